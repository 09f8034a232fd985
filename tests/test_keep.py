"""The best network and averages of latents are exact, and leave training as it was."""

import copy

import pytest
import torch
from torch import nn

import mirrorquant as mq


def trained(steps, *, levels="ternary", method="md-tanh-s", watch=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    base = torch.optim.Adam(mq.split(model), lr=0.02)
    opt = mq.MirrorDescent(base, method, levels, mq.schedules.until(60))
    keeper = None if watch is None else watch(model, opt)
    generator = torch.Generator().manual_seed(1)
    for k in range(steps):
        x = torch.randn(32, 6, generator=generator)
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        opt.step()
        opt.zero_grad()
        if keeper is not None:
            keeper(k)
    return model, opt


def test_the_best_network_comes_back_exactly():
    kept = {}

    def watch(model, opt):
        kept["best"] = best = mq.Best(model, opt)

        def keep(k):
            score = -abs(k - 20)  # the 21st step is the best
            if k == 20:
                with opt.quantized():
                    kept["state"] = copy.deepcopy(model.state_dict())
            assert best.update(score) == (k <= 20)

        return keep

    model, opt = trained(40, watch=watch)
    best = kept["best"]
    assert (best.score, best.stale) == (0, 19)
    best.restore()
    assert opt.finalized
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept["state"][name]), name
    assert model[0].weight.unique().numel() == 3


def test_watching_changes_nothing():
    def watch(model, opt):
        best, average = mq.Best(model, opt), mq.Average(opt, 0.9)

        def keep(k):
            average.update()
            best.update(k)
            with average.applied(), opt.quantized():
                pass

        return keep

    watched, plain = trained(25, watch=watch)[0], trained(25)[0]
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, watched.state_dict()[name]), name


@pytest.mark.parametrize("levels", [mq.BINARY, "ternary", mq.levels.auto(how="learnt")], ids=str)
def test_latents_are_averaged_and_then_rounded(levels):
    found = {}

    def watch(model, opt):
        def moved():
            return [t.detach().double() for group in opt.base.param_groups for t in group["params"]]

        found["average"], found["expected"] = mq.Average(opt, 0.9), moved()

        def keep(k):
            found["average"].update()
            decay = min(0.9, (k + 1) / (k + 10))
            pairs = zip(found["expected"], moved(), strict=True)
            found["expected"] = [decay * e + (1 - decay) * t for e, t in pairs]

        return keep

    model, opt = trained(30, levels=levels, watch=watch)
    soft = model[0].weight.detach().clone()
    for tensor, expected in zip(found["average"].tensors, found["expected"], strict=True):
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-4, atol=1e-6)
    with found["average"].applied():
        assert not torch.equal(model[0].weight, soft)
        with opt.quantized():
            assert all(q.is_rounded() for q in opt._quantized())
            assert model[0].weight.unique().numel() == len(opt.param_groups[1]["method"].levels)
    assert torch.equal(model[0].weight, soft)


@pytest.mark.parametrize("levels", [mq.BINARY, mq.levels.auto(how="learnt")], ids=str)
def test_a_resumed_loop_keeps_its_best_network_and_its_average(levels, tmp_path):
    def watch(model, opt):
        kept.update(best=mq.Best(model, opt), average=mq.Average(opt, 0.9))

        def keep(k):
            kept["average"].update()
            kept["best"].update(-abs(k - 7))

        return keep

    kept: dict = {}
    trained(12, levels=levels, watch=watch)
    torch.save({name: each.state_dict() for name, each in kept.items()}, tmp_path / "kept.pt")
    saved = torch.load(tmp_path / "kept.pt", weights_only=True)
    model, opt = trained(12, levels=levels)
    best, average = mq.Best(model, opt), mq.Average(opt, 0.9)
    best.load_state_dict(saved["best"])
    average.load_state_dict(saved["average"])
    assert (best.score, best.stale, average.updates) == (0, 4, 12)
    assert all(torch.equal(a, b) for a, b in zip(average.tensors, kept["average"].tensors, strict=True))
    best.restore()
    assert all(torch.equal(tensor, kept["best"].state[name]) for name, tensor in model.state_dict().items())
    other = mq.MirrorDescent(torch.optim.Adam(nn.Linear(3, 2).parameters()), "bc")
    with pytest.raises(
        ValueError, match=r"another optimizer: its tensors have the shapes .*, expected \[\(2, 3\), \(2,\)\]"
    ):
        mq.Average(other).load_state_dict(saved["average"])


def test_what_cannot_be_kept_is_an_error():
    model, opt = trained(1)
    with pytest.raises(RuntimeError, match="no network was kept"):
        mq.Best(model, opt).restore()
    assert not mq.Best(model, opt).update(float("nan"))
    with pytest.raises(ValueError, match="decay is 1, but it must be at least 0 and below 1"):
        mq.Average(opt, 1)
    with pytest.raises(ValueError, match="latents that are infinite"):
        mq.Average(trained(1, method="md-tanh", levels=mq.BINARY)[1])


LEVELS = [[-3, -1, 1, 3], [-2, -1, 0, 1], [-1, -0.6, -0.2, 0.2, 0.6, 1], [-1, -1 / 3, 1 / 3, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", LEVELS, ids=str)
@pytest.mark.parametrize("how", ["computed", "learnt"])
def test_the_best_network_of_any_levels_comes_back_with_its_scales(how, values, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)
    base = torch.optim.Adam(mq.split(model), lr=0.01)
    opt = mq.MirrorDescent(base, "md-tanh-s", mq.levels.auto(values, how=how), mq.schedules.until(60))
    best = mq.Best(model, opt)
    for k in range(60):
        x = torch.randn(32, 8).to(dtype)
        nn.functional.cross_entropy(model(x).float(), x[:, :3].argmax(1)).backward()
        opt.step()
        opt.zero_grad()
        best.update(-abs(k - 40))
    best.restore()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, best.state[name]), name


def test_an_average_in_half_precision_moves():
    w = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    bias = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    groups = [{"params": [w]}, {"params": [bias], "method": "ref"}]
    average = mq.Average(mq.MirrorDescent(torch.optim.SGD(groups, lr=0.1), levels=mq.BINARY), 0.999)
    with torch.no_grad():
        bias.fill_(2.0)
    for _ in range(5000):
        average.update()
    assert float(average.tensors[1].mean()) == pytest.approx(2.0, abs=0.02)


def test_contexts_may_be_entered_in_either_order():
    averages = []
    model, opt = trained(
        20, watch=lambda model, opt: averages.append(mq.Average(opt)) or (lambda k: averages[0].update())
    )
    before = model[0].weight.detach().clone()
    with averages[0].applied(), opt.quantized():
        one = model[0].weight.detach().clone()
    with opt.quantized(), averages[0].applied():
        two = model[0].weight.detach().clone()
    assert torch.equal(one, two)
    assert one.unique().numel() == 3
    assert torch.equal(model[0].weight, before)


def test_an_average_leaves_a_fresh_optimizer_as_it_was_and_can_be_finalized():
    model, opt = trained(0)
    before, average = model[0].weight.detach().clone(), mq.Average(opt)
    with average.applied():
        pass
    assert torch.equal(model[0].weight, before)
    with average.applied():
        opt.finalize()
        inside = copy.deepcopy(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, inside[name]), name


def test_a_saved_state_can_be_restored_again_and_again():
    model = nn.Linear(8, 4)
    opt = mq.MirrorDescent(torch.optim.Adam(mq.split(model), lr=0.1))

    def train(steps):
        for _ in range(steps):
            model(torch.ones(2, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return model.weight.detach().clone()

    train(3)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    found = []
    for _ in range(2):
        model.load_state_dict(weights)
        opt.load_state_dict(state)
        found.append(train(3))
    assert torch.equal(*found)
