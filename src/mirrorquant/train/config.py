"""The configuration of a run: every key with its type, range, default and help, and the file that holds them.

A key stands in one place, as a field of one of the sections below; overrides, recipes, files, help and checks follow
from there. Keys have names of their own over all sections, so that ``lr=0.01`` or a flat file need no sections; the
field ``name`` of a section has the section's name for its key: ``method`` is ``config.method.name``. The default of a
key that is added must be what earlier versions did.

>>> config = Config.from_recipe("cifar10/resnet18/binary/md-tanh-s", ["lr=0.01", "iterations=500"])
>>> config.method.name, config.optimizer.lr, config["lr"], config["iterations"]
('md-tanh-s', 0.01, 0.01, 500)
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from mirrorquant import _files, methods, models, schedules
from mirrorquant.errors import MirrorquantError
from mirrorquant.levels import BINARY, TERNARY, Levels
from mirrorquant.methods import Method
from mirrorquant.schedules import Schedule

__all__ = ["KEYS", "Config", "ConfigError", "Key", "parse_levels", "upgrade"]

VERSION = 2
_LARGEST_LR = 100.0  # times the largest beta, and ten for Adam's first step, it is still a float32
_REMEDY = "a run's configuration cannot be edited: start a new run with key=value overrides"
_IMPORT = "python -c 'import MODULE, sys; from mirrorquant.cli import main; sys.exit(main())' COMMAND ..."
_LONGEST = 1 << 20  # bytes of a file


class ConfigError(MirrorquantError, ValueError):
    """A configuration that does not make sense; the message names the key or the file."""


def key(default: Any, help: str, **facts: Any) -> Any:
    """A key of the configuration: ``facts`` are ``least``, ``most``, ``choices`` and ``used`` of :class:`Key`."""
    if isinstance(default, (list, dict)):
        return field(default_factory=type(default), metadata={"help": help, **facts})
    return field(default=default, metadata={"help": help, **facts})


_ANNEALED = "method!=" + ",".join(name for name in methods.names() if not methods.get(name).uses_beta)
_STEPPED = f"{_ANNEALED} beta_schedule=geometric"


@dataclass(frozen=True)
class DataKeys:
    """The images."""

    name: str = key("digits", "data set")
    augment: str = key("", "augmentation: crop-flip, shift, none ...; empty for the data set's own")


@dataclass(frozen=True)
class ModelKeys:
    """The network; all keys but the name are options of the function that builds it, and idle if it has no such one."""

    name: str = key("digitsnet", "network, or MODULE:FUNCTION for a custom one")
    affine: bool = key(False, "batch norm with learnable parameters")
    stem_stride: int = key(1, "stride of the first convolution", least=1, most=4096)
    width: int = key(32, "channels of the first convolution", least=1, most=4096)


@dataclass(frozen=True)
class MethodKeys:
    """How weights are quantized."""

    name: str = key("md-tanh-s", "method")
    levels: str = key("binary", "binary, ternary, or numbers like -1,0,1", used="method!=ref")
    skip: list[str] = key([], "patterns of parameters or modules that stay in float", used="method!=ref")  # noqa: RUF009


@dataclass(frozen=True)
class OptimizerKeys:
    """The base optimizer, and its learning rate."""

    name: str = key("adam", "base optimizer", choices=("adam", "adamw", "sgd"))
    lr: float = key(0.001, "learning rate", least=1e-35, most=_LARGEST_LR)
    momentum: float = key(0.9, "of SGD", least=0, most=1e35, used="optimizer=sgd")
    nesterov: bool = key(False, "Nesterov's momentum", used="optimizer=sgd")
    weight_decay: float = key(0.0, "weight decay; AdamW decouples it from the gradient", least=0, most=1e35)
    lr_schedule: str = key("step", "learning rate over time", choices=("step", "cosine", "linear", "constant"))
    lr_scale: float = key(1.0, "its factor every lr_interval", least=1e-300, most=1e300, used="lr_schedule=step")
    lr_interval: int = key(30000, "iterations; see lr_scale", least=1, used="lr_schedule=step")
    lr_end: float = key(0.0, "last learning rate", least=0, most=_LARGEST_LR, used="lr_schedule=cosine,linear")
    warmup: int = key(0, "iterations in which the learning rate rises to lr, before its schedule starts", least=0)


@dataclass(frozen=True)
class BetaKeys:
    """How soft weights become hard: β, ProxQuant's λ, and the step that rounds for good."""

    beta_schedule: str = key("geometric", "β over time", choices=("geometric", "cosine", "linear"), used=_ANNEALED)
    beta_scale: float = key(1.02, "factor of β every beta_interval", least=1, most=1e35, used=_STEPPED)
    beta_interval: int = key(200, "iterations; see beta_scale", least=1, used=_STEPPED)
    beta_cap: float = key(1e35, "largest β", least=1, most=1e35, used=_STEPPED)
    beta_end: float = key(1e4, "last β", least=1, most=1e35, used=f"{_ANNEALED} beta_schedule=cosine,linear")
    pq_rate: float = key(0.0001, "λ of ProxQuant per epoch", least=0, most=1e35, used="method=pq")
    finalize_at: float = key(1.0, "part of training until weights are rounded", least=1e-9, most=1, used="method!=ref")


@dataclass(frozen=True)
class ObjectiveKeys:
    """The loss."""

    label_smoothing: float = key(0.0, "share of the target spread over all classes", least=0, most=1)
    logit_scale: float = key(1.0, "constant factor of the logits", least=1e-6, most=1e6)
    teacher: str = key("", "folder of the run whose best network is imitated; empty for none")
    temperature: float = key(4.0, "of both softmaxes in distillation", least=1e-3, most=1e3, used="teacher!=")
    hard_share: float = key(0.1, "weight of the labels beside the teacher", least=0, most=1, used="teacher!=")


@dataclass(frozen=True)
class TrainingKeys:
    """What is computed how often, and in which arithmetic; auto is chosen for speed."""

    iterations: int = key(100000, "training steps", least=1, most=1e15)
    batch_size: int = key(128, "images per step", least=1)
    eval_every: int = key(100, "iterations between validations of the rounded network", least=1)
    recalibrate: int = key(0, "batches to recompute the final batch-norm statistics from; 0 keeps them", least=0)
    seed: int = key(0, "of initial weights and batches", least=-(2**63), most=2**63 - 1)
    precision: str = key("auto", "bfloat16 is autocast, auto on CUDA", choices=("auto", "float32", "bfloat16"))
    channels_last: bool | None = key(None, "memory format; auto is channels_last where torch computes it right")
    compile: bool | None = key(None, "torch.compile; auto is on CUDA only")
    deterministic: bool = key(False, "torch's deterministic algorithms")


@dataclass(frozen=True)
class MachineKeys:
    """Where it is computed; may change when a run is resumed."""

    device: str = key("auto", "cpu, cuda or cuda:N; auto is CUDA if there is one")
    data_root: str = key("data", "folder of the data sets")
    threads: int = key(0, "on the CPU; 0 for torch's choice", least=0, most=1024)
    engine: str = key("auto", "graph is a CUDA graph, auto on CUDA", choices=("auto", "plain", "graph", "eager"))


@dataclass(frozen=True)
class LoggingKeys:
    """What is recorded how often; may change when a run is resumed."""

    log_every: int = key(20, "iterations between records of the loss", least=1)
    histogram_every: int = key(0, "iterations between histograms of the weights; 0 for none", least=0)
    checkpoint_every: int = key(0, "iterations between checkpoints; 0 is once a minute", least=0)


@dataclass(frozen=True)
class OriginKeys:
    """Where the configuration comes from; cannot be overridden."""

    recipe: str = key("", "name of the recipe")
    paper: float = key(0.0, "test accuracy in the paper's table, in percent")
    note: str = key("", "how the recipe differs from the paper")
    overrides: dict[str, Any] = key({}, "keys that were set beside the recipe")  # noqa: RUF009


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on; :meth:`from_recipe` makes one."""

    data: DataKeys = field(default_factory=DataKeys)
    model: ModelKeys = field(default_factory=ModelKeys)
    method: MethodKeys = field(default_factory=MethodKeys)
    optimizer: OptimizerKeys = field(default_factory=OptimizerKeys)
    beta: BetaKeys = field(default_factory=BetaKeys)
    objective: ObjectiveKeys = field(default_factory=ObjectiveKeys)
    training: TrainingKeys = field(default_factory=TrainingKeys)
    machine: MachineKeys = field(default_factory=MachineKeys)
    logging: LoggingKeys = field(default_factory=LoggingKeys)
    origin: OriginKeys = field(default_factory=OriginKeys)

    def __post_init__(self) -> None:
        for name, each in KEYS.items():
            each.check(name, self[name])
        if self["warmup"] >= self["iterations"]:
            raise ConfigError(f"warmup is {self['warmup']}, but it must be below iterations, {self['iterations']}")
        try:
            self.build_method()
            lr = self.build_lr()
            largest = max(lr(self["warmup"]), lr(self["iterations"] - 1))
        except OverflowError:
            largest = math.inf
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if largest > _LARGEST_LR:
            raise ConfigError(
                f"lr is {self['lr']} and lr_scale {self['lr_scale']}, but in {self['iterations']} iterations the "
                f"learning rate must stay at most {_LARGEST_LR:g}"
            )

    @classmethod
    def from_recipe(cls, name: str, overrides: Sequence[str] = ()) -> Config:
        """A recipe's configuration, changed by ``key=value`` strings; an unknown key is an error.

        >>> Config.from_recipe("cifar10/resnet18/binary/bc", ["lrr=0.1"])
        Traceback (most recent call last):
        ...
        mirrorquant.train.config.ConfigError: there is no key 'lrr'; did you mean 'lr'?
        """
        from mirrorquant.train import recipes  # which checks its files against the keys

        changed = dict(_parse(text) for text in overrides)
        return cls.from_flat({**recipes.get(name), "recipe": name, **changed, "overrides": changed})

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Config:
        """A configuration from values by key; the others have their defaults."""
        sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
        for name, value in values.items():
            where = _known(name, KEYS)
            sections[where.section][where.attribute] = value
        return cls(**{name: _SECTIONS[name](**own) for name, own in sections.items()})

    def flat(self) -> dict[str, Any]:
        """All values by key."""
        return {name: self[name] for name in KEYS}

    def record(self) -> dict[str, Any]:
        """The same with the version, for files; :func:`upgrade` reads it."""
        return {"version": VERSION, **self.flat()}

    def __getitem__(self, name: str) -> Any:
        where = KEYS[name]
        return getattr(getattr(self, where.section), where.attribute)

    def replace(self, **changed: Any) -> Config:
        """The same configuration with other values of some keys."""
        return Config.from_flat({**self.flat(), **changed})

    def moved(self, overrides: Sequence[str]) -> Config:
        """The same run elsewhere: keys of the sections machine and logging may change, and no other.

        >>> Config().moved(["lr=0.1"])
        Traceback (most recent call last):
        ...
        mirrorquant.train.config.ConfigError: lr cannot change when a run resumes, only device, data_root, threads,
        engine, log_every, histogram_every, checkpoint_every: start a new run
        """
        free = [name for name, each in KEYS.items() if each.section in ("machine", "logging")]
        changed = dict(_parse(text) for text in overrides)
        if other := [name for name in changed if name not in free]:
            raise ConfigError(f"{other[0]} cannot change when a run resumes, only {', '.join(free)}: start a new run")
        return self.replace(**changed, overrides={**self.origin.overrides, **changed})

    @property
    def identity(self) -> str:
        """A digest of what is computed: all keys but those of the sections machine, logging and origin."""
        experiment = (name for name, each in KEYS.items() if each.section not in ("machine", "logging", "origin"))
        return _digest({name: self[name] for name in experiment})

    def idle_overrides(self) -> dict[str, str]:
        """The overrides that change nothing here, each with the reason."""
        unmet = {name: KEYS[name].unmet(self) for name in self.origin.overrides}
        return {name: f"{others[0]} is {self[others[0]] or 'not set'}" for name, others in unmet.items() if others}

    # What it describes without any device: models, data and optimizers are made in build.py.

    def build_method(self) -> Method:
        """The method, for its levels."""
        return methods.get(self.method.name, parse_levels(self.method.levels))

    def build_lr(self) -> Schedule:
        """The learning rate as a function of the iteration."""
        own, steps = self.optimizer, self.training.iterations - self.optimizer.warmup
        terms = {"start": own.lr, "scale": own.lr_scale, "every": own.lr_interval, "end": own.lr_end, "steps": steps}
        schedule = schedules.build(own.lr_schedule, **terms)
        return schedules.warmup(schedule, own.warmup) if own.warmup else schedule

    def build_beta(self, batches_per_epoch: int) -> Schedule:
        """β as a function of the iteration; λ for ProxQuant."""
        own = self.beta
        if self.method.name == "pq":
            return schedules.ramp(own.pq_rate, every=batches_per_epoch)
        terms = {"scale": own.beta_scale, "every": own.beta_interval, "cap": own.beta_cap, "end": own.beta_end}
        return schedules.build(own.beta_schedule, start=1.0, steps=self.training.iterations, log=True, **terms)

    # Files, with a checksum: a changed digit would be another experiment.

    def text(self) -> str:
        """The file's content: flat JSON with its version and its own checksum."""
        content = self.record()
        return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Config:
        """A configuration from a run's ``config.json``; an altered file raises :class:`ConfigError`."""
        try:
            with _files.open_regular(path) as file:
                return cls.parse(file.read(_LONGEST), path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): is this the folder of a run?") from error

    @classmethod
    def parse(cls, text: str | bytes, path: Path) -> Config:
        """A configuration from the text of such a file, or of a checkpoint; ``path`` is for the messages."""
        try:
            content = json.loads(text)
            whole = content.pop("sha256") == _digest(content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged ({type(error).__name__}); {_REMEDY}") from error
        if not whole:
            raise ConfigError(f"{path} was altered: its checksum does not fit; {_REMEDY}")
        newer = [name for name in content if name not in KEYS and name != "version"]
        if newer or content.get("version", 1) not in range(1, VERSION + 1):
            what = f"has the key {newer[0]!r:.60}" if newer else f"is of version {content['version']!r:.60}"
            raise ConfigError(f"{path} {what}, unknown to this version of mirrorquant: use the version that wrote it")
        content = upgrade(content)
        method = content.get("method", MethodKeys.name)
        if isinstance(method, str) and method not in methods.names():
            raise ConfigError(
                f"{path} names the method {method!r:.60}, which is not registered here. If it is a custom method, "
                f"import the module that defines it first: {_IMPORT}"
            )
        try:
            return cls.from_flat(content)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ConfigError(f"{path} holds no configuration ({error})") from error


class Key(NamedTuple):
    """What is known about a key: where it is, what it may be, and ``used``: other keys on which its effect depends."""

    section: str
    attribute: str
    type: str
    default: Any
    help: str
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    used: str = ""  # conditions such as "method!=ref,bc lr_schedule=step"

    def check(self, name: str, value: Any) -> None:
        """Raises :class:`ConfigError` for a value of another type, out of range, or not among the choices."""
        if not _is(self.type, value):
            raise ConfigError(f"{name} is {value!r:.60}, but it must be {self.type}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{name} is {value!r}, but it must be one of {', '.join(self.choices)}")
        if self.type in ("int", "float") and not self.least <= value <= self.most:
            limit = f"at least {self.least:g}" if value < self.least else f"at most {self.most:g}"
            raise ConfigError(f"{name} is {value}, but it must be {limit}")

    def unmet(self, config: Config) -> list[str]:
        """The keys whose values leave this one without effect."""
        conditions = re.findall(r"(\w+)(!?)=(\S*)", self.used)
        found = [other for other, no, values in conditions if (config[other] in values.split(",")) == bool(no)]
        if self.section == "model" and self.attribute != "name":
            model = config.model.name
            found += ["model"] if ":" in model or self.attribute not in models.options(model) else []
        return found


def _keys() -> dict[str, Key]:
    found: dict[str, Key] = {}
    for section, keys in _SECTIONS.items():
        for own in fields(keys):
            name = section if own.name == "name" else own.name
            assert name not in found, name
            found[name] = Key(section, own.name, str(own.type), getattr(keys(), own.name), **own.metadata)
    return found


_SECTIONS: dict[str, Any] = {section.name: section.default_factory for section in fields(Config)}
KEYS: dict[str, Key] = _keys()
"""All keys by name, in the order of the sections."""

_CHANGEABLE = {name: each for name, each in KEYS.items() if each.section != "origin"}


def upgrade(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flat values of any version in the names of today, without their version.

    >>> upgrade({"method": "pmf-authors", "lr": 0.1, "overrides": {"method": "pmf-authors"}})
    {'method': 'pmf', 'lr': 0.1, 'overrides': {'method': 'pmf'}}
    """
    current = dict(values)
    version = current.pop("version", 1)
    if version == 1 and isinstance(current.get("method"), str):
        current["method"] = methods.RENAMED.get(current["method"], current["method"])
    if isinstance(current.get("overrides"), dict):
        current["overrides"] = upgrade({**current["overrides"], "version": version})
    return current


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
        expected = "binary, ternary, or numbers like -1,0,1"
        raise ConfigError(f"levels is {text!r}, but it must be {expected}: {error}") from error


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is(kind: str, value: Any) -> bool:
    """Whether a value is of the type that a key is declared with; whole numbers are floats too."""
    if kind == "list[str]":
        return isinstance(value, list) and all(isinstance(part, str) for part in value)
    if kind == "dict[str, Any]":  # of overrides
        known = isinstance(value, dict) and value.keys() <= _CHANGEABLE.keys()
        return known and all(_is(KEYS[name].type, part) for name, part in value.items())
    types = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "bool | None": (bool, type(None))}
    return type(value) in types[kind]


def _known(name: str, keys: Mapping[str, Key]) -> Key:
    if name not in keys:
        near = difflib.get_close_matches(name.lower(), keys, 1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "'mirrorquant train --help' lists them"
        raise ConfigError(f"there is no key {name!r}; {hint}")
    return keys[name]


def _parse(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is no override: write key=value, as in lr=0.01")
    kind = _known(name, _CHANGEABLE).type
    try:
        if kind.startswith("bool"):
            return name, {"true": True, "1": True, "false": False, "0": False, "auto": None}[value.lower()]
        if kind == "list[str]":
            return name, [part for part in value.split(",") if part]
        return name, {"int": int, "float": float, "str": str}[kind](value)
    except (ValueError, KeyError):
        raise ConfigError(
            f"{name}={value}: {value!r} is not {'true or false' if kind.startswith('bool') else kind}"
        ) from None
