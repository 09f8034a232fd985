"""Bit planes: a tensor that takes few values, at one bit a weight for two levels.

The levels q_0 < q_1 < ... are numbered, and a weight is the number of its level. Plane j holds bit j of these numbers:
one plane for binary weights (0 is the lower level, 1 the upper one), two for ternary ones, ceil(log2 d) for d levels.
A plane has a row for each output channel (one row in all for a vector), with the input axes flattened, eight weights a
byte, the first one in the lowest bit; a row's last byte is filled up with zeros. Where a row has a scale, w = scale *
level.

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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirrorquant._text import printable
from mirrorquant.levels import BINARY, TERNARY, Levels

__all__ = ["MOST_LEVELS", "PackError", "PackedTensor", "off_level"]

MOST_LEVELS = 256
_DETECTED = 16  # more distinct values than this are no level set, unless somebody says so
_SAMPLE = 4096


class PackError(ValueError):
    """A model or a file that cannot be packed, saved, loaded or exported; the message names what is wrong with it.

    The message is one printable line, whatever a file calls its tensors.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class PackedTensor(nn.Module):
    """A tensor as bit planes: ``planes`` (uint8, planes x rows x bytes) and ``scale`` (one a row, or one, or None).

    A module, so that the planes move, are copied and are listed in ``state_dict`` with the layer that holds them.
    """

    planes: Tensor
    scale: Tensor | None

    def __init__(
        self, planes: Tensor, shape: Sequence[int], levels: Levels, scale: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shape, self.levels, self.dtype = torch.Size(shape), levels, dtype
        self.register_buffer("planes", planes)
        self.register_buffer("scale", scale)

    @staticmethod
    def of(tensor: Tensor, levels: Levels | None = None) -> PackedTensor | None:
        """The tensor as bits, or None where it is not on the levels (or on no few levels, where none are given).

        Exact: ``unpack`` gives the same numbers back (-0 as 0). Recognised are -1/+1 and -1/0/+1, also with a scale for
        the tensor or for each row; then any level set that is much smaller than the tensor.
        """
        if not tensor.is_floating_point():
            return None
        tensor = tensor.detach()
        for known in (BINARY, TERNARY) if levels is None else (levels,):
            if known.holds(tensor):
                return PackedTensor._encode(tensor, known, None)
        if levels is None or levels in (BINARY, TERNARY):
            scaled = _scaled(tensor)
            if scaled is not None and (levels is None or scaled[1] == levels or scaled[1] == BINARY):
                return PackedTensor._encode(*scaled)
        found = _few_values(tensor) if levels is None else None
        return None if found is None else PackedTensor._encode(tensor, found, None)

    @staticmethod
    def _encode(tensor: Tensor, levels: Levels, scale: Tensor | None) -> PackedTensor:
        rows, row = layout(tensor.shape)
        values = [float(value) for value in levels.tensor(tensor)]  # as the tensor's dtype has them
        signs = tensor if scale is None else tensor.reshape(rows, row) / scale[:, None]
        codes = torch.zeros(tensor.numel(), dtype=torch.uint8, device=tensor.device).reshape(rows, row)
        for number, value in enumerate(values[1:], 1):
            codes.masked_fill_(signs.reshape(rows, row) == value, number)
        if scale is not None and bool((scale == scale[0]).all()):
            scale = scale[:1]
        planes = pack_bits(codes, count_planes(levels))
        return PackedTensor(
            planes, tensor.shape, Levels(*values), None if scale is None else scale.clone(), tensor.dtype
        )

    def codes(self) -> Tensor:
        """The number of each weight's level, uint8, in the tensor's shape."""
        return unpack_bits(self.planes, layout(self.shape)[1]).reshape(self.shape)

    def unpack(self) -> Tensor:
        """The tensor itself, in its own dtype."""
        values = self.levels.tensor(torch.empty(0, dtype=self.dtype, device=self.planes.device))
        tensor = values[self.codes().int()]
        if self.scale is None:
            return tensor
        rows, row = layout(self.shape)
        return (tensor.reshape(rows, row) * self.scale.to(self.dtype)[:, None]).reshape(self.shape)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PackedTensor:
        """A cast changes what ``unpack`` gives: the levels, as the new dtype has them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        if dtype != self.dtype:
            self.levels, self.dtype = Levels(*torch.tensor(tuple(self.levels), dtype=dtype).tolist()), dtype
        return self

    def get_extra_state(self) -> Tensor:
        """The levels, for ``state_dict``."""
        return torch.tensor(tuple(self.levels), dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuses bits that stand for other levels."""
        if tuple(state.tolist()) != tuple(self.levels):
            raise PackError(f"the state is on the levels {state.tolist()}, but the tensor on {list(self.levels)}")

    def extra_repr(self) -> str:
        scale = {None: "", 1: ", one scale"}.get(None if self.scale is None else self.scale.numel(), ", a scale a row")
        return f"{'x'.join(map(str, self.shape))} on {', '.join(f'{q:g}' for q in self.levels)}{scale}"


def layout(shape: Sequence[int]) -> tuple[int, int]:
    """The number of rows and their length: output channels by what is left; a vector is one row.

    >>> layout((64, 3, 5, 5)), layout((10,)), layout(())
    ((64, 75), (1, 10), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def count_planes(levels: Sequence[float]) -> int:
    """ceil(log2 d), the bits that a level's number takes."""
    return (len(levels) - 1).bit_length()


def pack_bits(codes: Tensor, planes: int) -> Tensor:
    """Rows of numbers (uint8) as planes of bits: rows x n becomes planes x rows x ceil(n / 8).

    >>> pack_bits(torch.tensor([[0, 1, 2, 1]], dtype=torch.uint8), 2).tolist()
    [[[10]], [[4]]]
    """
    rows, row = codes.shape
    width = -(-row // 8)
    padded = torch.nn.functional.pad(codes, (0, 8 * width - row)).reshape(rows, width, 8)
    packed = torch.zeros(planes, rows, width, dtype=torch.uint8, device=codes.device)
    for plane in range(planes):
        for bit in range(8):
            packed[plane] |= ((padded[:, :, bit] >> plane) & 1) << bit
    return packed


def unpack_bits(planes: Tensor, row: int) -> Tensor:
    """The inverse of :func:`pack_bits`: numbers, uint8, rows x row."""
    shifts = torch.arange(8, dtype=torch.uint8, device=planes.device)
    codes = torch.zeros(planes.shape[1], 8 * planes.shape[2], dtype=torch.uint8, device=planes.device)
    for number, plane in enumerate(planes):
        codes |= (((plane[:, :, None] >> shifts) & 1) << number).reshape(codes.shape)
    return codes[:, :row]


def off_level(tensor: Tensor, levels: Levels | None) -> float | None:
    """A value that is not a level (the nearest ones are -1, 0, +1 where none are given), or None where all are."""
    levels = levels or TERNARY
    off = torch.ones_like(tensor, dtype=torch.bool)
    for level in levels.tensor(tensor):
        off &= tensor != level
    return float(tensor[off][0]) if bool(off.any()) else None


def _scaled(tensor: Tensor) -> tuple[Tensor, Levels, Tensor] | None:
    """The tensor with levels -1, +1 or -1, 0, +1 and a scale a row, where all |w| in a row are equal, or zero."""
    rows, row = layout(tensor.shape)
    if row < 2 or rows == 0:
        return None
    size = tensor.reshape(rows, row).abs()
    scale = size.amax(1)
    zeros = size == 0
    if not bool(((size == scale[:, None]) | zeros).all()) or not bool(torch.isfinite(scale).all()):
        return None
    return tensor, TERNARY if bool(zeros.any()) else BINARY, torch.where(scale == 0, torch.ones_like(scale), scale)


def _few_values(tensor: Tensor) -> Levels | None:
    """The distinct values, where they are few against the tensor's size."""
    flat = tensor.reshape(-1)
    if torch.unique(flat[:_SAMPLE]).numel() > _DETECTED:
        return None
    values = torch.unique(flat)
    if not 2 <= values.numel() <= min(_DETECTED, flat.numel() // 4) or not bool(torch.isfinite(values).all()):
        return None
    return Levels(*values.tolist())
