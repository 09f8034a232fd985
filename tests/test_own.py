"""Custom methods and schedules, named by their module on the command line, and their runs afterwards."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from test_train import SHORT

from mirrorquant import models
from mirrorquant.cli import main
from mirrorquant.report import RunRecord, labels
from mirrorquant.train import Config, ConfigError, Run, build, recipes

DIGITS = "digits/digitsnet/binary/md-tanh-s"
TINY = [*SHORT, "iterations=6", "width=4", "eval_every=3"]
CODE = '''
from functools import partial
import mirrorquant as mq

class Clip(mq.Method):
    """Projects by clipping."""
    label = "Clipping"
    def project(self, latent, beta):
        return (beta * latent).clamp(self.levels[0], self.levels[-1])

class Plain(Clip):
    label = ""

hard = partial(mq.methods.MD, mirror=mq.mirror_from(lambda x: x / (1 + x.abs()), (-1, 1)))

class Hookless(mq.Method): ...
def forgets(levels): return mq.methods.MD(mirror=mq.mirror_from(lambda x: x / (1 + x.abs()), (-1, 1)))

class Sawtooth:
    def __init__(self, start, every, end=0.5):
        self.start, self.every, self.end = start, every, end
    def __call__(self, step):
        return self.start * (1 + step % self.every)

def squares(steps, cap):
    return lambda step: min(1 + step * step / steps, cap)

def needs_more(start, height): ...
def gives_text(start): return lambda step: "high"
def falls(): return lambda step: -1.0
def no_schedule(): return 3
number = 3
'''


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "my_ideas.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_ideas", None)


def test_a_method_of_ones_own_trains_resumes_and_is_evaluated_and_packed(capsys):
    assert main(["train", *TINY, "method=my_ideas:Clip", "--out", "run", "--quiet", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["config"]["method"] == summary["overrides"]["method"] == "my_ideas:Clip"
    sys.modules.pop("my_ideas")
    assert main(["train", "--resume", "run", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["curve"] == summary["curve"]
    assert "my_ideas" in sys.modules
    assert main(["eval", "run"]) == 0
    assert "all 5 quantized tensors are exactly on their binary levels" in capsys.readouterr().out
    assert main(["pack", "run"]) == 0
    assert main(["eval", "run/packed.safetensors"]) == 0


@pytest.mark.parametrize("name", ["Clip", "Plain", "hard"])
def test_a_method_may_be_a_class_or_a_function_that_makes_one(name):
    config = Config.from_recipe(DIGITS, [f"method=my_ideas:{name}", "levels=binary", "scale=channel-learnt"])
    assert (config.build_method().levels, config.build_method().scale.per) == ((-1, 1), "channel")


def test_reports_show_the_label_or_the_name_of_a_class_and_import_nothing():
    assert labels.method("my_ideas:Clip") == "Clip"
    assert "my_ideas" not in sys.modules
    config = Config.from_recipe(DIGITS, ["method=my_ideas:Clip", "beta_schedule=my_ideas:squares"])
    assert (labels.method("my_ideas:Clip"), labels.method("my_ideas:Plain")) == ("Clipping", "Plain")
    sys.modules.pop("my_ideas")
    summary = {"recipe": DIGITS, "config": config.record(), "overrides": config.overrides, "loss_curve": [[1, 2.0]]}
    record = RunRecord.of(summary)
    assert (record.name, record.series("train", "beta")) == ("my_ideas:Clip", {})
    assert "my_ideas" not in sys.modules


def test_a_comparison_takes_methods_of_ones_own_and_those_without_a_recipe(capsys):
    command = ["compare", *TINY, "--methods", "bc,my_ideas:Clip,md-tanh-bounded", "--quiet", "--out", "all"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert re.findall(r"^(bc|my_ideas:Clip|md-tanh-bounded) ", told, re.M) == ["bc", "my_ideas:Clip", "md-tanh-bounded"]
    assert RunRecord.read(Path("all/my_ideas-Clip-seed0")).config["recipe"] == DIGITS
    assert main([*command, "--resume"]) == 0


def test_schedules_of_ones_own_get_the_terms_that_they_take(capsys):
    own = ["lr_schedule=my_ideas:Sawtooth", "lr_interval=2", "beta_schedule=my_ideas:squares", "beta_cap=4"]
    config = Config.from_recipe(DIGITS, [*TINY, *own])
    assert [config.build_lr()(step) for step in range(3)] == [0.01, 0.02, 0.01]
    assert config.build_lr().end == 0.0
    assert [config.build_beta(9)(step) for step in (0, 3, 6)] == [1, 2.5, 4]
    assert config.idle_overrides() == {}
    assert main(["train", *TINY, *own, "log_every=1", "--out", "run", "--quiet", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["train", "--resume", "run", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["curve"] == first["curve"]
    lines = [line for line in Run.resume("run", quiet=True).folder.metrics() if line["kind"] == "train"]
    assert [line["beta"] for line in lines] == [config.build_beta(1)(step) for step in range(1, 7)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "method=my_ideas:Clipp",
            "Method 'my_ideas:Clipp': 'Clipp' is not a function in 'my_ideas'. Did you mean 'Clip'",
        ),
        ("method=my_idea:Clip", "there is no module 'my_idea'; install it, or put its folder on PYTHONPATH"),
        ("method=my_ideas:number", "'number' is not a function"),
        ("method=my_ideas:Hookless", r"has no projection: define project\(self, latent, beta\)"),
        ("method=my_ideas:forgets", r"Levels\(-1.0, 1.0\), scale None: pass on what it is called with"),
        ("lr_schedule=my_ideas:needs_more", "cannot be made: missing a required argument: 'height'; .* start, scale"),
        ("lr_schedule=my_ideas:no_schedule", "makes a int, expected a function of the step"),
        ("lr_schedule=my_ideas:gives_text", "the learning rate is not a number"),
        ("lr_schedule=my_ideas:falls", "the learning rate reaches -1 in 800 iterations, but it must stay from 0"),
        ("lr_schedule=cosin", "must be one of constant, .*, MODULE:CLASS"),
    ],
)
def test_what_cannot_be_used_is_told_with_the_reason(override, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_recipe(DIGITS, [override])


def test_a_function_that_makes_no_method_is_told(monkeypatch):
    monkeypatch.setattr("mirrorquant.models.digitsnet", lambda levels: 3)
    with pytest.raises(ConfigError, match=r"makes a int, expected a method: name a subclass of mirrorquant\.Method"):
        Config.from_recipe(DIGITS, ["method=mirrorquant.models:digitsnet"])


def test_every_method_can_be_compared_on_every_task():
    """By its own recipe, or by that of MD-tanh-S."""
    from mirrorquant.cli.runs import _recipe

    for task in ("digits/digitsnet", "cifar10/mobilenetv2"):
        for method in ("pq", "md-tanh-bounded", "my_ideas:Clip"):
            name, overrides = _recipe(task, "binary", method)
            assert name in recipes.names()
            assert Config.from_recipe(name, overrides).method == method


def test_a_checkpoint_without_counters_of_batch_norm_is_a_start(tmp_path):
    """As older public ones are."""
    model = models.build("digitsnet", 10, width=4, affine=True)
    state = {name: tensor for name, tensor in model.state_dict().items() if "num_batches" not in name}
    torch.save(state, tmp_path / "old.pth")
    other = models.build("digitsnet", 10, width=4, affine=True)
    build.start_from(str(tmp_path / "old.pth"), other)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in state.items())


def test_a_comparison_by_epochs_resumes(tmp_path):
    command = [
        "compare",
        "--methods",
        "bc",
        "epochs=2",
        "eval_every=0",
        "width=4",
        "--quiet",
        "--out",
        str(tmp_path / "c"),
    ]
    assert main(command) == 0
    assert main([*command, "--resume"]) == 0
    with pytest.raises(ConfigError, match="iterations and epochs both say how long training is"):
        Config.from_recipe("digits/digitsnet/ref", ["iterations=10", "epochs=2"])
