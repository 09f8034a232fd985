"""Checkpoints that survive: written atomically, checked when read, with the one before kept as a spare.

A file is a line of magic with the SHA-256 of what follows, then what ``torch.save`` made. It is written beside its
place, synchronized to the disk, and moved there: a kill or a full disk at any moment leaves the last good one.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mirrorquant import _files

__all__ = ["CheckpointError", "load", "load_newest", "save", "write_atomically"]

MAGIC = b"mirrorquant checkpoint 1 sha256 "
HEADER = len(MAGIC) + 64 + 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file."""


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that appears whole or not at all; an error leaves the old file as it was."""
    _files.write_atomically(path, content, CheckpointError)


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; the one that was there becomes the spare ``*.previous``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    content = MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload
    fresh = path.with_name(path.name + ".new")
    write_atomically(fresh, content)
    try:
        if path.exists():
            path.replace(previous(path))
        fresh.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be replaced ({error.strerror}); {fresh} holds it") from error


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint; a damaged one is refused."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    payload = content[HEADER:]
    if content[:HEADER] != MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n":
        raise CheckpointError(f"{path} is damaged: {len(content):,} bytes whose checksum does not fit")
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} holds no state that can be loaded ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state")
    return state


def load_newest(path: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest checkpoint that is whole: one on its way into place, the last one, or its spare; None if none is."""
    problems = []
    for candidate in (path.with_name(path.name + ".new"), path, previous(path)):
        if candidate.exists():
            try:
                state = load(candidate)
            except CheckpointError as error:
                problems.append(error)
                say(f"{error}; trying the one before")
                continue
            return state
    if problems:
        raise CheckpointError(f"no whole checkpoint is left in {path.parent}: {'; '.join(map(str, problems))}")
    return None


def previous(path: Path) -> Path:
    """Where the spare is."""
    return path.with_name(path.name + ".previous")
