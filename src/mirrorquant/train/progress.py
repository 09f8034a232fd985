"""Progress on the terminal: a live bar with rich, where it is installed, or a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Any

from mirrorquant._text import printable

__all__ = ["Progress"]


class Progress:
    """A live progress bar (rich, on a terminal), or a plain line every few seconds."""

    def __init__(self, title: str, total: int, done: int = 0, *, quiet: bool = False, every: float = 10.0) -> None:
        self.title, self.total, self.done, self.quiet, self.every = title, total, done, quiet, every
        self.last = time.monotonic()
        self.recent = deque([(self.last, done)])
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as Bars

                columns = (TextColumn("{task.description:<24}", markup=False), BarColumn(), MofNCompleteColumn())
                tail = (TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
                self.bar = Bars(*columns, *tail, console=Console(stderr=True))
                self.bar.start()
                self.task = self.bar.add_task(self.title, total=self.total, completed=self.done, text="", rate="")
            except ImportError:
                self.bar = None
        return self

    def begin(self, done: int) -> None:
        """Counts from here: the rate leaves out what was done before."""
        self.recent = deque([(time.monotonic(), done)])

    def update(self, done: int, text: str) -> None:
        """The number of iterations done, and what to say beside it and the rate of the last ``every`` seconds."""
        self.done, now = done, time.monotonic()
        while len(self.recent) > 1 and now - self.recent[1][0] >= self.every:
            self.recent.popleft()
        then, before = self.recent[0]
        self.recent.append((now, done))
        rate = f"{(done - before) / max(now - then, 1e-9):.1f} it/s"  # of late: start-up does not weigh on it for long
        if self.bar is not None:
            self.bar.update(self.task, completed=done, text=text, rate=rate)
        elif not self.quiet and (now - self.last > self.every or done == self.total):
            self.last = now
            print(f"{self.title}  {done}/{self.total}  {rate}  {text}", file=sys.stderr, flush=True)

    def say(self, message: str) -> None:
        """A message beside the bar."""
        message = printable(message)  # it may quote a stranger's file
        if self.bar is not None:
            self.bar.console.print(message, highlight=False, markup=False)
        elif not self.quiet:
            print(message, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
