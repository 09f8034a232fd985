"""Several processes that train one network, each on its share of every batch, as ``torchrun`` starts them.

    torchrun --nproc-per-node 8 -m mirrorquant train RECIPE

All of them hold the same weights, latents and statistics: after the backward pass they average their gradients, and the
running statistics of their batch norms, so each makes the same update. Process 0 writes the run's folder.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mirrorquant.errors import MirrorquantError

__all__ = ["ALONE", "JobError", "World", "joined", "local_rank", "own_gpu", "statistics", "world"]

PATIENCE = timedelta(hours=6)  # one process may make a cache of ImageNet while the others wait
_T = TypeVar("_T")


class JobError(MirrorquantError, RuntimeError):
    """The other processes of a job are gone, or were started wrongly."""


@dataclass(frozen=True)
class World:
    """The processes of a job: the number of this one, and how many there are; alone, everything here does nothing."""

    rank: int = 0
    size: int = 1

    @property
    def chief(self) -> bool:
        """Whether this process writes the files and the messages."""
        return self.rank == 0

    @property
    def part(self) -> tuple[int, int]:
        """The share of each batch."""
        return self.rank, self.size

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors of one device by their mean over all processes, in one message per dtype."""
        if self.size == 1:
            return
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            own = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.reshape(-1) for t in own])
            dist.all_reduce(flat)
            flat /= self.size
            for tensor, mean in zip(own, torch.split(flat, [t.numel() for t in own]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def least(self, value: int, device: torch.device) -> int:
        """The least of the processes' values."""
        return -self.largest(-value, device)

    def largest(self, value: int, device: torch.device) -> int:
        """The largest of the processes' values."""
        if self.size == 1:
            return value
        found = torch.tensor(value, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def shared(self, value: _T) -> _T:
        """The value of process 0, in all of them."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values)
        return values[0]  # type: ignore[no-any-return]

    @contextmanager
    def first(self) -> Iterator[None]:
        """One process per machine goes through the block before the others: it downloads or decodes what they read."""
        leads = self.size == 1 or local_rank() == 0
        if leads:
            yield
        if self.size > 1:
            dist.barrier()
        if not leads:
            yield


ALONE = World()


def world() -> World:
    """The processes of this job."""
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else ALONE


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def own_gpu() -> int:
    """The number of this process's GPU among those that it can see, which may be just one."""
    return 0 if torch.cuda.device_count() == 1 else local_rank()


@contextmanager
def joined() -> Iterator[World]:
    """Joins the job that ``torchrun`` has started, if it has; a lost process raises :class:`JobError` in the others."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or "RANK" not in os.environ:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(own_gpu())
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    found = world()
    try:
        yield found
        dist.barrier()  # none leaves while another still needs it
    except RuntimeError as error:
        if isinstance(error, MirrorquantError) or not _lost(error):
            raise
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends the rest: first comes the message
        raise JobError(
            f"process {found.rank} of {found.size} lost contact with the others: one of them was killed, or failed and "
            "printed why. Continue the run with --resume, with any number of processes"
        ) from error
    finally:
        dist.destroy_process_group()
        time.sleep(0.1)  # lets Gloo's threads drop their last tensors: when the interpreter exits before, they abort


def _lost(error: RuntimeError) -> bool:
    """Whether an error says that another process is gone: NCCL's have a type, Gloo's only a text."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "Connection", "peer"))


def statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances of a model's normalization layers."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return [t for norm in norms for t in (norm.running_mean, norm.running_var) if t is not None]
