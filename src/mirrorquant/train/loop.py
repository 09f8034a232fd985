"""The training loop: one for all methods, on CPU and CUDA.

One iteration is a training step, with β and the learning rate from their schedules. Every ``eval_every`` iterations the
*rounded* network is validated on clean images. At the end the best one is tested, or the last one with ``keep=last``:
this is the number in the paper's tables.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
import platform
import shlex
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mirrorquant import data
from mirrorquant._version import __version__
from mirrorquant.calibration import recalibrate
from mirrorquant.health import health, unwarned
from mirrorquant.train import build, checkpoint, distributed, evaluate, process
from mirrorquant.train.config import Config
from mirrorquant.train.engine import PlainEngine, _GraphOrPlain, choose
from mirrorquant.train.metrics import Metrics, NoMetrics
from mirrorquant.train.progress import Progress
from mirrorquant.train.run_folder import BEST, CHECKPOINT, RunError, RunFolder

__all__ = ["Interrupted", "Run", "RunError"]

BINS = 61
CHECKPOINT_SECONDS = 60
_WIDEST_START = 0.1  # relative to the size of the weights
_COUNTS = ("step", "logged", "best_step", "best_accuracy", "best")  # attributes of a run, and keys of its checkpoint


class Interrupted(RunError):
    """A signal ended the run after its checkpoint was written."""

    def __init__(self, number: int, step: int, folder: RunFolder) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name} after iteration {step}; continue with "
            f"mirrorquant train --resume {shlex.quote(str(folder.path))}"
        )
        self.number = number


class Run:
    """A training run in a folder, which holds everything needed to continue after a stop.

    >>> import tempfile
    >>> config = Config.from_recipe("digits/digitsnet/binary/md-tanh-s", ["iterations=20", "width=4"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = Run(config, folder, quiet=True).train()
    >>> summary["parameters"]["bits"], any(row["off_levels"] for row in summary["layers"])
    (1.0, False)
    """

    def __init__(
        self, config: Config, folder: str | os.PathLike[str], *, quiet: bool = False, resumed: bool = False
    ) -> None:
        self.world, self.folder, self.messages = distributed.world(), RunFolder(folder), list[str]()
        title, quiet = config.recipe or f"{config.data} {config.method}", quiet or not self.world.chief
        self.progress = Progress(title, config.iterations, quiet=quiet)
        if self.world.chief:
            self.folder.lock()
        try:
            if self.world.shared(not resumed and self.folder.begun):
                raise RunError(f"{folder} already holds a run: continue it with --resume, or choose another folder")
            init = not resumed or not self.world.shared(self.folder.checkpoints)
            # A run from elsewhere starts no download.
            self.task = build.task(config, download=not resumed, init=init, world=self.world, say=self.say)
            if init and config.init and (gap := self.task.opt.start_gap) > _WIDEST_START:
                known = "MD-tanh-S and GD-tanh with scale=tensor or scale=channel keep them, if beta starts at 1"
                self.warn(f"at the start the weights differ by {gap:.0%} from those of init {config.init}: {known}")
            self._check_images(config.images if resumed else 0)
            self.config = config if resumed else self._begun(config)
            self.progress.total = self.config.iterations
            if self.world.chief:
                self.folder.write("config.json", self.config.text())
        except BaseException:
            self.folder.release()
            raise
        self.clock, self.saved = process.Clock(self.task.device), time.monotonic()
        self.beta = self.config.build_beta(self.task.loader.batches_per_epoch)
        warn = self.warn if self.world.chief else process.say_apart
        self.supply = process.Supply(self.task.loader, warn, cached=bool(config.cache))
        self.step, self.logged, self.best_step, self.best_accuracy = 0, 0, -1, -1.0
        self.next_sync, self.pace = 0, process.Pace()
        self.best: dict[str, Tensor] = {}

    def _begun(self, config: Config) -> Config:
        """The configuration of a new run, with all that depends on the device and the data."""
        images = len(self.task.data.train)
        return dataclasses.replace(build.resolve(config).timed(self.task.loader.batches_per_epoch), images=images)

    def _check_images(self, began: int) -> None:
        """Raises :class:`RunError` if the number of training images has changed, or differs between processes."""
        count, place = len(self.task.data.train), self.task.device
        fewest, most = self.world.least(count, place), self.world.largest(count, place)
        if fewest != most:
            problem = f"processes see different numbers of training images, {fewest} to {most}"
            raise RunError(f"{problem}: use the same data on every machine")
        if began not in (0, count):
            remedy = "restore them, or start a new run"
            raise RunError(f"the run began with {began} training images, but now there are {count}: {remedy}")

    @classmethod
    def resume(cls, folder: str | os.PathLike[str], overrides: Sequence[str] = (), *, quiet: bool = False) -> Run:
        """The run of a folder, to be continued with ``train``; it may move, as with ``["device=cuda"]``."""
        config = RunFolder(folder).config() if distributed.world().chief else None
        shared = distributed.world().shared(config)
        assert shared is not None
        return cls(shared.moved(overrides), folder, quiet=quiet, resumed=True)

    def train(self) -> dict[str, Any]:
        """Trains to the end, from the newest checkpoint if there is one, and returns the summary."""
        with ExitStack() as stack:
            stack.callback(self.folder.release)
            stack.callback(self.task.close)
            stack.enter_context(process.settings(self.config, self.task.device))
            with self.progress, process.signals() as stop:
                self._restore()
                stack.callback(self.metrics.close)
                while self.step < self.config.iterations:
                    if number := self._asked_to_stop(stop):
                        self._save()
                        raise Interrupted(number, self.step, self.folder)
                    self.advance()
                    self._follow_up()
            return self._finish()

    def _asked_to_stop(self, signals: list[int]) -> int:
        """The number of a signal, or 0; several processes agree every few seconds, and stop at the same step."""
        number, device = max(signals, default=0), self.task.device
        if self.world.size == 1:
            return number
        if self.step < self.next_sync:
            return 0
        self.next_sync = self.step + self.world.least(self.pace.steps(self.step), device)
        return self.world.largest(number, device)

    def advance(self) -> None:
        """One iteration; its loss is added to the engine's ``losses``."""
        try:
            with nullcontext() if self.engine.ready else self.clock.apart("startup"):
                self.engine.step(self.step)
        except FloatingPointError:
            raise self._diverged(self.step) from None
        self.step += 1

    def _follow_up(self) -> None:
        """Does everything that is due after an iteration."""
        config = self.config
        last = self.step == config.iterations
        finalized = math.ceil(Fraction(str(config.finalize_at)) * config.iterations)  # 0.07 of 100 is exactly 7
        if self.step == finalized and not last:
            self._finalize()
        text = self._log() if last or self.step % config.log_every == 0 else ""
        if last or self.step % config.eval_every == 0:
            self._validate()
        if text:
            best = f"  best val {self.best_accuracy:.2f} %" if self.best_step >= 0 else ""
            self.progress.update(self.step, text + best)
        if config.histogram_every and (self.step % config.histogram_every == 0 or self.step == 1):
            self._histograms()
        if self._checkpoint_is_due():
            self._save()

    def _checkpoint_is_due(self) -> bool:
        """Every so many iterations, or once per minute; several processes agree on the minute when they log."""
        if self.config.checkpoint_every:
            return self.step % self.config.checkpoint_every == 0
        late = time.monotonic() - self.saved > CHECKPOINT_SECONDS
        if self.world.size > 1:
            return not self.step % self.config.log_every and bool(self.world.largest(int(late), self.task.device))
        return late

    @functools.cached_property
    def engine(self) -> PlainEngine | _GraphOrPlain:
        """Makes the steps; chosen when first needed, since it starts from the model as it is then."""
        with self.clock.apart("startup"):
            return choose(self.task, self.config.engine, self.warn)

    def say(self, message: str) -> None:
        """Shows a message beside the progress, and keeps it; of several processes, the first does."""
        self.messages.append(message)
        self.progress.say(message)

    def warn(self, message: str) -> None:
        """Like ``say``, for warnings: shown even if the run is quiet."""
        self.messages.append(message)
        self.progress.say(f"warning: {message}", anyway=self.world.chief)

    def _finalize(self) -> None:
        """Rounds for good; a fresh engine trains the parameters that are left."""
        losses = self.engine.losses
        self.engine.sync()
        with unwarned():
            self.task.opt.finalize()
        del self.engine
        self.engine.losses.copy_(losses)

    def _log(self) -> str:
        """Records the mean loss of the iterations since the last record, and returns the text to show."""
        seconds, losses = self.clock.seconds, self.engine.losses
        loss = float(self.world.total(losses)) / (self.step - self.logged) / self.world.size
        losses.zero_()
        self.logged = self.step
        if not math.isfinite(loss):
            raise self._diverged(self.step - 1)
        lr, beta = self.task.lr(self.step - 1), 1.0 if self.config.method == "ref" else self.beta(self.step)
        supply = self.supply.record(seconds)
        self.metrics.write("train", self.step, loss=loss, lr=lr, beta=beta, seconds=round(seconds, 3), **supply)
        return f"loss {loss:.3f}  beta {beta:.3g}"

    def _validate(self) -> None:
        with self.clock.apart("validation"):
            score = self.engine.score()
        self.metrics.write("val", self.step, **score._asdict())
        last = self.step == self.config.iterations
        # Of equals the later one, which is closer to its levels.
        if last if self.config.keep == "last" else score.accuracy >= self.best_accuracy:
            self.best_accuracy, self.best_step = score.accuracy, self.step
            self.engine.sync()
            with self.task.opt.quantized():
                self.best = copy.deepcopy({k: v.detach() for k, v in self.task.model.state_dict().items()})

    @torch.no_grad()
    def _histograms(self) -> None:
        """Records where the weights are, in units of their scale: there the levels are the same for all layers."""
        self.engine.sync()
        method, rows = self.config.build_method(), {}
        levels = method.levels
        low, high = levels.centre - 1.1 * levels.radius, levels.centre + 1.1 * levels.radius
        for name, p in self.task.model.named_parameters():
            if p.dim() > 1 and (p in self.task.opt.state or self.config.method == "ref"):
                state = self.task.opt.state.get(p)
                unit = (p if state is None else method.in_units(p, state)).float()
                rows[name] = torch.histc(unit.clamp(low, high).cpu(), BINS, low, high).int().tolist()
        self.metrics.write("weights", self.step, range=[low, high], layers=rows)

    def _diverged(self, step: int) -> RunError:
        where = evaluate.not_finite(self.task.model, self.task.opt, self.task.batch(step).images)
        return RunError(
            f"the loss is not finite at iteration {self.step}; it begins in {where}. Lower lr (it is "
            f"{self.task.lr(self.step):g}) and start again; the last checkpoint in {self.folder.path} is intact"
        )

    # Checkpoints.

    def _save(self) -> None:
        """Writes everything that the run needs to continue; all processes have the same, so the first one does."""
        self.saved = time.monotonic()
        with self.clock.apart("checkpoints"):
            if evaluate.has_nan(self.task.opt):  # a graph does not look at its gradients
                raise self._diverged(self.step)
            self.engine.sync()
            self.world.average([self.engine.losses])
            if self.world.chief:
                self.metrics.sync()
                self.folder.write_checkpoint(self._state())

    def _state(self) -> dict[str, Any]:
        device = self.task.device
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "seconds": self.clock.seconds,
            "aside": self.clock.aside,
            "losses": self.engine.losses,
            "at_once": self.task.images_at_once,
            "model": self.task.model.state_dict(),
            "optimizer": self.task.opt.state_dict(),
            "rng": torch.get_rng_state(),
            **({"cuda_rng": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}),
            "metrics": self.metrics.digest.hexdigest(),
            "classes": list(self.task.data.classes),
            "teacher": getattr(self.task.objective.teacher, "digest", ""),
            "config": self.config.text(),
        }

    def _restore(self) -> None:
        """Continues from the newest checkpoint that fits, if there is one; the first process reads it for all."""
        self.clock, metrics = process.Clock(self.task.device), self.folder.path / "metrics.jsonl"
        digest = ""
        if self.world.chief and (found := self.folder.restore(self._load, self.warn)) is not None:
            losses, digest = found
            self.engine.losses.fill_(losses)
            self.say(f"continuing after iteration {self.step}")
            if self.step and not metrics.exists():
                self.warn(f"{metrics} is missing: the curves begin here")
        elif self.world.chief and metrics.exists():
            self.warn(f"there is no checkpoint in {self.folder.path}: starting over")
        self.metrics = Metrics(self.folder.path, self.step, digest) if self.world.chief else NoMetrics()
        if self.world.size > 1:
            state = self.world.shared(tree_map_only(Tensor, Tensor.cpu, self._state() if self.world.chief else {}))
            if not self.world.chief:
                losses, _ = self._load(state)  # before there is an engine, which starts from the model as it is
                self.engine.losses.fill_(losses)
                own = data.generator(self.config.seed, self.world.rank, self.step)
                torch.manual_seed(own.initial_seed())  # or all processes would drop the same activations
        self.saved, self.next_sync, self.pace = time.monotonic(), self.step, process.Pace(self.step)
        self.progress.begin(self.step)

    def _load(self, state: dict[str, Any]) -> tuple[float, str]:
        """Loads a checkpoint; RunError means that it is of another run. Version 0.1 wrote no ``logged`` and ``aside``.

        Returns:
            The losses since the last record, and the digest of the metrics, if the checkpoint has it.
        """
        task, cuda = self.task, self.task.device.type == "cuda"
        theirs = Config.parse(state.get("config", ""), self.folder.path / CHECKPOINT[0])
        if theirs.identity != self.config.identity:
            raise RunError(f"the checkpoint in {self.folder.path} belongs to another configuration than config.json")
        if theirs.precision == "auto" and ("cuda_rng" in state) != cuda:  # as in runs of version 0.1
            there, here = ("cpu", "cuda") if cuda else ("cuda", "cpu")
            raise RunError(f"the run began on {there} with precision=auto, which differs on {here}: use device={there}")
        if problem := data.renamed(state.get("classes", task.data.classes), task.data.classes):
            raise RunError(f"the run in {self.folder.path} began with other classes: {problem}. Restore their names")
        if state["best_step"] >= 0:
            task.model.load_state_dict(state["best"])  # raises unless it fits
        task.opt.load_state_dict(state["optimizer"])
        task.model.load_state_dict(state["model"])
        if task.opt.steps != state["step"]:
            raise ValueError(f"the optimizer has taken {task.opt.steps} steps, expected {state['step']}")
        with task.opt.quantized():  # raises unless the weights belong to their latents
            pass
        task.model.load_state_dict(state["model"])  # to the last bit: another version may have projected otherwise
        torch.set_rng_state(state["rng"])
        if cuda and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], task.device)
        state.setdefault("logged", task.opt.steps - task.opt.steps % theirs.log_every)
        if not (0 <= state["logged"] <= state["step"] and -1 <= state["best_step"] <= state["step"]):
            raise ValueError("it counts more than the steps that were taken")
        before, now = state.get("at_once"), task.images_at_once
        if before not in (None, now) and distributed.statistics(task.model):
            self.warn(f"batch norm now sees {now} images at a time instead of {before}; accumulate= can change that")
        if state.get("teacher", "") not in ("", getattr(task.objective.teacher, "digest", "")):
            self.warn(f"teacher {self.config.teacher} is not the network that this run has learnt from so far")
        for name in _COUNTS:
            setattr(self, name, type(getattr(self, name))(state[name]))
        self.clock.earlier = float(state["seconds"])
        if "aside" in state:
            self.clock.aside = {name: float(state["aside"][name]) for name in self.clock.aside}
        digest = state.get("metrics", "")
        return float(state["losses"]), digest if isinstance(digest, str) else ""  # a dictionary in version 0.1

    # The end.

    def _finish(self) -> dict[str, Any]:
        """Tests the last network, soft and rounded, and the best one, and writes the best one and the summary."""
        self._save()
        seconds, task, config = self.clock.seconds, self.task, self.config
        soft = task.evaluate(task.data.test)
        gaps = health(task.opt).gaps
        with task.opt.quantized():
            last = task.evaluate(task.data.test)
        task.model.load_state_dict(self.best)
        layers = evaluate.layers(task.opt)
        if off := [row["name"] for row in layers if row["off_levels"]]:
            raise RunError(f"the best network has weights off their levels in {', '.join(off)}: please report this")
        for problem in [*health(task.opt).collapses, *gaps]:
            self.warn(problem)
        lines = self.folder.metrics()
        kept = [row for row in lines if row["kind"] == "val" and row["step"] == self.best_step]
        val = {"accuracy": self.best_accuracy, "loss": kept[-1]["loss"] if kept else None}
        if config.recalibrate:
            recalibrate(task.model, (task.loader.batch(k)[0] for k in range(config.recalibrate)))
            self.world.average(distributed.statistics(task.model))
            val = task.evaluate(task.data.val)._asdict()
        test = task.evaluate(task.data.test)
        self.supply.name_problems()
        best = {"model": task.model.state_dict(), "config": config.text(), "images": task.data.about}
        if self.world.chief:
            checkpoint.save(self.folder.path / BEST[0], best)
        many = len(task.data.classes) >= evaluate.MANY_CLASSES
        scores = {
            "best_step": self.best_step,
            "val_accuracy": val["accuracy"],
            "val_loss": val["loss"],
            "tested_on_val": task.data.test is task.data.val,
            "test_accuracy": test.accuracy,
            "test_accuracy_soft": soft.accuracy,
            "test_accuracy_last": last.accuracy,
            **({"paper_top5": config.paper_top5 or None, "test_top5": test.top5} if many else {}),
        }
        summary = self._summary(scores, seconds, lines, layers)
        if self.world.chief:
            self.folder.write("summary.json", json.dumps(summary, indent=1) + "\n")
        return summary

    def _summary(
        self, scores: dict[str, Any], seconds: float, lines: list[dict[str, Any]], layers: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """All that is kept of a run: scores, time, software, curves and parameters."""
        task, config = self.task, self.config
        training, on_cuda = seconds - sum(self.clock.aside.values()), task.device.type == "cuda"
        total = sum(row["count"] for row in layers)
        val, train = ([line for line in lines if line["kind"] == kind] for kind in ("val", "train"))
        return {
            "recipe": config.recipe or None,
            "config": config.record(),
            "overrides": config.overrides,
            "paper": config.paper or None,
            **scores,
            "seconds": round(seconds, 2),
            "aside": {name: round(part, 2) for name, part in self.clock.aside.items()},
            "iterations_per_second": round(self.step / max(seconds, 1e-9), 2),
            "training_iterations_per_second": round(self.step / max(training, 1e-9), 2),
            "versions": {
                "mirrorquant": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": process.machine(task.device),
            },
            "engine": {
                "engine": self.engine.name,
                "processes": self.world.size,
                "precision": str(task.dtype).removeprefix("torch."),
                "compile": task.compile,
                "channels_last": task.channels_last,
                "cuda_bytes": torch.cuda.max_memory_allocated(task.device) if on_cuda else 0,
            },
            "curve": [[line["step"], round(line["accuracy"], 3)] for line in val],
            "loss_curve": [[line["step"], round(line["loss"], 5)] for line in train],
            "val_loss_curve": [[line["step"], round(line["loss"], 5)] for line in val],
            "parameters": {
                "total": total,
                "quantized": sum(row["count"] for row in layers if row["bits"] < 32),
                "bits": sum(row["count"] * row["bits"] for row in layers) / total,
            },
            "layers": layers,
        }
