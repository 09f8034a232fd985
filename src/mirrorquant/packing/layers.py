"""Packed layers: convolution and linear layers that compute with the bits of their weights.

A layer holds the bit planes of its weight, and its bias; the layout for the kernels is made from them when the layer is
built, moved or loaded, and is not part of ``state_dict``.

>>> import torch
>>> from torch import nn
>>> from mirrorquant.packing import PackedLinear
>>> layer = nn.Linear(100, 3)
>>> _ = layer.weight.data.sign_()
>>> packed = PackedLinear(layer)
>>> packed.weight_bits.planes.shape                    # 100 weights are 13 bytes
torch.Size([1, 3, 13])
>>> x = torch.randn(2, 100)
>>> torch.allclose(packed(x), layer(x), atol=1e-5)
True
>>> torch.equal(packed.weight, layer.weight)
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from mirrorquant.packing import kernels
from mirrorquant.packing.bits import PackedTensor, PackError
from mirrorquant.packing.kernels import fallback, ops
from mirrorquant.packing.kernels.layer import Epilogue, Geometry
from mirrorquant.packing.kernels.prepared import is_wide

__all__ = ["PackedConv2d", "PackedLinear", "fewest_rows", "why_floats"]

# What makes bits slower than floats, on processors with AVX2: see benchmarks/packed_layers.py.
_FEWEST_WEIGHTS = 1 << 16  # 256 x 256
_MANY_WEIGHTS = 3 << 17  # 512 x 768: from here on bits are faster for a single row, too
_FEWEST_ROWS = 16  # for linear layers in between
_FEWEST_CHANNELS = 64  # inputs and outputs of a linear layer


def why_floats(layer: nn.Conv2d | nn.Linear, levels: Sequence[float], *, fused: bool = False) -> str:
    """Why a layer should compute with floats: no kernel, or a slower one; empty if bits are faster.

    Convolutions of a network that is ``fused`` may be small: they take over the work of their neighbors.

    >>> why_floats(nn.Linear(512, 512), (-1, 1))
    ''
    >>> why_floats(nn.Linear(512, 10), (-1, 1))
    'fewer than 65,536 weights'
    """
    if fallback.affine(levels) is None:
        return f"no kernel for {len(levels)} levels" + " that are not equidistant" * (len(levels) == 3)
    if layer.weight.numel() < _FEWEST_WEIGHTS and not (fused and isinstance(layer, nn.Conv2d)):
        return f"fewer than {_FEWEST_WEIGHTS:,} weights"
    if isinstance(layer, nn.Linear):
        slender = min(layer.weight.shape) < _FEWEST_CHANNELS
        return f"fewer than {_FEWEST_CHANNELS} inputs or outputs" if slender else ""
    return "" if is_wide(layer.weight.shape, layer.groups) else "groups of fewer than 8 or 16 channels in and out"


def fewest_rows(layer: nn.Module) -> int:
    """The number of rows from which on a linear layer is faster on bits.

    >>> fewest_rows(nn.Linear(512, 512)), fewest_rows(nn.Linear(512, 1024))
    (16, 1)
    """
    if not isinstance(layer, nn.Linear) or layer.weight.numel() >= _MANY_WEIGHTS:
        return 1
    return _FEWEST_ROWS


class _PackedLayer(nn.Module):
    """The base of both: bits, a bias, and the scale and shift of the kernels' last step.

    It has the tensors of the layer, or those that are given in place of them.
    """

    prepared: Tensor
    gain: Tensor | None
    shift: Tensor | None
    bias: Tensor | None
    geometry: Geometry
    _options: tuple[str, ...]  # of the layer

    def __init__(
        self,
        layer: nn.Conv2d | nn.Linear,
        weight: PackedTensor | None = None,
        bias: Tensor | None = None,
        **geometry: Any,
    ) -> None:
        nn.Module.__init__(self)  # not that of the layer, whose class this only passes for
        if weight is None:
            weight, bias = PackedTensor.of(layer.weight), layer.bias
        if weight is None:
            raise PackError(f"the weights of {layer} are not quantized: call `opt.finalize()` first")
        for name in self._options:
            setattr(self, name, getattr(layer, name))
        self.weight_bits = weight
        self.geometry = Geometry(tuple(weight.shape), tuple(weight.levels), **geometry)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        for name in ("prepared", "gain", "shift"):
            self.register_buffer(name, None, persistent=False)
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]
        self._refresh()

    def _refresh(self) -> None:
        """Lays the weight out as the kernels read it, and makes scale and shift from the state."""
        self._unpacked: tuple[Tensor, int | None] | None = None
        self.geometry = self.geometry._replace(levels=tuple(self.weight_bits.levels))
        if self.weight_bits.planes.device.type != "meta":
            self.prepared = kernels.prepare(self.weight_bits.codes(), self.geometry.levels, self.geometry.groups)
            self.gain, self.shift = self._vector(self.weight_bits.scale), self._vector(self.bias)

    def _on_bits(self, x: Tensor) -> Tensor:
        return ops.call(x, self.prepared, self.geometry, Epilogue(self.gain, self.shift))

    def _vector(self, value: Tensor | None) -> Tensor | None:
        return None if value is None else value.float().expand(self.geometry.shape[0]).contiguous()

    @property
    def weight(self) -> Tensor:
        """The weights as floats, unpacked when first read, and again if someone changed them."""
        if self._unpacked is None or _version(self._unpacked[0]) not in (None, self._unpacked[1]):
            tensor = self.weight_bits.unpack()
            self._unpacked = tensor, _version(tensor)
        return self._unpacked[0]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> _PackedLayer:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._refresh()
        return self

    def extra_repr(self) -> str:
        options = "".join(f"{name}={getattr(self, name)}, " for name in self._options)
        return f"{options}activation={self.geometry.activation}"


class PackedConv2d(_PackedLayer, nn.Conv2d):  # type: ignore[override]
    """A ``Conv2d`` on bits; ``isinstance(layer, nn.Conv2d)`` is true of it."""

    _options = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")

    def __init__(self, layer: nn.Conv2d, *tensors: Any) -> None:
        left, right, top, bottom = pads = tuple(layer._reversed_padding_repeated_twice)  # as F.pad takes them
        by_kernel = layer.padding_mode == "zeros" and left == right and top == bottom
        window = {name: getattr(layer, name) for name in ("stride", "dilation", "groups")}
        super().__init__(layer, *tensors, padding=(top, left) if by_kernel else (0, 0), **window)
        self.pads = None if by_kernel else pads
        self.channels_last = suggest_memory_format(layer.weight) is torch.channels_last

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of a batch of images, or of one image, in the memory layout of the result of ``Conv2d``."""
        if input.dim() == 3:
            y: Tensor = self(input[None])[0]
            return y
        x, mode = input, str(self.padding_mode)
        if self.pads is not None:
            x = F.pad(x, self.pads, mode="constant" if mode == "zeros" else mode)
        return self._on_bits(x.contiguous(memory_format=torch.channels_last) if self.channels_last else x)


class PackedLinear(_PackedLayer, nn.Linear):  # type: ignore[misc, override]
    """A ``Linear`` on bits; ``isinstance(layer, nn.Linear)`` is true of it.

    A small one computes few rows with floats, which are unpacked once. With ``int8`` each row of the input is quantized
    to 8 bits, which is faster and no longer exact.
    """

    in_features: int
    _options = ("in_features", "out_features")
    _floats: tuple[Tensor, Tensor | None] | None = None

    def __init__(self, layer: nn.Linear, *tensors: Any, int8: bool = False) -> None:
        self.fewest: int = 1 if int8 else fewest_rows(layer)
        super().__init__(layer, *tensors, activation="int8" if int8 else "float32")

    def _refresh(self) -> None:
        super()._refresh()
        if self.fewest > 1 and self.prepared is not None:
            self._floats = self.weight, None if self.bias is None else self.bias.to(self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """The product for each row of the input."""
        floats = self._floats
        if floats is None or input.numel() >= self.fewest * self.in_features or input.dtype != floats[0].dtype:
            return self._on_bits(input)
        if torch.is_autocast_enabled(input.device.type):  # which does not apply to bits, nor to more rows
            return self._on_bits(input)
        return F.linear(input, *floats)


def _after_loading(layer: nn.Module, keys: Any) -> None:
    assert isinstance(layer, _PackedLayer)
    layer._refresh()


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed; None where torch does not count that."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else int(tensor._version)
