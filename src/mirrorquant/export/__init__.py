"""Export: a finalized model as a file for other runtimes, still at one bit per quantized weight.

``torch.export`` traces the network. ``onnx.py`` has torch write it as ONNX and stores the weights on levels as bits;
``openvino.py`` makes OpenVINO IR from that, with bit-wise convolutions after binary activations.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mirrorquant.packing.bits import PackedTensor, PackError
from mirrorquant.packing.file import about_of, stored, to_json
from mirrorquant.packing.model import Entry, restored

__all__ = ["FORMATS", "export"]

FORMATS = ("onnx", "openvino")
ENDS = ("input", "output")  # of the network in a file, where a tensor with such a name gets a dot


@torch.no_grad()
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    shape: Sequence[int],
    *,
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
        model: a model after ``MirrorDescent.finalize()``, or a packed one, with one input (a batch) and one output.
            Its ``forward`` must be one that ``torch.export`` can trace with a batch of any size.
        path: ``*.onnx``, or ``*.xml``, with the weights in ``*.bin`` beside it.
        shape: of one item of the batch, as in ``(3, 32, 32)``.
        to: ``onnx`` (needs the extra ``onnx``) or ``openvino`` (needs the extra ``openvino``).
        bits: False writes float32 weights instead.
        about: further metadata, as JSON: the data set, the accuracy, ... By default the ``about`` of a model that
            :func:`mirrorquant.load` returned.
        dtype: of the input; ``torch.int64`` for models of tokens.

    Raises:
        PackError: the model cannot be exported, or the file cannot be written.
    """
    if to not in FORMATS:
        raise PackError(f"to is {to!r}, but it must be one of {', '.join(FORMATS)}")
    if isinstance(shape, int):
        raise PackError(f"shape is {shape}, but it must be that of one item of the batch, as in ({shape},)")
    if to == "openvino":
        from mirrorquant.export import openvino
    from mirrorquant.export import onnx

    text, target = to_json({"about": about_of(model, about)}), Path(path)
    if to == "openvino" and target.suffix != ".xml":
        raise PackError(f"the path is {path}, but that of OpenVINO IR must end in .xml")
    plain, entries = stored(model)
    network = restored(plain, entries).cpu().float()
    network.eval().requires_grad_(False)
    packed = _packed(network, entries) if bits else {}
    exported: onnx.OnnxModel | openvino.OpenVinoModel
    try:
        content = onnx.convert(_traced(network, _inputs(2, shape, dtype)), packed, text)
        exported = onnx.OnnxModel(content) if to == "onnx" else openvino.convert(content, packed, text)
        _verify(network, _inputs(3, shape, dtype), exported)
    except Exception as error:
        problem = f"{type(network).__name__} cannot be exported with inputs of {list(shape)}"
        raise PackError(f"{problem}: {reason(error)}") from error
    exported.save(target)


def reason(error: BaseException) -> str:
    """The line of a runtime's message that describes the problem, from the error that caused the others."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("Exception from ")), type(error).__name__)


def _packed(network: nn.Module, entries: dict[str, Entry]) -> dict[str, PackedTensor]:
    """The bits of float32 tensors, by all of their names; without those that only a narrower dtype holds exactly."""
    packed: dict[str, PackedTensor] = {}
    tensors = network.state_dict(keep_vars=True)
    for name, entry in entries.items():
        bits = PackedTensor.of(tensors[name], entry.levels) if isinstance(entry, PackedTensor) else None
        if bits is not None:
            packed |= {other: bits for other, tensor in tensors.items() if tensor is tensors[name]}
    return {f"{name}." if name in ENDS else name: bits for name, bits in packed.items()}


def _inputs(batch: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, *shape, generator=generator, dtype=torch.float32).mul(dtype.is_floating_point).to(dtype)


def _traced(network: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    """The network as torch.export traces it, with a batch of any size."""
    y, again = network(x.clone()), network(x.clone())
    if not isinstance(y, Tensor):
        raise PackError(f"it returns a {type(y).__name__}, expected one tensor")
    if not torch.allclose(y, again, rtol=0, atol=0, equal_nan=True):
        raise PackError("two calls with the same input differ, because forward draws random numbers or keeps state")
    with quiet():
        return torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


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


def _verify(network: nn.Module, x: Tensor, exported: nn.Module) -> None:
    """Compares the outputs in the other runtime, within a bound from small changes of the input."""
    y, found = network(x.clone()), exported(x)
    noise = 1e-6 * torch.randn(4, *x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    moved = [network((x + step).to(x.dtype)) - y for step in noise]
    bound = 1e-3 * y.abs().max() + 10 * max(change.abs().max() for change in moved)
    if y.shape != found.shape or not bool(((found - y).abs() <= bound).all() | ~torch.isfinite(y).all()):
        raise PackError(f"{exported.runtime} computes something else from the file")
