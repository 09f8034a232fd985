"""Networks that train and round, but not as intended, say so; batch-norm statistics can be taken anew."""

import copy
import json
import re
import warnings

import pytest
import torch
from conftest import small_network, train
from torch import nn

import mirrorquant as mq
from mirrorquant import BINARY, TERNARY, Levels
from mirrorquant.cli import main

DIGITS = "digits/digitsnet/binary/md-tanh-s"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def wrap(model, **options):
    return mq.MirrorDescent(torch.optim.Adam(mq.split(model), lr=0.01), **options)


# At the start.


@pytest.mark.parametrize("method", ["md-tanh-s", "md-softmax-s", "pq", "bc", "gd-tanh"])
def test_levels_too_wide_for_the_weights_are_told_at_construction_with_the_remedy(method):
    with pytest.warns(mq.HealthWarning) as caught:
        wrap(network(), method=method, levels=TERNARY)
    (warning,) = caught
    assert warning.filename == __file__
    told = str(warning.message)
    assert "all weights of 2 of 2 quantized tensors (0.weight, 2.weight) start at the level 0" in told
    assert "thresholds are -0.5 and 0.5, but the mean |weight| is 0.06" in told
    assert told.endswith("levels='ternary' fits the levels to each layer")
    with warnings.catch_warnings():
        warnings.simplefilter("error", mq.HealthWarning)
        opt = wrap(network(), method=method, levels="ternary", anneal=mq.schedules.until(10))
    for tensor in mq.health(opt).tensors:
        assert min(tensor.shares) > 0.2


def test_the_advice_names_the_levels_that_were_given_and_works_for_other_sets():
    model = nn.Linear(64, 64)
    nn.init.uniform_(model.weight, 0.01, 0.02)
    with pytest.warns(mq.HealthWarning, match=r"levels=mq\.levels\.auto\(\[-3\.0, -1\.0, 1\.0, 3\.0\]\)") as caught:
        wrap(model, levels=Levels(-3, -1, 1, 3))
    assert "start at the level 1: the nearest thresholds are 0 and 2" in str(caught[0].message)
    with pytest.warns(mq.HealthWarning, match="choose levels that fit them$"):
        wrap(network(), levels=Levels(0, 1))  # not around zero: no factor makes them fit


def test_a_group_that_is_added_is_looked_at_too():
    opt, head = wrap(network()), nn.Linear(64, 64)
    with pytest.warns(mq.HealthWarning, match=r"1 of 1 quantized tensors \(head\) start at the level 0"):
        opt.add_param_group({"params": [("head", head.weight)], "levels": TERNARY})


def test_healthy_small_or_constant_tensors_are_not_talked_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error", mq.HealthWarning)
        wrap(network())
        wrap(network(), levels=0.05 * TERNARY)
        wrap(nn.Linear(7, 9), levels=TERNARY)  # 63 weights
        zeros = nn.Linear(64, 64)
        nn.init.zeros_(zeros.weight)
        wrap(zeros)
        opt = mq.MirrorDescent(torch.optim.SGD([nn.Parameter(torch.zeros(0, 3))], lr=0.1))
    assert mq.health(opt).problems == []
    assert str(mq.health(opt))


# The report.


def test_the_report_counts_levels_distances_and_latents():
    w = nn.Parameter(torch.tensor([0.02] * 3 + [0.2] * 4 + [-0.6] * 2 + [-1.0]))
    opt = mq.MirrorDescent(torch.optim.SGD([("w", w)], lr=0.1), "pq", TERNARY, anneal=mq.schedules.ramp(1.0))
    (found,) = mq.health(opt).tensors
    assert (found.name, found.levels, found.count) == ("w", TERNARY, 10)
    assert found.shares == pytest.approx((0.3, 0.7, 0.0))
    assert found.gap == pytest.approx((3 * 0.02 + 4 * 0.2 + 2 * 0.4) / 10)
    assert found.latent == pytest.approx(0.2)
    assert found.beta == 0
    wide = mq.MirrorDescent(torch.optim.SGD([nn.Parameter(10 * w.detach())], lr=0.1), "pq", 10 * TERNARY)
    assert mq.health(wide).tensors[0].gap == pytest.approx(found.gap)
    rows = str(mq.health(opt)).split("\n")
    assert rows[1].split() == ["w", "10", "-1:", "30", "%", "0:", "70", "%", "1:", "0", "%", "17", "%", "0", "0.2"]


@pytest.mark.parametrize("levels", [BINARY, 0.2 * BINARY])
def test_the_typical_latent_of_a_lifted_method_is_that_of_tanh(levels):
    reports = [mq.health(wrap(network(), method=method, levels=levels)) for method in ("md-tanh-s", "md-softmax-s")]
    for tanh, lifted in zip(*(report.tensors for report in reports), strict=True):
        assert lifted.latent * levels.radius == pytest.approx(tanh.latent, rel=1e-4)


# The end.


def test_the_report_compares_the_loss_of_soft_and_rounded_weights():
    model, x = network(), torch.randn(16, 64)
    opt = wrap(model, levels="binary", anneal=mq.schedules.until(10))
    report = mq.health(opt, lambda: model(x).square().mean())
    assert report.soft_loss == model(x).square().mean().item()
    with opt.quantized():
        assert report.rounded_loss == model(x).square().mean().item()
    assert str(report).endswith(f"loss {report.soft_loss:.4g}, rounded {report.rounded_loss:.4g}")
    assert mq.health(opt).soft_loss is None


def test_finalize_tells_of_the_rounding_gap_and_of_collapsed_tensors():
    model = network()
    opt = wrap(model, levels=TERNARY)
    with pytest.warns(mq.HealthWarning) as caught:
        opt.finalize()
    told = str(caught[0].message)
    assert "all weights of 2 of 2 quantized tensors (0.weight, 2.weight) round to 0" in told
    assert caught[0].filename == __file__
    opt = wrap(network())
    with pytest.warns(mq.HealthWarning, match=r"rounding moves the weights of \d\.weight by 4\d% .*beta is 1, the"):
        opt.finalize()
    assert opt.finalized


def test_a_hard_network_is_finalized_without_a_word():
    model = network()
    opt = wrap(model, anneal=mq.schedules.constant(1e4))
    assert max(tensor.gap for tensor in mq.health(opt).tensors) < 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error", mq.HealthWarning)
        opt.finalize()
        opt.finalize()
    assert mq.health(opt).problems == []


def test_rounded_weights_that_are_taken_over_have_no_gap():
    model = small_network()
    opt = wrap(model)
    with opt.quantized():
        best = copy.deepcopy(model.state_dict())
    train(model, opt, 2)
    model.load_state_dict(best)
    with warnings.catch_warnings():
        warnings.simplefilter("error", mq.HealthWarning)
        opt.finalize()


def test_a_run_and_its_evaluation_tell_of_a_collapsed_network_without_python_warnings(tmp_path, capsys):
    out = tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)
        changes = ["iterations=3", "rescale=false", "levels=ternary", "scale=", "width=4"]
        assert main(["train", DIGITS, *changes, "--quiet", "--out", str(out)]) == 0
    told = capsys.readouterr().err
    assert re.search(r"warning: all weights of \d of \d quantized tensors .* round to 0", told)
    assert "warning: rounding moves the weights of" in told
    assert main(["eval", str(out)]) == 0
    assert "\nwarning: all weights of" in capsys.readouterr().out
    assert main(["eval", str(out), "--json"]) == 0
    assert "round to 0" in json.loads(capsys.readouterr().out)["problems"][0]


# Batch-norm statistics.


def normed():
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, momentum=0.3), nn.Dropout(0.5), nn.BatchNorm1d(3))


@pytest.mark.parametrize("form", ["inputs", "tuples", "lists", "loader", "dictionaries"])
def test_recalibration_averages_the_statistics_of_the_batches(form):
    model = normed()
    inputs = [torch.randn(16, 5) * 2 + 1 for _ in range(4)]
    batches = {
        "inputs": iter(inputs),
        "tuples": [(x, torch.zeros(16)) for x in inputs],
        "lists": [[x, torch.zeros(16)] for x in inputs],
        "loader": torch.utils.data.DataLoader(torch.cat(inputs), batch_size=16),
        "dictionaries": [{"x": x} for x in inputs],
    }[form]
    forward = (lambda batch: model(batch["x"])) if form == "dictionaries" else None
    assert mq.recalibrate(model, batches, forward) == 2
    with torch.no_grad():
        hidden = [model[0](x) for x in inputs]
        torch.testing.assert_close(model[1].running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))
        torch.testing.assert_close(model[1].running_var, torch.stack([h.var(0) for h in hidden]).mean(0))
        after = [nn.functional.batch_norm(h, None, None, model[1].weight, model[1].bias, True) for h in hidden]
    torch.testing.assert_close(model[3].running_var, torch.stack([h.var(0) for h in after]).mean(0))  # no dropout


def test_recalibration_leaves_modes_and_momenta_as_they_were():
    model = normed()
    model[2].eval()
    model[3].eval()
    mq.recalibrate(model, [torch.randn(8, 5)])
    assert [module.training for module in model.modules()] == [True, True, True, False, False]
    assert [model[1].momentum, model[3].momentum] == [0.3, 0.1]
    assert int(model[1].num_batches_tracked) == 1
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("batches", [[torch.randn(8, 5), torch.randn(8, 4)], []])
def test_recalibration_that_fails_changes_nothing(batches):
    model = normed()
    model(torch.randn(8, 5))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((RuntimeError, ValueError), match=r"shapes cannot be multiplied|there are no batches"):
        mq.recalibrate(model, batches)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert [model[1].momentum, model[3].momentum] == [0.3, 0.1]


def test_a_model_without_batch_norm_has_nothing_to_recalibrate():
    assert mq.recalibrate(network(), []) == 0
    assert mq.recalibrate(nn.BatchNorm1d(3, track_running_stats=False), []) == 0


def test_recalibration_mends_the_statistics_that_rounding_leaves_behind():
    """The trap: after rounding, the hidden values are larger by far than the running statistics say."""
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32))
    opt = wrap(model)
    x = torch.randn(256, 64)
    for _ in range(200):
        model(x)  # statistics of soft weights, tanh(w) with |w| < 0.125
    opt.finalize()
    model.eval()
    assert model(x).std() > 3
    mq.recalibrate(model, [x])
    assert 0.9 < model(x).std() < 1.1
