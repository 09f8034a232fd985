"""Figures: training curves, weights moving to their levels, projections with their mirror maps, methods compared.

Each function writes a picture and returns its path. Runs are read as :class:`mirrorquant.report.RunRecord`, even before
they end. Matplotlib is imported when a figure is drawn, in the style of ``figures.mplstyle``, and keeps its settings.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from mirrorquant.errors import MirrorquantError
from mirrorquant.levels import BINARY, TERNARY, Levels
from mirrorquant.methods import Method
from mirrorquant.mirrors import Mirror, ShiftedTanh, Tanh
from mirrorquant.report import labels
from mirrorquant.report.record import RunRecord
from mirrorquant.report.tables import Kind, grouped, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

__all__ = ["PlotError", "comparison", "curves", "histograms", "projections", "search"]

_FAINT = "#8c8c8c"
_SHADES = ["#e3f1f8", "#88ccee", "#4a6fb5", "#332288", "#1a0f4f"]
_DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1.5, 1.5))]
_FEW = 25  # points of a line that are marked
_PANELS, _MOMENTS = 8, 150  # of histograms, at most
_WIDEST = 24  # characters of tick labels that stand beside each other


class PlotError(MirrorquantError, ValueError):
    """A figure that cannot be drawn: matplotlib is missing, or there is no data yet."""


def curves(runs: Sequence[Path], out: Path) -> Path:
    """Training curves (the paper's fig:trcurves): one line per run, or per set of runs that differ only in their seed.

    The panels show the validation accuracy of the rounded network with its best value, the training loss and β. A line
    over several seeds is their mean, in a band from the lowest to the highest. ``runs`` are folders, or files such as
    those in ``results/``.
    """
    records = [RunRecord.read(run) for run in runs]
    lines = _lines(records)
    right = ["loss"] * any(line.span("train", "loss") for line in lines) + ["beta"] * any(map(_Line.betas, lines))
    accuracy = any(map(_Line.best, lines))
    if not accuracy and not right:
        where = ", ".join(map(str, runs)) or "no run folder"
        raise PlotError(f"no training or validation line in {where} yet: let the run train longer")
    layout: Any = [["accuracy", panel] for panel in right or ["accuracy"]] if accuracy else [right]
    tasks = {labels.task(run.config) for run in records}
    with _figure(out, 9.6, 4.2, tasks.pop() if len(tasks) == 1 else "") as figure:
        axes = figure.subplot_mosaic(layout, width_ratios=[1.7, 1] if accuracy else None)
        _draw_curves(axes, lines)
        for ax in axes.values():
            ax.set(xlabel="iteration", xlim=(0, max(1, *(step for run in records for step in (*run.train, *run.val)))))
            _iterations(ax.xaxis)
        _legend_below(figure, lines)
    return out


@dataclass(frozen=True)
class _Line:
    """One line of the curves: runs that differ in nothing but their seed, with their label and look."""

    runs: Sequence[RunRecord]
    label: str
    colour: str
    dash: Any

    def span(self, kind: str, key: str) -> dict[int, tuple[float, float, float]]:
        """Mean, minimum and maximum over the runs by step, at the steps that all runs with data have recorded."""
        runs = [run for run in self.runs if run.validated or kind != "val"]
        recorded = [values for run in runs if (values := run.series(kind, key))]
        shared = sorted(set.intersection(*map(set, recorded))) if recorded else []
        columns = {step: [values[step] for values in recorded] for step in shared}
        return {step: (math.fsum(v) / len(v), min(v), max(v)) for step, v in columns.items()}

    def betas(self) -> dict[int, float]:
        """β by step, for methods that anneal it; the seeds share one schedule. A log axis has no place for zero."""
        method = labels.known_method(self.runs[0].config["method"])
        longest = max((run.series("train", "beta") for run in self.runs), key=len)
        return {step: beta for step, beta in longest.items() if method.uses_beta and beta > 0}

    def best(self) -> list[tuple[int, float]]:
        """Step and value of each run's best validation accuracy; the later one of equals, as in training."""
        every = [run.series("val", "accuracy") for run in self.runs if run.validated]
        return [max(values.items(), key=lambda point: (point[1], point[0])) for values in every if values]


def _lines(runs: Sequence[RunRecord]) -> list[_Line]:
    """The runs by line, in the order of the paper's rows; if a seed occurs twice, each run is a line by itself."""
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
    for key in ("data", "model", "levels", "scale", "lr", "seed", "folder"):
        values = [{**run.config, "scale": run.scale or "none", "folder": run.path.name}.get(key) for run in firsts]
        texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        pairs = list(zip(names, texts, strict=True))
        apart = {name for name, text in pairs if any(name == n and text != t for n, t in pairs)}
        names = [f"{name}, {key} {text}" if name in apart else name for name, text in pairs]
    return names


def _looks(methods: Sequence[str]) -> list[tuple[str, Any]]:
    """A colour and a dash pattern for each line: those of its method if no line has them yet, otherwise free ones.

    Variants of a method, such as PQ*, share its colour and differ in the dashes.
    """
    own = [(labels.method_colour(method), _DASHES[method.endswith("-star")]) for method in methods]
    known = [method.colour for method in reversed(Method.registry.values()) if method.colour]  # grey is last
    free = iter([(colour, dash) for dash in _DASHES for colour in known if (colour, dash) not in own])
    looks: list[tuple[str, Any]] = []
    for look in own:
        looks.append(look if look[0] and look not in looks else next(free, (_FAINT, "-")))
    return looks


def _draw_curves(axes: Mapping[str, Axes], lines: Sequence[_Line]) -> None:
    """Accuracy, loss and β, if there is a panel for it."""
    if ax := axes.get("accuracy"):
        ax.set_title("Validation accuracy of the rounded network, %")
        for line in lines:
            _draw_span(ax, line, line.span("val", "accuracy"))
            for step, value in line.best():
                ax.plot(step, value, "o", color=line.colour, ms=6, mec="white", mew=1, zorder=4, clip_on=False)
        low, high = ax.get_ylim()
        ax.set_ylim(max(min(low, high - 2), -1), min(max(high, low + 2), 101))
    if ax := axes.get("loss"):
        ax.set_title("Training loss")
        for line in lines:
            _draw_span(ax, line, line.span("train", "loss"))
        _scale(ax, [low for line in lines for _, low, _ in line.span("train", "loss").values()])
    if ax := axes.get("beta"):
        ax.set_title("Annealing: β")
        _draw_betas(ax, lines)
        _scale(ax, [beta for line in lines for beta in line.betas().values()])


def _draw_span(ax: Axes, line: _Line, span: Mapping[int, tuple[float, float, float]]) -> None:
    """The mean with its band; for many points their running mean, above the values of a single run in pale."""
    if not span:
        return
    steps, values = list(span), torch.tensor(list(span.values()), dtype=torch.float64).T
    half = len(steps) // 100  # windows of 2 %
    mean, low, high = F.avg_pool1d(values, 2 * half + 1, stride=1, padding=half, count_include_pad=False)
    ax.plot(steps, mean, color=line.colour, ls=line.dash, zorder=3, **_dots(steps))
    if len(line.runs) > 1:
        ax.fill_between(steps, low, high, color=line.colour, alpha=0.2, lw=0, zorder=2)
    elif half:
        ax.plot(steps, values[0], color=line.colour, lw=0.6, alpha=0.3, zorder=2)


def _dots(points: Collection[Any]) -> dict[str, Any]:
    return {"marker": "o", "ms": 3, "clip_on": False} if len(points) <= _FEW else {}


def _draw_betas(ax: Axes, lines: Sequence[_Line]) -> None:
    """β over the iterations; lines that coincide, at the steps that both have recorded, take turns in dashes."""
    groups: list[list[_Line]] = []
    for line in (line for line in lines if line.betas()):
        same = next((group for group in groups if _coincide(line.betas(), group[0].betas())), None)
        if same is None:
            groups.append([line])
        else:
            same.append(line)
    for group in groups:
        for k, line in enumerate(group):
            dash, points = (6 * k, (6, 6 * (len(group) - 1))) if len(group) > 1 else "-", line.betas()
            ax.plot(*zip(*points.items(), strict=True), color=line.colour, ls=dash, zorder=3, **_dots(points))


def _coincide(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Whether two lines are the same where they share steps."""
    shared = one.keys() & other.keys()
    return bool(shared) and all(math.isclose(one[step], other[step], rel_tol=1e-6) for step in shared)


def _scale(ax: Axes, values: Sequence[float]) -> None:
    """A log axis for values that span a factor of five or more; with ticks at 1, 2, 5 if it is below 100."""
    from matplotlib.ticker import LogLocator  # type: ignore[import-not-found, unused-ignore]

    low, high = min(values), max(values)
    if 0 < 5 * low <= high:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")


def _legend_below(figure: Figure, lines: Sequence[_Line]) -> None:
    """The legend below the panels, in as many columns as there is room for."""
    from matplotlib.lines import Line2D  # type: ignore[import-not-found, unused-ignore]

    title = "best validation accuracy (dots), %"
    if any(len(line.runs) > 1 for line in lines):
        title += "; over several seeds: mean ± standard deviation, band from lowest to highest"
    if any(len(run.train) >= 100 or len(run.val) >= 100 for line in lines for run in line.runs):
        title += "\nlines: running mean over 2 % of the points; pale: the points of a single run"
    texts = [f"{line.label}  {spread([value for _, value in line.best()], count=True)}" for line in lines]
    texts = [textwrap.fill(text, 76) for text in texts]
    handles = [Line2D([], [], color=line.colour, ls=line.dash, lw=2) for line in lines]
    columns = max(1, min(len(lines), 125 // (8 + max(map(len, texts)))))
    figure.legend(handles, texts, title=title, ncols=columns, loc="upper left", bbox_to_anchor=(0, 0), alignment="left")


def histograms(run: Path, out: Path) -> Path:
    """How the quantized weights move to the levels: one panel per layer, time upwards, dark where many weights are.

    The colour is logarithmic, so that a few weights still on their way show beside the many that have arrived. At most
    eight layers are drawn: the first, the last, and others evenly spaced between them. Layers that stay in float are
    left out, unless the whole network is float.
    """
    record = RunRecord.read(run)
    if not record.weights:
        raise PlotError(f"no line of weight histograms in {run / 'metrics.jsonl'} yet: let the run train longer")
    layers = [layer for layer, counts in record.weights[max(record.weights)]["layers"].items() if any(counts)]
    quantized = [layer for layer in layers if record.quantizes(layer)]
    layers = quantized or layers
    levels = labels.level_values(record.levels) if quantized else ()
    goal = f" to {'the levels ' * (len(levels) <= 4)}{labels.levels(levels, record.scale)}" if levels else ""
    rows = 1 if len(layers) <= 5 else 2
    shown = _evenly(layers, min(_PANELS, rows * (len(layers) // rows)))
    some = f" ({len(shown)} of {len(layers)} layers)" if len(shown) < len(layers) else ""
    columns = len(shown) // rows
    title = f"{labels.method(record.name)}: how the weights move{goal}{some}"
    with _figure(out, 2.1 * columns + 1.3, 3.0 * rows + 0.6, title) as figure:
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
        for ax, layer, name in zip(panels, shown, _titles(shown), strict=True):
            mesh = _draw_weights(ax, record, layer)
            ax.set(title=name, xlabel="weight / scale" if record.scale else "weight", ylabel="iteration")
            ax.label_outer()
        _weight_ticks(panels[0], levels)
        _iterations(panels[0].yaxis)
        bar = figure.colorbar(mesh, ax=figure.axes, shrink=0.55, anchor=(0, 1), format=lambda x, _: f"{100 * x:g} %")
        bar.ax.minorticks_off()
        bar.ax.set_title("share of\nthe layer", fontsize=8)
        bar.outline.set_visible(False)
    return out


def _draw_weights(ax: Axes, run: RunRecord, layer: str) -> Any:
    """One layer as a heat map: a row up to each moment, a column per bin, the colour its share of the weights."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, LogNorm  # type: ignore[import-not-found, unused-ignore]

    moments = _evenly(sorted(run.weights), _MOMENTS)
    counts = np.array([run.weights[step]["layers"][layer] for step in moments])
    low, high = run.weights[moments[0]]["range"]
    edges = np.linspace(low, high, counts.shape[1] + 1)
    occupied = np.flatnonzero(counts.any(0))
    first, last = occupied[0], occupied[-1] + 1
    shares = np.ma.masked_equal(counts[:, first:last], 0) / counts.sum(1, keepdims=True)
    shades = LinearSegmentedColormap.from_list("shades", _SHADES)
    rows = [moments[0] - 1, *moments]
    mesh = ax.pcolormesh(edges[first : last + 1], rows, shares, cmap=shades, norm=LogNorm(3e-4, 1))
    ax.grid(visible=False)
    ax.use_sticky_edges = False
    ax.margins(x=0.05, y=0)
    return mesh


def _titles(layers: Sequence[str]) -> list[str]:
    """Names of layers for their panels: without the ending that all share, and at most 24 characters of the rest."""
    names = list(layers)
    while len({name.rpartition(".")[2] for name in names}) == 1 < len(names):
        names = [name.rpartition(".")[0] for name in names]
    return [name if len(name) <= 24 else f"…{name[-23:]}" for name in names]


def _weight_ticks(ax: Axes, levels: Sequence[float]) -> None:
    """A tick at each level, with a label at the outer ones and where there is room; few ticks in float."""
    if not levels:
        ax.locator_params(axis="x", nbins=3)
        return
    outer, room = (levels[0], levels[-1]), (levels[-1] - levels[0]) / 5
    near = {level for pair in pairwise(levels) if pair[1] - pair[0] < room for level in pair}
    ax.set_xticks(levels, ["" if level in near.difference(outer) else labels.levels([level]) for level in levels])


def projections(out: Path) -> list[Path]:
    """The paper's fig:tanh and fig:stanh: a projection, its inverse and its mirror map for several β.

    They are written to the folder ``out``: ``tanh.png`` (binary levels) and ``stanh.png`` (shifted tanh, ternary).
    """
    tanh = Tanh(), BINARY, "tanh, levels −1, +1", out / "tanh.png"
    shifted = ShiftedTanh(TERNARY), TERNARY, "shifted tanh, levels −1, 0, +1", out / "stanh.png"
    return [_draw_mirror(*tanh), _draw_mirror(*shifted)]


def _draw_mirror(mirror: Mirror, levels: Levels, title: str, out: Path) -> Path:
    dual = torch.linspace(-2, 2, 1601, dtype=torch.float64)
    primal = torch.tanh(torch.linspace(-17, 17, 3201, dtype=torch.float64))  # dense where the inverse is steep
    with _figure(out, 10.2, 3.3, title) as figure:
        project, inverse, potential = figure.subplots(1, 3)
        project.plot(dual, levels.nearest(dual), color=_FAINT, ls=(0, (4, 3)), lw=1.2, label="β → ∞")
        for beta, colour in ((1, "#88ccee"), (2, "#44aa99"), (4, "#117733"), (8, "#332288")):
            project.plot(dual, mirror.project(dual, beta), color=colour, label=f"β = {beta}")
            inverse.plot(primal, mirror.inverse(primal, beta), color=colour)
            potential.plot(primal, mirror.potential(primal, beta), color=colour)
        project.set(title="Projection  w = P(w̃)", xlabel="dual w̃", ylabel="primal w", xlim=(-2, 2))
        inverse.set(title="Inverse  w̃ = P⁻¹(w) = ∇Φ(w)", xlabel="primal w", ylabel="dual w̃", ylim=(-2, 2))
        potential.set(title="Mirror map  Φ(w)", xlabel="primal w", ylabel="Φ")
        for ax in figure.axes:
            ax.locator_params(nbins=5)
        project.legend(loc="lower right")
    return out


def comparison(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Test accuracy of the rounded network by method, as points, with the float network as a dashed line.

    ``rows`` are those of :func:`mirrorquant.report.tables.compare_row`; several with the same method and levels, such
    as seeds, are drawn as small points around their mean. Rows of the method ``ref`` make the dashed line.
    """
    points = {key: [float(row["test"]) for row in group] for key, group in grouped(rows).items()}
    every = list(chain(*points.values()))
    floats = list(chain(*(points.pop(key) for key in list(points) if key[0] == "ref")))
    if not points:
        raise PlotError("no quantized method to compare: give the rows of at least one beside the float reference")
    several = len({levels for _, levels in points}) > 1
    names = [labels.method(method) + f" ({labels.levels(*levels)})" * several for method, levels in points]
    names = [textwrap.fill(name, 34) for name in names]
    height = 0.16 + 0.16 * max(name.count("\n") + 1 for name in names)
    with _figure(out, 7.2, 0.8 + len(points) * height, "Test accuracy of the rounded network, %") as figure:
        ax = figure.subplots()
        _draw_points(ax, points)
        ax.set_yticks(range(len(points)), names)
        ax.tick_params(axis="y", length=0, labelsize=9)
        width = max(max(every) - min(every), 1)
        limits = max(0, min(every) - 1.5 * width), min(100, max(every) + 0.1 * width)
        ax.set(ylim=(len(points) - 0.5, -0.5), xlim=limits)
        if floats:
            mean, above = math.fsum(floats) / len(floats), ax.get_xaxis_transform()
            ax.axvline(mean, color="#333333", ls=(0, (4, 3)), lw=1.3, zorder=2)
            text = f"float {spread(floats, count=True)}"
            ax.text(mean, 1.02, text, fontsize=8.5, transform=above, ha="center", va="bottom")
    return out


def _draw_points(ax: Axes, points: Mapping[Kind, Sequence[float]]) -> None:
    """The mean of each row, on a line over the range of its seeds, which are small points; as text at the right."""
    looks = _looks([method for method, _ in points])
    for place, (((method, _), values), look) in enumerate(zip(points.items(), looks, strict=True)):
        colour = labels.method_colour(method) or look[0]
        if len(values) > 1:
            ax.plot([min(values), max(values)], [place] * 2, color=colour, lw=2, zorder=3, clip_on=False)
            ax.plot(values, [place] * len(values), "o", ms=4, color="white", mec=colour, zorder=4, clip_on=False)
        mean = math.fsum(values) / len(values)
        ax.plot(mean, place, "o", ms=9, color=colour, mec="white", mew=1.2, zorder=5, clip_on=False)
        right, text = ax.get_yaxis_transform(), spread(values, count=True)
        ax.text(1.03, place, text, fontsize=9, transform=right, va="center_baseline")


def search(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Validation accuracy over each key of a search: a point per combination, a line through the best of each value.

    ``rows`` are those of ``search.json``, which ``mirrorquant search`` writes. Accuracies more than 20 points below the
    best are left out.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row["values"]))
    means = [math.fsum(row["val"]) / len(row["val"]) for row in rows]
    if not keys or len(rows) < 2:
        raise PlotError("a search with a single combination has nothing to compare: try several values of a key")
    low = max(min(means), max(means) - 20)
    title = "Validation accuracy of the rounded network, %"
    with _figure(out, 0.8 + 2.2 * len(keys), 3.2, title) as figure:
        for ax, key in zip(figure.subplots(1, len(keys), sharey=True, squeeze=False).flat, keys, strict=True):
            points = [(row["values"].get(key, "-"), mean) for row, mean in zip(rows, means, strict=True)]
            values = sorted({value for value, _ in points}, key=_number_first)
            best = [max(mean for value, mean in points if value == each) for each in values]
            ax.plot(range(len(values)), best, color=_SHADES[2], lw=1.5, zorder=3)
            places = [values.index(value) for value, _ in points]
            ax.plot(places, means, "o", color=_SHADES[3], ms=5, mec="white", mew=0.8, zorder=4)
            margin = 0.08 * max(max(means) - low, 1)
            ax.set(xlabel=key, xlim=(-0.4, len(values) - 0.6), ylim=(low - margin, max(means) + margin))
            labels = [value or "none" for value in values]
            slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
            ax.set_xticks(range(len(values)), labels, **(slanted if len("  ".join(labels)) > _WIDEST else {}))
            ax.label_outer()
    return out


def _number_first(text: str) -> tuple[float, str]:
    """Sorts numbers by value, and other texts after them."""
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


@contextmanager
def _figure(out: Path, width: float, height: float, title: str) -> Iterator[Figure]:
    """An empty figure of so many inches, with a bold title above it; written at the end, with everything around it."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("figures need matplotlib: pip install 'mirrorquant[plots]'") from error
    with matplotlib.rc_context(fname=Path(__file__).with_name("figures.mplstyle")):
        figure = Figure(figsize=(width, height))
        if title:
            figure.suptitle(textwrap.fill(title, int(10 * width)), x=0.01, y=1.01, ha="left", va="bottom")
        yield figure
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(out, format=out.suffix[1:] or "png")
        except ValueError as error:
            raise PlotError(f"{out}: {error}; name a file that ends in .png") from error


def _iterations(axis: Any) -> None:
    """Ticks at whole iterations, as 20k or 2M for large ones."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(EngFormatter(sep=""))


def _evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly spaced, the first and the last among them."""
    count = min(len(items), most)
    return [items[round(index * (len(items) - 1) / max(count - 1, 1))] for index in range(count)]
