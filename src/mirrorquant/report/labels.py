"""How reports write methods and levels."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["level_values", "levels", "method", "method_colour", "method_order", "uses_beta"]

# Paul Tol's "muted" colours, which remain distinct with any colour vision: baselines warm, mirror descent cool, its
# stable forms dark.
_METHODS = {
    "ref": ("REF (float)", "#555555"),
    "bc": ("BC", "#cc6677"),
    "pq": ("PQ", "#ddcc77"),
    "pmf": ("PMF", "#aa4499"),
    "pmf-authors": ("PMF-authors", "#882255"),
    "gd-tanh": ("GD-tanh", "#999933"),
    "md-softmax": ("MD-softmax", "#44aa99"),
    "md-tanh": ("MD-tanh", "#88ccee"),
    "md-softmax-s": ("MD-softmax-S", "#117733"),
    "md-tanh-s": ("MD-tanh-S", "#332288"),
}
_STAR = "-star"  # PQ* and PMF* are recipes of PQ and PMF
_LEVELS = {"binary": (-1.0, 1.0), "ternary": (-1.0, 0.0, 1.0)}


def method(name: str) -> str:
    """A method as the paper writes it; unknown names are returned as they are.

    >>> method("md-tanh-s"), method("pq-star"), method("my-method")
    ('MD-tanh-S', 'PQ*', 'my-method')
    """
    base = name.removesuffix(_STAR)
    return (_METHODS[base][0] + "*" * (base != name)) if base in _METHODS else name


def method_colour(name: str) -> str | None:
    """The colour of a method in figures; None for an unknown one. A starred method shares its method's colour."""
    base = name.removesuffix(_STAR)
    return _METHODS[base][1] if base in _METHODS else None


def uses_beta(name: str) -> bool:
    """Whether a method anneals β; PQ has a regularization strength, which is something else."""
    return name not in ("ref", "bc", "pq")


def method_order(name: str) -> tuple[int, bool]:
    """Sorts methods like the rows of the paper's tables; unknown ones come last.

    >>> sorted(["mine", "md-tanh-s", "pq-star", "pq", "ref"], key=method_order)
    ['ref', 'pq', 'pq-star', 'md-tanh-s', 'mine']
    """
    base, known = name.removesuffix(_STAR), list(_METHODS)
    return known.index(base) if base in known else len(known), base != name


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
