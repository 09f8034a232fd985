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


def test_what_cannot_be_kept_is_an_error():
    model, opt = trained(1)
    with pytest.raises(RuntimeError, match="no network was kept"):
        mq.Best(model, opt).restore()
    assert not mq.Best(model, opt).update(float("nan"))
    with pytest.raises(ValueError, match="decay is 1, but it must be at least 0 and below 1"):
        mq.Average(opt, 1)
    with pytest.raises(ValueError, match="latents that are infinite"):
        mq.Average(trained(1, method="md-tanh", levels=mq.BINARY)[1])
