"""The fast step trains as the plain loop does; what needs CUDA is in benchmarks/train_paths_agree.py."""

import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mirrorquant.train import Config, EngineError, Run, RunError, beside, checkpoint
from mirrorquant.train.engine import _Guarded
from mirrorquant.train.fast import FastStep, Unsupported, _update
from mirrorquant.train.metrics import read_metrics

METHODS = ("ref", "bc", "pq", "pmf", "gd-tanh", "md-tanh", "md-softmax", "md-tanh-s", "md-softmax-s")
METHODS += ("md-tanh-primal", "md-softmax-primal")


def config(*overrides, method="md-tanh-s"):
    recipe = "digits/digitsnet/binary/md-tanh-s" if method != "ref" else "digits/digitsnet/ref"
    changed = [] if method == "ref" else [f"method={method}"]
    basic = ["iterations=40", "eval_every=10", "log_every=1", "checkpoint_every=20", "batch_size=64"]
    basic += ["channels_last=false"]  # or the engines take other kernels for conv1, and their rounding errors grow
    return Config.from_recipe(recipe, [*changed, *basic, *overrides])


def train(folder, *overrides, **rest):
    run = Run(config(*overrides, **rest), folder, quiet=True)
    run.train()
    return run, [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]


def moved(run):
    """What a step moves, by name: the weights that the network computes with, latents, batch-norm statistics."""
    tensors = {f"weight {name}": p for name, p in run.task.model.named_parameters()}
    if run.engine.name == "graph":
        tensors |= {f"weight {name}": weight.clone() for name, weight in run.engine.fast.weights.items()}
    run.engine.sync()
    tensors |= {
        f"latent {name}": run.task.opt.latent(p)
        for name, p in run.task.model.named_parameters()
        if p in run.task.opt.state
    }
    tensors |= {f"buffer {name}": b for name, b in run.task.model.named_buffers()}
    return {name: tensor.detach().double().clone() for name, tensor in tensors.items()}


def take_over(run, leader):
    run.task.opt.load_state_dict(copy.deepcopy(leader.task.opt.state_dict()))
    run.task.model.load_state_dict(leader.task.model.state_dict())
    run.step, run._engine = leader.step, None


def assert_the_next_step_is_the_same(run, leader):
    """One step from one state: the engines differ by rounding alone, far below a thousandth of the way.

    Curves are not compared: Adam divides a gradient by its own size, so that the last bit, which differs from processor
    to processor, grows into another curve within twenty steps.
    """
    before = moved(leader)
    losses = []
    for each in (run, leader):
        each.engine.losses.zero_()
        each.advance()
        losses.append(float(each.engine.losses))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    found, expected = moved(run), moved(leader)
    assert found.keys() == expected.keys()
    for name, after in expected.items():
        finite = after.isfinite() & before[name].isfinite()  # a primal point that has reached its level is infinite
        assert torch.equal(found[name].isfinite() & before[name].isfinite(), finite), name
        error, way = ((a - b)[finite].norm() for a, b in ((found[name], after), (after, before[name])))
        assert error <= 1e-3 * way, (name, float(error), float(way))


def assert_alike(tmp_path, *overrides, method="md-tanh-s", first="plain", then="graph", steps=(0, 1, 7, 24)):
    """From states all along a run of one engine, the other takes the same step."""
    overrides = [*overrides, *(["beta_scale=1.1", "beta_interval=1"] if method not in ("ref", "bc", "pq") else [])]
    leader = Run(config(f"engine={first}", *overrides, method=method), tmp_path / "leader", quiet=True)
    run = Run(config(f"engine={then}", *overrides, method=method), tmp_path / "run", quiet=True)
    for step in range(max(steps) + 1):
        if step in steps:
            leader.engine.sync()
            take_over(run, leader)
            assert_the_next_step_is_the_same(run, leader)
            assert run.engine.name == then
        else:
            leader.advance()


def step_of(run, **options):
    return FastStep(
        run.task.model, run.task.opt, run.task.loader, run.task.lr, torch.zeros(()), **{"compiled": False, **options}
    )


@pytest.mark.parametrize("method", METHODS)
def test_fast_and_plain_engine_train_alike(method, tmp_path):
    assert_alike(tmp_path, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_both_engines_count_steps_alike(method, tmp_path):
    extra = ["finalize_at=0.5"] if method == "pq" else []
    plain, _ = train(tmp_path / "plain", "engine=plain", *extra, method=method)
    fast, _ = train(tmp_path / "fast", "engine=graph", *extra, method=method)
    assert fast.engine.name == "graph"
    assert fast.task.opt.steps == plain.task.opt.steps == 40
    assert fast.task.opt.beta == plain.task.opt.beta


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("ref", "optimizer=sgd lr=0.1 momentum=0.9 weight_decay=0.1"),
        ("md-tanh-s", "optimizer=sgd lr=0.1 momentum=0"),
        ("md-tanh-s", "weight_decay=0.1"),
        ("pq", "pq_rate=20"),
    ],
)
def test_both_engines_take_momentum_decay_and_the_proximal_step_alike(method, changed, tmp_path):
    assert_alike(tmp_path, *changed.split(), method=method)


@pytest.mark.parametrize("method", METHODS)
def test_fast_score_is_that_of_the_rounded_network(method, tmp_path):
    """The graph engine validates by its own rounding of the latents, which must be the optimizer's."""
    run = Run(config("engine=graph", method=method), tmp_path / "run", quiet=True)
    for _ in range(25):
        run.advance()
    before = {name: w.clone() for name, w in run.engine.fast.weights.items()}
    accuracy, loss = run.engine.score()
    assert run.engine._score is not None
    assert all(torch.equal(w, before[name]) for name, w in run.engine.fast.weights.items())
    assert run.task.model.training
    with run.settled.opt.quantized():
        expected, expected_loss = run.task.evaluate(run.task.data.val)
    assert accuracy == pytest.approx(expected, abs=1e-4)
    assert loss == pytest.approx(expected_loss, rel=1e-4)


def test_where_the_fast_score_cannot_serve_validation_is_done_plainly(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("mirrorquant.train.graph.FastScore", refuse)
    run, _ = train(tmp_path / "run", "engine=graph")
    assert sum("no such kernel" in message for message in run.messages) == 1
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "val"] == [10, 20, 30, 40]
    assert run.clock.aside["validation"] > 0


def test_histograms_are_of_the_weights_at_their_step(tmp_path):
    train(tmp_path / "run", "engine=graph", "iterations=9", "histogram_every=4")
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "weights"]
    assert [row["step"] for row in rows] == [1, 4, 8]
    assert rows[0]["layers"] != rows[1]["layers"] != rows[2]["layers"]


def test_ternary_levels_and_float_layers_are_served(tmp_path):
    assert_alike(tmp_path, "affine=true", "levels=ternary")


@pytest.mark.parametrize(("first", "then"), [("graph", "plain"), ("plain", "graph"), ("graph", "graph")])
def test_a_checkpoint_of_one_engine_continues_with_the_other(first, then, tmp_path):
    assert_alike(tmp_path, first=first, then=then, steps=(1, 20))


@pytest.mark.parametrize("method", ["md-tanh-s", "md-softmax-s", "pmf"])
def test_a_graph_run_goes_on_bit_exactly_on_the_cpu(method, tmp_path):
    """Its weights were projected in one flat tensor, where other numbers than in the model's are the last of a row."""
    whole = Run(config("engine=graph", method=method), tmp_path / "whole", quiet=True)
    for stop in range(1, 40):
        whole.advance()
        if stop % 6 == 3:
            whole.engine.sync()
            rest = Run(config("engine=graph", method=method), tmp_path / f"rest{stop}", quiet=True)
            rest.task.opt.load_state_dict(copy.deepcopy(whole.task.opt.state_dict()))
            rest.task.model.load_state_dict(whole.task.model.state_dict())
            rest.step = stop
            fresh = step_of(rest)
            for name, weight in whole.engine.fast.weights.items():
                assert torch.equal(fresh.weights[name], weight), (stop, name)


@pytest.mark.parametrize("first", [0, 1, 7, 25])
def test_the_batch_on_the_device_is_the_loaders(first, tmp_path):
    run = Run(config(), tmp_path / "run", quiet=True)
    step = step_of(run)
    for k in range(first, first + 25):
        epoch, place = divmod(k, run.task.loader.batches_per_epoch)
        if epoch != step.epoch or k == first:
            step._begin(epoch, place, k)
        chosen = step.place * run.task.loader.batch_size + step.offsets
        x, y = run.task.loader.compose(step.order[chosen], step.draws[chosen])
        expected_x, expected_y = run.task.loader.batch(k)
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)
        step.place += 1


def test_latents_lie_flat_in_the_layout_of_their_weights(tmp_path):
    run = Run(config("channels_last=true", method="md-softmax-s"), tmp_path / "run", quiet=True)
    before = {p: run.task.opt.latent(p).clone() for p in run.task.model.parameters()}
    step = step_of(run, dtype=torch.bfloat16)
    names = dict(run.task.model.named_parameters())
    for p, latent in before.items():
        assert torch.equal(run.task.opt.latent(p), latent)
    for name, weight in step.weights.items():
        torch.testing.assert_close(weight, names[name].to(weight.dtype))  # projected anew, and rounded then
        assert weight.dtype == (torch.bfloat16 if weight.dim() > 1 else torch.float32)
        assert weight.data_ptr() % 16 == 0
        if weight.dim() == 4:
            assert weight.is_contiguous(memory_format=torch.channels_last)


def guarded(run):
    """The run with the engine that auto chooses on CUDA."""
    run._engine = _Guarded(run.task, run.say, strict=False)
    return run


def test_a_task_that_the_graph_cannot_train_is_trained_plainly_with_a_message(tmp_path, capsys):
    run = Run(config("iterations=3"), tmp_path / "run")
    run.task.opt.base.param_groups[0]["amsgrad"] = True
    with pytest.raises(Unsupported, match="amsgrad"):
        step_of(run)
    assert guarded(run).train()["engine"]["engine"] == "plain"
    assert "the plain engine does, slower" in capsys.readouterr().err


def test_an_engine_that_was_asked_for_and_cannot_be_had_is_an_error(tmp_path):
    run = Run(config("engine=graph"), tmp_path / "run", quiet=True)
    run.task.opt.base.param_groups[0]["amsgrad"] = True
    with pytest.raises(
        EngineError, match=r"engine=graph cannot train this .*amsgrad.*: use engine=auto or engine=plain"
    ):
        run.train()


def test_a_first_step_that_breaks_off_is_taken_once_by_the_plain_engine(tmp_path, monkeypatch):
    def broken(method, *rest):
        if method.name != "ref":
            raise RuntimeError("no such kernel")
        _update(method, *rest)

    monkeypatch.setattr("mirrorquant.train.fast._update", broken)
    plain, other = (Run(config("affine=true"), tmp_path / name, quiet=True) for name in ("plain", "guarded"))
    guarded(other)
    assert other.engine.name == "graph"
    for run in (plain, other):
        run.advance()
        run.advance()
    assert other.engine.name == "plain"
    assert torch.equal(other.engine.losses, plain.engine.losses)
    for name, expected in plain.task.model.state_dict().items():
        torch.testing.assert_close(other.task.model.state_dict()[name], expected)


def test_weights_that_have_become_nan_are_not_saved_over_a_good_checkpoint(tmp_path):
    run = Run(config("engine=graph", "log_every=40", "checkpoint_every=4"), tmp_path / "run", quiet=True)
    advance = run.advance

    def diverging():
        if run.step == 6:  # what NaN gradients leave behind
            run.task.opt.latent(run.task.model.conv2.weight).fill_(torch.nan)
        advance()

    run.advance = diverging
    with pytest.raises(RunError, match=r"at iteration 8; it begins in the weights. .* checkpoint in .* is intact"):
        run.train()
    state = checkpoint.load(tmp_path / "run" / "checkpoint.pt")
    assert state["step"] == 4
    assert all(bool(tensor.isfinite().all()) for tensor in state["model"].values())


def test_weight_decay_of_a_primal_form_is_left_to_the_plain_engine(tmp_path):
    run = Run(config("weight_decay=0.01", method="md-tanh"), tmp_path / "run", quiet=True)
    with pytest.raises(Unsupported, match="weight decay by beta"):
        step_of(run)


def test_the_compiled_step_is_the_plain_one(tmp_path):
    assert_alike(tmp_path, "compile=true", steps=(7,))


COMPILED = """
import torch
from mirrorquant.train.compiling import compiled

images = torch.randn(8, 16, 8, 8, requires_grad=True)
loss = lambda x: torch.nn.functional.max_pool2d(x, 2).square().mean()
found, expected = (torch.autograd.grad(f(images), images)[0] for f in (compiled(loss), loss))
assert (found - expected).norm() <= 1e-3 * expected.norm()
"""


@pytest.mark.slow
def test_code_that_was_compiled_for_wider_vectors_is_not_taken_from_the_cache(tmp_path):
    """torch's own cache mixes them up: NaN, or code that does not compile."""
    narrower = {"AVX512": "avx2", "AVX2": "default"}.get(torch.backends.cpu.get_cpu_capability())
    if narrower is None:
        pytest.skip("this processor, or ATEN_CPU_CAPABILITY, has no wide vectors")
    for capability in ({}, {"ATEN_CPU_CAPABILITY": narrower}):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **capability}
        found = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr


def test_each_step_of_the_fast_path_is_the_plain_one_all_along_the_curve():
    path = Path(__file__).parents[1] / "benchmarks" / "train_paths_agree.py"
    spec = importlib.util.spec_from_file_location("train_paths_agree", path)
    agree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agree)
    paths = [["precision=float32", f"engine={engine}", "compile=false"] for engine in ("graph", "plain")]
    curves = agree.led("digits/digitsnet/binary/md-tanh-s", 60, *paths)
    assert agree.difference(*curves, 1) < agree.TOLERANCE["float32"][0]


@pytest.mark.slow
def test_weight_gradients_apart_from_the_backward_pass_are_the_same(monkeypatch):
    """On the CPU nothing runs beside: what is checked is the rewritten graph."""
    calls = []
    compute = beside._compute
    monkeypatch.setattr(beside, "_compute", lambda *arguments: calls.append(1) or compute(*arguments))
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, bias=False)]
    layers += [nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8, affine=False), nn.ReLU()]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 12, 12).contiguous(memory_format=torch.channels_last)

    def loss(images):
        return model(images).square().sum()

    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss(x), parameters)
    with beside.convolutions():
        found = torch.autograd.grad(torch.compile(loss)(x), parameters)
        beside.join()
    assert len(calls) == 2  # the grouped convolution stays as it is
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
