"""From level indices to what a kernel reads, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mirrorquant.packing.kernels import fallback
from mirrorquant.packing.kernels.layout import HEADER_BYTES, Header, full_shape, read

__all__ = ["check", "prepare", "weight"]


def prepare(codes: Tensor, levels: Sequence[float], groups: int = 1) -> Tensor:
    """A weight laid out for the kernels of this machine: an opaque 1-D uint8 tensor that ``conv2d``/``linear`` take.

    Args:
        codes: uint8 level indices, [O, C/groups, kh, kw] or [O, K].
        levels: the values that the indices stand for; prepared weights run with these levels only.
        groups: of the convolution.

    Example:
        >>> prepare(torch.zeros(8, 4, dtype=torch.uint8), (-1.0, 1.0)).dim()
        1
    """
    shape = full_shape(codes.shape)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes are {codes.dtype}, but level indices must be uint8")
    if len(levels) < 2 or int(codes.max()) >= len(levels):
        raise ValueError(f"codes go up to {int(codes.max())}, but there are {len(levels)} levels: {list(levels)}")
    if groups < 1 or shape[0] % groups:
        raise ValueError(f"groups is {groups}, but it must divide the {shape[0]} output channels")
    codes = codes.contiguous()
    values = fallback.decode(codes.reshape(-1), levels)
    header = Header("torch", len(levels), shape, groups, HEADER_BYTES + 4 * values.numel())
    start = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8).to(codes.device)
    return torch.cat([start, values.view(torch.uint8)])


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
    """The float32 weight of a prepared one."""
    header = check(prepared, shape, levels, groups)
    count = shape[0] * full_shape(shape)[1] * full_shape(shape)[2] * full_shape(shape)[3]
    if header.total != HEADER_BYTES + 4 * count:
        raise ValueError(f"the prepared weight has {header.total} bytes, but {HEADER_BYTES + 4 * count} are expected")
    return prepared[HEADER_BYTES:].view(torch.float32).view(tuple(shape))
