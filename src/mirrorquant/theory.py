"""The theory: Theorem 2's step size and bound for mirror descent with annealed β, and the proposition's γ.

Theorem 2. Let Φ be ρ-strongly convex on X, R² = sup Φ − min Φ over X, x⁰ the minimizer of Φ, and f convex and
L-Lipschitz. Mirror descent with Φ/β_k, 1 ≤ β_0 ≤ β_1 ≤ ... ≤ B, and the constant ``step_size`` η keeps the average of t
iterates within ``bound`` of the optimum. For the tanh mirror map on [−1, 1]^r with the Euclidean norm, ρ = 1 and
R² = r log 2.

>>> R = math.sqrt(math.log(2))
>>> eta = step_size(R=R, L=4.0, rho=1.0, B=4.0, t=1000)
>>> round(eta, 6), round(bound(R=R, L=4.0, rho=1.0, B=4.0, t=1000), 6)
(0.004654, 0.297864)
"""

from __future__ import annotations

import math

__all__ = ["bound", "gamma", "softmax_gamma", "step_size"]


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}, but it must be a positive finite number")
    if values["B"] < 1:
        raise ValueError(f"B is {values['B']}, but it bounds the annealed β from above and must be at least 1")
    if values.get("epsilon", 0) >= 1:
        raise ValueError(f"epsilon is {values['epsilon']}, but it must lie between 0 and 1")


def step_size(*, R: float, L: float, rho: float, B: float, t: int) -> float:
    """Theorem 2's learning rate η = (R / L) √(2ρ / (B t)).

    Args:
        R: root of the range of Φ over X.
        L: Lipschitz constant of f.
        rho: strong convexity of Φ.
        B: largest β.
        t: number of iterations.
    """
    _check(R=R, L=L, rho=rho, B=B, t=t)
    return R / L * math.sqrt(2 * rho / (B * t))


def bound(*, R: float, L: float, rho: float, B: float, t: int) -> float:
    """Theorem 2's bound f(mean of x⁰ ... xᵗ⁻¹) − f(x*) ≤ R L √(2B / (ρ t)); arguments as in ``step_size``."""
    _check(R=R, L=L, rho=rho, B=B, t=t)
    return R * L * math.sqrt(2 * B / (rho * t))


def gamma(*, B: float, epsilon: float) -> float:
    """The proposition's γ = atanh(1 − ε) / B: any |w̃| > γ has 1 − |tanh(B w̃)| < ε.

    >>> g = gamma(B=100.0, epsilon=1e-3)
    >>> 1 - math.tanh(100.0 * 1.0001 * g) < 1e-3
    True
    """
    _check(B=B, epsilon=epsilon)
    return 0.5 * math.log((2 - epsilon) / epsilon) / B


def softmax_gamma(*, B: float, epsilon: float, d: int) -> float:
    """The same for softmax on d levels, γ = log((d − 1)(1 − ε) / ε) / B, or 0 if that is negative.

    If the largest entry of ũ exceeds the others by more than γ, 1 − max softmax(B ũ) < ε.

    >>> import torch
    >>> g = softmax_gamma(B=100.0, epsilon=1e-3, d=3)
    >>> bool(1 - torch.softmax(100 * torch.tensor([0, 0, 1.0001 * g]), 0).max() < 1e-3)
    True
    """
    _check(B=B, epsilon=epsilon)
    if d < 2:
        raise ValueError(f"d is {d}, but there must be at least 2 levels")
    return max(0.0, math.log((d - 1) * (1 - epsilon) / epsilon)) / B
