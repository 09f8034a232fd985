"""Packed layers beside what else runs them on this CPU: layer by layer, and a whole ResNet-18.

    python benchmarks/inference.py [--threads 1 2] [--rounds 11] [--only conv fc net] [--json FILE]

Everything of a row takes turns within one process; printed are medians and ratios of medians (above 1: packed is
faster), then the same for the fastest rounds, which others on the machine disturb less.

eager     F.conv2d in float32, the faster of NCHW and channels_last
frozen    torch.compile with freezing, channels_last
int8      oneDNN through torch.ops.quantized (activations already quantized)
ov-bin    OpenVINO's BinaryConvolution, weights of one bit, float32 input binarized by its FakeQuantize; where installed
W1A32     mirrorquant, binary weights and float32 activations
W1A1      mirrorquant, binary weights and binary activations, float32 in and out
"""

import argparse
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrorquant as mq
from mirrorquant import models
from mirrorquant.packing import kernels

BINARY = (-1.0, 1.0)
SHAPES = [  # channels, height and width, batch: the 3x3 convolutions of ResNet-18 on CIFAR (1 and 32) and on ImageNet
    *[(64, 32, 1), (128, 16, 1), (256, 8, 1), (512, 4, 1)],
    *[(64, 32, 32), (128, 16, 32), (256, 8, 32), (512, 4, 32)],
    *[(64, 56, 1), (128, 28, 1), (256, 14, 1), (512, 7, 1)],
]
PEERS = ("eager", "frozen", "int8", "ov-bin")
Calls = dict[str, Callable[[], Any]]


def measure(calls: Calls, rounds: int, least: float = 0.02) -> dict[str, dict[str, float]]:
    """Microseconds a call, medians and the fastest; the calls take turns, each for at least `least` seconds a round."""
    repeats = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, int(least / max(time.perf_counter() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append(1e6 * (time.perf_counter() - start) / repeats[name])
    found = {}
    for key, of in (("us", statistics.median), ("fastest_us", min)):
        values = {name: of(times[name]) for name in calls}
        if "nchw" in values:
            values["eager"] = min(values.pop("nchw"), values.pop("nhwc"))
        found[key] = values
    return found


def frozen(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    import torch._inductor.config

    torch._inductor.config.freezing = True
    torch._dynamo.reset()
    compiled = torch.compile(module.eval().to(memory_format=torch.channels_last))
    compiled(x), compiled(x)
    return lambda: compiled(x)


def onednn_int8(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    torch.backends.quantized.engine = "onednn"
    channels = weight.shape[0]
    quantized = torch.quantize_per_tensor(x, 0.05, 64, torch.quint8)
    zeros = torch.zeros(channels, dtype=torch.long)
    packed = torch.quantize_per_channel(weight.contiguous(), torch.ones(channels), zeros, 0, torch.qint8)
    packed = torch.ops.quantized.conv2d_prepack(packed, None, [1, 1], [1, 1], [1, 1], 1)
    return lambda: torch.ops.quantized.conv2d(quantized, packed, 1.0, 64)


def openvino_binary(x: Tensor, weight: Tensor, threads: int) -> Callable[[], Any] | None:
    try:
        import numpy as np
        import openvino as ov
    except ImportError:
        return None
    ops = ov.opset8
    image = ops.parameter(list(x.shape), np.float32)
    zero, one = (ov.op.Constant(np.full((1, 1, 1, 1), value, np.float32)) for value in (0, 1))
    bits = np.packbits((weight.numpy() > 0).astype(np.uint8).reshape(-1), bitorder="little")
    kernel = ov.op.Constant(ov.Tensor(bits, list(weight.shape), ov.Type.u1))
    signs = ops.fake_quantize(image, zero, zero, zero, one, 2)
    ones = [1, 1]
    convolution = ops.binary_convolution(signs, kernel, ones, ones, ones, ones, "xnor-popcount", 0.0)
    options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = ov.Core().compile_model(ov.Model([convolution], [image]), "CPU", options).create_infer_request()
    request.infer({0: x.numpy()})
    return request.infer


def convolutions(threads: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for channels, size, batch in SHAPES:
        x = torch.randn(batch, channels, size, size)
        last = x.to(memory_format=torch.channels_last)
        codes = torch.randint(0, 2, (channels, channels, 3, 3), dtype=torch.uint8)
        weight = 2 * codes.float() - 1
        weight_last = weight.to(memory_format=torch.channels_last)
        module = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        module.weight.data.copy_(weight)
        prepared = kernels.prepare(codes, BINARY)

        def packed(activation: str, x: Tensor = last, prepared: Tensor = prepared, codes: Tensor = codes) -> Tensor:
            return kernels.conv2d(x, prepared, shape=codes.shape, levels=BINARY, padding=(1, 1), activation=activation)

        calls: Calls = {
            "nchw": lambda x=x, weight=weight: F.conv2d(x, weight, padding=1),
            "nhwc": lambda x=last, weight=weight_last: F.conv2d(x, weight, padding=1),
            "frozen": frozen(module, last),
            "int8": onednn_int8(last, weight),
            "W1A32": lambda packed=packed: packed("float32"),
            "W1A1": lambda packed=packed: packed("binary"),
        }
        if peer := openvino_binary(x, weight, threads):
            calls["ov-bin"] = peer
        rows.append({"layer": f"{channels}ch {size}x{size} batch {batch}", **measure(calls, rounds)})
        show(rows[-1])
    return rows


def linears(threads: int, rounds: int, size: int = 4096) -> list[dict[str, Any]]:
    rows = []
    codes = torch.randint(0, 2, (size, size), dtype=torch.uint8)
    weight = 2 * codes.float() - 1
    prepared = kernels.prepare(codes, BINARY)
    for batch in (1, 16):
        x = torch.randn(batch, size)
        module = nn.Linear(size, size, bias=False)
        module.weight.data.copy_(weight)

        def packed(activation: str, x: Tensor = x) -> Tensor:
            return kernels.linear(x, prepared, shape=codes.shape, levels=BINARY, activation=activation)

        calls: Calls = {
            "eager": lambda x=x: F.linear(x, weight),
            "frozen": frozen(module, x),
            "W1A32": lambda packed=packed: packed("float32"),
            "W1A8": lambda packed=packed: packed("int8"),
            "W1A1": lambda packed=packed: packed("binary"),
        }
        rows.append({"layer": f"linear {size}x{size} batch {batch}", **measure(calls, rounds)})
        show(rows[-1])
    return rows


def networks(threads: int, rounds: int) -> list[dict[str, Any]]:
    net = models.resnet18().eval()
    for parameter in net.parameters():
        parameter.data = torch.where(torch.randn_like(parameter) < 0, -1.0, 1.0)
    with torch.no_grad():
        net.train()
        net(torch.randn(64, 3, 32, 32))  # batch norm's statistics, so that activations neither grow nor vanish
        net.eval()
    packed = mq.pack(net)
    rows = []
    for batch in (1, 32):
        x = torch.randn(batch, 3, 32, 32)
        last = x.to(memory_format=torch.channels_last)
        nhwc = models.resnet18().eval()
        nhwc.load_state_dict(net.state_dict())
        nhwc.to(memory_format=torch.channels_last)
        expected, got = net(x), packed(last)
        error = float((expected - got).abs().max() / expected.abs().max())
        calls: Calls = {
            "nchw": lambda x=x: net(x),
            "nhwc": lambda x=last, nhwc=nhwc: nhwc(x),
            "frozen": frozen(nhwc, last),
            "W1A32": lambda x=last: packed(x),
        }
        same = bool((expected.argmax(1) == got.argmax(1)).all())
        told = {"layer": f"ResNet-18 CIFAR batch {batch}", "error": error, "same_predictions": same}
        rows.append({**told, **measure(calls, rounds, least=0.05)})
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    for key in ("us", "fastest_us"):
        times = row[key]
        cells = [f"{name} {value:9.1f}" for name, value in times.items()]
        ratios = []
        for ours in (name for name in ("W1A32", "W1A8", "W1A1") if name in times):
            beside = (f"{times[peer] / times[ours]:.2f}x {peer}" for peer in PEERS if peer in times)
            ratios.append(f"{ours}: {', '.join(beside)}")
        name = row["layer"] if key == "us" else "  fastest round"
        print(f"{name:28} us: {'  '.join(cells)}   {'   '.join(ratios)}", flush=True)


def means(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """Geometric means of the ratios over the rows."""
    result: dict[str, dict[str, float]] = {}
    for ours in ("W1A32", "W1A1"):
        for peer in PEERS:
            ratios = [row[key][peer] / row[key][ours] for row in rows if peer in row[key] and ours in row[key]]
            if ratios:
                result.setdefault(ours, {})[peer] = math.exp(statistics.fmean(map(math.log, ratios)))
    return result


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", nargs="+", choices=["conv", "fc", "net"], default=["conv", "fc", "net"])
    parser.add_argument("--json", type=Path, help="where the figures are written")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "kernels": kernels.describe(),
        "threads": {},
    }
    print(f"{report['cpu']}, torch {torch.__version__}\n{report['kernels']}")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{threads} thread{'s' if threads > 1 else ''}")
        part: dict[str, Any] = {}
        with torch.inference_mode():
            if "conv" in arguments.only:
                part["convolutions"] = convolutions(threads, arguments.rounds)
                for name, key in (("geometric_means", "us"), ("geometric_means_of_the_fastest", "fastest_us")):
                    part[name] = means(part["convolutions"], key)
                    for ours, ratios in part[name].items():
                        told = ", ".join(f"{value:.2f}x {peer}" for peer, value in ratios.items())
                        print(f"{name.replace('_', ' ')}, {ours}: {told}")
            if "fc" in arguments.only:
                part["linear"] = linears(threads, arguments.rounds)
            if "net" in arguments.only:
                part["networks"] = networks(threads, arguments.rounds)
        report["threads"][str(threads)] = part
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
