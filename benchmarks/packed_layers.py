"""Packed modules beside the plain ones, as users call them: single layers of many kinds and sizes, and small networks.

    python benchmarks/packed_layers.py [--only linear lstm] [--batches 1 32] [--seconds 1.5] [--json FILE]

Each module has binary weights and runs in eager PyTorch and after ``mq.pack``, in eval mode, without gradients, with
one thread. Both take turns, in short rounds; printed are the medians of the processor time, which other jobs on the
machine disturb less than the time on the clock, and the median ratio of the rounds (above 1: packed takes longer).
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mirrorquant as mq
from mirrorquant.packing import kernels

Case = tuple[str, nn.Module, Callable[[int], tuple[Tensor, ...]]]
ALLOWED = 1.05


def sizes(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Inputs of this shape, for a batch."""
    return lambda batch: (torch.randn(batch, *shape),)


def tokens(words: int, length: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda batch: (torch.randint(words, (batch, length)),)


class Attention(nn.Module):
    """Self-attention of linear layers, as people write it."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y: Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class MultiheadAttention(nn.Module):
    """``nn.MultiheadAttention`` of a sequence with itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


class VisionTransformer(nn.Module):
    """Patches of an image, encoder blocks with a norm first, and a classifier of their mean."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Parameter(torch.randn(64, width))
        self.blocks = nn.ModuleList([Encoder(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x.mean(1))
        return y


class Encoder(nn.Module):
    """A block of attention and an MLP, each with a norm first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms, self.attention = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)]), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y: Tensor = x + self.mlp(self.norms[1](x))
        return y


class Classifier(nn.Module):
    """An embedding, an LSTM, and a classifier of its last state."""

    def __init__(self, words: int = 1000, width: int = 128) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(words, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(self.words(words))[0][:, -1])
        return y


class UNet(nn.Module):
    """Two steps down and two up, with skip connections."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(3, width), self._block(width, 2 * width)])
        self.middle = self._block(2 * width, 4 * width)
        self.up = nn.ModuleList([nn.ConvTranspose2d(n * width, n // 2 * width, 2, stride=2) for n in (4, 2)])
        self.join = nn.ModuleList([self._block(n * width, n // 2 * width) for n in (4, 2)])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            kept.append(block(x))
            x = nn.functional.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        y: Tensor = self.head(x)
        return y


def layers() -> Iterator[Case]:
    """Single layers."""
    for width in (64, 128, 256, 512, 1024, 2048, 4096):
        yield f"linear {width}x{width}", nn.Linear(width, width), sizes(width)
    yield "linear 1000x512", nn.Linear(512, 1000), sizes(512)
    yield "linear 10x4096", nn.Linear(4096, 10), sizes(4096)
    yield "linear 1024x256, 64 rows per item", nn.Linear(256, 1024), sizes(64, 256)
    for width in (128, 256, 512):
        yield f"nn.MultiheadAttention {width}", MultiheadAttention(width), sizes(32, width)
        yield f"custom attention {width}", Attention(width), sizes(32, width)
        layer: nn.Module = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        yield f"nn.TransformerEncoderLayer {width}", layer, sizes(32, width)
        layer = nn.TransformerDecoderLayer(width, 4, 4 * width, batch_first=True)
        yield f"nn.TransformerDecoderLayer {width}", layer, lambda batch, width=width: 2 * sizes(32, width)(batch)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for width in (128, 256):
            yield f"nn.{kind.__name__} {width}", kind(width, width, batch_first=True), sizes(16, width)
    for channels in (32, 128):
        yield f"conv1d {channels}, 3", nn.Conv1d(channels, channels, 3, padding=1), sizes(channels, 64)
    yield "conv1d 64, 1", nn.Conv1d(64, 128, 1), sizes(64, 100)
    yield "conv1d 64, 7, 64 groups", nn.Conv1d(64, 64, 7, padding=3, groups=64), sizes(64, 100)
    for channels, size in ((3, 32), (16, 32), (64, 16), (256, 8)):
        outputs = max(channels, 16)
        yield f"conv2d {channels}, 3x3, {size}", nn.Conv2d(channels, outputs, 3, padding=1), sizes(channels, size, size)
    for channels, size in ((16, 32), (64, 16), (256, 8), (512, 4)):
        yield f"conv2d {channels}, 1x1, {size}", nn.Conv2d(channels, channels, 1), sizes(channels, size, size)
    for channels, size in ((32, 16), (256, 8)):
        layer = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        yield f"conv2d {channels}, depthwise, {size}", layer, sizes(channels, size, size)
    yield "conv2d 64, 4 groups, 16", nn.Conv2d(64, 64, 3, padding=1, groups=4), sizes(64, 16, 16)
    yield "conv2d 64, 8 x stride 8", nn.Conv2d(3, 64, 8, stride=8), sizes(3, 64, 64)
    yield "conv2d 1x1 image, 256", nn.Conv2d(256, 64, 1), sizes(256, 1, 1)
    for channels, size in ((32, 16), (128, 8)):
        layer = nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)
        yield f"convtranspose2d {channels}, {size}", layer, sizes(channels, size, size)
    for words, width in ((1000, 128), (30000, 256)):
        yield f"embedding {words}x{width}", nn.Embedding(words, width), tokens(words, 32)


def networks() -> Iterator[Case]:
    """Small networks."""
    for width in (128, 256):
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        yield f"net: nn.TransformerEncoder, 2 x {width}", encoder, sizes(32, width)
    yield "net: vision transformer, 4 x 128", VisionTransformer(), sizes(3, 32, 32)
    yield "net: LSTM classifier", Classifier(), tokens(1000, 16)
    yield "net: U-Net", UNet(), sizes(3, 32, 32)
    yield "net: mobilenetv2", mq.models.mobilenetv2(), sizes(3, 32, 32)
    yield "net: digitsnet", mq.models.digitsnet(), sizes(1, 8, 8)
    yield "net: resnet18", mq.models.resnet18(), sizes(3, 32, 32)
    mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    yield "net: MLP 64-64-10", mlp, sizes(64)
    mlp = nn.Sequential(nn.Linear(784, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    yield "net: MLP 784-256-10", mlp, sizes(784)


def binary(model: nn.Module) -> nn.Module:
    """The model with all matrices on -1 and +1, times a scale that keeps its numbers small."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.sign() * 2.0 ** -round(0.5 * (parameter[0].numel() - 1).bit_length())
    return model.eval()


def measure(calls: list[Callable[[], Any]], seconds: float) -> list[list[float]]:
    """Microseconds of processor time per call of each, round by round; they take turns of a millisecond or more."""
    counts = []
    for call in calls:
        for _ in range(3):
            call()
        start = time.thread_time()
        call()
        counts.append(max(1, int(0.001 / max(time.thread_time() - start, 1e-6))))
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 20:
        order = list(zip(calls, counts, times, strict=True))
        for call, count, found in order if len(times[0]) % 2 else reversed(order):
            start = time.thread_time()
            for _ in range(count):
                call()
            found.append(1e6 * (time.thread_time() - start) / count)
    return times


@torch.no_grad()
def compare(case: Case, batches: list[int], seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each size of the batch."""
    name, model, inputs = case
    plain = binary(model)
    for batch in batches:
        packed, given = mq.pack(plain), inputs(batch)
        own, others = measure([lambda: packed(*given), lambda: plain(*given)], seconds)  # noqa: B023
        times = {"packed_us": statistics.median(own), "plain_us": statistics.median(others)}
        ratio = statistics.median(one / other for one, other in zip(own, others, strict=True))
        yield {"module": name, "batch": batch, **{k: round(v, 1) for k, v in times.items()}, "ratio": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="parts of the names of the modules to run")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32])
    parser.add_argument("--seconds", type=float, default=1.5, help="for each module and batch size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the table, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for case in (*layers(), *networks()):
        if options.only is None or any(part.lower() in case[0].lower() for part in options.only):
            for row in compare(case, options.batches, options.seconds):
                rows.append(row)
                mark = "  slower" if row["ratio"] > ALLOWED else ""
                times = f"{row['packed_us']:10.1f} {row['plain_us']:10.1f} us {row['ratio']:7.3f}{mark}"
                print(f"{row['module']:36} {row['batch']:4} {times}", flush=True)
    slower = [row for row in rows if row["ratio"] > ALLOWED]
    print(f"{len(slower)} of {len(rows)} are slower packed by more than 5 %")
    if options.json:
        about = {"kernels": kernels.describe(), "torch": torch.__version__, "processor": platform.processor()}
        options.json.write_text(json.dumps({**about, "threads": 1, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
