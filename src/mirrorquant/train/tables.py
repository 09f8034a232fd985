"""Tables of results: the paper's tables beside our runs, in Markdown, and a comparison of methods for the terminal.

A run ends with a summary, a JSON file. :func:`results_table` reads a folder of them; nothing in a table is typed by
hand. :func:`compare_row` makes a line of :func:`compare_table` from one summary.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirrorquant import _files
from mirrorquant.train import recipes

__all__ = ["FREE_KEYS", "SPEED_KEYS", "TableError", "changed", "compare_row", "compare_table", "results_table"]
__all__ += ["data_label", "level_values", "levels_label", "method_label", "method_name", "method_order", "model_label"]
__all__ += ["with_results"]

FREE_KEYS = frozenset({"seed", "data_root", "out", "device"})
"""Overrides that leave a run a reproduction of the paper's cell."""

SPEED_KEYS = frozenset({"channels_last", "compile", "deterministic", "engine", "threads"})
SPEED_KEYS |= {"checkpoint_every", "histogram_every", "log_every"}
"""Overrides of how fast a run is and what it writes, not of what it computes but for the order of sums: as free."""

_BELOW = 0.6
_MARK = "†"
_METHODS = {
    "ref": "REF (float)",
    "bc": "BC",
    "pq": "PQ",
    "pq-star": "PQ*",
    "pmf": "PMF",
    "pmf-authors": "PMF-authors",
    "pmf-star": "PMF*",
    "gd-tanh": "GD-tanh",
    "md-softmax": "MD-softmax",
    "md-tanh": "MD-tanh",
    "md-softmax-s": "MD-softmax-S",
    "md-tanh-s": "MD-tanh-S",
}
_DATA = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tinyimagenet": "TinyImageNet",
    "fashion-mnist": "Fashion-MNIST",
    "digits": "UCI digits",
}
_MODELS = {"vgg16": "VGG-16", "resnet18": "ResNet-18", "mobilenetv2": "MobileNetV2", "digitsnet": "DigitsNet"}
_LEVELS = {"binary": (-1.0, 1.0), "ternary": (-1.0, 0.0, 1.0)}
_PAPER_DATA = ("cifar10", "cifar100", "tinyimagenet")
_PAPER_TABLES = (
    ("Binary weights", "tab:res_binary", "binary", ("vgg16", "resnet18")),
    ("Binary weights, MobileNetV2", "tab:res_mobilenet_bracewell", "binary", ("mobilenetv2",)),
    ("Ternary weights", "tab:res_ternary", "ternary", ("vgg16", "resnet18")),
)
_HEAD = """# Results

`mirrorquant table` makes this file from the JSON files beside it, one a run. Accuracies are test accuracies in percent
of the rounded network, of the iteration with the best rounded validation accuracy; of several seeds the mean ± the
sample standard deviation. Iterations a second and minutes are means over the seeds, with start-up, validation and
checkpoints in them; the files have the seconds of each, and the rate of training alone."""


class TableError(ValueError):
    """A summary that cannot be read, or that contradicts another one."""


def method_label(name: str) -> str:
    """A method as the paper writes it; a name that the paper does not have is returned as it is.

    >>> method_label("md-tanh-s"), method_label("my-method")
    ('MD-tanh-S', 'my-method')
    """
    return _METHODS.get(name, name)


def method_order(name: str) -> int:
    """The place of a method among the rows of the paper's tables; other methods come after them.

    >>> sorted(["mine", "md-tanh-s", "ref", "bc"], key=method_order)
    ['ref', 'bc', 'md-tanh-s', 'mine']
    """
    rows = list(_METHODS)
    return rows.index(name) if name in rows else len(rows)


def method_name(recipe: str | None, config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> str:
    """A run's method by the name that its recipe has for it; by its own where it was changed, or of no recipe.

    >>> method_name("cifar10/vgg16/binary/pq-star", {"method": "pq"}, {}), method_name(None, {"method": "pq"}, {})
    ('pq-star', 'pq')
    """
    return str(config["method"]) if not recipe or "method" in (overrides or {}) else recipe.split("/")[-1]


def data_label(name: str) -> str:
    """A data set as one writes it: ``cifar10`` is CIFAR-10."""
    return _DATA.get(name, name)


def model_label(name: str) -> str:
    """A network as one writes it: ``resnet18`` is ResNet-18."""
    return _MODELS.get(name, name)


def level_values(levels: str | Sequence[float] | None) -> tuple[float, ...]:
    """The quantization levels that a configuration means; empty for a float network, and for what cannot be read.

    >>> level_values("ternary"), level_values("-0.5,0.5"), level_values("float")
    ((-1.0, 0.0, 1.0), (-0.5, 0.5), ())
    """
    if levels is None or levels == "float":
        return ()
    if not isinstance(levels, str):
        return tuple(levels)
    try:
        return _LEVELS.get(levels) or tuple(float(value) for value in levels.split(","))
    except ValueError:
        return ()


def levels_label(levels: str | Sequence[float] | None) -> str:
    """Quantization levels as text, from their name or their numbers.

    >>> levels_label("ternary"), levels_label([-0.5, 0.5]), levels_label(None)
    ('-1, 0, +1', '-0.5, +0.5', 'float')
    """
    values = level_values(levels)
    return ", ".join(f"{value:+g}" if value else "0" for value in values) if values else str(levels or "float")


@dataclass(frozen=True)
class _Run:
    """What the tables need of one summary."""

    file: Path
    recipe: str
    named: bool
    changed: tuple[str, ...]
    seed: int
    paper: float | None
    accuracy: float
    rate: float
    seconds: float
    versions: str

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Data set, model, levels ("" in the float network) and method: the parts of the recipe's name."""
        parts = self.recipe.split("/")
        data, model, levels, method = parts if len(parts) == 4 else (*parts[:2], "", parts[-1])
        return data, model, levels, method


def results_table(folder: Path) -> str:
    """The paper's tables with our runs beside them, as the Markdown text of ``results/README.md``.

    Only cells that have runs appear. A cell more than 0.6 points below the paper carries a mark, explained below the
    tables with a link to ``findings.md`` if the folder has one. Runs of no recipe, or that differ from it as it is
    today in more than ``FREE_KEYS`` and ``SPEED_KEYS``, are listed apart, each with what differs.

    Args:
        folder: where to look, also in its subfolders, for run summaries: ``*.json`` with a key "recipe".

    Raises:
        TableError: a file is not JSON or lacks something, or a cell has the same seed twice.
    """
    if not folder.is_dir():
        raise TableError(f"{folder}: no such folder; give the one that holds the summaries of the runs")
    runs = [run for file in sorted(folder.rglob("*.json")) if (run := _read(file)) is not None]
    faithful = _grouped(run for run in runs if run.named and not run.changed)
    others = _grouped(run for run in runs if not run.named or run.changed)
    parts = [_HEAD, *_paper_sections(faithful), *_outside_sections(faithful)]
    if others:
        parts.append(_others_section(others))
    if not runs:
        parts.append(f"There are no runs yet. `mirrorquant train` writes a summary.json: copy it to {folder.name}/.")
    marked = any(_MARK in part for part in parts)
    parts += [_footnote(folder)] if marked else []
    parts += [_made_with(runs)] if runs else []
    return "\n\n".join(parts) + "\n"


BEGIN, END = "<!-- made by mirrorquant table --readme -->", "<!-- end of what mirrorquant table made -->"
"""Between these lines of a README stand the tables."""


def with_results(readme: str, table: str) -> str:
    """A README with the tables of :func:`results_table` between its marks, one heading deeper.

    >>> print(with_results(f"# Net\\n{BEGIN}\\nold\\n{END}\\n", "# Results\\n\\nHow.\\n\\n## Binary\\n\\nNew."))
    # Net
    <!-- made by mirrorquant table --readme -->
    <BLANKLINE>
    ### Binary
    <BLANKLINE>
    New.
    <BLANKLINE>
    <!-- end of what mirrorquant table made -->
    <BLANKLINE>
    """
    if not 0 <= readme.find(BEGIN) < readme.find(END):
        raise TableError(f"there is no place for the tables: put the two lines {BEGIN} and {END} where they belong")
    tables = table[table.index("\n## ") + 1 :] if "\n## " in table else ""
    deeper = re.sub("^#", "##", tables.replace("](findings.md)", "](results/findings.md)").strip(), flags=re.MULTILINE)
    before, rest = readme.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{deeper}\n\n{END}{rest.split(END, 1)[1]}"


def _read(file: Path) -> _Run | None:
    """The run that a file describes; None if it describes something else."""
    try:
        summary = _files.parse_json(_files.read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise TableError(f"{file}: not readable as JSON ({error}); fix or remove it") from error
    if not isinstance(summary, dict) or "recipe" not in summary or file.name == "config.json":
        return None
    try:
        config, versions = summary["config"], summary["versions"]
        if not isinstance(summary["recipe"], str | None):
            raise ValueError(f"recipe is {summary['recipe']!r:.60}")
        return _Run(
            file=file,
            recipe=summary["recipe"] or ", ".join(str(config[key]) for key in ("data", "model", "method")),
            named=summary["recipe"] is not None and summary["recipe"].count("/") in (2, 3),
            changed=tuple(_override(key, value) for key, value in sorted(changed(summary).items())),
            seed=int(config["seed"]),
            paper=None if summary["paper"] is None else _finite(summary["paper"]),
            accuracy=_finite(summary["test_accuracy"]),
            rate=_finite(summary["iterations_per_second"]),
            seconds=_finite(summary["seconds"]),
            versions=f"mirrorquant {versions['mirrorquant']}, torch {versions['torch']}, {versions['device']}",
        )
    except KeyError as error:
        raise TableError(f"{file}: the summary has no {error}; run it again or remove it") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise TableError(f"{file}: the summary holds a value of the wrong type: {error}") from error


def changed(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a run has otherwise than its recipe as it is today: overrides, and what was another value in it then.

    >>> config = {**recipes.get("cifar10/vgg16/binary/bc"), "weight_decay": 0.1}
    >>> changed({"recipe": "cifar10/vgg16/binary/bc", "config": config, "overrides": {"lr": 1e-4, "levels": "ternary"}})
    {'levels': 'ternary', 'weight_decay': 0.1}
    """
    config, overrides, name = summary["config"], summary["overrides"], summary["recipe"]
    recipe = recipes.get(name) if name in recipes.names() else {}
    given = {key: value for key, value in overrides.items() if key not in recipe or recipe[key] != value}
    since = {k: config[k] for k, v in recipe.items() if k not in overrides and config.get(k, v) != v}
    return {k: v for k, v in {**given, **since}.items() if k not in FREE_KEYS | SPEED_KEYS | {"paper", "note"}}


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def _override(key: str, value: Any) -> str:
    """An override as it is given on the command line."""
    if isinstance(value, list):
        return f"{key}={','.join(value)}"
    return f"{key}={'auto' if value is None else str(value).lower() if isinstance(value, bool) else value}"


def _grouped(runs: Iterable[_Run]) -> list[list[_Run]]:
    """Runs that differ in their seed alone, together, in the order of the paper's rows; no seed twice."""
    groups: dict[tuple[str, tuple[str, ...]], dict[int, _Run]] = {}
    for run in runs:
        seeds = groups.setdefault((run.recipe, run.changed), {})
        if run.seed in seeds:
            other = seeds[run.seed].file
            raise TableError(f"{run.file}: {run.recipe} with seed {run.seed} is in {other} too; keep one of them")
        seeds[run.seed] = run
    cells = [[seeds[seed] for seed in sorted(seeds)] for _, seeds in sorted(groups.items())]
    return sorted(cells, key=lambda cell: method_order(cell[0].recipe.split("/")[-1]))


def _in_paper(cell: list[_Run]) -> bool:
    """Whether the paper has a figure for these runs."""
    return cell[0].paper is not None and cell[0].place[0] in _PAPER_DATA


def _paper_sections(cells: list[list[_Run]]) -> list[str]:
    """A section a table of the paper, in it a table a column of the paper's."""
    sections = []
    for title, label, levels, models in _PAPER_TABLES:
        section = []
        for data, model in ((data, model) for data in _PAPER_DATA for model in models):
            column = [cell for cell in cells if _in_paper(cell) and cell[0].place[:2] == (data, model)]
            column = [cell for cell in column if cell[0].place[2] in ("", levels)]
            # REF stands in the binary and in the ternary table: alone, it is shown in the first of them only.
            if column and (levels == "binary" or any(cell[0].place[2] for cell in column)):
                section += [f"### {data_label(data)}, {model_label(model)}", _paper_table(column)]
                section += [_TINYIMAGENET] if data == "tinyimagenet" else []
        sections += [f"## {title} ({label})", *section] if section else []
    return sections


_TINYIMAGENET = "The test set is the official validation set, which also selects the iteration, as in the paper."


def _paper_table(column: list[list[_Run]]) -> str:
    rows = []
    for cell in column:
        paper, ours = cell[0].paper or 0.0, statistics.fmean(run.accuracy for run in cell)
        difference = round(ours - paper, 2)  # as printed, so that -0.60 is never marked
        mark = f" {_MARK}" if difference < -_BELOW else ""
        rows.append([_method(cell), f"{paper:.2f}", _mean(cell), f"{difference:+.2f}{mark}", *_running(cell)])
    return _markdown(["method", "paper", "ours", "difference", *_RUNNING], rows)


def _outside_sections(cells: list[list[_Run]]) -> list[str]:
    """Recipes of which the paper has no figure: the same tables without it."""
    columns: dict[tuple[str, str], list[list[_Run]]] = {}
    for cell in cells:
        if not _in_paper(cell):
            columns.setdefault(cell[0].place[:2], []).append(cell)
    section = ["## Not in the paper"] if columns else []
    for (data, model), column in sorted(columns.items()):
        levels = [levels_label(cell[0].place[2] or None) for cell in column]
        rows = [[_method(cell), q, _mean(cell), *_running(cell)] for q, cell in zip(levels, column, strict=True)]
        section += [f"### {data_label(data)}, {model_label(model)}"]
        section += [_markdown(["method", "levels", "ours", *_RUNNING], rows)]
    return section


def _others_section(cells: list[list[_Run]]) -> str:
    rows = []
    for cell in cells:
        changes = ", ".join(f"`{change}`" for change in cell[0].changed)
        rows.append([cell[0].recipe, changes or "no recipe", _mean(cell), *_running(cell)])
    return "## Other runs\n\n" + _markdown(["run", "overrides", "ours", *_RUNNING], rows)


_RUNNING = ("seeds", "iterations/s", "minutes")


def _running(cell: list[_Run]) -> list[str]:
    rate, seconds = statistics.fmean(run.rate for run in cell), statistics.fmean(run.seconds for run in cell)
    seeds = ", ".join(str(run.seed) for run in cell)
    return [seeds, f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}", f"{seconds / 60:.1f}"]


def _method(cell: list[_Run]) -> str:
    return method_label(cell[0].place[3]).replace("*", r"\*")


def _mean(cell: list[_Run]) -> str:
    """The mean over seeds; with its spread where there are several."""
    values = [run.accuracy for run in cell]
    return _spread(values) + (f" (n = {len(values)})" if len(values) > 1 else "")


def _footnote(folder: Path) -> str:
    where = "; [findings.md](findings.md) says what is known about why" if (folder / "findings.md").is_file() else ""
    return f"{_MARK} more than {_BELOW} points below the paper{where}."


def _made_with(runs: list[_Run]) -> str:
    lines = sorted({run.versions for run in runs})
    return "Made with " + "; ".join(lines) + "."


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns padded so that the text reads as a table too; numbers to the right."""
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*escaped, strict=True)]
    right = [name not in ("method", "levels", "run", "overrides", "seeds") for name in header]
    rule = ["-" * (width - 1) + ":" if r else "-" * width for width, r in zip(widths, right, strict=True)]
    lines = [_padded(row, widths, right) for row in (escaped[0], rule, *escaped[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _padded(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    cells = zip(row, widths, right, strict=True)
    return [cell.rjust(width) if r else cell.ljust(width) for cell, width, r in cells]


def compare_row(summary: dict[str, Any]) -> dict[str, Any]:
    """One row of a comparison, from the summary of a run.

    The keys are ``method`` (see :func:`method_name`), ``levels``, ``seed``, ``bits`` (a weight), ``soft`` (test
    accuracy of the soft network), ``val`` and ``test`` (of the rounded one), ``paper`` and ``seconds``; accuracies are
    in percent.
    """
    config = summary["config"]
    return {
        "method": method_name(summary["recipe"], config, summary["overrides"]),
        "levels": "float" if config["method"] == "ref" else config["levels"],
        "seed": config["seed"],
        "bits": summary["parameters"]["bits"],
        "soft": summary["test_accuracy_soft"],
        "val": summary["val_accuracy"],
        "test": summary["test_accuracy"],
        "paper": summary["paper"],
        "seconds": summary["seconds"],
    }


def compare_table(rows: Sequence[dict[str, Any]]) -> str:
    """Several methods on one task as aligned plain text; the rows are those of :func:`compare_row`.

    Rows of one method and level set, which are its seeds, make one line: the mean ± the sample standard deviation of
    each accuracy, and the mean time of a run. A value that is missing or None is shown as a dash.

    >>> row = {"method": "bc", "levels": "binary", "seed": 0, "bits": 1.0, "soft": 97.5, "val": 97.8, "test": 97.5}
    >>> print(compare_table([row | {"seconds": 75}]))
    method  levels  bits per weight  soft %  rounded val %  rounded test %        time
    ------  ------  ---------------  ------  -------------  --------------  ----------
    bc      -1, +1             1.00   97.50          97.80           97.50  1 min 15 s
    >>> print(compare_table([row | {"seconds": 75}, row | {"seed": 1, "test": 98.1}]).splitlines()[-1])
    bc      -1, +1             1.00  0, 1   97.50 ± 0.00   97.80 ± 0.00    97.80 ± 0.42    1 min 15 s
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], levels_label(row.get("levels"))), []).append(row)
    several = any(len(group) > 1 for group in groups.values())
    header = ["method", "levels", "bits per weight", *(["seeds"] if several else [])]
    header += ["soft %", "rounded val %", "rounded test %", "time per run" if several else "time"]
    text = []
    for names, group in groups.items():
        seeds = [", ".join(str(row.get("seed", "-")) for row in group)] if several else []
        accuracies = [_spread([row.get(key) for row in group]) for key in ("soft", "val", "test")]
        seconds = [row["seconds"] for row in group if row.get("seconds") is not None]
        time = _duration(statistics.fmean(seconds) if seconds else None)
        text.append([*names, _spread([group[0].get("bits")]), *seeds, *accuracies, time])
    widths = [max(map(len, column)) for column in zip(header, *text, strict=True)]
    right = [name not in ("method", "levels", "seeds") for name in header]
    lines = [_padded(row, widths, right) for row in (header, ["-" * width for width in widths], *text)]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _spread(values: Sequence[float | None]) -> str:
    """A value, or the mean of several with their sample standard deviation; a dash where one is missing."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return "-"
    spread = f" ± {statistics.stdev(numbers):.2f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.2f}{spread}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
