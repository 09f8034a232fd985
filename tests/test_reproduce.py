"""One command trains a whole table of the paper."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch

from mirrorquant.cli import main
from mirrorquant.train import Config, Run, RunError, recipes

SHORT = [
    "iterations=10",
    "width=4",
    "eval_every=10",
    "histogram_every=0",
    "checkpoint_every=5",
    "device=cpu",
    "--quiet",
]


@pytest.fixture(autouse=True)
def small_table(monkeypatch, tmp_path):
    monkeypatch.setitem(recipes.TABLES, "binary", (("digits",), ("digitsnet",), "binary"))
    monkeypatch.chdir(tmp_path)


def trained(monkeypatch):
    """The recipes and seeds that are trained from now on."""
    found, train = [], Run.train

    def recorded(self):
        found.append((self.config.recipe.split("/")[-1], self.config.seed))
        return train(self)

    monkeypatch.setattr(Run, "train", recorded)
    return found


def test_the_cells_of_the_papers_tables():
    assert len(recipes.cells("ternary")) == 5 * 6
    assert recipes.cells("imagenet")[:2] == ["imagenet/resnet18/ref", "imagenet/resnet34/ref"]
    assert recipes.cells("imagenette")[:2] == ["imagenette/resnet18/ref", "imagenette/resnet34/ref"]
    assert len(recipes.cells("imagenette")) == 6
    assert recipes.cells("beyond")[0] == "cifar10/resnet18/ref-best"


def test_what_is_there_is_skipped_and_the_rest_trained(monkeypatch, tmp_path, capsys):
    found = trained(monkeypatch)
    assert main(["reproduce", "binary", "bc", *SHORT]) == 0
    assert found == [("bc", 0)]
    assert main(["reproduce", "binary", "bc", *SHORT, "--seeds", "2"]) == 0
    assert found == [("bc", 0), ("bc", 1)]
    said = capsys.readouterr().out
    assert "1 of 2 cells have a result in results\n" in said
    assert re.search(r"^ended: digits/digitsnet/binary/bc, seed 1: test \d+\.\d\d %, ", said, re.M)
    assert "[2/2] digits/digitsnet/binary/bc, seed 1; 1 to go, about " in said
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "digits-digitsnet-binary-bc-seed0",
        "digits-digitsnet-binary-bc-seed1",
    ]
    for file in (tmp_path / "results").glob("*.json"):  # as from another machine, whose times say nothing
        file.write_text(re.sub(r'"device": "(?!auto)[^"]+"', '"device": "abacus"', file.read_text()))
    assert main(["reproduce", "binary", "bc", *SHORT, "--seeds", "3"]) == 0
    assert "[3/3] digits/digitsnet/binary/bc, seed 2; 1 to go\n" in capsys.readouterr().out
    del found[2]
    assert main(["reproduce", "binary", "bc", *SHORT, "lr=0.02"]) == 1  # its folder holds another run
    assert "another configuration" in capsys.readouterr().out
    assert main(["reproduce", "binary", "/bc,gd-tanh", *SHORT]) == 0
    assert found == [("bc", 0), ("bc", 1), ("gd-tanh", 0)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["binary", "bc", "seed=1"], "set how many with --seeds, instead of seed="),
        (["binary", "bc", "method=pq"], "name some of its recipes, instead of method="),
        (["imagenette", "pretrained", "--out", "other"], "init of imagenette/.* is runs/.*leave out --out"),
    ],
)
def test_what_belongs_to_the_table_cannot_be_set(words, said, capsys):
    assert main(["reproduce", *words, "--quiet"]) != 0
    assert re.search(said, capsys.readouterr().err)


def test_a_result_without_its_run_counts(monkeypatch, tmp_path):
    assert main(["reproduce", "binary", "bc", *SHORT]) == 0
    for path in sorted((tmp_path / "runs").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    found = trained(monkeypatch)
    assert main(["reproduce", "binary", "bc", *SHORT]) == 0
    assert found == []


def test_a_cell_that_fails_does_not_end_the_table(monkeypatch, tmp_path, capsys):
    train = Run.train

    def fails(self):
        if self.config.method == "bc":
            raise RunError("the loss is not finite")
        return train(self)

    monkeypatch.setattr(Run, "train", fails)
    monkeypatch.setattr(recipes, "cells", lambda table: ["digits/digitsnet/binary/bc", "digits/digitsnet/binary/pq"])
    assert main(["reproduce", "binary", *SHORT]) == 1
    said = capsys.readouterr()
    assert "failed: digits/digitsnet/binary/bc, seed 0: the loss is not finite" in said.out
    assert "1 of 2 cells failed: digits/digitsnet/binary/bc, seed 0: the loss is not finite" in said.err
    assert [json.loads(path.read_text())["recipe"] for path in (tmp_path / "results").iterdir()] == [
        "digits/digitsnet/binary/pq"
    ]


@pytest.fixture
def pretrained(monkeypatch):
    """A table in which a cell starts from the float network, and has a name of its own."""
    names, get = (
        ["digits/digitsnet/ref", "digits/digitsnet/binary/md-tanh-s", "digits/digitsnet/binary/bc"],
        recipes.get,
    )
    start = {"digits/digitsnet/binary/bc": {"init": "runs/digits-digitsnet-ref-seed0", "affine": True}}
    monkeypatch.setattr(recipes, "cells", lambda table: names)
    monkeypatch.setattr(recipes, "get", lambda name: get(name) | start.get(name, {}))


def test_a_network_that_others_start_from_is_trained_again_if_it_is_gone(monkeypatch, tmp_path, capsys, pretrained):
    found = trained(monkeypatch)
    assert main(["reproduce", "binary", *SHORT]) == 0
    assert found == [("ref", 0), ("md-tanh-s", 0), ("bc", 0)]
    del found[:]
    assert main(["reproduce", "binary", "bc", "--seeds", "2", *SHORT]) == 0  # the float network is there
    assert found == [("bc", 1)]
    (tmp_path / "runs").rename(tmp_path / "gone")
    assert main(["reproduce", "binary", "--seeds", "2", *SHORT]) == 0
    assert found == [("bc", 1), ("ref", 1), ("md-tanh-s", 1)]  # and nothing that is left needs it
    for path in (tmp_path / "results").glob("*bc-seed1*"):
        path.unlink()
    del found[:]
    assert main(["reproduce", "binary", "bc", "--seeds", "2", *SHORT]) == 0
    assert found == [("ref", 0), ("bc", 1)]
    assert "digits/digitsnet/ref, seed 0 has no network in runs/digits-digitsnet-ref-seed0" in capsys.readouterr().out


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_no_cell_starts_from_another_network_than_its_own(tmp_path, capsys, pretrained, jobs):
    folder = "runs/digits-digitsnet-ref-seed0"
    assert main(["train", "digits/digitsnet/ref", *SHORT, "lr=0.5", "--out", folder]) == 0
    assert main(["reproduce", "binary", *SHORT, "--jobs", jobs]) == 1
    said = capsys.readouterr().err
    assert "2 of 3 cells failed: digits/digitsnet/ref, seed 0: runs/digits-digitsnet-ref-seed0 holds a run of" in said
    assert "binary/bc, seed 0: it needs the network of digits/digitsnet/ref, seed 0, which failed" in said
    assert main(["reproduce", "binary", "bc", *SHORT]) == 1  # without training the float network itself
    assert "binary/bc, seed 0: runs/digits-digitsnet-ref-seed0 holds a run of" in capsys.readouterr().err
    (result,) = (tmp_path / "results").iterdir()
    assert json.loads(result.read_text())["recipe"] == "digits/digitsnet/binary/md-tanh-s"


def test_a_part_that_no_recipe_has_is_an_error(capsys):
    assert main(["reproduce", "binary", "imagenet"]) == 1
    assert "no recipe of the table binary has 'imagenet' in its name" in capsys.readouterr().err


def test_several_cells_at_a_time_are_trained_skipped_and_resumed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(recipes, "cells", lambda table: [f"digits/digitsnet/binary/{m}" for m in ("bc", "pq", "pmf")])
    assert main(["reproduce", "binary", *SHORT, "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert [f"[{n}/3]" in said for n in (1, 2, 3)] == [True] * 3
    assert all(label in said for label in ("\nbc ", "\npq ", "\npmf "))
    results = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert len(results) == 3
    summary = json.loads((tmp_path / "results" / results[0]).read_text())
    assert summary["config"]["iterations"] == 10
    (tmp_path / "results" / results[0]).unlink()
    assert main(["reproduce", "binary", *SHORT, "--jobs", "2"]) == 0  # its run has ended already
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == results
    assert "[2/3]" not in capsys.readouterr().out


def test_float_networks_end_before_others_start(monkeypatch, tmp_path):
    names = ["digits/digitsnet/ref", "digits/digitsnet/binary/bc"]
    monkeypatch.setattr(recipes, "cells", lambda table: names)
    assert main(["reproduce", "binary", *SHORT, "--jobs", "2"]) == 0
    ref, bc = (tmp_path / "runs" / f"{name.replace('/', '-')}-seed0" for name in names)
    assert (ref / "summary.json").stat().st_mtime <= (bc / "config.json").stat().st_mtime


def test_a_cell_that_fails_in_its_process_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(recipes, "cells", lambda table: [f"digits/digitsnet/binary/{m}" for m in ("bc", "pq")])
    assert (
        main(
            [
                "reproduce",
                "binary",
                "lr=100",
                "precision=float32",
                *SHORT[:-1],
                "data_root=/nowhere",
                "--quiet",
                "--jobs",
                "2",
                "data=cifar10",
            ]
        )
        == 1
    )
    assert "2 of 2 cells failed: digits/digitsnet/binary/" in capsys.readouterr().err


def begun(tmp_path, *words):
    """A table in a session of its own, whose first two cells train and have a checkpoint, and their folders."""
    long = [*words, *SHORT[1:-1], "iterations=100000", "checkpoint_every=200", "log_every=1", "--quiet", "--jobs", "2"]
    code = "import sys; from mirrorquant.cli import main; from mirrorquant.train import recipes; "
    code += "recipes.cells = lambda table: ['digits/digitsnet/binary/bc', 'digits/digitsnet/binary/pq', "
    code += "'digits/digitsnet/binary/pmf']; sys.exit(main())"
    command = [sys.executable, "-c", code, "reproduce", "binary", *long]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    table = subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipes)
    folders = [tmp_path / "runs" / f"digits-digitsnet-binary-{name}-seed0" for name in ("bc", "pq")]
    deadline = time.monotonic() + 120
    while not all((folder / "checkpoint.pt").exists() for folder in folders) and time.monotonic() < deadline:
        time.sleep(0.1)
    return table, folders


def stopped_at(folder):
    """The iteration of the newest checkpoint of a run, once its process has ended."""
    for _ in range(300):
        with suppress(RunError):  # its folder is in use
            Run.resume(folder, quiet=True).folder.release()
            return torch.load(folder / "checkpoint.pt", weights_only=True)["step"]
        time.sleep(0.1)
    raise AssertionError(f"{folder} is still in use")


@pytest.mark.parametrize("to_all", [False, True], ids=["signal", "ctrl-c"])
def test_a_signal_stops_all_processes_and_the_next_start_goes_on(tmp_path, to_all):
    table, folders = begun(tmp_path)
    if to_all:  # as a terminal does
        os.killpg(table.pid, signal.SIGINT)
    else:
        table.send_signal(signal.SIGTERM)
    printed, said = table.communicate(timeout=60)
    assert table.returncode == (130 if to_all else 143)
    assert "stopped: start again to continue" in said
    assert "Traceback" not in said
    for folder in folders:
        Run.resume(folder, quiet=True).folder.release()  # nobody holds its lock any more
        *_, last = (folder / "metrics.jsonl").read_text().splitlines()
        assert json.loads(last)["step"] <= stopped_at(folder)
    assert "failed" not in printed
    assert not (tmp_path / "runs" / "digits-digitsnet-binary-pmf-seed0").exists()

    before = [(folder / "metrics.jsonl").read_text() for folder in folders]
    table, _ = begun(tmp_path, "threads=2")
    deadline = time.monotonic() + 120
    while not all(longer(folder, text) for folder, text in zip(folders, before, strict=True)):
        assert time.monotonic() < deadline, "what was trained before is not continued"
        time.sleep(0.1)
    table.send_signal(signal.SIGTERM)
    table.communicate(timeout=60)
    assert all(Config.load(folder / "config.json").threads == 2 for folder in folders)


def longer(folder, text):
    """Whether the metrics of a run have grown, after the very lines that were there."""
    now = (folder / "metrics.jsonl").read_text()
    return len(now) > len(text) and now.startswith(text)


def test_when_a_table_is_killed_its_runs_write_checkpoints_and_stop(tmp_path):
    table, folders = begun(tmp_path)
    table.kill()
    table.communicate(timeout=60)
    for folder in folders:
        stopped = stopped_at(folder)
        *_, last = (folder / "metrics.jsonl").read_text().splitlines()
        assert json.loads(last)["step"] <= stopped < 100_000  # or the last steps would be lost


def test_an_override_may_be_without_effect_in_some_cells(monkeypatch, tmp_path, capsys):
    names = ["digits/digitsnet/binary/bc", "digits/digitsnet/binary/gd-tanh"]
    monkeypatch.setattr(recipes, "cells", lambda table: names)
    kept = []
    for jobs in ("1", "2"):
        where = ["--results", f"results-{jobs}", "--out", f"runs-{jobs}", "--jobs", jobs]
        assert main(["reproduce", "binary", *SHORT, "beta_scale=1.1", *where]) == 0
        files = sorted((tmp_path / f"results-{jobs}").iterdir())
        kept.append([(path.name, json.loads(path.read_text())["overrides"].get("beta_scale")) for path in files])
        assert main(["reproduce", "binary", *SHORT, "momentum=0.5", *where]) == 1
        assert "momentum has no effect here because optimizer is adam: leave it out" in capsys.readouterr().err
    assert kept[0] == kept[1]
    assert [value for _, value in kept[0]] == [None, 1.1]


def test_warnings_of_a_process_are_shown_with_the_name_of_its_cell(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(recipes, "cells", lambda table: ["digits/digitsnet/binary/md-tanh-s"])
    assert main(["reproduce", "binary", *SHORT, "lr=1e-30", "beta_scale=1", "--jobs", "2"]) == 0
    assert "digits/digitsnet/binary/md-tanh-s, seed 0: warning: rounding" in capfd.readouterr().err
