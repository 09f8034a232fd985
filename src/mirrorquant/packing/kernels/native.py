"""The compiled kernels: a plain shared library beside this file, loaded with ctypes."""

from __future__ import annotations

__all__ = ["paths", "reason"]


def paths() -> tuple[str, ...]:
    """The native paths that were compiled and that this processor runs, the fastest first."""
    return ()


def reason() -> str:
    """Why there are no native kernels; empty where there are."""
    return "they are not written yet"
