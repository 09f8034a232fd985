"""Where the time of a training step goes: microseconds per step of each kernel, by kind.

    python benchmarks/step_kernels.py [--recipe NAME] [--steps 50] [--top 25] [--json FILE] [key=value ...]

Trains as ``mirrorquant train`` does, and profiles steps that are only replayed. Kernels that run beside each other both
count in full, so their sum may exceed the time of a step.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from train_paths_agree import started

WARM_UP = 20
KINDS = {  # the first whose word is in a kernel's name
    "gradient of a convolution's weight": ("wgrad",),
    "gradient of a convolution's input": ("dgrad",),
    "convolution": ("fprop", "conv", "implicit", "winograd"),
    "matrix product": ("gemm", "matmul", "addmm", "nvjet", "cutlass"),
    "compiled, with reductions": ("triton_red", "triton_per"),
    "compiled, elementwise": ("triton_poi", "triton_for"),
    "copies": ("memcpy", "memset", "copy", "fill"),
}


def kind(name: str) -> str:
    """The kind of a kernel by its name."""
    found = (kind for kind, words in KINDS.items() if any(word in name.lower() for word in words))
    return next(found, "others")


def kernels(recipe: str, overrides: list[str], steps: int) -> tuple[float, dict[str, tuple[float, float]]]:
    """Seconds per step without the profiler; microseconds and calls per step of each kernel."""
    with started(recipe, overrides) as run:
        on_cuda = run.task.device.type == "cuda"
        wait = torch.cuda.synchronize if on_cuda else lambda: None
        for _ in range(WARM_UP):
            run.advance()
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            run.advance()
        wait()
        seconds = (time.perf_counter() - began) / steps
        with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiled:
            for _ in range(steps):
                run.advance()
            wait()
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for row in profiled.key_averages():
            us = row.self_device_time_total if on_cuda else row.self_cpu_time_total
            found[row.key][0] += us / steps
            found[row.key][1] += row.count / steps
    return seconds, {name: (us, calls) for name, (us, calls) in found.items() if us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10/resnet18/binary/md-tanh-s")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--top", type=int, default=25, help="kernels to list")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    seconds, found = kernels(arguments.recipe, arguments.overrides, arguments.steps)
    kinds: dict[str, float] = defaultdict(float)
    for name, (us, _) in found.items():
        kinds[kind(name)] += us
    print(f"{arguments.recipe}: {1e6 * seconds:.0f} us per step, {sum(kinds.values()):.0f} us in kernels")
    for name, us in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"{us:9.1f} us  {name}")
    print()
    ranked = sorted(found.items(), key=lambda item: -item[1][0])
    for name, (us, calls) in ranked[: arguments.top]:
        print(f"{us:9.1f} us  {calls:5.1f} calls  {name[:100]}")
    if arguments.json:
        chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        content = {"trained": arguments.recipe, "overrides": arguments.overrides, "chip": chip, "us": 1e6 * seconds}
        arguments.json.write_text(json.dumps({**content, "kinds": kinds, "kernels": dict(ranked)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
