"""The base class of all methods: the hooks that a method defines, and how the optimizer drives them."""

from __future__ import annotations

import dataclasses
import inspect
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mirrorquant.levels import BINARY, ROOM, Levels, Scale
from mirrorquant.mirrors import Beta

__all__ = ["Method", "nearest_or_nan"]

State = dict[str, Any]
_HOOKS = {"project": 3, "pull_back": 4, "settle": 4, "round": 3}  # with the number of their own arguments
INSIDE = 0.995  # of the hull: where a weight that lies further out starts
_PROBES = (-1.5, -0.75, -0.25, 0.25, 0.75, 1.5)


@dataclass(frozen=True)
class Method:
    """A quantization method; ``mirrorquant.methods`` describes its part in a step.

    A subclass overrides the hooks ``lift`` to ``round``, which ignore the scale: it is applied around them. Class
    attributes describe the method: ``name`` registers it; ``label`` and ``colour`` are for tables and plots (ours are
    Paul Tol's "muted" colours, which remain distinct with any colour vision); ``uses_beta`` says whether it is
    annealed, ``lowest_beta`` is its least β, ``can_decay`` says whether its latents survive L2 weight decay,
    ``can_follow`` whether they stay on the scale of the weights, so that a scale can be computed from them, ``lifts``
    whether a latent has one number per level, and ``fits_levels`` whether the method fits the levels to each tensor.

    Args:
        levels: the quantization levels, which may have a scale.
        scale: a factor on the levels per tensor or channel; by default that of the levels.
    """

    levels: Levels = BINARY
    scale: Scale | None = field(default=None, kw_only=True)
    name: ClassVar[str] = ""
    label: ClassVar[str] = ""
    colour: ClassVar[str] = ""
    uses_beta: ClassVar[bool] = True
    lowest_beta: ClassVar[float] = 1.0
    can_decay: ClassVar[bool] = True
    can_follow: ClassVar[bool] = True
    lifts: ClassVar[bool] = False
    fits_levels: ClassVar[bool] = False
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
        levels = Levels.of(self.levels)
        scale = self.scale or levels.scale
        if scale is not None and scale.how == "auto":
            follows = self.can_follow and scale.size == "mean"
            scale = dataclasses.replace(scale, how="computed" if follows else "fixed")
        if scale is not None and scale.how == "computed" and not self.can_follow:
            raise ValueError(
                f"the latents of {type(self).__name__} are on another scale than its weights: fix or learn it"
            )
        object.__setattr__(self, "levels", Levels(*levels))
        object.__setattr__(self, "scale", scale)

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

    # Hooks. ``project``, ``pull_back``, ``settle`` and ``round`` may have more arguments, with the names of the state
    # that they need.

    def lift(self, weight: Tensor) -> Tensor:
        """The latent that a model's initial weight starts from; extra dimensions come first."""
        return weight

    def invert(self, weight: Tensor, beta: Beta) -> Tensor:
        """The latent whose image is the weight, which is in the hull: with a scale that follows, β = 1 starts there.

        By default the latent is lifted.
        """
        return self.lift(weight)

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
        hull = self.hull(state, 1.0)  # whatever β is: a scale that follows needs latents of the weights' size
        unit = weight if hull is None else weight / hull
        if self.follows:
            reach, hook = INSIDE * self.levels.radius, "invert"
            latent = self.invert(unit.clamp(self.levels.centre - reach, self.levels.centre + reach), 1.0)
        else:
            latent, hook = self.lift(unit), "lift"
        latent = self._checked(hook, name, latent, weight.shape).clone()
        if latent.shape != weight.shape and self.scale is not None and self.scale.how == "computed":
            raise ValueError(f"{self} has several latents, from which no scale can be computed: set can_follow = False")
        state["latent"] = latent if hull is None else latent * hull
        hull = self.hull(state, beta)
        unit = weight if hull is None else weight / hull
        started = self.start(unit, self._unit(state, beta))
        state |= {k: self._checked("start", name, v).clone() for k, v in started.items()}
        trial = {k: v.clone() for k, v in state.items()}
        self._checked("project", name, self.image(trial, beta), weight.shape)
        self._checked("round", name, self.rounded(trial, beta), weight.shape)
        self._checked("pull_back", name, self.gradient(torch.ones_like(weight), trial, beta), latent.shape)
        self._checked("settle", name, self.settled(trial, beta, lr), latent.shape)
        return state

    def image(self, state: State, beta: Beta) -> Tensor:
        """The weight: c · project(latent / c), where c is the scale of the hull."""
        hull, weight = self.hull(state, beta), self._projected(state, beta)
        return weight if hull is None else weight * hull

    def rounded(self, state: State, beta: Beta) -> Tensor:
        """The quantized weight: c · round(latent / c)."""
        latent, scale = state["latent"], state.get("scale")
        unit = latent if scale is None else latent / scale
        if type(self).round is Method.round:
            weight = nearest_or_nan(self.levels, self.project(unit, beta, **self._more("project", state)))
        else:
            weight = self.round(unit, beta, **self._more("round", state))
        return weight if scale is None else weight * scale

    def gradient(self, grad: Tensor, state: State, beta: Beta) -> Tensor:
        """The latent's gradient."""
        grad = grad.to(state["latent"].dtype)
        return self.pull_back(grad, self._unit(state, beta), beta, **self._more("pull_back", state))

    def scale_gradient(self, grad: Tensor, state: State, beta: Beta) -> Tensor:
        """The gradient of a learnt scale, dL/dc = Σ P(latent / c) · dL/dw over the weights that share it."""
        grad = grad.to_dense() if grad.is_sparse else grad
        return (grad.to(state["scale"].dtype) * self._projected(state, beta)).sum_to_size(state["scale"].shape)

    def settled(self, state: State, beta: Beta, lr: Beta) -> Tensor:
        """The latent after ``settle``; a scale that moves is brought up to date in place."""
        latent: Tensor = state["latent"]
        if type(self).settle is not Method.settle:
            hull = self.hull(state, beta)
            latent = self.settle(self._unit(state, beta), beta, lr, **self._more("settle", state))
            latent = latent if hull is None else latent * hull
        if self.scale is not None and self.scale.how == "computed":
            self.refit({**state, "latent": latent})
        return latent

    def holds(self, weight: Tensor, state: State) -> bool:
        """Whether every entry of a weight is exactly one of the levels, times the scale."""
        return self.levels.holds(weight, state.get("scale"))

    def in_units(self, weight: Tensor, state: State) -> Tensor:
        """The weight in units of its scale: its levels are those of the method."""
        return weight / state["scale"] if "scale" in state else weight

    def refit(self, state: State) -> None:
        """Recomputes a scale that follows the latent, after someone has changed the latent."""
        if self.scale is not None and self.scale.how == "computed":
            state["scale"].copy_(self.scale.of(state["latent"], self.levels))

    def adopted(self, weight: Tensor, state: State) -> State | None:
        """The state of which a weight is the rounded image, with its own scale; None for one that is off its levels."""
        scale = None if "scale" not in state else self.levels.scales(weight, state["scale"].detach())
        if not self.levels.holds(weight, scale):
            return None
        latent = self.lift(self.levels.nearest(weight if scale is None else weight / scale).to(state["latent"].dtype))
        return {**state, "latent": latent} if scale is None else {**state, "latent": latent * scale, "scale": scale}

    def identity(self) -> str:
        """The method with its options, as JSON, which a saved state must fit.

        Options are the fields of a dataclass; mirrors, which may be functions, are compared by their values.

        >>> from mirrorquant.methods import BC
        >>> BC().identity()
        '{"class": "BC", "levels": [-1.0, 1.0], "values": [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0]}'
        """
        known: dict[str, Any] = {"class": type(self).__name__, "levels": list(self.levels)}
        if self.scale is not None:
            known["scale"] = [self.scale.per, self.scale.how, self.scale.size]
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

    @property
    def follows(self) -> bool:
        """Whether the scale follows the latents, in a hull that is wide while the weights are soft."""
        return self.uses_beta and self.scale is not None and self.scale.how == "computed"

    def hull(self, state: State, beta: Beta) -> Tensor | None:
        """The scale of the hull, if there is one: wider than the levels at first, so that few weights lie outside."""
        scale: Tensor | None = state.get("scale")
        return scale * (1 + ROOM / beta) if self.follows and scale is not None else scale

    def _projected(self, state: State, beta: Beta) -> Tensor:
        return self.project(self._unit(state, beta), beta, **self._more("project", state))

    def _more(self, hook: str, state: State) -> dict[str, Tensor]:
        return {name: state[name] for name in self.wanted[hook]}

    def _unit(self, state: State, beta: Beta) -> Tensor:
        latent: Tensor = state["latent"]
        hull = self.hull(state, beta)
        return latent if hull is None else latent / hull

    def _checked(self, hook: str, name: str, value: object, shape: torch.Size | None = None) -> Tensor:
        """A hook's result: floating-point numbers, not NaN, finite if they are weights, and of this shape.

        A lifted weight may have extra dimensions in front.
        """
        if not isinstance(value, Tensor) or not value.is_floating_point():
            given = str(getattr(value, "dtype", f"a {type(value).__name__}"))
            raise TypeError(self._wrong(hook, name, given, "a tensor of a floating-point dtype"))
        front = value.dim() - len(shape) if shape is not None and hook in ("lift", "invert") else 0
        if shape is not None and value.shape[front:] != shape:
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
