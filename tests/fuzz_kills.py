"""Kills trainings and comparisons at random moments and resumes them: `python tests/fuzz_kills.py 300`.

Each process is forked from one that has imported everything, and ends by SIGKILL: from outside after a random time, or
from inside just before or just after one of its file operations, a resumed process among them. Whatever was hit, the
run that goes on must end bit-identical to one that was never stopped.
"""

import contextlib
import io
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from mirrorquant import methods
from mirrorquant.cli import main

TINY = ["iterations=8", "batch_size=16", "eval_every=2", "log_every=3", "checkpoint_every=2", "width=4"]
TINY += ["histogram_every=4"]
OPERATIONS = ("replace", "fsync", "unlink")  # of the module os: those that change or settle what a folder holds
NAMES = (*methods.names(), "compare")
COMPARED = "ref,bc,md-tanh-s"


def command_line(name, folder, resumed):
    """The command of a method's run, or of a comparison, in a folder; the second time with its flag to resume."""
    if name == "compare":
        flags = ["--resume"] if resumed else []
        return ["compare", "--methods", COMPARED, "--out", str(folder), "--quiet", "--json", *flags, *TINY]
    if resumed and (folder / "config.json").exists():
        return ["train", "--resume", str(folder), "--quiet", "--json"]
    return ["train", f"method={name}", "--out", str(folder), "--quiet", "--json", *TINY]


def run_command(arguments, operation=None):
    """A process of its own; it is killed at the given number of an operation, before it (even) or after it (odd)."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if operation is not None:
        count_down = iter(range(operation, -1, -1))

        def counted(call):
            def counting(*given, **options):
                if next(count_down, None) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = call(*given, **options)
                if next(count_down, None) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return counting

        for name in OPERATIONS:
            setattr(os, name, counted(getattr(os, name)))
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    os._exit(code)


def start(arguments, operation=None):
    process = multiprocessing.get_context("fork").Process(target=run_command, args=(arguments, operation))
    process.start()
    return process


def finish(arguments):
    """Runs a command to its end; how long that took."""
    began = time.monotonic()
    process = start(arguments)
    process.join(300)
    if process.exitcode != 0:
        process.kill()
        raise AssertionError(f"{' '.join(arguments)} ended with {process.exitcode}")
    return time.monotonic() - began


def kill(arguments, duration, rng):
    """Starts a command and kills it; whether it was still alive then."""
    if rng.random() < 0.5:
        process = start(arguments, operation=rng.randrange(120 if arguments[0] == "train" else 360))
        process.join(300)
    else:
        process = start(arguments)
        process.join(rng.uniform(0, duration))
        process.kill()
        process.join(60)
    return process.exitcode == -signal.SIGKILL


def folders_of(folder, name):
    return sorted(path for path in folder.iterdir() if path.is_dir()) if name == "compare" else [folder]


def fuzz(count, seed, names=NAMES, say=lambda text: None):
    """Kills so many processes, over all names in turn; returns how many by name, and what was not bit-identical."""
    from test_train import assert_identical  # which imports this module

    rng, kills, findings = random.Random(seed), dict.fromkeys(names, 0), []
    with tempfile.TemporaryDirectory() as temporary:
        whole, cut = Path(temporary) / "whole", Path(temporary) / "cut"
        with contextlib.redirect_stdout(io.StringIO()):
            main(command_line("bc", Path(temporary) / "warm", False))  # imports what the processes need, once
        durations = {name: finish(command_line(name, whole / name, False)) for name in names}
        while sum(kills.values()) < count or not all(kills.values()):
            name = min(names, key=lambda name: kills[name])
            shutil.rmtree(cut, ignore_errors=True)
            resumed = False
            for _ in range(rng.choice([1, 1, 2, 3])):  # the second time it is a resumed process that is hit
                kills[name] += kill(command_line(name, cut, resumed), durations[name], rng)
                resumed = True
            try:
                finish(command_line(name, cut, resumed))
                pairs = zip(folders_of(whole / name, name), folders_of(cut, name), strict=True)
                for expected, found in pairs:
                    assert_identical(expected, found)
            except AssertionError as error:
                findings.append(f"{name} of seed {seed} after {sum(kills.values())} kills: {error}")
                say(findings[-1])
    return kills, findings


if __name__ == "__main__":
    torch.set_num_threads(1)
    began = time.monotonic()
    kills, findings = fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, say=print)
    for name, times in kills.items():
        print(f"{times:6} kills of {name}")
    print(f"{sum(kills.values())} kills, {len(findings)} resumed otherwise; {time.monotonic() - began:.0f} s")
    sys.exit(bool(findings))
