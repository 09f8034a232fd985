"""The commands about runs: train, compare, list and draw."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mirrorquant import methods
from mirrorquant._text import table
from mirrorquant.packing import kernels
from mirrorquant.report import RunRecord, plots, read_results
from mirrorquant.report.tables import compare_row, compare_table, results_tables
from mirrorquant.train import Config, ConfigError, Run, RunFolder, build, distributed, recipes
from mirrorquant.train.config import KEYS, Key
from mirrorquant.train.distributed import World
from mirrorquant.train.run_folder import BEST

DEFAULT = "digits/digitsnet/binary/md-tanh-s"
TRUSTED = "a run imports the modules that its model, teacher, method and schedules name, so only use runs you trust"


def place(text: str) -> Path:
    """A file or folder on the command line, which an empty text is not."""
    if not text:
        raise argparse.ArgumentTypeError("'' names no file or folder: give its name, as in runs/mine")
    return Path(text)


def count(text: str, most: int = 999_999) -> int:
    """A number on the command line, from 1 on."""
    if not re.fullmatch(r"0*[1-9]\d{0,5}", text, re.ASCII) or int(text) > most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: give a whole number from 1 to {most}")
    return int(text)


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds them to the parser."""
    sub = command("train", train, "cifar10/resnet18/binary/md-tanh-s seed=1")
    add_words(sub, "RECIPE", f"a name from 'mirrorquant recipes'; default: {DEFAULT}")
    sub.add_argument("--out", type=place, help="the run's folder; default: a new one in runs/")
    text = f"continue the run in this folder, or in --out; only machine and logging keys may change; {TRUSTED}"
    sub.add_argument("--resume", type=place, nargs="?", const=Path(), metavar="RUN", help=text)
    sub = command("compare", compare, "digits/digitsnet --seeds 3")
    add_words(sub, "TASK", "data set and model of the recipes; default: digits/digitsnet")
    sub.add_argument(
        "--methods",
        default="ref,bc,md-tanh-s",
        help="names of recipes or methods, or MODULE:CLASS, separated by commas; default: ref,bc,md-tanh-s",
    )
    sub.add_argument(
        "--levels", default="binary", choices=["binary", "ternary"], help="of the recipes; default: binary"
    )
    sub.add_argument("--seeds", type=count, default=1, help="runs per method, with seeds 0, 1, ...; default: 1")
    sub.add_argument("--out", type=place, help="folder of the runs; default: runs/compare-TASK")
    sub.add_argument("--resume", action="store_true", help="continue the comparison in the folder")
    sub = command("recipes", show_recipes, "cifar10/resnet18/ref")
    sub.add_argument("name", nargs="?", default="", help="a recipe, or a part of the names to list")
    command("methods", show_methods)
    sub = command("table", show_results, "--results results", json=False)
    sub.add_argument("--results", type=place, default=Path("results"), help="folder of the runs' JSON files")
    sub = command("curves", curves, "runs/A runs/B --out curves.png", json=False)
    sub.add_argument("folders", type=place, nargs="+", metavar="RUN", help="a run's folder, or its file in results/")
    sub.add_argument("--out", type=place, default=Path("curves.png"), help="a picture; default: curves.png")
    sub = command("plots", projections, "--out figures", json=False)
    sub.add_argument("--out", type=place, default=Path("figures"), help="a folder; default: figures")
    command("kernels", show_kernels, json=False)


def add_words(sub: argparse.ArgumentParser, name: str, text: str, results: Path | None = None) -> None:
    """Adds a word and key=value pairs to a command that trains, and what all such commands take."""
    rows = [f"  {key:18}{facts.help}{_default(facts)}" for key, facts in KEYS.items() if facts.section != "origin"]
    sub.epilog = "Any key can be changed by key=value, as in lr=0.01. Keys:\n" + "\n".join(rows)
    sub.add_argument("words", nargs="*", metavar=f"{name} KEY=VALUE", help=text)
    text = "also keep the summary as JSON in this folder" + f"; default: {results}" * (results is not None)
    sub.add_argument("--results", type=place, default=results, metavar="DIR", help=text)
    sub.add_argument("--quiet", action="store_true", help="no progress")


def _default(key: Key) -> str:
    choices = f": {', '.join(key.choices)}" if key.choices else ""
    default = str(key.default).lower() if key.type == "bool" else key.default
    return choices if default in ("", None, []) else f"{choices} (default {default})"


def train(options: argparse.Namespace) -> None:
    """Train a network, or continue a run; torchrun starts several processes that share the work."""
    try_writing(options.results)
    with distributed.joined() as world:
        run = _train_or_resume(options, world)
        record = trained(run, options)
    if not world.chief:
        return
    if options.json:
        print(json.dumps(record.summary))
        return
    print(f"\n{compare_table([compare_row(record)])}\n")
    if figure := _figure(run.config):
        print(f"the paper has {figure}" + " for the recipe as it is" * bool(record.changes))
    path, quantized = run.folder.path, run.config["method"] != "ref"
    _draw([path], path)
    print(f"wrote {path / BEST[0]}, the {run.config['keep']} {'rounded ' * quantized}network")
    folder = shlex.quote(str(path))
    check = (f"eval {folder}", "its accuracy" + ", and whether its weights are exactly on their levels" * quantized)
    look = (f"summary {folder}", "its bits and bytes, layer by layer")
    suggest(check, look, *[(f"pack {folder}", "the network at its true size, in a file")] * quantized)


def _train_or_resume(options: argparse.Namespace, world: World) -> Run:
    if options.resume is None:
        config = Config.from_recipe(options.word or DEFAULT, options.overrides)
        refuse_idle([config])
        return Run(config, world.shared(options.out or _new_folder(config)), quiet=options.quiet)
    folder = options.out if options.resume == Path() else options.resume
    if folder is None:
        raise ConfigError("--resume does not say which run to continue: name its folder, as in --resume runs/NAME")
    if options.word or options.out not in (None, folder):
        raise ConfigError("--resume continues the run in one folder: recipe and --out cannot be given with it")
    run = Run.resume(folder, options.overrides, quiet=options.quiet)
    if run.folder.ended:
        run.say("the run has already ended: it is tested again")
    return run


def suggest(*commands: tuple[str, str]) -> None:
    """Prints commands to run next, each with its purpose."""
    print("\nnext:\n" + table([[f"  mirrorquant {command}   ", purpose] for command, purpose in commands]))


def compare(options: argparse.Namespace) -> None:
    """Train several methods on one task, and compare them."""
    try_writing(options.results)
    task = options.word or "digits/digitsnet"
    folder = options.out or Path("runs") / ("compare-" + task.replace("/", "-"))
    configs = _compared(task, options)
    refuse_idle(list(configs.values()))
    records = [trained(begun(config, folder / name, options), options) for name, config in configs.items()]
    rows = [compare_row(record) for record in records]
    if options.json:
        print(json.dumps(rows))
        return
    print(f"\n{compare_table(rows)}\n")
    _draw([folder / name for name in configs], folder, rows)
    print(f"wrote {len(configs)} runs to folders in {folder}")
    custom = ("train RECIPE model=MODULE:FUNCTION data=folder:PATH", "your own model and images")
    suggest(("recipes", "all cells of the paper's tables"), custom)


def _compared(task: str, options: argparse.Namespace) -> dict[str, Config]:
    """All runs of a comparison by their folder; made before the first one trains."""
    refuse(options, "seed", "compare trains with seeds 0, 1, ...: set how many with --seeds")
    refuse(options, "method", "compare trains several methods: name them with --methods")
    configs, chosen = {}, filter(None, options.methods.replace(" ", "").split(","))
    for method, seed in itertools.product(chosen, range(options.seeds)):
        name, overrides = _recipe(task, options.levels, method)
        folder = f"{method.replace(':', '-')}-seed{seed}"
        configs[folder] = Config.from_recipe(name, [*overrides, *options.overrides, f"seed={seed}"])
    if not configs:
        raise ConfigError("there is nothing to compare: name at least one method, as in --methods bc --seeds 1")
    return configs


def refuse(options: argparse.Namespace, key: str, remedy: str) -> None:
    """Raises :class:`ConfigError` for an override that a command with several runs sets itself."""
    if any(text.startswith(f"{key}=") for text in options.overrides):
        raise ConfigError(f"{remedy}, instead of {key}=")


def _recipe(task: str, levels: str, method: str) -> tuple[str, list[str]]:
    """The recipe of a method, and overrides: a method without its own recipe for the task takes that of MD-tanh-S."""
    name, other = f"{task}/{levels}/{method}", f"{task}/{levels}/md-tanh-s"
    if method.startswith("ref") and ":" not in method:
        return f"{task}/{method}", []
    if name in recipes.names() or other not in recipes.names() or (":" not in method and method not in methods.names()):
        return name, []
    return other, [f"method={method}"]


def begun(config: Config, folder: Path, options: argparse.Namespace) -> Run:
    """A run in a folder: a new one, or with --resume the one that is there, whether it has ended or not."""
    if not options.resume or not RunFolder(folder).begun:
        return Run(config, folder, quiet=options.quiet)
    refuse_another(config, folder)
    return Run.resume(folder, config.movable, quiet=options.quiet)


def refuse_another(config: Config, folder: Path) -> None:
    """Raises :class:`ConfigError` if the run in a folder has another configuration."""
    there = RunFolder(folder).config()
    if there.identity != build.resolve(config).like(there).identity:
        raise ConfigError(f"{folder} holds a run of another configuration: give the same key=value, or another --out")


def trained(run: Run, options: argparse.Namespace) -> RunRecord:
    """Trains a run to its end, and keeps its summary among the results."""
    record = RunRecord.of(run.train())
    if options.results and run.world.chief:
        record.write_result(options.results)
    return record


def refuse_idle(configs: Sequence[Config]) -> None:
    """Rejects overrides that change nothing in any of the runs."""
    idle = [config.idle_overrides() for config in configs]
    useless = [f"{key} has no effect here because {why}" for key, why in idle[0].items() if all(key in i for i in idle)]
    if useless:
        raise ConfigError(f"{', and '.join(useless)}: leave it out")


def used(config: Config, overrides: Sequence[str]) -> list[str]:
    """Those of the overrides that have an effect in a run, which others may not have."""
    idle = config.idle_overrides()
    return [text for text in overrides if text.partition("=")[0] not in idle]


def _new_folder(config: Config) -> Path:
    """runs/NAME-seedK, with a number if it is taken."""
    base = recipes.run_name(config.recipe, config.seed)
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(folder for name in names if not RunFolder(folder := Path("runs") / name).begun)


def try_writing(results: Path | None) -> None:
    """Creates the folder of the results and a file in it: better an error now than after hours of training."""
    if results is None:
        return
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass
    except OSError as error:
        expected = f"expected a folder to write to ({error.strerror}): name another one"
        raise ConfigError(f"--results is {results}, {expected}") from error


def _draw(folders: Sequence[Path], out: Path, rows: Sequence[dict[str, Any]] = ()) -> None:
    """Draws the curves, the methods side by side, and the histograms; prints why, if one cannot be drawn."""
    try:
        print(f"wrote {plots.curves(folders, out / 'curves.png')}")
        if any(row["method"] != "ref" for row in rows):
            print(f"wrote {plots.comparison(rows, out / 'comparison.png')}")
        for folder in folders:
            if RunFolder(folder).config().histogram_every:
                print(f"wrote {plots.histograms(folder, folder / 'weights.png')}")
    except plots.PlotError as error:
        print(f"no further figures: {error}")


def show_recipes(options: argparse.Namespace) -> None:
    """List the recipes, or show one."""
    found = [name for name in recipes.names() if options.name in name]
    if options.name in found or not found:
        _print(recipes.get(options.name), options.json)  # raises for an unknown name, with the nearest one
    elif options.json:
        print(json.dumps(found))
    else:
        figures = {name: _figure(Config.from_recipe(name)) for name in found}
        print(table([[name, figure and f"paper {figure}"] for name, figure in figures.items()]))


def _figure(config: Config) -> str:
    """The paper's accuracy, with top-5 where its table has that; empty if there is none."""
    top5 = f" (top-5 {config.paper_top5:.2f} %)" if config.paper_top5 else ""
    return f"{config.paper:.2f} %{top5}" if config.paper else ""


def show_methods(options: argparse.Namespace) -> None:
    """List the methods."""
    _print({name: methods.get(name).describe() for name in methods.names()}, options.json)


def show_results(options: argparse.Namespace) -> None:
    """Show the runs kept as results, in one table per task."""
    print(results_tables(read_results(options.results)))


def curves(options: argparse.Namespace) -> None:
    """Draw training curves."""
    print(f"wrote {plots.curves(options.folders, options.out)}")


def projections(options: argparse.Namespace) -> None:
    """Draw projections, their inverses and mirror maps."""
    for path in plots.projections(options.out):
        print(f"wrote {path}")


def show_kernels(options: argparse.Namespace) -> None:
    """Show which kernels run packed networks here."""
    print(kernels.describe())


def _print(values: Mapping[str, Any], as_json: bool) -> None:
    print(json.dumps(values) if as_json else table([[key, str(value)] for key, value in values.items()]))
