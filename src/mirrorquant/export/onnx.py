"""ONNX files: torch exports the network, and weights on levels become uint8 initializers that a few nodes decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mirrorquant import _files
from mirrorquant._version import __version__
from mirrorquant.export import ordered, quiet, structured
from mirrorquant.packing.bits import PackedTensor, PackError, layout
from mirrorquant.packing.file import read_about

try:
    import onnx
    import onnx_ir
    from onnx_ir.passes import common as passes
    from onnxscript import optimizer
    from onnxscript.rewriter import RewritePass
    from onnxscript.rewriter.rules.common import remove_optional_bias_from_conv_rule
except ImportError as error:
    raise PackError("exports need the packages onnx and onnxscript: pip install 'mirrorquant[onnx]'") from error

__all__ = ["OnnxModel", "convert"]

OPSET = 18  # the first one with BitwiseAnd


def convert(
    program: torch.export.ExportedProgram,
    packed: Mapping[str, PackedTensor],
    about: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> bytes:
    """A program as an ONNX file with these names of inputs and outputs, in which these tensors are stored as bits."""
    with quiet():
        exported = torch.onnx.export(program, (), dynamo=True, opset_version=OPSET, optimize=False, verbose=False)
        assert exported is not None
        model = exported.model
        _simplify(model)
    decoder, tensors = _Decoder(), model.graph.initializers
    values = [*model.graph.inputs, *model.graph.outputs]
    if len(values) != len(inputs) + len(outputs) or len({id(value) for value in values}) < len(values):
        raise PackError("it returns an input, or a tensor twice, or ignores an input: return copies, by x.clone()")
    ends = dict(zip((*inputs, *outputs), values, strict=True))
    for value in [*tensors.values(), *model.graph.inputs, *(value for node in model.graph for value in node.outputs)]:
        if value.name in ends:  # a tensor of such a name gets a dot
            value.name = f"{value.name}."
    for name, value in ends.items():
        value.name = name
    for name, bits in packed.items():
        if name in tensors:
            decoder.add(name, bits)
            tensors.pop(name)
    proto = onnx_ir.to_proto(model)
    del proto.graph.value_info[:]
    nodes = [*decoder.nodes, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(decoder.constants.values())
    proto.producer_name, proto.producer_version = "mirrorquant", __version__
    onnx.helper.set_model_props(proto, {"mirrorquant": about})
    onnx.checker.check_model(proto)
    content: bytes = proto.SerializeToString()
    return content


def _simplify(model: onnx_ir.Model) -> None:
    """Folds sizes and small constants, but no tensor of the model; removes unused nodes and all comments."""
    state = set(model.graph.initializers)

    def should_fold(node: onnx_ir.Node) -> bool | None:
        reads = any(value is not None and value.name in state for value in node.inputs)
        return False if reads and node.op_type != "Shape" else None

    optimizer.fold_constants(model, should_fold=should_fold)
    for clean in (
        RewritePass([remove_optional_bias_from_conv_rule]),  # torch gives every convolution a bias, perhaps of zeros
        passes.RemoveUnusedNodesPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.ClearMetadataAndDocStringPass(),
    ):
        clean(model)


class _Decoder:
    """The nodes and constants that decode tensors from their bits. Their names begin with a slash."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def add(self, name: str, entry: PackedTensor) -> None:
        """Decodes a tensor by a mask for each bit of a byte; each bit selects a level, or is part of its number."""
        rows, row = layout(entry.shape)
        levels = torch.tensor(tuple(entry.levels), dtype=torch.float32)
        masks = self._constant("/masks", torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8))
        bits = []
        for place, plane in enumerate(entry.planes):
            packed = self._constant(f"{name}.plane{place}", plane[:, :, None])
            bit = self._node("Cast", [self._node("BitwiseAnd", [packed, masks])], to=onnx.TensorProto.BOOL)
            bit = self._node("Reshape", [bit, self._sizes(rows, 8 * plane.shape[1])])
            if row % 8:
                bit = self._node("Slice", [bit, self._sizes(0), self._sizes(row), self._sizes(1)])
            bits.append(self._node("Reshape", [bit, self._sizes(*entry.shape)]))
        if len(bits) == 1:
            value = self._node("Where", [bits[0], self._number(levels[1]), self._number(levels[0])])
        else:
            parts = [self._node("Where", [bit, self._number(1 << j), self._number(0)]) for j, bit in enumerate(bits)]
            number = self._node("Cast", [self._node("Sum", parts)], to=onnx.TensorProto.INT32)
            value = self._node("Gather", [self._constant(f"/levels.{levels.tolist()}", levels), number])
        if entry.scale is not None:
            scale = entry.scale.reshape(-1, *[1] * (len(entry.shape) - 1))
            value = self._node("Mul", [value, self._constant(f"{name}.scale", scale)])
        self.nodes[-1].output[0] = name

    def _constant(self, name: str, value: Tensor) -> str:
        if name not in self.constants:
            self.constants[name] = onnx.numpy_helper.from_array(value.cpu().contiguous().numpy(), name)
        return name

    def _number(self, value: float | Tensor) -> str:
        return self._constant(f"/number.{float(value)!r}", torch.tensor(float(value), dtype=torch.float32))

    def _sizes(self, *values: int) -> str:
        return self._constant("/sizes." + ".".join(map(str, values)), torch.tensor(values))

    def _node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"/{kind}.{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(kind, list(inputs), [name], **attributes))
        return name


class OnnxModel(nn.Module):
    """An ONNX file, or its content, as a model that takes and returns tensors; ONNX Runtime runs it on the CPU.

    ``about`` is the metadata that it was exported with; ``inputs`` and ``outputs`` are the names in the file.
    """

    runtime = "ONNX Runtime"

    def __init__(self, path: str | Path | bytes) -> None:
        super().__init__()
        try:
            import onnxruntime
        except ImportError as error:
            raise PackError("running ONNX files needs onnxruntime: pip install 'mirrorquant[onnx]'") from error
        file = "the model" if isinstance(path, bytes) else str(path)
        try:
            self.content = path if isinstance(path, bytes) else _files.read_regular(path)
            self.session = onnxruntime.InferenceSession(self.content, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise PackError(f"{file} cannot be read by ONNX Runtime ({str(error).splitlines()[0]})") from error
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]
        self.about = read_about(self.session.get_modelmeta().custom_metadata_map.get("mirrorquant", ""))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The outputs for a batch, as :func:`mirrorquant.export.structured` returns them.

        Takes the tensors in the order of the file, by their names, or in the structure of the model's own arguments.
        """
        given = ordered(self.inputs, inputs, named)
        arrays = {name: x.detach().cpu().contiguous().numpy() for name, x in zip(self.inputs, given, strict=True)}
        return structured(self.outputs, [torch.from_numpy(y) for y in self.session.run(None, arrays)])

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        _files.write_atomically(path, self.content, PackError)
