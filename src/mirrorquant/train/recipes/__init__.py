"""Recipes: the hyperparameters of every cell of the paper's tables, by name.

A name consists of data set, model, levels and method, as in the tables: ``cifar10/resnet18/binary/md-tanh-s``; the
float network, REF, has no levels: ``cifar10/resnet18/ref``. PQ* and PMF* are ``pq-star`` and ``pmf-star``; words after
a method name its other variants, as in ``imagenet/resnet18/binary/md-tanh-s-pretrained``. The values are in one TOML
file per data set, next to this module, laid out like the paper's hyperparameter tables. ``best``, ``best-kl``,
``quick`` and ``ref-best`` are our own recipes for MD-tanh-S and REF, in ``beyond.toml``.

A recipe is a dictionary of keys of :class:`mirrorquant.train.Config`; other keys have their defaults. It only holds
keys that have an effect: REF has no ``levels``, and only SGD has ``momentum``.
"""

import copy
import functools
import sys
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from mirrorquant._registry import suggestion
from mirrorquant.train.config import ConfigError

__all__ = ["TABLES", "RecipeError", "cells", "get", "names", "run_name", "words"]

_LEVELS = ("binary", "ternary")
_REF = ("ref", "ref-best")
_BEYOND = "beyond"
TABLES = {  # of the paper, and our own: data sets, networks and levels
    "binary": (("cifar10", "cifar100", "tinyimagenet"), ("vgg16", "resnet18"), "binary"),
    "mobilenetv2": (("cifar10", "cifar100"), ("mobilenetv2",), "binary"),
    "ternary": (("cifar10", "cifar100", "tinyimagenet"), ("vgg16", "resnet18"), "ternary"),
    "imagenet": (("imagenet",), ("resnet34", "resnet18", "bireal18"), "binary"),
    "imagenette": (("imagenette",), ("resnet34", "resnet18", "bireal18"), "binary"),
    _BEYOND: (("cifar10", "cifar100", "tinyimagenet"), ("resnet18",), ""),
}


class RecipeError(ConfigError):
    """A recipe that does not exist."""


def names() -> list[str]:
    """Names of all recipes, sorted.

    >>> [name for name in names() if name.startswith("cifar100/mobilenetv2")]
    ['cifar100/mobilenetv2/binary/bc', 'cifar100/mobilenetv2/binary/md-softmax-s',
     'cifar100/mobilenetv2/binary/md-tanh-s', 'cifar100/mobilenetv2/ref']
    """
    return sorted(_recipes())


def get(name: str) -> dict[str, Any]:
    """The recipe of that name, as a new dictionary, without the keys that have their defaults.

    >>> recipe = get("cifar10/resnet18/binary/md-tanh-s")
    >>> recipe["lr"], recipe["beta_scale"], recipe["beta_interval"], recipe["paper"]
    (0.001, 1.02, 200, 93.18)
    >>> get("cifar10/resnet18/md-tanh-s")
    Traceback (most recent call last):
    ...
    mirrorquant.train.recipes.RecipeError: There is no recipe 'cifar10/resnet18/md-tanh-s'. Did you mean
    'cifar10/...md-tanh-s'? ...
    """
    recipes = _recipes()
    if name not in recipes:
        raise RecipeError(f"There is no recipe {name!r}.{suggestion(name, recipes)} `mirrorquant recipes` lists all.")
    return copy.deepcopy(recipes[name])


def cells(table: str) -> list[str]:
    """The recipes of one of the tables; float networks come first, since others may start from them.

    >>> cells("mobilenetv2")[:3]
    ['cifar10/mobilenetv2/ref', 'cifar100/mobilenetv2/ref', 'cifar10/mobilenetv2/binary/bc']
    """
    data, models, levels = TABLES[table]
    found = []
    for name in names():
        own_data, model, *rest, _ = name.split("/")
        beyond = name in _files()[_BEYOND]
        fits = beyond if table == _BEYOND else not beyond and rest in ([], [levels])
        if fits and own_data in data and model in models:
            found.append(name)
    return sorted(found, key=lambda name: ("/ref" not in name, data.index(name.split("/")[0]), name))


def run_name(name: str, seed: int) -> str:
    """The name of a run's folder in ``runs/``, and of its file in ``results/``.

    >>> run_name("cifar10/resnet18/binary/bc", 1)
    'cifar10-resnet18-binary-bc-seed1'
    """
    return f"{name.replace('/', '-')}-seed{seed}"


def words(run: str) -> str:
    """What follows ``mirrorquant train`` to train the run of that name; empty for a name of another kind.

    >>> words("cifar10-resnet18-ref-best-seed1"), words("mine")
    ('cifar10/resnet18/ref-best seed=1', '')
    """
    _, _, seed = run.rpartition("-seed")
    found = (f"{name} seed={seed}" for name in names() if seed.isdecimal() and run == run_name(name, int(seed)))
    return next(found, "")


@functools.cache
def _recipes() -> dict[str, dict[str, Any]]:
    return {name: recipe for recipes in _files().values() for name, recipe in recipes.items()}


@functools.cache
def _files() -> dict[str, dict[str, dict[str, Any]]]:
    """The recipes of each file."""
    files = [file for file in resources.files(__name__).iterdir() if file.name.endswith(".toml")]
    stems = {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in files}
    return {stem: _parse(stem, text) for stem, text in stems.items()}


def _parse(data: str, text: str) -> dict[str, dict[str, Any]]:
    """The recipes of one file: [defaults], then values of the model, then of the method, then of the recipe itself."""
    tables = tomllib.loads(text)
    defaults, methods = tables.pop("defaults"), _methods(tables.pop("methods"))
    recipes = {}
    places = {(data, model): table for model, table in tables.items()}
    if data == _BEYOND:
        places = {(name, model): table for name, each in tables.items() for model, table in each.items()}
    for (data, model), table in places.items():
        shared = {key: value for key, value in table.items() if key not in (*_REF, *_LEVELS)}
        for path, row in _rows(table).items():
            *levels, method = path.split("/")
            place = {"data": data, "model": model, **({"levels": levels[0]} if levels else {}), "method": method}
            recipes[f"{data}/{model}/{path}"] = {**place, **defaults, **shared, **methods[path], **row}
    return recipes


def _methods(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of [methods]; one with ``like`` starts from the values, and the method, of that row above it."""
    rows: dict[str, dict[str, Any]] = {}
    for path, row in _rows(table).items():
        levels, _, name = path.rpartition("/")
        start = rows[f"{levels}/{row['like']}"] if "like" in row else {"method": name}
        rows[path] = {**start, **{key: value for key, value in row.items() if key != "like"}}
    return rows


def _rows(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows by their place in a table: ref, binary/bc, ..."""
    rows = {f"{levels}/{method}": row for levels in _LEVELS for method, row in table.get(levels, {}).items()}
    return {**{name: table[name] for name in _REF if name in table}, **rows}
