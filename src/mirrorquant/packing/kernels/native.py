"""The compiled kernels, a plain shared library beside this file that ctypes loads, and the path that runs.

The path is the fastest that this processor has, or the one that the variable MIRRORQUANT_KERNELS names.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torch import Tensor

from mirrorquant.errors import MirrorquantError
from mirrorquant.packing.kernels.layer import Epilogue

__all__ = ["NUMBERS", "KernelsError", "Layer", "active", "available", "decode", "describe", "force", "prepare", "run"]

NUMBERS = {"avx512": 3, "avx2": 2, "portable": 1}  # of the native paths in C
_ALL = (*NUMBERS, "torch")
_FILE = Path(__file__).with_name("_kernels.so")
_VARIABLE = "MIRRORQUANT_KERNELS"
_ABI = 2  # of csrc/api.c
_BAD_WEIGHT = 2
_ERRORS = {
    1: "the numbers of the layer contradict each other, or are too large",
    _BAD_WEIGHT: "the prepared weight is damaged, or was prepared for another layer",
    3: "there is not enough memory for the kernel's tables",
    4: "this processor does not have the path",
}
_forced: list[str] = []


class KernelsError(MirrorquantError, ValueError, RuntimeError):
    """A path that does not exist, or that cannot run here; the message says which can."""


# The path.


def available() -> tuple[str, ...]:
    """The paths that can run here, the fastest first; "torch" is always the last.

    >>> available()[-1]
    'torch'
    """
    library, _ = _load()
    mask = 0 if library is None else library.mq_paths()
    return (*(name for name, number in NUMBERS.items() if mask >> number & 1), "torch")


def active() -> str:
    """The path that runs: forced by ``force``, else by the variable MIRRORQUANT_KERNELS, else the fastest.

    The variable is read once, at the first use.
    """
    return _forced[-1] if _forced else _default()


def describe() -> str:
    """One line that says which path runs and why."""
    path = active()
    if _forced or os.environ.get(_VARIABLE):
        return f"{path} kernels, forced by {'force()' if _forced else _VARIABLE}; available: {', '.join(available())}"
    if path == "torch":
        return f"torch, without native kernels: {_load()[1]}"
    return f"{path} kernels, the fastest that this processor runs; available: {', '.join(available())}"


@contextmanager
def force(path: str) -> Iterator[None]:
    """Runs one path inside a ``with`` block, as tests do.

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
        why = _load()[1] or "this processor does not have these instructions"
        raise KernelsError(f"{what} {path!r}, but {why}; choose one of {', '.join(available())}")
    return path


# The library.


class Layer(ctypes.Structure):
    """The struct mq_layer of csrc/kernels.h."""

    _names = "n h w c o kh kw groups oh ow sy sx py px dy dx levels activation relu path threads"
    _fields_ = tuple((name, ctypes.c_int64) for name in _names.split())


def prepare(codes: Tensor, shape: tuple[int, int, int, int], groups: int, levels: int) -> Tensor:
    """Level indices laid out for the kernels."""
    library = _library()
    total = library.mq_prepared_bytes(*shape, groups, levels)
    prepared = codes.new_empty(total)
    _check(library.mq_prepare(codes.data_ptr(), *shape, groups, levels, prepared.data_ptr(), total))
    return prepared


def decode(prepared: Tensor, shape: tuple[int, int, int, int], groups: int, levels: int) -> Tensor:
    """The level indices of a prepared weight, [O, C/groups, kh, kw]."""
    codes, place = prepared.new_empty(shape), (prepared.data_ptr(), prepared.numel())
    _check(_library().mq_decode(*place, *shape, groups, levels, codes.data_ptr()))
    return codes


def run(layer: Layer, x: Tensor, prepared: Tensor, epilogue: Epilogue, y: Tensor) -> bool:
    """Fills y; False where the prepared weight does not have the native layout, or is not for this layer."""
    places = [None if tensor is None else tensor.data_ptr() for tensor in epilogue[:3]]
    status = _library().mq_run(layer, x.data_ptr(), prepared.data_ptr(), prepared.numel(), *places, y.data_ptr())
    if status != _BAD_WEIGHT:
        _check(status)
    return status == 0  # type: ignore[no-any-return]


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or the reason why there is none."""
    if not _FILE.exists():
        return None, (
            "they were not compiled when mirrorquant was installed, because no working C compiler was found;"
            " install it again with one"
        )
    try:
        library = ctypes.CDLL(str(_FILE))
        abi = library.mq_abi()
    except (OSError, AttributeError) as error:
        return None, f"{_FILE.name} does not load ({error}); install mirrorquant again"
    if abi != _ABI:
        return None, f"{_FILE.name} is of another version ({abi}, expected {_ABI}); install mirrorquant again"
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    library.mq_prepared_bytes.restype = i64
    library.mq_prepared_bytes.argtypes = [i64] * 6
    library.mq_prepare.argtypes = [pointer, *[i64] * 6, pointer, i64]
    library.mq_decode.argtypes = [pointer, *[i64] * 7, pointer]
    library.mq_run.argtypes = [ctypes.POINTER(Layer), pointer, pointer, i64, pointer, pointer, pointer, pointer]
    return library, ""


def _library() -> ctypes.CDLL:
    library, why = _load()
    if library is None:
        raise RuntimeError(f"there are no native kernels: {why}")
    return library


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"a native kernel failed: {_ERRORS.get(status, f'status {status}')}")
