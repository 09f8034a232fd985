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

from .base import DataError, check_digest, read

CHUNK = 256  # files for a thread at a time


def decode(paths: Sequence[Path], size: int, *, fit: bool, remedy: str) -> Tensor:
    """The images of some files as N×3×size×size of uint8.

    With `fit` an image is resized (bilinear) until its shorter side is `size` and its centre is cut out; without, an
    image of another size is refused. A file that does not decode is refused by name; a damaged one that does decode,
    to another picture, as a JPEG with a changed byte can, is not noticed.
    """
    _pillow()
    images = torch.empty(len(paths), size, size, 3, dtype=torch.uint8)

    def some(start: int) -> None:
        part = paths[start : start + CHUNK]
        content = bytearray(b"".join(_pixels(path, size, fit, remedy) for path in part))
        images[start : start + CHUNK] = torch.frombuffer(content, dtype=torch.uint8).view(len(part), size, size, 3)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(some, range(0, len(paths), CHUNK)):
            pass
    return images.permute(0, 3, 1, 2).contiguous()


def decode_once(paths: Sequence[Path], size: int, cache: Path, *, remedy: str) -> Tensor:
    """What `decode` gives without `fit`, kept in the file `cache` for the next time.

    It starts with a digest of the names, sizes and times of the image files: a cache of other files is made anew. A
    digest of the pixels follows; a cache that is damaged is refused by name.
    """
    key = _state(paths, size, remedy)
    shape = (len(paths), 3, size, size)
    try:
        with cache.open("rb") as file:
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
            stat = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror or error}). {remedy}") from error
        digest.update(f"\n{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
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
