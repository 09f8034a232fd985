"""Exports: ONNX Runtime and OpenVINO compute the same as the model, from files of one bit per weight."""

import copy
import errno
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
import torch.nn.functional as F
from openvino import opset14 as ops
from packed import SHAPES, agree, images, network, on_levels
from torch import nn

import mirrorquant as mq
from mirrorquant.cli import main
from mirrorquant.export import openvino as to_openvino
from mirrorquant.export.onnx import OnnxModel
from mirrorquant.export.openvino import OpenVinoModel
from mirrorquant.nn import BinaryActivation
from mirrorquant.packing import PackedTensor, PackError, read


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
    model, x, path = network(name), images(name), tmp_path / "bits.onnx"
    mq.export(mq.pack(model), path, SHAPES[name])
    found = in_onnx_runtime(path, x)
    for result in (found, in_openvino(path, x)):
        assert close(result, model, x)
        assert same_classes(result, model, x)
    assert in_onnx_runtime(path, x[:1]).shape == (1, 10)
    floats = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert floats / path.stat().st_size > {"resnet18": 30.5, "vgg16": 30.5, "mobilenetv2": 17, "digitsnet": 15}[name]
    if name == "digitsnet":
        onnx.checker.check_model(str(path), full_check=True)
        mq.export(model, tmp_path / "float.onnx", SHAPES[name], bits=False)
        assert np.array_equal(found, in_onnx_runtime(tmp_path / "float.onnx", x))
        assert (tmp_path / "float.onnx").stat().st_size > floats
        mq.export(model, tmp_path / "bits.xml", SHAPES[name], to="openvino")
        assert close(in_openvino(tmp_path / "bits.xml", x), model, x)
        assert floats / (tmp_path / "bits.bin").stat().st_size > 20


SCALED = [mq.TERNARY, mq.Levels(-1, 0.25, 1, 3), 0.1 * mq.BINARY, mq.TERNARY, mq.BINARY]  # the last two per row


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_weights_arrive_to_the_bit(to, tmp_path):
    """Rows of the unit matrix: each output is one weight and zeros, which is exact in whatever order it is summed."""
    layers = [on_levels(nn.Linear(40, 24, bias=False), levels) for levels in SCALED]
    kernels = [on_levels(nn.Conv2d(5, 8, 3, padding=1, bias=False), levels) for levels in SCALED]
    for layer in (*layers[3:], *kernels[3:]):
        layer.weight.mul_(torch.linspace(0.3, 2, len(layer.weight)).reshape(-1, *[1] * (layer.weight.dim() - 1)))
    found = export_and_run(Beside(layers), tmp_path, to, torch.eye(40))
    assert np.array_equal(found, torch.cat([layer.weight for layer in layers]).T.numpy())
    x = torch.zeros(1, 5, 3, 3)
    x[0, 1, 1, 1] = 1
    found = export_and_run(Beside(kernels), tmp_path, to, x)
    assert np.array_equal(found[0], torch.cat([kernel.weight for kernel in kernels])[:, 1].flip(1, 2).numpy())
    held = [PackedTensor.of(layer.weight) for layer in kernels]
    stored = sum(bits.planes.nbytes + (0 if bits.scale is None else bits.scale.nbytes) for bits in held)
    if to == "openvino":
        assert (tmp_path / "net.bin").stat().st_size < stored + 1000


class Beside(nn.Module):
    """Layers of the same input, with their outputs after one another."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.layers], 1)


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


class Block(nn.Module):
    """A small GPT: embeddings, causal attention and an MLP with layer norms, and a head for each token."""

    def __init__(self, words=40, width=64):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(12, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        q, k, v = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(self.norm2(x)))


class Recurrent(nn.Module):
    """An LSTM over rows, and a classifier of its last state."""

    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(48, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1])


def decoder():
    layers = [nn.Linear(16, 64 * 9), nn.Unflatten(1, (64, 3, 3)), nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1)]
    layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 32, 3, stride=2, output_padding=1), nn.Tanh()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Block, torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(0))),
        (Recurrent, torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))),
        (decoder, torch.randn(3, 16, generator=torch.Generator().manual_seed(0))),
    ],
    ids=["GPT block", "LSTM", "ConvTranspose2d"],
)
@torch.no_grad()
def test_other_architectures_are_packed_saved_loaded_and_exported_at_one_bit_per_weight(make, x, tmp_path):
    torch.manual_seed(0)
    model = make()
    matrices = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    opt = mq.MirrorDescent(torch.optim.SGD(mq.split(model, only=matrices), lr=0.1), method="md-tanh-s")
    opt.finalize()
    for norm in [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]:
        norm.running_var.fill_(200.0)
    mq.save(mq.pack(model.eval(), fuse=False), tmp_path / "net.safetensors")
    loaded = mq.load(tmp_path / "net.safetensors", make(), fuse=False)
    agree(loaded(x), model, x)
    mq.export(loaded, tmp_path / "net.onnx", x.shape[1:], dtype=x.dtype)
    agree(torch.from_numpy(in_onnx_runtime(tmp_path / "net.onnx", x)), model, x)
    count = sum(model.get_parameter(name).numel() for name in matrices)
    rest = sum(tensor.nbytes for name, tensor in model.state_dict().items() if name not in matrices)
    rows = mq.summary(read(tmp_path / "net.safetensors")).rows
    assert sum(row.bytes for row in rows if row.name in matrices) <= 1.01 * count / 8 + 64
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert sum(len(tensor.raw_data) for tensor in graph.initializer) < 1.01 * count / 8 + rest + 2500


class Reader(nn.Module):
    """Takes tokens, a mask and states in a dictionary, and returns what several heads say."""

    def __init__(self, returns=dict):
        super().__init__()
        self.words, self.rnn, self.returns = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), returns
        self.classes, self.score = nn.Linear(16, 4), nn.Linear(16, 1, bias=False)

    def forward(self, tokens, mask, *, state=None, table=None):
        start = None if state is None else state["hidden"][None]
        x, last = self.rnn(self.words(tokens) * mask[..., None], start)
        x = x if table is None else x @ table
        found = {"classes": self.classes(last[0]), "score": self.score(x.mean(1)), "best": x.mean(1).argmax(1)}
        return found if self.returns is dict else (found["classes"], [found["score"], last.transpose(0, 1)])


def reader_inputs(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens, mask = torch.randint(20, (batch, 7), generator=generator), torch.rand(batch, 7, generator=generator)
    return tokens, mask, torch.randn(batch, 16, generator=generator)


def file_model(to, path):
    return OnnxModel(path) if to == "onnx" else OpenVinoModel(str(path))


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_several_inputs_and_outputs_have_the_names_of_the_arguments_and_keys(to, tmp_path):
    if to == "openvino" and os.environ.get("ONEDNN_MAX_CPU_ISA") == "SSE41":
        pytest.skip("OpenVINO has no recurrent layers without AVX")
    model, path = on_levels(Reader(), 0.25 * mq.BINARY), tmp_path / {"onnx": "net.onnx", "openvino": "net.xml"}[to]
    tokens, mask, hidden = reader_inputs(2)
    table = torch.eye(16)
    mq.export(model, path, inputs={"mask": mask, "tokens": tokens, "table": table, "state": {"hidden": hidden}}, to=to)
    loaded = file_model(to, path)
    assert loaded.inputs == ["tokens", "mask", "hidden", "table"]
    assert loaded.outputs == ["classes", "score", "best"]
    for batch in (1, 5):
        tokens, mask, hidden = reader_inputs(batch, batch)
        given = {"state": {"hidden": hidden}, "table": table}
        found = loaded(tokens, mask, **given)
        assert list(found) == ["classes", "score", "best"]
        agree((found["classes"], found["score"]), Pick(model, "classes", "score"), tokens, mask, **given)
        again = loaded(tokens=tokens, mask=mask, hidden=hidden, table=table)
        assert all(torch.equal(found[name], again[name]) for name in found)
    with pytest.raises(
        PackError, match=r"the call has 1 inputs by position and mask, but the model takes tokens, mask"
    ):
        loaded(tokens, mask=mask)


class Pick(nn.Module):
    """Some of the outputs of a model."""

    def __init__(self, model, *names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs, **options):
        found = self.model(*inputs, **options)
        return [found[name] for name in self.names]


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_tuples_go_in_and_come_out_as_flat_tuples(to, tmp_path):
    model, path = on_levels(Reader(tuple), 0.25 * mq.TERNARY), tmp_path / {"onnx": "a.onnx", "openvino": "a.xml"}[to]
    mq.export(mq.pack(model), path, inputs=reader_inputs(1)[:2], to=to)  # an example of one item is enough
    loaded = file_model(to, path)
    assert loaded.inputs == ["tokens", "mask"]
    assert loaded.outputs == ["output_0", "output_1_0", "output_1_1"]
    given = reader_inputs(4)[:2]
    agree(loaded(*given), model, *given)


class Echo(nn.Module):
    """An output has the name of an input, and a parameter that of another one."""

    def __init__(self, again=False):
        super().__init__()
        self.fc, self.y, self.again = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), again

    def forward(self, x, y):
        z = self.fc(x) * self.y + y
        return {"x": x if self.again else 2 * x, "z": z}


@torch.no_grad()
def test_names_of_inputs_outputs_and_parameters_may_be_the_same(tmp_path):
    model, given = on_levels(Echo()), (torch.randn(3, 8), torch.randn(3, 8))
    mq.export(model, tmp_path / "net.onnx", inputs=given)
    loaded = OnnxModel(tmp_path / "net.onnx")
    assert loaded.inputs == ["x", "y"]
    assert loaded.outputs == ["output_x", "z"]
    agree(tuple(loaded(*given).values()), Pick(model, "x", "z"), *given)
    with pytest.raises(PackError, match=r"returns an input, or a tensor twice, .*: return copies, by x\.clone\(\)"):
        mq.export(on_levels(Echo(again=True)), tmp_path / "net.onnx", inputs=given)


def test_inputs_that_do_not_fit_are_named(tmp_path):
    model, path, x = on_levels(Pair()), tmp_path / "net.onnx", torch.randn(2, 3)
    for given, message in (
        ({}, r"export takes either the shape of one item of the batch, as in \(3, 32, 32\), or inputs="),
        ({"shape": (3,), "inputs": x}, "export takes either the shape"),
        ({"inputs": (x,)}, r"inputs do not fit the forward of Pair: missing a required argument: 'y'"),
        ({"inputs": {"x": x, "z": x}}, r"inputs do not fit the forward of Pair: .*'z'|missing"),
        ({"inputs": (x, 3)}, r"inputs contain 3, but they must be batches of tensors: set anything else in the model"),
        ({"inputs": (torch.tensor(1.0), x)}, "the first tensor of inputs has no batch"),
        ({"inputs": (x, torch.randn(2, 4))}, r"Pair cannot be exported with inputs of x \[2, 3\], y \[2, 4\]: "),
    ):
        with pytest.raises(PackError, match=message):
            mq.export(model, path, **given)


class Constants(nn.Module):
    """Tensors that are not in the model's state."""

    def __init__(self):
        super().__init__()
        self.fc, self.plain = nn.Linear(8, 4), torch.arange(4.0)
        self.register_buffer("mean", torch.rand(8), persistent=False)

    def forward(self, x):
        return self.fc(x - self.mean) * self.plain + torch.ones(4)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_tensors_outside_the_state_are_constants(to, tmp_path):
    model, x, path = on_levels(Constants()), torch.randn(3, 8), tmp_path / {"onnx": "a.onnx", "openvino": "a.xml"}[to]
    mq.export(model, path, (8,), to=to)
    assert close(in_openvino(path, x), model, x)


def test_no_constant_is_written_that_nobody_reads(tmp_path):
    mq.export(network("digitsnet"), tmp_path / "net.onnx", (1, 8, 8))
    graph = onnx.load(str(tmp_path / "net.onnx")).graph
    assert {constant.name for constant in graph.initializer} <= {name for node in graph.node for name in node.input}


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@torch.no_grad()
def test_a_single_layer_is_a_model_too(to, tmp_path):
    model, x = on_levels(nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 6, 6)
    assert close(export_and_run(mq.pack(model), tmp_path, to, x), model, x)


class Pools(nn.Module):
    def __init__(self, *pools):
        super().__init__()
        self.conv, self.pools = nn.Conv2d(3, 8, 1), nn.ModuleList(pools)

    def forward(self, x):
        return torch.cat([pool(self.conv(x)).flatten(1) for pool in self.pools], 1)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize(("window", "size"), [((3, 2, 1), 8), ((2, 3, 1), 5)])
@torch.no_grad()
def test_pools_that_round_up_end_where_torch_does(window, size, to, tmp_path):
    x = torch.randn(2, 3, size, size)
    pools = [nn.MaxPool2d(*window, ceil_mode=True), nn.AvgPool2d(*window, ceil_mode=True, count_include_pad=False)]
    model = on_levels(Pools(*pools))
    assert close(export_and_run(model, tmp_path, to, x), model, x)


@torch.no_grad()
def test_a_file_that_a_runtime_computes_wrongly_is_not_written(tmp_path):
    """The CPU plugin of OpenVINO counts what lies beyond the padding, too."""
    model, x = on_levels(Pools(nn.AvgPool2d(3, 2, 1, ceil_mode=True))), torch.randn(2, 3, 8, 8)
    assert close(export_and_run(model, tmp_path, "onnx", x), model, x)
    with pytest.raises(PackError, match=r"^Pools cannot be exported .*: OpenVINO computes something else"):
        export_and_run(model, tmp_path, "openvino", x)
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


class Named(nn.Module):
    """A parameter that has a name which the file needs, too."""

    def __init__(self, name):
        super().__init__()
        self.name, self.fc = name, nn.Linear(12, 8)
        setattr(self, name, nn.Parameter(torch.ones(8)))

    def forward(self, x):
        return getattr(self, self.name) * self.fc(x)


@pytest.mark.parametrize("name", ["input", "output"])
@torch.no_grad()
def test_parameters_may_have_any_name(name, tmp_path):
    model, x = on_levels(Named(name)), torch.randn(2, 12)
    assert close(export_and_run(model, tmp_path, "openvino", x), model, x)
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
        self.conv, self.flatten, self.way = nn.Conv2d(3, 8, 3), nn.Flatten(), way

    def forward(self, x):
        y = self.conv(x)
        if self.way == "twice":
            F.relu(y, inplace=True).add_(1)
        elif self.way == "view":
            y.view(x.size(0), -1).mul_(2)
        else:
            x, y = y, self.flatten(y)
            x += 1
            x *= 2
            x -= 3
            x /= 4
        return y - 0.5


@pytest.mark.parametrize("way", ["twice", "view", "flatten"])
@torch.no_grad()
def test_what_is_changed_by_another_name_is_changed_too(way, tmp_path):
    model, x = on_levels(ByAnotherName(way)).eval(), torch.randn(2, 3, 6, 6)
    assert close(export_and_run(model, tmp_path, "onnx", x), model, x)


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
    pads = {"pads_begin": layer.padding, "pads_end": layer.padding}
    return {"strides": layer.stride, "dilations": layer.dilation, **pads}


@torch.no_grad()
def test_a_layer_that_the_plugin_gets_wrong_becomes_a_plain_convolution(tmp_path, monkeypatch):
    model, x = signs(16)[2:], torch.randn(2, 16, 9, 9)
    expected, real = model(x), to_openvino._sign_conv

    def wrong(*arguments):
        return ops.multiply(real(*arguments), ops.constant(np.float32(3)))

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
@torch.no_grad()
def test_the_default_dtype_changes_nothing(to, tmp_path):
    layers = [nn.Conv2d(16, 8, 3), nn.Hardtanh(-2.5, 2.5), nn.Conv2d(8, 8, 3)]
    model, x = nn.Sequential(*layers), torch.randn(1, 16, 6, 6)
    model[0].weight.copy_(mq.BINARY.nearest(model[0].weight))
    model[2].weight.copy_(mq.TERNARY.nearest(model[2].weight))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = export_and_run(model, tmp_path, to, x)
    finally:
        torch.set_default_dtype(before)
    assert close(found, model, x)


class Noisy(nn.Module):
    def __init__(self, always):
        super().__init__()
        self.fc, self.always = nn.Linear(8, 8), always

    def forward(self, x):
        return F.dropout(self.fc(x)) if self.always else torch.dropout(F.dropout(x, 0.1, self.training), 0.1, False)


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x)[:2] * torch.ones(2, 8) if len(x) == 2 else self.fc(x)


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.special.airy_ai(self.fc(x))


class Says(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x), "a word"


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return self.fc(x) + self.calls.add_(1)


def test_a_model_that_cannot_be_exported_is_rejected_with_the_reason(tmp_path):
    path = tmp_path / "net.onnx"
    with pytest.raises(PackError, match=r"to is 'tflite', but it must be one of onnx, openvino"):
        mq.export(network("digitsnet"), path, (1, 8, 8), to="tflite")
    with pytest.raises(PackError, match=r"shape is 8, .* as in \(8,\)$"):
        mq.export(on_levels(nn.Linear(8, 8)), path, 8)
    with pytest.raises(PackError, match=r"net\.onnx, but that of OpenVINO IR must end in \.xml$"):
        mq.export(network("digitsnet"), path, (1, 8, 8), to="openvino")
    with pytest.raises(PackError, match=r"the model is a OrderedDict, expected a torch\.nn\.Module"):
        mq.export(network("digitsnet").state_dict(), path, (1, 8, 8))
    with pytest.raises(PackError, match=r"DigitsNet cannot be exported with inputs of \[3, 8, 8\]: .*channels"):
        mq.export(network("digitsnet"), path, (3, 8, 8))
    with pytest.raises(PackError, match=r"Pair cannot be exported .* missing 1 required positional argument: 'y'"):
        mq.export(on_levels(Pair()), path, (3,))
    with pytest.raises(PackError, match=r"Says cannot be exported .*: it returns a str, expected tensors, or tuples"):
        mq.export(on_levels(Says()), path, (8,))
    for model in (Noisy(True), Counting()):
        with pytest.raises(PackError, match=r"two calls with the same input differ, because forward draws random"):
            mq.export(on_levels(model), path, (8,))
    with pytest.raises(PackError, match=r"Fixed cannot be exported with inputs of \[8\]"):
        mq.export(on_levels(Fixed()), path, (8,))
    with pytest.raises(PackError, match=r"Unknown cannot be exported with inputs of \[8\]: .*airy_ai"):
        mq.export(on_levels(Unknown()), path, (8,))
    with pytest.raises(PackError, match="could not be written"):
        mq.export(on_levels(Noisy(False)), tmp_path / "no" / "net.onnx", (8,))
    assert not path.exists()


class PadsItself(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1), mode="circular"))


class Determinant(nn.Linear):
    def forward(self, x):
        return torch.linalg.det(super().forward(x)[:, None] * torch.eye(8))


@torch.no_grad()
def test_what_openvino_cannot_read_is_named(tmp_path):
    pytest.importorskip("openvino")
    layers = [nn.Conv2d(8, 8, 3, padding=1, padding_mode=mode) for mode in ("circular", "zeros", "reflect", "circular")]
    wanted = r"Sequential cannot be exported .*: 0, 3 pads with 'circular', which OpenVINO .*, or export to='onnx'$"
    with pytest.raises(PackError, match=wanted):
        mq.export(on_levels(nn.Sequential(*layers)), tmp_path / "net.xml", (8, 6, 6), to="openvino")
    with pytest.raises(PackError, match=r": Conv2d pads with 'circular', which"):
        mq.export(on_levels(layers[0]), tmp_path / "net.xml", (8, 6, 6), to="openvino")
    with pytest.raises(PackError, match=r": a call of F\.pad pads with 'circular', which"):
        mq.export(on_levels(PadsItself(8, 8, 3)), tmp_path / "net.xml", (8, 6, 6), to="openvino")
    with pytest.raises(PackError, match=r": OpenVINO cannot read it \(No conversion .*: Det-\d+\): export to='onnx'$"):
        mq.export(on_levels(Determinant(8, 8)), tmp_path / "net.xml", (8,), to="openvino")
    model, x = on_levels(nn.Sequential(*layers)), torch.randn(3, 8, 6, 6)
    mq.export(model, tmp_path / "net.onnx", (8, 6, 6))
    assert close(OnnxModel(tmp_path / "net.onnx")(x), model, x)


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


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The files of two networks, with 64 and 32 outputs."""
    folder = tmp_path_factory.mktemp("pairs")
    for outputs in (64, 32):
        (folder / f"{outputs}").mkdir()
        mq.export(on_levels(nn.Linear(64, outputs)), folder / f"{outputs}" / "net.xml", (64,), to="openvino")
    return folder


@pytest.fixture
def exported(pairs, tmp_path):
    """A folder with an export, and the bytes of its files."""
    for name in PAIR:
        shutil.copy(pairs / "64" / name, tmp_path / name)
    return tmp_path, {name: (tmp_path / name).read_bytes() for name in PAIR}


def assert_intact(exported):
    folder, before = exported
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("place", range(3))
def test_a_killed_openvino_export_leaves_no_description_beside_weights_of_another(pairs, exported, place):
    """At each step the pair is the old one, the new one, or has no description."""
    folder, before = exported
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mirrorquant.export.openvino import OpenVinoModel\n"
        "calls = []\n"
        "def killed(step):\n"
        "    def call(*values, **options):\n"
        "        calls.append(step(*values, **options))\n"
        "        if len(calls) == int(sys.argv[3]): os._exit(9)\n"
        "    return call\n"
        "model = OpenVinoModel(Path(sys.argv[1]))\n"
        "Path.unlink, Path.replace = killed(Path.unlink), killed(Path.replace)\n"
        "model.save(Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", code, str(pairs / "32" / "net.xml"), str(folder / "net.xml"), str(place + 1)]
    assert subprocess.run(command, check=False).returncode == 9
    if place < 2:
        assert not (folder / "net.xml").exists()
    else:
        assert (folder / "net.xml").read_bytes() != before["net.xml"]
        assert in_openvino(folder / "net.xml", torch.zeros(1, 64)).shape == (1, 32)


def test_an_openvino_export_without_space_leaves_the_older_pair(pairs, exported):
    """As with a full disk, where the weights or the description cannot be written."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from mirrorquant import PackError\n"
        "from mirrorquant.export.openvino import OpenVinoModel\n"
        "model = OpenVinoModel(Path(sys.argv[1]))\n"
        "for size in (100, 200, 2000):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"
        "    try: model.save(Path(sys.argv[2]))\n"
        "    except PackError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(pairs / "32" / "net.xml"), str(exported[0] / "net.xml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("net.xml could not be written") == 3
    assert done.stdout.count("what was there before is intact") == 3
    assert_intact(exported)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_an_exported_file_has_the_metadata_of_the_model(to, tmp_path, capsys):
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
    with pytest.raises(PackError, match="but JSON cannot hold it"):
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
