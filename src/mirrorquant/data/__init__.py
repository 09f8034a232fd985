"""Image data sets, held whole in memory as bytes, and batches of them.

>>> data = load("digits")
>>> data
digits: 1257 train, 180 val, 360 test images of 1×8×8 in 10 classes
"""

from __future__ import annotations

import difflib
import re
from os import PathLike
from pathlib import Path

from . import cifar, digits, fashion_mnist, folder, synthetic, tiny_imagenet
from .base import Data, DataError, Images
from .loader import Loader, clean_batches

__all__ = ["Data", "DataError", "Images", "Loader", "clean_batches", "load", "names"]

_SETS = {
    "cifar10": cifar.cifar10,
    "cifar100": cifar.cifar100,
    "tinyimagenet": tiny_imagenet.load,
    "fashion-mnist": fashion_mnist.load,
}
_FORMS = ("folder:PATH", "synthetic:CxHxW:CLASSES")


def names() -> tuple[str, ...]:
    """What `load` takes: names, and forms with parts to fill in, in capitals.

    >>> names()
    ('cifar10', 'cifar100', 'tinyimagenet', 'fashion-mnist', 'digits', 'folder:PATH', 'synthetic:CxHxW:CLASSES')
    """
    return (*_SETS, "digits", *_FORMS)


def load(name: str, root: str | PathLike[str] = "data", *, download: bool = True) -> Data:
    """The data set of that name, its files looked for in the folder `root`, and else downloaded there.

    With `download=False` missing files raise `DataError`, which says how to get them: for names that come from
    somebody else's file.

    `folder:PATH` takes images of your own, `folder:PATH:SIZE` at another size than 64×64 (see
    `mirrorquant.data.folder`); PATH stands for itself, not for something in `root`. Whatever is wrong with the files
    raises `DataError`.

    >>> load("synthetic:3x32x32:10").shape
    (3, 32, 32)
    >>> load("cifar-10")
    Traceback (most recent call last):
    mirrorquant.data.base.DataError: There is no data set 'cifar-10'. Did you mean 'cifar10'? ...
    """
    try:
        return _load(name, Path(root), download)
    except OSError as error:
        raise DataError(f"{name}: {error}. Check that the folder and what is in it can be read.") from error


def _load(name: str, root: Path, download: bool) -> Data:
    if name in _SETS:
        return _SETS[name](root, download=download)
    if name == "digits":
        return digits.load()
    if match := re.fullmatch(r"folder:(.+?)(?::(\d{1,6}))?", name):
        return folder.load(Path(match[1]), int(match[2] or folder.SIZE))
    if match := re.fullmatch(r"synthetic:(\d{1,6})x(\d{1,6})x(\d{1,6}):(\d{1,6})", name, re.ASCII):
        return synthetic.load(int(match[1]), int(match[2]), int(match[3]), int(match[4]))
    near = difflib.get_close_matches(name.lower(), names(), n=1, cutoff=0.4)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(f"There is no data set {name!r}.{guess} There are {', '.join(names())}.")
