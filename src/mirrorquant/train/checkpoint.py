"""Checkpoints that survive: written atomically, checked when read, with the one before kept as a spare.

A file is a line of magic with the SHA-256 of what follows, then what ``torch.save`` made. It is written beside its
place, synchronized to the disk, and moved there: a kill, a full disk or a power cut at any moment leaves the last good
one. The checksum guards against damage, not against a person who recomputes it: whatever is loaded is compared with
the model and the optimizer that it is for, and a difference raises :class:`CheckpointError`.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mirrorquant import _files
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.train.report import first_line

__all__ = ["Best", "CheckpointError", "check_state", "fill", "load", "load_best", "load_newest", "save"]
__all__ += ["write_atomically"]

MAGIC = b"mirrorquant checkpoint 1 sha256 "
HEADER = len(MAGIC) + 64 + 1
_SCHEDULED = ("lr", "beta", "weight_decay")  # what a step changes in a group of the optimizer
_PROGRESS = {"steps", "finalized", "fresh", "kept"}  # beside it
_ADAM = {"step", "exp_avg", "exp_avg_sq"}


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
            os.replace(path, previous(path))
        os.replace(fresh, path)
        _files.sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be replaced ({error.strerror}); {fresh} holds it") from error


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint; a damaged one raises :class:`CheckpointError`."""
    try:
        with _files.open_regular(path) as file:
            header = file.read(HEADER)
            payload = file.read() if header.startswith(MAGIC) else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except MemoryError as error:
        raise CheckpointError(f"{path} is too large for this machine's memory") from error
    if header != MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n":
        size = len(header) + len(payload)
        raise CheckpointError(f"{path} is damaged: the checksum does not fit its first {size:,} bytes")
    try:
        _refuse_compressed(payload)
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # a crafted file can fail in any way
        raise CheckpointError(f"{path} holds no state that can be loaded ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state")
    return state


def load_newest(
    path: Path, say: Callable[[str], None], check: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    """The newest checkpoint that is whole: one on its way into place, the last one, or its spare; None if none is.

    ``check`` raises for a state that does not fit; that file then counts as damaged.
    """
    problems = []
    for candidate in (path.with_name(path.name + ".new"), path, previous(path)):
        if candidate.exists():
            try:
                state = load(candidate)
                _check(candidate, check, state)
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


@dataclass(frozen=True)
class Best:
    """The best rounded network of a run, as its ``best.mq`` holds it: the types are checked, the tensors are not yet.

    ``images`` are the number of classes and the shape of one image, if the file says so.
    """

    path: Path
    model: dict[str, Tensor]
    config: str
    images: dict[str, Any] | None


def load_best(path: Path) -> Best:
    """Reads a ``best.mq``; use :func:`fill` to load it into a model."""
    state, found = load(path), list[Best]()

    def read(state: dict[str, Any]) -> None:
        model, config, images = state.get("model"), state.get("config"), state.get("images")
        if not isinstance(model, dict) or not all(isinstance(k, str) and _plain(v) for k, v in model.items()):
            raise ValueError("its model is not a dictionary of tensors")
        if not isinstance(config, str):
            raise ValueError(f"its config is {_shown(config)}, expected a string")
        if images is not None:
            if not isinstance(images, dict) or not isinstance(images.get("shape"), list):
                raise ValueError(f"its images are {_shown(images)}, expected classes and shape")
            _whole(images.get("classes"), 1, 1 << 20, "the number of its classes")
            for size in images["shape"] or [None]:
                _whole(size, 1, 1 << 20, "a side of its images")
        found.append(Best(path, {k: v.detach() for k, v in model.items()}, config, images))

    _check(path, read, state)
    return found[0]


def fill(model: nn.Module, best: Best) -> None:
    """Loads the best network into a model that must have the same tensors."""

    def load_into(_: dict[str, Any]) -> None:
        _check_model(best.model, model, "its model")
        model.load_state_dict(best.model)

    _check(best.path, load_into, {})


def check_state(state: dict[str, Any], model: nn.Module, optimizer: MirrorDescent, iterations: int) -> None:
    """Raises ValueError unless a run with this model and this optimizer can go on from a state.

    Checks names, types, shapes and ranges, and that no weight is NaN, but not the numbers themselves.
    """
    step = _whole(state.get("step"), 0, iterations, "step")
    best_step = _whole(state.get("best_step"), -1, step, "best_step")
    _number(state.get("seconds"), 0, 1e12, "seconds")
    _number(state.get("best_accuracy"), -1, 100, "best_accuracy")
    aside = state.get("aside", {})
    if not isinstance(aside, dict):
        raise ValueError(f"aside is {_shown(aside)}, expected seconds by name")
    for name, seconds in aside.items():
        _number(seconds, 0, 1e12, f"aside: {_shown(name)}")
    seal = state.get("metrics", {"bytes": 0, "sha256": ""})  # earlier versions had none
    if not isinstance(seal, dict) or not isinstance(seal.get("sha256"), str):
        raise ValueError(f"metrics is {_shown(seal)}, expected bytes and sha256")
    _whole(seal.get("bytes"), 0, 1 << 60, "metrics.bytes")
    _check_tensor(state.get("losses"), torch.zeros(()), "losses")
    _check_tensor(state.get("rng"), torch.get_rng_state(), "rng")
    _check_model(state.get("model"), model, "model")
    if best_step >= 0:
        _check_model(state.get("best"), model, "best")
    elif state.get("best") != {}:
        raise ValueError(f"best is {_shown(state.get('best'))}, but best_step is -1: expected nothing")
    _check_optimizer(state.get("optimizer"), optimizer, step)


def _check(path: Path, check: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
    """Runs a check, or loads a state: a crafted file can fail in any way."""
    try:
        check(state)
    except Exception as error:
        told = str(error).strip().split("\n")[0] if isinstance(error, ValueError) else first_line(error)
        raise CheckpointError(f"{path} does not fit this run: {told}") from error


def _check_model(found: object, model: nn.Module, what: str) -> None:
    expected: dict[str, Tensor] = model.state_dict()
    if not isinstance(found, dict) or set(found) != set(expected):
        names = set(found) ^ set(expected) if isinstance(found, dict) else expected
        raise ValueError(f"{what} differs from the model in {', '.join(sorted(map(str, names))[:3])}")
    learnt = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in expected.items():
        _check_tensor(found[name], tensor, f"{what}: {name}", nan=name not in learnt)


def _check_optimizer(found: object, optimizer: MirrorDescent, step: int) -> None:
    """Compares a state of the optimizer; that of version 0.1 keeps its base optimizer's apart, under "base"."""
    parts = [(found, optimizer.state_dict()["param_groups"], "optimizer")]
    if isinstance(found, dict) and isinstance(found.get("base"), dict) and "state" in found["base"]:
        parts.append((found["base"], optimizer.base.state_dict()["param_groups"], "base optimizer"))
    moved = [p for group in optimizer.base.param_groups for p in group["params"]]
    for part, groups, what in parts:
        if not isinstance(part, dict) or not isinstance(part.get("state"), dict):
            raise ValueError(f"the {what} lacks a part of its state")
        _check_groups(part.get("param_groups"), groups, what)
        for group in (part, *part["param_groups"]):
            _whole(group.get("steps", step), step, step, f"the {what}'s number of steps")
            if not isinstance(group.get("finalized", False), bool):
                raise ValueError(f"the {what}: finalized is {_shown(group['finalized'])}, expected true or false")
        for index, entry in part["state"].items():
            _whole(index, 0, len(moved) - 1, "the number of a parameter")
            _check_moments(entry, moved[index], f"{what}: parameter {index}")
    state = parts[0][0]["state"]  # type: ignore[index]
    for index, weight in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        latent = optimizer.state.get(weight, {}).get("latent")
        if latent is not None:
            _check_tensor(state[index]["latent"], latent, f"optimizer: latent of parameter {index}")


def _check_groups(found: object, expected: list[dict[str, Any]], what: str) -> None:
    """Hyperparameters are those of the configuration, but for what changes from step to step."""
    if not isinstance(found, list) or len(found) != len(expected):
        raise ValueError(f"the {what} has other groups of parameters")
    for mine, theirs in zip(found, expected, strict=True):
        needed = {"params", "method", "levels", *_SCHEDULED} & set(theirs)
        if not isinstance(mine, dict) or not needed <= set(mine):
            raise ValueError(f"a group of the {what} lacks a part of its state")
        for key in (set(mine) & set(theirs)) - _PROGRESS:  # a key of only one of them was added or removed by a version
            if key in _SCHEDULED:
                _number(mine[key], 0, 1e38, f"{key} of the {what}")
            elif type(mine[key]) is not type(theirs[key]) or mine[key] != theirs[key]:
                raise ValueError(f"{key} of the {what} is {_shown(mine[key])}, expected {_shown(theirs[key])}")


def _check_moments(entry: object, parameter: Tensor, what: str) -> None:
    if not isinstance(entry, dict) or (set(entry) & _ADAM not in (set(), _ADAM)):
        raise ValueError(f"{what} is not whole")
    for name, value in entry.items():
        if isinstance(value, Tensor):
            _check_tensor(value, value.new_empty(()) if name == "step" else parameter, f"{what}, {name}")
            value = value.item() if name == "step" else None
        if value is not None:
            _number(value, 0, 1e15, f"{what}, {name}")


def _check_tensor(found: object, expected: Tensor, what: str, *, nan: bool = False) -> None:
    if not isinstance(found, Tensor) or not _plain(found):
        raise ValueError(f"{what} is {_shown(found)}, expected a tensor")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        shapes = [f"{t.dtype} of shape {tuple(t.shape)}".removeprefix("torch.") for t in (found, expected)]
        raise ValueError(f"{what} is {shapes[0]}, expected {shapes[1]}")
    if not nan and bool(found.isnan().any()):
        raise ValueError(f"{what} holds NaN")


def _plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _whole(value: object, least: int, most: int, what: str) -> int:
    if type(value) is not int or not least <= value <= most:
        limits = str(least) if least == most else f"a whole number from {least} to {most}"
        raise ValueError(f"{what} is {_shown(value)}, expected {limits}")
    return value


def _number(value: object, least: float, most: float, what: str) -> None:
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{what} is {_shown(value)}, expected a number from {least:g} to {most:g}")


def _shown(value: object) -> str:
    """A value for a message, in a few words whatever it is."""
    if value is None:
        return "missing"
    return repr(value)[:60] if isinstance(value, (int, float, str, bool)) else f"a {type(value).__name__}"


def _refuse_compressed(payload: bytes) -> None:
    """torch.save stores and does not compress: a file that grows when it is read was made to fill the memory."""
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        if sum(record.file_size for record in archive.infolist()) > len(payload):
            raise ValueError("its records are larger than the file")
