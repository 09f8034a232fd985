"""What a run tells: metrics as JSON lines and TensorBoard events, progress on the terminal.

rich and tensorboard are used where they are installed; the loop needs neither.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

from mirrorquant import _files

__all__ = ["Metrics", "MetricsError", "Progress", "first_line", "read_metrics"]


class MetricsError(ValueError):
    """A metrics file that cannot be written, or a broken line of it; the message says which."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file. What follows its last line break is still being written, or was cut off: ignored."""
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise MetricsError(f"{place}: not JSON ({error}); mend or remove the line") from error
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        raise MetricsError(f'{place}: expected a JSON object with a "kind", found {line[:60]!r}')
    return row


class Metrics:
    """Appends to ``metrics.jsonl``, and to TensorBoard events where tensorboard is installed."""

    def __init__(self, folder: Path, steps_done: int) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(self.path) if row.get("step", 0) <= steps_done] if steps_done else []
        content = "".join(json.dumps(row) + "\n" for row in kept).encode()
        _files.write_atomically(self.path, content, MetricsError)
        self.file = self.path.open("a", encoding="utf-8")
        self.events: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(folder), purge_step=steps_done + 1)  # hides this step and all after
        except ImportError:
            pass

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line; numbers go to TensorBoard as ``kind/name``."""
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self.file.flush()
        if self.events is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Closes both."""
        self.file.close()
        if self.events is not None:
            self.events.close()


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
        if self.bar is not None:
            self.bar.console.print(message, highlight=False, markup=False)
        elif not self.quiet:
            print(message, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
