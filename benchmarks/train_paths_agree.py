"""Do the plain, the compiled and the graph path of training give the same loss curve?

    python benchmarks/train_paths_agree.py [--recipe NAME] [--steps 200] [--json FILE]

Each path trains from the same seed on the same batches, in float32 (without TF32) and in bfloat16 autocast. In
float32 the curves part only by the order of sums; training amplifies that, so the tolerance grows along the curve. In
bfloat16 the paths round at other places: there the curves are compared after smoothing over 20 steps.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from mirrorquant.train.config import Config
from mirrorquant.train.loop import Run

PATHS = {
    "plain": ["engine=eager", "compile=false"],
    "compiled": ["engine=eager", "compile=true"],
    "graph": ["engine=graph", "compile=true"],
}
TOLERANCE = {"float32": (0.002, 0.03), "bfloat16": (0.02, 0.06)}
"""Largest difference of the first 20 losses, and of the smoothed curve, relative to the loss."""


def losses(recipe: str, steps: int, overrides: list[str]) -> list[float]:
    """The loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config.from_recipe(recipe, [f"iterations={steps}", "log_every=1", *overrides])
        run = Run(config, Path(folder) / "run", quiet=True)
        curve = []
        for _ in range(steps):
            run.losses.zero_()
            if run.engine == "graph":
                run._fast_step()
            else:
                run.losses += run._train_step()
            run.step += 1
            curve.append(float(run.losses))
        run.lock.release()
        print("".join(f"  {message}\n" for message in run.messages), end="")
        return curve


def difference(curve: list[float], expected: list[float]) -> tuple[float, float]:
    """The largest relative difference of the first 20 losses, and of means of 20 over the whole curve."""
    a, b = torch.tensor(curve, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    early = ((a - b).abs() / b)[:20].max()
    means = [t[: len(t) // 20 * 20].view(-1, 20).mean(1) for t in (a, b)]
    return float(early), float(((means[0] - means[1]).abs() / means[1]).max())


def compare(recipe: str, steps: int, precision: str, overrides: list[str]) -> dict[str, object]:
    """All paths in one precision."""
    curves = {p: losses(recipe, steps, [f"precision={precision}", *o, *overrides]) for p, o in PATHS.items()}
    found = {path: difference(curve, curves["plain"]) for path, curve in curves.items()}
    agree = all(d <= t for pair in found.values() for d, t in zip(pair, TOLERANCE[precision], strict=True))
    for path, (early, smooth) in found.items():
        print(f"{precision:9} {path:9} last loss {curves[path][-1]:.5f}  first 20 {early:.2e}  smoothed {smooth:.2e}")
    return {"precision": precision, "agree": agree, "differences": found, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10/resnet18/binary/md-tanh-s")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"], choices=list(TOLERANCE))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="data=synthetic:3x32x32:10, say")
    arguments = parser.parse_args()
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{arguments.recipe}, {arguments.steps} steps, {chip}, torch {torch.__version__}")
    rows = [compare(arguments.recipe, arguments.steps, p, arguments.overrides) for p in arguments.precisions]
    print("the paths agree" if all(row["agree"] for row in rows) else "THE PATHS DIFFER")
    if arguments.json:
        report = {"recipe": arguments.recipe, "steps": arguments.steps, "chip": chip, "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**report, "tolerance": TOLERANCE, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
