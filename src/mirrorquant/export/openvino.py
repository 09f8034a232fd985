"""OpenVINO IR, made from ONNX: weights on levels are u1 constants, and convolutions of signs compute on bits."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirrorquant import _files
from mirrorquant.export import ordered, reason, structured
from mirrorquant.levels import BINARY
from mirrorquant.packing.bits import PackedTensor, PackError, layout, unpack_bits
from mirrorquant.packing.file import read_about

try:
    import numpy as np
    import openvino as ov
    from openvino import opset1
    from openvino import opset14 as ops
except ImportError as error:
    raise PackError("OpenVINO files need the package openvino: pip install 'mirrorquant[openvino]'") from error

__all__ = ["OpenVinoModel", "convert"]

_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}  # the default is bfloat16 on processors that have it


def convert(onnx: bytes, packed: Mapping[str, PackedTensor], about: str, network: nn.Module) -> OpenVinoModel:
    """The ONNX model of a network in OpenVINO, in which these tensors are stored as bits."""
    try:
        made = OpenVinoModel(ov.Core().read_model(model=onnx))
    except RuntimeError as error:
        raise PackError(_unreadable(str(error), network)) from None
    model, one_image = made.model, False
    model.set_rt_info(about, ["mirrorquant", "about"])
    for pool in [op for op in model.get_ops() if op.get_type_name() in ("MaxPool", "AvgPool")]:
        _round_as_torch(pool)
    outputs = {name: output for op in model.get_ops() for output in op.outputs() for name in output.get_names()}
    for output, entry in [(outputs[name], entry) for name, entry in packed.items() if name in outputs]:
        for layer in [user.get_node() for user in output.get_target_inputs()]:
            if layer.get_type_name() == "Convolution" and _takes_signs(layer, entry):
                signs = _sign_conv(layer.input_value(0), entry, layer.get_attributes())
                _replace(layer.output(0), _scaled(signs, entry, 1))
                one_image = True
        _replace(output, _decoded(entry))
    if one_image:  # BinaryConvolution needs the size of the batch
        made.reshape(1)
    return made


def _unreadable(problem: str, network: nn.Module) -> str:
    """Why OpenVINO cannot read the ONNX model of a network: a layer with circular padding, or what its log names."""
    if "padding mode: [wrap]" in problem:
        modes = {name or type(m).__name__: getattr(m, "padding_mode", "") for name, m in network.named_modules()}
        layers = ", ".join(name for name, mode in modes.items() if mode == "circular") or "a call of F.pad"
        others = "pad with 'zeros', 'reflect' or 'replicate', or by torch.cat"
        return f"{layers} pads with 'circular', which OpenVINO cannot read: {others}, or export to='onnx'"
    named = re.search(r"(No conversion rule found for operations|Unsupported [^:\n]*): .*", problem)
    return f"OpenVINO cannot read it ({named[0] if named else reason(RuntimeError(problem))}): export to='onnx'"


def _round_as_torch(pool: Any) -> None:
    """Pools with ``ceil_mode`` drop windows that begin in the padding at the end."""
    at = pool.get_attributes()
    if at["rounding_type"] == "ceil":
        window = at["strides"], at["pads_begin"], at["pads_end"], at["kernel"]
        strides, begin, end, kernel = map(list, window)
        x = pool.input_value(0)
        if pool.get_type_name() == "MaxPool":
            new = ops.max_pool(x, strides, list(at["dilations"]), begin, end, kernel, "ceil_torch")
        else:
            new = ops.avg_pool(x, strides, begin, end, kernel, at["exclude-pad"], "ceil_torch")
        _replace(pool.output(0), new)


def _replace(output: Any, node: Any) -> None:
    for user in output.get_target_inputs():
        user.replace_source_output(node.output(0))


def _decoded(entry: PackedTensor) -> Any:
    """The number of the level from its bits, and the level of that number."""
    row = layout(entry.shape)[1]
    parts = []
    for place, plane in enumerate(entry.planes):
        bits = _u1(unpack_bits(plane[None], row), entry.shape, "big")
        parts.append(ops.multiply(ops.convert(bits, "i32"), ops.constant(np.int32(1 << place))))
    levels = ops.constant(np.array(entry.levels, dtype=np.float32))
    return _scaled(ops.gather(levels, functools.reduce(ops.add, parts), ops.constant(np.int64(0))), entry, 0)


def _scaled(value: Any, entry: PackedTensor, axis: int) -> Any:
    """The value times the scale of each row, along an axis."""
    if entry.scale is None:
        return value
    shape = [1] * axis + [-1] + [1] * (len(entry.shape) - 1 - axis)
    return ops.multiply(value, ops.constant(entry.scale.reshape(shape).numpy()))


def _u1(bits: Tensor, shape: Sequence[int], order: Any) -> Any:
    """A constant of single bits: Convert reads the highest bit of a byte first, BinaryConvolution the lowest."""
    packed = np.packbits(bits.reshape(-1).numpy(), bitorder=order)
    return ov.op.Constant(ov.Tensor(packed, ov.Shape(list(shape)), ov.Type.u1), shared_memory=False)


# Convolutions of signs.


def _takes_signs(layer: Any, weight: PackedTensor) -> bool:
    """Whether a convolution can be a BinaryConvolution: it follows a sign, and the CPU plugin computes it correctly.

    The plugin was seen to fail with numbers of channels that are not multiples of eight and with uneven padding.
    """
    attributes, sign = layer.get_attributes(), layer.input_value(0).get_node()
    if sign.get_type_name() != "Select" or [_number(sign.input_value(place)) for place in (1, 2)] != [1.0, -1.0]:
        return False
    test = sign.input_value(0).get_node()
    if test.get_type_name() != "GreaterEqual" or _number(test.input_value(1)) != 0:
        return False
    even = attributes["pads_begin"] == attributes["pads_end"] and len(weight.shape) == 4
    return even and weight.levels == BINARY and weight.shape[1] % 8 == 0 and _is_right(weight, attributes)


def _number(output: Any) -> float | None:
    """The number that a constant holds in all places."""
    node = output.get_node()
    while node.get_type_name() in ("Broadcast", "Convert", "ConvertLike"):
        node = node.input_value(0).get_node()
    return float(node.get_data().item()) if node.get_type_name() == "Constant" and node.get_data().size == 1 else None


def _sign_conv(x: Any, weight: PackedTensor, attributes: Mapping[str, Any]) -> Any:
    """A BinaryConvolution of signs."""
    filters = _u1(weight.codes(), weight.shape, "little")
    zero, one = (ops.constant(np.full((1, 1, 1, 1), value, dtype=np.float32)) for value in (0, 1))
    bits = ops.fake_quantize(x, zero, zero, zero, one, 2)
    window = [list(attributes[name]) for name in ("strides", "pads_begin", "pads_end", "dilations")]
    return opset1.binary_convolution(bits, filters, *window, "xnor-popcount", 0.0)


def _is_right(weight: PackedTensor, attributes: Mapping[str, Any]) -> bool:
    """Whether the CPU plugin computes such a layer correctly, on random signs: all sums are integers."""
    strides, dilations, padding = (tuple(attributes[name]) for name in ("strides", "dilations", "pads_begin"))
    sizes = [d * (k - 1) + 3 * s for k, s, d in zip(weight.shape[2:], strides, dilations, strict=True)]
    generator = torch.Generator().manual_seed(0)
    x = 2.0 * torch.randint(0, 2, (1, weight.shape[1], *sizes), generator=generator) - 1
    parameter = ops.parameter(list(x.shape), np.float32)
    node = _sign_conv(parameter, weight, attributes)
    try:
        compiled = ov.Core().compile_model(ov.Model([ops.result(node)], [parameter], "layer"), "CPU", _FLOAT32)
        found = torch.from_numpy(np.array(compiled(x.float().numpy())[0]))
    except RuntimeError:
        return False
    signs = 2 * weight.codes().double() - 1
    return torch.equal(found.double(), F.conv2d(x.double(), signs, None, strides, padding, dilations))


class OpenVinoModel(nn.Module):
    """OpenVINO IR as a model that takes and returns tensors; the CPU plugin runs it in float32.

    ``about`` is the metadata that it was exported with; ``inputs`` and ``outputs`` are the names in the file. A model
    for one image at a time is reshaped to each batch.
    """

    runtime = "OpenVINO"

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.core, self.model = ov.Core(), source
        if isinstance(source, (str, Path)):
            source = Path(source)
            try:
                for file in filter(Path.exists, (source, source.with_suffix(".bin"))):
                    _files.open_regular(file).close()  # opening a FIFO would block
                self.model = self.core.read_model(str(source))
            except Exception as error:
                raise PackError(f"{source} cannot be read by OpenVINO ({reason(error)})") from error
        self.inputs, self.outputs = (
            [value.get_any_name() for value in values] for values in (self.model.inputs, self.model.outputs)
        )
        place = ["mirrorquant", "about"]
        self.about = read_about(str(self.model.get_rt_info(place).value)) if self.model.has_rt_info(place) else {}
        self.compiled: dict[int, Any] = {}

    def reshape(self, batch: int) -> None:
        """Fixes the size of the batch: of the first dimension of the first input, and of all that are as large."""
        shapes = {value: list(value.get_partial_shape()) for value in self.model.inputs}
        first = next(iter(shapes.values()))[0]
        changed = {v: [batch, *sizes[1:]] if sizes and sizes[0] == first else sizes for v, sizes in shapes.items()}
        self.model.reshape({value: ov.PartialShape(sizes) for value, sizes in changed.items()})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The outputs for a batch, as ``OnnxModel`` takes and returns them."""
        given = ordered(self.inputs, inputs, named)
        fixed = not self.model.is_dynamic()
        batch = len(given[0]) if fixed else 0
        if batch not in self.compiled:
            if fixed:
                self.reshape(batch)
            self.compiled[batch] = self.core.compile_model(self.model, "CPU", _FLOAT32)
        found = self.compiled[batch]([x.detach().cpu().contiguous().numpy() for x in given])
        return structured(self.outputs, [torch.from_numpy(np.array(y)) for y in found.to_tuple()])

    def save(self, path: Path) -> None:
        """Writes ``*.xml`` and ``*.bin``; an ``*.xml`` never stands beside the weights of another network."""
        if not self.model.is_dynamic():
            self.reshape(1)
        left = "what was there before is intact"
        try:
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.", suffix=".writing") as folder:
                new = Path(folder) / "new.xml"
                ov.save_model(self.model, str(new), compress_to_fp16=False)
                self.core.read_model(str(new))  # fails if not everything could be written
                left = "export again"
                path.unlink(missing_ok=True)
                new.with_suffix(".bin").replace(path.with_suffix(".bin"))
                new.replace(path)
        except (OSError, RuntimeError) as error:
            problem = error.strerror if isinstance(error, OSError) else reason(error)
            raise PackError(f"{path} could not be written ({problem}); {left}") from error
