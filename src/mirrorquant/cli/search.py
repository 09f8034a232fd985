"""The command that looks for hyperparameters."""

from __future__ import annotations

import argparse
import itertools
import json
import random
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
    done = {job: _ended(job) for job in every if RunFolder(job.folder).ended}
    if done:
        print(f"{len(done)} of {len(every)} runs in {folder} have ended", flush=True)
    failed = jobs.train(every, done, options, "val")
    rows = _ranked([(trial, [done[job] for job in each if job in done]) for trial, each in tried])
    problems = "; ".join(problem.removesuffix(".") for problem in failed[:3])
    if not rows:
        raise RunError(f"all {len(every)} runs failed: {problems}")
    _show(rows, recipe, folder, options)
    if failed:
        print(f"\n{len(failed)} of {len(every)} runs failed and are not ranked: {problems}")


def _trials(recipe: str, options: argparse.Namespace) -> list[Trial]:
    """The combinations that make different runs; at most --sample of them, in a random order."""
    values = _values(options)
    combinations = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    if options.sample:
        random.Random(0).shuffle(combinations)  # the same again, so that a larger sample adds to a smaller one
    found: dict[str, Trial] = {}
    full: list[Config] = []
    problems: list[ConfigError] = []
    for trial in combinations:
        if len(found) == options.sample:
            break
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
    return list(found.values())


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
        values[key] = [value for value in given.split(",") if value]
        if not values[key]:
            raise ConfigError(f"--over {text} has no values: write them as in --over lr=0.1,0.01")
    return values


def _words(trial: Trial) -> list[str]:
    return [f"{key}={value}" for key, value in trial.items()]


def _job(recipe: str, trial: Trial, seed: int, folder: Path, options: argparse.Namespace) -> Job:
    fixed = runs.used(Config.from_recipe(recipe, [*options.overrides, *_words(trial)]), options.overrides)
    title = " ".join(_words(trial)) + f" seed={seed}" * (options.seeds > 1)
    words = [*fixed, *_words(trial), f"seed={seed}"]
    return Job(title or recipe, recipe, words, folder / file_name(f"seed{seed}", trial))


def _ended(job: Job) -> RunRecord:
    runs.refuse_another(job.config, job.folder)
    return RunRecord.read(job.folder)


def _ranked(tried: Sequence[tuple[Trial, Sequence[RunRecord]]]) -> list[dict[str, Any]]:
    """A row for each trial with a run, the best first: by mean validation accuracy, then by the loss."""
    rows = []
    for trial, records in tried:
        accuracies = [record.number("val_accuracy") for record in records]
        losses = [dict(record.summary["val_loss_curve"])[record.summary["best_step"]] for record in records]
        seconds = [record.number("seconds") for record in records]
        if records:
            rows.append({"values": dict(trial), "val": accuracies, "loss": losses, "seconds": seconds})
    return sorted(rows, key=lambda row: (-statistics.fmean(row["val"]), statistics.fmean(row["loss"])))


def _show(rows: Sequence[dict[str, Any]], recipe: str, folder: Path, options: argparse.Namespace) -> None:
    """The table, the picture, and what to do with the winner."""
    keys = list(dict.fromkeys(key for row in rows for key in row["values"]))
    numbers = ["rounded val %", "val loss", "time per run" if options.seeds > 1 else "time"]
    text = [[*keys, *numbers]]
    for row in rows[:_SHOWN]:
        values = [row["values"].get(key, "-") for key in keys]
        loss, time = statistics.fmean(row["loss"]), duration(statistics.fmean(row["seconds"]))
        text.append([*values, spread(row["val"]), f"{loss:.4f}", time])
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
