"""Which parameters are being trained, for those who need weights that are on their levels."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

__all__ = ["begin", "owner"]

_OPTIMIZERS: weakref.WeakSet[Any] = weakref.WeakSet()


def begin(optimizer: Any) -> None:
    """Registers an optimizer, for as long as it lives."""
    _OPTIMIZERS.add(optimizer)


def owner(parameter: Tensor) -> Any | None:
    """The optimizer that still moves this parameter's latent: neither finalized, nor inside ``quantized()``."""
    for optimizer in list(_OPTIMIZERS):
        soft = not optimizer.finalized and not optimizer._inside_quantized
        if soft and "latent" in optimizer.state.get(parameter, {}):
            return optimizer
    return None
