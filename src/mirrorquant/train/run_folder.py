"""The folder of a run: its lock, configuration, checkpoints, metrics, best network and summary."""

from __future__ import annotations

import json
import os
import shlex
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from mirrorquant import _files
from mirrorquant.errors import MirrorquantError
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.packing import PackedModel, PackError
from mirrorquant.packing.file import stored
from mirrorquant.packing.model import assemble, skeleton
from mirrorquant.select import listed
from mirrorquant.train import build, checkpoint, evaluate
from mirrorquant.train.checkpoint import CheckpointError
from mirrorquant.train.config import Config, ConfigError
from mirrorquant.train.metrics import read_metrics

__all__ = ["Best", "RunError", "RunFolder"]

BEST = ("best.pt", "best.mq")  # the second name is from version 0.1
CHECKPOINT = ("checkpoint.pt", "checkpoint.pt.previous", "checkpoint.mq", "checkpoint.mq.previous")
_T = TypeVar("_T")
_ORIGIN = ("recipe", "data", "model", "method", "levels", "seed", "logit_scale")


class RunError(MirrorquantError, RuntimeError):
    """Training cannot start or continue; the message says why and what to do."""


_LOCKED: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked process, such as one that reads images: it would keep the locks when its parent is gone."""
    for folder in list(_LOCKED):
        folder.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class RunFolder:
    """Reads and writes the files of a run; its methods raise errors that name the file.

    ``config.json``, ``metrics.jsonl`` and ``summary.json`` are text; ``checkpoint.pt`` (with its spare
    ``checkpoint.pt.previous``) and ``best.pt`` open with ``torch.load(path, weights_only=True)``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._held = Path(path), ExitStack()

    def lock(self) -> None:
        """Creates the folder if needed and locks it until ``release``, or until the process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self._held.enter_context(_files.open_regular(self.path / ".lock", "ab"))
        except OSError as error:
            remedy = "choose another folder"
            raise RunError(f"{self.path} cannot be used as a run folder ({error.strerror}): {remedy}") from error
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no such locks on this system
            pass
        except OSError:
            self.release()
            raise RunError(f"{self.path} is in use by another run: wait for it, or choose another folder") from None
        _LOCKED.add(self)
        for unfinished in self.path.glob("*.writing"):  # by a run that was killed
            with suppress(OSError):
                unfinished.unlink()

    def release(self) -> None:
        """Unlocks the folder."""
        self._held.close()

    @property
    def best(self) -> Path:
        """The file of the best network."""
        return next((path for name in BEST if (path := self.path / name).exists()), self.path / BEST[0])

    @property
    def checkpoints(self) -> list[Path]:
        """The files of the checkpoints, the newest first."""
        return [path for name in CHECKPOINT if (path := self.path / name).exists()]

    @property
    def begun(self) -> bool:
        """Whether a run was started here."""
        return (self.path / "config.json").exists()

    @property
    def ended(self) -> bool:
        """Whether the run in it has ended."""
        return (self.path / "summary.json").exists()

    def config(self) -> Config:
        """The configuration."""
        return Config.load(self.path / "config.json")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the metrics so far."""
        return read_metrics(self.path / "metrics.jsonl")

    def summary(self) -> dict[str, Any]:
        """The summary of a run that has ended."""
        path = self.path / "summary.json"
        try:
            return dict(json.loads(_files.read_regular(path)))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise RunError(f"{path} cannot be read: the run has not ended, or was altered") from error

    def write(self, name: str, text: str) -> None:
        """Writes a text file atomically."""
        _files.write_atomically(self.path / name, text.encode(), CheckpointError)

    def write_checkpoint(self, state: dict[str, Any]) -> None:
        """Writes a checkpoint, and keeps the previous one as a spare."""
        try:
            checkpoint.save(self.path / CHECKPOINT[0], state)
        except CheckpointError as error:
            remedy = f"Free some space, or restore the folder, and continue with --resume {shlex.quote(str(self.path))}"
            raise RunError(f"{error}. {remedy}") from error

    def restore(self, load: Callable[[dict[str, Any]], _T], say: Callable[[str], None]) -> _T | None:
        """The result of ``load`` for the newest checkpoint that is undamaged; None if there is no file."""
        problems = []
        for path in self.checkpoints:
            try:
                return checkpoint.use(path, load)
            except RunError:  # noqa: PERF203 (it belongs to another run)
                raise
            except MirrorquantError as error:
                problems.append(str(error))
                say(f"{error}; trying the previous one")
        if problems:
            raise CheckpointError(f"no undamaged checkpoint is left: {'; '.join(problems)}")
        return None


@dataclass(frozen=True)
class Best:
    """The best rounded network of a run: the model, and an optimizer that knows the levels of its weights."""

    model: nn.Module
    opt: MirrorDescent
    config: Config
    images: dict[str, Any]
    path: Path

    @classmethod
    def load(cls, where: str | os.PathLike[str]) -> Best:
        """Reads the network from a run's folder, or from its ``best.pt`` alone."""
        path, expected = Path(where), None
        if path.is_dir() or not path.suffix:
            expected = Config.load(path / "config.json")
            path = RunFolder(path).best
        return checkpoint.use(path, lambda state: cls._of(state, path, expected))

    @classmethod
    def _of(cls, state: dict[str, Any], path: Path, expected: Config | None) -> Best:
        config = Config.parse(state.get("config", ""), path)
        if expected is not None and expected.identity != config.identity:
            raise ConfigError(f"{path} belongs to another configuration than config.json")
        images = state["images"]
        with torch.random.fork_rng(devices=[]):  # of the weights that are drawn here, nothing is left
            model = build.model(config, images["classes"], images["shape"][0])
        opt = build.optimizer(config, model, 1)
        model.load_state_dict(state["model"])
        return cls(model.eval(), opt, expected or config, images, path)

    def packed(self, *, fuse: bool = True) -> PackedModel:
        """The network as :func:`mirrorquant.pack` makes it, with its origin; one without bits for a float network."""
        if self.off_levels:
            raise PackError(f"{self.path} was altered: {listed(self.off_levels)} is off its levels; train it again")
        plain, entries = stored(self.model, finalized=False)
        packed = assemble(skeleton(plain), entries, fuse=fuse)
        packed.about = self.about
        return packed

    @property
    def about(self) -> dict[str, Any]:
        """The origin of the network, for files that are made from it."""
        return {**{name: self.config[name] for name in _ORIGIN}, **self.images}

    @property
    def off_levels(self) -> list[str]:
        """The quantized parameters with values that are not levels: none, unless the file was forged."""
        return [row["name"] for row in evaluate.layers(self.opt) if row["off_levels"]]
