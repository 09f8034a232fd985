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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, TensorSpec, serialize
from safetensors import torch as container
from torch import Tensor, nn

from mirrorquant import _files, models
from mirrorquant._version import __version__
from mirrorquant.levels import Levels
from mirrorquant.packing.bits import MOST_LEVELS, PackedTensor, PackError, count_planes, layout, unpack_bits
from mirrorquant.packing.metadata import InvalidError, about_of, check, from_json, to_json, typed
from mirrorquant.packing.model import Entry, PackedModel, assemble, entries_of, skeleton, state
from mirrorquant.select import unwrapped

__all__ = ["Contents", "load", "read", "save"]

FORMAT = 2  # format 1 had the digest in a metadata entry of its own
BITS = "plane j holds bit j of the level's number; one row per output channel; the first weight is in the lowest bit"
_BLANK = "0" * 64
_CHECKPOINTS = (b"PK\x03\x04", b"mirrorquant checkpoint ")  # how files of torch.save begin, and a run's old *.mq
_FLOATS = ("float64", "float32", "float16", "bfloat16")


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
    try:
        plain = _build(contents.architecture) if model is None else _emptied(unwrapped(model))
        entries = contents.entries_for(plain)
    except InvalidError as error:
        raise PackError(f"{path}: {error}") from error
    packed = assemble(plain, entries, fuse=fuse)
    vars(packed)["about"] = contents.about
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
    except InvalidError as error:
        raise PackError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Contents:
    """The checked contents of a packed file.

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

    def rows(self) -> list[dict[str, Any]]:
        """Name, shape, levels, bits and bytes of each tensor of the model."""
        return [row(name, entry) for name, entry in self.entries.items()]

    def entries_for(self, plain: nn.Module) -> dict[str, Entry]:
        """The tensors in the order of a model; names, shapes and dtypes must be those of the model."""
        wanted = dict(state(plain))
        for name in sorted(self.entries.keys() ^ wanted.keys()):
            where = "the file has, and the model lacks" if name in self.entries else "the model has, and the file lacks"
            raise InvalidError(f"it belongs to another model than {type(plain).__name__}: {where}, {name}")
        for name, tensor in wanted.items():
            found, expected = self.entries[name], list(tensor.shape)
            same = list(found.shape) == expected
            check(same, f"{name} has the shape {list(found.shape)}, but the model's is {expected}")
            check(found.dtype == tensor.dtype, f"{name} is {found.dtype}, but the model's is {tensor.dtype}")
        return {name: self.entries[name] for name in wanted}


def row(name: str, entry: Entry) -> dict[str, Any]:
    """Name, shape, levels, bits and bytes of a tensor, as a packed file stores it."""
    count, item = entry.shape.numel(), entry.dtype.itemsize
    bits, levels, scaled, size = 8 * item, None, False, count * item
    if isinstance(entry, PackedTensor):
        bits, levels, scaled = count_planes(entry.levels), list(entry.levels), entry.scale is not None
        size = sum(buffer.nbytes for buffer in entry.buffers())
    told = {"name": name, "shape": list(entry.shape), "count": count, "bits": bits, "levels": levels}
    return {**told, "scaled": scaled, "bytes": size, "float_bytes": count * item}


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
    told: dict[str, Any] = {"sha256": _BLANK, "format": FORMAT, "library": __version__}
    told |= {"architecture": _identified(plain), "bits": BITS, "packed": packed, "about": about}
    return _container(tensors, to_json(told))


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
    metadata = typed(header.get("__metadata__", {}), dict, "metadata")
    check("mirrorquant" in metadata, "it is a safetensors file, but not a packed model, which mq.save writes")
    told = from_json(typed(metadata["mirrorquant"], str, "description"), "description")
    digest = told.get("sha256", metadata.get("sha256"))
    before, _, after = content.partition(str(digest or None).encode())
    found = hashlib.sha256(before + _BLANK.encode() + after).hexdigest()
    check(found == digest, "it is damaged or was modified: its SHA-256 does not match its content")
    version = told.get("format")
    known = type(version) is int and 1 <= version <= FORMAT
    check(known, f"its format is {version!r:.60}, but mirrorquant {__version__} reads formats up to {FORMAT}")
    try:
        tensors = container.load(content)
    except (SafetensorError, KeyError, AssertionError) as error:
        raise InvalidError(f"safetensors cannot read it ({error})") from error
    entries: dict[str, Entry] = {}
    for name, value in typed(told.get("packed"), dict, "packed").items():
        entries[name] = _packed(name, typed(value, dict, name), tensors)
    scales = {f"{name}.scale" for name, entry in entries.items() if cast(PackedTensor, entry).scale is not None}
    for name in (name for name in header if name in tensors.keys() - entries - scales):
        entries[name] = tensors[name]
        flags = tensors[name].view(torch.uint8) if tensors[name].dtype == torch.bool else torch.empty(0)
        check(not bool((flags > 1).any()), f"{name} is boolean, but holds other bytes than 0 and 1")
    return Contents(
        path=path,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        library=typed(told.get("library"), str, "library"),
        architecture=_architecture(told.get("architecture")),
        about=typed(told.get("about"), dict, "about"),
        entries=entries,
    )


def _packed(name: str, entry: dict[str, Any], tensors: dict[str, Tensor]) -> PackedTensor:
    """A tensor from its bits, after its description was checked against them."""
    shape, numbers, dtype = entry.get("shape"), entry.get("levels"), _float_dtype(entry.get("dtype"), name)
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape) or len(shape) > 16:
        raise InvalidError(f"the shape of {name} is {shape!r:.60}, expected a list of sizes")
    if not isinstance(numbers, list) or not all(type(n) in (int, float) for n in numbers) or len(numbers) > MOST_LEVELS:
        raise InvalidError(f"the levels of {name} are {numbers!r:.60}, expected 2 to {MOST_LEVELS} numbers")
    try:
        levels = Levels(*numbers)
    except (ValueError, OverflowError) as error:
        raise InvalidError(f"{name}: {error}") from error
    exact = torch.tensor(levels, dtype=dtype).tolist() == list(levels)
    check(exact, f"the levels of {name} are {numbers!r:.60}, which {dtype} cannot hold")
    rows, row = layout(shape)
    planes, expected = tensors.get(name), (count_planes(levels), rows, -(-row // 8))
    if planes is None or planes.dtype != torch.uint8 or planes.shape != expected:
        raise InvalidError(f"the bits of {name} are missing, or not U8 {list(expected)}")
    codes = unpack_bits(planes, 8 * planes.shape[2])
    check(not bool((codes[:, row:] != 0).any()), f"{name} has bits beyond the end of a row")
    most = int(codes.max()) if codes.numel() else 0
    check(most < len(levels), f"{name} has level number {most}, but only {len(levels)} levels")
    scale = tensors.get(f"{name}.scale") if "scale" in entry else None
    if "scale" in entry and (scale is None or scale.dtype != dtype or scale.shape not in ((1,), (rows,))):
        raise InvalidError(f"the scale of {name} is missing, or not {dtype} [{rows}]")
    return PackedTensor(planes, shape, levels, scale, dtype)


def _float_dtype(name: Any, what: str) -> torch.dtype:
    check(name in _FLOATS, f"{what} is {name!r:.60}, expected one of {', '.join(_FLOATS)}")
    return cast(torch.dtype, getattr(torch, name))


def _architecture(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    entry = typed(value, dict, "architecture")
    name, options = entry.get("name"), typed(entry.get("options"), dict, "architecture's options")
    check(name in models.names(), f"its architecture is {name!r:.60}, expected one of {', '.join(models.names())}")
    right = all(type(n) is bool or (type(n) is int and 0 < n < 1 << 31) for n in options.values())
    check(right, f"its architecture has the options {options!r:.60}, expected sizes and switches")
    _float_dtype(entry.get("dtype"), "its architecture")
    return {"name": name, "options": options, "dtype": entry["dtype"]}


# Models.


def _build(architecture: dict[str, Any] | None) -> nn.Module:
    """A model of this library on the meta device, where a wrong size takes no memory."""
    if architecture is None:
        raise InvalidError("it holds a model that is not from this library: pass one of the same structure, model=...")
    name, options = architecture["name"], architecture["options"]
    try:
        with torch.device("meta"):
            return models.build(name, **options).to(getattr(torch, architecture["dtype"]))
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        raise InvalidError(f"{name} cannot be built with {options} ({str(error).splitlines()[0]:.200})") from error


def _emptied(model: nn.Module) -> nn.Module:
    """A custom model without its numbers, except for buffers that are never saved."""
    if not isinstance(model, nn.Module):
        raise PackError(f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    saved = dict(state(model))
    for name, buffer in model.named_buffers():
        known = name in saved or not buffer.is_meta
        check(known, f"{name} is a buffer that is not saved and has no numbers: build the model on a real device")
    return skeleton(model)
