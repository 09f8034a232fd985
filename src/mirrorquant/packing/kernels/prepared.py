"""From level indices to what a kernel reads, and back."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from mirrorquant.packing.kernels import fallback, gpu, native
from mirrorquant.packing.kernels.dispatch import active
from mirrorquant.packing.kernels.gate import admit
from mirrorquant.packing.kernels.layout import HEADER_BYTES, Header, check_levels, full_shape, level_bytes, read

__all__ = ["check", "is_native", "prepare", "weight"]

_NATIVE_GROUP = (8, 16)  # channels in and out that a group must have: with fewer, tables cost more than products


def is_native(shape: tuple[int, int, int, int], groups: int, levels: Sequence[float]) -> bool:
    """Whether native kernels run such a layer: two levels or three equidistant ones, and no slender groups."""
    wide = groups == 1 or (shape[1] >= _NATIVE_GROUP[0] and shape[0] // groups >= _NATIVE_GROUP[1])
    return wide and fallback.affine(levels) is not None


def prepare(codes: Tensor, levels: Sequence[float], groups: int = 1) -> Tensor:
    """A weight laid out for the kernels of this machine: an opaque 1-D uint8 tensor that ``conv2d``/``linear`` take.

    All native paths share one layout, of some 5 bits a weight (10 for three levels). Where a layer runs in torch it is
    the float32 weight itself: level sets that are neither two nor three equidistant levels, depthwise convolutions, and
    everything where ``active()`` is "torch".

    Args:
        codes: uint8 level indices, [O, C/groups, kh, kw] or [O, K].
        levels: the values that the indices stand for; a prepared weight runs with these levels only.
        groups: of the convolution.

    Example:
        >>> prepare(torch.zeros(8, 4, dtype=torch.uint8), (-1.0, 1.0)).dim()
        1
    """
    codes = admit("codes", codes)
    shape = full_shape(codes.shape)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes are {codes.dtype}, but level indices must be uint8")
    if codes.is_meta:
        raise ValueError("codes are on meta, without values: prepare the weight on the device that will run it")
    check_levels(levels)
    if int(codes.max()) >= len(levels):
        raise ValueError(f"codes go up to {int(codes.max())}, but there are {len(levels)} levels: {list(levels)}")
    if groups < 1 or shape[0] % groups:
        raise ValueError(f"groups is {groups}, but it must divide the {shape[0]} output channels")
    codes = codes.contiguous()
    if codes.device.type == "cpu" and active() != "torch" and is_native(shape, groups, levels):
        return native.prepare(codes, shape, groups, len(levels))
    if gpu.serves(codes.shape, levels, codes.device):
        return gpu.prepare(codes, levels)
    values = fallback.decode(codes.reshape(-1), levels)
    header = Header("torch", len(levels), shape, groups, _torch_bytes(shape, levels))
    start, end = (
        torch.frombuffer(bytearray(part), dtype=torch.uint8).to(codes.device)
        for part in (header.pack(), level_bytes(levels))
    )
    return torch.cat([start, values.view(torch.uint8), end])


def _torch_bytes(shape: Sequence[int], levels: Sequence[float]) -> int:
    """A header, the weight, and the levels that it was made with."""
    return HEADER_BYTES + 4 * math.prod(shape) + 4 * len(levels)


def check(prepared: Tensor, shape: Sequence[int], levels: Sequence[float], groups: int) -> Header:
    """The header of a prepared weight that was made for this shape, these levels and these groups, or an error."""
    header = read(prepared)
    if header.shape != full_shape(shape) or header.groups != groups or header.levels != len(levels):
        raise ValueError(
            f"the weight was prepared for shape {list(header.shape)}, {header.groups} groups, {header.levels} levels,"
            f" but the layer has shape {list(shape)}, {groups} groups and {len(levels)} levels"
        )
    return header


def weight(prepared: Tensor, shape: Sequence[int], levels: Sequence[float], groups: int) -> Tensor:
    """The float32 weight of a prepared one.

    On a GPU only the size is checked: reading the header would wait for the device, and break CUDA graphs.
    """
    prepared = admit("prepared", prepared)
    expected = _torch_bytes(shape, levels)
    if prepared.is_cuda and prepared.dtype == torch.uint8 and prepared.shape == (expected,):
        return _values(prepared, shape, levels)
    header = check(prepared, shape, levels, groups)
    if header.layout == "native":
        codes = native.decode(prepared.cpu(), header.shape, groups, header.levels)
        return fallback.decode(codes.to(prepared.device), levels).view(tuple(shape))
    if header.total != expected:
        raise ValueError(f"the prepared weight has {header.total} bytes, but its shape {list(shape)} needs {expected}")
    made = bytes(prepared[expected - 4 * len(levels) :].tolist())
    if made != level_bytes(levels):
        raise ValueError(
            f"the weight was prepared for the levels {list(struct.unpack(f'<{len(levels)}f', made))}, but the layer has"
            f" {list(levels)}"
        )
    return _values(prepared, shape, levels)


def _values(prepared: Tensor, shape: Sequence[int], levels: Sequence[float]) -> Tensor:
    values = prepared[HEADER_BYTES : -4 * len(levels)]
    values = values.clone() if values.storage_offset() % 4 else values  # a float32 does not begin at an odd byte
    return values.view(torch.float32).view(tuple(shape))
