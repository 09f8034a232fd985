"""Images as bytes, and data sets of three splits of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from mirrorquant.errors import MirrorquantError

if TYPE_CHECKING:
    from .streamed import Photos

Split: TypeAlias = "Images | Photos"


class DataError(MirrorquantError, ValueError):
    """A data file is missing, damaged or unexpected; the message names it and says what to do."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images and their labels: `images` is N×C×H×W of uint8, `labels` is N of int64, indices into `classes`.

    >>> two = Images(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog"))
    >>> len(two), two.shape
    (2, (3, 8, 8))
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            found = f"{self.images.dtype} of shape {tuple(self.images.shape)}"
            raise DataError(f"images are {found}, expected torch.uint8 of shape N×C×H×W")
        check_labels(self.labels, len(self.images), len(self.classes))

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def device(self) -> torch.device:
        """Where the images lie."""
        return self.images.device

    def to(self, device: torch.device | str) -> Images:
        """The same images on another device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def take(self, index: slice | Tensor) -> Images:
        """Some of the images: a slice shares memory, a tensor of indices copies.

        >>> two = Images(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog"))
        >>> two.take(slice(1, 2)).labels
        tensor([1])
        """
        return replace(self, images=self.images[index], labels=self.labels[index])

    def followed_by(self, other: Images) -> Images:
        """These images and then those of another split."""
        images, labels = torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels])
        return replace(self, images=images, labels=labels)


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """A data set: its three splits, the normalisation of its images, and their augmentation in training.

    All are `Images`, in memory, or all are `Photos`, streamed from files. `mean` and `std` have one number per channel,
    for pixels scaled to 0..1. `augment` is a name that the loader of such images knows.
    """

    name: str
    train: Split
    val: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: str
    _grey: list[Tensor] = field(init=False)  # mean and std in grey levels, on the device of the images

    def __post_init__(self) -> None:
        for split, images in (("val", self.val), ("test", self.test)):
            if type(images) is not type(self.train):
                raise DataError(f"{self.name}: {split} and training images must both be in memory or both be files")
            if images.shape != self.train.shape or images.classes != self.train.classes:
                raise DataError(f"{self.name}: the {split} images differ from the training images in shape or classes")
        if not len(self.mean) == len(self.std) == self.shape[0] or min(self.std) <= 0:
            found = f"mean is {self.mean} and std is {self.std}"
            raise DataError(f"{self.name}: {found}, expected {self.shape[0]} each, one per channel, std above 0")
        grey = [(torch.tensor(v, dtype=torch.float64) * 255).float().view(-1, 1, 1) for v in (self.mean, self.std)]
        object.__setattr__(self, "_grey", [v.to(self.train.device) for v in grey])

    def __repr__(self) -> str:
        splits = f"{len(self.train)} train, {len(self.val)} val, {len(self.test)} test images"
        return f"{self.name}: {splits} of {'×'.join(map(str, self.shape))} in {len(self.classes)} classes"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        return self.train.shape

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the labels."""
        return self.train.classes

    @property
    def about(self) -> dict[str, Any]:
        """What a network that is trained on these images has to know of them, for JSON."""
        return {
            "classes": len(self.classes),
            "shape": list(self.shape),
            "names": list(self.classes),
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def normalise(self, images: Tensor) -> Tensor:
        """Bytes as float32 of mean 0 and variance 1, by a subtraction and a division that are exact everywhere."""
        mean, std = self._grey  # tensors: a GPU would multiply by the reciprocal of a number, which rounds differently
        streamed = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
        if streamed and images.device.type == "cpu":
            width = images.shape[3]
            rows = images.permute(0, 2, 3, 1).flatten(2)  # whole rows of numbers: faster than three at a time
            floats = rows.float().sub_(mean.flatten().repeat(width)).div_(std.flatten().repeat(width))
            return floats.view(*images.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        return images.float().sub_(mean).div_(std)

    def joined(self) -> Data:
        """The same data with the validation images among the training images, after them."""
        if self.val is self.test:
            raise DataError(f"{self.name} has no validation images of its own: they are the test images")
        return replace(self, train=self.train.followed_by(self.val))  # type: ignore[arg-type]  # both of one type

    def resized(self, size: int) -> Data:
        """The same image files, with images of size×size in batches; a split that serves twice is one object again."""
        if isinstance(self.train, Images):
            raise DataError(f"images of {self.name} are stored at {self.shape[1]}×{self.shape[2]}, not {size}×{size}")
        return self._each(lambda split: split.resized(size))

    def to(self, device: torch.device | str) -> Data:
        """The same data on another device; a split that serves twice is moved once."""
        return self._each(lambda split: split.to(device))

    def _each(self, change: Callable[[Any], Split]) -> Data:
        changed = {id(split): change(split) for split in (self.train, self.val, self.test)}
        return replace(self, train=changed[id(self.train)], val=changed[id(self.val)], test=changed[id(self.test)])


def renamed(before: Sequence[str], now: Sequence[str]) -> str:
    """The first class that has become another one, in words; empty if there is none.

    >>> renamed(("cat", "dog"), ("dog", "zebra"))
    'class 0 was cat, but now it is dog'
    """
    pairs = enumerate(zip_longest(before, now, fillvalue="none"))
    return next((f"class {n} was {one}, but now it is {other}" for n, (one, other) in pairs if one != other), "")


def check_labels(labels: Tensor, images: int, classes: int) -> None:
    """Raises `DataError` unless there is at least one image, and a label from 0 to classes - 1 for each."""
    if labels.dtype != torch.int64 or labels.shape != (images,):
        found = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise DataError(f"labels are {found}, expected torch.int64 of shape ({images},), one per image")
    if images == 0:
        raise DataError("there are no images, expected at least one")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(f"labels run from {low} to {high}, expected 0 to {classes - 1}, one per class")


def shuffled(count: int, key: str) -> list[int]:
    """The numbers below `count` in an order that depends on `key` alone, in every version of Python and torch.

    >>> shuffled(5, "faces")
    [0, 2, 3, 4, 1]
    """
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{key}:{i}".encode("utf-8", "surrogateescape")).digest())


def statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, for pixels scaled to 0..1; the same on every machine (exact sums).

    The standard deviation is at least one grey level, so that dividing by it is safe.

    >>> statistics(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    grey = torch.arange(256)
    mean, std = [], []
    for channel in images.unbind(1):
        count = torch.bincount(channel.flatten(), minlength=256)
        n, total, squares = channel.numel(), int((count * grey).sum()), int((count * grey**2).sum())
        mean.append(total / n / 255)
        std.append(max((n * squares - total**2) ** 0.5 / n, 1.0) / 255)
    return tuple(mean), tuple(std)
