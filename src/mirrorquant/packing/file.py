"""Packed files: a model at one bit per weight on disk, in a file that describes itself and cannot run code.

The container is safetensors. A tensor on levels is stored as its bit planes (see ``bits.py``) under its own name, with
its scales under ``NAME.scale``; all other tensors are stored unchanged. The metadata entry ``mirrorquant`` is JSON with
the format's version, the architecture, the shape, levels and dtype of each packed tensor, and ``sha256``, the digest of
the whole file with the digest itself replaced by zeros.

Any problem with a file raises a :class:`PackError` that names it. The digest detects damage, not forgery: anyone who
modifies a file on purpose can recompute it, so compare ``sha256sum`` with a value that you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, serialize
from safetensors import torch as container
from torch import Tensor, nn

from mirrorquant import _files, models
from mirrorquant._text import first_line
from mirrorquant._version import __version__
from mirrorquant.levels import Levels
from mirrorquant.packing.bits import DTYPES, PackedTensor, PackError, count_planes, layout
from mirrorquant.packing.model import (
    Entry,
    PackedModel,
    as_bits,
    assemble,
    entries_of,
    packable,
    skeleton,
    state,
    whole,
)
from mirrorquant.select import unwrapped

__all__ = ["Contents", "load", "read", "save"]

FORMAT = 2  # format 1 had the digest in a separate metadata entry
BITS = "plane j holds bit j of the level's number; one row per output channel; the first weight is in the lowest bit"
_BLANK = "0" * 64
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
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
    """Loads a packed model from a file, or the best network of a run; :func:`mirrorquant.unpack` gives the plain one.

    Its attribute ``about`` is the metadata that it was saved with, or the origin of the run. A float network (method
    ``ref``) is a packed model without bits: it can be saved and exported as any other.

    Args:
        path: a file that :func:`save` wrote, or the folder of a training run. A run of a custom model imports the
            module that it names, which runs its code: load only runs that you trust.
        model: a model of the same structure, with any weights; it is not modified. Not needed for runs, nor for the
            models of this library, which the file describes.
        fuse: as in :func:`mirrorquant.pack`.

    Raises:
        PackError: the file is damaged, was modified, has a newer format, or belongs to another model. The errors of
            a run are those of its configuration and checkpoint, also :class:`MirrorquantError`.
    """
    if (Path(path) / "config.json").exists():
        if model is not None:
            raise PackError(f"{path} is a run, which builds its own model: leave out model=")
        from mirrorquant.train import Best  # which needs this package

        return Best.load(path).packed(fuse=fuse)
    contents = read(path)
    try:
        plain = _build(contents.architecture) if model is None else _emptied(packable(unwrapped(model)))
        entries = _matched(contents.entries, plain)
    except PackError as error:
        raise PackError(f"{path}: {error}") from error
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
    try:
        return _contents(Path(path), content)
    except PackError as error:
        raise PackError(f"{path}: {error}") from error
    except Exception as error:  # anything may be wrong in a file from elsewhere
        raise PackError(
            f"{path}: it is damaged, or not a packed model, which mq.save writes ({first_line(error)})"
        ) from error


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
        return model, entries_of(packable(model), None)
    plain = model.plain if isinstance(model, PackedModel) else model
    entries: dict[str, Entry] = model.entries() if isinstance(model, PackedModel) else dict(state(model))
    parameters = {name for name, _ in plain.named_parameters()}
    for name, entry in entries.items():
        if isinstance(entry, Tensor):
            entries[name] = (as_bits(entry) if name in parameters else None) or whole(entry).detach()
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
    header = from_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = header.get("__metadata__", {})
    if "mirrorquant" not in metadata:
        raise PackError("it is a safetensors file, but not a packed model, which mq.save writes")
    description = from_json(metadata["mirrorquant"])
    digest = str(description.get("sha256", metadata.get("sha256")))
    before, _, after = content.partition(digest.encode())
    if hashlib.sha256(before + _BLANK.encode() + after).hexdigest() != digest:
        raise PackError("it is damaged or was modified: its SHA-256 does not match its content")
    if description["format"] > FORMAT:
        newer = f"its format is {description['format']}, but mirrorquant {__version__} reads formats up to {FORMAT}"
        raise PackError(f"{newer}: install a newer mirrorquant")
    tensors, entries = container.load(content), {}
    for name, entry in description["packed"].items():
        dtype, scale = _DTYPES[entry["dtype"]], tensors.pop(f"{name}.scale") if "scale" in entry else None
        levels = Levels(*torch.tensor(entry["levels"], dtype=dtype).tolist())
        planes, (rows, row) = tensors.pop(name), layout(entry["shape"])
        fits = planes.dtype == torch.uint8 and planes.shape == (count_planes(levels), rows, -(-row // 8))
        if not fits or (scale is not None and (scale.dtype != dtype or scale.shape not in ((rows,), (1,)))):
            raise PackError(f"it is damaged: the bits or the scale of {name} do not have its shape {entry['shape']}")
        entries[name] = bits = PackedTensor(planes, entry["shape"], levels, scale, dtype)
        bits.unpack()  # raises an error for bits that are the number of no level
    return Contents(
        path=path,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        library=description["library"],
        architecture=description.get("architecture"),
        about=dict(description["about"]),
        entries={**entries, **{name: tensors[name] for name in header if name in tensors}},
    )


# Metadata.


def from_json(text: bytes | str) -> dict[str, Any]:
    """Parses an object; raises ValueError for anything else, and for numbers that are not finite."""
    content = json.loads(text)
    json.dumps(content, allow_nan=False)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, found {type(content).__name__}")
    return content


def to_json(value: dict[str, Any]) -> str:
    """A description as JSON in ASCII that can be read back."""
    try:
        text = json.dumps(value, separators=(",", ":"))
        from_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise PackError(f"about is {value['about']!r}, but JSON cannot hold it ({error})") from error
    return text


def about_of(model: nn.Module, about: dict[str, Any] | None = None) -> dict[str, Any]:
    """The metadata of a model: the caller's, or else that of the file it was loaded from."""
    if about is None:
        model = unwrapped(model)
        return dict(model.about) if isinstance(model, PackedModel) else {}
    if not isinstance(about, dict):
        raise PackError(f"about is {about!r}, expected a dictionary")
    return about


def read_about(text: str) -> dict[str, Any]:
    """The metadata that a file of another runtime has as JSON; empty if the text is something else."""
    try:
        return dict(from_json(text)["about"])
    except (LookupError, TypeError, ValueError, RecursionError):
        return {}


# Models.


def _build(architecture: dict[str, Any] | None) -> nn.Module:
    """A model of this library on the meta device, where a wrong size takes no memory."""
    if architecture is None:
        remedy = "pass one of the same structure, by model=... or --model MODULE:FUNCTION"
        raise PackError(f"it holds a model that is not from this library: {remedy}")
    try:
        name, options, dtype = (architecture[key] for key in ("name", "options", "dtype"))
        if name not in models.names():  # others could run code
            raise ValueError(f"{name!r} is none of {', '.join(models.names())}")
        with torch.device("meta"):
            return models.build(name, **options).to(_DTYPES[dtype])
    except Exception as error:
        raise PackError(f"its model {architecture} cannot be built ({first_line(error):.200})") from error


def _emptied(model: nn.Module) -> nn.Module:
    """A custom model without its numbers, except for buffers that are never saved."""
    saved = dict(state(model))
    for name, buffer in model.named_buffers():
        if name not in saved and buffer.is_meta:
            raise PackError(
                f"{name} is a buffer that is not saved and has no numbers: build the model on a real device"
            )
    return skeleton(model)


def _matched(entries: dict[str, Entry], plain: nn.Module) -> dict[str, Entry]:
    """The tensors in the order of a model; names, shapes and dtypes must be those of the model."""
    wanted = dict(state(plain))
    for name in sorted(entries.keys() ^ wanted.keys()):
        where = "the file has, and the model lacks" if name in entries else "the model has, and the file lacks"
        raise PackError(f"it belongs to another model than {type(plain).__name__}: {where}, {name}")
    for name, tensor in wanted.items():
        found, expected = (f"{t.dtype} {list(t.shape)}" for t in (entries[name], tensor))
        if found != expected:
            raise PackError(f"{name} is {found}, but the model's is {expected}")
    return {name: entries[name] for name in wanted}
