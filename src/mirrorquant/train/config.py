"""The configuration of a run: every key with its type, range, default and help, and the file that holds them.

A key is a field of :class:`Config`; overrides, recipes, files, help and checks all follow from that one line. A new key
must have a default that reproduces the behavior of earlier versions.

>>> config = Config.from_recipe("cifar10/resnet18/binary/md-tanh-s", ["lr=0.01", "iterations=500"])
>>> config.method, config.lr, config["iterations"]
('md-tanh-s', 0.01, 500)
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mirrorquant import _files, methods, models, schedules
from mirrorquant._registry import imported, suggestion
from mirrorquant.data import names as data_names
from mirrorquant.errors import MirrorquantError
from mirrorquant.levels import BINARY, TERNARY, Levels, Scale
from mirrorquant.methods import Method
from mirrorquant.schedules import Schedule

__all__ = ["KEYS", "Config", "ConfigError", "Key", "parse_levels", "parse_scale", "rescaled", "upgrade"]

VERSION = 2
_OWN = "MODULE:CLASS"
_LARGEST_LR = 100.0  # multiplied by the largest beta, and by ten for Adam's first step, it is still a float32
_LARGEST_BETA = 1e35
_INTERVALS = ("lr_interval", "beta_interval", "warmup")  # in iterations
_STRETCHED = (*_INTERVALS, "beta_scale", "pq_rate")
_REMEDY = "a run's configuration cannot be edited: start a new run with key=value overrides"
_IMPORT = "python -c 'import MODULE, sys; from mirrorquant.cli import main; sys.exit(main())' COMMAND ..."


class ConfigError(MirrorquantError, ValueError):
    """An invalid configuration; the message names the key or the file."""


class Key(NamedTuple):
    """Everything known about a key: its type, default, help and limits, and the other keys its effect depends on."""

    type: str
    default: Any
    help: str
    section: str
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    used: str = ""  # conditions such as "method!=ref,bc lr_schedule=step"

    def check(self, name: str, value: Any) -> None:
        """Raises :class:`ConfigError` for a value of another type, out of range, or not among the choices."""
        if not _is(self.type, value):
            raise ConfigError(f"{name} is {value!r:.60}, but it must be {self.type}")
        if self.choices and value not in self.choices and not (_OWN in self.choices and ":" in value):
            raise ConfigError(f"{name} is {value!r}, but it must be one of {', '.join(self.choices)}")
        if self.type in ("int", "float") and not self.least <= value <= self.most:
            limit = f"at least {self.least:g}" if value < self.least else f"at most {self.most:g}"
            limit = f"a number from {self.least:g} to {self.most:g}" if value != value else limit
            raise ConfigError(f"{name} is {value}, but it must be {limit}")


def _key(default: Any, help: str, **facts: Any) -> Any:
    """A field of the configuration; ``facts`` are those of :class:`Key`."""
    metadata = {"default": default, "help": help, **facts}
    if isinstance(default, (list, dict)):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _used(condition: str, term: str) -> str:
    """The condition that a schedule uses a term."""
    return condition + ",".join(name for name in _SCHEDULES if term in getattr(schedules, name).__dataclass_fields__)


_SCHEDULES = tuple(name for name in schedules.names() if name != "ramp")  # which needs a rate; pq_rate is ProxQuant's
_LR_SCHEDULES = tuple(name for name in _SCHEDULES if name != "until")  # which starts at 1
_ANNEALED = "method!=" + ",".join(name for name in methods.names() if not methods.get(name).uses_beta)
_SCALED = "method!=ref," + ",".join(name for name in methods.names() if methods.get(name).fits_levels)
_LIFTED = "method=" + ",".join(name for name in methods.names() if methods.get(name).lifts)
_lr, _beta = partial(_used, "lr_schedule="), partial(_used, f"{_ANNEALED} beta_schedule=")
_SECTIONS = ("data", "model", "method", "optimizer", "beta", "objective", "training", "machine", "logging", "origin")
MOVABLE = ("machine", "logging")  # what may change when a run resumes
_NOT_THE_EXPERIMENT = (*MOVABLE, "origin")
(_data, _model, _method, _optimizer, _anneal, _objective, _training, _machine, _logging, _origin) = (
    partial(_key, section=name) for name in _SECTIONS
)


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on; :meth:`from_recipe` makes one."""

    # The images, and the network. The keys of the section model are options of the function that builds it.
    data: str = _data("digits", f"data set: {', '.join(data_names())}")
    augment: str = _data("", "augmentation: crop-flip, shift, none ...; empty for the default of the data set")
    cutout: int = _data(0, "side of a square erased from each training image", least=0, most=1024)
    mixup: float = _data(0.0, "blend images and labels in pairs, with λ from Beta(mixup, mixup)", least=0, most=100)
    cutmix: float = _data(0.0, "paste boxes of area 1 - λ, with λ from Beta(cutmix, cutmix)", least=0, most=100)
    alternating_flip: bool = _data(False, "mirror each image in every other epoch, not at random")
    train_on: str = _data("train", "train, or all: the validation images too", choices=("train", "all"))
    image_size: int = _data(0, "side of images that are streamed from files; 0 for the usual", least=0, most=1024)
    model: str = _model("digitsnet", f"network: {', '.join(models.names())}, or MODULE:FUNCTION for a custom one")
    init: str = _model("", "start from these weights: a state_dict by torch.save, *.safetensors, or a run")
    affine: bool = _model(False, "batch norm with learnable parameters")
    stem_stride: int = _model(1, "stride of the first convolution", least=1, most=4096)
    width: int = _model(32, "channels of the first convolution", least=1, most=4096)
    stem: str = _model("cifar", "first layers for small images, or for ImageNet's", choices=("cifar", "imagenet"))
    prelu: bool = _model(False, "PReLU after each block of Bi-Real Net")

    # How weights are quantized.
    method: str = _method("md-tanh-s", f"method, or {_OWN} for a custom one")
    levels: str = _method(
        "binary", "binary, ternary, or numbers like -1,0,1, times a scale if one is set", used="method!=ref"
    )
    scale: str = _method("", "factor on the levels, as in tensor or channel-learnt; empty for none", used=_SCALED)
    skip: list[str] = _method([], "patterns of parameters or modules that stay in float", used="method!=ref")  # noqa: RUF009
    lifted_init: bool = _method(False, "draw a latent per level, as the authors do, not from the weights", used=_LIFTED)
    quantize_norms: bool = _method(False, "quantize the parameters of batch norm, too", used="method!=ref")

    # The base optimizer and its learning rate.
    optimizer: str = _optimizer("adam", "base optimizer", choices=("adam", "adamw", "sgd"))
    lr: float = _optimizer(0.001, "learning rate", least=1e-35, most=_LARGEST_LR)
    momentum: float = _optimizer(0.9, "momentum of SGD", least=0, most=1e35, used="optimizer=sgd")
    nesterov: bool = _optimizer(False, "Nesterov momentum", used="optimizer=sgd")
    weight_decay: float = _optimizer(0.0, "weight decay; AdamW decouples it from the gradient", least=0, most=1e35)
    decay_norms: bool = _optimizer(True, "apply weight decay to batch norm and PReLU, too", used="weight_decay!=0.0")
    lr_schedule: str = _optimizer("step", "learning rate over time", choices=(*_LR_SCHEDULES, _OWN))
    lr_scale: float = _optimizer(1.0, "factor every lr_interval", least=1e-300, most=1e300, used=_lr("scale"))
    lr_interval: int = _optimizer(30000, "iterations; see lr_scale", least=1, used=_lr("every"))
    lr_end: float = _optimizer(0.0, "last learning rate", least=0, most=_LARGEST_LR, used=_lr("end"))
    warmup: int = _optimizer(0, "iterations in which the learning rate rises to lr before its schedule", least=0)

    # How soft weights become hard: β, ProxQuant's λ, and the step that rounds for good.
    beta_schedule: str = _anneal("geometric", "β over time", choices=(*_SCHEDULES, _OWN), used=_ANNEALED)
    beta_scale: float = _anneal(1.02, "factor every beta_interval", least=1, most=_LARGEST_BETA, used=_beta("scale"))
    beta_interval: int = _anneal(200, "iterations; see beta_scale", least=1, used=_beta("every"))
    beta_cap: float = _anneal(_LARGEST_BETA, "largest β", least=1, most=_LARGEST_BETA, used=_beta("cap"))
    beta_end: float = _anneal(1e4, "last β", least=1, most=_LARGEST_BETA, used=_beta("end"))
    pq_rate: float = _anneal(0.0001, "λ of ProxQuant per epoch", least=0, most=1e35, used="method=pq,pq-levels")
    finalize_at: float = _anneal(1.0, "part of training before rounding", least=1e-9, most=1, used="method!=ref")

    # The loss.
    label_smoothing: float = _objective(
        0.0, "share of the target spread over all classes", least=0, most=1, used="hard_share!=0.0"
    )
    logit_scale: float = _objective(1.0, "constant factor of the logits", least=1e-6, most=1e6)
    teacher: str = _objective("", "network to distil from: a run (its best), a packed file, or MODULE:FUNCTION")
    temperature: float = _objective(
        4.0, "of both softmaxes in distillation", least=1e-3, most=1e3, used="teacher!= hard_share!=1.0"
    )
    hard_share: float = _objective(0.1, "weight of the labels beside the teacher", least=0, most=1, used="teacher!=")

    # Training, and its arithmetic; auto is chosen for speed.
    iterations: int = _training(100000, "training steps", least=1, most=1e15)
    epochs: float = _training(0.0, "passes over the training images, in place of iterations", least=0, most=1e9)
    rescale: bool = _training(True, "stretch the recipe's lr and β schedules when iterations change")
    batch_size: int = _training(128, "images per step, of all processes together", least=1)
    sync_norms: bool = _training(False, "batch norm over the images of all processes (SyncBatchNorm, on CUDA)")
    keep: str = _training("best", "network to test and store: best on validation, or last", choices=("best", "last"))
    eval_every: int = _training(100, "iterations between validations of the rounded network; 0 for an epoch", least=0)
    recalibrate: int = _training(0, "batches to recompute the final batch-norm statistics from; 0 keeps them", least=0)
    seed: int = _training(0, "of initial weights and batches", least=-(2**63), most=2**63 - 1)
    precision: str = _training("auto", "bfloat16 is autocast, auto on CUDA", choices=("auto", "float32", "bfloat16"))
    channels_last: bool | None = _training(None, "memory format; auto is channels_last where torch computes it right")
    compile: bool | None = _training(None, "torch.compile; auto is on CUDA only")
    deterministic: bool = _training(False, "torch's deterministic algorithms")

    # Where it is computed.
    device: str = _machine("auto", "cpu, cuda or cuda:N; auto is CUDA if there is one")
    data_root: str = _machine("data", "folder of the data sets")
    cache: str = _machine("", "folder for decoded copies of image files, made once; empty for none")
    workers: int = _machine(-1, "processes that read image files; -1 for one per core", least=-1, most=1024)
    accumulate: int = _machine(1, "parts of a batch that are computed one after the other, to save memory", least=1)
    threads: int = _machine(0, "on the CPU; 0 for torch's choice", least=0, most=1024)
    engine: str = _machine(
        "auto",
        "graph trains by a CUDA graph (on a CPU without one); auto is graph on CUDA, plain elsewhere",
        choices=("auto", "plain", "graph"),
    )

    # How often things are recorded.
    log_every: int = _logging(20, "iterations between records of the loss", least=1)
    histogram_every: int = _logging(0, "iterations between histograms of the weights; 0 for none", least=0)
    checkpoint_every: int = _logging(0, "iterations between checkpoints; 0 is once per minute", least=0)

    # Where the configuration comes from; cannot be overridden.
    recipe: str = _origin("", "name of the recipe")
    images: int = _origin(0, "number of training images")
    paper: float = _origin(0.0, "test accuracy in the paper's table, in percent")
    paper_top5: float = _origin(0.0, "top-5 accuracy in the paper's table, in percent")
    note: str = _origin("", "how the recipe differs from the paper")
    overrides: dict[str, Any] = _origin({}, "keys that were set beside the recipe")  # noqa: RUF009

    def __post_init__(self) -> None:
        for name, each in KEYS.items():
            each.check(name, self[name])
        if self.warmup >= self.iterations:
            raise ConfigError(f"warmup is {self.warmup}, but it must be below iterations, {self.iterations}")
        if self.train_on == "all" and self.keep == "best":
            raise ConfigError("train_on=all leaves no images to choose the best network by: add keep=last")
        if self.lifted_init and self.init:
            raise ConfigError("lifted_init draws the latents anew, so init would have no effect: leave one of them out")
        try:
            self.build_method()
            lr, beta = self.build_lr(), self.build_beta(1)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._check_range("the learning rate", lr, _LARGEST_LR, "lr and lr_scale")
        self._check_range("β", beta, _LARGEST_BETA, "beta_scale")

    def _check_range(self, what: str, schedule: Schedule, most: float, names: str) -> None:
        """Raises :class:`ConfigError` where a schedule leaves its range, at the start or the end of training."""
        try:
            ends = [float(schedule(step)) for step in (self.warmup, self.iterations - 1)]
        except OverflowError:
            ends = [math.inf]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{what} is not a number in every step: {error}") from error
        if wrong := [value for value in ends if not 0 <= value <= most]:
            limit = f"in {self.iterations} iterations, but it must stay from 0 to {most:g}"
            raise ConfigError(f"{what} reaches {wrong[0]:g} {limit}: change {names}")

    @classmethod
    def from_recipe(cls, name: str, overrides: Sequence[str] = ()) -> Config:
        """A recipe's configuration, changed by ``key=value`` strings; an unknown key raises :class:`ConfigError`.

        >>> Config.from_recipe("cifar10/resnet18/binary/bc", ["lrr=0.1"])
        Traceback (most recent call last):
        ...
        mirrorquant.train.config.ConfigError: There is no key 'lrr'. Did you mean 'lr'?
        """
        from mirrorquant.train import recipes  # which checks its files against the keys

        changed = dict(map(_parse, overrides))
        recipe = rescaled(recipes.get(name), changed)
        if "iterations" in changed:
            recipe.pop("epochs", None)
            if changed.get("epochs"):
                raise ConfigError("iterations and epochs both say how long training is: leave one of them out")
        return cls(**{**recipe, "recipe": name, **changed, "overrides": changed})

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def timed(self, batches_per_epoch: int) -> Config:
        """The configuration with the iterations that ``epochs`` mean, to which schedules are stretched.

        >>> config = Config(epochs=2.0, iterations=1000, warmup=100, beta_interval=10, eval_every=0).timed(250)
        >>> config.iterations, config.warmup, config.beta_interval, config.eval_every
        (500, 50, 5, 250)
        """
        iterations = max(1, round(self.epochs * batches_per_epoch)) if self.epochs else self.iterations
        return self._stretched(iterations, batches_per_epoch)

    def like(self, begun: Config) -> Config:
        """The configuration with the iterations of a run that may have begun with it."""
        return self._stretched(begun.iterations if self.epochs else self.iterations, begun.eval_every)

    def _stretched(self, iterations: int, batches_per_epoch: int) -> Config:
        values: dict[str, Any] = {"iterations": iterations, "eval_every": self.eval_every or batches_per_epoch}
        if self.epochs:
            stretched = rescaled(vars(self), {**self.overrides, "iterations": iterations})
            values |= {name: stretched[name] for name in _STRETCHED if name not in self.overrides}
        return dataclasses.replace(self, **values)

    def record(self) -> dict[str, Any]:
        """All values with the version, for files; :func:`upgrade` reads it."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    def moved(self, overrides: Sequence[str]) -> Config:
        """The same run elsewhere: only the keys of the machine and of logging may change.

        >>> Config().moved(["lr=0.1"])
        Traceback (most recent call last):
        ...
        mirrorquant.train.config.ConfigError: lr cannot change when a run resumes, only device, data_root, cache,
        workers, accumulate, threads, engine, log_every, histogram_every, checkpoint_every: start a new run
        """
        free = [name for name, each in KEYS.items() if each.section in MOVABLE]
        changed = dict(map(_parse, overrides))
        if other := [name for name in changed if name not in free]:
            raise ConfigError(f"{other[0]} cannot change when a run resumes, only {', '.join(free)}: start a new run")
        return dataclasses.replace(self, **changed, overrides={**self.overrides, **changed})

    @property
    def movable(self) -> list[str]:
        """The overrides with which a run may be resumed, as ``key=value``."""
        return [f"{name}={value}" for name, value in self.overrides.items() if KEYS[name].section in MOVABLE]

    @property
    def identity(self) -> str:
        """A digest of the experiment: of all keys but those of the machine, of logging and of the origin."""
        return _digest({name: self[name] for name, each in KEYS.items() if each.section not in _NOT_THE_EXPERIMENT})

    def idle_overrides(self) -> dict[str, str]:
        """The overrides that have no effect here, each with the reason."""
        idle = {}
        for name in self.overrides:
            conditions = re.findall(r"(\w+)(!?)=(\S*)", KEYS[name].used)
            known = [each for each in conditions if not (each[0].endswith("_schedule") and ":" in self[each[0]])]
            unmet = [other for other, no, values in known if (str(self[other]) in values.split(",")) == bool(no)]
            option = KEYS[name].section == "model" and name not in ("model", "init")
            if option and (":" in self.model or name not in models.options(self.model)):
                unmet.append("model")
            if unmet:
                value = self[unmet[0]]
                idle[name] = f"{unmet[0]} is {value if value or value != KEYS[unmet[0]].default else 'not set'}"
        return idle

    def build_method(self) -> Method:
        """The method, for its levels and its scale."""
        levels = Levels(*parse_levels(self.levels), scale=None if self.method == "ref" else parse_scale(self.scale))
        if ":" not in self.method:
            return methods.get(self.method, levels)
        try:
            made = imported("Method", self.method, ConfigError)(levels)
        except TypeError as error:
            raise ConfigError(f"method {self.method!r} cannot be made from levels: {error}") from error
        if not isinstance(made, Method):
            expected = "a method: name a subclass of mirrorquant.Method"
            raise ConfigError(f"method is {self.method!r}, which makes a {type(made).__name__}, expected {expected}")
        if type(made).project is Method.project:
            raise ConfigError(f"method {self.method!r} has no projection: define project(self, latent, beta)")
        if made.levels != levels or (made.scale is None) != (levels.scale is None):
            problem = (
                f"method {self.method!r} was called with {levels!r}, but is for {made.levels!r}, scale {made.scale}"
            )
            raise ConfigError(f"{problem}: pass on what it is called with, as in MD(levels, mirror=...)")
        return made

    def build_lr(self) -> Schedule:
        """The learning rate as a function of the iteration."""
        terms = {"start": self.lr, "scale": self.lr_scale, "every": self.lr_interval, "end": self.lr_end}
        schedule = _schedule(self.lr_schedule, steps=self.iterations - self.warmup, **terms)
        return schedules.warmup(schedule, self.warmup) if self.warmup else schedule

    def build_beta(self, batches_per_epoch: int) -> Schedule:
        """β as a function of the iteration; λ for ProxQuant."""
        if self.method in ("pq", "pq-levels"):
            return schedules.ramp(self.pq_rate, every=batches_per_epoch)
        terms = {"scale": self.beta_scale, "every": self.beta_interval, "cap": self.beta_cap, "end": self.beta_end}
        return _schedule(self.beta_schedule, start=1.0, steps=self.iterations, log=True, **terms)

    def text(self) -> str:
        """The content of a file: nested JSON with its version and its own checksum."""
        nested = {name: {k: self[k] for k, each in KEYS.items() if each.section == name} for name in _SECTIONS}
        content = {"version": VERSION, **nested}
        return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Config:
        """A configuration from a run's ``config.json``; an altered file raises :class:`ConfigError`."""
        try:
            return cls.parse(_files.read_regular(path), path)
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
            raise ConfigError(f"{path} was altered: its checksum does not match; {_REMEDY}")
        version, content = content.get("version", 1), upgrade(content)
        newer = [name for name in content if name not in KEYS]
        if newer or version not in range(1, VERSION + 1):
            what = f"has the key {newer[0]!r:.60}" if newer else f"is of version {version!r:.60}"
            raise ConfigError(f"{path} {what}, unknown to this version of mirrorquant: use the version that wrote it")
        try:
            return cls(**content)
        except ConfigError as error:
            method = content.get("method", cls.method)
            known = method in methods.names() or ":" in str(method)
            hint = "" if known else f" If it is a custom method, import its module first: {_IMPORT}"
            raise ConfigError(f"{path}: {error}{hint}") from error


KEYS: dict[str, Key] = {each.name: Key(str(each.type), **each.metadata) for each in dataclasses.fields(Config)}
"""All keys by name."""

_CHANGEABLE = {name: each for name, each in KEYS.items() if each.section != "origin"}


def upgrade(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of any version as a flat dictionary under their current names, without the version.

    >>> upgrade({"method": "pmf-authors", "lr": 0.1, "overrides": {"method": "pmf-authors"}})
    {'method': 'pmf', 'lr': 0.1, 'overrides': {'method': 'pmf'}}
    """
    current: dict[str, Any] = {}
    for name, value in values.items():
        current |= value if name in _SECTIONS and isinstance(value, dict) else {name: value}
    version = current.pop("version", 1)
    if version == 1 and isinstance(current.get("method"), str):
        current["method"] = methods.RENAMED.get(current["method"], current["method"])
    if current.get("engine") == "eager":  # as plain was called
        current["engine"] = "plain"
    if isinstance(current.get("overrides"), dict):
        current["overrides"] = upgrade({**current["overrides"], "version": version})
    return current


def rescaled(recipe: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe for the iterations in ``changed``: its schedules keep their shape, unless ``rescale`` is false.

    An interval is rounded, for which the factor of β makes up: β ends as before. If the interval itself is changed, the
    factor stays. ProxQuant's rate is per epoch, so it is divided by what the others are multiplied by.

    >>> rescaled({"iterations": 800, "beta_scale": 1.2, "beta_interval": 5, "lr_interval": 300}, {"iterations": 240})
    {'iterations': 800, 'beta_scale': 1.27519028302, 'beta_interval': 2, 'lr_interval': 90}
    """
    before, new = recipe.get("iterations", Config.iterations), dict(recipe)
    after = changed.get("iterations", before)
    KEYS["iterations"].check("iterations", after)
    if before == after or not {"rescale": True, **recipe, **changed}["rescale"]:
        return new
    for name in new.keys() & set(_INTERVALS):
        new[name] = max(1, round(recipe[name] * after / before)) if recipe[name] else 0
    if "warmup" in new:
        new["warmup"] = min(new["warmup"], after - 1)
    if "beta_interval" in new and "beta_interval" not in changed:
        power = new["beta_interval"] * before / (recipe["beta_interval"] * after)
        new["beta_scale"] = min(_short(recipe["beta_scale"] ** power), _LARGEST_BETA)
    if "pq_rate" in new:
        new["pq_rate"] = _short(recipe["pq_rate"] * before / after)
    return new


def _short(value: float) -> float:
    """A number without the digits in which machines differ."""
    return float(f"{value:.12g}")


def parse_levels(text: str) -> Levels:
    """``binary``, ``ternary``, or numbers such as ``-1,0,0.5,1``.

    >>> parse_levels("-1,0,0.5")
    Levels(-1.0, 0.0, 0.5)
    """
    try:
        return {"binary": BINARY, "ternary": TERNARY}.get(text) or Levels(*map(float, text.split(",")))
    except ValueError as error:
        raise ConfigError(f"levels is {text!r}, but it must be {KEYS['levels'].help}: {error}") from error


def parse_scale(text: str) -> Scale | None:
    """``tensor`` or ``channel``, alone or with how the scale is found, as in ``channel-learnt``; empty for none.

    >>> parse_scale("channel-fixed-he")
    Scale(per='channel', how='fixed', size='he')
    """
    try:
        return Scale(*text.split("-")) if text else None
    except (ValueError, TypeError) as error:
        expected = "tensor or channel, which -fixed, -computed or -learnt may follow, and then -he"
        raise ConfigError(f"scale is {text!r}, but it must be {expected}: {error}") from error


def _schedule(name: str, **terms: Any) -> Schedule:
    """The schedule of that name, or one of the user's own, which gets the terms that its signature has."""
    if ":" not in name:
        return schedules.build(name, **terms)
    function = imported("Schedule", name, ConfigError)
    signature = inspect.signature(function)
    known = {term: value for term, value in terms.items() if term in signature.parameters}
    try:
        signature.bind(**known)
    except TypeError as error:
        raise ConfigError(f"schedule {name!r} cannot be made: {error}; it may take {', '.join(terms)}") from error
    made = function(**known)
    if not callable(made):
        expected = "a function of the step: name a class with __call__(self, step)"
        raise ConfigError(f"schedule {name!r} makes a {type(made).__name__}, expected {expected}")
    return made  # type: ignore[no-any-return]


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False, "auto": None}
_TYPES: dict[str, tuple[tuple[type, ...], Callable[[str], Any]]] = {  # of values, and how they are parsed
    "int": ((int,), int),
    "float": ((int, float), float),
    "str": ((str,), str),
    "bool": ((bool,), lambda text: _BOOLEANS[text.lower()]),
    "bool | None": ((bool, type(None)), lambda text: _BOOLEANS[text.lower()]),
    "list[str]": ((list,), lambda text: [part for part in text.split(",") if part]),
    "dict[str, Any]": ((dict,), json.loads),
}


def _is(kind: str, value: Any) -> bool:
    """Whether a value has the declared type of a key; for overrides, whether each of them has its own."""
    if type(value) not in _TYPES[kind][0]:
        return False
    if isinstance(value, dict):
        return value.keys() <= _CHANGEABLE.keys() and all(_is(KEYS[name].type, part) for name, part in value.items())
    return not isinstance(value, list) or all(isinstance(part, str) for part in value)


def _parse(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not an override: write key=value, as in lr=0.01")
    if name not in _CHANGEABLE:
        hint = suggestion(name, _CHANGEABLE) or " 'mirrorquant train --help' lists them."
        raise ConfigError(f"There is no key {name!r}.{hint}")
    kind = KEYS[name].type
    try:
        return name, _TYPES[kind][1](value)
    except (ValueError, KeyError):
        expected = {"int": "a whole number", "float": "a number", "bool": "true or false"}
        example = str(KEYS[name].default).lower() if kind in expected else "auto"
        limit = f"{expected.get(kind, 'true, false or auto')}, as in {name}={example}"
        raise ConfigError(f"{name} is {value!r}, but it must be {limit}") from None
