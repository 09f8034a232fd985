"""Prepared weights: level indices laid out for a kernel, after 64 bytes that say for which kernel and layer.

    8 bytes  magic "MQKERN1\0"
    int32    the layout: 0 torch (float32 weights, then the levels), 1 native (the three parts of csrc/kernels.h),
             2 gpu (bit planes)
    int32    the number of levels
    int64    output channels, input channels per group, kernel height, kernel width, groups, bytes in all

All of it is compared with the layer before anything else is read, so that a damaged or swapped tensor raises an error
and is never read out of bounds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from mirrorquant.levels import Levels
from mirrorquant.packing.kernels import fallback, native
from mirrorquant.packing.kernels.layer import Geometry, admit

__all__ = ["HEADER_BYTES", "full_shape", "is_native", "is_wide", "level_bytes", "prepare", "weight", "with_header"]

HEADER_BYTES = 64
_LAYOUTS = ("torch", "native", "gpu")
_MAGIC = b"MQKERN1\0"
_HEADER = struct.Struct("<8sii6q")
_LEAST = (8, 16)  # channels in and out that a group must have: with fewer, tables cost more than products


def prepare(codes: Tensor, levels: Sequence[float], groups: int = 1) -> Tensor:
    """A weight laid out for the kernels of this machine: an opaque 1-D uint8 tensor that ``conv2d``/``linear`` take.

    All native paths share one layout, of some 5 bits per weight (10 for three levels). Where a layer runs in torch it
    is the float32 weight itself: level sets that are neither two nor three equidistant levels, depthwise convolutions,
    and everything where ``active()`` is "torch".

    Args:
        codes: uint8 level indices, [O, C/groups, kh, kw] or [O, K].
        levels: the values that the indices stand for; a prepared weight runs with these levels only.
        groups: of the convolution.

    Example:
        >>> prepare(torch.zeros(8, 4, dtype=torch.uint8), (-1.0, 1.0)).dim()
        1
    """
    codes = admit("codes", codes)
    shape, end = full_shape(codes.shape), level_bytes(levels)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes are {codes.dtype}, but level indices must be uint8")
    if int(codes.max()) >= len(levels):
        raise ValueError(f"codes go up to {int(codes.max())}, but there are {len(levels)} levels: {list(levels)}")
    if groups < 1 or shape[0] % groups:
        raise ValueError(f"groups is {groups}, but it must divide the {shape[0]} output channels")
    codes = codes.contiguous()
    if codes.device.type == "cpu" and native.active() != "torch" and is_native(shape, groups, levels):
        return native.prepare(codes, shape, groups, len(levels))
    from mirrorquant.packing.kernels import gpu

    if gpu.serves(codes.shape, levels, codes.device):
        return gpu.prepare(codes, levels)
    values = fallback.decode(codes.reshape(-1), levels).view(torch.uint8)
    body = torch.cat([values, torch.frombuffer(bytearray(end), dtype=torch.uint8).to(codes.device)])
    return with_header("torch", body, shape, groups, len(levels))


def is_native(shape: Sequence[int], groups: int, levels: Sequence[float]) -> bool:
    """Whether native kernels run such a layer: two levels or three equidistant ones, and no slender groups."""
    return is_wide(shape, groups) and fallback.affine(levels) is not None


def is_wide(shape: Sequence[int], groups: int) -> bool:
    """Whether a layer has one group, or groups of at least 8 input and 16 output channels."""
    return groups == 1 or (shape[1] >= _LEAST[0] and shape[0] // groups >= _LEAST[1])


def full_shape(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """The shape of a convolution's weight; a linear layer is a 1x1 convolution."""
    if len(shape) not in (2, 4) or min(shape) < 1:
        raise ValueError(
            f"the weight's shape is {list(shape)}, but kernels take [O, K] (linear) or [O, C/groups, kh, kw] (conv2d),"
            " each at least 1"
        )
    if math.prod(shape) >= 2**40:
        raise ValueError(f"the weight's shape is {list(shape)}: that is more than 2^40 weights, surely a mistake")
    o, c, h, w = map(int, (*shape, 1, 1)[:4])
    return o, c, h, w


def level_bytes(levels: Sequence[float]) -> bytes:
    """The levels as float32; raises an error unless these are two or more increasing numbers."""
    try:
        content = struct.pack(f"<{len(levels)}f", *levels)
        Levels(*struct.unpack(f"<{len(levels)}f", content))
    except (OverflowError, struct.error, TypeError, ValueError) as error:
        problem = f"the levels are {list(levels)}, but they must be two or more increasing float32 numbers"
        raise ValueError(problem) from error
    return content


def with_header(layout: str, body: Tensor, shape: Sequence[int], groups: int, levels: int) -> Tensor:
    """A prepared weight from the bytes of its body."""
    start = bytearray(_header(layout, shape, groups, levels, HEADER_BYTES + body.numel()))
    return torch.cat([torch.frombuffer(start, dtype=torch.uint8).to(body.device), body])


def _header(layout: str, shape: Sequence[int], groups: int, levels: int, total: int) -> bytes:
    return _HEADER.pack(_MAGIC, _LAYOUTS.index(layout), levels, *full_shape(shape), groups, total)


def weight(prepared: Tensor, geometry: Geometry) -> Tensor:
    """The float32 weight of a prepared one; raises an error if that is damaged, or was prepared for another layer.

    On a GPU only the size is checked: reading the header would wait for the device, and break CUDA graphs.
    """
    shape, levels, groups = geometry.shape, geometry.levels, geometry.groups
    end = HEADER_BYTES + 4 * math.prod(shape)
    right_size = prepared.numel() == end + 4 * len(levels)
    if not (prepared.is_cuda and right_size):
        start = bytes(prepared[:HEADER_BYTES].tolist())
        like = shape, groups, len(levels), prepared.numel()
        if start == _header("native", *like):
            codes = native.decode(prepared.cpu(), full_shape(shape), groups, len(levels))
            return fallback.decode(codes.to(prepared.device), levels).view(shape)
        same_levels = right_size and bytes(prepared[end:].tolist()) == level_bytes(levels)
        if start != _header("torch", *like) or not same_levels:
            raise ValueError(
                f"the prepared weight is damaged, or was not prepared for a layer of the shape {list(shape)} with"
                f" {groups} groups and the levels {list(levels)}: prepare it again"
            )
    values = prepared[HEADER_BYTES:end]
    values = values.clone() if values.storage_offset() % 4 else values  # a float32 does not begin at an odd byte
    return values.view(torch.float32).view(shape)
