"""Who else holds a parameter: the optimizer that quantizes it, and the module that gathers it for FSDP2."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["OPTIMIZERS", "levels", "note_sharded", "owner", "reshard"]

OPTIMIZERS: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # those that live, in their order
_SHARDED = WeakIdKeyDictionary()  # parameters, and the module of FSDP2 to which they belong


def owner(parameter: Tensor) -> Any | None:
    """The optimizer that still moves this parameter's latent: neither finalized, nor inside ``quantized()``."""
    optimizer = _newest(parameter)
    return None if optimizer is None or optimizer.finalized or optimizer._inside_quantized else optimizer


def levels(parameter: Tensor) -> Any | None:
    """The levels on which an optimizer puts this parameter, finalized or not; None if it is gone."""
    groups = getattr(_newest(parameter), "param_groups", [])
    return next((group["method"].levels for group in groups if any(p is parameter for p in group["params"])), None)


def _newest(parameter: Tensor) -> Any | None:
    """Of the optimizers that quantize a parameter the last one: an earlier one, perhaps forgotten, does not move it."""
    return next((each for each in reversed(list(OPTIMIZERS)) if "latent" in each.state.get(parameter, {})), None)


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
