"""Training on image files as they are needed: the same as ever, but for the supply of images."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from PIL import Image

from mirrorquant.cli import main
from mirrorquant.data import streamed
from mirrorquant.train import Config, ConfigError, Interrupted, Run, RunError, build
from mirrorquant.train.distributed import World
from mirrorquant.train.engine import PlainEngine
from mirrorquant.train.graph import GraphEngine

DIGITS = "digits/digitsnet/binary/md-tanh-s"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of bright and dark pictures, of many sizes."""
    root, generator = tmp_path_factory.mktemp("photos"), torch.Generator().manual_seed(0)
    for split, count in (("train", 24), ("val", 8)):
        for name, base in (("bright", 140), ("dark", 20)):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                height, width = torch.randint(30, 60, (2,), generator=generator).tolist()
                noise = torch.randint(base, base + 90, (height, width, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(noise.numpy()).save(root / split / name / f"{number}.jpg", quality=95)
    return root


def settings(photos, *overrides):
    common = ["device=cpu", f"data=photos:{photos}:16", "batch_size=8", "width=4", "scale=", "workers=1"]
    short = ["iterations=16", "eval_every=0", "log_every=2", "checkpoint_every=4", "histogram_every=0", "keep=last"]
    return Config.from_recipe(DIGITS, [*common, *short, *overrides])


def test_a_stopped_run_resumes_in_the_middle_of_an_epoch(photos, tmp_path):
    whole = Run(settings(photos), tmp_path / "whole", quiet=True)
    assert whole.config.eval_every == 6
    expected = whole.train()
    run = Run(settings(photos), tmp_path / "run", quiet=True)
    advance = run.advance

    def advance_and_stop():
        advance()
        if run.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    run.advance = advance_and_stop
    with pytest.raises(Interrupted):
        run.train()
    resumed = Run.resume(tmp_path / "run", ["workers=0"], quiet=True)
    assert resumed.train()["loss_curve"] == expected["loss_curve"]
    for name, tensor in whole.task.model.state_dict().items():
        assert torch.equal(tensor, resumed.task.model.state_dict()[name]), name


def test_a_run_does_not_go_on_with_fewer_images_and_processes_agree_on_them(photos, tmp_path, monkeypatch):
    shutil.copytree(photos, tmp_path / "photos")
    run = Run(settings(tmp_path / "photos", "iterations=12"), tmp_path / "run", quiet=True)
    assert run.config.images == 48
    run.train()
    (tmp_path / "photos" / "train" / "dark" / "7.jpg").unlink()
    with pytest.raises(RunError, match="began with 48 training images, but now there are 47: restore them, or start"):
        Run.resume(tmp_path / "run", quiet=True)
    monkeypatch.setattr(World, "largest", lambda self, value, device: max(value, 49) if value > 0 else value)
    with pytest.raises(RunError, match="processes see different numbers of training images, 47 to 49"):
        Run(settings(tmp_path / "photos"), tmp_path / "other", quiet=True)


def test_workers_of_evaluation_are_those_of_the_configuration(photos, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(streamed, "worker_count", lambda workers, **_: asked.append(workers) or 0)
    task = build.task(settings(photos, "workers=3"))
    task.evaluate(task.data.val)
    task.close()
    assert asked == [3, 3]


def test_a_corrupt_image_of_the_validation_set_is_named_once(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "val" / "dark" / "3.jpg").write_bytes(b"")
    run = Run(settings(tmp_path / "photos"), tmp_path / "run", quiet=True)
    summary = run.train()
    named = [message for message in run.messages if message.startswith("skipped")]
    assert len(named) == 1
    assert "val/dark/3.jpg cannot be read as an image" in named[0]
    assert (summary["test_accuracy"] * 15 / 100) == pytest.approx(round(summary["test_accuracy"] * 15 / 100))


def test_a_resumed_run_may_accumulate_and_says_what_batch_norm_sees(photos, tmp_path):
    run = Run(settings(photos, "iterations=8"), tmp_path / "run", quiet=True)
    advance = run.advance
    run.advance = lambda: (advance(), run.step == 5 and os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted):
        run.train()
    resumed = Run.resume(tmp_path / "run", ["accumulate=2"], quiet=True)
    resumed.train()
    assert "batch norm now sees 4 images at a time instead of 8; accumulate= can change that" in resumed.messages


def test_the_graph_engine_gets_the_same_batches(photos):
    steps = []
    for kind in (PlainEngine, GraphEngine):
        task = build.task(settings(photos, "optimizer=sgd", "lr=0.01", "beta_schedule=constant", "accumulate=2"))
        engine = kind(task) if kind is PlainEngine else kind(task, print)
        for k in (0, 1, 2, 7, 8):
            engine.step(k)
        engine.sync()
        steps.append({name: task.opt.latent(p).clone() for name, p in task.model.named_parameters()})
        task.close()
    for name, tensor in steps[0].items():
        torch.testing.assert_close(steps[1][name], tensor, rtol=1e-4, atol=1e-6)


def test_waiting_for_images_is_recorded_and_reported(photos, tmp_path):
    run = Run(settings(photos, "workers=0"), tmp_path / "run", quiet=True)  # decodes while training waits
    slow = run.task.loader._batches
    make = type(slow).__getitem__

    class Slow(type(slow)):
        def __getitem__(self, k):
            time.sleep(0.05)
            return make(self, k)

    slow.__class__ = Slow
    run.train()
    told = [message for message in run.messages if "waits for images" in message]
    assert len(told) == 1
    assert told[0].endswith("raise workers, or set cache=FOLDER, so that images are decoded only once")
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert all(0 < row["waiting"] <= 1 for row in rows if row["kind"] == "train")


def test_a_corrupt_image_is_named_and_training_goes_on(photos, tmp_path, capfd):
    copy = tmp_path / "photos"
    for path in photos.rglob("*.jpg"):
        target = copy / path.relative_to(photos)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    broken = copy / "train" / "dark" / "7.jpg"
    broken.write_bytes(b"no image")
    run = Run(settings(copy), tmp_path / "run", quiet=True)
    run.train()
    assert [message for message in run.messages if str(broken) in message and message.startswith("skipped: ")]
    assert f"skipped: {broken}" in capfd.readouterr().err  # even though it is quiet


def test_the_cache_is_for_streamed_images(photos, tmp_path):
    run = Run(settings(photos, f"cache={tmp_path / 'cache'}", "image_size=12"), tmp_path / "run", quiet=True)
    assert run.task.data.shape == (3, 12, 12)
    assert run.train()["best_step"] == 16
    with pytest.raises(ConfigError, match=r"cache is .*, but the images of digits are in memory: leave it out"):
        build.task(Config.from_recipe(DIGITS, [f"cache={tmp_path / 'cache'}"]))


def test_a_run_on_streamed_images_is_evaluated(photos, tmp_path, capsys):
    Run(settings(photos), tmp_path / "run", quiet=True).train()
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert " test: " in capsys.readouterr().out


def test_a_network_is_evaluated_at_the_size_on_which_it_was_trained(photos, tmp_path, capsys):
    summary = Run(settings(photos, "image_size=12"), tmp_path / "run", quiet=True).train()
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(summary["test_accuracy"])
    assert main(["pack", str(tmp_path / "run"), "--out", str(tmp_path / "net.safetensors"), "--json"]) == 0
    capsys.readouterr()
    given = ["--data", f"photos:{photos}:16", "--json"]
    assert main(["eval", str(tmp_path / "net.safetensors"), *given]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(summary["test_accuracy"])


def test_a_signal_to_all_processes_ends_in_a_checkpoint(photos, tmp_path):
    """As ``timeout`` and batch systems send it."""
    command = [
        sys.executable,
        "-m",
        "mirrorquant",
        "train",
        DIGITS,
        f"data=photos:{photos}:16",
        "device=cpu",
        "width=4",
    ]
    command += ["iterations=100000", "batch_size=8", "workers=1", "log_every=2", "eval_every=100000", "scale="]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")], start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 143, said
    assert "stopped by SIGTERM after iteration" in said
    assert "Traceback" not in said
    assert (tmp_path / "run" / "checkpoint.pt").exists()
