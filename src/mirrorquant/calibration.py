"""Recalibration: batch-norm statistics that belong to the weights as they are now."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["recalibrate"]

_BatchNorm = nn.modules.batchnorm._BatchNorm


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any], forward: Callable[[Any], Any] | None = None) -> int:
    """Recomputes the batch-norm statistics of a model from data, with its weights as they are.

    Batch norm keeps moving averages over the soft weights of the last few dozen steps. Rounding changes the
    activations, so a network can lose much of its accuracy at ``finalize()`` only because these statistics are stale.
    Call this after ``finalize()``, with a few dozen training batches, augmented or not.

    The new statistics are the plain average over the batches. Everything but batch norm runs in evaluation mode, so
    dropout is off. Training flags and momenta are restored afterwards; after an exception, the statistics are too.

    Args:
        model: any model.
        batches: inputs, or tuples and lists that begin with the input, on the model's device, such as a data loader.
        forward: runs the model on a batch of another kind, as in ``lambda batch: model(**batch)``.

    Returns:
        The number of batch-norm layers; a model without any is left as it is.

    Raises:
        ValueError: there are no batches.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        >>> loader = torch.utils.data.DataLoader([(torch.randn(4), 0) for _ in range(64)], batch_size=16)
        >>> recalibrate(model, loader)
        1
        >>> int(model[1].num_batches_tracked)
        4
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return 0
    modes = [(module, module.training) for module in model.modules()]
    before = [(norm, norm.momentum, copy.deepcopy(dict(norm.named_buffers(recurse=False)))) for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over the batches
        norm.train()
    try:
        count = 0
        for count, batch in enumerate(batches, 1):  # noqa: B007
            if forward is not None:
                forward(batch)
            else:
                model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        if not count:
            raise ValueError("there are no batches for the statistics: pass some inputs, such as a data loader")
    except BaseException:
        for norm, _, statistics in before:
            norm.load_state_dict(statistics, strict=False)
        raise
    finally:
        for norm, momentum, _ in before:
            norm.momentum = momentum
        for module, mode in modes:
            module.training = mode
    return len(norms)
