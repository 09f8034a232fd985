"""The paper's identities between methods, in float64, and each method's formulas."""

import contextlib
import copy
import itertools
import math

import pytest
import torch
from conftest import METHODS, anneal_for
from torch import nn

import mirrorquant as mq
from mirrorquant import BINARY, TERNARY, Levels, methods
from mirrorquant.levels import Scale

BETA = 3.0


def trajectory(method, anneal, steps=200, levels=None, base=torch.optim.Adam, lr=0.01):
    """The weights of a small regression, trained by a method from one fixed start."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 7, generator=generator, dtype=torch.float64)
    target = x @ torch.sign(torch.randn(7, generator=generator, dtype=torch.float64))
    w = nn.Parameter(0.3 * torch.randn(7, generator=generator, dtype=torch.float64))
    opt = mq.MirrorDescent(base([w], lr=lr), method=method, levels=levels, anneal=anneal)
    path = [w.detach().clone()]
    for _ in range(steps):
        opt.zero_grad()
        (x @ w - target).square().mean().backward()
        opt.step()
        path.append(w.detach().clone())
    return torch.stack(path)


def test_primal_and_dual_form_agree_for_constant_beta_over_200_adam_steps():
    generator = torch.Generator().manual_seed(2)
    start = 0.3 * torch.randn(7, generator=generator, dtype=torch.float64)

    def run(method):
        # Both start from the same primal point w = tanh(β w̃): the primal form's initial projection uses β = 1.
        w = nn.Parameter(start if method == "md-tanh-s" else BETA * start)
        opt = mq.MirrorDescent(torch.optim.Adam([w], lr=0.01), method=method, anneal=mq.schedules.constant(BETA))
        path = []
        for k in range(200):
            w.grad = torch.sin(torch.arange(7.0, dtype=torch.float64) + k) + w.detach()
            opt.step()
            path.append(w.detach().clone())
        return torch.stack(path)

    torch.testing.assert_close(run("md-tanh-bounded"), run("md-tanh-s"), rtol=0, atol=1e-10)


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.Adam])
def test_primal_and_dual_form_agree_under_weight_decay(base):
    paths = []
    for method in ("md-tanh-bounded", "md-tanh-s"):
        w = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        opt = mq.MirrorDescent(base([w], lr=0.01, weight_decay=0.1), method=method, anneal=mq.schedules.constant(BETA))
        for k in range(100):
            w.grad = torch.sin(torch.arange(5.0, dtype=torch.float64) + k / 9)
            opt.step()
        paths.append(w.detach().clone())
    torch.testing.assert_close(*paths, rtol=0, atol=1e-10)


def test_the_primal_form_accumulates_beta_k_times_d_k():
    w, levels = nn.Parameter(torch.tensor([0.3], dtype=torch.float64)), Levels(0, 1)
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.01), "md-tanh-bounded", levels, anneal=mq.schedules.geometric(1.5))
    v = 0.3
    for k in range(6):
        w.grad = torch.ones_like(w)
        opt.step()
        v -= 1.5**k * 0.01
        torch.testing.assert_close(w.detach(), torch.tensor([0.5 + 0.5 * math.tanh((v - 0.5) / 0.5)]).double())


def test_primal_and_dual_form_differ_once_beta_changes():
    anneal = mq.schedules.geometric(1.02)
    assert (trajectory("md-tanh-bounded", anneal) - trajectory("md-tanh-s", anneal)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("lifted", "plain"), [("md-softmax-s", "md-tanh-s"), ("md-softmax-bounded", "md-tanh-bounded")]
)
def test_softmax_on_two_levels_is_tanh(lifted, plain):
    anneal = mq.schedules.geometric(1.01)
    torch.testing.assert_close(trajectory(lifted, anneal), trajectory(plain, anneal), rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["md-tanh-s", "gd-tanh"])
def test_a_huge_beta_is_binaryconnects_forward_pass(method):
    latent = torch.randn(1000, dtype=torch.float64)
    hard = methods.BC().project(latent, 1.0)
    assert torch.equal(methods.get(method).project(latent, 1e30), hard)
    assert torch.equal(methods.get(method).project(latent.float(), 1e30), hard.float())


@pytest.mark.parametrize("levels", [BINARY, TERNARY, Levels(-0.5, 0.1, 0.4, 2.0)])
@pytest.mark.parametrize("name", ["gd-tanh", "pmf-exact"])
def test_gd_tanh_and_pmf_equal_autograd_through_the_projection(name, levels):
    method = methods.get(name, levels)
    weight = torch.randn(5, 3, dtype=torch.float64)
    latent = method.lift(weight).requires_grad_()
    grad = torch.randn(5, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad(method.project(latent, BETA), latent, grad)
    torch.testing.assert_close(method.pull_back(grad, latent.detach(), BETA), expected)


def test_pmf_authors_is_the_jacobian_without_its_diagonal():
    method = methods.get("pmf", TERNARY)
    latent, grad = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    u, q = torch.softmax(BETA * latent, 0), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    for j in range(4):
        jacobian = BETA * (torch.eye(3, dtype=torch.float64) - torch.outer(u[:, j], u[:, j]))
        torch.testing.assert_close(method.pull_back(grad, latent, BETA)[:, j], jacobian @ (q * grad[j]))


def test_md_tanh_is_the_printed_update_of_tab_eg_projns():
    w0, step, beta = torch.tensor([-0.9, 0.1, 0.7], dtype=torch.float64), 0.05, 4.0
    ratio = (1 + w0) / (1 - w0) * torch.exp(torch.tensor(-2 * beta * step, dtype=torch.float64))
    w = nn.Parameter(torch.atanh(w0))
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=step), method="md-tanh-bounded", anneal=mq.schedules.constant(beta))
    w.grad = torch.ones_like(w)
    opt.step()
    torch.testing.assert_close(w.detach(), (ratio - 1) / (ratio + 1))


@pytest.mark.parametrize("levels", [BINARY, TERNARY, Levels(0, 1, 3)])
def test_md_softmax_is_the_printed_update_for_any_number_of_levels(levels):
    method, beta, step = methods.get("md-softmax-bounded", levels), 2.5, 0.1
    w = nn.Parameter(torch.tensor([-0.4, 0.2, 0.9], dtype=torch.float64))
    u = torch.softmax(method.lift(w.detach()), 0)
    q = torch.tensor(levels, dtype=torch.float64)[:, None]
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=step), method=method, anneal=mq.schedules.constant(beta))
    grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    w.grad = grad.clone()
    opt.step()
    weighted = u * torch.exp(-beta * step * q * grad)
    torch.testing.assert_close(w.detach(), (q * weighted / weighted.sum(0)).sum(0))


def test_primal_forms_do_not_stick_or_overflow_in_float32():
    for name, size in itertools.product(("md-tanh-bounded", "md-softmax-bounded"), (1.0, 1e4)):
        w = nn.Parameter(torch.tensor([0.5, -0.5]))
        opt = mq.MirrorDescent(torch.optim.SGD([w], lr=1.0), method=name, anneal=mq.schedules.constant(1e35))
        for sign in (1.0, -1.0, 1.0):
            w.grad = torch.tensor([size * sign, -size * sign])
            opt.step()
            assert torch.equal(w.detach().round(), torch.tensor([-sign, sign]))
            assert torch.isfinite(opt.latent(w)).all()


@pytest.mark.parametrize(("name", "push"), [("md-tanh", 10.0), ("md-softmax", 60.0)])
def test_a_primal_point_that_has_reached_its_level_stays_there(name, push):
    w = nn.Parameter(torch.tensor([0.5, -0.5]))
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=1.0), method=name)
    for _ in range(2):
        w.grad = torch.tensor([-push, push])
        opt.step()
    assert torch.equal(w.detach(), torch.tensor([1.0, -1.0]))
    for size in (1.0, 1e4, 1e30):
        w.grad = torch.tensor([size, -size])
        opt.step()
        assert torch.equal(w.detach(), torch.tensor([1.0, -1.0]))
    opt.finalize()


@pytest.mark.parametrize("name", ["md-tanh-bounded", "md-softmax-bounded"])
def test_keeping_the_primal_point_changes_nothing_before_it_reaches_a_level(name):
    paths = [trajectory(method, mq.schedules.geometric(1.002)) for method in (name, name.removesuffix("-bounded"))]
    assert paths[0].abs().max() > 0.9
    torch.testing.assert_close(*paths, rtol=0, atol=1e-9)


def test_the_kept_primal_point_freezes_where_the_printed_closed_form_does_in_float32():
    """One step from shared points, w = (E − 1) / (E + 1) with E computed in float64.

    In float32 E + 1 and E − 1 are both E from 2²⁵ on, so that w is 1, and differ enough for a quotient below 1 up to
    2²⁴; in between the last bit of E decides. On the other side E − 1 is −1 up to 2⁻²⁵. The rounding of v, at most 11,
    moves E by some millionths: a thousandth is kept clear of.
    """
    torch.manual_seed(0)
    w = torch.tanh(7 * (2 * torch.rand(20000) - 1))
    target = torch.cat([11 * (2 * torch.rand(10000) - 1), torch.sign(torch.randn(10000)) * (8 + torch.rand(10000))])
    move = (torch.atanh(w.double()) - target.double()).float()
    exact = (1 + w.double()) / (1 - w.double()) * torch.exp(-2 * move.double())
    printed = (1 + w) / (1 - w + 1e-20) * torch.exp(-2 * move)
    printed = (printed - 1) / (printed + 1)
    v = methods.MDTanh().settle(torch.atanh(w) - move, 1.0, 1.0)
    frozen = (exact > 2.0**25 * 1.001) | (exact < 2.0**-25 * 0.999)
    free = (exact < 2.0**24 * 0.999) & (exact > 2.0**-25 * 1.001)
    assert min(int(frozen.sum()), int(free.sum())) > 5000
    for kept in (torch.isinf(v), printed.abs() == 1):
        assert kept[frozen].all()
        assert not kept[free].any()
    assert torch.equal(torch.tanh(v)[frozen], printed[frozen])
    w_exact = (exact - 1) / (exact + 1)
    bound = 4e-6 * (1 - w_exact.square()) + 2.0**-22  # the rounding of v times the slope of tanh, and that of w
    assert ((torch.tanh(v).double() - w_exact).abs() <= bound)[free].all()


def test_the_kept_point_of_the_simplex_freezes_where_the_printed_closed_form_does_in_float32():
    """One step from shared points: a probability well below the least number, 2⁻¹⁴⁹, is 0, one well above it is not.

    A factor of four is kept clear of, for the roundings to multiples of the least number on the way. Where the
    processor's exponential gives no subnormal numbers, the least one is 2⁻¹²⁶.
    """
    torch.manual_seed(0)
    least = 2.0**-149 if bool((torch.exp(torch.full((64,), -100.0)) > 0).all()) else 2.0**-126
    u = torch.softmax(torch.randn(2, 20000) / 10, 0)
    move = torch.cat([60 * (2 * torch.rand(10000) - 1), torch.sign(torch.randn(10000)) * (51 + 2 * torch.rand(10000))])
    moves = torch.stack([-move, move])
    exact = torch.softmax(torch.log(u.double()) - moves.double(), 0)
    weighted = u * torch.exp(moves.amin(0) - moves)
    printed = weighted / weighted.sum(0)
    latent = methods.MDSoftmax().settle(torch.log(u) - moves, 1.0, 1.0)
    gone, left = exact < 2.0**-149 / 4, exact > least * 4
    assert min(int(gone.sum()), int(left.sum())) > 2000
    for kept in (torch.isinf(latent), printed == 0):
        assert kept[gone].all()
        assert not kept[left].any()
    usual = exact > 1e-30
    torch.testing.assert_close(torch.exp(latent.double())[usual], exact[usual], rtol=1e-4, atol=0)
    assert torch.equal(printed.argmax(0), latent.argmax(0))


def test_proxquant_is_the_published_prox():
    method, r = methods.PQ(), 0.3
    w = torch.tensor([-2.0, -1.1, -0.8, -0.1, 0.0, 0.4, 1.0, 1.5])
    sign = torch.where(w >= 0, 1.0, -1.0)
    prox = sign * (1 + torch.sign(w.abs() - 1) * torch.relu((w.abs() - 1).abs() - r))
    torch.testing.assert_close(method.settle(w, 3.0, 0.1), prox.clamp(-1, 1))
    ternary = (w + r * TERNARY.nearest(w)) / (1 + r)
    torch.testing.assert_close(methods.PQ(TERNARY).settle(w, 3.0, 0.1), ternary.clamp(-1, 1))


def test_binaryconnect_stops_the_gradient_outside_levels_without_a_scale():
    latent, grad = torch.tensor([-1.5, -1.0, 0.2, 1.0, 1.1]), torch.ones(5)
    assert methods.BC().pull_back(grad, latent, 1.0).tolist() == [0, 1, 1, 1, 0]
    assert methods.BC("binary").pull_back(grad, latent, 1.0) is grad


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("levels", [BINARY, TERNARY, Levels(0.0, 0.5, 2.0, 2.25)])
def test_rounding_an_initial_latent_gives_the_nearest_level(name, levels):
    if name in ("md-tanh-bounded", "md-tanh") and len(levels) > 2:
        with pytest.raises(ValueError, match="use md-tanh-s"):
            methods.get(name, levels)
        return
    method, weight = methods.get(name, levels), torch.cat([2 * torch.randn(500), torch.tensor(levels.thresholds)])
    assert torch.equal(method.round(method.lift(weight), 1.0), levels.nearest(weight))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name):
    """A teacher with binary weights is found exactly."""
    generator = torch.Generator().manual_seed(1)
    torch.randn(64, 7, generator=generator, dtype=torch.float64)
    teacher = torch.sign(torch.randn(7, generator=generator, dtype=torch.float64))
    assert torch.equal(BINARY.nearest(trajectory(name, anneal_for(name), steps=300)[-1]), teacher)


def test_binary_connect_leaves_latents_outside_the_hull_and_its_clipped_form_brings_them_back():
    ended = {}
    for name in ("bc", "bc-clip"):
        w = nn.Parameter(torch.tensor([0.5, 3.0, -0.98]))
        opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), name)
        path = []
        for direction in (1.0, 1.0, -1.0, -1.0):
            w.grad = torch.full_like(w, direction)
            opt.step()
            path.append(opt.state[w]["latent"].clone())
        ended[name] = torch.stack(path, 1)
    expected = [[0.4, 0.3, 0.4, 0.5], [3.0, 3.0, 3.0, 3.0], [-1.08, -1.08, -1.08, -1.08]]
    torch.testing.assert_close(ended["bc"], torch.tensor(expected))
    expected = [[0.4, 0.3, 0.4, 0.5], [1.0, 0.9, 1.0, 1.0], [-1.0, -1.0, -0.9, -0.8]]
    torch.testing.assert_close(ended["bc-clip"], torch.tensor(expected))


def test_methods_are_listed_with_one_line_each():
    names = methods.names()
    assert {"ref", "bc", "pq", "pmf", "gd-tanh", "md-tanh", "md-softmax", "md-tanh-s", "md-softmax-s"} <= set(names)
    assert all(methods.get(name).describe() for name in names)


def test_a_mirror_must_end_where_the_levels_do():
    with pytest.raises(ValueError, match=r"maps onto \(0.0, 1.0\), but the levels run from -1 to 1"):
        methods.MD(mirror=mq.mirrors.Sigmoid())


def test_unknown_methods_answer_with_the_nearest_name():
    with pytest.raises(ValueError, match="Did you mean 'md-tanh-s'"):
        methods.get("md-tanhs")
    with pytest.raises(ValueError, match="give one"):
        methods.get(methods.BC(), TERNARY)


def test_a_user_adds_a_method_and_a_projection():
    class Hard(mq.Method):
        """Clips."""

        name = "test-hard"

        def project(self, latent, beta):
            return (beta * latent).clamp(self.levels[0], self.levels[-1])

    try:
        by_name = trajectory("test-hard", mq.schedules.geometric(1.02))
        assert torch.equal(by_name, trajectory(Hard(), mq.schedules.geometric(1.02)))
    finally:
        del mq.Method.registry["test-hard"]
    arctan = mq.mirror_from(lambda x: 2 / torch.pi * torch.atan(x), (-1, 1))
    path = trajectory(methods.MD(mirror=arctan), mq.schedules.geometric(1.05))
    assert torch.equal(
        BINARY.nearest(path[-1]), BINARY.nearest(trajectory("md-tanh-s", mq.schedules.geometric(1.05))[-1])
    )


def broken(hook, result):
    """A method with one hook that returns something else."""

    class Broken(mq.Method):
        """For the tests."""

        def project(self, latent, beta):
            return torch.tanh(beta * latent)

    setattr(Broken, hook, lambda self, latent, *rest: result(latent))
    return Broken()


@pytest.mark.parametrize("hook", ["lift", "project", "round", "pull_back", "settle"])
@pytest.mark.parametrize(
    ("result", "given"),
    [
        (lambda t: t.sum(-1), r"shape \(3,\)"),
        (lambda t: t[:, :1], r"shape \(3, 1\)"),
        (lambda t: t.mean(), r"shape \(\)"),
        (lambda t: t / 0 * 0, "NaN"),
        (lambda t: t.long(), r"torch\.int64"),
        (lambda t: t.tolist(), "a list"),
        (lambda t: None, "a NoneType"),
    ],
)
def test_a_custom_hook_that_returns_something_else_is_refused_before_anything_changes(hook, result, given):
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    base = torch.optim.SGD(mq.split(model), lr=0.1)
    with pytest.raises((ValueError, TypeError), match=rf"Broken\.{hook} returned {given} for weight, expected"):
        mq.MirrorDescent(base, broken(hook, result))
    assert torch.equal(model.weight, before)
    opt = mq.MirrorDescent(torch.optim.SGD([("first", nn.Parameter(torch.ones(2)))], lr=0.1))
    with pytest.raises((ValueError, TypeError), match=rf"Broken\.{hook} returned {given}"):
        opt.add_param_group({"params": [("weight", model.weight)], "method": broken(hook, result)})
    assert len(opt.param_groups) == len(opt.base.param_groups) == 1


def test_infinite_projections_and_weights_of_nan_are_refused():
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"Broken\.project returned inf for weight, expected finite numbers"):
        mq.MirrorDescent(torch.optim.SGD(mq.split(model), lr=0.1), broken("project", lambda t: 1 / (0 * t)))
    nn.init.constant_(model.weight, float("nan"))
    with pytest.raises(ValueError, match="weight holds NaN, so there is nothing to quantize"):
        mq.MirrorDescent(torch.optim.SGD(mq.split(model), lr=0.1))


def test_nan_is_never_rounded_to_a_level():
    class Late(mq.Method):
        """Fails where β is large."""

        def project(self, latent, beta):
            return torch.tanh(beta * latent) if beta < 2 else latent * float("nan")

    w = nn.Parameter(torch.tensor([0.5, -0.5]))
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), Late(), anneal=mq.schedules.geometric(2.0))
    w.grad = torch.ones(2)
    opt.step()
    with opt.quantized():
        assert w.isnan().all()
    with pytest.raises(RuntimeError, match=r"Late\.project gives NaN for parameter 0 of group 0 at beta 2"):
        opt.finalize()


@pytest.mark.parametrize("name", METHODS)
def test_rounding_keeps_nan(name):
    method = methods.get(name, BINARY)
    rounded = method.round(method.lift(torch.tensor([0.5, float("nan"), -0.5])), 1.0)
    assert torch.equal(rounded.isnan(), torch.tensor([False, True, False]))
    assert rounded[[0, 2]].tolist() == [1.0, -1.0]


def test_a_taken_name_is_an_error_but_a_class_may_be_defined_again():
    with pytest.raises(ValueError, match=r"'bc' is taken by mirrorquant\.methods\.baselines\.BC"):
        type("Mine", (mq.Method,), {"name": "bc"})
    assert methods.get("bc").__class__ is methods.BC
    try:
        first, second = (type("Again", (mq.Method,), {"name": "test-again"}) for _ in range(2))
        assert mq.Method.registry["test-again"] is second is not first
    finally:
        del mq.Method.registry["test-again"]


class Masked(mq.Method):
    """Tanh with a mask of weights that stay at the lowest level, and a count of steps per weight: state of its own."""

    def start(self, weight, latent):
        return {"mask": (weight > -0.2).to(weight.dtype), "count": torch.zeros_like(weight)}

    def project(self, latent, beta, mask):
        return torch.tanh(beta * latent) * mask - (1 - mask)

    def pull_back(self, grad, latent, beta, mask):
        return grad * mask

    def settle(self, latent, beta, lr, mask, count):
        count += mask
        return latent

    def round(self, latent, beta, mask):
        return self.levels.nearest(latent) * mask - (1 - mask)


def quadratic(method, steps, state=None, shape=(6, 5), start=0, lr=0.05):
    """A weight trained towards a target from a fixed start, or from a saved state."""
    generator = torch.Generator().manual_seed(3)
    w = nn.Parameter(0.2 * torch.randn(shape, generator=generator))
    target = 0.3 * torch.randn(shape, generator=generator).sign()
    opt = mq.MirrorDescent(torch.optim.Adam([("w", w)], lr=lr), method, anneal=mq.schedules.geometric(1.05))
    if state is not None:
        opt.load_state_dict(copy.deepcopy(state))
    for _ in range(start, steps):
        opt.zero_grad()
        (w - target).square().sum().backward()
        opt.step()
    return w, opt, target


def test_state_beyond_the_latent_is_kept_saved_and_resumed():
    w, opt, _ = quadratic(Masked(), 20)
    assert opt.state[w]["count"].max() == 20
    assert torch.equal(opt.state[w]["count"] == 0, opt.state[w]["mask"] == 0)
    assert 0 < int(opt.state[w]["mask"].sum()) < w.numel()
    _, half, _ = quadratic(Masked(), 10)
    resumed, again, _ = quadratic(Masked(), 20, half.state_dict(), start=10)
    assert torch.equal(resumed, w)
    assert torch.equal(again.state[resumed]["count"], opt.state[w]["count"])
    opt.finalize()
    assert (w[opt.state[w]["mask"] == 0] == -1).all()


SCALES = [Scale(per, how) for per in ("tensor", "channel") for how in ("fixed", "computed", "learnt")]


@pytest.mark.parametrize("levels", [BINARY, TERNARY])
@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("name", ["md-tanh-s", "bc", "gd-tanh", "md-softmax-s"])
def test_weights_are_levels_times_their_scale(name, scale, levels):
    scaled = mq.levels.auto(levels, per=scale.per, how=scale.how)
    if scale.how == "computed" and name == "md-softmax-s":
        with pytest.raises(ValueError, match="on another scale than its weights: fix or learn it"):
            methods.get(name, scaled)
        return
    method = methods.get(name, scaled)
    w, opt, _ = quadratic(method, 30)
    factor = opt.state[w]["scale"]
    assert factor.shape == ((6, 1) if scale.per == "channel" else (1, 1))
    allowed = torch.stack([(level * factor).expand_as(w) for level in levels])
    with opt.quantized():
        assert (w == allowed).any(0).all()
        inside = w.detach().clone()
    resumed, again, _ = quadratic(method, 30, quadratic(method, 15)[1].state_dict(), start=15)
    assert torch.equal(resumed, w)
    assert torch.equal(again.state[resumed]["scale"], factor)
    opt.finalize()
    assert torch.equal(w, inside)
    start = 0.2 * torch.randn((6, 5), generator=torch.Generator().manual_seed(3))
    initial = scale.of(start, levels)
    if scale.how == "fixed":
        assert torch.equal(factor, initial)
    if scale.how == "learnt":  # towards the target, whose weights are ±0.3
        assert (factor.mean() - 0.3).abs() < (initial.mean() - 0.3).abs()
    if scale.how == "computed":
        assert torch.equal(factor, scale.of(opt.latent(w), levels))


def test_a_fixed_scale_per_tensor_is_the_method_on_scaled_levels():
    w, opt, _ = quadratic(methods.MDTanhS(mq.levels.auto(how="fixed")), 25)
    other, _, _ = quadratic(methods.MDTanhS(float(opt.state[w]["scale"]) * BINARY), 25)
    torch.testing.assert_close(w, other)


def test_a_custom_method_with_several_latents_must_say_so():
    class Twice(mq.Method):
        def lift(self, weight):
            return torch.stack([weight, weight])

        def project(self, latent, beta):
            return torch.tanh(beta * latent.mean(0))

        def pull_back(self, grad, latent, beta):
            return torch.stack([grad, grad])

    with pytest.raises(ValueError, match="set can_follow = False"):
        quadratic(Twice("binary"), 1)
    Twice.can_follow = False
    assert Twice("binary").scale.how == "fixed"
    quadratic(Twice("binary"), 1)


def test_he_scales_depend_on_the_shape_alone():
    scale = Scale("channel", "fixed", "he")
    assert torch.equal(scale.of(torch.randn(4, 3, 5, 5), BINARY), torch.full((4, 1, 1, 1), math.sqrt(2 / 75)))
    assert float(Scale(size="he").of(torch.randn(8), TERNARY)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="depends on the shape alone"):
        Scale(how="computed", size="he")


def initialized(how):
    weight, generator = torch.empty(96, 128), torch.Generator().manual_seed(5)
    how(weight, generator=generator)
    return weight


INITIALIZATIONS = {
    "kaiming": nn.init.kaiming_uniform_,
    "xavier": nn.init.xavier_normal_,
    "orthogonal": nn.init.orthogonal_,
    "wide": lambda w, generator: nn.init.normal_(w, std=30.0, generator=generator),
    "narrow": lambda w, generator: nn.init.trunc_normal_(w, std=1e-4, generator=generator),
}


@pytest.mark.parametrize("how", INITIALIZATIONS)
@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize(
    "name", [name for name in methods.names() if name not in ("ref", "md-tanh", "md-tanh-bounded")]
)
def test_ternary_starts_with_about_a_third_of_the_weights_on_each_level(name, per, how):
    w = nn.Parameter(initialized(INITIALIZATIONS[how]))
    levels = mq.levels.auto("ternary", per=per)
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), name, levels, mq.schedules.until(10))
    assert all(0.22 < share < 0.47 for share in mq.health(opt).tensors[0].shares)


@pytest.mark.parametrize("name", ["md-tanh-s", "gd-tanh"])
@pytest.mark.parametrize("levels", ["binary", "ternary"])
def test_with_a_scale_that_follows_training_starts_from_the_models_own_weights(name, levels):
    initial = initialized(nn.init.xavier_uniform_)
    w = nn.Parameter(initial.clone())
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), name, levels, mq.schedules.until(10))
    torch.testing.assert_close(w.detach(), initial, rtol=1e-4, atol=1e-7)
    assert opt.start_gap < 1e-5
    with torch.no_grad():
        w[0, 0] = 100.0  # far outside the hull of all others
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), name, levels, mq.schedules.until(10))
    assert opt.start_gap > 0.5
    torch.testing.assert_close(w.detach()[1:], initial[1:], rtol=1e-4, atol=1e-7)
    assert "differ by" in repr(opt)


def arctan(levels):
    slope_1 = mq.mirror_from(lambda x: 2 / torch.pi * torch.atan(torch.pi / 2 * x), (-1, 1))
    return methods.MD(mq.levels.auto(levels), mirror=slope_1)


@pytest.mark.parametrize("how", INITIALIZATIONS)
@pytest.mark.parametrize("make", [methods.MDTanhS, methods.GDTanh, arctan])
@pytest.mark.parametrize("beta", [1.0, 2.0, 10.0, 1e4])
@pytest.mark.parametrize("late", [False, True])
def test_a_scale_that_follows_stays_as_it_is_while_no_latent_moves(how, make, beta, late):
    first, w = (nn.Parameter(initialized(INITIALIZATIONS[how])) for _ in range(2))
    method, anneal = make("binary"), mq.schedules.constant(beta)
    opt = mq.MirrorDescent(torch.optim.SGD([first] if late else [w], lr=0.0), method, anneal=anneal)
    if late:
        opt.add_param_group({"params": [w]})
    scale, size = opt.state[w]["scale"].clone(), w.detach().norm()
    for _ in range(2):
        w.grad = torch.ones_like(w)
        opt.step()
    assert 1 / 1.5 < float(opt.state[w]["scale"] / scale) < 1.5
    assert size / 1.5 < w.detach().norm() < size * 1.5


def test_a_few_large_weights_do_not_set_the_scale_of_a_mirror_with_long_tails():
    w = nn.Parameter(initialized(nn.init.normal_))
    with torch.no_grad():
        w[:1] *= 8
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.0), arctan("binary"), anneal=mq.schedules.constant(1.0))
    scale = opt.state[w]["scale"].clone()
    w.grad = torch.ones_like(w)
    opt.step()
    assert 1 < float(opt.state[w]["scale"] / scale) < 1.5


def test_what_start_returns_belongs_to_the_beta_of_the_start():
    seen = []

    class Keeps(methods.MDTanhS):
        def start(self, weight, latent):
            seen.extend([weight, latent])
            return {}

    w = nn.Parameter(initialized(nn.init.xavier_uniform_))
    before = w.detach().clone()
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), Keeps("binary"), anneal=mq.schedules.constant(10.0))
    hull = opt.param_groups[0]["method"].hull(opt.state[w], 10.0)
    torch.testing.assert_close(seen, [before / hull, opt.state[w]["latent"] / hull])


def test_the_hull_narrows_to_the_levels():
    method = methods.MDTanhS("binary")
    w, opt, _ = quadratic(method, 30)
    state = opt.state[w]
    wide, narrow = method.image(state, 1.0), method.image(state, 1e6)
    assert float(wide.abs().max()) > float(state["scale"])
    torch.testing.assert_close(narrow.abs(), state["scale"].expand_as(w), rtol=1e-4, atol=0)


def test_a_channel_of_zeros_gets_the_scale_of_its_tensor():
    weight = torch.tensor([[0.0, 0.0], [0.2, -0.4]])
    assert torch.allclose(Scale("channel").of(weight, BINARY), torch.tensor([[0.15], [0.3]]))
    assert torch.equal(Scale().of(torch.zeros(2, 2), BINARY), torch.ones(1, 1))


@pytest.mark.parametrize("how", ["fixed", "learnt"])
def test_the_start_is_reported_for_every_scale(how):
    w = nn.Parameter(initialized(nn.init.xavier_uniform_))
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), levels=mq.levels.auto(how=how), anneal=mq.schedules.until(9))
    assert opt.start_gap > 0.1
    before = opt.start_gap
    opt.add_param_group({"params": [nn.Parameter(torch.ones(3))], "method": "ref"})
    assert opt.start_gap == before
    with pytest.raises(ValueError, match=r"use mq\.levels\.auto"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))], "scale": Scale()})


def test_proxquant_on_fitted_levels_keeps_its_scale():
    w = nn.Parameter(initialized(nn.init.xavier_uniform_))
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.01), "pq", "binary", mq.schedules.ramp(1e-3))
    before = float(opt.state[w]["scale"])
    for _ in range(50):
        w.grad = torch.zeros_like(w)
        opt.step()
    assert float(opt.state[w]["scale"]) == before


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_a_learnt_scale_moves_in_proportion_and_stays_positive(per):
    torch.manual_seed(0)
    layer = nn.Linear(16, 4, bias=False)
    opt = mq.MirrorDescent(torch.optim.SGD(layer.parameters(), lr=0.01), "bc", mq.levels.auto(per=per, how="learnt"))
    scale, signs = opt.state[layer.weight]["scale"], layer.weight.detach().sign()
    for _ in range(20):  # gradients that would make it negative
        before, slope = scale.detach().clone(), signs * layer.weight.detach().sign()
        (layer.weight * signs).sum().backward()
        opt.step()
        opt.zero_grad()
        expected = before * (-0.01 * before * slope.sum_to_size(scale.shape)).exp()  # log c - lr · c · dL/dc
        torch.testing.assert_close(scale.detach(), expected, rtol=1e-5, atol=0)
    assert bool((scale > 0).all())


def test_an_exception_in_a_step_leaves_learnt_scales_as_they_were():
    class Interrupted(methods.MDTanhS):
        def pull_back(self, grad, latent, beta):
            if stop and latent.shape[0] == stop:
                raise KeyboardInterrupt
            return grad

    stop = 0
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False))
    method = Interrupted(mq.levels.auto(how="learnt"))
    opt = mq.MirrorDescent(torch.optim.Adam(model.parameters(), lr=0.01), method, anneal=mq.schedules.constant(1.0))
    for stop in (0, 3, 4, 3, 0):
        before = [opt.state[layer.weight]["scale"].detach().clone() for layer in model]
        model(torch.ones(2, 5)).square().sum().backward()
        with pytest.raises(KeyboardInterrupt) if stop else contextlib.nullcontext():
            opt.step()
        for layer, scale in zip(model, before, strict=True):
            assert torch.equal(opt.state[layer.weight]["scale"], scale) == bool(stop)


@pytest.mark.parametrize("sign", [-1, 1])
def test_no_step_is_too_large_for_a_learnt_scale(sign):
    layer = nn.Linear(16, 4, bias=False)
    opt = mq.MirrorDescent(torch.optim.SGD(layer.parameters(), lr=100.0), "bc", mq.levels.auto(how="learnt"))
    scale = opt.state[layer.weight]["scale"]
    for _ in range(3):
        (1e6 * sign * layer.weight.abs()).sum().backward()
        opt.step()
        opt.zero_grad()
        assert bool(scale.isfinite())
        assert bool(scale > 0)
        assert not bool(layer.weight.isnan().any())


class BothSides(torch.optim.SGD):
    """Evaluates the closure before and after its step, as optimizers with a line search do."""

    def step(self, closure=None):
        loss = super().step(closure)
        closure()
        return loss


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_closure_sees_a_learnt_scale_as_it_is(fails):
    layer, seen = nn.Linear(16, 4, bias=False), []
    opt = mq.MirrorDescent(BothSides(layer.parameters(), lr=0.1), "bc", mq.levels.auto(how="learnt"))
    scale = opt.state[layer.weight]["scale"]

    def closure():
        seen.append(float(scale.detach()))
        if len(seen) == fails:
            raise ArithmeticError
        opt.zero_grad()
        loss = layer.weight.square().mean()
        loss.backward()
        return loss

    before = float(scale.detach())
    with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
        opt.step(closure)
    assert all(0.9 * before < value <= before for value in (*seen, float(scale.detach())))


def test_a_learnt_scale_rests_once_it_is_finalized():
    w, opt, _ = quadratic(methods.MDTanhS(mq.levels.auto(how="learnt")), 5)
    opt.finalize()
    before = opt.state[w]["scale"].detach().clone()
    for _ in range(3):
        w.grad = torch.ones_like(w)
        opt.step()
    assert torch.equal(opt.state[w]["scale"], before)


def test_levels_that_fit_each_layer_need_to_know_the_end_of_training():
    w = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"needs anneal=mq\.schedules\.until\(steps\)"):
        mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), levels="binary")
    mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), "bc", "binary")  # which is not annealed


def test_weights_loaded_from_inside_quantized_are_kept_with_their_scale():
    method = methods.MDTanhS(mq.levels.auto(per="channel", how="learnt"))
    w, opt, _ = quadratic(method, 10)
    with opt.quantized():
        best = w.detach().clone()
    w, opt, _ = quadratic(method, 20)
    with torch.no_grad():
        w.copy_(best)
    opt.finalize()
    assert torch.equal(w, best)


def test_a_state_fits_the_same_options_alone():
    tanh, atan = (mq.mirror_from(f, (-1, 1)) for f in (torch.tanh, lambda x: 2 / torch.pi * torch.atan(x)))
    state = quadratic(methods.MD(mirror=tanh), 3)[1].state_dict()
    quadratic(methods.MD(mirror=tanh), 4, state, start=3)
    with pytest.raises(ValueError, match="build it as it was"):
        quadratic(methods.MD(mirror=atan), 4, state, start=3)
    state = quadratic(methods.MDTanhS(mq.levels.auto(per="channel", how="fixed")), 3)[1].state_dict()
    with pytest.raises(ValueError, match="build it as it was"):
        quadratic(methods.MDTanhS(), 4, state, start=3)
    with pytest.raises(ValueError, match="build it as it was"):
        quadratic(methods.MDTanhS(mq.levels.auto(per="channel", how="computed")), 4, state, start=3)


def test_bad_scales_are_refused():
    with pytest.raises(ValueError, match="per is 'row', but it must be one of tensor, channel"):
        Scale("row")
    with pytest.raises(ValueError, match="brings its own levels"):
        methods.get(methods.BC(), "binary")
    with pytest.raises(TypeError, match="or one of 'binary', 'ternary'"):
        methods.get("bc", "quaternary")


def test_learnt_scales_of_several_groups_are_trained_in_float_groups():
    model, scaled = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), mq.levels.auto(per="channel", how="learnt")
    opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model), lr=0.1), levels=scaled, anneal=mq.schedules.until(9))
    extra = nn.Linear(3, 2)
    opt.add_param_group({"params": [("extra", extra.weight)]})
    weights = [model[0].weight, model[1].weight, extra.weight]
    before = [opt.state[w]["scale"].detach().clone() for w in weights]
    extra(model(torch.randn(5, 6))).square().sum().backward()
    opt.step()
    for w, scale in zip(weights, before, strict=True):
        assert (opt.state[w]["scale"] != scale).any()
        assert sum(opt.state[w]["scale"] is p for group in opt.param_groups for p in group["params"]) == 1
    copy.deepcopy(opt).load_state_dict(opt.state_dict())
