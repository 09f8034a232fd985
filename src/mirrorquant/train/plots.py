"""Figures: training curves, weights moving to their levels, projections with their mirror maps, methods compared.

Each function writes PNG files and returns their paths. Run folders are read as they are, also while a run is going
on: ``config.json``, ``metrics.jsonl`` and, where there is one, ``summary.json``. Matplotlib is imported when a figure
is made, and no state of it is changed.
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mirrorquant import _files, schedules
from mirrorquant.levels import BINARY, TERNARY
from mirrorquant.mirrors import Mirror, ShiftedTanh, Tanh
from mirrorquant.train.report import MetricsError, read_metrics
from mirrorquant.train.tables import (
    FREE_KEYS,
    SPEED_KEYS,
    data_label,
    level_values,
    levels_label,
    method_label,
    method_name,
    method_order,
    model_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

__all__ = ["PlotError", "comparison", "curves", "histograms", "projections"]

_DPI = 150
_INK, _GRID, _FAINT = "#333333", "#e4e4e4", "#8c8c8c"
_SOLID, _DASHED, _DOTTED = "-", (0, (5, 2)), (0, (1.5, 1.5))
# Paul Tol's "muted" colours, which remain distinct with any colour vision: baselines warm, mirror descent cool, its
# stable forms dark. Variants of a method share its colour and differ in the dashes.
_LOOKS: dict[str, tuple[str, Any]] = {
    "md-tanh-s": ("#332288", _SOLID),
    "bc": ("#cc6677", _SOLID),
    "md-softmax-s": ("#117733", _SOLID),
    "gd-tanh": ("#999933", _SOLID),
    "md-tanh": ("#88ccee", _SOLID),
    "md-softmax": ("#44aa99", _SOLID),
    "pq": ("#ddcc77", _SOLID),
    "pmf": ("#aa4499", _SOLID),
    "pmf-authors": ("#882255", _SOLID),
    "ref": ("#555555", _SOLID),
    "pq-star": ("#ddcc77", _DASHED),
    "pmf-star": ("#aa4499", _DASHED),
    "md-tanh-primal": ("#88ccee", _DASHED),
    "md-softmax-primal": ("#44aa99", _DASHED),
}
_BETAS = {1: "#88ccee", 2: "#44aa99", 4: "#117733", 8: "#332288"}
_NO_BETA = ("ref", "bc", "pq")  # PQ has a regularization strength, which is no β
_WIDTH = 9.6  # inches
_FEW = 25  # validations that are drawn as points too
_FIELDS = {"train": ("step", "loss", "beta"), "val": ("step", "accuracy"), "weights": ("step", "range", "layers")}
_PANELS, _MOMENTS, _COLUMNS = 8, 150, 120
_SHADES = ["#e3f1f8", "#88ccee", "#4a6fb5", "#332288", "#1a0f4f"]


class PlotError(ValueError):
    """A figure that cannot be made: matplotlib is missing, or a run folder does not hold what it needs."""


@dataclass
class _Run:
    """What a run folder holds; ``train``, ``val`` and ``weights`` map a step to its line of ``metrics.jsonl``."""

    folder: Path
    config: dict[str, Any]
    name: str
    train: dict[int, dict[str, Any]] = field(default_factory=dict)
    val: dict[int, dict[str, Any]] = field(default_factory=dict)
    weights: dict[int, dict[str, Any]] = field(default_factory=dict)
    floats: frozenset[str] = frozenset()  # parameters that are not quantized, which the summary lists

    def series(self, kind: str, key: str) -> dict[int, float]:
        """One number by step, where it was recorded and is finite."""
        lines = sorted(getattr(self, kind).items())
        return {step: value for step, line in lines if (value := line.get(key)) is not None and math.isfinite(value)}

    def quantizes(self, layer: str) -> bool:
        """Whether a layer is quantized: by the summary, or by the patterns to skip while the run goes on."""
        parts = layer.split(".")
        paths = [".".join(parts[:k]) for k in range(1, len(parts) + 1)]
        skipped = any(fnmatchcase(path, str(p)) for p in self.config.get("skip") or () for path in paths)
        return self.config["method"] != "ref" and layer not in self.floats and not skipped


@dataclass(frozen=True)
class _Line:
    """One line of the curves: runs that differ in nothing but their seed, with their label and look."""

    runs: Sequence[_Run]
    label: str
    colour: str
    dash: Any

    def span(self, kind: str, key: str) -> dict[int, tuple[float, float, float]]:
        """Mean, minimum and maximum over the runs by step, at the steps that all runs with data have recorded."""
        recorded = [values for run in self.runs if (values := run.series(kind, key))]
        shared = sorted(set.intersection(*map(set, recorded))) if recorded else []
        columns = {step: [values[step] for values in recorded] for step in shared}
        return {step: (math.fsum(v) / len(v), min(v), max(v)) for step, v in columns.items()}

    def betas(self) -> dict[int, float]:
        """β by step, of methods that anneal it; the seeds share one schedule. A log axis has no place for zero."""
        if self.runs[0].config["method"] in _NO_BETA:
            return {}
        longest = max((run.series("train", "beta") for run in self.runs), key=len)
        return {step: beta for step, beta in longest.items() if beta > 0}

    def best(self) -> list[tuple[int, float]]:
        """Step and value of each run's best validation accuracy: of equals the later one, as in training."""
        every = [run.series("val", "accuracy") for run in self.runs]
        return [max(values.items(), key=lambda point: (point[1], point[0])) for values in every if values]


def curves(runs: Sequence[Path], out: Path) -> Path:
    """Training curves (the paper's fig:trcurves): one line per run, or per set of runs that differ only in their seed.

    A line over several seeds is their mean, inside a band from the lowest to the highest seed.

    Args:
        runs: folders with ``config.json`` and ``metrics.jsonl``, or summaries as they are kept in ``results/``.
        out: the picture to write: validation accuracy of the rounded network with its best value, training loss, β.

    Returns:
        ``out``.

    Raises:
        PlotError: nothing to draw yet, a file is missing or broken, or matplotlib is not installed.
    """
    loaded = [_load(run) for run in runs]
    if not any(run.train or run.val for run in loaded):
        raise PlotError(f"no training or validation line in {_listed(runs)} yet: let the run go on for a while")
    lines = _lines(loaded)
    accuracy = any(line.best() for line in lines)
    loss = any(line.span("train", "loss") for line in lines)
    right = ["loss"] * loss + ["beta"] * any(line.betas() for line in lines)
    figure = _figure(_WIDTH, 4.2)
    mosaic: list[Any] = [["accuracy", part] for part in right] or [["accuracy"]]
    if not accuracy:
        mosaic = [right or ["loss"]]
    axes = figure.subplot_mosaic(mosaic, width_ratios=[1.7, 1] if accuracy and right else None)
    _draw_curves(axes, lines)
    _finish_curves(axes, lines)
    _headline(figure, _task(loaded))
    _legend_below(figure, lines)
    return _save(figure, out)


def _draw_curves(axes: Mapping[str, Axes], lines: Sequence[_Line]) -> None:
    for line in lines:
        if "accuracy" in axes:
            _draw_span(axes["accuracy"], line, line.span("val", "accuracy"))
            for step, value in line.best():
                look: dict[str, Any] = {
                    "ms": 6 if len(line.runs) == 1 else 4.5,
                    "mec": "white",
                    "mew": 1.0,
                    "zorder": 4,
                }
                axes["accuracy"].plot(step, value, "o", color=line.colour, clip_on=False, **look)
        if "loss" in axes:
            _draw_span(axes["loss"], line, line.span("train", "loss"))
    if "beta" in axes:
        _draw_betas(axes["beta"], lines)


def _draw_span(ax: Axes, line: _Line, span: Mapping[int, tuple[float, float, float]]) -> None:
    """The mean with its band; of many points their running mean, above the single run's own values in pale."""
    if not span:
        return
    steps, values = list(span), list(zip(*span.values(), strict=True))
    half = len(steps) // 100  # windows of 2 %
    mean, low, high = (_running_mean(v, half) for v in values)
    marker: dict[str, Any] = {"marker": "o", "ms": 3, "clip_on": False} if len(steps) <= _FEW else {}
    ax.plot(steps, mean, color=line.colour, ls=line.dash, lw=1.5, zorder=3, **marker)
    if len(line.runs) > 1:
        ax.fill_between(steps, low, high, color=line.colour, alpha=0.2, lw=0, zorder=2)
    elif half:
        ax.plot(steps, values[0], color=line.colour, lw=0.6, alpha=0.3, zorder=2)


def _running_mean(values: Sequence[float], half: int) -> list[float]:
    """Means over windows of 2 ``half`` + 1 values, narrower at the ends."""
    if not half:
        return list(values)
    sums = [0.0, *accumulate(values)]
    windows = [(max(0, k - half), min(len(values), k + half + 1)) for k in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in windows]


def _draw_betas(ax: Axes, lines: Sequence[_Line]) -> None:
    """β over the iterations; methods whose schedules coincide share a line, in which each has every n-th dash."""
    schedules: list[tuple[dict[int, float], list[_Line]]] = []
    for line in lines:
        betas = line.betas()
        same = [sharing for others, sharing in schedules if betas and _coincide(betas, others)]
        if same:
            same[0].append(line)
        elif betas:
            schedules.append((betas, [line]))
    for betas, sharing in schedules:
        n, length = len(sharing), 6
        marker: dict[str, Any] = {"marker": "o", "ms": 3, "clip_on": False} if len(betas) <= _FEW and n == 1 else {}
        for k, line in enumerate(sharing):
            dash = (length * (n - k) % (length * n), (length, length * (n - 1))) if n > 1 else _SOLID
            ax.plot(list(betas), list(betas.values()), color=line.colour, ls=dash, lw=1.8, zorder=3, **marker)


def _coincide(some: Mapping[int, float], others: Mapping[int, float]) -> bool:
    """Whether two series of β end at the same step, and look the same on a log axis wherever both were recorded."""
    shared = some.keys() & others.keys()
    apart = max((abs(math.log(some[step] / others[step])) for step in shared), default=math.inf)
    return max(some) == max(others) and apart <= 0.02 * max(map(abs, map(math.log, some.values())))


def _finish_curves(axes: Mapping[str, Axes], lines: Sequence[_Line]) -> None:
    titles = {
        "accuracy": "Validation accuracy of the rounded network, %",
        "loss": "Training loss",
        "beta": "Annealing: β",
    }
    for name, ax in axes.items():
        _style(ax, titles[name], "iteration")
    if "accuracy" in axes:
        values = [v for line in lines for run in line.runs for v in run.series("val", "accuracy").values()]
        pad = max(0.05 * (max(values) - min(values)), 1)
        axes["accuracy"].set_ylim(max(min(values) - pad, -1), min(max(values) + pad, 101))
    if "loss" in axes:
        _scale(axes["loss"], [v for line in lines for run in line.runs for v in run.series("train", "loss").values()])
    if "beta" in axes:
        _scale(axes["beta"], [beta for line in lines for beta in line.betas().values()])
    if {"loss", "beta", "accuracy"} <= set(axes):  # one below the other
        axes["loss"].sharex(axes["beta"])
        axes["loss"].tick_params(labelbottom=False)
        axes["loss"].set_xlabel("")
    last = max(max([0, *run.train, *run.val]) for line in lines for run in line.runs)
    for ax in axes.values():
        ax.set_xlim(0, max(last, 1))
        _iterations(ax.xaxis, last)


def _scale(ax: Axes, values: Sequence[float]) -> None:
    """A log axis where the values span enough of it: with 1, 2, 5 below two decades, linear below a factor of five."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter  # type: ignore[import-not-found, unused-ignore]

    low, high = min(values, default=1.0), max(values, default=1.0)
    if low <= 0 or high < 5 * low:
        ax.yaxis.set_major_locator(MaxNLocator(5))
        return
    ax.set_yscale("log")
    if high < 100 * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())


def _legend_below(figure: Figure, lines: Sequence[_Line]) -> None:
    """The legend, in as many columns as fit, below panels that keep their size: the figure grows by its height."""
    from matplotlib.lines import Line2D  # type: ignore[import-not-found, unused-ignore]

    several = any(len(line.runs) > 1 for line in lines)
    title = "best validation accuracy (dots), %"
    title += "; over several seeds: mean ± standard deviation, band from lowest to highest" * several
    if any(len(run.train) >= 100 or len(run.val) >= 100 for line in lines for run in line.runs):
        title += "\nlines: running mean over 2 % of the points; pale: the points of a single run"
    handles = []
    for line in lines:
        text = textwrap.fill(f"{line.label}  {_mean([value for _, value in line.best()])}", 76)
        handles.append(Line2D([], [], color=line.colour, ls=line.dash, lw=2, label=text))
    look: dict[str, Any] = {
        "fontsize": 8.5,
        "title_fontsize": 8.5,
        "frameon": False,
        "labelcolor": _INK,
        "alignment": "left",
    }
    for columns in range(min(len(handles), 6), 0, -1):
        legend = figure.legend(handles=handles, loc="outside lower left", ncols=columns, title=title, **look)
        box = legend.get_window_extent(_renderer(figure))
        if box.width <= 0.98 * figure.bbox.width or columns == 1:
            break
        legend.remove()
    legend.get_title().set_color(_INK)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + box.height / figure.dpi)


def _mean(values: Sequence[float]) -> str:
    """A value, the mean of several with its spread, or nothing."""
    if not values:
        return "–"
    mean = f"{math.fsum(values) / len(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f} (n = {len(values)})"


def _lines(runs: Sequence[_Run]) -> list[_Line]:
    """The runs by line, in the order of the paper's rows; where a seed comes twice, each run is a line by itself."""
    groups: dict[str, list[_Run]] = {}
    for run in runs:
        groups.setdefault(_experiment(run), []).append(run)
    sets: list[list[_Run]] = []
    for group in groups.values():
        seeds = {str(run.config.get("seed")) for run in group}
        sets += [group] if len(seeds) == len(group) else [[run] for run in group]
    sets.sort(key=lambda runs: method_order(runs[0].name))
    looks = _looks([runs[0].name for runs in sets])
    labels = _labels(sets)
    return [_Line(runs, label, *look) for runs, label, look in zip(sets, labels, looks, strict=True)]


_NOT_THE_EXPERIMENT = FREE_KEYS | SPEED_KEYS | {"overrides", "sha256", "recipe", "paper", "note"}


def _experiment(run: _Run) -> str:
    """The same text for runs of one configuration but for the seed, the machine and what is recorded."""
    config = {key: value for key, value in run.config.items() if key not in _NOT_THE_EXPERIMENT}
    return json.dumps([run.name, config], sort_keys=True)


def histograms(run: Path, out: Path) -> Path:
    """How the quantized weights move to the levels: one panel per layer, time upwards, dark where many weights are.

    The colour is logarithmic, so that a few weights still on their way show beside the many that have arrived. If
    there are more than eight layers, eight are drawn, evenly chosen, the first and the last among them. Layers that
    stay in float are left out, unless the whole network is float.

    Args:
        run: folder with ``config.json`` and a ``metrics.jsonl`` that has lines of weight histograms.
        out: the picture to write.

    Returns:
        ``out``.

    Raises:
        PlotError: no histograms yet, a file is missing or broken, or matplotlib is not installed.
    """
    loaded = _load(run)
    if not loaded.weights:
        raise PlotError(f"no line of weight histograms in {run / 'metrics.jsonl'} yet: let the run go on for a while")
    layers = list(loaded.weights[max(loaded.weights)]["layers"])
    quantized = [layer for layer in layers if loaded.quantizes(layer)]
    shown = _evenly(quantized or layers, _PANELS)
    rows = 1 if len(shown) <= 5 else 2
    columns = math.ceil(len(shown) / rows)
    figure = _figure(2.1 * columns + 1.3, 3.0 * rows + 0.9)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    levels = level_values(loaded.config["levels"]) if quantized else ()
    titles = _titles(figure, [_plain(layer) for layer in shown])
    for index, (ax, layer, title) in enumerate(zip(panels, shown, titles, strict=False)):
        mesh = _draw_weights(ax, loaded, layer)
        _style(ax, title, "")
        ax.grid(visible=False)
        lowest = index + columns >= len(shown)
        ax.tick_params(labelbottom=lowest)
        ax.set_xlabel("weight" if lowest else "", fontsize=9, color=_INK)
        ax.set_ylabel("" if index % columns else "iteration", fontsize=9, color=_INK)
    for ax in panels[len(shown) :]:
        ax.set_visible(False)
    _weight_ticks(panels[0], levels)
    _iterations(panels[0].yaxis, max(loaded.weights))
    _colour_bar(figure, mesh)
    some = "" if len(shown) == len(quantized or layers) else f" ({len(shown)} of {len(quantized or layers)} layers)"
    goal = f" to {_levels_text(levels)}" if levels else ""
    _headline(figure, f"{method_label(loaded.name)}: how the weights move{goal}{some}")
    return _save(figure, out)


def _weight_ticks(ax: Axes, levels: Sequence[float]) -> None:
    """A tick at each level, labelled from the ends inwards where there is room; a few round numbers in float."""
    from matplotlib.ticker import MaxNLocator

    if not levels:
        ax.xaxis.set_major_locator(MaxNLocator(3))
        ax.xaxis.set_major_formatter(lambda value, _: _signed(f"{value:g}"))
        return
    low, high = min(ax.get_xlim()[0], levels[0]), max(ax.get_xlim()[1], levels[-1])  # ticks widen the axis
    inches = [1.8 * (level - low) / (high - low) for level in levels]
    texts = [_signed(f"{level:+.3g}" if level else "0") for level in levels]
    labelled: list[int] = []
    for k in range((len(levels) + 1) // 2):
        pair = [*labelled, *sorted({k, len(levels) - 1 - k})]
        gaps = [abs(inches[i] - inches[j]) - 0.04 * (len(texts[i]) + len(texts[j])) for i, j in combinations(pair, 2)]
        labelled = pair if min(gaps, default=1.0) > 0.08 else labelled
    ax.set_xticks(levels, [text if k in labelled else "" for k, text in enumerate(texts)])


def _draw_weights(ax: Axes, run: _Run, layer: str) -> Any:
    """One layer as a heat map: a row a moment, a column a bin, the colour the share of the layer's weights in it."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, LogNorm  # type: ignore[import-not-found, unused-ignore]

    moments = _evenly(sorted(run.weights), _MOMENTS)
    lines = [run.weights[step] for step in moments]
    low, high = min(line["range"][0] for line in lines), max(line["range"][1] for line in lines)
    bins = max(len(line["layers"].get(layer, [0])) for line in lines)
    edges = np.linspace(low, high, 1 + bins // math.ceil(bins / _COLUMNS))
    shares = np.array([_shares(line["range"], line["layers"].get(layer, [0]), edges) for line in lines])
    occupied = np.flatnonzero(shares.any(0))
    first, last = (occupied[0], occupied[-1] + 1) if len(occupied) else (0, len(edges) - 1)
    edges, shares = edges[first : last + 1], np.ma.masked_less_equal(shares[:, first:last], 0)
    between = [(a + b) / 2 for a, b in pairwise(moments)]
    rows = [moments[0] - (not between), *between, moments[-1] + (not between)]
    shades = LinearSegmentedColormap.from_list("shades", _SHADES)
    mesh = ax.pcolormesh(edges, rows, shares, cmap=shades, norm=LogNorm(3e-4, 1))
    ax.use_sticky_edges = False
    ax.margins(x=0.05, y=0)
    return mesh


def _shares(span: Sequence[float], counts: Sequence[float], edges: Any) -> Any:
    """A histogram in other bins, as shares of the whole: differences of its cumulated counts at the new edges."""
    import numpy as np

    cumulated = np.concatenate([[0.0], np.cumsum(counts)])
    own = np.linspace(span[0], span[1], len(cumulated))
    return np.diff(np.interp(edges, own, cumulated)) / max(cumulated[-1], 1)


def _colour_bar(figure: Figure, mesh: Any) -> None:
    bar = figure.colorbar(mesh, ax=figure.axes, shrink=0.55, aspect=18, pad=0.015, anchor=(0, 1))
    bar.set_ticks([0.001, 0.01, 0.1, 1], labels=["0.1 %", "1 %", "10 %", "100 %"])
    bar.ax.tick_params(labelsize=8, color=_GRID, labelcolor=_INK, which="both")
    bar.ax.minorticks_off()
    bar.ax.set_title("share of\nthe layer", loc="left", fontsize=8, color=_INK, pad=7)
    bar.outline.set_visible(False)


def projections(out: Path) -> list[Path]:
    """The paper's fig:tanh and fig:stanh: a projection, its inverse and its mirror map for several β.

    Args:
        out: folder for ``tanh.png`` (binary levels) and ``stanh.png`` (shifted tanh, ternary levels).

    Returns:
        The two files.

    Raises:
        PlotError: matplotlib is not installed.
    """
    binary = _draw_mirror(Tanh(), BINARY.nearest, "tanh, levels −1, +1", out / "tanh.png")
    ternary = _draw_mirror(ShiftedTanh(TERNARY), TERNARY.nearest, "shifted tanh, levels −1, 0, +1", out / "stanh.png")
    return [binary, ternary]


def _draw_mirror(mirror: Mirror, hard: Callable[[torch.Tensor], torch.Tensor], title: str, out: Path) -> Path:
    dual = torch.linspace(-2, 2, 1601, dtype=torch.float64)
    primal = torch.tanh(torch.linspace(-17, 17, 3201, dtype=torch.float64))  # dense where the inverse is steep
    figure = _figure(10.2, 3.6)
    axes = figure.subplots(1, 3)
    axes[0].plot(dual, hard(dual), color=_FAINT, ls=(0, (4, 3)), lw=1.2, label="β → ∞")
    for beta, colour in _BETAS.items():
        look = {"color": colour, "lw": 1.8, "label": f"β = {beta}"}
        axes[0].plot(dual, mirror.project(dual, beta), **look)
        axes[1].plot(primal, mirror.inverse(primal, beta), **look)
        axes[2].plot(primal, mirror.potential(primal, beta), **look)
    _style(axes[0], "Projection  w = P(w̃)", "dual w̃", "primal w")
    _style(axes[1], "Inverse  w̃ = P⁻¹(w) = ∇Φ(w)", "primal w", "dual w̃")
    _style(axes[2], "Mirror map  Φ(w)", "primal w", "Φ")
    axes[0].set_xticks([-2, -1, 0, 1, 2])
    axes[0].set_yticks([-1, -0.5, 0, 0.5, 1])
    axes[1].set_yticks([-2, -1, 0, 1, 2])
    axes[0].set_xlim(-2, 2)
    axes[1].set_ylim(-2, 2)
    for ax in axes[1:]:
        ax.set_xlim(-1.05, 1.05)
    _legend(axes[0], loc="lower right")
    _headline(figure, title)
    return _save(figure, out)


def comparison(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Test accuracy of the rounded network by method, as points, with the float network as a dashed line.

    Args:
        rows: those of :func:`mirrorquant.train.tables.compare_row`; several of one method and levels, as of several
            seeds, are drawn as small points around their mean. Rows of the method ``ref`` make the dashed line.
        out: the picture to write.

    Returns:
        ``out``.

    Raises:
        PlotError: no quantized method among the rows, or matplotlib is not installed.
    """
    points: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        key = (row["method"], levels_label(row.get("levels")))
        points.setdefault(key, []).append(float(row["test"]))
    floats = [value for (method, _), values in points.items() if method == "ref" for value in values]
    points = {key: values for key, values in points.items() if key[0] != "ref"}
    if not points:
        raise PlotError("no quantized method to compare: give the rows of at least one beside the float reference")
    figure = _figure(7.2, 1.0)
    several = len({levels for _, levels in points}) > 1
    names = [_wrapped(figure, _row_name(*key, several), 2.3, fontsize=9) for key in points]
    lines = max(name.count("\n") + 1 for name in names)
    figure.set_size_inches(7.2, 1.2 + len(points) * (0.16 + 0.16 * lines))
    ax = figure.subplots()
    _style(ax, "", "")
    _draw_points(ax, points)
    ax.set_yticks(range(len(points)), names)
    ax.set_ylim(len(points) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0, labelsize=9)
    every = [value for values in (*points.values(), floats) for value in values]
    start = _axis_start(every)
    ax.set_xlim(start, min(100.0, max(every) + 0.05 * (max(every) - start)))
    if floats:
        mean = math.fsum(floats) / len(floats)
        ax.axvline(mean, color=_INK, ls=(0, (4, 3)), lw=1.3, zorder=2)
        where: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "bottom"}
        ax.text(mean, 1.02, f"float {_mean(floats)}", fontsize=8.5, color=_INK, **where)
    _headline(figure, "Test accuracy of the rounded network, %")
    return _save(figure, out)


def _row_name(method: str, levels: str, several: bool) -> str:
    """A method, with its levels if the rows have several sets of them."""
    return _plain(method_label(method)) + (f" ({_short_levels(levels)})" if several else "")


def _draw_points(ax: Axes, points: Mapping[tuple[str, str], Sequence[float]]) -> None:
    """The mean of each row, on a line over the range of its seeds, which are small points; its figure at the right."""
    looks = _looks([method for method, _ in points])
    for place, (((method, _), values), look) in enumerate(zip(points.items(), looks, strict=True)):
        colour = _LOOKS.get(method, look)[0]
        if len(values) > 1:
            ax.plot([min(values), max(values)], [place] * 2, color=colour, lw=2, zorder=3, clip_on=False)
            ax.plot(values, [place] * len(values), "o", ms=4, color="white", mec=colour, zorder=4, clip_on=False)
        mean = math.fsum(values) / len(values)
        ax.plot(mean, place, "o", ms=9, color=colour, mec="white", mew=1.2, zorder=5, clip_on=False)
        right: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center_baseline"}
        ax.text(1.03, place, _mean(values), fontsize=9, color=_INK, **right)


def _axis_start(values: Sequence[float]) -> float:
    """A round number some way below the smallest value, so that differences can be seen; zero for a wide spread."""
    spread = max(max(values) - min(values), 1.0)
    start = min(values) - 1.5 * spread
    unit = 1 if spread < 4 else 5
    return float(max(0, unit * math.floor(start / unit)))


def _load(folder: Path) -> _Run:
    """A run folder; a step that was recorded twice, before and after a resume, counts as recorded last."""
    if folder.is_file():
        return _load_summary(folder)
    config = _checked(folder / "config.json")
    summary = _read_json(folder / "summary.json") if (folder / "summary.json").exists() else {}
    recipe = str(summary.get("recipe") or config.get("recipe") or "")
    name = method_name(recipe, config, config.get("overrides"))
    run = _Run(folder, config, name, floats=_floats(summary))
    for line in _read_lines(folder / "metrics.jsonl"):
        if line["kind"] in _FIELDS:
            getattr(run, line["kind"])[line["step"]] = line
    return run


def _floats(summary: Mapping[str, Any]) -> frozenset[str]:
    """The parameters that a summary lists with 32 bits."""
    rows = summary.get("layers")
    listed = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return frozenset(str(row.get("name")) for row in listed if row.get("bits") == 32)


def _load_summary(file: Path) -> _Run:
    """A run of which only the summary was kept: its curves, and β by its schedule."""
    summary = _read_json(file)
    try:
        config = _typed(file, summary["config"])
        beta = schedules.geometric(config["beta_scale"], every=config["beta_interval"], cap=config["beta_cap"])
        train = {int(step): {"loss": float(loss), "beta": beta(int(step))} for step, loss in summary["loss_curve"]}
        val = {int(step): {"accuracy": float(accuracy)} for step, accuracy in summary["curve"]}
        name = method_name(str(summary.get("recipe") or ""), config, summary.get("overrides"))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PlotError(f"{file}: not the summary of a run ({type(error).__name__}: {error})") from error
    return _Run(file, config, name, train=train, val=val)


def _checked(file: Path) -> dict[str, Any]:
    """A run's configuration; what is read from it here is of the right type."""
    return _typed(file, _read_json(file))


def _typed(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    levels = config.get("levels")
    if not isinstance(config.get("method"), str):
        raise PlotError(f"{file}: method is {config.get('method')!r}, expected a name")
    if not (levels is None or isinstance(levels, str) or _numbers(levels)):
        raise PlotError(f"{file}: levels are {levels!r}, expected a name or numbers")
    if not isinstance(config.get("overrides", {}), dict):
        raise PlotError(f"{file}: overrides are {config['overrides']!r}, expected a key and a value each")
    return {**config, "levels": None if config["method"] == "ref" else levels}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = _files.parse_json(_files.read_regular(file))
    except FileNotFoundError as error:
        raise PlotError(f"{file}: no such file; is {file.parent} a run folder?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PlotError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise PlotError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, their fields checked."""
    try:
        file.stat()
        rows = read_metrics(file)
    except OSError as error:
        raise PlotError(f"{file}: not readable ({error}); is {file.parent} a run folder?") from error
    except MetricsError as error:
        raise PlotError(str(error)) from error
    for number, row in enumerate(rows, 1):
        for key in _FIELDS.get(row["kind"], ()):
            if not _sound(key, row.get(key)):
                found = str(row.get(key))[:60]
                raise PlotError(f"{file}, line {number}: {key} of a {row['kind']} line is {found}")
    return rows


def _sound(key: str, value: Any) -> bool:
    """Whether a field of a metrics line is what its name promises."""
    if key == "range":
        return _numbers(value) and len(value) == 2 and value[0] < value[1]
    if key == "layers":
        return isinstance(value, dict) and len(value) > 0 and all(map(_numbers, value.values()))
    if key == "beta" and value is None:
        return True
    return isinstance(value, int if key == "step" else int | float)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(number, int | float) for number in value)


def _figure(width: float, height: float) -> Figure:
    """An empty figure in inches, outside pyplot's list of figures."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("figures need matplotlib: pip install 'mirrorquant[plots]'") from error
    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")


def _save(figure: Figure, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(out, dpi=_DPI, format=out.suffix[1:] or "png")
    except ValueError as error:
        raise PlotError(f"{out}: {error}; name a file that ends in .png") from error
    return out


def _style(ax: Axes, title: str, x: str, y: str = "") -> None:
    """The look of every panel: title at the left, light grid behind the data, no frame."""
    ax.set_title(title, loc="left", fontsize=9.5, color=_INK)
    ax.set_xlabel(x, fontsize=9, color=_INK)
    ax.set_ylabel(y, fontsize=9, color=_INK)
    ax.set_axisbelow(True)
    ax.grid(visible=True, color=_GRID, lw=0.8)
    ax.tick_params(labelsize=8, color=_GRID, labelcolor=_INK, which="both")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(_FAINT)


def _legend(ax: Axes, **options: Any) -> None:
    ax.legend(
        fontsize=8.5, title_fontsize=8.5, framealpha=0.9, edgecolor="none", labelcolor=_INK, alignment="left", **options
    )


def _headline(figure: Figure, text: str) -> None:
    """A bold title at the left, on several lines where one is too narrow; the figure grows with them."""
    if not text:
        return
    font: dict[str, Any] = {"fontsize": 11.5, "fontweight": "bold"}
    width, height = figure.get_size_inches()
    text = _wrapped(figure, _plain(text), 0.97 * width, **font)
    figure.suptitle(text, x=0.008, ha="left", color=_INK, **font)
    figure.set_size_inches(width, height + 0.19 * text.count("\n"))


def _renderer(figure: Figure) -> Any:
    """What measures text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found, unused-ignore]

    return FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call, unused-ignore]


def _inches(figure: Figure, text: str, **font: Any) -> float:
    """The width of a text."""
    artist = figure.text(0, 0, text, **font)
    width = artist.get_window_extent(_renderer(figure)).width
    artist.remove()
    return float(width) / figure.dpi


def _wrapped(figure: Figure, text: str, width: float, **font: Any) -> str:
    """A text on lines of at most so many inches, as few and as even as can be."""
    characters = len(text)
    wide = _inches(figure, text, **font)
    if wide > width:
        characters = int(1.1 * characters * width / wide)
    while characters > 8 and _inches(figure, textwrap.fill(text, characters), **font) > width:
        characters -= 1
    lines = len(textwrap.wrap(text, characters))
    while characters > 8 and len(textwrap.wrap(text, characters - 1)) == lines:
        characters -= 1
    return textwrap.fill(text, characters)


def _titles(figure: Figure, layers: Sequence[str], width: float = 1.9) -> list[str]:
    """Names of layers for panels of so many inches: without the ending that all share, then only the last part."""
    parts = [layer.split(".") for layer in layers]
    while max(_inches(figure, ".".join(part), fontsize=9.5) for part in parts) > width:
        if min(map(len, parts)) < 2 or len({part[-1] for part in parts}) > 1 or len(parts) < 2:
            break
        parts = [part[:-1] for part in parts]
    return [_clipped(figure, ".".join(part), width) for part in parts]


def _clipped(figure: Figure, text: str, width: float) -> str:
    """The end of a text that is wider than so many inches."""
    kept = text
    while _inches(figure, kept, fontsize=9.5) > width and len(text) > 4:
        text = text[1:]
        kept = "…" + text
    return kept


def _plain(text: str) -> str:
    """A text that is not taken for mathematics."""
    return text.replace("$", r"\$")


def _iterations(axis: Any, last: float) -> None:
    """Ticks at whole iterations, as 20k or 2M where there are many."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
    unit, letter = (1_000_000, "M") if last >= 2_000_000 else (1000, "k") if last >= 10_000 else (1, "")
    axis.set_major_formatter(lambda value, _: f"{value / unit:g}{letter}" if value else "0")


def _looks(methods: Sequence[str]) -> list[tuple[str, Any]]:
    """A colour and a dash pattern for each line: the method's own look if it is free, else one that no line has."""
    used: list[tuple[str, Any]] = []
    for method in methods:
        own = [_LOOKS[method]] if method in _LOOKS else []
        others = [colour for name, (colour, dash) in _LOOKS.items() if dash == _SOLID and name not in methods]
        every = [*others, *(colour for colour, dash in _LOOKS.values() if dash == _SOLID)]
        wanted = own + [(colour, dash) for dash in (_SOLID, _DASHED, _DOTTED) for colour in every]
        free = [look for look in wanted if look not in used and (look in own or look not in map(_LOOKS.get, methods))]
        used.append(free[0] if free else (_FAINT, _SOLID))
    return used


def _labels(sets: Sequence[Sequence[_Run]]) -> list[str]:
    """The method of each set of runs; where several have the same one, what tells those apart."""
    labels = [method_label(runs[0].name) for runs in sets]
    for key in ("data", "model", "levels", "lr", "seed"):
        found = [runs[0].config.get(key) for runs in sets]
        values = [f"{value:g}" if isinstance(value, float) else str(value) for value in found]
        alike = {label: [v for name, v in zip(labels, values, strict=True) if name == label] for label in labels}
        pairs = list(zip(labels, values, strict=True))
        labels = [f"{label}, {key} {value}" if len(set(alike[label])) > 1 else label for label, value in pairs]
    twice = {label for label in labels if labels.count(label) > 1}
    folders = [runs[0].folder.name for runs in sets]
    names = [f"{label}, {folder}" if label in twice else label for label, folder in zip(labels, folders, strict=True)]
    return [_plain(name) for name in names]


def _task(runs: Sequence[_Run]) -> str:
    """Data set and model, if they are the same in all runs."""
    tasks = {(str(run.config.get("data", "")), str(run.config.get("model", ""))) for run in runs}
    (data, model), *rest = tasks
    return "" if rest else ", ".join(filter(None, (data_label(data), model_label(model))))


def _evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _signed(text: str) -> str:
    """Minus signs instead of hyphens."""
    return text.replace("-", "−")


def _levels_text(levels: Sequence[float]) -> str:
    """Levels in a sentence: a few of them as they are, of many their number and range."""
    texts = [_signed(f"{level:+.3g}" if level else "0") for level in levels]
    return (
        f"the levels {', '.join(texts)}" if len(texts) <= 4 else f"{len(texts)} levels from {texts[0]} to {texts[-1]}"
    )


def _short_levels(label: str) -> str:
    """The label of a level set, of more than four its number and range."""
    parts = _signed(label).split(", ")
    text = ", ".join(parts) if len(parts) <= 4 else f"{len(parts)} levels, {parts[0]} to {parts[-1]}"
    return text.replace(" ", "\u00a0")  # on one line


def _listed(runs: Sequence[Path]) -> str:
    return ", ".join(map(str, runs)) or "no run folder"
