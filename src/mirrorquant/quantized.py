"""Quantized tensors: a weight of the model with its state, and the parts of a step on all of them.

Each part is one function with a loop, so that a compiled step has one graph for all tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mirrorquant.health import local
from mirrorquant.methods.base import Method, State
from mirrorquant.mirrors import Beta

__all__ = ["Quantized", "from_logs", "project", "pull_back", "settle", "to_logs"]


class Quantized(NamedTuple):
    """One quantized tensor: its name, the model's weight, its state, and the method, β and lr of its group."""

    name: str
    weight: Tensor
    state: State
    method: Method
    beta: Beta
    lr: Beta

    def is_rounded(self) -> bool:
        """Whether the weight is exactly the rounded latent, as its dtype represents it."""
        rounded = self.method.rounded(self.state, self.beta)
        return torch.equal(local(self.weight), local(rounded.to(self.weight.dtype)))

    def shows(self, relative: float) -> bool:
        """Whether the weight is the image of its latent, up to a relative error, or exactly the rounded one.

        The projection's own error is allowed too: another device, compiler or number of threads may have computed it.
        """
        latent: Tensor = self.state["latent"]
        error = 8 * torch.finfo(latent.dtype).eps
        hull = self.method.hull(self.state, self.beta)
        largest = 1.0 if hull is None or not local(hull).numel() else float(local(hull).max())
        absolute = error * largest * max(map(abs, self.method.levels)) + 2.0**-24  # the smallest float16
        image = self.method.image(self.state, self.beta)
        seen, expected = (local(t.detach().to(latent.dtype)) for t in (self.weight, image))
        close = torch.allclose(seen, expected, rtol=max(relative, error), atol=absolute, equal_nan=True)
        return close or self.is_rounded()

    def adopted(self) -> Quantized | None:
        """The same tensor with a state of which its weight is the rounded image; None if it is off its levels."""
        state = self.method.adopted(self.weight.detach(), self.state)
        return None if state is None else self._replace(state=state)


def pull_back(tensors: list[Quantized]) -> None:
    """latent.grad = pull_back(weight.grad)."""
    for _, weight, state, method, beta, _ in tensors:
        grad = weight.grad
        _set_grad(state["latent"], None if grad is None else method.gradient(grad, state, beta))


def to_logs(tensors: list[Quantized]) -> None:
    """Learnt scales become their logarithms while the base optimizer moves them, so that they stay positive.

    One that has a gradient is a logarithm, also if an exception ends the step.
    """
    for _, weight, state, method, beta, _ in tensors:
        if method.learns_scale:
            scale, grad = state["scale"], weight.grad
            _set_grad(scale, None if grad is None else scale.detach() * method.scale_gradient(grad, state, beta))
            if grad is not None:
                scale.log_()


def from_logs(tensors: list[Quantized]) -> None:
    """The inverse, afterwards; a step of any size leaves a scale that float32 can hold."""
    for q in tensors:
        if q.method.learns_scale and q.state["scale"].grad is not None:
            q.state["scale"].clamp_(-80, 80).exp_()


def settle(tensors: list[Quantized]) -> None:
    """latent = settle(latent), after the base optimizer has moved it."""
    for _, _, state, method, beta, lr in tensors:
        settled = method.settled(state, beta, lr)
        if settled is not state["latent"]:
            state["latent"].copy_(settled)


def project(tensors: list[Quantized], *, rounded: bool) -> None:
    """weight = project(latent), or round(latent)."""
    for _, weight, state, method, beta, _ in tensors:
        weight.copy_(method.rounded(state, beta) if rounded else method.image(state, beta))


def _set_grad(tensor: Tensor, grad: Tensor | None) -> None:
    """In place if there is a gradient already, as in a CUDA graph."""
    if grad is not None and tensor.grad is not None:
        tensor.grad.copy_(grad)
    else:
        tensor.grad = grad
