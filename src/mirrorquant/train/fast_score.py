"""Accuracy and loss of the rounded network as the fast step has it: rounding and evaluation in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from mirrorquant.data import Images
from mirrorquant.data.loader import Normalise
from mirrorquant.methods import Method
from mirrorquant.train import compiling
from mirrorquant.train.fast import FastStep

__all__ = ["FastScore"]


class FastScore:
    """Calling it gives accuracy in percent and mean cross-entropy of the rounded network on some images.

    Args:
        step: the fast step whose latents are rounded; it goes on as if nothing had happened.
        images: clean images, on its device.
        normalise: what makes the network's input of them.
        batch_size: how many are evaluated at once.
        compiled: whether it is compiled; False is for tests.
    """

    def __init__(
        self, step: FastStep, images: Images, normalise: Normalise, batch_size: int, *, compiled: bool = True
    ) -> None:
        self.step, self.images, self.normalise = step, images, normalise
        self.batches = [slice(start, start + batch_size) for start in range(0, len(images), batch_size)]
        self.rounded = {part: torch.zeros_like(part.weight) for part in step.moving}
        self.weights = {name: weight.detach() for name, weight in step.weights.items()}
        for part, flat in self.rounded.items():
            self.weights |= dict(zip(part.weights, part.views(flat), strict=True))
        self.betas = torch.ones(len(step.opt.param_groups), device=step.device)
        self.totals = torch.zeros(2, device=step.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.capture = step.device.type == "cuda"
        self._score: Callable[..., Tensor] = self._batch
        self._round: Callable[..., None] = _round
        if compiled:
            self._score = compiling.compiled(self._batch, dynamic=False)
            self._round = compiling.compiled(_round, dynamic=False)

    @torch.no_grad()
    def __call__(self) -> tuple[float, float]:
        """Accuracy and loss at the step where the fast step is."""
        groups = self.step.opt.param_groups
        self.betas.copy_(torch.tensor([float(group["anneal"](self.step.next)) for group in groups]))
        if self.graph is not None:
            self.graph.replay()
        else:
            with self.step.beside():
                self._run()
            if self.capture:
                self.graph = self.step.captured(self._run, "validation")
                self.capture = self.graph is not None
        right, loss = self.totals.tolist()
        return 100 * right / len(self.images), loss / len(self.images)

    def _run(self) -> None:
        mode = self.step.model.training
        self.step.model.eval()
        try:
            for part, flat in self.rounded.items():
                self._round(part.method, part.latents, self.betas[part.index], flat)
            self.totals.zero_()
            for batch in self.batches:
                self.totals += self._score(self.weights, self.images.images[batch], self.images.labels[batch])
        finally:
            self.step.model.train(mode)

    def _batch(self, weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        """How many are right, and the sum of the losses."""
        x = self.normalise(images)
        if self.step.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.step.dtype == torch.bfloat16):
            logits = functional_call(self.step.model, weights, (x,)).float()
        right = (logits.argmax(1) == labels).sum()
        return torch.stack([right.float(), F.cross_entropy(logits, labels, reduction="sum")])


def _round(method: Method, latents: list[Tensor], beta: Tensor, weight: Tensor) -> None:
    """weight = the level that each latent stands for."""
    weight.copy_(method.round(latents if len(latents) > 1 else latents[0], beta))  # type: ignore[arg-type]
