"""Other people's networks at one and two bits: nothing is chosen but the method and ``levels="binary"`` or "ternary".

    python examples/own_models.py [--models vit lstm ...] [--seeds 3] [--json results/own_models.json]

Six networks that know nothing of mirrorquant learn the 1,797 handwritten digits that ship with the package: a vision
transformer, an ``nn.TransformerEncoder``, an LSTM, a GRU, a network of MobileNet blocks, and a U-Net that finds the
strokes of a digit under noise. Each is trained in float; with binary and ternary weights for as many steps; and from
its float weights for a quarter of them. Prints the accuracy on the test images (of pixels, for the U-Net) in percent:
that of the rounded network, with its batch-norm statistics recomputed.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrorquant as mq
from mirrorquant import data

STEPS, BATCH, LR = 800, 64, 3e-3


class Attention(nn.Module):
    """Self-attention from plain linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches of 2x2 pixels, learnt positions, two blocks, the mean of the tokens."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks, self.norm, self.head = (
            nn.Sequential(Block(width), Block(width)),
            nn.LayerNorm(width),
            nn.Linear(width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class Encoder(nn.Module):
    """torch's own encoder, over the rows of an image."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(8, width), nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.squeeze(1)) + self.positions).mean(1))


class Recurrent(nn.Module):
    """An LSTM or a GRU that reads an image row by row."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int = 96) -> None:
        super().__init__()
        self.rnn, self.head = kind(8, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.squeeze(1))[0].mean(1))


class Inverted(nn.Module):
    """MobileNet's block: expansion, depthwise convolution, projection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = 4 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


def mobile() -> nn.Module:
    """A stem, four blocks, a linear layer."""
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Inverted(16, 16, 1), Inverted(16, 32, 2), Inverted(32, 32, 1), Inverted(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a shortcut between: a logit for each pixel."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()

        def conv(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

        self.enter, self.down = conv(1, width), conv(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge, self.head = conv(2 * width, width), nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        low = self.up(self.down(F.max_pool2d(x, 2)))
        return self.head(self.merge(torch.cat([x, low], 1)))


MODELS = {
    "vit": ViT,
    "encoder": Encoder,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "mobilenet": mobile,
    "unet": UNet,
}


def samples(split: str, name: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets: the class of an image or, for the U-Net, where its strokes are under noise."""
    digits = data.load("digits")
    images = getattr(digits, split)
    x, y = digits.normalise(images.images), images.labels
    if name != "unet":
        return x, y
    generator = torch.Generator().manual_seed(len(x))
    return x + torch.randn(x.shape, generator=generator), (images.images.squeeze(1) > 100).long()


def batches(x: Tensor, y: Tensor, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(x), (BATCH,), generator=generator)
        yield x[chosen], y[chosen]


def train(model: nn.Module, name: str, levels: str, steps: int, seed: int) -> float:
    """Trains a network, as a user would; the accuracy on the test images."""
    x, y = samples("train", name)
    groups = model.parameters() if levels == "float" else mq.split(model)
    opt: torch.optim.Optimizer = torch.optim.Adam(groups, lr=LR)
    if levels != "float":
        opt = mq.MirrorDescent(opt, method="md-tanh-s", levels=levels, anneal=mq.schedules.until(steps))
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, LR, steps)
    for inputs, targets in batches(x, y, steps, seed):
        F.cross_entropy(model(inputs), targets).backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
    if isinstance(opt, mq.MirrorDescent):
        opt.finalize()
        mq.recalibrate(model, batches(x, y, 20, seed))
    model.eval()
    x, y = samples("test", name)
    with torch.no_grad():
        return 100 * float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["float", "binary", "ternary", "binary, pretrained", "ternary, pretrained"]
    report: dict[str, dict[str, list[float]]] = {}
    print(f"{'':12}" + "".join(f"{column:>21}" for column in columns))
    for name in arguments.models:
        report[name] = rows = {column: [] for column in columns}
        for seed in range(arguments.seeds):
            torch.manual_seed(seed)
            fresh = MODELS[name]()
            trained = copy.deepcopy(fresh)
            rows["float"].append(train(trained, name, "float", arguments.steps, seed))
            for levels in ("binary", "ternary"):
                rows[levels].append(train(copy.deepcopy(fresh), name, levels, arguments.steps, seed))
                start = copy.deepcopy(trained).train()
                rows[f"{levels}, pretrained"].append(train(start, name, levels, arguments.steps // 4, seed))
        print(f"{name:12}" + "".join(f"{statistics.fmean(rows[column]):21.2f}" for column in columns), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"steps": arguments.steps, "accuracy": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
