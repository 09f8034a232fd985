"""Random images for tests and timings, `synthetic:CxHxW:CLASSES`: a mean image per class, plus noise."""

from __future__ import annotations

import re

import torch

from .base import Data, DataError, Images
from .registry import register

TRAIN, VAL, TEST = 1000, 200, 200


@register("synthetic:CxHxW:CLASSES")
def load(text: str) -> Data:
    """1,000 training, 200 validation and 200 test images; the same ones every time.

    >>> load("3x8x8:10").train.images.shape
    torch.Size([1000, 3, 8, 8])
    """
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})x(\d{1,6}):(\d{1,6})", text, re.ASCII)
    channels, height, width, classes = map(int, match.groups()) if match else (0, 0, 0, 0)
    if not (1 <= channels <= 16 and 1 <= height <= 512 and 1 <= width <= 512 and 2 <= classes <= 1000):
        limits = "CxHxW:CLASSES with 1 to 16 channels, 1 to 512 pixels per side, 2 to 1000 classes"
        raise DataError(f"synthetic:{text} is out of range, expected synthetic:{limits}.")
    generator = torch.Generator().manual_seed(0)
    count = TRAIN + VAL + TEST
    means = torch.randint(64, 192, (classes, channels, height, width), dtype=torch.uint8, generator=generator)
    noise = torch.randint(0, 64, (count, channels, height, width), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % classes
    every = Images(means[labels] + noise - 32, labels, tuple(f"class {i}" for i in range(classes)))
    train, val, test = (every.take(s) for s in (slice(TRAIN), slice(TRAIN, TRAIN + VAL), slice(-TEST, None)))
    name, grey = f"synthetic:{channels}x{height}x{width}:{classes}", (0.5,) * channels
    return Data(name, train, val, test, grey, (0.16,) * channels, augment="none")
