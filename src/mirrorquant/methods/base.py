"""The base class of all methods: the hooks that a method defines, and how the optimizer drives them."""

from __future__ import annotations

import dataclasses
import inspect
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mirrorquant.levels import BINARY, Levels
from mirrorquant.mirrors import Beta

__all__ = ["Method", "Scale", "nearest_or_nan"]

State = dict[str, Any]
_PER, _HOW = ("tensor", "channel"), ("fixed", "computed", "learnt")
_HOOKS = {"project": 3, "pull_back": 4, "settle": 4, "round": 3}  # with the number of their own arguments
_PROBES = (-1.5, -0.75, -0.25, 0.25, 0.75, 1.5)


@dataclass(frozen=True)
class Scale:
    """A factor c > 0 on the levels of a tensor: w = c · P(w̃ / c), so the levels fit the weights.

    Args:
        per: one factor per "tensor", or one per output "channel" (dimension 0) of a matrix or kernel.
        how: "fixed" as computed from the initial weights; "computed" again from the latent at each step; or "learnt" by
            the base optimizer with dL/dc = Σ P(w̃ / c) · dL/dw.
    """

    per: str = "tensor"
    how: str = "fixed"

    def __post_init__(self) -> None:
        for name, known in (("per", _PER), ("how", _HOW)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(known)}")

    def of(self, weight: Tensor, levels: Levels) -> Tensor:
        """c = fit · mean |w| with :attr:`Levels.fit`; 1 where all weights are zero.

        >>> Scale("channel").of(torch.tensor([[0.1, -0.3], [0.0, 0.0]]), BINARY)
        tensor([[0.2000],
                [1.0000]])
        """
        first = 1 if self.per == "channel" and weight.dim() > 1 else 0
        dims = tuple(range(first, weight.dim()))
        size = weight.abs().mean(dims, keepdim=True) if dims else weight.abs()
        return torch.where(size > 0, levels.fit * size, 1.0)


@dataclass(frozen=True)
class Method:
    """A quantization method; ``mirrorquant.methods`` describes its part in a step.

    A subclass overrides the hooks ``lift`` to ``round``, which ignore the scale: it is applied around them. Class
    attributes describe the method: ``name`` registers it; ``label`` and ``colour`` are for tables and plots (ours are
    Paul Tol's "muted" colours, which remain distinct with any colour vision); ``uses_beta`` says whether it is
    annealed, ``lowest_beta`` is its least β, and ``can_decay`` says whether its latents survive L2 weight decay.

    Args:
        levels: the quantization levels.
        scale: a factor on the levels per tensor or channel; none by default.
    """

    levels: Levels = BINARY
    scale: Scale | None = field(default=None, kw_only=True)
    name: ClassVar[str] = ""
    label: ClassVar[str] = ""
    colour: ClassVar[str] = ""
    uses_beta: ClassVar[bool] = True
    lowest_beta: ClassVar[float] = 1.0
    can_decay: ClassVar[bool] = True
    registry: ClassVar[dict[str, type[Method]]] = {}
    wanted: ClassVar[dict[str, list[str]]] = {}

    def __init_subclass__(cls) -> None:
        cls.wanted = {hook: [*inspect.signature(getattr(cls, hook)).parameters][own:] for hook, own in _HOOKS.items()}
        if "name" not in cls.__dict__:
            return
        known = Method.registry.setdefault(cls.name, cls)
        owner = f"{known.__module__}.{known.__qualname__}"
        if owner != f"{cls.__module__}.{cls.__qualname__}":
            raise ValueError(f"the name {cls.name!r} is taken by {owner}: choose another")
        Method.registry[cls.name] = cls  # a class that is defined again, as in a notebook
        cls.label = cls.__dict__.get("label", cls.name)

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", Levels.of(self.levels))

    def __repr__(self) -> str:
        scale = "" if self.scale is None else f", scale={self.scale}"
        return f"{type(self).__name__}(levels={self.levels}{scale})"

    @property
    def learns_scale(self) -> bool:
        """Whether the base optimizer trains the scales."""
        return self.scale is not None and self.scale.how == "learnt"

    @classmethod
    def describe(cls) -> str:
        """One line about the method."""
        return (cls.__doc__ or "").strip().split("\n")[0]

    # Hooks. Those after ``start`` may have more arguments, with the names of the state that they need.

    def lift(self, weight: Tensor) -> Tensor:
        """The latent that a model's initial weight starts from; extra dimensions come first."""
        return weight

    def start(self, weight: Tensor, latent: Tensor) -> dict[str, Tensor]:
        """State beyond the latent, by name: a dual variable, a mask. Hooks change it in place; it is saved."""
        return {}

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """The weight that the network sees."""
        raise NotImplementedError(f"{type(self).__name__} must define project(latent, beta)")

    def pull_back(self, grad: Tensor, latent: Tensor, beta: Beta) -> Tensor:
        """The latent's gradient from the weight's: itself in mirror descent (the straight-through estimator)."""
        return grad

    def step_scale(self, beta: Beta) -> Beta:
        """The factor on the base optimizer's step D."""
        return 1.0

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """The latent after the base optimizer moved it; may be changed in place."""
        return latent

    def round(self, latent: Tensor, beta: Beta) -> Tensor:
        """The quantized weight: the level nearest to the weight; NaN stays NaN."""
        return nearest_or_nan(self.levels, self.project(latent, beta))

    # Called by the optimizer: the hooks on the state of one tensor, with its scale.

    def begin(self, weight: Tensor, beta: float, lr: Beta, name: str) -> State:
        """The state that a weight starts from: the latent, the scale, and the entries that ``start`` adds.

        Tries all hooks; the error for a wrong shape, dtype or NaN names the hook.
        """
        if bool(weight.isnan().any()):
            raise ValueError(f"{name} holds NaN, so there is nothing to quantize: initialize or load it again")
        state: State = {} if self.scale is None else {"scale": self.scale.of(weight, self.levels)}
        unit = self._unit({"latent": weight, **state})
        latent = self._checked("lift", name, self.lift(unit), weight.shape).clone()
        if self.scale is not None and self.scale.how == "computed" and latent.shape != weight.shape:
            raise ValueError(f"{self} has several latents, from which no scale can be computed: fix or learn it")
        state["latent"] = self._times(latent, state)
        state |= {k: self._checked("start", name, v).clone() for k, v in self.start(unit, latent).items()}
        trial = {k: v.clone() for k, v in state.items()}
        self._checked("project", name, self.image(trial, beta), weight.shape)
        self._checked("round", name, self.rounded(trial, beta), weight.shape)
        self._checked("pull_back", name, self.gradient(torch.ones_like(weight), trial, beta), latent.shape)
        self._checked("settle", name, self.settled(trial, beta, lr), latent.shape)
        return state

    def image(self, state: State, beta: Beta) -> Tensor:
        """The weight: c · project(latent / c)."""
        return self._times(self._projected(state, beta), state)

    def rounded(self, state: State, beta: Beta) -> Tensor:
        """The quantized weight: c · round(latent / c)."""
        if type(self).round is Method.round:
            return self._times(nearest_or_nan(self.levels, self._projected(state, beta)), state)
        return self._times(self.round(self._unit(state), beta, **self._more("round", state)), state)

    def gradient(self, grad: Tensor, state: State, beta: Beta) -> Tensor:
        """The latent's gradient."""
        grad = grad.to(state["latent"].dtype)
        return self.pull_back(grad, self._unit(state), beta, **self._more("pull_back", state))

    def scale_gradient(self, grad: Tensor, state: State, beta: Beta) -> Tensor:
        """The gradient of a learnt scale: Σ P(latent / c) · dL/dw over the weights that share it."""
        grad = grad.to_dense() if grad.is_sparse else grad
        return (grad.to(state["scale"].dtype) * self._projected(state, beta)).sum_to_size(state["scale"].shape)

    def settled(self, state: State, beta: Beta, lr: Beta) -> Tensor:
        """The latent after ``settle``; a scale that moves is brought up to date in place."""
        latent: Tensor = state["latent"]
        if type(self).settle is not Method.settle:
            latent = self._times(self.settle(self._unit(state), beta, lr, **self._more("settle", state)), state)
        if self.scale is not None and self.scale.how == "computed":
            state["scale"].copy_(self.scale.of(latent, self.levels))
        elif self.learns_scale:
            state["scale"].clamp_(min=torch.finfo(latent.dtype).tiny)
        return latent

    def adopted(self, weight: Tensor, state: State) -> State | None:
        """The state of which a weight is the rounded image, with its own scale; None for one that is off its levels."""
        unit, factor, found = weight, state.get("scale"), state.copy()
        if factor is not None:
            largest = weight.abs().to(factor.dtype)
            dims = [i for i in range(weight.dim()) if factor.shape[i] == 1]
            largest = largest.amax(dims, keepdim=True) / max(map(abs, self.levels)) if weight.numel() else factor
            found["scale"] = torch.where(largest > 0, largest, factor)
            unit = self.levels.nearest(weight / found["scale"])
        found["latent"] = self._times(self.lift(unit.to(state["latent"].dtype)), found)
        return found if self.levels.holds(weight, found.get("scale")) else None

    def identity(self) -> str:
        """The method with its options, as JSON, which a saved state must fit.

        Options are the fields of a dataclass; mirrors, which may be functions, are compared by their values.

        >>> from mirrorquant.methods import BC
        >>> BC().identity()
        '{"class": "BC", "levels": [-1.0, 1.0], "values": [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0]}'
        """
        known: dict[str, Any] = {"class": type(self).__name__, "levels": list(self.levels)}
        if self.scale is not None:
            known["scale"] = [self.scale.per, self.scale.how]
        others = [f.name for f in dataclasses.fields(self) if f.name not in ("levels", "scale", "mirror")]
        known.update({name: repr(getattr(self, name)) for name in others})
        try:
            probes = torch.tensor(_PROBES, dtype=torch.float64)
            latent = self.lift(probes)
            known["values"] = self._projected({"latent": latent, **self.start(probes, latent)}, 1.0).tolist()
        except (RuntimeError, IndexError, ValueError):  # a method for matrices alone
            known["values"] = []
        return json.dumps(known)

    def fits(self, identity: str) -> bool:
        """Whether a saved :meth:`identity` is of this method; values may differ by rounding."""
        mine, theirs = json.loads(self.identity()), json.loads(identity)
        pairs = [*zip(mine.pop("values"), theirs.pop("values", []), strict=False)]
        return bool(mine == theirs) and all(abs(a - b) < 1e-4 for a, b in pairs)

    def _projected(self, state: State, beta: Beta) -> Tensor:
        return self.project(self._unit(state), beta, **self._more("project", state))

    def _more(self, hook: str, state: State) -> dict[str, Tensor]:
        return {name: state[name] for name in self.wanted[hook]}

    def _unit(self, state: State) -> Tensor:
        latent: Tensor = state["latent"]
        return latent if "scale" not in state else latent / state["scale"]

    def _times(self, unit: Tensor, state: State) -> Tensor:
        return unit if "scale" not in state else unit * state["scale"]

    def _checked(self, hook: str, name: str, value: object, shape: torch.Size | None = None) -> Tensor:
        """A hook's result: floating-point numbers, not NaN, finite if they are weights, and of this shape.

        A lifted weight may have extra dimensions in front.
        """
        if not isinstance(value, Tensor) or not value.is_floating_point():
            given = str(getattr(value, "dtype", f"a {type(value).__name__}"))
            raise TypeError(self._wrong(hook, name, given, "a tensor of a floating-point dtype"))
        if shape is not None and value.shape[value.dim() - len(shape) if hook == "lift" else 0 :] != shape:
            raise ValueError(self._wrong(hook, name, f"shape {tuple(value.shape)}", f"{tuple(shape)}"))
        if bool(value.isnan().any()):
            raise ValueError(self._wrong(hook, name, "NaN", "numbers"))
        if hook in ("project", "round") and bool(value.isinf().any()):
            raise ValueError(self._wrong(hook, name, "inf", "finite numbers"))
        return value.detach()

    def _wrong(self, hook: str, name: str, given: str, expected: str) -> str:
        return f"{type(self).__name__}.{hook} returned {given} for {name}, expected {expected}: correct the method"


def nearest_or_nan(levels: Levels, weight: Tensor) -> Tensor:
    """The nearest level, but NaN for NaN: a diverged weight must not pass for a quantized one.

    >>> nearest_or_nan(BINARY, torch.tensor([0.3, float("nan")]))
    tensor([1., nan])
    """
    return torch.where(weight.isnan(), weight, levels.nearest(weight))
