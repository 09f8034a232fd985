"""One command looks for hyperparameters, by validation accuracy alone."""

import argparse
import json
import re

import pytest

from mirrorquant.cli import main, search
from mirrorquant.report import RunRecord, plots
from mirrorquant.train import Run, RunError

SHORT = ["iterations=10", "width=4", "eval_every=10", "histogram_every=0", "device=cpu", "--quiet"]
NAME = "digits/digitsnet/binary/md-tanh-s"
FOLDER = "runs/search-digits-digitsnet-binary-md-tanh-s"


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch):
    """The lr and beta_scale of what is trained; learning rates above 1 diverge."""
    found, train = [], Run.train

    def recorded(self):
        if self.config.lr > 1:
            self.folder.release()  # as train does when it fails
            raise RunError("the loss is not finite")
        found.append((self.config.lr, self.config.beta_scale))
        return train(self)

    monkeypatch.setattr(Run, "train", recorded)
    return found


def trials(*over, recipe=NAME, sample=None, overrides=()):
    options = argparse.Namespace(over=over, sample=sample, overrides=list(overrides))
    return search._trials(recipe, options)


def test_without_keys_the_papers_grid_is_searched():
    every = trials(recipe="cifar10/resnet18/binary/md-tanh-s", overrides=["lr_schedule=step"])
    grid = {
        "lr": {0.1, 0.01, 0.001, 0.0001},
        "lr_scale": {0.1, 0.2, 0.3, 0.5},
        "beta_scale": {1.01, 1.02, 1.05, 1.1, 1.2},
        "beta_interval": {100, 200, 500, 1000, 2000},
    }
    assert {key: {float(trial[key]) for trial in every} for key in grid} == grid
    assert len(every) == 400
    assert len(trials(recipe="cifar10/resnet18/binary/bc", overrides=["lr_schedule=step"])) == 16  # it has no β
    assert len(trials(recipe="cifar10/resnet18/binary/bc", overrides=["lr_schedule=cosine"])) == 4
    assert len(trials(recipe="cifar10/resnet18/binary/bc", overrides=["lr_schedule=cosine", "lr=0.01"])) == 1


def test_a_larger_sample_holds_the_smaller_one():
    over = "lr=0.1,0.01,0.001", "beta_scale=1.01,1.02,1.03"
    few, more = trials(*over, sample=4), trials(*over, sample=7)
    assert (len(few), len(more)) == (4, 7)
    assert more[:4] == few
    assert few != trials(*over)[:4]
    assert len(trials(*over, sample=100)) == 9
    otherwise = trials("beta_scale=1.03,1.01,1.02", "lr=1e-3,1e-1,1e-2", sample=4)
    as_numbers = [{key: float(value) for key, value in sorted(trial.items())} for trial in otherwise]
    assert as_numbers == [{key: float(value) for key, value in sorted(trial.items())} for trial in few]


def test_a_sample_may_leave_out_what_makes_a_key_count():
    over = "optimizer=sgd,adam", "momentum=0.5,0.9"
    every = trials(*over)
    assert [trial["optimizer"] for trial in every] == ["sgd", "sgd", "adam"]
    assert all(trial in every for count in (1, 2, 3) for trial in trials(*over, sample=count))
    assert len(trials("method=bc,md-tanh-s", sample=1, overrides=["beta_scale=1.1"])) == 1


def test_an_empty_value_is_a_value():
    assert trials("scale=, tensor-learnt") == [{"scale": ""}, {"scale": "tensor-learnt"}]


def test_keys_without_an_effect_make_no_further_runs():
    found = trials("lr_schedule=cosine,step", "lr_scale=0.1,0.2")
    assert found == [
        {"lr_schedule": "cosine"},
        {"lr_schedule": "step", "lr_scale": "0.1"},
        {"lr_schedule": "step", "lr_scale": "0.2"},
    ]
    assert trials("lr=0.1,0.10,1e-1") == [{"lr": "0.1"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--over", "lrr=1,2"], "There is no key 'lrr'. Did you mean 'lr'?"),
        (["--over", "lr"], "--over lr has no values: write them as in --over lr=0.1,0.01"),
        (["--over", "lr=0.1,high"], "left out: 1 combinations that no run can have: lr is 'high'"),
        (["--over", "lr=0.1,0.2", "lr=0.1"], "lr is given twice"),
        (["--over", "lr=0.1", "--over", "lr=0.2"], "lr is given twice"),
        (["--over", "seed=1,2"], "set how many with --seeds"),
        (["seed=1"], "set how many with --seeds, instead of seed="),
        (["--over", "momentum=0.5,0.9"], "momentum has no effect here because optimizer is adam"),
        (["--over", "lr=0.1,0.2", "train_on=all", "keep=last"], "train_on=all leaves no validation images"),
        (["--over", "train_on=all,train", "keep=last"], "train_on=all leaves no validation images"),
        (["--over", "threads=1,2"], "threads changes no accuracy: set it once, as threads=1"),
        (["--over", f"lr={','.join(map(str, range(1, 202)))}", "--over", f"lr_scale={','.join('1' * 101)}"], "20301"),
        (["--sample", "0"], "'0' is not a count"),
    ],
)
def test_what_cannot_be_searched_is_told_in_one_line(trained, capsys, words, said):
    code = main(["search", NAME, *SHORT, *words])
    told = capsys.readouterr()
    assert said in told.out + told.err
    assert code == (0 if "left out" in said else 2 if "count" in said else 1)
    assert bool(trained) == ("left out" in said)


def test_the_best_comes_first_and_a_second_start_trains_only_what_is_new(trained, tmp_path, capsys):
    assert main(["search", NAME, *SHORT, "--over", "lr=1e-9,0.02", "--over", "beta_scale=1.3"]) == 0
    assert trained == [(1e-9, 1.3), (0.02, 1.3)]
    said = capsys.readouterr().out
    rows = json.loads((tmp_path / FOLDER / "search.json").read_text())
    assert [row["values"]["lr"] for row in rows] == ["0.02", "1e-9"]
    assert rows[0]["val"][0] > rows[1]["val"][0]
    assert re.search(r"^ +lr +beta_scale +rounded val % +val loss +time$", said, re.M)
    assert re.search(rf"^0\.02 +1\.3 +{rows[0]['val'][0]:.2f} +{rows[0]['loss']:.4f} ", said, re.M)
    assert "test" not in said.replace("tests", "")
    command = re.search(r"mirrorquant (train digits\S+ .*?)  ", said)[1]
    assert command.split()[2:] == [word for word in SHORT if "=" in word] + ["lr=0.02", "beta_scale=1.3", "seed=1"]
    assert (tmp_path / FOLDER / "search.png").stat().st_size > 1000

    del trained[:]
    again = ["--over", "beta_scale=1.30", "--over", "lr=0.01,2e-2,1e-09", "--results", "kept"]
    assert main(["search", NAME, *SHORT, *again]) == 0
    assert trained == [(0.01, 1.3)]
    assert f"2 of 3 runs in {FOLDER} have ended" in capsys.readouterr().out
    assert len(list((tmp_path / "kept").iterdir())) == 3
    assert main(["search", NAME, *SHORT, "batch_size=50", "--over", "lr=0.01", "--over", "beta_scale=1.3"]) == 0
    assert trained == [(0.01, 1.3)] * 2


def test_values_that_look_alike_in_a_name_have_their_own_folders(trained, tmp_path):
    for _ in range(2):
        assert main(["search", NAME, *SHORT, "--over", "skip=?c.bias,*c.bias"]) == 0
    assert len(trained) == len(list((tmp_path / FOLDER).glob("seed0-*"))) == 2


def test_what_fails_is_not_ranked(trained, capsys):
    assert main(["search", NAME, *SHORT, "--over", "lr=0.01,10"]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 runs failed; their combinations are not ranked: lr=10: the loss is not finite" in said
    assert "test images" not in said
    assert main(["search", NAME, *SHORT, "--over", "lr=10,20"]) == 1
    assert (
        "no combination has all its runs, 2 of 2 failed: lr=10: the loss is not finite; lr=20"
        in capsys.readouterr().err
    )


def test_a_combination_with_a_failed_seed_is_not_ranked(monkeypatch, tmp_path, capsys):
    train = Run.train

    def flaky(self):
        if self.config.lr == 0.02 and self.config.seed == 1:
            raise RuntimeError("out of memory\nwith details")
        return train(self)

    monkeypatch.setattr(Run, "train", flaky)
    assert main(["search", NAME, *SHORT, "--over", "lr=0.02,1e-9", "--seeds", "2"]) == 0
    rows = json.loads((tmp_path / FOLDER / "search.json").read_text())
    assert [(row["values"]["lr"], len(row["val"])) for row in rows] == [("1e-9", 2)]
    said = capsys.readouterr()
    assert (
        "1 of 4 runs failed; their combinations are not ranked: lr=0.02 seed=1: RuntimeError: out of memory" in said.out
    )
    assert "with details" in said.err


def test_it_is_said_if_the_test_images_choose(tmp_path, capsys):
    from PIL import Image

    for split, count in (("train", 20), ("val", 4)):
        for name, colour in (("black", 0), ("white", 255)):
            (tmp_path / "few" / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (colour,) * 3).save(tmp_path / "few" / split / name / f"{i}.png")
    assert main(["search", NAME, *SHORT, "data=folder:few", "batch_size=10", "--over", "lr=0.01,0.02"]) == 0
    assert "The validation images of this data set are its test images" in capsys.readouterr().out


def test_several_seeds_at_a_time_make_one_row(tmp_path, capsys):
    assert main(["search", NAME, *SHORT, "--over", "lr=0.01", "--seeds", "2", "--jobs", "2", "--results", "kept"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^0\.01 +\d+\.\d\d ± \d+\.\d\d ", said, re.M)
    assert "no figure: a search with a single combination has nothing to compare" in said
    kept = [json.loads(path.read_text()) for path in (tmp_path / "kept").iterdir()]
    assert sorted(summary["config"]["seed"] for summary in kept) == [0, 1]
    assert {summary["config"]["lr"] for summary in kept} == {0.01}
    assert re.search(r"mirrorquant train .* seed=2 ", said)


def test_the_mean_accuracy_ranks_and_of_equals_the_loss_of_the_kept_networks():
    def trial(lr, accuracies, losses):
        summary = {"recipe": NAME, "config": {"method": "md-tanh-s"}, "seconds": 1.0}
        each = zip(accuracies, losses, strict=True)
        return {"lr": lr}, [RunRecord.of({**summary, "val_accuracy": a, "val_loss": loss}) for a, loss in each]

    tried = [
        trial("1", [98.0, 98.0], [0.6, 0.4]),
        trial("2", [98.0, 98.0], [0.7, 0.2]),
        trial("3", [99.0, 97.2], [0.9, 0.9]),
        trial("4", [98.0, 98.0], [0.1, None]),
        trial("5", [99.5, 90.0], [0.1, 0.1]),
        trial("6", [98.0, 98.0], [0.1, float("nan")]),
    ]
    ranked = search._ranked(tried)
    assert [row["values"]["lr"] for row in ranked] == ["3", "2", "1", "4", "6", "5"]
    assert [row["loss"] for row in ranked] == [0.9, pytest.approx(0.45), 0.5, None, None, 0.1]


def test_the_picture_has_a_panel_for_each_key(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    values = [("0.1", "step", 50.0), ("0.01", "step", 97.0), ("0.01", "cosine", 98.0), ("10", "step", 10.0)]
    rows = [{"values": {"lr": lr, "lr_schedule": schedule}, "val": [val]} for lr, schedule, val in values]
    plots.search([*rows, {"values": {"lr": "1e-3"}, "val": [96.0, 97.0]}], tmp_path / "search.png")
    panels = figures[0].axes
    assert [ax.get_xlabel() for ax in panels] == ["lr", "lr_schedule"]
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == ["1e-3", "0.01", "0.1", "10"]
    assert [tick.get_text() for tick in panels[1].get_xticklabels()] == ["-", "cosine", "step"]
    assert panels[0].lines[0].get_ydata().tolist() == [96.5, 98.0, 50.0, 10.0]
    low, high = panels[0].get_ylim()
    assert 70 < low < 78
    assert high > 98
