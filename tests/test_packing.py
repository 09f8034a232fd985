"""Packed tensors, layers and models: exact in what they hold, right in what they compute."""

import copy
import types
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import SHAPES, images, network, on_levels, same_state
from torch import nn

import mirrorquant as mq
from mirrorquant.levels import Levels
from mirrorquant.nn import BinaryActivation
from mirrorquant.packing import PackedConv2d, PackedLinear, PackedTensor, PackError, kernels
from mirrorquant.packing.bits import pack_bits, unpack_bits

LEVELS = [mq.BINARY, mq.TERNARY, 0.1 * mq.BINARY, Levels(-1, 0.25, 1, 3), Levels(*range(16)), Levels(*range(100))]


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
    packed = PackedConv2d.of(layer)
    assert torch.equal(packed.weight, layer.weight)
    y = packed(x)
    assert close_to(y, copy.deepcopy(layer).double()(x.double()), layer, x)
    residual = torch.randn_like(y)
    for found, wanted in (
        (packed(x, residual, True), F.relu(y + residual)),
        (packed(x, residual[:, :, :1, :1], True), F.relu(y + residual[:, :, :1, :1])),
        (packed(x[0]), y[0]),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


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
    packed = PackedLinear.of(layer)
    y = packed(x)
    assert close_to(y, copy.deepcopy(layer).double()(x.double()), layer, x)
    residual = torch.randn_like(y)
    torch.testing.assert_close(packed(x, residual, True), F.relu(y + residual), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("levels", [mq.BINARY, mq.TERNARY])
@torch.no_grad()
def test_inputs_of_one_size_are_added_up_right(levels):
    """Sums as large as they can be, which integers inside a kernel must hold."""
    for inputs in (4, 16, 300):
        layer = on_levels(nn.Linear(inputs, 40, bias=False), levels)
        layer.weight[0] = 1.0
        layer.weight[1] = -1.0
        for x in (torch.ones(1, inputs), torch.full((3, inputs), -1.213), torch.randn(2, inputs).sign()):
            torch.testing.assert_close(PackedLinear.of(layer)(x), layer(x), rtol=1e-5, atol=1e-5 * inputs)


@settings(max_examples=250, deadline=None)
@given(st.data())
@torch.no_grad()
def test_layers_after_a_sign_are_equal_to_the_bit(data):
    layer, x = data.draw(convolutions(("zeros", "zeros", "reflect")))
    if data.draw(st.booleans()):
        layer, x = nn.Linear(data.draw(st.integers(1, 99)), data.draw(st.integers(1, 20)), bias=False), None
        x = torch.randn(data.draw(st.integers(1, 5)), layer.in_features)
    layer.weight.copy_(draw_weight(data.draw, layer.weight.shape, mq.BINARY))
    if layer.bias is not None:
        layer.bias.copy_(draw_weight(data.draw, layer.bias.shape, mq.BINARY))
    x = torch.where(x.abs() < 0.2, 0.0, x)  # zeros have a sign too
    model = nn.Sequential(BinaryActivation(), layer)
    packed = mq.pack(model)
    assert packed.network[1].after_sign
    torch.testing.assert_close(packed.network(x), model(x))
    assert len([node for node in packed.graph.graph.nodes if node.op == "call_module"]) == 1
    assert torch.equal(packed(x), model(x))


def test_every_float_dtype_goes_in_and_comes_out():
    layer = on_levels(nn.Conv2d(3, 8, 3))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        x = torch.randn(2, 3, 8, 8).to(dtype)
        y = PackedConv2d.of(layer)(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), layer(x.float()), rtol=0.02, atol=0.05)


@torch.no_grad()
def test_linear_layers_quantize_their_input_to_8_bits_when_asked():
    model = on_levels(nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 16)))
    x = torch.randn(4, 256)
    errors = [((mq.pack(model, int8=int8)(x) - model(x)).norm() / model(x).norm()).item() for int8 in (False, True)]
    assert errors[0] < 1e-6
    assert 1e-5 < errors[1] < 0.02
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
    expected, logits = model(x), packed(x)
    assert torch.equal(logits.argmax(1), expected.argmax(1))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5 * expected.abs().max().item())
    with kernels.force("torch"):
        assert torch.equal(packed(x).argmax(1), expected.argmax(1))
    assert torch.equal(packed.network(x).argmax(1), expected.argmax(1))  # the layers by themselves, nothing folded
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in packed.graph.modules())
    assert same_state(mq.unpack(packed), before)
    assert same_state(model, before)
    assert not mq.unpack(packed).training


@pytest.mark.parametrize("levels", LEVELS[1:4])
@torch.no_grad()
def test_other_levels_and_scales_run_packed_too(levels):
    model, x = network("digitsnet", levels), images("digitsnet")
    packed = mq.pack(model, levels=levels)
    assert packed.layers() == ["conv1", "conv2", "conv3", "fc"]
    torch.testing.assert_close(packed(x), model(x), rtol=1e-4, atol=1e-5)
    assert same_state(mq.unpack(packed), model)


def test_finalized_networks_can_be_packed():
    model = mq.models.digitsnet()
    groups = mq.split(model, skip=["conv1", "fc"])
    opt = mq.MirrorDescent(torch.optim.Adam(groups, lr=0.01), method="md-tanh-s", levels=mq.BINARY)
    model(torch.randn(4, 1, 8, 8)).square().mean().backward()
    opt.step()
    with pytest.raises(PackError, match=r"conv1\.weight holds -?\d.*which is on no few levels: finalize\(\)"):
        mq.pack(model)
    opt.finalize()
    packed = mq.pack(model)
    assert packed.layers() == ["conv2", "conv3"]
    assert mq.pack(model, levels=mq.BINARY, skip=["conv1", "fc"]).layers() == ["conv2", "conv3"]
    with pytest.raises(PackError, match=r"conv1\.weight holds .* none of the levels -1, 1"):
        mq.pack(model, levels=[-1, 1])
    with pytest.raises(PackError, match=r"the pattern \['conv9'\] matches no parameter; there are conv\d"):
        mq.pack(model, skip="conv9")
    assert same_state(mq.unpack(packed).train(), model)


def test_skip_takes_what_split_takes():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(288, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[4].weight = model[3].weight
    for parameter in model.parameters():
        parameter.data.sign_()
    assert mq.pack(model, skip=nn.Linear).layers() == ["0"]
    assert mq.pack(model, skip=[nn.Conv2d, "2"]).layers() == ["3", "4"]
    assert mq.pack(model, skip="4.weight").layers() == ["0", "2"]  # a tied parameter goes by all of its names


def test_misuse_is_told():
    packed = mq.pack(network("digitsnet"))
    assert packed.eval() is packed
    assert packed.train(False) is packed
    with pytest.raises(PackError, match="cannot be trained"):
        packed.train()
    x = images("digitsnet").requires_grad_()
    assert not packed(x).requires_grad
    with pytest.raises(PackError, match=r"no gradient: run them under torch\.no_grad"):
        packed.network.conv1(x)
    with pytest.raises(PackError, match="expected what mq"):
        mq.unpack(network("digitsnet"))
    with pytest.raises(PackError, match="has no Conv2d or Linear layer"):
        mq.pack(nn.Sequential(nn.ReLU()))
    again = mq.pack(packed)
    assert again is not packed
    assert same_state(mq.unpack(again), mq.unpack(packed))


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
        PackError, match=r"the state is on the levels \[-1\.0, 1\.0\], but the tensor on \[-2\.0, 2\.5\]"
    ):
        wider.load_state_dict(packed.state_dict())
    double = copy.deepcopy(packed).double()
    torch.testing.assert_close(double(x.double()).float(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(double.float()(x), expected)
    assert same_state(mq.unpack(copy.deepcopy(packed).bfloat16()), copy.deepcopy(model).bfloat16())
    scaled = network("digitsnet", 0.1 * mq.BINARY, affine=True)
    half = mq.pack(scaled, levels=0.1 * mq.BINARY).half()
    assert same_state(mq.unpack(half), copy.deepcopy(scaled).half())
    assert half(x.half()).dtype == torch.float16
    size = sum(tensor.numel() * tensor.element_size() for tensor in packed.state_dict().values())
    assert size < sum(parameter.numel() for parameter in model.parameters()) / 4  # no kernel layout, no float weights


def test_compilers_see_one_graph():
    model, x = mq.pack(network("digitsnet")), images("digitsnet")
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
        batch = torch.export.Dim("batch")
        program = torch.export.export(model, (x,), dynamic_shapes=(({0: batch},),))
        assert torch.equal(program.module()(x), expected)
        assert program.module()(images("digitsnet", 9)).shape == (9, 10)
    kinds = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"mirrorquant.conv2d.default", "mirrorquant.linear.default"} <= kinds


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
    torch.testing.assert_close(packed(x.clone()), model(x.clone()), rtol=1e-4, atol=1e-3)
    assert same_state(mq.unpack(packed), model)


@torch.no_grad()
def test_a_residual_block_becomes_two_calls():
    packed = mq.pack(on_levels(nn.Sequential(Block("in place"))))
    assert [node.op for node in packed.graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]


@torch.no_grad()
def test_batch_norm_over_another_axis_than_the_rows_is_not_confused():
    model = on_levels(nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5), nn.ReLU()))
    packed = mq.pack(model)
    for x in (torch.randn(7, 12), torch.randn(7, 5, 12)):
        torch.testing.assert_close(packed(x), model(x))
    model, x = on_levels(nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(3), nn.ReLU())), torch.randn(7, 3, 12)
    torch.testing.assert_close(mq.pack(model)(x), model(x))


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
        torch.testing.assert_close(packed(*arguments, **options), model(*arguments, **options))


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(self.fc(x)) if x.sum() > 0 else -self.bn(self.fc(x))


def test_what_cannot_be_traced_runs_packed_and_says_so():
    model = on_levels(Untraceable())
    with pytest.warns(UserWarning, match="torch.fx cannot trace Untraceable .*not folded"):
        packed = mq.pack(model)
    assert not packed.fused
    assert packed.layers() == ["fc"]
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), model(x))
    assert mq.pack(model, fuse=False).layers() == ["fc"]
    assert same_state(mq.unpack(packed), model)


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
    with pytest.warns(UserWarning, match="uses the weight or bias of a packed layer apart"):
        packed = mq.pack(model)
    other = copy.deepcopy(model)
    other.encode.weight.neg_()
    packed.load_state_dict(mq.pack(other, fuse=False).state_dict())
    torch.testing.assert_close(packed(x), other(x))
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


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore:torch.fx cannot trace")
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
def test_tracing_leaves_nothing_in_the_attributes_of_a_network(tmp_path):
    model, x = on_levels(Counts()), torch.randn(3, 8)
    packed = mq.pack(model)
    assert packed.fused
    assert packed.network.calls == 0
    torch.save(packed, tmp_path / "packed.pt")
    assert torch.equal(torch.load(tmp_path / "packed.pt", weights_only=False)(x), packed(x))
    torch.testing.assert_close(packed(x), model(x))


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
    torch.testing.assert_close(packed(x), model(x))
    model = on_levels(Asks("type"))
    with pytest.warns(UserWarning, match="it asks whether .*x.* is a Tensor"):
        packed = mq.pack(model)
    torch.testing.assert_close(packed(x), model(x))
    assert "isinstance" not in globals()


def test_hooks_are_not_lost():
    model = on_levels(nn.Sequential(nn.Sequential(nn.Linear(8, 4)), nn.Linear(4, 4)))
    model[0].register_forward_hook(lambda module, inputs, output: output + 100)
    model[1].register_forward_hook(lambda module, inputs, output: -output)
    with pytest.warns(UserWarning, match="0 has a forward hook"):
        packed = mq.pack(model)
    assert packed.layers() == ["0.0"]
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), model(x), rtol=1e-5, atol=1e-3)


@torch.no_grad()
def test_a_forward_that_was_put_into_a_layer_is_not_lost():
    model, x = on_levels(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))), torch.randn(3, 8)
    model[0].forward = types.MethodType(lambda layer, x: -nn.Linear.forward(layer, x), model[0])
    model[1].forward = types.MethodType(lambda layer, x: x.abs(), model[1])
    with pytest.warns(UserWarning, match="0 has a forward hook, or a forward that is not of its class"):
        packed = mq.pack(model)
    assert packed.layers() == ["2"]
    torch.testing.assert_close(packed(x), model(x))


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
    assert packed.layers() == ["hidden", "out"]
    words = torch.arange(12).reshape(3, 4)
    torch.testing.assert_close(packed(words), model(words))
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
    assert packed.layers() == ["decode"]
    assert torch.equal(packed(x), model(x))
    assert same_state(mq.unpack(packed), model)
    mq.save(packed, tmp_path / "net.safetensors")
    assert torch.equal(mq.load(tmp_path / "net.safetensors", Decoder())(x), model(x))


@torch.no_grad()
def test_a_single_layer_is_a_model_too():
    layer = on_levels(nn.Linear(9, 3))
    packed = mq.pack(layer)
    x = torch.randn(2, 9)
    torch.testing.assert_close(packed(x), layer(x))
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
    with nullcontext() if way == "alone" else pytest.warns(UserWarning, match="in place, by a view of the same memory"):
        packed = mq.pack(model)
    assert packed.fused == (way == "alone")
    torch.testing.assert_close(packed(x), model(x), rtol=1e-4, atol=1e-4)


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
    torch.testing.assert_close(packed(x), model(x), rtol=1e-4, atol=1e-4)


class AsksTorch(nn.Module):
    """Takes a tensor, or a list with one in it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x if torch.is_tensor(x) else x[0])


@torch.no_grad()
def test_a_network_that_asks_torch_for_a_tensor_is_told_the_truth():
    model, x = on_levels(AsksTorch()), torch.randn(2, 8)
    with pytest.warns(UserWarning, match="it asks whether .* is a Tensor"):
        packed = mq.pack(model)
    torch.testing.assert_close(packed(x), model(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed([x]), model(x), rtol=1e-4, atol=1e-4)
    assert torch.is_tensor.__globals__.get("isinstance") is None
