"""What a run does to its process: torch's settings, signals, and the time that it takes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from mirrorquant.train.config import Config

__all__ = ["Clock", "settings", "signals"]


@contextmanager
def settings(config: Config, device: torch.device) -> Iterator[None]:
    """Sets threads, deterministic algorithms and cuDNN's choice of kernels, and restores them afterwards."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(deterministic or config.deterministic)
        torch.backends.cudnn.benchmark = device.type == "cuda" and not config.deterministic
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # that of earlier runs of this process
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def signals() -> Iterator[list[int]]:
    """Yields a list that gets the number of a SIGINT or SIGTERM, to stop by; a second one interrupts at once."""
    stop: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(number)

    try:
        old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever runs the thread handles signals
        old = {}
    try:
        yield stop
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


class Clock:
    """Seconds of a run since its start, over all resumes, and those of them that did not go into training."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.began = device, time.monotonic()
        self.aside = {"startup": 0.0, "validation": 0.0, "checkpoints": 0.0}

    @property
    def seconds(self) -> float:
        """All seconds so far; set it to go on after so many."""
        return time.monotonic() - self.began

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self.began = time.monotonic() - seconds

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """Counts the seconds of a block apart; training's work that is still under way on the device is left out."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        began = time.monotonic()
        yield
        self.aside[what] += time.monotonic() - began
