"""Packed files are small, self-describing and exact, and every problem with one is reported in one error."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fuzz_files import by_command, no_network, outcome, small
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import (
    SHAPES,
    agree,
    held_as_bits,
    images,
    network,
    on_levels,
    same_state,
    sealed,
    split,
)
from safetensors import torch as container
from torch import nn

import mirrorquant as mq
from mirrorquant.cli import main
from mirrorquant.packing import PackedTensor, PackError, file, read


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_networks_of_the_paper_come_back_from_a_file_to_the_bit(name, affine, tmp_path):
    model, x = network(name, affine=affine), images(name, 1)
    packed = mq.pack(model)
    mq.save(packed, tmp_path / "packed.safetensors")
    mq.save(model, tmp_path / "plain.safetensors")
    content = (tmp_path / "packed.safetensors").read_bytes()
    assert content == (tmp_path / "plain.safetensors").read_bytes()
    loaded = mq.load(tmp_path / "packed.safetensors")
    assert torch.equal(loaded(x), packed(x))
    assert same_state(mq.unpack(loaded).eval(), model)
    mq.save(loaded, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again.safetensors",
        "packed.safetensors",
        "plain.safetensors",
    ]


def test_the_whole_file_of_a_binary_resnet18_is_30_times_smaller_than_its_checkpoint(tmp_path):
    model = network("resnet18")
    mq.save(model, tmp_path / "packed.safetensors")
    torch.save(model.state_dict(), tmp_path / "float.pt")
    sizes = [(tmp_path / name).stat().st_size for name in ("float.pt", "packed.safetensors")]
    assert sizes[0] / sizes[1] >= 30
    contents = read(tmp_path / "packed.safetensors")
    assert contents.size == sizes[1]
    rows = mq.summary(contents).rows
    assert sum(row.count for row in rows if row.bits == 1) == 11_164_362
    assert sum(row.bytes for row in rows) <= contents.size
    assert contents.sha256 == hashlib.sha256((tmp_path / "packed.safetensors").read_bytes()).hexdigest()


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_model_comes_back_from_a_file_to_the_bit(data):
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=4))
    levels = data.draw(st.sampled_from([mq.BINARY, mq.TERNARY, 0.3 * mq.BINARY, mq.Levels(-1, 0.25, 1, 3)]))
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=data.draw(st.booleans()))]
        layers += [data.draw(st.sampled_from([nn.ReLU, nn.Identity]))(), nn.BatchNorm1d(outputs)]
    model = on_levels(nn.Sequential(*layers), levels)
    if data.draw(st.booleans()):
        model.append(nn.Linear(sizes[-1], 2)).eval()  # in float
    with torch.no_grad():
        model[0].weight.copy_(levels.nearest(torch.randn_like(model[0].weight)))
        if data.draw(st.booleans()) and sizes[0] > 1:
            model[0].weight.mul_(1 + torch.rand(sizes[1], 1))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    model.to(dtype)
    try:
        content = file.dump(model)
    except PackError:
        assert len(levels) == 4 or min(sizes) == 1  # too few numbers to see that they are on levels
        return
    path = scratch(content)
    loaded = mq.load(path, nn.Sequential(*[type(m)(*arguments(m)) for m in model]).to(dtype))
    assert same_state(mq.unpack(loaded).eval(), model)


def arguments(module):
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features, module.bias is not None
    return (module.num_features,) if isinstance(module, nn.BatchNorm1d) else ()


FOLDER = []


def scratch(content):
    path = FOLDER[0] / "scratch.safetensors"
    path.write_bytes(content)
    return path


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    FOLDER.append(tmp_path_factory.mktemp("packed"))
    yield
    FOLDER.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("levels", [mq.BINARY, mq.TERNARY, mq.Levels(-1, -1 / 3, 1 / 3, 1)])
@torch.no_grad()
def test_scales_per_row_and_per_tensor_are_exact_at_one_bit_per_weight(levels, dtype, tmp_path):
    model = nn.Sequential(nn.Linear(256, 32, bias=False), nn.Linear(32, 8, bias=False)).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    for layer, scale in zip(model, (torch.rand(32, 1, generator=generator) + 0.1, torch.tensor(0.3)), strict=True):
        layer.weight.copy_(levels.nearest(torch.randn(layer.weight.shape, generator=generator, dtype=dtype)))
        layer.weight.mul_(scale.to(dtype))
    planes, path = 1 if levels == mq.BINARY else 2, tmp_path / "net.safetensors"
    packed = mq.pack(model, levels=levels)
    if len(levels) < 4:  # else the levels are not read off the weights
        mq.save(model, path)
        assert path.read_bytes() == file.dump(packed)
    mq.save(packed, path)
    assert same_state(mq.unpack(mq.load(path, model)).eval(), model)
    sizes = {row.name: row.bytes for row in mq.summary(read(path)).rows}
    assert sizes["0.weight"] == planes * 32 * 32 + 32 * dtype.itemsize
    assert sizes["1.weight"] == planes * 8 * 4 + dtype.itemsize


@torch.no_grad()
def test_files_of_version_0_1_are_read_to_the_bit():
    """Binary and ternary weights, with a scale per row and per tensor, of a model that the file itself describes."""
    folder = Path(__file__).with_name("fixtures")
    expected = json.loads((folder / "packed-0.1.json").read_text())
    loaded = mq.load(folder / "packed-0.1.safetensors")
    model, x = mq.unpack(loaded).eval(), (torch.arange(128.0) / 64 - 1).reshape(2, 1, 8, 8)
    content = {name: bytes(t.reshape(-1).view(torch.uint8).tolist()) for name, t in model.state_dict().items()}
    assert {name: hashlib.sha256(value).hexdigest() for name, value in content.items()} == expected["sha256"]
    assert loaded.about == expected["about"]
    agree(loaded(x), model, x)
    reference = torch.tensor(expected["output"], dtype=torch.float64)
    torch.testing.assert_close(model.double()(x.double()), reference, rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_summary_has_the_size_of_the_file(tmp_path):
    path, model = tmp_path / "net.safetensors", network("digitsnet", affine=True)
    model.conv2.weight.mul_(torch.rand(64, 1, 1, 1) + 0.5)
    model.fc.weight.copy_(torch.randn(10, 64))
    mq.save(model, path, about={"note": "so long"})
    size = path.stat().st_size
    loaded = mq.load(path)
    assert mq.summary(loaded).bytes == mq.summary(read(path)).bytes == size
    mq.save(model, path)
    found = mq.summary(model)
    assert found.bytes == path.stat().st_size < size
    assert {row.name: row.bytes for row in found.rows} == {row.name: row.bytes for row in mq.summary(read(path)).rows}
    rows = {row.name: row for row in found.rows}
    assert (rows["conv1.weight"].levels, rows["conv1.weight"].bits, rows["conv1.weight"].why) == ([-1.0, 1.0], 1, "")
    assert rows["conv2.weight"].scaled
    assert rows["conv2.weight"].bytes == 64 * 32 * 9 // 8 + 4 * 64
    assert (rows["fc.weight"].bits, rows["fc.weight"].levels) == (32, None)
    assert rows["fc.weight"].why == f"it contains {float(model.fc.weight[0, 0]):g}"
    assert rows["bn1.running_var"].why == "it is a buffer"
    assert found.count == sum(tensor.numel() for tensor in model.state_dict().values())
    assert found.quantized == sum(row.count for row in found.rows if row.levels)
    assert found.float_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())
    lines = str(found).splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[4].split() == ["conv2.weight", "64x32x3x3", "18,432", "-1,", "1", "x", "a", "scale", "1", "2,560"]
    assert f"{found.bytes:,} bytes in a file" in lines[-1]
    with pytest.raises(PackError, match="what is a str, expected a model, an optimizer or a packed file"):
        mq.summary("net.safetensors")


def test_an_optimizer_is_summarized_as_it_will_be_finalized():
    model = mq.models.digitsnet(affine=True)
    opt = mq.MirrorDescent(torch.optim.SGD(mq.split(model, skip="fc"), lr=0.1), method="md-tanh-s", levels=mq.TERNARY)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = {row.name: row for row in mq.summary(opt).rows}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    opt.finalize()
    after = {row.name: row for row in mq.summary(model).rows}
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, row in found.items():
        if name.startswith("bn"):  # its ones and zeros are no levels: it is trained in float
            assert (row.levels, row.bits, row.why) == (None, 32, "normalization")
        else:
            assert (row.levels, row.bits, row.bytes) == (after[name].levels, after[name].bits, after[name].bytes)
    assert found["conv1.weight"].levels == [-1.0, 0.0, 1.0]
    assert "skip" in found["fc.weight"].why


def test_other_tools_can_read_it(tmp_path):
    model = network("digitsnet")
    mq.save(model, tmp_path / "net.safetensors", about={"accuracy": 98.6})
    tensors = container.load_file(tmp_path / "net.safetensors")
    assert torch.equal(tensors["bn1.running_var"], model.bn1.running_var)
    assert tensors["fc.weight"].shape == (1, 10, 8)
    with container.safe_open(tmp_path / "net.safetensors", "pt") as opened:
        told = json.loads(opened.metadata()["mirrorquant"])
    assert told["packed"]["fc.weight"] == {"shape": [10, 64], "levels": [-1.0, 1.0], "dtype": "float32"}
    assert told["architecture"] == {
        "name": "digitsnet",
        "options": {"classes": 10, "affine": False, "channels": 1, "width": 32},
        "dtype": "float32",
    }
    assert read(tmp_path / "net.safetensors").about == {"accuracy": 98.6}


def test_a_custom_model_needs_its_structure(tmp_path):
    model, path = small(), tmp_path / "net.safetensors"
    mq.save(model, path)
    with pytest.raises(PackError, match=r"net\.safetensors: it holds a model that is not from this library: pass one"):
        mq.load(path)
    loaded = mq.load(path, small())
    assert loaded.layers() == []
    assert held_as_bits(loaded) == ["0", "4"]
    assert same_state(mq.unpack(loaded), model)
    with pytest.raises(PackError, match=r"another model than Sequential: the file has, and the model lacks, 1\.bias"):
        mq.load(path, model[:1])
    other = small()
    other[5] = nn.Linear(3, 5)
    with pytest.raises(
        PackError, match=r"5\.weight is torch\.float32 \[2, 3\], but the model's is torch\.float32 \[5, 3\]"
    ):
        mq.load(path, other)
    with pytest.raises(PackError, match=r"net\.safetensors: it belongs to another model than ResNet"):
        mq.load(path, mq.models.resnet18())
    with pytest.raises(PackError, match=r"the model is a function, expected a torch\.nn\.Module"):
        mq.load(path, mq.models.resnet18)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Sequential(nn.Conv1d(2, 8, 5), nn.BatchNorm1d(8, affine=False)), [torch.randn(3, 2, 16)]),
        (lambda: nn.MultiheadAttention(8, 2), [torch.randn(5, 1, 8)] * 3),
        (lambda: nn.LSTM(6, 8), [torch.randn(5, 1, 6)]),
    ],
    ids=["Conv1d", "MultiheadAttention", "LSTM"],
)
def test_modules_without_a_kernel_run_as_floats_and_are_stored_as_bits(make, inputs, tmp_path):
    model, path = on_levels(make()).eval(), tmp_path / "net.safetensors"
    mq.save(model, path)
    assert all(row.bits == 1 for row in mq.summary(read(path)).rows if "weight" in row.name)
    loaded = mq.load(path, make(), fuse=False)
    assert loaded.layers() == []
    with torch.no_grad():
        torch.testing.assert_close(loaded(*inputs), model(*inputs), rtol=0, atol=0)
    assert same_state(mq.unpack(loaded), model)
    with pytest.raises(PackError, match=r"weight.* is not quantized \(contains .*\), .* call `opt\.finalize"):
        mq.save(make(), path)
    packed = mq.pack(model)
    assert packed.layers() == []
    mq.save(packed, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_compiled_model_is_packed_as_the_model_itself(tmp_path):
    model = on_levels(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)))
    compiled = nn.DataParallel(torch.compile(model, backend="eager"))
    assert held_as_bits(mq.pack(compiled)) == ["0", "3"]
    mq.save(compiled, tmp_path / "model.safetensors")
    assert same_state(mq.unpack(mq.load(tmp_path / "model.safetensors", compiled)), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_another_dtype_comes_back_in_it(dtype, tmp_path):
    model = network("digitsnet").to(dtype)
    mq.save(model, tmp_path / "net.safetensors")
    assert same_state(mq.unpack(mq.load(tmp_path / "net.safetensors")).eval(), model)
    mq.save(mq.pack(network("digitsnet")).to(dtype), tmp_path / "cast.safetensors")
    assert same_state(mq.unpack(mq.load(tmp_path / "cast.safetensors")).eval(), model)
    model.fc.float()
    mq.save(model, tmp_path / "net.safetensors")
    assert read(tmp_path / "net.safetensors").architecture is None
    with pytest.raises(PackError, match=r"is torch\.\w+ \[.*\], but the model's is torch\.float32"):
        mq.load(tmp_path / "net.safetensors", mq.models.digitsnet())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_tensors_of_other_dtypes_are_kept_as_they_are(dtype, tmp_path):
    model = nn.Sequential(on_levels(nn.Linear(8, 8)), nn.Linear(8, 8, bias=False))
    model[1].weight = nn.Parameter(torch.ones(8, 8).to(dtype), requires_grad=False)
    mq.save(model, tmp_path / "net.safetensors")
    loaded = mq.load(tmp_path / "net.safetensors", model)
    assert list(loaded.runs) == ["0.weight", "0.bias"]
    for name, tensor in mq.unpack(loaded).state_dict().items():
        assert tensor.dtype == model.state_dict()[name].dtype
        assert torch.equal(tensor.float(), model.state_dict()[name].float())
    with pytest.raises(PackError, match=rf"1\.weight is {dtype}, which cannot be on levels: cast it"):
        mq.pack(model[1:])


def test_a_changed_model_of_this_library_is_a_custom_one(tmp_path):
    model = network("digitsnet")
    model.fc = on_levels(nn.Linear(64, 10, bias=False))
    mq.save(model, tmp_path / "net.safetensors")
    assert read(tmp_path / "net.safetensors").architecture is None


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("steps", torch.arange(3, dtype=torch.int16))

    def forward(self, x):
        return self.fc(x)


def test_buffers_of_any_kind_are_kept(tmp_path):
    model = on_levels(Odd())
    mq.save(model, tmp_path / "net.safetensors")
    assert same_state(mq.unpack(mq.load(tmp_path / "net.safetensors", Odd())), model)
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(PackError, match=r"phases is torch\.complex128, which a safetensors file cannot hold"):
        mq.save(model, tmp_path / "net.safetensors")
    with pytest.raises(PackError, match=r"about is .*, but JSON cannot hold it"):
        mq.save(small(), tmp_path / "net.safetensors", about={"x": torch.ones(1)})
    for about in (["digits"], "digits"):  # which could not be loaded again
        with pytest.raises(PackError, match=r"about is .*digits.*, expected a dictionary"):
            mq.save(small(), tmp_path / "net.safetensors", about=about)


def test_metadata_stay_with_a_model(tmp_path):
    path, again = tmp_path / "net.safetensors", tmp_path / "again.safetensors"
    mq.save(network("digitsnet"), path, about={"accuracy": 98.6})
    loaded = mq.load(path)
    assert loaded.about == {"accuracy": 98.6}
    assert mq.pack(loaded, int8=True).about == mq.pack(loaded, skip="fc").about == loaded.about
    mq.save(loaded, again)
    assert again.read_bytes() == path.read_bytes()
    mq.save(loaded, again, about={"accuracy": 99})
    assert mq.load(again).about == {"accuracy": 99}
    mq.save(loaded, again, about={})
    assert mq.load(again).about == {}
    mq.save(loaded, again, about={"x": nested(40)})
    assert mq.load(again).about == {"x": nested(40)}
    with pytest.raises(PackError, match="but JSON cannot hold it"):
        mq.save(loaded, again, about={"x": float("nan")})


def test_names_from_a_file_cannot_control_the_terminal(tmp_path, capsys):
    model = on_levels(nn.Sequential())
    model.add_module("a\x1b]0;title\x07\u202e", on_levels(nn.Linear(8, 8)))
    mq.save(model, tmp_path / "net.safetensors")
    assert main(["summary", str(tmp_path / "net.safetensors")]) == 0
    told = capsys.readouterr().out
    assert r"a\x1b]0;title\x07\u202e.weight" in told
    assert all(line.isprintable() for line in told.split("\n"))
    with pytest.raises(PackError) as refused:
        mq.load(tmp_path / "net.safetensors", nn.Linear(8, 8))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("data", ["cifar10", "fashion-mnist", "synthetic:3x8x8:10", "folder:.", "\x1b[2J", 3, None])
def test_a_file_starts_no_download_and_reads_no_folder(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    mq.save(network("digitsnet"), "net.safetensors", about={"data": data, "shape": [1, 8, 8]})
    assert main(["export", "net.safetensors", "--to", "onnx"]) == 0
    capsys.readouterr()
    for name in ("net.safetensors", "net.onnx"):
        assert main(["eval", name, "--data-root", str(tmp_path)]) == 1
        told = capsys.readouterr().err
        assert f"pass --data {data}" in told or "pass --data, as in" in told
        assert told.rstrip("\n").isprintable()
    assert not (tmp_path / "cifar-10-batches-bin").exists()


def test_a_buffer_that_no_file_holds_needs_its_numbers(tmp_path):
    model = on_levels(Odd())
    mq.save(model, tmp_path / "net.safetensors")
    with torch.device("meta"):
        empty = Odd()
    assert same_state(mq.unpack(mq.load(tmp_path / "net.safetensors", empty)), model)
    empty.register_buffer("mask", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(PackError, match=r"mask is a buffer that is not saved and has no numbers: build"):
        mq.load(tmp_path / "net.safetensors", empty)


def test_two_processes_can_write_the_same_file_at_once(tmp_path, monkeypatch):
    """Here one writes all of it while the other synchronizes its own."""
    model, path, synchronize = network("digitsnet"), tmp_path / "net.safetensors", os.fsync

    def meanwhile(descriptor):
        monkeypatch.setattr(os, "fsync", synchronize)
        mq.save(model, path)
        synchronize(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    mq.save(model, path)
    assert same_state(mq.unpack(mq.load(path)), model)
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_cannot_be_read_or_written_are_named(tmp_path):
    with pytest.raises(PackError, match=r"nothing\.safetensors cannot be read \(No such file"):
        mq.load(tmp_path / "nothing.safetensors")
    with pytest.raises(PackError, match=r"cannot be read \(Is a directory\)"):
        mq.load(tmp_path)
    with pytest.raises(PackError, match="could not be written"):
        mq.save(small(), tmp_path / "no" / "net.safetensors")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(PackError, match=r"text: it is damaged, or not a packed model, which mq\.save writes \(JSON"):
        mq.load(tmp_path / "text")
    container.save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(PackError, match=r"other\.safetensors: it is a safetensors file, but not a packed model"):
        mq.load(tmp_path / "other.safetensors")


# Hostile files.


def lying(change, of=None):
    """A sealed file of a model whose header was changed by a function of the header and of what is told."""
    header, body = split(file.dump(of or network("digitsnet")))
    told = json.loads(header["__metadata__"]["mirrorquant"])
    body = change(header, told, bytearray(body)) or body
    header["__metadata__"]["mirrorquant"] = json.dumps(told)
    return sealed(header, bytes(body))


def put(value, *path, told=True):
    def change(header, description, body):
        node = description if told else header
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


def nested(depth):
    return [nested(depth - 1)] if depth else []


LIES = {
    "a newer format": (put(3, "format"), "its format is 3, but mirrorquant"),
    "no format": (put(None, "format"), "'>' not supported between instances of 'NoneType' and 'int'"),
    "another architecture": (put("resnet18", "architecture", "name"), "cannot be built"),
    "code": (put("os:system", "architecture", "name"), "'os:system' is none of bireal18, digitsnet, "),
    "a billion classes": (put(2**30, "architecture", "options", "classes"), "but the model's is"),
    "classes of text": (put("10", "architecture", "options", "classes"), "cannot be built"),
    "an unknown option": (put(3, "architecture", "options", "depth"), "cannot be built"),
    "a huge shape": (put([2**40, 64], "packed", "fc.weight", "shape"), "the bits or the scale of fc.weight do not"),
    "a product beyond 64 bits": (
        put([2**61, 2**61, 2**61], "fc.weight", "shape", told=False),
        "overflow computing buffer size",
    ),
    "a negative size": (put([-10, 64], "packed", "fc.weight", "shape"), "do not have its shape [-10, 64]"),
    "another shape": (put([64, 10], "packed", "fc.weight", "shape"), "do not have its shape [64, 10]"),
    "a shape of the same size": (put([10, 8, 8], "packed", "fc.weight", "shape"), "but the model's is"),
    "another dtype": (put("float16", "packed", "fc.weight", "dtype"), "fc.weight is torch.float16 [10, 64], but"),
    "no such dtype": (put("float12", "packed", "fc.weight", "dtype"), "'float12'"),
    "floats for bits": (put("F64", "fc.weight", "dtype", told=False), "invalid shape, data type"),
    "one level": (put([1.0], "packed", "fc.weight", "levels"), "two or more"),
    "levels out of order": (put([1.0, -1.0], "packed", "fc.weight", "levels"), "increase strictly"),
    "levels equal in the dtype": (put([1.0, 1 + 1e-9], "packed", "fc.weight", "levels"), "increase strictly"),
    "infinite levels": (put([-1.0, 10**400], "packed", "fc.weight", "levels"), "too large to convert to float"),
    "a scale that is not there": (put("fc.weight.scale", "packed", "fc.weight", "scale"), "'fc.weight.scale'"),
    "negative offsets": (put([-8, 0], "fc.weight", "data_offsets", told=False), "invalid value: integer `-8`"),
    "a name of escapes": (
        put({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a\x1b[2J\n\u202eb", told=False),
        r"the model lacks, a\x1b[2J\n\u202eb",
    ),
    "overlapping tensors": (
        put([0, 8], "bn2.num_batches_tracked", "data_offsets", told=False),
        "invalid offset for tensor",
    ),
    "a tensor more": (put({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "more", told=False), "more"),
    "no digest": (put(None, "sha256"), "it is damaged or was modified"),
    "packed by a list": (put([], "packed"), "'list' object has no attribute 'items'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_rejected_with_the_reason(lie):
    change, message = LIES[lie]
    path = scratch(lying(change))
    with pytest.raises(PackError) as told:
        mq.load(path)
    assert str(path) in str(told.value)
    assert message in str(told.value)
    assert str(told.value).isprintable()


@pytest.mark.parametrize(
    "change", ["a column of scales", "scales of another dtype", "bits as floats", "a second plane"]
)
def test_bits_and_scales_of_another_shape_are_refused_before_they_are_computed_with(change, monkeypatch):
    bits = mq.pack(scaled_rows()).entries()["weight"]
    planes, scale = bits.planes, bits.scale
    if change == "a column of scales":
        scale = scale[:, None]
    elif change == "scales of another dtype":
        scale = scale.double()
    else:
        planes = planes.float() if change == "bits as floats" else torch.cat([planes, planes])
    tensors = {"weight": planes, "weight.scale": scale}
    told = {"shape": list(bits.shape), "levels": [-1.0, 1.0], "dtype": "float32", "scale": "weight.scale"}
    told = {"sha256": "0" * 64, "format": file.FORMAT, "library": "", "packed": {"weight": told}, "about": {}}
    header, body = split(container.save(tensors, {"mirrorquant": json.dumps(told)}))
    monkeypatch.setattr(PackedTensor, "unpack", lambda bits: pytest.fail("computed"))
    with pytest.raises(PackError, match="the bits or the scale of weight do not have its shape"):
        read(scratch(sealed(header, body)))


def scaled_rows():
    layer = on_levels(nn.Linear(64, 32, bias=False))
    layer.weight.data *= torch.arange(1, 33)[:, None]
    return layer


def test_a_level_number_without_a_level_is_refused():
    model = on_levels(mq.models.digitsnet(), mq.TERNARY)

    def change(header, told, body):
        begin, end = header["conv2.weight"]["data_offsets"]
        body[begin:end] = b"\xff" * (end - begin)
        return body

    with pytest.raises(PackError, match="index 3 is out of bounds"):
        mq.load(scratch(lying(change, model)))


@pytest.mark.parametrize(
    "more", [',"deep":' + "[" * 100_000, ',"x":NaN', ',"x":1e999', ',"x\xff":1', ',"\\ud800":1', ","]
)
def test_a_header_that_is_not_json_is_refused(more):
    header, body = split(file.dump(network("digitsnet")))
    text = json.dumps(header, separators=(",", ":")).encode()[:-1] + more.encode("latin-1") + b"}"
    with pytest.raises(PackError, match=r"scratch\.safetensors: it is damaged, or not a packed model, which mq"):
        mq.load(scratch(sealed(text, body)))


def test_every_single_bit_flip_of_a_header_and_many_of_the_rest_are_refused():
    content = file.dump(small())
    length = int.from_bytes(content[:8], "little") + 8
    for place in [*range(0, 8 * length, 7), *range(8 * length, 8 * len(content))]:
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(PackError, match=r"scratch\.safetensors"):
            read(scratch(bytes(changed)))


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**40))
def test_a_changed_file_is_refused_or_consistent(seed):
    outcome(seed, FOLDER[0] / "scratch.safetensors")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**40))
def test_the_command_line_reports_a_changed_file_in_one_line(seed):
    by_command(seed, FOLDER[0] / "scratch.safetensors")


@pytest.mark.slow
def test_thousands_of_changed_files_are_refused_or_consistent_in_little_memory(capsys):
    """Apart, so that its memory can be limited: a lying header that is believed would end in a MemoryError.

    More of them: python tests/fuzz_files.py 20000 0 200.
    """
    script = Path(__file__).with_name("fuzz_files.py")
    done = subprocess.run([sys.executable, script, "5000", "0", "50"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with capsys.disabled():
        print(f"\n{done.stdout}", end="")
    told = json.loads(done.stdout)
    assert told["refused"] > 3_750
    assert told["another model, sealed as such"] > 25


def test_files_need_torch_and_safetensors_alone(tmp_path):
    """Saving, loading and running need no package that only tests and exports use, nor numpy."""
    code = (
        "import sys\n"
        "for name in ('numpy', 'onnx', 'onnxruntime', 'onnxscript', 'openvino'):\n"
        "    sys.modules[name] = None\n"
        "import torch, mirrorquant as mq\n"
        "model = mq.models.digitsnet()\n"
        "for p in model.parameters(): p.data.sign_()\n"
        "mq.save(model, sys.argv[1])\n"
        "assert mq.load(sys.argv[1])(torch.zeros(1, 1, 8, 8)).shape == (1, 10)\n"
        "for to in ('onnx', 'openvino'):\n"
        "    try: mq.export(model, sys.argv[1], (1, 8, 8), to=to)\n"
        "    except mq.PackError as error: assert f'mirrorquant[{to}]' in str(error), error\n"
        "    else: raise SystemExit('exported')\n"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "net.safetensors")], check=True, env=environment)
