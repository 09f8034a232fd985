"""Data sets by name. A module in this package with a registered function is all that a new one needs."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from .base import Data, DataError


@dataclass(frozen=True)
class DataSet:
    """What is known about a data set without its files; ``shape`` is channels, height and width of an image."""

    loader: Callable[..., Data]
    label: str
    shape: tuple[int, int, int] | None
    classes: int | None


_SETS: dict[str, DataSet] = {}


def register(
    name: str, *, label: str = "", shape: tuple[int, int, int] | None = None, classes: int | None = None
) -> Callable[[Any], Any]:
    """Makes a function the loader of a data set, which reports call ``label``.

    It is called as ``loader(root, download=...)``; if the name is a form, such as ``folder:PATH``, with the text after
    the colon.
    """

    def wrap(loader: Callable[..., Data]) -> Callable[..., Data]:
        if name in _SETS:
            raise DataError(f"There is a data set {name!r} already: choose another name.")
        _SETS[name] = DataSet(loader, label or name, shape, classes)
        return loader

    return wrap


def names() -> list[str]:
    """Names that `load` takes, and forms with parts to fill in, in capitals.

    >>> names()
    ['cifar10', 'cifar100', 'digits', 'fashion-mnist', 'tinyimagenet', 'folder:PATH', 'synthetic:CxHxW:CLASSES']
    """
    return sorted(_SETS, key=lambda name: (":" in name, name))


def get(name: str) -> DataSet:
    """What is known about a data set.

    >>> get("cifar100").label, get("cifar100").classes
    ('CIFAR-100', 100)
    """
    forms = {form.partition(":")[0]: form for form in names() if ":" in form}
    kind, colon, _ = name.partition(":")
    found = forms.get(kind, "") if colon else name
    if found not in _SETS:
        near = difflib.get_close_matches(name.lower(), names(), n=1, cutoff=0.4)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(f"There is no data set {name!r}.{guess} There are {', '.join(names())}.")
    return _SETS[found]


def label(name: str) -> str:
    """A data set as it is usually written: ``cifar10`` is CIFAR-10; an unknown name as it is."""
    return _SETS[name].label if name in _SETS else name


def load(name: str, root: str | PathLike[str] = "data", *, download: bool = True) -> Data:
    """The data set of that name, from files in the folder `root`, where they are downloaded if they are missing.

    With `download=False` missing files raise `DataError`, which says how to get them: for names that come from
    somebody else's file. `folder:PATH` takes custom images, `folder:PATH:SIZE` at another size than 64×64 (see
    `mirrorquant.data.folder`); PATH is not relative to `root`. Whatever is wrong with the files raises `DataError`.

    >>> load("synthetic:3x32x32:10").shape
    (3, 32, 32)
    >>> load("cifar-10")
    Traceback (most recent call last):
    mirrorquant.data.base.DataError: There is no data set 'cifar-10'. Did you mean 'cifar10'? ...
    """
    _, form, text = name.partition(":")
    loader = get(name).loader
    try:
        return loader(text) if form else loader(Path(root), download=download)
    except OSError as error:
        raise DataError(f"{name}: {error}. Check that the folder and what is in it can be read.") from error
