"""Export: a packed model for other runtimes, its weights at one bit each in their files too.

The network is traced once and read node by node; a :class:`Writer` for each format turns the nodes into its operators.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from mirrorquant.nn import BinaryActivation
from mirrorquant.packing.bits import PackedTensor, PackError
from mirrorquant.packing.file import about_of, about_text
from mirrorquant.packing.fuse import Memory, refuse_changed_state
from mirrorquant.packing.layers import pads
from mirrorquant.packing.model import Entry, PackedModel, entries_of, skeleton, state
from mirrorquant.packing.trace import trace
from mirrorquant.select import unwrapped

__all__ = ["Window", "Writer", "export"]

FORMATS = ("onnx", "openvino")
_BATCHES = (7, 11)  # what differs between them depends on the batch


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    shape: Sequence[int],
    *,
    to: str = "onnx",
    bits: bool = True,
    about: dict[str, Any] | None = None,
) -> None:
    """Writes a finalized model, plain or packed, for ONNX Runtime or OpenVINO.

    ONNX: a weight on levels is a uint8 initializer, followed by the operators that unpack it; the runtime does that
    once, at load, so the result is bit-identical to that of the float32 file. OpenVINO IR: such weights are u1
    constants, and a layer that follows a :class:`mirrorquant.nn.BinaryActivation` is a BinaryConvolution, which
    computes on bits; such a model takes one image at a time, unless it is reshaped. At export the CPU plugin runs each
    of these layers once, and one that it gets wrong becomes a plain convolution.

    On processors that have bfloat16 instructions OpenVINO uses them by default, which is less exact.
    Compile the model with ``{"INFERENCE_PRECISION_HINT": "f32"}`` for the results of this library.

    Files appear whole: when an export fails, the files of an earlier one are still there.

    Args:
        model: a model after ``MirrorDescent.finalize()``, or a packed one; with one input, a batch of anything.
        path: ``*.onnx``, or ``*.xml``, beside which the weights become ``*.bin``.
        shape: of one item of the batch, as in ``(3, 32, 32)``.
        to: ``onnx`` (needs the extra ``onnx``) or ``openvino`` (needs the extra ``openvino``).
        bits: False writes float32 weights instead.
        about: what else the file should tell, as JSON: the data set, the accuracy, ... By default the ``about`` of a
            model that :func:`mirrorquant.load` returned.

    Raises:
        PackError: the model cannot be traced, has an operation that is not exported, or the file cannot be written.
    """
    if to not in FORMATS:
        raise PackError(f"to is {to!r}, but it must be one of {', '.join(FORMATS)}")
    if isinstance(shape, int):
        raise PackError(f"shape is {shape}, but it must be that of one item of the batch, as in ({shape},)")
    text, model = about_text(about_of(model, about)), unwrapped(model)
    entries = model.entries() if isinstance(model, PackedModel) else entries_of(model, None)
    plain = copy.deepcopy(model.plain) if isinstance(model, PackedModel) else skeleton(model)
    writer: Writer
    if to == "onnx":
        from mirrorquant.packing.to_onnx import OnnxWriter

        writer = OnnxWriter(bits)
    else:
        from mirrorquant.packing.to_openvino import OpenVinoWriter

        writer = OpenVinoWriter(bits)
    _Reader(plain.eval().float(), entries, tuple(shape), writer).write()
    writer.save(Path(path), text)


class Writer(Protocol):
    """What a format has to offer. A value (``Any`` here) is whatever it uses to name the output of an operator."""

    def input(self, shape: Sequence[int]) -> Any:
        """The batch, of items of this shape."""

    def tensor(self, name: str, entry: Entry) -> Any:
        """A constant, as bits where it comes as bits."""

    def conv(self, x: Any, weight: Any, bias: Any | None, window: Window, groups: int) -> Any:
        """A convolution with zero padding."""

    def sign_conv(self, x: Any, name: str, weight: PackedTensor, window: Window) -> Any | None:
        """A convolution of signs on bits, without bias; None where the format has none."""

    def linear(self, x: Any, weight: Any, bias: Any | None, dimensions: int) -> Any:
        """A linear layer, on an input with so many dimensions."""

    def norm(self, x: Any, tensors: Sequence[Any], eps: float) -> Any:
        """A batch norm with its scale, shift, mean and variance."""

    def pool(self, x: Any, kind: str, window: Window, ceil: bool, count_padding: bool) -> Any:
        """A max or avg pool."""

    def pad(self, x: Any, sides: Sequence[int], mode: str) -> Any:
        """Left, right, top and bottom, filled up as F.pad does in this mode."""

    def unary(self, kind: str, x: Any) -> Any:
        """relu, sigmoid, tanh, hardswish or sign (with sign(0) = +1)."""

    def binary(self, kind: str, x: Any, y: Any) -> Any:
        """add, sub, mul or div."""

    def number(self, value: float) -> Any:
        """A float32 scalar."""

    def clip(self, x: Any, low: float, high: float) -> Any:
        """Between two numbers."""

    def prelu(self, x: Any, slope: Any) -> Any:
        """x, or slope * x where that is negative."""

    def mean(self, x: Any, axes: Sequence[int], keep: bool) -> Any:
        """The mean over some axes."""

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """Another shape, -1 for what the batch decides."""

    def concat(self, values: Sequence[Any], axis: int) -> Any:
        """One after the other."""

    def output(self, value: Any) -> None:
        """What the network returns."""

    def save(self, path: Path, about: str) -> None:
        """Writes the file, with the metadata of the model."""


class Window:
    """Kernel, stride, padding (left, right, top, bottom) and dilation of a convolution or a pool."""

    def __init__(self, kernel: Any, stride: Any, sides: Sequence[int], dilation: Any = 1) -> None:
        self.kernel, self.stride, self.dilation = _pair(kernel), _pair(stride), _pair(dilation)
        self.left, self.right, self.top, self.bottom = sides


class _Shapes(fx.Interpreter):
    """The shape of each node's output, on the meta device; no entry where it is no tensor."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def fetch_attr(self, target: str) -> Any:
        """Without its numbers, also where they are none of the model's state."""
        value = super().fetch_attr(target)
        return value.to("meta") if isinstance(value, Tensor) else value

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = tuple(result.shape)
        return result


class _Reader:
    """Reads a traced network, and has it written."""

    def __init__(self, plain: nn.Module, entries: dict[str, Entry], shape: tuple[int, ...], writer: Writer) -> None:
        self.entries, self.writer, self.shape = entries, writer, shape
        self.names = {id(tensor): name for name, tensor in state(plain)}
        self.plain = nn.Sequential(plain).eval() if type(plain) in _MODULES else plain  # a layer is a node of a model
        try:
            traced = trace(self.plain)
            vars(self.plain).update(traced.constants)
            self.graph, self.memory = traced.graph, Memory(self.plain, traced.graph)
            refuse_changed_state(self.memory)
            inputs = [node.name for node in self.graph.nodes if node.op == "placeholder"]
            if len(inputs) > 1:
                raise PackError(f"it takes {', '.join(inputs)}, but only one input can be exported")
            module = fx.GraphModule(self.plain, self.graph)
            runs = [_Shapes(module) for _ in _BATCHES]
            for run, batch in zip(runs, _BATCHES, strict=True):
                run.run(torch.empty(batch, *shape, dtype=torch.float32, device="meta"))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            told = f"{type(plain).__name__} cannot be traced with inputs of {list(shape)}: {reason}"
            raise PackError(told) from error
        self.shapes = runs[0].shapes
        self.dynamic = {
            node: [-1 if a != b else a for a, b in zip(shape, runs[1].shapes[node], strict=True)]
            for node, shape in self.shapes.items()
        }
        self.values: dict[fx.Node, Any] = {}

    def write(self) -> None:
        for node in self.graph.nodes:
            if node.op == "output":
                (result,) = node.args
                if not isinstance(result, fx.Node):
                    raise PackError(f"the model returns {result}, but only one tensor can be exported")
                self.writer.output(self.values[result])
            elif node in self.shapes or node.op == "call_module":  # all else are sizes, which the shapes know already
                self.values[node] = self._value(node)
                if node in self.memory.changing:
                    self._change(node)

    def _change(self, node: fx.Node) -> None:
        """Whoever reads what the node changed, or a view of it, from here on reads what became of it."""
        for other in [*self.values]:
            if not self.memory.may_share(node, other) or all(user in self.values for user in other.users):
                continue
            if self.memory.whole[other] is not self.memory.whole[node]:
                raise self._unknown(node, f": it changes {other.name} in place, of which it may show a part")
            else:
                value, shape = self.values[node], self.dynamic[other]
                self.values[other] = value if shape == self.dynamic[node] else self.writer.reshape(value, shape)

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.writer.input(self.shape)
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        if node.op == "call_module":
            module = self.plain.get_submodule(str(node.target))
            for kind, method in _MODULES.items():
                if type(module) is kind:
                    return method(self, module, node)
        else:
            name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", "")).strip("_")
            known = node.op == "call_method" or str(getattr(node.target, "__module__", "")).startswith(_TORCH)
            if known and name in _FUNCTIONS:
                return _FUNCTIONS[name](self, node)
        raise self._unknown(node)

    def _unknown(self, node: fx.Node, what: str = "") -> PackError:
        told = str(getattr(node.target, "__name__", node.target))
        if node.op == "call_module":
            module = self.plain.get_submodule(told)
            told = type(module).__name__ if list(module.children()) else " ".join(str(module).split())
        return PackError(f"{node.name} ({told}) cannot be exported{what}")

    # What the nodes refer to.

    def _input(self, node: fx.Node, place: int = 0) -> Any:
        if place >= len(node.args):
            raise self._unknown(node, f" with {', '.join(node.kwargs)} by name: pass tensors by position")
        return self._operand(node, node.args[place])

    def _operand(self, node: fx.Node, value: Any) -> Any:
        if isinstance(value, fx.Node) and value in self.values:
            return self.values[value]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.writer.number(float(value))
        raise self._unknown(node, f": its operand {value} is no tensor")

    def _entry(self, tensor: Tensor) -> tuple[str, Entry]:
        name = self.names[id(tensor)]
        return name, self.entries[name]

    def _tensor(self, tensor: Tensor | None) -> Any | None:
        return None if tensor is None else self.writer.tensor(*self._entry(tensor))

    def _attribute(self, path: str) -> Any:
        owner, _, name = path.rpartition(".")
        tensor = getattr(self.plain.get_submodule(owner), name)
        if id(tensor) in self.names:
            return self._tensor(tensor)
        return self.writer.tensor(path, tensor)

    def _bind(self, node: fx.Node, **defaults: Any) -> dict[str, Any]:
        """The arguments after the first one, by name; what they do not provide for is refused."""
        given = dict(zip(defaults, node.args[1:], strict=False))
        named = {_NAMES.get(key, key): value for key, value in node.kwargs.items() if key not in _NO_MATTER}
        odd = [key for key, value in named.items() if key not in defaults and value not in (None, False)]
        if odd:
            raise self._unknown(node, f": it has the option {odd[0]}={named[odd[0]]}")
        return {**defaults, **given, **{key: value for key, value in named.items() if key in defaults}}

    # Modules.

    def _conv(self, layer: nn.Conv2d, node: fx.Node) -> Any:
        source, x = node.args[0], self._input(node)
        sides = pads(layer.padding, layer.kernel_size, layer.dilation)
        if layer.padding_mode != "zeros":
            x, sides = self.writer.pad(x, sides, layer.padding_mode), (0, 0, 0, 0)
        window = Window(layer.kernel_size, layer.stride, sides, layer.dilation)
        name, weight = self._entry(layer.weight)
        if self._is_sign(source) and layer.groups == 1 and isinstance(weight, PackedTensor):
            y = self.writer.sign_conv(x, name, weight, window)
            if y is not None:
                scale = None if weight.scale is None else weight.scale.reshape(1, -1, 1, 1)
                y = y if scale is None else self.writer.binary("mul", y, self.writer.tensor(f"{name}.scale", scale))
                bias = None if layer.bias is None else self._tensor(layer.bias)
                return y if bias is None else self.writer.binary("add", y, self.writer.reshape(bias, [1, -1, 1, 1]))
        return self.writer.conv(x, self._tensor(layer.weight), self._tensor(layer.bias), window, layer.groups)

    def _is_sign(self, node: Any) -> bool:
        if not isinstance(node, fx.Node) or node.op != "call_module":
            return False
        return isinstance(self.plain.get_submodule(str(node.target)), BinaryActivation)

    def _linear(self, layer: nn.Linear, node: fx.Node) -> Any:
        dimensions = len(self.shapes[node])
        return self.writer.linear(self._input(node), self._tensor(layer.weight), self._tensor(layer.bias), dimensions)

    def _norm(self, layer: nn.BatchNorm2d, node: fx.Node) -> Any:
        if layer.running_mean is None or layer.running_var is None:
            raise self._unknown(node, ": it has no running statistics")
        count = layer.num_features
        affine = [(layer.weight, "ones", torch.ones), (layer.bias, "zeros", torch.zeros)]
        tensors = [
            self.writer.tensor(f"/{name}.{count}", make(count)) if tensor is None else self._tensor(tensor)
            for tensor, name, make in affine
        ]
        tensors += [self._tensor(layer.running_mean), self._tensor(layer.running_var)]
        return self.writer.norm(self._input(node), tensors, layer.eps)

    def _same(self, layer: nn.Module, node: fx.Node) -> Any:
        return self._input(node)

    @staticmethod
    def unary(kind: str) -> Callable[..., Any]:
        """A reader of modules and functions of one input and no options."""

        def method(self: _Reader, *arguments: Any) -> Any:
            return self.writer.unary(kind, self._input(arguments[-1]))

        return method

    def _silu(self, *arguments: Any) -> Any:
        x = self._input(arguments[-1])
        return self.writer.binary("mul", x, self.writer.unary("sigmoid", x))

    def _hardtanh(self, layer: nn.Hardtanh, node: fx.Node) -> Any:
        return self.writer.clip(self._input(node), float(layer.min_val), float(layer.max_val))

    def _prelu(self, layer: nn.PReLU, node: fx.Node) -> Any:
        slope = self._tensor(layer.weight)
        tail = [1] * (len(self.shapes[node]) - 2)
        return self.writer.prelu(self._input(node), self.writer.reshape(slope, [layer.num_parameters, *tail]))

    def _max_pool(self, layer: nn.MaxPool2d, node: fx.Node) -> Any:
        options = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)
        return self._pool(node, "max", *options)

    def _avg_pool(self, layer: nn.AvgPool2d, node: fx.Node) -> Any:
        if layer.divisor_override:
            raise self._unknown(node, ": it has a divisor of its own")
        options = (layer.kernel_size, layer.stride, layer.padding, 1, layer.ceil_mode, layer.count_include_pad)
        return self._pool(node, "avg", *options)

    def _adaptive_pool(self, layer: nn.AdaptiveAvgPool2d, node: fx.Node) -> Any:
        return self._adaptive(node)

    def _flatten_module(self, layer: nn.Module, node: fx.Node) -> Any:
        return self._reshape(node)

    # Functions and methods of tensors.

    def _pool(
        self,
        node: fx.Node,
        kind: str,
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any = 1,
        ceil: bool = False,
        count_padding: bool = True,
    ) -> Any:
        top, left = _pair(padding)
        window = Window(kernel, stride or kernel, (left, left, top, top), dilation)
        return self.writer.pool(self._input(node), kind, window, ceil, count_padding)

    def _max_pool_function(self, node: fx.Node) -> Any:
        options = self._bind(node, kernel_size=2, stride=None, padding=0, dilation=1, ceil_mode=False)
        return self._pool(node, "max", *options.values())

    def _avg_pool_function(self, node: fx.Node) -> Any:
        names = {"stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True, "divisor_override": None}
        options = self._bind(node, kernel_size=2, **names)
        if options.pop("divisor_override"):
            raise self._unknown(node, ": it has a divisor of its own")
        kernel, stride, padding, ceil, count = options.values()
        return self._pool(node, "avg", kernel, stride, padding, 1, ceil, count)

    def _adaptive(self, node: fx.Node) -> Any:
        inputs, outputs = self.shapes[node.args[0]][-2:], self.shapes[node][-2:]  # type: ignore[index]
        if outputs == (1, 1):
            return self.writer.mean(self._input(node), [2, 3], True)
        if any(a % b for a, b in zip(inputs, outputs, strict=True)):
            raise self._unknown(node, f": {inputs[0]}x{inputs[1]} pixels cannot be split evenly into {outputs}")
        kernel = tuple(a // b for a, b in zip(inputs, outputs, strict=True))
        return self._pool(node, "avg", kernel, kernel, 0)

    def _reshape(self, node: fx.Node) -> Any:
        shape = self.dynamic[node]
        if shape.count(-1) > 1:
            raise self._unknown(node, f": the batch appears in more than one dimension of {shape}")
        return self.writer.reshape(self._input(node), shape)

    def _mean(self, node: fx.Node) -> Any:
        options = self._bind(node, dim=None, keepdim=False)
        count = len(self.shapes[node.args[0]])  # type: ignore[index]
        axes = range(count) if options["dim"] is None else options["dim"]
        axes = [axes] if isinstance(axes, int) else list(axes)
        return self.writer.mean(self._input(node), sorted(axis % count for axis in axes), bool(options["keepdim"]))

    @staticmethod
    def arithmetic(kind: str) -> Callable[..., Any]:
        """A reader of functions of two inputs."""

        def method(self: _Reader, node: fx.Node) -> Any:
            if node.kwargs:
                raise self._unknown(node, f": it has the options {dict(node.kwargs)}")
            return self.writer.binary(kind, self._input(node, 0), self._input(node, 1))

        return method

    def _clip(self, node: fx.Node) -> Any:
        low, high = self._bind(node, min=None, max=None).values()
        if isinstance(low, fx.Node) or isinstance(high, fx.Node):
            raise self._unknown(node, ": its ends are tensors")
        ends = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
        return self.writer.clip(self._input(node), *ends)

    def _hardtanh_function(self, node: fx.Node) -> Any:
        options = self._bind(node, min_val=-1.0, max_val=1.0)
        return self.writer.clip(self._input(node), float(options["min_val"]), float(options["max_val"]))

    def _relu6(self, *arguments: Any) -> Any:
        return self.writer.clip(self._input(arguments[-1]), 0.0, 6.0)

    def _cat(self, node: fx.Node) -> Any:
        options = self._bind(node, dim=0)
        tensors = node.args[0]
        if not isinstance(tensors, (list, tuple)):
            raise self._unknown(node, f": {tensors} is no list of tensors")
        parts = [self._operand(node, part) for part in tensors]
        return self.writer.concat(parts, int(options["dim"]) % len(self.shapes[node]))

    def _dropout(self, node: fx.Node) -> Any:
        if self._bind(node, p=0.5, training=True)["training"]:
            raise self._unknown(node, ": it is on in eval mode, too; pass training=self.training")
        return self._input(node)

    def _same_function(self, node: fx.Node) -> Any:
        return self._input(node)


_TORCH = ("torch", "_operator", "operator")
_NAMES = {"axis": "dim", "keepdims": "keepdim", "train": "training"}  # other names that torch has for the same
_NO_MATTER = ("inplace", "dtype")


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


_MODULES: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Conv2d: _Reader._conv,
    nn.Linear: _Reader._linear,
    nn.BatchNorm1d: _Reader._norm,
    nn.BatchNorm2d: _Reader._norm,
    nn.Identity: _Reader._same,
    nn.Dropout: _Reader._same,
    nn.Dropout2d: _Reader._same,
    nn.ReLU: _Reader.unary("relu"),
    nn.Sigmoid: _Reader.unary("sigmoid"),
    nn.Tanh: _Reader.unary("tanh"),
    nn.Hardswish: _Reader.unary("hardswish"),
    BinaryActivation: _Reader.unary("sign"),
    nn.SiLU: _Reader._silu,
    nn.ReLU6: _Reader._relu6,
    nn.Hardtanh: _Reader._hardtanh,
    nn.PReLU: _Reader._prelu,
    nn.MaxPool2d: _Reader._max_pool,
    nn.AvgPool2d: _Reader._avg_pool,
    nn.AdaptiveAvgPool2d: _Reader._adaptive_pool,
    nn.Flatten: _Reader._flatten_module,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "relu": _Reader.unary("relu"),
    "sigmoid": _Reader.unary("sigmoid"),
    "tanh": _Reader.unary("tanh"),
    "hardswish": _Reader.unary("hardswish"),
    "silu": _Reader._silu,
    "relu6": _Reader._relu6,
    "hardtanh": _Reader._hardtanh_function,
    "clamp": _Reader._clip,
    "max_pool2d": _Reader._max_pool_function,
    "avg_pool2d": _Reader._avg_pool_function,
    "adaptive_avg_pool2d": _Reader._adaptive,
    "dropout": _Reader._dropout,
    "contiguous": _Reader._same_function,
    "flatten": _Reader._reshape,
    "reshape": _Reader._reshape,
    "view": _Reader._reshape,
    "squeeze": _Reader._reshape,
    "unsqueeze": _Reader._reshape,
    "mean": _Reader._mean,
    "cat": _Reader._cat,
    "add": _Reader.arithmetic("add"),
    "iadd": _Reader.arithmetic("add"),
    "sub": _Reader.arithmetic("sub"),
    "isub": _Reader.arithmetic("sub"),
    "mul": _Reader.arithmetic("mul"),
    "imul": _Reader.arithmetic("mul"),
    "itruediv": _Reader.arithmetic("div"),
    "truediv": _Reader.arithmetic("div"),
    "div": _Reader.arithmetic("div"),
}
