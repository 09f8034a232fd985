"""Figures show the numbers of their runs, all of it inside the canvas, and never come from a broken run folder."""

import builtins
import itertools
import json
import math
import random
from pathlib import Path

import pytest

from mirrorquant.report import RecordError, RunRecord, labels, plots
from mirrorquant.train import MetricsError

matplotlib = pytest.importorskip("matplotlib")


def make_run(
    folder,
    method="md-tanh-s",
    levels="binary",
    steps=60,
    every=10,
    layers=("conv1.weight", "fc.weight"),
    reach=1.2,
    **config,
):
    folder.mkdir(parents=True)
    values = {"data": "digits", "model": "digitsnet", "method": method, "levels": levels, "seed": 0, **config}
    (folder / "config.json").write_text(json.dumps(values))
    lines, noise = [], random.Random(str(values))
    for step in range(0, steps + 1, every):
        done = step / max(steps, 1)
        loss = 2 * math.exp(-3 * done) * noise.uniform(0.9, 1.1)
        lines.append({"kind": "train", "step": step, "loss": loss, "lr": 0.01, "beta": 20**done})
        accuracy = 90 - 70 * math.exp(-4 * done) + noise.uniform(0, 3)
        lines.append({"kind": "val", "step": step, "accuracy": accuracy, "loss": 1.0})
        moved = round(50 * done)
        counts = [moved, 0, 100 - moved, 100 - moved, 0, moved]
        lines.append(
            {"kind": "weights", "step": step, "range": [-reach, reach], "layers": dict.fromkeys(layers, counts)}
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def with_summary(run, **bits):
    """The run with a summary that lists these bits per parameter."""
    rows = [{"name": name, "bits": bit, "count": 1, "shape": [1]} for name, bit in bits.items()]
    (run / "summary.json").write_text(json.dumps({"layers": rows}))
    return run


@pytest.fixture
def drawn(monkeypatch):
    """Draws by a function of the library, and returns the figure that it wrote."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: save(self, *args, **kw) or figures.append(self))

    def draw(function, *arguments):
        assert function(*arguments)
        return figures[-1]

    return draw


def picture(path):
    """The pixels of a PNG that is not blank."""
    from matplotlib import image

    pixels = image.imread(path)[..., :3]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert pixels.std() > 0.02
    return pixels


def has_colour(pixels, code):
    wanted = [int(code[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    return bool((abs(pixels - wanted) < 0.01).all(-1).any())


def points(line):
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def of_colour(ax, code):
    """The lines of a panel in this colour that connect points, and the points drawn by themselves."""
    lines = [line for line in ax.get_lines() if line.get_color() == code]
    return [li for li in lines if len(li.get_xdata()) > 1], [points(li)[0] for li in lines if len(li.get_xdata()) == 1]


def test_curves_of_kept_summaries_show_their_numbers(tmp_path, drawn):
    results = Path(__file__).parents[1] / "results"
    kept = [results / f"digits-digitsnet-{run}-seed0.json" for run in ("ref", "binary-bc", "binary-md-tanh-s")]
    figure = drawn(plots.curves, kept, tmp_path / "curves.png")
    accuracy, loss, beta = figure.axes
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    for file, name, code in zip(
        kept, ("REF (float)", "BC", "MD-tanh-S"), ("#555555", "#cc6677", "#332288"), strict=True
    ):
        summary = json.loads(file.read_text())
        best = max(value for _, value in summary["curve"])
        lines, dots = of_colour(accuracy, code)
        assert [points(line) for line in lines] == [[tuple(point) for point in summary["curve"]]]
        assert dots == [(max(step for step, value in summary["curve"] if value == best), best)]
        assert points(of_colour(loss, code)[0][0]) == [tuple(point) for point in summary["loss_curve"]]
        assert f"{name}  {best:.2f}" in labels
    (line,) = beta.get_lines()
    config = summary["config"]
    steps = [step for step, _ in summary["loss_curve"]]
    schedule = [config["beta_scale"] ** -(-step // config["beta_interval"]) for step in steps]
    assert list(line.get_xdata()) == steps
    assert list(line.get_ydata()) == pytest.approx(schedule)


def test_a_broken_summary_is_refused_by_its_name(tmp_path):
    kept = json.loads((Path(__file__).parents[1] / "results/digits-digitsnet-ref-seed0.json").read_text())
    broken = tmp_path / "run.json"
    broken.write_text(json.dumps({**kept, "loss_curve": [1, 2]}))
    with pytest.raises(RecordError, match=r"run\.json: not the summary of a run"):
        plots.curves([broken], tmp_path / "curves.png")


def test_seeds_of_one_method_are_a_mean_in_a_band_in_its_colour(tmp_path, drawn):
    runs = [make_run(tmp_path / f"{m}{k}", m, seed=k, lr=0.1) for m in ("ref", "bc") for k in (0, 1, 2)]
    figure = drawn(plots.curves, runs, tmp_path / "curves.png")
    accuracy, loss = figure.axes  # no panel for β, which neither has
    seeds = [RunRecord.read(run) for run in runs[3:]]
    for ax, kind, key in ((accuracy, "val", "accuracy"), (loss, "train", "loss")):
        columns = list(zip(*(run.series(kind, key).values() for run in seeds), strict=True))
        (line,), _ = of_colour(ax, "#cc6677")
        assert list(line.get_ydata()) == pytest.approx([sum(column) / 3 for column in columns])
        edges = ax.collections[1].get_paths()[0].vertices
        for step, column in zip(range(0, 61, 10), columns, strict=True):
            values = edges[edges[:, 0] == step][:, 1]
            assert (min(values), max(values)) == pytest.approx((min(column), max(column)))
    best = [max(run.series("val", "accuracy").values()) for run in seeds]
    assert sorted(value for _, value in of_colour(accuracy, "#cc6677")[1]) == sorted(best)
    mean = math.fsum(best) / 3
    spread = math.sqrt(sum((value - mean) ** 2 for value in best) / 2)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[1] == f"BC  {mean:.2f} ± {spread:.2f} (n = 3)"
    assert len(labels) == 2


def test_a_band_covers_the_steps_that_every_seed_has(tmp_path):
    runs = [RunRecord.read(make_run(tmp_path / str(steps), seed=steps, steps=steps)) for steps in (60, 30)]
    empty = RunRecord.read(make_run(tmp_path / "none", seed=9))
    empty.val.clear()
    (line,) = plots._lines([*runs, empty])
    assert list(line.span("val", "accuracy")) == [0, 10, 20, 30]
    assert len(line.best()) == 2


def test_methods_with_one_schedule_share_its_line(tmp_path, drawn):
    runs = [make_run(tmp_path / name, name) for name in ("bc", "pq", "gd-tanh", "md-tanh-s")]
    beta = drawn(plots.curves, runs, tmp_path / "curves.png").axes[2]
    assert {line.get_color() for line in beta.get_lines()} == {"#999933", "#332288"}
    assert [line.is_dashed() for line in beta.get_lines()] == [True, True]
    lines = (runs[-1] / "metrics.jsonl").read_text().splitlines()
    (runs[-1] / "metrics.jsonl").write_text("\n".join(lines[::2]) + "\n")  # recorded at fewer steps
    beta = drawn(plots.curves, runs, tmp_path / "curves.png").axes[2]
    assert [line.is_dashed() for line in beta.get_lines()] == [True, True]
    alone = drawn(plots.curves, runs[:3], tmp_path / "curves.png").axes[2]
    assert [line.is_dashed() for line in alone.get_lines()] == [False]


def texts_of(figure):
    """Every text that the figure shows, with its box in pixels and, of a tick's label, its axis."""
    renderer = figure.canvas.get_renderer()
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks = [(axis, tick) for axis in axes for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
    owner = {id(label): axis for axis, tick in ticks for label in (tick.label1, tick.label2)}
    hidden = set()
    for axis, tick in ticks:
        low, high = sorted(axis.get_view_interval())
        slack = 1e-9 * (high - low)
        if not low - slack <= tick.get_loc() <= high + slack or not axis.axes.get_visible():
            hidden |= {id(tick.label1), id(tick.label2)}
    shown = [text for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text().strip()]
    shown = [text for text in shown if id(text) not in hidden]
    return [(text.get_text(), text.get_window_extent(renderer), owner.get(id(text))) for text in shown]


def check_layout(figure):
    """No text over another, panels that fill most of the picture, no data below a legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    width = figure.dpi * figure.get_tightbbox().width  # of the picture
    assert width < 1.1 * figure.bbox.width
    texts = texts_of(figure)
    for (one, a, axis), (other, b, its) in itertools.combinations(texts, 2):
        beside = min(a.y1, b.y1) - max(a.y0, b.y0) > 1
        least = 12 if axis is not None and axis is its else -1  # labels of one axis are a digit apart
        assert not (beside and max(a.x0, b.x0) - min(a.x1, b.x1) < least), (one, other)
    panels = [ax for ax in figure.axes if ax.get_visible() and ax.get_label() != "<colorbar>"]
    for ax in panels:
        box, (_, columns, *_) = ax.get_window_extent(), ax.get_subplotspec().get_geometry()
        assert box.width > 0.45 * width / columns, ax.get_title("left")
        assert box.height > 0.6 * figure.dpi
    for legend in [*figure.legends, *(ax.get_legend() for ax in panels if ax.get_legend())]:
        box = legend.get_window_extent()
        for ax in panels:
            for line in ax.get_lines():
                places = line.get_transform().transform(line.get_xydata())
                below = [box.contains(x, y) for x, y in places]
                assert sum(below) <= 0.02 * len(below), ax.get_title("left")


METHODS = ["ref", "bc", "pq", "pq-star", "pmf", "pmf-star", "pmf-exact", "gd-tanh"]
METHODS += ["md-softmax", "md-tanh", "md-softmax-s", "md-tanh-s"]
LONG = "a-rather-long-name-of-a-run-with-many-hyperparameters-in-it_" * 3
CURVES = {
    "one run": [{}],
    "two seeds": [{"method": m, "lr": lr, "seed": k} for m, lr in (("ref", 0.1), ("bc", 0.01)) for k in (0, 1)],
    "two seeds of three methods": [
        {"method": m, "lr": lr, "seed": k, "levels": "binary"}
        for m, lr in (("ref", 0.01), ("bc", 0.01), ("md-tanh-s", 0.003))
        for k in (0, 1)
    ],
    "all methods": [{"method": m} for m in METHODS],
    "three seeds of all methods": [{"method": m, "seed": k} for m in METHODS for k in (0, 1, 2)],
    "many runs": [{"lr": 0.001 * k, "levels": "-1,-0.5,0.5,1"} for k in range(1, 31)],
    "long labels": [{"model": f"{LONG}{k}", "method": "WWWWWWWWWW" * 9} for k in range(3)],
    "a long task": [{"data": f"folder:/home/{LONG}", "model": f"module.of.mine:{LONG}"}],
    "one validation": [{"method": m, "steps": 5, "every": 6} for m in ("ref", "md-tanh-s")],
    "two validations": [{"method": m, "steps": 60, "every": 60} for m in ("bc", "md-tanh-s")],
    "float beside quantized": [{"method": m} for m in ("ref", "md-tanh-s")],
    "five iterations": [{"steps": 5, "every": 1}],
    "100,000 iterations": [{"method": m, "steps": 100_000, "every": 500} for m in ("ref", "bc", "md-tanh-s")],
    "3,000,000 iterations": [{"steps": 3_000_000, "every": 50_000, "seed": k} for k in (0, 1)],
    "dollars": [{"model": "a$^$b"}],
}


@pytest.mark.parametrize("case", CURVES)
def test_curves_fit_their_canvas(tmp_path, drawn, case):
    runs = [make_run(tmp_path / f"run{k}", **options) for k, options in enumerate(CURVES[case])]
    check_layout(drawn(plots.curves, runs, tmp_path / "curves.png"))


@pytest.mark.parametrize("gap", ["no validation", "no training", "NaN", "zero loss", "a flat loss"])
def test_curves_with_gaps_fit_their_canvas(tmp_path, drawn, gap):
    run = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] != {"no validation": "val", "no training": "train"}.get(gap)]
    for row in rows[6:12]:
        row.update({"NaN": {"loss": math.nan, "beta": math.nan}, "zero loss": {"loss": 0.0}}.get(gap, {}))
    for row in rows:
        row.update({"loss": 2.3} if gap == "a flat loss" else {})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = drawn(plots.curves, [run], tmp_path / "curves.png")
    check_layout(figure)
    panels = {"no validation": 2, "no training": 1}.get(gap, 3)
    assert len(figure.axes) == panels


HISTOGRAMS = {
    "binary": {},
    "one layer": {"layers": ["fc.weight"]},
    "float": {"method": "ref", "layers": ["conv1.weight", "conv2.weight", "conv3.weight", "fc.weight"], "reach": 0.6},
    "one layer in float": {"method": "ref", "layers": ["w"]},
    "three levels": {"levels": "ternary", "layers": [f"layer{k}" for k in range(5)]},
    "four levels": {"levels": "-1,-0.3333,0.3333,1"},
    "eight levels": {"levels": "-1,-0.75,-0.5,-0.25,0.25,0.5,0.75,1"},
    "levels close together": {"levels": "-1,-0.02,0,0.02,1"},
    "weights still far from the levels": {"levels": "-1.992,-1.887,-1.625,-0.27,0.61,1.05,1.15", "reach": 0.3},
    "long names": {"layers": [f"encoder.blocks.{k}.attention.projection.parametrizations.weight" for k in range(22)]},
    "five iterations": {"steps": 5, "every": 1},
    "one moment": {"steps": 0},
    "100,000 iterations": {"steps": 100_000, "every": 5000},
}


@pytest.mark.parametrize("case", HISTOGRAMS)
def test_histograms_fit_their_canvas(tmp_path, drawn, case):
    check_layout(drawn(plots.histograms, make_run(tmp_path / "run", **HISTOGRAMS[case]), tmp_path / "weights.png"))


EIGHT = "-1,-0.75,-0.5,-0.25,0.25,0.5,0.75,1"
COMPARISONS = {
    "one method": [("bc", "binary", [99.9])],
    "beside float": [("ref", None, [99.9]), ("bc", "binary", [99.8])],
    "two seeds": [("ref", None, [98.1, 98.3]), ("bc", "binary", [94, 96]), ("md-tanh-s", "binary", [84, 90])],
    "all methods": [(m, "binary", [90 + k, 91, 93]) for k, m in enumerate(METHODS[1:])],
    "several levels": [(m, q, [90, 91]) for m in METHODS[1:] for q in ("binary", "ternary", EIGHT)],
    "a long name": [("ref", None, [12.0]), (LONG, "binary", [10.0]), ("MY-METHOD " * 9, "ternary", [11.0])],
}


@pytest.mark.parametrize("case", COMPARISONS)
def test_comparisons_fit_their_canvas(tmp_path, drawn, case):
    rows = [{"method": m, "levels": q, "test": value} for m, q, values in COMPARISONS[case] for value in values]
    check_layout(drawn(plots.comparison, rows, tmp_path / "comparison.png"))


def test_projections_fit_their_canvas(tmp_path, drawn):
    check_layout(drawn(plots.projections, tmp_path))


def test_layers_in_float_do_not_appear_among_those_that_move_to_the_levels(tmp_path, drawn):
    layers = ["conv1.weight", "conv2.weight", "fc.weight"]
    run = with_summary(
        make_run(tmp_path / "run", layers=layers), **{"conv1.weight": 32, "conv2.weight": 1, "fc.weight": 32}
    )
    figure = drawn(plots.histograms, run, tmp_path / "weights.png")
    titles = [ax.get_title("left") for ax in figure.axes]
    assert titles == ["conv2.weight", "share of\nthe layer"]
    ref = with_summary(make_run(tmp_path / "ref", "ref", layers=layers), **dict.fromkeys(layers, 32))
    figure = drawn(plots.histograms, ref, tmp_path / "weights.png")
    assert len(figure.axes) == 3 + 1
    assert figure.get_suptitle() == "REF (float): how the weights move"


def test_every_level_has_a_tick_and_the_outer_ones_their_labels(tmp_path, drawn):
    figure = drawn(plots.histograms, make_run(tmp_path / "run", levels=EIGHT), tmp_path / "weights.png")
    ticks = figure.axes[0].get_xticks()
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert list(ticks) == [float(level) for level in EIGHT.split(",")]
    assert labels == ["-1", "", "", "", "", "", "", "+1"]
    assert figure.get_suptitle().replace("\n", " ") == "MD-tanh-S: how the weights move to 8 levels, -1 to +1"


def test_layers_with_long_names_are_told_apart(tmp_path, drawn):
    layers = [f"encoder.blocks.{k}.attention.projection.parametrizations.weight" for k in range(4)]
    figure = drawn(plots.histograms, make_run(tmp_path / "run", layers=layers), tmp_path / "weights.png")
    assert [ax.get_title("left") for ax in figure.axes[:4]] == [f"encoder.blocks.{k}" for k in range(4)]
    layers = [f"{'a' * 30}.{k}" for k in range(4)]
    figure = drawn(plots.histograms, make_run(tmp_path / "other", layers=layers), tmp_path / "weights.png")
    assert [ax.get_title("left") for ax in figure.axes[:4]] == [f"…{'a' * 21}.{k}" for k in range(4)]


@pytest.mark.parametrize(
    ("last", "labels"),
    [(5, {"0", "1", "5"}), (800, {"0", "400"}), (100_000, {"0", "40k", "100k"}), (3_000_000, {"1M", "3M"})],
)
def test_iterations_are_whole_and_short(tmp_path, drawn, last, labels):
    figure = drawn(plots.curves, [make_run(tmp_path / "run", steps=last, every=last)], tmp_path / "curves.png")
    assert labels <= {label.get_text() for label in figure.axes[0].get_xticklabels()}


def test_curves_show_every_run_in_the_colour_of_its_method(tmp_path):
    runs = [make_run(tmp_path / name, name) for name in ("bc", "md-tanh-s")]
    out = plots.curves(runs, tmp_path / "new" / "curves.png")
    pixels = picture(out)
    assert out == tmp_path / "new" / "curves.png"
    assert has_colour(pixels, "#cc6677")
    assert has_colour(pixels, "#332288")
    assert not has_colour(pixels, "#117733")
    primal = make_run(tmp_path / "primal", "md-tanh", recipe="cifar10/resnet18/binary/md-tanh")
    assert has_colour(picture(plots.curves([primal], tmp_path / "primal.png")), "#88ccee")


def test_the_float_network_has_neither_beta_nor_levels(tmp_path):
    run = make_run(tmp_path / "ref", "ref", levels="binary")
    (line,) = plots._lines([RunRecord.read(run)])
    assert line.betas() == {}
    assert RunRecord.read(run).levels is None
    picture(plots.curves([run], tmp_path / "ref.png"))


def labels_of(*runs):
    return [line.label for line in plots._lines([RunRecord.read(run) for run in runs])]


def test_runs_of_one_method_are_told_apart_by_what_differs_among_them(tmp_path):
    runs = [make_run(tmp_path / f"r{lr}", lr=lr) for lr in (0.1, 0.2)]
    ref = make_run(tmp_path / "ref", "ref", levels=None, lr=0.3)
    assert labels_of(ref, *runs) == ["REF (float)", "MD-tanh-S, lr 0.1", "MD-tanh-S, lr 0.2"]
    looks = plots._looks(["md-tanh-s"] * 25)
    assert looks[0] == ("#332288", "-")
    assert len(set(looks)) == 25


def test_every_method_has_a_look_of_its_own():
    looks = plots._looks(METHODS)
    assert looks == [(labels.method_colour(name), plots._DASHES[name.endswith("-star")]) for name in METHODS]
    assert len(set(plots._looks([*METHODS, "mine", "another"]))) == len(METHODS) + 2
    assert plots._looks(["mine", "md-tanh-s"])[1] == ("#332288", "-")


def test_runs_that_differ_in_nothing_are_told_apart_by_folder(tmp_path):
    assert labels_of(*(make_run(tmp_path / name) for name in ("a", "b"))) == [
        "MD-tanh-S, folder a",
        "MD-tanh-S, folder b",
    ]


def test_a_run_is_called_as_its_recipe(tmp_path):
    run = make_run(tmp_path / "run", "pq")
    (run / "summary.json").write_text(json.dumps({"recipe": "cifar10/resnet18/binary/pq-star"}))
    assert labels_of(run) == ["PQ*"]


def test_a_run_with_another_method_than_its_recipes_is_called_by_that(tmp_path):
    changed = {"recipe": "digits/digitsnet/binary/md-tanh-s", "overrides": {"method": "bc", "seed": 1}}
    assert labels_of(make_run(tmp_path / "run", "bc", **changed)) == ["BC"]
    results = Path(__file__).parents[1] / "results"
    (kept,) = results.glob("digits-digitsnet-binary-md-tanh-s-seed0-method-md-tanh-bounded-*.json")
    assert labels_of(kept) == ["MD-tanh, bounded"]


@pytest.mark.parametrize(("layers", "rows", "columns"), [(5, 1, 5), (7, 2, 3), (22, 2, 4)])
def test_histograms_have_a_panel_per_layer_and_at_most_eight(tmp_path, drawn, layers, rows, columns):
    run = make_run(tmp_path / "run", steps=30, layers=[f"layer{k}" for k in range(layers)])
    figure = drawn(plots.histograms, run, tmp_path / "weights.png")
    picture(tmp_path / "weights.png")
    assert figure.axes[0].get_gridspec().get_geometry() == (rows, columns)
    assert len(figure.axes) == rows * columns + 1


@pytest.mark.parametrize("levels", [None, "-0.5,0.25,0.5"])
def test_histograms_of_any_levels(tmp_path, levels):
    run = make_run(tmp_path / "run", steps=0, layers=["w"], levels=levels)
    picture(plots.histograms(run, tmp_path / "weights.png"))


def test_histograms_show_the_share_of_each_bin(tmp_path, drawn):
    figure = drawn(plots.histograms, make_run(tmp_path / "run", steps=60, every=30), tmp_path / "weights.png")
    (mesh,) = figure.axes[0].collections
    shares = [[0, 0, 0.5, 0.5, 0, 0], [0.125, 0, 0.375, 0.375, 0, 0.125], [0.25, 0, 0.25, 0.25, 0, 0.25]]
    assert mesh.get_array().filled(0).tolist() == shares
    assert mesh.get_coordinates()[0, :, 0].tolist() == pytest.approx([-1.2, -0.8, -0.4, 0, 0.4, 0.8, 1.2])


def test_layers_are_chosen_evenly_with_the_first_and_the_last():
    assert plots._evenly(range(22), 8) == [0, 3, 6, 9, 12, 15, 18, 21]
    assert plots._evenly("abc", 8) == ["a", "b", "c"]


def test_projections_are_two_pictures(tmp_path):
    files = plots.projections(tmp_path / "figures")
    assert [file.name for file in files] == ["tanh.png", "stanh.png"]
    assert all(has_colour(picture(file), "#332288") for file in files)


def test_comparison_has_the_mean_and_the_seeds_of_each_method_and_a_line_for_float(tmp_path, drawn):
    rows = [
        {"method": "ref", "levels": None, "test": 98.0},
        {"method": "bc", "levels": "binary", "test": 95.0},
        {"method": "md-tanh-s", "levels": "binary", "test": 97.0},
        {"method": "md-tanh-s", "levels": "binary", "test": 97.4},
    ]
    (ax,) = drawn(plots.comparison, rows, tmp_path / "comparison.png").axes
    shown = {(line.get_color(), *line.get_xdata()) for line in ax.get_lines()}
    assert {("#cc6677", 95.0), ("#332288", 97.2), ("white", 97.0, 97.4), ("#333333", 98.0, 98.0)} <= shown
    assert [label.get_text() for label in ax.get_yticklabels()] == ["BC", "MD-tanh-S"]
    assert {text.get_text() for text in ax.texts} == {"95.00", "97.20 ± 0.28 (n = 2)", "float 98.00"}
    with pytest.raises(plots.PlotError, match="no quantized method"):
        plots.comparison(rows[:1], tmp_path / "comparison.png")


@pytest.mark.parametrize("values", [[98.0, 97.5], [98, 10], [0.5, 0.2], [100, 100]])
def test_the_axis_starts_well_below_all_points_and_ends_at_100(tmp_path, drawn, values):
    rows = [{"method": "bc", "levels": "binary", "test": value} for value in values]
    low, high = drawn(plots.comparison, rows, tmp_path / "comparison.png").axes[0].get_xlim()
    assert low == max(0, min(values) - 1.5 * max(max(values) - min(values), 1))
    assert max(values) <= high <= 100


def test_a_last_line_that_is_cut_off_is_ignored(tmp_path):
    run = make_run(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    whole = RunRecord.read(run)
    for tail in (b'{"kind": "train", "st', b'{"kind": "val", "note": "\xc3', b"{"):
        metrics.write_bytes(metrics.read_bytes().rpartition(b"\n")[0] + b"\n" + tail)
        assert RunRecord.read(run) == whole


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "train", "st',
        b"",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"step": 1}',
        b'{"kind": ["val"]}',
        b'{"kind": "val", "step": 1}',
        b'{"kind": "val", "step": "1", "accuracy": 5}',
        b'{"kind": "train", "step": 1, "loss": null}',
        b'{"kind": "train", "step": 1, "loss": 1.0, "beta": "big"}',
        b'{"kind": "weights", "step": 1, "range": [1, -1], "layers": {"w": [1]}}',
        b'{"kind": "weights", "step": 1, "range": [1], "layers": {"w": [1]}}',
        b'{"kind": "weights", "step": 1, "range": [-1, 1], "layers": {}}',
        b'{"kind": "weights", "step": 1, "range": [-1, 1], "layers": {"w": ["1"]}}',
    ],
)
def test_any_other_broken_line_is_refused_by_file_and_number(tmp_path, line):
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines[:3], line, *lines[3:]]))
    with pytest.raises(MetricsError, match=r"metrics\.jsonl, line 4: "):
        plots.curves([run], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_a_step_recorded_again_after_a_resume_counts_once_and_unknown_kinds_do_not_matter(tmp_path):
    run = make_run(tmp_path / "run", steps=20)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "val", "step": 10, "accuracy": 1.5}\n{"kind": "note", "step": 10, "text": "resumed"}\n')
        file.write('{"kind": "train", "step": 20, "loss": NaN}\n')
    loaded = RunRecord.read(run)
    values = loaded.series("val", "accuracy")
    assert (list(values), values[10]) == ([0, 10, 20], 1.5)
    assert list(loaded.series("train", "loss")) == [0, 10]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json: no such file"),
        ("config.json", "{", "config.json: not readable as JSON"),
        ("config.json", "[]", "config.json: expected a JSON object"),
        ("config.json", '{"method": 3}', "config.json: method is 3"),
        ("config.json", '{"method": "bc", "levels": {"a": 1}}', "config.json: levels is"),
        ("config.json", '{"method": "bc", "recipe": "bc", "overrides": 1}', "config.json: overrides is 1"),
        ("summary.json", "\x00", "summary.json: not readable as JSON"),
        ("metrics.jsonl", None, "let the run train"),
        ("metrics.jsonl", "", "let the run train"),
    ],
)
def test_what_is_missing_or_broken_is_named(tmp_path, file, content, message):
    run = make_run(tmp_path / "run")
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_text(content)
    for draw in (lambda out: plots.curves([run], out), lambda out: plots.histograms(run, out)):
        with pytest.raises((RecordError, plots.PlotError), match=message):
            draw(tmp_path / "x.png")


def test_a_file_name_that_is_no_picture_is_refused(tmp_path):
    with pytest.raises(plots.PlotError, match=r"ends in \.png"):
        plots.curves([make_run(tmp_path / "run")], tmp_path / "curves.doc")


def test_no_state_of_matplotlib_is_changed(tmp_path):
    def settings():  # looking at the backend would choose one
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    before = settings()
    plots.comparison([{"method": "bc", "levels": "binary", "test": 95.0}], tmp_path / "bars.png")
    assert settings() == before


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(plots.PlotError, match=r"pip install 'mirrorquant\[plots\]'"):
        plots.projections(tmp_path)
