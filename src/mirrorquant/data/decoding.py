"""Photographs of any size as squares of bytes: decoded no larger than needed, cut out, resized (bilinear, antialias).

JPEG files are decoded by simplejpeg (libjpeg-turbo) where it is installed; all others, and what it refuses, by pillow.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .pictures import FORMATS, check_size, require_pillow, rgb

Box = tuple[int, int, int, int]  # top, left, height and width
NUMBERS = 41  # uniform random numbers that `random_box` and a flip take: ten tries of four, and one
AREA, RATIO = (0.08, 1.0), (math.log(3 / 4), math.log(4 / 3))


def random_box(height: int, width: int, uniform: Sequence[float]) -> Box:
    """The box of `augment.ResizedCrop` from 40 uniform numbers: the areas, ratios, tops and lefts of ten tries.

    >>> random_box(100, 150, [0.5] * 40)
    (5, 30, 90, 90)
    """
    for n in range(10):
        area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * uniform[n])
        ratio = math.exp(RATIO[0] + (RATIO[1] - RATIO[0]) * uniform[10 + n])
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 1 <= w <= width and 1 <= h <= height:
            return int((height - h + 1) * uniform[20 + n]), int((width - w + 1) * uniform[30 + n]), h, w
    h = min(height, max(1, round(width * 4 / 3)))
    w = min(width, max(1, round(height * 4 / 3)))
    return (height - h) // 2, (width - w) // 2, h, w


def shorter(size: int) -> int:
    """The shorter side to which an image is resized before its central square of `size` is cut out.

    >>> shorter(224)
    256
    """
    return round(size * 8 / 7)


def resized(pixels: Tensor, height: int, width: int) -> Tensor:
    """An image of H×W×3 bytes, resized (bilinear, antialias); the same as pillow gives but for a grey level or two."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = F.interpolate(pixels.permute(2, 0, 1)[None], (height, width), mode="bilinear", antialias=True)
    return image[0].permute(1, 2, 0)


def shrunk(pixels: Tensor, side: int) -> Tensor:
    """An image of H×W×3 bytes whose shorter side is `side` at most."""
    height, width = pixels.shape[:2]
    return pixels if min(height, width) <= side else resized(pixels, *_sides(height, width, side))


def centre(pixels: Tensor, size: int) -> Tensor:
    """The evaluation transform of H×W×3 bytes: the shorter side is resized to 8/7 of `size`, the centre cut out."""
    pixels = _middle(pixels)
    height, width = _sides(pixels.shape[0], pixels.shape[1], shorter(size))
    top, left = round((height - size) / 2), round((width - size) / 2)
    return resized(pixels, height, width)[top : top + size, left : left + size]


def decode(content: bytes, size: int = 0, choose: Callable[[int, int], Box] | None = None) -> Tensor:
    """The pixels of an image file, H×W×3 of uint8; with `choose` those of the box that it picks for a height and width.

    The box may come out smaller by a factor of 2, 4 or 8, but with at least `size` pixels per side if it had them: a
    JPEG decodes faster so. Raises `ValueError` or whatever pillow raises if the content is not a PNG or JPEG, does not
    decode completely or has more than `MOST_PIXELS` pixels.
    """
    turbo = _turbo()
    if turbo is not None and content[:2] == b"\xff\xd8":
        try:
            height, width, space, _ = turbo.decode_jpeg_header(content)
            if space in ("YCbCr", "RGB", "Gray"):
                check_size(height, width)
                box = choose(height, width) if choose else (0, 0, height, width)
                least = {"min_factor": _factor(box, size if choose else 0)}
                least |= {
                    "min_height": -(-height // least["min_factor"]),
                    "min_width": -(-width // least["min_factor"]),
                }
                return _cut(torch.from_numpy(turbo.decode_jpeg(content, "RGB", **least)), height, width, box)
        except ValueError:  # pillow reads some files that break the rules, and says of others what is wrong
            pass
    return _with_pillow(content, size, choose)


def _with_pillow(content: bytes, size: int, choose: Callable[[int, int], Box] | None) -> Tensor:
    require_pillow()
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as file:
            width, height = file.size
            check_size(height, width)
            box = choose(height, width) if choose else (0, 0, height, width)
            if (factor := _factor(box, size if choose else 0)) > 1:
                file.draft(None, (width // factor, height // factor))
            image = rgb(file)
    except UnidentifiedImageError as error:
        raise ValueError("empty" if not content else "neither PNG nor JPEG") from error
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    return _cut(pixels, height, width, box)


@functools.cache
def _turbo() -> Any:
    """The module simplejpeg, or None where it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _factor(box: Box, size: int) -> int:
    """By how much an image may be decoded smaller: by 8, 4 or 2, which are faster than 1, unlike those between."""
    return next((f for f in (8, 4, 2) if size and min(box[2:]) >= f * size), 1)


def _cut(pixels: Tensor, height: int, width: int, box: Box) -> Tensor:
    """The box out of an image of height×width that may have been decoded smaller."""
    top, left, h, w = box
    rows, columns = pixels.shape[:2]
    factor = next(f for f in (1, 2, 4, 8) if (rows, columns) == (-(-height // f), -(-width // f)))
    h, w = max(1, h // factor), max(1, w // factor)
    top, left = min(round(top / factor), rows - h), min(round(left / factor), columns - w)
    return pixels[top : top + h, left : left + w]


def _sides(height: int, width: int, least: int) -> tuple[int, int]:
    """Height and width of an image that is resized so that the shorter of them is `least`."""
    return (least, least * width // height) if height <= width else (least * height // width, least)


def _middle(pixels: Tensor) -> Tensor:
    """Of an image that is more than four times as long as wide, the middle: it would get too large when enlarged."""
    height, width = pixels.shape[:2]
    top, left = max(0, (height - 4 * width) // 2), max(0, (width - 4 * height) // 2)
    return pixels[top : height - top, left : width - left]
