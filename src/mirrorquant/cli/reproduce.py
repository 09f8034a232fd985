"""The command that trains a whole table of the paper."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mirrorquant.cli import jobs, runs
from mirrorquant.cli.jobs import Job
from mirrorquant.report import RunRecord, read_results
from mirrorquant.report.tables import results_tables
from mirrorquant.train import Config, ConfigError, RunError, RunFolder, recipes

Cell = tuple[str, int]
"""A recipe and a seed."""


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds it to the parser."""
    sub = command("reproduce", reproduce, "binary cifar100 --seeds 3", json=False)
    sub.add_argument(
        "table", choices=sorted(recipes.TABLES), help="a table of the paper, or one of our own: imagenette, beyond"
    )
    text = "only recipes with this in their names, or any of a list: cifar10/resnet18,/bc"
    runs.add_words(sub, "PART", text, results=Path("results"))
    sub.add_argument("--seeds", type=runs.count, default=1, help="runs per cell, with seeds 0, 1, ...; default: 1")
    jobs.add_option(sub)
    sub.add_argument("--out", type=runs.place, default=Path("runs"), help="folder of the runs; default: runs")


def reproduce(options: argparse.Namespace) -> None:
    """Train the cells of a table that have no result yet; started again, it continues where it stopped."""
    runs.try_writing(options.results)
    runs.refuse(options, "seed", "reproduce trains with seeds 0, 1, ...: set how many with --seeds")
    runs.refuse(options, "method", "reproduce trains the methods of a table: name some of its recipes")
    parts = [part for part in options.word.split(",") if part] or [""]
    chosen = [name for name in recipes.cells(options.table) if any(part in name for part in parts)]
    cells = [(name, seed) for name in chosen for seed in range(options.seeds)]
    if not cells:
        raise ConfigError(f"no recipe of the table {options.table} has {options.word!r} in its name")
    every = _jobs(cells, options)
    _refuse_elsewhere([job.config for job in every.values()], options.out)
    done = _results(options.results, every)
    needed = {source for cell in cells if cell not in done for source in _sources(every[cell].config, options.table)}
    again = sorted(source for source in needed if not RunFolder(_path(source)).ended)
    for source in again:
        if source in done or source not in cells:
            print(f"{_title(source)} has no network in {_path(source)}, which others need: it is trained, too")
    done = {cell: record for cell, record in done.items() if cell not in again}
    cells = [*again, *(cell for cell in cells if cell not in again)]
    if done:
        print(f"{len(done)} of {len(cells)} cells have a result in {options.results}", flush=True)
    every = _jobs([*cells, *(needed - {*cells})], options)
    for job in every.values():
        job.needs = [every[source] for source in _sources(job.config, options.table) if source in every]
    records = {every[cell]: record for cell, record in done.items()}
    failed = jobs.train([every[cell] for cell in cells], records, options)
    print("\n" + results_tables([records[every[cell]] for cell in cells if every[cell] in records]))
    if failed:
        problems = "; ".join(problem.removesuffix(".") for problem in failed)
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
    return out / recipes.run_name(*cell)


def _sources(config: Config, table: str) -> list[Cell]:
    """The cells of a table whose networks a run starts or learns from."""
    cells = {str(_path((name, 0))): (name, 0) for name in recipes.cells(table) if name != config.recipe}
    return [cells[path] for path in (config.init, config.teacher) if path in cells]


def _jobs(cells: Sequence[Cell], options: argparse.Namespace) -> dict[Cell, Job]:
    """A job for each cell, without the overrides that have no effect in it, but have one in others."""
    full = {cell: Config.from_recipe(cell[0], [*options.overrides, f"seed={cell[1]}"]) for cell in cells}
    runs.refuse_idle(list(full.values()))
    found = {}
    for cell, config in full.items():
        words = [*runs.used(config, options.overrides), f"seed={cell[1]}"]
        found[cell] = Job(_title(cell), cell[0], words, _path(cell, options.out))
    return found


def _results(folder: Path, every: dict[Cell, Job]) -> dict[Cell, RunRecord]:
    """The results that are there already: of the same recipe and seed, with the same overrides."""
    found = {}
    for record in read_results(folder):
        cell = record.config["recipe"], record.config.get("seed", 0)
        if cell in every and record.changes == RunRecord.of(_summary(every[cell].config)).changes:
            found[cell] = record
    return found


def _summary(config: Config) -> dict[str, object]:
    return {"recipe": config.recipe, "config": config.record(), "overrides": config.overrides}
