"""How reports write methods and levels."""

from __future__ import annotations

from collections.abc import Sequence

from mirrorquant.methods import Method

__all__ = ["level_values", "levels", "method", "method_colour", "method_order", "uses_beta"]

_ORDER = ("ref", "bc", "pq", "pmf", "gd-tanh", "md-softmax", "md-tanh", "md-softmax-s", "md-tanh-s")
_STAR = "-star"  # PQ* and PMF* are recipes of PQ and PMF
_LEVELS = {"binary": (-1.0, 1.0), "ternary": (-1.0, 0.0, 1.0)}


def method(name: str) -> str:
    """A method as the paper writes it; unknown names are returned as they are.

    >>> method("md-tanh-s"), method("pq-star"), method("my-method")
    ('MD-tanh-S', 'PQ*', 'my-method')
    """
    base = name.removesuffix(_STAR)
    return (Method.registry[base].label + "*" * (base != name)) if base in Method.registry else name


def method_colour(name: str) -> str | None:
    """The colour of a method in figures; None for an unknown one. A starred method shares its method's colour."""
    known = Method.registry.get(name.removesuffix(_STAR))
    return (known.colour or None) if known else None


def uses_beta(name: str) -> bool:
    """Whether a method anneals β; PQ has a regularization strength, which is something else."""
    return name not in Method.registry or Method.registry[name].uses_beta


def method_order(name: str) -> tuple[int, bool]:
    """Sorts methods like the rows of the paper's tables; unknown ones come last.

    >>> sorted(["mine", "md-tanh-s", "pq-star", "pq", "ref"], key=method_order)
    ['ref', 'pq', 'pq-star', 'md-tanh-s', 'mine']
    """
    base = name.removesuffix(_STAR)
    return _ORDER.index(base) if base in _ORDER else len(_ORDER), base != name


def level_values(levels: str | Sequence[float] | None) -> tuple[float, ...]:
    """The quantization levels that a configuration means; empty for a float network, and for an unknown name.

    >>> level_values("ternary"), level_values("-0.5,0.5"), level_values("float")
    ((-1.0, 0.0, 1.0), (-0.5, 0.5), ())
    """
    if levels is None or levels == "float":
        return ()
    if not isinstance(levels, str):
        return tuple(levels)
    try:
        return _LEVELS.get(levels) or tuple(float(value) for value in levels.split(","))
    except ValueError:
        return ()


def levels(given: str | Sequence[float] | None) -> str:
    """Quantization levels as text, from their name or their numbers.

    >>> levels("ternary"), levels([-0.5, 0.5]), levels(None)
    ('-1, 0, +1', '-0.5, +0.5', 'float')
    """
    values = level_values(given)
    return ", ".join(f"{value:+g}" if value else "0" for value in values) if values else str(given or "float")
