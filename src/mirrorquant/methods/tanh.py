"""Mirror descent with any mirror, and the tanh family: MD-tanh-S, GD-tanh and MD-tanh."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mirrorquant.levels import BINARY
from mirrorquant.methods.base import Method, nearest_or_nan
from mirrorquant.mirrors import Beta, Mirror, ShiftedTanh, Tanh

__all__ = ["MD", "GDTanh", "MDTanh", "MDTanhBounded", "MDTanhS"]

_REACH = 3.0  # of tanh's latents: atanh(INSIDE) is 2.99


@dataclass(frozen=True, repr=False)
class MD(Method):
    """Mirror descent with any mirror, in the numerically stable form (eq:mdhybridgd)."""

    mirror: Mirror = field(default_factory=Tanh)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self) is MD and self.mirror.interval != (self.levels[0], self.levels[-1]):
            ends = f"the levels run from {self.levels[0]:g} to {self.levels[-1]:g}"
            remedy = "use levels that end where the mirror does"
            raise ValueError(f"the mirror maps onto {self.mirror.interval}, but {ends}: {remedy}")

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """w = P_β(w̃)."""
        return self.mirror.project(latent, beta)

    def invert(self, weight: Tensor, beta: Beta) -> Tensor:
        """w̃ = P_β⁻¹(w), at most three times as far from P_β⁻¹(centre) as the tangent there takes to leave the hull.

        The far ends of tanh are just inside that. Those of arctan would be 40 times as far, and set the scale alone.
        """
        centre = self.mirror.inverse(weight.new_tensor(self.levels.centre), beta)
        reach = _REACH * self.levels.radius / self.mirror.derivative(centre, beta)
        return torch.clamp(self.mirror.inverse(weight, beta), centre - reach, centre + reach)


@dataclass(frozen=True, repr=False)
class MDTanhS(MD):
    """Mirror descent, (shifted) tanh projection, stable form (Algorithm 2)."""

    name = "md-tanh-s"
    label = "MD-tanh-S"
    colour = "#332288"
    mirror: Mirror = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mirror", Tanh() if self.levels == BINARY else ShiftedTanh(self.levels))

    def round(self, latent: Tensor, beta: Beta) -> Tensor:
        """The level nearest to w̃, where annealing leads: sign(w̃) for {−1, 1}; NaN stays NaN."""
        return nearest_or_nan(self.levels, latent)


class GDTanh(MDTanhS):
    """Gradient descent through the (shifted) tanh projection."""

    name = "gd-tanh"
    label = "GD-tanh"
    colour = "#999933"

    def pull_back(self, grad: Tensor, latent: Tensor, beta: Beta) -> Tensor:
        """dL/dw · P_β'(w̃), which is β (1 − w²) for tanh."""
        return grad * self.mirror.derivative(latent, beta)


class MDTanh(MDTanhS):
    """Mirror descent, tanh projection, primal form (Algorithm 1); two levels.

    The primal point w is kept as its dual coordinate v = P_1⁻¹(w), in which the closed form of tab:eg_projns is
    v − β D: unlike the stable form, it accumulates Σ β_k D_k.

    A weight that reaches its level stays there, as in the printed form w = (E − 1) / (E + 1) with
    E = (1 + w)/(1 − w) exp(−2 β D) = e^{2v}. In floating point E absorbs the 1, from 2²⁴ on in float32 (v = 8.3); then
    w is ±1, from where the closed form never leads away. So weights freeze one after the other as β grows.
    """

    name = "md-tanh"
    label = "MD-tanh"
    colour = "#88ccee"
    can_decay = False  # a latent that has reached its level is infinite
    can_follow = False  # and grows with β

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.levels) != 2:
            remedy = "use md-tanh-s (any levels), or md-softmax (primal, any levels)"
            raise ValueError(f"{self.name} has a closed form for two levels only, not for {self.levels}: {remedy}")

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """w = P_1(v): β is in v already."""
        return self.mirror.project(latent, 1.0)

    def step_scale(self, beta: Beta) -> Beta:
        """v − β D."""
        return beta

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """v = P_1⁻¹(w) of w = (E − 1) / (E + 1), each operation rounded; infinite where w is a level."""
        centre, radius = self.levels.centre, self.levels.radius
        v = ((latent - centre) / radius).clamp(-20, 20)  # e^40 and e^-40 absorb and are absorbed by 1
        e = torch.exp(2 * v)
        above, below = e + 1, e - 1
        # The same quotient, but right to the last bit where w is near ±1 even if a compiler divides approximately.
        w = torch.where(v > 0, 1 - (above - below) / above, (above + below) / above - 1)
        return centre + radius * torch.atanh(w)


class MDTanhBounded(MDTanh):
    """MD-tanh that neither freezes nor overflows: weights keep moving, with ever longer steps β D."""

    name = "md-tanh-bounded"
    label = "MD-tanh, bounded"
    colour = "#4477aa"
    can_decay = True

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """v bounded where w is one rounding unit from its level."""
        bound = self.levels.radius * dual_bound(latent.dtype)
        return latent.clamp(self.levels.centre - bound, self.levels.centre + bound)


def dual_bound(dtype: torch.dtype) -> float:
    """atanh of the largest number below 1: the dual coordinate of a tanh that is one rounding unit from saturation."""
    return math.atanh(1 - torch.finfo(dtype).eps / 2)
