"""The float reference, BinaryConnect and ProxQuant."""

from __future__ import annotations

import torch
from torch import Tensor

from mirrorquant.methods.base import Method, nearest_or_nan
from mirrorquant.mirrors import Beta

__all__ = ["BC", "PQ", "REF"]


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
    """BinaryConnect: sign(w̃) forward, straight-through gradient where w̃ is in the hull."""

    name = "bc"
    label = "BC"
    colour = "#cc6677"
    uses_beta = False
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
        strength, target = lr * beta, self.levels.nearest(latent)
        if len(self.levels) == 2:
            distance = latent - target
            latent = target + torch.sign(distance) * torch.relu(distance.abs() - strength)
        else:
            latent = (latent + strength * target) / (1 + strength)
        return latent.clamp(self.levels[0], self.levels[-1])
