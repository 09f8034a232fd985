"""Which parameters are still being trained: packing needs weights that are on their levels."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

__all__ = ["OPTIMIZERS", "owner"]

OPTIMIZERS: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # those that live, in their order


def owner(parameter: Tensor) -> Any | None:
    """The optimizer that still moves this parameter's latent: neither finalized, nor inside ``quantized()``.

    Of several, the newest decides: an earlier one, perhaps forgotten and not yet collected, does not move it any more.
    """
    for optimizer in reversed(list(OPTIMIZERS)):
        if "latent" in optimizer.state.get(parameter, {}):
            return None if optimizer.finalized or optimizer._inside_quantized else optimizer
    return None
