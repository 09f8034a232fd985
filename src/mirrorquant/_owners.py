"""Who else holds a parameter: the optimizer that still moves it, and the module that gathers it for FSDP2."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["OPTIMIZERS", "note_sharded", "owner", "reshard"]

OPTIMIZERS: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # those that live, in their order
_SHARDED = WeakIdKeyDictionary()  # parameters, and the module of FSDP2 to which they belong


def owner(parameter: Tensor) -> Any | None:
    """The optimizer that still moves this parameter's latent: neither finalized, nor inside ``quantized()``.

    Of several, the newest decides: an earlier one, perhaps forgotten and not yet collected, does not move it any more.
    """
    for optimizer in reversed(list(OPTIMIZERS)):
        if "latent" in optimizer.state.get(parameter, {}):
            return None if optimizer.finalized or optimizer._inside_quantized else optimizer
    return None


def note_sharded(model: nn.Module) -> None:
    """Remembers which modules of FSDP2 (``fully_shard``) the parameters of a model belong to: the innermost ones."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            for parameter in module.parameters():
                _SHARDED[parameter] = weakref.ref(module)


def reshard(parameters: Iterable[Tensor]) -> None:
    """Makes FSDP2 gather these parameters again: after a forward pass without backward, it would use the old ones."""
    modules = {_SHARDED[parameter]() for parameter in parameters if parameter in _SHARDED} if _SHARDED else set()
    for module in modules - {None}:
        module.reshard()
