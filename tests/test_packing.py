"""Packed tensors, layers and models: exact in what they hold, right in what they compute."""

import copy
import gc
import itertools
import math
import pickle
import random
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import SHAPES, agree, compiled_graphs, held_as_bits, images, network, on_levels, same_state
from torch import nn

import mirrorquant as mq
from mirrorquant.levels import Levels
from mirrorquant.nn import BinaryActivation
from mirrorquant.packing import PackedConv2d, PackedLinear, PackedTensor, PackError, fuse, kernels
from mirrorquant.packing.bits import pack_bits, unpack_bits
from mirrorquant.packing.kernels import native, ops
from mirrorquant.packing.kernels.prepared import weight

LEVELS = [mq.BINARY, mq.TERNARY, 0.1 * mq.BINARY, Levels(-1, 0.25, 1, 3), Levels(*range(16)), Levels(*range(100))]


BITS = ("planes", "_extra_state")
pytestmark = pytest.mark.usefixtures("small_on_bits")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Tensors.


def draw_weight(draw, shape, levels, dtype=torch.float32):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    numbers = torch.randint(len(levels), shape, generator=generator)
    return torch.tensor(tuple(levels), dtype=dtype)[numbers]


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_a_tensor_on_levels_comes_back_to_the_bit(data):
    shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
    levels = data.draw(st.sampled_from(LEVELS))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    weight = draw_weight(data.draw, shape, levels, dtype)
    if len(shape) == 4 and data.draw(st.booleans()):
        weight = weight.contiguous(memory_format=torch.channels_last)
    packed = PackedTensor.of(weight, levels)
    again = packed.unpack()
    assert again.dtype == dtype
    assert torch.equal(again, weight)
    rows, row = (shape[0], weight[0].numel() if shape[0] else 0) if len(shape) > 1 else (1, weight.numel())
    if weight.numel():
        assert packed.planes.shape == ((len(packed.levels) - 1).bit_length(), rows, -(-row // 8))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_scales_are_found_and_exact(data):
    rows, row = data.draw(st.integers(1, 20)), data.draw(st.integers(2, 40))
    levels = data.draw(st.sampled_from([mq.BINARY, mq.TERNARY]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    scale = torch.rand(rows, 1, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).to(dtype) + 0.01
    if data.draw(st.booleans()):
        scale = scale[:1].expand(rows, 1)
    weight = scale * draw_weight(data.draw, (rows, row), levels, dtype)
    packed = PackedTensor.of(weight)
    assert torch.equal(packed.unpack(), weight)
    assert len(packed.levels) <= 3


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 30), st.integers(0, 70), st.integers(1, 8), st.integers(0, 2**32))
def test_bits_are_little_endian_in_rows(rows, row, planes, seed):
    codes = torch.randint(2**planes, (rows, row), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_bits(codes, planes)
    assert torch.equal(unpack_bits(packed, row), codes)
    if rows and row:
        place = seed % (rows * row)
        i, k = place // row, place % row
        assert [int(packed[j, i, k // 8]) >> (k % 8) & 1 for j in range(planes)] == [
            int(codes[i, k]) >> j & 1 for j in range(planes)
        ]


def test_what_is_not_on_levels_is_not_packed():
    assert PackedTensor.of(torch.randn(8, 8)) is None
    assert PackedTensor.of(torch.tensor([1.0, float("nan"), -1.0])) is None
    assert PackedTensor.of(torch.tensor([1.0, float("inf")] * 20)) is None
    assert PackedTensor.of(torch.ones(3, dtype=torch.int64)) is None
    assert PackedTensor.of(torch.tensor([1.0, -1.0, 0.5]), mq.BINARY) is None
    assert PackedTensor.of(torch.randn(5, 1)) is None  # every row of one number has one |w|


# Layers.


def close_to(y, expected, layer, x):
    """Within 2e-6 of the sum of max|w| |x| + |bias|, the bound that summing in any order can keep."""
    size = copy.deepcopy(layer).double()
    size.weight.fill_(layer.weight.abs().max())
    if layer.bias is not None:
        size.bias.abs_()
    bound = 2e-6 * size(x.double().abs())
    return bool(((y.double() - expected).abs() <= bound + 1e-30).all())


@st.composite
def convolutions(draw, padding_modes=("zeros", "reflect", "replicate", "circular")):
    torch.manual_seed(draw(st.integers(0, 2**32)))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    inputs, outputs = groups * draw(st.integers(1, 12)), groups * draw(st.integers(1, 12))
    if draw(st.integers(0, 4)) == 0:
        groups, outputs = inputs, inputs  # depthwise
    kernel = (draw(st.sampled_from([1, 2, 3, 5])), draw(st.sampled_from([1, 3])))
    dilation = draw(st.sampled_from([1, 1, 2]))
    stride = draw(st.sampled_from([1, 2]))
    padding = draw(st.sampled_from([0, 1, (2, 1), "valid"] + (["same"] if stride == 1 else [])))
    mode = draw(st.sampled_from(padding_modes))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": mode}
    layer = nn.Conv2d(inputs, outputs, kernel, bias=draw(st.booleans()), **options)
    x = torch.randn(draw(st.integers(1, 3)), inputs, draw(st.integers(9, 12)), draw(st.integers(9, 12)))
    return layer, x.contiguous(memory_format=torch.channels_last) if draw(st.booleans()) else x


def drawn(layer, draw):
    with torch.no_grad():
        layer.weight.copy_(draw_weight(draw, layer.weight.shape, draw(st.sampled_from(LEVELS[:4]))))
        if draw(st.booleans()):
            layer.weight.mul_(0.5 + torch.rand(len(layer.weight), *[1] * (layer.weight.dim() - 1)))
        if layer.bias is not None and draw(st.booleans()):
            layer.bias.copy_(draw_weight(draw, layer.bias.shape, mq.BINARY))
    return layer if PackedTensor.of(layer.weight) is not None else None


@settings(max_examples=250, deadline=None)
@given(st.data())
@torch.no_grad()
def test_a_packed_convolution_is_the_convolution(data):
    layer, x = data.draw(convolutions())
    if drawn(layer, data.draw) is None:
        return
    packed = PackedConv2d(layer)
    assert torch.equal(packed.weight, layer.weight)
    y = packed(x)
    assert close_to(y, copy.deepcopy(layer).double()(x.double()), layer, x)
    assert y.stride() == layer(x).stride()
    torch.testing.assert_close(packed(x[0]), y[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last])
def test_large_images_come_out_in_the_layout_they_have_in_torch(format_, fuse):
    layer = on_levels(nn.Conv2d(64, 1024, 3, padding=1).eval())
    x = torch.randn(2, 64, 8, 9).contiguous(memory_format=format_)
    assert ops.LARGE_IMAGE < 1024 * 8 * 9
    packed = mq.pack(nn.Sequential(layer), fuse=fuse)
    assert packed.fused is fuse
    with torch.no_grad():
        expected, y = layer(x), packed(x)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)


@settings(max_examples=200, deadline=None)
@given(st.data())
@torch.no_grad()
def test_a_packed_linear_layer_is_the_linear_layer(data):
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    shape = data.draw(st.lists(st.integers(1, 4), max_size=2))
    layer = nn.Linear(data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40)), bias=data.draw(st.booleans()))
    if drawn(layer, data.draw) is None:
        return
    x = torch.randn(*shape, layer.in_features)
    packed = PackedLinear(layer)
    assert close_to(packed(x), copy.deepcopy(layer).double()(x.double()), layer, x)


@pytest.mark.parametrize("levels", [mq.BINARY, mq.TERNARY])
@torch.no_grad()
def test_inputs_of_one_size_are_added_up_right(levels):
    """Sums as large as they can be, which integers inside a kernel must hold."""
    for inputs in (4, 16, 300):
        layer = on_levels(nn.Linear(inputs, 40, bias=False), levels)
        layer.weight[0] = 1.0
        layer.weight[1] = -1.0
        for x in (torch.ones(1, inputs), torch.full((3, inputs), -1.213), torch.randn(2, inputs).sign()):
            assert close_to(PackedLinear(layer)(x), copy.deepcopy(layer).double()(x.double()), layer, x)


@settings(max_examples=30, deadline=None)
@given(st.data())
@torch.no_grad()
def test_layers_after_a_sign_are_equal_to_the_bit(data):
    layer, x = data.draw(convolutions(("zeros", "zeros", "reflect")))
    if data.draw(st.booleans()):
        layer = nn.Linear(data.draw(st.integers(256, 300)), data.draw(st.integers(256, 300)), bias=False)
        x = torch.randn(data.draw(st.integers(1, 5)), layer.in_features)
    layer.weight.copy_(draw_weight(data.draw, layer.weight.shape, mq.BINARY))
    if layer.bias is not None:
        layer.bias.copy_(draw_weight(data.draw, layer.bias.shape, mq.BINARY))
    x = torch.where(x.abs() < 0.2, 0.0, x)  # zeros have a sign too
    model = nn.Sequential(BinaryActivation(), layer)
    packed = mq.pack(model)
    agree(packed.network(x), model, x)
    with compiled_graphs() as graphs:
        assert torch.equal(packed(x), model(x))
    kernel = ["run"]
    padded = getattr(layer, "padding_mode", "zeros") != "zeros" or getattr(layer, "padding", 0) == "same"
    if packed.layers() and not padded:
        assert [name for name in graphs[0] if name != "contiguous"] in (kernel, [*kernel, "_ordered"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_on_bits_and_rounded_once(dtype, monkeypatch):
    decoded = []
    monkeypatch.setattr(ops, "weight", lambda *given: (decoded.append(given), weight(*given))[1])
    linear, convolution = PackedLinear(on_levels(nn.Linear(300, 70))), PackedConv2d(on_levels(nn.Conv2d(64, 32, 3)))
    for packed, x in ((linear, torch.randn(20, 300)), (convolution, torch.randn(2, 64, 6, 6))):
        x = x.to(dtype)
        y = packed(x)
        assert y.dtype == dtype
        assert torch.equal(y, packed(x.float()).to(dtype))
    assert not decoded or native.active() == "torch"


def test_every_float_dtype_goes_in_and_comes_out():
    layer = on_levels(nn.Conv2d(3, 8, 3))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        x = torch.randn(2, 3, 8, 8).to(dtype)
        y = PackedConv2d(layer)(x)
        assert y.dtype == dtype
        exact = copy.deepcopy(layer).double()(x.double())
        rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) * (exact.abs() + 2)  # the bias is +-1
        assert bool(((y.double() - exact).abs() <= rounding + 2e-6 * (27 * x.double().abs().max() + 1)).all())


@torch.no_grad()
def test_linear_layers_quantize_their_input_to_8_bits_when_asked():
    model = on_levels(nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 16)))
    x = torch.randn(4, 256)
    agree(mq.pack(model)(x), model, x)
    assert 1e-5 < (mq.pack(model, int8=True)(x) - model(x)).norm() / model(x).norm() < 0.02
    again = mq.pack(mq.pack(model), int8=True)
    assert torch.equal(again(x), mq.pack(model, int8=True)(x))
    assert same_state(mq.unpack(again), model)


# Models.


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_networks_of_the_paper_give_the_same_predictions_packed_and_come_back_to_the_bit(name, affine):
    model, x = network(name, affine=affine), images(name)
    before = copy.deepcopy(model)
    packed = mq.pack(model)
    with compiled_graphs() as graphs:
        agree(packed(x), model, x)
    assert packed.fused
    assert len(graphs) == 1
    assert "run" in graphs[0]
    assert "_native_batch_norm_legit_no_training" not in graphs[0]
    with kernels.force("torch"):
        agree(packed(x), model, x)
    agree(packed.network(x), model, x)  # the layers by themselves, nothing folded
    assert same_state(mq.unpack(packed), before)
    assert same_state(model, before)
    assert not mq.unpack(packed).training


@pytest.mark.parametrize("levels", LEVELS[1:4])
@torch.no_grad()
def test_other_levels_and_scales_run_packed_too(levels):
    model, x = network("digitsnet", levels), images("digitsnet")
    packed = mq.pack(model, levels=levels)
    assert packed.layers() == (["conv1", "conv2", "conv3", "fc"] if len(levels) < 4 else [])
    assert held_as_bits(packed) == ["conv1", "conv2", "conv3", "fc"]
    agree(packed(x), model, x)
    assert same_state(mq.unpack(packed), model)


def test_finalized_networks_can_be_packed():
    model = mq.models.digitsnet()
    groups = mq.split(model, skip=["conv1", "fc"])
    opt = mq.MirrorDescent(torch.optim.Adam(groups, lr=0.01), method="md-tanh-s", levels=mq.BINARY)
    model(torch.randn(4, 1, 8, 8)).square().mean().backward()
    opt.step()
    with pytest.raises(PackError, match=r"conv2\.weight belongs to a MirrorDescent that is not finalized, and has \d+"):
        mq.pack(model)
    opt.finalize()
    packed = mq.pack(model)
    assert packed.layers() == ["conv2", "conv3"]
    assert mq.pack(model, levels=mq.BINARY, skip=["conv1", "fc"]).layers() == ["conv2", "conv3"]
    with pytest.raises(PackError, match=r"conv1\.weight contains .* none of the levels -1, 1, .*`opt\.finalize"):
        mq.pack(model, levels=[-1, 1])
    with pytest.raises(PackError, match=r"the pattern \['conv9'\] matches no parameter; there are conv\d"):
        mq.pack(model, skip="conv9")
    assert same_state(mq.unpack(packed).train(), model)


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("levels", [(-2, 2), (-3, 1), (-1, -1 / 3, 1 / 3, 1), (-2, 0, 1, 2), (-8, -5, 0, 7)], ids=str)
def test_any_levels_with_a_scale_are_packed(levels, per):
    model, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)), torch.randn(8, 64)
    opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model)), "bc", levels=mq.levels.auto(levels, per=per))
    opt.finalize()
    networks = [mq.pack(model), mq.pack(model, levels=levels)]
    del opt  # without it the levels are read off the weights
    if min(levels) > -8 or per == "tensor":
        networks.append(mq.pack(model))
    for packed in networks:
        assert held_as_bits(packed) == ["0", "2"]
        agree(packed(x), model.eval(), x)
        assert same_state(mq.unpack(packed), model)


@pytest.mark.parametrize("levels", [None, mq.TERNARY], ids=["found", "given"])
def test_a_channel_of_zeros_shares_the_scale_of_the_others(levels):
    weight = torch.tensor([[0.3, -0.3, 0.0], [0.0, 0.0, 0.0], [0.3, 0.3, 0.0]])
    apart = weight * torch.tensor([[1.0], [1.0], [2.0]])
    for tensor, scales in ((weight, 1), (apart, 3), (torch.zeros(3, 3), 0)):
        packed = PackedTensor.of(tensor, levels)
        assert (0 if packed.scale is None else len(packed.scale)) == scales
        assert torch.equal(packed.unpack(), tensor)


def test_levels_of_a_living_optimizer_are_known(tmp_path):
    levels = mq.levels.auto([-1, -0.31, 0.17, 1], per="channel")
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Conv1d(4, 8, 3))
    model[2].weight.data *= torch.rand(8, 1, 1) + 0.1
    opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model)), "bc", levels=levels)
    in_bits = {row.name for row in mq.summary(opt).rows if row.bits == 2}
    assert in_bits == {"0.weight", "2.weight"}
    opt.finalize()
    mq.save(model, tmp_path / "net")
    for found in (mq.summary(model), mq.summary(mq.packing.read(tmp_path / "net"))):
        assert {row.name for row in found.rows if row.bits == 2} == in_bits
    model[0].weight.data[0, 0] = 2.0  # no level any more, whatever the optimizer says
    assert {row.name for row in mq.summary(model).rows if row.bits == 2} == {"2.weight"}


def test_a_float_tensor_of_ones_does_not_count_as_quantized():
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32))
    report = mq.summary(mq.MirrorDescent(torch.optim.Adam(mq.split(model)), "bc"))
    assert report.quantized == 64 * 32
    assert {row.name: row.why for row in report.rows if row.levels is None} == {
        "0.bias": "bias or other vector",
        "1.weight": "normalization",
        "1.bias": "normalization",
    }


def test_levels_that_only_their_reader_knows_are_asked_for():
    levels, scale = Levels(-1, -0.31, 0.17, 1), torch.rand(32, 1) + 0.1
    model = nn.Sequential(on_levels(nn.Linear(64, 32, bias=False), levels))
    model[0].weight.data.mul_(scale)
    with pytest.raises(PackError, match=r"^0\.weight is not quantized .*a scale on: mq\.pack\(model, levels=\.\.\.\)"):
        mq.pack(model)
    assert same_state(mq.unpack(mq.pack(model, levels=levels)), model)
    half = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    half[0].weight.data = (on_levels(nn.Linear(64, 32), levels).weight * scale).bfloat16()
    with pytest.raises(
        PackError, match=r"0\.weight contains .*levels of torch\.bfloat16 must be .*finalize in float32"
    ):
        mq.pack(half, levels=levels)


def test_skip_takes_what_split_takes():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(288, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[4].weight = model[3].weight
    for parameter in model.parameters():
        parameter.data.sign_()
    assert held_as_bits(mq.pack(model, skip=nn.Linear)) == ["0"]
    assert held_as_bits(mq.pack(model, skip=[nn.Conv2d, "2"])) == ["3", "4"]
    assert held_as_bits(mq.pack(model, skip="4.weight")) == ["0", "2"]  # a tied parameter goes by all of its names


def test_misuse_is_told():
    packed = mq.pack(network("digitsnet"))
    assert packed.eval() is packed
    assert packed.train(False) is packed
    student = nn.Module()
    student.teacher = packed
    assert student.train().training
    assert not any(module.training for module in packed.modules())
    x = images("digitsnet").requires_grad_()
    assert not packed(x).requires_grad
    with pytest.raises(ValueError, match=r"x requires a gradient, .* under torch\.no_grad"):
        packed.network.conv1(x)
    with pytest.raises(PackError, match="expected the result of mq"):
        mq.unpack(network("digitsnet"))
    with pytest.raises(PackError, match="has no weight to pack"):
        mq.pack(nn.Sequential(nn.ReLU()))
    whole = nn.Sequential(nn.Linear(8, 8), nn.Sequential(packed))
    for refused in (mq.pack, lambda model: mq.save(model, "no"), lambda model: mq.export(model, "no.onnx", x)):
        with pytest.raises(PackError, match=r"1\.0 is packed already: put the plain module in its place"):
            refused(whole)
    with pytest.raises(PackError, match="0 has no shape yet: run one batch"):
        mq.pack(nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(8, 8)))
    many = nn.Linear(30, 20)
    many.weight.data.copy_(torch.linspace(-1, 1, 600).view(20, 30))
    with pytest.raises(PackError, match="there are 600 levels, but a packed weight has at most 256"):
        mq.pack(many, levels=many.weight.flatten().tolist())
    again = mq.pack(packed)
    assert again is not packed
    assert same_state(mq.unpack(again), mq.unpack(packed))


class Counted(nn.Linear):
    """Has a tensor of extra state."""

    count = 3

    def get_extra_state(self):
        return torch.tensor(self.count)

    def set_extra_state(self, state):
        self.count = int(state)


def test_extra_state_is_refused_and_not_lost():
    with pytest.raises(PackError, match=r"1\._extra_state is extra state, or the new name"):
        mq.pack(nn.Sequential(nn.Linear(8, 8), on_levels(Counted(8, 8))))


class Twice(nn.Module):
    """Has a layer whose weight is in another place, too."""

    def __init__(self, way="list"):
        super().__init__()
        self.layer, self.other = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
        if way == "layer":
            self.other = self.layer
        elif way == "weight":
            self.other.weight = self.layer.weight
        else:
            apart, self.other = self.other, None
            apart.weight = self.layer.weight
            self.kept = {
                "list": [{0: apart.weight}],
                "object": types.SimpleNamespace(weight=apart.weight),
                "module": [apart],
            }[way]

    def forward(self, x):
        if self.other is not None:
            return self.other(self.layer(x))
        held = self.kept[0] if isinstance(self.kept, list) else self.kept
        return F.linear(self.layer(x), held[0] if isinstance(held, dict) else held.weight)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("way", ["layer", "weight", "list", "object", "module"])
@torch.no_grad()
def test_a_weight_in_two_places_keeps_its_numbers_in_both(way, fuse, tmp_path):
    model, x = on_levels(Twice(way)), torch.randn(3, 512)
    packed, path = mq.pack(model, fuse=fuse), tmp_path / "twice.safetensors"
    mq.save(packed, path)
    for each in (packed, mq.pack(packed), mq.unpack(packed), mq.load(path, Twice(way))):
        agree(each(x), model, x)
    assert mq.summary(packed).quantized == 512**2


def test_float64_runs_as_floats():
    model = on_levels(nn.Linear(512, 512)).double()
    assert mq.pack(model).runs["weight"] == "float: float64 has no kernel for bits"
    x = torch.randn(3, 512).double()
    with torch.no_grad():
        agree(mq.pack(model)(x), model, x)


@torch.no_grad()
def test_a_packed_model_that_was_compiled_runs_compiled():
    packed, graphs = mq.pack(on_levels(nn.Linear(512, 512))), []
    packed.compile(backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[1])
    packed(torch.randn(32, 512))
    assert graphs


@torch.no_grad()
def test_a_packed_model_moves_copies_and_loads_as_any_model():
    model, x = network("digitsnet", affine=True), images("digitsnet")
    packed = mq.pack(model)
    expected = packed(x)
    copied = copy.deepcopy(packed)
    other = mq.pack(on_levels(mq.models.digitsnet(affine=True), seed=5))
    copied.load_state_dict(other.state_dict())
    assert torch.equal(copied(x), other(x))
    assert torch.equal(packed(x), expected)
    copied.load_state_dict(packed.state_dict())
    assert torch.equal(copied(x), expected)
    wider = mq.pack(network("digitsnet", mq.Levels(-2, 2.5), affine=True), levels=(-2, 2.5))
    with pytest.raises(
        PackError, match=r"the state has the levels \[-1\.0, 1\.0\], but the tensor has \[-2\.0, 2\.5\]"
    ):
        wider.load_state_dict(packed.state_dict())
    double = copy.deepcopy(packed).double()
    agree(double(x.double()), model, x)
    agree(double.float()(x), model, x)
    assert same_state(mq.unpack(copy.deepcopy(packed).bfloat16()), copy.deepcopy(model).bfloat16())
    scaled = network("digitsnet", 0.1 * mq.BINARY, affine=True)
    half = mq.pack(scaled, levels=0.1 * mq.BINARY).half()
    assert same_state(mq.unpack(half), copy.deepcopy(scaled).half())
    assert half(x.half()).dtype == torch.float16
    size = sum(tensor.numel() * tensor.element_size() for tensor in packed.state_dict().values())
    assert size < sum(parameter.numel() for parameter in model.parameters()) / 4  # no kernel layout, no float weights


def test_compilers_see_one_graph():
    plain, x = network("digitsnet"), images("digitsnet")
    model = mq.pack(plain)
    with torch.no_grad():
        agree(torch.compile(model, backend="eager", fullgraph=True)(x), plain, x)
        batch = torch.export.Dim("batch")
        program = torch.export.export(model, (x,), dynamic_shapes=(({0: batch},),))
        agree(program.module()(x), plain, x)
        assert program.module()(images("digitsnet", 9)).shape == (9, 10)
    kinds = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"mirrorquant.conv2d.default", "mirrorquant.linear.default"} <= kinds
    wide, x = mq.pack(on_levels(nn.Sequential(nn.Linear(256, 256), nn.ReLU()))), torch.randn(3, 256)
    assert torch.equal(torch.compile(wide, backend="eager", fullgraph=True)(x), wide(x))
    with torch.no_grad():
        kinds = {str(node.target) for node in torch.export.export(wide, (x,)).graph.nodes}
    assert "mirrorquant.linear.default" in kinds


# Fusion.


class Block(nn.Module):
    """A residual block, written in one of the ways in which people write them."""

    def __init__(self, style):
        super().__init__()
        self.style = style
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.sign = nn.ReLU(inplace=style == "in place"), BinaryActivation()
        self.scale = nn.Parameter(torch.ones(1, 8, 1, 1))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.style == "in place":
            y += x
            return self.relu(y)
        if self.style == "input changed in between":
            y = self.conv2(x)
            x = x.mul_(2)
            return torch.relu(self.bn2(y) + x)
        if self.style == "broadcast":
            return F.relu(y + self.scale)
        if self.style == "a size":
            return F.relu(y + x.shape[-1])
        if self.style == "twice":
            return F.relu(y + y) + self.bn1(self.conv1(x))
        if self.style == "used again":
            return F.relu(self.bn2(self.conv2(x))) + self.conv1(x) + y
        if self.style == "method":
            return torch.add(x, y).relu() - 3 + y.add(x)
        if self.style == "sign of what changes":
            y = self.sign(x)
            x.mul_(-1)
            return self.bn1(self.conv1(y)) + x
        if self.style == "bits of floats":
            return x.view(torch.int32), self.bn1(self.conv1(x))
        if self.style == "alpha":
            return torch.add(y, x, alpha=2).view(x.size(0), -1)
        if self.style == "layers by name":
            return self.bn2(self.conv2(input=x))
        if self.style == "view as":
            return y.view_as(torch.ones(2, 288))
        if self.style == "view by name":
            return y.view(size=(x.size(0), -1))
        return F.relu(self.bn2(self.conv2(x)).reshape(x.shape[0], -1))


STYLES = [
    "sign of what changes",
    "bits of floats",
    "in place",
    "input changed in between",
    "broadcast",
    "a size",
    "twice",
    "used again",
    "method",
    "alpha",
    "view by name",
    "view as",
    "layers by name",
    "reshaped",
]


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_fusion_keeps_the_meaning_of_the_network(style):
    model = on_levels(nn.Sequential(Block(style)))
    x = torch.randn(2, 8, 6, 6)
    packed = mq.pack(model)
    assert packed.fused
    got = packed(x.clone())
    assert same_state(mq.unpack(packed), model)
    if style == "bits of floats":
        assert torch.equal(got[0], x.view(torch.int32))
        got, model = got[1], nn.Sequential(model[0].conv1, model[0].bn1)
    agree(got, model, x)


@torch.no_grad()
def test_a_residual_block_becomes_two_calls():
    packed = mq.pack(on_levels(nn.Sequential(Block("in place"))))
    with compiled_graphs() as graphs:
        packed(torch.randn(2, 8, 6, 6))
    folded = ["call", "getitem", "getitem"]  # of the batch norm, once
    assert graphs == [[*folded, "run", *folded, "run", "contiguous"]]


@torch.no_grad()
def test_nothing_is_compiled_without_fuse_or_without_layers_on_bits():
    with compiled_graphs() as graphs:
        mq.pack(on_levels(nn.Sequential(Block("method"))), fuse=False)(torch.randn(2, 8, 6, 6))
        mq.pack(on_levels(nn.Sequential(nn.LSTM(12, 5))))(torch.randn(2, 12))
    assert not graphs


@pytest.mark.by_default
def test_networks_are_compiled_only_where_that_is_faster():
    small = nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    large = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 1024, 3))
    signs = nn.Sequential(nn.Conv2d(16, 16, 3), BinaryActivation(), nn.Conv2d(16, 16, 3))
    linear = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.ReLU())
    packed = [mq.pack(on_levels(model)) for model in (small, large, signs, linear)]
    assert [model.fused for model in packed] == [False, True, True, False]
    assert [model.layers() for model in packed] == [[], ["0", "2"], ["0", "2"], ["0"]]


@torch.no_grad()
def test_two_batch_sizes_are_compiled_and_all_others_run():
    model = on_levels(nn.Sequential(Block("method")))
    packed = mq.pack(model)
    with compiled_graphs() as graphs:
        for batch in (3, 5, 2, 7):
            x = torch.randn(batch, 8, 6, 6)
            agree(packed(x), model, x)
    assert len(graphs) == 2


@torch.no_grad()
def test_what_was_compiled_is_forgotten_with_the_model():
    packed = mq.pack(on_levels(nn.Sequential(Block("method"))))
    packed(torch.randn(2, 8, 6, 6))
    layer = weakref.ref(packed.network[0].conv1)
    del packed
    gc.collect()
    assert layer() is None


@torch.no_grad()
def test_batch_norm_over_another_axis_than_the_rows_is_not_confused():
    model = on_levels(nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5), nn.ReLU()))
    packed = mq.pack(model)
    for x in (torch.randn(7, 12), torch.randn(7, 5, 12)):
        agree(packed(x), model, x)
    model, x = on_levels(nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(3), nn.ReLU())), torch.randn(7, 3, 12)
    agree(mq.pack(model)(x), model, x)


class Optional(nn.Module):
    """What a tracer that gives every argument a value would get wrong."""

    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x, mask=None, negate=False):
        x = self.bn(self.fc(x))
        x = x if mask is None else x * mask
        return -x if negate else x


@torch.no_grad()
def test_optional_arguments_keep_their_meaning():
    model, x, mask = on_levels(Optional()), torch.randn(3, 8), torch.rand(3, 4)
    packed = mq.pack(model)
    assert packed.fused
    for arguments, options in (((x,), {}), ((x, mask), {}), ((x,), {"negate": True}), ((), {"x": x})):
        agree(packed(*arguments, **options), model, *arguments, **options)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(self.fc(x)) if x.sum() > 0 else -self.bn(self.fc(x))


@torch.no_grad()
def test_a_network_that_branches_on_values_is_fused_piece_by_piece():
    model = on_levels(Branches())
    packed = mq.pack(model)
    with compiled_graphs() as graphs:
        for x in (torch.rand(3, 8), -torch.rand(3, 8), torch.rand(3, 8)):
            agree(packed(x), model, x)
    assert sum("run" in graph for graph in graphs) == 2
    assert not any("_native_batch_norm_legit_no_training" in graph for graph in graphs)
    assert same_state(mq.unpack(packed), model)


@torch.no_grad()
def test_what_cannot_be_compiled_runs_packed_and_says_so(monkeypatch):
    model, x = on_levels(nn.Sequential(Block("method"))), torch.randn(2, 8, 6, 6)
    packed = mq.pack(model)
    monkeypatch.setattr(fuse, "fuse", lambda graph: 1 / 0)
    with pytest.warns(UserWarning, match=r"Sequential runs packed, but .*cannot compile it: .*division by zero"):
        agree(packed(x), model, x)
    assert not packed.fused
    agree(packed(x), model, x)
    assert packed.layers() == ["0.conv1", "0.conv2"]


@torch.no_grad()
def test_an_error_of_the_network_is_raised_as_it_is():
    packed = mq.pack(on_levels(Branches()))
    with pytest.raises(ValueError, match=r"x is \[3, 9\], but a weight of \[4, 8\] needs rows of 8"):
        packed(torch.randn(3, 9))
    assert packed.fused


class Mirrored(nn.Module):
    """An autoencoder that decodes with the weight of its encoder."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 4)

    def forward(self, x):
        return F.linear(self.encode(x).relu(), self.encode.weight.t())


@torch.no_grad()
def test_a_weight_that_is_used_apart_from_its_layer_is_cast_and_loaded_with_it():
    model, x = on_levels(Mirrored()), torch.randn(3, 8)
    packed = mq.pack(model)
    agree(packed(x), model, x)
    other = copy.deepcopy(model)
    other.encode.weight.neg_()
    packed.load_state_dict(mq.pack(other, fuse=False).state_dict())
    agree(packed(x), other, x)
    torch.testing.assert_close(packed.double()(x.double()), other.double()(x.double()))


class Remembers(nn.Module):
    """Keeps what its layers computed, as for a loss on them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.utils.weight_norm(nn.Linear(8, 4)), nn.Linear(4, 4)

    def forward(self, x):
        self.hidden = self.first(x)
        self.both = {"all": [self.hidden, self.second(self.hidden)]}
        return self.both["all"][1]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_model_that_keeps_computed_tensors_can_be_packed():
    model, x = Remembers().eval(), torch.randn(3, 8)
    model.second.weight.data.sign_()
    expected = model(x)
    packed = mq.pack(model)
    torch.testing.assert_close(packed(x), expected)
    assert same_state(mq.unpack(packed), model)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.calls = nn.Linear(8, 4), 0

    def forward(self, x):
        self.calls, self.hidden = self.calls + 1, self.fc(x)
        return self.hidden + torch.ones(4)


@torch.no_grad()
def test_a_forward_that_sets_attributes_sets_them_once_per_call(tmp_path):
    model, x = on_levels(Counts()), torch.randn(3, 8)
    packed = mq.pack(model)
    assert packed.network.calls == 0
    assert not hasattr(packed.network, "hidden")
    for calls in (1, 2, 3):
        agree(packed(x), model, x)
        assert packed.network.calls == calls
    torch.save(packed, tmp_path / "packed.pt")
    assert torch.equal(torch.load(tmp_path / "packed.pt", weights_only=False)(x), packed(x))


class Asks(nn.Module):
    """Does what depends on questions that tracing may answer wrongly."""

    def __init__(self, question):
        super().__init__()
        self.fc, self.question = nn.Linear(8, 4), question

    def forward(self, x):
        yes = torch.is_grad_enabled() if self.question == "gradient" else isinstance(x, torch.Tensor)
        return self.fc(x) if yes else -self.fc(x)


@torch.no_grad()
def test_questions_are_answered_as_when_it_runs():
    x = torch.randn(3, 8)
    with torch.enable_grad():
        model = on_levels(Asks("gradient"))
        packed = mq.pack(model)
    assert packed.fused
    agree(packed(x), model, x)
    model = on_levels(Asks("type"))
    packed = mq.pack(model)
    assert packed.fused
    agree(packed(x), model, x)


def test_hooks_are_not_lost():
    model = on_levels(nn.Sequential(nn.Sequential(nn.Linear(8, 4)), nn.Linear(4, 4)))
    model[0].register_forward_hook(lambda module, inputs, output: output + 100)
    model[1].register_forward_hook(lambda module, inputs, output: -output)
    packed = mq.pack(model)
    assert packed.layers() == ["0.0"]
    assert packed.runs["1.weight"] == "float: the layer has hooks, or a forward of its own"
    x = torch.randn(3, 8)
    with torch.no_grad():
        agree(packed(x), model, x)


@torch.no_grad()
def test_a_forward_that_was_put_into_a_layer_is_not_lost():
    model, x = on_levels(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))), torch.randn(3, 8)
    model[0].forward = types.MethodType(lambda layer, x: -nn.Linear.forward(layer, x), model[0])
    model[1].forward = types.MethodType(lambda layer, x: x.abs(), model[1])
    packed = mq.pack(model)
    assert packed.layers() == ["2"]
    agree(packed(x), model, x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(12), persistent=False)

    def forward(self, words):
        return self.out(self.hidden(self.hidden(self.embedding(words)))) * self.mask


@torch.no_grad()
def test_tied_weights_stay_tied():
    model = on_levels(Tied())
    packed = mq.pack(model)
    assert held_as_bits(packed) == ["hidden", "out"]
    words = torch.arange(12).reshape(3, 4)
    agree(packed(words), model, words)
    again = mq.unpack(packed)
    assert again.out.weight is again.embedding.weight
    assert same_state(again, model)


class Decoder(nn.Module):
    """A linear layer that shares its weight with the embedding that is built after it."""

    def __init__(self):
        super().__init__()
        self.decode, self.embed = nn.Linear(8, 12, bias=False), nn.Embedding(12, 8)
        self.embed.weight = self.decode.weight

    def forward(self, x):
        return self.decode(self.embed(x))


@torch.no_grad()
def test_a_weight_shared_with_a_layer_that_is_not_packed_keeps_its_numbers(tmp_path):
    model, x = on_levels(Decoder()), torch.arange(12)
    packed = mq.pack(model)
    assert held_as_bits(packed) == ["decode"]
    assert torch.equal(packed(x), model(x))
    assert same_state(mq.unpack(packed), model)
    mq.save(packed, tmp_path / "net.safetensors")
    assert torch.equal(mq.load(tmp_path / "net.safetensors", Decoder())(x), model(x))


@torch.no_grad()
def test_a_single_layer_is_a_model_too():
    layer = on_levels(nn.Linear(9, 3))
    packed = mq.pack(layer)
    x = torch.randn(2, 9)
    agree(packed(x), layer, x)
    assert same_state(mq.unpack(packed), layer)


def test_binary_activation_has_the_gradients_it_says():
    x = torch.tensor([-1.5, -1.0, -0.5, 0.0, 0.25, 2.0], requires_grad=True)
    for gradient, slopes in {"clipped": [0, 0, 1, 1, 1, 0], "polynomial": [0, 0, 1, 2, 1.5, 0]}.items():
        y = BinaryActivation(gradient)(x)
        assert y.tolist() == [-1, -1, -1, 1, 1, 1]
        (slope,) = torch.autograd.grad(y.sum(), x)
        assert slope.tolist() == slopes
    with pytest.raises(ValueError, match="gradient is 'straight'"):
        BinaryActivation("straight")


class ChangedView(nn.Module):
    """Changes a tensor through a view of it, or the reverse, and goes on with the other one."""

    def __init__(self, way):
        super().__init__()
        self.conv, self.relu, self.way = nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), way

    def forward(self, x):
        y = self.conv(x)
        z = y.view(x.size(0), -1) if self.way == "view" else y.flatten(1)
        self.relu(z if self.way != "source" else y)
        return z if self.way in ("source", "alone") else y


@pytest.mark.parametrize("way", ["view", "flatten", "source", "alone"])
@torch.no_grad()
def test_what_is_changed_through_a_view_is_changed(way):
    model, x = on_levels(ChangedView(way)), torch.randn(2, 3, 6, 6)
    packed = mq.pack(model)
    assert packed.fused
    agree(packed(x), model, x)


class Augmented(nn.Module):
    """Holds a tensor by two names, and changes it by an augmented assignment to one of them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        y = kept = self.conv(x)
        y += 1
        y *= 2
        count = x.size(0)
        count += 1
        return kept + count


@torch.no_grad()
def test_augmented_assignments_change_the_tensor():
    model, x = on_levels(Augmented()), torch.randn(2, 3, 6, 6)
    packed = mq.pack(model)
    assert packed.fused
    agree(packed(x), model, x)


class AsksTorch(nn.Module):
    """Takes a tensor, or a list with one in it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x if torch.is_tensor(x) else x[0])


@torch.no_grad()
def test_a_network_that_asks_torch_for_a_tensor_gets_the_right_answer():
    model, x = on_levels(AsksTorch()), torch.randn(2, 8)
    packed = mq.pack(model)
    assert packed.fused
    agree(packed(x), model, x)
    agree(packed([x]), model, x)


# State, randomness and aliases: what a graph cannot hold.

SHARED = {"calls": 0, "scale": 2.0}


def numpy_noise():
    return float(np.random.rand())  # noqa: NPY002


class Stateful(nn.Module):
    """Does in one way or another what makes the next call differ from this one."""

    def __init__(self, way):
        super().__init__()
        self.fc, self.way, self.calls, self.cache, self.last = nn.Linear(8, 8), way, 0, [], torch.zeros(8)
        self.numbers = random.Random(0)
        self.counter = itertools.count()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, seen=[]):  # noqa: B006
        if self.way == "noise":
            return self.fc(x + torch.randn(8))
        if self.way == "filled with noise":
            return self.fc(x + torch.empty(8).uniform_())
        if self.way == "noise of Python":
            return self.fc(x) * random.random()
        if self.way == "noise of an object":
            return self.fc(x) * self.numbers.choice([1.0, 2.0])
        if self.way == "noise of numpy":
            return self.fc(x) * numpy_noise()
        if self.way == "noise that is caught":
            try:
                return self.fc(x) + torch.rand(8)
            except Exception:
                return self.fc(x)
        if self.way == "counter":
            self.calls += 1
        if self.way == "counter of an object":
            return self.fc(x) + next(self.counter)
        if self.way == "cache":
            self.cache.append(x)
            return self.fc(torch.stack(self.cache).mean(0))
        if self.way == "tensor":
            self.last = self.last + self.fc(x).mean(0)
        if self.way == "buffer":
            self.mean += x.mean(0)
        if self.way == "buffer in place":
            self.mean.mul_(0.5).add_(x.mean(0))
        if self.way == "statistics":
            F.batch_norm(x, self.mean, torch.ones(8), training=True)
        if self.way == "global":
            SHARED["calls"] += 1
        if self.way == "default argument":
            seen.append(1)
        if self.way == "by its own dictionary":
            vars(self)["calls"] = self.calls + 1
        return self.fc(x) + self.calls + self.last + self.mean + SHARED["calls"] + len(seen)


WAYS = [
    "noise",
    "filled with noise",
    "noise of Python",
    "noise of an object",
    "noise of numpy",
    "noise that is caught",
    "counter",
    "counter of an object",
    "cache",
    "tensor",
    "buffer",
    "buffer in place",
    "statistics",
    "global",
    "default argument",
    "by its own dictionary",
]


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_state_and_randomness_are_those_of_the_plain_model(way, monkeypatch):
    plain = on_levels(Stateful(way))
    packed = mq.pack(plain)
    assert packed.fused
    found = []
    for model in (plain, packed):
        monkeypatch.setitem(SHARED, "calls", 0)
        Stateful.forward.__defaults__[0].clear()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        found.append([model(torch.full((2, 8), float(k))) for k in range(4)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)
    assert same_state(mq.unpack(packed), plain)
    assert packed.network.calls == plain.calls
    assert len(packed.network.cache) == len(plain.cache)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.table = nn.Linear(8, 8), np.array([1.0, 2.0])

    def forward(self, x):
        return self.fc(x) * float(self.table[0])


@torch.no_grad()
def test_an_array_is_not_taken_for_constant():
    model, x = on_levels(Table()), torch.randn(3, 8)
    packed = mq.pack(model)
    for value in (3.0, 4.0):
        for table in (model.table, packed.network.table):
            table[0] = value
        agree(packed(x), model, x)


class Cached(nn.Module):
    """Attention to all tokens so far."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.keys, self.values = nn.Linear(8, 24), nn.Linear(8, 8), None, None

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 1)
        self.values = v if self.values is None else torch.cat([self.values, v], 1)
        return self.out(F.scaled_dot_product_attention(q, self.keys, self.values))


@torch.no_grad()
def test_a_cache_of_keys_and_values_grows_token_by_token():
    model = on_levels(Cached())
    packed = mq.pack(model)
    for token in torch.randn(5, 1, 1, 8):
        torch.testing.assert_close(packed(token), model(token))
    assert packed.network.keys.shape == (1, 5, 8)


class Settings:
    def __init__(self):
        self.scale = 2.0


class Adjustable(nn.Module):
    """Reads what can be changed from outside, in every place where it can be."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act, self.scale, self.flip = (
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            2.0,
            False,
        )
        self.options, self.settings, self.offset = {"shift": [1.0]}, Settings(), torch.ones(8, 1, 1)
        self.register_buffer("gain", torch.ones(8, 1, 1))
        self.blocks = nn.ModuleList([nn.Identity(), nn.ReLU()])

    def forward(self, x):
        x = self.act(self.bn(self.conv(x))) * self.scale + self.options["shift"][0] + self.offset * (self.gain * 2)
        for block in self.blocks:
            x = block(x) * self.settings.scale * SHARED["scale"]
        return -x if self.flip else x


CHANGES = {
    "number": lambda net: setattr(net, "scale", 3.0),
    "flag": lambda net: setattr(net, "flip", True),
    "list in a dictionary": lambda net: net.options["shift"].append(net.options["shift"].pop() + 1),
    "object": lambda net: setattr(net.settings, "scale", 5.0),
    "module": lambda net: setattr(net, "act", nn.Sigmoid()),
    "list of modules": lambda net: net.blocks.append(nn.Tanh()),
    "hook": lambda net: net.bn.register_forward_hook(lambda module, inputs, output: output * 2),
    "forward": lambda net: setattr(net.act, "forward", torch.tanh),
    "eps": lambda net: setattr(net.bn, "eps", 3.0),
    "tensor": lambda net: setattr(net, "offset", torch.full((8, 1, 1), 7.0)),
    "tensor in place": lambda net: net.offset.mul_(3),
    "buffer": lambda net: setattr(net, "gain", torch.full((8, 1, 1), 7.0)),
    "buffer in place": lambda net: net.gain.mul_(3),
    "statistics": lambda net: net.bn.running_mean.add_(3),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_is_changed_after_packing_has_its_effect(change):
    model, x = on_levels(Adjustable()), torch.randn(2, 3, 6, 6)
    packed = mq.pack(model)
    assert packed.fused
    agree(packed(x), model, x)
    CHANGES[change](model)
    CHANGES[change](packed.network)
    got = packed(x)
    assert packed.fused
    assert not torch.allclose(got, mq.pack(on_levels(Adjustable()), fuse=False)(x))
    agree(got, model, x)


@torch.no_grad()
def test_a_global_that_is_changed_after_packing_has_its_effect(monkeypatch):
    model, x = on_levels(Adjustable()), torch.randn(2, 3, 6, 6)
    packed = mq.pack(model)
    agree(packed(x), model, x)
    monkeypatch.setitem(SHARED, "scale", 4.0)
    agree(packed(x), model, x)
    assert packed.fused


class Shows(nn.Module):
    """Changes a tensor after something was made of it that may show its memory, or the reverse."""

    def __init__(self, way, reverse):
        super().__init__()
        self.conv, self.way, self.reverse = nn.Conv2d(3, 8, 3, padding=1), way, reverse

    def forward(self, x):
        y = self.conv(x)
        z = SHOWN[self.way](y)
        if self.reverse:
            z *= 2
            return y
        y *= 2
        return z


SHOWN = {
    "detach": lambda y: y.detach().flatten(1),
    "index": lambda y: y[:, :].contiguous(),
    "chunk": lambda y: y.chunk(2, 1)[0].contiguous(),
    "split": lambda y: torch.split(y, 4, 1)[1],
    "narrow": lambda y: y.narrow(1, 0, 4).reshape(2, -1),
    "transpose": lambda y: y.transpose(1, 2).contiguous(),
    "permute": lambda y: y.permute(0, 2, 3, 1).flatten(1),
    "unbind": lambda y: y.unbind(1)[3],
    "mT": lambda y: y.mT,
    "data": lambda y: y.data.reshape(2, -1),
    "to": lambda y: y.to(y.dtype).ravel(),
    "movedim": lambda y: y.movedim(1, 3).contiguous(),
    "diagonal": lambda y: y.diagonal(0, 2, 3),
    "reshape": lambda y: y.reshape(2, -1),
    "channels last": lambda y: y.contiguous(memory_format=torch.channels_last),
    "strides": lambda y: y.as_strided((2, 8), (288, 1)),
    "pixels": lambda y: F.pixel_shuffle(y, 2),
    "real": lambda y: y.real,
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("way", SHOWN)
@torch.no_grad()
def test_a_change_reaches_whatever_shows_the_memory(way, reverse, last):
    model, x = on_levels(Shows(way, reverse)), torch.randn(2, 3, 6, 6)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    packed = mq.pack(model)
    assert packed.fused
    expected = copy.deepcopy(model)(x)
    for got in (packed(x), packed.network(x)):
        assert bool(((got - expected).abs() <= 2e-6 * (2 * 27 * x.abs().max() + 2)).all())


class Takes(nn.Module):
    """Changes the tensor that it is given, or returns it."""

    def __init__(self, way):
        super().__init__()
        self.conv, self.way, self.relu = nn.Conv2d(3, 3, 3, padding=1), way, nn.ReLU(inplace=True)

    def forward(self, x):
        if self.way == "changed":
            x *= 2
        if self.way == "part":
            x[:, 0] = 1.0
        if self.way == "module":
            self.relu(x)
        if self.way == "out":
            torch.add(x, 1, out=x)
        if self.way == "function":
            F.hardtanh(x, -0.5, 0.5, True)
        y = self.conv(x)
        return (y, x) if self.way == "returned" else y


@pytest.mark.parametrize("way", ["changed", "part", "module", "out", "function", "returned"])
@torch.no_grad()
def test_the_caller_sees_its_tensor_changed_and_returned(way):
    model = on_levels(Takes(way))
    packed = mq.pack(model)
    assert packed.fused
    x = torch.randn(2, 3, 6, 6)
    agree(packed(x.clone()), model, x)
    one, two = x.clone(), x.clone()
    result, _ = packed(one), model(two)
    assert packed.fused
    assert torch.equal(one, two)
    assert torch.equal(one, x) == (way == "returned")
    assert way != "returned" or result[1] is one


class Dense(nn.Module):
    """A dense block, a U and a bottleneck with a squeeze, in the ways in which they are usually written."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self._unit(8 + 4 * k, 4) for k in range(3))
        self.down, self.up = nn.Sequential(self._unit(20, 16), nn.MaxPool2d(2)), nn.ConvTranspose2d(16, 16, 2, 2)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(36, 36, 1), nn.Hardsigmoid())
        self.stem, self.head, self.drop = self._unit(3, 8), nn.Linear(36, 10), nn.Dropout(0.5)

    @staticmethod
    def _unit(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)
        )

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        y = self.down(x)
        y = F.interpolate(y, scale_factor=2, mode="nearest") + self.up(y)
        x = torch.cat([x, y], dim=1)
        x = x * self.squeeze(x)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        return self.head(self.drop(x.view(x.size(0), -1)))


def test_ordinary_networks_run_fused(recwarn):
    model, x = on_levels(Dense()), torch.randn(2, 3, 8, 8)
    packed = mq.pack(model)
    with compiled_graphs() as graphs:
        agree(packed(x), model, x)
    assert packed.fused
    assert len(graphs) == 1
    assert not {"_native_batch_norm_legit_no_training", "relu"} & set(graphs[0])
    assert not [w for w in recwarn if "packed" in str(w.message)]


def test_several_threads_pack_while_others_compute():
    models = [network("digitsnet"), on_levels(Dense()), on_levels(Asks("type")), on_levels(AsksTorch())]
    inputs = [images("digitsnet"), torch.randn(2, 3, 8, 8), torch.randn(3, 8), torch.randn(3, 8)]
    with torch.no_grad():
        expected = [model(x) for model, x in zip(models, inputs, strict=True)]

        def work(k):
            with torch.no_grad():
                if k % 2:
                    return [
                        torch.equal(m(x), y)
                        for m, x, y in zip(models, inputs, expected, strict=True)
                        for _ in range(20)
                    ]
                packed = [mq.pack(model) for model in models]
                for one, model, x in zip(packed, models, inputs, strict=True):
                    agree(one(x), model, x)
                return [one.fused for one in packed]

        with ThreadPoolExecutor(4) as pool:
            assert all(all(result) for result in pool.map(work, range(12)))


# Where bits do not pay.


@pytest.mark.by_default
def test_layers_that_bits_slow_down_compute_with_floats_and_are_stored_as_bits(tmp_path):
    layers = [nn.Conv2d(32, 1024, 3), nn.Conv2d(1024, 1024, 3, groups=1024), nn.Conv2d(1024, 64, 3, groups=4)]
    layers += [nn.Flatten(), nn.Linear(256, 256), nn.Linear(256, 255), nn.BatchNorm1d(255), nn.Linear(255, 1024)]
    model = on_levels(nn.Sequential(*layers, nn.Linear(1024, 63), nn.Linear(63, 2048)))
    packed, x = mq.pack(model), torch.randn(2, 32, 8, 8)
    assert packed.layers() == ["0", "2", "4", "7"]
    assert held_as_bits(packed) == ["0", "1", "2", "4", "5", "7", "8", "9"]
    assert type(packed.network[1]) is nn.Conv2d
    assert packed.runs["0.weight"] == "bits"
    assert packed.runs["0.bias"] == "float: a vector"
    assert packed.runs["1.weight"] == "float: groups of fewer than 8 or 16 channels in and out"
    assert packed.runs["4.weight"] == "bits from 16 rows on; float: fewer rows are faster"
    assert packed.runs["5.weight"] == "float: fewer than 65,536 weights"
    assert packed.runs["9.weight"] == "float: fewer than 64 inputs or outputs"
    agree(packed(x), model, x)
    agree(packed.double()(x.double()), model, x)
    agree(packed.float()(x), model, x)
    for name, saved in (("plain", model), ("packed", packed)):
        mq.save(saved, tmp_path / name)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "packed").read_bytes()
    other = on_levels(copy.deepcopy(model), seed=3)
    packed.load_state_dict(mq.pack(other).state_dict())
    agree(packed(x), other, x)


@pytest.fixture
def unpacked(monkeypatch):
    """The shapes that were unpacked so far."""
    shapes, unpack = [], PackedTensor.unpack
    monkeypatch.setattr(PackedTensor, "unpack", lambda bits: (shapes.append(bits.shape), unpack(bits))[1])
    return shapes


@torch.no_grad()
def test_no_call_of_a_transformer_unpacks_a_weight_again(unpacked):
    layer = nn.TransformerEncoderLayer(64, 4, 2048, batch_first=True)
    model, x = on_levels(nn.TransformerEncoder(layer, 2)), torch.randn(2, 5, 64)
    for parameter in model.parameters():
        parameter.mul_(0.05)
    packed = mq.pack(model)
    assert packed.layers() == []
    wanted = "float: nn.TransformerEncoderLayer computes with the weights of its layers"
    assert packed.runs["layers.0.linear1.weight"] == wanted
    assert packed.runs["layers.0.self_attn.in_proj_weight"] == "float: nn.MultiheadAttention has no kernel for bits"
    packed(x)
    unpacked.clear()
    agree(packed(x), model, x)
    assert not unpacked


def test_a_weight_that_only_packed_layers_hold_is_not_unpacked(unpacked):
    packed = mq.pack(
        on_levels(nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU(), nn.GRU(1024, 8, bias=False)))
    )
    assert unpacked == [(24, 1024), (24, 8)]
    mq.pack(packed)
    assert (1024, 1024) not in unpacked


@torch.no_grad()
def test_a_weight_that_others_read_is_unpacked_once(unpacked):
    model, x = on_levels(Mirrored()), torch.randn(3, 8)
    packed = mq.pack(model, fuse=False)
    packed(x)
    unpacked.clear()
    agree(packed(x), model, x)
    assert not unpacked
    packed.network.encode.weight.mul_(2)  # which is nobody's to change
    agree(packed(x), model, x)


# Modules of every kind.


class Attends(nn.Module):
    """Attention of linear layers, as people write it."""

    def __init__(self, width=64):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def encoder(width=64):
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


TOKENS = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(3, 64, 6, 6, generator=torch.Generator().manual_seed(0))
MODULES = {
    "attention": (lambda: nn.MultiheadAttention(64, 4, batch_first=True), (TOKENS, TOKENS, TOKENS)),
    "attention to others": (lambda: nn.MultiheadAttention(64, 4, kdim=64, vdim=32, batch_first=True), None),
    "custom attention": (Attends, (TOKENS,)),
    "encoder": (encoder, (TOKENS,)),
    "decoder": (lambda: nn.TransformerDecoderLayer(64, 4, 1024, batch_first=True), (TOKENS, TOKENS)),
    "transformer": (lambda: nn.Transformer(64, 4, 1, 1, 64, batch_first=True), (TOKENS, TOKENS)),
    "LSTM": (lambda: nn.LSTM(64, 48, 2, bidirectional=True, proj_size=8), (TOKENS,)),
    "GRU": (lambda: nn.GRU(64, 48, batch_first=True), (TOKENS,)),
    "RNN": (lambda: nn.RNN(64, 48), (TOKENS,)),
    "LSTM cell": (lambda: nn.LSTMCell(64, 48), (TOKENS[0],)),
    "Conv1d": (lambda: nn.Conv1d(5, 16, 3, padding=1, stride=2), (TOKENS,)),
    "Conv3d": (lambda: nn.Conv3d(64, 8, 3, padding=1), (IMAGES[:, :, None],)),
    "depthwise": (lambda: nn.Conv2d(64, 64, 3, groups=64), (IMAGES,)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(64, 32, 4, stride=2, groups=2), (IMAGES,)),
    "Embedding": (lambda: nn.Embedding(40, 64), (torch.arange(40).reshape(4, 10),)),
    "Bilinear": (lambda: nn.Bilinear(64, 64, 8), (TOKENS, TOKENS)),
    "Linear": (lambda: nn.Linear(64, 4096), (TOKENS,)),
    "linear of one row": (lambda: nn.Linear(512, 512), (torch.ones(512),)),
}
MODULES["attention to others"] = (MODULES["attention to others"][0], (TOKENS, TOKENS, TOKENS[:, :, :32]))


def scaled(model, levels, per_row):
    """The model with its matrices on c * levels, c for each tensor or for each index of dimension 0."""
    generator = torch.Generator().manual_seed(0)
    on_levels(model, levels)
    with torch.no_grad():
        for parameter in model.parameters():
            size = [len(parameter), *[1] * (parameter.dim() - 1)] if per_row and parameter.dim() > 1 else [1]
            parameter.mul_(0.02 + 0.1 * torch.rand(size, generator=generator))
            if parameter.dim() < 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.by_default
@pytest.mark.parametrize("per_row", [False, True], ids=["one scale", "a scale per row"])
@pytest.mark.parametrize("levels", [mq.BINARY, mq.TERNARY], ids=["binary", "ternary"])
@pytest.mark.parametrize("kind", MODULES)
@torch.no_grad()
def test_modules_of_every_kind_are_packed_saved_loaded_and_run(kind, levels, per_row, unpacked, tmp_path):
    make, inputs = MODULES[kind]
    model = scaled(make(), levels, per_row)
    packed = mq.pack(model)
    mq.save(packed, tmp_path / "net.safetensors")
    loaded = mq.load(tmp_path / "net.safetensors", make())
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    for run in (packed, loaded):
        assert same_state(mq.unpack(run).eval(), model)
        assert run.runs.keys() == matrices
        run(*inputs)
        unpacked.clear()
        agree(run(*inputs), model, *inputs)
        assert not unpacked
    rows = {row.name: row for row in mq.summary(packed).rows}
    for name in matrices:
        assert (rows[name].bits, rows[name].scaled) == (len(levels) - 1, True)
        assert rows[name].runs == packed.runs[name]
        assert rows[name].runs.startswith(("bits", "float: "))
    assert "runs on" in str(mq.summary(packed))
    assert "runs on" not in str(mq.summary(model))


@pytest.mark.by_default
@torch.no_grad()
def test_few_rows_of_a_small_linear_layer_are_computed_with_floats_of_any_dtype():
    model = scaled(nn.Linear(256, 300), mq.BINARY, True)
    packed = mq.pack(model)
    for shape in ((256,), (1, 256), (15, 256), (16, 256), (2, 8, 256)):
        x = torch.randn(shape)
        agree(packed(x), model, x)
        assert packed(x.double()).dtype == torch.float64
        with torch.autocast("cpu", dtype=torch.bfloat16):
            agree(packed(x), model, x)
    other = scaled(nn.Linear(256, 300), mq.BINARY, True)
    other.weight.neg_()
    packed.load_state_dict(mq.pack(other).state_dict())
    x = torch.randn(2, 256)
    agree(packed(x), other, x)
    agree(copy.deepcopy(packed).double()(x.double()), other, x)


class Several(nn.Module):
    """Takes a dictionary, tuples and keyword arguments, and returns them."""

    def __init__(self):
        super().__init__()
        self.attends, self.head = Attends(), nn.Linear(64, 8)

    def forward(self, batch, *others, gain=1.0, mask=None):
        x = self.attends(batch["x"] + sum(others), mask=mask) * gain
        return {"tokens": x, "heads": (self.head(x[:, 0]), self.head(x[:, -1]))}


@torch.no_grad()
def test_dictionaries_and_keyword_arguments_go_in_and_out():
    model, x, mask = scaled(Several(), mq.BINARY, True), TOKENS, torch.rand(5, 5)
    for packed in (mq.pack(model), mq.pack(model, fuse=False)):
        for others, options in (((), {}), ((x, x), {"gain": 0.5}), ((x,), {"mask": mask})):
            found = packed({"x": x}, *others, **options)
            assert list(found) == ["tokens", "heads"]
            assert isinstance(found["heads"], tuple)
            agree(found, model, {"x": x}, *others, **options)


@pytest.mark.by_default
def test_tensors_that_two_modules_share_say_how_each_of_them_runs():
    model = nn.Sequential(nn.Embedding(1000, 512), nn.Linear(512, 1000, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.data.sign_()
    assert mq.pack(model).runs == {"0.weight": "float: nn.Embedding has no kernel for bits; bits"}


@pytest.mark.by_default
@torch.no_grad()
def test_hooks_of_a_packed_model_are_called_and_gradients_are_off():
    packed, seen = mq.pack(on_levels(nn.LSTM(8, 8))), []
    x = torch.randn(3, 8, requires_grad=True)
    with torch.enable_grad():
        assert not packed(x)[0].requires_grad
    packed.register_forward_hook(lambda *values: seen.append(values))
    packed(x)
    assert len(seen) == 1


@pytest.mark.by_default
def test_weights_in_channels_last_stay_in_it():
    model = on_levels(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))).to(memory_format=torch.channels_last)
    packed, x = mq.pack(model), torch.randn(2, 8, 8, 8)
    assert packed(x).stride() == model(x).stride()
    assert mq.unpack(packed)[0].weight.stride() == model[0].weight.stride()


# What ordinary networks do besides.


class Ordinary(nn.Module):
    """A convolution and a batch norm, and something else after them."""

    def __init__(self, then):
        super().__init__()
        self.conv, self.bn, self.then = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), then

    def forward(self, x):
        return self.then(self, F.relu(self.bn(self.conv(x))))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.bn(self.conv(x)).mean((2, 3)))


class Wrapped(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net[:2](x)


def _asserted(net, x):
    torch._assert(x.shape[1] == 16, f"{x.shape[1]} channels of {x.shape[2]}x{x.shape[3]} in {x.ndim} dimensions")
    return x


def _imports(net, x):
    import colorsys

    return x * colorsys.ONE_THIRD


@torch.no_grad()
def test_a_module_called_norm_is_not_taken_for_what_a_layer_took_over():
    model, x = on_levels(Normed()), torch.randn(2, 3, 6, 6)
    packed = mq.pack(model)
    assert packed.fused
    agree(packed(x), model, x)


FOLLOWS = {
    "assertion": _asserted,
    "import": _imports,
    "import in torch": lambda net, x: x if torch.onnx.is_in_onnx_export() else -x,
    "float64 of numpy": lambda net, x: x / np.sqrt(64),
    "float32 of numpy": lambda net, x: x * np.float32(0.1),
}


@pytest.mark.parametrize("then", FOLLOWS.values(), ids=FOLLOWS)
@torch.no_grad()
def test_assertions_imports_and_numbers_of_numpy_are_followed(then):
    model, x = on_levels(Ordinary(then)), torch.randn(2, 3, 6, 6)
    packed = mq.pack(model)
    agree(packed(x), model, x)
    assert packed.fused


@torch.no_grad()
def test_an_assertion_still_fails_when_packed():
    def narrow(net, x):
        torch._assert(x.shape[3] == 4, f"the width is {x.shape[3]}")
        return x

    packed = mq.pack(on_levels(Ordinary(narrow)))
    assert packed.fused
    packed(torch.randn(1, 3, 6, 6))
    with pytest.raises(AssertionError, match="the width is"):
        packed(torch.randn(1, 3, 6, 7))


TEXTS = {
    "compared": lambda net, x: x if f"{x.dtype}" == "torch.float32" else -x,
    "searched": lambda net, x: x if "32" in f"{x.dtype}" else -x,
    "returned": lambda net, x: (x, f"{x.shape}"),
}


@pytest.mark.parametrize("way", TEXTS)
@torch.no_grad()
def test_text_about_tensors_is_right(way):
    model, x = on_levels(Ordinary(TEXTS[way])), torch.randn(2, 3, 6, 6)
    found, expected = mq.pack(model)(x), model(x)
    assert found[1] == expected[1] if way == "returned" else torch.allclose(found, expected, atol=1e-4)


@torch.no_grad()
def test_modules_that_forward_makes_and_python_numbers_are_followed():
    model, x = on_levels(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())), torch.randn(2, 3, 6, 6)
    for net in (Wrapped(model), on_levels(Ordinary(lambda net, x: x / math.sqrt(x.size(1))))):
        packed = mq.pack(net)
        agree(packed(x), net, x)
        assert packed.fused


def _in_float32(net, x):
    with torch.autocast("cpu", enabled=False):
        return x.flatten(1).float() @ net.table


def _as_told(net, x):
    return x * 2 if torch.is_autocast_enabled("cpu") else x


@pytest.mark.parametrize("then", [_in_float32, _as_told])
@torch.no_grad()
def test_what_forward_does_about_autocast_holds_at_each_call(then):
    model, x = on_levels(Ordinary(then)), torch.randn(2, 3, 6, 6)
    model.table = torch.randn(16 * 16, 8)
    packed = mq.pack(model)
    assert packed.fused
    agree(packed(x), model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = packed(x), packed.network(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


def test_autocast_in_forward_is_not_lost():
    def coarse(net, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x.flatten(1) @ torch.ones(16 * 16, 8)

    packed = mq.pack(on_levels(Ordinary(coarse)))
    assert packed(torch.randn(2, 3, 6, 6)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["forward", "last"])
@torch.no_grad()
def test_methods_that_are_replaced_after_packing_have_their_effect(name):
    class Methods(Normed):
        def forward(self, x):
            return self.last(self.bn(self.conv(x)))

        def last(self, x):
            return x.mean((2, 3))

    model, x, before = on_levels(Methods()), torch.randn(2, 3, 6, 6), getattr(Methods, name)
    packed = mq.pack(model)
    agree(packed(x), model, x)
    setattr(Methods, name, lambda self, x: 2 * before(self, x))
    agree(packed(x), model, x)
    assert packed.fused


# What is not finalized.


@pytest.mark.parametrize("save", [False, True])
def test_a_forgotten_finalize_is_noticed(save, tmp_path):
    model = mq.models.digitsnet()
    opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model), lr=0.01), anneal=mq.schedules.geometric(1.5))
    for _ in range(25):  # until soft weights are all but saturated
        model(torch.randn(8, 1, 8, 8)).square().mean().backward()
        opt.step()

    def write(**options):
        return mq.save(model, tmp_path / "net") if save else mq.pack(model, **options)

    wanted = (
        r"conv\d\.weight belongs to a MirrorDescent that is not finalized, and has \d+ distinct values: call `opt\."
    )
    with pytest.raises(PackError, match=wanted):
        write()
    with opt.quantized():
        write()
    opt.finalize()
    write()


def test_of_several_optimizers_the_newest_says_whether_weights_are_final():
    model = mq.models.digitsnet()
    first, second = (mq.MirrorDescent(torch.optim.Adam(mq.split(model), lr=0.01)) for _ in range(2))
    with pytest.raises(PackError, match="not finalized"):
        mq.pack(model)
    second.finalize()
    assert not first.finalized
    mq.pack(model)


def test_values_too_close_to_each_other_are_no_levels():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    near = Levels(-1, -0.9999999, 0.5, 0.9999998, 1)
    on_levels(model, near)
    with pytest.raises(PackError, match=r"0\.weight has 5 distinct values, some only 1\.2e-07 apart, .*`opt\.finalize"):
        mq.pack(model)
    assert held_as_bits(mq.pack(model, levels=near)) == ["0", "1"]
    assert held_as_bits(mq.pack(on_levels(model, Levels(*(2.0**k for k in range(-8, 0)))))) == ["0", "1"]
    on_levels(model)
    model[0].bias.data[:2] = torch.tensor([0.9999999, 0.9999998])  # so few numbers are no reason for doubt
    assert held_as_bits(mq.pack(model)) == ["0", "1"]


def test_only_a_model_without_any_quantized_weight_is_an_error():
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 4))
    with pytest.raises(PackError, match=r"^0\.weight is not quantized \(contains -?[\d.e-]+\), nor .*`opt\.finalize"):
        mq.pack(model)
    model[0].weight.data.sign_()
    assert mq.pack(model).runs == {"0.weight": "float: nn.Embedding has no kernel for bits"}
    with pytest.raises(PackError, match=r"^1\.weight is not quantized .*, or pass the levels that its channels have"):
        mq.pack(model, skip="0")


# The same questions, where the graph is written to a file.


@pytest.mark.parametrize("way", ["noise", "counter", "buffer in place", "cache"])
def test_state_and_randomness_are_not_exported(way, tmp_path):
    pytest.importorskip("onnx")
    with pytest.raises(PackError, match="Stateful cannot be exported with inputs of"):
        mq.export(on_levels(Stateful(way)), tmp_path / "net.onnx", (8,))
    assert not (tmp_path / "net.onnx").exists()


class ChangesPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.conv(x)
        z = y.detach()
        y *= 2
        return z.flatten(1)


def test_a_change_of_shared_memory_is_exported(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    model, x = on_levels(ChangesPart()), torch.randn(2, 3, 6, 6)
    mq.export(model, tmp_path / "net.onnx", (3, 6, 6))
    session = runtime.InferenceSession(tmp_path / "net.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    agree(torch.from_numpy(y), model, x)


class Doubled(nn.Module):
    """A network that asks what its layers are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(64, 128, 3), nn.Flatten(), nn.Linear(512, 512), nn.ReLU()])

    def forward(self, x):
        for layer in self.layers:
            x = 2 * layer(x) if isinstance(layer, (nn.Conv2d, nn.Linear)) else layer(x)
        return x


def test_packed_layers_are_layers_for_code_that_asks():
    model, x = on_levels(Doubled()).eval(), torch.randn(3, 64, 4, 4)
    packed = mq.pack(model)
    assert sum(isinstance(m, (PackedConv2d, PackedLinear)) for m in packed.modules()) == 2
    agree(packed(x), model, x)


class AsksItself(nn.Module):
    """A network that asks its parameters where it is, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))

    def forward(self, tokens):
        asked = next(self.layers[1].parameters())
        return self.layers(F.one_hot(tokens, 64).to(device=asked.device, dtype=asked.dtype))


@pytest.mark.parametrize("fuse", [False, True])
@torch.no_grad()
def test_code_that_asks_for_a_parameter_finds_device_and_dtype(fuse, tmp_path):
    model, tokens = on_levels(AsksItself()), torch.arange(5)
    packed = mq.pack(model, fuse=fuse)
    assert packed.layers() == ["layers.0", "layers.1"]
    agree(packed(tokens), model, tokens)
    assert sum(p.numel() for p in packed.parameters()) == 0
    assert packed.state_dict().keys() == {f"network.layers.{i}.weight_bits.{k}" for i in (0, 1) for k in BITS}
    again = mq.pack(on_levels(AsksItself(), seed=1))
    again.load_state_dict(packed.state_dict())
    assert torch.equal(again(tokens), packed(tokens))
    for dtype in (torch.bfloat16, torch.float64):
        cast = pickle.loads(pickle.dumps(copy.deepcopy(packed).to(dtype)))
        assert {p.dtype for p in cast.parameters()} == {cast(tokens).dtype} == {dtype}
        assert same_state(mq.unpack(cast), copy.deepcopy(model).to(dtype))
    assert {p.device.type for p in copy.deepcopy(packed).to("meta").parameters()} == {"meta"}


def test_a_copied_optimizer_is_not_finalized_either():
    model = nn.Linear(64, 64)
    opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model)))
    model(torch.randn(4, 64)).square().mean().backward()
    opt.step()
    again, copied = copy.deepcopy((model, opt))
    with pytest.raises(PackError, match="not finalized"):
        mq.pack(again)
    copied.finalize()
    mq.pack(again)
