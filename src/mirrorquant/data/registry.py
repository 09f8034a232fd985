"""Data sets by name. A module in this package with a registered function is all that a new one needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from mirrorquant._registry import Registry

from .base import Data, DataError


@dataclass(frozen=True)
class DataSet:
    """Facts about a data set that need none of its files; `shape` is channels, height and width of an image."""

    loader: Callable[..., Data]
    label: str
    shape: tuple[int, int, int] | None = None
    classes: int | None = None
    remedy: str = ""


_SETS = Registry[DataSet]("data set", DataError)


def register(name: str, *, label: str = "", **facts: Any) -> Callable[[Callable[..., Data]], Callable[..., Data]]:
    """Makes a function the loader of a data set; `facts` are further fields of `DataSet`.

    It is called as ``loader(root, download=...)``; if the name is a form, such as ``folder:PATH``, with the text after
    the colon. Reports use the `label`. The `remedy`, which may contain {name} and {root}, follows every error message.
    """

    def wrap(loader: Callable[..., Data]) -> Callable[..., Data]:
        _SETS[name] = DataSet(loader, label or name, **facts)
        return loader

    return wrap


def names() -> list[str]:
    """Names that `load` accepts, and forms with parts to fill in, in capitals.

    >>> names()
    ['cifar10', 'cifar100', 'digits', 'fashion-mnist', 'imagenet', 'imagenette', 'tinyimagenet', 'folder:PATH',
     'photos:PATH', 'synthetic:CxHxW:CLASSES']
    """
    return sorted(_SETS, key=lambda name: (":" in name, name))


def get(name: str) -> DataSet:
    """The facts about a data set.

    >>> get("cifar100").label, get("cifar100").classes
    ('CIFAR-100', 100)
    """
    kind, colon, _ = name.partition(":")
    return _SETS[next((form for form in _SETS if colon and form.startswith(f"{kind}:")), name)]


def label(name: str) -> str:
    """A data set as it is usually written: ``cifar10`` is CIFAR-10. Returns an unknown name as it is."""
    return _SETS[name].label if name in _SETS else name


def load(name: str, root: str | PathLike[str] = "data", *, download: bool = True) -> Data:
    """Loads a data set from files in the folder `root`; by default, missing files are downloaded to it.

    Use `download=False` for names that come from somebody else's file. `folder:PATH` takes custom images, and
    `folder:PATH:SIZE` scales them to another size than 64×64 (see `mirrorquant.data.folder`); `photos:PATH` and
    `photos:PATH:SIZE` stream them from their files (see `mirrorquant.data.imagenet`). PATH is not relative to `root`.
    Missing or damaged files raise `DataError`, which says what to do.

    >>> load("synthetic:3x32x32:10").shape
    (3, 32, 32)
    >>> load("cifar-10")
    Traceback (most recent call last):
    mirrorquant.data.base.DataError: There is no data set 'cifar-10'. Did you mean 'cifar10'? ...
    """
    found, (_, form, text) = get(name), name.partition(":")
    remedy = found.remedy.format(name=name, root=str(root))
    try:
        return found.loader(text) if form else found.loader(Path(root), download=download)
    except DataError as error:
        raise DataError(f"{str(error).rstrip('.')}. {remedy}".strip()) from error
    except OSError as error:
        raise DataError(f"{error.filename or name} cannot be read ({error.strerror or error}). {remedy}") from error
