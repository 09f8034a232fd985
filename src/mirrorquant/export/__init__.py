"""Export: a finalized model as a file for other runtimes, still at one bit per quantized weight.

``torch.export`` traces the network. ``onnx.py`` has torch write it as ONNX and stores the weights on levels as bits;
``openvino.py`` makes OpenVINO IR from that, with bit-wise convolutions after binary activations.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_flatten_with_path, tree_leaves, tree_map

from mirrorquant.packing.bits import PackedTensor, PackError
from mirrorquant.packing.file import about_of, stored, to_json
from mirrorquant.packing.model import Entry, restored

__all__ = ["FORMATS", "export"]

FORMATS = ("onnx", "openvino")


@torch.no_grad()
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    shape: Sequence[int] | None = None,
    *,
    inputs: Tensor | tuple[Any, ...] | dict[str, Any] | None = None,
    to: str = "onnx",
    bits: bool = True,
    about: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes a finalized model, plain or packed, for ONNX Runtime or OpenVINO.

    ONNX: a weight on levels is a uint8 initializer, followed by the operators that decode it; the runtime does that
    once, at load time, so the results are bit-identical to those of the float32 file. OpenVINO IR: such weights are u1
    constants, and a convolution after a :class:`mirrorquant.nn.BinaryActivation` is a BinaryConvolution, which
    computes on bits; such a model takes one image at a time, unless it is reshaped. At export the CPU plugin runs each
    of these layers once, and a layer with a wrong result stays a plain convolution.

    On processors that have bfloat16 instructions OpenVINO uses them by default, which is less exact.
    Compile the model with ``{"INFERENCE_PRECISION_HINT": "f32"}`` for the results of this library.

    Before a file is written, its runtime runs it once, and the outputs are compared with those of the model. Files are
    written atomically: when an export fails, the files of an earlier one are still there.

    Args:
        model: a model after ``MirrorDescent.finalize()``, or a packed one. Its ``forward`` must be one that
            ``torch.export`` can trace with a batch of any size; it returns a tensor, or tuples and dictionaries of
            tensors.
        path: ``*.onnx``, or ``*.xml``, with the weights in ``*.bin`` beside it.
        shape: of one item of the batch, as in ``(3, 32, 32)``, for a model with one input; it is called ``input`` in
            the file.
        inputs: in place of ``shape``, example inputs: a tensor, a tuple of positional arguments, or a dictionary of
            keyword arguments, which may be nested. Dimension 0 of the first tensor is the batch, of any size in the
            file; so is dimension 0 of all tensors of the same size, and other tensors have fixed sizes. In the file
            they have the names of the arguments of ``forward`` and of the keys of dictionaries. Outputs are called
            ``output``, ``output_0``, ``output_1``, ..., or have the keys of the dictionary that ``forward`` returns.
        to: ``onnx`` (needs the extra ``onnx``) or ``openvino`` (needs the extra ``openvino``).
        bits: False writes float32 weights instead.
        about: further metadata, as JSON: the data set, the accuracy, ... By default the ``about`` of a model that
            :func:`mirrorquant.load` returned.
        dtype: of the input, with ``shape``; ``torch.int64`` for models of tokens.

    Example:
        >>> import tempfile, torch, mirrorquant as mq
        >>> from mirrorquant.export.onnx import OnnxModel
        >>> model = torch.nn.Bilinear(8, 8, 4)
        >>> _ = model.weight.data.sign_()
        >>> path = tempfile.mkdtemp() + "/net.onnx"
        >>> mq.export(model, path, inputs={"input1": torch.randn(2, 8), "input2": torch.randn(2, 8)})
        >>> OnnxModel(path)(input1=torch.randn(5, 8), input2=torch.randn(5, 8)).shape
        torch.Size([5, 4])

    Raises:
        PackError: the model cannot be exported, or the file cannot be written.
    """
    if to not in FORMATS:
        raise PackError(f"to is {to!r}, but it must be one of {', '.join(FORMATS)}")
    if to == "openvino":
        from mirrorquant.export import openvino
    from mirrorquant.export import onnx

    text, target = to_json({"about": about_of(model, about)}), Path(path)
    if to == "openvino" and target.suffix != ".xml":
        raise PackError(f"the path is {path}, but that of OpenVINO IR must end in .xml")
    plain, entries = stored(model)
    network = restored(plain, entries).cpu().float()
    network.eval().requires_grad_(False)
    exported: onnx.OnnxModel | openvino.OpenVinoModel
    given = _Inputs.of(network, shape, inputs, dtype)
    try:
        program, outputs = _traced(network, given)
        packed = _packed(network, entries, {*given.names, *outputs}) if bits else {}
        content = onnx.convert(program, packed, text, given.names, outputs)
        exported = onnx.OnnxModel(content) if to == "onnx" else openvino.convert(content, packed, text, network)
        _verify(network, given.changed(_with_one_more), exported)
    except Exception as error:
        sizes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(given.names, given.tensors, strict=True))
        problem = (
            f"{type(network).__name__} cannot be exported with inputs of {sizes if shape is None else list(shape)}"
        )
        raise PackError(f"{problem}: {reason(error)}") from error
    exported.save(target)


def reason(error: BaseException) -> str:
    """The line of a runtime's message that describes the problem, from the error that caused the others."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("Exception from ")), type(error).__name__)


def ordered(names: Sequence[str], inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call of an exported model, in the order of its inputs."""
    tensors: list[Tensor] = tree_leaves(inputs)
    left = list(names[len(tensors) :])
    rest = named if named.keys() == set(left) else _by_name(named)
    if len(tensors) > len(names) or rest.keys() != set(left):
        found = f"{len(tensors)} inputs by position" + f" and {', '.join(rest)}" * bool(rest)
        raise PackError(f"the call has {found}, but the model takes {', '.join(names)}")
    return [*tensors, *(rest[name] for name in left)]


def _by_name(tree: dict[str, Any]) -> dict[str, Tensor]:
    return dict(zip(_names(tree), tree_leaves(tree), strict=True))


def structured(names: Sequence[str], outputs: list[Tensor]) -> Any:
    """The outputs of an exported model: one tensor, a tuple if they have numbers only, or a dictionary by name.

    >>> structured(["output"], [1]), structured(["output_0", "output_1"], [1, 2]), structured(["a", "b"], [1, 2])
    (1, (1, 2), {'a': 1, 'b': 2})
    """
    if list(names) == ["output"]:
        return outputs[0]
    numbered = all(re.fullmatch(r"output(_\d+)+", name) for name in names)
    return tuple(outputs) if numbered else dict(zip(names, outputs, strict=True))


def _packed(network: nn.Module, entries: dict[str, Entry], ends: set[str]) -> dict[str, PackedTensor]:
    """The bits of float32 tensors, by all of their names; without those that only a narrower dtype holds exactly.

    A tensor with the name of an input or output gets a dot.
    """
    packed: dict[str, PackedTensor] = {}
    tensors = network.state_dict(keep_vars=True)
    for name, entry in entries.items():
        bits = PackedTensor.of(tensors[name], entry.levels) if isinstance(entry, PackedTensor) else None
        if bits is not None:
            packed |= {other: bits for other, tensor in tensors.items() if tensor is tensors[name]}
    return {f"{name}." if name in ends else name: bits for name, bits in packed.items()}


@dataclass(frozen=True)
class _Inputs:
    """The arguments of a call, and the names of their tensors in a file."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str]

    @classmethod
    def of(cls, network: nn.Module, shape: Sequence[int] | None, inputs: Any, dtype: torch.dtype) -> _Inputs:
        """From the arguments of :func:`export`: two random items of this shape, or examples."""
        if (shape is None) == (inputs is None):
            raise PackError("export takes either the shape of one item of the batch, as in (3, 32, 32), or inputs=")
        if isinstance(shape, int):
            raise PackError(f"shape is {shape}, but it must be that of one item of the batch, as in ({shape},)")
        if shape is not None:
            x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
            return cls((x.mul(dtype.is_floating_point).to(dtype),), {}, ["input"])
        args = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
        try:
            bound = inspect.signature(network.forward).bind(*args, **(inputs if isinstance(inputs, dict) else {}))
        except TypeError as error:
            raise PackError(f"inputs do not fit the forward of {type(network).__name__}: {error}") from error
        found = cls(bound.args, bound.kwargs, _names(dict(bound.arguments)))
        wrong = [leaf for leaf in tree_leaves((found.args, found.kwargs)) if not isinstance(leaf, Tensor)]
        if wrong or not found.tensors or not found.tensors[0].dim():
            problem = f"inputs contain {wrong[0]!r:.40}" if wrong else "the first tensor of inputs has no batch"
            raise PackError(f"{problem}, but they must be batches of tensors: set anything else in the model itself")
        found = found.changed(lambda x, _: x.detach().cpu().float() if x.is_floating_point() else x.detach().cpu())
        return found.changed(_twice) if len(found.tensors[0]) == 1 else found  # torch takes a size of 1 for a constant

    @property
    def tensors(self) -> list[Tensor]:
        return tree_leaves((self.args, self.kwargs))

    def mapped(self, change: Callable[[Tensor, bool], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with something in the place of each tensor, which may have the dimension of the batch."""
        batch = len(self.tensors[0])
        changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
            lambda x: change(x, bool(x.dim()) and len(x) == batch), (self.args, self.kwargs)
        )
        return changed

    def changed(self, change: Callable[[Tensor, bool], Tensor]) -> _Inputs:
        return _Inputs(*self.mapped(change), self.names)

    def call(self, network: nn.Module) -> Any:
        """The result of a network, which gets copies."""
        args, kwargs = self.mapped(lambda x, batched: x.clone())
        return network(*args, **kwargs)


def _twice(x: Tensor, batched: bool) -> Tensor:
    return torch.cat([x, x]) if batched else x


def _with_one_more(x: Tensor, batched: bool) -> Tensor:
    return torch.cat([x, x[:1].flip(-1)]) if batched else x


def _names(tree: dict[str, Any], taken: Sequence[str] = ()) -> list[str]:
    """A name for each tensor: its last key, with the places in tuples after it; all keys, if that is ambiguous.

    >>> _names({"x": 0, "batch": {"ids": 0, "mask": 0}, "state": (0, 0)})
    ['x', 'ids', 'mask', 'state_0', 'state_1']
    """
    paths = [[str(getattr(key, "key", getattr(key, "idx", key))) for key in path] for path in _paths(tree)]
    last = [max(n for n, key in enumerate(path) if isinstance(key, MappingKey)) for path in _paths(tree)]
    short = ["_".join(path[start:]) for path, start in zip(paths, last, strict=True)]
    count = Counter([*short, *taken])
    return [name if count[name] == 1 else "_".join(path) for name, path in zip(short, paths, strict=True)]


def _paths(tree: Any) -> list[tuple[Any, ...]]:
    return [path for path, _ in tree_flatten_with_path(tree)[0]]


def _traced(network: nn.Module, inputs: _Inputs) -> tuple[torch.export.ExportedProgram, list[str]]:
    """The network as torch.export traces it, with a batch of any size; and the names of its outputs."""
    y, again = inputs.call(network), inputs.call(network)
    for one, two in zip(tree_leaves(y), tree_leaves(again), strict=True):
        if not isinstance(one, Tensor):
            raise PackError(f"it returns a {type(one).__name__}, expected tensors, or tuples or dictionaries of them")
        if not torch.allclose(one, two, rtol=0, atol=0, equal_nan=True):
            raise PackError("two calls with the same input differ, because forward draws random numbers or keeps state")
    sizes = inputs.mapped(lambda x, batched: {0: torch.export.Dim.DYNAMIC} if batched else None)
    keywords = list(inspect.signature(network.forward).parameters)[: len(inputs.args)]
    with quiet():
        shapes: Any = sizes[0] if not sizes[1] else dict(zip(keywords, sizes[0], strict=True)) | sizes[1]
        program = torch.export.export(network, inputs.args, inputs.kwargs, dynamic_shapes=shapes)
    return program, _names({"output": y}, inputs.names)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of torch's exporter, which are not about the model."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _verify(network: nn.Module, inputs: _Inputs, exported: nn.Module) -> None:
    """Compares the outputs in the other runtime, within a bound from small changes of the inputs."""
    generator = torch.Generator().manual_seed(1)

    def moved(x: Tensor, batched: bool) -> Tensor:
        return (x + 1e-6 * torch.randn(x.shape, generator=generator)).to(x.dtype) if x.is_floating_point() else x

    expected, found = tree_leaves(inputs.call(network)), tree_leaves(exported(*inputs.tensors))
    others = [tree_leaves(inputs.changed(moved).call(network)) for _ in range(4)]
    for y, got, *near in zip(expected, found, *others, strict=True):
        y, got = y.double(), got.double()
        bound = 1e-3 * y.abs().max() + 10 * max((other.double() - y).abs().max() for other in near)
        if y.shape != got.shape or not bool(((got - y).abs() <= bound).all() | ~torch.isfinite(y).all()):
            raise PackError(f"{exported.runtime} computes something else from the file")
