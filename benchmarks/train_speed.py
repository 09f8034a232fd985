"""How fast training is: iterations per second of each path, the optimizer's step alone, and the floor.

    python benchmarks/train_speed.py [--recipe NAME] [--json FILE] [key=value ...]

Needs CUDA. Each path trains the recipe (ResNet-18, batch 128, MD-tanh-S by default) as ``mirrorquant train`` does,
without evaluation. The graph engine is timed with other optimizers and methods too, among them one that is not the
library's own, and with the gradients of the weights on the main stream. The optimizers take their steps over
ResNet-18's 22 tensors inside a CUDA graph, so that the launches of small kernels cost neither side. The floor is the
arithmetic of the convolutions at the rate of a large bfloat16 matrix product on the same GPU, and for the optimizer the
bytes that it must move at the rate of a large copy.
"""

import argparse
import json
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from step_cost import weights
from torch import nn
from train_paths_agree import PATHS

import mirrorquant as mq
from mirrorquant.mirrors import Beta
from mirrorquant.train import Config, Run, beside, build
from mirrorquant.train.graph import GraphEngine
from mirrorquant.train.process import settings

EVERY = {
    **PATHS,
    "graph, AdamW": ["engine=graph", "optimizer=adamw", "weight_decay=0.1"],
    "graph, user-tanh": ["engine=graph", "method=user-tanh"],
    "graph, MD-softmax-S": ["engine=graph", "method=md-softmax-s"],
    "graph, one stream": ["engine=graph"],
}


def timed(function: Callable[[], object], repeats: int = 20, rounds: int = 5) -> float:
    """Median seconds of a call, by device events."""
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def captured(function: Callable[[], object]) -> Callable[[], None]:
    """The function as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def path_speed(recipe: str, overrides: list[str], steps: int) -> dict[str, float]:
    """Iterations a second of a path, its start-up time and its memory."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Config.from_recipe(recipe, overrides), Path(folder) / "run", quiet=True)
        with settings(run.config, run.task.device):
            began = time.perf_counter()
            for _ in range(10):
                run.advance()
            torch.cuda.synchronize()
            startup = time.perf_counter() - began
            times = []
            for _ in range(3):
                began = time.perf_counter()
                for _ in range(steps):
                    run.advance()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began) / steps)
            assert bool(torch.isfinite(run.engine.losses))
        run.folder.release()
        print("".join(f"  {message}\n" for message in run.messages), end="")
    memory = torch.cuda.max_memory_allocated() / 2**20
    return {"iterations_per_second": 1 / statistics.median(times), "startup_s": startup, "memory_mib": memory}


class UserTanh(mq.Method):
    """MD-tanh-S as a user would write it."""

    name = "user-tanh"

    def project(self, latent: torch.Tensor, beta: Beta) -> torch.Tensor:
        return torch.tanh(beta * latent)


def optimizer_step(recipe: str, method: str | None, overrides: list[str]) -> float:
    """Seconds of fused Adam on float32 tensors, or of a method's update in the graph engine."""
    if method is None:
        base = torch.optim.Adam(weights(torch.device("cuda")), lr=1e-3, fused=True, capturable=True)
        return timed(captured(base.step))
    engine = GraphEngine(build.task(Config.from_recipe(recipe, [*overrides, f"method={method}"])), print)
    engine._fill_knobs(0)
    grads = [[torch.randn_like(w) for w in part.weights.values()] for part in engine.moving]

    @torch.no_grad()
    def step() -> None:
        for part, own in zip(engine.moving, grads, strict=True):
            part.take_gradients(own)
        engine._move()

    return timed(captured(step))


def floor(recipe: str) -> dict[str, float]:
    """The arithmetic of an iteration, and the two ceilings of the GPU."""
    config = Config.from_recipe(recipe, ["device=cpu"])
    model, operations = build.model(config, 10, 3), 0

    def count(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal operations
        operations += 3 * 2 * output.numel() * module.weight[0].numel()  # forward, and two products backward

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    model.eval()(torch.zeros(1, 3, 32, 32))
    operations *= config["batch_size"]
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * 8192**3 / timed(captured(lambda: a @ b))
    big = torch.randn(2**30, device="cuda")
    other = torch.empty_like(big)
    copy = 8 * 2**30 / timed(lambda: other.copy_(big), 5)
    return {
        "gflop": operations / 1e9,
        "matrix_tflops": flops / 1e12,
        "copy_tb_per_s": copy / 1e12,
        "iterations_per_second": flops / operations,
        "fused_adam_us": 1e6 * 28 * sum(p.numel() for p in model.parameters()) / copy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10/resnet18/binary/md-tanh-s")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--methods", nargs="+", default=["md-tanh-s", "bc", "gd-tanh", "md-tanh", "md-softmax-s"])
    parser.add_argument("--paths", nargs="*", default=list(EVERY), choices=list(EVERY))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    overrides = [text for text in arguments.overrides if not text.startswith("data_root=")]
    report: dict[str, object] = {"trained": arguments.recipe, "overrides": overrides}
    report |= {"chip": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{arguments.recipe}, {report['chip']}, torch {torch.__version__}")

    def keep() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")

    report["floor"] = limits = floor(arguments.recipe)
    print("floor     " + "  ".join(f"{key} {value:.4g}" for key, value in limits.items()))
    report["paths"] = rows = {}
    for path in arguments.paths:
        together = (
            unittest.mock.patch.object(beside, "convolutions", nullcontext) if "stream" in path else nullcontext()
        )
        with together:
            rows[path] = path_speed(arguments.recipe, [*EVERY[path], *arguments.overrides], arguments.steps)
        print(f"{path:18} " + "  ".join(f"{key} {value:.4g}" for key, value in rows[path].items()), flush=True)
        keep()
    adam = optimizer_step(arguments.recipe, None, [])
    report["optimizer_us"] = steps = {"fused adam": 1e6 * adam}
    for method in arguments.methods:
        steps[method] = 1e6 * optimizer_step(arguments.recipe, method, arguments.overrides)
        keep()
    for method, us in steps.items():
        print(f"step of {method:14} {us:7.1f} us  {us / steps['fused adam']:.2f} x fused Adam")


if __name__ == "__main__":
    main()
