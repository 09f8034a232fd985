"""Batches of images for training and for evaluation, made on the device that the images live on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .augment import AUGMENTATIONS, Extra, inside
from .base import Data, Images, Split
from .streamed import Photos, StreamedLoader, check_part, checked, generator, rows_of
from .streamed import clean_batches as streamed_batches

NOTHING = Extra()
FLIPS = -1  # in place of an epoch, for the random numbers of alternating flips


class Loader:
    """Training batches, shuffled and augmented: `batch(k)` depends on k alone, so training can resume at any step.

    An epoch visits each image at most once; an incomplete last batch is dropped. The order and the random numbers of
    the augmentation (by default that of the data set) are drawn on the CPU, from `seed` and the number of the epoch:
    every device gets the same batches. A process that shares the work with others gets the rows of its `part`, its
    rank and the number of processes; the batch as a whole is the same. Images that `extra` mixes are blended with those
    of the next batch, and their labels are N×classes probabilities.

    >>> from mirrorquant.data import load
    >>> x, y = Loader(load("digits"), batch_size=64, seed=0).batch(1000)
    >>> x.shape, x.dtype, y.shape
    (torch.Size([64, 1, 8, 8]), torch.float32, torch.Size([64]))
    """

    def __init__(
        self,
        data: Data,
        *,
        batch_size: int,
        seed: int,
        augment: str = "",
        part: tuple[int, int] = (0, 1),
        extra: Extra = NOTHING,
    ) -> None:
        if not isinstance(data.train, Images):
            raise ValueError(f"images of {data.name} are files, expected images in memory: use StreamedLoader")
        augment = checked(data, batch_size, augment, AUGMENTATIONS)
        self.data, self.images, self.batch_size, self.seed = data, data.train, batch_size, seed
        self.batches_per_epoch = len(self.images) // batch_size
        self._rows = rows_of(part, batch_size)
        self._augmentation, self.extra = AUGMENTATIONS[augment], extra
        if extra.alternating_flip and not self._augmentation.flip:
            raise ValueError(f"alternating_flip is set, but the augmentation {augment!r} does not flip: try crop-flip")
        self._epoch = -1
        self._order = self._draws = torch.empty(0)

    def batch(self, k: int) -> tuple[Tensor, Tensor]:
        """Batch number k, counted from 0 over all epochs: normalised float32 images and int64 labels."""
        epoch, place = divmod(k, self.batches_per_epoch)
        order, draws = self.epoch(epoch)
        start = place * self.batch_size
        part = slice(start + self._rows.start, start + self._rows.stop)
        return self.compose(order[part], draws[part])

    def compose(self, chosen: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of the images with the numbers `chosen`, augmented with the random numbers `draws` of `plan`."""
        own, erased, mixed, other = torch.split(draws, self._columns, 1)
        images, labels = self._augmentation.apply(self.images.images[chosen], own), self.images.labels[chosen]
        if self.extra.mixes:
            partner, classes = other[:, 0], torch.arange(len(self.data.classes), device=images.device)
            others = self._augmentation.apply(self.images.images[partner], other[:, 1:])
            images, share = self.extra.mix(images, others, mixed)
            first, second = (labels[:, None] == classes for labels in (labels, self.images.labels[partner]))
            labels = share[:, None] * first + (1 - share[:, None]) * second
        floats = self.data.normalise(images)
        if self.extra.cutout:
            floats = torch.where(inside(erased, *floats.shape[2:]), 0.0, floats)
        return floats, labels

    def epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The plan of an epoch, on the device of the images."""
        if epoch != self._epoch:
            self._order, self._draws = (tensor.to(self.images.device) for tensor in self.plan(epoch))
            self._epoch = epoch
        return self._order, self._draws

    def plan(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The order of the images in an epoch, and a row of random numbers for each of them, in that order.

        Its columns are the numbers for augmentation, cutout and mixing, then the number of the image to mix with and
        the numbers for its augmentation.
        """
        drawn = generator(self.seed, epoch)
        count, (_, height, width) = len(self.images), self.images.shape
        order = torch.randperm(count, generator=drawn)
        draws = self._augmentation.draw(count, height, width, drawn)
        if self.extra.alternating_flip:
            first = torch.randint(0, 2, (count,), generator=generator(self.seed, FLIPS))
            draws[:, -1] = (first[order] + epoch) % 2
        columns = [draws]
        if self.extra.cutout:
            columns.append(self.extra.erased(count, height, width, drawn))
        if self.extra.mixes:
            ahead = self.batch_size if self.batch_size < count else count // 2
            partner = torch.cat([order[:, None], draws], 1).roll(-ahead, 0)
            columns += [self.extra.draw(count, height, width, drawn), partner]
        return order, torch.cat(columns, 1)

    @property
    def _columns(self) -> list[int]:
        """The number of columns per purpose in a plan."""
        own = self._augmentation.numbers
        return [own, 4 * bool(self.extra.cutout), 5 * self.extra.mixes, (1 + own) * self.extra.mixes]


def loader(
    data: Data,
    *,
    batch_size: int,
    seed: int,
    augment: str = "",
    part: tuple[int, int] = (0, 1),
    workers: int = -1,
    extra: Extra = NOTHING,
) -> Loader | StreamedLoader:
    """The training batches of images in memory, or of image files, which `workers` processes read (-1: one per core).

    >>> from mirrorquant.data import load
    >>> loader(load("digits"), batch_size=64, seed=0, part=(1, 2)).batch(0)[1].shape
    torch.Size([32])
    """
    if not isinstance(data.train, Photos):
        return Loader(data, batch_size=batch_size, seed=seed, augment=augment, part=part, extra=extra)
    if extra != NOTHING:
        raise ValueError(
            f"images of {data.name} are streamed from files: cutout, mixup, cutmix and alternating_flip "
            "need images in memory"
        )
    return StreamedLoader(data, batch_size=batch_size, seed=seed, augment=augment, part=part, workers=workers)


def clean_batches(
    images: Split, data: Data, batch_size: int, part: tuple[int, int] = (0, 1), workers: int = -1
) -> Iterator[tuple[Tensor, Tensor]]:
    """All images in order, normalised like `data` but not augmented, for evaluation; the last batch may be smaller.

    Of several processes each takes a `part`, its rank and the number of processes: every count-th image from the
    rank on. Image files are read by `workers`; those that cannot be read are skipped and named in `images.problems`.

    >>> from mirrorquant.data import load
    >>> data = load("digits")
    >>> [len(y) for _, y in clean_batches(data.test, data, 100)]
    [100, 100, 100, 60]
    """
    if isinstance(images, Photos):
        yield from streamed_batches(images, data, batch_size, workers, part)
        return
    rank, count = check_part(part)
    step = batch_size * count
    for start in range(rank, len(images), step):
        chosen = slice(start, start + step, count)
        yield data.normalise(images.images[chosen]), images.labels[chosen]
