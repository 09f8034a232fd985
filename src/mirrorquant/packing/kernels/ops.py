"""The operators ``torch.ops.mirrorquant.conv2d`` and ``linear``, with the shapes that tracing and export need."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from mirrorquant.packing.kernels import fallback, gpu, native
from mirrorquant.packing.kernels.layer import Epilogue, Geometry, admit, operands
from mirrorquant.packing.kernels.prepared import full_shape, is_native, level_bytes, weight

__all__ = ["call", "contiguous", "conv2d", "copied", "linear", "run"]

_HALF = (torch.float16, torch.bfloat16)
LARGE_IMAGE, _MANY_CHANNELS = 1 << 15, 512  # from these numbers on, images are copied one by one
_LIBRARY = torch.library.Library("mirrorquant", "FRAGMENT")  # type: ignore[no-untyped-call]
_WEIGHT = "Tensor x, Tensor prepared, int[] shape, float[] levels, str activation"
_WINDOW = "int[] stride, int[] padding, int[] dilation, int groups"
_EPILOGUE = "Tensor? scale, Tensor? shift, Tensor? residual, bool relu"
for _schema in (f"conv2d({_WEIGHT}, {_WINDOW}, {_EPILOGUE}) -> Tensor", f"linear({_WEIGHT}, {_EPILOGUE}) -> Tensor"):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]

conv2d = torch.ops.mirrorquant.conv2d.default
linear = torch.ops.mirrorquant.linear.default


def call(x: Tensor, prepared: Tensor, geometry: Geometry, epilogue: Epilogue) -> Tensor:
    """The operator of a layer; called directly where nothing watches operators.

    Torch's dispatcher takes longer to call into Python than a small layer takes to run.
    """
    if _is_plain(x, prepared, *epilogue[:3]):
        return run(x, prepared, geometry, epilogue)
    if geometry.axis < 0:
        return linear(x, prepared, *geometry[:3], *epilogue)  # type: ignore[no-any-return]
    return conv2d(x, prepared, *geometry, *epilogue)  # type: ignore[no-any-return]


_PLAIN = (Tensor, nn.Parameter)


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors, outside of tracing and of modes that watch operators."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or not (tensor.is_cpu or tensor.is_cuda)):
            return False
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._is_tracing()
    )


def run(x: Tensor, prepared: Tensor, geometry: Geometry, epilogue: Epilogue, layout: bool = True) -> Tensor:
    """The implementation of both operators; autocast does not apply, on any path.

    Without ``layout`` the result may have any memory layout: that of a convolution is mostly channels_last.
    """
    admitted = {name: admit(name, tensor) for name, tensor in operands(x, prepared, epilogue).items()}
    x, prepared, epilogue = admitted.pop("x"), admitted.pop("prepared"), Epilogue(**admitted, relu=epilogue.relu)
    if prepared.dtype != torch.uint8 or prepared.dim() != 1 or not prepared.is_contiguous():
        raise ValueError(
            f"a prepared weight is a contiguous 1-D uint8 tensor, this one is {prepared.dim()}-D {prepared.dtype}:"
            " make it with mirrorquant.packing.kernels.prepare"
        )
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return run(x, prepared, geometry, epilogue, layout)
    plan = _plan(x.shape, x.dtype, x.is_cpu, geometry, epilogue.relu, native.active(), torch.get_num_threads())
    epilogue.check(x.dtype, plan.size, geometry.shape[0])
    if x.is_cpu and x.dtype in _HALF:  # for which there is no kernel, and torch's are slow
        residual = None if epilogue.residual is None else epilogue.residual.float()
        return run(x.float(), prepared, geometry, epilogue._replace(residual=residual), layout).to(x.dtype)
    y = None if plan.layer is None else _run_native(plan, plan.layer, x, prepared, geometry, epilogue)
    if y is None and x.is_cuda and gpu.is_gpu(prepared, geometry.shape, geometry.levels):
        y = gpu.linear(x, prepared, geometry, epilogue)
    if y is None:
        y = fallback.apply(x, weight(prepared, geometry), geometry, epilogue)
    if not layout:
        return y
    plain = geometry.axis < 0 or suggest_memory_format(x) is torch.contiguous_format
    strides = plan.contiguous if plain else plan.strides
    return y if y.stride() == strides else copied(y, y.new_empty_strided(plan.size, strides))


def copied(y: Tensor, out: Tensor) -> Tensor:
    """``out.copy_(y)``; large images of many channels go from channels_last to the plain layout one by one.

    Torch copies the transpose of a matrix block by block, in one thread: up to ten times as fast as a batch of images
    in two layouts, where the numbers of many channels fall on the same places of the cache.
    """
    large = y.dim() == 4 and y.shape[1] >= _MANY_CHANNELS and y.shape[1:].numel() >= LARGE_IMAGE
    transposed = large and y.is_contiguous(memory_format=torch.channels_last) and out.is_contiguous()
    if not (transposed and y.is_cpu):
        return out.copy_(y)
    for image, pixels in zip(out.flatten(2).unbind(), y.flatten(2).unbind(), strict=True):
        image.copy_(pixels)
    return out


def contiguous(x: Tensor) -> Tensor:
    """``x.contiguous()``, by means of :func:`copied`."""
    return x if x.is_contiguous() else copied(x, torch.empty_like(x, memory_format=torch.contiguous_format))


class _Plan(NamedTuple):
    """The size of a layer's result, and how native kernels run it: the affine map of its levels, and their struct.

    The strides are those of channels_last for images: allocating by strides is twice as fast as by format.
    """

    size: tuple[int, ...]
    contiguous: tuple[int, ...]
    strides: tuple[int, ...]
    layer: native.Layer | None = None
    a: float = 1.0
    b: float = 0.0


@lru_cache(maxsize=4096)
def _plan(
    x: tuple[int, ...], dtype: torch.dtype, on_cpu: bool, geometry: Geometry, relu: bool, path: str, threads: int
) -> _Plan:
    """The plan of a call, checked and made once for all calls with equal arguments; x is the size of the input."""
    shape, levels, activation, *window, groups = geometry
    level_bytes(levels)
    whole, unit, size = full_shape(shape), fallback.affine(levels), geometry.size(x, dtype)
    contiguous = strides = torch.empty(size, device="meta").stride()
    if len(shape) == 2:
        rows = math.prod(x) // shape[1]
        image, output = (min(rows, 1), 1, max(rows, 1), shape[1]), (1, max(rows, 1))
    else:
        image, output = (x[0], x[2], x[3], x[1]), (size[2], size[3])
        strides = torch.empty(size, device="meta", memory_format=torch.channels_last).stride()
    if path == "torch" or dtype != torch.float32 or not on_cpu or unit is None or not is_native(whole, groups, levels):
        return _Plan(size, contiguous, strides)
    o, _, kh, kw = whole
    kind = ("float32", "binary", "int8").index(activation)
    fused = unit[1] == 0  # else the epilogue comes after the second term of the levels
    numbers = (len(levels), kind, relu and fused, native.NUMBERS[path], threads)
    layer = native.Layer(*image, o, kh, kw, groups, *output, *itertools.chain(*window), *numbers)
    return _Plan(size, contiguous, strides, layer, *unit)


def _run_native(
    plan: _Plan, layer: native.Layer, x: Tensor, prepared: Tensor, geometry: Geometry, epilogue: Epilogue
) -> Tensor | None:
    """The result of a native kernel; None where the weight was not prepared for one."""
    format_ = torch.channels_last if geometry.axis == 1 else torch.contiguous_format
    x, y = x.contiguous(memory_format=format_), x.new_empty_strided(plan.size, plan.strides)
    if plan.b == 0:
        scale, shift, residual, relu = epilogue
        scale, shift = (None if vector is None else vector.contiguous() for vector in (scale, shift))
        residual = None if residual is None else residual.contiguous(memory_format=format_)
        folded = fallback.fold(Epilogue(scale, shift, residual, relu), plan.a, y, layer.o)
        return y if native.run(layer, x, prepared, folded, y) else None
    if not native.run(layer, x, prepared, Epilogue(), y):
        return None
    second = plan.b * fallback.sums(*fallback.activate(x, geometry.activation), geometry)
    return y.copy_(fallback.finish(plan.a * y + second, epilogue, geometry.axis))


# The arguments of the operators are x, prepared, and the fields of a geometry and of an epilogue.


def _run(x: Tensor, prepared: Tensor, *fields: Any) -> Tensor:
    return run(x, prepared, Geometry.of(*fields[:-4]), Epilogue(*fields[-4:]))


def _fake(x: Tensor, prepared: Tensor, *fields: Any) -> Tensor:
    """A result without values, for tracing."""
    geometry, epilogue = Geometry.of(*fields[:-4]), Epilogue(*fields[-4:])
    operands(x, prepared, epilogue)
    size = geometry.size(x.shape, x.dtype)
    epilogue.check(x.dtype, size, geometry.shape[0])
    format_ = torch.contiguous_format if geometry.axis < 0 else suggest_memory_format(x)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=format_)


for _name in ("conv2d", "linear"):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"mirrorquant::{_name}", _fake, lib=_LIBRARY)
