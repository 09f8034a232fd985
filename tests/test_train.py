"""Training runs: the protocol, resuming, and what happens when something goes wrong."""

import copy
import dataclasses
import errno
import hashlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import stat
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import fuzz_kills
import fuzz_runs
import pytest
import torch
from torch import nn

import mirrorquant as mq
from mirrorquant import BINARY, Method, models
from mirrorquant.cli import main
from mirrorquant.data import DataError, load
from mirrorquant.train import (
    Best,
    CheckpointError,
    Config,
    ConfigError,
    EngineError,
    Interrupted,
    MetricsError,
    Run,
    RunError,
    build,
    checkpoint,
    recipes,
)
from mirrorquant.train.evaluate import Score, score
from mirrorquant.train.metrics import Metrics, read_metrics
from mirrorquant.train.progress import Progress

DIGITS = "digits/digitsnet/binary/md-tanh-s"
SHORT = ["iterations=40", "batch_size=32", "eval_every=10", "log_every=5", "checkpoint_every=6", "histogram_every=0"]
SHORT += ["scale="]  # the paper's levels


def config(*overrides, recipe=DIGITS):
    return Config.from_recipe(recipe, [*SHORT, *overrides])


def end_of(folder):
    """What must be bit-identical: weights, latents, moments, the best network, and all metrics but the clock."""
    state, best = checkpoint.load(folder / "checkpoint.pt"), checkpoint.load(folder / "best.pt")
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(folder / "metrics.jsonl")]
    summary = json.loads((folder / "summary.json").read_text())
    timeless = {k: v for k, v in summary.items() if "seconds" not in k and "per_second" not in k and k != "aside"}
    del state["seconds"], state["aside"], state["metrics"]  # which has the seconds, too
    return flatten([state, best]), rows, timeless


def flatten(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for key in value for leaf in [key, *flatten(value[key])]]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


def assert_identical(a, b):
    (leaves_a, *rest_a), (leaves_b, *rest_b) = end_of(a), end_of(b)
    assert rest_a == rest_b
    assert len(leaves_a) == len(leaves_b)
    for x, y in zip(leaves_a, leaves_b, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


# The protocol.


def test_a_run_leaves_everything_that_its_reader_needs(tmp_path):
    summary = Run(config("histogram_every=10"), tmp_path / "run", quiet=True).train()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "config.json",
        "metrics.jsonl",
        "checkpoint.pt",
        "checkpoint.pt.previous",
        "best.pt",
        "summary.json",
    } <= names
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "val"] == [10, 20, 30, 40]
    weights = [row for row in rows if row["kind"] == "weights"]
    assert [row["step"] for row in weights] == [1, 10, 20, 30, 40]
    assert all(
        list(row["layers"]) == [f"{name}.weight" for name in ("conv1", "conv2", "conv3", "fc")] for row in weights
    )
    assert summary["val_accuracy"] == max(row["accuracy"] for row in rows if row["kind"] == "val")
    assert summary["parameters"] == {"total": 56234, "quantized": 56234, "bits": 1.0}
    best = checkpoint.load(tmp_path / "run" / "best.pt")["model"]
    assert all(BINARY.holds(best[name]) for name, _ in models.digitsnet().named_parameters())


def test_histograms_are_of_the_quantized_layers(tmp_path):
    Run(config("iterations=1", "histogram_every=1", "skip=conv1,fc"), tmp_path / "run", quiet=True).train()
    (row,) = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "weights"]
    assert list(row["layers"]) == ["conv2.weight", "conv3.weight"]


def test_learning_rate_and_beta_follow_the_papers_schedules(tmp_path):
    overrides = ["lr=0.01", "lr_scale=0.5", "lr_interval=10", "beta_scale=2", "beta_interval=8", "log_every=1"]
    run, used = Run(config(*overrides), tmp_path / "run", quiet=True), []
    run.task.opt.register_step_pre_hook(lambda opt, *_: used.append((opt.param_groups[0]["lr"], opt.beta)))
    run.train()
    assert used == [(0.01 * 0.5 ** (k // 10), 2.0 ** -(-k // 8)) for k in range(40)]
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["lr"] for row in rows] == [0.01 * 0.5 ** (k // 10) for k in range(40)]
    assert [row["beta"] for row in rows] == [2.0 ** -(-(k + 1) // 8) for k in range(40)]


def test_a_line_of_the_log_has_the_mean_loss_since_the_one_before(tmp_path):
    losses = []
    for every in (1, 5):
        Run(config("iterations=13", f"log_every={every}"), tmp_path / str(every), quiet=True).train()
        rows = read_metrics(tmp_path / str(every) / "metrics.jsonl")
        losses.append({row["step"]: row["loss"] for row in rows if row["kind"] == "train"})
    each, means = losses
    for step, first in ((5, 1), (10, 6), (13, 11)):
        expected = sum(each[k] for k in range(first, step + 1)) / (step + 1 - first)
        assert means.pop(step) == pytest.approx(expected, rel=1e-5)
    assert not means


def fingerprint(state):
    """A number that tells states apart, where accuracies of a few images may agree."""
    content = b"".join(name.encode() + tensor.contiguous().numpy().tobytes() for name, tensor in sorted(state.items()))
    return float(int.from_bytes(hashlib.sha256(content).digest()[:6], "big"))


def test_the_best_rounded_network_is_tested_and_the_last_one_soft_and_rounded(tmp_path):
    """Validation is made up: the best has an equal before, and comes before the run is stopped."""
    run, kept = Run(config("rescale=false"), tmp_path / "run", quiet=True), {}

    def score():
        with run.task.opt.quantized():
            kept[run.step] = copy.deepcopy(run.task.model.state_dict())
        return Score({10: 50.0, 20: 90.0, 30: 90.0}[run.step], 0.0, 100.0)

    run.engine.score = score
    with pytest.raises(Interrupted):
        signalled(run, 34).train()
    rest = Run.resume(tmp_path / "run", quiet=True)
    rest.engine.score = lambda: Score(10.0, 0.0, 100.0)

    def tested(images):
        assert images is rest.task.data.test
        return Score(fingerprint(rest.task.model.state_dict()), 0.0, 0.0)

    object.__setattr__(rest.task, "evaluate", tested)
    summary = rest.train()
    assert (summary["best_step"], summary["val_accuracy"]) == (30, 90.0)
    best = checkpoint.load(tmp_path / "run" / "best.pt")["model"]
    assert all(torch.equal(best[name], tensor) for name, tensor in kept[30].items())
    last = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["model"]
    rounded = {name: tensor if "bn" in name else BINARY.nearest(tensor) for name, tensor in last.items()}

    told = [summary[f"test_accuracy{which}"] for which in ("", "_soft", "_last")]
    assert told == [fingerprint(best), fingerprint(last), fingerprint(rounded)]
    assert len(set(told)) == 3


def test_proxquant_rounds_for_good_at_its_fraction_of_training(tmp_path):
    run = Run(config("method=pq", "finalize_at=0.5"), tmp_path / "run", quiet=True)
    advance, seen = run.advance, {}

    def watched():
        seen[run.step] = {name: p.detach().clone() for name, p in run.task.model.named_parameters()}
        advance()

    run.advance = watched
    run.train()
    last = {name: p.detach() for name, p in run.task.model.named_parameters()}
    assert not all(BINARY.holds(weight) for weight in seen[19].values())
    for k in range(20, 40):
        assert all(BINARY.holds(weight) and torch.equal(weight, last[name]) for name, weight in seen[k].items())


def test_weights_are_rounded_at_the_very_step_of_the_fraction(tmp_path):
    """0.07 * 100 is a little more than 7 in floating point."""
    run = Run(config("method=pq", "finalize_at=0.07", "iterations=100"), tmp_path / "run", quiet=True)
    steps = []
    run.task.opt.finalize = lambda: steps.append(run.step)
    run.train()
    assert steps == [7]


def test_the_last_line_of_progress_knows_the_last_validation(tmp_path, capsys):
    run = Run(config(), tmp_path / "run")
    run.engine.score = lambda: Score(float(run.step), 0.0, 0.0)
    run.train()
    lines = [line for line in capsys.readouterr().err.split("\n") if line and not line.startswith("warning: ")]
    assert lines[-1].endswith("best val 40.00 %")


def thin(classes):
    """A 1x1 convolution with stride of few channels: in channels_last torch 2.13 gets its gradient wrong on CPUs."""
    layers = [nn.Conv2d(1, 4, 3), nn.Conv2d(4, 16, 1, stride=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16 * 9, classes))


def test_what_torch_gets_wrong_in_channels_last_is_trained_in_the_plain_layout(tmp_path):
    own = [f"model={__name__}:thin", "iterations=3"]
    plain = Run(config(*own, "channels_last=false"), tmp_path / "plain", quiet=True).train()
    chosen = Run(config(*own), tmp_path / "chosen", quiet=True).train()
    assert not chosen["engine"]["channels_last"]
    assert chosen["loss_curve"] == plain["loss_curve"]
    assert Run(config("iterations=3"), tmp_path / "usual", quiet=True).train()["engine"]["channels_last"]


def test_ref_trains_all_parameters_in_float(tmp_path):
    summary = Run(config(recipe="digits/digitsnet/ref"), tmp_path / "run", quiet=True).train()
    assert summary["parameters"]["bits"] == 32
    assert summary["test_accuracy_soft"] == summary["test_accuracy_last"]


def test_the_best_network_is_saved_with_the_statistics_of_its_recalibration(tmp_path):
    run = Run(config("iterations=10", "recalibrate=2"), tmp_path / "run", quiet=True)
    summary = run.train()
    best = Best.load(tmp_path / "run")
    assert [int(getattr(best.model, f"bn{i}").num_batches_tracked) for i in (1, 2, 3)] == [2, 2, 2]
    inputs = [best.model.conv1(run.task.batch(k).images) for k in range(2)]  # training images, not always the same
    torch.testing.assert_close(best.model.bn1.running_mean, torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0))
    assert summary["val_accuracy"] == score(best.model, run.task.data.val, run.task.data).accuracy


def losses_of(folder, *overrides):
    run = Run(config("iterations=3", "log_every=1", *overrides), folder, quiet=True)
    return run, [loss for _, loss in run.train()["loss_curve"]]


def test_bfloat16_is_what_the_network_computes_in(tmp_path):
    run, losses = losses_of(tmp_path / "half", "precision=bfloat16")
    with run.task.autocast():
        assert run.task.model(run.task.loader.batch(0)[0]).dtype == torch.bfloat16
    assert losses != losses_of(tmp_path / "full")[1]


@pytest.mark.parametrize("layout", [True, False])
def test_the_layout_that_is_asked_for_is_trained_in(tmp_path, layout):
    run, _ = losses_of(tmp_path / "run", f"channels_last={layout}")
    weight = run.task.model.conv2.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) == layout
    assert weight.is_contiguous() != layout


def test_settings_of_the_process_are_those_of_the_run_while_it_trains_and_no_longer(tmp_path):
    run = Run(config("iterations=3", "deterministic=true", "threads=2"), tmp_path / "run", quiet=True)
    advance, seen = run.advance, set()
    before = torch.get_num_threads()

    def watched():
        seen.add((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))
        advance()

    run.advance = watched
    run.train()
    assert seen == {(True, 2)}
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == (False, before)


def user_model(classes):
    """A model of a user, found by ``module:function``."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, classes))


def test_a_users_own_model_trains_and_resumes(tmp_path):
    Run(config("model=test_train:user_model"), tmp_path / "whole", quiet=True).train()
    killed(tmp_path / "cut", config("model=test_train:user_model"), at_step=17)
    Run.resume(tmp_path / "cut", quiet=True).train()
    assert_identical(tmp_path / "whole", tmp_path / "cut")


# All recipes of the paper's tables run, and those beyond it.

SHAPES = {"cifar10": "3x32x32:10", "cifar100": "3x32x32:100", "tinyimagenet": "3x64x64:200"}
PAPER = [name for name in recipes.names() if "paper" in recipes.get(name) and name.split("/")[0] in SHAPES]


def small_teacher(classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PAPER, *recipes.cells("beyond")])
def test_every_recipe_trains(name, tmp_path):
    shape = SHAPES[name.split("/")[0]]
    overrides = [f"data=synthetic:{shape}", "iterations=6", "batch_size=2", "eval_every=1000", "checkpoint_every=1000"]
    overrides += ["teacher=test_train:small_teacher"] * ("teacher" in recipes.get(name))
    run = Run(Config.from_recipe(name, overrides), tmp_path / "run", quiet=True)
    losses = []
    for _ in range(6):
        run.advance()
        losses.append(float(run.engine.losses))
        run.engine.losses.zero_()
    run.folder.release()
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) > 1
    assert run.task.opt.steps == 6
    with run.task.opt.quantized():
        for q in run.task.opt._quantized():
            assert q.method.holds(q.weight.detach(), q.state)


# Killed and continued.


def work(folder, settings, at_step=None):
    torch.set_num_threads(1)
    run = Run.resume(folder, quiet=True) if (folder / "config.json").exists() else Run(settings, folder, quiet=True)
    signalled(run, at_step, signal.SIGKILL).train()


def signalled(run, at_step, number=signal.SIGINT):
    """The run, to which a signal comes in that iteration."""
    advance = run.advance

    def interrupted():
        if run.step == at_step:
            os.kill(os.getpid(), number)
        advance()

    run.advance = interrupted
    return run


def start(folder, settings, at_step=None):
    process = multiprocessing.get_context("fork").Process(target=work, args=(folder, settings, at_step))
    process.start()
    return process


def killed(folder, settings, at_step):
    process = start(folder, settings, at_step)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("kills", "names"),
    [(6, ("md-tanh-s", "pq", "compare")), pytest.param(24, fuzz_kills.NAMES, marks=pytest.mark.slow)],
)
def test_whatever_is_killed_at_a_random_moment_ends_bit_identical(kills, names):
    """More of them: python tests/fuzz_kills.py 300."""
    killed_by_name, findings = fuzz_kills.fuzz(kills, 0, names)
    assert not findings
    assert min(killed_by_name.values()) > 0


@pytest.mark.parametrize("cases", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_damaged_run_folders_end_in_one_line_or_in_the_right_result(cases):
    """More of them: python tests/fuzz_runs.py 2000."""
    ended, findings = fuzz_runs.fuzz(cases, cases)
    assert not findings
    assert sum(ended.values()) == cases


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_from_outside_write_a_checkpoint(tmp_path, number):
    settings = config("iterations=4000", "checkpoint_every=100000", "eval_every=100000")
    process = start(tmp_path / "run", settings)
    while process.is_alive() and not read_metrics(tmp_path / "run" / "metrics.jsonl"):
        time.sleep(0.02)
    assert process.is_alive()
    os.kill(process.pid, number)
    process.join(60)
    assert 0 < checkpoint.load(tmp_path / "run" / "checkpoint.pt")["step"] < 4000


@pytest.mark.parametrize("stops", [[0], [17], [16, 17, 18], [38]])
def test_a_run_stopped_by_signals_ends_bit_identical(tmp_path, stops):
    settings, cut = config("finalize_at=0.45"), tmp_path / "cut"
    Run(settings, tmp_path / "whole", quiet=True).train()
    for stop in stops:
        run = Run.resume(cut, quiet=True) if cut.exists() else Run(settings, cut, quiet=True)
        with pytest.raises(Interrupted, match=f"stopped by SIGINT after iteration {stop + 1}; continue with"):
            signalled(run, stop).train()
    Run.resume(cut, quiet=True).train()
    assert_identical(tmp_path / "whole", cut)


def test_a_run_with_levels_of_any_size_resumes(tmp_path):
    """Numbers of a checkpoint are positive, except those that are as the configuration has them."""
    settings = config("levels=-2,0.5,2", "iterations=6", "width=4")
    with pytest.raises(Interrupted):
        signalled(Run(settings, tmp_path / "run", quiet=True), 3).train()
    assert Run.resume(tmp_path / "run", quiet=True).train()["best_step"] == 6


def test_a_signal_in_the_last_iteration_finds_nothing_to_stop(tmp_path):
    assert signalled(Run(config(), tmp_path / "run", quiet=True), 39).train()["curve"][-1][0] == 40


def test_the_rate_counts_each_second_of_training_and_no_other(tmp_path, monkeypatch):
    """A step takes a second here and a checkpoint ten; the run is stopped between two lines of its log."""
    clock = [0.0]
    monkeypatch.setattr("mirrorquant.train.process.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slowly(work, seconds):
        def slow(*arguments):
            clock[0] += seconds
            return work(*arguments)

        return slow

    run = Run(config("log_every=1000", "checkpoint_every=1000"), tmp_path / "run", quiet=True)
    run.advance = slowly(run.advance, 1)
    with pytest.raises(Interrupted):
        signalled(run, 17).train()
    assert checkpoint.load(tmp_path / "run" / "checkpoint.pt")["seconds"] == 18
    rest = Run.resume(tmp_path / "run", quiet=True)
    rest.advance = slowly(rest.advance, 1)
    rest.folder.write_checkpoint = slowly(rest.folder.write_checkpoint, 10)
    summary = rest.train()
    assert summary["seconds"] == 50
    assert summary["aside"]["checkpoints"] == 10
    assert summary["training_iterations_per_second"] == 1


def test_the_spare_is_used_where_a_checkpoint_is_damaged(tmp_path):
    Run(config(), tmp_path / "whole", quiet=True).train()
    killed(tmp_path / "cut", config(), at_step=33)
    path = tmp_path / "cut" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-100])
    run = Run.resume(tmp_path / "cut", quiet=True)
    run.train()
    assert "checkpoint.pt is damaged" in run.messages[0]
    assert run.messages[1] == "continuing after iteration 24"
    assert_identical(tmp_path / "whole", tmp_path / "cut")


def test_an_engine_that_cannot_train_is_not_mistaken_for_a_damaged_checkpoint(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "run")

    def choose(*_):
        raise EngineError("engine=graph cannot train this")

    monkeypatch.setattr("mirrorquant.train.loop.choose", choose)
    with pytest.raises(EngineError, match=r"^engine=graph cannot train this"):
        Run.resume(tmp_path / "run", quiet=True).train()


@pytest.mark.parametrize("done", [0, 3])
def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path, done):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps_done, steps in ((0, range(1, 6)), (done, range(done + 1, 8))):
        metrics = Metrics(tmp_path, steps_done)
        for step in steps:
            metrics.write("val", step, accuracy=1.0)
        metrics.close()
    events = reader.EventAccumulator(str(tmp_path)).Reload().Scalars("val/accuracy")
    assert [event.step for event in events] == [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6, 7]


# Damaged files.


def mutations(content, count, rng):
    """Bit flips, truncations, extensions, and lost or repeated stretches."""
    for _ in range(count):
        kind, place = rng.randrange(5), rng.randrange(len(content))
        changed = bytearray(content)
        if kind <= 1:
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del changed[place:]
        elif kind == 3:
            changed += bytes([rng.randrange(256)])
        else:
            del changed[place : place + rng.randint(1, 50)]
        if changed != content:
            yield bytes(changed)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    Run(config(), folder, quiet=True).train()
    return folder


@pytest.mark.parametrize("name", ["checkpoint.pt", "best.pt", "config.json"])
def test_mutated_files_are_refused_by_name(finished, tmp_path, name, capsys):
    rng, path, folder = random.Random(name), finished / name, tmp_path / "run"
    content = path.read_bytes()
    folder.mkdir()
    for other in ("config.json", "best.pt", "checkpoint.pt"):
        (folder / other).write_bytes((finished / other).read_bytes())
    command = ["eval", str(folder)] if name == "best.pt" else ["train", "--quiet", "--resume", str(folder)]
    refused = 0
    for changed in mutations(content, 70, rng):
        (folder / name).write_bytes(changed)
        assert main(command) == 1, f"mutation {refused} was accepted"
        told = capsys.readouterr().err
        assert name in told
        assert "Traceback" not in told
        refused += 1
    assert refused > 60


def test_a_run_that_has_lost_its_checkpoints_says_that_it_begins_anew(tmp_path, capsys):
    Run(config("iterations=2"), tmp_path / "run").train()
    assert "starting over" not in capsys.readouterr().err
    (tmp_path / "run" / "checkpoint.pt").unlink()
    Run.resume(tmp_path / "run").train()
    assert f"there is no checkpoint in {tmp_path / 'run'}: starting over" in capsys.readouterr().err


def test_a_checkpoint_of_another_configuration_is_refused(finished, tmp_path):
    other = tmp_path / "other"
    killed(other, config("seed=9"), at_step=13)
    state = checkpoint.load(finished / "checkpoint.pt")
    for theirs in (state, changed(state, "seconds", [])):  # which is not looked at
        (other / "checkpoint.pt").write_bytes(with_checksum(theirs))
        with pytest.raises(RunError, match="belongs to another configuration"):
            Run.resume(other, quiet=True).train()


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return (os.system, ("touch " + str(tmp_path / "owned"),))

    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    (tmp_path / "evil.pt").write_bytes(checkpoint.sealed(buffer.getvalue()))
    payload = pickle.dumps(Evil())
    header = b"mirrorquant checkpoint 1 sha256 " + hashlib.sha256(payload).hexdigest().encode() + b"\n"
    (tmp_path / "evil.mq").write_bytes(header + payload)
    for name in ("evil.pt", "evil.mq"):
        with pytest.raises(CheckpointError, match=f"{name} holds no state"):
            checkpoint.load(tmp_path / name)
    assert not (tmp_path / "owned").exists()


# Files that were made to do harm: the checksum is right.


def with_checksum(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return checkpoint.sealed(buffer.getvalue())


def changed(state, place, value):
    """A copy with something else at a place such as "optimizer/state/0/latent"; nothing there where it is None."""
    state, name = copy.deepcopy(state), place.split("/")[-1]
    part = state
    for key in place.split("/")[:-1]:
        part = part[int(key) if key.isdecimal() else key]
    if value is None:
        del part[name]
    else:
        part[name] = value(part[name]) if callable(value) else value
    return state


WRONG = [
    ("step", None, "KeyError: 'step'"),
    ("step", -2, "the optimizer has taken 36 steps, expected -2"),
    ("step", 41, "the optimizer has taken 36 steps, expected 41"),
    ("step", "12", "the optimizer has taken 36 steps, expected 12"),
    ("seconds", [], "TypeError: float() argument must be"),
    ("best_accuracy", "high", "ValueError: could not convert string to float"),
    ("best", {}, 'Missing key(s) in state_dict: "conv1.weight"'),
    ("aside", {"more": []}, "KeyError: 'startup'"),
    ("losses", torch.zeros(2), "only one element tensors can be converted"),
    ("rng", torch.zeros(5, dtype=torch.uint8), "RNG state size to be 5"),
    ("rng", lambda rng: torch.full_like(rng, 255), "mt19937"),
    ("model", [], "Expected state_dict to be dict-like"),
    ("model/conv1.weight", None, 'Missing key(s) in state_dict: "conv1.weight"'),
    ("model/conv1.weight", torch.zeros(1).expand(1 << 40), "size mismatch for conv1.weight"),
    ("model/conv1.weight", lambda w: w * math.nan, "conv1.weight was changed since the optimizer wrote it"),
    ("model/conv1.weight", lambda w: w.to_sparse(), 'While copying the parameter named "conv1.weight"'),
    ("model/fc.bias", lambda w: -w, "fc.bias was changed since the optimizer wrote it"),
    ("best/fc.bias", "x", 'While copying the parameter named "fc.bias"'),
    ("optimizer", [], "'list' object has no attribute 'get'"),
    ("optimizer/param_groups/0/params", [0], "the state was saved with (parameters, method) [(1, "),
    ("optimizer/param_groups/0/method", "x", "the state was saved with (parameters, method)"),
    ("optimizer/state", {7: {}}, "the saved latent of conv1.weight has shape None"),
    ("optimizer/state/0/latent", torch.zeros(3), "the saved latent of conv1.weight has shape torch.Size([3])"),
]


@pytest.mark.parametrize(("place", "value", "message"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_a_checkpoint_of_wrong_content_is_refused_and_the_spare_is_used(finished, tmp_path, place, value, message):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    good = checkpoint.load(folder / "checkpoint.pt.previous")
    (folder / "checkpoint.pt").write_bytes(with_checksum(changed(good, place, value)))
    run = Run.resume(folder, quiet=True)
    run.train()
    assert "checkpoint.pt does not fit this run (" in run.messages[0]
    assert message in run.messages[0]
    assert_identical(finished, folder)
    (folder / "checkpoint.pt").write_bytes(with_checksum(changed(good, place, value)))
    (folder / "checkpoint.pt.previous").unlink()
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Run.resume(folder, quiet=True).train()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("model", None, "KeyError: 'model'"),
        ("model", [1], "Expected state_dict to be dict-like"),
        ("model/conv1.weight", None, 'Missing key(s) in state_dict: "conv1.weight"'),
        ("model/conv1.weight", lambda w: w[:1], "size mismatch for conv1.weight"),
        ("config", None, "is damaged (JSONDecodeError)"),
        ("config", 5, "is damaged (TypeError)"),
        ("images", 5, "does not fit this run (TypeError: "),
        ("images/shape", [], "does not fit this run (IndexError: "),
        ("images/shape", "188", "does not fit this run (TypeError: "),
        ("images/classes", 10**30, "does not fit this run ("),
    ],
)
def test_a_best_network_of_wrong_content_is_refused_in_one_line(finished, tmp_path, capsys, place, value, message):
    shutil.copytree(finished, tmp_path / "run")
    best = tmp_path / "run" / "best.pt"
    best.write_bytes(with_checksum(changed(checkpoint.load(best), place, value)))
    for command in ("eval", "pack"):
        assert main([command, str(tmp_path / "run")]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"mirrorquant: {best} ")
        assert message in told
        assert told.count("\n") == 1


def test_a_checkpoint_that_grows_when_it_is_read_is_refused_unread(tmp_path, monkeypatch):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 24))
    (tmp_path / "bomb.pt").write_bytes(checkpoint.sealed(buffer.getvalue()))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match=r"bomb\.pt holds no state that can be loaded"):
        checkpoint.load(tmp_path / "bomb.pt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "val", "step": null, "accuracy": 1.0}', "ValueError: step is None"),
        ('{"kind": "val", "accuracy": 1.0}', "KeyError: 'step'"),
        ('{"kind": "val", "step": 1e3, "accuracy": 1.0}', "ValueError: step is 1000.0"),
        ('{"kind": "val", "step": -1, "accuracy": 1.0}', "ValueError: step is -1"),
        ('{"kind": "val", "step": 1, "accuracy": "high"}', "ValueError: accuracy is high"),
        ('{"kind": "train", "step": 1}', "KeyError: 'loss'"),
        ('{"kind": "train", "step": 1' + "0" * 400 + ', "loss": 1}', "ValueError: step is 10000"),
        ('{"kind": "train", "step": 1, "loss": 1000000000000000000}', "ValueError: loss is 10000"),
        ('{"kind": "note", "step": []}', r"ValueError: step is \[\]"),
        ("[" * 100_000, "RecursionError"),
        ("1" * 5_000, "ValueError"),
        ("\udcff", "UnicodeDecodeError"),
    ],
)
def test_a_broken_line_of_metrics_is_named_before_anything_is_trained(finished, tmp_path, line, message):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(line.encode("utf-8", "surrogateescape") + b"\n" + path.read_bytes())
    expected = rf"line 1: not a line of metrics \({message}.*\); fix or remove it"
    with pytest.raises(MetricsError, match=expected):
        read_metrics(path)
    run = Run.resume(tmp_path / "run", quiet=True)
    run.advance = run._finish = lambda *_: pytest.fail("training began")
    with pytest.raises(MetricsError, match=expected):
        run.train()


def test_a_run_whose_metrics_are_missing_goes_on(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.unlink()
    rest = Run.resume(tmp_path / "run", quiet=True)
    rest.train()
    assert f"{path} is missing: the curves begin here" in rest.messages


def test_lines_after_the_checkpoint_are_recorded_anew(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "val", "step": 41, "accuracy": 1.0}\n{"kind": "val", "st')
    Run.resume(tmp_path / "run", quiet=True).train()
    assert_identical(finished, tmp_path / "run")


def test_a_checkpoint_with_a_checksum_of_its_metrics_is_read(tmp_path):
    """As an earlier version wrote it."""
    Run(config(), tmp_path / "whole", quiet=True).train()
    killed(tmp_path / "cut", config(), at_step=33)
    path = tmp_path / "cut" / "checkpoint.pt"
    path.write_bytes(with_checksum({**checkpoint.load(path), "metrics": {"bytes": 0, "sha256": ""}}))
    Run.resume(tmp_path / "cut", quiet=True).train()
    assert_identical(tmp_path / "whole", tmp_path / "cut")


def config_text(**changes):
    """A configuration as a file holds it, with the checksum of what is in it; None takes a key out."""
    content = {**build.resolve(config()).record(), **changes}
    content = {key: value for key, value in content.items() if value is not None or key in ("compile", "channels_last")}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1) + "\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "mine"}, "There is no method 'mine'.* If it is a custom method, import its module first: python"),
        ({"warp": 3}, "has the key 'warp', unknown to this version of mirrorquant: use the version that wrote it"),
        ({"lr": "fast"}, "lr is 'fast', but it must be float"),
        ({"lr": math.nan}, "lr is nan, but it must be a number from 1e-35 to 100"),
        ({"version": 3}, "is of version 3, unknown to this version of mirrorquant: use the version that wrote it"),
        ({"iterations": 1.5}, "iterations is 1.5, but it must be int"),
        ({"iterations": True}, "iterations is True, but it must be int"),
        ({"seed": 10**400}, "seed is 1000.*, but it must be at most"),
        ({"skip": "fc"}, r"skip is 'fc', but it must be list\[str\]"),
        ({"skip": [1]}, r"skip is \[1\], but it must be list\[str\]"),
        ({"overrides": []}, r"overrides is \[\], but it must be dict"),
        ({"overrides": {"lr": [[[]]]}}, "overrides is .*, but it must be dict"),
        ({"method": ["bc"]}, r"method is \['bc'\], but it must be str"),
        ({"levels": "1"}, "level"),
    ],
)
def test_a_stored_configuration_says_what_is_wrong_with_it(tmp_path, changes, message):
    path = tmp_path / "config.json"
    path.write_text(config_text(**changes))
    with pytest.raises(ConfigError, match=f"^{path}:? .*{message}"):
        Config.load(path)


def test_a_custom_method_resumes_once_its_module_is_imported(tmp_path):
    settings = config(recipe=DIGITS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(config_text(method="late"))
    with pytest.raises(ConfigError, match=r"There is no method 'late'.* If it is a custom method"):
        Run.resume(tmp_path / "run", quiet=True)
    type("Late", (type(settings.build_method()),), {"name": "late"})
    try:
        Run.resume(tmp_path / "run", quiet=True).train()
    finally:
        Method.registry.pop("late")


def test_a_key_that_came_later_has_its_default_in_an_older_run(finished, tmp_path):
    """The run goes on although neither its config.json nor its checkpoint has the key."""
    shutil.copytree(finished, tmp_path / "run")
    older = config_text(note=None)
    (tmp_path / "run" / "config.json").write_text(older)
    for name in ("checkpoint.pt", "best.pt"):
        path = tmp_path / "run" / name
        path.write_bytes(with_checksum(changed(checkpoint.load(path), "config", older)))
    assert Config.load(tmp_path / "run" / "config.json").identity == build.resolve(config()).identity
    Run.resume(tmp_path / "run", quiet=True).train()
    assert main(["eval", str(tmp_path / "run")]) == 0


def test_resuming_and_evaluating_never_download(tmp_path, monkeypatch, capsys):
    """A run's folder may be somebody else's: what it names is not fetched, and not to where it says."""
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("a download was started"))
    folder = tmp_path / "run"
    folder.mkdir()
    text = config_text(data="cifar10", model="digitsnet", data_root=str(tmp_path / "elsewhere"))
    (folder / "config.json").write_text(text)
    model = build.model(Config.load(folder / "config.json"), 10, 3)
    images = {"classes": 10, "shape": [3, 32, 32]}
    state = {"model": model.state_dict(), "config": text, "images": images}
    (folder / "best.pt").write_bytes(with_checksum(state))
    for command in (["train", "--resume"], ["eval"]):
        assert main([*command, str(folder)]) == 1
        assert "downloading is off" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_lock_that_is_no_file_is_neither_changed_nor_waited_for(finished, tmp_path, kind):
    shutil.copytree(finished, tmp_path / "run")
    precious, lock = tmp_path / "precious", tmp_path / "run" / ".lock"
    precious.write_text("mine")
    lock.unlink()
    if kind == "fifo":
        os.mkfifo(lock)
        with pytest.raises(RunError, match="cannot be used as a run folder"):
            Run.resume(tmp_path / "run", quiet=True)
    else:
        lock.symlink_to(precious)
        Run.resume(tmp_path / "run", quiet=True).train()
    assert precious.read_text() == "mine"


def test_a_folder_removed_during_a_run_ends_it_with_one_error(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("threading.excepthook", told.append)
    run = Run(config(), tmp_path / "run", quiet=True)
    advance = run.advance

    def removing():
        if run.step == 8:
            shutil.rmtree(tmp_path / "run")
        advance()

    run.advance = removing
    with pytest.raises(RunError, match=r"checkpoint.pt could not be written .No such file.* restore the folder"):
        run.train()
    assert told == []


def test_the_files_of_a_run_are_not_mistaken_for_packed_ones(finished):
    with pytest.raises(mq.PackError, match=r"best\.pt is a checkpoint, not a packed model: 'mirrorquant pack"):
        mq.load(finished / "best.pt")


# What a power cut leaves.


def recorded(monkeypatch, folder):
    """The synchronizations and renames from here on: "sync NAME", "rename NAME", of the folder itself "sync ."."""
    calls, fsync, replace = [], os.fsync, os.replace

    def syncing(handle):
        found = os.fstat(handle)
        names = [p.name for p in folder.iterdir() if p.exists() and os.path.samestat(p.stat(), found)]
        calls.append(
            f"sync {'.' if os.path.samestat(folder.stat(), found) else re.sub('[.][0-9a-f]+[.]', '.', names[0])}"
        )
        fsync(handle)

    def renaming(source, target, **options):
        calls.append(f"rename {Path(target).name}")
        replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", renaming)
    return calls


def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_the_next(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "a.pt", {})
    calls = recorded(monkeypatch, tmp_path)
    checkpoint.save(tmp_path / "a.pt", {})
    assert calls == ["sync a.pt.writing", "rename a.pt.previous", "rename a.pt", "sync ."]


def test_metrics_are_on_the_disk_before_the_checkpoint_that_counts_on_them(tmp_path, monkeypatch):
    run = Run(config("iterations=6"), tmp_path / "run", quiet=True)
    calls = recorded(monkeypatch, tmp_path / "run")
    run.train()
    assert calls[: calls.index("rename checkpoint.pt")] == [
        *("sync metrics.jsonl.writing", "rename metrics.jsonl", "sync ."),
        "sync metrics.jsonl",
        "sync checkpoint.pt.writing",
    ]


def test_a_system_that_cannot_synchronize_folders_is_no_reason_to_stop(tmp_path, monkeypatch):
    fsync = os.fsync

    def picky(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", picky)
    checkpoint.save(tmp_path / "a.pt", {"a": 1})
    assert checkpoint.load(tmp_path / "a.pt") == {"a": 1}


# Other trouble.


@pytest.mark.parametrize("told", ["[enforce fail at alloc_cpu.cpp] no memory", "no checkpoint in [/old]", "[red]"])
def test_a_message_beside_the_progress_bar_is_shown_as_it_is(told, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    with Progress(f"title {told}"[:24], 10) as progress:
        progress.say(told)
        progress.update(10, "")
    assert f"{told}\n" in terminal.getvalue()
    assert f"title {told}"[:24] in terminal.getvalue()


def test_the_rate_beside_the_progress_is_that_of_the_last_seconds(monkeypatch, capsys):
    clock = iter([0.0, 60.0, 65.0, 71.0, 82.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    progress = Progress("title", 2000)
    for done in (100, 600, 1200, 2000):  # the first hundred take a minute: they compile
        progress.update(done, "")
    lines = [line.split()[2:5:2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [["1.67", "0:19:00"], ["100", "0:00:08"], ["72.7", "0:00:00"]]


@pytest.mark.parametrize("done", [0, 1])
def test_a_slow_start_has_a_rate_and_a_time_left_that_are_not_0(done, monkeypatch, capsys):
    clock = iter([0.0, 40.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    Progress("title", 10**12).update(done, "")
    expected = "0/1000000000000  0 it/s" if not done else "1/1000000000000  0.025 it/s"
    assert capsys.readouterr().err.strip() == f"title  {expected}"


def test_two_runs_in_one_folder_are_refused(tmp_path):
    first = Run(config(), tmp_path / "run", quiet=True)
    with pytest.raises(RunError, match="in use by another run"):
        Run.resume(tmp_path / "run", quiet=True)
    first.train()
    with pytest.raises(RunError, match="already holds a run"):
        Run(config(), tmp_path / "run", quiet=True)


def nan_model(classes):
    class Bad(nn.Module):
        def forward(self, x):
            return torch.log(x - x - (1.0 if self.training else 0.0))

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Bad(), nn.Linear(16, classes))


def test_a_nan_loss_stops_with_step_layer_and_remedy(tmp_path):
    run = Run(config("model=test_train:nan_model"), tmp_path / "run", quiet=True)
    with pytest.raises(RunError, match=r"not finite at iteration 0; it begins in layer 2 \(Bad\). Lower lr"):
        run.train()


def fill_disk(folder, settings):
    torch.set_num_threads(1)
    run = Run(settings, folder, quiet=True)
    save, calls = run._save, []

    def failing():
        calls.append(1)
        if len(calls) == 3:  # from here on no file may grow beyond 100 kB
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        save()

    run._save = failing
    try:
        run.train()
    except RunError as error:
        Path(f"{folder}.told").write_text(str(error))


def test_a_full_disk_ends_with_a_clear_error_and_the_last_good_checkpoint(tmp_path):
    folder = tmp_path / "run"
    process = multiprocessing.get_context("fork").Process(target=fill_disk, args=(folder, config()))
    process.start()
    process.join(60)
    told = Path(f"{folder}.told").read_text()
    assert "could not be written" in told
    assert "Free some space" in told
    assert checkpoint.load(folder / "checkpoint.pt")["step"] == 12
    Run(config(), tmp_path / "whole", quiet=True).train()
    Run.resume(folder, quiet=True).train()
    assert_identical(tmp_path / "whole", folder)


def resume_metrics_on_a_full_disk(folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
    with pytest.raises(MetricsError, match=r"metrics\.jsonl could not be written .* before is intact"):
        Metrics(folder, 30)


def test_a_full_disk_on_resuming_leaves_the_metrics_as_they_were(finished, tmp_path):
    content = (finished / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(content)
    process = multiprocessing.get_context("fork").Process(target=resume_metrics_on_a_full_disk, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lrr=0.1"], "There is no key 'lrr'. Did you mean 'lr'"),
        (["lr"], "write key=value"),
        (["lr=fast"], "lr is 'fast', but it must be a number, as in lr=0.001"),
        (["affine=maybe"], "affine is 'maybe', but it must be true or false"),
        (["lr=0"], "lr is 0.0, but it must be at least 1e-35"),
        (["lr=inf"], "lr is inf, but it must be at most 100"),
        (["beta_scale=0.9"], "beta_scale is 0.9, but it must be at least 1"),
        (["beta_scale=nan"], "beta_scale is nan, but it must be"),
        (["beta_cap=1e36"], r"beta_cap is 1e\+36, but it must be at most 1e\+35"),
        (["weight_decay=-1"], "weight_decay is -1.0, but it must be at least 0"),
        (["width=0"], "width is 0, but it must be at least 1"),
        (["threads=-1"], "threads is -1, but it must be at least 0"),
        (["recalibrate=-5"], "recalibrate is -5, but it must be at least 0"),
        (["iterations=0"], "at least 1"),
        ([f"iterations=1{'0' * 400}"], r"must be at most 1e\+15"),
        (["width=99999999"], "width is 99999999, but it must be at most 4096"),
        (["threads=99999999999"], "threads is 99999999999, but it must be at most 1024"),
        ([f"seed={2**63}"], "seed is 9223372036854775808, but it must be at most"),
        (["momentum=inf"], r"momentum is inf, but it must be at most 1e\+35"),
        (["lr=1e39"], r"lr is 1e\+39, but it must be at most 100"),
        (
            ["lr_scale=1.1", "lr_interval=1"],
            "the learning rate reaches .*, but it must stay from 0 to 100: change lr and lr_scale",
        ),
        (["warmup=800"], "warmup is 800, but it must be below iterations, 800"),
        (
            ["lr_schedule=steps"],
            "lr_schedule is 'steps', but it must be one of constant, step, geometric, linear, cosine",
        ),
        (["beta_schedule=step", "beta_scale=2", "beta_interval=1"], r"β reaches .*, but it must stay from 0 to 1e\+35"),
        (["finalize_at=0"], "finalize_at is 0.0, but it must be at least 1e-09"),
        (["lr_scale=1e300", "lr_interval=1"], "the learning rate reaches inf in 800 iterations"),
        (["optimizer=lion"], "one of adam, adamw, sgd"),
        (["method=md-tanhs"], "Did you mean 'md-tanh-s'"),
        (["levels=1,0"], "increase strictly"),
        (["levels=one"], "numbers like -1,0,1"),
        (["method=md-tanh", "levels=ternary"], "two levels only"),
    ],
)
def test_bad_configurations_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_recipe(DIGITS, overrides)


@pytest.mark.parametrize("method", ["ref", "md-tanh-s"])
def test_what_a_model_has_frozen_is_not_trained(method):
    """The fast step trains all that the optimizer has."""
    setting = Config.from_recipe(DIGITS, [f"method={method}", "scale="])
    model = build.model(setting, 10, 1)
    model.conv1.weight.requires_grad_(False)
    names = [name for group in build.optimizer(setting, model, 1).param_groups for name in group["param_names"]]
    assert names == ["conv2.weight", "conv3.weight", "fc.weight", "fc.bias"]


def test_problems_of_data_model_and_device_are_told_without_a_traceback(tmp_path, capsys):
    for override in (
        "data=cifar99",
        "model=resnet81",
        "model=nomodule:f",
        "device=gpu",
        "device=cuda:99",
        "device=meta",
        "device=mps",
        "method=md-tanh-primal weight_decay=0.1",
        "batch_size=5000",
        "skip=nothing",
        "model=resnet18",
        "model=torch.nn:Identity",
        "model=torch.nn:Identity method=ref",
    ):
        code = main(["train", DIGITS, *override.split(), "--out", str(tmp_path / override), "--quiet"])
        told = capsys.readouterr().err
        assert code == 1, told
        assert told.startswith("mirrorquant: ")


def test_names_in_a_run_folder_cannot_steer_the_terminal(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for name in ("best.pt", "checkpoint.pt"):
        state = checkpoint.load(folder / name)
        state["model"]["\x1b[2Jevil"] = torch.zeros(1)
        checkpoint.save(folder / name, state)  # what was there is now the spare
    for command, code in ((["eval"], 1), (["summary"], 1), (["train", "--resume"], 0)):
        assert main([*command, str(folder)]) == code
        told = "".join(capsys.readouterr())
        assert r"\x1b[2Jevil" in told
        assert "\x1b" not in told


@pytest.mark.parametrize(("key", "value"), [("recipe", ["a"]), ("test_accuracy", 10**400), ("config", 5)])
def test_a_summary_of_wrong_content_is_refused_in_one_line(finished, tmp_path, capsys, key, value):
    summary = json.loads((finished / "summary.json").read_text())
    (tmp_path / "wrong.json").write_text(json.dumps({**summary, key: value}))
    assert main(["table", "--results", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"mirrorquant: {tmp_path / 'wrong.json'}: ")
    assert told.count("\n") == 1


def test_training_on_all_images_keeps_the_last_network(tmp_path):
    changed = ["iterations=60", "eval_every=20", "width=4", "train_on=all", "keep=last"]
    run = Run(Config.from_recipe(DIGITS, changed), tmp_path / "run", quiet=True)
    data, joined = load("digits"), run.task.data.train
    assert torch.equal(joined.images, torch.cat([data.train.images, data.val.images]))
    assert torch.equal(joined.labels, torch.cat([data.train.labels, data.val.labels]))
    summary = run.train()
    assert summary["best_step"] == 60
    assert summary["test_accuracy"] == summary["test_accuracy_last"]


def test_training_on_all_images_leaves_none_to_choose_by():
    with pytest.raises(ConfigError, match="train_on=all leaves no images to choose the best network by: add keep=last"):
        Config.from_recipe(DIGITS, ["train_on=all"])
    data = load("synthetic:3x8x8:10")
    with pytest.raises(DataError, match="has no validation images of its own"):
        dataclasses.replace(data, test=data.val).joined()
