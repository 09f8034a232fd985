"""How much of its time a GPU trains, rather than waits for images that are streamed from files or from their cache.

    python benchmarks/streamed_training.py [--data-root data] [--cache FOLDER] [--json FILE] [key=value ...]

Needs CUDA and Imagenette. Trains a binary ResNet-18 at 224×224 with the graph engine: with one batch again and again,
which is as fast as the GPU can be, and with batches as they come. The ratio of the two rates is the share of the time
in which the GPU is busy. Rounds take turns; printed are medians.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from mirrorquant.train import Config, build
from mirrorquant.train.graph import GraphEngine
from mirrorquant.train.process import settings


def rate(engine: GraphEngine, first: int, steps: int) -> float:
    """Images per second over some steps."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for k in range(first, first + steps):
        engine.step(k)
    torch.cuda.synchronize()
    return steps * engine.task.loader.batch_size / (time.perf_counter() - began)


def measure(config: Config, steps: int, rounds: int) -> dict[str, object]:
    """Medians of images per second, with one batch and with all."""
    task = build.task(config)
    engine = GraphEngine(task, print)
    feed, k = engine.feed, 0
    for k in range(2 * steps):  # compiles, captures, and fills the queue of batches
        engine.step(k)
    rates: dict[str, list[float]] = {"one batch": [], "streamed": []}
    for _ in range(rounds):
        streamed, feed.look_ahead, feed.ready = feed.look_ahead, lambda k: setattr(feed, "ready", k), k + 1
        rates["one batch"].append(rate(engine, k + 1, steps))
        feed.look_ahead, feed.ready = streamed, -1
        k += steps
        feed.look_ahead(k + 1)
        rates["streamed"].append(rate(engine, k + 1, steps))
        k += steps
    task.close()
    found = {name: statistics.median(values) for name, values in rates.items()}
    return {**found, "busy": found["streamed"] / found["one batch"], "rounds": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--cache", default="")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    given = [f"data_root={options.data_root}", "batch_size=256", *options.overrides]
    report: dict[str, object] = {"chip": torch.cuda.get_device_name(), "torch": torch.__version__}
    report |= {"cores": os.cpu_count(), "overrides": list(options.overrides)}
    for name, extra in {"files": [], **({"cache": [f"cache={options.cache}"]} if options.cache else {})}.items():
        config = Config.from_recipe("imagenette/resnet18/binary/md-tanh-s", [*given, *extra])
        with settings(config, torch.device("cuda")):
            report[name] = found = measure(config, options.steps, options.rounds)
        print(
            f"{name:6} {found['one batch']:8.0f} images/s with one batch, {found['streamed']:8.0f} streamed, "
            f"busy {found['busy']:.1%}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
