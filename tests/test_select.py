"""Which parameters are quantized."""

import re

import pytest
import torch
from conftest import small_network
from torch import nn
from torch.nn.utils import prune

import mirrorquant as mq
from mirrorquant.train import Config, build


def names(group):
    return [name for name, _ in group["params"]]


class Custom(nn.Module):
    """Parameters of every kind, many of which must not be quantized by accident."""

    def __init__(self):
        super().__init__()
        self.table, self.attention = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.recurrent, self.cell = nn.LSTM(8, 8, proj_size=4), nn.GRUCell(4, 4)
        self.up, self.pair, self.slope = nn.ConvTranspose1d(4, 4, 3), nn.Bilinear(4, 4, 2), nn.PReLU(8)
        self.norm, self.position = nn.LayerNorm(8), nn.Parameter(torch.zeros(1, 5, 8))
        self.temperature, self.gamma = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(8))
        self.mixing = nn.Parameter(torch.ones(8, 8))


def test_by_default_the_weights_of_layers_that_multiply_are_quantized():
    floats, quantized = mq.split(small_network())
    assert names(floats) == ["0.bias", "1.weight", "1.bias", "6.bias"]
    assert names(quantized) == ["0.weight", "3.weight", "6.weight"]
    slopes, weights = mq.split(nn.Sequential(nn.Linear(64, 64), nn.PReLU()))
    assert names(slopes) == ["0.bias", "1.weight"]
    assert names(weights) == ["0.weight"]
    floats, quantized = mq.split(Custom())
    assert set(names(quantized)) == {
        *("attention.in_proj_weight", "attention.out_proj.weight", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0"),
        *("recurrent.weight_hr_l0", "cell.weight_ih", "cell.weight_hh", "up.weight", "pair.weight"),
    }
    reasons = dict(zip(names(floats), floats["why"], strict=True))
    assert reasons["table.weight"] == "embedding"
    assert reasons["norm.weight"] == "normalization"
    assert reasons["temperature"] == reasons["gamma"] == reasons["up.bias"] == "bias or other vector"
    assert reasons["position"] == reasons["mixing"] == "not a weight of a layer that multiplies"


def test_a_subclass_of_a_layer_counts_as_one():
    class Special(nn.Linear):
        pass

    assert names(mq.split(nn.Sequential(Special(3, 3)))[1]) == ["0.weight"]


def test_the_papers_choice_is_everything_but_norms():
    floats, quantized = mq.split(small_network(), everything=True)
    assert names(floats) == ["1.weight", "1.bias"]
    assert names(quantized) == ["0.weight", "0.bias", "3.weight", "6.weight", "6.bias"]
    (every,) = mq.split(small_network(), everything=True, norms=True)
    assert len(names(every)) == 7
    assert "gamma" in names(mq.split(Custom(), everything=True)[1])
    assert names(mq.split(small_network(), norms=True)[1]) == ["0.weight", "1.weight", "1.bias", "3.weight", "6.weight"]


def custom(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.PReLU(), nn.BatchNorm1d(8), nn.Linear(8, classes))


def test_recipes_quantize_the_papers_networks_whole_and_custom_ones_by_default():
    config = Config.from_recipe("digits/digitsnet/binary/md-tanh-s", ["affine=true", "scale="])
    floats, quantized = build.optimizer(config, build.model(config, 10, 1), 10).param_groups
    assert quantized["param_names"] == ["conv1.weight", "conv2.weight", "conv3.weight", "fc.weight", "fc.bias"]
    assert all(name.startswith("bn") for name in floats["param_names"])
    config = Config.from_recipe("digits/digitsnet/binary/md-tanh-s", [f"model={__name__}:custom", "scale="])
    _, quantized = build.optimizer(config, build.model(config, 10, 1), 10).param_groups
    assert quantized["param_names"] == ["1.weight", "4.weight"]


def test_patterns_match_names_modules_and_types():
    assert names(mq.split(small_network(), skip=["0", nn.Linear])[1]) == ["3.weight"]
    assert names(mq.split(small_network(), only=[nn.Conv2d])[1]) == ["0.weight", "3.weight"]
    assert names(mq.split(small_network(), only="3")[1]) == ["3.weight"]
    nested = nn.ModuleDict({"conv1": nn.Conv2d(1, 1, 1), "layer": nn.ModuleDict({"conv1": nn.Conv2d(1, 1, 1)})})
    chosen = mq.split(nested, skip=["conv1"], everything=True)[1]
    assert names(chosen) == ["layer.conv1.weight", "layer.conv1.bias"]


def test_a_pattern_of_only_that_matches_nothing_selected_selects_what_it_matches():
    assert names(mq.split(Custom(), only=nn.Embedding)[1]) == ["table.weight"]
    assert names(mq.split(Custom(), only=["table", "pos*", "up"])[1]) == ["position", "table.weight", "up.weight"]
    assert names(mq.split(small_network(), only=["*.bias"], skip="6")[1]) == ["0.bias"]
    assert names(mq.split(Custom(), only="*.weight")[1]) == ["attention.out_proj.weight", "up.weight", "pair.weight"]
    assert names(mq.split(Custom(), only="slope.weight")[1]) == ["slope.weight"]


def test_an_embedding_that_is_tied_to_a_linear_layer_stays_in_float():
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "hidden": nn.Linear(4, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["embed"].weight
    assert names(mq.split(model)[1]) == ["hidden.weight"]
    assert names(mq.split(model, only=["head", "hidden"])[1]) == ["embed.weight", "hidden.weight"]


def test_the_optimizer_shows_what_it_quantizes_and_why_not_the_rest():
    opt = mq.MirrorDescent(torch.optim.Adam(mq.split(Custom(), skip="pair")), levels=0.1 * mq.TERNARY)
    first, quantized, floats = repr(opt).split("\n")
    assert first == "MirrorDescent(Adam, step 0)"
    assert quantized.startswith("  md-tanh-s, levels -0.1, 0, 0.1: 8 tensors, ")
    assert quantized.endswith(" weights (attention.in_proj_weight, attention.out_proj.weight, ...)")
    assert "embedding (1: table.weight)" in floats
    assert "skipped (2: pair.weight, pair.bias)" in floats
    assert "normalization (2: norm.weight, norm.bias)" in floats
    assert all("why" not in group for group in (*opt.param_groups, *opt.base.param_groups))


def test_levels_that_fit_each_layer_are_shown_with_their_scales():
    opt = mq.MirrorDescent(torch.optim.Adam(mq.split(Custom())), levels="ternary", anneal=mq.schedules.until(5))
    _, start, quantized, _ = repr(opt).split("\n")
    assert start == "  at the start the quantized weights differ by 0.0% from those of the model"
    assert re.match(r"  md-tanh-s, levels -1, 0, 1 x a computed scale per tensor \([\d.]+ to [\d.]+\): 9 t", quantized)


def test_the_first_and_the_last_layer_stay_in_float_by_a_flag():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    floats, quantized = mq.split(model, ends=False)
    assert names(quantized) == ["2.weight"]
    reasons = dict(zip(names(floats), floats["why"], strict=True))
    assert (reasons["1.weight"], reasons["4.weight"]) == ("first layer", "last layer")
    with pytest.raises(ValueError, match=r"first layer \(1: weight\)"):
        mq.split(nn.Linear(3, 2), ends=False)


def test_a_model_without_such_layers_says_what_there_is_and_what_to_do():
    with pytest.raises(ValueError, match=r"bias or other vector \(1: 0.weight\).*only=, or choose everything=True"):
        mq.split(nn.Sequential(nn.PReLU(), nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: run one batch"):
        mq.split(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("given", [list, nn.Module.parameters, nn.Module.state_dict])
def test_what_is_no_model_is_refused(given):
    with pytest.raises(TypeError, match=r"the model is a \w+, expected a torch\.nn\.Module: pass the model itself"):
        mq.split(given(small_network()))


def test_tied_parameters_go_by_all_their_names():
    tied = nn.ModuleDict({"embed": nn.Linear(4, 4, bias=False), "hidden": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    tied["head"].weight = tied["embed"].weight
    floats, quantized = mq.split(tied, skip=["head"])
    assert names(floats) == ["embed.weight", "hidden.bias", "head.bias"]
    assert names(quantized) == ["hidden.weight"]


def test_a_parametrized_weight_is_refused_unless_skipped():
    model = nn.Sequential(nn.Linear(3, 4), torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    with pytest.raises(
        ValueError, match=r"weight from 1\.parametrizations\.weight\.original0 .*\.remove_parametrizations"
    ):
        mq.split(model)
    floats, quantized = mq.split(model, skip=["1"])
    assert names(quantized) == ["0.weight"]
    assert len(names(floats)) == 4


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
    with pytest.raises(ValueError, match=rf"a layer computes its weight from 1\.{part}"):
        mq.split(model)
    assert names(mq.split(model, skip=["1"])[1]) == ["0.weight"]


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
