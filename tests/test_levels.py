"""Level sets: what is accepted, and that nearest is exact."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirrorquant import BINARY, TERNARY, Levels
from mirrorquant.levels import auto

level_sets = st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=9, unique=True).map(sorted)


@given(level_sets, st.lists(st.floats(-20, 20, width=32), max_size=20))
def test_nearest_is_the_level_at_the_smallest_distance(values, weights):
    levels = Levels(*values)
    weight = torch.tensor(weights, dtype=torch.float64)
    nearest = levels.nearest(weight)
    assert levels.holds(nearest)
    for w, q in zip(weight.tolist(), nearest.tolist(), strict=True):
        assert abs(w - q) == min(abs(w - level) for level in values)


@pytest.mark.parametrize("text", ["Binary", "01"])
def test_other_text_is_no_level_set(text):
    with pytest.raises(TypeError, match=rf"levels are '{text}', but they must be a sequence of numbers such as"):
        Levels.of(text)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_sign_of_zero_is_plus_one(zero):
    assert BINARY.nearest(torch.tensor([zero])).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nearest_keeps_dtype_and_layout_and_is_exact(dtype):
    weight = torch.randn(4, 8, 3, 3).to(dtype).to(memory_format=torch.channels_last)
    levels = Levels(-0.7, 0.1, 0.3)
    nearest = levels.nearest(weight)
    assert nearest.dtype == dtype
    assert nearest.stride() == weight.stride()
    assert set(nearest.unique().tolist()) <= set(torch.tensor(levels, dtype=dtype).tolist())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "two or more"),
        ([1], "two or more"),
        ([1, -1], r"try Levels\(-1, 1\)"),
        ([0, 0, 1], "increase strictly"),
        ([1, 1], r"increase strictly: try Levels\(-1, 1\)"),
        ([float("nan"), 1], "finite"),
        ([0, float("inf")], "finite"),
    ],
)
def test_bad_levels_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Levels(*values)


@pytest.mark.parametrize("values", [["a", "b"], [[-1, 1]], [1j, 2], [None, 1]])
def test_levels_that_are_no_numbers_are_refused(values):
    with pytest.raises(TypeError, match=r"levels are \[.*\], but each must be a number: try Levels\(-1, 1\)"):
        Levels.of(values)


def test_levels_are_values():
    assert Levels.of([-1, 0, 1]) == TERNARY
    assert pickle.loads(pickle.dumps(TERNARY)) == copy.deepcopy(TERNARY) == TERNARY
    assert isinstance(pickle.loads(pickle.dumps(TERNARY)), Levels)
    assert 2 * BINARY == BINARY * 2 == Levels(-2, 2)
    with pytest.raises(ValueError, match="positive"):
        -1 * BINARY


@pytest.mark.parametrize("values", [[-1, 0.99], [-0.1 * 3, 0.3], [-1 + 0.4 * k for k in range(6)]], ids=str)
def test_a_threshold_that_is_zero_but_for_rounding_counts_as_zero(values):
    levels = Levels(*values)
    assert levels.fit == 1 / min(map(abs, levels))


def test_levels_with_a_scale_can_be_copied_pickled_and_multiplied():
    levels = auto("ternary", per="channel")
    for other in (copy.deepcopy(levels), pickle.loads(pickle.dumps(levels))):
        assert (other, other.scale) == (levels, levels.scale)
    assert (0.5 * levels).scale == levels.scale
