"""A run as it was recorded: the one reader of run folders and of result files."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mirrorquant import _files
from mirrorquant.errors import MirrorquantError
from mirrorquant.report.labels import known_method
from mirrorquant.schedules import Schedule
from mirrorquant.train import recipes
from mirrorquant.train.config import KEYS, Config, ConfigError, rescaled, upgrade
from mirrorquant.train.metrics import read_metrics

__all__ = ["RecordError", "RunRecord", "file_name", "read_results"]

_EXPERIMENT = {key for key, facts in KEYS.items() if facts.section not in ("machine", "logging", "origin")}
_EXPERIMENT -= {"seed", "channels_last", "compile", "deterministic"}
_LONGEST_NAME = 200  # of at most 255 bytes
Lines = dict[int, dict[str, Any]]


class RecordError(MirrorquantError, ValueError):
    """A file of a run is missing, damaged or incomplete; the message names it."""


@dataclass(frozen=True)
class RunRecord:
    """A run, possibly still in progress; ``train``, ``val`` and ``weights`` are its metrics by step.

    >>> record = RunRecord.of({"recipe": "cifar10/vgg16/binary/pq-star", "config": {"method": "pq"}})
    >>> record.name
    'pq-star'
    """

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    train: Lines = field(default_factory=dict)
    val: Lines = field(default_factory=dict)
    weights: Lines = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """The run in a folder, or in a file: its ``summary.json``, or a copy of that in ``results/``.

        Raises:
            RecordError: a file is missing or damaged; MetricsError for a damaged line of the metrics.
        """
        if path.is_file():
            return cls.of(_read_json(path), path)
        summary = _read_json(path / "summary.json") if (path / "summary.json").exists() else {}
        config = _config(path / "config.json", {"recipe": summary.get("recipe"), **_read_json(path / "config.json")})
        lines = read_metrics(path / "metrics.jsonl")
        kinds = ("train", "val", "weights")
        return cls(path, config, summary, *({row["step"]: row for row in lines if row["kind"] == k} for k in kinds))

    @classmethod
    def of(cls, summary: dict[str, Any], path: Path = Path("summary.json")) -> RunRecord:
        """The run that a summary describes: its curves, and β according to its schedule."""
        try:
            origin = {"recipe": summary["recipe"], "overrides": summary.get("overrides")}
            config = _config(path, {**summary["config"], **origin})
            beta = _beta(config)
            train = {int(k): {"loss": float(v), "beta": beta(k)} for k, v in summary.get("loss_curve", ())}
            val = {int(k): {"accuracy": float(v)} for k, v in summary.get("curve", ())}
        except RecordError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise RecordError(f"{path}: not the summary of a run ({type(error).__name__}: {error})") from error
        return cls(path, config, summary, train, val)

    @property
    def validated(self) -> bool:
        """Whether the validation images were not among the training images."""
        return bool(self.config.get("train_on") != "all")

    @property
    def levels(self) -> str | None:
        """The levels of the configuration; None for a float network."""
        return None if self.config["method"] == "ref" else self.config.get("levels")

    @property
    def scale(self) -> str:
        """The scale of the levels; empty for none."""
        if known_method(str(self.config["method"])).fits_levels:
            return "fitted"
        return "" if self.levels is None else self.config.get("scale", "")

    @property
    def name(self) -> str:
        """The method by its name in the recipe; by its own name if it was overridden or there is no recipe."""
        recipe, overrides = self.config["recipe"], self.config["overrides"]
        return str(self.config["method"] if not recipe or "method" in overrides else recipe.split("/")[-1])

    @property
    def experiment(self) -> str:
        """A text that is the same for runs that differ only in the seed, the machine and the logging."""
        config = {key: self.config.get(key, KEYS[key].default) for key in _EXPERIMENT}  # an old file lacks newer keys
        return json.dumps([self.name, config], sort_keys=True)

    @property
    def changes(self) -> dict[str, Any]:
        """The differences from today's recipe that matter: overrides, and values that have changed in the recipe.

        >>> config = {**recipes.get("cifar10/vgg16/binary/bc"), "weight_decay": 0.1}
        >>> overrides = {"lr": 1e-4, "levels": "ternary", "seed": 1}
        >>> RunRecord.of({"recipe": "cifar10/vgg16/binary/bc", "config": config, "overrides": overrides}).changes
        {'levels': 'ternary', 'weight_decay': 0.1}
        """
        name, overrides = self.config["recipe"], self.config["overrides"]
        used = {k: self.config.get(k, v) for k, v in overrides.items()}  # of which the values have been checked
        recipe = _timed(recipes.get(name), used, self.config) if name in recipes.names() else {}
        others = {k: self.config.get(k, KEYS[k].default) for k in recipe}  # an old file lacks newer keys
        now = {**overrides, **others, **overrides}
        return {k: v for k, v in now.items() if k in _EXPERIMENT and (k not in recipe or recipe[k] != v)}

    def number(self, key: str) -> float:
        """A number of the summary; raises :class:`RecordError` if it is missing."""
        value = self.summary.get(key)
        if isinstance(value, int | float) and abs(value) < 1e300:  # an integer may be larger than any float
            return float(value)
        expected = "expected a finite number: run it again, or remove it"
        raise RecordError(f"{self.path}: {key} of the summary is {value!r:.60}, {expected}")

    def series(self, kind: str, key: str) -> dict[int, float]:
        """One number by step, if it was recorded and is finite."""
        lines = sorted(getattr(self, kind).items())
        return {step: value for step, line in lines if (value := line.get(key)) is not None and math.isfinite(value)}

    def quantizes(self, layer: str) -> bool:
        """Whether a layer is quantized: according to the summary, as older runs recorded histograms of all layers."""
        floats = [row.get("name") for row in self.summary.get("layers", ()) if row.get("bits") == 32]
        return self.config["method"] != "ref" and layer not in floats

    def write_result(self, folder: Path) -> Path:
        """Writes the summary to a folder of results, without the place of this machine's data; returns the file.

        A file of that name from before the recipe was changed is kept: its name now says what differs.
        """
        places = ("data_root", "cache")
        given = self.summary.get("overrides")  # in the names of the version that made the run, as the config
        given = given if isinstance(given, dict) else self.config["overrides"]
        overrides = {k: v for k, v in given.items() if k not in places}
        config = {k: v for k, v in self.summary["config"].items() if k not in (*places, "overrides")}
        name = recipes.run_name(self.config["recipe"], self.config["seed"])
        file = folder / f"{file_name(name, self.changes)}.json"
        content = json.dumps({**self.summary, "config": config, "overrides": overrides})
        with suppress(RecordError):  # a damaged file is replaced
            if file.exists() and (before := RunRecord.read(file)).changes != self.changes:
                before.write_result(folder)
        _files.write_atomically(file, f"{content}\n".encode(), RecordError)
        return file


def file_name(base: str, changes: Mapping[str, Any]) -> str:
    """A name for the file or folder of a run with these changes.

    >>> file_name("bc-seed0", {"lr": 0.01, "levels": "-1,0,1"})
    'bc-seed0-lr-0.01-levels--1-0-1'
    """
    name = base + "".join(f"-{key}-{re.sub('[^A-Za-z0-9.]', '-', str(value))}" for key, value in changes.items())
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 17]}-{hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:16]}"


def _timed(recipe: dict[str, Any], used: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """A recipe with its schedules for the iterations of a run, which epochs may have decided."""
    by_epochs = (recipe.get("epochs") or used.get("epochs")) and "iterations" not in used
    timed = {"iterations": config["iterations"]} if by_epochs else {}
    recipe = {**rescaled(recipe, {**used, **timed}), **timed}
    if "iterations" in used:
        recipe.pop("epochs", None)
    if recipe.get("eval_every") == 0:  # once per epoch
        del recipe["eval_every"]
    return recipe


def read_results(folder: Path) -> list[RunRecord]:
    """The runs in a folder of results and its subfolders: all JSON files with a key "recipe", by name."""
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such folder; give the one that holds the summaries of the runs")
    files = [file for file in sorted(folder.rglob("*.json")) if file.name != "config.json"]
    contents = [(file, _parsed(file)) for file in files]
    return [RunRecord.of(found, file) for file, found in contents if isinstance(found, dict) and "recipe" in found]


def _read_json(file: Path) -> dict[str, Any]:
    content = _parsed(file)
    if not isinstance(content, dict):
        raise RecordError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def _parsed(file: Path) -> Any:
    try:
        return json.loads(_files.read_regular(file))
    except FileNotFoundError as error:
        raise RecordError(f"{file}: no such file; is {file.parent} a run folder?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{file}: not readable as JSON ({error}); fix or remove it") from error


def _beta(config: dict[str, Any]) -> Schedule:
    """β according to a configuration; NaN if the schedule is the user's own, as nothing is imported to read results."""
    if ":" in config.get("beta_schedule", ""):
        return lambda step: math.nan
    annealing = {key for key in KEYS if key.startswith("beta_") or key == "iterations"}
    return Config(**{key: config[key] for key in annealing & config.keys()}).build_beta(1)


def _config(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """A configuration in the names of today, without keys that are None; an unsuitable value raises RecordError."""
    given = {key: value for key, value in upgrade(values).items() if value is not None}
    config: dict[str, Any] = {"recipe": "", "overrides": {}, **given}
    if not isinstance(config["overrides"], dict):
        raise RecordError(f"{file}: overrides is {config['overrides']!r:.60}, but it must be an object")
    try:
        for key in ("method", *config):
            if key in KEYS and key != "overrides":
                KEYS[key].check(key, config.get(key))
    except ConfigError as error:
        raise RecordError(f"{file}: {error}") from error
    return config
