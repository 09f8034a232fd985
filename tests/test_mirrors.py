"""The mathematics of the mirrors, as properties: Theorem 1, eq:bg, eq:mdprox."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mirrorquant import TERNARY, Levels, mirror_from
from mirrorquant.mirrors import ShiftedTanh, Sigmoid, Softmax, Tanh

UNEQUAL = Levels(-0.5, 0.1, 0.4, 2.0)
MIRRORS = {
    "tanh": (Tanh(), (-1.0, 1.0)),
    "sigmoid": (Sigmoid(), (0.0, 1.0)),
    "ternary": (ShiftedTanh(TERNARY), (-1.0, 1.0)),
    "unequal": (ShiftedTanh(UNEQUAL), (-0.5, 2.0)),
    "small": (ShiftedTanh(0.01 * TERNARY), (-0.01, 0.01)),
    "arctan": (mirror_from(lambda x: 2 / torch.pi * torch.atan(x), (-1, 1)), (-1.0, 1.0)),
    "from tanh": (mirror_from(torch.tanh, (-1, 1)), (-1.0, 1.0)),
}
scalar = pytest.mark.parametrize("name", MIRRORS)
fraction = st.floats(0.001, 0.999)
betas = st.floats(1, 20)
numerical = settings(max_examples=25)


def point(name, *fractions):
    low, high = MIRRORS[name][1]
    return torch.tensor([low + f * (high - low) for f in fractions], dtype=torch.float64)


simplex_point = st.lists(st.floats(0.01, 1), min_size=3, max_size=3).map(
    lambda u: torch.tensor(u, dtype=torch.float64)[:, None] / sum(u)
)


@scalar
@given(fraction, betas)
@numerical
def test_project_undoes_inverse(name, f, beta):
    mirror, (low, high) = MIRRORS[name]
    w = point(name, f)
    torch.testing.assert_close(mirror.project(mirror.inverse(w, beta), beta), w, rtol=0, atol=1e-12 * (high - low))


@given(simplex_point, betas)
def test_softmax_project_undoes_inverse(u, beta):
    torch.testing.assert_close(Softmax().project(Softmax().inverse(u, beta), beta), u)


@scalar
@given(fraction, fraction, betas)
@numerical
def test_inverse_increases_strictly(name, f, g, beta):
    mirror, _ = MIRRORS[name]
    if abs(f - g) > 1e-9:
        low, high = mirror.inverse(point(name, *sorted((f, g))), beta)
        assert low < high


@scalar
@given(fraction, fraction, betas)
@numerical
def test_divergence_is_positive_and_zero_only_at_equality(name, f, g, beta):
    mirror, _ = MIRRORS[name]
    p, q = point(name, f), point(name, g)
    assert mirror.divergence(p, p, beta).abs() < 1e-15
    if abs(f - g) > 1e-9:
        assert mirror.divergence(p, q, beta) > 0


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "ternary"])
@given(fraction, st.floats(-8, -3), st.floats(1, 5))
@numerical
def test_divergence_of_close_points_is_half_the_squared_distance(name, f, exponent, beta):
    """D(p, q) = (p - q)² / (2 P'(x)) up to higher orders: no cancellation however close they are."""
    mirror, (low, high) = MIRRORS[name]
    q = point(name, f)
    p = q + 10**exponent * (high - low) * min(f, 1 - f)
    leading = (p - q) ** 2 / (2 * mirror.derivative(mirror.inverse(q, beta), beta))
    torch.testing.assert_close(mirror.divergence(p, q, beta), leading, rtol=0.02, atol=0)


@given(simplex_point, simplex_point, betas)
def test_softmax_divergence_is_positive_and_zero_only_at_equality(p, q, beta):
    assert Softmax().divergence(p, p, beta) == 0
    if (p - q).abs().max() > 1e-9:
        assert Softmax().divergence(p, q, beta) > 0


@scalar
@given(fraction, fraction, betas)
@numerical
def test_divergence_is_the_bregman_divergence_of_the_potential(name, f, g, beta):
    mirror, (low, high) = MIRRORS[name]
    p, q = point(name, f), point(name, g)
    bregman = mirror.potential(p, beta) - mirror.potential(q, beta) - mirror.inverse(q, beta) * (p - q)
    torch.testing.assert_close(mirror.divergence(p, q, beta), bregman, rtol=1e-7, atol=1e-8 * (high - low) ** 2)


@given(simplex_point, simplex_point, betas)
def test_softmax_divergence_is_kullback_leibler(p, q, beta):
    kl = (p * (p / q).log()).sum(0) / beta
    torch.testing.assert_close(Softmax().divergence(p, q, beta), kl, rtol=1e-9, atol=1e-12)


@scalar
@given(fraction, betas)
@numerical
def test_the_gradient_of_the_potential_is_the_inverse(name, f, beta):
    mirror, (low, high) = MIRRORS[name]
    w = point(name, f).requires_grad_()
    (gradient,) = torch.autograd.grad(mirror.potential(w, beta).sum(), w)
    inverse = mirror.inverse(w.detach(), beta)
    torch.testing.assert_close(gradient, inverse, rtol=1e-9, atol=1e-12)
    step = 1e-5 * (high - low) * min(f, 1 - f)
    difference = (mirror.potential(w + step, beta) - mirror.potential(w - step, beta)).detach() / (2 * step)
    # Across a step of a sharp projection the inverse is steep: two evaluations bound what it can be between them.
    slack = mirror.inverse(w.detach() + step, beta) - mirror.inverse(w.detach() - step, beta) + 1e-6 * (high - low)
    assert (difference - inverse).abs() <= slack


@given(simplex_point, betas)
def test_the_gradient_of_the_softmax_potential_is_the_inverse(u, beta):
    u = u.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(Softmax().potential(u, beta).sum(), u)
    torch.testing.assert_close(gradient, Softmax().inverse(u.detach(), beta))


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "ternary", "arctan"])
def test_the_numerical_inverse_is_differentiable(name):
    mirror, _ = MIRRORS[name]
    w = point(name, 0.2, 0.55, 0.9).requires_grad_()
    (gradient,) = torch.autograd.grad(mirror.inverse(w, 2.0).sum(), w)
    torch.testing.assert_close(gradient, 1 / mirror.derivative(mirror.inverse(w.detach(), 2.0), 2.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "ternary"])
@given(fraction, st.floats(-1, 1), st.floats(1, 5))
@settings(max_examples=12)
def test_primal_step_is_the_argmin_of_the_proximal_form(name, f, step, beta):
    mirror, (low, high) = MIRRORS[name]
    w = point(name, f)
    found = mirror.primal_step(w, torch.tensor([step], dtype=torch.float64), beta)
    # The derivative of <step, x> + D(x, w) is step + inverse(x) - inverse(w): its root, by bisection, is the argmin.
    a, b = torch.full_like(w, low), torch.full_like(w, high)
    for _ in range(36):
        middle = (a + b) / 2
        rising = step + mirror.inverse(middle, beta) - mirror.inverse(w, beta) > 0
        a, b = torch.where(rising, a, middle), torch.where(rising, middle, b)
    torch.testing.assert_close(found, (a + b) / 2, rtol=0, atol=1e-8)
    # And directly: no point of a fine grid has a smaller proximal objective.
    grid = torch.linspace(low, high, 401, dtype=torch.float64)[1:-1]

    def objective(x):
        return step * x + mirror.divergence(x, w.expand_as(x), beta)

    assert objective(found) <= objective(grid).min() + 1e-12


@given(simplex_point, st.lists(st.floats(-1, 1), min_size=3, max_size=3), st.floats(1, 5))
@settings(max_examples=50)
def test_softmax_primal_step_is_exponentiated_gradient_and_the_argmin(u, step, beta):
    step = torch.tensor(step, dtype=torch.float64)[:, None]
    found = Softmax().primal_step(u, step, beta)
    weighted = u * torch.exp(-beta * step)
    torch.testing.assert_close(found, weighted / weighted.sum(0), rtol=0, atol=1e-8)
    # Stationarity on the simplex: step + (log u' - log u) / beta is one constant for all levels.
    lagrange = step + (found.log() - u.log()) / beta
    torch.testing.assert_close(lagrange, lagrange.mean(0, keepdim=True).expand_as(lagrange), rtol=0, atol=1e-8)


@given(fraction, fraction, betas)
@numerical
def test_mirror_from_tanh_agrees_with_the_analytic_tanh_mirror(f, g, beta):
    derived, analytic = MIRRORS["from tanh"][0], Tanh()
    p, q = point("tanh", f), point("tanh", g)
    for function, arguments in [("project", (p,)), ("inverse", (p,)), ("potential", (p,)), ("divergence", (p, q))]:
        ours = getattr(derived, function)(*arguments, beta)
        torch.testing.assert_close(ours, getattr(analytic, function)(*arguments, beta), rtol=0, atol=1e-6)


def test_shifted_tanh_of_the_binary_levels_is_tanh():
    x, shifted = torch.linspace(-3, 3, 41, dtype=torch.float64), ShiftedTanh(Levels(-1, 1))
    w, v = Tanh().project(x), Tanh().project(x.flip(0) / 2)
    for beta in (1.0, 4.0):
        torch.testing.assert_close(shifted.project(x, beta), Tanh().project(x, beta))
        torch.testing.assert_close(shifted.inverse(w, beta), Tanh().inverse(w, beta), rtol=0, atol=1e-9)
        torch.testing.assert_close(shifted.potential(w, beta), Tanh().potential(w, beta), rtol=0, atol=1e-12)
        torch.testing.assert_close(shifted.divergence(w, v, beta), Tanh().divergence(w, v, beta), rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(shifted.derivative(x, beta), Tanh().derivative(x, beta))


def test_ternary_projection_is_the_papers():
    x = torch.linspace(-2, 2, 33, dtype=torch.float64)
    paper = (torch.tanh(3.0 * (x + 0.5)) + torch.tanh(3.0 * (x - 0.5))) / 2
    torch.testing.assert_close(ShiftedTanh(TERNARY).project(x, 3.0), paper)


@pytest.mark.parametrize("beta", [300.0, 1e4, 1e8])
def test_the_ternary_divergence_is_right_where_the_steps_saturate(beta):
    """There Φ is |w|/2 but for 1/β: from 0.5 to −0.5 the tangent climbs past it by 0.5."""
    p, q = torch.tensor([-0.5, 0.5, -0.6], dtype=torch.float64), torch.tensor([0.5, -0.5, 0.2], dtype=torch.float64)
    expected = torch.tensor([0.5, 0.5, 0.6], dtype=torch.float64)
    torch.testing.assert_close(ShiftedTanh(TERNARY).divergence(p, q, beta), expected, rtol=0, atol=4 / beta + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_can_be_given_by_name(dtype):
    w = torch.tensor([0.25, -0.5], dtype=dtype)
    assert torch.equal(Tanh().project(dual=w, beta=3.0), Tanh().project(w, 3.0))
    assert torch.equal(Sigmoid().divergence(q=w.abs(), p=w.abs() / 2), Sigmoid().divergence(w.abs() / 2, w.abs()))


def test_scaling_the_levels_scales_the_projection():
    x = torch.linspace(-2, 2, 33, dtype=torch.float64)
    scaled = ShiftedTanh(0.1 * TERNARY).project(0.1 * x, 7.0)
    torch.testing.assert_close(scaled, 0.1 * ShiftedTanh(TERNARY).project(x, 7.0))


EXTREMES = torch.tensor([-1e4, -1.0, -0.5, -1e-3, -1e-30, 0.0, 1e-30, 1e-3, 0.5, 1.0, 1e4])
BETAS = [1.0, 1e4, 1e20, 1e35]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tensor_beta", [False, True])
@pytest.mark.parametrize("name", MIRRORS)
def test_everything_is_finite_in_float32_up_to_beta_1e35(name, beta, tensor_beta):
    mirror, (low, high) = MIRRORS[name]
    beta = torch.tensor(beta) if tensor_beta else beta
    w = mirror.project(EXTREMES, beta)
    primal = torch.cat([w, torch.tensor([low, high]), torch.linspace(low, high, 11)])
    assert low <= w.min()
    assert w.max() <= high
    results = [
        w,
        mirror.inverse(primal, beta),
        mirror.potential(primal, beta),
        mirror.divergence(primal, primal.flip(0), beta),
        mirror.primal_step(primal, torch.full_like(primal, 100.0), beta),
        mirror.derivative(EXTREMES, beta),
    ]
    for result in results:
        assert result.dtype == torch.float32
        assert torch.isfinite(result).all()


@pytest.mark.parametrize("projection", [lambda x: x / torch.sqrt(1 + x * x), lambda x: x / (1 + x.abs())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_map_that_would_overflow_in_float32_still_reaches_its_levels(projection, dtype):
    """Theorem 1's conditions are checked in float64; a square of β w̃ is infinite in float32 from β = 1e20 on."""
    mirror, dual = mirror_from(projection, (-1, 1)), torch.tensor([-1e4, -0.1, -1e-3, 1e-3, 0.1, 1e4], dtype=dtype)
    for beta in (1e20, 1e25, 1e35, torch.tensor(1e35)):
        assert torch.equal(mirror.project(dual, beta), torch.sign(dual))
        assert (mirror.derivative(dual, beta).abs() < 1e-6).all()


@pytest.mark.parametrize("beta", BETAS)
def test_softmax_is_finite_in_float32_up_to_beta_1e35(beta):
    dual = torch.stack([EXTREMES, EXTREMES.flip(0), torch.zeros_like(EXTREMES)])
    u, mirror = Softmax().project(dual, beta), Softmax()
    torch.testing.assert_close(u.sum(0), torch.ones_like(EXTREMES))
    results = [u, mirror.inverse(u, beta), mirror.potential(u, beta), mirror.divergence(u, u.flip(0), beta)]
    results += [mirror.primal_step(u, torch.full_like(u, 100.0), beta)]
    assert all(torch.isfinite(result).all() for result in results)


@pytest.mark.parametrize("mirror", [Tanh(), Sigmoid()])
def test_primal_steps_neither_stick_at_the_boundary_nor_overflow(mirror):
    w = mirror.project(torch.tensor([1e4, -1e4]))  # exactly on the boundary
    there = mirror.primal_step(w, torch.tensor([100.0, -100.0]), 1.0)
    assert torch.isfinite(there).all()
    assert (there - w).abs().min() > 0.5
    back = mirror.primal_step(there, torch.tensor([-200.0, 200.0]), 1.0)
    assert (back - w).abs().max() < 1e-6


def test_softmax_primal_steps_neither_stick_nor_overflow():
    u = Softmax().project(torch.tensor([[1e4], [0.0], [-1e4]]))
    there = Softmax().primal_step(u, torch.tensor([[100.0], [0.0], [-100.0]]), 1.0)
    assert torch.isfinite(there).all()
    assert there.argmax(0) == 2


@pytest.mark.parametrize("name", MIRRORS)
def test_bfloat16_is_computed_in_float32_and_rounded_once(name):
    mirror, _ = MIRRORS[name]
    w = point(name, 0.1, 0.5, 0.8).to(torch.bfloat16)
    for function, arguments in [
        ("project", (w,)),
        ("inverse", (w,)),
        ("potential", (w,)),
        ("divergence", (w, w.flip(0))),
    ]:
        half = getattr(mirror, function)(*arguments, 3.0)
        full = getattr(mirror, function)(*(a.float() for a in arguments), 3.0)
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half, full.to(torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [3.0, 1e3, 1e6])
def test_half_precision_primal_steps_are_rounded_once_too(dtype, beta):
    """Between inverse and projection a half could not hold the dual point: 0.5 + 1e-3, or 1e-6, in steps of 2⁻⁸."""
    for mirror, (low, high) in MIRRORS.values():
        w = torch.linspace(low, high, 11)[1:-1].to(dtype)
        step = torch.linspace(-1, 1, 9).to(dtype) / beta
        full = mirror.primal_step(w.float(), step.float(), beta)
        torch.testing.assert_close(mirror.primal_step(w, step, beta), full.to(dtype), rtol=0, atol=0)
    u, step = torch.tensor([[0.25], [0.75]], dtype=dtype), torch.tensor([[0.5], [0.5]], dtype=dtype) / beta
    assert torch.equal(Softmax().primal_step(u, step, beta), u)


@pytest.mark.parametrize(
    ("projection", "interval", "message"),
    [
        (lambda x: -torch.tanh(x), (-1, 1), "strictly increasing"),
        (torch.sin, (-1, 1), "strictly increasing"),
        (lambda x: torch.round(2 * torch.tanh(x)) / 2, (-1, 1), "strictly increasing"),
        (torch.tanh, (-2, 2), "onto the interval"),
        (lambda x: 0.99 * torch.tanh(x), (-1, 1), "onto the interval"),
        (torch.tanh, (1, -1), "finite open one"),
        (torch.tanh, (-1, math.inf), "finite open one"),
        (lambda x: x / 0 * 0, (-1, 1), "finite number"),
        (lambda x: x.sum(), (-1, 1), "one finite number"),
        (lambda x: x.clamp(-1, 1), (-1, 1), "never arrives"),
        (lambda x: torch.tanh(x) / 2 + torch.where(x >= 0, 0.5, -0.5), (-1, 1), "jumps at"),
    ],
)
def test_mirror_from_refuses_what_theorem_1_does_not_cover(projection, interval, message):
    with pytest.raises(ValueError, match=message):
        mirror_from(projection, interval)
