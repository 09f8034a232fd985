"""How fast photographs become training batches: decoders side by side, then whole pipelines against the plain way.

    python benchmarks/input_pipeline.py FOLDER [--sides 224x224 500x375 500x375@99] [--rounds 5] [--json FILE]

FOLDER has train/<class>/*.JPEG. From it come sets of photographs of one size each: `--sides WIDTHxHEIGHT@QUALITY`
resizes them into a temporary folder (quality 90 if left out). An average file of ImageNet has about 500x375 pixels and
110 kB; an enlarged photograph is smooth and has fewer bytes, which a quality of 99 nearly makes up for.

Decoders: images per second of processor time on one core, from bytes in memory to an array; those that scale decode a
photograph no larger than needed for 112 pixels per side. Pipelines: images per second of wall time from files to
batches of 224x224 with two worker processes, ours against torch's DataLoader with pillow and one image at a time. All
take turns in short rounds, so that a busy machine slows them alike; printed are medians over the rounds, and of the
ratio to the plain way within a round. Processor time is that of the workers as well.
"""

import argparse
import functools
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from mirrorquant.data import Data, Photos, StreamedLoader, cached, decoding, load

WORKERS, BATCH, STEPS, SIZE, SCALED = 2, 64, 24, 224, 112
PREFETCH = 2 * WORKERS  # batches in flight


def photographs(folder: Path, sides: str, count: int, target: Path) -> Data:
    """A data set of some photographs, resized."""
    (width, height), quality = sides.partition("@")[0].split("x"), int(sides.partition("@")[2] or 90)
    paths = sorted((folder / "train").glob("*/*.*"))
    for number, path in enumerate(random.Random(0).sample(paths, count)):
        image = Image.open(path).convert("RGB").resize((int(width), int(height)), Image.Resampling.BICUBIC)
        for split in ("train", "val"):
            place = target / split / path.parent.name / f"{number:05}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            if split == "train" or number < 100:
                image.save(place, quality=quality)
    for empty in [each for each in (target / "val").iterdir() if not any(each.iterdir())]:
        empty.rmdir()
    return load(f"photos:{target}")


# Decoders ------------------------------------------------------------------------------------------------------------


def decoders() -> dict[str, Callable[[bytes], Any]]:
    found: dict[str, Callable[[bytes], Any]] = {
        "pillow": lambda content: Image.open(io.BytesIO(content)).convert("RGB"),
        "pillow, scaled": pillow_scaled,
    }
    if (simplejpeg := decoding._turbo()) is not None:
        found["simplejpeg"] = simplejpeg.decode_jpeg
        least = {"min_height": SCALED, "min_width": SCALED, "min_factor": 2}
        found["simplejpeg, scaled"] = functools.partial(simplejpeg.decode_jpeg, **least)
    try:
        import cv2
        import numpy as np
    except ImportError:
        return found
    cv2.setNumThreads(1)
    found["opencv"] = lambda content: cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
    return found


def pillow_scaled(content: bytes) -> Any:
    image = Image.open(io.BytesIO(content))
    image.draft("RGB", (SCALED, SCALED))
    return image.convert("RGB")


def measure_decoders(contents: list[bytes], rounds: int) -> dict[str, float]:
    """Images per second of processor time."""
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, decode in decoders().items():
            start = time.process_time()
            for content in contents:
                decode(content)
            times.setdefault(name, []).append((time.process_time() - start) / len(contents))
    return {name: 1 / statistics.median(each) for name, each in times.items()}


# Pipelines -----------------------------------------------------------------------------------------------------------


class PlainImages(Dataset[Any]):
    """One image at a time, as most training scripts do it: pillow, a random resized crop, a flip, floats."""

    def __init__(self, photos: Photos, data: Data) -> None:
        self.paths, self.labels = [str(path) for path in photos.paths], photos.labels.tolist()
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in (data.mean, data.std))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self.paths[index]).convert("RGB")
        box = usual_box(image.width, image.height)
        image = image.crop(box).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(SIZE, SIZE, 3)
        floats = pixels.permute(2, 0, 1).contiguous().float().div(255)
        return floats.sub_(self.mean).div_(self.std), self.labels[index]


def usual_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def plain(data: Data) -> Iterator[Any]:
    assert isinstance(data.train, Photos)
    images = PlainImages(data.train, data)
    order = [i % len(images) for i in torch.randperm(BATCH * (STEPS + 4 * PREFETCH)).tolist()]
    batches: DataLoader[Any] = DataLoader(images, BATCH, sampler=order, num_workers=WORKERS)
    return iter(batches)


def ours(data: Data, *, normalise: bool = True) -> Iterator[Any]:
    """Batches, normalised in this process, or left as bytes, for a GPU to normalise."""
    made = StreamedLoader(data, batch_size=BATCH, seed=0, workers=WORKERS)
    return map(made.batch if normalise else made.raw, itertools.count())


def timed(stream: Iterator[Any]) -> tuple[float, float]:
    """Wall and processor seconds per image, once all workers are as many batches ahead as they go."""
    for _ in range(2 * PREFETCH):
        next(stream)
    start, used = time.perf_counter(), processor()
    for _ in range(STEPS):
        next(stream)
    return (time.perf_counter() - start) / STEPS / BATCH, (processor() - used) / STEPS / BATCH


def processor() -> float:
    """Processor seconds so far of this process and its workers."""
    used = time.process_time()
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def measure_pipelines(data: Data, cache: Data, rounds: int) -> list[dict[str, Any]]:
    pipelines: dict[str, Callable[[], Iterator[Any]]] = {
        "plain": lambda: plain(data),
        "ours, files": lambda: ours(data),
        "ours, cache": lambda: ours(cache),
        "ours, files, bytes": lambda: ours(data, normalise=False),
        "ours, cache, bytes": lambda: ours(cache, normalise=False),
    }
    times = [{name: timed(make()) for name, make in pipelines.items()} for _ in range(rounds)]
    return [
        {
            "pipeline": name,
            "images_per_s": 1 / statistics.median(each[name][0] for each in times),
            "times_plain": statistics.median(each["plain"][0] / each[name][0] for each in times),
            "processor_ms": 1e3 * statistics.median(each[name][1] for each in times),
            "times_plain_processor": statistics.median(each["plain"][1] / each[name][1] for each in times),
        }
        for name in pipelines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sides", nargs="+", default=["224x224", "500x375", "500x375@99"])
    parser.add_argument("--count", type=int, default=1000, help="photographs of each size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the figures are written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, pillow {Image.__version__}")
    report = []
    for sides in arguments.sides:
        with tempfile.TemporaryDirectory() as folder:
            data = photographs(arguments.folder, sides, arguments.count, Path(folder) / "photos")
            cache = cached(data, Path(folder) / "cache")
            contents = [path.read_bytes() for path in data.train.paths[:200]]  # type: ignore[union-attr]
            size = sum(map(len, contents)) / len(contents) / 1e3
            row: dict[str, Any] = {"sides": sides, "kb": size, "decoders": measure_decoders(contents, arguments.rounds)}
            row["pipelines"] = measure_pipelines(data, cache, arguments.rounds)
        report.append(row)
        print(f"\n{sides}, {size:.0f} kB on average\n  {'decoder':24}{'images/s of a core':>20}")
        for name, speed in row["decoders"].items():
            print(f"  {name:24}{speed:20.0f}")
        print(f"  {'pipeline':24}{'images/s':>20}{'x plain':>10}{'cpu ms':>10}{'x plain':>10}")
        for each in row["pipelines"]:
            name, speed, times, used, times_used = each.values()
            print(f"  {name:24}{speed:20.0f}{times:10.2f}{used:10.3f}{times_used:10.2f}")
    if arguments.json:
        about = {"chip": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__, "pillow": Image.__version__}
        arguments.json.write_text(
            json.dumps({**about, "workers": WORKERS, "batch": BATCH, "rows": report}, indent=1) + "\n"
        )


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
