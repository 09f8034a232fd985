"""The same layers in plain torch: the definition of every kernel, and the path where no kernel runs.

A weight of level index i is levels[i]. Two levels, and three equidistant ones, are an affine image of the unit sets:

    levels = a * u + b    with u in {-1, +1} or {-1, 0, +1}

so that W * x = a * (U * x) + b * (1 * x). With b = 0 (the usual case) the constant a goes into the scale. A binary
activation makes U * sign(x) an integer, which float32 holds exactly below 2^24: there every path agrees to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mirrorquant.levels import BINARY
from mirrorquant.packing.kernels.layer import Epilogue, Geometry

__all__ = ["activate", "affine", "apply", "decode", "finish", "fold", "sums"]

_SLACK = 1e-6


def affine(levels: Sequence[float]) -> tuple[float, float] | None:
    """The (a, b) of ``levels = a * u + b``, or None where the levels are no affine image of a unit set.

    >>> affine((-1.0, 1.0)), affine((0.0, 1.0)), affine((-0.5, 0.0, 0.5)), affine((-1.0, 0.0, 3.0))
    ((1.0, 0.0), (0.5, 0.5), (0.5, 0.0), None)
    """
    if len(levels) == 2:
        return (levels[1] - levels[0]) / 2, (levels[1] + levels[0]) / 2
    if len(levels) == 3:
        a, b = (levels[2] - levels[0]) / 2, (levels[2] + levels[0]) / 2
        return (a, levels[1]) if abs(levels[1] - b) <= _SLACK * abs(a) else None
    return None


def decode(codes: Tensor, levels: Sequence[float]) -> Tensor:
    """The float32 weight of level indices."""
    return torch.tensor(tuple(levels), dtype=torch.float32, device=codes.device)[codes.long()]


def apply(x: Tensor, weight: Tensor, geometry: Geometry, epilogue: Epilogue) -> Tensor:
    """relu?(scale[o] * (W * act(x)) + shift[o] + residual), a convolution or a linear layer by the geometry."""
    a, b = 1.0, 0.0
    if geometry.activation != "float32" and (unit := affine(geometry.levels)):
        a, b = unit
        if unit != (1.0, 0.0):  # exact: a level minus b, over a, is -1, 0 or +1 except for its rounding
            weight = ((weight - b) / a).round()
    weight = weight.to(x.dtype)
    x, step = activate(x, geometry.activation)
    y = F.linear(x, weight) if geometry.axis < 0 else convolution(x, weight, *geometry[3:])
    y = y if step is None else y * step
    if b != 0:
        y, a = a * y + b * sums(x, step, geometry), 1.0
    return finish(y, fold(epilogue, a, y, geometry.shape[0]), geometry.axis)


def activate(x: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """act(x), and for int8 the steps s of its rows, by which results are multiplied.

    For int8 a row is integers q in -127..127 with x about s * q: s = max|x| / 127, q = round(x / s). The step of a row
    that is not finite is NaN, and so is everything that is computed from it.

    >>> activate(torch.tensor([[1.0, -127.0, 0.4]]), "int8")
    (tensor([[   1., -127.,    0.]]), tensor([[1.]]))
    """
    if activation != "int8":
        return (BINARY.nearest(x) if activation == "binary" else x), None
    step = x.abs().amax(-1, keepdim=True) / 127
    step = torch.where(step.isfinite(), step, torch.nan)
    return torch.where(step > 0, x / step, torch.zeros_like(x)).round().clamp(-127, 127), step


def sums(x: Tensor, step: Tensor | None, geometry: Geometry) -> Tensor:
    """The product of a weight of ones and act(x): the second term of levels that are not symmetric about 0."""
    outputs, *window = geometry.shape
    if len(window) == 1:
        total = x.sum(-1, keepdim=True)
        return total if step is None else total * step
    total = convolution(x, x.new_ones(geometry.groups, *window), *geometry[3:])
    return total.repeat_interleave(outputs // geometry.groups, 1)


def convolution(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """``F.conv2d``, with a single channel in the plain layout.

    Its memory is the same in both layouts, but where the strides are those of channels_last, torch 2.13 computes wrong
    numbers on processors with AVX-512, for a 7x7 kernel with stride (1, 2) on images 7 wide.
    """
    if x.shape[1] == 1 and x.is_contiguous():
        x = x.flatten().view(x.shape)
    return F.conv2d(x, weight, None, tuple(stride), tuple(padding), tuple(dilation), groups)


def fold(epilogue: Epilogue, a: float, like: Tensor, channels: int) -> Epilogue:
    """The epilogue with the constant of the levels in its scale."""
    if a == 1:
        return epilogue
    scale = like.new_full((channels,), a) if epilogue.scale is None else epilogue.scale * a
    return epilogue._replace(scale=scale)


def finish(y: Tensor, epilogue: Epilogue, axis: int = 1) -> Tensor:
    """relu?(y * scale[o] + shift[o] + residual), rounded after each operation, in that order, as in every kernel.

    The outputs o lie along the axis.
    """
    scale, shift, residual, relu = epilogue
    shape = [1] * y.dim()
    shape[axis] = -1
    if scale is not None:
        y = y * scale.to(y.dtype).view(shape)
    if shift is not None:
        y = y + shift.to(y.dtype).view(shape)
    if residual is not None:
        y = y + residual
    return y.relu() if relu else y
