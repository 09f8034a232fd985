"""The float reference, BinaryConnect and ProxQuant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mirrorquant.levels import BINARY, TERNARY
from mirrorquant.methods.base import Method, State, nearest_or_nan
from mirrorquant.mirrors import Beta

__all__ = ["BC", "PQ", "REF", "BCClip", "PQLevels"]

TERNARY_THRESHOLD = 0.7  # of mean |w|, as in ternary weight networks


class REF(Method):
    """Floating-point reference: nothing is quantized."""

    name = "ref"
    label = "REF (float)"
    colour = "#555555"
    uses_beta = False
    lowest_beta = 0.0

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """The weight itself."""
        return latent

    def round(self, latent: Tensor, beta: Beta) -> Tensor:
        """The weight itself: there are no levels."""
        return latent


class BC(Method):
    """BinaryConnect: sign(w̃) forward, straight-through gradient where w̃ is in the hull.

    As in the authors' program, a latent that has left the hull stays where it is; :class:`BCClip` keeps them inside.
    Levels with a scale are about as large as the weights, so nearly half of the latents would be outside at once: then
    the gradient passes everywhere.
    """

    name = "bc"
    label = "BC"
    colour = "#cc6677"
    uses_beta = False
    lowest_beta = 0.0

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """The nearest level: sign(w̃) for {−1, 1}."""
        return self.levels.nearest(latent)

    def pull_back(self, grad: Tensor, latent: Tensor, beta: Beta) -> Tensor:
        """dL/dw where q_min ≤ w̃ ≤ q_max, else 0; with a scale dL/dw."""
        if self.scale is not None:
            return grad
        inside = (latent >= self.levels[0]) & (latent <= self.levels[-1])
        return grad * inside if grad.is_sparse else torch.where(inside, grad, 0.0)

    def round(self, latent: Tensor, beta: Beta) -> Tensor:
        """The nearest level; NaN stays NaN."""
        return nearest_or_nan(self.levels, latent)


class BCClip(BC):
    """BinaryConnect with latents that are clipped to the hull, so that none of them is out of the gradient's reach."""

    name = "bc-clip"
    label = "BC, clipped"
    colour = "#aa5533"
    can_follow = False  # the hull would shrink with the scale

    def pull_back(self, grad: Tensor, latent: Tensor, beta: Beta) -> Tensor:
        """dL/dw."""
        return grad

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """The latent, clipped to the hull."""
        return latent.clamp(self.levels[0], self.levels[-1])


class PQ(Method):
    """ProxQuant: a proximal step towards the levels after each gradient step; β is its λ."""

    name = "pq"
    label = "PQ"
    colour = "#ddcc77"
    can_follow = False  # latents are clipped to the hull, which would shrink with them
    uses_beta = False
    lowest_beta = 0.0

    def project(self, latent: Tensor, beta: Beta) -> Tensor:
        """The weight itself: ProxQuant stays in the primal space."""
        return latent

    def settle(self, latent: Tensor, beta: Beta, lr: Beta) -> Tensor:
        """The proximal map of strength r = lr·λ, then a clip to the hull.

        Two levels, W-shaped |w − T(w)| regularizer, T(w) the nearest level: w moves towards T(w) by at most r.
        More levels, its square: (w + r T(w)) / (1 + r).
        """
        moved = self.approach(latent, self.levels.nearest(latent), lr * beta)
        return moved.clamp(self.levels[0], self.levels[-1])

    def approach(self, latent: Tensor, target: Tensor, strength: Beta) -> Tensor:
        """The proximal map of strength r towards the target T(w)."""
        if len(self.levels) > 2:
            return (latent + strength * target) / (1 + strength)
        distance = latent - target
        return target + torch.sign(distance) * torch.relu(distance.abs() - strength)


class PQLevels(PQ):
    """ProxQuant with levels fitted to each tensor: each is the mean of the weights that round to it.

    For three levels, T(w) is upper for w ≥ δ, lower for w ≤ −δ and 0 between, with δ = 0.7 mean |w|; for two, it is
    upper for w ≥ 0 and lower for w < 0. They are recomputed at every step until ``finalize()``.
    """

    name = "pq-levels"
    label = "PQ (fitted levels)"
    colour = "#b8a13b"
    fits_levels = True

    def __post_init__(self) -> None:
        if self.scale is not None:
            raise ValueError(f"scale is {self.scale}, but {self.name} fits its levels to each tensor: leave it out")
        super().__post_init__()
        if self.levels not in (BINARY, TERNARY):
            raise ValueError(f"levels are {self.levels}, but {self.name} fits its own: use [-1, 1] or [-1, 0, 1]")
        object.__setattr__(self, "scale", None)  # that of "binary" and "ternary"

    def start(self, weight: Tensor, latent: Tensor) -> dict[str, Tensor]:
        """The lower and the upper level, and the threshold δ."""
        return {"fitted": self.fit(latent)}

    def fit(self, latent: Tensor) -> Tensor:
        """The levels and the threshold of a tensor; a level that no weight rounds to is placed at the threshold.

        >>> PQLevels((-1, 0, 1)).fit(torch.tensor([-2.0, 0.1, 1.0, 2.0, -0.4]))
        tensor([-2.0000,  1.5000,  0.7700])
        """
        size = latent.abs().mean() if latent.numel() else latent.new_zeros(())
        delta = TERNARY_THRESHOLD * size * (len(self.levels) > 2)
        up = (latent >= delta).to(latent.dtype)
        down = (latent <= -delta).to(latent.dtype) if len(self.levels) > 2 else 1 - up
        least = torch.maximum(delta, torch.full_like(delta, torch.finfo(delta.dtype).tiny))  # levels never meet
        upper, lower = ((latent * part).sum() / part.sum().clamp(min=1) for part in (up, down))
        return torch.stack([torch.minimum(lower, -least), torch.maximum(upper, least), delta])

    def settle(self, latent: Tensor, beta: Beta, lr: Beta, fitted: Tensor | None = None) -> Tensor:
        """The proximal map towards the levels of the tensor as it is now."""
        assert fitted is not None
        self.refit({"latent": latent, "fitted": fitted})
        return self.approach(latent, self.round(latent, beta, fitted), lr * beta)

    def round(self, latent: Tensor, beta: Beta, fitted: Tensor | None = None) -> Tensor:
        """T(w); NaN stays NaN."""
        assert fitted is not None
        lower, upper, delta = fitted.unbind()
        if len(self.levels) == 2:
            weight = torch.where(latent >= 0, upper, lower)
        else:
            weight = torch.where(latent >= delta, upper, torch.where(latent <= -delta, lower, 0.0))
        return torch.where(latent.isnan(), latent, weight)

    def refit(self, state: State) -> None:
        """Fits the levels to the latent again."""
        state["fitted"].copy_(self.fit(state["latent"]))

    def holds(self, weight: Tensor, state: State) -> bool:
        """Whether every entry is one of the tensor's levels."""
        found = [*state["fitted"][:2].to(weight.dtype), *[weight.new_zeros(())] * (len(self.levels) - 2)]
        return bool(torch.stack([weight == level for level in found]).any(0).all())

    def in_units(self, weight: Tensor, state: State) -> Tensor:
        """The weight with the tensor's levels at −1 and +1."""
        lower, upper, _ = state["fitted"]
        return weight / torch.where(weight >= 0, upper, -lower)

    def adopted(self, weight: Tensor, state: State) -> State | None:
        """The state whose levels are the extremes of the weight, if all its entries are levels."""
        fitted: Tensor = state["fitted"].clone()
        wide = weight.to(fitted.dtype)
        if wide.numel():
            low, high = wide.aminmax()
            fitted[0], fitted[1] = torch.where(low < 0, low, fitted[0]), torch.where(high > 0, high, fitted[1])
        fitted[2] = torch.minimum(-fitted[0], fitted[1]) / 2 * (len(self.levels) > 2)
        found: dict[str, Any] = {**state, "latent": wide.clone(), "fitted": fitted}
        return found if self.holds(weight, found) else None
