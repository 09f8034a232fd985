"""The paper's tables with our runs beside them, in Markdown, made from the files in ``results/``.

    python tools/paper_tables.py                             print them
    python tools/paper_tables.py --write --readme README.md  write results/README.md, and the table of README.md

Nothing in a table is typed by hand but what the paper cites of other methods on ImageNet.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import mirrorquant as mq
from mirrorquant._text import aligned
from mirrorquant.data import label as data_label
from mirrorquant.models import label as model_label
from mirrorquant.report import RecordError, RunRecord, labels, read_results
from mirrorquant.report.tables import spread
from mirrorquant.train import Config, build, recipes
from mirrorquant.train.config import parse_levels

BELOW = 0.6
MARK = "†"
SUPERSCRIPTS = "¹²³⁴⁵⁶⁷⁸⁹"
PAPER_DATA = ("cifar10", "cifar100", "tinyimagenet")
PAPER_TABLES = (  # heading, the paper's label, and the name of the recipes' table
    ("Binary weights", "tab:res_binary", "binary"),
    ("Binary weights, MobileNetV2", "tab:res_mobilenet_bracewell", "mobilenetv2"),
    ("Ternary weights", "tab:res_ternary", "ternary"),
)
IMAGENET_WEIGHTS: dict[str, tuple[float, float] | str] = {  # cited top-1 and top-5, or the recipe that has them
    "REF (float)": "imagenet/resnet18/ref",
    "BWN*": (60.80, 83.00),
    "BR": (63.20, 85.10),
    "ELQ": (64.72, 86.04),
    "ADMM": (64.80, 86.20),
    "QN": (66.50, 87.03),
    "MD-tanh-S*⁺": "imagenet/resnet18/binary/md-tanh-s-full",
    "MD-tanh-S*": "imagenet/resnet18/binary/md-tanh-s",
    "MD-tanh-S": "imagenet/resnet18/binary/md-tanh-s-pretrained",
}
IMAGENET_ACTIVATIONS: dict[str, tuple[float, float] | str] = {
    "REF (float)": "imagenet/resnet18/ref",
    "BinaryNet": (42.2, 67.1),
    "Dorefa-Net": (52.5, 76.7),
    "XNOR-Net": (51.2, 73.2),
    "Bireal-Net": (56.4, 79.5),
    "Bireal-Net (PReLU)": (59.0, 81.3),
    "PCNN (J=1)": (57.3, 80.0),
    "QN": (53.6, 75.3),
    "BOP": (54.2, 77.2),
    "GBCN": (57.8, 80.9),
    "IR-Net": (58.1, 80.0),
    "Noisy Supervision": (59.4, 81.7),
    "MD-tanh-S": "imagenet/bireal18/binary/md-tanh-s",
    "MD-tanh-S (KL div. loss)": "imagenet/bireal18/binary/md-tanh-s-kl",
}
IMAGENET_ABLATION = (
    "imagenet/resnet18/binary/md-tanh-s-pretrained",
    "imagenet/resnet18/binary/md-tanh-s",
    "imagenet/resnet18/binary/md-tanh-s-ends-pretrained",
    "imagenet/resnet18/binary/md-tanh-s-ends",
    "imagenet/resnet18/binary/md-tanh-s-full-pretrained",
    "imagenet/resnet18/binary/md-tanh-s-full",
    "imagenet/resnet18/binary/md-tanh-s-ends-scaled-pretrained",
    "imagenet/resnet18/binary/md-tanh-s-full-scaled-pretrained",
)
NO_IMAGENET = (
    'ImageNet itself was not available to us; Imagenette, ten of its classes, stands in: see "Not in the paper".'
)
NOTATION = r"As in the paper, \* is training from scratch, and ⁺ full binarization except for batch norm."
HEAD = """# Results

`tools/paper_tables.py` makes this file from the JSON files beside it, one per run. Accuracies are test accuracies in
percent of the rounded network, of the iteration with the best rounded validation accuracy (for ImageNet and Imagenette,
of the last one, as in the paper); of several seeds the mean ± the sample standard deviation. Rows with dashes have no
run yet. Iterations per second and minutes are means over the seeds, with start-up, validation and checkpoints in them;
the files have the seconds of each, and the rate of training alone."""
TINYIMAGENET = "The test set is the official validation set, which also selects the iteration, as in the paper."
RUNNING = ("seeds", "iterations/s", "minutes")
BEST = """\
Test accuracy in percent with our own recipes, which quantize every weight and bias, beside the paper's float network
and its best fully quantized one. `best-kl` is distilled from a float network of `ref-best`. The float networks are
trained for as many iterations, without a teacher, and without the cutmix that `best-kl` uses on CIFAR-100:"""
BEST_HEADER = (
    "run",
    "recipe",
    "levels",
    "float, paper",
    "quantized, paper",
    "float, ours",
    "quantized, ours",
    "bits per weight",
    "packed file",
)
REPRODUCED = """\
Test accuracy in percent of the float network (REF), and of networks trained with MD-tanh-S in which every weight and
bias is binary (activations are not), with the paper's recipes:"""
CHOICES = ("pretrained", "conv1 and FC", "bias", "BN", "layerwise scaling")
FIGURES = ("paper, top-1", "paper, top-5", "ours, top-1", "ours, top-5", "recipe")
BEGIN, END = "<!-- made by tools/paper_tables.py -->", "<!-- end of what tools/paper_tables.py made -->"

Cell = list[RunRecord]
"""Runs that differ in their seed alone."""


def results_table(folder: Path) -> str:
    """The text of ``results/README.md``, from the runs in a folder and its subfolders.

    Columns of the paper's tables appear with all their rows if one of these has runs, and are named otherwise. A cell
    more than 0.6 points below the paper carries a mark, explained below the tables with a link to ``findings.md`` if
    the folder has one; a recipe with a note carries its number. Runs without a recipe, or that differ from it as it is
    today in more than the seed, the machine and the speed, are listed apart, each with its differences.
    """
    runs = read_results(folder)
    faithful = grouped(run for run in runs if named(run) and not run.changes)
    others = grouped(run for run in runs if not named(run) or run.changes)
    parts = [HEAD, *paper_sections(faithful), *imagenet_sections(faithful), *outside_sections(faithful)]
    if others:
        parts.append(others_section(others))
    if not runs:
        parts.append(f"There are no runs yet. `mirrorquant train --results {folder.name}` keeps one here.")
    if any(MARK in part for part in parts):
        known = "; [findings.md](findings.md) says what is known about why"
        parts.append(f"{MARK} more than {BELOW} points below the paper{known * (folder / 'findings.md').is_file()}.")
    if runs:
        parts.append("Made with " + "; ".join(sorted({versions(run) for run in runs})) + ".")
    return "\n\n".join(parts) + "\n"


def short_tables(folder: Path) -> str:
    """For ``README.md``: our own recipes if they have runs, then MD-tanh-S with the paper's, beside its figures."""
    cells = grouped(run for run in read_results(folder) if named(run) and not run.changes)
    found = {place(cell[0]): cell for cell in cells}
    networks = [(data, model) for data in PAPER_DATA for model in ("vgg16", "resnet18", "mobilenetv2")]
    best = [row for network in networks for row in best_rows(network, found)]
    rows, notes = [], Notes()
    for data, model in networks:
        pair = [found.get((data, model, "", "ref")), found.get((data, model, "binary", "md-tanh-s"))]
        if all(pair):
            figures = [text for cell in pair if cell for text in (f"{cell[0].number('paper'):.2f}", mean(cell))]
            marks = [notes.mark(Config.from_recipe(title(cell[0])).note) for cell in pair if cell]
            rows.append([network_label(data, model) + "".join(marks), *figures])
    reproduced = markdown(["run", "float, paper", "float, ours", "binary, paper", "binary, ours"], rows)
    first = [BEST, markdown(BEST_HEADER, best)] if best else []
    return "\n\n".join([*first, REPRODUCED, reproduced + notes.text()])


def best_rows(network: tuple[str, str], found: dict[tuple[str, str, str, str], Cell]) -> list[list[str]]:
    """A network's ``best`` and ``best-kl`` with runs, beside the paper's best network whose every weight is rounded."""
    rows = []
    floating = found.get((*network, "", "ref-best"))
    for levels, recipe in itertools.product(("binary", "ternary"), ("best", "best-kl")):
        cell = found.get((*network, levels, recipe))
        if not cell:
            continue
        column = "/".join((*network, levels, ""))
        theirs = [Config.from_recipe(name) for name in recipes.names() if name.startswith(column)]
        figures = [Config.from_recipe("/".join((*network, "ref"))).paper, max(c.paper for c in theirs if not c.skip)]
        ours = [mean(floating) if floating else "-", mean(cell)]
        size = [f"{cell[0].summary['parameters']['bits']:.2f}", f"{packed_bytes(cell[0]) / 1e6:.2f} MB"]
        names = [network_label(*network), f"`{recipe}`", labels.levels(levels, cell[0].scale)]
        rows.append([*names, *(f"{figure:.2f}" for figure in figures), *ours, *size])
    return rows


def packed_bytes(run: RunRecord) -> int:
    """The size of the packed network of a run: that of a network like it, with random weights on the same levels."""
    layers, levels = run.summary["layers"], parse_levels(str(run.levels))
    shape = {"classes": layers[-1]["shape"][0], "channels": layers[0]["shape"][1]}
    network = build.model(Config.from_recipe(title(run)), **shape).eval()
    for parameter in network.parameters():
        parameter.data.copy_(levels.nearest(torch.randn_like(parameter)))
    with tempfile.TemporaryDirectory() as folder:
        mq.save(network, file := Path(folder) / "packed.safetensors")
        return file.stat().st_size


def network_label(data: str, model: str) -> str:
    """Data set and network, as people write them."""
    return f"{data_label(data)}, {model_label(model)}"


def with_results(readme: str, table: str) -> str:
    """A README with a table between its marks."""
    if not 0 <= readme.find(BEGIN) < readme.find(END):
        raise RecordError(f"there is no place for the table: put the two lines {BEGIN} and {END} where it belongs")
    before, rest = readme.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END, 1)[1]}"


def named(run: RunRecord) -> bool:
    """Whether a run has a recipe."""
    return run.config["recipe"].count("/") in (2, 3)


def title(run: RunRecord) -> str:
    """The recipe, or data, model and method without one."""
    return run.config["recipe"] or ", ".join(str(run.config.get(key)) for key in ("data", "model", "method"))


def place(run: RunRecord) -> tuple[str, str, str, str]:
    """Data set, model, levels ("" for the float network) and method: the parts of the recipe's name."""
    parts = run.config["recipe"].split("/")
    data, model, levels, method = parts if len(parts) == 4 else (*parts[:2], "", parts[-1])
    return data, model, levels, method


def versions(run: RunRecord) -> str:
    """The software and the device of a run."""
    found = run.summary.get("versions")
    if not isinstance(found, dict):
        raise RecordError(f"{run.path}: versions are {found!r:.60}, expected names and versions")
    return f"mirrorquant {found.get('mirrorquant')}, torch {found.get('torch')}, {found.get('device')}"


def override(key: str, value: Any) -> str:
    """An override as it is given on the command line."""
    if isinstance(value, list):
        return f"{key}={','.join(value)}"
    return f"{key}={'auto' if value is None else str(value).lower() if isinstance(value, bool) else value}"


def differences(run: RunRecord) -> tuple[str, ...]:
    """How a run differs from its recipe."""
    return tuple(override(key, value) for key, value in sorted(run.changes.items()))


def grouped(runs: Iterable[RunRecord]) -> list[Cell]:
    """Runs that differ in their seed alone, together, in the order of the paper's rows; no seed twice."""
    groups: dict[tuple[str, tuple[str, ...]], dict[int, RunRecord]] = {}
    for run in runs:
        seed, seeds = int(run.config["seed"]), groups.setdefault((title(run), differences(run)), {})
        if seed in seeds:
            raise RecordError(f"{run.path}: {title(run)} with seed {seed} is in {seeds[seed].path} too; keep one")
        seeds[seed] = run
    cells = [[seeds[seed] for seed in sorted(seeds)] for _, seeds in sorted(groups.items())]
    return sorted(cells, key=lambda cell: labels.method_order(title(cell[0]).split("/")[-1]))


def in_paper(cell: Cell) -> bool:
    """Whether the paper has a figure for these runs."""
    return cell[0].summary.get("paper") is not None and place(cell[0])[0] in (*PAPER_DATA, "imagenet")


def paper_sections(cells: list[Cell]) -> list[str]:
    """A section for each table of the paper, with a table for each of its columns that has runs; all empty if none."""
    found = {title(cell[0]): cell for cell in cells if in_paper(cell) and place(cell[0])[0] in PAPER_DATA}
    sections: list[str] = []
    for heading, label, table in PAPER_TABLES if found else ():
        sections.append(f"## {heading} ({label})")
        empty, (datasets, models, levels) = [], recipes.TABLES[table]
        for data, model in ((data, model) for data in datasets for model in models):
            names = [name for name in recipes.cells(table) if name.startswith(f"{data}/{model}/")]
            # REF stands in the binary and in the ternary table: alone, it is shown in the first of them only.
            if any(name in found and (levels == "binary" or "/ref" not in name) for name in names):
                sections += [f"### {network_label(data, model)}", paper_table(names, found)]
                sections += [TINYIMAGENET] if data == "tinyimagenet" else []
            elif names:
                empty.append(network_label(data, model))
        sections += [f"No runs yet: {'; '.join(empty)}."] if empty else []
    return sections


def paper_table(names: list[str], found: dict[str, Cell]) -> str:
    """Our runs beside the paper's figures, with the notes of their recipes."""
    rows, notes = [], Notes()
    for name in sorted(names, key=lambda name: labels.method_order(name.split("/")[-1])):
        config, cell = Config.from_recipe(name), found.get(name)
        row = ["-"] * (2 + len(RUNNING))
        if cell:
            ours = statistics.fmean(run.number("test_accuracy") for run in cell)
            difference = round(ours - config.paper, 2)  # as printed, so that -0.60 is never marked
            row = [mean(cell), f"{difference:+.2f}{marked(difference)}", *running(cell)]
        rows.append([method(name) + notes.mark(config.note if cell else ""), f"{config.paper:.2f}", *row])
    return markdown(["method", "paper", "ours", "difference", *RUNNING], rows) + notes.text()


class Notes(list[str]):
    """Footnotes of a table, each once."""

    def mark(self, note: str) -> str:
        """The number of a note, to stand behind a word; nothing for no note."""
        if note and note not in self:
            self.append(note)
        return f" {SUPERSCRIPTS[self.index(note)]}" if note else ""

    def text(self) -> str:
        """The notes, to stand below the table."""
        return "".join(f"\n\n{SUPERSCRIPTS[i]} {note}".replace("*", r"\*") for i, note in enumerate(self))


def marked(difference: float) -> str:
    """The mark of what falls short of the paper."""
    return f" {MARK}" if difference < -BELOW else ""


def imagenet_sections(cells: list[Cell]) -> list[str]:
    """The paper's three tables about ImageNet, with all their rows."""
    ours = {title(cell[0]): cell for cell in cells if place(cell[0])[0] == "imagenet"}
    return [
        "## ImageNet",
        *[NO_IMAGENET] * (not ours),
        "### Binary weights, ResNet-18 (tab:res_imagenet)",
        imagenet_table(IMAGENET_WEIGHTS, ours, digits=2),
        NOTATION,
        "### Ablation, ResNet-18 with MD-tanh-S (tab:res_imagenet_abl)",
        ablation_table(ours),
        "### Binary weights and activations (tab:res_imagenet_binarywtact)",
        imagenet_table(IMAGENET_ACTIVATIONS, ours, digits=1),
    ]


def imagenet_table(table: dict[str, tuple[float, float] | str], ours: dict[str, Cell], *, digits: int) -> str:
    """Other methods with the figures that the paper cites, and the recipes with our runs beside the paper's figures."""
    rows = []
    for label, source in table.items():
        if isinstance(source, str):
            row = recipe_row(source, ours, digits)
        else:
            row = [*(f"{figure:.{digits}f}" for figure in source), "-", "-", "-"]
        rows.append([label.replace("*", r"\*"), *row])
    return markdown(["method", *FIGURES], rows)


def ablation_table(ours: dict[str, Cell]) -> str:
    """What is binary in each recipe, and what that costs."""
    rows = []
    for name in IMAGENET_ABLATION:
        config = Config.from_recipe(name)
        ends = "float" if "conv1" in config.skip else "binary"
        bias = "float" if {"fc", "fc.bias"} & {*config.skip} else "binary"
        choices = ["yes" if config.init else "no", ends, bias, "float", "yes" if config.scale else "no"]
        rows.append([*choices, *recipe_row(name, ours, digits=2)])
    return markdown([*CHOICES, *FIGURES], rows)


def recipe_row(name: str, ours: dict[str, Cell], digits: int) -> list[str]:
    """Top-1 and top-5 in the paper, and of our runs if there are any; the recipe."""
    config, cell = Config.from_recipe(name), ours.get(name)
    found = ["-", "-"]
    if cell:
        difference = statistics.fmean(run.number("test_accuracy") for run in cell) - config.paper
        found = [mean(cell) + marked(round(difference, 2)), mean(cell, "test_top5")]
    return [f"{config.paper:.{digits}f}", f"{config.paper_top5:.{digits}f}", *found, f"`{name}`"]


def outside_sections(cells: list[Cell]) -> list[str]:
    """Recipes for which the paper has no figure: the same tables without it."""
    columns: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if not in_paper(cell):
            columns.setdefault(place(cell[0])[:2], []).append(cell)
    section = ["## Not in the paper"] if columns else []
    for (data, model), column in sorted(columns.items()):
        rows = [
            [method(title(c[0])), labels.levels(place(c[0])[2] or None, c[0].scale), mean(c), *running(c)]
            for c in column
        ]
        section += [f"### {network_label(data, model)}"]
        section += [markdown(["method", "levels", "ours", *RUNNING], rows)]
    return section


def others_section(cells: list[Cell]) -> str:
    """Runs that are not those of a recipe."""
    rows = []
    for cell in cells:
        changes = ", ".join(f"`{change}`" for change in differences(cell[0]))
        rows.append([title(cell[0]), changes or "no recipe", mean(cell), *running(cell)])
    return "## Other runs\n\n" + markdown(["run", "overrides", "ours", *RUNNING], rows)


def running(cell: Cell) -> list[str]:
    """Seeds, iterations per second and minutes."""
    rate = statistics.fmean(run.number("iterations_per_second") for run in cell)
    seconds = statistics.fmean(run.number("seconds") for run in cell)
    seeds = ", ".join(str(run.config["seed"]) for run in cell)
    return [seeds, f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}", f"{seconds / 60:.1f}"]


def method(recipe: str) -> str:
    """The method of a recipe as the paper writes it, in Markdown."""
    return labels.method(recipe.split("/")[-1]).replace("*", r"\*")


def mean(cell: Cell, key: str = "test_accuracy") -> str:
    """The mean over seeds, with its spread where there are several."""
    return spread([run.number(key) for run in cell], count=True)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns padded so that the text reads as a table too; numbers to the right."""
    left = ("method", "levels", "run", "overrides", "seeds", "recipe", *CHOICES)
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (header, *rows)]
    lines = aligned(escaped, [name for name in header if name not in left], least=3)
    rule = ["-" * len(c) if n in left else "-" * (len(c) - 1) + ":" for n, c in zip(header, lines[0], strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints or writes the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the runs' JSON files")
    parser.add_argument("--write", action="store_true", help="write README.md there")
    parser.add_argument(
        "--readme", type=Path, metavar="FILE", help="write the short table into a text, between its marks"
    )
    options = parser.parse_args(arguments)
    try:
        text = results_table(options.results)
        outputs = {options.results / "README.md": text} if options.write else {}
        if options.readme:
            outputs[options.readme] = with_results(
                options.readme.read_text(encoding="utf-8"), short_tables(options.results)
            )
        for file, content in outputs.items():
            file.write_text(content, encoding="utf-8")
            print(f"wrote {file}")
    except (OSError, RecordError, UnicodeDecodeError) as error:
        print(f"paper_tables: {error}", file=sys.stderr)
        return 1
    if not outputs:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
