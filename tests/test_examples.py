"""The networks of the examples, which nobody wrote for this library, pack, save, load, run and export."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mirrorquant as mq

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OWN, GPT = example("own_models"), example("char_gpt")
MODELS = {**OWN.MODELS, "gpt": lambda: GPT.GPT(90)}


def finished(name, levels):
    """A network after three steps, and some inputs."""
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randint(90, (6, GPT.CONTEXT)) if name == "gpt" else torch.randn(6, 1, 8, 8)
    base = torch.optim.Adam(mq.split(model), lr=1e-3)
    opt = mq.MirrorDescent(base, method="md-tanh-s", levels=levels, anneal=mq.schedules.until(3))
    for _ in range(3):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.finalize()
    return model.eval(), x


@pytest.mark.parametrize("levels", ["binary", "ternary"])
@pytest.mark.parametrize("name", MODELS)
def test_a_network_packs_and_comes_back_from_its_file(name, levels, tmp_path):
    model, x = finished(name, levels)
    with torch.no_grad():
        expected = model(x)
        scale = 1e-4 * float(expected.abs().max())
        packed = mq.pack(model)
        torch.testing.assert_close(packed(x), expected, rtol=0, atol=scale)
        mq.save(model, tmp_path / "net.safetensors")
        loaded = mq.load(tmp_path / "net.safetensors", MODELS[name]())
        torch.testing.assert_close(loaded(x), expected, rtol=0, atol=scale)
    quantized = [row for row in mq.summary(packed).rows if row.levels is not None]
    assert {row.bits for row in quantized} == {1 if levels == "binary" else 2}
    assert all(row.runs for row in quantized)
    assert sum(row.count for row in quantized) == sum(p.numel() for _, p in mq.split(model)[-1]["params"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_network_is_exported_with_equal_outputs(name, tmp_path):
    pytest.importorskip("onnxruntime")
    from mirrorquant.export.onnx import OnnxModel

    model, x = finished(name, "ternary")
    mq.export(model, tmp_path / "net.onnx", x.shape[1:], dtype=x.dtype)
    with torch.no_grad():
        expected = model(x)
    found = OnnxModel(tmp_path / "net.onnx")(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    count = sum(p.numel() for _, p in mq.split(model)[-1]["params"])
    rest = sum(tensor.nbytes for tensor in model.state_dict().values()) - 4 * count
    assert (tmp_path / "net.onnx").stat().st_size < count / 4 + rest + 60_000  # two bits per weight, and the graph


def test_the_examples_train_and_learn():
    torch.manual_seed(0)
    assert OWN.train(OWN.MODELS["mobilenet"](), "mobilenet", "binary", 60, 0) > 50
    text = GPT.sources()
    assert GPT.train("ternary", 5, 0, text) < GPT.train("b1.58", 1, 0, text)


def test_bitnets_rules():
    weight = torch.tensor([[0.1, -0.5], [0.9, -0.1]], requires_grad=True)  # the mean |w| is 0.4
    torch.testing.assert_close(GPT.BitNet(ternary=True)(weight), torch.tensor([[0.0, -0.4], [0.4, 0.0]]))
    rounded = GPT.BitNet(ternary=False)(weight)
    torch.testing.assert_close(rounded, torch.tensor([[0.4, -0.4], [0.4, -0.4]]))
    (gradient,) = torch.autograd.grad(F.mse_loss(rounded, torch.zeros(2, 2)), weight)
    torch.testing.assert_close(gradient, rounded.detach() / 2)
