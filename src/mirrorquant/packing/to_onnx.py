"""ONNX files: weights on levels as uint8 initializers, and the few operators that unpack them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mirrorquant import _files
from mirrorquant._version import __version__
from mirrorquant.packing.bits import PackedTensor, PackError, layout
from mirrorquant.packing.export import Window
from mirrorquant.packing.file import read_about
from mirrorquant.packing.model import Entry

try:
    import onnx
    from onnx import TensorProto, helper
except ImportError as error:
    raise PackError("ONNX files need the package onnx: pip install 'mirrorquant[onnx]'") from error

__all__ = ["OnnxModel", "OnnxWriter"]

OPSET = 18  # the first one with BitwiseAnd
_IR = 9
_UNARY = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "hardswish": "HardSwish"}
_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}


class OnnxWriter:
    """Builds an ONNX graph; a value is a name. Those that do not come from the model begin with a slash."""

    def __init__(self, bits: bool) -> None:
        self.bits = bits
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}
        self.unpacked: dict[str, str] = {}
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    # Constants.

    def tensor(self, name: str, entry: Entry) -> str:
        name = f"{name}." if name in ("input", "output") else name  # which are the graph's own
        if isinstance(entry, PackedTensor) and self.bits:
            if name not in self.unpacked:  # a tied one is unpacked once
                self.unpacked[name] = self._unpacked(name, entry)
            return self.unpacked[name]
        value = entry.unpack() if isinstance(entry, PackedTensor) else entry
        return self._constant(name, value.detach().float().cpu())

    def number(self, value: float) -> str:
        return self._constant(f"/number.{value!r}", torch.tensor(value, dtype=torch.float32))

    def _constant(self, name: str, value: Tensor) -> str:
        if name not in self.initializers:
            self.initializers[name] = onnx.numpy_helper.from_array(value.contiguous().numpy(), name)
        return name

    def _integers(self, values: Sequence[int]) -> str:
        return self._constant("/sizes." + ".".join(map(str, values)), torch.tensor(list(values), dtype=torch.int64))

    def _index(self, value: int) -> str:
        return self._constant(f"/index.{value}", torch.tensor(value, dtype=torch.int32))

    def _unpacked(self, name: str, entry: PackedTensor) -> str:
        """Each bit of each byte by a mask; the bit chooses between two levels, or several make the level's number."""
        rows, row = layout(entry.shape)
        planes, levels = entry.planes.cpu(), entry.levels
        masks = self._constant("/masks", torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8))
        value = ""
        for place, plane in enumerate(planes):
            packed = self._constant(f"{name}.plane{place}", plane[:, :, None])
            bit = self._node("Cast", [self._node("BitwiseAnd", [packed, masks])], to=TensorProto.BOOL)
            bit = self._node("Reshape", [bit, self._integers([rows, 8 * planes.shape[2]])])
            if row % 8:
                bit = self._node("Slice", [bit, *(self._integers([end]) for end in (0, row, 1))])
            bit = self._node("Reshape", [bit, self._integers(entry.shape)])
            if len(planes) == 1:
                value = self._node("Where", [bit, self.number(levels[1]), self.number(levels[0])])
                break
            part = self._node("Where", [bit, self._index(1 << place), self._index(0)])
            value = self._node("Add", [value, part]) if value else part
        if len(planes) > 1:
            table = torch.tensor(tuple(levels), dtype=torch.float32)
            value = self._node("Gather", [self._constant("/levels." + ".".join(map(str, levels)), table), value])
        if entry.scale is not None:
            scale = entry.scale.float().cpu().reshape(-1, *[1] * (len(entry.shape) - 1))
            value = self._node("Mul", [value, self._constant(f"{name}.scale", scale)])
        return value

    # Operators.

    def _node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"/{kind}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def input(self, shape: Sequence[int]) -> str:
        self.inputs.append(helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", *shape]))
        return "input"

    def conv(self, x: str, weight: str, bias: str | None, window: Window, groups: int) -> str:
        inputs = [x, weight] if bias is None else [x, weight, bias]
        return self._node("Conv", inputs, group=groups, **_window(window))

    def sign_conv(self, x: str, name: str, weight: PackedTensor, window: Window) -> None:
        return None

    def linear(self, x: str, weight: str, bias: str | None, dimensions: int) -> str:
        if dimensions == 2:
            return self._node("Gemm", [x, weight] if bias is None else [x, weight, bias], transB=1)
        y = self._node("MatMul", [x, self._node("Transpose", [weight], perm=[1, 0])])
        return y if bias is None else self._node("Add", [y, bias])

    def norm(self, x: str, tensors: Sequence[str], eps: float) -> str:
        return self._node("BatchNormalization", [x, *tensors], epsilon=eps)

    def pool(self, x: str, kind: str, window: Window, ceil: bool, count_padding: bool) -> str:
        options = {**_window(window), "ceil_mode": int(ceil)}
        if kind == "max":
            return self._node("MaxPool", [x], **options)
        options.pop("dilations")
        return self._node("AveragePool", [x], count_include_pad=int(count_padding), **options)

    def pad(self, x: str, sides: Sequence[int], mode: str) -> str:
        left, right, top, bottom = sides
        amounts = self._integers([0, 0, top, left, 0, 0, bottom, right])
        named = {"reflect": "reflect", "replicate": "edge"}
        if mode not in named:
            raise PackError(f"a convolution with padding_mode={mode!r} cannot be exported to ONNX {OPSET}")
        return self._node("Pad", [x, amounts], mode=named[mode])

    def unary(self, kind: str, x: str) -> str:
        if kind == "sign":
            positive = self._node("GreaterOrEqual", [x, self.number(0.0)])
            return self._node("Where", [positive, self.number(1.0), self.number(-1.0)])
        return self._node(_UNARY[kind], [x])

    def binary(self, kind: str, x: str, y: str) -> str:
        return self._node(_BINARY[kind], [x, y])

    def clip(self, x: str, low: float, high: float) -> str:
        ends = ["" if math.isinf(end) else self.number(end) for end in (low, high)]
        return self._node("Clip", [x, *ends])

    def prelu(self, x: str, slope: str) -> str:
        return self._node("PRelu", [x, slope])

    def mean(self, x: str, axes: Sequence[int], keep: bool) -> str:
        return self._node("ReduceMean", [x, self._integers(axes)], keepdims=int(keep))

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        return self._node("Reshape", [x, self._integers(shape)])

    def concat(self, values: Sequence[str], axis: int) -> str:
        return self._node("Concat", values, axis=axis)

    def output(self, value: str) -> None:
        self.nodes.append(helper.make_node("Identity", [value], ["output"]))
        self.outputs.append(helper.make_tensor_value_info("output", TensorProto.FLOAT, None))

    def save(self, path: Path, about: str) -> None:
        """Checks the model and writes it."""
        graph = helper.make_graph(
            self.nodes, "mirrorquant", self.inputs, self.outputs, list(self.initializers.values())
        )
        opset = helper.make_opsetid("", OPSET)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=_IR)
        model.producer_name, model.producer_version = "mirrorquant", __version__
        helper.set_model_props(model, {"mirrorquant": about})
        model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
        del model.graph.value_info[:]
        onnx.checker.check_model(model)
        _files.write_atomically(path, model.SerializeToString(), PackError)


class OnnxModel(nn.Module):
    """An ONNX file that ONNX Runtime runs on the CPU, as a model that takes and returns tensors.

    ``about`` is the metadata it was exported with.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            import onnxruntime
        except ImportError as error:
            raise PackError("running ONNX files needs onnxruntime: pip install 'mirrorquant[onnx]'") from error
        try:
            _files.open_regular(path).close()  # a FIFO would be waited for forever
            self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        except Exception as error:
            raise PackError(f"{path} cannot be read by ONNX Runtime ({str(error).splitlines()[0]})") from error
        inputs = self.session.get_inputs()
        if len(inputs) != 1:
            raise PackError(f"{path} takes {len(inputs)} inputs, expected one, a batch of images")
        self.name = inputs[0].name
        self.about = read_about(self.session.get_modelmeta().custom_metadata_map.get("mirrorquant", ""))

    def forward(self, x: Tensor) -> Tensor:
        """The first output, for a batch."""
        return torch.from_numpy(self.session.run(None, {self.name: x.cpu().numpy()})[0])


def _window(window: Window) -> dict[str, list[int]]:
    return {
        "kernel_shape": list(window.kernel),
        "strides": list(window.stride),
        "pads": [window.top, window.left, window.bottom, window.right],
        "dilations": list(window.dilation),
    }
