"""The folder of a run: its lock, configuration, checkpoints, metrics, best network and summary."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, nn

from mirrorquant import _files
from mirrorquant.data import load as load_data
from mirrorquant.errors import MirrorquantError
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.train import build, checkpoint, evaluate
from mirrorquant.train.checkpoint import CheckpointError
from mirrorquant.train.config import Config, ConfigError
from mirrorquant.train.metrics import read_metrics

__all__ = ["Best", "RunError", "RunFolder"]

BEST = ("best.pt", "best.mq")  # the second is that of version 0.1
CHECKPOINT = ("checkpoint.pt", "checkpoint.mq")
_TOLD = ("recipe", "data", "model", "method", "levels", "seed")


class RunError(MirrorquantError, RuntimeError):
    """Training cannot start or go on; the message says why and what to do."""


class RunFolder:
    """Reads and writes the files of a run; its methods raise errors that name the file.

    ``config.json``, ``metrics.jsonl`` and ``summary.json`` are text; ``checkpoint.pt`` (with its spare
    ``checkpoint.pt.previous``) and ``best.pt`` open with ``torch.load(path, weights_only=True)``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: BinaryIO | None = None

    # Holding it.

    def lock(self) -> None:
        """Creates the folder if need be and holds it: another process gets an error; a killed one lets go."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "wb", opener=_open_lock)  # noqa: SIM115
        except OSError as error:
            raise RunError(f"{self.path} cannot be used as a run folder ({error.strerror})") from error
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no such locks on this system
            pass
        except OSError:
            self.release()
            raise RunError(f"{self.path} is in use by another run: wait for it, or choose another --out") from None
        for unfinished in self.path.glob("*.writing"):  # by a run that was killed
            with suppress(OSError):
                unfinished.unlink()

    def release(self) -> None:
        """Lets go."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # Text.

    @property
    def begun(self) -> bool:
        """Whether a run was started here."""
        return (self.path / "config.json").exists()

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
            return dict(_files.parse_json(_files.read_regular(path)))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise RunError(f"{path} cannot be read: the run has not ended, or was altered") from error

    def write(self, name: str, text: str) -> None:
        """Writes a text file, which appears whole or not at all."""
        _files.write_atomically(self.path / name, text.encode(), CheckpointError)

    # Networks.

    def write_checkpoint(self, state: dict[str, Any]) -> None:
        """Writes a checkpoint, and keeps the one before as a spare."""
        try:
            checkpoint.save(self.path / CHECKPOINT[0], state)
        except CheckpointError as error:
            remedy = f"Free some space and continue with --resume {shlex.quote(str(self.path))}"
            if not self.path.is_dir():
                remedy = "It was removed or renamed while the run went on: start again"
            raise RunError(f"{error}. {remedy}") from error

    def newest_checkpoint(
        self, say: Callable[[str], None], use: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any] | None:
        """The newest checkpoint that ``use`` could take, which raises for one that does not fit; None without any."""
        paths = [path for name in CHECKPOINT for path in checkpoint.spares(self.path / name)]
        return checkpoint.load_newest(paths, say, use)

    def best(self) -> Best:
        """The best rounded network of the run."""
        return Best.load(self.path)


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
        where, expected = Path(where), None
        path = where
        if where.is_dir() or not where.suffix:
            expected = Config.load(where / "config.json")
            path = next((where / name for name in BEST if (where / name).exists()), where / BEST[0])
        state = checkpoint.load(path)
        checkpoint.whole(path, _check_best, state)
        config = Config.parse(state["config"], path)
        if expected is not None and expected.identity != config.identity:
            raise ConfigError(f"{path} belongs to another configuration than config.json")
        images = state.get("images") or _images(expected or config)
        model = build.model(config, images["classes"], images["shape"][0])
        opt = build.optimizer(config, model, 1)

        def fill(state: dict[str, Any]) -> None:
            checkpoint.fits(state["model"], model.state_dict(), "its model", dict(model.named_buffers()))
            model.load_state_dict(state["model"])

        checkpoint.whole(path, fill, state)
        return cls(model.eval(), opt, expected or config, images, path)

    @property
    def about(self) -> dict[str, Any]:
        """Where the network comes from, for a file that is made of it."""
        return {**{name: self.config[name] for name in _TOLD}, **self.images}

    @property
    def off_levels(self) -> list[str]:
        """The quantized parameters with values that are not levels: none, unless the file was made to deceive."""
        return [row["name"] for row in evaluate.layers(self.opt) if row["off_levels"]]


def _check_best(state: dict[str, Any]) -> None:
    model, config, images = state.get("model"), state.get("config"), state.get("images")
    if not isinstance(model, dict) or not all(isinstance(value, Tensor) for value in model.values()):
        raise ValueError("its model is not a dictionary of tensors")
    if not isinstance(config, str):
        raise ValueError(f"its config is {checkpoint.shown(config)}, expected a string")
    if images is not None:
        sizes = [images["classes"], *images["shape"]] if isinstance(images, dict) and images.get("shape") else []
        if len(sizes) < 2 or not all(type(size) is int and 0 < size <= 1 << 20 for size in sizes):
            raise ValueError(f"its images are {images!s:.60}, expected a number of classes and a shape")


def _images(config: Config) -> dict[str, Any]:
    data = load_data(config.data.name, config.machine.data_root, download=False)
    return {"classes": len(data.classes), "shape": list(data.shape)}


def _open_lock(path: str, flags: int) -> int:
    """Follows no link, and does not wait for the reader of a FIFO: a stranger's folder may hold either."""
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, flags | careful, 0o666)
