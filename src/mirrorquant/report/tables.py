"""Tables for the terminal: methods side by side, with the mean and the spread over their seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mirrorquant._text import printable, table
from mirrorquant.report import labels
from mirrorquant.report.record import RecordError, RunRecord

__all__ = ["compare_row", "compare_table", "duration", "grouped", "results_tables", "spread"]

Kind = tuple[str, tuple[tuple[float, ...], str]]
"""A method, and its levels with their scale."""


def compare_row(record: RunRecord) -> dict[str, Any]:
    """One row of a comparison: method, levels and their scale, seed, bits per weight, accuracies in percent, seconds.

    ``soft`` is the test accuracy of the last soft network; ``val``, ``test`` and ``top5`` are those of the rounded one
    that was kept. A run that trained on the validation images, too, has no ``val``; one that differs from its recipe
    has no figure of the paper.
    """
    return {
        "method": record.name,
        "levels": record.levels or "float",
        "scale": record.scale,
        "seed": record.config.get("seed"),
        "bits": record.summary.get("parameters", {}).get("bits"),
        "soft": record.number("test_accuracy_soft"),
        "val": record.number("val_accuracy") if record.validated else None,
        "test": record.number("test_accuracy"),
        **({"top5": record.number("test_top5")} if "test_top5" in record.summary else {}),
        "paper": None if record.changes else record.summary.get("paper"),
        "seconds": record.number("seconds"),
    }


def compare_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Several methods on one task as aligned plain text; the rows are those of :func:`compare_row`.

    Rows with the same method, levels and scale are seeds and make one line: the mean ± the sample standard deviation of
    each accuracy, and the mean time per run. A missing value is a dash.

    >>> row = {"method": "bc", "levels": "binary", "seed": 0, "bits": 1.0, "soft": 97.5, "val": 97.8, "test": 97.5}
    >>> print(compare_table([row | {"seconds": 75}]))
    method  levels  bits per weight  last soft %  rounded val %  rounded test %        time
    ------  ------  ---------------  -----------  -------------  --------------  ----------
    bc      -1, +1             1.00        97.50          97.80           97.50  1 min 15 s
    >>> print(compare_table([row | {"seconds": 75}, row | {"seed": 1, "test": 98.1}]).splitlines()[-1])
    bc      -1, +1             1.00  0, 1   97.50 ± 0.00   97.80 ± 0.00    97.80 ± 0.42    1 min 15 s
    """
    groups = grouped(rows)
    several, top5 = any(len(group) > 1 for group in groups.values()), any("top5" in row for row in rows)
    paper = any(row.get("paper") for row in rows)
    numbers = ["last soft %", "rounded val %", "rounded test %", *["top-5 %"] * top5, *["paper %"] * paper]
    numbers.append("time per run" if several else "time")
    text = [["method", "levels", "bits per weight", *["seeds"] * several, *numbers]]
    for (method, _), group in groups.items():
        seeds = [", ".join(str(row.get("seed", "-")) for row in group)] * several
        accuracies = [spread([row.get(key) for row in group]) for key in ("soft", "val", "test", *["top5"] * top5)]
        seconds = [row["seconds"] for row in group if row.get("seconds") is not None]
        time = duration(statistics.fmean(seconds) if seconds else None)
        levels = labels.levels(group[0].get("levels"), group[0].get("scale", ""))
        bits = spread([group[0].get("bits")])
        figure = [spread([group[0].get("paper")])] * paper
        text.append([method, levels, bits, *seeds, *accuracies, *figure, time])
    return table(text, ["bits per weight", *numbers], rule=True)


def grouped(rows: Sequence[Mapping[str, Any]]) -> dict[Kind, list[Mapping[str, Any]]]:
    """The rows by method, and by levels with their scale: the seeds of each."""
    groups: dict[Kind, list[Mapping[str, Any]]] = {}
    for row in rows:
        levels = labels.level_values(row.get("levels")), row.get("scale", "")
        groups.setdefault((row["method"], levels), []).append(row)
    return groups


def results_tables(records: Sequence[RunRecord]) -> str:
    """Runs kept as results: one table per data set and model. Runs that differ from their recipe show how.

    Raises:
        RecordError: two files hold runs that do not even differ in their seed.
    """
    tasks: dict[str, list[dict[str, Any]]] = {}
    seen: dict[tuple[str, Any], Path] = {}
    for record in sorted(records, key=lambda record: labels.method_order(record.name)):
        run, path = (record.experiment, record.config.get("seed")), record.path
        if seen.setdefault(run, path) != path:
            raise RecordError(f"{path}: {record.name} with seed {run[1]} is in {seen[run]} too; keep one")
        row, recipe = compare_row(record), record.config["recipe"]
        changes = "".join(f" {key}={value}" for key, value in record.changes.items() if key != "method")
        elsewhere = not recipe.startswith("/".join(str(record.config.get(key)) for key in ("data", "model")))
        row["method"] = printable(record.name + changes + f" (of {recipe})" * bool(recipe and elsewhere))
        tasks.setdefault(printable(labels.task(record.config)), []).append(row)
    tables = [f"{task}\n\n{compare_table(rows)}\n" for task, rows in sorted(tasks.items())]
    return "\n".join(tables) or "There are no runs yet: mirrorquant train --results FOLDER keeps one in a folder."


def spread(values: Sequence[float | None], *, count: bool = False) -> str:
    """A value, or the mean of several with their sample standard deviation; a dash if one is missing.

    >>> spread([97.5]), spread([97.5, 98.1], count=True), spread([None])
    ('97.50', '97.80 ± 0.42 (n = 2)', '-')
    """
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return "-"
    mean = f"{statistics.fmean(numbers):.2f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(numbers):.2f}" + f" (n = {len(numbers)})" * count


def duration(seconds: float | None) -> str:
    """A time as text.

    >>> duration(3.25), duration(75), duration(3700)
    ('3.2 s', '1 min 15 s', '1 h 01 min')
    """
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
