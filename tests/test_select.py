"""Which parameters are quantized."""

import pytest
import torch
from conftest import small_network
from torch import nn
from torch.nn.utils import prune

import mirrorquant as mq


def names(group):
    return [name for name, _ in group["params"]]


def test_everything_but_norms_is_quantized_by_default():
    floats, quantized = mq.split(small_network())
    assert names(floats) == ["1.weight", "1.bias"]
    assert names(quantized) == ["0.weight", "0.bias", "3.weight", "6.weight", "6.bias"]
    (everything,) = mq.split(small_network(), norms=True)
    assert len(names(everything)) == 7


def test_patterns_match_names_modules_and_types():
    assert names(mq.split(small_network(), skip=["0", "*.bias", nn.Linear])[1]) == ["3.weight"]
    assert names(mq.split(small_network(), only=[nn.Conv2d], skip=["0.bias"])[1]) == ["0.weight", "3.weight"]
    assert names(mq.split(small_network(), only="3")[1]) == ["3.weight"]
    nested = nn.ModuleDict({"conv1": nn.Conv2d(1, 1, 1), "layer": nn.ModuleDict({"conv1": nn.Conv2d(1, 1, 1)})})
    assert names(mq.split(nested, skip=["conv1"])[1]) == ["layer.conv1.weight", "layer.conv1.bias"]


@pytest.mark.parametrize("given", [list, nn.Module.parameters, nn.Module.state_dict])
def test_what_is_no_model_is_refused(given):
    with pytest.raises(TypeError, match=r"the model is a \w+, expected a torch\.nn\.Module: pass the model itself"):
        mq.split(given(small_network()))


def test_tied_parameters_go_by_all_their_names():
    tied = nn.ModuleDict({"embed": nn.Linear(4, 4, bias=False), "hidden": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    tied["head"].weight = tied["embed"].weight
    floats, quantized = mq.split(tied, skip=["head"])
    assert names(floats) == ["embed.weight", "head.bias"]
    assert names(quantized) == ["hidden.weight", "hidden.bias"]


def test_a_parametrized_weight_is_refused_unless_skipped():
    model = nn.Sequential(nn.Linear(3, 4), torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"1\.parametrizations\.weight\.original0 .*\.remove_parametrizations"):
        mq.split(model)
    floats, quantized = mq.split(model, skip=["1"])
    assert names(quantized) == ["0.weight", "0.bias"]
    assert len(names(floats)) == 3


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    ("wrap", "part"),
    [
        (torch.nn.utils.weight_norm, "weight_g"),
        (torch.nn.utils.spectral_norm, "weight_orig"),
        (lambda layer: prune.random_unstructured(layer, "weight", 0.5), "weight_orig"),
    ],
)
def test_what_a_hook_computes_the_weight_from_is_refused_unless_skipped(wrap, part):
    model = nn.Sequential(nn.Linear(3, 4), wrap(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=rf"1\.{part} is what its layer's weight is computed from"):
        mq.split(model)
    assert names(mq.split(model, skip=["1"])[1]) == ["0.weight", "0.bias"]


def test_a_compiled_model_goes_by_its_own_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    for wrapped_group, group in zip(mq.split(wrapped, skip=["1"]), mq.split(model, skip=["1"]), strict=True):
        assert names(wrapped_group) == names(group)


def test_frozen_parameters_are_left_alone():
    model = small_network()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.clone()
    opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model)))
    opt.finalize()
    assert torch.equal(model[0].weight, frozen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"skip": ["conv9"]}, r"pattern \['conv9'\] matches no parameter"),
        ({"only": [nn.Conv3d]}, r"pattern \[Conv3d\] matches no parameter"),
        ({"skip": ["*"]}, "none of 7 parameters is left"),
        ({"only": [nn.BatchNorm2d]}, "stay in float unless norms=True"),
    ],
)
def test_bad_selections_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        mq.split(small_network(), **arguments)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        mq.split(nn.ReLU())
