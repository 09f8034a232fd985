"""What a step of mirror descent costs, in time and in memory, against the bare optimizer it wraps.

    python benchmarks/step_cost.py [--rounds 15] [--json FILE]

The tensors are the 22 of the paper's CIFAR ResNet-18 (11.2 million weights). In each round the bare Adam(foreach=True)
and a method around the same Adam take turns, in a process of their own; printed is the median over the
rounds of the ratio within one, so that a noisy machine slows both sides alike. The memory is counted from the
tensors that the optimizers hold, its growth from all tensors alive before and after the timed steps.
"""

import argparse
import gc
import itertools
import json
import multiprocessing
import platform
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import mirrorquant as mq

CHANNELS = [64, 64, 128, 256, 512]


def resnet18_shapes() -> list[tuple[int, ...]]:
    """The learnable tensors of ResNet-18 for 10 classes, batch norm without scale and shift."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3)]
    for before, width in itertools.pairwise(CHANNELS):
        shapes += [(width, before, 3, 3)] + [(width, width, 3, 3)] * 3
        shapes += [(width, before, 1, 1)] if width != before else []
    return [*shapes, (10, 512), (10,)]


def weights(device: torch.device) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(0.1 * torch.randn(shape, device=device)) for shape in resnet18_shapes()]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


def optimizer(name: str, device: torch.device) -> torch.optim.Optimizer:
    named = [(f"tensor {number}", p) for number, p in enumerate(weights(device))]
    base = torch.optim.Adam(named, lr=1e-3, foreach=True)
    if name == "bare":
        return base
    anneal = mq.schedules.ramp(1e-4) if name == "pq" else mq.schedules.geometric(1.02, every=200)
    return mq.MirrorDescent(base, method=name, anneal=anneal)


def tensors_held(opt: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state: the base optimizer's moments, and the latents."""
    base = opt.base if isinstance(opt, mq.MirrorDescent) else opt
    held = [v for state in base.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    held += [state["latent"] for state in opt.state.values() if "latent" in state]
    return sum(t.numel() * t.element_size() for t in held)


def resident() -> int:
    """Bytes of all tensors alive."""
    gc.collect()
    return sum(o.numel() * o.element_size() for o in gc.get_objects() if type(o) is torch.Tensor)


def measure(opt: torch.optim.Optimizer, steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        opt.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def compare(name: str, device: torch.device, rounds: int, steps: int) -> dict[str, object]:
    bare, opt = optimizer("bare", device), optimizer(name, device)
    measure(bare, 3, device), measure(opt, 3, device)
    before = resident()
    times = [(measure(bare, steps, device), measure(opt, steps, device)) for _ in range(rounds)]
    return {
        "method": name,
        "bare_ms": 1e3 * statistics.median(a for a, _ in times),
        "step_ms": 1e3 * statistics.median(b for _, b in times),
        "times_bare": statistics.median(b / a for a, b in times),
        "state_mb": tensors_held(opt) / 2**20,
        "latent_mb": sum(s["latent"].numel() * 4 for s in opt.state.values() if "latent" in s) / 2**20,
        "growth_mb": (resident() - before) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the figures are written")
    parser.add_argument("--methods", nargs="+", default=["bare", *mq.methods.names()])
    arguments = parser.parse_args()
    report = []
    for kind in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        chip = torch.cuda.get_device_name() if kind == "cuda" else cpu_name()
        print(f"\n{kind}: {chip}, torch {torch.__version__}, {torch.get_num_threads()} threads")
        columns = ["bare ms", "ms a step", "x bare", "state MiB", "latent MiB", "growth MiB"]
        print(f"{'method':14}" + "".join(f"{column:>12}" for column in columns))
        rows = []
        for name in arguments.methods:
            # A process each: what one optimizer leaves in the allocator would speed up the next.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                row = pool.submit(compare, name, torch.device(kind), arguments.rounds, arguments.steps).result()
            rows.append(row)
            print(f"{name:14}" + "".join(f"{value:12.2f}" for key, value in row.items() if key != "method"))
        report.append({"device": kind, "chip": chip, "torch": torch.__version__, "rows": rows})
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
