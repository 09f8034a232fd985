"""mirrorquant: neural networks whose weights take only a few values, trained by mirror descent.

Implements "Mirror Descent View for Neural Network Quantization" (Ajanthan, Gupta, Torr, Hartley, Dokania; AISTATS
2021) for any PyTorch model: wrap an optimizer in ``MirrorDescent``, train as usual, ``finalize()``, and ``save`` it at
one bit a weight.
"""

from mirrorquant import data, levels, methods, mirrors, models, nn, schedules, theory, train
from mirrorquant._version import __version__
from mirrorquant.calibration import recalibrate
from mirrorquant.export import export
from mirrorquant.health import HealthWarning, health
from mirrorquant.keep import Average, Best
from mirrorquant.levels import BINARY, TERNARY, Levels
from mirrorquant.methods import Method
from mirrorquant.mirrors import Mirror, mirror_from
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.packing import PackedModel, PackError, load, pack, save, unpack
from mirrorquant.select import split
from mirrorquant.summary import summary

__all__ = [
    "BINARY",
    "TERNARY",
    "Average",
    "Best",
    "HealthWarning",
    "Levels",
    "Method",
    "Mirror",
    "MirrorDescent",
    "PackError",
    "PackedModel",
    "__version__",
    "data",
    "export",
    "health",
    "levels",
    "load",
    "methods",
    "mirror_from",
    "mirrors",
    "models",
    "nn",
    "pack",
    "recalibrate",
    "save",
    "schedules",
    "split",
    "summary",
    "theory",
    "train",
    "unpack",
]
