"""The networks of the paper, as plain ``nn.Module`` objects; nothing in them knows how weights are quantized.

"VGG-16, ResNet-18 and MobileNetV2 architectures adapted for CIFAR dataset are used. [...] In all the models, batch
normalization (with no learnable parameters) and ReLU nonlinearity are used. Only for the floating point networks
(i.e., REF), we keep the learnable parameters for batch norm."

>>> from mirrorquant import models
>>> model = models.build("vgg16", classes=100)
>>> models.initialize(model)

Every name is an attribute of this package too: ``models.vgg16(classes=100)``.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from mirrorquant.models.init import drawn, initialize
from mirrorquant.models.registry import _MODELS, ModelError, build, identify, label, names, options, register

__all__ = ["ModelError", "build", "drawn", "identify", "initialize", "label", "names", "options", "register"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)


def __getattr__(name: str) -> Callable[..., Any]:
    if name in _MODELS:
        return _MODELS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
