"""How reports write methods, levels and tasks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mirrorquant import data, models
from mirrorquant.methods import Method
from mirrorquant.train.config import ConfigError, parse_levels

__all__ = ["known_method", "level_values", "levels", "method", "method_colour", "method_order", "task"]

_ORDER = ("ref", "bc", "pq", "pmf", "gd-tanh", "md-softmax", "md-tanh", "md-softmax-s", "md-tanh-s")
_STAR = "-star"  # PQ* and PMF* are recipes of PQ and PMF


def method(name: str) -> str:
    """A method as the paper writes it; unknown names are returned as they are, without the module of a class.

    >>> method("md-tanh-s"), method("pq-star"), method("my-method"), method("my_module:Mine")
    ('MD-tanh-S', 'PQ*', 'my-method', 'Mine')
    """
    label = known_method(name).label
    return label + "*" * name.endswith(_STAR) if label else name.rpartition(":")[2]


def known_method(name: str) -> type[Method]:
    """The class of a method, or of the one that a variant such as PQ* is of; the base class for an unknown one.

    A class that is named by its module is only known if that is imported already: a report imports nothing.
    """
    module, colon, own_name = name.rpartition(":")
    found: Any = getattr(sys.modules.get(module), own_name, None) if colon else None
    if isinstance(found, type) and issubclass(found, Method):
        return found
    return Method.registry.get(name.removesuffix(_STAR), Method)


def method_colour(name: str) -> str:
    """The colour of a method in figures, which its starred variant shares; empty for an unknown one."""
    return known_method(name).colour


def method_order(name: str) -> tuple[int, bool]:
    """Sorts methods like the rows of the paper's tables; unknown ones come last.

    >>> sorted(["mine", "md-tanh-s", "pq-star", "pq", "ref"], key=method_order)
    ['ref', 'pq', 'pq-star', 'md-tanh-s', 'mine']
    """
    base = name.removesuffix(_STAR)
    return _ORDER.index(base) if base in _ORDER else len(_ORDER), base != name


def level_values(levels: str | Sequence[float] | None) -> tuple[float, ...]:
    """The quantization levels by their name or their numbers; empty for a float network and for an unknown name.

    >>> level_values("ternary"), level_values("-0.5,0.5"), level_values("float")
    ((-1.0, 0.0, 1.0), (-0.5, 0.5), ())
    """
    try:
        return tuple(parse_levels(levels) if isinstance(levels, str) else levels or ())
    except ConfigError:
        return ()


def levels(given: str | Sequence[float] | None, scale: str = "") -> str:
    """Quantization levels as text, from their name or their numbers; only the number and the range of many.

    >>> levels("ternary"), levels([-0.5, 0.5], "tensor"), levels("-1,-0.5,0,0.5,1"), levels(None)
    ('-1, 0, +1', '-0.5, +0.5 × scale', '5 levels, -1 to +1', 'float')
    """
    texts = [f"{value:+.3g}" if value else "0" for value in level_values(given)]
    few = ", ".join(texts) or str(given or "float")
    text = few if len(texts) <= 4 else f"{len(texts)} levels, {texts[0]} to {texts[-1]}"
    return text + " × scale" * bool(scale)


def task(config: Mapping[str, Any]) -> str:
    """The data set and the model of a configuration.

    >>> task({"data": "cifar10", "model": "resnet18"})
    'CIFAR-10, ResNet-18'
    """
    return f"{data.label(str(config.get('data')))}, {models.label(str(config.get('model')))}"
