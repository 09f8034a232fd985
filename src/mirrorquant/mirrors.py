r"""Mirrors: a projection with its mathematics (the paper's framework section, tab:eg_projns, Theorem 1).

A mirror turns a strictly increasing projection P from the dual space (unconstrained auxiliary variables) onto the
primal space (the convex hull of the levels) into a mirror map. With the annealing hyperparameter β ≥ 1:

=============  ==========================================  =====================================================
``project``    w = P_β(w̃)                                  dual to primal
``inverse``    w̃ = P_β⁻¹(w) = ∇Φ_β(w)                      primal to dual
``potential``  Φ_β(w) = ∫ P_β⁻¹                            the mirror map (up to a constant)
``divergence`` D(p, q) = Φ(p) − Φ(q) − ⟨∇Φ(q), p − q⟩      its Bregman divergence (eq:bg)
``primal_step`` argmin_w ⟨s, w⟩ + D(w, wᵏ)                 the mirror descent update (eq:mdprox) for a step s = η g
=============  ==========================================  =====================================================

All functions are elementwise, take β as a float or a tensor, keep dtype and device, compute half precisions in
float32, and stay finite up to β = 1e35: a primal point is kept one rounding unit inside its open interval, which bounds
its dual coordinate.

>>> tanh = Tanh()
>>> w = torch.tensor([-0.5, 0.0, 0.9])
>>> tanh.project(tanh.inverse(w, beta=3.0), beta=3.0)
tensor([-0.5000,  0.0000,  0.9000])
>>> tanh.primal_step(w, step=torch.full((3,), 0.1), beta=10.0)
tensor([-0.9137, -0.7616,  0.4400])

A new projection needs one method; the rest follows numerically (Theorem 1):

>>> arctan = mirror_from(lambda x: 2 / torch.pi * torch.atan(x), interval=(-1, 1))
>>> arctan.inverse(torch.tensor([0.5]))
tensor([1.])
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mirrorquant.levels import Levels

__all__ = ["Beta", "Mirror", "NumericalMirror", "ShiftedTanh", "Sigmoid", "Softmax", "Tanh", "mirror_from"]

Beta = float | Tensor


def _in_full_precision(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Computes half-precision arguments in float32 and rounds the result once, at the end."""
    first = list(inspect.signature(function).parameters)[1]

    @functools.wraps(function)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        point: Tensor = args[0] if args else kwargs[first]
        if point.dtype.itemsize >= 4:
            return function(self, *args, **kwargs)
        wide = [a.float() if isinstance(a, Tensor) else a for a in args]
        kwargs = {k: v.float() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        return function(self, *wide, **kwargs).to(point.dtype)

    return wrapped


class Mirror:
    """A projection and the mirror map derived from it; ``interval`` is its range, if that is an interval.

    The methods of subclasses compute half precisions in float32.
    """

    interval: tuple[float, float] | None = None

    def __init_subclass__(cls) -> None:
        for name in {"project", "inverse", "potential", "divergence", "derivative"} & set(vars(cls)):
            setattr(cls, name, _in_full_precision(vars(cls)[name]))

    def project(self, dual: Tensor, beta: Beta = 1.0) -> Tensor:
        """w = P_β(w̃)."""
        raise NotImplementedError

    def inverse(self, primal: Tensor, beta: Beta = 1.0) -> Tensor:
        """w̃ = P_β⁻¹(w) = ∇Φ_β(w)."""
        raise NotImplementedError

    def potential(self, primal: Tensor, beta: Beta = 1.0) -> Tensor:
        """Φ_β(w), the mirror map, elementwise (summed over the simplex for softmax)."""
        raise NotImplementedError

    def divergence(self, p: Tensor, q: Tensor, beta: Beta = 1.0) -> Tensor:
        """D(p, q) = Φ_β(p) − Φ_β(q) − ⟨∇Φ_β(q), p − q⟩ (eq:bg), without its cancellation."""
        raise NotImplementedError

    def derivative(self, dual: Tensor, beta: Beta = 1.0) -> Tensor:
        """P_β'(w̃), elementwise: the Jacobian that mirror descent leaves out."""
        with torch.enable_grad():
            point = dual.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.project(point, beta).sum(), point)
        return slope

    @_in_full_precision
    def primal_step(self, primal: Tensor, step: Tensor, beta: Beta = 1.0) -> Tensor:
        """argmin_w ⟨step, w⟩ + D(w, primal) = P_β(P_β⁻¹(primal) − step), the update of eq:md1 and eq:mdprox.

        The closed forms of tab:eg_projns, evaluated in the dual coordinate: as printed they stick at the boundary
        and overflow in the exponential.
        """
        return self.project(self.inverse(primal, beta) - step, beta)


def _xlog1px(x: Tensor) -> Tensor:
    """(1 + x) log(1 + x), with 0 log 0 = 0."""
    product: Tensor = torch.special.xlog1py(1 + x, x)
    return product


def relative_entropy(difference: Tensor, q: Tensor) -> Tensor:
    """p log(p/q) − p + q for p = q + difference: never negative, and no cancellation when p is close to q."""
    q = q.clamp(min=torch.finfo(q.dtype).tiny)
    p = (q + difference).clamp(min=0)
    exact = torch.xlogy(p, p / q) - difference
    r = (difference / q).clamp(-0.01, 0.01)
    series = difference * r * (1 / 2 - r * (1 / 6 - r * (1 / 12 - r * (1 / 20 - r * (1 / 30 - r / 42)))))
    return torch.where(r.abs() < 0.01, series, exact)


@dataclass(frozen=True)
class Tanh(Mirror):
    """w = tanh(β w̃) on (−1, 1): the paper's Example 1, for the levels {−1, 1}.

    Φ_β(w) = [(1+w) log(1+w) + (1−w) log(1−w)] / 2β.
    """

    interval = (-1.0, 1.0)

    def project(self, dual: Tensor, beta: Beta = 1.0) -> Tensor:
        """tanh(β w̃)."""
        return torch.tanh(beta * dual)

    def inverse(self, primal: Tensor, beta: Beta = 1.0) -> Tensor:
        """log((1+w) / (1−w)) / 2β."""
        edge = 1 - torch.finfo(primal.dtype).eps / 2
        return torch.atanh(primal.clamp(-edge, edge)).div(beta)

    def potential(self, primal: Tensor, beta: Beta = 1.0) -> Tensor:
        """[(1+w) log(1+w) + (1−w) log(1−w)] / 2β (eq:tanhmm)."""
        return (_xlog1px(primal) + _xlog1px(-primal)) / 2 / beta

    def divergence(self, p: Tensor, q: Tensor, beta: Beta = 1.0) -> Tensor:
        """[(1+p) log((1+p)/(1+q)) + (1−p) log((1−p)/(1−q))] / 2β."""
        return (relative_entropy(p - q, 1 + q) + relative_entropy(q - p, 1 - q)) / 2 / beta

    def derivative(self, dual: Tensor, beta: Beta = 1.0) -> Tensor:
        """P_β'(w̃) = β (1 − tanh²(β w̃))."""
        return beta * (1 - torch.tanh(beta * dual).square())


@dataclass(frozen=True)
class Sigmoid(Mirror):
    """w = σ(β w̃) on (0, 1), with Φ_β(w) = [w log w + (1−w) log(1−w)] / β."""

    interval = (0.0, 1.0)

    def project(self, dual: Tensor, beta: Beta = 1.0) -> Tensor:
        """1 / (1 + exp(−β w̃))."""
        return torch.sigmoid(beta * dual)

    def inverse(self, primal: Tensor, beta: Beta = 1.0) -> Tensor:
        """log(w / (1−w)) / β."""
        precision = torch.finfo(primal.dtype)
        return torch.logit(primal.clamp(precision.tiny, 1 - precision.eps / 2)).div(beta)

    def potential(self, primal: Tensor, beta: Beta = 1.0) -> Tensor:
        """[w log w + (1−w) log(1−w)] / β."""
        return (torch.xlogy(primal, primal) + _xlog1px(-primal)) / beta

    def divergence(self, p: Tensor, q: Tensor, beta: Beta = 1.0) -> Tensor:
        """[p log(p/q) + (1−p) log((1−p)/(1−q))] / β."""
        return (relative_entropy(p - q, q) + relative_entropy(q - p, 1 - q)) / beta


@dataclass(frozen=True)
class Softmax(Mirror):
    """u = softmax(β ũ) on the simplex: the paper's Example 2, in the lifted space.

    Dimension 0 runs over the d levels. Φ_β(u) = [Σ u log u − u] / β is the negative entropy, and the update is
    exponentiated gradient descent (eq:eda). The inverse is the representative log(u)/β of eq:sminv.
    """

    def project(self, dual: Tensor, beta: Beta = 1.0) -> Tensor:
        """exp(β ũ_λ) / Σ exp(β ũ_μ); the largest entry is subtracted first, so no β overflows."""
        return torch.softmax(beta * (dual - dual.amax(0, keepdim=True)), 0)

    def inverse(self, primal: Tensor, beta: Beta = 1.0) -> Tensor:
        """log(u) / β."""
        return torch.log(primal.clamp(min=torch.finfo(primal.dtype).tiny)) / beta

    def potential(self, primal: Tensor, beta: Beta = 1.0) -> Tensor:
        """Σ_λ [u_λ log u_λ − u_λ] / β (eq:smmm)."""
        return (torch.xlogy(primal, primal) - primal).sum(0) / beta

    def divergence(self, p: Tensor, q: Tensor, beta: Beta = 1.0) -> Tensor:
        """Σ_λ p_λ log(p_λ/q_λ) / β: the Kullback-Leibler divergence."""
        return relative_entropy(p - q, q).sum(0) / beta

    def derivative(self, dual: Tensor, beta: Beta = 1.0) -> Tensor:
        """Not elementwise: the Jacobian is the matrix β (diag(u) − u uᵀ)."""
        raise NotImplementedError("the softmax Jacobian is a matrix, β (diag(u) − u uᵀ): methods.PMFExact applies it")


class NumericalMirror(Mirror):
    """A mirror that is given by its projection, ``interval``, ``bracket`` and ``between``; the rest is numerical."""

    def bracket(self, primal: Tensor, beta: Beta) -> tuple[Tensor, Tensor]:
        """Two dual points with P(low) ≤ w ≤ P(high)."""
        raise NotImplementedError

    def between(self, x: Tensor, y: Tensor, beta: Beta) -> Tensor:
        """D(P(x), P(y)) = ∫ (P(s) − P(x)) ds from x to y, two dual points in float64."""
        raise NotImplementedError

    def inverse(self, primal: Tensor, beta: Beta = 1.0) -> Tensor:
        """The root of P_β(x) = w, by bisection in float64; differentiable in w."""
        x = self._root(primal, beta)
        if primal.requires_grad:  # by the inverse function theorem, dx/dw = 1 / P'(x)
            x = x + (primal.double() - primal.detach()) / self.derivative(x, beta)
        return x.to(primal.dtype)

    def potential(self, primal: Tensor, beta: Beta = 1.0) -> Tensor:
        """Φ_β(w) = D(w, P_β(0)), where ∇Φ_β is 0; its own gradient is x = P_β⁻¹(w), by the envelope theorem."""
        w, x = primal.double(), self._root(primal, beta)
        return (self.between(x, torch.zeros_like(x), beta) + x * (w - w.detach())).to(primal.dtype)

    def divergence(self, p: Tensor, q: Tensor, beta: Beta = 1.0) -> Tensor:
        """D(p, q), between the dual points."""
        return self.between(self._root(p, beta), self._root(q, beta), beta).to(p.dtype)

    @torch.no_grad()
    def _root(self, primal: Tensor, beta: Beta) -> Tensor:
        """P_β⁻¹ in float64, of a point that is kept one rounding unit of its dtype inside the interval."""
        assert self.interval is not None
        unit = torch.finfo(primal.dtype).eps * (self.interval[1] - self.interval[0]) / 4
        w = primal.double().clamp(self.interval[0] + unit, self.interval[1] - unit)
        low, high = (torch.asinh(edge) for edge in self.bracket(w, beta))
        for _ in range(64):
            middle = (low + high) / 2
            left = self.project(torch.sinh(middle), beta) < w
            low, high = torch.where(left, middle, low), torch.where(left, high, middle)
        return torch.sinh((low + high) / 2)


def _integrate(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, panels: int = 64) -> Tensor:
    """∫ function(s) ds by Gauss-Legendre panels, uniform in θ = asinh(s): fine near zero, far-reaching in the tails."""
    nodes = (0.1834346424956498, 0.5255324099163290, 0.7966664774136267, 0.9602898564975363)
    weights = (0.3626837833783620, 0.3137066458778873, 0.2223810344533745, 0.1012285362903763)
    start, width = torch.asinh(low), (torch.asinh(high) - torch.asinh(low)) / panels
    total = torch.zeros_like(start)
    for panel in range(panels):
        for node, weight in zip(nodes, weights, strict=True):
            for side in (-node, node):
                theta = start + width * (panel + (1 + side) / 2)
                total = total + weight / 2 * torch.cosh(theta) * function(torch.sinh(theta))
    return width * total


@dataclass(frozen=True)
class ShiftedTanh(NumericalMirror):
    """A sum of tanh steps between the levels of any ordered set: the paper's Example 3, generalized.

    With levels q_1 < ... < q_d, thresholds t_i halfway between neighbours, centre c and radius r of their hull,

        P_β(w̃) = c + Σ_i (q_{i+1} − q_i)/2 · tanh(β (w̃ − t_i) / r).

    {−1, 0, 1} gives the paper's ternary projection with its ±0.5 thresholds, {−1, 1} gives tanh(β w̃); scaling or
    shifting the levels scales and shifts the projection.

    >>> ternary = ShiftedTanh(Levels(-1, 0, 1))
    >>> ternary.project(torch.tensor([-0.7, 0.0, 0.7]), beta=20.0)
    tensor([-0.9997,  0.0000,  0.9997])
    """

    levels: Levels

    @property
    def interval(self) -> tuple[float, float]:  # type: ignore[override]
        """From the lowest level to the highest."""
        return self.levels[0], self.levels[-1]

    def steps(self, dual: Tensor, beta: Beta) -> list[tuple[float, Tensor]]:
        """Each step's half height (q_{i+1} − q_i)/2 with its tanh(β (w̃ − t_i) / r)."""
        q = self.levels
        heights = [(high - low) / 2 for low, high in pairwise(q)]
        return [(h, torch.tanh(beta * ((dual - t) / q.radius))) for h, t in zip(heights, q.thresholds, strict=True)]

    def project(self, dual: Tensor, beta: Beta = 1.0) -> Tensor:
        """c + Σ_i (q_{i+1} − q_i)/2 · tanh(β (w̃ − t_i) / r)."""
        (height, step), *rest = self.steps(dual, beta)
        total = height * step
        for height, step in rest:
            total = total + height * step
        return total + self.levels.centre if self.levels.centre else total

    def derivative(self, dual: Tensor, beta: Beta = 1.0) -> Tensor:
        """P_β'(w̃) = β/r · Σ_i (q_{i+1} − q_i)/2 · (1 − tanh²(β (w̃ − t_i) / r))."""
        slope = sum((h * (1 - step.square()) for h, step in self.steps(dual, beta)), torch.zeros_like(dual))
        return beta * (slope / self.levels.radius)

    def bracket(self, primal: Tensor, beta: Beta) -> tuple[Tensor, Tensor]:
        """All steps at the first threshold rise earliest, all at the last one latest; the root lies between."""
        q = self.levels
        rise = q.radius * Tanh().inverse((primal - q.centre) / q.radius, beta)
        return q.thresholds[0] + rise, q.thresholds[-1] + rise

    def between(self, x: Tensor, y: Tensor, beta: Beta) -> Tensor:
        """The tanh divergences of the single steps, weighted with their heights: each term is non-negative.

        A step's (1 ± tanh z)/2 are σ(±2z), which keep their precision where the step saturates; where they underflow,
        their logarithms do not.
        """
        scale = 2 * beta / self.levels.radius
        total = torch.zeros_like(x)
        for low, high, t in zip(self.levels, self.levels[1:], self.levels.thresholds, strict=False):
            for side in (-scale, scale):
                z_p, z_q = side * (x - t), side * (y - t)
                a, b = torch.sigmoid(z_p), torch.sigmoid(z_q)
                far = a * (F.logsigmoid(z_p) - F.logsigmoid(z_q)) - (a - b)
                total = total + (high - low) * torch.where(z_q < -700, far, relative_entropy(a - b, b))
        return total / scale


@dataclass(frozen=True)
class _FromProjection(NumericalMirror):
    """The result of ``mirror_from``: P_β(x) = P(β x), so P_β⁻¹, Φ_β and D_β are those of β = 1 divided by β."""

    projection: Callable[[Tensor], Tensor]
    interval: tuple[float, float]

    def project(self, dual: Tensor, beta: Beta = 1.0) -> Tensor:
        """P(β w̃), in float64."""
        return self.projection(beta * dual.double()).to(dual.dtype)

    def bracket(self, primal: Tensor, beta: Beta) -> tuple[Tensor, Tensor]:
        """The whole line."""
        far = torch.full_like(primal, 1e100)
        return -far, far

    def between(self, x: Tensor, y: Tensor, beta: Beta) -> Tensor:
        """The integral at β = 1, whose integrand keeps its sign, divided by β."""
        low = self.projection(beta * x)
        return _integrate(lambda s: self.projection(s) - low, beta * x, beta * y) / beta

    def _root(self, primal: Tensor, beta: Beta) -> Tensor:
        return super()._root(primal, 1.0) / beta


def mirror_from(projection: Callable[[Tensor], Tensor], interval: tuple[float, float]) -> Mirror:
    """Theorem 1 in code: a mirror from any strictly increasing map of the real line onto an open interval.

    ``projection`` is called with float64 tensors, elementwise. Inverse, potential and divergence are derived
    numerically, to about 1e-6 for maps that rise around zero, over a scale of order one. A map that is not
    increasing or does not reach the ends of its interval raises an error.

    >>> mirror = mirror_from(torch.tanh, (-1, 1))
    >>> mirror.potential(torch.tensor([0.5])), Tanh().potential(torch.tensor([0.5]))
    (tensor([0.1308]), tensor([0.1308]))
    >>> mirror_from(lambda x: 0.9 * torch.tanh(x), (-1, 1))
    Traceback (most recent call last):
        ...
    ValueError: the projection runs from -0.9 to 0.9, but Theorem 1 needs a map onto the interval (-1, 1)...
    """
    low, high = map(float, interval)
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"the interval is ({low:g}, {high:g}), but Theorem 1 needs a finite open one, as in (-1, 1)")
    tail = torch.logspace(1, 100, 199, dtype=torch.float64)
    grid = torch.cat([-tail.flip(0), torch.linspace(-9.99, 9.99, 2000, dtype=torch.float64), tail])
    values = projection(grid)
    if values.shape != grid.shape or not bool(torch.isfinite(values).all()):
        raise ValueError("the projection must map each real number to one finite number: check it for NaN and shape")
    slack = 1e-6 * (high - low)
    onto = abs(float(values[0]) - low) <= slack and abs(float(values[-1]) - high) <= slack
    inside = (values[:-1] > low + slack) & (values[1:] < high - slack)
    flat = (values.diff() < 0) | (inside & (values.diff() == 0) & onto)
    if bool(flat.any()):
        stop = float(grid[:-1][flat][0])
        raise ValueError(f"the projection does not rise at {stop:.6g}, but Theorem 1 needs a strictly increasing map")
    if not onto:
        raise ValueError(
            f"the projection runs from {values[0]:.6g} to {values[-1]:.6g}, but Theorem 1 needs a map onto the "
            f"interval ({low:g}, {high:g}): rescale the map or name the interval that it fills"
        )
    mirror = _FromProjection(projection, (low, high))
    w = torch.linspace(low + slack, high - slack, 10001, dtype=torch.float64)
    x = mirror.inverse(w)
    missed = (projection(x) - w).abs()
    if float(missed.max()) > slack:
        jump = float(x[missed.argmax()])
        raise ValueError(f"the projection jumps at {jump:.6g}, but Theorem 1 needs a continuous map")
    beyond = x[[0, -1]] + x[[0, -1]].abs() * torch.tensor([-0.001, 0.001], dtype=torch.float64)
    if bool((projection(beyond) == values[[0, -1]]).any()):  # it reaches its end with a slope, as a clip does
        raise ValueError("the projection reaches an end, but a strictly increasing map, as of Theorem 1, never arrives")
    return mirror
