"""The training loop: one for all methods, on CPU and CUDA.

One iteration: a training step; every ``eval_every`` iterations the *rounded* network is validated on clean images, and
the best one kept; β and the learning rate follow their schedules. At the end the best rounded network is tested: that
is the number of the paper's tables.
"""

from __future__ import annotations

import copy
import json
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirrorquant._version import __version__
from mirrorquant.calibration import recalibrate
from mirrorquant.data import Data, DataError, Images, Loader, clean_batches
from mirrorquant.data import load as load_data
from mirrorquant.data.loader import Normalise
from mirrorquant.health import health, unwarned
from mirrorquant.methods import REF
from mirrorquant.models.registry import ModelError
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.train import checkpoint, compiling
from mirrorquant.train.checkpoint import CheckpointError
from mirrorquant.train.config import Config, ConfigError
from mirrorquant.train.report import Metrics, MetricsError, Progress, first_line, read_metrics

if TYPE_CHECKING:  # imported where they are used: they bring the compiler along, which takes seconds
    from mirrorquant.train.fast import FastStep
    from mirrorquant.train.fast_score import FastScore

__all__ = ["Interrupted", "Run", "RunError", "accuracy"]

EVAL_BATCH = 500
BINS = 61
CHECKPOINT_SECONDS = 60


class RunError(RuntimeError):
    """Training cannot start or go on; the message says why and what to do."""


class Interrupted(RunError):
    """A signal ended the run, after its checkpoint was written."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Run:
    """A training run in a folder.

    The folder holds ``config.json``, ``metrics.jsonl``, TensorBoard events, ``checkpoint.mq`` with its spare,
    ``best.mq`` (the best rounded network) and ``summary.json``.
    """

    def __init__(self, config: Config, folder: Path, *, resume: bool = False, quiet: bool = False) -> None:
        self.config, self.folder, self.quiet = config, folder, quiet
        self.device = config.torch_device
        self.progress: Progress | None = None
        self.metrics: Metrics | None = None
        if config.threads:
            torch.set_num_threads(config.threads)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.lock = _Lock(folder)
        path = folder / "config.json"
        try:
            for unfinished in folder.glob("*.writing"):  # by a run that was killed
                with suppress(OSError):
                    unfinished.unlink()
            if not resume and path.exists():
                raise RunError(f"{folder} holds a run already: continue it with --resume, or choose another --out")
            self._build(download=not resume)  # whoever resumes a stranger's run has not asked for the download
            if not resume:
                checkpoint.write_atomically(path, config.text().encode())
        except BaseException:
            self.lock.release()
            raise

    @classmethod
    def resume(cls, folder: Path, *, quiet: bool = False) -> Run:
        """A run as its folder describes it, to be continued with ``train``."""
        return cls(Config.load(folder / "config.json"), folder, resume=True, quiet=quiet)

    def train(self) -> dict[str, Any]:
        """Trains to the end and returns the summary; continues where a checkpoint stands."""
        name = self.config.recipe or f"{self.config.data} {self.config.method}"
        try:
            self._load_checkpoint()
            self.metrics = Metrics(self.folder, self.step, self.seal)
            with Progress(name, self.config.iterations, self.step, quiet=self.quiet) as progress, _signals() as stop:
                for message in self.messages:
                    progress.say(message)
                self.progress = progress
                self._iterate(progress, stop)
            return self._finish()
        finally:
            if self.metrics is not None:
                self.metrics.close()
            self.lock.release()

    # Setting up.

    def _build(self, *, download: bool) -> None:
        config = self.config
        self.data: Data = load_data(config.data, config.data_root, download=download).to(self.device)
        channels = self.data.shape[0]
        self.loader = self._loader(self.data.train, config.augment or self.data.augment)
        self.model = config.build_model(len(self.data.classes), channels).to(self.device)
        torch.backends.cudnn.benchmark = self.device.type == "cuda" and not config.deterministic
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # that of earlier runs of this process
        self.channels_last = config.wants("channels_last")
        if self.channels_last and config.channels_last is None and self.device.type == "cpu":
            self.channels_last = not any(_breaks_channels_last(module) for module in self.model.modules())
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.opt: MirrorDescent = config.build_optimizer(self.model, self.loader.batches_per_epoch)
        self.network: Callable[[Tensor], Tensor] = self.model
        if config.wants("compile"):
            self.network = compiling.compiled(self.model)
        self.engine = "graph" if config.fast else "eager"
        self.fast: FastStep | None = None
        self.score: FastScore | None = None
        self.scores = True
        self.step, self.seconds, self.best_step, self.best_accuracy = 0, 0.0, -1, -1.0
        self.aside = {"startup": 0.0, "validation": 0.0, "checkpoints": 0.0}  # seconds that did not go into training
        self.best: dict[str, Tensor] = {}
        self.losses = torch.zeros((), device=self.device)
        self.seal: dict[str, Any] | None = None  # of the metrics, in the checkpoint that the run goes on from
        self.messages: list[str] = []

    def _loader(self, images: Images, augment: str) -> Loader:
        config = self.config
        try:
            return Loader(
                images,
                batch_size=config.batch_size,
                augment=augment,
                mean=self.data.mean,
                std=self.data.std,
                seed=config.seed,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    # Training.

    def _iterate(self, progress: Progress, stop: _Stop) -> None:
        config, saved = self.config, time.monotonic()
        finalize_step = math.ceil(Fraction(str(config.finalize_at)) * config.iterations)  # 0.07 of 100 is 7
        self.began = saved - self.seconds
        while self.step < config.iterations:
            if stop.number:
                self._save_checkpoint()
                raise Interrupted(
                    f"stopped by {signal.Signals(stop.number).name} after iteration {self.step}; continue with "
                    f"mirrorquant train --resume {shlex.quote(str(self.folder))}",
                    stop.number,
                )
            self.advance()
            if self.step == finalize_step and self.step < config.iterations:
                self._sync()
                with unwarned():
                    self.opt.finalize()
                self.fast = self.score = None  # rebuilt, for what is still trained
            logged = self.step % config.log_every == 0 or self.step == config.iterations
            if logged:
                text = self._log()
            if self.step % config.eval_every == 0 or self.step == config.iterations:
                self._validate()
            if logged:
                best = f"  best val {self.best_accuracy:.2f} %" if self.best_step >= 0 else ""
                progress.update(self.step, text + best)
            if config.histogram_every and (self.step % config.histogram_every == 0 or self.step == 1):
                self._histograms()
            every, since = config.checkpoint_every, time.monotonic() - saved
            if self.step % every == 0 if every else since > CHECKPOINT_SECONDS:
                saved = time.monotonic()
                self._save_checkpoint()

    def advance(self) -> None:
        """One iteration, by the engine of the run; its loss is added to ``losses``."""
        if self.engine == "graph":
            self._fast_step()
        else:
            self.losses += self._train_step()
        self.step += 1

    def _fast_step(self) -> None:
        """A step of the fast engine; where its first one fails, it says so and the plain one takes that step over."""
        before = copy.deepcopy((self.opt.state_dict(), self.model.state_dict())) if self.fast is None else None
        try:
            if self.fast is None:
                from mirrorquant.train.fast import FastStep

                self.model.train()
                self.fast = FastStep(
                    self.model,
                    self.opt,
                    self.loader,
                    self.config.lr_at,
                    self.losses,
                    dtype=self.config.dtype,
                    compiled=self.config.wants("compile"),
                    say=self._say,
                )
            if self.fast.ready:
                self.fast(self.step)
            else:
                with self._timed("startup"):
                    self.fast(self.step)
        except Exception as error:
            if before is None:
                raise
            self.engine, self.fast = "eager", None
            self.opt.load_state_dict(before[0])
            self.model.load_state_dict(before[1])
            self._say(f"engine=graph cannot train this ({first_line(error)}): the plain engine does, slower")
            self.losses += self._train_step()

    def _say(self, message: str) -> None:
        """Beside the progress bar, where there is one by now."""
        self.messages.append(message)
        if self.progress is not None:
            self.progress.say(message)

    def _sync(self) -> None:
        """Model and optimizer as the plain engine would have them."""
        if self.fast is not None:
            self.fast.sync()

    def _train_step(self) -> Tensor:
        for group in self.opt.param_groups:
            group["lr"] = self.config.lr_at(self.step)
        x, y = self.loader.batch(self.step)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        self.model.train()
        self.opt.zero_grad()
        loss = self._loss(x, y)
        if self.device.type == "cpu" and not bool(torch.isfinite(loss)):
            self._refuse_nan(x)
        loss.backward()  # type: ignore[no-untyped-call]
        try:
            self.opt.step()
        except ValueError as error:
            raise RunError(f"{error}. The last checkpoint in {self.folder} is intact") from error
        return loss.detach()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        try:
            with self._autocast():
                return F.cross_entropy(self.network(x), y)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            size, classes = "x".join(map(str, self.data.shape)), len(self.data.classes)
            raise RunError(
                f"model {self.config.model} cannot train on {self.config.data}, {classes} classes of {size} in batches "
                f"of {len(x)}: {first_line(error)}"
            ) from error

    def _autocast(self) -> torch.autocast | nullcontext[None]:
        if self.config.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.config.dtype)

    def _refuse_nan(self, x: Tensor) -> None:
        """Names the first layer whose output is not finite; the fast step's own weights are not in the model."""
        culprit = ["the loss itself" if self.fast is None else "the weights"]

        def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()) and len(culprit) == 1:
                    culprit.append(f"layer {name} ({type(module).__name__})")

            return hook

        leaves = [(n, m) for n, m in self.model.named_modules() if not list(m.children())]
        handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
        with torch.no_grad():
            self.model(x)
        for handle in handles:
            handle.remove()
        raise RunError(
            f"the loss is not finite at iteration {self.step}; it begins in {culprit[-1]}. Lower lr (it is "
            f"{self.config.lr_at(self.step):g}) and start again; the last checkpoint in {self.folder} is intact"
        )

    def _log(self) -> str:
        """Records the mean loss of the iterations since the last time, and returns what to say of it."""
        self._count_seconds()
        loss = float(self.losses) / ((self.step - 1) % self.config.log_every + 1)
        self.losses.zero_()
        if not math.isfinite(loss):
            self._refuse_nan(self.loader.batch(self.step - 1)[0])
        lr, beta = self.config.lr_at(self.step - 1), self._beta()
        self._record("train", loss=loss, lr=lr, beta=beta, seconds=round(self.seconds, 3))
        return f"loss {loss:.3f}  beta {beta:.3g}"

    def _beta(self) -> float:
        """β at this step, of the first quantized group; the fast step does not tell the optimizer each time."""
        groups = (group for group in self.opt.param_groups if not isinstance(group["method"], REF))
        return float(next((group["anneal"](self.step) for group in groups), 1.0))

    def _validate(self) -> None:
        first = self.fast is not None and self.scores and self.score is None
        with self._timed("startup" if first else "validation"):
            found, loss = self._rounded_score()
        self._record("val", accuracy=found, loss=loss)
        if found >= self.best_accuracy:  # of equals the later one, which is closer to its levels
            self.best_accuracy, self.best_step = found, self.step
            self._sync()
            with self.opt.quantized():
                self.best = copy.deepcopy({k: v.detach() for k, v in self.model.state_dict().items()})

    def _rounded_score(self) -> tuple[float, float]:
        """Validation accuracy and loss of the rounded network; where the fast score cannot serve, it says so."""
        if self.fast is not None and self.scores:
            try:
                if self.score is None:
                    from mirrorquant.train.fast_score import FastScore

                    normalise = Normalise(self.data.val, self.data.mean, self.data.std)
                    compiled = self.config.wants("compile")
                    self.score = FastScore(self.fast, self.data.val, normalise, EVAL_BATCH, compiled=compiled)
                return self.score()
            except Exception as error:
                self.score, self.scores = None, False
                self._say(f"validation in a graph does not work here ({first_line(error)}): it is done plainly, slower")
        self._sync()
        with self.opt.quantized():
            return self.evaluate(self.data.val)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Counts the seconds that something takes, training's own work left out."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        began = time.monotonic()
        yield
        self.aside[what] += time.monotonic() - began

    def _count_seconds(self) -> None:
        """All seconds of training so far, those aside and those before a resume too."""
        self.seconds = time.monotonic() - self.began

    def _record(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, self.step, **values)

    def evaluate(self, images: Images) -> tuple[float, float]:
        """Accuracy in percent and mean loss of the model as it stands."""
        return accuracy(self.model, images, self.data, self._autocast())

    @torch.no_grad()
    def _histograms(self) -> None:
        self._sync()
        levels = self.config.build_method().levels
        low, high = levels.centre - 1.1 * levels.radius, levels.centre + 1.1 * levels.radius
        layers = {}
        for name, p in self.model.named_parameters():
            if p.dim() > 1:
                counts = torch.histc(p.detach().float().clamp(low, high).cpu(), BINS, low, high)
                layers[name] = [int(c) for c in counts]
        self._record("weights", range=[low, high], layers=layers)

    # Checkpoints.

    def _save_checkpoint(self) -> None:
        self._count_seconds()
        with self._timed("checkpoints"):
            moved = (p for group in self.opt.base.param_groups for p in group["params"])
            if any(bool(p.isnan().any()) for p in moved):  # the fast step does not look at its gradients
                self._refuse_nan(self.loader.batch(self.step)[0])
            self._sync()
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "best_step": self.best_step,
            "best_accuracy": self.best_accuracy,
            "best": self.best,
            "losses": self.losses,
            "aside": self.aside,
            "model": self.model.state_dict(),
            "optimizer": self.opt.state_dict(),
            "rng": torch.get_rng_state(),
            "config": self.config.text(),
        }
        if self.metrics is not None:
            state["metrics"] = self.metrics.seal()
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        try:
            checkpoint.save(self.folder / "checkpoint.mq", state)
        except CheckpointError as error:
            if not self.folder.is_dir():
                raise RunError(f"{error}. It was removed or renamed while the run went on: start again") from error
            raise RunError(
                f"{error}. Free some space and continue with --resume {shlex.quote(str(self.folder))}"
            ) from error

    def _load_checkpoint(self) -> None:
        state = checkpoint.load_newest(self.folder / "checkpoint.mq", self.messages.append, self._restore)
        if state is None:
            if (self.folder / "metrics.jsonl").exists():
                self.messages.append(f"there is no checkpoint in {self.folder}: starting over")
            return
        if not self._is_of_this_run(state):
            raise RunError(f"{self.folder / 'checkpoint.mq'} belongs to another configuration than config.json")
        self.step, self.seconds = state["step"], state["seconds"]
        self.best_step, self.best_accuracy = state["best_step"], state["best_accuracy"]
        self.best = {k: v.to(self.device) for k, v in state["best"].items()}
        self.losses.copy_(state["losses"])
        self.aside |= state.get("aside", {})
        self.seal = state.get("metrics")
        self.messages.append(f"continuing after iteration {self.step}")
        if self.step and not (self.folder / "metrics.jsonl").exists():
            self.messages.append(f"{self.folder / 'metrics.jsonl'} is missing: the curves begin here")

    def _restore(self, state: dict[str, Any]) -> None:
        """Loads what can fail, and raises where it does, so that the spare is tried; another run's is left alone."""
        if self._is_of_this_run(state):
            checkpoint.check_state(state, self.model, self.opt, self.config.iterations)
            self.opt.load_state_dict(state["optimizer"])
            self.model.load_state_dict(state["model"])
            torch.set_rng_state(state["rng"])
            if "cuda_rng" in state and self.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda_rng"], self.device)

    def _is_of_this_run(self, state: dict[str, Any]) -> bool:
        text = state.get("config")
        return isinstance(text, str) and Config.parse(text, self.folder / "checkpoint.mq") == self.config

    # The end.

    def _finish(self) -> dict[str, Any]:
        self._save_checkpoint()
        self._count_seconds()
        soft, _ = self.evaluate(self.data.test)
        problems = health(self.opt).gaps
        with self.opt.quantized():
            last, _ = self.evaluate(self.data.test)
        self.model.load_state_dict(self.best)
        off = [row["name"] for row in layers(self.opt) if row["off_levels"]]
        if off:
            raise RunError(f"the best network has weights off their levels in {', '.join(off)}: please report this")
        for problem in [*health(self.opt).collapses, *problems]:
            print(f"warning: {problem}", file=sys.stderr, flush=True)  # it is not progress, which quiet leaves out
        if self.config.recalibrate:
            batches = (self.loader.batch(k)[0] for k in range(self.config.recalibrate))
            recalibrate(self.model, batches)
        test, _ = self.evaluate(self.data.test)
        images = {"classes": len(self.data.classes), "shape": list(self.data.shape)}
        best = {"model": self.model.state_dict(), "config": self.config.text(), "images": images}
        checkpoint.save(self.folder / "best.mq", best)
        summary = self._summary(test, soft, last)
        checkpoint.write_atomically(self.folder / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
        return summary

    def _summary(self, test: float, soft: float, last: float) -> dict[str, Any]:
        rows = read_metrics(self.folder / "metrics.jsonl")
        training = self.seconds - sum(self.aside.values())
        return {
            "recipe": self.config.recipe or None,
            "config": self.config.as_dict(),
            "overrides": self.config.overrides,
            "paper": self.config.paper or None,
            "best_step": self.best_step,
            "val_accuracy": self.best_accuracy,
            "test_accuracy": test,
            "test_accuracy_soft": soft,
            "test_accuracy_last": last,
            "seconds": round(self.seconds, 2),
            "aside": {what: round(seconds, 2) for what, seconds in self.aside.items()},
            "iterations_per_second": round(self.step / max(self.seconds, 1e-9), 2),
            "training_iterations_per_second": round(self.step / max(training, 1e-9), 2),
            "versions": versions(self.device),
            "engine": self._engine(),
            "curve": [[r["step"], round(r["accuracy"], 3)] for r in rows if r["kind"] == "val"],
            "loss_curve": [[r["step"], round(r["loss"], 5)] for r in rows if r["kind"] == "train"],
            "parameters": count_parameters(layers(self.opt)),
            "layers": layers(self.opt),
        }

    def _engine(self) -> dict[str, Any]:
        """What was chosen for speed, and the memory that it took."""
        chosen: dict[str, Any] = {"engine": self.engine, "precision": str(self.config.dtype).removeprefix("torch.")}
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        chosen |= {"compile": self.config.wants("compile"), "channels_last": self.channels_last}
        return {**chosen, "cuda_bytes": peak}


def _breaks_channels_last(module: nn.Module) -> bool:
    """Whether torch 2.13 computes the gradient of its weight wrongly in channels_last on a CPU (2 to 7 channels)."""
    if not isinstance(module, nn.Conv2d) or max(module.kernel_size) > 1:
        return False
    return max(module.stride) > 1 and 1 < module.in_channels // module.groups < 8


def accuracy(
    model: nn.Module, images: Images, data: Data, context: torch.autocast | nullcontext[None] | None = None
) -> tuple[float, float]:
    """Accuracy in percent and mean cross-entropy of a model on clean images; the model's mode is left as it was."""
    mode = model.training
    model.eval()
    right, loss = torch.zeros((), device=images.labels.device), torch.zeros((), device=images.labels.device)
    with torch.no_grad(), context or nullcontext():
        for x, y in clean_batches(images, EVAL_BATCH, data.mean, data.std):
            logits = model(x).float()
            right += (logits.argmax(1) == y).sum()
            loss += F.cross_entropy(logits, y, reduction="sum")
    model.train(mode)
    return 100 * float(right) / len(images), float(loss) / len(images)


def layers(opt: MirrorDescent) -> list[dict[str, Any]]:
    """Name, shape, count and bits of each parameter, and whether a quantized one is off its levels now."""
    rows = []
    for group in opt.param_groups:
        floating, levels = isinstance(group["method"], REF), group["method"].levels
        bits = 32 if floating else (len(levels) - 1).bit_length()
        for name, p in zip(group["param_names"], group["params"], strict=True):
            off = not floating and not levels.holds(p.detach())
            rows.append({"name": name, "shape": list(p.shape), "count": p.numel(), "bits": bits, "off_levels": off})
    return rows


def count_parameters(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many parameters there are, how many are quantized, and the mean number of bits a parameter."""
    total = sum(row["count"] for row in rows)
    bits = sum(row["count"] * row["bits"] for row in rows) / total
    return {"total": total, "quantized": sum(row["count"] for row in rows if row["bits"] < 32), "bits": bits}


def versions(device: torch.device) -> dict[str, str]:
    """What the figures of a run were made with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"mirrorquant": __version__, "torch": torch.__version__, "python": platform.python_version(), "device": name}


class _Stop:
    """The number of the signal that asked the run to stop; 0 while none did."""

    number = 0


@contextmanager
def _signals() -> Iterator[_Stop]:
    """Turns SIGINT and SIGTERM into a wish to stop after the iteration; a second SIGINT interrupts at once."""
    stop = _Stop()

    def handler(number: int, frame: FrameType | None) -> None:
        if stop.number:
            raise KeyboardInterrupt
        stop.number = number

    try:
        old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever runs the thread handles signals
        old = {}
    try:
        yield stop
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


class _Lock:
    """Holds a run's folder: a second process is refused; a killed one lets go."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(folder / ".lock", "wb", opener=_open_lock)  # noqa: SIM115
        except OSError as error:
            raise RunError(f"{folder} cannot be used as a run folder ({error.strerror})") from error
        try:
            import fcntl

            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no such locks on this system
            pass
        except OSError:
            self.file.close()
            raise RunError(f"{folder} is in use by another run: wait for it, or choose another --out") from None

    def release(self) -> None:
        """Lets go."""
        self.file.close()


def _open_lock(path: str, flags: int) -> int:
    """Follows no link, and does not wait for the reader of a FIFO: a stranger's folder may hold either."""
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, flags | careful, 0o666)


USER_ERRORS = (RunError, ConfigError, DataError, ModelError, CheckpointError, MetricsError)
