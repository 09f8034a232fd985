"""Batches of images for training and for evaluation, made on the device that the images live on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .augment import AUGMENTATIONS
from .base import Images


class Loader:
    """Training batches, shuffled and augmented: `batch(k)` depends on k alone, so training can resume at any step.

    An epoch visits each image at most once; an incomplete last batch is dropped. The order and the random numbers of
    the augmentation are drawn on the CPU, from `seed` and the number of the epoch: every device gets the same batches.

    >>> from mirrorquant.data import load
    >>> data = load("digits")
    >>> loader = Loader(data.train, batch_size=64, augment=data.augment, mean=data.mean, std=data.std, seed=0)
    >>> x, y = loader.batch(1000)
    >>> x.shape, x.dtype, y.shape
    (torch.Size([64, 1, 8, 8]), torch.float32, torch.Size([64]))
    """

    def __init__(
        self,
        images: Images,
        *,
        batch_size: int,
        augment: str,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        device: torch.device | str | None = None,
    ) -> None:
        if not 1 <= batch_size <= len(images):
            raise ValueError(f"batch_size is {batch_size}, expected 1 to {len(images)}, the number of images")
        if augment not in AUGMENTATIONS:
            raise ValueError(f"augment is {augment!r}, expected one of {', '.join(AUGMENTATIONS)}")
        self.images = images if device is None else images.to(device)
        self.batch_size, self.seed = batch_size, seed
        self.batches_per_epoch = len(images) // batch_size
        self._augmentation = AUGMENTATIONS[augment]
        self._normalise = Normalise(self.images, mean, std)
        self._epoch = -1
        self._order = self._draws = torch.empty(0)

    def batch(self, k: int) -> tuple[Tensor, Tensor]:
        """Batch number k, counted from 0 over all epochs: normalised float32 images and int64 labels."""
        if k < 0:
            raise ValueError(f"k is {k}, expected 0 or more, the number of the batch since the start of training")
        epoch, place = divmod(k, self.batches_per_epoch)
        order, draws = self.epoch(epoch)
        part = slice(place * self.batch_size, (place + 1) * self.batch_size)
        return self.compose(order[part], draws[part])

    def compose(self, chosen: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of the images with the numbers `chosen`, augmented with the random numbers `draws`."""
        images = self._augmentation.apply(self.images.images[chosen], draws)
        return self._normalise(images), self.images.labels[chosen]

    def epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The plan of an epoch, on the device of the images."""
        if epoch != self._epoch:
            self._order, self._draws = (tensor.to(self.images.images.device) for tensor in self.plan(epoch))
            self._epoch = epoch
        return self._order, self._draws

    def plan(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The order of the images in an epoch, and the random numbers of their augmentation in that order."""
        digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        count, (_, height, width) = len(self.images), self.images.shape
        order = torch.randperm(count, generator=generator)
        return order, self._augmentation.draw(count, height, width, generator)


def clean_batches(
    images: Images, batch_size: int, mean: Sequence[float], std: Sequence[float]
) -> Iterator[tuple[Tensor, Tensor]]:
    """All images in order, normalised but not augmented, for evaluation; the last batch may be smaller.

    >>> from mirrorquant.data import load
    >>> data = load("digits")
    >>> [len(y) for _, y in clean_batches(data.test, 100, data.mean, data.std)]
    [100, 100, 100, 60]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected 1 or more")
    normalise = Normalise(images, mean, std)
    parts = (slice(start, start + batch_size) for start in range(0, len(images), batch_size))
    return ((normalise(images.images[part]), images.labels[part]) for part in parts)


class Normalise:
    """Turns bytes into float32 of mean 0 and variance 1, by a subtraction and a division that are exact everywhere."""

    def __init__(self, images: Images, mean: Sequence[float], std: Sequence[float]) -> None:
        channels = images.shape[0]
        if not len(mean) == len(std) == channels or min(std) <= 0:
            raise ValueError(f"mean is {mean} and std is {std}, expected {channels} each, one per channel, std above 0")
        # Tensors: a GPU replaces division by a number with multiplication by its reciprocal, which rounds differently.
        self.mean, self.std = (
            (torch.tensor(v, dtype=torch.float64) * 255).float().view(-1, 1, 1).to(images.images.device)
            for v in (mean, std)
        )

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().sub_(self.mean).div_(self.std)
