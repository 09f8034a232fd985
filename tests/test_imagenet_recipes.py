"""Every recipe of the paper's ImageNet tables trains, on a few small synthetic images of 1,000 classes."""

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from mirrorquant.cli import main
from mirrorquant.train import Config, recipes

SMALL = ["data=synthetic:3x64x64:1000", "batch_size=8", "iterations=5", "device=cpu", "threads=1"]
FLOATS = ("imagenet/resnet18/ref", "imagenet/resnet34/ref")
REPRESENTATIVE = [
    "imagenet/resnet18/binary/md-tanh-s",
    "imagenet/resnet18/binary/md-tanh-s-full-scaled-pretrained",
    "imagenet/bireal18/binary/md-tanh-s-kl",
]
OTHERS = [n for n in recipes.names() if n.startswith("imagenet/") and n not in (*FLOATS, *REPRESENTATIVE)]

Trained = tuple[str, dict[str, Any]]
"""What a run printed, and its summary."""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Trains a recipe once; the float networks that it starts from, or imitates, are trained before it."""
    folder, done = tmp_path_factory.mktemp("runs"), dict[str, Trained]()

    def trained(name: str) -> Trained:
        if name not in done:
            config, out = Config.from_recipe(name), folder / name.replace("/", "-")
            needed = [f"{key}={needed_run(config[key])}" for key in ("init", "teacher") if config[key]]
            with redirect_stdout(StringIO()) as text:
                assert main(["train", name, "--out", str(out), "--quiet", *SMALL, *needed]) == 0
            done[name] = text.getvalue(), json.loads((out / "summary.json").read_text())
        return done[name]

    def needed_run(path: str) -> Path:
        """The small run in place of the recipe's ``runs/NAME-seed0``."""
        run = Path(path).name.removesuffix("-seed0")
        trained(next(name for name in FLOATS if name.replace("/", "-") == run))
        return folder / run

    return trained


@pytest.mark.parametrize("name", [*FLOATS, *REPRESENTATIVE, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_a_recipe_trains_and_shows_the_papers_figure(name: str, train: Callable[[str], Trained]) -> None:
    text, summary = train(name)
    recipe = recipes.get(name)
    paper, top5 = recipe.get("paper"), recipe.get("paper_top5")
    assert (summary["paper"], summary["paper_top5"]) == (paper, top5)
    if name == "imagenet/resnet34/ref":  # the teacher, which is in no table
        assert "the paper" not in text
    else:
        assert f"\nthe paper has {paper:.2f} % (top-5 {top5:.2f} %) for the recipe as it is\n" in text
    assert 0 <= summary["test_accuracy"] <= summary["test_top5"] <= 100
    assert summary["loss_curve"][-1][0] == summary["best_step"] == 5
    binary = {row["name"] for row in summary["layers"] if row["bits"] == 1}
    assert bool(binary) == (recipe["method"] != "ref")
    assert not any(row["off_levels"] for row in summary["layers"])


def test_an_unchanged_recipe_is_compared_with_the_paper_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = {"data": "digits", "model": "digitsnet", "method": "ref", "iterations": 5, "paper": 98.25}
    monkeypatch.setattr(recipes, "_recipes", lambda: {"digits/digitsnet/toy": toy})
    for override, ending in ("seed=1", "\n"), ("lr=0.01", " for the recipe as it is\n"):
        assert main(["train", "digits/digitsnet/toy", "device=cpu", override, "--out", str(tmp_path / override)]) == 0
        assert f"\nthe paper has 98.25 %{ending}" in capsys.readouterr().out


def test_the_list_of_recipes_has_both_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "imagenet/resnet"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["imagenet/resnet18/binary/md-tanh-s", "paper 65.92 % (top-5 86.29 %)"] in rows
    assert ["imagenet/resnet34/ref"] in rows
