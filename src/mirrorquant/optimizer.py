"""MirrorDescent: quantization by any method, around any torch optimizer.

A quantized weight lives twice: a latent tensor that the base optimizer moves (the dual space), and the model's own
parameter, its image under the projection (the primal space). The model itself is never touched.

>>> import mirrorquant as mq
>>> from torch import nn
>>> model = nn.Linear(4, 2, bias=False)
>>> opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model), lr=0.1), anneal=mq.schedules.geometric(1.5))
>>> for _ in range(20):
...     model(torch.ones(8, 4)).square().mean().backward()
...     opt.step()
...     opt.zero_grad()
>>> with opt.quantized():
...     model.weight.detach().unique()
tensor([-1.,  1.])
>>> opt.finalize()

What the gradient scaler, gradient clipping and learning-rate schedulers look at are the groups of this optimizer: they
hold the model's parameters. The base optimizer's groups hold the latents; hyperparameters are copied across each step.

The latents own the weights, so weights that are changed behind the optimizer's back are an error at the next step
(changes through ``.data`` are only noticed by ``finalize()``; a step overwrites them). For early stopping, save both
states and load both, in either order:

>>> import copy
>>> opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model), lr=0.1), anneal=mq.schedules.geometric(1.5))
>>> best = copy.deepcopy((model.state_dict(), opt.state_dict()))
>>> for _ in range(20):
...     model(torch.ones(8, 4)).square().mean().backward()
...     opt.step()
>>> model.load_state_dict(best[0])
<All keys matched successfully>
>>> opt.load_state_dict(best[1])

A ``model.state_dict()`` saved inside ``quantized()`` is on the levels already: load it and call ``finalize()``, which
keeps such weights.
"""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirrorquant import _owners, methods, schedules
from mirrorquant.health import HealthWarning, advice, health, local
from mirrorquant.levels import Levels
from mirrorquant.methods import REF, Method, Scale
from mirrorquant.methods.base import State
from mirrorquant.mirrors import Beta
from mirrorquant.schedules import Schedule
from mirrorquant.select import listed, summarized

__all__ = ["MirrorDescent"]

Closure = Callable[[], Any]
_OURS = ("method", "anneal", "beta")
_SAVED = ("levels", "steps", "finalized", "base_class", "fresh", "kept")  # beside these, in the groups of a state
_RENAMED = {"MDTanhPrimal": "MDTanh", "MDTanh": "MDTanhBounded", "MDSoftmaxPrimal": "MDSoftmax"}
_RENAMED |= {"MDSoftmax": "MDSoftmaxBounded", "PMFAuthors": "PMF", "PMF": "PMFExact"}  # since version 0.1
_LEAST_HALF = 2.0**-24  # the smallest float16 above zero


class Quantized(NamedTuple):
    """One quantized group: its parameters' names, the model's weights, their states, and its method, β and lr."""

    names: list[str]
    weights: list[Tensor]
    states: list[State]
    method: Method
    beta: Beta
    lr: Beta

    def tensors(self) -> Iterator[tuple[str, Tensor, State]]:
        """Name, weight and state of each tensor."""
        return zip(self.names, self.weights, self.states, strict=True)


class MirrorDescent(Optimizer):
    """Trains quantized weights with any torch optimizer.

    Constructing it makes each quantized weight the image of its latent, so that the weights change at once. From then
    on the latents own the weights: load a pretrained model before, not after. ``print(opt)`` shows what is quantized to
    which levels, and what stays in float.

    Args:
        base: a fresh torch optimizer over the model's parameters, as in ``torch.optim.Adam(mq.split(model), lr=1e-3)``.
            A group may have its own ``method``, ``levels``, ``scale`` and ``anneal``; with ``method="ref"`` it stays
            in float.
        method: a name from ``mq.methods.names()``, or a ``Method`` object.
        levels: the quantization levels for methods given by name; binary by default.
        anneal: β as a function of the step.
        scale: a factor on the levels per tensor or channel, for methods given by name; none by default. A learnt one is
            trained by the base optimizer, in a group that is added for it, with the group's learning rate.
        check_gradients: refuse a step with NaN or infinite gradients (one read of the gradients; a synchronization
            on CUDA). Skipped in compiled steps.

    Warns:
        HealthWarning: the initial weights are too small for the levels, so that they all round to one of them.
    """

    base: Optimizer
    steps: int
    finalized: bool

    def __init__(
        self,
        base: Optimizer,
        method: str | Method = "md-tanh-s",
        levels: Iterable[float] | None = None,
        anneal: Schedule = schedules.geometric(1.02, every=200),  # noqa: B008 (frozen)
        *,
        scale: Scale | None = None,
        check_gradients: bool = True,
    ) -> None:
        if not isinstance(base, Optimizer) or isinstance(base, MirrorDescent):
            raise TypeError(f"base is a {type(base).__name__}, but it must be a plain torch optimizer")
        if any(float(state.get("step", 1)) for state in base.state.values()):
            raise ValueError(
                f"the base {type(base).__name__} already has state for {len(base.state)} parameters, which belongs "
                "to the weights and not to the latents: wrap a fresh optimizer"
            )
        if any("initial_lr" in group for group in base.param_groups):
            raise ValueError("the base optimizer has a learning-rate scheduler: attach it to MirrorDescent instead")
        _keep_out_of_graphs()
        levels = None if levels is None else Levels.of(levels)
        methods.get(method, levels, scale)
        self.base, self.steps, self.finalized = base, 0, False
        self._check_gradients, self._levels, self._scale = check_gradients, levels, scale
        self._constructed = self._inside_quantized = False
        self._versions: dict[Tensor, tuple[int, int]] = {}
        self._why: dict[Tensor, str] = {}
        groups = [dict(group) for group in base.param_groups]
        super().__init__(groups, {**base.defaults, "method": method, "anneal": anneal})
        if not isinstance(methods.get(method), REF) and not self.state:
            raise ValueError(f"method is {method!r}, but no parameter is left to quantize: all groups are 'ref'")
        for ours, theirs in zip(self.param_groups, base.param_groups, strict=True):
            theirs["params"][:] = self._moved(ours)  # in place: LBFGS keeps the list
            for key in (*_OURS, "levels", "scale", "why"):
                theirs.pop(key, None)
        if base.state:  # Adagrad's begins with the optimizer: that of the latents
            base.state.clear()
            base.state.update(type(base)([dict(group) for group in base.param_groups], **base.defaults).state)
        self._constructed = True
        found = advice(self, self.state)
        self._write(rounded=False)
        for index in range(len(self.param_groups)):
            self._add_scales(index)
        _owners.begin(self)
        if found:
            warnings.warn(found, HealthWarning, stacklevel=2)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, quantized by its own ``method``, ``levels`` and ``anneal``, or by the optimizer's.

        A parameter that does not require a gradient is left as it is.
        """
        if self._inside_quantized:
            raise RuntimeError("add_param_group() was called inside quantized(): leave the context first")
        if self._constructed:
            self._refuse_changed("add_param_group()")
        group = dict(param_group)
        why = group.pop("why", ())
        method = group.get("method", self.defaults["method"])
        levels, scale = (self._levels, self._scale) if isinstance(method, str) else (None, None)
        levels, scale = group.pop("levels", levels), group.pop("scale", scale)
        group["method"] = method = methods.get(method, levels, None if method == "ref" else scale)
        if self.finalized and not isinstance(method, REF):
            raise RuntimeError(f"the optimizer is finalized: a new group can only be 'ref', not {method}")
        group["beta"] = beta_at({**self.defaults, **group}, self.steps)
        self._refuse_decay({**self.defaults, **group})
        super().add_param_group(group)
        try:
            named = zip(self._names(len(self.param_groups) - 1), group["params"], strict=True)
            learnt = [(n, p) for n, p in named if p.requires_grad and not isinstance(method, REF)]
            states = {p: self._new_state(p, group, name) for name, p in learnt}
        except BaseException:
            self.param_groups.pop()
            raise
        self.state.update(states)
        self._why.update(zip(group["params"], why, strict=False))
        self._set_beta(group, group["beta"])
        if self._constructed:
            theirs = {k: v for k, v in group.items() if k not in _OURS}
            self.base.add_param_group({**theirs, "params": self._moved(group)})
            found = advice(self, states)
            self._write(rounded=False)
            self._add_scales(len(self.param_groups) - 1)
            if found:
                warnings.warn(found, HealthWarning, stacklevel=2)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One step: pull the gradients back, let the base optimizer move the latents, advance β, project.

        Args:
            closure: reevaluates the model and returns the loss; it may be called several times (LBFGS does).
        """
        if self._inside_quantized:
            raise RuntimeError("step() was called inside quantized(): leave the context first, then step")
        after = self._prepare()
        loss = None
        if closure is None:
            self._pull_back()
            self.base.step()
        else:
            loss = self.base.step(lambda: self._evaluate(closure))
        self._settle()
        self._advance(after)
        self._put(rounded=False)
        self._remember()
        return loss

    def arrive(self, steps: int) -> None:
        """Brings the step count, β and the weights to a step up to which an engine has moved the latents."""
        self.steps = steps - 1
        self._advance([beta_at(group, steps) for group in self.param_groups])
        self._write(rounded=False)

    @contextmanager
    def quantized(self) -> Iterator[None]:
        """Exact levels inside, soft weights back after, even on an exception."""
        if self._inside_quantized:
            yield
            return
        self._refuse_changed("quantized()")
        self._write(rounded=True)
        self._inside_quantized = True
        try:
            yield
            self._refuse_changed("leaving quantized()")
        finally:
            self._inside_quantized = False
            self._write(rounded=False)

    def finalize(self) -> None:
        """Rounds for good: each quantized weight is now exactly one of its levels, which is checked.

        Steps after it train what stayed in float, as ProxQuant does at the end. Weights that were loaded into the model
        in the meantime are kept if they are on their levels, and are an error if not.

        Batch-norm statistics still belong to the soft weights, and lag behind even those: if accuracy drops here,
        :func:`mirrorquant.recalibrate` recomputes them from data.

        Raises:
            RuntimeError: a weight was changed behind the optimizer's back, or is NaN; nothing was rounded.

        Warns:
            HealthWarning: rounding changed the network a lot, or left a tensor with a single level.
        """
        with torch.no_grad():
            taken = {} if self.finalized else self._taken()
            for q in self._groups():
                for name, weight, state in q.tensors():
                    self._refuse_unrounded(q, name, weight, taken.get(weight, state))
            for weight, own in taken.items():
                _fill(self.state[weight], own)
        found = [] if self.finalized else health(self).problems
        self._write(rounded=True)
        self.finalized = True
        if found:
            warnings.warn("; ".join(found), HealthWarning, stacklevel=2)

    def __repr__(self) -> str:
        """What is quantized by which method to which levels, what stays in float, and why."""
        lines = [f"MirrorDescent({type(self.base).__name__}, step {self.steps}{', finalized' * self.finalized})"]
        floats: list[tuple[str, str]] = []
        for index, group in enumerate(self.param_groups):
            method: Method = group["method"]
            named = [*zip(self._names(index), group["params"], strict=True)]
            moved = [(name, p) for name, p in named if p in self.state]
            if moved:
                levels, count = ", ".join(f"{q:g}" for q in method.levels), sum(p.numel() for _, p in moved)
                tensors = "1 tensor" if len(moved) == 1 else f"{len(moved)} tensors"
                told = f"{tensors}, {count:,} weights ({listed([name for name, _ in moved])})"
                lines.append(f"  {method.name or type(method).__name__}, levels {levels}: {told}")
            usual = "method 'ref'" if isinstance(method, REF) else "frozen"
            floats += [(name, self._why.get(p, usual)) for name, p in named if p not in self.state]
        return "\n".join(lines + [f"  float: {summarized(floats)}"] * bool(floats))

    @property
    def beta(self) -> float:
        """The current β, of the first quantized group."""
        return float(next((q.beta for q in self._groups()), 1.0))

    def latent(self, weight: Tensor) -> Tensor:
        """The latent tensor of a quantized parameter."""
        latent: Tensor | None = self.state.get(weight, {}).get("latent")
        if latent is None:
            raise KeyError(f"the parameter of shape {tuple(weight.shape)} is not quantized by this optimizer")
        return latent

    # The parts of a step, on the lists of tensors of one group at a time.

    def _pull_back(self) -> None:
        if self._check_gradients:
            self._refuse_bad_gradients()
        if not self.finalized:
            pull_back(self._groups())

    def _settle(self) -> None:
        groups = self._groups()
        if not self.finalized:
            settle(groups)
        for state in (state for q in groups for state in q.states):
            state["latent"].grad = None

    def _advance(self, betas: list[float]) -> None:
        """β_{k+1}, until finalized; and what the base optimizer keeps in its groups, copied back."""
        self.steps += 1
        for ours, theirs, beta in zip(self.param_groups, self.base.param_groups, betas, strict=True):
            ours.update({k: v for k, v in theirs.items() if k not in ("params", "lr", "weight_decay")})
            if not self.finalized:
                self._set_beta(ours, beta)

    def _write(self, *, rounded: bool) -> None:
        """weight = project(latent), or round(latent), as it is known from now on."""
        self._put(rounded=rounded)
        self._remember()

    @torch.no_grad()
    def _put(self, *, rounded: bool) -> None:
        """weight = project(latent), or round(latent); once finalized, the weights stay."""
        if not self.finalized:
            project(self._groups(), rounded=rounded)

    # Weights that were changed behind the optimizer's back.

    def _remember(self) -> None:
        """The versions of weights and latents as they are now: any change in place will show."""
        self._versions = {w: (w._version, state["latent"]._version) for w, state in self.state.items()}

    def _version(self, weight: Tensor) -> int:
        """The version that a weight had when it was written last; -1 for that of a copied optimizer."""
        return self._versions.get(weight, (-1, -1))[0]

    def _refuse_changed(self, doing: str) -> None:
        """Raises where a weight is no longer what was written, so that the latent's image would undo the change."""
        if all(self._version(weight) == weight._version for weight in self.state):
            return
        for q in self._groups():
            for name, weight, state in q.tensors():
                if self._version(weight) != weight._version and not self._is_ours(q, weight, state):
                    raise RuntimeError(self._changed(name, doing))
        self._remember()

    def _taken(self) -> dict[Tensor, State]:
        """The weights that were replaced by levels, with the state that takes their place; refuses other changes.

        Values are compared, since changes through ``.data`` do not show in the version.
        """
        taken = {}
        for q in self._groups():
            for name, weight, state in q.tensors():
                if self._is_ours(q, weight, state):
                    continue
                own, diverged = q.method.adopted(weight.detach(), state), bool(local(state["latent"]).isnan().any())
                if own is None or not _equal(weight, q.method.rounded(own, q.beta)):
                    raise RuntimeError(_diverged(name) if diverged else self._changed(name, "finalize()"))
                taken[weight] = own
        return taken

    @torch.no_grad()
    def _follow_loaded(self) -> None:
        """States of weights that were loaded after finalize(): a state saved now must give these weights back."""
        for q in self._groups() if self.finalized else ():
            for _, weight, state in q.tensors():
                if not _equal(weight, q.method.rounded(state, q.beta)):
                    _fill(state, q.method.adopted(weight.detach(), state) or state)

    @torch.no_grad()
    def _is_ours(self, q: Quantized, weight: Tensor, state: State) -> bool:
        """Whether a weight still is the image of its latent, or the rounded one; once finalized, whether on its levels.

        Up to rounding, since another device, compiler or number of threads may have computed it; where the version
        shows no change, up to a conversion to half precision and back.
        """
        if self.finalized:
            return q.method.adopted(weight.detach(), state) is not None
        latent, unchanged = state["latent"], self._version(weight) == weight._version
        if unchanged and self._versions[weight][1] != latent._version:
            return True  # it is the latent that was changed
        error = 8 * torch.finfo(latent.dtype).eps  # of the projection, which is computed in the latent's precision
        relative = max(error, 2.0**-8 if unchanged else torch.finfo(weight.dtype).eps)
        largest = float(local(state["scale"]).max()) if "scale" in state else 1.0
        absolute = error * largest * max(map(abs, q.method.levels)) + _LEAST_HALF
        image = q.method.image(state, q.beta)
        return _close(weight, image, relative, absolute) or _equal(weight, q.method.rounded(state, q.beta))

    def _changed(self, name: str, doing: str) -> str:
        if self.finalized:
            return (
                f"{name} is off its levels, although the optimizer is finalized: it was changed after finalize(), by "
                "model.load_state_dict() perhaps. Load weights that are on their levels, or build a new MirrorDescent"
            )
        return (
            f"{name} was changed since the optimizer wrote it (by model.load_state_dict(), an initialization or an "
            f"average of weights?), but its latent was not: {doing} would undo the change. To go back to an earlier "
            "state, load model.state_dict() and opt.state_dict(), saved together, in either order; weights that are "
            "all on their levels can be kept by finalize(); for any others, build a new MirrorDescent after loading"
        )

    def _refuse_unrounded(self, q: Quantized, name: str, weight: Tensor, state: State) -> None:
        """Raises where rounding would not give levels."""
        if bool(local(state["latent"]).isnan().any()):  # infinite is where a primal point has reached its level
            raise RuntimeError(_diverged(name))
        kind = type(q.method).__name__
        if bool(local(q.method.image(state, q.beta)).isnan().any()):
            raise RuntimeError(f"{kind}.project gives NaN for {name} at beta {float(q.beta):g}; nothing was rounded")
        if self.finalized and q.method.adopted(weight.detach(), state) is None:
            raise RuntimeError(self._changed(name, "finalize()"))
        if not self.finalized and not q.method.holds(q.method.rounded(state, q.beta).to(weight.dtype), state):
            raise RuntimeError(f"{kind}.round left {name} off its {q.method.levels}; nothing was rounded")

    # What they need.

    def _groups(self) -> list[Quantized]:
        """The quantized groups."""
        found = []
        for index, group in enumerate(self.param_groups):
            if not isinstance(group["method"], REF):
                named = [(n, p) for n, p in zip(self._names(index), group["params"], strict=True) if p in self.state]
                names, weights = [name for name, _ in named], [weight for _, weight in named]
                states = [self.state[p] for p in weights]
                found.append(Quantized(names, weights, states, group["method"], group["beta"], group.get("lr", 1.0)))
        return found

    def _names(self, index: int) -> list[str]:
        group = self.param_groups[index]
        return group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]

    def _moved(self, group: dict[str, Any]) -> list[Tensor]:
        """What the base optimizer moves: the latents, or the weights themselves where they stay in float."""
        return [self.state.get(p, {}).get("latent", p) for p in group["params"]]

    def _add_scales(self, index: int) -> None:
        """Puts the learnt scales of a group into a float group, without weight decay."""
        group = self.param_groups[index]
        method: Method = group["method"]
        if method.scale is not None and method.scale.how == "learnt":
            names, states = self._names(index), [self.state.get(p) for p in group["params"]]
            scales = [(f"{name}.scale", state["scale"]) for name, state in zip(names, states, strict=True) if state]
            ours = {k: v for k, v in group.items() if k not in (*_OURS, "params", "param_names")}
            scales = scales if "param_names" in group else [scale for _, scale in scales]
            self.add_param_group({**ours, "weight_decay": 0.0, "params": scales, "method": "ref", "scale": None})

    def _new_state(self, weight: Tensor, group: dict[str, Any], name: str) -> State:
        """The latent and all else that a weight starts from, in float32 (float64 for float64) and in its layout."""
        method: Method = group["method"]
        if not weight.is_floating_point():
            raise TypeError(f"{name} is {weight.dtype}, but only floating-point parameters can be quantized")
        levels = method.levels.tensor(weight)
        if len(set(levels.tolist())) < len(levels) or not bool(levels.isfinite().all()):
            raise ValueError(f"{method.levels} are not finite and distinct in {weight.dtype}: choose others")
        with torch.no_grad():
            state = method.begin(_wide(weight), group["beta"], group.get("lr", 1.0), name)
        if method.scale is not None and method.scale.how == "learnt":
            state["scale"].requires_grad_()
        return state

    def _evaluate(self, closure: Closure) -> Any:
        self._write(rounded=False)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            self._pull_back()
        return loss

    def _prepare(self) -> list[float]:
        """The next β, refused before anything changes; and the hyperparameters, copied to the base optimizer."""
        if _capturing():
            raise RuntimeError(
                "step() cannot be captured in a CUDA graph: each replay would use the same beta. Capture the forward "
                "and backward pass and step outside, or train with mirrorquant.train, whose graph engine updates beta"
            )
        self._refuse_changed("step()")
        betas = [beta_at(group, self.steps + 1) for group in self.param_groups]
        for index, group in enumerate(self.param_groups):
            self._refuse_decay(group)
            self._refuse_thawed(index)
        for ours, theirs in zip(self.param_groups, self.base.param_groups, strict=True):
            theirs.update({k: v for k, v in ours.items() if k in theirs and k not in (*_OURS, "params")})
            scale = ours["method"].step_scale(ours["beta"])
            if "lr" in theirs and (isinstance(scale, Tensor) or scale != 1.0):
                theirs["lr"] = theirs["lr"] * scale
                if "weight_decay" in theirs:  # it acts on a latent that is β times larger, too
                    theirs["weight_decay"] = theirs["weight_decay"] / scale
        return betas

    def _set_beta(self, group: dict[str, Any], beta: float) -> None:
        """A float; a tensor beside the weights where the base optimizer is capturable."""
        if not group.get("capturable") or not group["params"]:
            group["beta"] = beta
        elif isinstance(group["beta"], Tensor):
            group["beta"].fill_(beta)
        else:
            group["beta"] = torch.full((), beta, device=group["params"][0].device)

    def _refuse_decay(self, group: dict[str, Any]) -> None:
        """Weight decay that goes by the gradient makes NaN of a latent that is infinite; AdamW's leaves it as it is."""
        method: Method = group["method"]
        apart = group.get("decoupled_weight_decay") or isinstance(self.base, torch.optim.AdamW)
        if group.get("weight_decay") and not apart and not method.can_decay:
            raise ValueError(
                f"weight_decay is {group['weight_decay']:g}, but {type(method).__name__} keeps a weight on its level, "
                f"where nothing decays: use weight_decay=0, or '{method.name}-bounded'"
            )

    def _refuse_thawed(self, index: int) -> None:
        """A parameter without a latent would be trained in float, among quantized ones."""
        group = self.param_groups[index]
        if isinstance(group["method"], REF):
            return
        for i, p in enumerate(group["params"]):
            if p.grad is not None and p not in self.state:
                raise RuntimeError(
                    f"{self._names(index)[i]} was frozen when the optimizer was built, so it has no latent, but now it "
                    "has a gradient: build the optimizer first and freeze after, or build another one"
                )

    def _refuse_bad_gradients(self) -> None:
        if torch.compiler.is_compiling():
            return
        grads = [(n, p.grad) for n, p in self._named() if p.grad is not None]
        grads = [(n, grad._values() if grad.is_sparse else grad) for n, grad in grads]
        sums = [grad.sum().to(grads[0][1].device, torch.float64) for _, grad in grads]
        if not sums or bool(torch.stack(sums).isfinite().all()):
            return
        for name, grad in grads:
            if not bool(torch.isfinite(grad).all()):
                raise ValueError(
                    f"the gradient of {name} holds NaN or inf at step {self.steps}; nothing was changed. Lower the "
                    "learning rate, clip the gradients, or look for the operation with torch.autograd.detect_anomaly()"
                )

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """Latents, hyperparameters, β, the step count and the base optimizer's state; loads with weights_only.

        All of it is in ``state``, by parameter, and in ``param_groups``, which is what torch.distributed.checkpoint
        keeps of an optimizer.
        """
        try:
            self._refuse_changed("loading it")
            self._follow_loaded()
        except RuntimeError as error:  # not an error: tools ask for a state before they load one
            warnings.warn(f"the optimizer's state does not belong to the model's weights: {error}", stacklevel=2)
        state, base = super().state_dict(), self.base.state_dict()
        fresh = self.steps == 0 and not self.base.state
        kept = self._unstepped() if fresh else base["state"]
        place = 0
        for group, live in zip(state["param_groups"], self.param_groups, strict=True):
            method: Method = group.pop("method")
            del group["anneal"]
            group.update(method=method.identity(), levels=tuple(method.levels), beta=float(group["beta"]))
            group.update(steps=self.steps, finalized=self.finalized, base_class=type(self.base).__name__, fresh=fresh)
            group["kept"] = 0
            for _ in live["params"]:
                entries, mine = kept.get(place, {}), state["state"].get(place, {})
                if set(entries) & set(mine):
                    raise ValueError(f"{type(self.base).__name__} keeps {', '.join(mine)} of its own: cannot be saved")
                state["state"][place] = {**mine, **entries}
                group["kept"] += len(entries)
                place += 1
        extra = {k: v for k, v in base.items() if k not in ("state", "param_groups")}
        return {**state, "base": extra} if extra else state

    def _unstepped(self) -> dict[int, dict[str, Any]]:
        """What the base optimizer will keep for each parameter: from a step of a copy, with gradients of zero.

        Loading ignores it. It is there for torch.distributed.checkpoint, which loads into the tensors of the state of
        a new optimizer, and nothing for which there are none.
        """
        moved = [p for group in self.base.param_groups for p in group["params"]]
        zeros = {id(p): torch.zeros_like(p) for p in moved}
        for _, p in self._named():
            if p.requires_grad or p in self.state:
                zero = zeros[id(self.state.get(p, {}).get("latent", p))]
                zero.grad = torch.zeros_like(zero)
        try:
            twin = copy.deepcopy(self.base, {**zeros})
            with torch.no_grad():
                twin.step()
        except Exception:  # it needs a closure, as LBFGS does: a state that lacks something is refused when loaded
            return {}
        state: dict[int, dict[str, Any]] = twin.state_dict()["state"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state of the same methods, levels and shapes; training goes on bit-exactly."""
        if self._inside_quantized:
            raise RuntimeError("load_state_dict() was called inside quantized(): leave the context first")
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, states = self._understood(state_dict)
        steps, finalized = groups[0]["steps"], groups[0]["finalized"]
        betas = [beta_at(group, steps) for group in self.param_groups]
        self._load_base(groups, states, state_dict.get("base", {}))
        for (_, weight), state in zip(self._named(), states, strict=True):
            if weight in self.state:
                _fill(self.state[weight], state)
        self.steps, self.finalized = steps, False
        not_theirs = (*_OURS, *_SAVED, "params", "param_names")
        for group, saved, beta in zip(self.param_groups, groups, betas, strict=True):
            group.update({k: v for k, v in saved.items() if k not in not_theirs})
            self._set_beta(group, saved["beta"] if finalized else beta)
            if beta != saved["beta"] and not finalized and not isinstance(group["method"], REF):
                warnings.warn(
                    f"at step {steps} the saved beta was {saved['beta']:g}, but {group['anneal']} gives {beta:g}: "
                    "training goes on with another schedule",
                    stacklevel=2,
                )
        self._write(rounded=finalized)
        self.finalized = finalized
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_base(self, groups: list[dict[str, Any]], states: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        """The base optimizer's own state and groups, out of a state of this optimizer."""
        base = self.base.state_dict()
        for theirs, saved in zip(base["param_groups"], groups, strict=True):
            theirs.update({k: saved[k] for k in theirs if k in saved and k not in ("params", "param_names")})
        named = [] if groups[0]["fresh"] else self._named()
        kept = {i: self._of_base(weight, states[i]) for i, (_, weight) in enumerate(named)}
        base["state"] = {i: entries for i, entries in kept.items() if entries}
        self.base.load_state_dict({**base, **{k: v for k, v in extra.items() if k not in base}})

    def _understood(self, state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The groups of a state, and what it holds for each parameter in order; refuses what does not fit here."""
        if {"state", "param_groups", "base", "base_class", "steps", "finalized"} <= set(state_dict):
            state_dict = _from_version_0_1(state_dict)
        groups: list[dict[str, Any]] = state_dict.get("param_groups", [])
        missing = {k for k in ("method", "beta", *_SAVED) if any(k not in group for group in groups)}
        if missing or not groups or "state" not in state_dict:
            lacking = ", ".join(sorted(missing)) or "state or param_groups"
            raise ValueError(f"this is no state of MirrorDescent: {lacking} missing")
        if groups[0]["base_class"] != type(self.base).__name__:
            raise ValueError(
                f"the state is of a {groups[0]['base_class']}, but the base is a {type(self.base).__name__}"
            )
        saved = [(_class_of(g["method"]), tuple(g["levels"]), len(g["params"])) for g in groups]
        here = [(type(g["method"]).__name__, tuple(g["method"].levels), len(g["params"])) for g in self.param_groups]
        if saved != here:
            raise ValueError(
                f"the state was saved with (method, levels, parameters) {saved}, but this optimizer has {here}: "
                "build it as it was"
            )
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            if theirs["method"].startswith("{") and not mine["method"].fits(theirs["method"]):
                raise ValueError(
                    f"the state was saved with the method {theirs['method']}, but this optimizer has "
                    f"{mine['method'].identity()}: build it as it was"
                )
        states = [state_dict["state"].get(key, {}) for group in groups for key in group["params"]]
        for index, ((_, weight), state) in enumerate(zip(self._named(), states, strict=True)):
            for key, own in self.state.get(weight, {}).items():
                shape = getattr(state.get(key), "shape", None)
                if own.shape != shape:
                    raise ValueError(
                        f"the saved {key} of parameter {index} has shape {shape}, but this model needs {own.shape}"
                    )
            if "latent" in state and weight not in self.state:
                raise ValueError(f"the state has a latent for parameter {index}, which is not quantized here")
        kept = sum(len(self._of_base(p, state)) for (_, p), state in zip(self._named(), states, strict=True))
        expected = sum(group["kept"] for group in groups)
        if kept != expected:
            raise ValueError(
                f"the state holds {kept} entries of {groups[0]['base_class']}, but {expected} were saved: the rest was "
                "lost on the way, so that training could not go on as it was"
            )
        return groups, states

    def _of_base(self, weight: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a parameter's saved state that belongs to the base optimizer."""
        return {key: value for key, value in state.items() if key not in self.state.get(weight, {})}

    def _named(self) -> list[tuple[str, Tensor]]:
        """All parameters of all groups, with their names."""
        groups = enumerate(self.param_groups)
        return [pair for i, group in groups for pair in zip(self._names(i), group["params"], strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        if self._inside_quantized:
            raise RuntimeError("the optimizer was copied or pickled inside quantized(): leave the context first")
        # A scheduler patches ``step`` into the instance; like torch's own optimizers, a copy does without it.
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(
            {"_why": {}, **state, "_versions": {}}
        )  # a copied weight counts its changes from the start


def _from_version_0_1(old: dict[str, Any]) -> dict[str, Any]:
    """A state in which the base optimizer's state, the step count and ``finalized`` stood apart, in today's form."""
    kept, state = old["base"]["state"], old["state"]
    common = {"fresh": False, **{key: old[key] for key in ("steps", "finalized", "base_class")}}
    groups, states = [], {}
    for group in old["param_groups"]:
        for i in group["params"]:
            states[i] = {**state.get(i, {}), **kept.get(i, {})}
        groups.append({**group, **common, "kept": sum(len(kept.get(i, {})) for i in group["params"])})
    extra = {k: v for k, v in old["base"].items() if k not in ("state", "param_groups")}
    return {"state": states, "param_groups": groups, "base": extra}


def _diverged(name: str) -> str:
    return f"the latent of {name} holds NaN: training diverged; nothing was rounded"


def _wide(weight: Tensor) -> Tensor:
    """In float32, or in float64 if it is."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def _close(weight: Tensor, image: Tensor, relative: float, absolute: float) -> bool:
    return torch.allclose(local(_wide(weight)), local(_wide(image)), relative, absolute, equal_nan=True)


def _equal(weight: Tensor, rounded: Tensor) -> bool:
    return torch.equal(local(weight), local(rounded.to(weight.dtype)))


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def pull_back(groups: list[Quantized]) -> None:
    """latent.grad = pull_back(weight.grad), and the gradients of learnt scales."""
    for q in groups:
        learnt = q.method.scale is not None and q.method.scale.how == "learnt"
        for _, weight, state in q.tensors():
            grad = weight.grad
            _set_grad(state["latent"], None if grad is None else q.method.gradient(grad, state, q.beta))
            if learnt:
                _set_grad(state["scale"], None if grad is None else q.method.scale_gradient(grad, state, q.beta))


def settle(groups: list[Quantized]) -> None:
    """latent = settle(latent), after the base optimizer has moved it."""
    for q in groups:
        for _, _, state in q.tensors():
            settled = q.method.settled(state, q.beta, q.lr)
            if settled is not state["latent"]:
                state["latent"].copy_(settled)


def project(groups: list[Quantized], *, rounded: bool = False) -> None:
    """weight = project(latent), or round(latent)."""
    for q in groups:
        for _, weight, state in q.tensors():
            weight.copy_(q.method.rounded(state, q.beta) if rounded else q.method.image(state, q.beta))


def _set_grad(tensor: Tensor, grad: Tensor | None) -> None:
    """In place where there is a gradient already, as in a CUDA graph."""
    if grad is not None and tensor.grad is not None:
        tensor.grad.copy_(grad)
    else:
        tensor.grad = grad


def _fill(state: State, source: State) -> None:
    for key, tensor in state.items():
        tensor.detach().copy_(source[key])


def _class_of(method: str) -> str:
    """The class that a saved state names; version 0.1 saved no more than that, under other names."""
    if method.startswith("{"):
        return str(json.loads(method)["class"])
    return _RENAMED.get(method, method)


@functools.cache
def _keep_out_of_graphs() -> None:
    """What sets β or reads versions stays plain Python in a compiled step: in its graph it would be a constant.

    Done with the first optimizer, since it imports the compiler, which takes longer than all the rest of this package.
    """
    for name in ("_prepare", "_advance", "_remember"):
        apart = torch.compiler.disable(getattr(MirrorDescent, name))  # type: ignore[no-untyped-call]
        setattr(MirrorDescent, name, apart)


def beta_at(group: dict[str, Any], step: int) -> float:
    """β at a step, by the schedule of a group."""
    schedule, method = group["anneal"], group["method"]
    if not callable(schedule):
        raise TypeError(
            f"anneal is {schedule!r}, but it must be a function of the step: try mq.schedules.geometric(1.02)"
        )
    value = schedule(step)
    try:
        beta = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"anneal gives {value!r} at step {step}, but beta must be a number: change {schedule}"
        ) from None
    if not method.lowest_beta <= beta <= 1e35:
        raise ValueError(
            f"beta is {beta:g} at step {step}, but {type(method).__name__} needs a beta from {method.lowest_beta:g} to "
            f"1e35: change {schedule}"
        )
    return beta
