"""Level sets: the quantization levels Q = {q_1 < ... < q_d} that a weight may take (eq:dnnobj).

>>> import mirrorquant as mq
>>> mq.TERNARY
Levels(-1.0, 0.0, 1.0)
>>> 0.5 * mq.BINARY
Levels(-0.5, 0.5)
>>> mq.BINARY.nearest(torch.tensor([-0.3, 0.0, 2.0]))
tensor([-1.,  1.,  1.])

The paper fixes the levels at -1, (0,) +1. :func:`auto` fits them to each layer by a scale; ``levels="binary"`` and
``levels="ternary"`` are short for it.

>>> mq.levels.auto("ternary", per="channel")
Levels(-1.0, 0.0, 1.0, scale=Scale(per='channel', how='auto', size='mean'))
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["BINARY", "TERNARY", "Levels", "Scale", "auto"]

ROOM = 3.0  # of the hull beyond the levels at β = 1, in units of the final scale


class Levels(tuple[float, ...]):
    """An ordered set of two or more quantization levels, perhaps with a :class:`Scale` that fits them to each layer.

    >>> q = Levels(-1, 0.25, 1)
    >>> q.thresholds, q.centre, q.radius
    ((-0.375, 0.625), 0.0, 1.0)
    """

    scale: Scale | None

    def __new__(cls, *values: float, scale: Scale | None = None) -> Levels:
        try:
            levels = super().__new__(cls, map(float, values))
        except (TypeError, ValueError) as error:
            raise TypeError(f"levels are {list(values)}, but each must be a number: try Levels(-1, 1)") from error
        if len(levels) < 2 or not all(map(math.isfinite, levels)) or any(a >= b for a, b in pairwise(levels)):
            expected = "two or more finite numbers that increase strictly: try Levels(-1, 1)"
            raise ValueError(f"levels are {list(levels)}, but they must be {expected}")
        levels.scale = scale
        return levels

    @staticmethod
    def of(values: Iterable[float] | str) -> Levels:
        """Levels as they are, or from a sequence such as ``[-1, 0, 1]``; "binary" and "ternary" fit each layer."""
        if isinstance(values, str) and values in _NAMES:
            return auto(values)
        if isinstance(values, str) or not isinstance(values, Iterable):
            expected = "a sequence of numbers such as [-1, 0, 1], or one of " + ", ".join(map(repr, _NAMES))
            raise TypeError(f"levels are {values!r}, but they must be {expected}")
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

        It puts the innermost threshold at 0.7, as ternary weight networks do; if that is (almost) zero, the innermost
        level at 1.

        >>> BINARY.fit, TERNARY.fit
        (1.0, 1.4)
        """
        inner, least = min(abs(t) for t in self.thresholds), min(abs(level) for level in self if level)
        return 0.7 / inner if inner > least / 4 else 1 / least

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

    def scales(self, weight: Tensor, own: Tensor) -> Tensor:
        """The scales of a weight on its levels: where ``own`` does not fit, by which the largest entry is some level.

        ``own`` has a size of 1 in the dimensions that share a scale; where no scale fits, it is the result.

        >>> Levels(-4, -1, 1, 4).scales(torch.tensor([[0.5, -2.0], [1.0, 1.0], [1.0, 2.0]]), torch.ones(3, 1)).T
        tensor([[0.5000, 1.0000, 1.0000]])
        """
        dims = [i for i in range(weight.dim()) if own.shape[i] == 1]
        if not weight.numel() or not dims:
            return own
        largest, tries = weight.abs().to(own.dtype).amax(dims, keepdim=True), [own]
        for level in sorted({abs(level) for level in self if level}, reverse=True):
            near = torch.where(largest > 0, largest / level, own)  # which may be one rounding unit off
            tries += [near, near.nextafter(2 * near), near.nextafter(near / 2)]
        found, missing, levels = own, torch.ones_like(own, dtype=torch.bool), self.tensor(own).tolist()
        for scale in tries:
            on_level = torch.stack([weight == (level * scale).to(weight.dtype) for level in levels]).any(0)
            fits = on_level.all(dims, keepdim=True) & missing
            found, missing = torch.where(fits, scale, found), missing & ~fits
            if not bool(missing.any()):
                break
        return found

    def __rmul__(self, scale: float) -> Levels:  # type: ignore[override]
        """The levels times a positive scale, as in ``0.1 * BINARY``."""
        if not scale > 0:
            raise ValueError(f"the scale is {scale}, but it must be positive to keep the levels in order")
        return Levels(*(scale * level for level in self), scale=self.scale)

    __mul__ = __rmul__  # type: ignore[assignment]

    def __getnewargs__(self) -> tuple[float, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        scale = [] if self.scale is None else [f"scale={self.scale}"]
        return f"Levels({', '.join([*map(str, self), *scale])})"


BINARY = Levels(-1, 1)
TERNARY = Levels(-1, 0, 1)
_NAMES = {"binary": BINARY, "ternary": TERNARY}
_CHOICES = {"per": ("tensor", "channel"), "how": ("auto", "fixed", "computed", "learnt"), "size": ("mean", "he")}


@dataclass(frozen=True)
class Scale:
    """A factor c > 0 on the levels of a tensor: w = c · P(w̃ / c), so that the levels fit the weights.

    Args:
        per: one factor per "tensor", or one per "channel": dimension 0 of a matrix or kernel, its output channels (of a
            transposed convolution its input channels).
        how: "fixed" as computed from the initial weights; "computed" again from the latent at each step; or "learnt" by
            the base optimizer, with dL/dc = Σ P(w̃ / c) · dL/dw; it moves log c, so that c stays positive and changes
            in proportion. "auto" is "computed" for the methods whose latent is on the scale of the weights, and "fixed"
            for the others.
        size: "mean" for :attr:`Levels.fit` · mean |w|, or "he" for √(2 / fan-in), which is never "computed".
    """

    per: str = "tensor"
    how: str = "auto"
    size: str = "mean"

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(known)}")
        if self.size == "he" and self.how == "computed":
            raise ValueError("size is 'he', which depends on the shape alone: choose how='fixed' or 'learnt'")

    def of(self, weight: Tensor, levels: Levels) -> Tensor:
        """c = fit · mean |w|, or √(2 / fan-in); a channel of zeros gets the tensor's mean, and a tensor of zeros 1.

        >>> Scale("channel").of(torch.tensor([[0.1, -0.3], [0.0, 0.0]]), BINARY)
        tensor([[0.2000],
                [0.1000]])
        """
        first = 1 if self.per == "channel" and weight.dim() > 1 else 0
        dims = tuple(range(first, weight.dim()))
        size = weight.abs().mean(dims, keepdim=True) if dims else weight.abs()
        if self.size == "he":
            inputs = weight.numel() / weight.shape[0] if weight.dim() > 1 else weight.numel()
            return torch.full_like(size, math.sqrt(2 / max(inputs, 1)))
        size = torch.where(size > 0, size, size.mean())
        return torch.where(size > 0, levels.fit * size, 1.0)


def auto(
    levels: Iterable[float] | str = "binary", *, per: str = "tensor", how: str = "auto", size: str = "mean"
) -> Levels:
    """Levels that fit each layer: "binary", "ternary" or any level set, times a :class:`Scale`.

    >>> auto([-1, -0.5, 0.5, 1], how="learnt")
    Levels(-1.0, -0.5, 0.5, 1.0, scale=Scale(per='tensor', how='learnt', size='mean'))
    """
    named = _NAMES.get(levels) if isinstance(levels, str) else None
    return Levels(*(named or Levels.of(levels)), scale=Scale(per, how, size))
