"""The operators ``torch.ops.mirrorquant.conv2d`` and ``linear``, with the shapes that tracing and export need."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from mirrorquant.levels import BINARY
from mirrorquant.packing.kernels import fallback, gpu, native
from mirrorquant.packing.kernels.dispatch import active
from mirrorquant.packing.kernels.gate import admit_all, check_devices
from mirrorquant.packing.kernels.layer import Epilogue, Geometry
from mirrorquant.packing.kernels.layout import check_levels, full_shape
from mirrorquant.packing.kernels.prepared import is_native, weight

__all__ = ["conv2d", "conv2d_now", "is_plain", "linear", "linear_now"]

_LIBRARY = torch.library.Library("mirrorquant", "FRAGMENT")  # type: ignore[no-untyped-call]
_WEIGHT = "Tensor x, Tensor prepared, int[] shape, float[] levels, str activation"
_WINDOW = "int[] stride, int[] padding, int[] dilation, int groups"
_EPILOGUE = "Tensor? scale, Tensor? shift, Tensor? residual, bool relu"
for _schema in (f"conv2d({_WEIGHT}, {_WINDOW}, {_EPILOGUE}) -> Tensor", f"linear({_WEIGHT}, {_EPILOGUE}) -> Tensor"):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]

conv2d = torch.ops.mirrorquant.conv2d.default
linear = torch.ops.mirrorquant.linear.default


def conv2d_now(x: Tensor, prepared: Tensor, geometry: Geometry, epilogue: Epilogue, layout: bool = True) -> Tensor:
    """The operator's implementation; autocast does not apply, on any path.

    Without ``layout`` the result may lie in memory in any way: mostly in channels_last.
    """
    x, prepared, epilogue = admit_all(x, prepared, epilogue)
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return conv2d_now(x, prepared, geometry, epilogue, layout)
    format_ = suggest_memory_format(x) if layout else torch.preserve_format
    plan = _plan(x, geometry, epilogue.relu)
    epilogue.check(x, plan.size, geometry.shape[0])
    if plan.layer is not None:
        y = x.new_empty_strided(plan.size, plan.strides)
        if _run(plan, plan.layer, x, prepared, geometry, epilogue, y):
            return _laid_out(y, format_) if format_ is torch.contiguous_format else y
    kernel = weight(prepared, geometry.shape, geometry.levels, geometry.groups)
    return _laid_out(fallback.apply(x, kernel, geometry, epilogue), format_)


def linear_now(x: Tensor, prepared: Tensor, geometry: Geometry, epilogue: Epilogue) -> Tensor:
    """The operator's implementation; autocast does not apply, on any path."""
    x, prepared, epilogue = admit_all(x, prepared, epilogue)
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return linear_now(x, prepared, geometry, epilogue)
    plan = _plan(x, geometry, epilogue.relu)
    epilogue.check(x, plan.size, geometry.shape[0])
    if x.is_cuda and gpu.is_gpu(prepared, geometry.shape, geometry.levels):
        return gpu.linear(x, prepared, geometry, epilogue)
    if plan.layer is not None:
        y = x.new_empty_strided(plan.size, plan.strides)
        if _run(plan, plan.layer, x, prepared, geometry, epilogue, y):
            return y
    return fallback.apply(x, weight(prepared, geometry.shape, geometry.levels, 1), geometry, epilogue).contiguous()


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
    axis: int


def _plan(x: Tensor, geometry: Geometry, relu: bool) -> _Plan:
    """What a call comes to; checked and made once for all calls alike."""
    path, threads = active(), torch.get_num_threads()
    key = (x.shape, x.dtype, x.is_cpu, geometry, relu, path, threads)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _new_plan(x, geometry, relu, path, threads)
    return plan


_MOST_PLANS = 4096
_plans: dict[tuple[object, ...], _Plan] = {}


def _new_plan(x: Tensor, geometry: Geometry, relu: bool, path: str, threads: int) -> _Plan:
    shape, levels, activation, *window, groups = geometry
    check_levels(levels)
    size: tuple[int, ...]
    result: tuple[int, ...]
    if len(shape) == 2:
        size = geometry.linear_size(x)
        rows = x.numel() // shape[1]
        image, result = (min(rows, 1), 1, max(rows, 1), shape[1]), (1, max(rows, 1))
        format_, axis = torch.contiguous_format, -1
    else:
        size = geometry.conv2d_size(x)
        image, result = (x.shape[0], x.shape[2], x.shape[3], x.shape[1]), size[2:]
        format_, axis = torch.channels_last, 1
    strides = torch.empty(size, device="meta", memory_format=format_).stride()
    whole, unit = full_shape(shape), fallback.affine(levels)
    native_input = path != "torch" and x.dtype == torch.float32 and x.is_cpu
    if not native_input or unit is None or not is_native(whole, groups, levels):
        return _Plan(size, strides, None, 1.0, 0.0, axis)
    o, _, kh, kw = whole
    kind = ("float32", "binary", "int8").index(activation)
    fused = unit[1] == 0  # else the epilogue comes after the second term of the levels
    numbers = (len(levels), kind, relu and fused, native.number(path), threads)
    layer = native.Layer(*image, o, kh, kw, groups, *result, *itertools.chain(*window), *numbers)
    return _Plan(size, strides, layer, *unit, axis)


def _run(
    plan: _Plan,
    layer: native.Layer,
    x: Tensor,
    prepared: Tensor,
    geometry: Geometry,
    epilogue: Epilogue,
    y: Tensor,
) -> bool:
    """Fill y by a native kernel; False where the weight was not prepared for one."""
    if prepared.dtype != torch.uint8 or prepared.dim() != 1 or not prepared.is_contiguous():
        return False
    format_ = torch.channels_last if plan.axis == 1 else torch.contiguous_format
    x, (scale, shift, residual, relu) = x.contiguous(memory_format=format_), epilogue
    if plan.b == 0:
        scale, shift = (None if vector is None else vector.contiguous() for vector in (scale, shift))
        residual = None if residual is None else residual.contiguous(memory_format=format_)
        folded = fallback.fold(Epilogue(scale, shift, residual, relu), plan.a, y, layer.o)
        return native.run(layer, x, prepared, folded, y)
    if not native.run(layer, x, prepared, Epilogue(), y):
        return False
    sums = _window_sums(geometry, x)
    y.copy_(fallback.finish(plan.a * y + plan.b * sums, epilogue, plan.axis))
    return True


def _window_sums(geometry: Geometry, x: Tensor) -> Tensor:
    """What a weight of ones makes of x: the second term of levels that are not symmetric about 0."""
    if geometry.activation == "int8":
        q, step = fallback.quantize_rows(x)
        return q.sum(-1, keepdim=True) * step
    if geometry.activation == "binary":
        x = BINARY.nearest(x)
    outputs, *window = geometry.shape
    if len(window) == 1:
        return x.sum(-1, keepdim=True)
    sums = fallback.convolution(x, x.new_ones(geometry.groups, *window), *geometry[3:])
    return sums.repeat_interleave(outputs // geometry.groups, 1)


def _laid_out(y: Tensor, format_: torch.memory_format) -> Tensor:
    """The result with the strides of this format: itself, where it has them."""
    other = y if format_ is torch.preserve_format else torch.empty_like(y, memory_format=format_)
    return y if y.stride() == other.stride() else other.copy_(y)


# The operators: the arguments of their schemas are x, prepared, and the fields of a geometry and of an epilogue.


def _conv2d(x: Tensor, prepared: Tensor, *fields: Any) -> Tensor:
    return conv2d_now(x, prepared, Geometry.of(*fields[:-4]), Epilogue(*fields[-4:]))


def _linear(x: Tensor, prepared: Tensor, *fields: Any) -> Tensor:
    return linear_now(x, prepared, Geometry.of(*fields[:-4]), Epilogue(*fields[-4:]))


def _conv2d_fake(x: Tensor, prepared: Tensor, *fields: Any) -> Tensor:
    size = _checked_size(x, prepared, Geometry.of(*fields[:-4]).conv2d_size(x), Epilogue(*fields[-4:]))
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=suggest_memory_format(x))


def _linear_fake(x: Tensor, prepared: Tensor, *fields: Any) -> Tensor:
    return x.new_empty(_checked_size(x, prepared, Geometry.of(*fields[:-4]).linear_size(x), Epilogue(*fields[-4:])))


def _checked_size(x: Tensor, prepared: Tensor, size: tuple[int, ...], epilogue: Epilogue) -> tuple[int, ...]:
    check_devices(x, prepared, epilogue)
    epilogue.check(x, size, size[1] if len(size) == 4 else size[-1])
    return size


for _name, _implementation, _fake in (("conv2d", _conv2d, _conv2d_fake), ("linear", _linear, _linear_fake)):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _implementation, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"mirrorquant::{_name}", _fake, lib=_LIBRARY)
