"""Several processes that train one network, started by torchrun, on CPUs with Gloo."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from mirrorquant.train import Config, ConfigError, Run, build, process
from mirrorquant.train.distributed import ALONE, World, statistics
from mirrorquant.train.engine import choose
from mirrorquant.train.graph import GraphEngine

DIGITS = "digits/digitsnet/binary/md-tanh-s"
SHORT = ["device=cpu", "iterations=30", "eval_every=15", "log_every=5", "checkpoint_every=10", "width=8", "scale="]
PLAIN = ["optimizer=sgd", "lr=0.02", "batch_size=64", "augment=none", "beta_schedule=constant"]  # amplify no rounding

SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
from mirrorquant.train import Config, Run, distributed

folder, kill_at, *overrides = sys.argv[1:]
with distributed.joined() as world:
    resumed = os.path.exists(f"{folder}/config.json")
    world.shared(0)  # all have looked
    if resumed:
        run = Run.resume(folder, quiet=True)
    else:
        run = Run(Config.from_recipe("digits/digitsnet/binary/md-tanh-s", overrides), folder, quiet=True)
    advance = run.advance

    def advance_or_die():
        advance()
        if run.step == int(kill_at) and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    run.advance = advance_or_die
    run.train()
    last = torch.load(f"{folder}/checkpoint.pt", weights_only=True)["losses"]
    state = {**run.task.model.state_dict(), "losses": last}
    for name, p in run.task.model.named_parameters():
        state |= {f"{name} {key}": value.float() for key, value in run.task.opt.state[p].items()}
        moved = run.task.opt.state[p].get("latent", p)
        state |= {f"{name} {key}": value.float() for key, value in run.task.opt.base.state[moved].items()}
    if world.size > 1:
        masks = [torch.empty(8) for _ in range(world.size)]
        dist.all_gather(masks, torch.rand(8))
        assert not torch.equal(*masks)  # or dropout would be the same everywhere
        for name, tensor in state.items():
            both = [torch.empty_like(tensor) for _ in range(world.size)]
            dist.all_gather(both, tensor.contiguous())
            assert torch.equal(*both), name
    if world.chief:
        torch.save(state, f"{folder}/end.pt")
"""


def torchrun(tmp_path, processes, folder, *overrides, kill_at=0):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(script), str(folder), str(kill_at), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)


def end(folder):
    return torch.load(folder / "end.pt", weights_only=True)


def finished(result, folder):
    assert result.returncode == 0, result.stderr
    return end(folder)


@pytest.mark.parametrize("engine", ["plain", "graph"])
def test_two_processes_are_identical_and_train_like_one(tmp_path, engine):
    """The one computes both halves of a batch after another, so that batch norm sees the same images."""
    two = finished(torchrun(tmp_path, 2, tmp_path / "two", *SHORT, *PLAIN, f"engine={engine}"), tmp_path / "two")
    run = Run(Config.from_recipe(DIGITS, [*SHORT, *PLAIN, "accumulate=2"]), tmp_path / "one", quiet=True)
    start = {name: run.task.opt.latent(p).clone() for name, p in run.task.model.named_parameters()}
    run.train()
    for name, p in run.task.model.named_parameters():
        latent, way = run.task.opt.latent(p), (run.task.opt.latent(p) - start[name]).norm()
        assert float((latent - two[f"{name} latent"]).norm()) <= 1e-3 * float(way), name
    records = [(tmp_path / name / "metrics.jsonl").read_text().count("\n") for name in ("one", "two")]
    assert records[0] == records[1]


@pytest.mark.slow
@pytest.mark.parametrize("more", [["engine=plain"], ["engine=graph", "affine=true"]], ids=["plain", "graph"])
def test_a_killed_process_ends_the_job_and_any_number_resumes_it(tmp_path, more):
    changed = [*SHORT, "checkpoint_every=7", "finalize_at=0.5", *more]  # a checkpoint between two records of the loss
    whole = finished(torchrun(tmp_path, 2, tmp_path / "whole", *changed), tmp_path / "whole")
    for processes in (2, 1):
        folder = tmp_path / f"killed-{processes}"
        died = torchrun(tmp_path, 2, folder, *changed, kill_at=23)
        assert died.returncode != 0
        assert "process 0 of 2 lost contact with the others" in died.stderr
        assert "--resume" in died.stderr
        assert not (folder / "end.pt").exists()
        resumed = finished(torchrun(tmp_path, processes, folder), folder)
        if processes == 2:
            assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
            curves = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", folder.name)]
            assert curves[0]["loss_curve"] == curves[1]["loss_curve"]
        assert (folder / "summary.json").exists()


def test_the_command_line_runs_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "mirrorquant"]
    command += ["train", DIGITS, *SHORT, "iterations=10", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rounded test %") == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits-digitsnet-binary-md-tanh-s-seed0"]


def test_a_batch_must_be_divisible():
    with pytest.raises(ConfigError, match="batch_size is 64, but it must be divisible by 3"):
        build.task(Config.from_recipe(DIGITS, ["batch_size=64", "accumulate=3"]))


@pytest.mark.parametrize("chosen", ["true", "false"])
def test_batch_norm_stays_float_or_is_quantized(chosen):
    task = build.task(Config.from_recipe(DIGITS, [*SHORT, "affine=true", f"quantize_norms={chosen}"]))
    norms = [p for m in task.model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    assert norms
    assert {p in task.opt.state for p in norms} == {chosen == "true"}


def test_batch_norm_over_all_processes_needs_cuda():
    with pytest.raises(ConfigError, match="sync_norms needs CUDA"):
        build.task(Config.from_recipe(DIGITS, ["device=cpu", "sync_norms=true"]))


def test_each_process_takes_one_of_the_gpus_that_it_sees(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for seen, own in ((8, 3), (4, 3), (1, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: seen)
        for device in ("auto", "cuda"):
            assert build.device(Config(device=device)) == torch.device("cuda", own)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="torch sees 2 CUDA devices"):
        build.device(Config())


def test_statistics_are_those_of_all_normalization_layers():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(3, track_running_stats=True), nn.InstanceNorm1d(4))
    assert [len(t) for t in statistics(model)] == [2, 2, 3, 3]


def test_processes_meet_every_few_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
    pace = process.Pace()
    assert pace.steps(0) == 1  # nothing is known yet
    assert process.Pace(50_000).steps(50_000) == 1  # of a resumed run, too
    for seconds, steps, expected in ((2.0, 1, 2), (2.0, 2, 5), (0.1, 5, 250), (1.0, 1_000_000, 1000), (100.0, 3, 1)):
        now[0] += seconds
        assert pace.steps(pace.step + steps) == expected


def test_batch_norm_of_all_processes_keeps_its_counter_in_a_graph():
    task = build.task(Config.from_recipe(DIGITS, SHORT))
    object.__setattr__(task, "model", nn.SyncBatchNorm.convert_sync_batchnorm(task.model))
    engine = GraphEngine(task, print)
    assert any(isinstance(module, nn.SyncBatchNorm) for module in task.model.modules())
    assert engine._norms() == []


def test_gradients_add_up_in_float32():
    """A sum of 64 parts in bfloat16 would lose up to three of its eight bits."""
    whole, parts = (
        GraphEngine(build.task(Config.from_recipe(DIGITS, [*SHORT, "precision=bfloat16", more])), print)
        for more in ("batch_size=64", "accumulate=64")
    )
    for engine, count in ((whole, 1), (parts, 64)):
        for part in engine.moving:
            ones = [torch.full_like(w, 1 + 2**-7) for w in part.weights.values()]
            for i in range(count):
                part.take_gradients(ones, add=i > 0)
            part.take_total()
            for view in part.views(part.image.grad):
                assert float(view.detach().flatten()[0]) == pytest.approx(count * (1 + 2**-7), rel=2**-9)


def test_alone_nothing_is_averaged():
    tensor = torch.ones(3)
    ALONE.average([tensor])
    assert torch.equal(tensor, torch.ones(3))
    assert ALONE.total(tensor) is tensor
    assert ALONE.shared("x") == "x"
    assert World(1, 2).part == (1, 2)
    assert not World(1, 2).chief


@pytest.mark.parametrize("engine", ["plain", "graph"])
def test_parts_of_a_batch_add_up_to_it(engine):
    """Without batch norm, the gradients of the parts are those of the whole."""
    settings = ["device=cpu", "model=gpu.test_cuda:perceptron", f"engine={engine}", *PLAIN, "scale="]
    states = []
    for count in (1, 4):
        task = build.task(Config.from_recipe(DIGITS, [*settings, f"accumulate={count}"]))
        stepper = choose(task, engine, print)
        for k in range(4):
            stepper.step(k)
        stepper.sync()
        states.append({name: task.opt.latent(p).clone() for name, p in task.model.named_parameters() if p.dim() > 1})
        losses = float(stepper.losses)
        states[-1]["losses"] = torch.tensor(losses)
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["plain", "graph"])
def test_parts_of_a_batch_move_the_statistics_of_batch_norm_as_far_as_the_whole(engine):
    kept = []
    for count in (1, 8):
        task = build.task(Config.from_recipe(DIGITS, [*SHORT, *PLAIN, f"engine={engine}", f"accumulate={count}"]))
        norm = next(module for module in task.model.modules() if isinstance(module, nn.BatchNorm2d))
        norm.running_var.fill_(1e6)  # against which those of the images are nothing
        choose(task, engine, print).step(0)
        kept.append(float(norm.running_var.mean()) / 1e6)
    assert kept == pytest.approx([0.9, 0.9], rel=1e-4)
