"""Annealing: the hyperparameter β as a function of the step k.

Any function ``step -> beta`` is a schedule; these are the usual ones. The paper's is ``geometric``: β starts at 1 and
is multiplied by ``scale`` every ``every`` iterations, up to a cap.

>>> schedule = geometric(1.02, every=200)
>>> schedule(0), schedule(1), schedule(200), schedule(201)
(1.0, 1.02, 1.02, 1.0404)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Schedule", "constant", "cosine", "geometric", "linear"]

Schedule = Callable[[int], float]


def _check(**positive: float) -> None:
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}, but it must be a positive finite number")


@dataclass(frozen=True)
class constant:
    """β_k = beta."""

    beta: float = 1.0

    def __call__(self, step: int) -> float:
        return self.beta


@dataclass(frozen=True)
class geometric:
    """β_k = min(start · scale^⌈k / every⌉, cap): the paper's schedule, multiplied for the first time after step 0.

    >>> geometric(10.0, every=1)(1000)
    1e+35
    """

    scale: float
    every: int = 1
    start: float = 1.0
    cap: float = 1e35

    def __post_init__(self) -> None:
        _check(scale=self.scale, every=self.every, start=self.start, cap=self.cap)

    def __call__(self, step: int) -> float:
        try:
            return min(self.start * self.scale ** -(-step // self.every), self.cap)
        except OverflowError:
            return self.cap


@dataclass(frozen=True)
class linear:
    """β_k = min(start + rate · ⌊k / every⌋, cap); with start 0 and the batches of an epoch, ProxQuant's λ.

    >>> linear(1e-4, every=351, start=0.0)(702)
    0.0002
    """

    rate: float
    every: int = 1
    start: float = 1.0
    cap: float = 1e35

    def __post_init__(self) -> None:
        _check(every=self.every, cap=self.cap)

    def __call__(self, step: int) -> float:
        return min(self.start + self.rate * (step // self.every), self.cap)


@dataclass(frozen=True)
class cosine:
    """From ``start`` to ``end`` over ``steps``, along half a cosine in log β: slow, fast, slow.

    >>> round(cosine(end=1e4, steps=100)(50), 9)
    100.0
    """

    end: float
    steps: int
    start: float = 1.0

    def __post_init__(self) -> None:
        _check(end=self.end, steps=self.steps, start=self.start)

    def __call__(self, step: int) -> float:
        done = (1 - math.cos(math.pi * min(step / self.steps, 1.0))) / 2
        return float(self.start * (self.end / self.start) ** done)
