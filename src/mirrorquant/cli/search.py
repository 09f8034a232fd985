"""The command that looks for hyperparameters."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mirrorquant._text import table
from mirrorquant.cli import jobs, runs
from mirrorquant.cli.jobs import Job
from mirrorquant.report import RunRecord, file_name, plots
from mirrorquant.report.tables import duration, spread
from mirrorquant.train import Config, ConfigError, RunError, RunFolder
from mirrorquant.train.config import KEYS, MOVABLE

GRID = {
    "lr": "0.1,0.01,0.001,0.0001",
    "lr_scale": "0.1,0.2,0.3,0.5",
    "beta_scale": "1.01,1.02,1.05,1.1,1.2",
    "beta_interval": "100,200,500,1000,2000",
}
"""What the paper searched (tab:finetuning)."""
Trial = Mapping[str, str]
"""A value for each key that is searched."""
_SHOWN = 20
_MOST = 20_000  # combinations: to make them all takes seconds


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds it to the parser."""
    sub = command("search", search, f"{runs.DEFAULT} --over lr=0.1,0.01,0.001 --over beta_scale=1.02,1.05", json=False)
    runs.add_words(sub, "RECIPE", f"a name from 'mirrorquant recipes'; default: {runs.DEFAULT}")
    text = "values to try, each with all values of other keys; default: the paper's grid, for keys that have an effect"
    sub.add_argument("--over", action="append", default=[], metavar="KEY=A,B,...", help=text)
    sub.add_argument("--sample", type=runs.count, metavar="N", help="try only N combinations, drawn at random")
    sub.add_argument("--seeds", type=runs.count, default=1, help="runs per combination; default: 1")
    jobs.add_option(sub)
    sub.add_argument("--out", type=runs.place, help="folder of the runs; default: runs/search-RECIPE")


def search(options: argparse.Namespace) -> None:
    """Try hyperparameters, and rank them by validation accuracy; started again, it continues where it stopped."""
    runs.try_writing(options.results)
    runs.refuse(options, "seed", "search trains with seeds 0, 1, ...: set how many with --seeds")
    recipe = options.word or runs.DEFAULT
    folder = options.out or Path("runs") / f"search-{recipe.replace('/', '-')}"
    trials = _trials(recipe, options)
    tried = [(trial, [_job(recipe, trial, seed, folder, options) for seed in range(options.seeds)]) for trial in trials]
    every = [job for _, each in tried for job in each]
    done = {job: RunRecord.read(job.folder) for job in every if RunFolder(job.folder).ended}
    if done:
        print(f"{len(done)} of {len(every)} runs in {folder} have ended", flush=True)
    for record in done.values() if options.results else ():
        record.write_result(options.results)
    failed = jobs.train(every, done, options, "val")
    rows = _ranked([(trial, [done[job] for job in each]) for trial, each in tried if all(job in done for job in each)])
    problems = "; ".join(problem.removesuffix(".") for problem in failed[:3])
    if not rows:
        raise RunError(f"no combination has all its runs, {len(failed)} of {len(every)} failed: {problems}")
    _show(rows, recipe, folder, options)
    if failed:
        print(f"\n{len(failed)} of {len(every)} runs failed; their combinations are not ranked: {problems}")
    if any(record.summary.get("tested_on_val") for record in done.values()):
        print("\nThe validation images of this data set are its test images: the winner's test accuracy is optimistic.")


def _trials(recipe: str, options: argparse.Namespace) -> list[Trial]:
    """The combinations that make different runs; with --sample, those with the first digests.

    So a larger sample holds a smaller one, in whatever order or notation the values are given.
    """
    values = _values(options)
    if (count := math.prod(map(len, values.values()))) > _MOST:
        raise ConfigError(f"these are {count} combinations, expected {_MOST} at most: give fewer values")
    found: dict[str, Trial] = {}
    full: list[Config] = []
    problems: list[ConfigError] = []
    for each in itertools.product(*values.values()):
        trial = dict(zip(values, each, strict=True))
        try:
            full.append(Config.from_recipe(recipe, [*options.overrides, *_words(trial)]))
        except ConfigError as error:
            problems.append(error)
            continue
        idle = full[-1].idle_overrides()
        used = {key: value for key, value in trial.items() if key not in idle}
        found.setdefault(Config.from_recipe(recipe, [*options.overrides, *_words(used)]).identity, used)
    if not found:
        raise problems[0]
    runs.refuse_idle(full if options.over else [Config.from_recipe(recipe, options.overrides)])
    if any(config.train_on == "all" for config in full):
        raise ConfigError("train_on=all leaves no validation images to choose by: search with train_on=train")
    if problems:
        print(f"left out: {len(problems)} combinations that no run can have: {problems[0]}")
    return [found[digest] for digest in sorted(found)[: options.sample]] if options.sample else list(found.values())


def _values(options: argparse.Namespace) -> dict[str, list[str]]:
    """The values of each key that is searched."""
    fixed = [text.partition("=")[0] for text in options.overrides]
    if not options.over:
        return {key: text.split(",") for key, text in GRID.items() if key not in fixed}
    values: dict[str, list[str]] = {}
    for text in options.over:
        key, _, given = text.partition("=")
        if key in values or key in fixed:
            raise ConfigError(f"{key} is given twice: give all its values in one --over")
        if key == "seed":
            raise ConfigError("search trains with seeds 0, 1, ...: set how many with --seeds, instead of --over seed=")
        if not given:
            raise ConfigError(f"--over {text} has no values: write them as in --over lr=0.1,0.01")
        values[key] = [value.strip() for value in given.split(",")]
        if key in KEYS and KEYS[key].section in MOVABLE:
            raise ConfigError(f"{key} changes no accuracy: set it once, as {key}={values[key][0]}")
    return values


def _words(trial: Trial) -> list[str]:
    return [f"{key}={value}" for key, value in trial.items()]


def _job(recipe: str, trial: Trial, seed: int, folder: Path, options: argparse.Namespace) -> Job:
    """A run in a folder that is named after its values, as numbers are written, and after all of its configuration."""
    config = Config.from_recipe(recipe, [*options.overrides, *_words(trial), f"seed={seed}"])
    title = " ".join(_words(trial)) + f" seed={seed}" * (options.seeds > 1)
    words = [*runs.used(config, options.overrides), *_words(trial), f"seed={seed}"]
    name = file_name(f"seed{seed}", {key: config[key] for key in sorted(trial)})
    return Job(title or recipe, recipe, words, folder / f"{name}-{config.identity[:8]}")


def _ranked(tried: Sequence[tuple[Trial, Sequence[RunRecord]]]) -> list[dict[str, Any]]:
    """A row for each trial, the best first: by mean validation accuracy, then by the loss, which is None if unknown."""
    rows = []
    for trial, records in tried:
        accuracies, seconds = ([r.number(key) for r in records] for key in ("val_accuracy", "seconds"))
        losses = [record.summary.get("val_loss") for record in records]
        loss = statistics.fmean(math.inf if each is None else each for each in losses)
        known = loss if math.isfinite(loss) else None
        rows.append({"values": dict(trial), "val": accuracies, "loss": known, "seconds": seconds})
    return sorted(
        rows, key=lambda row: (-statistics.fmean(row["val"]), math.inf if row["loss"] is None else row["loss"])
    )


def _show(rows: Sequence[dict[str, Any]], recipe: str, folder: Path, options: argparse.Namespace) -> None:
    """The table, the picture, and what to do with the winner."""
    keys = list(dict.fromkeys(key for row in rows for key in row["values"]))
    numbers = ["rounded val %", "val loss", "time per run" if options.seeds > 1 else "time"]
    text = [[*keys, *numbers]]
    for row in rows[:_SHOWN]:
        values = [row["values"].get(key, "-") for key in keys]
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        text.append([*values, spread(row["val"]), loss, duration(statistics.fmean(row["seconds"]))])
    print("\n" + table(text, text[0], rule=True))
    if len(rows) > _SHOWN:
        print(f"... and {len(rows) - _SHOWN} more")
    (folder / "search.json").write_text(json.dumps(rows) + "\n")
    print(f"\nwrote {folder / 'search.json'}, the whole table")
    try:
        print(f"wrote {plots.search(rows, folder / 'search.png')}")
    except plots.PlotError as error:
        print(f"no figure: {error}")
    winner = _job(recipe, rows[0]["values"], options.seeds, folder, options)
    runs.suggest((f"train {shlex.join([recipe, *winner.words])}", "the best combination, with a new seed"))
