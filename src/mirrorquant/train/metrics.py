"""The metrics of a run: JSON lines, and TensorBoard events where tensorboard is installed."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mirrorquant import _files
from mirrorquant.errors import MirrorquantError

__all__ = ["Metrics", "MetricsError", "read_metrics"]


_NUMBERS = {"train": ("step", "loss"), "val": ("step", "accuracy"), "weights": ("step",)}  # the curves of a summary


class MetricsError(MirrorquantError, ValueError):
    """A metrics file that cannot be read or written, or a broken line in it; the message names the place."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; none if there is no file.

    Text after the last line break is still being written, or was cut off: it is ignored.
    """
    *lines, _ = _read(path).split(b"\n")
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _read(path: Path) -> bytes:
    try:
        return _files.read_regular(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise MetricsError(f"{path} cannot be read ({error.strerror})") from error


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = _files.parse_json(line)
    except (ValueError, RecursionError) as error:
        raise MetricsError(f"{place}: not JSON ({error}); fix or remove the line") from error
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        raise MetricsError(f'{place}: expected a JSON object with a "kind", found {line[:60]!r}')
    for name in _NUMBERS.get(row["kind"], row.keys() & {"step"}):  # lines of other kinds may hold anything else
        value, whole = row.get(name), name == "step"
        if (whole or type(value) is not float) and (type(value) is not int or not 0 <= value <= 1e15):
            expected = f"a {'whole ' * whole}number"
            raise MetricsError(f"{place}: {name} is {str(value)[:60]}, expected {expected}; fix or remove the line")
    return row


class Metrics:
    """Appends to ``metrics.jsonl``, and to TensorBoard events where tensorboard is installed."""

    def __init__(self, folder: Path, steps_done: int, seal: Mapping[str, Any] | None = None) -> None:
        """Continues after ``steps_done`` steps, with the result of :meth:`seal` from then."""
        self.path = folder / "metrics.jsonl"
        self.events: _Events | None = None
        content = self._kept(steps_done, seal) if steps_done and self.path.exists() else b""
        self.bytes, self.digest = len(content), hashlib.sha256(content)
        _files.write_atomically(self.path, content, MetricsError)
        try:
            self.file = self.path.open("ab")
            with suppress(ImportError):
                self.events = _Events(folder, steps_done + 1)
        except OSError as error:
            raise MetricsError(f"the metrics in {folder} cannot be written ({error.strerror})") from error

    def _kept(self, steps_done: int, seal: Mapping[str, Any] | None) -> bytes:
        """The lines up to a checkpoint; later ones are recorded again."""
        if seal is None:  # the version that wrote them had no seals
            rows = [row for row in read_metrics(self.path) if row.get("step", 0) <= steps_done]
            return "".join(json.dumps(row) + "\n" for row in rows).encode()
        content = _read(self.path)[: seal["bytes"]]
        if hashlib.sha256(content).hexdigest() != seal["sha256"]:
            raise MetricsError(
                f"{self.path} differs from what iteration {steps_done} had recorded: restore it, or delete it to "
                "continue without the curves so far"
            )
        return content

    def seal(self) -> dict[str, Any]:
        """Synchronizes the lines so far to the disk, and returns their size and checksum, for a checkpoint."""
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            raise MetricsError(f"{self.path} could not be written ({error.strerror})") from error
        return {"bytes": self.bytes, "sha256": self.digest.hexdigest()}

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Writes one line; numbers go to TensorBoard as ``kind/name``."""
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, (int, float))}
        line = (json.dumps({"kind": kind, "step": step, **values}) + "\n").encode()
        self.bytes += len(line)
        self.digest.update(line)
        try:
            self.file.write(line)
            self.file.flush()
            if self.events is not None and numbers:
                self.events.write(step, numbers)
        except OSError as error:
            raise MetricsError(f"{self.path} could not be written ({error.strerror}): free some space") from error

    def close(self) -> None:
        """Closes both files."""
        for file in [self.file, *([self.events.file] if self.events is not None else [])]:
            with suppress(OSError):  # of a line that could not be written, which was reported then
                file.close()


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
