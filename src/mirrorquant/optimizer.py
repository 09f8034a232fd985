"""MirrorDescent: quantization by any method, around any torch optimizer.

A quantized weight lives twice: a latent tensor that the base optimizer moves (the dual space), and the model's own
parameter, its image under the projection (the primal space). The model itself is never touched.

>>> import mirrorquant as mq
>>> from torch import nn
>>> model = nn.Linear(4, 2, bias=False)
>>> opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model), lr=0.1), anneal=mq.anneal.geometric(1.5))
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
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirrorquant import _owners, methods
from mirrorquant import anneal as _anneal
from mirrorquant.anneal import Schedule
from mirrorquant.levels import Levels
from mirrorquant.methods import REF, Method
from mirrorquant.mirrors import Beta

__all__ = ["MirrorDescent"]

Closure = Callable[[], Any]
_OURS = ("method", "anneal", "beta")


class Quantized(NamedTuple):
    """One quantized group: its parameters' names, the model's weights, their latents, its method and β."""

    names: list[str]
    weights: list[Tensor]
    latents: list[Tensor]
    method: Method
    beta: Beta
    lr: Beta


class MirrorDescent(Optimizer):
    """Trains quantized weights with any torch optimizer.

    Constructing it makes each quantized weight the image of its latent, so that the weights change at once. From then
    on the latents own the weights: load a pretrained model before, not after.

    Args:
        base: a fresh torch optimizer over the model's parameters, as in ``torch.optim.Adam(mq.split(model), lr=1e-3)``.
            A group may carry ``method``, ``levels`` and ``anneal`` of its own; ``method="ref"`` leaves it in float.
        method: a name from ``mq.methods.list()``, or a ``Method`` object.
        levels: the quantization levels for methods given by name; binary unless told.
        anneal: β as a function of the step.
        check_gradients: refuse a step with NaN or infinite gradients (one read of the gradients; a synchronization
            on CUDA). Skipped in compiled steps.
    """

    base: Optimizer
    steps: int
    finalized: bool

    def __init__(
        self,
        base: Optimizer,
        method: str | Method = "md-tanh-s",
        levels: Iterable[float] | None = None,
        anneal: Schedule = _anneal.geometric(1.02, every=200),  # noqa: B008 (frozen)
        *,
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
        methods.get(method, levels)
        self.base, self.steps, self.finalized = base, 0, False
        self._check_gradients, self._levels = check_gradients, levels
        self._constructed = self._inside_quantized = False
        groups = [dict(group) for group in base.param_groups]
        super().__init__(groups, {**base.defaults, "method": method, "anneal": anneal})
        if not isinstance(methods.get(method), REF) and not self.state:
            raise ValueError(f"method is {method!r}, but no parameter is left to quantize: all groups are 'ref'")
        for ours, theirs in zip(self.param_groups, base.param_groups, strict=True):
            theirs["params"][:] = self._moved(ours)  # in place: LBFGS keeps the list
            for key in (*_OURS, "levels"):
                theirs.pop(key, None)
        if base.state:  # Adagrad's begins with the optimizer: that of the latents
            base.state.clear()
            base.state.update(type(base)([dict(group) for group in base.param_groups], **base.defaults).state)
        self._constructed = True
        self._write(rounded=False)
        _owners.begin(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, quantized by its own ``method``, ``levels`` and ``anneal``, or by the optimizer's.

        A parameter that does not require a gradient is left as it is.
        """
        if self._inside_quantized:
            raise RuntimeError("add_param_group() was called inside quantized(): leave the context first")
        group = dict(param_group)
        method = group.get("method", self.defaults["method"])
        by_name = isinstance(method, str)
        group["method"] = method = methods.get(method, group.pop("levels", self._levels if by_name else None))
        if self.finalized and not isinstance(method, REF):
            raise RuntimeError(f"the optimizer is finalized: a new group can only be 'ref', not {method}")
        group["beta"] = _beta(group.get("anneal", self.defaults["anneal"]), method, self.steps)
        self._refuse_decay({**self.defaults, **group})
        super().add_param_group(group)
        try:
            learnt = [p for p in group["params"] if p.requires_grad and not isinstance(method, REF)]
            latents = {p: self._new_latent(p, method) for p in learnt}
        except BaseException:
            self.param_groups.pop()
            raise
        for p, latent in latents.items():
            self.state[p]["latent"] = latent
        self._set_beta(group, group["beta"])
        if self._constructed:
            theirs = {k: v for k, v in group.items() if k not in _OURS}
            self.base.add_param_group({**theirs, "params": self._moved(group)})
            self._write(rounded=False)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One step: pull the gradients back, let the base optimizer move the latents, advance β, project.

        Args:
            closure: reevaluates the model and returns the loss; it may be called several times (LBFGS does).
        """
        if self._inside_quantized:
            raise RuntimeError("step() was called inside quantized(): leave the context first, then step")
        betas = self._prepare()
        loss = None
        if closure is None:
            self._pull_back()
            self.base.step()
        else:
            loss = self.base.step(lambda: self._evaluate(closure))
        self._settle()
        self._advance(betas)
        self._write(rounded=False)
        return loss

    @contextmanager
    def quantized(self) -> Iterator[None]:
        """Exact levels inside, soft weights back after, even on an exception."""
        if self._inside_quantized:
            yield
            return
        self._write(rounded=True)
        self._inside_quantized = True
        try:
            yield
        finally:
            self._inside_quantized = False
            self._write(rounded=False)

    def finalize(self) -> None:
        """Rounds for good: each quantized weight is now exactly one of its levels, which is checked.

        Steps after it train what stayed in float, as ProxQuant does at the end.
        """
        for q in self._quantized():
            for name, latent in zip(q.names, q.latents, strict=True):
                if bool(torch.isnan(latent).any()):  # infinite is where a primal point has reached its level
                    raise RuntimeError(f"the latent of {name} holds NaN: training diverged; nothing was rounded")
        self._write(rounded=True)
        for q in self._quantized():
            for name, weight in zip(q.names, q.weights, strict=True):
                if not q.method.levels.holds(weight):
                    raise RuntimeError(f"{type(q.method).__name__}.round left {name} off its {q.method.levels}")
        self.finalized = True

    @property
    def beta(self) -> float:
        """The current β, of the first quantized group."""
        return float(next((q.beta for q in self._quantized()), 1.0))

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
        for q in self._quantized():
            _pull_back(q.method, q.weights, q.latents, q.beta, frozen=self.finalized)

    def _settle(self) -> None:
        for q in self._quantized():
            _settle(q.method, q.latents, q.beta, q.lr, frozen=self.finalized)

    def _advance(self, betas: list[float]) -> None:
        """β_{k+1}, until finalized; and what the base optimizer keeps in its groups, copied back."""
        self.steps += 1
        for ours, theirs, beta in zip(self.param_groups, self.base.param_groups, betas, strict=True):
            ours.update({k: v for k, v in theirs.items() if k not in ("params", "lr", "weight_decay")})
            if not self.finalized:
                self._set_beta(ours, beta)

    @torch.no_grad()
    def _write(self, *, rounded: bool) -> None:
        """weight = project(latent), or round(latent); once finalized, the weights stay."""
        if not self.finalized:
            for q in self._quantized():
                (_round if rounded else _project)(q.method, q.weights, q.latents, q.beta)

    # What they need.

    def _quantized(self) -> Iterator[Quantized]:
        for index, group in enumerate(self.param_groups):
            if not isinstance(group["method"], REF):
                named = [(n, p) for n, p in zip(self._names(index), group["params"], strict=True) if p in self.state]
                names, weights = [name for name, _ in named], [weight for _, weight in named]
                latents = [self.state[p]["latent"] for p in weights]
                yield Quantized(names, weights, latents, group["method"], group["beta"], group.get("lr", 1.0))

    def _names(self, index: int) -> list[str]:
        group = self.param_groups[index]
        return group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]

    def _moved(self, group: dict[str, Any]) -> list[Tensor]:
        """What the base optimizer moves: the latents, or the weights themselves where they stay in float."""
        return [self.state.get(p, {}).get("latent", p) for p in group["params"]]

    def _new_latent(self, weight: Tensor, method: Method) -> Tensor:
        """A float32 (float64 for float64) tensor, in the weight's layout."""
        if not weight.is_floating_point():
            raise TypeError(f"a parameter is {weight.dtype}, but only floating-point parameters can be quantized")
        levels = method.levels.tensor(weight)
        if len(set(levels.tolist())) < len(levels) or not bool(levels.isfinite().all()):
            raise ValueError(f"{method.levels} are not finite and distinct in {weight.dtype}: choose others")
        wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        return method.lift(wide).clone()

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
                "and backward pass and step outside, or train with mirrorquant.train, whose fast step brings beta along"
            )
        betas = [_beta(group["anneal"], group["method"], self.steps + 1) for group in self.param_groups]
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
                f"where nothing decays: use weight_decay=0, or {method.name.removesuffix('-primal')!r}"
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
        groups = enumerate(self.param_groups)
        named = [pair for i, group in groups for pair in zip(self._names(i), group["params"], strict=True)]
        grads = [(n, p.grad._values() if p.grad.is_sparse else p.grad) for n, p in named if p.grad is not None]
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
        """Latents, hyperparameters, β, the step count and the base optimizer's state; loads with weights_only."""
        state = super().state_dict()
        for group in state["param_groups"]:
            method: Method = group.pop("method")
            del group["anneal"]
            group.update(method=type(method).__name__, levels=tuple(method.levels), beta=float(group["beta"]))
        saved = {"base": self.base.state_dict(), "base_class": type(self.base).__name__}
        return {**state, **saved, "steps": self.steps, "finalized": self.finalized}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state of the same methods, levels and shapes; training goes on bit-exactly."""
        if self._inside_quantized:
            raise RuntimeError("load_state_dict() was called inside quantized(): leave the context first")
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._refuse_other_state(state_dict)
        steps, finalized, groups = state_dict["steps"], state_dict["finalized"], state_dict["param_groups"]
        betas = [_beta(group["anneal"], group["method"], steps) for group in self.param_groups]
        self.base.load_state_dict(state_dict["base"])
        for index, weight in enumerate(p for group in self.param_groups for p in group["params"]):
            if weight in self.state:
                self.state[weight]["latent"].copy_(state_dict["state"][index]["latent"])
        self.steps, self.finalized = steps, False
        for group, saved, beta in zip(self.param_groups, groups, betas, strict=True):
            group.update({k: v for k, v in saved.items() if k not in (*_OURS, "levels", "params", "param_names")})
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

    def _refuse_other_state(self, state_dict: dict[str, Any]) -> None:
        missing = {"state", "param_groups", "base", "base_class", "steps", "finalized"} - set(state_dict)
        if missing:
            raise ValueError(f"this is no state of MirrorDescent: {', '.join(sorted(missing))} missing")
        if state_dict["base_class"] != type(self.base).__name__:
            raise ValueError(
                f"the state is of a {state_dict['base_class']}, but the base is a {type(self.base).__name__}"
            )
        saved = [(g["method"], tuple(g["levels"]), len(g["params"])) for g in state_dict["param_groups"]]
        here = [(type(g["method"]).__name__, tuple(g["method"].levels), len(g["params"])) for g in self.param_groups]
        if saved != here:
            raise ValueError(
                f"the state was saved with (method, levels, parameters) {saved}, but this optimizer has {here}: "
                "build it as it was"
            )
        for index, weight in enumerate(p for group in self.param_groups for p in group["params"]):
            mine = getattr(self.state.get(weight, {}).get("latent"), "shape", None)
            theirs = getattr(state_dict["state"].get(index, {}).get("latent"), "shape", None)
            if mine != theirs:
                raise ValueError(
                    f"the saved latent of parameter {index} has shape {theirs}, but this model needs {mine}"
                )

    def __getstate__(self) -> dict[str, Any]:
        if self._inside_quantized:
            raise RuntimeError("the optimizer was copied or pickled inside quantized(): leave the context first")
        # A scheduler patches ``step`` into the instance; like torch's own optimizers, a copy does without it.
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _pull_back(method: Method, weights: list[Tensor], latents: list[Tensor], beta: Beta, *, frozen: bool) -> None:
    """latent.grad = pull_back(weight.grad)."""
    for weight, latent in zip(weights, latents, strict=True):
        grad = None if frozen else weight.grad
        latent.grad = None if grad is None else method.pull_back(grad.to(latent.dtype), latent, beta)


def _settle(method: Method, latents: list[Tensor], beta: Beta, lr: Beta, *, frozen: bool) -> None:
    """latent = settle(latent)."""
    for latent in latents:
        latent.grad = None
        settled = latent if frozen else method.settle(latent, beta, lr)
        if settled is not latent:
            latent.copy_(settled)


def _project(method: Method, weights: list[Tensor], latents: list[Tensor], beta: Beta) -> None:
    """weight = project(latent)."""
    for weight, latent in zip(weights, latents, strict=True):
        method.write(weight, latent, beta)


def _round(method: Method, weights: list[Tensor], latents: list[Tensor], beta: Beta) -> None:
    """weight = round(latent)."""
    for weight, latent in zip(weights, latents, strict=True):
        weight.copy_(method.round(latent, beta))


@functools.cache
def _keep_out_of_graphs() -> None:
    """What sets β stays plain Python in a compiled step: in its graph β would be a constant.

    Done with the first optimizer, since it imports the compiler, which takes longer than all the rest of this package.
    """
    for name in ("_prepare", "_advance"):
        apart = torch.compiler.disable(getattr(MirrorDescent, name))  # type: ignore[no-untyped-call]
        setattr(MirrorDescent, name, apart)


def _beta(schedule: Schedule, method: Method, step: int) -> float:
    if not callable(schedule):
        raise TypeError(f"anneal is {schedule!r}, but it must be a function of the step: try mq.anneal.geometric(1.02)")
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
