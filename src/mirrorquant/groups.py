"""Quantized groups: the weights of one parameter group with their states, and the parts of a step on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mirrorquant.health import local
from mirrorquant.methods.base import Method, State
from mirrorquant.mirrors import Beta

__all__ = ["Quantized", "equal"]


class Quantized(NamedTuple):
    """One quantized group: its parameters' names, the model's weights, their states, and its method, β and lr."""

    names: list[str]
    weights: list[Tensor]
    states: list[State]
    method: Method
    beta: Beta
    lr: Beta

    def tensors(self) -> Iterator[tuple[str, Tensor, State]]:
        """Name, weight and state of each tensor."""
        return zip(self.names, self.weights, self.states, strict=True)

    def pull_back(self) -> None:
        """latent.grad = pull_back(weight.grad), and the gradients of learnt scales."""
        for _, weight, state in self.tensors():
            grad = weight.grad
            _set_grad(state["latent"], None if grad is None else self.method.gradient(grad, state, self.beta))
            if self.method.learns_scale:
                own = None if grad is None else self.method.scale_gradient(grad, state, self.beta)
                _set_grad(state["scale"], own)

    def settle(self) -> None:
        """latent = settle(latent), after the base optimizer has moved it."""
        for state in self.states:
            settled = self.method.settled(state, self.beta, self.lr)
            if settled is not state["latent"]:
                state["latent"].copy_(settled)

    def project(self, *, rounded: bool = False) -> None:
        """weight = project(latent), or round(latent)."""
        image = self.method.rounded if rounded else self.method.image
        for _, weight, state in self.tensors():
            weight.copy_(image(state, self.beta))

    def shows(self, weight: Tensor, state: State, relative: float) -> bool:
        """Whether a weight is the image of its latent, up to a relative error, or exactly the rounded one.

        The projection's own error is allowed too: another device, compiler or number of threads may have computed it.
        """
        latent: Tensor = state["latent"]
        error = 8 * torch.finfo(latent.dtype).eps
        largest = float(local(state["scale"]).max()) if "scale" in state else 1.0
        absolute = error * largest * max(map(abs, self.method.levels)) + 2.0**-24  # the smallest float16
        seen, image = (local(t.detach().to(latent.dtype)) for t in (weight, self.method.image(state, self.beta)))
        close = torch.allclose(seen, image, rtol=max(relative, error), atol=absolute, equal_nan=True)
        return close or equal(weight, self.method.rounded(state, self.beta))


def equal(weight: Tensor, rounded: Tensor) -> bool:
    """Whether a weight is exactly the rounded one, as its dtype represents it."""
    return torch.equal(local(weight), local(rounded.to(weight.dtype)))


def _set_grad(tensor: Tensor, grad: Tensor | None) -> None:
    """In place if there is a gradient already, as in a CUDA graph."""
    if grad is not None and tensor.grad is not None:
        tensor.grad.copy_(grad)
    else:
        tensor.grad = grad
