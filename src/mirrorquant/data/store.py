"""Decoded images in one file, each of its own size, read box by box.

The file holds the pixels of all images, then their offsets, heights and widths, then a key that says which files they
were made from, and a SHA-256 of these last two. The pixels themselves are not checked, as they are too many.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from mirrorquant import _files

from .base import DataError

EVERY = 10.0  # seconds between two lines about the progress
ABANDONED = 3600.0  # seconds after which a temporary file that nobody writes to is removed


def key_of(paths: Iterable[str], side: int) -> bytes:
    """A SHA-256 of the names, sizes and times of image files; those that are missing count, too."""
    key = hashlib.sha256(f"mirrorquant store {side}, version 2".encode())
    for path in paths:
        name = "/".join(path.replace(os.sep, "/").split("/")[-2:])  # the folder may move
        try:
            found = os.stat(path)
            key.update(f"\n{name} {found.st_size} {found.st_mtime_ns}".encode("utf-8", "surrogateescape"))
        except OSError:
            key.update(f"\n{name} missing".encode("utf-8", "surrogateescape"))
    return key.digest()


@dataclass(frozen=True, eq=False)
class Store:
    """Images of H×W×3 bytes in a file: `index` is N×3 of int64, their offsets, heights and widths.

    An image of height 0 is not there: its file could not be read.
    """

    file: Path
    index: Tensor

    @classmethod
    def opened(cls, file: Path, key: bytes, count: int) -> Store | None:
        """The store in a file, or None if there is none, if it is damaged or if its key is another."""
        try:
            with _files.open_regular(file) as content:
                pixels = content.seek(0, os.SEEK_END) - 24 * count - 64
                content.seek(max(0, pixels))
                tail = content.read()
        except OSError:
            return None
        if pixels < 0 or tail[-64:-32] != key or tail[-32:] != hashlib.sha256(tail[:-32]).digest():
            return None
        index = torch.frombuffer(bytearray(tail[:-64]), dtype=torch.int64).view(count, 3)
        complete = int((3 * index[:, 1] * index[:, 2]).sum()) == pixels
        return cls(file, index) if complete else None

    @classmethod
    def written(
        cls, file: Path, key: bytes, chunks: Iterable[tuple[Tensor, Tensor]], count: int, say: Callable[[str], None]
    ) -> Store:
        """Writes a file, completely or not at all, from chunks: pixels, and N×2 of the heights and widths of images."""
        temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.writing")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(file.parent)
            with temporary.open("wb") as content:
                with suppress(OSError):  # some file systems have no locks
                    _lock(content)
                sides = _write_pixels(content, chunks, count, lambda line: say(f"{file.name}: {line}"))
                ends = (3 * sides.prod(1)).cumsum(0)
                index = torch.cat([(ends - 3 * sides.prod(1))[:, None], sides], 1)
                tail = bytes(_memory(index)) + key
                content.write(tail + hashlib.sha256(tail).digest())
                content.flush()
                os.fsync(content.fileno())
            os.replace(temporary, file)
        except OSError as error:
            remedy = "Free some space, or do without the cache."
            raise DataError(f"{file} could not be written ({error.strerror}). {remedy}") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return cls(file, index)

    def has(self, number: int) -> bool:
        """Whether an image is there."""
        return bool(self.index[number, 1] > 0)

    def take(self, places: Tensor) -> Store:
        """Some of the images."""
        return replace(self, index=self.index[places])

    def read(self, number: int, choose: Callable[[int, int], tuple[int, int, int, int]] | None = None) -> Tensor:
        """The pixels of an image, or of the box that `choose` picks for its height and width."""
        offset, height, width = self.index[number].tolist()
        top, left, h, w = choose(height, width) if choose else (0, 0, height, width)
        try:
            with _files.open_regular(self.file) as file:
                file.seek(offset + 3 * width * top)
                rows = bytearray(file.read(3 * width * h))
        except OSError as error:
            raise DataError(f"{self.file} cannot be read ({error.strerror}): run again to rebuild it.") from error
        if len(rows) != 3 * width * h:
            raise DataError(f"{self.file} is truncated: run again to rebuild it.")
        return torch.frombuffer(rows, dtype=torch.uint8).view(h, width, 3)[:, left : left + w]


def _remove_abandoned(folder: Path) -> None:
    """Removes temporary files of killed processes: nobody holds their lock, or has written to them for an hour."""
    for unfinished in folder.glob("*.pixels.*.writing"):
        with suppress(OSError), unfinished.open("rb") as content:
            if _lock(content) and time.time() - unfinished.stat().st_mtime > ABANDONED:
                unfinished.unlink()


def _lock(content: BinaryIO) -> bool:
    """Locks an open file until it is closed; returns False where there are no locks, raises OSError if it is taken."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return False
    fcntl.flock(content, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def _write_pixels(
    content: BinaryIO, chunks: Iterable[tuple[Tensor, Tensor]], count: int, say: Callable[[str], None]
) -> Tensor:
    """Writes the pixels of all chunks, with a line about the progress now and then; the heights and widths."""
    start = said = time.monotonic()
    sides: list[Tensor] = []
    done = written = 0
    for pixels, of_chunk in chunks:
        written += content.write(_memory(pixels))
        sides.append(of_chunk)
        done += len(of_chunk)
        if done == count or time.monotonic() > said + EVERY:
            said = time.monotonic()
            left = (count - done) * (said - start) / done / 60
            say(f"{done} of {count} images, {written / 1e9:.1f} GB, {left:.0f} minutes left")
    return torch.cat(sides)


def _memory(tensor: Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """The bytes of a contiguous tensor, without a copy and without numpy; the tensor must outlive them."""
    return (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
