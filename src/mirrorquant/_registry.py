"""Things that are found by their name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from torch import nn

_Entry = TypeVar("_Entry")


def suggestion(name: str, names: Iterable[str]) -> str:
    """A sentence that suggests the nearest name, whatever its case, or nothing if none is near.

    >>> suggestion("CIFAR-10", ["cifar10", "digits"])
    " Did you mean 'cifar10'?"
    """
    lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.4)
    return f" Did you mean {lower[near[0]]!r}?" if near else ""


def imported(kind: str, name: str, error: type[Exception]) -> Callable[..., Any]:
    """The function or class that ``MODULE:NAME`` names; the module is imported, so only for names you trust.

    >>> imported("Model", "mirrorquant.models:digitsnet", ValueError).__name__
    'DigitsNet'
    """
    module_name, _, own_name = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise error(f"{kind} {name!r} is not MODULE:NAME with the full name of a module.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if not f"{module_name}.".startswith(f"{missing.name}."):
            raise  # the module exists, but something that it imports does not
        remedy = "install it, or put its folder on PYTHONPATH"
        raise error(f"{kind} {name!r}: there is no module {missing.name!r}; {remedy}.") from missing
    found: Any = getattr(module, own_name, None)
    if not callable(found) or isinstance(found, nn.Module):
        near = suggestion(own_name, vars(module).keys() - {own_name})
        raise error(f"{kind} {name!r}: {own_name!r} is not a function in {module_name!r}.{near}")
    return found  # type: ignore[no-any-return]


class Registry(dict[str, _Entry]):
    """A dictionary whose entries are never replaced; a missing one raises an error that suggests the nearest name.

    >>> fruits = Registry[int]("fruit", KeyError)
    >>> fruits["apple"] = 1
    >>> fruits["appel"]
    Traceback (most recent call last):
    KeyError: "There is no fruit 'appel'. Did you mean 'apple'? Expected one of apple."
    """

    def __init__(self, kind: str, error: type[Exception], *forms: str) -> None:
        """`forms` are names with parts to fill in that are accepted elsewhere, for the error message."""
        super().__init__()
        self.kind, self.error, self.forms = kind, error, forms

    def __setitem__(self, name: str, entry: _Entry) -> None:
        if name in self:
            raise self.error(f"There is already a {self.kind} {name!r}: choose another name.")
        super().__setitem__(name, entry)

    def __missing__(self, name: str) -> NoReturn:
        expected = ", ".join([*self, *self.forms])
        raise self.error(f"There is no {self.kind} {name!r}.{suggestion(name, self)} Expected one of {expected}.")
