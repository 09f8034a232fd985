"""Decoding image files, with pillow, on a few threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .base import DataError


def decode(paths: Sequence[Path], size: int, *, fit: bool, remedy: str) -> Tensor:
    """The images of some files as N×3×size×size of uint8.

    With `fit` an image is resized (bilinear) until its shorter side is `size` and its centre is cut out; without, an
    image of another size is refused. A file that does not decode is refused by name; a damaged one that does decode
    to another picture, as a JPEG with a changed byte can, is not noticed.
    """
    _pillow()
    images = torch.empty(len(paths), size, size, 3, dtype=torch.uint8)

    def one(index: int) -> None:
        content = bytearray(_pixels(paths[index], size, fit, remedy))
        images[index] = torch.frombuffer(content, dtype=torch.uint8).view(size, size, 3)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(one, range(len(paths))):
            pass
    return images.permute(0, 3, 1, 2).contiguous()


def _pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DataError("Image files need pillow, which is missing. Run: pip install mirrorquant[images]") from error


def _pixels(path: Path, size: int, fit: bool, remedy: str) -> bytes:
    from PIL import Image

    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
        width, height = image.size
        if fit:
            scale = size / min(width, height)
            width, height = max(size, round(width * scale)), max(size, round(height * scale))
            left, top = (width - size) // 2, (height - size) // 2
            image = image.resize((width, height), Image.Resampling.BILINEAR)
            image = image.crop((left, top, left + size, top + size))
    except Exception as error:  # pillow's decoders fail in many ways
        raise DataError(f"{path} is not an image that can be read ({error}). {remedy}") from error
    if image.size != (size, size):
        raise DataError(f"{path} has {width}×{height} pixels, expected {size}×{size}. {remedy}")
    return image.tobytes()
