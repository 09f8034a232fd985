"""Packed files: a model at one bit a weight on disk, in a file that says what it is and cannot run code.

The container is safetensors, which other tools can read: a length, a JSON header, the bytes of the tensors. A tensor
on levels is stored as its bit planes (see ``bits.py``) under its own name, its scales beside it under ``NAME.scale``;
any other one as it is. The metadata hold two strings: ``mirrorquant``, JSON that tells the format's version, the
architecture and, of each packed tensor, shape, levels and dtype; and ``sha256``, the digest of the whole file with
that digest's own place zeroed, so that no damaged file is taken for the model that was saved.

Nothing in a file is trusted: names, shapes and sizes are compared with the model and with the file's length before any
memory is taken for them, and whatever is wrong ends in a :class:`PackError` that names the file. The digest detects
damage, not forgery: whoever alters a file on purpose can also recompute it, so compare ``sha256sum`` with a value that
you trust.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from mirrorquant import _files, models
from mirrorquant._version import __version__
from mirrorquant.levels import Levels
from mirrorquant.packing.bits import MOST_LEVELS, PackedTensor, PackError, count_planes, layout, unpack_bits
from mirrorquant.packing.model import Entry, PackedModel, assemble, entries_of, skeleton, state
from mirrorquant.select import unwrapped

__all__ = ["Contents", "load", "read", "save"]

FORMAT = 1
BITS = (
    "plane j holds bit j of the level's number; rows of output channels; first weight in the lowest bit; bit 1 is upper"
)
_START = b'{"__metadata__":{"sha256":"'
_DIGEST = slice(8 + len(_START), 8 + len(_START) + 64)
_MOST_HEADER = 1 << 24
_MOST_DEEP = 32
_CHUNK = 1 << 20
_CHECKPOINT = b"mirrorquant checkpoint "  # what a run's *.mq files begin with
_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_FLOATS = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES if dtype.is_floating_point}


def save(model: nn.Module, path: str | os.PathLike[str], *, about: dict[str, Any] | None = None) -> None:
    """Writes a finalized model, plain or packed, at one bit a weight.

    Every parameter that is on levels is stored as bits, of whatever module; all else as it is. The file appears at once
    and whole. A model sharded by FSDP2 is gathered, so every process has to call this.

    Args:
        model: a model after ``MirrorDescent.finalize()``, or a packed one.
        path: the file, by custom ``*.safetensors``.
        about: what else to tell, as JSON: the data set, the accuracy, ... By default the ``about`` of a model that
            :func:`load` returned.

    Raises:
        PackError: no weight of the model is on levels, or the file cannot be written.

    Example:
        >>> import tempfile, torch, mirrorquant as mq
        >>> model = mq.models.digitsnet()
        >>> for parameter in model.parameters():
        ...     _ = parameter.data.sign_()
        >>> path = tempfile.mkdtemp() + "/digits.safetensors"
        >>> mq.save(model, path)
        >>> mq.load(path)(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    _files.write_atomically(Path(path), dump(model, about), PackError)


def load(path: str | os.PathLike[str], model: nn.Module | None = None, *, fuse: bool = True) -> PackedModel:
    """A model from a packed file; it runs packed, and :func:`mirrorquant.unpack` gives the plain one.

    Its attribute ``about`` is the metadata that it was saved with.

    Args:
        path: what :func:`save` wrote.
        model: a model of the same structure, whatever its numbers, which is left alone. This library's own models are
            built by the file itself.
        fuse: as in :func:`mirrorquant.pack`.

    Raises:
        PackError: the file is damaged, was altered, is of a newer format, or belongs to another model.
    """
    with _opened(path) as file:  # once: another one may take its name meanwhile
        contents = _read(Path(path), file)
        plain = _build(contents) if model is None else _emptied(contents, unwrapped(model))
        entries = contents.entries(plain, file)
    packed = assemble(plain, entries, fuse=fuse)
    vars(packed)["about"] = contents.about
    return packed


def about_of(model: nn.Module, about: dict[str, Any] | None = None) -> dict[str, Any]:
    """The metadata of a model: the caller's, or else that of the file it was loaded from."""
    if not isinstance(about, dict | None):
        raise PackError(f"about is {about!r}, expected a dictionary")
    if about is not None:
        return about
    model = unwrapped(model)
    return dict(vars(model).get("about", {})) if isinstance(model, PackedModel) else {}


def about_text(about: dict[str, Any]) -> str:
    """The metadata of a model, as JSON for the files of other runtimes."""
    try:
        return _text({"about": about})
    except (TypeError, ValueError, RecursionError) as error:
        raise PackError(f"about is {about!r}, expected what JSON can hold ({error})") from error


def read_about(text: str) -> dict[str, Any]:
    """What ``about_text`` made; nothing where the text is something else."""
    try:
        return _object(_json(text, "description").get("about"), "about")
    except _Wrong:
        return {}


@dataclass(frozen=True)
class Contents:
    """A packed file as its header describes it, checked against its size and its digest.

    ``sha256`` is that of the whole file, as sha256sum gives it; ``about`` is what the writer told; ``architecture`` is
    the name and the options of one of this library's models, or None; ``stored`` has the name, dtype, shape and place
    of each tensor, and ``packed`` what the bits mean.
    """

    path: Path
    size: int
    sha256: str
    library: str
    architecture: dict[str, Any] | None
    about: dict[str, Any]
    stored: dict[str, _Stored]
    packed: dict[str, _Bits]
    start: int

    def rows(self) -> list[dict[str, Any]]:
        """Name, shape, levels, bits and bytes of each tensor of the model."""
        rows = []
        for name, place in self.stored.items():
            bits = self.packed.get(name)
            if bits is None and name.removesuffix(".scale") in self.packed:
                continue
            shape = place.shape if bits is None else bits.shape
            size = place.size + (self.stored[f"{name}.scale"].size if bits is not None and bits.scaled else 0)
            item = place.dtype.itemsize if bits is None else bits.dtype.itemsize
            width = 8 * item if bits is None else count_planes(bits.levels)
            levels = None if bits is None else list(bits.levels)
            count = math.prod(shape)
            row = {"name": name, "shape": list(shape), "count": count, "bits": width, "levels": levels}
            rows.append({**row, "bytes": size, "float_bytes": count * item})
        return rows

    def entries(self, plain: nn.Module, file: BinaryIO) -> dict[str, Entry]:
        """The tensors, for a model without numbers; names, shapes and dtypes must be those of the model."""
        wanted = dict(state(plain))
        names = {name for name in self.stored if name in self.packed or name.removesuffix(".scale") not in self.packed}
        if names != set(wanted):
            odd = sorted(names ^ set(wanted))[0]
            where = "the file has, and the model lacks" if odd in names else "the model has, and the file lacks"
            raise self.error(f"it belongs to another model than {type(plain).__name__}: {where}, {odd}")
        for name, tensor in wanted.items():
            shape, dtype = (
                (self.packed[name].shape, self.packed[name].dtype)
                if name in self.packed
                else (self.stored[name].shape, self.stored[name].dtype)
            )
            if shape != tuple(tensor.shape):
                raise self.error(f"{name} has the shape {list(shape)}, but the model's is {list(tensor.shape)}")
            if dtype != tensor.dtype:
                raise self.error(f"{name} is {dtype}, but the model's is {tensor.dtype}")
        return {name: self._entry(file, name) for name in wanted}

    def _entry(self, file: BinaryIO, name: str) -> Entry:
        tensor = self._tensor(file, name)
        bits = self.packed.get(name)
        if bits is None:
            return tensor
        row = layout(bits.shape)[1]
        codes = unpack_bits(tensor, 8 * tensor.shape[2])
        if bool((codes[:, row:] != 0).any()):
            raise self.error(f"{name} has bits beyond the end of a row")
        if codes.numel() and int(codes.max()) >= len(bits.levels):
            raise self.error(f"{name} has level number {int(codes.max())}, but only {len(bits.levels)} levels")
        scale = self._tensor(file, f"{name}.scale") if bits.scaled else None
        return PackedTensor(tensor, bits.shape, bits.levels, scale, bits.dtype)

    def _tensor(self, file: BinaryIO, name: str) -> Tensor:
        place = self.stored[name]
        file.seek(self.start + place.begin)
        content = bytearray(file.read(place.size))
        if len(content) != place.size:
            raise self.error("it became shorter while it was read")
        if place.dtype == torch.bool and not set(content) <= {0, 1}:
            raise self.error(f"{name} is boolean, but holds {max(content)}")
        if not place.size:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(content, dtype=place.dtype).reshape(place.shape)

    def error(self, problem: str) -> PackError:
        """What is wrong with the file."""
        return PackError(f"{self.path}: {problem}")


@dataclass(frozen=True)
class _Stored:
    """Where a tensor's bytes are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass(frozen=True)
class _Bits:
    """What a packed tensor's bytes mean."""

    shape: tuple[int, ...]
    levels: Levels
    dtype: torch.dtype
    scaled: bool


# Writing.


def dump(model: nn.Module, about: dict[str, Any] | None = None) -> bytes:
    """The content of a packed file."""
    about, model = about_of(model, about), unwrapped(model)
    if isinstance(model, PackedModel):
        parameters = {name for name, _ in model.plain.named_parameters()}
        entries = {
            name: (PackedTensor.of(entry) or entry) if isinstance(entry, Tensor) and name in parameters else entry
            for name, entry in model.entries().items()
        }
        plain = model.plain
    else:
        entries, plain = entries_of(model, None, stored=True), model
    tensors: dict[str, Tensor] = {}
    packed: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if isinstance(entry, Tensor):
            tensors[name] = entry
            continue
        tensors[name] = entry.planes
        dtype = str(entry.dtype).removeprefix("torch.")
        packed[name] = {"shape": list(entry.shape), "levels": list(entry.levels), "dtype": dtype}
        if entry.scale is not None:
            if f"{name}.scale" in entries:
                raise PackError(f"{name} has a scale, but {name}.scale is taken by another tensor of the model")
            tensors[f"{name}.scale"] = entry.scale.to(entry.dtype)
            packed[name]["scale"] = f"{name}.scale"
    told: dict[str, Any] = {"format": FORMAT, "library": __version__, "architecture": _identified(plain)}
    told |= {"bits": BITS, "packed": packed, "about": about}
    return _container(told, tensors)


def _identified(plain: nn.Module) -> dict[str, Any] | None:
    """Which of this library's models it is, if it is one, in one dtype."""
    found = models.identify(plain)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for _, tensor in state(plain) if tensor.is_floating_point()}
    return None if found is None or len(dtypes) != 1 else {**found, "dtype": dtypes.pop()}


def _container(told: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in _CODES]
    if odd:
        raise PackError(f"{odd[0]} is {tensors[odd[0]].dtype}, but a file can hold only {', '.join(_DTYPES)}")
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # each aligned to its own size
    try:
        metadata = {"sha256": "0" * 64, "mirrorquant": _text(told)}
    except (TypeError, ValueError, RecursionError) as error:
        raise PackError(f"about is {told['about']!r}, expected what JSON can hold ({error})") from error
    header: dict[str, Any] = {"__metadata__": metadata, **dict.fromkeys(tensors)}
    chunks, begin = [], 0
    for name in order:
        chunks.append(_bytes(tensors[name]))
        end = begin + len(chunks[-1])
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _CODES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER:
        raise PackError(
            f"names and about take {len(text):,} bytes, but at most {_MOST_HEADER:,} can be loaded: tell less"
        )
    content = bytearray(b"".join([struct.pack("<Q", len(text)), text, *chunks]))
    content[_DIGEST] = hashlib.sha256(content).hexdigest().encode()
    return bytes(content)


def _text(value: dict[str, Any]) -> str:
    """JSON in ASCII, of a value that comes back: with text keys, and without lone surrogates."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    try:
        _json(text, "about")
    except _Wrong as error:
        raise ValueError(str(error)) from error
    return text


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


# Reading.


def read(path: str | os.PathLike[str]) -> Contents:
    """What a packed file says about itself, after its digest, its structure and its sizes were checked."""
    with _opened(path) as file:
        return _read(Path(path), file)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    try:
        with _files.open_regular(path) as file:
            yield file
    except OSError as error:
        raise PackError(f"{path} cannot be read ({error.strerror})") from error


def _read(path: Path, file: BinaryIO) -> Contents:
    size = os.fstat(file.fileno()).st_size
    start, header, digest = _header(path, file, size)
    try:
        return _contents(path, size, start, header, digest)
    except _Wrong as error:
        raise PackError(f"{path}: {error}") from error


class _Wrong(ValueError):
    """Something in a header."""


def _header(path: Path, file: BinaryIO, size: int) -> tuple[int, bytes, str]:
    """Where the tensors begin, the header's text, and the file's SHA-256, after that of its content was checked."""
    head = file.read(_DIGEST.stop)
    if head.startswith(_CHECKPOINT):
        raise PackError(
            f"{path} is a file of a run, not a packed model: 'mirrorquant pack {path}' packs a best.mq, and "
            "mirrorquant.train.checkpoint.load reads its tensors"
        )
    if len(head) < _DIGEST.stop or head[8 : _DIGEST.start] != _START:
        raise PackError(f"{path} is no packed model: it does not begin as one that mq.save wrote")
    length = struct.unpack("<Q", head[:8])[0]
    if length > min(size - 8, _MOST_HEADER):
        raise PackError(f"{path}: its header should have {length:,} bytes, but the file has {size:,}: it was cut off")
    blank = head[: _DIGEST.start] + b"0" * 64
    if 8 + length < len(blank):
        raise PackError(f"{path}: its header should have {length:,} bytes, which is too short for one")
    rest = file.read(8 + length - len(blank))
    content, whole = hashlib.sha256(blank + rest), hashlib.sha256(head + rest)
    while chunk := file.read(_CHUNK):
        content.update(chunk)
        whole.update(chunk)
    if head[_DIGEST] != content.hexdigest().encode():
        raise PackError(f"{path} is damaged or was altered: its SHA-256 does not fit its content")
    return 8 + length, blank[8:] + rest, whole.hexdigest()


def _contents(path: Path, size: int, start: int, header: bytes, digest: str) -> Contents:
    tensors = _json(header, "header")
    metadata = _object(tensors.pop("__metadata__", None), "metadata")
    told = _json(_string(metadata.get("mirrorquant"), "metadata"), "description")
    version = told.get("format")
    if version != FORMAT or isinstance(version, bool):
        raise _Wrong(
            f"its format is {_show(version)}, but this is mirrorquant {__version__}, which reads format {FORMAT}"
        )
    stored = {name: _stored(name, value) for name, value in tensors.items()}
    end = 0
    for place in sorted(stored.values(), key=lambda place: (place.begin, place.size)):
        if place.begin != end:
            raise _Wrong(f"its tensors leave a gap or overlap at byte {end:,}")
        end += place.size
    if start + end != size:
        raise _Wrong(f"its tensors take {end:,} bytes, but it has {size - start:,} for them")
    packed = {name: _bits(name, value, stored) for name, value in _object(told.get("packed"), "packed").items()}
    return Contents(
        path=path,
        size=size,
        sha256=digest,
        library=_string(told.get("library"), "library"),
        architecture=_architecture(told.get("architecture")),
        about=_object(told.get("about"), "about"),
        stored=stored,
        packed=packed,
        start=start,
    )


def _json(text: bytes | str, what: str) -> dict[str, Any]:
    """An object in JSON, in UTF-8 where it comes as bytes, in which no key comes twice and all text is Unicode."""

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key, value in pairs:
            if key in content:
                raise _Wrong(f"its {what} has the key {_show(key)} twice")
            content[key] = value
        return content

    def constant(name: str) -> None:
        raise _Wrong(f"its {what} holds {name}, which is no JSON")

    try:
        content = json.loads(
            text if isinstance(text, str) else text.decode(), object_pairs_hook=unique, parse_constant=constant
        )
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()  # fails on lone surrogates, and on 1e999
        if _depth(content) > _MOST_DEEP:
            raise _Wrong(f"its {what} is nested more than {_MOST_DEEP} deep")
        return _object(content, what)
    except _Wrong:
        raise
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise _Wrong(f"its {what} holds text that is not Unicode ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"its {what} is no JSON ({type(error).__name__})") from error


def _depth(content: Any) -> int:
    """How deep objects and lists are nested, counted up to one more than may be."""
    depth, level = 0, [content]
    while level and depth <= _MOST_DEEP:
        inner = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        depth, level = depth + bool(inner), [value for values in inner for value in values]
    return depth


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"its {what} is {_show(value)}, expected an object")
    return value


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"its {what} is {_show(value)}, expected a string")
    return value


def _integers(value: Any, what: str) -> tuple[int, ...]:
    right = isinstance(value, list) and len(value) <= 16
    if not right or not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        raise _Wrong(f"{what} is {_show(value)}, expected a list of sizes")
    return tuple(value)


def _show(value: Any) -> str:
    return repr(value)[:60]


def _stored(name: str, value: Any) -> _Stored:
    entry = _object(value, name)
    code = entry.get("dtype")
    if not isinstance(code, str) or code not in _DTYPES:
        raise _Wrong(f"{name} is {_show(code)}, expected one of {', '.join(_DTYPES)}")
    shape = _integers(entry.get("shape"), f"the shape of {name}")
    offsets = _integers(entry.get("data_offsets"), f"the place of {name}")
    size = math.prod(shape) * _DTYPES[code].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise _Wrong(f"{name} of {code} {list(shape)} takes {size:,} bytes, but its place is {list(offsets)}")
    return _Stored(_DTYPES[code], shape, offsets[0], size)


def _bits(name: str, value: Any, stored: dict[str, _Stored]) -> _Bits:
    entry = _object(value, name)
    shape = _integers(entry.get("shape"), f"the shape of {name}")
    dtype = _FLOATS.get(_string(entry.get("dtype"), f"dtype of {name}"))
    levels = entry.get("levels")
    if dtype is None:
        raise _Wrong(f"{name} is {_show(entry['dtype'])}, expected one of {', '.join(_FLOATS)}")
    numbers = levels if isinstance(levels, list) else []
    if not 2 <= len(numbers) <= MOST_LEVELS or not all(type(level) in (int, float) for level in numbers):
        raise _Wrong(f"the levels of {name} are {_show(levels)}, expected 2 to {MOST_LEVELS} numbers")
    try:
        found = Levels(*numbers)
    except (ValueError, OverflowError) as error:
        raise _Wrong(f"{name}: {error}") from error
    if any(float(torch.tensor(level, dtype=dtype)) != level for level in found):
        raise _Wrong(f"the levels of {name} are {_show(levels)}, which {dtype} cannot hold")
    rows, row = layout(shape)
    planes = stored.get(name)
    expected = (count_planes(found), rows, -(-row // 8))
    if planes is None or planes.dtype != torch.uint8 or planes.shape != expected:
        raise _Wrong(f"the bits of {name} are missing, or not U8 {list(expected)}")
    scaled = "scale" in entry
    if scaled:
        scale = stored.get(f"{name}.scale")
        if (
            entry["scale"] != f"{name}.scale"
            or scale is None
            or scale.dtype != dtype
            or scale.shape not in ((1,), (rows,))
        ):
            raise _Wrong(f"the scale of {name} is missing, or not {dtype} [{rows}]")
    return _Bits(shape, found, dtype, scaled)


def _architecture(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    entry = _object(value, "architecture")
    options = _object(entry.get("options"), "architecture's options")
    name = entry.get("name")
    if not isinstance(name, str) or name not in models.names():
        raise _Wrong(f"its architecture is {_show(name)}, expected one of {', '.join(models.names())}")
    if not all(type(option) is bool or (type(option) is int and 0 < option < 1 << 31) for option in options.values()):
        raise _Wrong(f"its architecture has the options {_show(options)}, expected sizes and switches")
    if not isinstance(entry.get("dtype"), str) or entry["dtype"] not in _FLOATS:
        raise _Wrong(f"its architecture is of {_show(entry.get('dtype'))}, expected one of {', '.join(_FLOATS)}")
    return {"name": name, "options": options, "dtype": entry["dtype"]}


def _build(contents: Contents) -> nn.Module:
    """The model without numbers: a lying header costs no memory."""
    if contents.architecture is None:
        raise PackError(
            f"{contents.path} holds a model that is not of this library: pass one of the same structure, model=..."
        )
    name, options = contents.architecture["name"], contents.architecture["options"]
    try:
        with torch.device("meta"):
            return models.build(name, **options).to(_FLOATS[contents.architecture["dtype"]])
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        reason = str(error).splitlines()[0]
        raise contents.error(f"{name} cannot be built with {options} ({reason[:200]})") from error


def _emptied(contents: Contents, model: nn.Module) -> nn.Module:
    """A model of the user without numbers, but for those of its buffers that no file holds."""
    if not isinstance(model, nn.Module):
        raise PackError(f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    saved = dict(state(model))
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in saved:
            raise contents.error(
                f"{name} is a buffer that is not saved, and the model's holds no numbers: build the model on a device "
                "that is not 'meta'"
            )
    return skeleton(model)
