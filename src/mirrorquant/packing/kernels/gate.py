"""The one way into the kernels: every tensor that passes has its values in memory, as native code reads them.

Kernels get an address and a size. A tensor can promise memory that is not there (a freed or shrunk storage, zeros
without memory, a wrapper around other tensors) or mean something else than its bytes say (a negated view). Here such a
tensor is resolved into a plain one, or raises a ``ValueError`` that names it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mirrorquant.packing.kernels.layer import Epilogue

__all__ = ["admit", "admit_all", "check_devices", "refuse_gradient"]

_NAMES = ("scale", "shift", "residual")


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


def admit_all(x: Tensor, prepared: Tensor, epilogue: Epilogue) -> tuple[Tensor, Tensor, Epilogue]:
    """The operands of a layer, each admitted, all on one device."""
    check_devices(x, prepared, epilogue)
    scale, shift, residual = (
        None if tensor is None else admit(name, tensor) for name, tensor in zip(_NAMES, epilogue[:3], strict=True)
    )
    return admit("x", x), admit("prepared", prepared), Epilogue(scale, shift, residual, epilogue.relu)


def check_devices(x: Tensor, prepared: Tensor, epilogue: Epilogue) -> None:
    """That all operands are on the device of x."""
    for name, tensor in (("x", x), ("prepared", prepared)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {tensor!r:.40}, but it must be a tensor")
    device = x.device
    for name, other in zip(("prepared", *_NAMES), (prepared, *epilogue[:3]), strict=True):
        if other is not None and other.device != device:
            raise ValueError(f"{name} is on {other.device}, but x is on {device}: move both to one device")


def refuse_gradient(x: Tensor, epilogue: Epilogue) -> None:
    """Raises where autograd would expect a gradient, which no kernel computes."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in zip(("x", *_NAMES), (x, *epilogue[:3]), strict=True):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient, but kernels compute none: call them under torch.no_grad()")


def _end(tensor: Tensor) -> int:
    """How many elements of its storage a tensor reaches to."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return int(tensor.storage_offset()) + tensor.numel()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + reach + 1
