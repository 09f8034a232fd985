"""Health: whether quantized tensors use their levels, and how far rounding would move their weights.

>>> import torch, mirrorquant as mq
>>> from torch import nn
>>> _ = torch.manual_seed(0)
>>> model = nn.Linear(64, 8)
>>> opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model)), levels=0.1 * mq.TERNARY)
>>> report = mq.health(opt)
>>> print(report)
tensor  weights  share of weights per level       gap  beta  |latent|
weight      512  -0.1: 32 %  0: 38 %  0.1: 30 %  32 %  1     0.065
>>> x, y = torch.randn(32, 64), torch.randint(8, (32,))
>>> report = mq.health(opt, lambda: nn.functional.cross_entropy(model(x), y))
>>> report.soft_loss < report.rounded_loss
True
>>> for problem in report.problems:
...     print(problem)
rounding moves the weights of weight by 32% of the distance between levels on average, more than 5% (beta is 1,
the typical |latent| 0.065): train longer or anneal faster, and recalibrate batch norm afterwards (mq.recalibrate)

The typical |latent| is the median of the absolute values; for methods with one latent number per level, the median of
half the difference between the two largest. If β times it is well above 1, most weights are near their levels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mirrorquant._text import table
from mirrorquant.levels import BINARY, TERNARY, Levels
from mirrorquant.select import listed

if TYPE_CHECKING:
    from mirrorquant.optimizer import MirrorDescent

__all__ = ["Health", "HealthWarning", "TensorHealth", "health"]

COLLAPSED = 0.999  # share of the weights on one level
FEWEST = 64  # weights: for a smaller tensor, one level may well be right
WIDEST_GAP = 0.05  # of the distance between levels; weights spread evenly have 0.25


class HealthWarning(UserWarning):
    """The network trains and rounds, but probably not as intended."""


@dataclass(frozen=True)
class TensorHealth:
    """A quantized tensor: how its rounded weights use the levels, and how far they are from the current ones."""

    name: str
    levels: Levels
    count: int
    shares: tuple[float, ...]
    gap: float
    beta: float
    latent: float

    @property
    def collapsed(self) -> bool:
        """Whether there are many weights, and (almost) all of them round to one level."""
        return self.count >= FEWEST and max(self.shares) >= COLLAPSED

    @property
    def main_level(self) -> float:
        """The level to which most weights round."""
        return self.levels[self.shares.index(max(self.shares))]


@dataclass(frozen=True)
class Health:
    """The report of :func:`health`: one entry per quantized tensor; as text, a table."""

    tensors: tuple[TensorHealth, ...]
    soft_loss: float | None = None
    rounded_loss: float | None = None

    @property
    def problems(self) -> list[str]:
        """All problems, one line each; empty for a healthy network that can be rounded now."""
        return [*self.collapses, *self.gaps]

    @property
    def collapses(self) -> list[str]:
        """Tensors that have lost all levels but one, one line per level."""
        names: dict[float, list[str]] = {}
        for t in self.tensors:
            if t.collapsed:
                names.setdefault(t.main_level, []).append(t.name)
        return [
            f"all weights of {len(found)} of {len(self.tensors)} quantized tensors ({listed(found)}) round to {level:g}"
            ", so they hold no information: use levels that fit each layer (mq.levels.auto), or skip these layers"
            for level, found in sorted(names.items())
        ]

    @property
    def gaps(self) -> list[str]:
        """Tensors that rounding would change a lot, in one line."""
        wide = [t for t in self.tensors if t.gap > WIDEST_GAP]
        if not wide:
            return []
        worst = max(wide, key=lambda t: t.gap)
        others = f"; {len(wide)} of {len(self.tensors)} tensors have such a gap" if len(wide) > 1 else ""
        return [
            f"rounding moves the weights of {worst.name} by {worst.gap:.0%} of the distance between levels on average, "
            f"more than {WIDEST_GAP:.0%} (beta is {worst.beta:.3g}, the typical |latent| {worst.latent:.2g}{others}): "
            "train longer or anneal faster, and recalibrate batch norm afterwards (mq.recalibrate)"
        ]

    def __str__(self) -> str:
        rows = [["tensor", "weights", "share of weights per level", "gap", "beta", "|latent|"]]
        for t in self.tensors:
            shares = "  ".join(f"{level:g}: {share:.0%}" for level, share in zip(t.levels, t.shares, strict=True))
            rows.append([t.name, f"{t.count:,}", shares, f"{t.gap:.0%}", f"{t.beta:.3g}", f"{t.latent:.2g}"])
        lines = [table([[cell.replace("%", " %") for cell in row] for row in rows], right=("weights", "gap"))]
        if self.soft_loss is not None:
            lines.append(f"loss {self.soft_loss:.4g}, rounded {self.rounded_loss:.4g}")
        return "\n".join(lines)


def health(opt: MirrorDescent, loss: Callable[[], Tensor | float] | None = None) -> Health:
    """Reports on an optimizer's quantized tensors, with the model's weights as they are now.

    Call it during training, outside ``quantized()``, to see whether the network could be rounded now; ``finalize()``
    warns of the same problems. With distributed tensors, each process reports on its own part.

    Args:
        opt: the optimizer.
        loss: computes the loss on a batch or on a whole loader. It is called twice, with the weights as they are and
            rounded; put the model into ``eval`` mode before, or batch norm hides the difference.
    """
    found, losses = [], []
    with torch.no_grad():
        if loss is not None:
            losses.append(float(loss()))
            with opt.quantized():
                losses.append(float(loss()))
        for q in opt._quantized():
            levels, weight = q.method.levels, q.weight.detach()
            final = weight if q.method.holds(weight, q.state) else q.method.rounded(q.state, q.beta)
            rounded = levels.nearest(q.method.in_units(final, q.state))
            shares, gap = _compared(local(q.method.in_units(weight, q.state)), local(rounded), levels)
            typical = _typical(local(q.method.in_units(q.state["latent"], q.state)), local(weight))
            found.append(TensorHealth(q.name, levels, weight.numel(), shares, gap, float(q.beta), typical))
    return Health(tuple(found), *losses)


def advice(opt: MirrorDescent, learnt: Collection[Tensor]) -> str:
    """A warning about the initial weights of some parameters; empty if there is nothing to warn about.

    Called while the parameters still have their initial values. Constant ones, such as zeros, are left out: they do not
    show which scale the levels should have.
    """
    fixed = [q for q in opt._quantized() if q.weight in learnt and q.method.scale is None]
    initial = {q.name: local(q.weight.detach()) for q in fixed}
    found = [t for t in health(opt).tensors if t.collapsed and t.name in initial]
    collapsed = [t for t in found if bool(initial[t.name].min() < initial[t.name].max())]
    if not collapsed:
        return ""
    levels, level = collapsed[0].levels, collapsed[0].main_level
    names = [t.name for t in collapsed]
    size = float(torch.cat([initial[name].abs().double().flatten() for name in names]).mean())
    near = [f"{t:g}" for pair, t in zip(pairwise(levels), levels.thresholds, strict=True) if level in pair]
    nearest = "nearest thresholds are" if len(near) > 1 else "nearest threshold is"
    known = {BINARY: "'binary'", TERNARY: "'ternary'"}.get(levels, f"mq.levels.auto({list(levels)})")
    remedy = f"levels={known} fits the levels to each layer" if levels.centre == 0 else "choose levels that fit them"
    return (
        f"all weights of {len(names)} of {len(initial)} quantized tensors ({listed(names)}) start at the level "
        f"{level:g}: the {nearest} {' and '.join(near)}, but the mean |weight| is {size:.2g}. Training "
        f"may never leave it; {remedy}"
    )


@contextmanager
def unwarned() -> Iterator[None]:
    """No :class:`HealthWarning` inside: for runs, which report problems at their end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HealthWarning)
        yield


def local(tensor: Tensor) -> Tensor:
    """The part of a distributed tensor that is in this process; any other tensor as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _compared(weight: Tensor, rounded: Tensor, levels: Levels) -> tuple[tuple[float, ...], float]:
    """The share of the rounded weights on each level, and their mean distance from the weights, in level distances."""
    rounded = rounded.to(weight.dtype)
    shares = tuple(float((rounded == level).double().mean()) for level in levels.tensor(weight))
    spacing = 2 * levels.radius / (len(levels) - 1)
    return shares, float((weight.double() - rounded.double()).abs().mean()) / spacing


def _typical(latent: Tensor, weight: Tensor) -> float:
    """The median of |latent|; for one number per level, that of half the difference between the two largest."""
    if latent.dim() > weight.dim():
        first, second = latent.topk(2, dim=0).values
        return float((first - second).median()) / 2
    return float(latent.abs().median())
