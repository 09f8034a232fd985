"""Where numbers stop being finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mirrorquant.optimizer import MirrorDescent

__all__ = ["has_nan", "origin"]


def has_nan(opt: MirrorDescent) -> bool:
    """Whether any weight or latent that is trained has become NaN."""
    return any(bool(p.isnan().any()) for group in opt.base.param_groups for p in group["params"])


@torch.no_grad()
def origin(model: nn.Module, opt: MirrorDescent, images: Tensor) -> str:
    """The weights if they are NaN; else the first layer whose output is not finite, or else the loss itself."""
    if has_nan(opt):
        return "the weights"
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                found.append(f"layer {name} ({type(module).__name__})")

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    model(images)
    for handle in handles:
        handle.remove()
    return [*found, "the loss itself"][0]
