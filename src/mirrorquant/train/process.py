"""The process of a run: torch's settings, signals, time, and the supply of images."""

from __future__ import annotations

import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

import torch

from mirrorquant._text import printable
from mirrorquant.data import Loader, StreamedLoader
from mirrorquant.train.config import Config

__all__ = ["Clock", "Pace", "Supply", "machine", "say_apart", "settings", "signals"]

SYNC_SECONDS = 5.0  # seconds between two steps at which processes agree on whether to stop
STARVED, RECORDS_IN_A_ROW = 0.15, 3  # a message comes after this many records of waiting more than that share


def machine(device: torch.device) -> str:
    """What computes there: the name of the GPU, or the kind of processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


@contextmanager
def settings(config: Config, device: torch.device) -> Iterator[None]:
    """Sets threads, deterministic algorithms and cuDNN's choice of kernels, and restores them afterwards."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(deterministic or config.deterministic)
        torch.backends.cudnn.benchmark = device.type == "cuda" and not config.deterministic
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # of earlier runs in this process
        yield


@contextmanager
def signals() -> Iterator[list[int]]:
    """Yields a list that receives the number of a SIGINT or SIGTERM; a second signal interrupts at once."""
    stop: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(number)

    with ExitStack() as stack:
        with suppress(ValueError):  # not in the main thread, which then handles signals itself
            for number in (signal.SIGINT, signal.SIGTERM):
                stack.callback(signal.signal, number, signal.signal(number, handler))
        yield stop


class Clock:
    """Seconds since the start of a run, over all resumes, and the part of them that was not spent on training."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.began, self.earlier = device, time.monotonic(), 0.0
        self.aside = {"startup": 0.0, "validation": 0.0, "checkpoints": 0.0}

    @property
    def seconds(self) -> float:
        """All seconds so far, with those of the processes before."""
        return self.earlier + time.monotonic() - self.began

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """Counts the seconds of a block apart, after waiting for the training that is still under way on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        began = time.monotonic()
        yield
        self.aside[what] += time.monotonic() - began


class Pace:
    """How many steps to take before the processes of a run synchronize again."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.time = step, time.monotonic()

    def steps(self, step: int) -> int:
        """The steps that fill the time between two meetings, at the pace since the last call; at least 1."""
        now = time.monotonic()
        rate = (step - self.step) / max(now - self.time, 1e-3)
        self.step, self.time = step, now
        return max(1, min(1000, int(SYNC_SECONDS * rate)))


def say_apart(message: str) -> None:
    """Prints a message of a process that shows no progress."""
    print(printable(message), file=sys.stderr, flush=True)


class Supply:
    """Watches streamed images: names corrupt files, and says when training waits for workers."""

    def __init__(self, loader: Loader | StreamedLoader, warn: Callable[[str], None], *, cached: bool) -> None:
        self.loader, self.warn, self.cached = loader, warn, cached
        self.waited = self.seconds = 0.0
        self.named, self.row = set[str](), 0

    def name_problems(self) -> None:
        """Names the files that were skipped in training or evaluation and have not been named yet."""
        if isinstance(self.loader, StreamedLoader):
            data = self.loader.data
            evaluated = [problem for split in (data.val, data.test) for problem in getattr(split, "problems", ())]
            for problem in dict.fromkeys([*self.loader.problems, *evaluated]):
                if problem not in self.named:
                    self.named.add(problem)
                    self.warn(f"skipped: {problem}")

    def record(self, seconds: float) -> dict[str, float]:
        """For the metrics, the share of the time since the last record in which training waited for images."""
        if not isinstance(self.loader, StreamedLoader):
            return {}
        self.name_problems()
        share = (self.loader.waited - self.waited) / max(seconds - self.seconds, 1e-9)
        if self.row < RECORDS_IN_A_ROW:
            self.row = self.row + 1 if share > STARVED and self.seconds else 0
            if self.row == RECORDS_IN_A_ROW:
                remedy = "" if self.cached else ", or set cache=FOLDER, so that images are decoded only once"
                self.warn(f"training waits for images {share:.0%} of the time: raise workers{remedy}")
        self.waited, self.seconds = self.loader.waited, seconds
        return {"waiting": round(share, 4)}
