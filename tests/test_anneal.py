"""Annealing schedules."""

import pytest

from mirrorquant import anneal


def test_geometric_is_the_papers_schedule():
    schedule, beta = anneal.geometric(1.02, every=200), 1.0
    for k in range(1000):  # the authors' loop: multiply after iteration 0, 200, 400, ...
        assert schedule(k) == pytest.approx(beta, rel=1e-12)
        if k % 200 == 0:
            beta = min(beta * 1.02, 1e35)


def test_geometric_stops_at_its_cap():
    assert anneal.geometric(1.2, every=1)(10**6) == 1e35
    assert anneal.geometric(2.0, cap=10.0)(100) == 10.0


def test_linear_is_proxquants_lambda():
    schedule = anneal.linear(1e-4, every=351, start=0.0)
    assert schedule(350) == 0.0
    assert schedule(351) == pytest.approx(1e-4)
    assert schedule(351 * 284) == pytest.approx(284e-4)


def test_cosine_rises_from_start_to_end():
    schedule = anneal.cosine(end=1e4, steps=100)
    betas = [schedule(k) for k in range(200)]
    assert betas[0] == 1.0
    assert betas[100:] == pytest.approx([1e4] * 100)
    assert betas == sorted(betas)


@pytest.mark.parametrize("bad", [lambda: anneal.geometric(0.0), lambda: anneal.geometric(1.1, every=0)])
def test_bad_schedules_are_refused(bad):
    with pytest.raises(ValueError, match="must be a positive finite number"):
        bad()
