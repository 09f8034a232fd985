"""Exports: ONNX Runtime and OpenVINO compute what the model computes, from files of one bit a weight."""

import copy
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
import torch.nn.functional as F
from openvino import opset14 as ops
from packed import SHAPES, images, network, on_levels
from torch import nn

import mirrorquant as mq
from mirrorquant.cli import main
from mirrorquant.nn import BinaryActivation
from mirrorquant.packing import PackedTensor, PackError, to_openvino
from mirrorquant.packing.export import Window
from mirrorquant.packing.layers import pads
from mirrorquant.packing.to_onnx import OnnxModel
from mirrorquant.packing.to_openvino import OpenVinoModel


def in_onnx_runtime(path, x):
    return onnxruntime.InferenceSession(str(path)).run(None, {"input": x.numpy()})[0]


def in_openvino(path, x):
    core = openvino.Core()
    model = core.read_model(str(path))
    if not model.is_dynamic() and model.input(0).shape[0] != len(x):
        model.reshape([len(x), *x.shape[1:]])
    return core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x.numpy())[0]


ROUNDING = 2.0**-20  # of a layer's largest output: what sums of thousands of products lose in float32, in any order


def reference(model, x):
    """The model's output in float64, and how far float32 may be from it.

    That is ten times the largest change among runs in which each layer's output is off by ROUNDING, at random: what the
    network makes of such errors, whatever kernels a runtime chooses on a processor.
    """
    exact = copy.deepcopy(model).double()
    y = exact(x.double())
    torch.manual_seed(0)
    leaves = [module for module in exact.modules() if not list(module.children())]
    hooks = [
        leaf.register_forward_hook(lambda _, __, out: out.add_(ROUNDING * out.abs().max() * torch.randn_like(out)))
        for leaf in leaves
    ]
    noise = max(float((exact(x.double()) - y).abs().max()) for _ in range(8))
    for hook in hooks:
        hook.remove()
    assert noise < 1e-3 * float(y.abs().max())  # else this would be no test
    return y, 10 * noise


def close(found, model, x):
    expected, bound = reference(model, x)
    return found.shape == tuple(expected.shape) and np.abs(found - expected.numpy()).max() <= bound


def same_classes(found, model, x):
    """Whether the classes are those of float64, for all images where it is not a near tie."""
    expected, bound = reference(model, x)
    first, second = expected.topk(2, 1).values.T
    clear = (first - second > 2 * bound).numpy()
    assert clear.any()
    return np.array_equal(found.argmax(1)[clear], expected.argmax(1).numpy()[clear])


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_networks_of_the_paper_run_in_onnx_runtime_and_openvino(name, tmp_path):
    model, x = network(name), images(name)
    mq.export(mq.pack(model), tmp_path / "bits.onnx", SHAPES[name])
    mq.export(model, tmp_path / "float.onnx", SHAPES[name], bits=False)
    onnx.checker.check_model(str(tmp_path / "bits.onnx"), full_check=True)
    found = in_onnx_runtime(tmp_path / "bits.onnx", x)
    assert np.array_equal(found, in_onnx_runtime(tmp_path / "float.onnx", x))
    assert close(found, model, x)
    assert same_classes(found, model, x)
    assert in_onnx_runtime(tmp_path / "bits.onnx", x[:1]).shape == (1, 10)
    sizes = [(tmp_path / file).stat().st_size for file in ("float.onnx", "bits.onnx")]
    assert sizes[0] / sizes[1] > {"resnet18": 30.5, "vgg16": 30.5, "mobilenetv2": 17, "digitsnet": 15}[name]
    mq.export(model, tmp_path / "bits.xml", SHAPES[name], to="openvino")
    for file in ("bits.onnx", "bits.xml"):
        found = in_openvino(tmp_path / file, x)
        assert close(found, model, x)
        assert same_classes(found, model, x)


OTHER = [mq.TERNARY, mq.Levels(-1, 0.25, 1, 3), 0.1 * mq.BINARY]


@pytest.mark.parametrize("levels", OTHER)
@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_other_levels_and_scales_are_right_too(levels, to, tmp_path):
    model, x = network("digitsnet", levels), images("digitsnet")
    model.conv2.weight.mul_(torch.linspace(0.5, 2, 64).reshape(-1, 1, 1, 1))
    for bits in (True, False):
        path = tmp_path / {"onnx": "net.onnx", "openvino": "net.xml"}[to]
        mq.export(model, path, (1, 8, 8), to=to, bits=bits)
        assert close(in_onnx_runtime(path, x) if to == "onnx" else in_openvino(path, x), model, x)
        assert close(in_openvino(path, x), model, x)


@pytest.mark.parametrize(
    ("levels", "scaled"), [*((levels, False) for levels in OTHER), (OTHER[0], True), (OTHER[2], True)]
)
@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_weights_arrive_to_the_bit(levels, scaled, to, tmp_path):
    """Rows of the unit matrix: each output is one weight and zeros, which is exact in whatever order it is summed."""
    model = on_levels(nn.Linear(40, 24, bias=False), levels)
    if scaled:
        model.weight.mul_(torch.linspace(0.5, 2, 24)[:, None])
    assert np.array_equal(export_and_run(model, tmp_path, to, torch.eye(40)), model.weight.T.numpy())
    kernel = on_levels(nn.Conv2d(3, 8, 3, padding=1, bias=False), levels)
    x = torch.zeros(1, 3, 3, 3)
    x[0, 1, 1, 1] = 1
    found = export_and_run(kernel, tmp_path, to, x)
    assert np.array_equal(found[0], kernel.weight[:, 1].flip(1, 2).numpy())


class Everything(nn.Module):
    """All that can be exported, once."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect")
        self.even = nn.Conv2d(8, 8, (2, 3), padding="same", groups=4)
        self.dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2, bias=False)
        self.norm, self.prelu = nn.BatchNorm2d(8), nn.PReLU(8)
        self.acts = nn.Sequential(nn.ReLU6(), nn.Hardtanh(-2, 2), nn.Tanh(), nn.Dropout(), nn.Identity(), nn.Sigmoid())
        self.pools = nn.ModuleList([nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True)])
        self.adaptive, self.flatten = nn.AdaptiveAvgPool2d(2), nn.Flatten()
        self.hidden, self.norm1 = nn.Linear(64, 32), nn.BatchNorm1d(32)
        self.rows = nn.Linear(8, 4)
        self.gain = nn.Parameter(torch.ones(1))
        self.swish = nn.Hardswish()

    def forward(self, x):
        x = self.even(self.stem(x))
        x = self.prelu(self.norm(self.dilated(x))) + self.gain * 0.5
        x = torch.cat([self.pools[0](x), self.pools[1](x)], dim=1) / 2
        x = F.silu(F.relu6(x)) - self.swish(x).clamp(-1, 1)
        x = self.pools[2](F.avg_pool2d(F.max_pool2d(x, 2, stride=1), 3, stride=1, padding=1, count_include_pad=False))
        x = self.flatten(self.adaptive(x))
        x = torch.relu(self.norm1(self.hidden(x)))
        x = self.rows(x.view(x.size(0), 4, -1))
        return self.acts(x).mean(1, keepdim=True).squeeze(1).reshape(x.shape[0], -1)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_everything_that_can_be_exported_is_right(to, tmp_path):
    model = on_levels(Everything())
    x = torch.randn(3, 3, 17, 15)
    path = tmp_path / {"onnx": "net.onnx", "openvino": "net.xml"}[to]
    mq.export(model, path, (3, 17, 15), to=to)
    found = in_onnx_runtime(path, x) if to == "onnx" else in_openvino(path, x)
    assert found.shape == tuple(model(x).shape)
    assert close(found, model, x)
    assert close(in_openvino(path, x), model, x)


class Constants(nn.Module):
    """Tensors that are none of the model's state."""

    def __init__(self):
        super().__init__()
        self.fc, self.plain = nn.Linear(8, 4), torch.arange(4.0)
        self.register_buffer("mean", torch.rand(8), persistent=False)

    def forward(self, x):
        return self.fc(x - self.mean) * self.plain + torch.ones(4)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_tensors_that_are_no_state_are_constants(to, tmp_path):
    model, x, path = on_levels(Constants()), torch.randn(3, 8), tmp_path / {"onnx": "a.onnx", "openvino": "a.xml"}[to]
    mq.export(model, path, (8,), to=to)
    assert close(in_openvino(path, x), model, x)


@pytest.mark.parametrize("affine", [True, False])
def test_no_constant_is_written_that_nobody_reads(affine, tmp_path):
    mq.export(network("digitsnet", affine=affine), tmp_path / "net.onnx", (1, 8, 8))
    graph = onnx.load(str(tmp_path / "net.onnx")).graph
    assert {constant.name for constant in graph.initializer} <= {name for node in graph.node for name in node.input}


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_a_single_layer_is_a_model_too(to, tmp_path):
    model, x = on_levels(nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 6, 6)
    assert close(export_and_run(mq.pack(model), tmp_path, to, x), model, x)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize(("window", "size"), [((3, 2, 1), 8), ((2, 3, 1), 5)])
@torch.no_grad()
def test_pools_that_round_up_end_where_torch_does(window, size, to, tmp_path):
    x = torch.randn(2, 3, size, size)
    counting = nn.AvgPool2d(*window, ceil_mode=True)
    for pool in (
        nn.MaxPool2d(*window, ceil_mode=True),
        nn.AvgPool2d(*window, ceil_mode=True, count_include_pad=False),
        counting,
    ):
        model = on_levels(nn.Sequential(nn.Conv2d(3, 8, 1), pool))
        if to == "openvino" and pool is counting:
            with pytest.raises(PackError, match="one with count_include_pad=False can"):
                export_and_run(model, tmp_path, to, x)
            continue
        found = export_and_run(model, tmp_path, to, x)
        assert found.shape == tuple(model(x).shape)
        assert close(found, model, x)


class Named(nn.Module):
    """A parameter that has a name which the file needs, too."""

    def __init__(self, name):
        super().__init__()
        self.name, self.fc = name, nn.Linear(12, 8)
        setattr(self, name, nn.Parameter(torch.ones(8)))

    def forward(self, x):
        return getattr(self, self.name) * self.fc(x)


@pytest.mark.parametrize("name", ["input", "output", "masks"])
@torch.no_grad()
def test_parameters_may_have_any_name(name, tmp_path):
    model, x = on_levels(Named(name)), torch.randn(2, 12)
    setattr(model, name, nn.Parameter(torch.randn(8)))
    assert close(export_and_run(model, tmp_path, "onnx", x), model, x)


class InPlace(nn.Module):
    """Statements that change a tensor, and are not assigned to anything."""

    def __init__(self):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True)

    def forward(self, x):
        x, y, z = self.conv(x), self.conv(x - 1), self.conv(2 * x)
        self.relu(x)
        y.relu_()
        F.relu(z, inplace=True)
        z.add_(1)
        return x - y * z


def export_and_run(model, tmp_path, to, x):
    path = tmp_path / {"onnx": "net.onnx", "openvino": "net.xml"}[to]
    mq.export(model, path, x.shape[1:], to=to)
    return in_onnx_runtime(path, x) if to == "onnx" else in_openvino(path, x)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_what_is_changed_in_place_stays_changed(to, tmp_path):
    model, x = on_levels(InPlace()), torch.randn(2, 3, 6, 6)
    assert close(export_and_run(model, tmp_path, to, x), model, x)


class ByAnotherName(nn.Module):
    """A tensor that is changed in place by way of another one with the same memory."""

    def __init__(self, way):
        super().__init__()
        self.conv, self.drop, self.flatten, self.way = nn.Conv2d(3, 8, 3), nn.Dropout(), nn.Flatten(), way

    def forward(self, x):
        y = self.conv(x)
        if self.way == "twice":
            F.relu(y, inplace=True).add_(1)
        elif self.way == "dropout":
            self.drop(F.dropout(y, 0.1, self.training)).relu_()
        elif self.way == "view":
            y.view(x.size(0), -1).mul_(2)
        else:
            x, y = y, self.flatten(y)
            x += 1
            x *= 2
            x -= 3
            x /= 4
        return y - 0.5


@pytest.mark.parametrize("way", ["twice", "dropout", "view", "flatten"])
@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_what_is_changed_by_another_name_is_changed_too(to, way, tmp_path):
    model, x = on_levels(ByAnotherName(way)).eval(), torch.randn(2, 3, 6, 6)
    assert close(export_and_run(model, tmp_path, to, x), model, x)


class Chunks(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.cat(self.fc(x).chunk(2, 1))


class Options(nn.Module):
    """Arguments in all the ways in which torch takes them."""

    def __init__(self, last=None):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), last

    def forward(self, x):
        x = self.conv(x)
        x = torch.clamp(x, None, 4) + x.clamp(min=-3)
        return self.last(x) if self.last else torch.cat((x, x - 1), axis=1).mean(axis=(2, 3), keepdims=True)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_options_go_by_all_their_names(to, tmp_path):
    model, x = on_levels(Options()), torch.randn(2, 3, 6, 6)
    assert close(export_and_run(model, tmp_path, to, x), model, x)
    with pytest.raises(PackError, match=r"^mean_1 \(mean\) cannot be exported: it has the option out="):
        export_and_run(on_levels(Options(lambda x: torch.mean(x, 1, out=x.mean(1)))), tmp_path, to, x)
    with pytest.raises(PackError, match=r"clamp.* cannot be exported: its ends are tensors"):
        export_and_run(on_levels(Options(lambda x: x.clamp(max=x.mean()))), tmp_path, to, x)
    with pytest.raises(PackError, match=r"relu .* cannot be exported with input by name: pass tensors by position"):
        export_and_run(on_levels(Options(lambda x: torch.relu(input=x))), tmp_path, to, x)


def signs(channels):
    layers = [nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels)]
    layers += [BinaryActivation(), nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)]
    return on_levels(nn.Sequential(*layers, BinaryActivation(), nn.Conv2d(16, 5, 3, bias=False)))


@pytest.mark.parametrize("channels", [16, 13])
@torch.no_grad()
def test_binary_activations_are_exact_everywhere(channels, tmp_path):
    """From the first sign on, all numbers are integers (or sums of few of them): nothing may differ."""
    model = signs(channels)[2:]
    x = torch.randn(2, channels, 9, 9)
    x[:, 0] = 0.0
    expected = model(x)
    assert torch.equal(mq.pack(model)(x), expected)
    mq.export(model, tmp_path / "net.onnx", x.shape[1:])
    mq.export(model, tmp_path / "net.xml", x.shape[1:], to="openvino")
    for found in (in_onnx_runtime(tmp_path / "net.onnx", x), in_openvino(tmp_path / "net.onnx", x)):
        assert np.array_equal(found, expected.numpy())
    assert np.array_equal(in_openvino(tmp_path / "net.xml", x), expected.numpy())
    text = (tmp_path / "net.xml").read_text()
    layers = [layer for layer in model if isinstance(layer, nn.Conv2d) and layer.weight.shape[1] % 8 == 0]
    right = [to_openvino._is_right(PackedTensor.of(layer.weight), window(layer)) for layer in layers]
    assert text.count('type="BinaryConvolution"') == sum(right)
    assert text.count('element_type="u1"') == 3


def window(layer):
    return Window(layer.kernel_size, layer.stride, pads(layer.padding, layer.kernel_size, layer.dilation))


@torch.no_grad()
def test_a_layer_that_the_plugin_gets_wrong_becomes_a_plain_convolution(tmp_path, monkeypatch):
    model, x = signs(16)[2:], torch.randn(2, 16, 9, 9)
    expected, real = model(x), to_openvino._sign_conv

    def wrong(x, weight, window):
        node, array = real(x, weight, window)
        return ops.multiply(node, ops.constant(np.float32(3))), array

    monkeypatch.setattr(to_openvino, "_sign_conv", wrong)
    mq.export(model, tmp_path / "net.xml", x.shape[1:], to="openvino")
    assert "BinaryConvolution" not in (tmp_path / "net.xml").read_text()
    assert np.array_equal(in_openvino(tmp_path / "net.xml", x), expected.numpy())


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, y):
        return self.fc(x) + y


@torch.no_grad()
def test_a_model_in_half_precision_is_exported_in_float32(tmp_path):
    model, x = network("digitsnet"), images("digitsnet")
    mq.export(model.bfloat16(), tmp_path / "net.onnx", (1, 8, 8))
    assert close(in_onnx_runtime(tmp_path / "net.onnx", x), model.float(), x)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("levels", [mq.BINARY, mq.TERNARY])
@torch.no_grad()
def test_the_default_dtype_changes_nothing(levels, to, tmp_path):
    model, x = nn.Sequential(nn.Conv2d(16, 8, 3), nn.Hardtanh(-2.5, 2.5)), torch.randn(1, 16, 6, 6)
    model[0].weight.copy_(levels.nearest(model[0].weight))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = export_and_run(model, tmp_path, to, x)
    finally:
        torch.set_default_dtype(before)
    assert close(found, model, x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.lstm(x)[0])


class Noisy(nn.Module):
    def __init__(self, always):
        super().__init__()
        self.fc, self.always = nn.Linear(8, 8), always

    def forward(self, x):
        return F.dropout(self.fc(x)) if self.always else torch.dropout(F.dropout(x, 0.1, self.training), 0.1, False)


def test_what_cannot_be_exported_is_named(tmp_path):
    path = tmp_path / "net.onnx"
    with pytest.raises(PackError, match=r"to is 'tflite', but it must be one of onnx, openvino"):
        mq.export(network("digitsnet"), path, (1, 8, 8), to="tflite")
    with pytest.raises(PackError, match=r"shape is 8, .* as in \(8,\)$"):
        mq.export(on_levels(nn.Linear(8, 8)), path, 8)
    with pytest.raises(PackError, match=r"net\.onnx, but that of OpenVINO IR must end in \.xml$"):
        mq.export(network("digitsnet"), path, (1, 8, 8), to="openvino")
    with pytest.raises(PackError, match=r"the model is a OrderedDict, expected a torch\.nn\.Module"):
        mq.export(network("digitsnet").state_dict(), path, (1, 8, 8))
    with pytest.raises(PackError, match=r"_1 \(LayerNorm.* cannot be exported"):
        mq.export(on_levels(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))), path, (8,))
    with pytest.raises(PackError, match=r"^lstm \(LSTM\(8, 8\)\) cannot be exported$"):
        mq.export(on_levels(Recurrent()), path, (4, 8))
    normed = nn.Sequential(nn.Linear(8, 8), torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    with pytest.raises(PackError, match=r"^_1 \(ParametrizedLinear\) cannot be exported$"):
        mq.export(on_levels(normed), path, (8,))
    with pytest.raises(PackError, match=r"DigitsNet cannot be traced with inputs of \[3, 8, 8\]"):
        mq.export(network("digitsnet"), path, (3, 8, 8))
    with pytest.raises(PackError, match="padding_mode='circular' cannot be exported"):
        mq.export(on_levels(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, padding_mode="circular"))), path, (1, 8, 8))
    uneven = on_levels(nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(4)))
    with pytest.raises(PackError, match="cannot be split evenly"):
        mq.export(uneven, path, (1, 9, 9))
    with pytest.raises(PackError, match=r"Pair cannot be traced .*: it takes x, y, but only one input can be exported"):
        mq.export(on_levels(Pair()), path, (3,))
    with pytest.raises(PackError, match=r"dropout .* cannot be exported: it is on in eval mode"):
        mq.export(on_levels(Noisy(True)), path, (8,))
    mq.export(on_levels(Noisy(False)), tmp_path / "quiet.onnx", (8,))
    with pytest.raises(PackError, match=r"^cat .* cannot be exported: chunk is no list of tensors$"):
        mq.export(on_levels(Chunks()), path, (8,))
    with pytest.raises(PackError, match="could not be written"):
        mq.export(network("digitsnet"), tmp_path / "no" / "net.onnx", (1, 8, 8))
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_named_and_what_was_there_is_intact(tmp_path, monkeypatch):
    model, path = on_levels(nn.Linear(8, 8)), tmp_path / "net.onnx"
    mq.export(model, path, (8,))
    before = path.read_bytes()
    with pytest.raises(PackError, match=r"net\.onnx/net\.xml could not be written \(Not a directory\)"):
        mq.export(model, path / "net.xml", (8,), to="openvino")

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PackError, match=r"net\.onnx could not be written \(No space left on device\)"):
        mq.export(on_levels(nn.Linear(8, 4)), path, (8,))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]


PAIR = ("net.xml", "net.bin")


@pytest.fixture
def exported(tmp_path):
    """A folder with an export, and the bytes of its files."""
    mq.export(on_levels(nn.Linear(64, 64)), tmp_path / "net.xml", (64,), to="openvino")
    return tmp_path, {name: (tmp_path / name).read_bytes() for name in PAIR}


def assert_intact(exported):
    folder, before = exported
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("place", range(4))
def test_an_openvino_export_that_cannot_be_moved_leaves_the_older_pair(exported, place, monkeypatch):
    """Whichever of its four renames fails."""
    calls, rename = [], Path.rename

    def failing(self, target):
        calls.append(target)
        if len(calls) == place + 1:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(
        PackError, match=r"net\.xml could not be written \(Input/output error\); what was there before is"
    ):
        mq.export(on_levels(nn.Linear(64, 32)), exported[0] / "net.xml", (64,), to="openvino")
    assert_intact(exported)


@pytest.mark.parametrize("place", range(4))
def test_a_killed_openvino_export_leaves_no_description_beside_weights_of_another(exported, place):
    """At each rename the pair is the old one, the new one, or has no description."""
    folder, before = exported
    code = (
        "import os, sys, mirrorquant as mq\n"
        "from pathlib import Path\n"
        "from torch import nn\n"
        "model, calls, rename = nn.Linear(64, 32), [], Path.rename\n"
        "model.weight.data.sign_()\n"
        "def killed(self, target):\n"
        "    calls.append(rename(self, target))\n"
        "    if len(calls) == int(sys.argv[2]): os._exit(9)\n"
        "Path.rename = killed\n"
        "mq.export(model, sys.argv[1], (64,), to='openvino')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder / "net.xml"), str(place + 1)], check=False)
    assert done.returncode == 9
    if place < 3:
        assert not (folder / "net.xml").exists()
    else:
        assert (folder / "net.xml").read_bytes() != before["net.xml"]
        assert in_openvino(folder / "net.xml", torch.zeros(1, 64)).shape == (1, 32)


@pytest.mark.parametrize("blocks", [1, 2, 6])
def test_an_openvino_export_without_space_leaves_the_older_pair(exported, blocks):
    """As with a full disk, where the weights or the description cannot be written."""
    code = (
        "import resource, sys, torch, mirrorquant as mq\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(64, 160), nn.Linear(160, 4))\n"
        "for layer in model: layer.weight.data.sign_()\n"
        "from mirrorquant.packing import to_openvino\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * int(sys.argv[2]), resource.RLIM_INFINITY))\n"
        "try: mq.export(model, sys.argv[1], (64,), to='openvino')\n"
        "except mq.PackError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(exported[0] / "net.xml"), str(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "net.xml could not be written" in done.stdout
    assert "what was there before is intact" in done.stdout
    assert_intact(exported)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_an_exported_file_tells_what_it_is_about(to, tmp_path, capsys):
    path, runs = (
        tmp_path / {"onnx": "net.onnx", "openvino": "net.xml"}[to],
        {"onnx": OnnxModel, "openvino": OpenVinoModel},
    )
    model, about = network("digitsnet"), {"data": "digits", "note": '<&"\u20ac\x1b'}
    mq.save(model, tmp_path / "net.safetensors", about=about)
    mq.export(mq.load(tmp_path / "net.safetensors"), path, (1, 8, 8), to=to)
    assert runs[to](path).about == about
    assert main(["eval", str(tmp_path / "net.safetensors"), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["accuracy"]
    assert main(["eval", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(expected)
    mq.export(model, path, (1, 8, 8), to=to)
    assert runs[to](path).about == {}
    assert main(["eval", str(path)]) == 1
    assert "does not say which data it is for: pass --data" in capsys.readouterr().err
    with pytest.raises(PackError, match="expected what JSON can hold"):
        mq.export(model, path, (1, 8, 8), to=to, about={"x": float("nan")})


def test_a_fifo_in_place_of_a_file_is_refused_instead_of_waited_for(tmp_path):
    mq.export(network("digitsnet"), tmp_path / "whole.xml", (1, 8, 8), to="openvino")
    (tmp_path / "whole.bin").unlink()
    for name in ("net.safetensors", "net.onnx", "net.xml", "whole.bin"):
        os.mkfifo(tmp_path / name)
    code = "import sys; from mirrorquant.cli import main; print([main(['eval', path]) for path in sys.argv[1:]])"
    paths = [str(tmp_path / name) for name in ("net.safetensors", "net.onnx", "net.xml", "whole.xml")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[1, 1, 1, 1]\n"
    assert done.stderr.count("not a regular file") == 4


def test_openvino_models_for_one_image_take_any_batch(tmp_path):
    model = signs(16)[2:]
    mq.export(model, tmp_path / "net.xml", (16, 9, 9), to="openvino")
    loaded = OpenVinoModel(tmp_path / "net.xml")
    with torch.no_grad():
        for batch in (1, 3, 2, 3):
            x = torch.randn(batch, 16, 9, 9)
            assert torch.equal(loaded(x), model(x))
