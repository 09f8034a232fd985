"""Runs on a folder of images: a network remembers the classes and the normalisation that it was trained with."""

import json
import os

import pytest
import torch

from mirrorquant.cli import main
from mirrorquant.packing import read

image = pytest.importorskip("PIL.Image")

GREYS = {"apple": 20, "berry": 120, "cherry": 220}


def painted(folder, classes, splits=("train", "val"), count=8):
    """Grey images, darker or brighter by class."""
    generator = torch.Generator().manual_seed(0)
    for split in splits:
        for name, grey in classes.items():
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = (grey + torch.randint(-15, 16, (8, 8, 3), generator=generator)).clamp(0, 255).byte().numpy()
                image.fromarray(pixels).save(folder / split / name / f"{i}.png")


@pytest.fixture
def trained(tmp_path):
    """A folder of images, and a run on them."""
    images, run = tmp_path / "images", tmp_path / "run"
    painted(images, GREYS)
    keys = [f"data=folder:{images}:8", "augment=none", "iterations=60", "batch_size=12"]
    keys += ["eval_every=20", "checkpoint_every=20", "lr=0.01"]
    assert main(["train", "digits/digitsnet/binary/md-tanh-s", *keys, "--out", str(run), "--quiet"]) == 0
    return images, run


def accuracy(what, capsys, *options):
    capsys.readouterr()
    assert main(["eval", str(what), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)["accuracy"]


def test_classes_that_changed_their_place_are_refused(trained, capsys):
    images, run = trained
    assert main(["pack", str(run)]) == 0
    assert accuracy(run, capsys) > 90
    for split in ("train", "val"):
        os.rename(images / split / "apple", images / split / "zapple")
    told = "trained on other classes: class 0 was apple, but now it is berry"
    for what in (run, run / "packed.safetensors"):
        options = [] if what == run else ["--data", f"folder:{images}:8"]
        assert main(["eval", str(what), *options]) == bool(what == run)
        assert told in capsys.readouterr().err
    (run / "summary.json").unlink()
    assert main(["train", "--resume", str(run), "--quiet"]) == 1
    assert "began with other classes: class 0 was apple, but now it is berry" in capsys.readouterr().err


def test_images_are_normalised_as_in_training(trained, capsys):
    images, run = trained
    before = accuracy(run, capsys)
    painted(images, dict.fromkeys(GREYS, 0), ("train",))
    assert accuracy(run, capsys) == before > 90
    assert main(["pack", str(run)]) == 0
    about = read(run / "packed.safetensors").about
    assert about["names"] == list(GREYS)
    assert 0.4 < about["mean"][0] < 0.6
    assert accuracy(run / "packed.safetensors", capsys, "--data", f"folder:{images}:8") == before


def test_more_images_than_in_training_are_noticed(trained, capsys):
    images, run = trained
    painted(images, GREYS, ("train",), 9)
    assert accuracy(run, capsys) > 90
    assert main(["eval", str(run)]) == 0
    assert "the run began with 24 training images, but now there are 27" in capsys.readouterr().err


def test_names_of_classes_may_be_any_bytes(tmp_path, capsys):
    images, run = tmp_path / "images", tmp_path / "run"
    painted(images, GREYS)
    try:
        for split in ("train", "val"):
            os.rename(os.fsencode(images / split / "berry"), os.path.join(os.fsencode(images / split), b"caf\xe9"))
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    keys = [f"data=folder:{images}:8", "batch_size=12", "iterations=4", "eval_every=2"]
    assert main(["train", *keys, "--out", str(run), "--quiet"]) == 0
    assert main(["pack", str(run)]) == 0
    accuracy(run, capsys)
    assert os.fsencode(read(run / "packed.safetensors").about["names"][1]) == b"caf\xe9"
