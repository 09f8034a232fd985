"""Layers whose weights take two or three levels, computed from their bits.

    y = relu?(scale[o] * (W * act(x)) + shift[o] + residual)

``prepare`` lays level indices out for the kernels of this machine, once, when a model is loaded; ``conv2d`` and
``linear`` compute with the result. On the CPU there are kernels for AVX-512, AVX2 and any other processor (portable),
compiled when the package is installed; without them, and for layers that they do not cover, plain torch computes the
same. ``describe`` says which path runs.

>>> import torch
>>> from mirrorquant.packing import kernels
>>> codes = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.uint8)      # the weight [[1, -1, 1], [-1, -1, 1]]
>>> prepared = kernels.prepare(codes, (-1.0, 1.0))
>>> kernels.linear(torch.tensor([[1.0, 2.0, 3.0]]), prepared, shape=(2, 3), levels=(-1.0, 1.0))
tensor([[2., 0.]])

| activation | W is multiplied by | promise |
|---|---|---|
| ``"float32"`` | x itself | error about 1e-7, at most 2e-6, of the largest level times the sum of abs(x) |
| ``"binary"`` | sign(x), sign(0) = 1, sign(NaN) = -1; a padded position counts 0 | equal to the bit on every path |
| ``"int8"`` (linear) | x quantized row by row, step max(abs(x)) / 127 | equal to the bit on every path |

Inputs that are not finite stay visible: with float32 activations in each output that sums them, with int8 ones as NaN
in all outputs of their row.

The bit-equal promises are for two levels, or three equidistant ones, and sums below 2^24. A float32 layer of at most 7
rows keeps its inputs in fixed point, to 2^-24 of the largest of 256 neighbors: rows constructed so that all these
errors add up beside one large input can exceed the 2e-6, up to 1.5e-5.

Operands may have any strides, and be negated views or tensors of zeros without memory. Operands on different devices,
freed storages, sparse and nested tensors, and inputs that require a gradient raise a ``ValueError`` that names the
operand. Meta and fake tensors give meta and fake results.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mirrorquant.packing.kernels import ops
from mirrorquant.packing.kernels.layer import Epilogue, Geometry
from mirrorquant.packing.kernels.native import KernelsError, active, available, describe, force
from mirrorquant.packing.kernels.prepared import prepare

__all__ = ["KernelsError", "active", "available", "conv2d", "describe", "force", "linear", "prepare"]


def conv2d(
    x: Tensor,
    prepared: Tensor,
    *,
    shape: Sequence[int],
    levels: Sequence[float],
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    activation: str = "float32",
) -> Tensor:
    """relu?(scale[o] * (W * act(x)) + shift[o] + residual), a convolution with zero padding.

    Args:
        x: [N, C, H, W]. Native for float32; other dtypes run in torch. channels_last is the fast form, and comes back.
        prepared: the result of ``prepare`` for the level indices of the weight.
        shape: the weight's shape, [O, C/groups, kh, kw].
        levels: the values that the level indices stand for.
        scale, shift: float32 [O]; None for 1 and 0.
        residual: of the shape of the result, None for 0.
        relu: whether negative results become 0.
        stride, padding, dilation: pairs; a padded position contributes 0 whatever the activation.
        groups: as in ``torch.nn.functional.conv2d``.
        activation: "float32" or "binary" (see the module).

    Returns:
        [N, O, H', W'], in channels_last where x is.

    Example:
        >>> import torch
        >>> codes = torch.ones(1, 2, 3, 3, dtype=torch.uint8)
        >>> prepared = prepare(codes, (-1, 1))
        >>> x = torch.ones(1, 2, 4, 4)
        >>> y = conv2d(x, prepared, shape=(1, 2, 3, 3), levels=(-1, 1), padding=(1, 1))
        >>> y[0, 0, :2]
        tensor([[ 8., 12., 12.,  8.],
                [12., 18., 18., 12.]])
    """
    geometry = Geometry.of(shape, levels, activation, stride, padding, dilation, groups)
    return ops.call(x, prepared, geometry, Epilogue(scale, shift, residual, relu))


def linear(
    x: Tensor,
    prepared: Tensor,
    *,
    shape: Sequence[int],
    levels: Sequence[float],
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
    activation: str = "float32",
) -> Tensor:
    """relu?(scale[o] * (W * act(x)) + shift[o] + residual) over the last dimension of x: [..., K] becomes [..., O].

    The arguments are those of :func:`conv2d`, with a weight of the shape [O, K]; ``activation`` may be "int8", too.
    """
    return ops.call(x, prepared, Geometry.of(shape, levels, activation), Epilogue(scale, shift, residual, relu))
