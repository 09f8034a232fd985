"""What a prepared weight begins with: 64 bytes that say for which kernel and which shape it was made.

    8 bytes  magic "MQKERN1\0"
    int32    the layout: 0 torch (float32 weights, then the levels), 1 native (the three parts of csrc/kernels.h),
             2 gpu (bit planes)
    int32    the number of levels
    int64    output channels, input channels a group, kernel height, kernel width, groups, bytes in all

Kernels compare all of it with what they are called for before they read anything else, so that a damaged or swapped
tensor is an error and never a read out of bounds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["HEADER_BYTES", "LAYOUTS", "Header", "check_levels", "full_shape", "level_bytes", "read"]

LAYOUTS = ("torch", "native", "gpu")
HEADER_BYTES = 64
_MAGIC = b"MQKERN1\0"
_FORMAT = struct.Struct("<8sii6q")


class Header(NamedTuple):
    """The first 64 bytes of a prepared weight."""

    layout: str
    levels: int
    shape: tuple[int, int, int, int]
    groups: int
    total: int

    def pack(self) -> bytes:
        """The bytes themselves."""
        return _FORMAT.pack(_MAGIC, LAYOUTS.index(self.layout), self.levels, *self.shape, self.groups, self.total)


def full_shape(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """The shape of a convolution's weight; a linear layer is a 1x1 convolution."""
    if len(shape) not in (2, 4) or min(shape) < 1:
        raise ValueError(
            f"the weight's shape is {list(shape)}, but kernels take [O, K] (linear) or [O, C/groups, kh, kw] (conv2d),"
            " each at least 1"
        )
    o, c, h, w = (*shape, 1, 1) if len(shape) == 2 else shape
    if math.prod(shape) >= 2**40:
        raise ValueError(f"the weight's shape is {list(shape)}: that is more than 2^40 weights, surely a mistake")
    return int(o), int(c), int(h), int(w)


def check_levels(levels: Sequence[float]) -> None:
    """That the levels are at least two finite numbers in increasing order, as float32 has them."""
    try:
        values = [*struct.unpack(f"<{len(levels)}f", level_bytes(levels))]
        right = len(values) > 1 and all(map(math.isfinite, values)) and all(a < b for a, b in pairwise(values))
    except (OverflowError, struct.error, TypeError):
        right = False
    if not right:
        raise ValueError(f"the levels are {list(levels)}, but they must be two or more increasing float32 numbers")


def level_bytes(levels: Sequence[float]) -> bytes:
    """The levels as float32."""
    return struct.pack(f"<{len(levels)}f", *levels)


def read(prepared: Tensor) -> Header:
    """The header of a prepared weight, or an error that says what is wrong with it."""
    if prepared.dtype != torch.uint8 or prepared.dim() != 1 or not prepared.is_contiguous():
        raise ValueError(
            f"a prepared weight is a contiguous 1-D uint8 tensor, this one is {prepared.dim()}-D {prepared.dtype}:"
            " make it with mirrorquant.packing.kernels.prepare"
        )
    if prepared.numel() < HEADER_BYTES:
        raise ValueError(f"the prepared weight has {prepared.numel()} bytes, fewer than its header of {HEADER_BYTES}")
    magic, layout, levels, *numbers = _FORMAT.unpack(bytes(prepared[:HEADER_BYTES].tolist()))
    o, c, h, w, groups, total = numbers
    if magic != _MAGIC or not 0 <= layout < len(LAYOUTS) or total != prepared.numel():
        raise ValueError(
            f"the prepared weight begins with {magic!r}, layout {layout} and {total} bytes, but it should begin with"
            f" {_MAGIC!r} and have {prepared.numel()} bytes: it is damaged, prepare it again"
        )
    return Header(LAYOUTS[layout], levels, (o, c, h, w), groups, total)
