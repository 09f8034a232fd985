"""Checkpoints that survive: written atomically, checked when read, with the previous one kept as a spare.

A file is written by ``torch.save`` and opens with ``torch.load(path, weights_only=True)``. Its SHA-256 is the comment
at the end of the zip archive, so file and digest cannot be separated. The file is written next to its place,
synchronized to the disk, and moved there: a kill, a full disk or a power cut leaves the last good one intact. The
digest guards against damage, not against a person who recomputes it.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from mirrorquant import _files
from mirrorquant.errors import MirrorquantError

__all__ = ["CheckpointError", "load", "save", "use"]

_T = TypeVar("_T")
_DIGEST = 64  # bytes of a SHA-256 in hexadecimal
_OLD = b"mirrorquant checkpoint 1 sha256 "  # then digest, line break and content: files of version 0.1


class CheckpointError(MirrorquantError, RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; the existing one becomes the spare ``*.previous``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    spare = path.with_name(f"{path.name}.previous")
    _files.write_atomically(path, sealed(buffer.getvalue()), CheckpointError, spare=spare)


def sealed(archive: bytes) -> bytes:
    """A zip archive that had no comment, with its digest as the comment."""
    content = archive[:-2] + _DIGEST.to_bytes(2, "little")
    return content + hashlib.sha256(content).hexdigest().encode()


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint; a damaged one raises :class:`CheckpointError`."""
    try:
        content = _files.read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    archive, signed, digest = content, content[:-_DIGEST], content[-_DIGEST:]
    if content.startswith(_OLD):
        digest, _, archive = content[len(_OLD) :].partition(b"\n")
        signed = archive
    if not content.startswith((_OLD, b"PK")):
        raise CheckpointError(f"{path} is not a mirrorquant checkpoint: name a run's folder, or its best.pt")
    if hashlib.sha256(signed).hexdigest().encode() != digest:
        raise CheckpointError(f"{path} is damaged: the checksum does not match its {len(content):,} bytes")
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as records:  # torch.save does not compress; a bomb does
            if sum(record.file_size for record in records.infolist()) > len(archive):
                raise ValueError("its records are larger than the file")
        return dict(torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True))
    except Exception as error:  # a crafted file can fail in any way
        raise CheckpointError(f"{path} holds no state that can be loaded ({type(error).__name__})") from error


def use(path: Path, restore: Callable[[dict[str, Any]], _T]) -> _T:
    """Restores something from a checkpoint; if that fails, the state does not fit."""
    state = load(path)
    try:
        return restore(state)
    except MirrorquantError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"  # torch's messages have several lines
        raise CheckpointError(f"{path} does not fit this run ({reason})") from error
