"""Random networks run packed as they run plain; `python tests/fuzz_graphs.py 10000` compares many more."""

import fuzz_graphs
import pytest

pytestmark = pytest.mark.usefixtures("small_on_bits")


def compare(count, first):
    """How many of so many networks there were, and how many of those ran fused."""
    found = [result for seed in range(first, first + count) if (result := fuzz_graphs.check(seed)) is not None]
    return len(found), sum(found)


def test_random_networks_do_the_same_packed():
    valid, fused = compare(40, 0)
    assert valid > 25
    assert fused > valid / 2  # not by running nothing fused


@pytest.mark.slow
def test_more_random_networks_do_the_same_packed():
    """Each is compiled, which takes a second: python tests/fuzz_graphs.py makes more."""
    valid, fused = compare(150, 10**6)
    assert valid > 90
    assert fused > valid / 2
