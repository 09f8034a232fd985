"""Runs whose levels have a scale: their configuration, their weights, their pictures and their files."""

import json

import pytest
import torch
from test_train import config, signalled

from mirrorquant.cli import main
from mirrorquant.levels import Scale
from mirrorquant.report import RunRecord, labels
from mirrorquant.report.tables import compare_row, compare_table
from mirrorquant.train import Best, Config, ConfigError, Interrupted, Run, recipes
from mirrorquant.train.metrics import read_metrics

SMALL = ["width=4", "iterations=6", "eval_every=3", "checkpoint_every=2"]
SCALES = ["tensor-fixed", "tensor-computed", "channel-learnt"]


def test_a_scale_is_named_by_what_shares_it_and_how_it_is_found():
    assert Config().build_method().scale is None
    assert config("scale=tensor").build_method().scale == Scale("tensor", "computed")
    assert config("scale=channel-computed").build_method().scale == Scale("channel", "computed")
    assert config("scale=tensor", recipe="digits/digitsnet/ref").build_method().scale is None
    assert config("scale=tensor").identity != config().identity
    for wrong in ("layer", "tensor-", "tensor-guessed", "tensor-fixed-fixed"):
        with pytest.raises(ConfigError, match=f"scale is '{wrong}', but it must be tensor or channel"):
            config(f"scale={wrong}")


@pytest.mark.parametrize("scale", SCALES)
def test_a_run_with_scaled_levels_resumes_and_ends_on_them(tmp_path, scale, capsys):
    settings = config(*SMALL, f"scale={scale}", "levels=ternary")
    whole = Run(settings, tmp_path / "whole", quiet=True).train()
    with pytest.raises(Interrupted):
        signalled(Run(settings, tmp_path / "cut", quiet=True), 3).train()
    cut = Run.resume(tmp_path / "cut", quiet=True).train()
    assert (cut["curve"], cut["test_accuracy"]) == (whole["curve"], whole["test_accuracy"])
    assert [row["name"] for row in cut["layers"]] == [
        name for name, _ in Best.load(tmp_path / "cut").model.named_parameters()
    ]
    assert cut["parameters"]["bits"] == 2.0
    model = Best.load(tmp_path / "cut").model
    rows = model.conv2.weight.flatten(1) if scale.startswith("channel") else model.conv2.weight.flatten()[None]
    assert all(len(row.abs().unique()) <= 2 for row in rows)
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "cut"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_off_their_levels"] == []
    assert main(["pack", str(tmp_path / "cut")]) == 0
    assert main(["eval", str(tmp_path / "cut" / "packed.safetensors"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["accuracy"] == pytest.approx(cut["test_accuracy"], abs=1)


def test_weights_off_their_scaled_levels_are_found(tmp_path):
    Run(config(*SMALL, "scale=tensor"), tmp_path / "run", quiet=True).train()
    best = Best.load(tmp_path / "run")
    assert best.off_levels == []
    with torch.no_grad():
        best.model.conv2.weight[0, 0, 0, 0] *= 1.5
    assert best.off_levels == ["conv2.weight"]


@pytest.mark.parametrize("scale", SCALES)
def test_histograms_are_in_units_of_the_scale(tmp_path, scale):
    settings = config(*SMALL, f"scale={scale}", "histogram_every=6", "finalize_at=0.5")
    Run(settings, tmp_path / "run", quiet=True).train()
    last = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "weights"][-1]
    assert last["range"] == [-1.1, 1.1]
    for counts in last["layers"].values():
        outer = counts[2] + counts[3] + counts[-3] + counts[-4]  # the bins around -1 and 1
        assert outer == sum(counts)


def test_reports_say_that_levels_are_scaled():
    name = "digits/digitsnet/binary/md-tanh-s"
    plain = {"recipe": name, "config": {**recipes.get(name), "scale": ""}, "overrides": {"scale": ""}, "seconds": 1}
    plain |= dict.fromkeys(("test_accuracy_soft", "val_accuracy", "test_accuracy"), 90.0)
    scaled = {**plain, "config": recipes.get(name), "overrides": {}}
    lines = compare_table([compare_row(RunRecord.of(run)) for run in (plain, scaled)]).splitlines()
    assert [line[: line.index(" - ")].split("  ", 1)[1].strip() for line in lines[2:]] == ["-1, +1", "-1, +1 × scale"]
    assert labels.levels("ternary", "channel-learnt") == "-1, 0, +1 × scale"


def test_a_result_from_before_there_were_scales_had_none():
    name = "digits/digitsnet/binary/md-tanh-s"
    old = {key: value for key, value in recipes.get(name).items() if key != "scale"}
    assert RunRecord.of({"recipe": name, "config": old, "overrides": {}}).changes == {"scale": ""}


def test_ternary_levels_fit_the_digits_without_another_key():
    for changes in ([], ["levels=ternary"]):
        assert Config.from_recipe("digits/digitsnet/binary/md-tanh-s", changes).build_method().scale is not None
