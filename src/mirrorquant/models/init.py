"""The initialization of the paper's experiments: "all methods are trained from a random initialization"."""

from collections.abc import Sequence

import torch
from torch import nn

_RESET = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.PReLU)


@torch.no_grad()
def initialize(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draws every parameter: Xavier uniform for two or more dimensions, N(0, 0.1²) for one-dimensional tensors.

    Not drawn but reset to their usual start are the scale and shift of normalization layers, to 1 and 0, and the slopes
    of PReLU, to 0.25.

    Numbers are drawn on the CPU in float32, in the order of ``model.parameters()``, then copied: the same generator,
    which must be on the CPU, gives the same model on every device and in every memory format.

    >>> from mirrorquant import models
    >>> model = models.digitsnet()
    >>> models.initialize(model, torch.Generator().manual_seed(0))
    >>> round(model.fc.bias.std().item(), 1)
    0.1
    """
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(f"generator is on {generator.device}, expected cpu: pass torch.Generator().manual_seed(seed)")
    layers = [module for module in model.modules() if isinstance(module, _RESET)]
    fixed = {parameter for layer in layers for parameter in layer.parameters(recurse=False)}
    for layer in layers:
        layer.reset_parameters()
    for parameter in model.parameters():
        if parameter not in fixed:
            parameter.copy_(drawn(parameter.shape, generator))


def drawn(shape: Sequence[int], generator: torch.Generator | None = None) -> torch.Tensor:
    """A tensor drawn from the initial distribution, on the CPU in float32."""
    values = torch.empty(tuple(shape), device="cpu", dtype=torch.float32)
    if values.dim() >= 2:
        return nn.init.xavier_uniform_(values, generator=generator)
    return values.normal_(0.0, 0.1, generator=generator)
