"""Runs that start from pretrained weights."""

import os

import pytest
import torch
from safetensors.torch import save_file
from test_train import config, signalled

from mirrorquant import models
from mirrorquant.cli import main
from mirrorquant.train import Best, ConfigError, Interrupted, Run, build

SMALL = ["width=4", "iterations=6", "eval_every=3", "checkpoint_every=2"]


def network(**options):
    torch.manual_seed(5)
    model = models.digitsnet(10, width=4, **options)
    model.bn1.running_mean.fill_(0.25)
    return model


@pytest.fixture(params=["net.pt", "net.safetensors", "run", "run/best.pt"])
def file(request, tmp_path):
    """Pretrained weights in each form, and their tensors."""
    path = tmp_path / request.param
    if request.param.startswith("run"):
        Run(config(*SMALL, "seed=3"), tmp_path / "run", quiet=True).train()
        return path, Best.load(tmp_path / "run").model.state_dict()
    state = network().state_dict()
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path, state


def test_a_run_starts_from_the_weights_of_a_file_and_resumes_without_it(file, tmp_path):
    path, expected = file
    settings = config(*SMALL, f"init={path}", "method=bc")
    started = build.task(settings)
    assert torch.equal(started.model.bn1.running_mean, expected["bn1.running_mean"])
    assert torch.equal(started.opt.latent(started.model.conv1.weight), expected["conv1.weight"])
    whole = Run(settings, tmp_path / "whole", quiet=True).train()
    with pytest.raises(Interrupted):
        signalled(Run(settings, tmp_path / "cut", quiet=True), 3).train()
    os.rename(path, tmp_path / "gone")
    assert Run.resume(tmp_path / "cut", quiet=True).train()["curve"] == whole["curve"]
    assert Best.load(tmp_path / "cut").off_levels == []
    assert main(["eval", str(tmp_path / "cut")]) == 0


def test_a_run_without_a_checkpoint_begins_again_from_the_file(tmp_path):
    torch.save(network().state_dict(), tmp_path / "net.pt")
    Run(config(*SMALL, f"init={tmp_path / 'net.pt'}"), tmp_path / "run", quiet=True).folder.release()
    again = Run.resume(tmp_path / "run", quiet=True)
    assert float(again.task.model.bn1.running_mean[0]) == 0.25
    again.folder.release()


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ("scale=tensor", False),
        ("method=gd-tanh scale=channel levels=ternary", False),
        ("scale=tensor-fixed", True),
        ("method=bc scale=tensor", True),
        ("method=md-softmax-s levels=ternary scale=", True),
    ],
)
def test_a_start_that_is_not_the_given_network_is_reported(options, warned, tmp_path):
    torch.save(network().state_dict(), tmp_path / "net.pt")
    run = Run(config(*SMALL, f"init={tmp_path / 'net.pt'}", *options.split()), tmp_path / "run", quiet=True)
    run.folder.release()
    found = [text for text in run.messages if "at the start the weights differ by" in text]
    assert bool(found) == warned, run.task.opt.start_gap


def test_the_file_belongs_to_the_identity_of_a_run():
    assert config("init=a.pt").identity not in (config().identity, config("init=b.pt").identity)
    assert config("init=a.pt").idle_overrides() == {}


def test_weights_of_a_float_run_need_its_affine_batch_norm(tmp_path):
    Run(config(*SMALL, recipe="digits/digitsnet/ref"), tmp_path / "ref", quiet=True).train()
    with pytest.raises(ConfigError, match=r"ref has bn1\.weight, which the model lacks: .* add affine=true"):
        build.task(config(*SMALL, f"init={tmp_path / 'ref'}"))
    task = build.task(config(*SMALL, f"init={tmp_path / 'ref'}", "affine=true"))
    assert torch.equal(task.model.bn1.weight, Best.load(tmp_path / "ref").model.bn1.weight)


def test_a_file_that_does_not_fit_is_told_with_the_first_difference(tmp_path):
    path, settings = tmp_path / "net.pt", config(*SMALL, f"init={tmp_path / 'net.pt'}")
    state = network().state_dict()
    for content, message in (
        ({k: v for k, v in state.items() if k != "conv2.weight"}, r"net\.pt has no conv2\.weight, which the model has"),
        ({**state, "extra": torch.zeros(1)}, r"net\.pt has extra, which the model lacks"),
        ({**state, "fc.bias": torch.zeros(7)}, r"fc\.bias of init .* has shape \(7,\), but the model needs \(10,\)"),
        ({"epoch": 3}, r"holds no state_dict: write it by torch\.save\(model\.state_dict\(\)"),
        (network(), r"cannot be loaded \(UnpicklingError\)"),
    ):
        torch.save(content, path)
        with pytest.raises(ConfigError, match=message):
            build.task(settings)
    for content in (state, {f"module.{name}": tensor for name, tensor in state.items()}):
        for checkpoint in (content, {"epoch": 3, "state_dict": content}, {"model": content, "optimizer": {}}):
            torch.save(checkpoint, path)
            assert torch.equal(build.task(settings).model.fc.weight.sign(), state["fc.weight"].sign())
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        build.task(settings)
    torch.save(state, path)
    with pytest.raises(ConfigError, match="its batch norm is not affine: add affine=false"):
        build.task(config(*SMALL, f"init={path}", "affine=true"))
