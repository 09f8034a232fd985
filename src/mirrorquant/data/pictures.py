"""Decoding image files, with pillow, on a few threads; many small ones can be kept decoded in one file."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from mirrorquant import _files

from .base import DataError, check_digest, read

CHUNK = 256  # files for a thread at a time
FORMATS = ("PNG", "JPEG")  # pillow has dozens more, and runs Ghostscript for one of them
MOST_PIXELS = 1 << 26  # of a file, decoded: 256 MiB in pillow


def decode(paths: Sequence[Path], size: int, *, fit: bool, remedy: str) -> Tensor:
    """The images of some files as N×3×size×size of uint8.

    With `fit` the largest central square of an image is resized (bilinear) to `size`; without, an image of another
    size raises `DataError`. So does a file that is not PNG or JPEG, has more than `MOST_PIXELS` pixels or does not
    decode; the error names the file. A damaged file that still decodes, as a JPEG with a changed byte can, is not
    noticed.
    """
    _pillow()
    from PIL import Image

    images = _empty(len(paths), size)

    def some(start: int) -> None:
        for number in range(start, min(start + CHUNK, len(paths))):
            pixels = bytearray(_pixels(paths[number], size, fit, remedy))
            images[number] = torch.frombuffer(pixels, dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)

    with warnings.catch_warnings(), ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MOST_PIXELS is the stricter limit
        for _ in pool.map(some, range(0, len(paths), CHUNK)):
            pass
    return images


def decode_once(paths: Sequence[Path], size: int, cache: Path, *, remedy: str) -> Tensor:
    """What `decode` gives without `fit`, kept in the file `cache` for the next time.

    It starts with a digest of the names, sizes and times of the image files: a cache of other files is rebuilt. A
    digest of the pixels follows; a damaged cache raises `DataError`, which names it.
    """
    key = _state(paths, size, remedy)
    shape = (len(paths), 3, size, size)
    try:
        with _files.open_regular(cache) as file:
            known = file.read(32) == key
    except OSError:
        known = False
    if known:
        again = "Delete it: it is made again from the images."
        content = read(cache, 64 + torch.Size(shape).numel(), again)
        pixels = memoryview(content)[64:]
        check_digest(cache, pixels, content[32:64].hex(), again)
        return torch.frombuffer(pixels, dtype=torch.uint8).view(shape)
    images = decode(paths, size, fit=False, remedy=remedy)
    _keep(cache, key, images)
    return images


def _state(paths: Sequence[Path], size: int, remedy: str) -> bytes:
    digest = hashlib.sha256(f"mirrorquant images {size}".encode())
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror or error}). {remedy}") from error
        digest.update(f"\n{path.name} {found.st_size} {found.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return digest.digest()


def _keep(cache: Path, key: bytes, images: Tensor) -> None:
    content = bytearray(images.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(images.flatten())
    part = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.writelines((key, hashlib.sha256(content).digest(), content))
        os.replace(part, cache)
    except OSError as error:
        part.unlink(missing_ok=True)
        warnings.warn(f"{cache} cannot be written ({error}): the images are decoded again next time", stacklevel=2)


def _pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DataError("Image files need pillow, which is missing. Run: pip install 'mirrorquant[images]'") from error


def _empty(count: int, size: int) -> Tensor:
    try:
        return torch.empty(count, 3, size, size, dtype=torch.uint8)
    except RuntimeError as error:
        needed = count * 3 * size * size
        raise DataError(f"{count:,} images of {size}×{size} pixels need {needed:,} bytes of memory.") from error


def _pixels(path: Path, size: int, fit: bool, remedy: str) -> bytes:
    from PIL import Image, UnidentifiedImageError

    try:
        with _files.open_regular(path) as content, Image.open(content, formats=FORMATS) as file:
            width, height = file.size
            if width * height > MOST_PIXELS:  # known from the header: nothing is decoded yet
                raise ValueError(f"{width}×{height} pixels, expected {MOST_PIXELS:,} at most")
            image = file.convert("RGB")
        if fit:
            # The box alone: resizing all of a long thin image first would take gigabytes.
            image = image.resize((size, size), Image.Resampling.BILINEAR, box=_central_box(width, height, size))
    except UnidentifiedImageError as error:
        raise DataError(f"{path} is not an image that can be read (neither PNG nor JPEG). {remedy}") from error
    except Exception as error:  # pillow's decoders fail in many ways
        raise DataError(f"{path} is not an image that can be read ({error}). {remedy}") from error
    if image.size != (size, size):
        raise DataError(f"{path} has {width}×{height} pixels, expected {size}×{size}. {remedy}")
    return image.tobytes()


def _central_box(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """The part of an image that fills `size`×`size` when its shorter side becomes `size`: left, top, right, bottom."""
    scale = size / min(width, height)
    wide, high = max(size, round(width * scale)), max(size, round(height * scale))
    left, top = (wide - size) // 2, (high - size) // 2
    across, down = width / wide, height / high
    return left * across, top * down, min((left + size) * across, width), min((top + size) * down, height)
