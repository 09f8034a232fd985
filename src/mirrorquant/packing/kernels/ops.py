"""The operators ``torch.ops.mirrorquant.conv2d`` and ``linear``, with the shapes that tracing and export need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from mirrorquant.levels import BINARY
from mirrorquant.packing.kernels import fallback, gpu, native
from mirrorquant.packing.kernels.dispatch import active
from mirrorquant.packing.kernels.gate import admit_all, check_devices
from mirrorquant.packing.kernels.layout import check_levels, full_shape
from mirrorquant.packing.kernels.prepared import is_native, weight

__all__ = ["conv2d", "conv2d_now", "is_plain", "linear", "linear_now"]

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


def conv2d_now(
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
    layout: bool = True,
) -> Tensor:
    """The operator's implementation; autocast does not apply, on any path.

    Without ``layout`` the result may lie in memory in any way: mostly in channels_last.
    """
    x, prepared, scale, shift, residual = admit_all(x, prepared, scale, shift, residual)
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return conv2d_now(
                *(x, prepared, shape, levels, scale, shift, residual, relu, stride, padding, dilation, groups),
                activation,
                layout,
            )
    format_ = suggest_memory_format(x) if layout else torch.preserve_format
    plan = _plan(x, shape, levels, relu, stride, padding, dilation, groups, activation)
    check_epilogue(x, plan.size, shape[0], scale, shift, residual)
    if plan.layer is not None:
        inner = x.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        y = x.new_empty_strided(plan.size, plan.strides)
        if _run(plan, plan.layer, inner, prepared, scale, shift, residual, y):
            return _laid_out(y, format_)
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
    return _laid_out(y, format_)


def linear_now(
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
    """The operator's implementation; autocast does not apply, on any path."""
    x, prepared, scale, shift, residual = admit_all(x, prepared, scale, shift, residual)
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return linear_now(x, prepared, shape, levels, scale, shift, residual, relu, activation)
    plan = _plan(x, shape, levels, relu, (1, 1), (0, 0), (1, 1), 1, activation)
    check_epilogue(x, plan.size, shape[0], scale, shift, residual)
    if x.is_cuda and gpu.is_gpu(prepared, shape, levels):
        return gpu.linear(x, prepared, shape, levels, scale, shift, residual, relu, activation)
    if plan.layer is not None:
        y = x.new_empty_strided(plan.size, plan.strides)
        residual = None if residual is None else residual.contiguous()
        if _run(plan, plan.layer, x.contiguous(), prepared, scale, shift, residual, y):
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


def is_plain(*operands: Tensor | None) -> bool:
    """Whether nothing watches operators on these: then the implementation can be called without torch's dispatcher.

    The dispatcher takes longer to call into Python than a small layer takes to run.
    """
    for tensor in operands:
        if tensor is not None and (type(tensor) not in _PLAIN or not (tensor.is_cpu or tensor.is_cuda)):
            return False
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._is_tracing()
    )


_PLAIN = (Tensor, nn.Parameter)


class _Plan(NamedTuple):
    """The size of a layer's result, and how native kernels run it: the affine map of its levels, and their struct.

    The outputs lie along the axis: 1 in images, -1 in what a linear layer gives. The strides are those of
    channels_last: memory by strides is had in half the time of memory by format.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    layer: native.Layer | None
    a: float
    b: float
    relu: bool
    activation: str
    axis: int


def _plan(
    x: Tensor,
    shape: Sequence[int],
    levels: Sequence[float],
    relu: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> _Plan:
    """What a call comes to; checked and made once for all calls alike."""
    path, threads = active(), torch.get_num_threads()
    pairs = (*stride, None, *padding, None, *dilation, groups)
    key = (x.shape, x.dtype, x.is_cpu, *shape, None, *levels, relu, *pairs, activation, path, threads)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _new_plan(
            x, shape, levels, relu, stride, padding, dilation, groups, activation, path, threads
        )
    return plan


_MOST_PLANS = 4096
_plans: dict[tuple[object, ...], _Plan] = {}


def _new_plan(
    x: Tensor,
    shape: Sequence[int],
    levels: Sequence[float],
    relu: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    path: str,
    threads: int,
) -> _Plan:
    check_levels(levels)
    size: tuple[int, ...]
    if len(shape) == 2:
        size = linear_size(x, shape, activation)
        rows = x.numel() // shape[1]
        image, result = (min(rows, 1), 1, max(rows, 1), shape[1]), (1, max(rows, 1))
        format_, axis = torch.contiguous_format, -1
    else:
        size = conv2d_size(x, shape, stride, padding, dilation, groups, activation)
        image, result = (x.shape[0], x.shape[2], x.shape[3], x.shape[1]), size[2:]
        format_, axis = torch.channels_last, 1
    strides = torch.empty(size, device="meta", memory_format=format_).stride()
    whole, unit = full_shape(shape), fallback.affine(levels)
    native_input = path != "torch" and x.dtype == torch.float32 and x.is_cpu
    if not native_input or unit is None or not is_native(whole, groups, levels):
        return _Plan(size, strides, None, 1.0, 0.0, relu, activation, axis)
    o, _, kh, kw = whole
    kind = ("float32", "binary", "int8").index(activation)
    fused = unit[1] == 0  # else the epilogue comes after the second term of the levels
    window = (*stride, *padding, *dilation)
    numbers = (len(levels), kind, relu and fused, native.number(path), threads)
    layer = native.Layer(*image, o, kh, kw, groups, *result, *window, *numbers)
    return _Plan(size, strides, layer, *unit, relu, activation, axis)


def _run(
    plan: _Plan,
    layer: native.Layer,
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
        return native.run(layer, x, prepared, fallback.fold(scale, plan.a, layer.o, y), shift, residual, y)
    if not native.run(layer, x, prepared, None, None, None, y):
        return False
    sums = _window_sums(layer, plan.activation, x, plan.axis)
    y.copy_(fallback.epilogue(plan.a * y + plan.b * sums, scale, shift, residual, plan.relu, plan.axis))
    return True


def _window_sums(layer: native.Layer, activation: str, x: Tensor, axis: int) -> Tensor:
    """What a weight of ones makes of x: the second term of levels that are not symmetric about 0."""
    if activation == "int8":
        q, step = fallback.quantize_rows(x)
        return q.sum(-1, keepdim=True) * step
    if activation == "binary":
        x = BINARY.nearest(x)
    if axis == -1:
        return x.sum(-1, keepdim=True)
    ones = x.new_ones(layer.groups, layer.c // layer.groups, layer.kh, layer.kw)
    window = ((layer.sy, layer.sx), (layer.py, layer.px), (layer.dy, layer.dx))
    sums = fallback.convolution(x, ones, *window, layer.groups)
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
    check_devices(x, prepared, scale, shift, residual)
    size = conv2d_size(x, shape, stride, padding, dilation, groups, activation)
    check_epilogue(x, size, shape[0], scale, shift, residual)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=suggest_memory_format(x))


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
    check_devices(x, prepared, scale, shift, residual)
    size = linear_size(x, shape, activation)
    check_epilogue(x, size, shape[0], scale, shift, residual)
    return x.new_empty(size)


def _laid_out(y: Tensor, format_: torch.memory_format) -> Tensor:
    """The result with the strides of this format: itself, where it has them."""
    other = y if format_ is torch.preserve_format else torch.empty_like(y, memory_format=format_)
    return y if y.stride() == other.stride() else other.copy_(y)


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
    x: Tensor,
    size: Sequence[int],
    channels: int,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
) -> None:
    """That scale and shift are float32 [O], and the residual is like the result."""
    if scale is None and shift is None and residual is None:
        return
    for name, vector in (("scale", scale), ("shift", shift)):
        if vector is not None and (vector.dtype != torch.float32 or vector.shape != (channels,)):
            raise ValueError(f"{name} is {vector.dtype} {list(vector.shape)}, but it must be float32 [{channels}]")
    if residual is not None and (residual.dtype != x.dtype or residual.shape != torch.Size(size)):
        raise ValueError(f"residual is {residual.dtype} {list(residual.shape)}, but it must be {x.dtype} {list(size)}")


for _name, _implementation, _fake in (("conv2d", conv2d_now, _conv2d_fake), ("linear", linear_now, _linear_fake)):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _implementation, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"mirrorquant::{_name}", _fake, lib=_LIBRARY)
