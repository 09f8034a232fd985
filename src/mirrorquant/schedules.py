"""Schedules: a hyperparameter as a function of the step k, for β and for the learning rate alike.

Any function ``step -> value`` is a schedule; these are the usual ones. The paper uses ``geometric`` for β, which starts
at 1 and is multiplied by ``scale`` every ``every`` iterations up to a cap, and ``step`` for the learning rate.

>>> beta = geometric(1.02, every=200)
>>> beta(0), beta(1), beta(200), beta(201)
(1.0, 1.02, 1.02, 1.0404)
>>> lr = warmup(cosine(0.1, end=0.0, steps=100), steps=10)
>>> lr(0), lr(9), lr(10), round(lr(60), 9), lr(110)
(0.01, 0.1, 0.1, 0.05, 0.0)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Schedule", "build", "constant", "cosine", "geometric", "linear", "names", "ramp", "step", "until", "warmup"]

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class _Schedule:
    """Checks the numbers of a schedule: all must be finite, counts and factors positive."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("every", "steps", "scale", "cap") and not value > 0:
                raise ValueError(f"{field.name} is {value}, but it must be positive")
            if isinstance(value, (int, float)) and not math.isfinite(value):
                raise ValueError(f"{field.name} is {value}, but it must be finite")


@dataclass(frozen=True)
class constant(_Schedule):
    """The same value at each step."""

    start: float = 1.0

    def __call__(self, step: int) -> float:
        return self.start


@dataclass(frozen=True)
class step(_Schedule):
    """start · scale^⌊k / every⌋: the paper's learning rate.

    >>> step(0.1, scale=0.2, every=30000)(29999), step(0.1, scale=0.2, every=30000)(30000)
    (0.1, 0.020000000000000004)
    """

    start: float
    scale: float
    every: int

    def __call__(self, step: int) -> float:
        return self.start * self.scale ** (step // self.every)


@dataclass(frozen=True)
class geometric(_Schedule):
    """min(start · scale^⌈k / every⌉, cap): the paper's β, multiplied for the first time after step 0.

    >>> geometric(10.0, every=1)(1000)
    1e+35
    """

    scale: float
    every: int = 1
    start: float = 1.0
    cap: float = 1e35

    def __call__(self, step: int) -> float:
        try:
            return min(self.start * self.scale ** -(-step // self.every), self.cap)
        except OverflowError:
            return self.cap


@dataclass(frozen=True)
class until(_Schedule):
    """From 1 to ``end`` in equal ratios over a ``share`` of training's ``steps``, then ``end``: always hard at the end.

    Steps are calls of ``opt.step()``: with gradients of several batches per step, fewer than the batches.

    >>> beta = until(1000)
    >>> beta(0), round(beta(400), 6), beta(800), beta(1000)
    (1.0, 100.0, 10000.0, 10000.0)
    """

    steps: int
    share: float = 0.8
    end: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1 or self.end < 1:
            raise ValueError(f"share is {self.share} and end is {self.end}, expected 0 < share <= 1 and end >= 1")

    def __call__(self, step: int) -> float:
        return float(self.end ** min(step / (self.share * self.steps), 1.0))


@dataclass(frozen=True)
class ramp(_Schedule):
    """min(start + rate · ⌊k / every⌋, cap); with ``every`` the number of batches per epoch, ProxQuant's λ.

    >>> ramp(1e-4, every=351)(702)
    0.0002
    """

    rate: float
    every: int = 1
    start: float = 0.0
    cap: float = 1e35

    def __call__(self, step: int) -> float:
        return min(self.start + self.rate * (step // self.every), self.cap)


@dataclass(frozen=True)
class linear(_Schedule):
    """From ``start`` to ``end`` along a straight line over ``steps``, then ``end``.

    >>> linear(1.0, end=0.0, steps=100)(25)
    0.75
    """

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        done = min(step / self.steps, 1.0)
        return self.start + (self.end - self.start) * done


@dataclass(frozen=True)
class cosine(_Schedule):
    """From ``start`` to ``end`` over ``steps`` along half a cosine (slow, fast, slow), of the logarithm with ``log``.

    >>> round(cosine(1.0, end=1e4, steps=100, log=True)(50), 9)
    100.0
    """

    start: float
    end: float
    steps: int
    log: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log and not min(self.start, self.end) > 0:
            raise ValueError(f"log needs positive ends, but cosine runs from {self.start:g} to {self.end:g}")

    def __call__(self, step: int) -> float:
        left = (1 + math.cos(math.pi * min(step / self.steps, 1.0))) / 2
        if self.log:
            return float(self.end * (self.start / self.end) ** left)
        return self.end + (self.start - self.end) * left


@dataclass(frozen=True)
class warmup(_Schedule):
    """A straight line up to the first value of another schedule over ``steps``; then that schedule, from its start."""

    schedule: Schedule
    steps: int

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.schedule(step - self.steps)
        return self.schedule(0) * (step + 1) / self.steps


def names() -> list[str]:
    """The schedules that :func:`build` knows.

    >>> names()
    ['constant', 'step', 'geometric', 'until', 'ramp', 'linear', 'cosine']
    """
    return [cls.__name__ for cls in _Schedule.__subclasses__() if cls is not warmup]


def build(name: str, **terms: Any) -> Schedule:
    """The schedule of that name, from the terms that it takes; the others are ignored.

    >>> build("cosine", start=0.1, end=0.0, steps=100, scale=0.2, every=30)
    cosine(start=0.1, end=0.0, steps=100, log=False)
    """
    if name not in names():
        raise ValueError(f"there is no schedule {name!r}: use one of {', '.join(names())}")
    cls: Any = globals()[name]
    return cls(**{f.name: terms[f.name] for f in dataclasses.fields(cls) if f.name in terms})  # type: ignore[no-any-return]
