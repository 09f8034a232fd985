"""The commands that list and draw: recipes, methods, results, curves, projections, kernels."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mirrorquant import methods
from mirrorquant.packing import kernels
from mirrorquant.report import plots, read_results
from mirrorquant.report.tables import results_tables
from mirrorquant.train import RunFolder, recipes


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds them to the parser."""
    sub = command("recipes", show_recipes, "list recipes, or show one", "cifar10/resnet18/ref")
    sub.add_argument("name", nargs="?", default="", help="a recipe, or a part of the names to list")
    command("methods", show_methods, "list the methods", "")
    table = "the runs kept as results, a table per task"
    sub = command("table", lambda o: print(results_tables(read_results(o.results))), table, "", json=False)
    sub.add_argument("--results", type=Path, default=Path("results"), help="folder of the runs' JSON files")
    sub = command("curves", curves, "training curves as PNG", "runs/A runs/B --out curves.png", json=False)
    sub.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="a run's folder, or its file in results/")
    sub.add_argument("--out", type=Path, default=Path("curves.png"))
    sub = command("plots", projections, "projections, inverses, mirror maps", "--out figures", json=False)
    sub.add_argument("--out", type=Path, default=Path("figures"))
    command("kernels", lambda _: print(kernels.describe()), "which kernels run packed networks here", "", json=False)


def show_recipes(options: argparse.Namespace) -> None:
    """Lists recipes, or shows one."""
    if options.name in recipes.names():
        _print_columns(recipes.get(options.name), options.json)
        return
    found = [name for name in recipes.names() if options.name in name]
    if not found:
        recipes.get(options.name)  # raises, with the nearest name
    if options.json:
        print(json.dumps(found))
        return
    for name in found:
        paper = recipes.get(name).get("paper")
        print(f"{name:48}" + (f"paper {paper:.2f} %" if paper else ""))


def show_methods(options: argparse.Namespace) -> None:
    """Lists the methods."""
    _print_columns({name: methods.get(name).describe() for name in methods.names()}, options.json)


def curves(options: argparse.Namespace) -> None:
    """Draws training curves."""
    for folder in options.folders:
        if not folder.is_file():
            RunFolder(folder).config()  # checks it
    print(f"wrote {plots.curves(options.folders, options.out)}")


def projections(options: argparse.Namespace) -> None:
    """Draws projections, inverses and mirror maps."""
    for path in plots.projections(options.out):
        print(f"wrote {path}")


def _print_columns(values: Mapping[str, Any], as_json: bool) -> None:
    width = max(map(len, values))
    print(json.dumps(values) if as_json else "\n".join(f"{key:{width}} {value}" for key, value in values.items()))
