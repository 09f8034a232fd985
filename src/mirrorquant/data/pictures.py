"""Decoding image files with pillow, on a few threads; the decoded images can be kept in one file."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mirrorquant import _files

from .base import DataError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG")  # pillow has dozens more, and runs Ghostscript for one of them
MOST_PIXELS = 1 << 26  # of a file, decoded: 256 MiB in pillow


def decode(paths: Sequence[Path], size: int, *, fit: bool) -> Tensor:
    """The images of some files as N×3×size×size of uint8.

    With `fit` the largest central square of an image is resized (bilinear) to `size`; without, an image of another
    size raises `DataError`. So does a file that is not PNG or JPEG, has more than `MOST_PIXELS` pixels or does not
    decode. A damaged file that still decodes, as a JPEG with a changed byte can, is not noticed.
    """
    require_pillow()
    images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for number, pixels in enumerate(pool.map(lambda path: _pixels(path, size, fit), paths)):
            images[number] = torch.frombuffer(pixels, dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)
    return images


def decode_once(paths: Sequence[Path], size: int, cache: Path) -> Tensor:
    """The result of `decode` without `fit`, kept in the file `cache` for the next time.

    The file starts with a SHA-256 of the names, sizes and times of the image files. If it does not match, because a
    file was changed, or if the size is wrong, the images are decoded again.
    """
    digest = hashlib.sha256(f"mirrorquant images {size}, version 2".encode())
    for path in paths:
        found = path.stat()
        digest.update(f"\n{path.name} {found.st_size} {found.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    content = bytearray(_files.read_regular(cache) if cache.exists() else b"")
    if len(content) != 32 + 3 * len(paths) * size**2 or content[:32] != digest.digest():
        content = bytearray(digest.digest())
        content += decode(paths, size, fit=False).numpy().data
        try:
            _files.write_atomically(cache, content, DataError)
        except DataError as error:
            warnings.warn(f"{error}: the images will be decoded again next time", stacklevel=2)
    return torch.frombuffer(content, dtype=torch.uint8, offset=32).view(len(paths), 3, size, size)


def require_pillow() -> None:
    """Raises `DataError` with the remedy where pillow is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DataError("Image files need pillow, which is missing. Run: pip install 'mirrorquant[images]'.") from error


def check_size(height: int, width: int) -> None:
    """Raises ValueError for an image that is too large, before anything but its header is decoded."""
    if height * width > MOST_PIXELS:
        raise ValueError(f"{width}×{height} pixels, expected {MOST_PIXELS:,} at most")


def rgb(file: Image.Image) -> Image.Image:
    """The image in colour, with 8 bits per channel; grey levels of 16 bits are divided by 256, not clipped."""
    return (file.point(lambda level: level * (1 / 256)).convert("L") if file.mode[0] == "I" else file).convert("RGB")


def _pixels(path: Path, size: int, fit: bool) -> bytearray:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with _files.open_regular(path) as content, Image.open(content, formats=FORMATS) as file:
            width, height = file.size
            check_size(height, width)
            image = rgb(file)
        if fit:
            image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    except Exception as error:  # pillow's decoders fail in many ways
        why = "neither PNG nor JPEG" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"{path} cannot be read as an image ({why}): replace it or move it away.") from error
    if image.size != (size, size):
        raise DataError(f"{path} has {width}×{height} pixels, expected {size}×{size}.")
    return bytearray(image.tobytes())
