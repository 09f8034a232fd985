"""ProxQuant with levels that are found for each tensor: against a loop over its weights, and wherever levels matter."""

import copy

import pytest
import torch
from conftest import small_network, train

import mirrorquant as mq
from mirrorquant.methods import PQLevels
from mirrorquant.report import RunRecord
from mirrorquant.train import Config, ConfigError, Run, build
from mirrorquant.train.graph import GraphEngine

LEVELS = {"binary": mq.BINARY, "ternary": mq.TERNARY}


def mean(numbers):
    return sum(numbers) / len(numbers)


def by_hand(weights, ternary):
    """The levels and the threshold as ProxQuant's paper has them, in plain Python."""
    delta = 0.7 * mean([abs(w) for w in weights]) if ternary else 0.0
    upper = [w for w in weights if w >= delta]
    lower = [w for w in weights if (w <= -delta if ternary else w < 0)]
    return mean(lower), mean(upper), delta


def wrap(model, levels=mq.TERNARY, lr=0.05):
    base = torch.optim.Adam(mq.split(model, everything=True), lr=lr)
    return mq.MirrorDescent(base, "pq-levels", levels=levels, anneal=mq.schedules.ramp(0.05))


@pytest.mark.parametrize("name", LEVELS)
def test_levels_and_proximal_map_agree_with_a_loop_over_the_weights(name):
    method, ternary = PQLevels(LEVELS[name]), name == "ternary"
    latent = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lower, upper, delta = by_hand(latent.flatten().tolist(), ternary)
    fitted = method.fit(latent)
    torch.testing.assert_close(fitted, torch.tensor([lower, upper, delta], dtype=torch.float64))
    moved = method.settle(latent, 3.0, 0.1, fitted=torch.zeros(3, dtype=torch.float64))
    for w, found in zip(latent.flatten().tolist(), moved.flatten().tolist(), strict=True):
        target = upper if w >= delta else lower if w <= -delta or not ternary else 0.0
        nearer = max(w - 0.3, target) if w > target else min(w + 0.3, target)  # by 0.3 at most
        assert found == pytest.approx((w + 0.3 * target) / 1.3 if ternary else nearer)


@pytest.mark.parametrize("name", LEVELS)
def test_finalized_weights_are_on_two_or_three_levels_of_their_own(name, tmp_path):
    model = small_network()
    opt = wrap(model, LEVELS[name])
    train(model, opt, 12)
    with opt.quantized():
        inside = copy.deepcopy(model.state_dict())
    opt.finalize()
    found = set()
    assert all(torch.equal(p, inside[key]) for key, p in model.named_parameters())
    for p in opt.state:
        values = p.detach().unique().tolist()
        assert len(values) <= len(LEVELS[name])
        assert set(values) <= {*opt.state[p]["fitted"][:2].tolist(), *([0.0] if name == "ternary" else [])}
        found |= {abs(value) for value in values}
    assert len(found) > 4  # they differ from tensor to tensor, and the upper from the lower
    mq.save(model, tmp_path / "net.safetensors")
    loaded = mq.unpack(mq.load(tmp_path / "net.safetensors", small_network()))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_a_saved_state_resumes_bit_exactly():
    model, again = small_network(), small_network()
    opt = wrap(model)
    train(model, opt, 5)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    train(model, opt, 5, start=5)
    other = wrap(again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(again, other, 5, start=5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_rounded_weights_that_are_loaded_bring_their_own_levels():
    model = small_network()
    opt = wrap(model)
    train(model, opt, 6)
    with opt.quantized():
        best = copy.deepcopy(model.state_dict())
    train(model, opt, 6, start=6)
    model.load_state_dict(best)
    opt.finalize()
    assert all(torch.equal(tensor, best[name]) for name, tensor in model.state_dict().items())
    p = next(iter(opt.state))
    state = opt.state[p]
    assert opt.param_groups[-1]["method"].adopted(torch.tensor([0.1, 0.2, -1.0]), state) is None
    one = opt.param_groups[-1]["method"].adopted(torch.tensor([0.3, 0.0, 0.3]), state)
    assert one["fitted"][1] == pytest.approx(0.3)


def test_health_is_in_units_of_the_levels():
    model = small_network()
    opt = wrap(model)
    for tensor in mq.health(opt).tensors:
        assert sum(tensor.shares) == pytest.approx(1)
        if tensor.count > 50:
            assert min(tensor.shares) > 0.15
    opt.finalize()
    assert {tensor.gap for tensor in mq.health(opt).tensors} == {0.0}


def test_an_average_of_latents_has_levels_of_its_own():
    model = small_network()
    opt = wrap(model)
    average = mq.Average(opt, decay=0.5)
    for k in range(6):
        train(model, opt, 1, start=k)
        average.update()
    before = [opt.state[p]["fitted"].clone() for p in opt.state]
    with average.applied():
        for p in opt.state:
            assert torch.equal(opt.state[p]["fitted"], PQLevels(mq.TERNARY).fit(opt.latent(p)))
        with opt.quantized():
            assert all(len(p.unique()) <= 3 for p in opt.state)
    assert all(torch.equal(opt.state[p]["fitted"], old) for p, old in zip(opt.state, before, strict=True))


def test_nan_stays_nan_constants_have_levels_and_four_levels_are_refused():
    method = PQLevels(mq.TERNARY)
    latent = torch.tensor([float("nan"), 1.0])
    assert method.round(latent, 1.0, fitted=torch.tensor([-1.0, 1.0, 0.5])).isnan().tolist() == [True, False]
    for constant in (torch.zeros(4), torch.ones(4), torch.zeros(0), -torch.ones(3)):
        lower, upper, _ = method.fit(constant).tolist()
        assert lower < 0 < upper
    for levels in ((-1, -0.5, 0.5, 1), (-2, 2), (-1, 0.25, 1)):
        with pytest.raises(ValueError, match=r"pq-levels fits its own: use \[-1, 1\] or \[-1, 0, 1\]"):
            PQLevels(levels)
    with pytest.raises(ValueError, match="fits its levels to each tensor: leave it out"):
        PQLevels(mq.BINARY, scale=mq.levels.Scale())
    assert PQLevels("ternary").scale is None


@pytest.mark.parametrize("engine", ["plain", "graph"])
def test_a_run_ends_on_levels_of_each_layer(tmp_path, engine):
    overrides = ["method=pq-levels", "scale=", "iterations=60", "width=8", "finalize_at=0.6667", f"engine={engine}"]
    config = Config.from_recipe("digits/digitsnet/ternary/md-tanh-s", overrides)
    summary = Run(config, tmp_path / "run", quiet=True).train()
    assert not any(row["off_levels"] for row in summary["layers"])
    best = mq.train.Best.load(tmp_path / "run")
    assert best.off_levels == []
    assert RunRecord.read(tmp_path / "run").scale == "fitted"
    assert "pq-levels, levels -1, 0, 1 fitted to each tensor: " in repr(best.opt)
    values = best.model.conv2.weight.detach().unique()
    assert len(values) == 3
    assert values[1] == 0
    assert values[0] != -values[2]


@pytest.mark.parametrize("method", ["md-softmax-s", "md-softmax", "pmf"])
@pytest.mark.parametrize("levels", ["binary", "ternary"])
def test_latents_of_lifted_methods_may_be_drawn_per_level(method, levels):
    """As the authors' layers with d times as many outputs: independent numbers, and a larger fan-out."""
    shared = [f"method={method}", f"levels={levels}", "scale=", "device=cpu"]
    task = build.task(Config.from_recipe("digits/digitsnet/binary/md-tanh-s", [*shared, "lifted_init=true"]))
    p = task.model.conv2.weight
    latent, count = task.opt.latent(p), {"binary": 2, "ternary": 3}[levels]
    if method == "md-softmax":  # kept as log u
        torch.testing.assert_close(latent.exp().sum(0), torch.ones_like(p))
        latent = latent - latent.mean(0)
    else:
        out, fan_in, height, width = p.shape
        bound = (6 / (height * width * (fan_in + count * out))) ** 0.5
        assert 0.98 * bound < latent.abs().max() <= bound
        pairs = torch.corrcoef(latent.flatten(1))
        assert (pairs - torch.eye(count)).abs().max() < 0.06
    plain = build.task(Config.from_recipe("digits/digitsnet/binary/md-tanh-s", shared))
    assert not torch.equal(task.opt.latent(p), plain.opt.latent(plain.model.conv2.weight))
    assert torch.equal(p, task.opt.param_groups[-1]["method"].image(task.opt.state[p], 1.0))
    again = build.task(Config.from_recipe("digits/digitsnet/binary/md-tanh-s", [*shared, "lifted_init=true"]))
    assert torch.equal(again.opt.latent(again.model.conv2.weight), task.opt.latent(p))
    assert GraphEngine(task, print).parts


def test_latents_cannot_be_drawn_and_pretrained():
    with pytest.raises(ConfigError, match="lifted_init draws the latents anew, so init would have no effect"):
        Config(method="md-softmax-s", lifted_init=True, init="x.pt")
