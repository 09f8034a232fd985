"""What only a GPU shows: capture, resume, fallback and the Triton kernel. Skipped without CUDA.

    python -m unittest discover -v -s tests/gpu -t .

Needs nothing but the package's own dependencies; pytest collects it too.
"""

import copy
import os
import signal
import tempfile
import unittest
from pathlib import Path

import torch
from torch import nn

import mirrorquant as mq
from mirrorquant.train import Config, EngineError, Interrupted, Run, build
from mirrorquant.train.engine import PlainEngine, choose
from mirrorquant.train.graph import GraphEngine

RECIPE = "digits/digitsnet/binary/md-tanh-s"
BASIC = ["device=cuda", "precision=float32", "iterations=60", "eval_every=20", "log_every=5", "checkpoint_every=20"]
# Batch norm makes a layer's scale meaningless: its gradient is rounding error, which Adam turns into whole steps.
BASIC += ["scale="]
MIXED = "augment=crop-flip cutout=3 mixup=0.5 cutmix=1.0 alternating_flip=true label_smoothing=0.1 logit_scale=0.5"
PQ, PARTS = "method=pq-levels levels=ternary pq_rate=0.01", "accumulate=4"


def task(*overrides):
    return build.task(Config.from_recipe(RECIPE, [*BASIC, *overrides]))


def state(engine):
    """Weights, latents, scales and statistics by name, in double precision."""
    engine.sync()
    model, opt = engine.task.model, engine.task.opt
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, p in model.named_parameters():
        tensors |= {f"{name} {key}": value for key, value in opt.state.get(p, {}).items()}
    return {name: tensor.detach().double().clone() for name, tensor in tensors.items()}


class Clip(mq.Method):
    """A user's own method."""

    def project(self, latent, beta):
        return (beta * latent).clamp(self.levels[0], self.levels[-1])


class Centred(mq.Method):
    """Not elementwise."""

    def project(self, latent, beta):
        return torch.tanh(beta * (latent - latent.mean()))


def perceptron():
    """A network without batch norm, so that scales have gradients."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


class Reading(nn.Module):
    """A network that reads a value back in its forward pass, which no CUDA graph can hold."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.fc(x if float(x.sum()) > -1e9 else -x)


@unittest.skipUnless(torch.cuda.is_available(), "needs CUDA")
class OnCuda(unittest.TestCase):
    """Each step is compared with the plain engine's from the same state, since rounding errors grow with Adam."""

    def setUp(self):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def assert_captured_steps_are_plain(self, make):
        graph, plain = GraphEngine(make(), self.fail), PlainEngine(make())
        for k in range(12):
            graph.step(k)
        self.assertIsNotNone(graph.graph)
        graph.sync()
        plain.task.opt.load_state_dict(copy.deepcopy(graph.task.opt.state_dict()))
        plain.task.model.load_state_dict(graph.task.model.state_dict())
        before = state(plain)
        graph.losses.zero_()
        for engine in (graph, plain):
            engine.step(12)
        self.assertAlmostEqual(float(graph.losses), float(plain.losses), delta=1e-3 * float(plain.losses))
        found, expected = state(graph), state(plain)
        for name, after in expected.items():
            error, way = (found[name] - after).norm(), (after - before[name]).norm()
            self.assertLessEqual(float(error), 2e-2 * float(way) + 1e-9, name)
        score, rounded = graph.score(), PlainEngine(graph.task).score()
        self.assertAlmostEqual(score[0], rounded[0], delta=0.6)
        self.assertIsNotNone(graph.validation.graph)

    def test_captured_steps_are_the_plain_engines(self):
        for changed in (
            "",
            "method=md-softmax-s",
            "method=gd-tanh",
            "optimizer=adamw weight_decay=0.1",
            "levels=ternary scale=tensor",
            "scale=tensor-fixed",
            MIXED,
            PQ,
            PARTS,
        ):
            with self.subTest(changed):
                self.assert_captured_steps_are_plain(lambda changed=changed: task(*changed.split()))

    def test_momentum_and_nesterov(self):
        changed = "optimizer=sgd lr=0.01 momentum=0.9 nesterov=true"
        self.assert_captured_steps_are_plain(lambda: task(*changed.split()))

    def test_learnt_scales_are_captured(self):
        for scale in ("tensor-learnt", "channel-learnt"):
            with self.subTest(scale):
                changed = ["model=tests.gpu.test_cuda:perceptron", f"scale={scale}"]
                self.assert_captured_steps_are_plain(lambda changed=changed: task(*changed))

    def test_custom_methods_and_scales_are_captured(self):
        scaled = mq.methods.MDTanhS(mq.levels.auto(per="channel", how="computed"))
        for method in (Clip(), Centred(), scaled):

            def make(method=method):
                made = task()
                base = torch.optim.Adam(mq.split(made.model, everything=True), lr=0.01)
                object.__setattr__(made, "opt", mq.MirrorDescent(base, method, anneal=mq.schedules.until(60)))
                return made

            with self.subTest(type(method).__name__):
                self.assert_captured_steps_are_plain(make)

    def stopped(self, config, name, steps):
        """The folder of a run that a signal stopped after some steps."""
        run = Run(config, self.folder / name, quiet=True)
        advance = run.advance

        def advance_and_stop():
            advance()
            if run.step == steps:
                os.kill(os.getpid(), signal.SIGTERM)

        run.advance = advance_and_stop
        with self.assertRaises(Interrupted):
            run.train()
        return self.folder / name

    def test_a_stopped_run_resumes(self):
        config = Config.from_recipe(RECIPE, BASIC)
        whole = Run(config, self.folder / "whole", quiet=True)
        whole.train()
        resumed = Run.resume(self.stopped(config, "run", 30), quiet=True)
        summary = resumed.train()
        self.assertEqual(resumed.engine.name, "graph")
        self.assertIn("continuing after iteration 30", resumed.messages)
        self.assertEqual(summary["parameters"]["bits"], 1.0)
        self.assertEqual(resumed.task.opt.beta, whole.task.opt.beta)
        elsewhere = Run.resume(self.stopped(config, "moved", 10), ["device=cpu"], quiet=True)
        elsewhere.train()
        self.assertEqual(elsewhere.engine.name, "plain")

    def test_a_step_that_cannot_be_captured_falls_back_or_is_an_error(self):
        def make():
            made = task("compile=false")
            model = Reading().cuda()
            base = torch.optim.Adam(mq.split(model), lr=0.01)
            object.__setattr__(made, "model", model)
            object.__setattr__(made, "opt", mq.MirrorDescent(base))
            return made

        messages = []
        engine, plain = choose(make(), "auto", messages.append), PlainEngine(make())
        torch.manual_seed(0)
        plain.task.opt.load_state_dict(copy.deepcopy(engine.task.opt.state_dict()))
        plain.task.model.load_state_dict(engine.task.model.state_dict())
        for k in range(8):
            engine.step(k)
            plain.step(k)
        self.assertEqual(engine.name, "plain")
        self.assertIn("cannot be captured", messages[0])
        for p, q in zip(engine.task.model.parameters(), plain.task.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-2)
        strict = choose(make(), "graph", self.fail)
        with self.assertRaisesRegex(EngineError, "engine=graph cannot train this"):
            for k in range(8):
                strict.step(k)

    def test_packed_linear_layers_are_exact(self):
        """Inputs are small integers, so that every sum is exact in any order."""
        for levels in (mq.BINARY, mq.TERNARY):
            for rows in (1, 3, 16, 40):
                with self.subTest(levels=levels, rows=rows):
                    layer = nn.Linear(700, 300).requires_grad_(False)
                    q = torch.tensor(levels)
                    layer.weight.copy_(q[torch.randint(len(levels), layer.weight.shape)])
                    layer.bias.copy_(torch.randint(-3, 4, layer.bias.shape).float())
                    x = torch.randint(-4, 5, (rows, 700)).float()
                    packed = mq.pack(nn.Sequential(layer)).cuda()
                    self.assertTrue(torch.equal(packed(x.cuda()).cpu(), layer(x)))
                    half = packed(x.cuda().bfloat16()).float().cpu()
                    torch.testing.assert_close(half, layer(x), rtol=2**-7, atol=0.5)

    def test_packed_linear_layers_are_captured(self):
        """Also with more rows than the Triton kernel takes, whose weights are unpacked in each call."""
        layer = nn.Linear(700, 300).requires_grad_(False)
        layer.weight.sign_()
        packed = mq.pack(nn.Sequential(layer)).cuda().network
        for dtype, rows in ((torch.float32, 3), (torch.float32, 40), (torch.float16, 3)):
            with self.subTest(dtype=dtype, rows=rows), torch.no_grad():
                x = torch.zeros(rows, 700, dtype=dtype, device="cuda")
                packed(x)  # compiles the kernel
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = packed(x)
                x.normal_()
                graph.replay()
                torch.testing.assert_close(y, packed(x))


if __name__ == "__main__":
    unittest.main()
