"""A task: everything that an engine needs to train."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirrorquant.data import Data, Images, Loader, Photos, StreamedLoader
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.schedules import Schedule
from mirrorquant.train import evaluate
from mirrorquant.train.distributed import ALONE, World
from mirrorquant.train.objective import Batch, Objective

__all__ = ["Task"]


@dataclass(frozen=True, eq=False)
class Task:
    """A model with its optimizer on a device, its batches, its objective and its learning rate by step.

    ``dtype`` is the precision of the network: bfloat16 is autocast. ``compile`` and ``channels_last`` are for speed.
    A batch is computed in ``accumulate`` parts. Of several processes in the ``world``, each has its share of the batch,
    and ``workers`` processes that read image files.
    """

    model: nn.Module
    opt: MirrorDescent
    loader: Loader | StreamedLoader
    data: Data
    objective: Objective
    lr: Schedule
    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    compile: bool = False
    accumulate: int = 1
    workers: int = -1
    world: World = ALONE

    @property
    def images_at_once(self) -> int:
        """The number of images that batch norm sees at a time."""
        synced = any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules())
        return self.loader.batch_size // (self.accumulate * (1 if synced else self.world.size))

    def batch(self, k: int) -> Batch:
        """Training batch k (this process's share of it), in the memory format of the model."""
        images, labels = self.loader.batch(k)
        return Batch(self.laid_out(images), labels)

    def laid_out(self, images: Tensor) -> Tensor:
        """Images in the memory format of the model."""
        return images.contiguous(memory_format=torch.channels_last) if self.channels_last else images

    def autocast(self) -> torch.autocast | nullcontext[None]:
        """The context in which the network computes."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)

    def close(self) -> None:
        """Ends the processes that read images."""
        if isinstance(self.loader, StreamedLoader):
            self.loader.close()
        for split in (self.data.train, self.data.val, self.data.test):
            if isinstance(split, Photos):
                split.close()

    def evaluate(self, images: Images | Photos) -> evaluate.Score:
        """The score of the model as it is."""
        options: dict[str, Any] = {"world": self.world, "workers": self.workers}
        return evaluate.score(self.model, images, self.data, self.objective, self.autocast(), **options)
