"""Batches of images for training and for evaluation, made on the device that the images live on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .augment import AUGMENTATIONS
from .base import Data, Images


class Loader:
    """Training batches, shuffled and augmented: `batch(k)` depends on k alone, so training can resume at any step.

    An epoch visits each image at most once; an incomplete last batch is dropped. The order and the random numbers of
    the augmentation (by default that of the data set) are drawn on the CPU, from `seed` and the number of the epoch:
    every device gets the same batches.

    >>> from mirrorquant.data import load
    >>> x, y = Loader(load("digits"), batch_size=64, seed=0).batch(1000)
    >>> x.shape, x.dtype, y.shape
    (torch.Size([64, 1, 8, 8]), torch.float32, torch.Size([64]))
    """

    def __init__(self, data: Data, *, batch_size: int, seed: int, augment: str = "") -> None:
        if not 1 <= batch_size <= len(data.train):
            raise ValueError(f"batch_size is {batch_size}, expected 1 to {len(data.train)}, the number of images")
        augment = augment or data.augment
        if augment not in AUGMENTATIONS:
            raise ValueError(f"augment is {augment!r}, expected one of {', '.join(AUGMENTATIONS)}")
        self.data, self.images, self.batch_size, self.seed = data, data.train, batch_size, seed
        self.batches_per_epoch = len(self.images) // batch_size
        self._augmentation = AUGMENTATIONS[augment]
        self._epoch = -1
        self._order = self._draws = torch.empty(0)

    def batch(self, k: int) -> tuple[Tensor, Tensor]:
        """Batch number k, counted from 0 over all epochs: normalised float32 images and int64 labels."""
        epoch, place = divmod(k, self.batches_per_epoch)
        order, draws = self.epoch(epoch)
        part = slice(place * self.batch_size, (place + 1) * self.batch_size)
        return self.compose(order[part], draws[part])

    def compose(self, chosen: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of the images with the numbers `chosen`, augmented with the random numbers `draws`."""
        images = self._augmentation.apply(self.images.images[chosen], draws)
        return self.data.normalise(images), self.images.labels[chosen]

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


def clean_batches(images: Images, data: Data, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All images in order, normalised like `data` but not augmented, for evaluation; the last batch may be smaller.

    >>> from mirrorquant.data import load
    >>> data = load("digits")
    >>> [len(y) for _, y in clean_batches(data.test, data, 100)]
    [100, 100, 100, 60]
    """
    for start in range(0, len(images), batch_size):
        part = slice(start, start + batch_size)
        yield data.normalise(images.images[part]), images.labels[part]
