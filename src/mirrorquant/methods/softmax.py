"""The softmax family, in the lifted space: MD-softmax-S, MD-softmax and proximal mean-field."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mirrorquant.levels import BINARY
from mirrorquant.methods.tanh import MD, dual_bound
from mirrorquant.mirrors import Beta, Mirror, Softmax

__all__ = ["PMF", "MDSoftmax", "MDSoftmaxBounded", "MDSoftmaxS", "PMFExact"]


@dataclass(frozen=True, repr=False)
class MDSoftmaxS(MD):
    """Mirror descent, softmax projection in the lifted space, stable form.

    A latent has d numbers per weight, stacked along dimension 0.
    """

    name = "md-softmax-s"
    label = "MD-softmax-S"
    colour = "#117733"
    can_follow = False
    lifts = True
    mirror: Mirror = field(init=False, default_factory=Softmax)

    def lift(self, weight: Tensor) -> Tensor:
        """ũ_λ = (q_λ w − q_λ²/2) / r², largest for the level nearest to w.

        Levels are measured from their centre in units of their radius r, so two levels start, like tanh, at
        (ũ_2 − ũ_1)/2 = w̃.
        """
        w = (weight - self.levels.centre) / self.levels.radius
        q = [(level - self.levels.centre) / self.levels.radius for level in self.levels]
        return torch.stack([level * w - level**2 / 2 for level in q])

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """w = q · softmax(β ũ); for two levels as their centre + radius · tanh(β (ũ_2 − ũ_1) / 2), which is faster."""
        if len(self.levels) > 2:
            return self.collapse(self.mirror.project(latent, beta))
        weight = torch.tanh(beta * ((latent[1] - latent[0]) / 2))
        return weight if self.levels == BINARY else self.levels.centre + self.levels.radius * weight

    def collapse(self, u: Tensor) -> Tensor:
        """w = Σ_λ q_λ u_λ: from the lifted space to the parameter space."""
        weight = self.levels[0] * u[0]
        for level, probability in zip(self.levels[1:], u[1:], strict=True):
            weight = weight + level * probability
        return weight

    def pull_back(self, grad: Tensor, latent: Tensor, beta: Beta) -> Tensor:
        """dL/du_λ = q_λ dL/dw."""
        return torch.stack([level * grad for level in self.levels])

    def round(self, latent: Tensor, beta: Beta) -> Tensor:
        """The most probable level; a tie goes up, as everywhere, and NaN stays NaN."""
        weight, best = torch.full_like(latent[0], self.levels[0]), latent[0]
        for level, value in zip(self.levels[1:], latent[1:], strict=True):
            weight, best = torch.where(value >= best, level, weight), torch.maximum(best, value)
        return torch.where(best.isnan(), best, weight)


class PMF(MDSoftmaxS):
    """Proximal mean-field as its authors' code computes it, with β (I − u uᵀ)."""

    name = "pmf"
    label = "PMF"
    colour = "#aa4499"

    def pull_back(self, grad: Tensor, latent: Tensor, beta: Beta) -> Tensor:
        """dL/dũ_λ = β (q_λ − u_λ w) dL/dw."""
        u = self.mirror.project(latent, beta)
        w = self.collapse(u)
        return torch.stack([beta * self.slope(*pair, w) * grad for pair in zip(self.levels, u, strict=True)])

    def slope(self, level: float, u: Tensor, w: Tensor) -> Tensor:
        """dw/dũ_λ, divided by β."""
        return level - u * w


class PMFExact(PMF):
    """Proximal mean-field: gradient descent through the softmax, true Jacobian β (diag(u) − u uᵀ)."""

    name = "pmf-exact"
    label = "PMF, exact"
    colour = "#882255"

    def slope(self, level: float, u: Tensor, w: Tensor) -> Tensor:
        """u_λ (q_λ − w): dL/dũ_λ = β u_λ (q_λ − w) dL/dw."""
        return u * (level - w)


class MDSoftmax(MDSoftmaxS):
    """Mirror descent, softmax projection, primal form (exponentiated gradient, eq:eda).

    The point u of the simplex is kept as log u, in which a step is log u − β D. As in the printed form, a level whose
    probability becomes 0 stays out: near 0 a probability is n times the least number, 2⁻¹⁴⁹ in float32, and n = 1 stays
    until a single step halves it. So weights freeze late.
    """

    name = "md-softmax"
    label = "MD-softmax"
    colour = "#44aa99"
    can_decay = False  # a latent that has reached its level is infinite

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """w = q · u: β is in log u already."""
        return super().project(latent, 1.0)

    def step_scale(self, beta: Beta) -> Beta:
        """log u − β D."""
        return beta

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """log u of the rounded u = softmax(v), which is −∞ where a probability has underflown to 0."""
        return torch.log(self.mirror.project(latent, 1.0))


class MDSoftmaxBounded(MDSoftmax):
    """MD-softmax that never freezes: log u is bounded below like the tanh form's dual coordinate."""

    name = "md-softmax-bounded"
    label = "MD-softmax, bounded"
    colour = "#228833"
    can_decay = True

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """log u with its maximum at 0, bounded below."""
        finite = torch.finfo(latent.dtype).max / 4
        latent = latent.clamp(-finite, finite)
        return (latent - latent.amax(0, keepdim=True)).clamp(min=-2 * dual_bound(latent.dtype))
