"""The one way into the kernels: every tensor that passes has its values in memory, as native code reads them.

Kernels get an address and a size. A tensor can promise memory that is not there (a freed or shrunk storage, zeros
without memory, a wrapper around other tensors) or mean something else than its bytes say (a negated view). Here such a
tensor is resolved into a plain one, or raises a ``ValueError`` that names it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Operands", "admit", "admit_all", "check_devices", "refuse_gradient"]

Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
_NAMES = ("x", "prepared", "scale", "shift", "residual")


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


def admit_all(
    x: Tensor, prepared: Tensor, scale: Tensor | None, shift: Tensor | None, residual: Tensor | None
) -> Operands:
    """The operands of a layer, each admitted, all on one device."""
    check_devices(x, prepared, scale, shift, residual)
    return (
        admit("x", x),
        admit("prepared", prepared),
        None if scale is None else admit("scale", scale),
        None if shift is None else admit("shift", shift),
        None if residual is None else admit("residual", residual),
    )


def check_devices(x: Tensor, *others: Tensor | None) -> None:
    """That the other operands (prepared, scale, shift, residual) are on the device of x."""
    for place, tensor in enumerate((x, others[0])):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAMES[place]} is {tensor!r:.40}, but it must be a tensor")
    device = x.device
    for place, tensor in enumerate(others, 1):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{_NAMES[place]} is on {tensor.device}, but x is on {device}: move both to one device")


def refuse_gradient(x: Tensor, scale: Tensor | None, shift: Tensor | None, residual: Tensor | None) -> None:
    """Raises where autograd would expect a gradient, which no kernel computes."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in (("x", x), ("scale", scale), ("shift", shift), ("residual", residual)):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient, but kernels compute none: call them under torch.no_grad()")


def _end(tensor: Tensor) -> int:
    """How many elements of its storage a tensor reaches to."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return int(tensor.storage_offset()) + tensor.numel()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + reach + 1
