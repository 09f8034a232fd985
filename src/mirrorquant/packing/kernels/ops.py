"""The operators ``torch.ops.mirrorquant.conv2d`` and ``linear``, with the shapes that tracing and export need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mirrorquant.packing.kernels import fallback, gpu, native
from mirrorquant.packing.kernels.dispatch import active
from mirrorquant.packing.kernels.layout import full_shape
from mirrorquant.packing.kernels.prepared import is_native, weight

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
    format_ = memory_format(x)
    plan = _plan(x, size, shape, levels, relu, stride, padding, dilation, groups, activation)
    if plan is not None:
        inner = x.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        y = torch.empty(size, memory_format=torch.channels_last)
        if _run(plan, inner, prepared, scale, shift, residual, y):
            return y.contiguous(memory_format=format_)
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
    return y.contiguous(memory_format=format_)


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
    if x.is_cuda and gpu.is_gpu(prepared, shape, levels):
        return gpu.linear(x, prepared, shape, levels, scale, shift, residual, relu, activation)
    plan = _plan(x, size, shape, levels, relu, (1, 1), (0, 0), (1, 1), 1, activation)
    if plan is not None:
        y = torch.empty(size)
        if _run(plan, x.contiguous(), prepared, scale, shift, None if residual is None else residual.contiguous(), y):
            return y
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


class _Plan(NamedTuple):
    """A layer as the native kernels take it, and the affine map of its levels."""

    layer: native.Layer
    a: float
    b: float
    relu: bool
    activation: str


def _plan(
    x: Tensor,
    size: Sequence[int],
    shape: Sequence[int],
    levels: Sequence[float],
    relu: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> _Plan | None:
    """How the native kernels run a layer; None where they do not."""
    path = active()
    if path == "torch" or x.dtype != torch.float32 or x.device.type != "cpu":
        return None
    key = (
        x.shape,
        *shape,
        *levels,
        relu,
        *stride,
        *padding,
        *dilation,
        groups,
        activation,
        path,
        torch.get_num_threads(),
    )
    if key not in _plans:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        unit = fallback.affine(levels)
        whole = full_shape(shape)
        if unit is None or not is_native(whole, groups, levels):
            _plans[key] = None
        else:
            rows = 0 if len(shape) == 4 else x.numel() // shape[1]
            n, c, h, w = x.shape if len(shape) == 4 else (min(rows, 1), shape[1], 1, max(rows, 1))
            o, _, kh, kw = whole
            oh, ow = size[2:] if len(shape) == 4 else (1, max(rows, 1))
            window = (*stride, *padding, *dilation)
            kind = ("float32", "binary", "int8").index(activation)
            fused = unit[1] == 0  # else the epilogue comes after the second term of the levels
            numbers = (len(levels), kind, relu and fused, native.number(path), torch.get_num_threads())
            _plans[key] = _Plan(
                native.Layer(n, h, w, c, o, kh, kw, groups, oh, ow, *window, *numbers), *unit, relu, activation
            )
    return _plans[key]


_MOST_PLANS = 4096
_plans: dict[tuple[object, ...], _Plan | None] = {}


def _run(
    plan: _Plan,
    x: Tensor,
    prepared: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
) -> bool:
    """Fill y by a native kernel; False where the weight was not prepared for one."""
    if prepared.dtype != torch.uint8 or prepared.dim() != 1 or not prepared.is_contiguous():
        return False
    scale = None if scale is None else scale.contiguous()
    shift = None if shift is None else shift.contiguous()
    if plan.b == 0:
        return native.run(plan.layer, x, prepared, fallback.fold(scale, plan.a, plan.layer.o, y), shift, residual, y)
    if not native.run(plan.layer, x, prepared, None, None, None, y):
        return False
    y.copy_(fallback.epilogue(plan.a * y + plan.b * _window_sums(plan, x), scale, shift, residual, plan.relu))
    return True


def _window_sums(plan: _Plan, x: Tensor) -> Tensor:
    """What a weight of ones makes of x: the second term of levels that are not symmetric about 0."""
    layer = plan.layer
    if plan.activation == "int8":
        q, step = fallback.quantize_rows(x)
        return q.sum(-1, keepdim=True) * step
    if plan.activation == "binary":
        x = fallback.binarize(x)
    if x.dim() != 4:
        return x.sum(-1, keepdim=True)
    ones = x.new_ones(layer.groups, layer.c // layer.groups, layer.kh, layer.kw)
    window = ((layer.sy, layer.sx), (layer.py, layer.px), (layer.dy, layer.dx))
    sums = F.conv2d(x, ones, None, *window, layer.groups)
    return sums.repeat_interleave(layer.o // layer.groups, 1)


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
