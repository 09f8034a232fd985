"""Image data sets, held in memory as bytes or streamed from files, and batches of them.

>>> data = load("digits")
>>> data
digits: 1257 train, 180 val, 360 test images of 1×8×8 in 10 classes
"""

import importlib
import pkgutil

from .augment import Extra
from .base import Data, DataError, Images, Split, renamed
from .loader import Loader, clean_batches, loader
from .registry import DataSet, get, label, load, names, register
from .streamed import Photos, StreamedLoader, cached, generator

__all__ = ["Data", "DataError", "DataSet", "Extra", "Images", "Loader", "Photos", "Split", "StreamedLoader"]
__all__ += ["cached", "clean_batches", "generator", "get", "label", "load", "loader", "names", "register", "renamed"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
