"""The configuration of a run: a recipe with every default filled in, and what was overridden."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mirrorquant import _files, methods, models, schedules
from mirrorquant.health import unwarned
from mirrorquant.levels import BINARY, TERNARY, Levels
from mirrorquant.methods import Method
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.select import split
from mirrorquant.train import recipes

__all__ = ["Config", "ConfigError"]


_RANGES = (
    (("lr_interval", "beta_interval", "batch_size", "eval_every", "log_every"), 1, math.inf),
    (("iterations",), 1, 1e15),
    (("width", "stem_stride"), 1, 4096),
    (("beta_scale", "beta_cap"), 1, 1e35),
    (("histogram_every", "checkpoint_every", "recalibrate"), 0, math.inf),
    (("threads",), 0, 1024),
    (("momentum", "weight_decay", "pq_rate"), 0, 1e35),
    (("seed",), -(2**63), 2**63 - 1),
)
_LARGEST_LR = 100.0  # times the largest beta, and ten for Adam's first step, it is still a float32
_NO_BETA = ("ref", "bc", "pq")
_REMEDY = "a run's configuration cannot be edited: start a new run with key=value overrides"
_IMPORT = "python -c 'import MODULE, sys; from mirrorquant.cli import main; sys.exit(main())' COMMAND ..."
_LONGEST = 1 << 20  # bytes of a file


class ConfigError(ValueError):
    """A configuration that does not make sense; the message names the key or the file."""


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on. The first part comes from a recipe; any key can be overridden.

    ``augment``: crop-flip, shift, none ...; by default the data set's own. ``eval_every``: the rounded network is
    validated at this cadence. ``checkpoint_every``: in iterations; 0 is once a minute. ``recalibrate``: training
    batches from which the batch-norm statistics of the rounded network are recomputed before the final test; 0 keeps
    those of the soft weights, as the paper does. ``precision``: float32, or bfloat16 autocast. ``engine``: graph is the
    fast step of ``train/fast.py``, eager the plain one. What is auto (or None) is chosen for speed: on the CPU that is
    channels_last alone. ``threads``: on the CPU, 0 for torch's own choice.
    """

    data: str = "digits"
    model: str = "digitsnet"
    method: str = "md-tanh-s"
    levels: str = "binary"
    optimizer: str = "adam"
    lr: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 0.0
    lr_scale: float = 1.0
    lr_interval: int = 30000
    beta_scale: float = 1.02
    beta_interval: int = 200
    beta_cap: float = 1e35
    pq_rate: float = 0.0001
    finalize_at: float = 1.0
    iterations: int = 100000
    batch_size: int = 128
    augment: str = ""
    affine: bool = False
    skip: list[str] = field(default_factory=list)
    stem_stride: int = 1
    width: int = 32
    seed: int = 0
    eval_every: int = 100
    log_every: int = 20
    histogram_every: int = 0
    checkpoint_every: int = 0
    recalibrate: int = 0
    engine: str = "auto"
    precision: str = "auto"
    channels_last: bool | None = None
    compile: bool | None = None
    deterministic: bool = False
    threads: int = 0
    device: str = "auto"
    data_root: str = "data"
    recipe: str = ""
    paper: float = 0.0
    note: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not _is(str(entry.type), getattr(self, entry.name)):
                raise ConfigError(f"{entry.name} is {getattr(self, entry.name)!r:.60}, but it must be {entry.type}")
        for names, least, most in _RANGES:
            for name in names:
                if not least <= getattr(self, name) <= most:
                    limit = f"at least {least:g}" if getattr(self, name) < least else f"at most {most:g}"
                    raise ConfigError(f"{name} is {getattr(self, name)}, but it must be {limit}")
        for name in ("lr", "lr_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, but it must be positive and finite")
        last = math.log(self.lr) + (self.iterations - 1) // self.lr_interval * math.log(self.lr_scale)
        if max(math.log(self.lr), last) > math.log(_LARGEST_LR):
            raise ConfigError(
                f"lr is {self.lr} and lr_scale {self.lr_scale}, but in {self.iterations} iterations the learning rate "
                f"must stay at most {_LARGEST_LR:g}"
            )
        choices = {"engine": ("auto", "eager", "graph"), "precision": ("auto", "float32", "bfloat16")}
        for name, known in (("optimizer", ("adam", "sgd")), *choices.items()):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(known)}")
        if not 0 < self.finalize_at <= 1:
            raise ConfigError(f"finalize_at is {self.finalize_at}, but it is a fraction of training between 0 and 1")
        try:
            self.build_method()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @classmethod
    def from_recipe(cls, name: str, overrides: Sequence[str] = ()) -> Config:
        """A recipe's configuration, changed by ``key=value`` strings; an unknown key is an error.

        >>> Config.from_recipe("cifar10/resnet18/binary/bc", ["lrr=0.1"])
        Traceback (most recent call last):
        ...
        mirrorquant.train.config.ConfigError: there is no key 'lrr'; did you mean 'lr'?
        """
        changed = dict(_parse(text) for text in overrides)
        try:
            return cls(**{**recipes.get(name), "recipe": name, **changed, "overrides": changed})
        except recipes.RecipeError as error:
            raise ConfigError(str(error)) from error

    # What it describes.

    def build_method(self) -> Method:
        """The method, for its levels."""
        return methods.get(self.method, parse_levels(self.levels))

    def build_model(self, classes: int, channels: int) -> nn.Module:
        """The model with the paper's initialization, drawn from the seed; a user's own model as it comes."""
        torch.manual_seed(self.seed)
        if ":" in self.model:
            return models.build(self.model, classes)
        options: dict[str, Any] = {"affine": self.affine}
        options |= {"stem_stride": self.stem_stride} if self.model == "resnet18" else {}
        options |= {"channels": channels, "width": self.width} if self.model == "digitsnet" else {}
        model = models.build(self.model, classes, **options)
        models.initialize(model, torch.Generator().manual_seed(self.seed))
        return model

    def build_optimizer(self, model: nn.Module, batches_per_epoch: int) -> MirrorDescent:
        """The base optimizer of the recipe, wrapped."""
        learnt = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not learnt:
            raise ConfigError(f"model {self.model} has no parameter that requires a gradient: nothing can be trained")
        try:
            # The paper quantizes everything in its networks; a custom model may own what must not be.
            everything = ":" not in self.model
            named: list[dict[str, Any]] = [{"params": learnt}]
            groups = named if self.method == "ref" else split(model, skip=self.skip, everything=everything)
        except ValueError as error:
            which = f"skip is {','.join(self.skip)}" if self.skip else f"model {self.model}"
            raise ConfigError(f"{which}: {error}") from error
        base: torch.optim.Optimizer
        if self.optimizer == "sgd":
            base = torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        else:
            base = torch.optim.Adam(groups, lr=self.lr, weight_decay=self.weight_decay)
        schedule: schedules.Schedule = schedules.geometric(self.beta_scale, every=self.beta_interval, cap=self.beta_cap)
        if self.method == "pq":
            schedule = schedules.ramp(self.pq_rate, every=batches_per_epoch)
        try:
            with unwarned():  # the paper's ternary networks start at zero, by design; a run says how it ended
                return MirrorDescent(base, method=self.build_method(), anneal=schedule)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def idle_overrides(self) -> dict[str, str]:
        """The overrides that change nothing here, each with what it is that does not use them."""
        users = {
            "momentum": ("optimizer", self.optimizer == "sgd"),
            "pq_rate": ("method", self.method == "pq"),
            "stem_stride": ("model", self.model == "resnet18"),
            "width": ("model", self.model == "digitsnet"),
            "affine": ("model", ":" not in self.model),
            **dict.fromkeys(("levels", "skip", "finalize_at"), ("method", self.method != "ref")),
            **dict.fromkeys(("beta_scale", "beta_interval", "beta_cap"), ("method", self.method not in _NO_BETA)),
        }
        idle = {key: by for key, (by, used) in users.items() if key in self.overrides and not used}
        return {key: f"{by} is {getattr(self, by)}" for key, by in idle.items()}

    def lr_at(self, step: int) -> float:
        """The learning rate of iteration ``step``: scaled every ``lr_interval`` iterations."""
        return self.lr * self.lr_scale ** (step // self.lr_interval)

    @property
    def torch_device(self) -> torch.device:
        """The device; auto is CUDA where there is one."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if not re.fullmatch(r"cpu|cuda|cuda:(0|[1-9]\d?)", self.device, re.ASCII):
            raise ConfigError(f"device is {self.device!r}, but it must be auto, cpu, cuda or cuda:N")
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device is {self.device!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
        return device

    @property
    def fast(self) -> bool:
        """Whether the fast step trains."""
        return self.engine == "graph" or (self.engine == "auto" and self.torch_device.type == "cuda")

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in: bfloat16 is autocast."""
        half = self.torch_device.type == "cuda" if self.precision == "auto" else self.precision == "bfloat16"
        return torch.bfloat16 if half else torch.float32

    def wants(self, key: str) -> bool:
        """Whether ``compile`` or ``channels_last`` is on; by default, the former on CUDA and the latter everywhere."""
        value: bool | None = getattr(self, key)
        return (key == "channels_last" or self.torch_device.type == "cuda") if value is None else value

    # Files: the exact bytes are checked, since a changed digit would be another experiment.

    def as_dict(self) -> dict[str, Any]:
        """The flat dictionary of all keys."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """The file's content: JSON with its own checksum."""
        return _text(self.as_dict())

    @classmethod
    def load(cls, path: Path) -> Config:
        """A configuration from a run's ``config.json``; an altered file raises :class:`ConfigError`."""
        try:
            with _files.open_regular(path) as file:
                content = file.read(_LONGEST)
            text = content.decode("utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): is this the folder of a run?") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is damaged ({type(error).__name__}); {_REMEDY}") from error
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: Path) -> Config:
        """A configuration from the text of such a file, or of a checkpoint; ``path`` says where it was.

        A key that the text lacks was added to the library later and gets its default, so the default of a new key must
        be what earlier versions did.
        """
        try:
            content = json.loads(text)
            del content["sha256"]
            whole = _text(content) == text
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged ({type(error).__name__}); {_REMEDY}") from error
        if not whole:
            raise ConfigError(f"{path} was altered: its checksum does not fit; {_REMEDY}")
        unknown = sorted(set(content) - {entry.name for entry in fields(cls)})
        if unknown:
            raise ConfigError(
                f"{path} has the key {unknown[0]!r:.60}, unknown to this version of mirrorquant: use the version that "
                "wrote it"
            )
        method = content.get("method", cls.method)
        if isinstance(method, str) and method not in methods.list():
            raise ConfigError(
                f"{path} names the method {method!r:.60}, which is not registered here. If it is a custom method, "
                f"import the module that defines it first: {_IMPORT}"
            )
        try:
            return cls(**content)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ConfigError(f"{path} holds no configuration ({error})") from error


def _text(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1) + "\n"


def _is(kind: str, value: Any) -> bool:
    """Whether a value is of the kind that a key is declared with; whole numbers are floats too."""
    if kind == "list[str]":
        return isinstance(value, list) and all(isinstance(part, str) for part in value)
    if kind == "dict[str, Any]":  # of overrides
        return isinstance(value, dict) and all(key in TYPES and _is(TYPES[key], part) for key, part in value.items())
    if kind == "bool | None" and value is None:
        return True
    if kind.startswith("bool"):
        return isinstance(value, bool)
    return type(value) in {"int": (int,), "float": (int, float), "str": (str,)}[kind]


def parse_levels(text: str) -> Levels:
    """``binary``, ``ternary``, or numbers such as ``-1,0,0.5,1``.

    >>> parse_levels("-1,0,0.5")
    Levels(-1.0, 0.0, 0.5)
    """
    named = {"binary": BINARY, "ternary": TERNARY}
    if text in named:
        return named[text]
    try:
        return Levels(*map(float, text.split(",")))
    except ValueError as error:
        raise ConfigError(
            f"levels is {text!r}, but it must be binary, ternary, or numbers like -1,0,1: {error}"
        ) from error


TYPES = {f.name: str(f.type) for f in fields(Config) if f.name not in ("recipe", "overrides", "paper", "note")}


def _parse(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is no override: write key=value, as in lr=0.01")
    if key not in TYPES:
        near = difflib.get_close_matches(key.lower(), TYPES, 1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "'mirrorquant train --help' lists them"
        raise ConfigError(f"there is no key {key!r}; {hint}")
    kind = TYPES[key]
    try:
        if kind.startswith("bool"):
            known = {"true": True, "false": False, "1": True, "0": False}
            return key, (known if kind == "bool" else {**known, "auto": None})[value.lower()]
        if kind == "list[str]":
            return key, [part for part in value.split(",") if part]
        return key, {"int": int, "float": float, "str": str}[kind](value)
    except (ValueError, KeyError):
        raise ConfigError(
            f"{key}={value}: {value!r} is not {'true or false' if kind.startswith('bool') else kind}"
        ) from None
