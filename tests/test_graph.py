"""The graph engine trains as the plain one does. On a CPU it captures nothing; tests/gpu covers CUDA."""

import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor
from gpu.test_cuda import MIXED, Centred, Clip
from torch import nn

import mirrorquant as mq
from mirrorquant.train import Config, EngineError, Run, RunError, beside, build
from mirrorquant.train.engine import PlainEngine, Unsupported, _GraphOrPlain, choose
from mirrorquant.train.graph import GraphEngine, Part
from mirrorquant.train.metrics import read_metrics

METHODS = mq.methods.names()
ENGINES = {"plain": PlainEngine, "graph": lambda task: GraphEngine(task, print)}


def config(*overrides, method="md-tanh-s"):
    recipe = "digits/digitsnet/binary/md-tanh-s" if method != "ref" else "digits/digitsnet/ref"
    changed = [] if method == "ref" else [f"method={method}"]
    basic = ["iterations=40", "eval_every=10", "log_every=1", "checkpoint_every=20", "batch_size=64", "width=8"]
    basic += ["scale="]  # the paper's levels; with small ones rounding errors grow
    basic += ["channels_last=false"]  # or the engines take other kernels for conv1, and their rounding errors grow
    if mq.methods.get(method).uses_beta:
        basic += ["beta_scale=1.1", "beta_interval=1"]
    return Config.from_recipe(recipe, [*changed, *basic, *overrides])


def with_optimizer(task, method, base=torch.optim.Adam, **options):
    """The task with a method that is no name, or another base optimizer."""
    groups = mq.split(task.model, everything=True)
    opt = mq.MirrorDescent(base(groups, lr=0.01, **options), method, anneal=mq.schedules.geometric(1.1))
    object.__setattr__(task, "opt", opt)
    return task


def moved(engine):
    """The tensors that a step moves, by name: weights that the network computes with, latents, statistics, scales."""
    task = engine.task
    tensors = {f"weight {name}": p for name, p in task.model.named_parameters()}
    if isinstance(engine, GraphEngine):
        tensors |= {f"weight {name}": weight.clone() for name, weight in engine.weights.items()}
    engine.sync()
    for name, p in task.model.named_parameters():
        tensors |= {f"{key} {name}": value for key, value in task.opt.state.get(p, {}).items()}
    tensors |= {f"buffer {name}": b for name, b in task.model.named_buffers()}
    return {name: tensor.detach().double().clone() for name, tensor in tensors.items()}


def taken_over(task, engine, leader):
    """The engine on another task, from the leader's state."""
    leader.sync()
    task.opt.load_state_dict(copy.deepcopy(leader.task.opt.state_dict()))
    task.model.load_state_dict(leader.task.model.state_dict())
    return ENGINES[engine](task)


def assert_the_next_step_is_the_same(engine, leader, k):
    """One step from one state: the engines differ by rounding alone, far below a thousandth of the way.

    Curves are not compared: Adam divides a gradient by its own size, so that the last bit, which differs from processor
    to processor, grows into another curve within twenty steps.
    """
    before = moved(leader)
    for each in (engine, leader):
        each.losses.zero_()
        each.step(k)
    assert float(engine.losses) == pytest.approx(float(leader.losses), rel=1e-4)
    found, expected = moved(engine), moved(leader)
    assert found.keys() == expected.keys()
    for name, after in expected.items():
        finite = after.isfinite() & before[name].isfinite()  # a primal point that has reached its level is infinite
        assert torch.equal(found[name].isfinite() & before[name].isfinite(), finite), name
        error, way = ((a - b)[finite].norm() for a, b in ((found[name], after), (after, before[name])))
        assert error <= 1e-3 * way + 1e-12, (name, float(error), float(way))


def assert_alike(make, first="plain", then="graph", steps=(0, 1, 7, 24)):
    """From states all along a run of one engine, the other takes the same step."""
    leader, task = ENGINES[first](make()), make()
    for k in range(max(steps) + 1):
        if k in steps:
            assert_the_next_step_is_the_same(taken_over(task, then, leader), leader, k)
        else:
            leader.step(k)


@pytest.mark.parametrize("method", METHODS)
def test_both_engines_train_alike(method):
    assert_alike(lambda: build.task(config(method=method)))


def test_both_engines_learn_alike_from_a_teacher(tmp_path):
    Run(config("iterations=5", method="ref"), tmp_path / "teacher", quiet=True).train()
    taught = ["augment=crop-flip", f"teacher={tmp_path / 'teacher'}", "hard_share=0.3"]
    assert_alike(lambda: build.task(config(*taught)))


def test_both_engines_train_alike_on_mixed_images_and_smooth_labels():
    assert_alike(lambda: build.task(config(*MIXED.split())))


@pytest.mark.parametrize("method", METHODS)
def test_both_engines_count_steps_alike(method, tmp_path):
    extra = ["finalize_at=0.5"] if method == "pq" else []
    runs = [Run(config(f"engine={e}", *extra, method=method), tmp_path / e, quiet=True) for e in ("plain", "graph")]
    for run in runs:
        run.train()
    plain, graph = runs
    assert (plain.engine.name, graph.engine.name) == ("plain", "graph")
    assert graph.task.opt.steps == plain.task.opt.steps == 40
    assert graph.task.opt.beta == plain.task.opt.beta


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("ref", "optimizer=sgd lr=0.1 momentum=0.9 weight_decay=0.1"),
        ("md-tanh-s", "optimizer=sgd lr=0.1 momentum=0"),
        ("md-tanh-s", "optimizer=sgd lr=0.1 momentum=0.9 nesterov=true"),
        ("md-tanh-s", "weight_decay=0.1"),
        ("md-softmax-s", "optimizer=adamw weight_decay=0.5"),
        ("pq", "pq_rate=20"),
        ("md-tanh-s", "affine=true levels=ternary"),
        ("md-tanh-s", "label_smoothing=0.1 logit_scale=0.3"),
        ("md-tanh-s", "lr_schedule=cosine warmup=5"),
    ],
)
def test_both_engines_train_alike_with_any_recipe(method, changed):
    assert_alike(lambda: build.task(config(*changed.split(), method=method)))


class Counted(mq.Method):
    """Has state beyond the latent."""

    def start(self, weight, latent):
        return {"count": torch.zeros_like(latent)}

    def project(self, latent, beta):
        return torch.tanh(beta * latent)

    def settle(self, latent, beta, lr, count):
        count += latent.sign()
        return latent.clamp(-2, 2)


class Rows(mq.Method):
    """Not elementwise, and for matrices alone."""

    def project(self, latent, beta):
        return torch.tanh(beta * (latent - latent.mean(1, keepdim=True)))


class Twice(mq.methods.MDTanhS):
    """Its scales are twice as large."""

    def refit(self, state):
        state["scale"].copy_(2 * self.scale.of(state["latent"], self.levels))


CUSTOM = {"clip": (Clip(), 1), "centred": (Centred(), 5), "counted": (Counted(), 5)}
for how in ("fixed", "computed"):
    per_channel, per_tensor = (mq.levels.Scale(per, how) for per in ("channel", "tensor"))
    CUSTOM[f"{how} per channel"] = mq.methods.MDTanhS(scale=per_channel), 5
    CUSTOM[f"{how} per tensor"] = mq.methods.MDTanhS(scale=per_tensor), 1
    CUSTOM[f"{how}, ternary"] = mq.methods.MDTanhS(mq.TERNARY, scale=per_tensor), 1
    CUSTOM[f"{how}, through tanh"] = mq.methods.GDTanh(scale=per_tensor), 1
CUSTOM["with a rule of its own"] = Twice(scale=mq.levels.Scale("tensor", "computed")), 1
CUSTOM["fixed, lifted"] = mq.methods.MDSoftmaxS(mq.TERNARY, scale=mq.levels.Scale("tensor", "fixed")), 1
CUSTOM["fixed, proximal"] = mq.methods.PQ(scale=mq.levels.Scale("tensor", "fixed")), 1


def made(method):
    """A task with one of the methods by its name."""
    if method in CUSTOM:
        return with_optimizer(build.task(config()), CUSTOM[method][0])
    return build.task(config(method=method))


@pytest.mark.parametrize("name", CUSTOM)
def test_any_method_trains_alike_and_elementwise_ones_in_one_tensor(name):
    assert len(GraphEngine(made(name), print).parts) == CUSTOM[name][1]
    assert_alike(lambda: made(name), steps=(0, 1, 7))


def test_a_scaled_method_for_matrices_alone_trains_alike():
    def make():
        task, method = build.task(config()), Rows(scale=mq.levels.Scale("tensor", "fixed"))
        base = torch.optim.Adam(mq.split(task.model))
        object.__setattr__(task, "opt", mq.MirrorDescent(base, method, anneal=mq.schedules.geometric(1.1)))
        return task

    assert_alike(make, steps=(0, 1, 7))


def test_learnt_scales_train_alike():
    """With SGD: batch norm makes their gradients rounding errors, which Adam would blow up."""
    method = mq.methods.MDTanhS(mq.levels.auto(per="channel", how="learnt"))

    def make():
        return with_optimizer(build.task(config()), method, torch.optim.SGD, momentum=0.9)

    engines = [ENGINES[name](make()) for name in ("plain", "graph")]
    for k in range(5):
        for engine in engines:
            engine.step(k)
    plain, graph = (moved(engine) for engine in engines)
    scales = [name for name in plain if name.startswith("scale")]
    assert len(scales) == 5
    for name in plain:
        torch.testing.assert_close(graph[name], plain[name], rtol=1e-3, atol=1e-5)


def test_amsgrad_and_fused_optimizers_train_alike():
    assert_alike(lambda: with_optimizer(build.task(config()), "md-tanh-s", amsgrad=True), steps=(0, 7))
    assert_alike(lambda: with_optimizer(build.task(config()), "md-tanh-s", fused=True), steps=(0, 7))


@pytest.mark.parametrize("method", [*METHODS, "computed, ternary", "fixed, lifted"])
def test_the_score_is_that_of_the_rounded_network(method):
    """The graph engine validates with its own rounding of the latents, which must be the optimizer's."""
    engine = GraphEngine(made(method), print)
    for k in range(25):
        engine.step(k)
    before = {name: w.clone() for name, w in engine.weights.items()}
    score = engine.score()
    assert all(torch.equal(w, before[name]) for name, w in engine.weights.items())
    assert engine.task.model.training
    engine.sync()
    with engine.task.opt.quantized():
        expected = engine.task.evaluate(engine.task.data.val)
    assert score.accuracy == pytest.approx(expected.accuracy, abs=1e-4)
    assert score.top5 == pytest.approx(expected.top5, abs=1e-4)
    assert score.loss == pytest.approx(expected.loss, rel=1e-4)


def test_histograms_are_of_the_weights_at_their_step(tmp_path):
    Run(config("engine=graph", "iterations=9", "histogram_every=4"), tmp_path / "run", quiet=True).train()
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "weights"]
    assert [row["step"] for row in rows] == [1, 4, 8]
    assert rows[0]["layers"] != rows[1]["layers"] != rows[2]["layers"]


@pytest.mark.parametrize(("first", "then"), [("graph", "plain"), ("plain", "graph"), ("graph", "graph")])
def test_a_state_of_one_engine_continues_with_the_other(first, then):
    assert_alike(lambda: build.task(config()), first=first, then=then, steps=(1, 20))


SAMPLE = ["md-tanh-s", "md-softmax-s", "pmf", "md-tanh", "computed, ternary", "computed per channel", "fixed, lifted"]


@pytest.mark.parametrize("method", SAMPLE)
def test_a_graph_run_goes_on_bit_exactly_on_the_cpu(method):
    whole, start = GraphEngine(made(method), print), 0
    for stop in (1, 4, 11, 25):
        for k in range(start, stop):
            whole.step(k)
        rest, start = taken_over(made(method), "graph", whole), stop + 1
        for each in (rest, whole):
            each.step(stop)
        for name, weight in whole.weights.items():
            assert torch.equal(rest.weights[name], weight), (stop, name)


@pytest.mark.parametrize("first", [0, 1, 7, 25])
@pytest.mark.parametrize("overrides", [[], MIXED.split()], ids=["plain", "mixed"])
def test_the_batch_on_the_device_is_the_loaders(first, overrides):
    engine = GraphEngine(build.task(config(*overrides)), print)
    feed, loader = engine.feed, engine.task.loader
    for k in range(first, first + 25):
        feed.begin(k)
        for found, expected in zip(feed.compose(*feed.share(0)), loader.batch(k), strict=True):
            assert torch.equal(found, expected)
        feed.end()
        feed.look_ahead(k + 1)


def test_latents_lie_flat_in_the_layout_of_their_weights():
    task = build.task(config("channels_last=true", "precision=bfloat16", method="md-softmax-s"))
    before = {p: task.opt.latent(p).clone() for p in task.model.parameters()}
    engine, names = GraphEngine(task, print), dict(task.model.named_parameters())
    for p, latent in before.items():
        assert torch.equal(task.opt.latent(p), latent)
    for name, weight in engine.weights.items():
        torch.testing.assert_close(weight, names[name].to(weight.dtype))
        assert weight.dtype == (torch.bfloat16 if weight.dim() > 1 else torch.float32)
        assert weight.data_ptr() % 16 == 0
        if weight.dim() == 4:
            assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_optimizers_that_move_whole_tensors_are_left_to_the_plain_engine(kind):
    task, messages = build.task(config()), []
    groups = list(task.model.parameters()) if kind is torch.optim.LBFGS else mq.split(task.model)
    object.__setattr__(task, "opt", mq.MirrorDescent(kind(groups)))
    assert _GraphOrPlain(task, messages.append, strict=False).name == "plain"
    assert f"{kind.__name__} does not move each number of a tensor on its own" in messages[0]


def test_weights_that_are_frozen_are_left_to_the_plain_engine():
    task = build.task(config())
    task.model.conv1.weight.requires_grad_(False)
    opt = mq.MirrorDescent(torch.optim.Adam(task.model.parameters()))
    object.__setattr__(task, "opt", opt)
    with pytest.raises(Unsupported, match="parameters without a latent"):
        GraphEngine(task, print)
    before = task.model.conv1.weight.clone()
    PlainEngine(task).step(0)
    assert torch.equal(task.model.conv1.weight, before)


def test_a_model_that_the_graph_engine_cannot_train_is_an_error_if_it_was_asked_for():
    task = build.task(config())
    task.model.double()
    task = with_optimizer(task, "md-tanh-s")
    with pytest.raises(Unsupported, match="not float32"):
        GraphEngine(task, print)
    with pytest.raises(EngineError, match=r"engine=graph cannot train this \(.*not float32.*\): use engine=auto"):
        choose(task, "graph", print)
    messages = []
    assert _GraphOrPlain(task, messages.append, strict=False).name == "plain"
    assert "using the plain engine, which is slower" in messages[0]


def test_a_first_step_that_breaks_off_is_taken_once_by_the_plain_engine(monkeypatch):
    calls, quantized = [], Part.quantized

    def broken(part, knobs, *after):
        if not after:
            return quantized(part, knobs)
        calls.append(part)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Part, "quantized", broken)  # for the projection, after the latents have moved
    messages, tasks = [], [build.task(config("affine=true")) for _ in range(2)]
    engines = [PlainEngine(tasks[0]), _GraphOrPlain(tasks[1], messages.append, strict=False)]
    for engine in engines:
        engine.step(0)
        engine.step(1)
    assert len(calls) == 1
    assert engines[1].name == "plain"
    assert "no such kernel" in messages[0]
    for name, expected in tasks[0].model.state_dict().items():
        torch.testing.assert_close(tasks[1].model.state_dict()[name], expected)


def test_weights_that_have_become_nan_are_not_saved_over_a_good_checkpoint(tmp_path):
    run = Run(config("engine=graph", "log_every=40", "checkpoint_every=4"), tmp_path / "run", quiet=True)
    advance = run.advance

    def diverging():
        if run.step == 6:  # as NaN gradients would
            run.task.opt.latent(run.task.model.conv2.weight).fill_(torch.nan)
        advance()

    run.advance = diverging
    with pytest.raises(RunError, match=r"at iteration 8; it begins in the weights. .* checkpoint in .* is intact"):
        run.train()
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 4
    assert all(bool(tensor.isfinite().all()) for tensor in state["model"].values())


def test_weight_decay_of_a_primal_form_is_left_to_the_plain_engine():
    with pytest.raises(Unsupported, match="weight decay by beta"):
        GraphEngine(build.task(config("weight_decay=0.01", method="md-tanh-bounded")), print)


def test_the_compiled_step_is_the_plain_one():
    assert_alike(lambda: build.task(config("compile=true")), steps=(7,))


COMPILED = """
import torch
from mirrorquant.train.compiling import compiled

images = torch.randn(8, 16, 8, 8, requires_grad=True)
loss = lambda x: torch.nn.functional.max_pool2d(x, 2).square().mean()
found, expected = (torch.autograd.grad(f(images), images)[0] for f in (compiled(loss, True, torch.device("cpu")), loss))
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
    apart, split = [], beside._Split.__call__

    def counting(self, graph):
        split(self, graph)
        apart.extend(node for node in graph.nodes if node.target is beside._op)

    monkeypatch.setattr(beside._Split, "__call__", counting)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, bias=False)]
    layers += [nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8, affine=False), nn.ReLU()]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 12, 12).contiguous(memory_format=torch.channels_last)

    def loss(images):
        return model(images).square().sum()

    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss(x), parameters)
    with beside.convolutions(), inductor.patch(force_disable_caches=True):  # or the graph might come from a file
        found = torch.autograd.grad(torch.compile(loss)(x), parameters)
        beside.join()
    assert len(apart) == 2  # the grouped convolution stays as it is
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
