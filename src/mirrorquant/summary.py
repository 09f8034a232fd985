"""A summary of a model: its tensors with their levels, counts, bits and bytes, as ``mq.save`` stores them.

>>> import torch, mirrorquant as mq
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 2, bias=False))
>>> with torch.no_grad():
...     _ = model[0].weight.sign_().mul_(0.5), model[1].weight[0, 0].fill_(0.7)
>>> print(mq.summary(model))
tensor    shape  count  levels           bits  bytes  float because
0.weight  32x64  2,048  -1, 1 x a scale     1    260
1.weight  2x32      64                     32    256  it contains 0.7
2,048 of 2,112 weights are quantized (97.0 %); ... bytes in a file, 8,448 in float32 (... times as many)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from mirrorquant._text import printable, table
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.packing import Contents, PackedModel, PackedTensor, PackError, file
from mirrorquant.packing.bits import count_planes, off_level
from mirrorquant.packing.model import Entry, as_bits, whole

__all__ = ["Row", "Summary", "summary"]

_HEAD = ("tensor", "shape", "count", "levels", "bits", "bytes", "float because", "runs on")
_RIGHT = ("count", "bits", "bytes")


@dataclass(frozen=True)
class Row:
    """A tensor: ``bits`` per weight, and the ``bytes`` that a file takes for it, including its scales.

    ``levels`` is None, and ``why`` gives the reason, if it is stored in float (or as integers). ``runs`` says what a
    packed model computes with, for a quantized tensor: ``bits``, or ``float:`` and the reason.
    """

    name: str
    shape: list[int]
    count: int
    bits: int
    levels: list[float] | None
    scaled: bool
    bytes: int
    float_bytes: int
    why: str
    runs: str = ""

    @classmethod
    def of(cls, name: str, entry: Entry, why: str = "", runs: str = "") -> Row:
        """The row of a tensor, as a packed file stores it."""
        shape, count, item = list(entry.shape), entry.shape.numel(), entry.dtype.itemsize
        if isinstance(entry, PackedTensor):
            bits, size = count_planes(entry.levels), sum(buffer.nbytes for buffer in entry.buffers())
            levels, scaled = list(entry.levels), entry.scale is not None
            return cls(name, shape, count, bits, levels, scaled, size, count * item, "", runs)
        value = off_level(entry, None) if entry.is_floating_point() else None
        why = why or (f"it is {entry.dtype}" if value is None else f"it contains {value:g}")
        return cls(name, shape, count, 8 * item, None, False, count * item, count * item, why)


@dataclass(frozen=True)
class Summary:
    """The report of :func:`summary`; ``str()`` is a table. ``bytes`` is the size of the file."""

    rows: list[Row]
    bytes: int

    @property
    def count(self) -> int:
        """The number of weights and other numbers."""
        return sum(row.count for row in self.rows)

    @property
    def quantized(self) -> int:
        """The number of weights on levels."""
        return sum(row.count for row in self.rows if row.levels is not None)

    @property
    def float_bytes(self) -> int:
        """The size of the same tensors without quantization."""
        return sum(row.float_bytes for row in self.rows)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [_HEAD]
        for row in self.rows:
            levels = ", ".join(f"{level:g}" for level in row.levels or ()) + " x a scale" * row.scaled
            shape = "x".join(map(str, row.shape)) or "1"
            numbers = f"{row.count:,}", levels, str(row.bits), f"{row.bytes:,}"
            rows.append((printable(row.name), shape, *numbers, row.why, row.runs))
        kept = [place for place in range(len(_HEAD)) if place < 6 or any(row[place] for row in rows[1:])]
        rows = [tuple(row[place] for place in kept) for row in rows]
        share, times = 100 * self.quantized / max(self.count, 1), self.float_bytes / max(self.bytes, 1)
        return (
            f"{table(rows, _RIGHT)}\n"
            f"{self.quantized:,} of {self.count:,} weights are quantized ({share:.1f} %); {self.bytes:,} bytes in a "
            f"file, {self.float_bytes:,} in float32 ({times:.1f} times as many)"
        )


def summary(what: nn.Module | MirrorDescent | Contents, *, about: dict[str, Any] | None = None) -> Summary:
    """Summarizes a plain or packed model, an optimizer, or a packed file that ``mirrorquant.packing.read`` returned.

    For a model, ``bytes`` is the size of the file that ``mq.save(model, path, about=about)`` writes. An optimizer is
    summarized with its weights rounded, as ``finalize()`` leaves them; it knows parameters only, so ``bytes`` has no
    buffers and no header of a file. For a packed model the column ``runs on`` says which tensors it computes with as
    bits, and why others are floats.
    """
    if isinstance(what, MirrorDescent):
        scales = {state["scale"] for state in what.state.values() if "scale" in state}  # are part of their tensors
        named = {what._names[p]: p for group in what.param_groups for p in group["params"] if p not in scales}
        with what.quantized():
            bits = {name: as_bits(p) for name, p in named.items() if p in what.state}
            entries = {name: bits.get(name) or whole(p.detach()).clone() for name, p in named.items()}
        why = {name: "" if p in what.state else what._why.get(p, "it is not quantized") for name, p in named.items()}
        rows = [Row.of(name, entry, why[name]) for name, entry in entries.items()]
        return Summary(rows, sum(row.bytes for row in rows))
    if isinstance(what, Contents):
        return Summary([Row.of(name, entry) for name, entry in what.entries.items()], what.size)
    if not isinstance(what, nn.Module):
        raise PackError(f"what is a {type(what).__name__}, expected a model, an optimizer or a packed file")
    plain, entries = file.stored(what, finalized=False)
    runs = what.runs if isinstance(what, PackedModel) else {}
    why = dict.fromkeys(dict(plain.named_buffers()), "it is a buffer")
    rows = [Row.of(name, entry, why.get(name, ""), runs.get(name, "")) for name, entry in entries.items()]
    return Summary(rows, len(file.content(plain, entries, file.about_of(what, about))))
