"""The graph engine: ``FastStep`` and ``FastScore`` behind the protocol of engines."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mirrorquant._text import first_line
from mirrorquant.data.loader import Normalise
from mirrorquant.train.engine import PlainEngine
from mirrorquant.train.evaluate import BATCH
from mirrorquant.train.fast import FastStep, Unsupported
from mirrorquant.train.fast_score import FastScore
from mirrorquant.train.objective import Objective
from mirrorquant.train.task import Task

__all__ = ["GraphEngine"]


class GraphEngine:
    """One CUDA graph per training step, and one per validation."""

    name = "graph"

    def __init__(self, task: Task, say: Callable[[str], None]) -> None:
        if task.objective != Objective():
            raise Unsupported("it has plain cross-entropy only")
        self.task, self.say, self.scores = task, say, True
        self.losses = torch.zeros((), device=task.device)
        task.model.train()
        self.fast = FastStep(
            task.model,
            task.opt,
            task.loader,
            task.lr,
            self.losses,
            dtype=task.dtype,
            compiled=task.compile,
            say=say,
        )
        self._score: FastScore | None = None

    @property
    def ready(self) -> bool:
        """Whether a step is only replayed by now."""
        return self.fast.ready

    def step(self, k: int) -> None:
        """Trains on batch k."""
        self.fast(k)

    def score(self) -> tuple[float, float]:
        """Accuracy and loss of the rounded network; where the graph cannot serve, it says so."""
        task = self.task
        if self.scores:
            try:
                if self._score is None:
                    normalise = Normalise(task.data.val, task.data.mean, task.data.std)
                    self._score = FastScore(self.fast, task.data.val, normalise, BATCH, compiled=task.compile)
                return self._score()
            except Exception as error:
                self._score, self.scores = None, False
                self.say(f"validation in a graph does not work here ({first_line(error)}): it is done plainly, slower")
        self.sync()
        return PlainEngine(task).score()

    def sync(self) -> None:
        """Brings model and optimizer to where the plain engine would have them."""
        self.fast.sync()
