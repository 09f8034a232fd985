"""Figures: training curves, weights moving to their levels, projections with their mirror maps, methods compared.

Each function writes PNG files and returns their paths. Run folders are read as they are, also while a run is going
on: ``config.json``, ``metrics.jsonl`` and, where there is one, ``summary.json``. Matplotlib is imported when a figure
is made, and no state of it is changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mirrorquant import anneal
from mirrorquant.levels import BINARY, TERNARY
from mirrorquant.mirrors import Mirror, ShiftedTanh, Tanh
from mirrorquant.train.report import MetricsError, read_metrics
from mirrorquant.train.tables import data_label, level_values, levels_label, method_label, method_name, model_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

__all__ = ["PlotError", "comparison", "curves", "histograms", "projections"]

_DPI = 150
_INK, _GRID, _FAINT = "#333333", "#e4e4e4", "#8c8c8c"
# Paul Tol's "muted" colours, told apart with any colour vision: baselines warm, mirror descent cool, its stable forms
# dark.
_COLOURS = {
    "md-tanh-s": "#332288",
    "bc": "#cc6677",
    "md-softmax-s": "#117733",
    "gd-tanh": "#999933",
    "md-tanh": "#88ccee",
    "md-softmax": "#44aa99",
    "pq": "#ddcc77",
    "pmf": "#aa4499",
    "pmf-authors": "#882255",
    "ref": "#555555",
}
_BETAS = {1: "#88ccee", 2: "#44aa99", 4: "#117733", 8: "#332288"}
_LEGEND_INSIDE = 5  # runs
_NOT_ANNEALED = ("ref", "bc")
_FIELDS = {"train": ("step", "loss", "beta"), "val": ("step", "accuracy"), "weights": ("step", "range", "layers")}
_PANELS, _MOMENTS, _COLUMNS = 8, 150, 120
_SHADES = ["#e3f1f8", "#88ccee", "#4a6fb5", "#332288", "#1a0f4f"]


class PlotError(ValueError):
    """A figure that cannot be made: matplotlib is missing, or a run folder does not hold what it needs."""


@dataclass
class _Run:
    """What a run folder holds; each of the three maps a step to its line of ``metrics.jsonl``."""

    folder: Path
    config: dict[str, Any]
    name: str
    train: dict[int, dict[str, Any]] = field(default_factory=dict)
    val: dict[int, dict[str, Any]] = field(default_factory=dict)
    weights: dict[int, dict[str, Any]] = field(default_factory=dict)

    def series(self, kind: str, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one number, where it was recorded."""
        lines = sorted(getattr(self, kind).items())
        points = [
            (step, value) for step, line in lines if (value := line.get(key)) is not None and math.isfinite(value)
        ]
        return [step for step, _ in points], [value for _, value in points]


def curves(runs: Sequence[Path], out: Path) -> Path:
    """Training curves (the paper's fig:trcurves) of one or several runs, one colour a run.

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
    annealed = any(_betas(run)[0] for run in loaded)
    figure = _figure(9.6, 4.6 if len(loaded) <= _LEGEND_INSIDE else 5.4)
    right = ["loss", "beta"] if annealed else ["loss", "loss"]
    axes = figure.subplot_mosaic([["accuracy", part] for part in right], width_ratios=[1.7, 1])
    drawn = _colours([run.name for run in loaded])
    for run, label, (colour, dash) in zip(loaded, _labels(loaded), drawn, strict=True):
        _draw_accuracy(axes["accuracy"], run, label, colour, dash)
        _draw_loss(axes["loss"], run, colour, dash)
        if annealed:
            axes["beta"].plot(*_betas(run), color=colour, ls=dash, lw=1.6)
    _finish_curves(axes, loaded)
    _headline(figure, _task(loaded))
    return _save(figure, out)


def _betas(run: _Run) -> tuple[list[int], list[float]]:
    """The annealing hyperparameter over the steps, of the methods that have one; a log axis has no place for zero."""
    steps, betas = run.series("train", "beta")
    return ([], []) if run.config["method"] in _NOT_ANNEALED else (steps, [b if b > 0 else math.nan for b in betas])


def _draw_accuracy(ax: Axes, run: _Run, label: str, colour: str, dash: Any) -> None:
    steps, values = run.series("val", "accuracy")
    if not values:
        return
    best = max(range(len(values)), key=lambda k: (values[k], k))  # of equals the later one, as in training
    ax.plot(steps, values, color=colour, ls=dash, lw=1.5, label=f"{label}  {values[best]:.2f}", zorder=3)
    ax.plot(steps[best], values[best], "o", ms=6, color=colour, mec="white", mew=1.2, zorder=4, clip_on=False)


def _draw_loss(ax: Axes, run: _Run, colour: str, dash: Any) -> None:
    """The loss as it was, pale, below its running mean."""
    steps, losses = run.series("train", "loss")
    half = len(losses) // 100
    if half:
        ax.plot(steps, losses, color=colour, lw=0.6, alpha=0.25)
    sums = [0.0, *accumulate(losses)]
    windows = [(max(0, k - half), min(len(losses), k + half + 1)) for k in range(len(losses))]
    means = [(sums[high] - sums[low]) / (high - low) for low, high in windows]
    ax.plot(steps, means, color=colour, ls=dash, lw=1.5, zorder=3)


def _finish_curves(axes: Mapping[str, Axes], runs: Sequence[_Run]) -> None:
    _style(axes["accuracy"], "Validation accuracy of the rounded network, %", "iteration")
    if axes["accuracy"].get_lines():
        inside = {"loc": "lower right"}
        below = {"loc": "upper left", "bbox_to_anchor": (0, -0.12), "ncols": 3}
        place = inside if len(runs) <= _LEGEND_INSIDE else below  # a long one would hide the curves
        _legend(axes["accuracy"], title="run and its best value", **place)
    _style(axes["loss"], "Training loss", "" if "beta" in axes else "iteration")
    axes["loss"].set_yscale("log")
    if "beta" in axes:
        _style(axes["beta"], "Annealing: β", "iteration")
        axes["beta"].set_yscale("log")
        axes["loss"].sharex(axes["beta"])
        axes["loss"].tick_params(labelbottom=False)
    last = max(max([0, *run.train, *run.val]) for run in runs)
    for ax in axes.values():
        ax.set_xlim(0, max(last, 1))
        _thousands(ax.xaxis, last)


def histograms(run: Path, out: Path) -> Path:
    """How the weights of each layer move to the levels: a panel a layer, time upwards, dark where many weights are.

    The colour is logarithmic, so that a few weights still on their way show beside the many that have arrived. Of
    more than eight layers eight are drawn, evenly chosen, the first and the last among them.

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
    shown = _evenly(layers, _PANELS)
    rows = 1 if len(shown) <= 5 else 2
    columns = math.ceil(len(shown) / rows)
    figure = _figure(2.1 * columns + 1.3, 3.0 * rows + 0.9)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for index, (ax, layer) in enumerate(zip(panels, shown, strict=False)):
        mesh = _draw_weights(ax, loaded, layer)
        lowest = index + columns >= len(shown)
        ax.tick_params(labelbottom=lowest)
        ax.set_xlabel("weight" if lowest else "", fontsize=9, color=_INK)
        ax.set_ylabel("" if index % columns else "iteration", fontsize=9, color=_INK)
    for ax in panels[len(shown) :]:
        ax.set_visible(False)
    _colour_bar(figure, mesh)
    some = "" if len(shown) == len(layers) else f" ({len(shown)} of {len(layers)} layers)"
    levels = loaded.config.get("levels")
    goal = f" to the levels {_signed(levels_label(levels))}" if level_values(levels) else ""
    _headline(figure, f"{method_label(loaded.name)}: how the weights move{goal}{some}")
    return _save(figure, out)


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
    _style(ax, layer, "")
    ax.grid(visible=False)
    ax.use_sticky_edges = False
    ax.margins(x=0.05, y=0)
    _thousands(ax.yaxis, moments[-1])
    levels = level_values(run.config.get("levels"))
    if levels:
        ax.set_xticks(levels, [_signed(levels_label([level])) for level in levels])
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
    bar.ax.set_title("share of\nthe layer", loc="left", fontsize=8, color=_INK)
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
    axes[0].set_xlim(-2, 2)
    axes[1].set_ylim(-2, 2)
    for ax in axes[1:]:
        ax.set_xlim(-1.05, 1.05)
    _legend(axes[0], loc="lower right")
    _headline(figure, title)
    return _save(figure, out)


def comparison(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Test accuracy of the rounded network by method, as bars, with the float network as a dashed line.

    Args:
        rows: those of :func:`mirrorquant.train.tables.compare_row`; several of one method and levels, as of several
            seeds, make one bar of their mean with a dot each. Rows of the method ``ref`` make the dashed line.
        out: the picture to write.

    Returns:
        ``out``.

    Raises:
        PlotError: no quantized method among the rows, or matplotlib is not installed.
    """
    bars: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        key = (row["method"], levels_label(row.get("levels")))
        bars.setdefault(key, []).append(float(row["test"]))
    floats = [value for (method, _), values in bars.items() if method == "ref" for value in values]
    bars = {key: values for key, values in bars.items() if key[0] != "ref"}
    if not bars:
        raise PlotError("no quantized method to compare: give the rows of at least one beside the float reference")
    figure = _figure(7.2, 1.5 + 0.46 * len(bars))
    ax = figure.subplots()
    every = [value for values in (*bars.values(), floats) for value in values]
    start = _axis_start(every)
    _draw_bars(ax, bars, start)
    ax.set_xlim(start, min(100.0, max(every) + 0.05 * (max(every) - start)))
    if floats:
        mean = math.fsum(floats) / len(floats)
        ax.axvline(mean, color="white", lw=3, zorder=4)
        ax.axvline(mean, color=_INK, ls=(0, (4, 3)), lw=1.3, zorder=4)
        ax.text(
            mean, 1.02, f"float {mean:.2f}", transform=ax.get_xaxis_transform(), ha="center", fontsize=8.5, color=_INK
        )
    _headline(figure, "Test accuracy of the rounded network, %")
    return _save(figure, out)


def _draw_bars(ax: Axes, bars: Mapping[tuple[str, str], Sequence[float]], start: float) -> None:
    several = len({levels for _, levels in bars}) > 1
    names = []
    for place, ((method, levels), values) in enumerate(bars.items()):
        mean = math.fsum(values) / len(values)
        ax.barh(place, mean - start, left=start, height=0.62, color=_COLOURS.get(method, _FAINT), zorder=2)
        if len(values) > 1:
            ax.plot(values, [place] * len(values), "o", ms=4.5, color="white", mec=_INK, mew=0.8, zorder=5)
        names.append(method_label(method) + (f" ({_signed(levels)})" if several else "") + f"  {mean:.2f}")
    _style(ax, "", f"the axis starts at {start:g} %" if start else "")
    ax.set_yticks(range(len(bars)), names)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0, labelsize=9)


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
    run = _Run(folder, config, name=method_name(recipe, config, config.get("overrides")))
    for line in _read_lines(folder / "metrics.jsonl"):
        if line["kind"] in _FIELDS:
            getattr(run, line["kind"])[line["step"]] = line
    return run


def _load_summary(file: Path) -> _Run:
    """A run of which only the summary was kept: its curves, and β by its schedule."""
    summary = _read_json(file)
    try:
        config = _typed(file, summary["config"])
        beta: anneal.Schedule = anneal.constant(math.nan)
        if config["method"] != "pq":  # its λ grows by the epoch, of which a summary does not tell the length
            beta = anneal.geometric(config["beta_scale"], every=config["beta_interval"], cap=config["beta_cap"])
        train = {int(step): {"loss": float(loss), "beta": beta(int(step))} for step, loss in summary["loss_curve"]}
        val = {int(step): {"accuracy": float(accuracy)} for step, accuracy in summary["curve"]}
        name = method_name(str(summary.get("recipe") or ""), config, summary.get("overrides"))
    except (KeyError, TypeError, ValueError) as error:
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
        content = json.loads(file.read_text(encoding="utf-8"))
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
    if text:
        figure.suptitle(text, x=0.008, ha="left", fontsize=11.5, fontweight="bold", color=_INK)


def _thousands(axis: Any, last: float) -> None:
    """Iterations as 20k where there are many."""
    if last >= 10_000:
        axis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")


def _colours(methods: Sequence[str]) -> list[tuple[str, Any]]:
    """A colour and a dash pattern for each run: the method's own colour if it is free, else one that no run has."""
    patterns: list[Any] = ["-", (0, (5, 2)), (0, (1.5, 1.5))]
    used: list[tuple[str, Any]] = []
    for method in methods:
        others = [colour for name, colour in _COLOURS.items() if name not in methods]
        wanted = [_COLOURS.get(method, others[0] if others else _FAINT), *others, *_COLOURS.values()]
        free = [(colour, dash) for dash in patterns for colour in wanted if (colour, dash) not in used]
        used.append(free[0] if free else (_FAINT, "-"))
    return used


def _labels(runs: Sequence[_Run]) -> list[str]:
    """The method of each run, and where several have the same one what else tells them apart."""
    labels = [method_label(run.name) for run in runs]
    for key in ("data", "model", "levels", "lr", "seed"):
        values = {str(run.config.get(key)) for run in runs}
        if len(set(labels)) < len(labels) and len(values) > 1:
            labels = [f"{label}, {key} {run.config.get(key)}" for label, run in zip(labels, runs, strict=True)]
    if len(set(labels)) < len(labels):
        labels = [f"{label}, {run.folder.name}" for label, run in zip(labels, runs, strict=True)]
    return labels


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


def _listed(runs: Sequence[Path]) -> str:
    return ", ".join(map(str, runs)) or "no run folder"
