"""MirrorDescent: quantization by any method, around any torch optimizer.

A quantized weight exists twice: as a latent tensor that the base optimizer moves (the dual space), and as the model's
own parameter, its image under the projection (the primal space). The model itself is not modified.

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

The groups of this optimizer hold the model's parameters, so gradient scalers, gradient clipping and learning-rate
schedulers work as usual. The base optimizer's groups hold the latents; each step copies the hyperparameters to them.

The latents own the weights: a step after the weights were changed in any other way raises an error (changes through
``.data`` are only noticed by ``finalize()``; a step overwrites them). For early stopping, save ``model.state_dict()``
and ``opt.state_dict()`` and load both, in either order (docs/guide.md has an example). A ``model.state_dict()`` saved
inside ``quantized()`` is on the levels already: load it and call ``finalize()``, which keeps such weights.
"""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from mirrorquant import _owners, methods, schedules
from mirrorquant.health import HealthWarning, advice, health, local
from mirrorquant.levels import Levels
from mirrorquant.methods import REF, Method
from mirrorquant.methods.base import State
from mirrorquant.quantized import Quantized, from_logs, project, pull_back, settle, to_logs
from mirrorquant.schedules import Schedule
from mirrorquant.select import listed, summarized

__all__ = ["MirrorDescent"]

Closure = Callable[[], Any]
Group = dict[str, Any]
_OURS = ("method", "anneal", "beta")
_SCHEDULER = "the base optimizer has a learning-rate scheduler: attach it to MirrorDescent instead"
_SAVED = ("levels", "steps", "finalized", "base_class", "fresh", "kept")  # in the groups of a state, with _OURS
_RENAMED = {"MDTanhPrimal": "MDTanh", "MDTanh": "MDTanhBounded", "MDSoftmaxPrimal": "MDSoftmax"}
_RENAMED |= {"MDSoftmax": "MDSoftmaxBounded", "PMFAuthors": "PMF", "PMF": "PMFExact"}  # since version 0.1


class MirrorDescent(Optimizer):
    """Trains quantized weights with any torch optimizer.

    Constructing it replaces each quantized weight by the image of its latent, so the weights change immediately. From
    then on the latents own the weights: load a pretrained model before, not after. ``print(opt)`` lists the tensors
    that are quantized, with their levels, and those that stay in float.

    Args:
        base: a fresh torch optimizer over the model's parameters, as in ``torch.optim.Adam(mq.split(model), lr=1e-3)``.
            A group may have its own ``method``, ``levels`` and ``anneal``; with ``method="ref"`` it stays in float.
        method: a name from ``mq.methods.names()``, or a ``Method`` object.
        levels: the quantization levels for methods given by name. "binary" and "ternary" fit them to each layer (see
            ``mq.levels.auto``); ``mq.BINARY``, the default, and ``mq.TERNARY`` are the paper's. A learnt scale is
            trained by the base optimizer, in a group that is added for it, with the group's learning rate.
        anneal: β as a function of the step: ``mq.schedules.until(steps)`` for training of that length. The default is
            ``geometric(1.02, every=200)``, the paper's for 100,000 steps; levels that fit each layer have none.
        check_gradients: raise an error for NaN or infinite gradients (reads the gradients once per step, which
            synchronizes on CUDA). Skipped in compiled steps.

    Warns:
        HealthWarning: the initial weights are too small for the levels, so all of them round to the same level.
    """

    base: Optimizer
    steps: int
    finalized: bool
    start_gap: float
    """How far the weights were moved when training started, relative to their size."""

    def __init__(
        self,
        base: Optimizer,
        method: str | Method = "md-tanh-s",
        levels: Iterable[float] | str | None = None,
        anneal: Schedule | None = None,
        *,
        check_gradients: bool = True,
    ) -> None:
        if not isinstance(base, Optimizer) or isinstance(base, MirrorDescent):
            raise TypeError(f"base is a {type(base).__name__}, but it must be a plain torch optimizer")
        if any(float(state.get("step", 1)) for state in base.state.values()):
            raise ValueError(f"the base {type(base).__name__} already has state for its parameters: wrap a fresh one")
        if any("initial_lr" in group for group in base.param_groups):
            raise ValueError(_SCHEDULER)
        _keep_out_of_graphs()
        levels = None if levels is None else Levels.of(levels)
        methods.get(method, levels)
        self.base, self.steps, self.finalized = base, 0, False
        self._check_gradients, self._levels = check_gradients, levels
        self._constructed = self._inside_quantized = False
        self._versions: dict[Tensor, tuple[int, int]] = {}
        self._names: dict[Tensor, str] = {}
        self._why: dict[Tensor, str] = {}
        defaults = {**base.defaults, "method": method, "anneal": anneal}
        super().__init__([dict(group) for group in base.param_groups], defaults)
        if not isinstance(methods.get(method), REF) and not self.state:
            raise ValueError(f"method is {method!r}, but no parameter is left to quantize: all groups are 'ref'")
        for ours, theirs in zip(self.param_groups, base.param_groups, strict=True):
            theirs["params"][:] = self._moved(ours)  # in place: LBFGS keeps the list
            for key in (*_OURS, "levels", "why"):
                theirs.pop(key, None)
        if base.state:  # Adagrad has state from the start: replace it by that of the latents
            base.state.clear()
            base.state.update(type(base)([dict(group) for group in base.param_groups], **base.defaults).state)
        self._constructed = True
        self.start_gap = self._gap()
        self._begin(self.param_groups[:], self.state)
        _owners.OPTIMIZERS[self] = None

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, quantized by its own ``method``, ``levels`` and ``anneal``, or by the optimizer's.

        A parameter that does not require a gradient is left as it is.
        """
        self._refuse_inside("add_param_group()")
        if self._constructed:
            self._refuse_changed("add_param_group()")
        group = dict(param_group)
        if "scale" in group:
            raise ValueError("a group has the key scale, but a scale is part of its levels: use mq.levels.auto")
        why = group.pop("why", ())
        method = group.get("method", self.defaults["method"])
        levels = group.pop("levels", self._levels if isinstance(method, str) and method != "ref" else None)
        group["method"] = method = methods.get(method, levels)
        if group.setdefault("anneal", self.defaults["anneal"]) is None:
            group["anneal"] = _default_anneal(method)
        if self.finalized and not isinstance(method, REF):
            raise RuntimeError(f"the optimizer is finalized: a new group can only be 'ref', not {method}")
        group["beta"] = beta_at({**self.defaults, **group}, self.steps)
        self._refuse_decay({**self.defaults, **group})
        super().add_param_group(group)
        params, number = group["params"], len(self.param_groups) - 1
        names = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(params))]
        self._names.update(zip(params, names, strict=True))
        try:
            learnt = [p for p in params if p.requires_grad and not isinstance(method, REF)]
            states = {p: self._new_state(p, group) for p in learnt}
        except BaseException:
            self.param_groups.pop()
            raise
        self.state.update(states)
        self._why.update(zip(params, why, strict=False))
        if self._constructed:
            theirs = {k: v for k, v in group.items() if k not in _OURS}
            self.base.add_param_group({**theirs, "params": self._moved(group)})
            self._begin([group], states)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One step: pull the gradients back, let the base optimizer move the latents, advance β, project.

        Args:
            closure: reevaluates the model and returns the loss; it may be called several times (LBFGS does).
        """
        self._refuse_inside("step()")
        after = self._prepare()
        loss = None
        try:
            if closure is None:
                self._pull_back()
                self.base.step()
            else:
                loss = self.base.step(lambda: self._evaluate(closure))
        finally:
            self._leave_logs()
        if not self.finalized:
            settle(self._quantized())
        for state in self.state.values():
            state["latent"].grad = None
        self._advance(after)
        self._write(rounded=False)
        return loss

    def arrive(self, steps: int) -> None:
        """Brings the step count, β and the weights to a step up to which an engine has moved the latents."""
        self.steps = steps - 1
        self._advance([beta_at(group, steps) for group in self.param_groups])
        self._write(rounded=False)

    @torch.no_grad()
    def refresh(self, *, scales: bool = True) -> None:
        """Writes the images of the latents after someone has changed these, as an average of them does.

        Scales and levels that follow the latents are computed again, unless ``scales`` is false.
        """
        for q in self._quantized() if scales and not self.finalized else []:
            q.method.refit(q.state)
        self._write(rounded=self._inside_quantized)

    @contextmanager
    def quantized(self) -> Iterator[None]:
        """Exact levels inside, soft weights again afterwards, even after an exception."""
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

        Later steps only train the parameters that stayed in float, as ProxQuant does at the end. Weights that were
        loaded into the model in the meantime are kept if they are on their levels, and raise an error otherwise.

        Batch-norm statistics still belong to the soft weights of the last steps: if accuracy drops here, recompute
        them from data with :func:`mirrorquant.recalibrate`.

        Raises:
            RuntimeError: a weight is NaN, or was changed since the last step, or only the base optimizer has taken
                steps; nothing was rounded.

        Warns:
            HealthWarning: rounding changed the network a lot, or left a tensor with a single level.
        """
        if not self.steps and any(float(state.get("step", 0)) for state in self.base.state.values()):
            raise RuntimeError(
                "the base optimizer has taken steps by itself, which train the float parameters alone: call step() and "
                "zero_grad() of MirrorDescent in place of the base optimizer's"
            )
        with torch.no_grad():
            finals = [(q.state, self._final(q).state) for q in self._quantized()]
            for state, final in finals:
                _fill(state, final)
        found = [] if self.finalized else health(self).problems
        self._write(rounded=True)
        self.finalized = True
        if found:
            warnings.warn("; ".join(found), HealthWarning, stacklevel=2)

    def __repr__(self) -> str:
        """The tensors per method and levels, and those that stay in float, with the reason."""
        lines = [f"MirrorDescent({type(self.base).__name__}, step {self.steps}{', finalized' * self.finalized})"]
        if not self.steps and any(group["method"].scale for group in self.param_groups):
            lines.append(f"  at the start the quantized weights differ by {self.start_gap:.1%} from those of the model")
        floats = []
        for group in self.param_groups:
            method, sizes = group["method"], {self._names[p]: p.numel() for p in group["params"] if p in self.state}
            if sizes:
                levels, tensors = ", ".join(f"{level:g}" for level in method.levels), "tensor" + "s" * (len(sizes) > 1)
                levels += " fitted to each tensor" * method.fits_levels
                if method.scale is not None:
                    scales = [local(self.state[p]["scale"].detach()) for p in group["params"] if p in self.state]
                    every = [c for scale in scales for c in scale.flatten().tolist()] or [1.0]
                    low, high = min(every), max(every)
                    levels += f" x a {method.scale.how} scale per {method.scale.per} ({low:.2g} to {high:.2g})"
                title = f"{method.name or type(method).__name__}, levels {levels}: {len(sizes)} {tensors}"
                lines.append(f"  {title}, {sum(sizes.values()):,} weights ({listed([*sizes])})")
            usual = "method 'ref'" if isinstance(method, REF) else "frozen"
            floats += [(self._names[p], self._why.get(p, usual)) for p in group["params"] if p not in self.state]
        return "\n".join(lines + [f"  float: {summarized(floats)}"] * bool(floats))

    @property
    def beta(self) -> float:
        """The current β of the first quantized group."""
        return next((float(q.beta) for q in self._quantized()), 1.0)

    def latent(self, weight: Tensor) -> Tensor:
        """The latent tensor of a quantized parameter."""
        latent: Tensor | None = self.state.get(weight, {}).get("latent")
        if latent is None:
            raise KeyError(f"the parameter of shape {tuple(weight.shape)} is not quantized by this optimizer")
        return latent

    # Groups and states.

    def _quantized(self) -> list[Quantized]:
        """The quantized tensors, in the order of the groups."""
        return [
            Quantized(self._names[p], p, self.state[p], group["method"], group["beta"], group.get("lr", 1.0))
            for group in self.param_groups
            for p in group["params"]
            if p in self.state
        ]

    def _params(self) -> list[Tensor]:
        """All parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def _moved(self, group: Group) -> list[Tensor]:
        """The tensors that the base optimizer moves: latents, or the weights themselves if they stay in float."""
        return [self.state.get(p, {}).get("latent", p) for p in group["params"]]

    def _new_state(self, weight: Tensor, group: Group) -> State:
        """The latent and all else that a weight starts from, in float32 (float64 for float64) and in its layout."""
        method: Method = group["method"]
        name = self._names[weight]
        if not weight.is_floating_point():
            raise TypeError(f"{name} is {weight.dtype}, but only floating-point parameters can be quantized")
        levels = method.levels.tensor(weight)
        if len(set(levels.tolist())) < len(levels) or not bool(levels.isfinite().all()):
            raise ValueError(f"{method.levels} are not finite and distinct in {weight.dtype}: choose others")
        with torch.no_grad():
            wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
            state = method.begin(wide, group["beta"], group.get("lr", 1.0), name)
        if method.learns_scale:
            state["scale"].requires_grad_()
        return state

    def _begin(self, groups: list[Group], learnt: Collection[Tensor]) -> None:
        """Writes the first images of new latents; puts learnt scales into float groups without weight decay."""
        found = [advice(self, learnt)]
        unnamed = [p for group in groups if "param_names" not in group for p in group["params"] if p in learnt]
        if (vectors := sum(p.dim() < 2 for p in unnamed)) and vectors < len(unnamed):
            what = f"{vectors} of {len(unnamed)} quantized tensors are vectors, such as biases and norms"
            found.append(f"{what}: mq.split(model) leaves them in float, and quantizes them with everything=True")
        self._write(rounded=False)
        for group in groups:
            if group["method"].learns_scale:
                scales = {f"{self._names[p]}.scale": self.state[p]["scale"] for p in group["params"] if p in self.state}
                ours = {k: v for k, v in group.items() if k not in (*_OURS, "params", "param_names")}
                params = [*scales.items()] if "param_names" in group else [*scales.values()]
                self.add_param_group({**ours, "weight_decay": 0.0, "params": params, "method": "ref"})
        if any(found):
            warnings.warn("; ".join(filter(None, found)), HealthWarning, stacklevel=3)

    @torch.no_grad()
    def _gap(self) -> float:
        """The norm of the change that writing the images makes to the weights, relative to the norm of the weights."""
        moved = size = 0.0
        for q in self._quantized():
            weight, image = (local(t).double() for t in (q.weight, q.method.image(q.state, q.beta)))
            moved, size = moved + float((image - weight).square().sum()), size + float(weight.square().sum())
        return (moved / size) ** 0.5 if size else 0.0

    # The parts of a step.

    def _prepare(self) -> list[float]:
        """The next β per group, and the hyperparameters copied to the base optimizer; raises before any change."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step() cannot be captured in a CUDA graph: each replay would use the same beta. Capture the forward "
                "and backward pass and step outside, or train with mirrorquant.train, whose graph engine updates beta"
            )
        self._refuse_changed("step()")
        betas = [beta_at(group, self.steps + 1) for group in self.param_groups]
        groups = zip(self.param_groups, self.base.param_groups, strict=True)
        if any("initial_lr" in theirs and "initial_lr" not in ours for ours, theirs in groups):
            raise RuntimeError(_SCHEDULER)
        for group in self.param_groups:
            self._refuse_decay(group)
            self._refuse_thawed(group)
        for ours, theirs in zip(self.param_groups, self.base.param_groups, strict=True):
            theirs.update({k: v for k, v in ours.items() if k in theirs and k not in (*_OURS, "params")})
            scale = ours["method"].step_scale(ours["beta"])
            if "lr" in theirs and scale != 1.0:
                theirs["lr"] = theirs["lr"] * scale
                if "weight_decay" in theirs:  # it acts on a latent that is β times larger, too
                    theirs["weight_decay"] = theirs["weight_decay"] / scale
        return betas

    def _leave_logs(self) -> None:
        """Scales are no logarithms until the next pull_back, even after an exception."""
        from_logs(self._quantized())
        for state in self.state.values():
            if "scale" in state:
                state["scale"].grad = None

    def _evaluate(self, closure: Closure) -> Any:
        self._leave_logs()
        self._write(rounded=False)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            self._pull_back(unchanged="")  # the optimizer may have moved the latents before this call
        return loss

    def _pull_back(self, unchanged: str = "; nothing was changed") -> None:
        if self._check_gradients:
            self._refuse_bad_gradients(unchanged)
        if not self.finalized:
            tensors = self._quantized()
            pull_back(tensors)
            to_logs(tensors)

    def _advance(self, betas: list[float]) -> None:
        """Sets β_{k+1} until finalized, and copies back the values that the base optimizer keeps in its groups."""
        self.steps += 1
        for ours, theirs, beta in zip(self.param_groups, self.base.param_groups, betas, strict=True):
            ours.update({k: v for k, v in theirs.items() if k not in ("params", "lr", "weight_decay")})
            if not self.finalized:
                ours["beta"] = beta

    @torch.no_grad()
    def _write(self, *, rounded: bool) -> None:
        """weight = project(latent), or round(latent); once finalized, the weights stay."""
        if not self.finalized:
            project(self._quantized(), rounded=rounded)
        self._remember()

    # Errors that leave everything as it was.

    def _refuse_inside(self, doing: str) -> None:
        if self._inside_quantized:
            raise RuntimeError(f"{doing} is not possible inside quantized(): leave the context first")

    def _refuse_decay(self, group: Group) -> None:
        """L2 weight decay, part of the gradient, makes NaN of an infinite latent; AdamW's leaves it as it is."""
        method: Method = group["method"]
        apart = group.get("decoupled_weight_decay") or isinstance(self.base, torch.optim.AdamW)
        if group.get("weight_decay") and not apart and not method.can_decay:
            raise ValueError(
                f"weight_decay is {group['weight_decay']:g}, but {type(method).__name__} keeps a weight on its level, "
                f"where nothing decays: use weight_decay=0, or '{method.name}-bounded'"
            )

    def _refuse_thawed(self, group: Group) -> None:
        """A parameter without a latent would be trained in float, among quantized ones."""
        thawed = [p for p in group["params"] if p.grad is not None and p not in self.state]
        if thawed and not isinstance(group["method"], REF):
            raise RuntimeError(
                f"{self._names[thawed[0]]} was frozen when the optimizer was built, so it has no latent, but now it "
                "has a gradient: build the optimizer first and freeze it afterwards, or build another one"
            )

    def _refuse_bad_gradients(self, unchanged: str) -> None:
        if torch.compiler.is_compiling():
            return
        grads = [(self._names[p], p.grad) for p in self._params() if p.grad is not None]
        grads = [(name, grad._values() if grad.is_sparse else grad) for name, grad in grads]
        sums = [grad.sum().to(grads[0][1].device, torch.float64) for _, grad in grads]
        if not sums or bool(torch.stack(sums).isfinite().all()):
            return
        for name, grad in grads:
            if not bool(torch.isfinite(grad).all()):
                raise ValueError(
                    f"the gradient of {name} holds NaN or inf at step {self.steps}{unchanged}. Lower the "
                    "learning rate, clip the gradients, or look for the operation with torch.autograd.detect_anomaly()"
                )

    # Weights that were changed by anyone else.

    def _remember(self) -> None:
        """Notes the versions of weights that were written, and of latents: any later change in place will show."""
        _owners.reshard(self.state)
        self._versions = {w: (w._version, state["latent"]._version) for w, state in self.state.items()}

    def _touched(self, weight: Tensor) -> bool:
        """Whether a weight was changed in place since it was written, or belongs to a copied optimizer."""
        return self._versions.get(weight, (-1, -1))[0] != weight._version

    @torch.no_grad()
    def _is_ours(self, q: Quantized) -> bool:
        """Whether a weight still is the image of its latent; once finalized, whether it is on its levels.

        An untouched weight may have been converted to half precision and back.
        """
        if self.finalized:
            return q.adopted() is not None
        if self._touched(q.weight):
            return q.shows(torch.finfo(q.weight.dtype).eps)
        latent_changed = self._versions[q.weight][1] != q.state["latent"]._version
        return latent_changed or q.shows(2.0**-8)

    def _refuse_changed(self, doing: str) -> None:
        """Raises if a weight was changed, since writing the image of its latent would undo the change."""
        for q in self._quantized():
            if self._touched(q.weight) and not self._is_ours(q):
                raise RuntimeError(self._changed(q.name, doing))

    def _changed(self, name: str, doing: str) -> str:
        remedy = "build a new MirrorDescent after loading"
        if self.finalized:
            return f"{name} is off its levels, although the optimizer is finalized: load weights on levels, or {remedy}"
        return (
            f"{name} was changed since the optimizer wrote it (by model.load_state_dict(), an initialization or an "
            f"average of weights?), but its latent was not: {doing} would undo the change. Load model.state_dict() and "
            "opt.state_dict(), saved together, in either order; finalize() keeps weights that are all on their levels; "
            f"for any others, {remedy}"
        )

    def _final(self, q: Quantized) -> Quantized:
        """The tensor to be rounded: with its current state, or that of a weight which was replaced by exact levels.

        Values are compared, since changes through ``.data`` do not show in the version.
        """
        kind, rounded = type(q.method).__name__, q.is_rounded()
        loaded = q.adopted() if self._touched(q.weight) and not rounded else None  # exact levels are no soft weights
        ours = loaded is None and (rounded if self.finalized else self._is_ours(q))
        final = q if ours else loaded or q.adopted()
        state = (final or q).state
        if bool(local(state["latent"]).isnan().any()):  # infinite is a primal point that reached its level
            raise RuntimeError(f"the latent of {q.name} holds NaN: training diverged; nothing was rounded")
        if final is None or not (ours or final.is_rounded()):
            raise RuntimeError(self._changed(q.name, "finalize()"))
        if bool(local(q.method.image(state, q.beta)).isnan().any()):
            raise RuntimeError(f"{kind}.project gives NaN for {q.name} at beta {float(q.beta):g}; nothing was rounded")
        if not q.method.holds(q.method.rounded(state, q.beta).to(q.weight.dtype), state):
            raise RuntimeError(f"{kind}.round left {q.name} off its {q.method.levels}; nothing was rounded")
        return final

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """Latents, hyperparameters, β, the step count and the base optimizer's state; loads with weights_only.

        All of it is in ``state``, by parameter, and in ``param_groups``: torch.distributed.checkpoint keeps nothing
        else of an optimizer.
        """
        try:
            if self.finalized:
                self.finalize()  # weights that were loaded since: this state must give them back
            self._refuse_changed("loading it")
        except RuntimeError as error:  # only a warning: tools ask for a state before they load one
            warnings.warn(f"the optimizer's state does not belong to the model's weights: {error}", stacklevel=2)
        state = super().state_dict()
        fresh = self.steps == 0 and not self.base.state
        kept: dict[int, dict[str, Any]] = self._unstepped() if fresh else self.base.state_dict()["state"]
        common = {"steps": self.steps, "finalized": self.finalized, "base_class": type(self.base).__name__}
        for group in state["param_groups"]:
            method: Method = group.pop("method")
            del group["anneal"]
            group.update(method=method.identity(), levels=tuple(method.levels))
            group.update(common, fresh=fresh, kept=sum(len(kept.get(i, {})) for i in group["params"]))
        for i, entries in kept.items():
            mine = state["state"].get(i, {})
            if set(entries) & set(mine):
                raise ValueError(f"{type(self.base).__name__} keeps its own {', '.join(mine)}: cannot be saved")
            state["state"][i] = {**mine, **entries}
        return state

    def _unstepped(self) -> dict[int, dict[str, Any]]:
        """The entries that the base optimizer will keep for each parameter: a copy makes a step with zero gradients.

        Loading ignores them. They are there for torch.distributed.checkpoint, which only loads entries that the state
        of a new optimizer has already.
        """
        try:
            twin = copy.deepcopy(self.base)
            twins = [p for group in twin.param_groups for p in group["params"]]
            for p, moved in zip(self._params(), twins, strict=True):
                moved.grad = torch.zeros_like(moved) if p.requires_grad or p in self.state else None
            with torch.no_grad():
                twin.step()
        except Exception:  # it needs a closure, as LBFGS does; loading an incomplete state raises an error
            return {}
        state: dict[int, dict[str, Any]] = twin.state_dict()["state"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state of the same methods, levels and shapes; training goes on bit-exactly."""
        self._refuse_inside("load_state_dict()")
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups, states, kept = self._understood(state_dict)
        steps, finalized = groups[0]["steps"], groups[0]["finalized"]
        betas = [beta_at(group, steps) for group in self.param_groups]
        base = self.base.state_dict()
        for theirs, saved in zip(base["param_groups"], groups, strict=True):
            theirs.update({k: saved[k] for k in theirs if k in saved and k not in ("params", "param_names")})
        kept = [tree_map_only(Tensor, torch.clone, entries) for entries in kept]  # or steps would change the saved ones
        base["state"] = {i: entries for i, entries in enumerate(kept) if entries and not groups[0]["fresh"]}
        self.base.load_state_dict(base)
        for weight, state in zip(self._params(), states, strict=True):
            _fill(self.state.get(weight, {}), state)
        self.steps, self.finalized = steps, False
        not_theirs = (*_OURS, *_SAVED, "params", "param_names")
        for group, saved, beta in zip(self.param_groups, groups, betas, strict=True):
            group.update({k: v for k, v in saved.items() if k not in not_theirs})
            group["beta"] = saved["beta"] if finalized else beta
            if beta != saved["beta"] and not finalized and not isinstance(group["method"], REF):
                change = f"at step {steps} the saved beta was {saved['beta']:g}, but {group['anneal']} gives {beta:g}"
                warnings.warn(f"{change}: training goes on with another schedule", stacklevel=2)
        self._write(rounded=finalized)
        self.finalized = finalized
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _understood(self, state_dict: dict[str, Any]) -> tuple[list[Group], list[State], list[State]]:
        """The groups of a state, and per parameter all entries and those of the base; raises if it does not fit."""
        groups: list[Group] = state_dict.get("param_groups") or [{}]
        missing = {k for k in ("method", "beta", *_SAVED) if any(k not in group for group in groups)}
        if missing or "state" not in state_dict:
            raise ValueError(f"this is not a state of MirrorDescent: {', '.join(sorted(missing)) or 'state'} missing")
        base = groups[0]["base_class"]
        if base != type(self.base).__name__:
            raise ValueError(f"the state was saved with {base}, but the base optimizer is a {type(self.base).__name__}")
        saved = [(len(g["params"]), _identity(g)) for g in groups]
        here = [(len(g["params"]), g["method"].identity()) for g in self.param_groups]
        pairs = zip(self.param_groups, saved, strict=False)
        if [n for n, _ in saved] != [n for n, _ in here] or not all(g["method"].fits(m) for g, (_, m) in pairs):
            expected = f"but this optimizer has {here}: build it as it was"
            raise ValueError(f"the state was saved with (parameters, method) {saved}, {expected}")
        states = [state_dict["state"].get(key, {}) for group in groups for key in group["params"]]
        kept = []
        for weight, state in zip(self._params(), states, strict=True):
            name, own = self._names[weight], self.state.get(weight, {})
            kept.append({k: v for k, v in state.items() if k not in own})
            for key, tensor in own.items():
                shape = getattr(state.get(key), "shape", None)
                if tensor.shape != shape:
                    raise ValueError(f"the saved {key} of {name} has shape {shape}, but the model needs {tensor.shape}")
            if "latent" in state and not own:
                raise ValueError(f"the state has a latent for {name}, which is not quantized here")
        count, expected = sum(map(len, kept)), sum(group["kept"] for group in groups)
        if count != expected:
            raise ValueError(f"the state holds {count} entries of {base}, but {expected} were saved: the rest was lost")
        return groups, states, kept

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_inside("copying or pickling")
        # A scheduler patches ``step`` into the instance; like torch's own optimizers, a copy does without it.
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_versions": {}})  # a copied weight counts its changes from the start
        _owners.OPTIMIZERS[self] = None


def _identity(group: Group) -> str:
    """The method of a saved group, like ``Method.identity``; version 0.1 only saved its class."""
    method: str = group["method"]
    if method.startswith("{"):
        return method
    return json.dumps({"class": _RENAMED.get(method, method), "levels": list(group["levels"])})


def _fill(state: State, source: State) -> None:
    for key, tensor in state.items():
        tensor.detach().copy_(source[key])


@functools.cache
def _keep_out_of_graphs() -> None:
    """Keeps functions that set β or read versions plain Python in a compiled step: its graph would hold a constant.

    Called with the first optimizer, since it imports the compiler, which takes longer than the rest of this package.
    """
    for name in ("_prepare", "_advance", "_remember"):
        apart = torch.compiler.disable(getattr(MirrorDescent, name))  # type: ignore[no-untyped-call]
        setattr(MirrorDescent, name, apart)


def _default_anneal(method: Method) -> Schedule:
    if method.uses_beta and method.scale is not None:
        raise ValueError(
            f"{type(method).__name__} with levels that fit each layer needs anneal=mq.schedules.until(steps), with the "
            "number of steps that training takes: weights must be on their levels when it ends"
        )
    return schedules.geometric(1.02, every=200)


def beta_at(group: Group, step: int) -> float:
    """β at a step, by the schedule of a group."""
    schedule, method = group["anneal"], group["method"]
    if not callable(schedule):
        raise TypeError(f"anneal is {schedule!r}, but it must be a function of the step: try mq.schedules.constant()")
    value = schedule(step)
    try:
        beta = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"anneal gives {value!r} at step {step}, but beta must be a number") from None
    if not method.lowest_beta <= beta <= 1e35:
        expected = f"{type(method).__name__} needs a beta from {method.lowest_beta:g} to 1e35"
        raise ValueError(f"beta is {beta:g} at step {step}, but {expected}: change {schedule}")
    return beta
