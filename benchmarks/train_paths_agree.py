"""Do the plain, the compiled and the graph path of training give the same loss curve?

    python benchmarks/train_paths_agree.py [key=value ...] [--recipe NAME] [--steps 200] [--json FILE]

Each path trains from the same seed on the same batches, in float32 (without TF32) and in bfloat16 autocast, twice:

*led*: every other step begins in the plain path's state. Its loss shows the forward pass, and the loss of the step
after it what the path's own update did, all along the curve. These losses must agree one by one.

*free*: each path goes its own way. Adam divides a gradient by its own size, so that rounding errors grow within a few
steps, until the curves differ as two runs of the plain path do (convolutions on CUDA sum in no fixed order). ``plain
again`` is that yardstick; means over 20 steps must agree within the tolerance.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mirrorquant.train import Config, Run
from mirrorquant.train.process import settings

PATHS = {
    "plain": ["engine=plain", "compile=false"],
    "compiled": ["engine=plain", "compile=true"],
    "graph": ["engine=graph", "compile=true"],
}
TOLERANCE = {"float32": (1e-3, 0.05), "bfloat16": (2e-2, 0.05)}
"""Largest difference relative to the loss: led, of each step; free, of means over 20 steps. Adam's first step takes the
signs of the gradients, many of which bfloat16 cannot tell: the loss after it differs most, by 0.2 to 1.1 %."""


@contextmanager
def started(recipe: str, overrides: list[str]) -> Iterator[Run]:
    """A run that stands at its first step, in a folder that goes when it does."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Config.from_recipe(recipe, overrides), Path(folder) / "run", quiet=True)
        try:
            with settings(run.config, run.task.device):
                yield run
        finally:
            run.folder.release()
            print("".join(f"  {message}\n" for message in run.messages), end="")


def step(run: Run) -> float:
    """One training step, and its loss."""
    run.engine.losses.zero_()
    run.advance()
    return float(run.engine.losses)


@torch.no_grad()
def take_over(run: Run, leader: Run) -> None:
    """Copies weights, latents, moments and batch-norm statistics, each into the tensor that is there."""
    mine, theirs = (
        {**dict(r.task.model.named_parameters()), **dict(r.task.model.named_buffers())} for r in (run, leader)
    )
    for name, tensor in theirs.items():
        mine[name].copy_(tensor)
    moved = [[t for group in r.task.opt.base.param_groups for t in group["params"]] for r in (run, leader)]
    for tensor, other in zip(*moved, strict=True):
        tensor.copy_(other)
        for key, value in leader.task.opt.base.state[other].items():
            if key != "step" and value is not None:
                run.task.opt.base.state[tensor][key].copy_(value)
    for name, weight in run.engine.weights.items() if run.engine.name == "graph" else ():
        weight.detach().copy_(mine[name])


def free(recipe: str, steps: int, overrides: list[str]) -> list[float]:
    """The losses of a path that goes its own way."""
    with started(recipe, overrides) as run:
        return [step(run) for _ in range(steps)]


def led(recipe: str, steps: int, overrides: list[str], leading: list[str]) -> tuple[list[float], list[float]]:
    """The losses of a path that takes over the plain path's state every other step, and the plain path's own."""
    found, expected = [], []
    with started(recipe, leading) as leader, started(recipe, overrides) as run:
        for _ in range(steps):
            if run.step and run.step % 2 == 0:
                run.engine.sync()  # moments and latents are views of the engine's own from here on
                take_over(run, leader)
            found.append(step(run))
            expected.append(step(leader))
    return found, expected


def difference(curve: list[float], expected: list[float], width: int) -> float:
    """The largest relative difference of means over ``width`` steps."""
    a, b = (torch.tensor(c, dtype=torch.float64)[: len(c) // width * width].view(-1, width) for c in (curve, expected))
    return float(((a.mean(1) - b.mean(1)).abs() / b.mean(1)).max())


def compare(recipe: str, steps: int, precision: str, overrides: list[str]) -> dict[str, object]:
    """All paths in one precision."""
    options = {path: [f"precision={precision}", *own, *overrides] for path, own in PATHS.items()}
    curves = {path: free(recipe, steps, own) for path, own in options.items()}
    curves["plain again"] = free(recipe, steps, options["plain"])
    found: dict[str, dict[str, float]] = {}
    for path, curve in curves.items():
        found[path] = {"free": difference(curve, curves["plain"], 20)}
        if path in options:
            found[path]["led"] = difference(*led(recipe, steps, options[path], options["plain"]), 1)
        text = "  ".join(f"{way} {value:.1e}" for way, value in found[path].items())
        print(f"{precision:9} {path:12} last loss {curve[-1]:.5f}  {text}", flush=True)
    one, many = TOLERANCE[precision]
    agree = all(row.get("led", 0.0) <= one and row["free"] <= many for row in found.values())
    return {"precision": precision, "agree": agree, "differences": found, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="data=synthetic:3x32x32:10, say")
    parser.add_argument("--recipe", default="cifar10/resnet18/binary/md-tanh-s")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"], choices=list(TOLERANCE))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{arguments.recipe}, {arguments.steps} steps, {chip}, torch {torch.__version__}")
    report = {"trained": arguments.recipe, "steps": arguments.steps, "chip": chip, "torch": torch.__version__}
    rows: list[dict[str, object]] = []
    for precision in arguments.precisions:
        rows.append(compare(arguments.recipe, arguments.steps, precision, arguments.overrides))
        if arguments.json:
            arguments.json.write_text(json.dumps({**report, "tolerance": TOLERANCE, "rows": rows}) + "\n")
    print("the paths agree" if all(row["agree"] for row in rows) else "THE PATHS DIFFER")


if __name__ == "__main__":
    main()
