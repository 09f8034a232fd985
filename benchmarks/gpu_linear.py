"""The packed linear layer on an NVIDIA GPU: right, and how fast beside F.linear.

    PYTHONPATH=src python benchmarks/gpu_linear.py [--size 4096] [--json FILE]

Prints JSON. `error` is max|y - y64| over max(sum|x|), y64 in float64; times are medians of CUDA-graph replays, in
microseconds a call, so that launches do not count.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from mirrorquant.packing import kernels
from mirrorquant.packing.kernels import gpu
from mirrorquant.packing.kernels.layer import Epilogue, Geometry

CALLS = 20


def microseconds(call: Callable[[], torch.Tensor], rounds: int = 30) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def check() -> list[dict[str, object]]:
    """Every combination of levels, epilogue, type and odd sizes, against float64."""
    cases = []
    torch.manual_seed(0)
    for levels in ((-1.0, 1.0), (-1.0, 0.0, 1.0), (-0.25, 0.25), (0.0, 1.0)):
        for outputs, inputs, rows in (
            (4096, 4096, 1),
            (10, 513, 3),
            (1000, 777, 16),
            (65, 64, 5),
            (33, 2048, 40),
            (7, 30, 2),
        ):
            codes = torch.randint(0, len(levels), (outputs, inputs), dtype=torch.uint8, device="cuda")
            prepared = kernels.prepare(codes, levels)
            weight = torch.tensor(levels, dtype=torch.float64, device="cuda")[codes.long()]
            scale, shift = torch.rand(outputs, device="cuda"), torch.randn(outputs, device="cuda")
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
                residual = torch.randn(rows, outputs, device="cuda", dtype=dtype)
                y = kernels.linear(
                    x,
                    prepared,
                    shape=codes.shape,
                    levels=levels,
                    scale=scale,
                    shift=shift,
                    residual=residual,
                    relu=True,
                )
                exact = ((x.double() @ weight.T) * scale + shift + residual).relu()
                error = float((y.double() - exact).abs().max() / x.double().abs().sum(-1).max())
                right = error < (2e-6 if dtype == torch.float32 else 1e-2)
                cases.append(
                    {
                        "levels": levels,
                        "shape": [outputs, inputs],
                        "rows": rows,
                        "dtype": str(dtype),
                        "error": error,
                        "right": right,
                    }
                )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="where the figures are written")
    arguments = parser.parse_args()
    size, levels = arguments.size, (-1.0, 1.0)
    cases = check()
    codes = torch.randint(0, 2, (size, size), dtype=torch.uint8, device="cuda")
    prepared = kernels.prepare(codes, levels)
    times = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = (2 * codes.to(dtype) - 1).contiguous()
        for rows in (1, 2, 4, 8, 16):
            x = torch.randn(rows, size, device="cuda", dtype=dtype)
            float_us = microseconds(lambda x=x, weight=weight: F.linear(x, weight))
            packed_us = microseconds(lambda x=x: gpu.linear(x, prepared, Geometry((size, size), levels), Epilogue()))
            times.append(
                {
                    "dtype": str(dtype),
                    "rows": rows,
                    "float_us": round(float_us, 2),
                    "packed_us": round(packed_us, 2),
                    "ratio": round(float_us / packed_us, 2),
                }
            )
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "size": size,
        "all_right": all(case["right"] for case in cases),
        "wrong": [case for case in cases if not case["right"]],
        "largest_error_float32": max(case["error"] for case in cases if case["dtype"] == "torch.float32"),
        "times": times,
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
