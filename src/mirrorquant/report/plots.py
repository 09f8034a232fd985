"""Figures: training curves, weights moving to their levels, projections with their mirror maps, methods compared.

Each function writes PNG files and returns their paths. Runs are read as :class:`mirrorquant.report.RunRecord`, also
while they go on. Matplotlib is imported when a figure is made, and its settings are restored.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from mirrorquant import data, models
from mirrorquant.errors import MirrorquantError
from mirrorquant.levels import BINARY, TERNARY, Levels
from mirrorquant.mirrors import Mirror, ShiftedTanh, Tanh
from mirrorquant.report import labels
from mirrorquant.report.record import RunRecord
from mirrorquant.report.tables import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

__all__ = ["PlotError", "comparison", "curves", "histograms", "projections"]

_INK, _GRID, _FAINT = "#333333", "#e4e4e4", "#8c8c8c"
_COLOURS = [
    "#332288",
    "#cc6677",
    "#117733",
    "#999933",
    "#88ccee",
    "#44aa99",
    "#ddcc77",
    "#aa4499",
    "#882255",
    "#555555",
]
_SHADES = ["#e3f1f8", "#88ccee", "#4a6fb5", "#332288", "#1a0f4f"]
_DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1.5, 1.5))]
_HEADLINE: dict[str, Any] = {"fontsize": 11.5, "fontweight": "bold"}
_STYLE: Any = {
    **{"axes.axisbelow": True, "axes.edgecolor": _FAINT, "axes.grid": True, "grid.color": _GRID, "grid.linewidth": 0.8},
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    **{"axes.labelcolor": _INK, "axes.labelsize": 9, "axes.titlecolor": _INK, "axes.titlesize": 9.5},
    **{"axes.titlelocation": "left", "figure.dpi": 150, "savefig.dpi": 150, "text.color": _INK},
    **{"legend.edgecolor": "none", "legend.framealpha": 0.9, "legend.fontsize": 8.5, "legend.title_fontsize": 8.5},
    **{f"{axis}tick.{key}": value for axis in "xy" for key, value in (("color", _GRID), ("labelcolor", _INK))},
    **{"xtick.labelsize": 8, "ytick.labelsize": 8},
}
_FEW = 25  # points that are drawn as such
_PANELS, _MOMENTS, _COLUMNS = 8, 150, 120  # of histograms, at most


class PlotError(MirrorquantError, ValueError):
    """A figure that cannot be made: matplotlib is missing, or there is nothing to draw yet."""


def curves(runs: Sequence[Path], out: Path) -> Path:
    """Training curves (the paper's fig:trcurves): one line per run, or per set of runs that differ only in their seed.

    The panels show the validation accuracy of the rounded network with its best value, the training loss and β. A line
    over several seeds is their mean, in a band from the lowest to the highest seed. ``runs`` are folders, or files as
    they are kept in ``results/``.
    """
    records = [RunRecord.read(run) for run in runs]
    lines = _lines(records)
    right = ["loss"] * any(line.span("train", "loss") for line in lines) + ["beta"] * any(map(_Line.betas, lines))
    accuracy = any(map(_Line.best, lines))
    if not accuracy and not right:
        where = ", ".join(map(str, runs)) or "no run folder"
        raise PlotError(f"no training or validation line in {where} yet: let the run go on for a while")
    beside: Any = [["accuracy", panel] for panel in right] or [["accuracy"]]
    with _figure(out, 9.6, 4.2) as figure:
        widths = [1.7, 1] if accuracy and right else None
        axes = figure.subplot_mosaic(beside if accuracy else cast(Any, [right]), width_ratios=widths)
        _draw_curves(axes, lines)
        last = max(max([0, *record.train, *record.val]) for record in records)
        for ax in axes.values():
            ax.set(xlabel="iteration", xlim=(0, max(last, 1)))
            _iterations(ax.xaxis, last)
        if len(axes) == 3:  # loss above beta
            axes["loss"].sharex(axes["beta"])
            axes["loss"].tick_params(labelbottom=False)
            axes["loss"].set_xlabel("")
        _headline(figure, _task(records))
        _legend_below(figure, lines)
    return out


@dataclass(frozen=True)
class _Line:
    """One line of the curves: runs that differ in nothing but their seed, with their label and look."""

    runs: Sequence[RunRecord]
    label: str
    colour: str
    dash: Any

    def values(self, kind: str, key: str) -> list[float]:
        """All values of all runs."""
        return [value for run in self.runs for value in run.series(kind, key).values()]

    def span(self, kind: str, key: str) -> dict[int, tuple[float, float, float]]:
        """Mean, minimum and maximum over the runs by step, at the steps that all runs with data have recorded."""
        recorded = [values for run in self.runs if (values := run.series(kind, key))]
        shared = sorted(set.intersection(*map(set, recorded))) if recorded else []
        columns = {step: [values[step] for values in recorded] for step in shared}
        return {step: (math.fsum(v) / len(v), min(v), max(v)) for step, v in columns.items()}

    def betas(self) -> dict[int, float]:
        """β by step, for methods that anneal it; the seeds share one schedule. A log axis has no place for zero."""
        if not labels.uses_beta(self.runs[0].config["method"]):
            return {}
        longest = max((run.series("train", "beta") for run in self.runs), key=len)
        return {step: beta for step, beta in longest.items() if beta > 0}

    def best(self) -> list[tuple[int, float]]:
        """Step and value of each run's best validation accuracy: of equals the later one, as in training."""
        every = [run.series("val", "accuracy") for run in self.runs]
        return [max(values.items(), key=lambda point: (point[1], point[0])) for values in every if values]


def _lines(runs: Sequence[RunRecord]) -> list[_Line]:
    """The runs by line, in the order of the paper's rows; where a seed comes twice, each run is a line by itself."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(run.experiment, []).append(run)
    sets: list[list[RunRecord]] = []
    for group in groups.values():
        seeds = {str(run.config.get("seed")) for run in group}
        sets += [group] if len(seeds) == len(group) else [[run] for run in group]
    sets.sort(key=lambda runs: labels.method_order(runs[0].name))
    looks = _looks([runs[0].name for runs in sets])
    return [_Line(runs, label, *look) for runs, label, look in zip(sets, _labels(sets), looks, strict=True)]


def _labels(sets: Sequence[Sequence[RunRecord]]) -> list[str]:
    """The method of each set of runs, followed by whatever distinguishes it from the others of that method."""
    firsts = [runs[0] for runs in sets]
    names = [labels.method(run.name) for run in firsts]
    for key in ("data", "model", "levels", "lr", "seed", "folder"):
        values = [run.path.name if key == "folder" else run.config.get(key) for run in firsts]
        texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        pairs = list(zip(names, texts, strict=True))
        apart = {name for name, text in pairs if any(name == n and text != t for n, t in pairs)}
        names = [f"{name}, {key} {text}" if name in apart else name for name, text in pairs]
    return [_plain(name) for name in names]


def _looks(methods: Sequence[str]) -> list[tuple[str, Any]]:
    """A colour and a dash pattern for each line: the method's own look if it is free, else one that no line has."""
    reserved = {_own_look(method) for method in methods}
    free = [(colour, dash) for dash in _DASHES for colour in _COLOURS if (colour, dash) not in reserved]
    looks: list[tuple[str, Any]] = []
    for method in methods:
        own = _own_look(method)
        looks.append(own if own[0] and own not in looks else free.pop(0) if free else (_FAINT, "-"))
    return looks


def _own_look(method: str) -> tuple[str, Any]:
    """Variants of a method, such as PQ*, share its colour and differ in the dashes."""
    return labels.method_colour(method) or "", _DASHES[method.endswith("-star")]


def _draw_curves(axes: Mapping[str, Axes], lines: Sequence[_Line]) -> None:
    """Accuracy, loss and β, each where there is a panel for it."""
    if ax := axes.get("accuracy"):
        ax.set_title("Validation accuracy of the rounded network, %")
        for line in lines:
            _draw_span(ax, line, line.span("val", "accuracy"))
            for step, value in line.best():
                size = 6 if len(line.runs) == 1 else 4.5
                ax.plot(step, value, "o", color=line.colour, ms=size, mec="white", mew=1, zorder=4, clip_on=False)
        values = [value for line in lines for value in line.values("val", "accuracy")]
        pad = max(0.05 * (max(values) - min(values)), 1)
        ax.set_ylim(max(min(values) - pad, -1), min(max(values) + pad, 101))
    if ax := axes.get("loss"):
        ax.set_title("Training loss")
        for line in lines:
            _draw_span(ax, line, line.span("train", "loss"))
        _scale(ax, [value for line in lines for value in line.values("train", "loss")])
    if ax := axes.get("beta"):
        ax.set_title("Annealing: β")
        _draw_betas(ax, lines)
        _scale(ax, [beta for line in lines for beta in line.betas().values()])


def _draw_span(ax: Axes, line: _Line, span: Mapping[int, tuple[float, float, float]]) -> None:
    """The mean with its band; of many points their running mean, above the single run's own values in pale."""
    if not span:
        return
    steps, values = list(span), list(zip(*span.values(), strict=True))
    half = len(steps) // 100  # windows of 2 %
    mean, low, high = (_running_mean(v, half) for v in values)
    ax.plot(steps, mean, color=line.colour, ls=line.dash, lw=1.5, zorder=3, **_dots(steps))
    if len(line.runs) > 1:
        ax.fill_between(steps, low, high, color=line.colour, alpha=0.2, lw=0, zorder=2)
    elif half:
        ax.plot(steps, values[0], color=line.colour, lw=0.6, alpha=0.3, zorder=2)


def _dots(points: Collection[Any]) -> dict[str, Any]:
    return {"marker": "o", "ms": 3, "clip_on": False} if len(points) <= _FEW else {}


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
        for k, line in enumerate(sharing):
            dash = (length * (n - k) % (length * n), (length, length * (n - 1))) if n > 1 else "-"
            dots = _dots(betas) if n == 1 else {}
            ax.plot(list(betas), list(betas.values()), color=line.colour, ls=dash, lw=1.8, zorder=3, **dots)


def _coincide(some: Mapping[int, float], others: Mapping[int, float]) -> bool:
    """Whether two series of β end at the same step, and look the same on a log axis wherever both were recorded."""
    shared = some.keys() & others.keys()
    apart = max((abs(math.log(some[step] / others[step])) for step in shared), default=math.inf)
    return max(some) == max(others) and apart <= 0.02 * max(map(abs, map(math.log, some.values())))


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

    title = "best validation accuracy (dots), %"
    if any(len(line.runs) > 1 for line in lines):
        title += "; over several seeds: mean ± standard deviation, band from lowest to highest"
    if any(len(run.train) >= 100 or len(run.val) >= 100 for line in lines for run in line.runs):
        title += "\nlines: running mean over 2 % of the points; pale: the points of a single run"
    handles = []
    for line in lines:
        text = f"{line.label}  {spread([value for _, value in line.best()], count=True)}"
        handles.append(Line2D([], [], color=line.colour, ls=line.dash, lw=2, label=textwrap.fill(text, 76)))
    look: dict[str, Any] = {"loc": "outside lower left", "title": title, "frameon": False, "alignment": "left"}
    for columns in range(min(len(handles), 6), 0, -1):
        legend = figure.legend(handles=handles, ncols=columns, **look)
        box = legend.get_window_extent(_renderer(figure))
        if box.width <= 0.98 * figure.bbox.width or columns == 1:
            break
        legend.remove()
    _grow(figure, box.height / figure.dpi)


def histograms(run: Path, out: Path) -> Path:
    """How the quantized weights move to the levels: one panel per layer, time upwards, dark where many weights are.

    The colour is logarithmic, so that a few weights still on their way show beside the many that have arrived. If
    there are more than eight layers, eight are drawn, evenly chosen, the first and the last among them. Layers that
    stay in float are left out, unless the whole network is float.
    """
    record = RunRecord.read(run)
    if not record.weights:
        raise PlotError(f"no line of weight histograms in {run / 'metrics.jsonl'} yet: let the run go on for a while")
    layers = list(record.weights[max(record.weights)]["layers"])
    quantized = [layer for layer in layers if record.quantizes(layer)]
    shown = _evenly(quantized or layers, _PANELS)
    levels = labels.level_values(record.levels) if quantized else ()
    rows = 1 if len(shown) <= 5 else 2
    columns = math.ceil(len(shown) / rows)
    with _figure(out, 2.1 * columns + 1.3, 3.0 * rows + 0.9) as figure:
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
        titles = _titles(figure, [_plain(layer) for layer in shown])
        for index, (ax, layer, title) in enumerate(zip(panels, shown, titles, strict=False)):
            mesh = _draw_weights(ax, record, layer)
            lowest = index + columns >= len(shown)
            ax.tick_params(labelbottom=lowest)
            ax.set(title=title, xlabel="weight" * lowest, ylabel="" if index % columns else "iteration")
        for ax in panels[len(shown) :]:
            ax.set_visible(False)
        _weight_ticks(panels[0], levels)
        _iterations(panels[0].yaxis, max(record.weights))
        _colour_bar(figure, mesh)
        some = "" if len(shown) == len(quantized or layers) else f" ({len(shown)} of {len(quantized or layers)} layers)"
        goal = f" to {'the levels ' * (len(levels) <= 4)}{_levels_text(levels)}" if levels else ""
        _headline(figure, f"{labels.method(record.name)}: how the weights move{goal}{some}")
    return out


def _draw_weights(ax: Axes, run: RunRecord, layer: str) -> Any:
    """One layer as a heat map: a row per moment, a column per bin, the colour its share of the layer's weights."""
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
    ax.grid(visible=False)
    ax.use_sticky_edges = False
    ax.margins(x=0.05, y=0)
    return mesh


def _shares(span: Sequence[float], counts: Sequence[float], edges: Any) -> Any:
    """A histogram in other bins, as shares of the whole: differences of its cumulated counts at the new edges."""
    import numpy as np

    cumulated = np.concatenate([[0.0], np.cumsum(counts)])
    own = np.linspace(span[0], span[1], len(cumulated))
    return np.diff(np.interp(edges, own, cumulated)) / max(cumulated[-1], 1)


def _weight_ticks(ax: Axes, levels: Sequence[float]) -> None:
    """A tick at each level, labelled from the ends inwards where there is room; a few round numbers in float."""
    from matplotlib.ticker import MaxNLocator

    if not levels:
        ax.xaxis.set_major_locator(MaxNLocator(3))
        return
    low, high = min(ax.get_xlim()[0], levels[0]), max(ax.get_xlim()[1], levels[-1])  # ticks widen the axis
    inches = [1.8 * (level - low) / (high - low) for level in levels]
    texts = _level_texts(levels)
    labelled: list[int] = []
    for k in range((len(levels) + 1) // 2):
        pair = [*labelled, *sorted({k, len(levels) - 1 - k})]
        gaps = [abs(inches[i] - inches[j]) - 0.04 * (len(texts[i]) + len(texts[j])) for i, j in combinations(pair, 2)]
        labelled = pair if min(gaps, default=1.0) > 0.08 else labelled
    ax.set_xticks(levels, [text if k in labelled else "" for k, text in enumerate(texts)])


def _colour_bar(figure: Figure, mesh: Any) -> None:
    bar = figure.colorbar(mesh, ax=figure.axes, shrink=0.55, aspect=18, pad=0.015, anchor=(0, 1))
    bar.set_ticks([0.001, 0.01, 0.1, 1], labels=["0.1 %", "1 %", "10 %", "100 %"])
    bar.ax.minorticks_off()
    bar.ax.set_title("share of\nthe layer", fontsize=8, pad=7)
    bar.outline.set_visible(False)


def projections(out: Path) -> list[Path]:
    """The paper's fig:tanh and fig:stanh: a projection, its inverse and its mirror map for several β.

    They are written to the folder ``out``: ``tanh.png`` (binary levels) and ``stanh.png`` (shifted tanh, ternary).
    """
    binary = _draw_mirror(Tanh(), BINARY, "tanh, levels −1, +1", out / "tanh.png")
    ternary = _draw_mirror(ShiftedTanh(TERNARY), TERNARY, "shifted tanh, levels −1, 0, +1", out / "stanh.png")
    return [binary, ternary]


def _draw_mirror(mirror: Mirror, levels: Levels, title: str, out: Path) -> Path:
    dual = torch.linspace(-2, 2, 1601, dtype=torch.float64)
    primal = torch.tanh(torch.linspace(-17, 17, 3201, dtype=torch.float64))  # dense where the inverse is steep
    whole, half = [-2, -1, 0, 1, 2], [-1, -0.5, 0, 0.5, 1]
    with _figure(out, 10.2, 3.6) as figure:
        project, inverse, potential = figure.subplots(1, 3)
        project.plot(dual, levels.nearest(dual), color=_FAINT, ls=(0, (4, 3)), lw=1.2, label="β → ∞")
        for beta, colour in ((1, "#88ccee"), (2, "#44aa99"), (4, "#117733"), (8, "#332288")):
            look = {"color": colour, "lw": 1.8, "label": f"β = {beta}"}
            project.plot(dual, mirror.project(dual, beta), **look)
            inverse.plot(primal, mirror.inverse(primal, beta), **look)
            potential.plot(primal, mirror.potential(primal, beta), **look)
        project.set(title="Projection  w = P(w̃)", xlabel="dual w̃", ylabel="primal w", xticks=whole, yticks=half)
        inverse.set(title="Inverse  w̃ = P⁻¹(w) = ∇Φ(w)", xlabel="primal w", ylabel="dual w̃", yticks=whole, ylim=(-2, 2))
        potential.set(title="Mirror map  Φ(w)", xlabel="primal w", ylabel="Φ")
        for ax, limits in ((project, (-2, 2)), (inverse, (-1.05, 1.05)), (potential, (-1.05, 1.05))):
            ax.set_xlim(*limits)
        project.legend(loc="lower right")
        _headline(figure, title)
    return out


def comparison(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Test accuracy of the rounded network by method, as points, with the float network as a dashed line.

    ``rows`` are those of :func:`mirrorquant.report.tables.compare_row`; several with one method and levels, as from
    several seeds, are drawn as small points around their mean. Rows of the method ``ref`` make the dashed line.
    """
    points: dict[tuple[str, tuple[float, ...]], list[float]] = {}
    for row in rows:
        points.setdefault((row["method"], labels.level_values(row.get("levels"))), []).append(float(row["test"]))
    every = [value for values in points.values() for value in values]
    floats = [value for (method, _), values in points.items() if method == "ref" for value in values]
    points = {key: values for key, values in points.items() if key[0] != "ref"}
    if not points:
        raise PlotError("no quantized method to compare: give the rows of at least one beside the float reference")
    several = len({levels for _, levels in points}) > 1
    with _figure(out, 7.2, 1.2) as figure:
        texts = [f" ({_levels_text(levels)})" if several else "" for _, levels in points]
        names = [_plain(labels.method(method)) + text for (method, _), text in zip(points, texts, strict=True)]
        names = [_wrapped(figure, name, 2.3, fontsize=9) for name in names]
        _grow(figure, len(points) * (0.16 + 0.16 * max(name.count("\n") + 1 for name in names)))
        ax = figure.subplots()
        _draw_points(ax, points)
        ax.set_yticks(range(len(points)), names)
        ax.tick_params(axis="y", length=0, labelsize=9)
        start = _axis_start(every)
        ax.set(ylim=(len(points) - 0.5, -0.5), xlim=(start, min(100.0, max(every) + 0.05 * (max(every) - start))))
        if floats:
            mean = math.fsum(floats) / len(floats)
            ax.axvline(mean, color=_INK, ls=(0, (4, 3)), lw=1.3, zorder=2)
            above: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "bottom"}
            ax.text(mean, 1.02, f"float {spread(floats, count=True)}", fontsize=8.5, **above)
        _headline(figure, "Test accuracy of the rounded network, %")
    return out


def _draw_points(ax: Axes, points: Mapping[tuple[str, tuple[float, ...]], Sequence[float]]) -> None:
    """The mean of each row, on a line over the range of its seeds, which are small points; its figure at the right."""
    looks = _looks([method for method, _ in points])
    for place, (((method, _), values), look) in enumerate(zip(points.items(), looks, strict=True)):
        colour = labels.method_colour(method) or look[0]
        if len(values) > 1:
            ax.plot([min(values), max(values)], [place] * 2, color=colour, lw=2, zorder=3, clip_on=False)
            ax.plot(values, [place] * len(values), "o", ms=4, color="white", mec=colour, zorder=4, clip_on=False)
        mean = math.fsum(values) / len(values)
        ax.plot(mean, place, "o", ms=9, color=colour, mec="white", mew=1.2, zorder=5, clip_on=False)
        right: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center_baseline"}
        ax.text(1.03, place, spread(values, count=True), fontsize=9, **right)


def _axis_start(values: Sequence[float]) -> float:
    """A round number some way below the smallest value, so that differences can be seen; zero for a wide spread."""
    width = max(max(values) - min(values), 1.0)
    unit = 1 if width < 4 else 5
    return float(max(0, unit * math.floor((min(values) - 1.5 * width) / unit)))


@contextmanager
def _figure(out: Path, width: float, height: float) -> Iterator[Figure]:
    """An empty figure of so many inches in our style, outside pyplot's list of figures; written at the end."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("figures need matplotlib: pip install 'mirrorquant[plots]'") from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        yield figure
        _save(figure, out)


def _save(figure: Figure, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(out, format=out.suffix[1:] or "png")
    except ValueError as error:
        raise PlotError(f"{out}: {error}; name a file that ends in .png") from error


def _grow(figure: Figure, inches: float) -> None:
    """Makes a figure taller."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + inches)


def _headline(figure: Figure, text: str) -> None:
    """A bold title at the left, on several lines where one is too narrow; the figure grows with them."""
    if text:
        text = _wrapped(figure, _plain(text), 0.97 * figure.get_size_inches()[0], **_HEADLINE)
        figure.suptitle(text, x=0.008, ha="left", **_HEADLINE)
        _grow(figure, 0.19 * text.count("\n"))


def _renderer(figure: Figure) -> Any:
    """Measures text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found, unused-ignore]

    return FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call, unused-ignore]


def _inches(figure: Figure, text: str, **font: Any) -> float:
    """The width of a text."""
    artist = figure.text(0, 0, text, **font)
    width = artist.get_window_extent(_renderer(figure)).width
    artist.remove()
    return float(width) / figure.dpi


def _wrapped(figure: Figure, text: str, width: float, **font: Any) -> str:
    """A text on lines of at most so many inches."""
    characters = math.ceil(1.3 * len(text) / math.ceil(_inches(figure, text, **font) / width))
    while characters > 8 and _inches(figure, textwrap.fill(text, characters), **font) > width:
        characters -= 1
    return textwrap.fill(text, characters)


def _titles(figure: Figure, layers: Sequence[str], width: float = 1.9) -> list[str]:
    """Names of layers for panels of so many inches: without the ending that all share, then without their beginning."""
    names = list(layers)

    def too_wide(name: str) -> bool:
        return len(name) > 4 and _inches(figure, name, fontsize=9.5) > width

    while any(map(too_wide, names)) and len({name.rpartition(".")[2] for name in names}) == 1 < len(names):
        names = [name.rpartition(".")[0] for name in names]
    for k in range(len(names)):
        while too_wide(names[k]):
            names[k] = "…" + names[k].lstrip("…")[1:]
    return names


def _plain(text: str) -> str:
    """A text that is not taken for mathematics."""
    return text.replace("$", r"\$")


def _iterations(axis: Any, last: float) -> None:
    """Ticks at whole iterations, as 20k or 2M where there are many."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
    unit, letter = (1_000_000, "M") if last >= 2_000_000 else (1000, "k") if last >= 10_000 else (1, "")
    axis.set_major_formatter(lambda value, _: f"{value / unit:g}{letter}" if value else "0")


def _task(runs: Sequence[RunRecord]) -> str:
    """Data set and model, if they are the same in all runs."""
    (images, model), *rest = {(str(run.config.get("data", "")), str(run.config.get("model", ""))) for run in runs}
    return "" if rest else ", ".join(filter(None, (data.label(images), models.label(model))))


def _evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly spaced, the first and the last among them."""
    count = min(len(items), most)
    return [items[round(index * (len(items) - 1) / max(count - 1, 1))] for index in range(count)]


def _level_texts(levels: Sequence[float]) -> list[str]:
    return [f"{level:+.3g}".replace("-", "−") if level else "0" for level in levels]


def _levels_text(levels: Sequence[float]) -> str:
    """A few levels as they are, of many their number and range; on one line."""
    texts = _level_texts(levels)
    text = ", ".join(texts) if len(texts) <= 4 else f"{len(texts)} levels, {texts[0]} to {texts[-1]}"
    return text.replace(" ", "\u00a0")
