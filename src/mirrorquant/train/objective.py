"""The objective: a callable of logits and batch, and the only place that computes the loss.

>>> batch = Batch(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))
>>> Objective(label_smoothing=0.1)(torch.eye(2), batch)
tensor(0.3633)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirrorquant._text import first_line
from mirrorquant.errors import MirrorquantError

__all__ = ["SCORES", "TOP", "Batch", "Objective", "Teacher", "TeacherError"]

TOP = 5
SCORES = 3  # numbers of ``Objective.tally``


class Batch(NamedTuple):
    """Images N×C×H×W, and their labels: N classes, or N×classes probabilities where images were mixed."""

    images: Tensor
    labels: Tensor

    def split(self, count: int) -> list[Batch]:
        """The batch in parts of equal size, one after the other."""
        parts = zip(self.images.chunk(count), self.labels.chunk(count), strict=True)
        return [Batch(images, labels) for images, labels in parts]


class TeacherError(MirrorquantError):
    """A teacher fails, or gives something else than one number per image and class; the message names it."""


class Teacher(nn.Module):
    """A network in evaluation mode, with the factor on its logits that it was trained with; its errors name it."""

    def __init__(self, name: str, network: nn.Module, logit_scale: float = 1.0) -> None:
        super().__init__()
        self.name, self.network, self.logit_scale = name, network, logit_scale
        self.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> Tensor:
        """The logits for a batch of images."""
        try:
            answers: Tensor = self.network(images)
        except Exception as error:
            problem = f"teacher {self.name} fails on images of shape {tuple(images.shape)}"
            raise TeacherError(f"{problem}: {first_line(error)}") from error
        return answers if self.logit_scale == 1.0 else answers * self.logit_scale

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the network's numbers, the same on any device, by which a resumed run knows its teacher again."""
        state = [tensor.cpu() for tensor in self.network.state_dict().values() if isinstance(tensor, Tensor)]
        return hashlib.sha256(str([self.logit_scale, *map(_checksum, state)]).encode()).hexdigest()


def _checksum(tensor: Tensor) -> int:
    """A number that depends on each byte and its place."""
    content = tensor.contiguous().flatten().view(torch.uint8).long()
    return int((content * (torch.arange(len(content)) % 65521 + 1)).sum())


@dataclass(frozen=True)
class Objective:
    """Mean cross-entropy of ``logit_scale`` times the logits, with label smoothing, and distillation from a teacher.

    With a teacher, the loss is ``hard_share`` of that plus ``1 - hard_share`` of the Kullback-Leibler divergence from
    the teacher's probabilities, both softened by the temperature T, times T² (so that gradients do not shrink with T).
    The teacher is a network in evaluation mode on the device of the images; no gradient reaches it, and ``logit_scale``
    is not applied to its logits.
    """

    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    teacher: Callable[[Tensor], Tensor] | None = None
    temperature: float = 4.0
    hard_share: float = 0.1

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        hard = F.cross_entropy(logits, batch.labels, label_smoothing=self.label_smoothing)
        if self.teacher is None:
            return hard
        with torch.no_grad():
            taught = F.log_softmax(self._answers(batch.images, logits.shape) / self.temperature, 1)
        learnt = F.log_softmax(logits / self.temperature, 1)
        soft = F.kl_div(learnt, taught, reduction="batchmean", log_target=True) * self.temperature**2
        return self.hard_share * hard + (1 - self.hard_share) * soft

    def _answers(self, images: Tensor, expected: torch.Size) -> Tensor:
        """The teacher's logits, of the expected shape: others would be broadcast."""
        assert self.teacher is not None
        answers = self.teacher(images)
        shape = answers.shape if isinstance(answers, Tensor) else type(answers).__name__
        if shape != expected:
            given = f"gives {tuple(shape) if isinstance(shape, torch.Size) else shape}"
            raise TeacherError(
                f"teacher {getattr(self.teacher, 'name', type(self.teacher).__name__)} {given} for images of shape "
                f"{tuple(images.shape)}, expected {tuple(expected)}, one number per image and class"
            )
        return answers

    def tally(self, logits: Tensor, labels: Tensor) -> Tensor:
        """For validation: how many answers are right, how many labels are among the first five, and Σ cross-entropy.

        The cross-entropy is without label smoothing. ``SCORES`` numbers.

        >>> Objective().tally(torch.eye(6), torch.tensor([0, 1, 2, 3, 4, 0]))
        tensor([5.0000, 6.0000, 7.2615])
        """
        logits = logits.float() * self.logit_scale
        loss = F.cross_entropy(logits, labels, reduction="sum")
        own, number = logits.gather(1, labels[:, None]), torch.arange(logits.shape[1], device=logits.device)
        ahead = ~(logits <= own) | ((logits == own) & (number < labels[:, None]))  # of equals the first, as in argmax
        counts = [(logits.argmax(1) == labels).sum(), (ahead.sum(1) < TOP).sum()]
        return torch.stack([*(count.to(loss.dtype) for count in counts), loss])
