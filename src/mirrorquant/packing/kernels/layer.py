"""What every kernel is called with: the geometry of a layer, and the epilogue of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Epilogue", "Geometry"]


class Geometry(NamedTuple):
    """A layer apart from its numbers: the weight's shape, its levels, what it meets, and the window of a convolution.

    >>> Geometry((8, 4), (-1.0, 1.0)).activation
    'float32'
    """

    shape: tuple[int, ...]
    levels: tuple[float, ...]
    activation: str = "float32"
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    @classmethod
    def of(cls, *values: Any) -> Geometry:
        """From values that may be lists."""
        fields: list[Any] = [value if isinstance(value, (str, int)) else tuple(value) for value in values]
        return cls(*fields)

    def conv2d_size(self, x: Tensor) -> tuple[int, ...]:
        """The size of a convolution's result, or an error that names the argument that does not fit."""
        shape, padding = self.shape, self.padding
        if self.activation not in ("float32", "binary"):
            raise ValueError(f'activation is {self.activation!r}, but conv2d takes "float32" or "binary"')
        if len(shape) != 4 or x.dim() != 4 or not x.is_floating_point():
            raise ValueError(
                f"x is {x.dim()}-D {x.dtype} and the weight's shape {list(shape)}, but conv2d needs a floating-point"
                " [N, C, H, W] and [O, C/groups, kh, kw]"
            )
        for name, pair in (("stride", self.stride), ("padding", padding), ("dilation", self.dilation)):
            if len(pair) != 2 or min(pair) < (name != "padding"):
                raise ValueError(f"{name} is {list(pair)}, but it must be two numbers from {int(name != 'padding')} up")
        if self.groups < 1 or x.shape[1] != shape[1] * self.groups or shape[0] % self.groups:
            raise ValueError(
                f"x has {x.shape[1]} channels and the weight's shape is {list(shape)} with {self.groups} groups, but x"
                f" needs {shape[1]} * {self.groups} channels, and groups must divide the {shape[0]} output channels"
            )
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, shape[2:], strict=True)]
        sizes = zip(x.shape[2:], padding, spans, self.stride, strict=True)
        height, width = ((n + 2 * pad - span) // step + 1 for n, pad, span, step in sizes)
        if height < 1 or width < 1:
            raise ValueError(
                f"x is {list(x.shape)}, too small for a {shape[2]}x{shape[3]} kernel with padding {list(padding)} and"
                f" dilation {list(self.dilation)}"
            )
        return x.shape[0], shape[0], height, width

    def linear_size(self, x: Tensor) -> tuple[int, ...]:
        """The size of a linear layer's result, or an error that names the argument that does not fit."""
        if self.activation not in ("float32", "binary", "int8"):
            raise ValueError(f'activation is {self.activation!r}, but linear takes "float32", "binary" or "int8"')
        if len(self.shape) != 2 or x.dim() < 1 or x.shape[-1] != self.shape[1] or not x.is_floating_point():
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)} and the weight's shape {list(self.shape)}, but linear needs a"
                " floating-point [..., K] and [O, K]"
            )
        return (*x.shape[:-1], self.shape[0])


class Epilogue(NamedTuple):
    """The last step: relu?(scale[o] * y + shift[o] + residual)."""

    scale: Tensor | None = None
    shift: Tensor | None = None
    residual: Tensor | None = None
    relu: bool = False

    def check(self, x: Tensor, size: Sequence[int], channels: int) -> None:
        """That scale and shift are float32 [O], and the residual is like the result."""
        for name, vector in (("scale", self.scale), ("shift", self.shift)):
            if vector is not None and (vector.dtype != torch.float32 or vector.shape != (channels,)):
                raise ValueError(f"{name} is {vector.dtype} {list(vector.shape)}, but it must be float32 [{channels}]")
        residual = self.residual
        if residual is not None and (residual.dtype != x.dtype or residual.shape != torch.Size(size)):
            raise ValueError(
                f"residual is {residual.dtype} {list(residual.shape)}, but it must be {x.dtype} {list(size)}"
            )
