"""Evaluation of a network: its accuracy and loss, the bits of its parameters, and where it diverges."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mirrorquant.data import Data, DataError, Images, Photos, clean_batches
from mirrorquant.methods import REF
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.packing.bits import count_planes
from mirrorquant.train.distributed import ALONE, World
from mirrorquant.train.objective import SCORES, Objective

__all__ = ["BATCH", "MANY_CLASSES", "Score", "has_nan", "layers", "not_finite", "score"]

BATCH, STREAMED_BATCH = 500, 125
MANY_CLASSES = 100  # from which on top-5 accuracy says something


class Score(NamedTuple):
    """Accuracy in percent, mean cross-entropy, and the share of images with their label among the first five."""

    accuracy: float
    loss: float
    top5: float

    @classmethod
    def of(cls, totals: Tensor, count: int) -> Score:
        """From the sums that :meth:`Objective.tally` makes."""
        right, among, loss = totals.tolist()
        return cls(100 * right / count, loss / count, 100 * among / count)


@torch.no_grad()
def score(
    model: nn.Module,
    images: Images | Photos,
    data: Data,
    objective: Objective = Objective(),  # noqa: B008 (frozen)
    context: torch.autocast | nullcontext[None] | None = None,
    *,
    world: World = ALONE,
    workers: int = -1,
) -> Score:
    """The score of a model on clean images, each process with its share of them; keeps the model's mode.

    Files that cannot be read do not count.
    """
    mode, totals, count = model.training, torch.zeros(SCORES, device=images.device), 0
    size = BATCH if isinstance(images, Images) else STREAMED_BATCH
    model.eval()
    with context or nullcontext():
        for x, y in clean_batches(images, data, size, part=world.part, workers=workers):
            totals += objective.tally(model(x), y)
            count += len(y)
    model.train(mode)
    scored = int(world.total(torch.tensor(count, device=images.device)))
    if not scored:
        raise DataError(f"none of the {len(images)} image files can be read")
    return Score.of(world.total(totals), scored)


def layers(opt: MirrorDescent) -> list[dict[str, Any]]:
    """Name, shape, count and bits of each parameter, and whether a quantized one is off its levels now.

    Learnt scales, which the optimizer trains too, are not parameters of the model.
    """
    rows, scales = [], {state["scale"] for state in opt.state.values() if "scale" in state}
    for group in opt.param_groups:
        method, floating = group["method"], isinstance(group["method"], REF)
        bits = 32 if floating else count_planes(method.levels)
        for name, p in zip(group["param_names"], group["params"], strict=True):
            if p in scales:
                continue
            off = not floating and method.adopted(p.detach(), opt.state[p]) is None
            rows.append({"name": name, "shape": list(p.shape), "count": p.numel(), "bits": bits, "off_levels": off})
    return rows


def has_nan(opt: MirrorDescent) -> bool:
    """Whether any trained weight or latent has become NaN."""
    return any(bool(p.isnan().any()) for group in opt.base.param_groups for p in group["params"])


@torch.no_grad()
def not_finite(model: nn.Module, opt: MirrorDescent, images: Tensor) -> str:
    """Where numbers stop being finite: the weights, the first layer whose output is not finite, or the loss itself."""
    if has_nan(opt):
        return "the weights"
    names = {module: name for name, module in model.named_modules() if not list(module.children())}
    found = []

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        if module in names and isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
            found.append(f"layer {names[module]} ({type(module).__name__})")

    with nn.modules.module.register_module_forward_hook(watch):
        model(images)
    return [*found, "the loss itself"][0]
