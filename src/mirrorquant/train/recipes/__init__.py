"""Recipes: the hyperparameters of every CIFAR and TinyImageNet cell of the paper's tables, by name.

A name says data set, model, levels and method as the tables do: ``cifar10/resnet18/binary/md-tanh-s``; the float
network, REF, has no levels: ``cifar10/resnet18/ref``. PQ* and PMF* are ``pq-star`` and ``pmf-star``. The values are
in one TOML file per data set, next to this module, laid out like the paper's hyperparameter tables.

A recipe is a flat dictionary of keys of :mod:`mirrorquant.train.config`, which has their types, defaults and help;
those that are not in it have their defaults. A key stands only where it means something: ``levels`` is not in REF,
``momentum`` only beside SGD.
"""

import copy
import difflib
import functools
import sys
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from mirrorquant.train.config import KEYS, ConfigError

__all__ = ["RecipeError", "get", "names"]

_LEVELS = ("binary", "ternary")
_TABLES = ("ref", *_LEVELS)
_NOT_IN_A_ROW = ("data", "model", "levels", "recipe", "overrides")


class RecipeError(ConfigError):
    """A recipe that does not exist, or a TOML file that does not make sense."""


def names() -> list[str]:
    """Names of all recipes, sorted.

    >>> [name for name in names() if name.startswith("cifar100/mobilenetv2")]
    ['cifar100/mobilenetv2/binary/bc', 'cifar100/mobilenetv2/binary/md-softmax-s',
     'cifar100/mobilenetv2/binary/md-tanh-s', 'cifar100/mobilenetv2/ref']
    """
    return sorted(_recipes())


def get(name: str) -> dict[str, Any]:
    """The recipe of that name: a fresh dictionary, without the keys that have their defaults.

    >>> recipe = get("cifar10/resnet18/binary/md-tanh-s")
    >>> recipe["lr"], recipe["beta_scale"], recipe["beta_interval"], recipe["paper"]
    (0.001, 1.02, 200, 93.18)
    >>> get("cifar10/resnet18/md-tanh-s")
    Traceback (most recent call last):
    ...
    mirrorquant.train.recipes.RecipeError: no recipe 'cifar10/resnet18/md-tanh-s'; did you mean
    'cifar10/...md-tanh-s'? ...
    """
    recipes = _recipes()
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1, cutoff=0.0)
        raise RecipeError(f"no recipe {name!r}; did you mean {near[0]!r}? `mirrorquant recipes` lists all")
    return copy.deepcopy(recipes[name])


@functools.cache
def _recipes() -> dict[str, dict[str, Any]]:
    recipes: dict[str, dict[str, Any]] = {}
    for file in resources.files(__name__).iterdir():
        if file.name.endswith(".toml"):
            recipes.update(_parse(file.name.removesuffix(".toml"), file.read_text(encoding="utf-8")))
    return recipes


def _parse(data: str, text: str) -> dict[str, dict[str, Any]]:
    """The recipes of one file: [defaults], then values of the model, then of the method, then of the recipe itself."""
    tables = tomllib.loads(text)
    defaults, methods = tables.pop("defaults"), _rows(tables.pop("methods"))
    recipes = {}
    for model, table in tables.items():
        shared = {key: value for key, value in table.items() if key not in _TABLES}
        for path, row in _rows(table).items():
            name = "/".join((data, model, *path))
            if path not in methods:
                raise RecipeError(
                    f"{name}: no row for {path[-1]!r} in [methods] of {data}.toml: add one, empty if need be"
                )
            values = {**defaults, **shared, **methods[path], **row}
            _check(name, values)
            levels = {"levels": path[0]} if len(path) == 2 else {}
            recipes[name] = {"data": data, "model": model, **levels, "method": path[-1], **values}
    return recipes


def _rows(table: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows by their place in a table: ("ref",), ("binary", "bc"), ..."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {("ref",): table["ref"]} if "ref" in table else {}
    for levels in _LEVELS:
        rows.update({(levels, method): row for method, row in table.get(levels, {}).items()})
    return rows


def _check(name: str, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if key not in KEYS or key in _NOT_IN_A_ROW:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.0)
            raise RecipeError(f"{name}: unknown key {key!r}; did you mean {near[0]!r}? Keys are {', '.join(KEYS)}")
        KEYS[key].check(f"{name}: {key}", value)
