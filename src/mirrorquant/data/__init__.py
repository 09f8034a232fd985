"""Image data sets, held in memory as bytes, and batches of them.

>>> data = load("digits")
>>> data
digits: 1257 train, 180 val, 360 test images of 1×8×8 in 10 classes
"""

import importlib
import pkgutil

from .base import Data, DataError, Images
from .loader import Loader, clean_batches
from .registry import DataSet, get, label, load, names, register

__all__ = ["Data", "DataError", "DataSet", "Images", "Loader"]
__all__ += ["clean_batches", "get", "label", "load", "names", "register"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
