"""Progress on the terminal."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from mirrorquant._text import printable

__all__ = ["Progress"]


_LONGEST = 1e9  # seconds to wait that are shown


class Progress:
    """A live bar on a terminal where rich is installed, or else a plain line every few seconds."""

    def __init__(self, title: str, total: int, *, quiet: bool = False, every: float = 10.0) -> None:
        self.title, self.total, self.quiet, self.every = title, total, quiet, every
        self.bar: Any = None
        self.begin(0)

    def begin(self, done: int) -> None:
        """Counts from here: the rate leaves out the iterations of earlier runs."""
        self.last = time.monotonic()
        self.recent = deque([(self.last, done)])

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty() and find_spec("rich"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bars

            columns = (TextColumn("{task.description:<24}", markup=False), BarColumn(), MofNCompleteColumn())
            tail = (TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[text]}"))
            self.bar = Bars(*columns, *tail, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total, text="", rate="")
        return self

    def update(self, done: int, text: str) -> None:
        """Shows how many iterations are done, the rate of the last ``every`` seconds, the time left, and a text."""
        now = time.monotonic()
        while len(self.recent) > 1 and now - self.recent[1][0] >= self.every:
            self.recent.popleft()
        then, before = self.recent[0]
        self.recent.append((now, done))
        speed = (done - before) / max(now - then, 1e-9)  # start-up counts only for a while
        left = (self.total - done) / speed if speed else math.inf
        rate = f"{speed:{'.0f' if speed >= 100 else '.3g'}} it/s"
        rate += f"  {timedelta(seconds=math.ceil(left))} left" if left < _LONGEST else ""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, text=text, rate=rate)
        elif not self.quiet and (now - self.last > self.every or done == self.total):
            self.last = now
            print(f"{self.title}  {done}/{self.total}  {rate}  {text}", file=sys.stderr, flush=True)

    def say(self, message: str, *, anyway: bool = False) -> None:
        """Shows a message beside the bar; when quiet, only if ``anyway`` is set."""
        message = printable(message)  # it may quote a stranger's file
        if self.bar is not None:
            self.bar.console.print(message, highlight=False, markup=False)
        elif anyway or not self.quiet:
            print(message, file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()
