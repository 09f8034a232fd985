"""Engines make the training steps of a task; all of them train alike, batch for batch and formula for formula."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import DistError

from mirrorquant._text import first_line
from mirrorquant.data import DataError
from mirrorquant.errors import MirrorquantError
from mirrorquant.train import compiling
from mirrorquant.train.distributed import statistics
from mirrorquant.train.evaluate import Score
from mirrorquant.train.objective import TeacherError
from mirrorquant.train.task import Task

__all__ = ["EngineError", "PlainEngine", "Unsupported", "choose"]


class EngineError(MirrorquantError, RuntimeError):
    """An engine cannot train a task; the message says why and what to do."""


class Unsupported(EngineError):
    """The graph engine cannot train or capture a task; nothing was changed."""


class PlainEngine:
    """The usual training step in PyTorch; other engines only do it faster.

    Each step adds its loss to ``losses``, a scalar on the device; its reader sets it to zero.
    """

    name = "plain"

    def __init__(self, task: Task) -> None:
        self.task, self.losses = task, torch.zeros((), device=task.device)
        self.network = compiling.compiled(task.model, task.compile, task.device)

    @property
    def ready(self) -> bool:
        """Whether steps run at full speed from now on: nothing is left to compile or capture."""
        return True

    def step(self, k: int) -> None:
        """Trains on batch k; a loss that is not finite raises FloatingPointError (on CUDA it would cost a wait)."""
        task, batch = self.task, self.task.batch(k)
        for group in task.opt.param_groups:
            group["lr"] = task.lr(k)
        task.model.train()
        task.opt.zero_grad()
        for part in batch.split(task.accumulate):
            try:
                with task.autocast():
                    loss = task.objective(self.network(part.images), part) / task.accumulate
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                problem = f"{type(task.model).__name__} cannot train on batches of {len(part.labels)} from {task.data}"
                raise EngineError(f"{problem}: {first_line(error)}") from error
            if task.device.type == "cpu" and not bool(torch.isfinite(loss)):
                raise FloatingPointError
            loss.backward()  # type: ignore[no-untyped-call]
            self.losses += loss.detach()
        if task.world.size > 1:
            grads = [p.grad for p in task.model.parameters() if p.grad is not None]
            task.world.average([*grads, *statistics(task.model)])
        try:
            task.opt.step()
        except (ValueError, RuntimeError, TypeError, ArithmeticError, AssertionError) as error:  # of a forged state
            raise EngineError(f"{error}. The last checkpoint is intact") from error

    def score(self) -> Score:
        """The score of the rounded network on the validation images."""
        with self.task.opt.quantized():
            return self.task.evaluate(self.task.data.val)

    def sync(self) -> None:
        """Brings model and optimizer up to date, which may lag behind between steps of other engines."""


class _GraphOrPlain:
    """The graph engine; if its first step fails or it cannot be captured, the plain one takes over.

    The first step compiles everything the model is made of, so much can go wrong. With ``strict``, that is an error.
    """

    def __init__(self, task: Task, say: Callable[[str], None], *, strict: bool) -> None:
        self.task, self.say, self.strict = task, say, strict
        self.before: Any = copy.deepcopy((task.opt.state_dict(), task.model.state_dict()))
        try:
            from mirrorquant.train.graph import GraphEngine  # here, since it imports the compiler, which takes seconds

            self.engine: PlainEngine = GraphEngine(task, say)
        except Exception as error:
            self._fall_back(error)

    def step(self, k: int) -> None:
        """Trains on batch k."""
        losses = self.losses if self.before is None else self.losses.clone()
        try:
            self.engine.step(k)
        except Exception as error:
            if isinstance(error, Unsupported):  # raised before anything changes
                self.engine.sync()
            elif self.before is None or isinstance(error, (DataError, DistError, TeacherError)):
                raise
            self._fall_back(error)
            self.losses.copy_(losses)
            self.engine.step(k)
        self.before = None

    def _fall_back(self, error: Exception) -> None:
        problem = f"engine=graph cannot train this ({first_line(error)})"
        if self.strict or self.task.world.size > 1:  # the others would send different messages
            remedy = "engine=plain" if self.task.world.size > 1 else "engine=auto or engine=plain"
            raise EngineError(f"{problem}: use {remedy}") from error
        self.say(f"{problem}: using the plain engine, which is slower")
        if self.before is not None:
            self.task.opt.load_state_dict(self.before[0])
            self.task.model.load_state_dict(self.before[1])
        self.before, self.engine = None, PlainEngine(self.task)

    def __getattr__(self, name: str) -> Any:  # name, losses, ready, score and sync
        return getattr(self.engine, name)


def choose(task: Task, engine: str, say: Callable[[str], None]) -> PlainEngine | _GraphOrPlain:
    """The engine of that name: plain, graph, or auto, which is graph on CUDA if it works.

    Raises:
        EngineError: engine is graph, and it cannot train this.
    """
    if engine == "plain" or (engine == "auto" and task.device.type != "cuda"):
        return PlainEngine(task)
    return _GraphOrPlain(task, say, strict=engine == "graph")
