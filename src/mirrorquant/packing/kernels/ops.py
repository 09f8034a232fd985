"""The operators ``torch.ops.mirrorquant.conv2d`` and ``linear``, with the shapes that tracing and export need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mirrorquant.packing.kernels import fallback
from mirrorquant.packing.kernels.prepared import weight

__all__ = ["conv2d", "linear"]

_LIBRARY = torch.library.Library("mirrorquant", "FRAGMENT")  # type: ignore[no-untyped-call]
_WEIGHT = "Tensor x, Tensor prepared, int[] shape, float[] levels"
_EPILOGUE = "Tensor? scale, Tensor? shift, Tensor? residual, bool relu"
_WINDOW = "int[] stride, int[] padding, int[] dilation, int groups"
_LIBRARY.define(  # type: ignore[no-untyped-call]
    f"conv2d({_WEIGHT}, {_EPILOGUE}, {_WINDOW}, str activation) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    f"linear({_WEIGHT}, {_EPILOGUE}, str activation) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)

conv2d = torch.ops.mirrorquant.conv2d.default
linear = torch.ops.mirrorquant.linear.default


def _conv2d(
    x: Tensor,
    prepared: Tensor,
    shape: Sequence[int],
    levels: Sequence[float],
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> Tensor:
    size = conv2d_size(x, shape, stride, padding, dilation, groups, activation)
    check_epilogue(x, size, scale, shift, residual)
    y = fallback.apply(
        x,
        weight(prepared, shape, levels, groups),
        levels,
        scale=scale,
        shift=shift,
        residual=residual,
        relu=relu,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        activation=activation,
    )
    return y.contiguous(memory_format=memory_format(x))


def _linear(
    x: Tensor,
    prepared: Tensor,
    shape: Sequence[int],
    levels: Sequence[float],
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    activation: str,
) -> Tensor:
    size = linear_size(x, shape, activation)
    check_epilogue(x, size, scale, shift, residual)
    return fallback.apply(
        x,
        weight(prepared, shape, levels, 1),
        levels,
        scale=scale,
        shift=shift,
        residual=residual,
        relu=relu,
        activation=activation,
    ).contiguous()


def _conv2d_fake(
    x: Tensor,
    prepared: Tensor,
    shape: Sequence[int],
    levels: Sequence[float],
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> Tensor:
    size = conv2d_size(x, shape, stride, padding, dilation, groups, activation)
    check_epilogue(x, size, scale, shift, residual)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def _linear_fake(
    x: Tensor,
    prepared: Tensor,
    shape: Sequence[int],
    levels: Sequence[float],
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    activation: str,
) -> Tensor:
    size = linear_size(x, shape, activation)
    check_epilogue(x, size, scale, shift, residual)
    return x.new_empty(size)


def memory_format(x: Tensor) -> torch.memory_format:
    """channels_last for a channels_last input, else contiguous."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def conv2d_size(
    x: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> tuple[int, int, int, int]:
    """The size of the result, or an error that names what does not fit."""
    if activation not in ("float32", "binary"):
        raise ValueError(f'activation is {activation!r}, but conv2d takes "float32" or "binary"')
    if len(shape) != 4 or x.dim() != 4 or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dim()}-D {x.dtype} and the weight's shape {list(shape)}, but conv2d needs a floating-point"
            " [N, C, H, W] and [O, C/groups, kh, kw]"
        )
    pairs = {"stride": stride, "padding": padding, "dilation": dilation}
    for name, pair in pairs.items():
        if len(pair) != 2 or min(pair) < (name != "padding"):
            raise ValueError(f"{name} is {list(pair)}, but it must be two numbers from {int(name != 'padding')} up")
    if groups < 1 or x.shape[1] != shape[1] * groups or shape[0] % groups:
        raise ValueError(
            f"x has {x.shape[1]} channels and the weight's shape is {list(shape)} with {groups} groups, but x needs"
            f" {shape[1]} * {groups} channels, and groups must divide the {shape[0]} output channels"
        )
    height, width = (
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (shape[2 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    )
    if height < 1 or width < 1:
        raise ValueError(
            f"x is {list(x.shape)}, too small for a {shape[2]}x{shape[3]} kernel with padding {list(padding)} and"
            f" dilation {list(dilation)}"
        )
    return x.shape[0], shape[0], height, width


def linear_size(x: Tensor, shape: Sequence[int], activation: str) -> tuple[int, ...]:
    """The size of the result, or an error that names what does not fit."""
    if activation not in ("float32", "binary", "int8"):
        raise ValueError(f'activation is {activation!r}, but linear takes "float32", "binary" or "int8"')
    if len(shape) != 2 or x.dim() < 1 or x.shape[-1] != shape[1] or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)} and the weight's shape {list(shape)}, but linear needs a floating-point"
            " [..., K] and [O, K]"
        )
    return (*x.shape[:-1], shape[0])


def check_epilogue(
    x: Tensor, size: Sequence[int], scale: Tensor | None, shift: Tensor | None, residual: Tensor | None
) -> None:
    """That scale and shift are float32 [O], and the residual is like the result."""
    channels = size[1] if len(size) == 4 and x.dim() == 4 else size[-1]
    for name, vector in (("scale", scale), ("shift", shift)):
        if vector is not None and (vector.dtype != torch.float32 or vector.shape != (channels,)):
            raise ValueError(f"{name} is {vector.dtype} {list(vector.shape)}, but it must be float32 [{channels}]")
    if residual is not None and (residual.dtype != x.dtype or residual.shape != torch.Size(size)):
        raise ValueError(f"residual is {residual.dtype} {list(residual.shape)}, but it must be {x.dtype} {list(size)}")


for _name, _implementation, _fake in (("conv2d", _conv2d, _conv2d_fake), ("linear", _linear, _linear_fake)):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _implementation, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"mirrorquant::{_name}", _fake, lib=_LIBRARY)
