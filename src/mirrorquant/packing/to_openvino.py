"""OpenVINO IR: weights on levels as u1 constants, and convolutions of signs that compute on bits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirrorquant import _files
from mirrorquant.levels import BINARY
from mirrorquant.packing.bits import PackedTensor, PackError, layout, unpack_bits
from mirrorquant.packing.export import Window
from mirrorquant.packing.file import read_about
from mirrorquant.packing.model import Entry

try:
    import numpy as np
    import openvino as ov
    from openvino import opset1
    from openvino import opset14 as ops
except ImportError as error:
    raise PackError("OpenVINO files need the package openvino: pip install 'mirrorquant[openvino]'") from error

__all__ = ["OpenVinoModel", "OpenVinoWriter"]

_UNARY = {"relu": ops.relu, "sigmoid": ops.sigmoid, "tanh": ops.tanh, "hardswish": ops.hswish}
_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}  # else bfloat16, on processors that have it
_BINARY = {"add": ops.add, "sub": ops.subtract, "mul": ops.multiply, "div": ops.divide}


class OpenVinoWriter:
    """Builds an OpenVINO model; a value is a node."""

    def __init__(self, bits: bool) -> None:
        self.bits = bits
        self.cache: dict[str, Any] = {}
        self.kept: list[Any] = []  # arrays of which a constant does not make a copy
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.one_image = False

    # Constants.

    def tensor(self, name: str, entry: Entry) -> Any:
        if name not in self.cache:
            packed = isinstance(entry, PackedTensor)
            value = entry.unpack() if isinstance(entry, PackedTensor) and not self.bits else entry
            self.cache[name] = self._unpacked(value) if packed and self.bits else _constant(value)
        return self.cache[name]

    def number(self, value: float) -> Any:
        return _constant(torch.tensor(value, dtype=torch.float32))

    def _unpacked(self, entry: Any) -> Any:
        """The level's number from its bits, and then the level of that number."""
        row = layout(entry.shape)[1]
        number = None
        for place, plane in enumerate(entry.planes.cpu()):
            bits = self._u1(unpack_bits(plane[None], row), list(entry.shape), "big")
            part = ops.convert(bits, "i32")
            part = part if place == 0 else ops.multiply(part, ops.constant(np.int32(1 << place)))
            number = part if number is None else ops.add(number, part)
        levels = _constant(torch.tensor(tuple(entry.levels), dtype=torch.float32))
        value = ops.gather(levels, number, ops.constant(np.int64(0)))
        if entry.scale is None:
            return value
        shape = [entry.scale.numel()] + [1] * (len(entry.shape) - 1)
        return ops.multiply(value, _constant(entry.scale.reshape(shape)))

    def _u1(self, bits: Tensor, shape: Sequence[int], order: Any) -> Any:
        """A constant of single bits, whose array is kept."""
        constant, array = _u1(bits, shape, order)
        self.kept.append(array)
        return constant

    # Operators.

    def input(self, shape: Sequence[int]) -> Any:
        node = ops.parameter([-1, *shape], np.float32, name="input")
        self.inputs.append(node)
        return node

    def conv(self, x: Any, weight: Any, bias: Any | None, window: Window, groups: int) -> Any:
        if groups == 1:
            y = ops.convolution(x, weight, *_window(window))
        else:
            outputs, *rest = weight.output(0).get_shape()
            weight = self.reshape(weight, [groups, outputs // groups, *rest])
            y = ops.group_convolution(x, weight, *_window(window))
        return y if bias is None else ops.add(y, self.reshape(bias, [1, -1, 1, 1]))

    def sign_conv(self, x: Any, name: str, weight: PackedTensor, window: Window) -> Any | None:
        """BinaryConvolution, where the CPU plugin computes it right: it was seen not to, for other numbers of channels
        than multiples of eight and for uneven padding, and what it makes of this very layer is looked at."""
        even = window.left == window.right and window.top == window.bottom
        if not self.bits or weight.levels != BINARY or weight.shape[1] % 8 or not even or not _is_right(weight, window):
            return None
        self.one_image = True
        node, array = _sign_conv(x, weight, window)
        self.kept.append(array)
        return node

    def linear(self, x: Any, weight: Any, bias: Any | None, dimensions: int) -> Any:
        y = ops.matmul(x, weight, False, True)
        return y if bias is None else ops.add(y, bias)

    def norm(self, x: Any, tensors: Sequence[Any], eps: float) -> Any:
        return ops.batch_norm_inference(x, *tensors, eps)

    def pool(self, x: Any, kind: str, window: Window, ceil: bool, count_padding: bool) -> Any:
        strides, begin, end, dilations = _window(window)
        rounding = "ceil_torch" if ceil else "floor"
        if kind == "max":
            pooled = ops.max_pool(x, strides, dilations, begin, end, list(window.kernel), rounding)
            return pooled.output(0)
        if ceil and count_padding and any((*begin, *end)):  # the CPU plugin counts what lies beyond the padding, too
            raise PackError(
                "an average pool with ceil_mode that counts its padding cannot be exported to OpenVINO, "
                "one with count_include_pad=False can"
            )
        return ops.avg_pool(x, strides, begin, end, list(window.kernel), not count_padding, rounding)

    def pad(self, x: Any, sides: Sequence[int], mode: str) -> Any:
        left, right, top, bottom = sides
        named = {"reflect": "reflect", "replicate": "edge"}
        if mode not in named:
            raise PackError(f"a convolution with padding_mode={mode!r} cannot be exported to OpenVINO")
        return ops.pad(x, _integers([0, 0, top, left]), _integers([0, 0, bottom, right]), named[mode])

    def unary(self, kind: str, x: Any) -> Any:
        if kind == "sign":
            return ops.select(ops.greater_equal(x, self.number(0.0)), self.number(1.0), self.number(-1.0))
        return _UNARY[kind](x)

    def binary(self, kind: str, x: Any, y: Any) -> Any:
        return _BINARY[kind](x, y)

    def clip(self, x: Any, low: float, high: float) -> Any:
        return ops.clamp(x, low, high)

    def prelu(self, x: Any, slope: Any) -> Any:
        return ops.prelu(x, self.reshape(slope, [-1]))

    def mean(self, x: Any, axes: Sequence[int], keep: bool) -> Any:
        return ops.reduce_mean(x, _integers(axes), keep)

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        return ops.reshape(x, _integers(shape), False)

    def concat(self, values: Sequence[Any], axis: int) -> Any:
        return ops.concat(list(values), axis)

    def output(self, value: Any) -> None:
        self.outputs.append(ops.result(value, name="output"))

    def save(self, path: Path, about: str) -> None:
        """Writes ``*.xml`` and ``*.bin``."""
        if path.suffix != ".xml":
            raise PackError(f"the path is {path}, but that of OpenVINO IR must end in .xml")
        model = ov.Model(self.outputs, self.inputs, "mirrorquant")
        if self.one_image:  # BinaryConvolution needs to know
            model.reshape([1, *list(model.input(0).get_partial_shape())[1:]])
        model.set_rt_info(about, ["mirrorquant", "about"])
        try:
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.", suffix=".writing") as folder:
                new = Path(folder) / "new.xml"
                ov.save_model(model, str(new), compress_to_fp16=False)
                ov.Core().read_model(str(new))  # also fails where not all could be written
                _replace_pair(new, path, Path(folder) / "old.xml")
        except OSError as error:
            told = f"{path} could not be written ({error.strerror}); what was there before is intact"
            raise PackError(told) from error
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise PackError(f"{path} could not be written ({reason}); what was there before is intact") from error


class OpenVinoModel(nn.Module):
    """OpenVINO IR that the CPU plugin runs in float32, as a model that takes and returns tensors.

    ``about`` is the metadata it was exported with. A file for one image at a time is reshaped to each batch.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.core = ov.Core()
        try:
            for file in filter(Path.exists, (path, path.with_suffix(".bin"))):
                _files.open_regular(file).close()  # a FIFO would be waited for forever
            self.model = self.core.read_model(str(path))
        except Exception as error:
            raise PackError(f"{path} cannot be read by OpenVINO ({_reason(error)})") from error
        if len(self.model.inputs) != 1:
            raise PackError(f"{path} takes {len(self.model.inputs)} inputs, expected one, a batch of images")
        place = ["mirrorquant", "about"]
        self.about = read_about(str(self.model.get_rt_info(place).value)) if self.model.has_rt_info(place) else {}
        self.compiled: dict[int, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        """The first output, for a batch."""
        fixed = not self.model.is_dynamic()
        batch = len(x) if fixed else 0
        if batch not in self.compiled:
            if fixed:
                self.model.reshape(list(x.shape))
            self.compiled[batch] = self.core.compile_model(self.model, "CPU", _FLOAT32)
        return torch.from_numpy(np.array(self.compiled[batch](x.cpu().contiguous().numpy())[0]))


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _replace_pair(new: Path, path: Path, aside: Path) -> None:
    """Moves ``*.xml`` and ``*.bin`` into place; where that fails the old pair is put back.

    The old description goes first and the new one comes last: whenever the process ends, no description stands beside
    weights of another network.
    """
    for file in (new, new.with_suffix(".bin")):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    done: list[tuple[Path, Path]] = []
    steps = [(path, aside), (path.with_suffix(".bin"), aside.with_suffix(".bin"))]
    steps = [step for step in steps if step[0].exists()]
    try:
        for source, target in [*steps, (new.with_suffix(".bin"), path.with_suffix(".bin")), (new, path)]:
            source.rename(target)
            done.append((source, target))
    except OSError:
        for source, target in reversed(done):
            target.rename(source)
        raise


def _u1(bits: Tensor, shape: Sequence[int], order: Any) -> tuple[Any, Any]:
    """A constant of single bits, and the array that it reads.

    Convert reads the highest bit of a byte first, BinaryConvolution the lowest.
    """
    array = np.packbits(bits.reshape(-1).numpy(), bitorder=order)
    return ov.op.Constant(ov.Tensor(array, ov.Shape(list(shape)), ov.Type.u1)), array


def _sign_conv(x: Any, weight: PackedTensor, window: Window) -> tuple[Any, Any]:
    """A BinaryConvolution of signs, and the array of its weights."""
    filters, array = _u1(weight.codes().cpu(), list(weight.shape), "little")
    zero, one = (_constant(torch.full((1, 1, 1, 1), value, dtype=torch.float32)) for value in (0.0, 1.0))
    bits = ops.fake_quantize(x, zero, zero, zero, one, 2)
    return opset1.binary_convolution(bits, filters, *_window(window), "xnor-popcount", 0.0), array


def _is_right(weight: PackedTensor, window: Window) -> bool:
    """Whether the CPU plugin computes such a layer as it is defined, on signs at random: all sums are integers."""
    generator = torch.Generator().manual_seed(0)
    height, width = (d * (k - 1) + 3 * s for k, s, d in zip(window.kernel, window.stride, window.dilation, strict=True))
    bits = torch.randint(0, 2, (1, weight.shape[1], height, width), generator=generator)
    x = 2 * bits.to(torch.float32) - 1
    parameter = ops.parameter(list(x.shape), np.float32)
    node, _array = _sign_conv(parameter, weight, window)  # the constant reads the array's memory: keep it
    try:
        compiled = ov.Core().compile_model(ov.Model([ops.result(node)], [parameter], "layer"), "CPU", _FLOAT32)
        found = torch.from_numpy(np.array(compiled(x.numpy())[0]))
    except RuntimeError:
        return False
    signs = 2 * weight.codes().cpu().to(torch.float32) - 1
    padding = (window.top, window.left)
    expected = F.conv2d(x.double(), signs.double(), None, window.stride, padding, window.dilation)
    return torch.equal(found.double(), expected)


def _constant(value: Any) -> Any:
    return ops.constant(value.detach().float().cpu().contiguous().numpy())


def _integers(values: Sequence[int]) -> Any:
    return ops.constant(np.array(list(values), dtype=np.int64))


def _window(window: Window) -> tuple[list[int], list[int], list[int], list[int]]:
    """Strides, padding before, padding after, dilations."""
    return list(window.stride), [window.top, window.left], [window.bottom, window.right], list(window.dilation)
