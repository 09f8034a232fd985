"""Layers for networks with few-valued weights *and* activations."""

from typing import Any

import torch
from torch import Tensor, nn

from mirrorquant.levels import BINARY

__all__ = ["BinaryActivation"]

_GRADIENTS = ("clipped", "polynomial")


class BinaryActivation(nn.Module):
    """sign(x), with sign(0) = +1, so that an activation is always -1 or +1.

    The derivative of the sign is zero almost everywhere; in its place the backward pass uses, for |x| < 1 and zero
    beyond,

    - ``clipped``: 1, the straight-through estimator;
    - ``polynomial``: 2 - 2|x|, the derivative of the piecewise polynomial that Bi-Real Net puts in the sign's place.

    In a packed network the layer after it computes with bits alone.

    Example:
        >>> BinaryActivation()(torch.tensor([-0.2, 0.0, 3.0]))
        tensor([-1.,  1.,  1.])
        >>> x = torch.tensor([-2.0, -0.5, 0.25], requires_grad=True)
        >>> BinaryActivation("polynomial")(x).sum().backward()
        >>> x.grad
        tensor([0.0000, 1.0000, 1.5000])
    """

    def __init__(self, gradient: str = "clipped") -> None:
        super().__init__()
        if gradient not in _GRADIENTS:
            raise ValueError(f"gradient is {gradient!r}, but it must be one of {', '.join(_GRADIENTS)}")
        self.gradient = gradient

    def forward(self, x: Tensor) -> Tensor:
        """The signs, in the dtype of ``x``."""
        signs: Tensor = _Sign.apply(x, self.gradient) if x.requires_grad else BINARY.nearest(x)  # type: ignore[no-untyped-call]
        return signs

    def extra_repr(self) -> str:
        return f"gradient={self.gradient!r}"


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = gradient
        return BINARY.nearest(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        slope = (2 - 2 * x.abs()).clamp_min(0) if ctx.gradient == "polynomial" else (x.abs() < 1).to(x.dtype)
        return grads[0] * slope, None
