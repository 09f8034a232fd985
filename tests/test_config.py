"""Configurations: one place per key, versions, and what may change when a run is resumed."""

import json
import math
from dataclasses import fields, replace

import pytest
import torch
from test_train import config, end_of, signalled

import mirrorquant as mq
from mirrorquant import schedules
from mirrorquant.cli import main
from mirrorquant.report import RunRecord
from mirrorquant.train import Best, Config, ConfigError, Interrupted, Run, RunFolder, build, recipes
from mirrorquant.train.config import KEYS, rescaled, upgrade
from mirrorquant.train.metrics import read_metrics


def test_every_field_is_a_key_with_help_and_a_valid_default():
    assert [each.name for each in fields(Config)] == list(KEYS)
    for name, key in KEYS.items():
        assert key.help
        key.check(name, key.default)
        assert Config()[name] == key.default


def test_values_go_through_the_flat_form_and_the_file_unchanged(tmp_path):
    setting = config("skip=fc", "compile=false", "lr=0.0123", "levels=-1,0,2")
    assert Config(**upgrade(setting.record())) == setting
    path = tmp_path / "config.json"
    path.write_text(setting.text())
    assert Config.load(path) == setting
    path.write_text(json.dumps(json.loads(setting.text())))  # other whitespace is no other configuration
    assert Config.load(path) == setting


def test_the_identity_is_the_experiment_without_machine_logging_and_origin():
    setting = config()
    same = ["device=cpu", "data_root=x", "threads=2", "engine=plain", "log_every=7", "histogram_every=3"]
    assert setting.moved([*same, "checkpoint_every=9"]).identity == setting.identity
    changes = ["data=cifar10", "model=vgg16", "width=4", "method=bc", "skip=fc", "lr=0.5", "warmup=1", "beta_end=2"]
    changes += ["finalize_at=0.5", "label_smoothing=0.1", "teacher=x", "seed=9", "eval_every=9", "precision=bfloat16"]
    assert len({setting.identity, *(config(change).identity for change in changes)}) == 1 + len(changes)
    assert replace(setting, recipe="x", paper=1.0, note="x", overrides={}).identity == setting.identity


def test_method_names_of_version_1_are_those_of_today():
    old = {"method": "md-tanh-s", "lr": 0.1}
    assert upgrade(old) == old
    assert upgrade({**old, "version": 2, "method": "pmf"}) == {**old, "method": "pmf"}


def test_precision_is_stored_as_it_was_chosen(tmp_path):
    Run(config("iterations=2"), tmp_path / "run", quiet=True).train()
    assert RunFolder(tmp_path / "run").config()["precision"] == ("bfloat16" if torch.cuda.is_available() else "float32")


def test_a_resumed_run_may_move_and_log_otherwise_and_ends_the_same(tmp_path):
    Run(config(), tmp_path / "whole", quiet=True).train()
    with pytest.raises(Interrupted):
        signalled(Run(config(), tmp_path / "cut", quiet=True), 16).train()
    moved = ["device=cpu", f"data_root={tmp_path}", "log_every=4", "checkpoint_every=50", "engine=plain"]
    summary = Run.resume(tmp_path / "cut", moved, quiet=True).train()
    (whole, *_), (cut, *_) = end_of(tmp_path / "whole"), end_of(tmp_path / "cut")
    tensors = [[leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()] for leaves in (whole, cut)]
    assert len(tensors[0]) == len(tensors[1]) > 20
    assert all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))
    assert summary["overrides"]["log_every"] == 4
    assert RunFolder(tmp_path / "cut").config()["data_root"] == str(tmp_path)


def test_the_first_mean_loss_after_another_log_every_counts_its_own_iterations(tmp_path):
    Run(config("iterations=12", "log_every=1"), tmp_path / "each", quiet=True).train()
    each = {r["step"]: r["loss"] for r in read_metrics(tmp_path / "each" / "metrics.jsonl") if r["kind"] == "train"}
    with pytest.raises(Interrupted):
        signalled(Run(config("iterations=12", "log_every=5"), tmp_path / "cut", quiet=True), 6).train()
    rest = Run.resume(tmp_path / "cut", ["log_every=4"], quiet=True).train()
    steps = dict(map(tuple, rest["loss_curve"]))
    assert list(steps) == [5, 8, 12]
    assert steps[8] == pytest.approx(sum(each[k] for k in (6, 7, 8)) / 3, abs=1e-4)


@pytest.mark.parametrize("change", ["lr=0.1", "seed=2", "iterations=50", "method=bc", "teacher=x", "recipe=x", "lrr=1"])
def test_a_resumed_run_may_change_nothing_else(tmp_path, change, capsys):
    Run(config("iterations=2"), tmp_path / "run", quiet=True).train()
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=change.partition("=")[0]):
        Run.resume(tmp_path / "run", [change], quiet=True)
    assert main(["train", "--resume", str(tmp_path / "run"), change]) == 1
    assert change.partition("=")[0] in capsys.readouterr().err
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_an_augmentation_out_of_range_is_named(tmp_path, capsys):
    assert main(["train", "mixup=0.001", "--out", str(tmp_path / "run")]) == 1
    assert "mixup is 0.001, expected 0 for none, or 0.01 to 100" in capsys.readouterr().err


def test_the_command_line_resumes_with_other_logging(tmp_path, capsys):
    Run(config("iterations=2"), tmp_path / "run", quiet=True).train()
    assert main(["train", "--resume", str(tmp_path / "run"), "log_every=3", "threads=1", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["log_every"] == 3


def test_files_of_a_run_open_with_torch_alone_and_with_the_library(tmp_path):
    summary = mq.train.Run(config(), tmp_path / "run", quiet=True).train()
    folder = mq.train.RunFolder(str(tmp_path / "run"))
    assert folder.summary() == json.loads(json.dumps(summary))
    assert [line["step"] for line in folder.metrics() if line["kind"] == "val"] == [10, 20, 30, 40]
    best = Best.load(folder.path)
    assert best.off_levels == []
    assert best.model(torch.zeros(1, *best.images["shape"])).shape == (1, 10)
    for name in ("checkpoint.pt", "checkpoint.pt.previous", "best.pt"):
        state = torch.load(tmp_path / "run" / name, weights_only=True)
        assert all(isinstance(tensor, torch.Tensor) for tensor in state["model"].values())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["lr_schedule=cosine", "lr_end=0.001"], schedules.cosine(0.01, end=0.001, steps=40)),
        (["lr_schedule=linear"], schedules.linear(0.01, end=0.0, steps=40)),
        (["lr_schedule=constant"], schedules.constant(0.01)),
        (["lr_schedule=cosine", "warmup=8"], schedules.warmup(schedules.cosine(0.01, end=0.0, steps=32), 8)),
        (["lr_interval=10", "warmup=5"], schedules.warmup(schedules.step(0.01, scale=0.1, every=10), 5)),
    ],
)
def test_the_learning_rate_follows_its_schedule(tmp_path, overrides, expected):
    run, used = Run(config("width=4", *overrides), tmp_path / "run", quiet=True), []
    run.task.opt.register_step_pre_hook(lambda opt, *_: used.append(opt.param_groups[0]["lr"]))
    run.train()
    assert used == [expected(k) for k in range(40)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine", schedules.cosine(1.0, end=100.0, steps=40, log=True)),
        ("linear", schedules.linear(1.0, end=100.0, steps=40)),
    ],
)
def test_beta_follows_its_schedule(tmp_path, name, expected):
    settings = config("width=4", f"beta_schedule={name}", "beta_end=100", "log_every=1")
    Run(settings, tmp_path / "run", quiet=True).train()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["beta"] for row in rows if row["kind"] == "train"] == [expected(k) for k in range(1, 41)]


def test_the_choices_of_schedules_are_those_that_can_be_built_from_the_keys():
    """A schedule that is added needs no change here, unless it needs a term that no key gives."""
    for key, others in (("lr_schedule", {"ramp", "until"}), ("beta_schedule", {"ramp"})):
        *choices, own = KEYS[key].choices
        assert (set(choices), own) == (set(schedules.names()) - others, "MODULE:CLASS")
        for name in choices:
            setting = config(f"{key}={name}")
            assert type(setting.build_lr() if key == "lr_schedule" else setting.build_beta(1)).__name__ == name


@pytest.mark.parametrize("iterations", [1, 6, 120, 500, 3000, 250_000])
def test_other_iterations_keep_the_ends_of_every_recipes_schedules(iterations):
    for name in recipes.names():
        recipe, other = Config.from_recipe(name), Config.from_recipe(name, [f"iterations={iterations}"])
        lr, beta, end = other.build_lr(), other.build_beta(1)(iterations), recipe.build_beta(1)(recipe.iterations)
        if recipe.build_method().uses_beta:
            factor = max(recipe.beta_scale, other.beta_scale)
            assert math.log(beta) == pytest.approx(math.log(end), abs=math.log(factor)), name
        if recipe.method == "pq":
            assert beta == pytest.approx(end), name
        if iterations >= 100:
            close = 0.02 * recipe.lr if recipe.lr_schedule == "cosine" else 0.0  # its steps are of another size
            assert lr(iterations // 2) == pytest.approx(recipe.build_lr()(recipe.iterations // 2), 0, close), name
            assert lr(iterations - 1) == pytest.approx(recipe.build_lr()(recipe.iterations - 1), 0, close), name


DIGITS = "digits/digitsnet/binary/md-tanh-s"


@pytest.mark.parametrize("levels", ["binary", "ternary"])
def test_rounding_changes_nothing_at_the_end_of_a_short_run(tmp_path, levels):
    changes = ["iterations=120", f"levels={levels}", "width=8", "histogram_every=0"]
    summary = Run(Config.from_recipe(DIGITS, changes), tmp_path / "run", quiet=True).train()
    assert summary["test_accuracy_last"] == pytest.approx(summary["test_accuracy_soft"], abs=1)


def test_what_is_given_beside_other_iterations_stays_as_it_is():
    recipe = Config.from_recipe(DIGITS)
    stretched = Config.from_recipe(DIGITS, ["iterations=120"])
    assert (stretched.beta_interval, stretched.lr_interval) == (1, 45)
    assert stretched.overrides == {"iterations": 120}
    for change in ("beta_interval=7", "beta_scale=1.3", "lr_interval=9", "eval_every=13"):
        key, value = change.split("=")
        given = Config.from_recipe(DIGITS, ["iterations=120", change])
        assert given[key] == float(value)
        assert given.overrides == {"iterations": 120, key: float(value)}
    assert Config.from_recipe(DIGITS, ["iterations=120", "beta_interval=7"]).beta_scale == recipe.beta_scale
    pinned = Config.from_recipe(DIGITS, ["iterations=120", "rescale=false"])
    assert replace(pinned, iterations=800, rescale=True, overrides={}) == recipe
    assert Config.from_recipe(DIGITS, ["iterations=800"]).record() == {
        **recipe.record(),
        "overrides": {"iterations": 800},
    }


def test_a_recipe_can_pin_its_schedules_and_a_warmup_stays_shorter_than_the_run():
    recipe = {"iterations": 100, "warmup": 10, "lr_interval": 40}
    assert rescaled(recipe, {"iterations": 50}) == {"iterations": 100, "warmup": 5, "lr_interval": 20}
    assert rescaled(recipe, {"iterations": 1}) == {"iterations": 100, "warmup": 0, "lr_interval": 1}
    pinned = {**recipe, "rescale": False}
    assert rescaled(pinned, {"iterations": 50}) == pinned
    assert rescaled(pinned, {"iterations": 50, "rescale": True})["warmup"] == 5


def test_a_stored_configuration_is_used_as_it_is_and_its_changes_are_what_was_typed(tmp_path):
    summary = Run(config("width=4", "iterations=6"), tmp_path / "run", quiet=True).train()
    stored = RunFolder(tmp_path / "run").config()
    assert (stored.beta_interval, stored.beta_scale) == (1, config("iterations=6").beta_scale)
    for record in (RunRecord.of(summary), RunRecord.read(tmp_path / "run")):
        assert record.changes == {"iterations": 6, "batch_size": 32, "eval_every": 10, "scale": "", "width": 4}
    path = RunRecord.of(summary).write_result(tmp_path)
    assert path.name == f"{DIGITS.replace('/', '-')}-seed0-iterations-6-batch_size-32-eval_every-10-scale--width-4.json"


def test_an_old_run_of_other_iterations_says_that_its_schedules_were_not_stretched():
    record = RunRecord.of(
        {"recipe": DIGITS, "config": {**recipes.get(DIGITS), "iterations": 80}, "overrides": {"iterations": 80}}
    )
    assert record.changes == {"iterations": 80, "lr_interval": 300, "beta_interval": 5, "beta_scale": 1.3}


@pytest.mark.parametrize(
    ("overrides", "kind", "options"),
    [
        (["optimizer=adamw", "weight_decay=0.1"], torch.optim.AdamW, {"weight_decay": 0.1}),
        (["optimizer=sgd", "nesterov=true"], torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_optimizers_are_built_as_configured_and_train(tmp_path, overrides, kind, options):
    run = Run(config("width=4", "iterations=4", *overrides), tmp_path / "run", quiet=True)
    assert type(run.task.opt.base) is kind
    assert options.items() <= run.task.opt.base.param_groups[0].items()
    run.train()


@pytest.mark.parametrize(
    ("overrides", "idle"),
    [
        (["lr_schedule=cosine", "lr_scale=0.5"], {"lr_scale": "lr_schedule is cosine"}),
        (["lr_end=0.5"], {"lr_end": "lr_schedule is step"}),
        (["temperature=2"], {"temperature": "teacher is not set"}),
        (["teacher=runs/t", "hard_share=1", "temperature=2"], {"temperature": "hard_share is 1.0"}),
        (["teacher=runs/t", "hard_share=0", "label_smoothing=0.1"], {"label_smoothing": "hard_share is 0.0"}),
        (["teacher=runs/t", "label_smoothing=0.1"], {}),
        (["decay_norms=false"], {"decay_norms": "weight_decay is not set"}),
        (["weight_decay=0.1", "decay_norms=false"], {}),
        (["beta_end=2"], {"beta_end": "beta_schedule is geometric"}),
        (["method=bc", "beta_schedule=cosine"], {"beta_schedule": "method is bc"}),
        (["nesterov=true"], {"nesterov": "optimizer is adam"}),
        (["optimizer=sgd", "momentum=0.5", "warmup=3", "logit_scale=2"], {}),
    ],
)
def test_overrides_without_effect_are_found(overrides, idle):
    assert config(*overrides).idle_overrides() == idle


def test_a_nesterov_momentum_of_zero_is_an_error_of_the_configuration():
    setting = config("optimizer=sgd", "nesterov=true", "momentum=0")
    with pytest.raises(ConfigError, match="Nesterov"):
        build.optimizer(setting, build.model(setting, 10, 1), 1)
