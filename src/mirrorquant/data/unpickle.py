"""Reading the pickles of `cifar-10-batches-py` without trusting them.

A pickle is a program that may call anything it can name. Here it can name three things, those that an array of numpy is
pickled with, and even they are stand-ins that only note what they are given: nothing is called, and numpy is not
needed. What comes out is made of dictionaries, lists, tuples, numbers, bytes, text and tensors of uint8.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mirrorquant import _files

from .base import DataError


class _Dtype:
    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment mean nothing for bytes."""


class _Array:
    """Stands for `numpy.ndarray`, and for its state: version, shape, dtype, column-major or not, content."""

    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def tensor(self) -> Tensor:
        _, shape, dtype, column_major, content = self.state
        if dtype.code not in (b"u1", "u1") or not isinstance(content, bytes) or column_major:
            raise pickle.UnpicklingError("it holds an array that is not of bytes in row-major order")
        if not all(type(n) is int and n > 0 for n in shape) or math.prod(shape) != len(content):
            raise pickle.UnpicklingError(f"it holds an array of shape {shape} with {len(content)} bytes")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


def _reconstruct(*_: object) -> _Array:
    return _Array()


ALLOWED = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
}


_OPCODES = """
PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES
SHORT_BINUNICODE BINUNICODE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""
OPCODES = frozenset(_OPCODES.split())
MEMO = 100_000  # objects that may be remembered; Python makes room for as many as the highest number used


def _check_opcodes(content: bytes) -> None:
    """Refuse what needs no running to be refused, such as a number that asks for more memory than there is."""
    for opcode, argument, place in pickletools.genops(content):
        if opcode.name not in OPCODES:
            raise pickle.UnpicklingError(f"it has the opcode {opcode.name} at byte {place}, which data has no use for")
        if opcode.name == "LONG_BINPUT" and argument is not None and argument > MEMO:
            raise pickle.UnpicklingError(f"it remembers object {argument} at byte {place}, expected {MEMO} at most")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which data has no use for")
        return ALLOWED[module, name]


def unpickle(path: Path, *, limit: int, remedy: str) -> object:
    """What a pickle of at most `limit` bytes holds, arrays of bytes as tensors; anything else raises `DataError`."""
    try:
        with _files.open_regular(path) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}). {remedy}") from error
    if len(content) > limit:
        raise DataError(f"{path} has more than {limit:,} bytes. {remedy}")
    try:
        _check_opcodes(content)
        loaded = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if isinstance(loaded, dict):
            return {key: value.tensor() if isinstance(value, _Array) else value for key, value in loaded.items()}
        return loaded
    except Exception as error:  # a damaged pickle can fail in any way whatever
        raise DataError(f"{path} is refused: {error}. {remedy}") from error
