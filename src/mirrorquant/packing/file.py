"""Packed files: a model at one bit per weight on disk, in a file that describes itself and cannot run code.

The container is safetensors. A tensor on levels is stored as its bit planes (see ``bits.py``) under its own name, with
its scales under ``NAME.scale``; all other tensors are stored unchanged. The metadata entry ``mirrorquant`` is JSON with
the format's version, the architecture, the shape, levels and dtype of each packed tensor, and ``sha256``, the digest of
the whole file with the digest itself replaced by zeros.

Files are not trusted: the digest, names, shapes, sizes and level numbers are checked, and any problem raises a
:class:`PackError` that names the file. The digest detects damage, not forgery: anyone who modifies a file on purpose
can recompute it, so compare ``sha256sum`` with a value that you trust.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, serialize
from safetensors import torch as container
from torch import Tensor, nn

from mirrorquant import _files, models
from mirrorquant._version import __version__
from mirrorquant.levels import Levels
from mirrorquant.packing.bits import PackedTensor, PackError, count_planes, layout, unpack_bits
from mirrorquant.packing.metadata import about_of, check, field, from_json, to_json
from mirrorquant.packing.model import Entry, PackedModel, assemble, entries_of, skeleton, state
from mirrorquant.select import unwrapped

__all__ = ["Contents", "load", "read", "save"]

FORMAT = 2  # format 1 had the digest in a separate metadata entry
BITS = "plane j holds bit j of the level's number; one row per output channel; the first weight is in the lowest bit"
_BLANK = "0" * 64
_CHECKPOINTS = (b"PK\x03\x04", b"mirrorquant checkpoint ")  # how files of torch.save begin, and a run's old *.mq


def save(model: nn.Module, path: str | os.PathLike[str], *, about: dict[str, Any] | None = None) -> None:
    """Writes a finalized model, plain or packed, at one bit per weight.

    Every parameter on levels is stored as bits, whatever its module; everything else is stored unchanged. The file is
    written atomically. A model sharded by FSDP2 is gathered, so every process has to call this.

    Args:
        model: a model after ``MirrorDescent.finalize()``, or a packed one.
        path: the file, usually ``*.safetensors``.
        about: further metadata, as JSON: the data set, the accuracy, ... By default the ``about`` of a model that
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
    """Loads a packed model from a file; :func:`mirrorquant.unpack` gives the plain one.

    Its attribute ``about`` is the metadata that it was saved with.

    Args:
        path: a file that :func:`save` wrote.
        model: a model of the same structure, with any weights; it is not modified. Not needed for the models of this
            library, which the file describes.
        fuse: as in :func:`mirrorquant.pack`.

    Raises:
        PackError: the file is damaged, was modified, has a newer format, or belongs to another model.
    """
    contents = read(path)
    with _naming(path):
        plain = _build(contents.architecture) if model is None else _emptied(unwrapped(model))
        entries = _matched(contents.entries, plain)
    packed = assemble(plain, entries, fuse=fuse)
    packed.about = contents.about
    return packed


def read(path: str | os.PathLike[str]) -> Contents:
    """Reads and checks a packed file, without building its model."""
    try:
        content = _files.read_regular(path)
    except OSError as error:
        raise PackError(f"{path} cannot be read ({error.strerror})") from error
    if content.startswith(_CHECKPOINTS):
        raise PackError(
            f"{path} is a checkpoint, not a packed model: 'mirrorquant pack {path}' packs the best.pt of a run, and "
            "torch.load(path, weights_only=True) reads its tensors"
        )
    with _naming(path):
        return _contents(Path(path), content)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the name of the file before the message of an error."""
    try:
        yield
    except PackError as error:
        raise PackError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Contents:
    """The checked contents of a packed file, of which :func:`mirrorquant.summary` makes a table.

    ``sha256`` is the digest of the whole file, as sha256sum prints it; ``about`` is the writer's metadata;
    ``architecture`` is the name and the options of one of this library's models, or None; ``entries`` has each tensor
    of the model, as bits or as it is.
    """

    path: Path
    size: int
    sha256: str
    library: str
    architecture: dict[str, Any] | None
    about: dict[str, Any]
    entries: dict[str, Entry]


# Writing.


def stored(model: nn.Module, *, finalized: bool = True) -> tuple[nn.Module, dict[str, Entry]]:
    """A plain or packed model as a file stores it: its structure, and its tensors as bits or as they are.

    A plain model must be ``finalized``, or this raises an error.
    """
    model = unwrapped(model)
    if finalized and not isinstance(model, PackedModel):
        return model, entries_of(model, None, stored=True)
    plain = model.plain if isinstance(model, PackedModel) else model
    entries: dict[str, Entry] = model.entries() if isinstance(model, PackedModel) else dict(state(model))
    for name, _ in plain.named_parameters():
        entry = entries[name]
        entries[name] = entry if isinstance(entry, PackedTensor) else PackedTensor.of(entry) or entry.detach()
    return plain, entries


def dump(model: nn.Module, about: dict[str, Any] | None = None) -> bytes:
    """The content of a packed file."""
    about = about_of(model, about)
    return content(*stored(model), about)


def content(plain: nn.Module, entries: dict[str, Entry], about: dict[str, Any]) -> bytes:
    """The content of a packed file, from the structure of a model and its tensors."""
    tensors: dict[str, Tensor] = {}
    packed: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if isinstance(entry, Tensor):
            tensors[name] = entry
            continue
        tensors[name] = entry.planes
        packed[name] = {"shape": list(entry.shape), "levels": list(entry.levels), "dtype": _dtype_name(entry.dtype)}
        if entry.scale is not None:
            if f"{name}.scale" in entries:
                raise PackError(f"{name} has a scale, but {name}.scale is taken by another tensor of the model")
            tensors[f"{name}.scale"] = entry.scale.to(entry.dtype)
            packed[name]["scale"] = f"{name}.scale"
    description: dict[str, Any] = {"sha256": _BLANK, "format": FORMAT, "library": __version__}
    description |= {"architecture": _identified(plain), "bits": BITS, "packed": packed, "about": about}
    return _container(tensors, to_json(description))


def _identified(plain: nn.Module) -> dict[str, Any] | None:
    """The name and options of a model of this library, if it is one and has a single dtype."""
    found = models.identify(plain)
    dtypes = {_dtype_name(tensor.dtype) for _, tensor in state(plain) if tensor.is_floating_point()}
    return None if found is None or len(dtypes) != 1 else {**found, "dtype": dtypes.pop()}


def _container(tensors: dict[str, Tensor], text: str) -> bytes:
    specs = {}
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}  # while their memory is read
    for name, tensor in held.items():
        place = {"data_ptr": tensor.data_ptr(), "data_len": tensor.nbytes}
        try:
            specs[name] = TensorSpec(dtype=_dtype_name(tensor.dtype), shape=tensor.shape, **place)
        except SafetensorError as error:
            raise PackError(f"{name} is {tensor.dtype}, which a safetensors file cannot hold") from error
    content = bytes(serialize(specs, {"mirrorquant": text}))
    return content.replace(_BLANK.encode(), hashlib.sha256(content).hexdigest().encode(), 1)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Reading.


def _contents(path: Path, content: bytes) -> Contents:
    header = from_json(content[8 : 8 + int.from_bytes(content[:8], "little")], "header")
    metadata = field({"__metadata__": {}, **header}, "__metadata__", "its header")
    text = metadata.get("mirrorquant")
    check(isinstance(text, str), "it is a safetensors file, but not a packed model, which mq.save writes")
    description = from_json(text, "description")
    digest = description.get("sha256", metadata.get("sha256"))
    before, _, after = content.partition(str(digest or None).encode())
    found = hashlib.sha256(before + _BLANK.encode() + after).hexdigest()
    check(found == digest, "it is damaged or was modified: its SHA-256 does not match its content")
    version = description.get("format")
    known = type(version) is int and 1 <= version <= FORMAT
    check(known, f"its format is {version!r:.60}, but mirrorquant {__version__} reads formats up to {FORMAT}")
    try:
        tensors = container.load(content)
    except (SafetensorError, KeyError, AssertionError) as error:
        raise PackError(f"safetensors cannot read it ({error})") from error
    packed = field(description, "packed", "its description")
    entries: dict[str, Entry] = {name: _packed(name, entry, tensors) for name, entry in packed.items()}
    scales = {f"{name}.scale" for name, entry in packed.items() if "scale" in entry}
    for name in (name for name in header if name in tensors.keys() - entries - scales):
        entries[name] = tensors[name]
        flags = tensors[name].view(torch.uint8) if tensors[name].dtype == torch.bool else torch.empty(0)
        check(not bool((flags > 1).any()), f"{name} is boolean, but holds other bytes than 0 and 1")
    architecture = description.get("architecture")
    if architecture is not None:
        check(isinstance(architecture, dict), f"its architecture is {architecture!r:.60}, expected an object")
        architecture = {key: field(architecture, key, "its architecture") for key in ("name", "options", "dtype")}
    return Contents(
        path=path,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        library=field(description, "library", "its description"),
        architecture=architecture,
        about=field(description, "about", "its description"),
        entries=entries,
    )


def _packed(name: str, entry: dict[str, Any], tensors: dict[str, Tensor]) -> PackedTensor:
    """A tensor from its bits, after its description was checked against them."""
    shape, numbers, dtype = (field(entry, key, name) for key in ("shape", "levels", "dtype"))
    dtype = getattr(torch, dtype)
    try:
        levels = Levels(*numbers)
    except (ValueError, OverflowError) as error:
        raise PackError(f"{name}: {error}") from error
    exact = torch.tensor(levels, dtype=dtype).tolist() == list(levels)
    check(exact, f"{name}: levels are {numbers!r:.60}, which {dtype} cannot hold")
    rows, row = layout(shape)
    planes, scale = tensors.get(name, torch.empty(0)), tensors.get(f"{name}.scale") if "scale" in entry else None
    expected = (count_planes(levels), rows, -(-row // 8))
    right = planes.dtype == torch.uint8 and planes.shape == expected
    check(right, f"the bits of {name} are missing, or not U8 {list(expected)}")
    codes = unpack_bits(planes, 8 * planes.shape[2])
    check(not bool((codes[:, row:] != 0).any()), f"{name} has bits beyond the end of a row")
    most = int(codes.max()) if codes.numel() else 0
    check(most < len(levels), f"{name} has level number {most}, but only {len(levels)} levels")
    right = scale is not None and scale.dtype == dtype and scale.shape in ((1,), (rows,))
    check(right or "scale" not in entry, f"the scale of {name} is missing, or not {dtype} [{rows}]")
    return PackedTensor(planes, shape, levels, scale, dtype)


# Models.


def _build(architecture: dict[str, Any] | None) -> nn.Module:
    """A model of this library on the meta device, where a wrong size takes no memory."""
    if architecture is None:
        raise PackError("it holds a model that is not from this library: pass one of the same structure, model=...")
    name, options = architecture["name"], architecture["options"]
    try:
        with torch.device("meta"):
            return models.build(name, **options).to(getattr(torch, architecture["dtype"]))
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        raise PackError(f"{name} cannot be built with {options} ({str(error).splitlines()[0]:.200})") from error


def _emptied(model: nn.Module) -> nn.Module:
    """A custom model without its numbers, except for buffers that are never saved."""
    check(isinstance(model, nn.Module), f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    saved = dict(state(model))
    for name, buffer in model.named_buffers():
        known = name in saved or not buffer.is_meta
        check(known, f"{name} is a buffer that is not saved and has no numbers: build the model on a real device")
    return skeleton(model)


def _matched(entries: dict[str, Entry], plain: nn.Module) -> dict[str, Entry]:
    """The tensors in the order of a model; names, shapes and dtypes must be those of the model."""
    wanted = dict(state(plain))
    for name in sorted(entries.keys() ^ wanted.keys()):
        where = "the file has, and the model lacks" if name in entries else "the model has, and the file lacks"
        raise PackError(f"it belongs to another model than {type(plain).__name__}: {where}, {name}")
    for name, tensor in wanted.items():
        found, expected = entries[name], list(tensor.shape)
        check(list(found.shape) == expected, f"{name} has the shape {list(found.shape)}, but the model's is {expected}")
        check(found.dtype == tensor.dtype, f"{name} is {found.dtype}, but the model's is {tensor.dtype}")
    return {name: entries[name] for name in wanted}
