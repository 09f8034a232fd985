"""The initialization of the paper's experiments: "all methods are trained from a random initialization"."""

import torch
from torch import nn

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_ONE_DIMENSIONAL_STD = 0.1


@torch.no_grad()
def initialize(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw every parameter: Xavier uniform for two or more dimensions, N(0, 0.1^2) for one-dimensional tensors.

    Scale and shift of a normalization layer are not drawn but put back to 1 and 0. Only REF, the float network, has
    them: in the quantized networks batch norm has "no learnable parameters".

    Numbers are drawn on the CPU in float32, in the order of ``model.parameters()``, then copied: a generator on the
    CPU, the only kind allowed, gives the same model on every device and in every memory format.

    >>> from mirrorquant import models
    >>> model = models.digitsnet()
    >>> models.initialize(model, torch.Generator().manual_seed(0))
    >>> round(model.fc.bias.std().item(), 1)
    0.1
    """
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(
            f"generator is on {generator.device}, expected cpu, so that a seed means the same model on every device: "
            "pass torch.Generator().manual_seed(seed)"
        )
    normalization: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, _NORMS):
            module.reset_parameters()
            normalization.update(module.parameters(recurse=False))
    for parameter in model.parameters():
        if parameter not in normalization:
            parameter.copy_(_draw(parameter.shape, generator))


def _draw(shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
    values = torch.empty(shape, device="cpu", dtype=torch.float32)
    if len(shape) >= 2:
        return nn.init.xavier_uniform_(values, generator=generator)
    return values.normal_(0.0, _ONE_DIMENSIONAL_STD, generator=generator)
