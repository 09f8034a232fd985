"""The metrics of a run: JSON lines, and TensorBoard events where tensorboard is installed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mirrorquant import _files
from mirrorquant.errors import MirrorquantError

__all__ = ["Metrics", "MetricsError", "NoMetrics", "read_metrics"]

_NEEDED = {"train": ["loss"], "val": ["accuracy"]}  # the curves of a summary


class MetricsError(MirrorquantError, ValueError):
    """A metrics file that cannot be read or written, or a broken line in it; the message names the place."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; none if there is no file.

    Text after the last line break is still being written, or was cut off: it is ignored.
    """
    try:
        *lines, _ = _files.read_regular(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise MetricsError(f"{path} cannot be read ({error.strerror})") from error
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = dict(json.loads(line))
        for name in ["step", *_NEEDED.get(row["kind"], [])]:
            value, types = row[name], (int,) if name == "step" else (int, float)
            if type(value) not in types or value < 0 or value > 1e15:
                raise ValueError(f"{name} is {str(value)[:60]}")
        math.fsum([row.get("beta") or 0])  # raises unless it is a number
        if row["kind"] == "weights":
            low, high = row["range"]
            bins = {len(counts) for counts in row["layers"].values() if math.fsum(counts) >= 0}
            if not low < high + 0.0 or len(bins - {0}) != 1:
                raise ValueError("the range or the bins of its histograms are empty")
        return row
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise MetricsError(f"{place}: not a line of metrics ({problem}); fix or remove it") from error


class Metrics:
    """Appends to ``metrics.jsonl``, and to TensorBoard events where tensorboard is installed."""

    def __init__(self, folder: Path, steps_done: int, digest: str = "") -> None:
        """Keeps the lines of the steps that are done, which must have this digest; later ones are recorded again."""
        self.path = folder / "metrics.jsonl"
        self.events: _Events | None = None
        rows = [row for row in read_metrics(self.path) if row["step"] <= steps_done] if steps_done else []
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        self.digest = hashlib.sha256(content)
        if digest and self.path.exists() and self.digest.hexdigest() != digest:
            raise MetricsError(f"{self.path} was changed since the checkpoint: restore it, or remove it to continue")
        _files.write_atomically(self.path, content, MetricsError)
        with self._reporting():
            self.file = self.path.open("ab")
            with suppress(ImportError):
                self.events = _Events(folder, steps_done + 1)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MetricsError(f"{self.path} could not be written ({error.strerror}): free some space") from error

    def sync(self) -> None:
        """Synchronizes the lines so far to the disk, before a checkpoint that counts on them."""
        with self._reporting():
            os.fsync(self.file.fileno())

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Writes one line; numbers go to TensorBoard as ``kind/name``."""
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, (int, float))}
        line = (json.dumps({"kind": kind, "step": step, **values}) + "\n").encode()
        self.digest.update(line)
        with self._reporting():
            self.file.write(line)
            self.file.flush()
            if self.events and numbers:
                self.events.write(step, numbers)

    def close(self) -> None:
        """Closes both files."""
        for file in [self.file, *([self.events.file] if self.events else [])]:
            with suppress(OSError):  # of a line that could not be written, which was reported then
                file.close()


class NoMetrics:
    """In place of :class:`Metrics` in a process that writes no files."""

    digest = hashlib.sha256()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Events:
    """TensorBoard events, written by the calling thread: tensorboard's writer reports failures from another."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"  # sorts by time
        self.file, self.event, self.summary = (folder / name).open("xb"), Event, Summary
        self.records = RecordWriter(self.file)
        self.add(file_version="brain.Event:2")
        self.add(step=first_step, session_log=SessionLog(status=SessionLog.START))  # hides later steps of older files

    def add(self, **content: Any) -> None:
        """One event."""
        self.records.write(self.event(wall_time=time.time(), **content).SerializeToString())
        self.file.flush()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """The values of one step by name."""
        values = [self.summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self.add(step=step, summary=self.summary(value=values))
