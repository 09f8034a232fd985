"""The command line: every command, what it prints for people and for programs, and how it fails."""

import hashlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch

from mirrorquant import export, packing
from mirrorquant.cli import main
from mirrorquant.packing import kernels
from mirrorquant.train import recipes
from mirrorquant.train.config import KEYS

TINY = ["iterations=6", "batch_size=16", "eval_every=3", "log_every=2", "checkpoint_every=4", "histogram_every=2"]


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    assert main(["train", *TINY, "--out", str(folder), "--quiet"]) == 0
    return folder


def test_train_writes_a_run_and_says_what_to_do_next(tmp_path, capsys):
    run_folder = tmp_path / "run"
    assert main(["train", *TINY, "--out", str(run_folder), "--quiet"]) == 0
    told = capsys.readouterr().out
    assert "md-tanh-s" in told
    assert f"mirrorquant eval {run_folder}" in told
    for name in ("curves.png", "weights.png", "best.pt", "summary.json"):
        assert (run_folder / name).stat().st_size > 0


def test_eval_says_whether_the_weights_are_on_their_levels(run_folder, capsys):
    assert main(["eval", str(run_folder)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"digits test: \d+\.\d\d %", told)
    assert "all 5 quantized tensors are exactly on their binary levels" in told
    assert main(["eval", str(run_folder), "--data", "synthetic:1x8x8:10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == "synthetic:1x8x8:10"
    assert main(["eval", str(run_folder), "--split", "val", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    summary = json.loads((run_folder / "summary.json").read_text())
    assert result["accuracy"] == pytest.approx(summary["val_accuracy"])
    assert result["weights_off_their_levels"] == []


def test_the_loss_is_that_of_training_also_from_a_file(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", *TINY, "logit_scale=0.125", "--out", str(run), "--quiet"]) == 0
    assert main(["pack", str(run)]) == 0
    step = json.loads((run / "summary.json").read_text())["best_step"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = next(line["loss"] for line in lines if line["kind"] == "val" and line["step"] == step)
    for what in (run, run / "packed.safetensors"):
        capsys.readouterr()
        assert main(["eval", str(what), "--split", "val", "--data", "digits", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(expected, rel=1e-4)


def test_eval_says_that_a_float_network_has_no_levels(tmp_path, capsys):
    assert main(["train", "digits/digitsnet/ref", *TINY, "--out", str(tmp_path / "ref"), "--quiet"]) == 0
    assert main(["eval", str(tmp_path / "ref")]) == 0
    assert capsys.readouterr().out.endswith("a float network: none of its tensors is quantized\n")


def test_help_lists_every_key(capsys):
    for command in ("train", "compare"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        told = set(re.findall(r"\w+", capsys.readouterr().out.partition("Any key can")[2]))
        assert {name for name, key in KEYS.items() if key.section != "origin"} <= told
    assert main(["train", "zzz=1"]) == 1
    assert "There is no key 'zzz'. 'mirrorquant train --help' lists them" in capsys.readouterr().err


def test_what_is_listed_stands_in_columns(capsys):
    for command in (["methods"], ["recipes", "digits/digitsnet/binary/md-tanh-s"]):
        assert main(command) == 0
        lines = capsys.readouterr().out.splitlines()
        longest = max(len(line.split()[0]) for line in lines)
        assert all(line[longest : longest + 2] == "  " and line[longest + 2] != " " for line in lines)


def test_eval_repeats_the_test_accuracy_of_the_summary(run_folder, capsys):
    capsys.readouterr()
    main(["eval", str(run_folder), "--json"])
    summary = json.loads((run_folder / "summary.json").read_text())
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(summary["test_accuracy"])


def test_compare_makes_one_table_and_one_plot(tmp_path, capsys):
    results = tmp_path / "results"
    command = ["compare", *TINY, "--methods", "ref,bc", "--seeds", "2", "--quiet", "skip=fc"]  # ref skips nothing
    assert main([*command, "--out", str(tmp_path / "all"), "--results", str(results)]) == 0
    told = capsys.readouterr().out
    kept = [json.loads(file.read_text()) for file in results.glob("*.json")]
    for method in ("ref", "bc"):
        values = [run["test_accuracy"] for run in kept if run["config"]["method"] == method]
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        assert len(re.findall(rf"^{method} .* 0, 1 .* {mean:.2f} ± {spread:.2f} ", told, re.M)) == 1
    assert len(re.findall(r"^(ref|bc) ", told, re.M)) == 2
    for name in ("comparison", "curves"):
        assert f"wrote {tmp_path / 'all' / name}.png\n" in told
        assert (tmp_path / "all" / f"{name}.png").stat().st_size > 0
    assert f"wrote 4 runs to folders in {tmp_path / 'all'}\n" in told
    assert told.count("weights.png\n") == 4
    assert len(list(results.glob("*.json"))) == 4
    assert main(["table", "--results", str(results)]) == 0
    assert re.search(r"^bc iterations=6 .* 0, 1 ", capsys.readouterr().out, re.M)


def test_float_networks_alone_have_curves_and_nothing_to_compare(tmp_path, capsys):
    assert main(["compare", *TINY, "--methods", "ref", "--quiet", "--out", str(tmp_path / "all")]) == 0
    told = capsys.readouterr().out
    assert f"wrote {tmp_path / 'all' / 'curves.png'}\n" in told
    assert "figures" not in told


def test_every_method_of_the_paper_can_be_compared_on_the_digits(tmp_path, capsys):
    names = "bc,pq,pmf,gd-tanh,md-softmax,md-tanh,md-softmax-s,md-tanh-s"
    short = ["iterations=1", "batch_size=16", "histogram_every=0"]
    assert main(["compare", *short, "--methods", names, "--quiet", "--json", "--out", str(tmp_path / "all")]) == 0
    assert ",".join(row["method"] for row in json.loads(capsys.readouterr().out)) == names


def test_a_comparison_of_several_seeds_goes_on_where_it_stopped(tmp_path, capsys):
    command = ["compare", *TINY, "--quiet", "--out", str(tmp_path / "all"), "--methods", "bc"]
    assert main([*command, "--seeds", "2"]) == 0
    first = [line.rpartition("  ")[0] for line in capsys.readouterr().out.splitlines()]  # without the time
    assert main([*command, "--seeds", "2", "--resume"]) == 0
    assert [line.rpartition("  ")[0] for line in capsys.readouterr().out.splitlines()] == first
    assert main([*command, "--seeds", "3", "--resume"]) == 0
    assert re.search(r"^bc .* 0, 1, 2 ", capsys.readouterr().out, re.M)


def test_a_comparison_goes_on_where_it_stopped(tmp_path, capsys):
    command = ["compare", *TINY, "--quiet", "--json", "--out", str(tmp_path / "all"), "--methods"]
    assert main([*command, "bc"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*command, "bc"]) == 1
    assert "continue it with --resume" in capsys.readouterr().err
    assert main([*command, "bc,md-tanh-s", "--resume"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == ["bc", "md-tanh-s"]
    assert rows[0]["test"] == first[0]["test"]
    assert main([*command, "bc", "--resume", "lr=0.5"]) == 1
    assert "another configuration" in capsys.readouterr().err
    assert main([*command, "bc,bc", "--resume"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_a_comparison_with_an_unknown_method_is_refused_before_anything_trains(tmp_path, capsys):
    assert main(["compare", *TINY, "--methods", "ref,bcc", "--quiet", "--out", str(tmp_path / "all")]) == 1
    assert (
        "no recipe 'digits/digitsnet/binary/bcc'. Did you mean 'digits/digitsnet/binary/bc'?" in capsys.readouterr().err
    )
    assert not (tmp_path / "all").exists()


def test_the_file_of_a_runs_network_stands_for_the_run(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", *TINY, "--quiet", "--out", str(run)]) == 0
    capsys.readouterr()
    for command in ("eval", "summary"):
        told = []
        for path in (run, run / "best.pt"):
            assert main([command, str(path)]) == 0
            told.append(capsys.readouterr().out)
        assert told[0] == told[1]
    assert main(["train", "--resume", str(run), "--out", str(tmp_path / "other")]) == 1
    assert "--out" in capsys.readouterr().err


def test_json_is_for_programs(tmp_path, capsys):
    assert main(["train", *TINY, "--out", str(tmp_path / "run"), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["iterations"] == 6
    assert main(["recipes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == recipes.names()
    assert main(["recipes", "cifar10/resnet18/ref", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["paper"] == 94.84
    assert main(["methods", "--json"]) == 0
    assert "md-tanh-s" in json.loads(capsys.readouterr().out)
    assert main(["summary", "cifar10/resnet18/binary/md-tanh-s", "--json"]) == 0
    assert sum(row["count"] for row in json.loads(capsys.readouterr().out)) == 11_164_362


def test_summary_counts_bits_and_bytes(run_folder, capsys):
    capsys.readouterr()
    assert main(["summary", str(run_folder)]) == 0
    told = capsys.readouterr().out
    assert "56,234 of 56,557 weights are quantized" in told
    assert re.search(r"; 1[01],\d{3} bytes in a file, 226,240 in float32 ", told)
    assert main(["summary", "cifar10/resnet18/binary/pq-star"]) == 0
    assert re.search(r"^fc\.weight +10x512 +5,120 +32 ", capsys.readouterr().out, re.M)


def test_a_run_is_packed_evaluated_summarized_and_exported(run_folder, capsys):
    packed = run_folder / "packed.safetensors"
    expected = json.loads((run_folder / "summary.json").read_text())["test_accuracy"]
    capsys.readouterr()
    assert main(["pack", str(run_folder)]) == 0
    size = packed.stat().st_size
    assert (
        f"wrote {packed}: {size:,} bytes, {226_240 / size:.1f} times smaller than in float32 (226,240)"
        in capsys.readouterr().out
    )
    assert main(["pack", str(run_folder / "best.pt"), "-o", str(run_folder / "again.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == size
    assert (run_folder / "again.safetensors").read_bytes() == packed.read_bytes()

    assert main(["summary", str(run_folder)]) == 0
    assert f"{size:,} bytes in a file" in capsys.readouterr().out
    assert main(["summary", str(packed)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"conv3\.weight +64x64x3x3 +36,864 +-1, 1 x a scale +1 +4,612", told)
    assert f"{size:,} bytes in a file" in told
    assert hashlib.sha256(packed.read_bytes()).hexdigest() in told
    assert main(["summary", str(packed), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)["about"]
    assert (about["data"], about["shape"], about["levels"]) == ("digits", [1, 8, 8], "binary")

    assert main(["eval", str(packed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(expected)
    assert main(["eval", str(packed), "--split", "val"]) == 0
    assert f"{size:,} bytes, run packed: {kernels.describe()}" in capsys.readouterr().out

    assert main(["export", str(packed), "--to", "onnx"]) == 0
    assert f"mirrorquant eval {run_folder}/packed.onnx   " in capsys.readouterr().out
    assert main(["eval", str(run_folder / "packed.onnx"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(expected)
    assert main(["export", str(run_folder), "--to", "openvino", "-o", str(run_folder / "net.xml")]) == 0
    assert (run_folder / "net.bin").stat().st_size < 10_000
    assert f"mirrorquant eval {run_folder}/net.xml   " in capsys.readouterr().out
    assert main(["eval", str(run_folder / "net.xml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["accuracy"] == pytest.approx(expected)
    assert told["bytes"] == sum((run_folder / f"net.{end}").stat().st_size for end in ("xml", "bin"))

    assert main(["kernels"]) == 0
    assert capsys.readouterr().out.endswith(kernels.describe() + "\n")


def test_a_model_of_ones_own_is_named_for_its_packed_file(tmp_path, monkeypatch, capsys):
    code = "from torch import nn\ndef net(classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    (tmp_path / "ownnet.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "model=ownnet:net", "--out", "run", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["pack", "run"]) == 0
    told = capsys.readouterr().out
    assert "mirrorquant eval run/packed.safetensors --model ownnet:net " in told
    assert "mirrorquant export run/packed.safetensors --to onnx --model ownnet:net\n" in told
    assert main(["eval", "run/packed.safetensors"]) == 1
    assert "pass one of the same structure, by model=... or --model MODULE:FUNCTION" in capsys.readouterr().err
    assert main(["eval", "run/packed.safetensors", "--model", "ownnet:net"]) == 0
    assert main(["export", "run/packed.safetensors", "--to", "onnx", "--model", "ownnet:net"]) == 0


def test_the_commands_to_run_next_work_as_they_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "data=synthetic:1x8x8:3", "--out", "my run", "--quiet"]) == 0
    assert main(["pack", "my run"]) == 0
    assert main(["export", "my run", "--to", "onnx"]) == 0
    lines = re.findall(r"^  mirrorquant (\S.*)", capsys.readouterr().out, re.M)
    assert len(lines) == 7
    for line in lines:
        assert main(shlex.split(re.sub(r" {5,}.*", "", line))) == 0, line


def test_a_result_with_long_overrides_gets_a_name_that_a_file_can_have(tmp_path):
    results = tmp_path / "results"
    for number, last in enumerate("ab", 1):
        skip = "skip=" + ",".join(["conv1", "conv2.weight", "*.bias"] * 12 + [f"*{last}*"])
        assert main(["train", *TINY, skip, "--out", str(tmp_path / last), "--results", str(results), "--quiet"]) == 0
        assert len(list(results.glob("digits-digitsnet-binary-md-tanh-s-seed0-iterations-6-*.json"))) == number


def test_the_value_of_an_option_is_no_override(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "lr=0.1", "--out", "lr=0.1", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overrides"]["lr"] == 0.1
    assert (tmp_path / "lr=0.1" / "summary.json").exists()
    assert main(["train", "--resume", "lr=0.1", "--quiet"]) == 0
    assert main(["train", "--out", "lr=0.1", "--resume", "--quiet"]) == 0  # as compare has it
    assert main(["train", "--resume", "--quiet"]) == 1


def test_a_float_network_is_packed_exported_and_tested_as_any_other(tmp_path, capsys):
    run = tmp_path / "ref"
    assert main(["train", "digits/digitsnet/ref", *TINY, "--out", str(run), "--quiet"]) == 0
    assert main(["pack", str(run)]) == 0
    assert main(["export", str(run / "packed.safetensors"), "--to", "onnx"]) == 0
    assert main(["export", str(run), "--to", "onnx", "-o", str(tmp_path / "net.onnx")]) == 0
    assert (tmp_path / "net.onnx").read_bytes() == (run / "packed.onnx").read_bytes()
    capsys.readouterr()
    found = []
    for what in (run, run / "packed.safetensors", run / "packed.onnx"):
        assert main(["eval", str(what), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["accuracy"])
    assert found == pytest.approx(found[:1] * 3)
    assert main(["eval", str(run / "packed.safetensors")]) == 0
    assert "run in float32" in capsys.readouterr().out
    loaded = packing.load(run)
    assert not loaded.runs
    assert loaded.about["method"] == "ref"


def test_the_folder_of_a_run_loads_as_its_packed_file(run_folder, tmp_path):
    assert main(["pack", str(run_folder), "-o", str(tmp_path / "net.safetensors")]) == 0
    loaded, packed = packing.load(run_folder), packing.load(tmp_path / "net.safetensors")
    assert loaded.about == packed.about
    assert loaded.runs == packed.runs
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(loaded(x), packed(x))
    packing.save(loaded, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "net.safetensors").read_bytes()
    with pytest.raises(packing.PackError, match="is a run, which builds its own model: leave out model="):
        packing.load(run_folder, packing.unpack(loaded))


def test_what_cannot_be_packed_is_told_in_one_line(run_folder, tmp_path, capsys):
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    assert main(["pack", str(run_folder), "-o", str(whole)]) == 0
    assert main(["pack", str(run_folder), "-o", str(broken)]) == 0
    broken.write_bytes(broken.read_bytes()[:-1])
    export(packing.load(whole), tmp_path / "silent.onnx", (1, 8, 8), about={})
    capsys.readouterr()
    for arguments, message in (
        (["eval", str(run_folder), "--model", "a:b"], "--model is for packed files"),
        (["eval", str(run_folder), "--data", "synthetic:1x8x8:7"], "has 10 classes, but synthetic:1x8x8:7 7"),
        (
            ["eval", str(run_folder), "--data", "synthetic:3x8x8:10"],
            "cannot be tested on synthetic:3x8x8:10: 1000 train",
        ),
        (["eval", str(tmp_path / "no.onnx"), "--data", "digits", "--model", "a:b"], "--model is for packed files"),
        (["export", str(run_folder), "--to", "onnx", "--model", "a:b"], "--model is for packed files"),
        (["pack", str(run_folder), "-o", "net.bin"], "net.bin must end in .safetensors"),
        (["export", str(run_folder), "--to", "onnx", "-o", "net"], "net must end in .onnx"),
        (["export", str(run_folder), "--to", "openvino", "-o", "net.onnx"], "net.onnx must end in .xml"),
        (["summary", str(broken)], "broken.safetensors: it is damaged or was modified"),
        (["eval", str(broken)], "broken.safetensors: it is damaged or was modified"),
        (["export", str(broken), "--to", "onnx"], "broken.safetensors: it is damaged or was modified"),
        (["eval", str(tmp_path / "no.onnx"), "--data", "digits"], "no.onnx cannot be read by ONNX Runtime"),
        (["eval", str(tmp_path / "no.xml")], "no.xml cannot be read by OpenVINO"),
        (["eval", str(tmp_path / "silent.onnx")], "pass --data"),
        (["eval", str(whole), "--data", "synthetic:3x8x8:10"], "cannot be tested on synthetic:3x8x8:10: 1000 train"),
    ):
        assert main(arguments) == 1, arguments
        told = capsys.readouterr().err
        assert message in told
        assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trian"], 2, "Did you mean 'train'"),
        (["train", "cifar10/resnet18/md-tanh-s"], 1, "Did you mean 'cifar10/resnet18/binary/md-tanh-s'"),
        (["train", "lrr=1"], 1, "Did you mean 'lr'"),
        (["train", "LR=1"], 1, "There is no key 'LR'. Did you mean 'lr'"),
        (["eval", "a=b"], 1, "a=b/config.json cannot be read"),
        (["train", "--resume", "nowhere"], 1, "is this the folder of a run"),
        (
            ["train", "cifar10/resnet18/binary/best-kl", "data=digits"],
            1,
            "train it first, with mirrorquant train cifar10/resnet18/ref-best seed=0 --out runs/cifar10-resnet18-ref-b",
        ),
        (["train", "init=runs/imagenet-resnet34-ref-seed3"], 1, "with mirrorquant train imagenet/resnet34/ref seed=3"),
        (["train", "init=nowhere"], 1, "init nowhere cannot be read"),
        (["train", "bc", "--resume", "nowhere"], 1, "cannot be given with it"),
        (["eval", "nowhere"], 1, "nowhere/config.json cannot be read"),
        (["recipes", "cifra10"], 1, "Did you mean"),
        (["compare", "digits/digitsnett"], 1, "no recipe 'digits/digitsnett/ref'. Did you mean 'digits/digitsnet/ref'"),
        (
            ["compare", "fashion-mnist/digitsnet", "--levels", "ternary", "--methods", "pq"],
            1,
            "no recipe 'fashion-mnist/",
        ),
        (["compare", "--methods", "nowhere:Mine"], 1, "Method 'nowhere:Mine': there is no module 'nowhere'"),
        (["compare", "--methods", ","], 1, "nothing to compare: name at least one method"),
        (["compare", "--seeds", "0"], 2, "argument --seeds: '0' is not a count: give a whole number from 1 to"),
        (["compare", "--seeds", "two"], 2, "argument --seeds: 'two' is not a count"),
        (["reproduce", "binary", "--jobs", "0"], 2, "argument --jobs: '0' is not a count: give a whole number"),
        (["reproduce", "binary", "--jobs", "-1"], 2, "--jobs"),
        (["reproduce", "binary", "--jobs", "65"], 2, "'65' is not a count: give a whole number from 1 to 64"),
        (["reproduce", "nothing"], 2, "invalid choice: 'nothing' (choose from"),
        (["train", "--out", ""], 2, "argument --out: '' names no file or folder: give its name"),
        (["train", "--results="], 2, "argument --results: '' names no file or folder"),
        (["train", "--resume", ""], 2, "argument --resume: '' names no file or folder"),
        (["compare", "--out", ""], 2, "argument --out: '' names no file or folder"),
        (["reproduce", "binary", "--out", ""], 2, "argument --out: '' names no file or folder"),
        (["eval", ""], 2, "argument RUN-OR-FILE: '' names no file or folder"),
        (["pack", "runs/x", "-o", ""], 2, "argument -o/--out: '' names no file or folder"),
        (["curves", ""], 2, "argument RUN: '' names no file or folder"),
        (["table", "--results", ""], 2, "argument --results: '' names no file or folder"),
        (["plots", "--out", ""], 2, "argument --out: '' names no file or folder"),
        (["export", "run", "--to", "onnx", "--shape", "3,32,32"], 2, "invalid shape 3,32,32; use positive sizes"),
        (["export", "run", "--to", "onnx", "--shape", "0x8x8"], 2, "invalid shape 0x8x8; use positive sizes"),
        (["train", "--fast"], 2, "unrecognized arguments: --fast. See mirrorquant --help"),
        (["eval"], 2, "the following arguments are required: RUN-OR-FILE. See mirrorquant eval --help"),
        (["methods", "lr=1"], 2, "unrecognized arguments: lr=1"),
        (["train", "lr=nan"], 1, "lr is nan, but it must be a number from 1e-35 to 100"),
        (["train", "lr=inf"], 1, "lr is inf, but it must be at most 100"),
        (["train", "lr="], 1, "lr is '', but it must be a number, as in lr=0.001"),
        (["train", "seed=1.5"], 1, "seed is '1.5', but it must be a whole number, as in seed=0"),
        (["train", "nesterov=maybe"], 1, "nesterov is 'maybe', but it must be true or false, as in nesterov=false"),
        (["train", "compile="], 1, "compile is '', but it must be true, false or auto, as in compile=auto"),
        (["train", ""], 2, "'' is not a key=value pair: write it without spaces"),
        (["compare", "seed=3"], 1, "set how many with --seeds"),
        (["train", "--lr", "0.1"], 2, "there is no option --lr: write lr=VALUE"),
        (["train", "--batch-size=8"], 2, "there is no option --batch-size: write batch_size=8"),
        (["train", "lr", "=", "0.1"], 2, "'=' is not a key=value pair: write it without spaces"),
        (["train", "learning-rate=0.1"], 1, "There is no key 'learning-rate'"),
        (["table", "--results", "nowhere"], 1, "nowhere: no such folder"),
        (["curves", "nowhere"], 1, "nowhere/config.json"),
        (["summary", "nowhere"], 1, "no recipe 'nowhere'"),
        (["plots", "--out", "/dev/null/figures"], 1, "/dev/null/figures"),
        (["train", *TINY, "--quiet", "--results", "/dev/null/results"], 1, "--results is /dev/null/results, expected"),
        (["train", "data=cifar10", "data_root=nowhere"], 1, "cifar-10-binary.tar.gz in the folder nowhere"),
        (["train", "momentum=0.5"], 1, "momentum has no effect here because optimizer is adam"),
        (["train", "method=bc", "beta_scale=1.1"], 1, "beta_scale has no effect here because method is bc"),
        (["compare", "momentum=0.5"], 1, "momentum has no effect here because optimizer is adam"),
        (["train", "model=resnet18", "width=16"], 1, "width has no effect here because model is resnet18"),
    ],
)
def test_wrong_input_is_told_in_one_line(arguments, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    assert main(arguments) == code
    told = capsys.readouterr().err
    assert message in told
    assert told.startswith("mirrorquant: ")
    assert told.count("\n") == 1


def test_results_that_cannot_be_kept_are_told_before_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for results in (tmp_path / "file", tmp_path / "file" / "results"):
        for command in (["train"], ["compare", "--methods", "bc"]):
            assert main([*command, *TINY, "--out", str(tmp_path / "run"), "--results", str(results)]) == 1
            assert f"--results is {results}, expected a folder to write to (" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def no_network(*arguments, **options):
    raise OSError("no network")


def test_a_file_of_another_kind_is_told_as_such(run_folder, capsys):
    told = "is not a supported file; expected the folder of a run, "
    for name, command in (("packed.bin", "eval"), ("packed.onnx", "summary"), ("packed.onnx", "export"), ("x", "pack")):
        (run_folder / name).write_bytes(b"something else")
        options = {"eval": ["--data", "digits"], "export": ["--to", "openvino"]}.get(command, [])
        assert main([command, str(run_folder / name), *options]) == 1
        assert f"{run_folder / name} {told}" in capsys.readouterr().err


def test_help_shows_an_example_for_each_command(capsys):
    assert main([]) == 2
    commands = re.findall(r"^    (\w+)  ", capsys.readouterr().out, re.M)
    assert len(commands) == 13
    for command in commands:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"    mirrorquant {command}" in capsys.readouterr().out


def test_an_interrupted_process_exits_with_143_and_resumes(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "mirrorquant", "train", "iterations=3000", "batch_size=32", "--out", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        time.sleep(0.05)
        assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143
    assert f"continue with mirrorquant train --resume {folder}" in told
    assert "Traceback" not in told


def test_an_output_without_unicode_shows_what_it_can():
    command = [sys.executable, "-m", "mirrorquant", "methods"]
    told = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert re.search(r"^bc +BinaryConnect: sign\(w\?\) forward", told.stdout, re.M)


def documented_commands(text):
    fences = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    joined = [fence.replace("\\\n", " ") for fence in fences]
    lines = [line.split("#")[0].strip() for fence in joined for line in fence.splitlines() if line.strip()]
    return [*dict.fromkeys(line.replace("runs/FOLDER", "runs/digits") for line in lines)]


def test_every_command_of_the_documentation_runs(tmp_path, monkeypatch, pytestconfig, capsys):
    """Shortened: few iterations, and synthetic images in place of what would be downloaded."""
    root = pytestconfig.rootpath
    text = "".join((root / page).read_text() for page in ("docs/packing.md", "docs/guide.md", "README.md"))
    code = re.search(r"^```python\n(from torch import nn\n.*?)^```", text, re.M | re.S)
    (tmp_path / "mynet.py").write_text(code[1])
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # as the installed command has it
    commands = documented_commands(text)
    assert len(commands) == 30
    few = {table: [n for n in recipes.cells(table) if n.endswith("/md-tanh-s")][:3] for table in recipes.TABLES}
    monkeypatch.setattr(recipes, "cells", few.get)
    for command in commands:
        program, *arguments = shlex.split(command)
        if program == "make":
            subprocess.run(["make", "-n", *arguments], cwd=root, check=True, capture_output=True)
            continue
        if program == "torchrun":  # test_distributed.py runs it
            assert arguments[arguments.index("train") + 1] in recipes.names()
            continue
        arguments = [str(root / word) if word.startswith("networks/") else word for word in arguments]
        if "--data" in arguments:
            arguments[arguments.index("--data") + 1] = "synthetic:3x32x32:10"
        if arguments[0] in ("train", "compare", "reproduce", "search"):
            arguments += [*TINY, "batch_size=2", "--quiet"]
            if arguments[0] == "reproduce" or any("cifar10" in text for text in arguments):
                arguments += ["data=synthetic:3x8x8:10", "model=digitsnet"]
        assert main(arguments) == 0, command
    assert "error" not in capsys.readouterr().err


def test_commands_do_not_wait_for_the_compiler_to_be_imported():
    code = "import sys, torch; before = set(sys.modules); import mirrorquant.cli; print(*set(sys.modules) - before)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "mirrorquant.train.loop" in imported
    assert [name for name in imported if name.startswith(("torch._dynamo", "torch._inductor"))] == []


def test_what_a_killed_run_was_writing_is_removed_when_it_goes_on(run_folder):
    half = run_folder / "checkpoint.pt.0123abcd.writing"
    half.write_bytes(b"half of a checkpoint")
    assert main(["train", "--resume", str(run_folder), "--quiet"]) == 0
    assert not half.exists()


@pytest.mark.parametrize("command", ["train", "eval", "pack"])
def test_help_warns_of_runs_of_strangers(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "only use runs you trust" in " ".join(capsys.readouterr().out.split())
