"""The commands that list and draw: recipes, methods, results, curves, projections, kernels."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mirrorquant import methods
from mirrorquant._text import table
from mirrorquant.packing import kernels
from mirrorquant.report import plots, read_results
from mirrorquant.report.tables import results_tables
from mirrorquant.train import RunFolder, recipes


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds them to the parser."""
    sub = command("recipes", show_recipes, "cifar10/resnet18/ref")
    sub.add_argument("name", nargs="?", default="", help="a recipe, or a part of the names to list")
    command("methods", show_methods)
    sub = command("table", show_results, "--results results", json=False)
    sub.add_argument("--results", type=Path, default=Path("results"), help="folder of the runs' JSON files")
    sub = command("curves", curves, "runs/A runs/B --out curves.png", json=False)
    sub.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="a run's folder, or its file in results/")
    sub.add_argument("--out", type=Path, default=Path("curves.png"))
    sub = command("plots", projections, "--out figures", json=False)
    sub.add_argument("--out", type=Path, default=Path("figures"))
    command("kernels", show_kernels, json=False)


def show_recipes(options: argparse.Namespace) -> None:
    """List the recipes, or show one."""
    found = [name for name in recipes.names() if options.name in name]
    if options.name in found or not found:
        _print(recipes.get(options.name), options.json)  # raises for an unknown name, with the nearest one
    elif options.json:
        print(json.dumps(found))
    else:
        papers = {name: recipes.get(name).get("paper") for name in found}
        print(table([[name, f"paper {paper:.2f} %" if paper else ""] for name, paper in papers.items()]))


def show_methods(options: argparse.Namespace) -> None:
    """List the methods."""
    _print({name: methods.get(name).describe() for name in methods.names()}, options.json)


def show_results(options: argparse.Namespace) -> None:
    """Show the runs kept as results, in one table per task."""
    print(results_tables(read_results(options.results)))


def curves(options: argparse.Namespace) -> None:
    """Draw training curves."""
    for folder in options.folders:
        if not folder.is_file():
            RunFolder(folder).config()  # checks it
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
