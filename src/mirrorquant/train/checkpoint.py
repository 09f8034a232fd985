"""Checkpoints that survive: written atomically, checked when read, with the previous one kept as a spare.

A file is written by ``torch.save`` and opens with ``torch.load(path, weights_only=True)``. Its SHA-256 is the comment
at the end of the zip archive, so file and digest cannot be separated. The file is written next to its place,
synchronized to the disk, and moved there: a kill, a full disk or a power cut leaves the last good one intact. The
digest guards against damage, not against a person who recomputes it: a loaded state is compared with that of the run
that loads it, and a difference raises :class:`CheckpointError`.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mirrorquant import _files
from mirrorquant._text import first_line
from mirrorquant.errors import MirrorquantError

__all__ = ["CheckpointError", "fits", "load", "save", "spares", "whole"]

_T = TypeVar("_T")
_DIGEST = 64  # bytes of a SHA-256 in hexadecimal
_OLD = b"mirrorquant checkpoint 1 sha256 "  # then digest, line break and content: files of version 0.1
_GROUPS = "optimizer: param_groups: "
_CHANGING = {"lr", "beta", "weight_decay", "steps", "finalized", "fresh", "kept", "method"}  # from step to step


class CheckpointError(MirrorquantError, RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; the existing one becomes the spare ``*.previous``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    fresh, _, previous = spares(path)
    _files.write_atomically(fresh, sealed(buffer.getvalue()), CheckpointError)
    try:
        if path.exists():
            os.replace(path, previous)
        os.replace(fresh, path)
        _files.sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be replaced ({error.strerror}); {fresh} holds it") from error


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
    except MemoryError as error:
        raise CheckpointError(f"{path} is too large for this machine's memory") from error
    payload, digest = content[:-_DIGEST], content[-_DIGEST:]
    if content.startswith(_OLD):
        digest, _, payload = content[len(_OLD) :].partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise CheckpointError(f"{path} is damaged: the checksum does not match its {len(content):,} bytes")
    try:
        archive = payload if content.startswith(_OLD) else content
        with zipfile.ZipFile(io.BytesIO(archive)) as records:  # torch.save does not compress; a bomb does
            if sum(record.file_size for record in records.infolist()) > len(archive):
                raise ValueError("its records are larger than the file")
        state = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    except Exception as error:  # a crafted file can fail in any way
        raise CheckpointError(f"{path} holds no state that can be loaded ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, expected a dict")
    return state


def spares(path: Path) -> tuple[Path, Path, Path]:
    """The paths of checkpoints, newest first: one that is being put in place, the last one, and the previous one."""
    return path.with_name(path.name + ".new"), path, path.with_name(path.name + ".previous")


def whole(path: Path, use: Callable[[dict[str, Any]], _T]) -> _T:
    """Reads a checkpoint and uses it; any other error, as a crafted file can cause, becomes CheckpointError."""
    state = load(path)
    try:
        return use(state)
    except MirrorquantError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0] if isinstance(error, ValueError) else first_line(error)
        raise CheckpointError(f"{path} does not fit this run: {reason}") from error


def fits(found: Any, expected: Any, where: str, nan: Collection[str] = ()) -> None:
    """Raises ValueError unless a state has the structure of another one of the same run.

    Keys, types, shapes and dtypes must be equal; numbers must be finite and at least 0, and tensors must not hold NaN,
    except those named in ``nan``. An optimizer may lack the state of a parameter. Its groups must have equal values,
    except those that change from step to step; a key in only one of them is ignored, since versions add and remove
    some. The optimizer itself compares its methods, since it knows their former names.
    """
    mine, theirs = dict(_parts(found, where)), dict(_parts(expected, where))
    for path in {**theirs, **mine}:
        if path in mine and path in theirs:
            _compare(mine[path], theirs[path], path, nan)
        elif not path.startswith(_GROUPS) and not (path.startswith("optimizer: state: ") and path in theirs):
            raise ValueError(f"{path} is {'missing' if path in theirs else 'not in a state of this run'}")


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A value and everything nested in it, by path."""
    yield path, value
    if isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _parts(part, f"{path}: {key}")


def _compare(found: Any, expected: Any, path: str, nan: Collection[str]) -> None:
    name, wanted = path.rpartition(": ")[2], ""
    exact = path.startswith(_GROUPS) and name not in _CHANGING and isinstance(expected, (int, float, str))
    if _kind(found) != _kind(expected) and (type(found), type(expected)) != (int, float):
        wanted = _kind(expected)
    elif exact:
        wanted = shown(expected) if found != expected else ""
    elif isinstance(found, (int, float)) and not (found == -1 or 0 <= found <= 1e38):  # -1: no best step yet
        wanted = "a finite number, at least 0"
    elif isinstance(found, Tensor) and name not in nan and bool(found.isnan().any()):
        raise ValueError(f"{path} holds NaN")
    elif path.startswith("optimizer: ") and name == "step" and not 0 <= float(found) <= 1e15:
        wanted = "a number of steps"
    if wanted:
        raise ValueError(f"{path} is {shown(found)}, expected {wanted}")


def _kind(value: object) -> str:
    """The type of a value, and its size."""
    if isinstance(value, Tensor):
        odd = "meta " if value.is_meta else "sparse " if value.layout != torch.strided else ""
        return f"{odd}{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    return "dict" if isinstance(value, dict) else type(value).__name__  # a state_dict is an OrderedDict


def shown(value: object) -> str:
    """A value in a few words, for messages."""
    if value is None:
        return "missing"
    return f"{value!r:.60}" if isinstance(value, (int, float, str)) else f"a {_kind(value)}"
