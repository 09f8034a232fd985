"""Figures are written, have their size, show something, and never come from a broken run folder."""

import builtins
import json
import math
from pathlib import Path

import pytest

from mirrorquant.train import plots

matplotlib = pytest.importorskip("matplotlib")


def make_run(folder, method="md-tanh-s", levels="binary", steps=60, layers=("conv1.weight", "fc.weight"), **config):
    folder.mkdir(parents=True)
    values = {"data": "digits", "model": "digitsnet", "method": method, "levels": levels, "seed": 0, **config}
    (folder / "config.json").write_text(json.dumps(values))
    lines = []
    for step in range(0, steps + 1, 10):
        loss = 2 * math.exp(-step / 20)
        lines.append({"kind": "train", "step": step, "loss": loss, "lr": 0.01, "beta": 1.05**step})
        lines.append({"kind": "val", "step": step, "accuracy": 90 - 70 * math.exp(-step / 15), "loss": 1.0})
        counts = [step, 0, 100 - step, 100 - step, 0, step]
        lines.append({"kind": "weights", "step": step, "range": [-1.2, 1.2], "layers": dict.fromkeys(layers, counts)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


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


def test_curves_are_drawn_from_kept_summaries_too(tmp_path):
    results = Path(__file__).parents[1] / "results"
    kept = sorted(results.glob("digits-digitsnet-*-seed0.json"))
    assert len(kept) == 4
    assert plots.curves(kept, tmp_path / "curves.png").stat().st_size > 10_000
    broken = tmp_path / "run.json"
    broken.write_text(json.dumps({**json.loads(kept[0].read_text()), "loss_curve": [1, 2]}))
    with pytest.raises(plots.PlotError, match=r"run\.json: not the summary of a run"):
        plots.curves([broken], tmp_path / "curves.png")


def test_curves_show_every_run_in_the_colour_of_its_method(tmp_path):
    runs = [make_run(tmp_path / name, name) for name in ("bc", "md-tanh-s")]
    out = plots.curves(runs, tmp_path / "new" / "curves.png")
    pixels = picture(out)
    assert out == tmp_path / "new" / "curves.png"
    assert pixels.shape == (690, 1440, 3)
    assert has_colour(pixels, "#cc6677")
    assert has_colour(pixels, "#332288")
    assert not has_colour(pixels, "#117733")
    primal = make_run(tmp_path / "primal", "md-tanh-primal", recipe="cifar10/resnet18/binary/md-tanh")
    assert has_colour(picture(plots.curves([primal], tmp_path / "primal.png")), "#88ccee")


def test_the_float_network_has_neither_beta_nor_levels(tmp_path):
    run = make_run(tmp_path / "ref", "ref", levels="binary")
    assert plots._betas(plots._load(run)) == ([], [])
    assert plots._load(run).config["levels"] is None
    picture(plots.curves([run], tmp_path / "ref.png"))


def test_runs_of_one_method_differ_in_colour_and_label(tmp_path):
    runs = [plots._load(make_run(tmp_path / f"r{seed}", seed=seed)) for seed in (0, 1)]
    assert plots._labels(runs) == ["MD-tanh-S, seed 0", "MD-tanh-S, seed 1"]
    looks = plots._colours(["md-tanh-s"] * 25)
    assert looks[0] == ("#332288", "-")
    assert len(set(looks)) == 25


def test_runs_that_differ_in_nothing_are_told_apart_by_folder(tmp_path):
    runs = [plots._load(make_run(tmp_path / name)) for name in ("a", "b")]
    assert plots._labels(runs) == ["MD-tanh-S, a", "MD-tanh-S, b"]


def test_a_run_is_called_as_its_recipe(tmp_path):
    run = make_run(tmp_path / "run", "pq")
    (run / "summary.json").write_text(json.dumps({"recipe": "cifar10/resnet18/binary/pq-star"}))
    assert plots._labels([plots._load(run)]) == ["PQ*"]


def test_a_run_with_another_method_than_its_recipes_is_called_by_that(tmp_path):
    changed = {"recipe": "digits/digitsnet/binary/md-tanh-s", "overrides": {"method": "bc", "seed": 1}}
    assert plots._labels([plots._load(make_run(tmp_path / "run", "bc", **changed))]) == ["BC"]
    kept = Path(__file__).parents[1] / "results/digits-digitsnet-binary-md-tanh-s-seed0-method-md-tanh.json"
    assert plots._labels([plots._load(kept)]) == ["MD-tanh"]


@pytest.mark.parametrize(("layers", "size"), [(5, (585, 1770)), (22, (1035, 1455))])
def test_histograms_have_a_panel_a_layer_and_at_most_eight(tmp_path, layers, size):
    run = make_run(tmp_path / "run", steps=30, layers=[f"layer{k}" for k in range(layers)])
    pixels = picture(plots.histograms(run, tmp_path / "weights.png"))
    assert pixels.shape == (*size, 3)


@pytest.mark.parametrize("levels", [None, [-0.5, 0.25, 0.5]])
def test_histograms_of_any_levels(tmp_path, levels):
    run = make_run(tmp_path / "run", steps=0, layers=["w"], levels=levels)
    picture(plots.histograms(run, tmp_path / "weights.png"))


def test_histograms_in_other_bins_keep_their_mass():
    shares = plots._shares([-1, 1], [1, 0, 0, 3], [-2.0, -1.0, 0.0, 1.0])
    assert shares.tolist() == [0.0, 0.25, 0.75]


def test_layers_are_chosen_evenly_with_the_first_and_the_last():
    assert plots._evenly(range(22), 8) == [0, 3, 6, 9, 12, 15, 18, 21]
    assert plots._evenly("abc", 8) == ["a", "b", "c"]


def test_projections_are_two_pictures(tmp_path):
    files = plots.projections(tmp_path / "figures")
    assert [file.name for file in files] == ["tanh.png", "stanh.png"]
    assert [picture(file).shape for file in files] == [(540, 1530, 3)] * 2


def test_comparison_has_a_bar_a_method_and_a_line_for_float(tmp_path):
    rows = [
        {"method": "ref", "levels": None, "test": 98.0},
        {"method": "bc", "levels": "binary", "test": 95.0},
        {"method": "md-tanh-s", "levels": "binary", "test": 97.0},
        {"method": "md-tanh-s", "levels": "binary", "test": 97.4},
    ]
    pixels = picture(plots.comparison(rows, tmp_path / "bars.png"))
    assert pixels.shape == (round(150 * (1.5 + 0.46 * 2)), 1080, 3)
    assert has_colour(pixels, "#cc6677")
    assert has_colour(pixels, "#332288")
    with pytest.raises(plots.PlotError, match="no quantized method"):
        plots.comparison(rows[:1], tmp_path / "bars.png")


@pytest.mark.parametrize(
    ("values", "start"), [([98.0, 97.5], 96), ([98, 91], 80), ([98, 10], 0), ([0.5, 0.2], 0), ([100, 100], 98)]
)
def test_bars_start_at_a_round_number_below_all_of_them(values, start):
    assert plots._axis_start(values) == start


def test_a_last_line_that_is_cut_off_is_ignored(tmp_path):
    run = make_run(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    whole = plots._load(run)
    for tail in (b'{"kind": "train", "st', b'{"kind": "val", "note": "\xc3', b"{"):
        metrics.write_bytes(metrics.read_bytes().rpartition(b"\n")[0] + b"\n" + tail)
        assert plots._load(run) == whole


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
        b'{"kind": "weights", "step": 1, "range": [-1, 1], "layers": {}}',
        b'{"kind": "weights", "step": 1, "range": [-1, 1], "layers": {"w": ["1"]}}',
    ],
)
def test_any_other_broken_line_is_refused_by_file_and_number(tmp_path, line):
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines[:3], line, *lines[3:]]))
    with pytest.raises(plots.PlotError, match=r"metrics\.jsonl, line 4: "):
        plots.curves([run], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_a_step_recorded_again_after_a_resume_counts_once_and_unknown_kinds_do_not_matter(tmp_path):
    run = make_run(tmp_path / "run", steps=20)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "val", "step": 10, "accuracy": 1.5}\n{"kind": "note", "text": "resumed"}\n')
        file.write('{"kind": "train", "step": 20, "loss": NaN}\n')
    loaded = plots._load(run)
    steps, values = loaded.series("val", "accuracy")
    assert (steps, values[1]) == ([0, 10, 20], 1.5)
    assert loaded.series("train", "loss")[0] == [0, 10]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json: no such file"),
        ("config.json", "{", "config.json: not readable as JSON"),
        ("config.json", "[]", "config.json: expected a JSON object"),
        ("config.json", '{"method": 3}', "config.json: method is 3"),
        ("config.json", '{"method": "bc", "levels": {"a": 1}}', "config.json: levels are"),
        ("config.json", '{"method": "bc", "recipe": "bc", "overrides": 1}', "config.json: overrides are 1"),
        ("summary.json", "\x00", "summary.json: not readable as JSON"),
        ("metrics.jsonl", None, "metrics.jsonl: not readable"),
        ("metrics.jsonl", "", "let the run go on"),
    ],
)
def test_what_is_missing_or_broken_is_named(tmp_path, file, content, message):
    run = make_run(tmp_path / "run")
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_text(content)
    for draw in (lambda out: plots.curves([run], out), lambda out: plots.histograms(run, out)):
        with pytest.raises(plots.PlotError, match=message):
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
