"""How reports write methods, levels and tasks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mirrorquant import data, models
from mirrorquant.methods import Method
from mirrorquant.train.config import ConfigError, parse_levels

__all__ = ["known_method", "level_values", "levels", "method", "method_colour", "method_order", "task"]

_ORDER = ("ref", "bc", "pq", "pq-levels", "pmf", "gd-tanh", "md-softmax", "md-tanh", "md-softmax-s", "md-tanh-s")
_STAR = "star"  # PQ* and PMF* are recipes of PQ and PMF
_WORDS = {"kl": "KL divergence"}
_OWN = {"best": "md-tanh-s-best", "quick": "md-tanh-s-quick"}  # words that recipes begin with in place of their method


def method(name: str) -> str:
    """A method as the paper writes it, with the words that name a variant; a class without its module.

    >>> method("md-tanh-s"), method("md-tanh-s-ends-pretrained"), method("pq-star")
    ('MD-tanh-S', 'MD-tanh-S (ends, pretrained)', 'PQ*')
    >>> method("my-method"), method("my_module:Mine"), method("quick"), method("ref-best")
    ('my-method', 'Mine', 'MD-tanh-S (quick)', 'REF (float, best)')
    """
    label, (_, words) = known_method(name).label, _parts(name)
    if not label:
        return name.rpartition(":")[2]
    others = ", ".join(_WORDS.get(word, word) for word in words if word != _STAR)
    if others and label.endswith(")"):
        return f"{label[:-1]}, {others})"
    return label + "*" * (_STAR in words) + f" ({others})" * bool(others)


def known_method(name: str) -> type[Method]:
    """The class of a method, or of the one that a variant such as PQ* is of; the base class for an unknown one.

    A class that is named by its module is only known if that is imported already: a report imports nothing.
    """
    module, colon, own_name = name.rpartition(":")
    found: Any = getattr(sys.modules.get(module), own_name, None) if colon else None
    if isinstance(found, type) and issubclass(found, Method):
        return found
    return Method.registry.get(_parts(name)[0], Method)


def method_colour(name: str) -> str:
    """The colour of a method in figures, which its variants share; empty for an unknown one."""
    return known_method(name).colour


def method_order(name: str) -> tuple[int, bool]:
    """Sorts methods like the rows of the paper's tables, each before its variants; unknown ones come last.

    >>> sorted(["mine", "md-tanh-s-kl", "md-tanh-s", "pq-star", "pq", "ref"], key=method_order)
    ['ref', 'pq', 'pq-star', 'md-tanh-s', 'md-tanh-s-kl', 'mine']
    """
    base, words = _parts(name)
    return _ORDER.index(base) if base in _ORDER else len(_ORDER), bool(words)


def _parts(name: str) -> tuple[str, list[str]]:
    """The longest name of a method that a name begins with, and the words that follow it; an unknown name is whole.

    >>> _parts("md-tanh-s-ends-pretrained"), _parts("my-method")
    (('md-tanh-s', ['ends', 'pretrained']), ('my-method', []))
    """
    first, *rest = name.split("-")
    words = [*_OWN.get(first, first).split("-"), *rest]
    ends = (end for end in range(len(words), 0, -1) if "-".join(words[:end]) in Method.registry)
    end = next(ends, len(words))
    return "-".join(words[:end]), words[end:]


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
