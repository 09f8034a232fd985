"""The command that trains a whole table of the paper."""

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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from mirrorquant.cli import runs
from mirrorquant.errors import MirrorquantError
from mirrorquant.report import RunRecord, read_results
from mirrorquant.report.tables import duration, results_tables
from mirrorquant.train import Config, ConfigError, Interrupted, RunError, RunFolder, process, recipes

Cell = tuple[str, int]
"""A recipe and a seed."""
Train = Callable[[Config, Path, argparse.Namespace], RunRecord]
_CHILD = "import sys; from mirrorquant.cli import main, reproduce; reproduce.stop_with_parent(); sys.exit(main())"


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds it to the parser."""
    sub = command("reproduce", reproduce, "binary cifar100 --seeds 3", json=False)
    sub.add_argument(
        "table", choices=sorted(recipes.TABLES), help="a table of the paper, or one of our own: imagenette, beyond"
    )
    text = "only recipes with this in their names, or any of a list: cifar10/resnet18,/bc"
    runs.add_words(sub, "PART", text, results=Path("results"))
    sub.add_argument("--seeds", type=runs.count, default=1, help="runs per cell, with seeds 0, 1, ...; default: 1")
    text = "runs at a time, each in its own process; on one GPU, start nvidia-cuda-mps-control -d before"
    sub.add_argument("--jobs", type=functools.partial(runs.count, most=64), default=1, metavar="N", help=text)
    sub.add_argument("--out", type=runs.place, default=Path("runs"), help="folder of the runs; default: runs")


def reproduce(options: argparse.Namespace) -> None:
    """Train the cells of a table that have no result yet; started again, it continues where it stopped."""
    runs.try_writing(options.results)
    runs.refuse(options, "seed", "reproduce trains with seeds 0, 1, ...: set how many with --seeds")
    runs.refuse(options, "method", "reproduce trains the methods of a table: name some of its recipes")
    chosen = [n for n in recipes.cells(options.table) if any(part in n for part in options.word.split(","))]
    cells = [(name, seed) for name in chosen for seed in range(options.seeds)]
    if not cells:
        raise ConfigError(f"no recipe of the table {options.table} has {options.word!r} in its name")
    configs = _configs(cells, options.overrides)
    _refuse_elsewhere(configs.values(), options.out)
    done = _results(options.results, configs)
    needed = {source for cell in cells if cell not in done for source in _sources(configs[cell], options.table)}
    again = sorted(source for source in needed if not RunFolder(_path(source)).ended)
    for source in again:
        if source in done or source not in cells:
            print(f"{_title(source)} has no network in {_path(source)}, which others need: it is trained, too")
    done = {cell: record for cell, record in done.items() if cell not in again}
    cells = [*again, *(cell for cell in cells if cell not in again)]
    configs = _configs([*cells, *(needed - {*cells})], options.overrides)
    failed: dict[Cell, str] = {}
    missing = [cell for cell in cells if cell not in done]
    if done:
        print(f"{len(done)} of {len(cells)} cells have a result in {options.results}", flush=True)

    def attempt(cell: Cell, train: Train) -> None:
        name = _title(cell)
        left = [each for each in missing if each not in done and each not in failed]
        expected = _expected(dict(done), left, options.jobs)  # others add to it meanwhile
        print(f"[{cells.index(cell) + 1}/{len(cells)}] {name}; {expected}\n", end="", flush=True)
        try:
            for source in _sources(configs[cell], options.table):
                if source in failed:
                    raise RunError(f"it needs the network of {_title(source)}, which failed")
                runs.refuse_another(configs[source], _path(source))
            done[cell] = train(configs[cell], _path(cell, options.out), options)
        except Interrupted:
            raise
        except MirrorquantError as error:
            failed[cell] = f"{name}: {error}"
            print(f"failed: {failed[cell]}\n", end="", flush=True)  # in one piece: others print, too
        else:
            test, seconds = done[cell].number("test_accuracy"), done[cell].number("seconds")
            print(f"ended: {name}: test {test:.2f} %, {duration(seconds)}\n", end="", flush=True)

    if options.jobs == 1:
        for cell in missing:
            attempt(cell, _in_this_process)
    else:
        for first in (True, False):  # float networks, from which others may start or learn
            batch = [cell for cell in missing if ("/ref" in cell[0]) == first]
            _in_parallel([functools.partial(attempt, cell) for cell in batch], options.jobs)
    print("\n" + results_tables([done[cell] for cell in cells if cell in done]))
    if failed:
        problems = "; ".join(problem.removesuffix(".") for problem in failed.values())
        raise RunError(f"{len(failed)} of {len(cells)} cells failed: {problems}. Run the command again to retry them")


def _refuse_elsewhere(configs: Iterable[Config], out: Path) -> None:
    """Raises :class:`ConfigError` if runs in another folder than "runs" need the network of a cell."""
    for config in configs if out != Path("runs") else ():
        for key, value in (("init", config.init), ("teacher", config.teacher)):
            if value.startswith("runs/") and key not in config.overrides:
                raise ConfigError(f"{key} of {config.recipe} is {value}, another cell: leave out --out, or set {key}=")


def _title(cell: Cell) -> str:
    return f"{cell[0]}, seed {cell[1]}"


def _path(cell: Cell, out: Path = Path("runs")) -> Path:
    return out / f"{cell[0].replace('/', '-')}-seed{cell[1]}"


def _sources(config: Config, table: str) -> list[Cell]:
    """The cells of a table whose networks a run starts or learns from."""
    cells = {str(_path((name, 0))): (name, 0) for name in recipes.cells(table) if name != config.recipe}
    return [cells[path] for path in (config.init, config.teacher) if path in cells]


def _in_this_process(config: Config, folder: Path, options: argparse.Namespace) -> RunRecord:
    options.resume = True
    return runs.trained(runs.begun(config, folder, options), options)


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
        waiting = {pool.submit(attempt, functools.partial(_in_own_process, started)) for attempt in attempts}
        try:
            while waiting:
                finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    if not future.cancelled():
                        future.result()
                if stop:
                    pass_on(stop[0])
        except BaseException:
            pass_on(signal.SIGTERM)
            raise
        if stop:
            print("stopped: start again to continue", file=sys.stderr)
            raise SystemExit(128 + stop[0])


def _in_own_process(
    started: list[subprocess.Popen[str]], config: Config, folder: Path, options: argparse.Namespace
) -> RunRecord:
    own = [text for text in options.overrides if text.partition("=")[0] in config.overrides]
    words = [config.recipe, *own, f"seed={config.seed}", "--out", str(folder)]
    if RunFolder(folder).begun:
        runs.refuse_another(config, folder)
        words = ["--resume", str(folder)]
    command = [sys.executable, "-c", _CHILD, "train", *words, "--results", str(options.results), "--quiet"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    begin = functools.partial(subprocess.Popen[str], text=True, start_new_session=True)  # Ctrl-C is for the parent
    with begin(command, **streams) as child:
        started.append(child)
        assert child.stderr is not None
        said = child.stderr.read().strip()
        child.wait()  # closing its input would stop it
    warnings, _, last = said.rpartition("\n") if child.returncode else (said, "", "")
    if warnings:
        print(f"{config.recipe}, seed {config.seed}: {warnings}\n", end="", file=sys.stderr, flush=True)
    if child.returncode:
        raise RunError(last.removeprefix("mirrorquant: ") or f"the process ended with exit code {child.returncode}")
    return RunRecord.read(folder)


def stop_with_parent() -> None:
    """In the process of a cell: SIGTERM when the input ends, as it does when the parent is gone, even if it was killed.

    The run then writes a checkpoint, as after any signal.
    """

    def watch() -> None:
        while os.read(0, 1024):
            pass
        signal.raise_signal(signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _configs(cells: Sequence[Cell], overrides: Sequence[str]) -> dict[Cell, Config]:
    """The configurations of the cells: each without the overrides that have no effect in it, but have one in others."""
    full = {cell: Config.from_recipe(cell[0], [*overrides, f"seed={cell[1]}"]) for cell in cells}
    runs.refuse_idle(list(full.values()))
    configs = {}
    for (name, seed), config in full.items():
        idle = config.idle_overrides()
        used = [text for text in overrides if text.partition("=")[0] not in idle]
        configs[name, seed] = Config.from_recipe(name, [*used, f"seed={seed}"])
    return configs


def _results(folder: Path, configs: dict[Cell, Config]) -> dict[Cell, RunRecord]:
    """The results that are there already: of the same recipe and seed, with the same overrides."""
    found = {}
    for record in read_results(folder):
        cell = record.config["recipe"], record.config.get("seed", 0)
        if cell in configs and record.changes == RunRecord.of(_summary(configs[cell])).changes:
            found[cell] = record
    return found


def _summary(config: Config) -> dict[str, object]:
    return {"recipe": config.recipe, "config": config.record(), "overrides": config.overrides}


def _expected(done: dict[Cell, RunRecord], left: Sequence[Cell], jobs: int) -> str:
    """How long the rest takes if it takes as long as what is done: on the same data and network where possible."""
    seconds = {cell: float(record.summary.get("seconds") or 0) for cell, record in done.items()}
    if not any(seconds.values()):
        return f"{len(left)} to go"
    total = 0.0
    for name, _ in left:
        alike = [value for (other, _), value in seconds.items() if other.split("/")[:2] == name.split("/")[:2]]
        total += statistics.fmean(alike or seconds.values()) / jobs
    finish = time.strftime("%a %H:%M", time.localtime(time.time() + total))
    return f"{len(left)} to go, about {duration(total)}, until {finish}"
