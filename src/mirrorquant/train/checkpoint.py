"""Checkpoints that survive: written atomically, checked when read, with the one before kept as a spare.

A file is what ``torch.save`` writes, and opens with ``torch.load(path, weights_only=True)``. The SHA-256 of all of it
stands at its very end, where a zip archive has its comment: file and digest cannot come apart. The file is written
beside its place, synchronized to the disk, and moved there: a kill, a full disk or a power cut at any moment leaves the
last good one. The digest guards against damage, not against a person who recomputes it: whatever is loaded is compared
with the state of the run that it is for, and a difference raises :class:`CheckpointError`.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mirrorquant import _files
from mirrorquant._text import first_line
from mirrorquant.errors import MirrorquantError

__all__ = ["CheckpointError", "fits", "load", "load_newest", "save", "spares", "whole"]

_DIGEST = 64  # bytes of a SHA-256 in hexadecimal
_OLD = b"mirrorquant checkpoint 1 sha256 "  # then digest, line break and content: files of version 0.1
_CHANGING = {"lr", "beta", "weight_decay", "steps", "finalized", "fresh", "kept", "step"}  # from step to step


class CheckpointError(MirrorquantError, RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; the one that was there becomes the spare ``*.previous``."""
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
    """A zip archive without a comment, with the digest of it all as its comment."""
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
        raise CheckpointError(f"{path} is damaged: the checksum does not fit its {len(content):,} bytes")
    try:
        archive = payload if content.startswith(_OLD) else content
        with zipfile.ZipFile(
            io.BytesIO(archive)
        ) as records:  # torch.save does not compress: this would fill the memory
            if sum(record.file_size for record in records.infolist()) > len(archive):
                raise ValueError("its records are larger than the file")
        state = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    except Exception as error:  # a crafted file can fail in any way
        raise CheckpointError(f"{path} holds no state that can be loaded ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state")
    return state


def spares(path: Path) -> tuple[Path, Path, Path]:
    """Where checkpoints are, the newest first: one on its way into place, the last one, and the one before."""
    return path.with_name(path.name + ".new"), path, path.with_name(path.name + ".previous")


def load_newest(
    paths: Iterable[Path], say: Callable[[str], None], use: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    """The first checkpoint that is whole, after ``use`` has taken it; None if there is no file.

    ``use`` raises for a state that does not fit; that file then counts as damaged.
    """
    problems = []
    for path in paths:
        if path.exists():
            try:
                state = load(path)
                whole(path, use, state)
            except CheckpointError as error:
                problems.append(str(error))
                say(f"{error}; trying the one before")
                continue
            return state
    if problems:
        raise CheckpointError(f"no whole checkpoint is left: {'; '.join(problems)}")
    return None


def whole(path: Path, use: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
    """Uses a state; whatever goes wrong, as a crafted file can make it, is an error of that file."""
    try:
        use(state)
    except Exception as error:
        reason = str(error).strip().split("\n")[0] if isinstance(error, ValueError) else first_line(error)
        raise CheckpointError(f"{path} does not fit this run: {reason}") from error


def fits(found: Any, expected: Any, where: str, nan: Collection[str] = (), *, exact: bool = False) -> None:
    """Raises ValueError unless a state has the structure of another one of the same run.

    Keys, types, shapes and dtypes must be equal; numbers are finite and at least 0, tensors hold no NaN (except those
    of the names ``nan``). An optimizer need not have a state for each parameter; in its groups (``exact``) values must
    be equal too, but for those that change from step to step, and a key of only one of them is ignored: a version may
    have added or removed it. Methods are compared by the optimizer itself, which knows their names of before.
    """
    if isinstance(expected, Tensor):
        return _same_tensor(found, expected, where, nan=where.rpartition(": ")[2] in nan)
    if isinstance(expected, (list, tuple)):
        if type(found) is not type(expected) or len(found) != len(expected):
            raise ValueError(f"{where} is {shown(found)}, expected {len(expected)} entries")
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            fits(mine, theirs, f"{where}: {index}", nan, exact=exact or where.endswith("param_groups"))
    elif isinstance(expected, dict):
        if not isinstance(found, dict):
            raise ValueError(f"{where} is {shown(found)}, expected a dictionary")
        odd = found.keys() - expected.keys() if "optimizer: state" in where else found.keys() ^ expected.keys()
        if odd and not exact:
            raise ValueError(f"{where} differs from that of this run in {', '.join(sorted(map(str, odd))[:3])}")
        for name in (name for name in expected if name in found and name != "method"):
            fits(found[name], expected[name], f"{where}: {name}", nan, exact=exact and name not in _CHANGING)
    elif type(found) is not type(expected) and (type(found), type(expected)) != (int, float):
        raise ValueError(f"{where} is {shown(found)}, but it must be {type(expected).__name__}")
    elif exact:
        if found != expected:
            raise ValueError(f"{where} is {shown(found)}, expected {shown(expected)}")
    elif isinstance(found, (int, float)) and not (found == -1 or 0 <= found <= 1e38):  # -1 is a step that was not yet
        raise ValueError(f"{where} is {shown(found)}, expected a finite number from 0 on")


def _same_tensor(found: Any, expected: Tensor, where: str, *, nan: bool) -> None:
    if not isinstance(found, Tensor) or found.layout != torch.strided or found.device.type != "cpu":
        raise ValueError(f"{where} is {shown(found)}, expected a tensor")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        shapes = [f"{t.dtype} of shape {tuple(t.shape)}".removeprefix("torch.") for t in (found, expected)]
        raise ValueError(f"{where} is {shapes[0]}, expected {shapes[1]}")
    if not nan and bool(found.isnan().any()):
        raise ValueError(f"{where} holds NaN")
    if where.endswith(": step") and not 0 <= float(found) <= 1e15:
        raise ValueError(f"{where} is {float(found)}, expected a number of steps")


def shown(value: object) -> str:
    """A value for a message, in a few words whatever it is."""
    if value is None:
        return "missing"
    return repr(value)[:60] if isinstance(value, (int, float, str, bool)) else f"a {type(value).__name__}"
