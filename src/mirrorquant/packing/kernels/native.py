"""The compiled kernels: a plain shared library beside this file, loaded with ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from torch import Tensor

from mirrorquant.packing.kernels.layer import Epilogue

__all__ = ["BAD_WEIGHT", "Layer", "decode", "paths", "prepare", "reason", "run"]

_FILE = Path(__file__).with_name("_kernels.so")
_ABI = 2  # of csrc/api.c
_NUMBERS = {"portable": 1, "avx2": 2, "avx512": 3}
BAD_WEIGHT = 2
_ERRORS = {
    1: "the numbers of the layer contradict each other, or are too large",
    BAD_WEIGHT: "the prepared weight is damaged, or was prepared for another layer",
    3: "there is not enough memory for the kernel's tables",
    4: "this processor does not have the path",
}


class Layer(ctypes.Structure):
    """The struct mq_layer of csrc/kernels.h."""

    _names = "n h w c o kh kw groups oh ow sy sx py px dy dx levels activation relu path threads"
    _fields_ = tuple((name, ctypes.c_int64) for name in _names.split())


def paths() -> tuple[str, ...]:
    """The native paths that were compiled and that this processor runs, the fastest first."""
    library, _ = _load()
    if library is None:
        return ()
    mask = library.mq_paths()
    return tuple(name for name in reversed(_NUMBERS) if mask >> _NUMBERS[name] & 1)


def reason() -> str:
    """Why there are no native kernels; empty where there are."""
    return _load()[1]


def prepare(codes: Tensor, shape: tuple[int, int, int, int], groups: int, levels: int) -> Tensor:
    """Level indices laid out for the kernels."""
    library = _library()
    total = library.mq_prepared_bytes(*shape, groups, levels)
    prepared = codes.new_empty(total)
    _check(library.mq_prepare(codes.data_ptr(), *shape, groups, levels, prepared.data_ptr(), total))
    return prepared


def decode(prepared: Tensor, shape: tuple[int, int, int, int], groups: int, levels: int) -> Tensor:
    """The level indices of a prepared weight, [O, C/groups, kh, kw]."""
    codes = prepared.new_empty(shape)
    library = _library()
    _check(
        library.mq_decode(prepared.data_ptr(), prepared.numel(), *shape, groups, levels, codes.data_ptr()),
    )
    return codes


def run(layer: Layer, x: Tensor, prepared: Tensor, epilogue: Epilogue, y: Tensor) -> bool:
    """Fill y; False where the prepared weight is not of the native layout, or not for this layer."""
    places = [None if tensor is None else tensor.data_ptr() for tensor in epilogue[:3]]
    status: int = _run(layer, x.data_ptr(), prepared.data_ptr(), prepared.numel(), *places, y.data_ptr())
    if status and status != BAD_WEIGHT:
        _check(status)
    return status == 0


def number(path: str) -> int:
    """A path as the kernels know it."""
    return _NUMBERS[path]


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if not _FILE.exists():
        return None, (
            "they were not compiled when mirrorquant was installed, for want of a working C compiler;"
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
        raise RuntimeError(f"a native kernel refused: {_ERRORS.get(status, f'status {status}')}")


_loaded = _load()[0]
if _loaded is not None:
    _run = _loaded.mq_run
