"""Methods: the paper's algorithms and the baselines it compares with, each a few lines of hooks.

Quantization methods "mainly differ in the constraint set, the projection used, and how backpropagation through the
projection is performed": so that is all that a method says. A latent tensor x̃ is moved by a plain optimizer by −D; the
model's weight is its image. One step k, with β_k the annealing hyperparameter:

    latent.grad = pull_back(dL/dw, latent, β)        # default: the gradient itself, which is mirror descent
    latent      = latent − step_scale(β) · D         # the base optimizer; step_scale is 1, and β in the primal forms
    latent      = settle(latent, β, lr)              # default: unchanged
    weight      = project(latent, β_{k+1})

A custom method is a subclass, usable as an object, or by its name once it is defined:

>>> import mirrorquant as mq
>>> class Clip(mq.Method):
...     '''BinaryRelax-like: projects by clipping.'''
...     name = "clip"
...     def project(self, latent, beta):
...         return (beta * latent).clamp(self.levels[0], self.levels[-1])
>>> mq.methods.get("clip", mq.BINARY)
Clip(levels=Levels(-1.0, 1.0))

A custom projection needs no method at all:

>>> arctan = mq.mirror_from(lambda x: 2 / torch.pi * torch.atan(x), (-1, 1))
>>> method = mq.methods.MD(mirror=arctan)
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from mirrorquant.levels import BINARY, Levels
from mirrorquant.mirrors import Beta, Mirror, ShiftedTanh, Softmax, Tanh

__all__ = ["BC", "MD", "PMF", "PQ", "REF", "GDTanh", "MDSoftmax", "MDSoftmaxPrimal", "MDSoftmaxS", "MDTanh"]
__all__ += ["MDTanhPrimal", "MDTanhS", "Method", "PMFAuthors", "get", "list"]

Lifted = TypeVar("Lifted", Tensor, Sequence[Tensor])


@dataclass(frozen=True)
class Method:
    """What distinguishes one quantization method from another; see the module's docstring for a step's anatomy."""

    levels: Levels = BINARY
    name: ClassVar[str] = ""
    lowest_beta: ClassVar[float] = 1.0
    can_decay: ClassVar[bool] = True
    registry: ClassVar[dict[str, type[Method]]] = {}

    def __init_subclass__(cls) -> None:
        if cls.__dict__.get("name"):
            Method.registry[cls.name] = cls

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", Levels.of(self.levels))

    def lift(self, weight: Tensor) -> Tensor:
        """The latent that a model's initial weight starts from."""
        return weight

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """The weight that the network sees."""
        raise NotImplementedError(f"{type(self).__name__} must define project(latent, beta)")

    def pull_back(self, grad: Tensor, latent: Tensor, beta: Beta) -> Tensor:
        """The latent's gradient from the weight's; as it is, in mirror descent (the straight-through estimator)."""
        return grad

    def step_scale(self, beta: Beta) -> Beta:
        """What the base optimizer's step D is multiplied with."""
        return 1.0

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """The latent after the base optimizer moved it; may be changed in place."""
        return latent

    def write(self, weight: Tensor, latent: Tensor, beta: Beta) -> None:
        """weight = project(latent, β), for a method that can do it in place; never through a reshaped view."""
        weight.copy_(self.project(latent, beta))

    def round(self, latent: Tensor, beta: Beta) -> Tensor:
        """The quantized weight: the level nearest to the weight; NaN stays NaN."""
        return nearest_or_nan(self.levels, self.project(latent, beta))


class REF(Method):
    """Floating-point reference: nothing is quantized."""

    name = "ref"
    lowest_beta = 0.0

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """The weight itself."""
        return latent

    def round(self, latent: Tensor, beta: Beta) -> Tensor:
        """The weight itself: there are no levels."""
        return latent


class BC(Method):
    """BinaryConnect: sign(w̃) forward, straight-through gradient where w̃ is in the hull."""

    name = "bc"
    lowest_beta = 0.0

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """The nearest level: sign(w̃) for {−1, 1}."""
        return self.levels.nearest(latent)

    def pull_back(self, grad: Tensor, latent: Tensor, beta: Beta) -> Tensor:
        """dL/dw where q_min ≤ w̃ ≤ q_max, else 0."""
        inside = (latent >= self.levels[0]) & (latent <= self.levels[-1])
        return grad * inside if grad.is_sparse else torch.where(inside, grad, 0.0)

    def round(self, latent: Tensor, beta: Beta) -> Tensor:
        """The nearest level; NaN stays NaN."""
        return nearest_or_nan(self.levels, latent)


class PQ(Method):
    """ProxQuant: a proximal step towards the levels after each gradient step; β is its λ."""

    name = "pq"
    lowest_beta = 0.0

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """The weight itself: ProxQuant stays in the primal space."""
        return latent

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """The proximal map of strength r = lr·λ, then a clip to the hull.

        Two levels, W-shaped |w − T(w)| regularizer, T(w) the nearest level: w moves towards T(w) by at most r.
        More levels, its square: (w + r T(w)) / (1 + r).
        """
        strength, target = lr * beta, self.levels.nearest(latent)
        if len(self.levels) == 2:
            distance = latent - target
            latent = target + torch.sign(distance) * torch.relu(distance.abs() - strength)
        else:
            latent = (latent + strength * target) / (1 + strength)
        return latent.clamp(self.levels[0], self.levels[-1])


@dataclass(frozen=True)
class MD(Method):
    """Mirror descent with any mirror, in the numerically stable form (eq:mdhybridgd)."""

    mirror: Mirror = field(default_factory=Tanh)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self) is MD and self.mirror.interval != (self.levels[0], self.levels[-1]):
            raise ValueError(
                f"the mirror maps onto {self.mirror.interval}, but the levels run from {self.levels[0]:g} to "
                f"{self.levels[-1]:g}: use levels that end where the mirror does"
            )

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """w = P_β(w̃)."""
        return self.mirror.project(latent, beta)


@dataclass(frozen=True)
class MDTanhS(MD):
    """Mirror descent, (shifted) tanh projection, stable form (Algorithm 2)."""

    name = "md-tanh-s"
    mirror: Mirror = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mirror", Tanh() if self.levels == BINARY else ShiftedTanh(self.levels))

    def write(self, weight: Tensor, latent: Tensor, beta: Beta) -> None:
        """weight = tanh(β w̃); in float32 on a CPU as 2σ(2β w̃) − 1 in place, 3 times faster and to 2e-7 absolute."""
        if isinstance(self.mirror, Tanh) and in_place(weight):
            torch.mul(latent, 2 * beta, out=weight).sigmoid_()
            torch.sub(torch.tensor(-1.0, device=weight.device), weight, alpha=-2, out=weight)
        else:
            super().write(weight, latent, beta)

    def round(self, latent: Tensor, beta: Beta) -> Tensor:
        """The level nearest to w̃, where annealing leads: sign(w̃) for {−1, 1}; NaN stays NaN."""
        return nearest_or_nan(self.levels, latent)


class GDTanh(MDTanhS):
    """Gradient descent through the (shifted) tanh projection."""

    name = "gd-tanh"

    def pull_back(self, grad: Tensor, latent: Tensor, beta: Beta) -> Tensor:
        """dL/dw · P_β'(w̃), which is β (1 − w²) for tanh."""
        return grad * self.mirror.derivative(latent, beta)


class MDTanh(MDTanhS):
    """Mirror descent, tanh projection, primal form (Algorithm 1); two levels.

    The primal point w is kept as its dual coordinate v = P_1⁻¹(w), in which the closed form of tab:eg_projns is
    v − β D: it neither sticks at ±1 nor overflows. Unlike the stable form, it accumulates Σ β_k D_k.
    """

    name = "md-tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.levels) != 2:
            raise ValueError(
                f"md-tanh has a closed form for two levels only, not for {self.levels}: "
                "use md-tanh-s (any levels), or md-softmax (primal, any levels)"
            )

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """w = P_1(v): β is in v already."""
        return self.mirror.project(latent, 1.0)

    def write(self, weight: Tensor, latent: Tensor, beta: Beta) -> None:
        """weight = P_1(v)."""
        super().write(weight, latent, 1.0)

    def step_scale(self, beta: Beta) -> Beta:
        """v − β D."""
        return beta

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """v bounded where w is one rounding unit from its level."""
        bound = self.levels.radius * dual_bound(latent.dtype)
        return latent.clamp_(self.levels.centre - bound, self.levels.centre + bound)


class MDTanhPrimal(MDTanh):
    """MD-tanh that keeps the primal point as the printed closed form does: a weight that reaches its level stays there.

    tab:eg_projns has w = (E − 1) / (E + 1) with E = (1 + w)/(1 − w) exp(−2 β D) = e^{2v}. In floating point E absorbs
    the 1, from 2²⁴ on in float32 (v = 8.3), and then w is ±1, from where the closed form never leads away. So weights
    freeze one after the other as β grows, while those of ``md-tanh`` go on, with ever longer steps β D.
    """

    name = "md-tanh-primal"
    can_decay = False  # a latent that has reached its level is infinite

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """v = P_1⁻¹(w) of w = (E − 1) / (E + 1), each operation rounded; infinite where w is a level."""
        centre, radius = self.levels.centre, self.levels.radius
        v = ((latent - centre) / radius).clamp(-20, 20)  # e^40 and e^-40 absorb and are absorbed by 1
        e = torch.exp(2 * v)
        above, below = e + 1, e - 1
        # The same quotient, but right to the last bit where w is near ±1 even if a compiler divides approximately.
        w = torch.where(v > 0, 1 - (above - below) / above, (above + below) / above - 1)
        return centre + radius * torch.atanh(w)


def nearest_or_nan(levels: Levels, weight: Tensor) -> Tensor:
    """The nearest level, but NaN where there is no number: a diverged weight must not pass for a quantized one.

    >>> nearest_or_nan(BINARY, torch.tensor([0.3, float("nan")]))
    tensor([1., nan])
    """
    return torch.where(weight.isnan(), weight, levels.nearest(weight))


def in_place(weight: Tensor) -> bool:
    """Whether projecting in place pays: on a CPU the pages of temporaries cost more than the arithmetic."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu"


def dual_bound(dtype: torch.dtype) -> float:
    """atanh of the largest number below 1: the dual coordinate of a tanh that is one rounding unit from saturation."""
    return math.atanh(1 - torch.finfo(dtype).eps / 2)


def gather(like: Lifted, entries: Sequence[Tensor]) -> Lifted:
    """One tensor a level, stacked where ``like`` is."""
    return torch.stack([*entries]) if isinstance(like, Tensor) else entries


@dataclass(frozen=True)
class MDSoftmaxS(MD):
    """Mirror descent, softmax projection in the lifted space, stable form.

    A latent is d numbers a weight, stacked along dimension 0, or d tensors that are not stacked.
    """

    name = "md-softmax-s"
    mirror: Mirror = field(init=False, repr=False, default_factory=Softmax)

    def lift(self, weight: Tensor) -> Tensor:
        """ũ_λ = (q_λ w − q_λ²/2) / r², largest for the level nearest to w; d numbers a weight, along dimension 0.

        Levels are measured from their centre in units of their radius r, so that two levels start, like tanh, at
        (ũ_2 − ũ_1)/2 = w̃.
        """
        w = (weight - self.levels.centre) / self.levels.radius
        q = [(level - self.levels.centre) / self.levels.radius for level in self.levels]
        return torch.stack([level * w - level**2 / 2 for level in q])

    def project(self, latent: Lifted, beta: Beta) -> Tensor:
        """w = q · softmax(β ũ)."""
        return self.collapse(self.probabilities(latent, beta))

    def probabilities(self, latent: Lifted, beta: Beta) -> Lifted:
        """u = softmax(β ũ)."""
        if isinstance(latent, Tensor):
            return self.mirror.project(latent, beta)
        return Softmax().project_each(latent, beta)

    def collapse(self, u: Lifted) -> Tensor:
        """w = Σ_λ q_λ u_λ: from the lifted space to the parameter space."""
        weight = self.levels[0] * u[0]
        for level, probability in zip(self.levels[1:], u[1:], strict=True):
            weight = weight + level * probability
        return weight

    def pull_back(self, grad: Tensor, latent: Lifted, beta: Beta) -> Lifted:
        """dL/du_λ = q_λ dL/dw."""
        return gather(latent, [level * grad for level in self.levels])

    def write(self, weight: Tensor, latent: Lifted, beta: Beta) -> None:
        """weight = q · softmax(β ũ); of two levels on a CPU as q_1 + (q_2 − q_1) σ(β (ũ_2 − ũ_1)), in place."""
        if len(self.levels) == 2 and in_place(weight):
            low, high = self.levels
            torch.sub(latent[1], latent[0], out=weight).mul_(beta).sigmoid_()
            torch.add(torch.tensor(low, device=weight.device), weight, alpha=high - low, out=weight)
        else:
            weight.copy_(self.project(latent, beta))

    def round(self, latent: Lifted, beta: Beta) -> Tensor:
        """The most probable level; a tie goes up, as everywhere, and NaN stays NaN."""
        weight, best = torch.full_like(latent[0], self.levels[0]), latent[0]
        for level, value in zip(self.levels[1:], latent[1:], strict=True):
            weight, best = torch.where(value >= best, level, weight), torch.maximum(best, value)
        return torch.where(best.isnan(), best, weight)


class PMF(MDSoftmaxS):
    """Proximal mean-field: gradient descent through the softmax, true Jacobian β (diag(u) − u uᵀ)."""

    name = "pmf"

    def pull_back(self, grad: Tensor, latent: Lifted, beta: Beta) -> Lifted:
        """dL/dũ_λ = β u_λ (q_λ − w) dL/dw."""
        u = self.probabilities(latent, beta)
        w = self.collapse(u)
        return gather(latent, [beta * u_l * (level - w) * grad for level, u_l in zip(self.levels, u, strict=True)])


class PMFAuthors(MDSoftmaxS):
    """Proximal mean-field as its authors' code computes it, with β (I − u uᵀ)."""

    name = "pmf-authors"

    def pull_back(self, grad: Tensor, latent: Lifted, beta: Beta) -> Lifted:
        """dL/dũ_λ = β (q_λ − u_λ w) dL/dw."""
        u = self.probabilities(latent, beta)
        w = self.collapse(u)
        return gather(latent, [beta * (level - u_l * w) * grad for level, u_l in zip(self.levels, u, strict=True)])


class MDSoftmax(MDSoftmaxS):
    """Mirror descent, softmax projection, primal form (exponentiated gradient, eq:eda).

    The point u of the simplex is kept as log u, up to the constant that softmax ignores.
    """

    name = "md-softmax"

    def project(self, latent: Lifted, beta: Beta) -> Tensor:
        """w = q · u: β is in log u already."""
        return super().project(latent, 1.0)

    def write(self, weight: Tensor, latent: Lifted, beta: Beta) -> None:
        """weight = q · u."""
        super().write(weight, latent, 1.0)

    def step_scale(self, beta: Beta) -> Beta:
        """log u − β D."""
        return beta

    def settle(self, latent: Lifted, beta: Beta, lr: Beta) -> Lifted:
        """log u with its maximum at 0, bounded below like the tanh form's dual coordinate."""
        kind = latent[0].dtype
        finite = torch.finfo(kind).max / 4
        entries = [entry.clamp(-finite, finite) for entry in latent]
        largest = functools.reduce(torch.maximum, entries)
        return gather(latent, [(entry - largest).clamp(min=-2 * dual_bound(kind)) for entry in entries])


class MDSoftmaxPrimal(MDSoftmax):
    """MD-softmax that keeps the primal point in its own precision: a level whose probability is 0 stays out.

    Where that happens is decided by the smallest numbers: near 0 a probability is n times the least one, 2⁻¹⁴⁹ in
    float32, and n = 1 stays what it is until a single step halves it. So weights freeze late.
    """

    name = "md-softmax-primal"
    can_decay = False  # a latent that has reached its level is infinite

    def settle(self, latent: Lifted, beta: Beta, lr: Beta) -> Lifted:
        """log u of the rounded u = softmax(v), which is −∞ where a probability has underflown to 0."""
        return gather(latent, [torch.log(u) for u in self.probabilities(latent, 1.0)])


def refuse_bad_hooks(method: Method, weight: Tensor, beta: Beta, lr: Beta, name: str) -> Tensor:
    """Tries the hooks of a method on one weight and returns its first latent.

    A hook that returns the wrong shape, NaN or anything but floating-point numbers raises an error that names it.

    Args:
        method: the method, custom or not.
        weight: a float32 or float64 copy of the weight.
        beta: the β to start with.
        lr: the learning rate to start with.
        name: the weight's, for the message.
    """
    if bool(weight.isnan().any()):
        raise ValueError(f"{name} holds NaN, so that there is nothing to quantize: initialize or load the model again")
    latent = _checked(method, "lift", name, method.lift(weight))
    if latent.shape[latent.dim() - weight.dim() :] != weight.shape:
        expected = f"{tuple(weight.shape)}, with extra dimensions only in front"
        raise ValueError(_wrong(method, "lift", name, f"shape {tuple(latent.shape)}", expected))
    for hook in ("project", "round"):
        result = _checked(method, hook, name, getattr(method, hook)(latent, beta), weight.shape)
        if not bool(result.isfinite().all()):
            raise ValueError(_wrong(method, hook, name, "inf", "finite numbers"))
    _checked(method, "pull_back", name, method.pull_back(torch.ones_like(weight), latent, beta), latent.shape)
    _checked(method, "settle", name, method.settle(latent.clone(), beta, lr), latent.shape)
    return latent.clone()


def _checked(method: Method, hook: str, name: str, value: object, shape: torch.Size | None = None) -> Tensor:
    """A hook's result, which must be a tensor of floating-point numbers without NaN, of this shape."""
    if not isinstance(value, Tensor):
        raise TypeError(_wrong(method, hook, name, f"a {type(value).__name__}", "a tensor"))
    if not value.is_floating_point():
        raise TypeError(_wrong(method, hook, name, str(value.dtype), "a floating-point dtype"))
    if shape is not None and value.shape != shape:
        raise ValueError(_wrong(method, hook, name, f"shape {tuple(value.shape)}", f"{tuple(shape)}"))
    if bool(value.isnan().any()):
        raise ValueError(_wrong(method, hook, name, "NaN", "numbers"))
    return value.detach()


def _wrong(method: Method, hook: str, name: str, given: str, expected: str) -> str:
    return f"{type(method).__name__}.{hook} returned {given} for {name}, expected {expected}: correct the method"


def get(method: str | Method, levels: Iterable[float] | None = None) -> Method:
    """A method by name, for the given levels (binary by default); a method object as it is.

    >>> get("md-tanh-s", [-1, 0, 1])
    MDTanhS(levels=Levels(-1.0, 0.0, 1.0))
    """
    if isinstance(method, Method):
        if levels is not None and Levels.of(levels) != method.levels:
            raise ValueError(f"{method} brings its own levels, but {Levels.of(levels)} were given too: give one")
        return method
    if method not in Method.registry:
        near = difflib.get_close_matches(str(method), Method.registry, 1)
        hint = f"did you mean {near[0]!r}?" if near else "known are " + ", ".join(Method.registry)
        raise ValueError(f"there is no method {method!r}: {hint}")
    return Method.registry[method](Levels.of(BINARY if levels is None else levels))


def list() -> dict[str, str]:
    """The methods by name, with one line each.

    >>> for name, line in list().items():
    ...     print(f"{name:13} {line}")
    ref           Floating-point reference: nothing is quantized.
    bc            BinaryConnect: sign(w̃) forward, straight-through gradient where w̃ is in the hull.
    ...
    """
    return {name: (cls.__doc__ or "").strip().split("\n")[0] for name, cls in Method.registry.items()}
