"""Theorem 2 and the proposition, and the paper's convex example (fig:md-pq)."""

import math

import pytest
import torch
from torch import nn

import mirrorquant as mq
from mirrorquant import theory
from mirrorquant.mirrors import Tanh


def test_theorem_2_is_never_violated_on_random_convex_problems():
    """1,000 problems of five dimensions with annealed β, all at once."""
    generator = torch.Generator().manual_seed(0)
    problems, r, t = 1000, 5, 300
    slopes = torch.rand(problems, 8, r, generator=generator, dtype=torch.float64) * 4 - 2
    optimum = torch.rand(problems, 1, r, generator=generator, dtype=torch.float64) * 2 - 1

    def f(x):  # the largest of eight absolute affine functions that all vanish at the optimum: f(x*) = 0
        return (slopes * (x[:, None] - optimum)).sum(-1).abs().amax(-1)

    lipschitz = slopes.norm(dim=-1).amax(-1, keepdim=True)
    largest = torch.rand(problems, 1, generator=generator, dtype=torch.float64) * 20 + 1
    radius = math.sqrt(r * math.log(2))
    pairs = torch.cat([lipschitz, largest], 1).tolist()
    constants = [{"R": radius, "L": lip, "rho": 1.0, "B": b, "t": t} for lip, b in pairs]
    eta = torch.tensor([[theory.step_size(**known)] for known in constants], dtype=torch.float64)
    x = torch.zeros(problems, r, dtype=torch.float64)
    total = torch.zeros_like(x)
    for k in range(t):
        total += x
        x_grad = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x_grad).sum(), x_grad)
        beta = largest ** (k / (t - 1))
        x = Tanh().primal_step(x, eta * g, beta)
    gap = f(total / t)
    bounds = torch.tensor([theory.bound(**known) for known in constants])
    assert (gap <= bounds).all()
    assert (gap > 0.3 * bounds).any()  # the bound is not met vacuously,
    assert (gap > bounds / largest[:, 0].sqrt()).any()  # and would not hold without its √B


def test_gamma_makes_the_projection_discrete_to_epsilon():
    for B, epsilon in [(1.0, 0.5), (100.0, 1e-3), (1e4, 1e-9)]:
        gamma = theory.gamma(B=B, epsilon=epsilon)
        assert 1 - math.tanh(B * gamma * 1.0001) < epsilon < 1 - math.tanh(B * gamma * 0.9999)


@pytest.mark.parametrize("d", [2, 3, 16])
def test_softmax_gamma_makes_the_projection_discrete_to_epsilon(d):
    for B, epsilon in [(1.0, 0.3), (100.0, 1e-3), (1e4, 1e-9)]:
        margin = theory.softmax_gamma(B=B, epsilon=epsilon, d=d)
        near, far = (torch.tensor([0.0] * (d - 1) + [s * margin], dtype=torch.float64) for s in (0.9999, 1.0001))
        rest = [torch.softmax(B * u, 0)[:-1].sum() for u in (near, far)]
        assert rest[1] < epsilon < rest[0]
    assert theory.softmax_gamma(B=1.0, epsilon=0.9, d=2) == 0
    with pytest.raises(ValueError, match="d is 1, but"):
        theory.softmax_gamma(B=1.0, epsilon=0.9, d=1)


def test_step_size_and_bound_are_the_printed_formulas():
    known = {"R": 2.0, "L": 3.0, "rho": 0.5, "B": 7.0, "t": 100}
    assert theory.step_size(**known) == pytest.approx(2 / 3 * math.sqrt(2 * 0.5 / (7 * 100)))
    assert theory.bound(**known) == pytest.approx(2 * 3 * math.sqrt(2 * 7 / (0.5 * 100)))


@pytest.mark.parametrize("bad", [{"R": 0.0}, {"L": -1.0}, {"B": 0.5}, {"t": 0}])
def test_bad_constants_are_refused(bad):
    with pytest.raises(ValueError, match="but"):
        theory.bound(**{"R": 1.0, "L": 1.0, "rho": 1.0, "B": 1.0, "t": 1, **bad})


def convex_example(method, steps=2000):
    """min (x+1)^2 over [-1, 1] from x̃ = 1.2 with β = 4 (fig:md-pq)."""
    x = nn.Parameter(torch.tensor([1.2], dtype=torch.float64))
    opt = mq.MirrorDescent(torch.optim.SGD([x], lr=0.1), method=method, anneal=mq.schedules.constant(4.0))
    for _ in range(steps):
        opt.zero_grad()
        (x + 1).square().sum().backward()
        opt.step()
    return float(x.detach())


def test_mirror_descent_reaches_the_optimum_where_proxquant_gets_stuck():
    assert convex_example("md-tanh-s") == pytest.approx(-1, abs=1e-3)
    # The primal form starts at w = tanh(1.2) rather than at tanh(4 · 1.2), and behaves identically from there.
    assert convex_example("md-tanh-bounded") == pytest.approx(-1, abs=1e-3)
    assert convex_example("pq") == pytest.approx(1, abs=1e-6)
