"""What training leaves behind: the best rounded network so far, and running averages.

>>> import torch, mirrorquant as mq
>>> from torch import nn
>>> _ = torch.manual_seed(0)
>>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
>>> x = torch.randn(256, 16)
>>> y = (x[:, 0] > x[:, 1]).long()
>>> base = torch.optim.Adam(mq.split(model), lr=1e-2)
>>> opt = mq.MirrorDescent(base, levels="binary", anneal=mq.schedules.until(200))
>>> best, average = mq.Best(model, opt), mq.Average(opt)
>>> for step in range(200):
...     nn.functional.cross_entropy(model(x), y).backward()
...     opt.step()
...     opt.zero_grad()
...     average.update()
...     if step % 20 == 19:
...         with opt.quantized():
...             accuracy = float((model(x).argmax(1) == y).float().mean())
...         _ = best.update(accuracy)
>>> with average.applied():                                  # the network of the averaged latents
...     with opt.quantized():
...         accuracy = float((model(x).argmax(1) == y).float().mean())
...     _ = best.update(accuracy)                            # inside, where that network is
>>> best.restore()                                           # finalized, with the weights of the best score
>>> with torch.no_grad():
...     float((model(x).argmax(1) == y).float().mean()) == best.score
True
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mirrorquant.optimizer import MirrorDescent

__all__ = ["Average", "Best"]


class Best:
    """Keeps the rounded network with the highest score: its exact levels, and everything else of the model's state.

    ``score`` is the highest so far, and ``stale`` the number of updates since, for early stopping.
    """

    def __init__(self, model: nn.Module, opt: MirrorDescent) -> None:
        self.model, self.opt = model, opt
        self.score, self.stale = -math.inf, 0
        self.state: dict[str, Any] | None = None
        self.scales: list[Tensor] = []

    def update(self, score: float) -> bool:
        """Keeps the network as it is now, rounded, unless an earlier one had a higher score; returns whether it did.

        Of equals the later one is kept, which has trained longer.
        """
        if not score >= self.score:
            self.stale += 1
            return False
        with self.opt.quantized():
            self.state = copy.deepcopy(self.model.state_dict())
        self.scales = _scales(self.opt)
        self.score, self.stale = score, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """The kept network and its score, for a checkpoint."""
        return {"score": self.score, "stale": self.stale, "state": self.state, "scales": self.scales}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a :meth:`state_dict`, of an equal model and optimizer."""
        if state["state"] is not None:
            _check(state["scales"], _fitted(self.opt))
        self.score, self.stale = float(state["score"]), int(state["stale"])
        self.state, self.scales = copy.deepcopy((state["state"], state["scales"]))

    def restore(self) -> None:
        """Loads the kept network into the model, and finalizes the optimizer with it."""
        if self.state is None:
            raise RuntimeError("no network was kept: call update(score) at least once, with a score that is not NaN")
        self.model.load_state_dict(self.state)
        _set_scales(self.opt, self.scales)
        self.opt.finalize()


class Average:
    """An exponential moving average of everything that the base optimizer moves: latents, scales and float parameters.

    Latents are averaged, not weights: an average of points on the levels is on none of them, and rounding it would
    count signs. Batch-norm statistics are not averaged: call :func:`mirrorquant.recalibrate` inside ``applied()``.

    Args:
        opt: the optimizer.
        decay: the weight of the past in each update; at first less, so that the start is soon forgotten.
    """

    def __init__(self, opt: MirrorDescent, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}, but it must be at least 0 and below 1")
        for group in opt.param_groups:
            if not group["method"].can_decay:
                name = type(group["method"]).__name__
                raise ValueError(f"{name} has latents that are infinite, which have no average: use md-tanh-s, say")
        self.opt, self.decay, self.updates = opt, decay, 0
        wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in self._moved()]
        self.tensors = [tensor.detach().to(dtype, copy=True) for tensor, dtype in zip(self._moved(), wide, strict=True)]

    def _moved(self) -> list[Tensor]:
        return [tensor for group in self.opt.base.param_groups for tensor in group["params"]]

    @torch.no_grad()
    def update(self) -> None:
        """Adds the present state; call it after each step."""
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 9))
        present = [tensor.detach().to(own.dtype) for tensor, own in zip(self._moved(), self.tensors, strict=True)]
        torch._foreach_lerp_(self.tensors, present, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        """The averages, for a checkpoint."""
        return {"updates": self.updates, "tensors": self.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a :meth:`state_dict`, of an equal optimizer."""
        _check(state["tensors"], self.tensors)
        self.updates = int(state["updates"])
        for own, saved in zip(self.tensors, state["tensors"], strict=True):
            own.copy_(saved)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The averaged network inside, soft or in ``opt.quantized()``; the present one again afterwards.

        A network that is finalized inside stays.
        """
        present, scales, before = [t.detach().clone() for t in self._moved()], _scales(self.opt), self.opt.finalized
        self._assign(self.tensors)
        self.opt.refresh()
        try:
            yield
        finally:
            if self.opt.finalized == before:
                self._assign(present)
                _set_scales(self.opt, scales)
                self.opt.refresh(scales=False)

    @torch.no_grad()
    def _assign(self, tensors: list[Tensor]) -> None:
        for tensor, new in zip(self._moved(), tensors, strict=True):  # one by one: FSDP2 has no _foreach_copy_
            tensor.detach().copy_(new)


def _check(saved: list[Tensor], own: list[Tensor]) -> None:
    """Raises ValueError for the tensors of another model."""
    theirs, ours = ([tuple(tensor.shape) for tensor in tensors] for tensors in (saved, own))
    if theirs != ours:
        raise ValueError(f"the state is of another optimizer: its tensors have the shapes {theirs}, expected {ours}")


def _scales(opt: MirrorDescent) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in _fitted(opt)]


@torch.no_grad()
def _set_scales(opt: MirrorDescent, scales: list[Tensor]) -> None:
    for scale, kept in zip(_fitted(opt), scales, strict=True):
        scale.detach().copy_(kept)


def _fitted(opt: MirrorDescent) -> list[Tensor]:
    """Scales, and whatever else methods keep beside the latents."""
    return [value for state in opt.state.values() for name, value in state.items() if name != "latent"]
