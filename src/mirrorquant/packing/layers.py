"""Packed layers: convolution and linear layers that compute with the bits of their weights.

A layer holds the bit planes of its weight, and of its bias where that is on levels too; the layout that the kernels
read is made from them when the layer is built, moved or loaded, and is not part of ``state_dict``.

>>> import torch
>>> from torch import nn
>>> from mirrorquant.packing import PackedLinear
>>> layer = nn.Linear(100, 3)
>>> _ = layer.weight.data.sign_()
>>> packed = PackedLinear.of(layer)
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

from mirrorquant.levels import BINARY
from mirrorquant.packing import kernels
from mirrorquant.packing.bits import PackedTensor, PackError

__all__ = ["PackedConv2d", "PackedLinear", "bits_pay"]

Norm = nn.BatchNorm1d | nn.BatchNorm2d
_FEWEST_WEIGHTS = 1 << 16  # of a linear layer: 256 x 256
_FEWEST_CHANNELS = (8, 16)  # that go into a group of a convolution, and come out


def bits_pay(layer: nn.Conv2d | nn.Linear) -> bool:
    """Whether a layer is faster on bits than on floats: all are but small linear layers and depthwise convolutions.

    A linear layer is small below 65,536 weights; a convolution counts as depthwise if it has groups of fewer than 8
    input or 16 output channels.

    >>> bits_pay(nn.Linear(512, 512)), bits_pay(nn.Linear(512, 10))
    (True, False)
    >>> bits_pay(nn.Conv2d(16, 16, 3)), bits_pay(nn.Conv2d(16, 16, 3, groups=16))
    (True, False)
    """
    if isinstance(layer, nn.Linear):
        return layer.weight.numel() >= _FEWEST_WEIGHTS
    channels = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    return layer.groups == 1 or all(n >= least for n, least in zip(channels, _FEWEST_CHANNELS, strict=True))


class _PackedLayer(nn.Module):
    """What the two have in common: bits, a bias, and the scale and shift of the kernels' last step.

    A layer with ``floats`` computes with floats, which it unpacks once; its state is bits all the same.

    In a traced network a layer is called with ``fused=True``: then it does the work of the batch norm that follows it
    and of the sign that precedes it, too. Called by itself it is the layer alone. While it is ``traced`` its weight and
    bias cannot be had as floats: these would be constants of the graph, which nothing moves, casts or loads.
    """

    prepared: Tensor
    gain: Tensor | None
    shift: Tensor | None
    fused_gain: Tensor | None
    fused_shift: Tensor | None
    bias_float: Tensor | None
    norm: tuple[Norm, ...] = ()  # in a tuple, since it is another module's child
    activation = "float32"
    after_sign = False
    floats = False
    traced = False
    groups = 1

    def __init__(self, weight: PackedTensor, bias: PackedTensor | Tensor | None) -> None:
        super().__init__()
        self.weight_bits = weight
        self.bias_bits = bias if isinstance(bias, PackedTensor) else None
        self.register_buffer("bias_float", bias if isinstance(bias, Tensor) else None)
        for name in ("prepared", "gain", "shift", "fused_gain", "fused_shift"):
            self.register_buffer(name, None, persistent=False)
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]
        self._weight: dict[str, Any] = {"shape": tuple(weight.shape)}
        self._unpacked: dict[str, tuple[Tensor, int | None]] = {}
        self._folded: tuple[Tensor, Tensor] | None = None

    def _prepare(self) -> None:
        """Lays the weight out as the kernels read it."""
        bits = self.weight_bits
        self._weight["levels"] = tuple(bits.levels)
        if bits.planes.device.type != "meta":
            self.prepared = kernels.prepare(bits.codes(), tuple(bits.levels), self.groups)

    def refresh(self) -> None:
        """Makes scales and shifts anew from the state."""
        self._unpacked, self._folded = {}, None
        bits = self.weight_bits
        if bits.planes.device.type == "meta":
            return
        bias = self.bias
        gain = None if bits.scale is None else bits.scale.double()
        shift = None if bias is None else bias.double()
        self.gain, self.shift = self._vector(gain), self._vector(shift)
        for norm in self.norm:
            gain, shift = _folded(norm, gain, shift)
        self.fused_gain, self.fused_shift = self._vector(gain), self._vector(shift)
        if self.floats:
            self._float_tensors(True, bits.dtype)

    def use_floats(self) -> None:
        """Has the layer compute with floats from now on."""
        self.floats = True
        self.refresh()

    def _vector(self, value: Tensor | None) -> Tensor | None:
        return None if value is None else value.float().expand(self.weight_bits.shape[0]).contiguous()

    @property
    def weight(self) -> Tensor:
        """The weights as floats, unpacked when first read."""
        return self._floats("weight", self.weight_bits)

    @property
    def bias(self) -> Tensor | None:
        """The bias as floats."""
        return self.bias_float if self.bias_bits is None else self._floats("bias", self.bias_bits)

    def _floats(self, name: str, bits: PackedTensor) -> Tensor:
        if self.traced:
            raise PackError("it uses the weight or bias of a packed layer apart from the layer")
        kept = self._unpacked.get(name)
        if kept is None or _version(kept[0]) not in (None, kept[1]):  # it is not for others to change
            tensor = bits.unpack()
            kept = self._unpacked[name] = (tensor, _version(tensor))
        return kept[0]

    @property
    def on_bits(self) -> bool:
        """Whether the layer computes with bits: without ``floats``, or where it took over a sign."""
        return self.after_sign or not self.floats

    def _float_tensors(self, fused: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as floats, with the batch norm that was taken over if ``fused``."""
        if not fused or not self.norm:
            bias = self.bias
            return self.weight.to(dtype), None if bias is None else bias.to(dtype)
        if self._folded is None or self._folded[0].dtype != dtype:
            (norm,) = self.norm
            slope, shift = _folded(norm, None, None if self.bias is None else self.bias.double())
            weight = self.weight_bits.unpack().double() * slope.reshape(-1, *[1] * (len(self.weight_bits.shape) - 1))
            self._folded = weight.to(dtype), shift.to(dtype)
        return self._folded

    def fold(self, norm: Norm) -> None:
        """Takes over the work of a batch norm that follows, with the statistics that it has collected."""
        self.norm = (norm,)
        self.refresh()

    def part(self) -> None:
        """Gives back what the layer took over."""
        self.norm, self.after_sign = (), False
        self.refresh()

    def take_sign(self) -> bool:
        """Takes over the sign that precedes the layer; False where its levels do not allow it."""
        self.after_sign = self.weight_bits.levels == BINARY
        return self.after_sign

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> _PackedLayer:
        bits = self.weight_bits
        before = bits.planes.device, bits.levels
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if (bits.planes.device, bits.levels) != before:
            self._prepare()
        here = bits.planes.device
        if all(norm.running_var is not None and norm.running_var.device == here for norm in self.norm):
            self.refresh()  # otherwise the norm is on its way: the model refreshes in the end
        return self

    def extra_repr(self) -> str:
        activation = f"activation={'binary' if self.after_sign else self.activation}"
        return activation if self.on_bits else f"{activation}, computed with floats"


class PackedConv2d(_PackedLayer):
    """A ``Conv2d`` on bits; ``residual`` is added to its output and ``relu`` applied after that, in one go."""

    channels_last = False  # as the weight was

    def __init__(
        self,
        weight: PackedTensor,
        bias: PackedTensor | Tensor | None = None,
        *,
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] | str = (0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__(weight, bias)
        self.stride, self.dilation, self.groups = stride, dilation, groups
        self.padding, self.padding_mode = padding, padding_mode
        self.out_channels, self.in_channels = weight.shape[0], weight.shape[1] * groups
        self.kernel_size = tuple(weight.shape[2:])
        self._pads = pads(padding, weight.shape[2:], dilation)
        self._weight |= {"stride": stride, "dilation": dilation, "groups": groups}
        self._prepare()
        self.refresh()

    @classmethod
    def of(
        cls, layer: nn.Conv2d, weight: PackedTensor | None = None, bias: PackedTensor | Tensor | None = None
    ) -> PackedConv2d:
        """The packed form of a layer: its own tensors, or these in place of them."""
        if weight is None:
            weight, bias = _tensors(layer)
        packed = cls(
            weight,
            bias,
            stride=_pair(layer.stride),
            padding=layer.padding if isinstance(layer.padding, str) else _pair(layer.padding),
            dilation=_pair(layer.dilation),
            groups=layer.groups,
            padding_mode=layer.padding_mode,
        )
        packed.channels_last = _is_channels_last(layer.weight)
        return packed

    def forward(
        self, input: Tensor, residual: Any = None, relu: bool = False, *, fused: bool = False, layout: bool = True
    ) -> Tensor:
        """The convolution of a batch of images, or of one image; arguments go by the names that ``Conv2d`` has.

        With ``layout`` the result lies in memory as that of ``Conv2d`` does, so that a view of it is a view there, too.
        """
        x = input
        _refuse_gradient(x)
        if x.dim() == 3:
            residual = residual[None] if isinstance(residual, Tensor) else residual
            y: Tensor = self(x[None], residual, relu, fused=fused, layout=layout)[0]
            return y
        y = self._convolved(x, residual, relu, fused)
        return _laid_out(y, self.channels_last or _is_channels_last(x)) if layout else y

    def _convolved(self, x: Tensor, residual: Any, relu: bool, fused: bool) -> Tensor:
        activation = "binary" if fused and self.after_sign else "float32"
        images, (left, right, top, bottom) = x, self._pads
        padding = (top, left)
        if self.padding_mode != "zeros":
            images, padding = F.pad(images, self._pads, mode=self.padding_mode), (0, 0)
        elif left != right or top != bottom:
            images = BINARY.nearest(images) if activation == "binary" else images  # a padded zero is no sign
            images, padding, activation = F.pad(images, self._pads), (0, 0), "float32"
        if self.floats and activation == "float32":
            weight, bias = self._float_tensors(fused, x.dtype)
            y = F.conv2d(images, weight, bias, self.stride, padding, self.dilation, self.groups)
            return _finish(y, residual, relu)
        fits = residual is None or _like(residual, self._output_shape(x), x.dtype)
        y = kernels.conv2d(
            images,
            self.prepared,
            **self._weight,
            padding=padding,
            scale=self.fused_gain if fused else self.gain,
            shift=self.fused_shift if fused else self.shift,
            residual=residual if fits else None,
            relu=relu and fits,
            activation=activation,
        )
        return y if fits else _finish(y, residual, relu)

    def _output_shape(self, x: Tensor) -> tuple[int, ...]:
        outputs, _, *kernel = self.weight_bits.shape
        left, right, top, bottom = self._pads
        sizes = zip(x.shape[2:], (top + bottom, left + right), kernel, self.stride, self.dilation, strict=True)
        return (x.shape[0], outputs, *((n + pad - d * (k - 1) - 1) // s + 1 for n, pad, k, s, d in sizes))

    def extra_repr(self) -> str:
        told = f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, groups={self.groups}"
        mode = f", padding_mode={self.padding_mode}" if self.padding_mode != "zeros" else ""
        return f"{told}{mode}, {super().extra_repr()}"


class PackedLinear(_PackedLayer):
    """A ``Linear`` on bits; ``residual`` is added to its output and ``relu`` applied after that, in one go.

    With ``int8`` each row of the input is quantized to 8 bits, which is faster and no longer exact.
    """

    def __init__(self, weight: PackedTensor, bias: PackedTensor | Tensor | None = None, *, int8: bool = False) -> None:
        super().__init__(weight, bias)
        self.out_features, self.in_features = weight.shape
        self.activation = "int8" if int8 else "float32"
        self._prepare()
        self.refresh()

    @classmethod
    def of(
        cls,
        layer: nn.Linear,
        weight: PackedTensor | None = None,
        bias: PackedTensor | Tensor | None = None,
        *,
        int8: bool = False,
    ) -> PackedLinear:
        """The packed form of a layer: its own tensors, or these in place of them."""
        if weight is None:
            weight, bias = _tensors(layer)
        return cls(weight, bias, int8=int8)

    def forward(
        self, input: Tensor, residual: Any = None, relu: bool = False, *, fused: bool = False, layout: bool = True
    ) -> Tensor:
        """The product for each row of the input; arguments go by the names that ``Linear`` has."""
        x = input
        _refuse_gradient(x)
        norms = self.norm if fused and x.dim() != 2 else ()  # over another axis than the rows that the kernel scales
        folded = fused and not norms
        activation = "binary" if fused and self.after_sign else self.activation
        if self.floats and activation == "float32":
            y = F.linear(x, *self._float_tensors(folded, x.dtype))
            for norm in norms:
                y = norm(y)
            return _finish(y, residual, relu)
        outputs = self._weight["shape"][0]
        fits = residual is None or _like(residual, (*x.shape[:-1], outputs), x.dtype)
        fits = fits and not norms
        y = kernels.linear(
            x,
            self.prepared,
            **self._weight,
            scale=self.fused_gain if folded else self.gain,
            shift=self.fused_shift if folded else self.shift,
            residual=residual if fits else None,
            relu=relu and fits,
            activation=activation,
        )
        for norm in norms:
            y = norm(y)
        return y if fits else _finish(y, residual, relu)


def _after_loading(layer: nn.Module, keys: Any) -> None:
    assert isinstance(layer, _PackedLayer)
    layer._prepare()
    layer.refresh()


def _refuse_gradient(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise PackError("packed layers give no gradient: run them under torch.no_grad(), or train the unpacked model")


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed; None where nothing counts that."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else int(tensor._version)


def _tensors(layer: nn.Conv2d | nn.Linear) -> tuple[PackedTensor, PackedTensor | Tensor | None]:
    weight = PackedTensor.of(layer.weight)
    if weight is None:
        raise PackError(f"the weights of {layer} are not quantized: call `opt.finalize()` first")
    bias = None if layer.bias is None else PackedTensor.of(layer.bias) or layer.bias.detach().clone()
    return weight, bias


def _folded(norm: Norm, gain: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """norm(gain * y + shift) as one scale and shift of y, in float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    slope = (norm.running_var.double() + norm.eps).rsqrt()
    slope = slope if norm.weight is None else slope * norm.weight.detach().double()
    centre = -norm.running_mean.double() if shift is None else shift - norm.running_mean.double()
    moved = centre * slope
    moved = moved if norm.bias is None else moved + norm.bias.detach().double()
    return slope if gain is None else gain * slope, moved


def _like(residual: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the kernel can add it: a tensor like the result, and not one to broadcast, or a number."""
    return isinstance(residual, Tensor) and residual.dtype == dtype and residual.shape == shape


def _is_channels_last(x: Tensor) -> bool:
    """Whether torch takes a batch of images for channels_last, which for some sizes and slices strides alone decide."""
    least, (sizes, strides) = 0, (x.shape, x.stride())
    for d in (1, 3, 2, 0):
        if sizes[d] == 0 or strides[d] < (1 if d == 1 else least) or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * sizes[d]
    return True


def _laid_out(y: Tensor, channels_last: bool) -> Tensor:
    """The images in this layout: themselves, where they are."""
    _, c, h, w = y.shape
    strides = (c * h * w, 1, w * c, c) if channels_last else (c * h * w, h * w, w, 1)
    if y.stride() == strides or y.numel() == 0:
        return y
    if all(n == 1 or a == b for n, a, b in zip(y.shape, y.stride(), strides, strict=True)):
        return y.as_strided(y.shape, strides)
    return torch.empty_strided(y.shape, strides, dtype=y.dtype, device=y.device).copy_(y)


def _finish(y: Tensor, residual: Any, relu: bool) -> Tensor:
    """What the kernel could not do at once."""
    y = y if residual is None else y + residual
    return torch.relu_(y) if relu else y


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return int(first), int(second)


def pads(padding: tuple[int, ...] | str, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, int, int, int]:
    """Left, right, top and bottom, as ``F.pad`` takes them; 'same' puts the odd one at the end."""
    if padding == "valid":
        return 0, 0, 0, 0
    if isinstance(padding, str):
        vertical, horizontal = (d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
        return horizontal // 2, horizontal - horizontal // 2, vertical // 2, vertical - vertical // 2
    return padding[1], padding[1], padding[0], padding[0]
