"""A character GPT with binary and ternary blocks, beside BitNet's rules for the same weights.

    python examples/char_gpt.py [--steps 600 1200] [--seeds 3] [--json results/char_gpt.json]

Four transformer blocks of width 128 (786,432 quantized weights) learn the sources of Python's standard library, 64
characters at a time; embeddings, positions, norms, biases and the last layer stay in float. Rows:

    float       the network itself
    binary      MD-tanh-S with levels="binary"
    ternary     MD-tanh-S with levels="ternary"
    sign        sign(w) times mean |w|, straight-through: the binary weights of XNOR-Net and BitNet
    b1.58       w rounded to -1, 0, +1 times mean |w|, straight-through: BitNet b1.58

All have the same batches, AdamW, one-cycle learning rate and gradient clipping. Prints the validation loss of the
rounded network, in nats. The text differs between versions of Python, and with it the figures. Runs that the JSON file
has already are not repeated.
"""

import argparse
import json
import platform
import statistics
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrorquant as mq

WIDTH, LAYERS, HEADS, CONTEXT, BATCH, LR = 128, 4, 4, 64, 32, 3e-3
KINDS = ("float", "binary", "ternary", "sign", "b1.58")


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embeddings, blocks, and a linear layer to the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(torch.arange(x.shape[1])))))


class BitNet(nn.Module):
    """The weight of a layer by BitNet's rules: rounded forward, unchanged gradients."""

    def __init__(self, *, ternary: bool) -> None:
        super().__init__()
        self.ternary = ternary

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.abs().mean()
        rounded = (weight / scale).round().clamp(-1, 1) if self.ternary else torch.where(weight >= 0, 1.0, -1.0)
        return weight + (scale * rounded - weight).detach()


def sources() -> tuple[Tensor, Tensor, int]:
    """Nine tenths of the characters to train and one to validate, as numbers, and how many different ones there are."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    codes = torch.tensor(list(text.encode("ascii", "ignore")))
    known, numbers = codes.unique(return_inverse=True)
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:], len(known)


def batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random passages, and the character that follows each of theirs."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    passages = text[starts + torch.arange(CONTEXT + 1)]
    return passages[:, :-1], passages[:, 1:]


def loss(model: nn.Module, passages: tuple[Tensor, Tensor]) -> Tensor:
    """Nats per character."""
    return F.cross_entropy(model(passages[0]).flatten(0, 1), passages[1].flatten())


def train(kind: str, steps: int, seed: int, text: tuple[Tensor, Tensor, int]) -> float:
    """Trains a network; its validation loss, rounded."""
    torch.manual_seed(seed)
    model = GPT(text[2])
    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear) and kind in ("sign", "b1.58"):
            nn.utils.parametrize.register_parametrization(layer, "weight", BitNet(ternary=kind == "b1.58"))
    quantize = kind in ("binary", "ternary")
    groups = mq.split(model, skip=["head"]) if quantize else model.parameters()
    opt: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=LR)
    if quantize:
        opt = mq.MirrorDescent(opt, method="md-tanh-s", levels=kind, anneal=mq.schedules.until(steps))
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, LR, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss(model, batch(text[0], generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
    if isinstance(opt, mq.MirrorDescent):
        opt.finalize()
    model.eval()
    generator.manual_seed(1)
    with torch.no_grad():
        return statistics.fmean(float(loss(model, batch(text[1], generator))) for _ in range(50))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[600, 1200])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = sources()
    report = {"python": platform.python_version(), "torch": torch.__version__, "nats": {}}
    if arguments.json and arguments.json.exists():
        report = json.loads(arguments.json.read_text())
    nats = report["nats"]
    for steps in arguments.steps:
        for seed in range(arguments.seeds):
            for kind in KINDS:
                name = f"{kind}, {steps} steps, seed {seed}"
                if name not in nats:
                    nats[name] = round(train(kind, steps, seed, text), 4)
                    print(f"{name}: {nats[name]:.3f}", flush=True)
                    if arguments.json:
                        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for kind in KINDS:
        means = [
            statistics.fmean(nats[f"{kind}, {n} steps, seed {s}"] for s in range(arguments.seeds))
            for n in arguments.steps
        ]
        print(f"{kind:8}" + "".join(f"{mean:8.3f}" for mean in means))


if __name__ == "__main__":
    main()
