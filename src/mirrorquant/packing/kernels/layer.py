"""The arguments of every kernel, checked: the geometry of a layer, the epilogue of a call, and tensors in memory.

Kernels get an address and a size. A tensor can promise memory that is not there (a freed or shrunk storage, zeros
without memory, a wrapper around other tensors) or mean something else than its bytes say (a negated view). ``admit``
resolves such a tensor into a plain one, or raises a ``ValueError`` that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Epilogue", "Geometry", "admit", "operands"]

_OPERANDS = ("scale", "shift", "residual")
_SHAPES = {2: "linear needs [O, K]", 4: "conv2d needs [O, C/groups, kh, kw]"}


class Geometry(NamedTuple):
    """A layer apart from its numbers: the weight's shape, its levels, the activation, and a convolution's window.

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
        """From values that may be lists: the first three of a linear layer, all of a convolution."""
        fields: list[Any] = [value if isinstance(value, (str, int)) else tuple(value) for value in values]
        dimensions = 2 if len(fields) == 3 else 4
        if len(fields[0]) != dimensions:
            raise ValueError(f"the weight's shape is {list(fields[0])}, but {_SHAPES[dimensions]}")
        return cls(*fields)

    @property
    def axis(self) -> int:
        """The axis of the outputs: 1 in images, -1 in the result of a linear layer."""
        return 1 if len(self.shape) == 4 else -1

    def size(self, x: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
        """The size of the result for an input of this size, or an error that names the argument that does not fit."""
        linear = len(self.shape) == 2
        known = ("float32", "binary", "int8") if linear else ("float32", "binary")
        if self.activation not in known:
            raise ValueError(f"activation is {self.activation!r}, but this layer takes one of {', '.join(known)}")
        if not dtype.is_floating_point or (not x if linear else len(x) != 4):
            needs = "[..., K]" if linear else "[N, C, H, W]"
            raise ValueError(f"x is {len(x)}-D {dtype}, but this layer needs a floating-point {needs}")
        if not linear:
            return x[0], self.shape[0], *self._window(x)
        if x[-1] != self.shape[1]:
            raise ValueError(f"x is {list(x)}, but a weight of {list(self.shape)} needs rows of {self.shape[1]}")
        return *x[:-1], self.shape[0]

    def _window(self, x: Sequence[int]) -> tuple[int, int]:
        """The height and width of a convolution's result."""
        shape, pairs = self.shape, {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        for name, pair in pairs.items():
            if len(pair) != 2 or min(pair) < (name != "padding"):
                raise ValueError(f"{name} is {list(pair)}, but it must be two numbers from {int(name != 'padding')} up")
        if self.groups < 1 or x[1] != shape[1] * self.groups or shape[0] % self.groups:
            raise ValueError(
                f"x has {x[1]} channels and the weight's shape is {list(shape)} with {self.groups} groups, but x"
                f" needs {shape[1]} * {self.groups} channels, and groups must divide the {shape[0]} output channels"
            )
        axes = zip(x[2:], shape[2:], self.stride, self.padding, self.dilation, strict=True)
        height, width = ((n + 2 * pad - d * (k - 1) - 1) // step + 1 for n, k, step, pad, d in axes)
        if height < 1 or width < 1:
            raise ValueError(
                f"x is {list(x)}, too small for a {shape[2]}x{shape[3]} kernel with padding {list(self.padding)} and"
                f" dilation {list(self.dilation)}"
            )
        return height, width


class Epilogue(NamedTuple):
    """The last step: relu?(scale[o] * y + shift[o] + residual)."""

    scale: Tensor | None = None
    shift: Tensor | None = None
    residual: Tensor | None = None
    relu: bool = False

    def named(self) -> dict[str, Tensor]:
        """The tensors that there are, by their names."""
        return {name: t for name, t in zip(_OPERANDS, self[:3], strict=True) if t is not None}

    def check(self, dtype: torch.dtype, size: tuple[int, ...], channels: int) -> None:
        """Raises an error unless scale and shift are float32 [O], and the residual is like the result."""
        for name, tensor in self.named().items():
            right = (dtype, size) if name == "residual" else (torch.float32, (channels,))
            if tensor.dtype != right[0] or tensor.shape != right[1]:
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{name} is {found}, but it must be {right[0]} {list(right[1])}")


def admit(name: str, tensor: Tensor) -> Tensor:
    """The tensor with its values in memory, where they are said to be.

    >>> x = torch.ones(3)
    >>> admit("x", torch._neg_view(x)).is_neg()
    False
    >>> _ = x.untyped_storage().resize_(0)
    >>> admit("x", x)
    Traceback (most recent call last):
    ValueError: x is torch.float32 [3], but only 0 of the 12 bytes that it needs are in memory: its storage was freed
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise ValueError(
            f"{name} is {kind}, but kernels take dense tensors: call to_dense() or to_padded_tensor() first"
        )
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if tensor.numel():
        try:
            address, present = tensor.data_ptr(), tensor.untyped_storage().nbytes()
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{name} is a wrapper without memory of its own, but kernels read memory") from error
        present = present if address else 0
        needed = _end(tensor) * tensor.element_size()
        if present < needed:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, but only {present:,} of the {needed:,} bytes that it"
                " needs are in memory: its storage was freed"
            )
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _end(tensor: Tensor) -> int:
    """The number of elements of its storage that a tensor reaches to."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return int(tensor.storage_offset()) + tensor.numel()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + reach + 1


def operands(x: Tensor, prepared: Tensor, epilogue: Epilogue) -> dict[str, Tensor]:
    """The tensors of a call by their names; raises an error unless all are on the device of x, without a gradient."""
    found = {"x": x, "prepared": prepared, **epilogue.named()}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {tensor!r:.40}, but it must be a tensor")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}: move both to one device")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, but kernels compute none: call them under torch.no_grad()")
    return found
