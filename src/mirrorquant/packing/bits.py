"""Bit planes: a tensor that takes few values, at one bit per weight for two levels.

The levels q_0 < q_1 < ... are numbered, and a weight is the number of its level. Plane j holds bit j of these numbers:
one plane for binary weights (0 is the lower level, 1 the upper one), two for ternary ones, ceil(log2 d) for d levels.
A plane has a row per output channel (a vector is one row), with the input axes flattened, eight weights per byte, the
first one in the lowest bit; a row's last byte is padded with zeros. With a scale per row, w = scale * level.

>>> import torch
>>> bits = PackedTensor.of(torch.tensor([[0.5, -0.5, 0.5], [2.0, 2.0, -2.0]]))
>>> bits.planes.tolist(), bits.levels, bits.scale.tolist()
([[[5], [3]]], Levels(-1.0, 1.0), [0.5, 2.0])
>>> bits.unpack()
tensor([[ 0.5000, -0.5000,  0.5000],
        [ 2.0000,  2.0000, -2.0000]])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirrorquant._text import printable
from mirrorquant.errors import MirrorquantError
from mirrorquant.levels import BINARY, TERNARY, Levels

__all__ = ["PackError", "PackedTensor", "off_level"]

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of tensors that can be bits
_MOST = 256  # levels, whose numbers fit in a byte
_DETECTED = 16  # more distinct values than this are not taken for levels, unless the caller passes them
_SAMPLE = 4096
_WHOLE = 8  # the largest of the whole numbers that are tried as levels


class PackError(MirrorquantError, ValueError):
    """A model or a file cannot be packed, saved, loaded or exported; the message says why, in one printable line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class PackedTensor(nn.Module):
    """A tensor as bit planes: ``planes`` (uint8, planes x rows x bytes) and ``scale`` (one per row, or one, or None).

    A module, so that moving, copying and ``state_dict`` of the layer that holds it include the planes. ``like`` is an
    empty parameter that has the device and the dtype of the tensor, for code that asks ``next(module.parameters())``.
    """

    planes: Tensor
    scale: Tensor | None
    like: Tensor

    def __init__(
        self, planes: Tensor, shape: Sequence[int], levels: Levels, scale: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shape, self.levels = torch.Size(shape), levels
        self.like = nn.Parameter(torch.empty(0, dtype=dtype, device=planes.device), requires_grad=False)
        self.register_buffer("planes", planes)
        self.register_buffer("scale", scale)

    @staticmethod
    def of(tensor: Tensor, levels: Levels | None = None) -> PackedTensor | None:
        """The tensor as bits, or None if it is not on the levels (or, without levels, has too many values).

        Exact: ``unpack`` returns the same numbers (-0 as 0). Recognized are -1/+1 and -1/0/+1 (or the levels that are
        given), also with a scale for the tensor or for each row; without levels, too, any set of few values, and levels
        in the ratio of whole numbers up to 8 with a scale for each row.
        """
        if levels is not None and len(levels) > _MOST:
            raise PackError(f"there are {len(levels)} levels, but a packed weight has at most {_MOST}: use fewer")
        tensor = tensor.detach()
        table = tensor.reshape(layout(tensor.shape))
        for found, scale in _candidates(table, levels) if tensor.dtype in DTYPES else ():
            codes, off = _numbered(table, found, scale)
            if not bool(off.any()):
                if scale is not None and bool((scale == scale[0]).all()):
                    scale = scale[:1].clone()
                found = Levels(*found.tensor(tensor).tolist())  # as the tensor's dtype has them
                return PackedTensor(pack_bits(codes, count_planes(found)), tensor.shape, found, scale, tensor.dtype)
        return None

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""
        return self.like.dtype

    def codes(self) -> Tensor:
        """The number of each weight's level, uint8, in the tensor's shape."""
        return unpack_bits(self.planes, layout(self.shape)[1]).reshape(self.shape)

    def unpack(self) -> Tensor:
        """The tensor itself, in its own dtype."""
        tensor = self.levels.tensor(self.like)[self.codes().int()]
        if self.scale is None:
            return tensor
        rows, row = layout(self.shape)
        return (tensor.reshape(rows, row) * self.scale.to(self.dtype)[:, None]).reshape(self.shape)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PackedTensor:
        """Casts the levels, too, so that ``unpack`` returns the new dtype."""
        before = self.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.dtype != before:
            self.levels = Levels(*torch.tensor(tuple(self.levels), dtype=self.dtype).tolist())
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}like"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({**state_dict, f"{prefix}like": self.like}, prefix, *rest)

    def get_extra_state(self) -> Tensor:
        """The levels, for ``state_dict``."""
        return torch.tensor(tuple(self.levels), dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Raises an error if the state is on other levels."""
        if tuple(state.tolist()) != tuple(self.levels):
            raise PackError(f"the state has the levels {state.tolist()}, but the tensor has {list(self.levels)}")

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f", {self.scale.numel()} scale{'s' * (self.scale.numel() > 1)}"
        return f"{'x'.join(map(str, self.shape))} on {', '.join(f'{q:g}' for q in self.levels)}{scale}"


def layout(shape: Sequence[int]) -> tuple[int, int]:
    """The number of rows and their length: output channels by the remaining axes; a vector is one row.

    >>> layout((64, 3, 5, 5)), layout((10,)), layout(())
    ((64, 75), (1, 10), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def count_planes(levels: Sequence[float]) -> int:
    """ceil(log2 d), the number of bits of a level's number."""
    return (len(levels) - 1).bit_length()


def pack_bits(codes: Tensor, planes: int) -> Tensor:
    """Rows of numbers (uint8) as planes of bits: rows x n becomes planes x rows x ceil(n / 8).

    >>> pack_bits(torch.tensor([[0, 1, 2, 1]], dtype=torch.uint8), 2).tolist()
    [[[10]], [[4]]]
    """
    bits = nn.functional.pad(codes, (0, -codes.shape[1] % 8)).reshape(len(codes), -(-codes.shape[1] // 8), 8)
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    return torch.stack([((bits >> plane & 1) << places).sum(-1, dtype=torch.uint8) for plane in range(planes)])


def unpack_bits(planes: Tensor, row: int) -> Tensor:
    """The inverse of :func:`pack_bits`: numbers, uint8, rows x row."""
    shifts = torch.arange(8, dtype=torch.uint8, device=planes.device)
    codes = torch.zeros(planes.shape[1], 8 * planes.shape[2], dtype=torch.uint8, device=planes.device)
    for number, plane in enumerate(planes):
        codes |= (((plane[:, :, None] >> shifts) & 1) << number).reshape(codes.shape)
    return codes[:, :row]


def off_level(tensor: Tensor, levels: Levels | None) -> float | None:
    """A value that is not one of the levels (by default -1, 0, +1), or None if all are."""
    off = _numbered(tensor, levels or TERNARY)[1]
    return float(tensor[off][0]) if bool(off.any()) else None


def _numbered(table: Tensor, levels: Levels, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The number of each entry's level, perhaps times a scale per row; and a mask of the entries that have none."""
    codes, off = torch.zeros_like(table, dtype=torch.uint8), torch.ones_like(table, dtype=torch.bool)
    for number, level in enumerate(levels.tensor(table)):
        on_level = table == (level if scale is None else level * scale[:, None])
        codes.masked_fill_(on_level, number)
        off &= ~on_level
    return codes, off


def _candidates(table: Tensor, levels: Levels | None) -> Iterator[tuple[Levels, Tensor | None]]:
    """Levels, and a scale per row or None, that a tensor may be on; if none are given, at last its distinct values."""
    known = (BINARY, TERNARY) if levels is None else (levels,)
    yield from ((each, None) for each in known)
    rows, row = table.shape
    if not rows or not bool(table.isfinite().all()):
        return
    scale = table.abs().amax(1, keepdim=True)
    shared = scale.amax() if bool(scale.any()) else torch.ones_like(scale[0])
    scale = torch.where(scale == 0, shared, scale)  # a row of zeros has the others' if they have one in common
    yield from ((each, (scale if levels is None else each.scales(table, scale))[:, 0]) for each in known if row > 1)
    if levels is None and torch.unique(table.flatten()[:_SAMPLE]).numel() <= _DETECTED:
        values = torch.unique(table)
        if 2 <= values.numel() <= min(_DETECTED, table.numel() // 4):
            yield Levels(*values.tolist()), None
    if levels is None and row > 1:
        yield from ((each, each.scales(table, scale)[:, 0]) for each in _in_whole_ratio(table / scale))


def _in_whole_ratio(unit: Tensor) -> Iterator[Levels]:
    """Whole numbers in whose ratio the entries may be, of which the largest in each row is 1; and their fractions."""
    sample = unit[: -(-_SAMPLE // unit.shape[1])]
    for most in range(2, _WHOLE + 1):
        error = (sample * most - (sample * most).round()).abs().max()
        if error <= 2 * most * torch.finfo(unit.dtype).eps:
            whole = torch.unique((unit * most).round()).tolist()
            if 2 <= len(whole) <= min(_DETECTED, unit.numel() // 4):
                yield from (Levels(*whole), Levels(*(value / most for value in whole)))
            return
