"""Which parameters are still being trained: packing needs weights that are on their levels."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

__all__ = ["begin", "owner"]

_OPTIMIZERS: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in the order of their creation


def begin(optimizer: Any) -> None:
    """Registers an optimizer, for as long as it lives."""
    _OPTIMIZERS[optimizer] = None


def owner(parameter: Tensor) -> Any | None:
    """The optimizer that still moves this parameter's latent: neither finalized, nor inside ``quantized()``.

    Of several that were built over the parameter, one after the other, only the last one counts.
    """
    owners = [optimizer for optimizer in list(_OPTIMIZERS) if "latent" in optimizer.state.get(parameter, {})]
    if not owners or owners[-1].finalized or owners[-1]._inside_quantized:
        return None
    return owners[-1]
