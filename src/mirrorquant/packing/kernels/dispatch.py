"""Which kernels run: the best path that this processor has, or the one that MIRRORQUANT_KERNELS names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from mirrorquant.errors import MirrorquantError
from mirrorquant.packing.kernels import native

__all__ = ["KernelsError", "active", "available", "describe", "force"]

_VARIABLE = "MIRRORQUANT_KERNELS"
_ALL = ("avx512", "avx2", "portable", "torch")
_forced: list[str] = []


class KernelsError(MirrorquantError, ValueError, RuntimeError):
    """A path that does not exist, or that cannot run here; the message says which can."""


def available() -> tuple[str, ...]:
    """The paths that can run here, the fastest first; "torch" is always the last.

    >>> available()[-1]
    'torch'
    """
    return (*native.paths(), "torch")


def active() -> str:
    """The path that runs: forced by ``force``, else by the variable MIRRORQUANT_KERNELS, else the fastest.

    The variable is read once, at the first use.
    """
    return _forced[-1] if _forced else _default()


def describe() -> str:
    """One line for people: which path runs and why."""
    path = active()
    if _forced or os.environ.get(_VARIABLE):
        return f"{path} kernels, forced by {'force()' if _forced else _VARIABLE}; available: {', '.join(available())}"
    if path == "torch":
        return f"torch, without native kernels: {native.reason()}"
    return f"{path} kernels, the fastest that this processor runs; available: {', '.join(available())}"


@contextmanager
def force(path: str) -> Iterator[None]:
    """Run one path inside a ``with`` block, as tests do.

    Native paths share one layout, so weights prepared outside run inside; those prepared for torch stay there.

    >>> with force("torch"):
    ...     active()
    'torch'
    """
    _forced.append(_checked(path, "the path to force is"))
    try:
        yield
    finally:
        _forced.pop()


@cache
def _default() -> str:
    name = os.environ.get(_VARIABLE)
    return _checked(name, f"{_VARIABLE} is") if name else available()[0]


def _checked(path: str, what: str) -> str:
    if path not in _ALL:
        raise KernelsError(f"{what} {path!r}, but it must be one of {', '.join(_ALL)}")
    if path not in available():
        why = native.reason() or "this processor does not have these instructions"
        raise KernelsError(f"{what} {path!r}, but {why}; choose one of {', '.join(available())}")
    return path
