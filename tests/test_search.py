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
    grid = {key: set(values.split(",")) for key, values in search.GRID.items()}
    assert {key: {trial[key] for trial in every} for key in grid} == grid
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
    assert re.search(rf"^0\.02 +1\.3 +{rows[0]['val'][0]:.2f} +{rows[0]['loss'][0]:.4f} ", said, re.M)
    assert "test" not in said.replace("tests", "")
    command = re.search(r"mirrorquant (train digits\S+ .*?)  ", said)[1]
    assert command.split()[2:] == [word for word in SHORT if "=" in word] + ["lr=0.02", "beta_scale=1.3", "seed=1"]
    assert (tmp_path / FOLDER / "search.png").stat().st_size > 1000

    del trained[:]
    assert main(["search", NAME, *SHORT, "--over", "lr=1e-9,0.02,0.01", "--over", "beta_scale=1.3"]) == 0
    assert trained == [(0.01, 1.3)]
    assert f"2 of 3 runs in {FOLDER} have ended" in capsys.readouterr().out
    assert main(["search", NAME, *SHORT, "batch_size=50", "--over", "lr=1e-9,0.02", "--over", "beta_scale=1.3"]) == 1
    assert "holds a run of another configuration" in capsys.readouterr().err


def test_what_fails_is_not_ranked(trained, capsys):
    assert main(["search", NAME, *SHORT, "--over", "lr=0.01,10"]) == 0
    assert "1 of 2 runs failed and are not ranked: lr=10: the loss is not finite" in capsys.readouterr().out
    assert main(["search", NAME, *SHORT, "--over", "lr=10,20"]) == 1
    assert "all 2 runs failed: lr=10: the loss is not finite; lr=20" in capsys.readouterr().err


def test_several_seeds_at_a_time_make_one_row(tmp_path, capsys):
    assert main(["search", NAME, *SHORT, "--over", "lr=0.01", "--seeds", "2", "--jobs", "2", "--results", "kept"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^0\.01 +\d+\.\d\d ± \d+\.\d\d ", said, re.M)
    assert "no figure: a search with a single combination has nothing to compare" in said
    kept = [json.loads(path.read_text()) for path in (tmp_path / "kept").iterdir()]
    assert sorted(summary["config"]["seed"] for summary in kept) == [0, 1]
    assert {summary["config"]["lr"] for summary in kept} == {0.01}


def test_equal_accuracies_are_ranked_by_the_loss_of_the_kept_network():
    def record(lr, accuracy, losses):
        summary = {"recipe": NAME, "config": {"method": "md-tanh-s"}, "val_accuracy": accuracy, "seconds": 1.0}
        return {"lr": lr}, [RunRecord.of({**summary, "best_step": 20, "val_loss_curve": losses})]

    tried = [
        record("1", 98.0, [[10, 0.1], [20, 0.5]]),
        record("2", 98.0, [[10, 0.9], [20, 0.4]]),
        record("3", 99.0, [[20, 0.9]]),
        ({"lr": "4"}, []),
    ]
    assert [row["values"]["lr"] for row in search._ranked(tried)] == ["3", "2", "1"]


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
