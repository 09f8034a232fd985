"""Schedules of β and of the learning rate."""

import pytest

from mirrorquant import schedules


def test_geometric_is_the_papers_beta():
    schedule, beta = schedules.geometric(1.02, every=200), 1.0
    for k in range(1000):  # the authors' loop: multiply after iteration 0, 200, 400, ...
        assert schedule(k) == pytest.approx(beta, rel=1e-12)
        if k % 200 == 0:
            beta = min(beta * 1.02, 1e35)


def test_step_is_the_papers_learning_rate():
    schedule, lr = schedules.step(0.1, scale=0.3, every=300), 0.1
    for k in range(1000):
        lr = lr * 0.3 if k and k % 300 == 0 else lr
        assert schedule(k) == pytest.approx(lr, rel=1e-12)


def test_geometric_stops_at_its_cap():
    assert schedules.geometric(1.2, every=1)(10**6) == 1e35
    assert schedules.geometric(2.0, cap=10.0)(100) == 10.0


def test_ramp_is_proxquants_lambda():
    schedule = schedules.ramp(1e-4, every=351)
    assert schedule(350) == 0.0
    assert schedule(351) == pytest.approx(1e-4)
    assert schedule(351 * 284) == pytest.approx(284e-4)


@pytest.mark.parametrize("log", [False, True])
def test_cosine_rises_from_start_to_end(log):
    betas = [schedules.cosine(1.0, end=1e4, steps=100, log=log)(k) for k in range(200)]
    assert betas[0] == 1.0
    assert betas[100:] == pytest.approx([1e4] * 100)
    assert betas == sorted(betas)
    middle = 100.0 if log else 5000.5
    assert betas[50] == pytest.approx(middle)


def test_linear_falls_to_its_end_and_stays():
    values = [schedules.linear(1.0, end=0.2, steps=10)(k) for k in range(20)]
    assert values[:3] == pytest.approx([1.0, 0.92, 0.84])
    assert values[10:] == pytest.approx([0.2] * 10)


@pytest.mark.parametrize("name", schedules.names())
def test_a_warm_up_precedes_any_schedule(name):
    inner = schedules.build(name, start=2.0, end=4.0, steps=50, scale=0.5, every=10, rate=0.1)
    warm = schedules.warmup(inner, steps=4)
    assert [warm(k) for k in range(4)] == pytest.approx([inner(0) * part for part in (0.25, 0.5, 0.75, 1.0)])
    assert [warm(k + 4) for k in range(60)] == [inner(k) for k in range(60)]


def test_build_names_an_unknown_schedule():
    with pytest.raises(ValueError, match="no schedule 'cosin': use one of constant, step"):
        schedules.build("cosin", start=1.0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: schedules.geometric(0.0), "scale is 0.0, but it must be positive"),
        (lambda: schedules.step(0.1, 0.5, every=0), "every is 0, but it must be positive"),
        (lambda: schedules.linear(0.1, float("inf"), 10), "end is inf, but it must be finite"),
        (lambda: schedules.cosine(0.0, 1.0, 10, log=True), "log needs positive ends"),
    ],
)
def test_bad_schedules_raise(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()
