"""Runs of version 0.1 still open: `fixtures/run-0.1` has one that ended and one that was killed after 37 of 60 steps.

The killed run is compared with a plain loop on the same machine, since processors round differently.
"""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import mirrorquant as mq
from mirrorquant import data, models, schedules
from mirrorquant.cli import main
from mirrorquant.train import Run, RunError, checkpoint
from mirrorquant.train.metrics import read_metrics

OLD = Path(__file__).parent / "fixtures" / "run-0.1"


def reference():
    """The state dict after the other 30 steps of the killed run, whose last checkpoint is at step 30."""
    torch.set_num_threads(1)
    payload = (OLD / "killed" / "checkpoint.mq").read_bytes().split(b"\n", 1)[1]
    state, digits = torch.load(io.BytesIO(payload), weights_only=True), data.load("digits")
    model = models.build("digitsnet", 10, channels=1, width=4, affine=False).to(memory_format=torch.channels_last)
    base = torch.optim.Adam(mq.split(model, everything=True), lr=0.003)
    opt = mq.MirrorDescent(base, method="md-tanh-s", anneal=schedules.geometric(1.2, every=3))
    opt.load_state_dict(state["optimizer"])
    model.load_state_dict(state["model"])
    loader = data.Loader(digits, batch_size=64, seed=3)
    for k in range(state["step"], 60):
        for group in opt.param_groups:
            group["lr"] = 0.003 * 0.1 ** (k // 25)
        x, y = loader.batch(k)
        opt.zero_grad()
        F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y).backward()
        opt.step()
    return model.state_dict()


def test_a_killed_old_run_goes_on_as_if_nothing_had_changed(tmp_path):
    folder = shutil.copytree(OLD / "killed", tmp_path / "run")
    run = Run.resume(folder, quiet=True)
    last = {}
    finish = run._finish
    run._finish = lambda: last.update({k: v.clone() for k, v in run.task.model.state_dict().items()}) or finish()
    summary = run.train()
    expected = reference()
    assert last.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in last.items())
    old = json.loads((OLD / "finished" / "summary.json").read_text())
    assert {**summary["config"], **old["config"]} == summary["config"]
    assert not (folder / "checkpoint.mq").samefile(folder / "checkpoint.pt")
    assert summary["curve"][:3] == old["curve"][:3]
    assert [step for step, _ in summary["curve"]] == [10, 20, 30, 40, 50, 60]
    assert dict(summary["loss_curve"])[35] == pytest.approx(dict(old["loss_curve"])[35], rel=0.05)
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "weights"] == [1, 20, 40, 60]


def test_an_old_run_with_automatic_precision_stays_on_its_kind_of_device(tmp_path):
    """Or it would go on in another precision: it was begun on CUDA, as its checkpoint shows."""
    folder = shutil.copytree(OLD / "killed", tmp_path / "run")
    state = checkpoint.load(folder / "checkpoint.mq")
    checkpoint.save(folder / "checkpoint.pt", {**state, "cuda_rng": torch.zeros(16, dtype=torch.uint8)})
    with pytest.raises(RunError, match="began on cuda with precision=auto, which differs on cpu: use device=cuda"):
        Run.resume(folder, ["device=cpu"], quiet=True).train()


def test_every_command_reads_a_finished_old_run(tmp_path, capsys):
    folder = shutil.copytree(OLD / "finished", tmp_path / "run")
    old = json.loads((folder / "summary.json").read_text())
    assert main(["eval", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == pytest.approx(old["test_accuracy"], abs=1)  # an image on the edge between two classes
    assert found["weights_off_their_levels"] == []
    assert main(["summary", str(folder), "--json"]) == 0
    rows = {row["name"]: (row["shape"], row["count"], row["bits"]) for row in json.loads(capsys.readouterr().out)}
    assert {row["name"]: (row["shape"], row["count"], row["bits"]) for row in old["layers"]}.items() <= rows.items()
    assert main(["pack", str(folder)]) == 0
    assert main(["eval", str(folder / "packed.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["accuracy"] == pytest.approx(found["accuracy"], abs=1)
    results = tmp_path / "results"
    results.mkdir()
    shutil.copy(folder / "summary.json", results)
    assert main(["table", "--results", str(results)]) == 0
    assert f"{old['test_accuracy']:.2f}" in capsys.readouterr().out


def test_curves_of_an_old_run_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["curves", str(OLD / "finished"), "--out", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").stat().st_size > 1000
