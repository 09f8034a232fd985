"""Augmentation of whole batches on their device, from random numbers drawn beforehand.

An augmentation has two methods. `draw` makes the random numbers of many images at once, with a generator on the CPU;
`apply` changes a batch of images according to its share of those numbers. It uses integers throughout, so that the CPU
and a GPU give the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

PIXELS = 1 << 21  # with more, the sums in `ResizedCrop.apply` do not fit in 32 bits


@dataclass(frozen=True)
class Crop:
    """Pads each image with black pixels, cuts out a random window of the original size and, if `flip`, mirrors half.

    >>> Crop(padding=0, flip=False).apply(torch.eye(2).byte()[None, None], torch.tensor([[0, 0, 1]])).tolist()
    [[[[0, 1], [1, 0]]]]
    """

    padding: int
    flip: bool
    numbers: ClassVar[int] = 3  # that `draw` makes per image

    def draw(self, count: int, height: int, width: int, generator: Generator) -> Tensor:
        """Top, left and flipped (0 or 1) of each image: count×3 of int64."""
        corner = torch.randint(0, 2 * self.padding + 1, (count, 2), generator=generator)
        return torch.cat([corner, _flips(count, self.flip, generator)], 1)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """The windows of N×C×H×W images of uint8 at the places in `draws`."""
        height, width = images.shape[2:]
        top, left, flipped = draws.unbind(1)
        rows = top[:, None] + torch.arange(height, device=images.device)
        columns = left[:, None] + _columns(width, flipped)
        return _window(F.pad(images, (self.padding,) * 4), rows, columns)


@dataclass(frozen=True)
class ResizedCrop:
    """Cuts a random box out of each image, resizes it (bilinear) to the original size and mirrors half of them.

    The box covers a share of the area drawn uniformly from `scale`; the logarithm of its ratio of width to height is
    drawn uniformly within `ratio`. If ten draws give no box that fits, it is the largest central one of an allowed
    ratio.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    numbers: ClassVar[int] = 5

    def draw(self, count: int, height: int, width: int, generator: Generator) -> Tensor:
        """Top, left, height and width of the box and flipped (0 or 1) of each image: count×5 of int64."""
        if height * width > PIXELS:
            raise ValueError(f"images have {height}×{width} pixels, expected {PIXELS:,} at most. Load them smaller.")
        uniform = torch.rand(4, count, 10, generator=generator, dtype=torch.float64)
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * uniform[0])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        ratio = torch.exp(low + (high - low) * uniform[1])
        w, h = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
        fits = (w >= 1) & (w <= width) & (h >= 1) & (h <= height)
        first = fits.int().argmax(1, keepdim=True)
        w, h, y, x = (t.gather(1, first)[:, 0] for t in (w, h, uniform[2], uniform[3]))
        central_h = min(height, max(1, round(width / self.ratio[0])))
        central_w = min(width, max(1, round(height * self.ratio[1])))
        none = ~fits.any(1)
        w, h = w.masked_fill(none, central_w), h.masked_fill(none, central_h)
        top = ((height - h + 1) * y).long().where(~none, (height - h) // 2)
        left = ((width - w + 1) * x).long().where(~none, (width - w) // 2)
        return torch.cat([torch.stack([top, left, h, w], 1), _flips(count, self.flip, generator)], 1)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """The boxes in `draws`, cut out of N×C×H×W images of uint8, resized and rounded."""
        height, width = images.shape[2:]
        top, left, box_height, box_width, flipped = draws.unbind(1)
        row, next_row, down = _between(torch.arange(height, device=images.device), height, top, box_height)
        column, next_column, right = _between(_columns(width, flipped), width, left, box_width)
        right = right[:, None, None, :]
        upper = _window(images, row, column) * (2 * width - right) + _window(images, row, next_column) * right
        lower = _window(images, next_row, column) * (2 * width - right) + _window(images, next_row, next_column) * right
        down = down[:, None, :, None]
        whole = 4 * height * width
        return ((upper * (2 * height - down) + lower * down + whole // 2) // whole).byte()


@dataclass(frozen=True)
class Extra:
    """Extra augmentation of training images; all of it is off by default.

    Args:
        cutout: side of a square that is erased at a random place of each image, clipped at the borders (DeVries and
            Taylor, 2017). Erased pixels have the mean of the data.
        mixup: blends each image and label with another: λ times its own plus 1 − λ times the other's, with λ drawn from
            Beta(mixup, mixup) for each image.
        cutmix: replaces a random box in each image with the same box of another, and the label in proportion to its
            area: 1 − λ of the image, clipped at the borders. With `mixup` as well, each image gets one of the two, with
            equal probability.
        alternating_flip: mirrors an image in every other epoch rather than at random; whether in the first is random.

    >>> Extra(cutout=8).mixes, Extra(mixup=0.2).mixes
    (False, True)
    """

    cutout: int = 0
    mixup: float = 0.0
    cutmix: float = 0.0
    alternating_flip: bool = False

    def __post_init__(self) -> None:
        if self.cutout < 0:
            raise ValueError(f"cutout is {self.cutout}, expected 0 or more pixels")
        for name in ("mixup", "cutmix"):
            if getattr(self, name) != 0 and not 0.01 <= getattr(self, name) <= 100:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 for none, or 0.01 to 100")

    @property
    def mixes(self) -> bool:
        """Whether labels become probabilities."""
        return self.mixup > 0 or self.cutmix > 0

    def erased(self, count: int, height: int, width: int, generator: Generator) -> Tensor:
        """The box that cutout erases from each image, as top, bottom, left and right: count×4 of int64."""
        sides = torch.full((2, count), self.cutout)
        return _boxes(sides, height, width, generator)

    def draw(self, count: int, height: int, width: int, generator: Generator) -> Tensor:
        """How each image is mixed: λ in 256ths for all pixels, then the box of the other image: count×5 of int64."""
        blended = torch.full((count,), self.cutmix == 0)
        if self.mixup and self.cutmix:
            blended = torch.rand(count, generator=generator) < 0.5
        alpha = torch.where(blended, self.mixup, self.cutmix).double()
        own, other = torch._standard_gamma(torch.stack([alpha, alpha]), generator=generator)
        share = own / (own + other)
        side = torch.where(blended, 0.0, (1 - share).sqrt())
        sides = torch.stack([(height * side).round(), (width * side).round()]).long()
        pixels = torch.where(blended, (256 * share).round(), 256.0).long()
        return torch.cat([pixels[:, None], _boxes(sides, height, width, generator)], 1)

    @staticmethod
    def mix(images: Tensor, others: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """N×C×H×W images of uint8 mixed with others, and the share that each of them has in its label.

        >>> black, white = torch.zeros(1, 1, 2, 2).byte(), torch.full((1, 1, 2, 2), 255).byte()
        >>> Extra.mix(black, white, torch.tensor([[256, 0, 1, 0, 2]]))
        (tensor([[[[255, 255], [  0,   0]]]], dtype=torch.uint8), tensor([0.5000]))
        """
        pixels, (height, width) = draws[:, 0], images.shape[2:]
        own = pixels.view(-1, 1, 1, 1)
        blended = ((images * own + others * (256 - own) + 128) // 256).byte()
        _, top, bottom, left, right = draws.unbind(1)
        kept = height * width - (bottom - top) * (right - left)
        share = (pixels * kept / torch.full((), 256.0 * height * width, device=images.device)).float()
        return torch.where(inside(draws[:, 1:], height, width), others, blended), share


def inside(boxes: Tensor, height: int, width: int) -> Tensor:
    """Which pixels lie in the boxes (top, bottom, left and right): N×1×H×W of bool."""
    rows, columns = (torch.arange(side, device=boxes.device) for side in (height, width))
    top, bottom, left, right = boxes[:, :, None].unbind(1)
    in_rows, in_columns = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def _boxes(sides: Tensor, height: int, width: int, generator: Generator) -> Tensor:
    """Boxes of these heights and widths around random pixels, clipped at the borders of the image: N×4 of int64."""
    found = []
    for side, most in zip(sides, (height, width), strict=True):
        first = torch.randint(0, most, side.shape, generator=generator) - side // 2
        found += [first.clamp(min=0), (first + side).clamp(max=most)]
    return torch.stack(found, 1)


AUGMENTATIONS: dict[str, Crop | ResizedCrop] = {
    "none": Crop(padding=0, flip=False),
    "shift": Crop(padding=1, flip=False),
    "crop": Crop(padding=4, flip=False),
    "crop-flip": Crop(padding=4, flip=True),
    "resized-crop-flip": ResizedCrop(),
}


def _flips(count: int, flip: bool, generator: Generator) -> Tensor:
    return torch.randint(0, 2 if flip else 1, (count, 1), generator=generator)


def _columns(width: int, flipped: Tensor) -> Tensor:
    """The columns of each image from left to right, or from right to left if it is flipped."""
    columns = torch.arange(width, device=flipped.device)
    return torch.where(flipped[:, None].bool(), columns.flip(0), columns)


def _window(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels of image i at `rows[i]` and `columns[i]`, in all channels."""
    image, channel = (torch.arange(count, device=images.device) for count in images.shape[:2])
    return images[image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]


def _between(index: Tensor, size: int, start: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The positions of the pixels `index` of an image of `size` in a box that is stretched over it.

    With the centres of pixels at half integers, pixel i lies at (i + 1/2)·length/size - 1/2, clamped to the box. In
    units of 1/(2·size) that is an integer. Returns the two pixels beside it and its distance to the first, in those
    units.
    """
    start, length = start[:, None], length[:, None]
    place = (2 * index + 1) * length - size
    place = torch.minimum(place.clamp(min=0), 2 * size * (length - 1))
    first = place // (2 * size)
    return start + first, start + torch.minimum(first + 1, length - 1), (place % (2 * size)).int()
