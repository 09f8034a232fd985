"""Level sets: the quantization levels Q = {q_1 < ... < q_d} that a weight may take (eq:dnnobj).

>>> import mirrorquant as mq
>>> mq.TERNARY
Levels(-1.0, 0.0, 1.0)
>>> 0.5 * mq.BINARY
Levels(-0.5, 0.5)
>>> mq.BINARY.nearest(torch.tensor([-0.3, 0.0, 2.0]))
tensor([-1.,  1.,  1.])
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["BINARY", "TERNARY", "Levels"]


class Levels(tuple[float, ...]):
    """An ordered set of two or more quantization levels.

    >>> q = Levels(-1, 0.25, 1)
    >>> q.thresholds, q.centre, q.radius
    ((-0.375, 0.625), 0.0, 1.0)
    """

    def __new__(cls, *values: float) -> Levels:
        try:
            levels = super().__new__(cls, map(float, values))
        except (TypeError, ValueError) as error:
            raise TypeError(f"levels are {list(values)}, but each must be a number: try Levels(-1, 1)") from error
        if len(levels) < 2 or not all(map(math.isfinite, levels)) or any(a >= b for a, b in pairwise(levels)):
            expected = "two or more finite numbers that increase strictly: try Levels(-1, 1)"
            raise ValueError(f"levels are {list(levels)}, but they must be {expected}")
        return levels

    @staticmethod
    def of(values: Iterable[float]) -> Levels:
        """Levels as they are, or made from a plain sequence such as ``[-1, 0, 1]``."""
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"levels are {values!r}, but they must be a sequence of numbers: try [-1, 0, 1]")
        return values if isinstance(values, Levels) else Levels(*values)

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The midpoints (q_i + q_{i+1}) / 2, where the nearest level changes."""
        return tuple((a + b) / 2 for a, b in pairwise(self))

    @property
    def centre(self) -> float:
        """The middle of conv(Q) = [q_min, q_max]."""
        return (self[0] + self[-1]) / 2

    @property
    def radius(self) -> float:
        """Half the length of conv(Q); 1 for the paper's binary and ternary sets."""
        return (self[-1] - self[0]) / 2

    @property
    def fit(self) -> float:
        """The factor that fits the levels to weights with a mean absolute value of 1.

        It puts the innermost threshold at 0.7, as ternary weight networks do; if zero is a threshold, the innermost
        level at 1.

        >>> BINARY.fit, TERNARY.fit
        (1.0, 1.4)
        """
        inner = min(abs(t) for t in self.thresholds)
        return 0.7 / inner if inner else 1 / min(abs(level) for level in self)

    def nearest(self, weight: Tensor) -> Tensor:
        """The level nearest to each weight; a tie goes up, so sign(0) = +1, never 0.

        Exact in every dtype: levels are selected, never computed.
        """
        nearest = torch.full_like(weight, self[0])
        for threshold, level in zip(self.thresholds, self[1:], strict=True):
            nearest = torch.where(weight >= threshold, level, nearest)
        return nearest

    def tensor(self, like: Tensor) -> Tensor:
        """The vector q of the levels, in the dtype and on the device of ``like``."""
        return torch.tensor(tuple(self), dtype=like.dtype, device=like.device)

    def holds(self, weight: Tensor, scale: Tensor | None = None) -> bool:
        """Whether every entry is exactly a level (times the scale), as the weight's dtype represents it.

        >>> BINARY.holds(torch.tensor([1.0, -1.0])), BINARY.holds(torch.tensor([0.999]))
        (True, False)
        """
        on_level = torch.zeros_like(weight, dtype=torch.bool)
        for level in self.tensor(weight) if scale is None else [(level * scale).to(weight.dtype) for level in self]:
            on_level |= weight == level
        return bool(on_level.all())

    def __rmul__(self, scale: float) -> Levels:  # type: ignore[override]
        """The levels times a positive scale, as in ``0.1 * BINARY``."""
        if not scale > 0:
            raise ValueError(f"the scale is {scale}, but it must be positive to keep the levels in order")
        return Levels(*(scale * level for level in self))

    __mul__ = __rmul__  # type: ignore[assignment]

    def __getnewargs__(self) -> tuple[float, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"Levels({', '.join(map(str, self))})"


BINARY = Levels(-1, 1)
TERNARY = Levels(-1, 0, 1)
