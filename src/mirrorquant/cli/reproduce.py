"""The command that trains a whole table of the paper."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mirrorquant.cli import runs
from mirrorquant.errors import MirrorquantError
from mirrorquant.report import RunRecord, read_results
from mirrorquant.report.tables import duration, results_tables
from mirrorquant.train import Config, ConfigError, Interrupted, RunError, recipes

Cell = tuple[str, int]
"""A recipe and a seed."""


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds it to the parser."""
    sub = command("reproduce", reproduce, "binary cifar100 --seeds 3", json=False)
    sub.add_argument("table", choices=sorted(recipes.TABLES), help="a table of the paper")
    runs.add_words(sub, "PART", "only recipes with this in their names, as in cifar10/resnet18 or md-tanh-s")
    sub.add_argument("--seeds", type=int, default=1, help="runs per cell, with seeds 0, 1, ...")
    sub.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs; default: runs")
    sub.set_defaults(results=Path("results"))


def reproduce(options: argparse.Namespace) -> None:
    """Train the cells of a table that have no result yet; started again, it continues where it stopped."""
    runs.try_writing(options.results)
    cells = [(n, s) for n in recipes.cells(options.table) if options.word in n for s in range(options.seeds)]
    if not cells:
        raise ConfigError(f"no recipe of the table {options.table} has {options.word!r} in its name")
    configs = {cell: Config.from_recipe(cell[0], [*options.overrides, f"seed={cell[1]}"]) for cell in cells}
    done = _results(options.results, configs)
    failed: list[str] = []
    for number, cell in enumerate(cells, 1):
        if cell in done:
            continue
        left = [each for each in cells[number - 1 :] if each not in done]
        print(f"[{number}/{len(cells)}] {cell[0]}, seed {cell[1]}; {_expected(done, left)}", flush=True)
        try:
            folder = options.out / f"{cell[0].replace('/', '-')}-seed{cell[1]}"
            options.resume = True
            done[cell] = runs.trained(runs.begun(configs[cell], folder, options), options)
        except Interrupted:
            raise
        except MirrorquantError as error:
            failed.append(f"{cell[0]}, seed {cell[1]}: {error}")
            print(f"failed: {error}", flush=True)
    print("\n" + results_tables(list(done.values())))
    if failed:
        raise RunError(f"{len(failed)} of {len(cells)} cells failed: {'; '.join(failed)}. Start again to try them")


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


def _expected(done: dict[Cell, RunRecord], left: Sequence[Cell]) -> str:
    """How long the rest takes if it takes as long as what is done: on the same data and network where possible."""
    seconds = {cell: float(record.summary.get("seconds") or 0) for cell, record in done.items()}
    if not any(seconds.values()):
        return f"{len(left)} to go"
    total = 0.0
    for name, _ in left:
        alike = [value for (other, _), value in seconds.items() if other.split("/")[:2] == name.split("/")[:2]]
        total += statistics.fmean(alike or seconds.values())
    finish = time.strftime("%a %H:%M", time.localtime(time.time() + total))
    return f"{len(left)} to go, about {duration(total)}, until {finish}"
