"""The training loop: one for all methods, on CPU and CUDA.

One iteration: a training step; every ``eval_every`` iterations the *rounded* network is validated on clean images, and
the best one kept; β and the learning rate follow their schedules. At the end the best rounded network is tested: that
is the number of the paper's tables.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from mirrorquant._version import __version__
from mirrorquant.calibration import recalibrate
from mirrorquant.health import health, unwarned
from mirrorquant.train import build, checkpoint, diagnosis, process
from mirrorquant.train.config import Config
from mirrorquant.train.engine import Engine, choose
from mirrorquant.train.evaluate import count_parameters, layers
from mirrorquant.train.metrics import Metrics
from mirrorquant.train.progress import Progress
from mirrorquant.train.run_folder import BEST, RunError, RunFolder
from mirrorquant.train.task import Task

__all__ = ["Interrupted", "Run", "RunError"]

BINS = 61
CHECKPOINT_SECONDS = 60


class Interrupted(RunError):
    """A signal ended the run, after its checkpoint was written."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Run:
    """A training run in a folder, which holds everything that it needs to go on after a stop.

    >>> import tempfile
    >>> config = Config.from_recipe("digits/digitsnet/binary/md-tanh-s", ["iterations=20", "width=4"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = Run(config, folder, quiet=True).train()
    ...     best = RunFolder(folder).best()
    >>> summary["parameters"]["bits"], best.off_levels
    (1.0, [])
    """

    def __init__(
        self, config: Config, folder: str | os.PathLike[str], *, quiet: bool = False, resumed: bool = False
    ) -> None:
        self.folder, self.quiet = RunFolder(folder), quiet
        self.messages: list[str] = []
        self.progress: Progress | None = None
        self.metrics: Metrics | None = None
        self.folder.lock()
        try:
            if not resumed and self.folder.begun:
                raise RunError(f"{folder} holds a run already: continue it with --resume, or choose another --out")
            self.config = config if resumed else build.resolve(config)
            self.task = build.task(config, download=not resumed)  # a stranger's run does not start a download
            self.folder.write("config.json", self.config.text())
        except BaseException:
            self.folder.release()
            raise
        self.clock = process.Clock(self.task.device)
        self.beta = config.build_beta(self.task.loader.batches_per_epoch)
        self.step, self.logged, self.best_step, self.best_accuracy = 0, 0, -1, -1.0
        self.best: dict[str, Tensor] = {}
        self.seal: dict[str, Any] | None = None  # of the metrics, in the checkpoint that the run goes on from
        self._engine: Engine | None = None

    @classmethod
    def resume(cls, folder: str | os.PathLike[str], overrides: Sequence[str] = (), *, quiet: bool = False) -> Run:
        """A run as its folder describes it, to be continued with ``train``; it may move: ``["device=cuda"]``."""
        return cls(RunFolder(folder).config().moved(overrides), folder, quiet=quiet, resumed=True)

    def train(self) -> dict[str, Any]:
        """Trains to the end and returns the summary; continues where a checkpoint stands."""
        config = self.config
        name = config.origin.recipe or f"{config.data.name} {config.method.name}"
        try:
            with process.settings(config, self.task.device):
                self._restore()
                self.metrics = Metrics(self.folder.path, self.step, self.seal)
                self.progress = Progress(name, config.training.iterations, self.step, quiet=self.quiet)
                with self.progress, process.signals() as stop:
                    for message in self.messages:
                        self.progress.say(message)
                    while self.step < config.training.iterations:
                        if stop:
                            self._stop(stop[0])
                        self.advance()
                        self._follow_up(self.progress)
                return self._finish()
        finally:
            if self.metrics is not None:
                self.metrics.close()
            self.folder.release()

    # Steps.

    @property
    def engine(self) -> Engine:
        """What makes the steps; chosen when it is first needed, since it starts from where the model is then."""
        if self._engine is None:
            self._engine = choose(self.task, self.config.machine.engine, self.say)
        return self._engine

    def advance(self) -> None:
        """One iteration; its loss is added to the engine's ``losses``."""
        try:
            with nullcontext() if self.engine.ready else self.clock.apart("startup"):
                self.engine.step(self.step)
        except FloatingPointError:
            raise self._diverged(self.step) from None
        self.step += 1

    @property
    def settled(self) -> Task:
        """The task with its model and optimizer up to date, for whoever looks at them."""
        self.engine.sync()
        return self.task

    def say(self, message: str) -> None:
        """A message beside the progress bar, if there is one by now."""
        self.messages.append(message)
        if self.progress is not None:
            self.progress.say(message)

    def _follow_up(self, progress: Progress) -> None:
        """Whatever is due after an iteration."""
        training, logging = self.config.training, self.config.logging
        last = self.step == training.iterations
        finalized = math.ceil(Fraction(str(self.config.beta.finalize_at)) * training.iterations)  # 0.07 of 100 is 7
        if self.step == finalized and not last:
            self._finalize()
        text = self._log() if last or self.step % logging.log_every == 0 else ""
        if last or self.step % training.eval_every == 0:
            self._validate()
        if text:
            best = f"  best val {self.best_accuracy:.2f} %" if self.best_step >= 0 else ""
            progress.update(self.step, text + best)
        if logging.histogram_every and (self.step % logging.histogram_every == 0 or self.step == 1):
            self._histograms()
        every, since = logging.checkpoint_every, time.monotonic() - self.saved
        if self.step % every == 0 if every else since > CHECKPOINT_SECONDS:
            self._save()

    def _finalize(self) -> None:
        """Rounds for good; a fresh engine trains what is left."""
        losses = self.engine.losses
        with unwarned():
            self.settled.opt.finalize()
        self._engine = None
        self.engine.losses.copy_(losses)

    def _log(self) -> str:
        """Records the mean loss of the iterations since the last time, and returns what to show of it."""
        seconds, losses = self.clock.seconds, self.engine.losses
        loss = float(losses) / (self.step - self.logged)
        losses.zero_()
        self.logged = self.step
        if not math.isfinite(loss):
            raise self._diverged(self.step - 1)
        lr, beta = self.task.lr(self.step - 1), 1.0 if self.config.method.name == "ref" else self.beta(self.step)
        self._record("train", loss=loss, lr=lr, beta=beta, seconds=round(seconds, 3))
        return f"loss {loss:.3f}  beta {beta:.3g}"

    def _validate(self) -> None:
        with self.clock.apart("validation"):
            accuracy, loss = self.engine.score()
        self._record("val", accuracy=accuracy, loss=loss)
        if accuracy >= self.best_accuracy:  # of equals the later one, which is closer to its levels
            self.best_accuracy, self.best_step = accuracy, self.step
            with self.settled.opt.quantized():
                self.best = copy.deepcopy({k: v.detach() for k, v in self.task.model.state_dict().items()})

    @torch.no_grad()
    def _histograms(self) -> None:
        levels = self.config.build_method().levels
        low, high = levels.centre - 1.1 * levels.radius, levels.centre + 1.1 * levels.radius
        rows = {}
        for name, p in self.settled.model.named_parameters():
            if p.dim() > 1:
                rows[name] = torch.histc(p.float().clamp(low, high).cpu(), BINS, low, high).int().tolist()
        self._record("weights", range=[low, high], layers=rows)

    def _record(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, self.step, **values)

    def _diverged(self, step: int) -> RunError:
        where = diagnosis.origin(self.task.model, self.task.opt, self.task.batch(step).images)
        return RunError(
            f"the loss is not finite at iteration {self.step}; it begins in {where}. Lower lr (it is "
            f"{self.task.lr(self.step):g}) and start again; the last checkpoint in {self.folder.path} is intact"
        )

    def _stop(self, number: int) -> None:
        self._save()
        raise Interrupted(
            f"stopped by {signal.Signals(number).name} after iteration {self.step}; continue with "
            f"mirrorquant train --resume {shlex.quote(str(self.folder.path))}",
            number,
        )

    # Checkpoints.

    def _save(self) -> None:
        seconds, self.saved = self.clock.seconds, time.monotonic()
        with self.clock.apart("checkpoints"):
            if diagnosis.has_nan(self.task.opt):  # a graph does not look at its gradients
                raise self._diverged(self.step)
            self.engine.sync()
            self.folder.write_checkpoint(self._state(seconds, self.engine.losses))

    def _state(self, seconds: float, losses: Tensor) -> dict[str, Any]:
        """Everything that the run needs to go on."""
        cuda = self.task.device.type == "cuda"
        return {
            "step": self.step,
            "logged": self.logged,
            "seconds": seconds,
            "best_step": self.best_step,
            "best_accuracy": self.best_accuracy,
            "best": self.best,
            "losses": losses,
            "aside": self.clock.aside,
            "model": self.task.model.state_dict(),
            "optimizer": self.task.opt.state_dict(),
            "rng": torch.get_rng_state(),
            **({"cuda_rng": torch.cuda.get_rng_state(self.task.device)} if cuda else {}),
            "metrics": self.metrics.seal() if self.metrics is not None else {"bytes": 0, "sha256": ""},
            "config": self.config.text(),
        }

    def _restore(self) -> None:
        """Goes on from the newest checkpoint, if there is one."""
        state, metrics = self.folder.newest_checkpoint(self.say, self._take), self.folder.path / "metrics.jsonl"
        self.saved, self.clock.seconds = time.monotonic(), 0.0
        if state is None:
            if metrics.exists():
                self.say(f"there is no checkpoint in {self.folder.path}: starting over")
            return
        if not self._is_ours(state):
            raise RunError(f"the checkpoint in {self.folder.path} belongs to another configuration than config.json")
        self.step, self.best_step, self.best_accuracy = (state[k] for k in ("step", "best_step", "best_accuracy"))
        self.logged = state.get("logged", self.step - self.step % self._config_of(state)["log_every"])
        self.best = {k: v.to(self.task.device) for k, v in state["best"].items()}
        self.engine.losses.copy_(state["losses"])
        self.clock.seconds = state["seconds"]
        self.clock.aside |= state.get("aside", {})
        self.seal = state.get("metrics")
        self.say(f"continuing after iteration {self.step}")
        if self.step and not metrics.exists():
            self.say(f"{metrics} is missing: the curves begin here")

    def _take(self, state: dict[str, Any]) -> None:
        """Loads what can fail, and raises where it does, so that the spare is tried; another run's is left alone."""
        if not self._is_ours(state):
            return
        task = self.task
        self._check(state)
        task.opt.load_state_dict(state["optimizer"])
        task.model.load_state_dict(state["model"])
        if task.opt.steps != state["step"]:
            raise ValueError(f"the optimizer has taken {task.opt.steps} steps, expected {state['step']}")
        with task.opt.quantized():  # raises unless the weights belong to their latents
            pass
        task.model.load_state_dict(state["model"])  # to the last bit: another version may have projected otherwise
        torch.set_rng_state(state["rng"])
        if "cuda_rng" in state and task.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], task.device)

    @functools.cached_property
    def _fresh(self) -> dict[str, Any]:
        """The state of the run before its first step, which all later ones resemble."""
        return copy.deepcopy(self._state(0.0, torch.zeros(())))

    def _check(self, state: dict[str, Any]) -> None:
        """Raises ValueError unless the run can go on from a state; some keys came after version 0.1."""
        later, buffers = ("logged", "aside", "metrics", "cuda_rng"), dict(self.task.model.named_buffers())
        for name, expected in self._fresh.items():
            if name == "best" and state["best_step"] >= 0:
                expected = self._fresh["model"]
            checkpoint.fits(state.get(name, expected if name in later else None), expected, name, buffers)
        if not state["best_step"] <= state["step"] <= self.config.training.iterations or state["best_accuracy"] > 100:
            raise ValueError(f"step is {state['step']} and best_step {state['best_step']}, which cannot be")

    def _config_of(self, state: dict[str, Any]) -> Config:
        return Config.parse(state["config"], self.folder.path / "checkpoint.pt")

    def _is_ours(self, state: dict[str, Any]) -> bool:
        return isinstance(state.get("config"), str) and self._config_of(state).identity == self.config.identity

    # The end.

    def _finish(self) -> dict[str, Any]:
        self._save()
        seconds, task = self.clock.seconds, self.settled
        soft, _ = task.evaluate(task.data.test)
        problems = health(task.opt).gaps
        with task.opt.quantized():
            last, _ = task.evaluate(task.data.test)
        task.model.load_state_dict(self.best)
        rows = layers(task.opt)
        if off := [row["name"] for row in rows if row["off_levels"]]:
            raise RunError(f"the best network has weights off their levels in {', '.join(off)}: please report this")
        for problem in [*health(task.opt).collapses, *problems]:
            print(f"warning: {problem}", file=sys.stderr, flush=True)  # it is not progress, which quiet leaves out
        if self.config.training.recalibrate:
            recalibrate(task.model, (task.loader.batch(k)[0] for k in range(self.config.training.recalibrate)))
        test, _ = task.evaluate(task.data.test)
        images = {"classes": len(task.data.classes), "shape": list(task.data.shape)}
        best = {"model": task.model.state_dict(), "config": self.config.text(), "images": images}
        checkpoint.save(self.folder.path / BEST[0], best)
        accuracies = {"test_accuracy": test, "test_accuracy_soft": soft, "test_accuracy_last": last}
        summary = self._summary(accuracies, seconds, rows)
        self.folder.write("summary.json", json.dumps(summary, indent=1) + "\n")
        return summary

    def _summary(self, accuracies: dict[str, float], seconds: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
        config, task, aside, lines = self.config, self.task, self.clock.aside, self.folder.metrics()
        training = seconds - sum(aside.values())
        return {
            "recipe": config.origin.recipe or None,
            "config": config.record(),
            "overrides": config.origin.overrides,
            "paper": config.origin.paper or None,
            "best_step": self.best_step,
            "val_accuracy": self.best_accuracy,
            **accuracies,
            "seconds": round(seconds, 2),
            "aside": {what: round(seconds, 2) for what, seconds in aside.items()},
            "iterations_per_second": round(self.step / max(seconds, 1e-9), 2),
            "training_iterations_per_second": round(self.step / max(training, 1e-9), 2),
            "versions": versions(task.device),
            "engine": {
                "engine": self.engine.name,
                "precision": str(task.dtype).removeprefix("torch."),
                "compile": task.compile,
                "channels_last": task.channels_last,
                "cuda_bytes": torch.cuda.max_memory_allocated(task.device) if task.device.type == "cuda" else 0,
            },
            "curve": [[line["step"], round(line["accuracy"], 3)] for line in lines if line["kind"] == "val"],
            "loss_curve": [[line["step"], round(line["loss"], 5)] for line in lines if line["kind"] == "train"],
            "parameters": count_parameters(rows),
            "layers": rows,
        }


def versions(device: torch.device) -> dict[str, str]:
    """What the figures of a run were made with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"mirrorquant": __version__, "torch": torch.__version__, "python": platform.python_version(), "device": name}
