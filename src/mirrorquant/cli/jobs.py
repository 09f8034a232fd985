"""Many runs one after the other, or several at a time, each in its folder: what was interrupted is continued."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mirrorquant._text import first_line
from mirrorquant.cli import runs
from mirrorquant.errors import MirrorquantError
from mirrorquant.report import RunRecord
from mirrorquant.report.tables import duration
from mirrorquant.train import Config, Interrupted, RunError, RunFolder, build, process

__all__ = ["Job", "add_option", "stop_with_parent", "train"]

Train = Callable[["Job", argparse.Namespace], RunRecord]
_AGAIN = "stopped: start again to continue"
_CHILD = "import sys; from mirrorquant.cli import jobs, main; jobs.stop_with_parent(); sys.exit(main())"


class _Stopped(Exception):
    """A process ended by the signal that was passed on to it; its run can be continued."""


@dataclass(eq=False)
class Job:
    """A run: its recipe, its overrides as ``key=value``, its folder, and the jobs whose networks it needs."""

    title: str
    recipe: str
    words: Sequence[str]
    folder: Path
    needs: list[Job] = field(default_factory=list)

    @functools.cached_property
    def config(self) -> Config:
        """The configuration."""
        return Config.from_recipe(self.recipe, self.words)


def add_option(sub: argparse.ArgumentParser) -> None:
    """Adds ``--jobs``."""
    text = "runs at a time, each in its own process; on one GPU, start nvidia-cuda-mps-control -d before"
    sub.add_argument("--jobs", type=functools.partial(runs.count, most=64), default=1, metavar="N", help=text)


def train(
    jobs: Sequence[Job], done: dict[Job, RunRecord], options: argparse.Namespace, shown: str = "test"
) -> list[str]:
    """Trains the jobs that are not ``done`` yet, and adds their records to it; returns how the others failed.

    The accuracy called ``shown``, of the test or the validation images, is printed when a run ends.
    """
    failed: dict[Job, str] = {}
    missing = [job for job in jobs if job not in done]

    def attempt(job: Job, train: Train) -> None:
        left = [each for each in missing if each not in done and each not in failed]
        expected = _expected(dict(done), left, options.jobs)  # others add to it meanwhile
        print(f"[{jobs.index(job) + 1}/{len(jobs)}] {job.title}; {expected}\n", end="", flush=True)
        try:
            for source in job.needs:
                if source in failed:
                    raise RunError(f"it needs the network of {source.title}, which failed")
                runs.refuse_another(source.config, source.folder)
            done[job] = train(job, options)
        except (Interrupted, _Stopped):
            raise
        except (MirrorquantError, RuntimeError, MemoryError) as error:  # such as a GPU without memory left
            if not isinstance(error, MirrorquantError):
                traceback.print_exc()
            failed[job] = f"{job.title}: {error if isinstance(error, MirrorquantError) else first_line(error)}"
            print(f"failed: {failed[job]}\n", end="", flush=True)  # in one piece: others print, too
        else:
            accuracy, seconds = done[job].number(f"{shown}_accuracy"), done[job].number("seconds")
            print(f"ended: {job.title}: {shown} {accuracy:.2f} %, {duration(seconds)}\n", end="", flush=True)

    if options.jobs == 1:
        try:
            for job in missing:
                attempt(job, _in_this_process)
        except Interrupted as error:
            print(_AGAIN, file=sys.stderr)
            raise SystemExit(128 + error.number) from error
    else:
        for first in (True, False):  # float networks, from which others may start or learn
            batch = [job for job in missing if (job.config.method == "ref") == first]
            _in_parallel([functools.partial(attempt, job) for job in batch], options.jobs)
    return list(failed.values())


def _in_this_process(job: Job, options: argparse.Namespace) -> RunRecord:
    options.resume = True
    return runs.trained(runs.begun(job.config, job.folder, options), options)


def _in_parallel(attempts: Sequence[Callable[[Train], None]], jobs: int) -> None:
    """Several at a time, each in its own process; a signal is passed on to all of them, which write checkpoints."""
    started: list[subprocess.Popen[str]] = []
    signalled: list[subprocess.Popen[str]] = []

    def pass_on(number: int) -> None:
        for future in waiting:
            future.cancel()
        for child in [each for each in started if each not in signalled]:
            child.send_signal(number)
            signalled.append(child)

    with process.signals() as stop, ThreadPoolExecutor(jobs) as pool:
        train = functools.partial(_in_own_process, started, signalled)
        waiting = {pool.submit(attempt, train) for attempt in attempts}
        try:
            while waiting:
                finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    if not future.cancelled():
                        with suppress(_Stopped):
                            future.result()
                if stop:
                    pass_on(stop[0])
        except BaseException:
            pass_on(signal.SIGTERM)
            raise
        if stop:
            print(_AGAIN, file=sys.stderr)
            raise SystemExit(128 + stop[0])


def _in_own_process(
    started: list[subprocess.Popen[str]],
    signalled: Collection[subprocess.Popen[str]],
    job: Job,
    options: argparse.Namespace,
) -> RunRecord:
    words = [job.recipe, *job.words, "--out", str(job.folder)]
    if RunFolder(job.folder).begun:
        runs.refuse_another(job.config, job.folder)
        words = ["--resume", str(job.folder), *job.config.movable]
    if options.results:
        words += ["--results", str(options.results)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    begin = functools.partial(subprocess.Popen[str], text=True, start_new_session=True)  # Ctrl-C is for the parent
    with begin([sys.executable, "-c", _CHILD, "train", *words, "--quiet"], **streams) as child:
        started.append(child)
        assert child.stderr is not None
        said = child.stderr.read().strip()
        child.wait()  # closing its input would stop it
    if child.returncode and child in signalled:
        raise _Stopped
    warnings, _, last = said.rpartition("\n") if child.returncode else (said, "", "")
    if warnings:
        print(f"{job.title}: {warnings}\n", end="", file=sys.stderr, flush=True)
    if child.returncode:
        raise RunError(last.removeprefix("mirrorquant: ") or f"the process ended with exit code {child.returncode}")
    return RunRecord.read(job.folder)


def stop_with_parent() -> None:
    """In the process of a job: SIGTERM when the input ends, as it does when the parent is gone, even if it was killed.

    The run then writes a checkpoint, as after any signal.
    """

    def watch() -> None:
        while os.read(0, 1024):
            pass
        signal.raise_signal(signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _expected(done: dict[Job, RunRecord], left: Collection[Job], jobs: int) -> str:
    """How long the rest takes if it takes as long as what is done: on the same data and network where possible.

    Runs on another kind of machine do not count.
    """
    seconds = {}
    for job, record in done.items():
        if record.summary.get("versions", {}).get("device") == process.machine(build.device(job.config)):
            seconds[job] = float(record.summary.get("seconds") or 0)
    if not any(seconds.values()):
        return f"{len(left)} to go"
    total = 0.0
    for job in left:
        task = job.recipe.split("/")[:2]
        alike = [value for other, value in seconds.items() if other.recipe.split("/")[:2] == task]
        total += statistics.fmean(alike or seconds.values()) / jobs
    finish = time.strftime("%a %H:%M", time.localtime(time.time() + total))
    return f"{len(left)} to go, about {duration(total)}, until {finish}"
