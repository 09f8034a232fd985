"""From a configuration to what it describes: device, data, model, optimizer, objective, and the task of all of them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from mirrorquant import models
from mirrorquant.data import Loader
from mirrorquant.data import load as load_data
from mirrorquant.health import unwarned
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.select import split
from mirrorquant.train.config import Config, ConfigError
from mirrorquant.train.objective import Objective
from mirrorquant.train.task import Task

__all__ = ["device", "model", "objective", "optimizer", "resolve", "task"]


def device(config: Config) -> torch.device:
    """The device; auto is CUDA where there is one."""
    name = config.machine.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda|cuda:(0|[1-9]\d?)", name, re.ASCII):
        raise ConfigError(f"device is {name!r}, but it must be auto, cpu, cuda or cuda:N")
    found = torch.device(name)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def resolve(config: Config) -> Config:
    """The configuration with the precision that auto stands for on its device: it stays if the run moves."""
    if config.training.precision != "auto":
        return config
    return config.replace(precision="bfloat16" if device(config).type == "cuda" else "float32")


def model(config: Config, classes: int, channels: int) -> nn.Module:
    """The model with the paper's initialization, drawn from the seed; a custom model as it comes."""
    torch.manual_seed(config.training.seed)
    name = config.model.name
    if ":" in name:
        return models.build(name, classes)
    options = {"channels": channels, **vars(config.model)}
    built = models.build(name, classes, **{key: options[key] for key in models.options(name) if key in options})
    models.initialize(built, torch.Generator().manual_seed(config.training.seed))
    return built


def optimizer(config: Config, model: nn.Module, batches_per_epoch: int) -> MirrorDescent:
    """The base optimizer of the configuration, wrapped by its method."""
    learnt = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not learnt:
        raise ConfigError(
            f"model {config.model.name} has no parameter that requires a gradient: nothing can be trained"
        )
    skip, own = config.method.skip, config.optimizer
    groups: list[dict[str, Any]] = [{"params": learnt}]
    options: dict[str, Any] = {"lr": own.lr, "weight_decay": own.weight_decay}
    if own.name == "sgd":
        options |= {"momentum": own.momentum, "nesterov": own.nesterov}
    try:
        if config.method.name != "ref":  # the paper quantizes everything; a custom model may have what must stay float
            groups = split(model, skip=skip, everything=":" not in config.model.name)
        classes = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        base: torch.optim.Optimizer = classes[own.name](groups, **options)
        with unwarned():  # the paper's ternary networks start at zero, by design; a run says how it ended
            return MirrorDescent(base, method=config.build_method(), anneal=config.build_beta(batches_per_epoch))
    except ValueError as error:
        about = f"skip is {','.join(skip)}" if skip else f"model {config.model.name}"
        raise ConfigError(f"{about}: {error}") from error


def objective(config: Config, classes: int, device: torch.device) -> Objective:
    """The objective, with the best network of the teacher's run if there is one."""
    options = dict(vars(config.objective))
    if not options["teacher"]:
        return Objective(**{**options, "teacher": None})
    from mirrorquant.train.run_folder import Best  # which builds models itself

    best = Best.load(options["teacher"])
    if best.images["classes"] != classes:
        raise ConfigError(f"teacher {options['teacher']} has {best.images['classes']} classes, but there are {classes}")
    return Objective(**{**options, "teacher": best.model.requires_grad_(False).eval().to(device)})


def task(config: Config, *, download: bool = True) -> Task:
    """Everything that an engine needs, on the device of the configuration."""
    place, training = device(config), config.training
    data = load_data(config.data.name, config.machine.data_root, download=download).to(place)
    classes = len(data.classes)
    try:
        loader = Loader(
            data.train,
            batch_size=training.batch_size,
            augment=config.data.augment or data.augment,
            mean=data.mean,
            std=data.std,
            seed=training.seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    network = model(config, classes, data.shape[0]).to(place)
    channels_last = training.channels_last
    if channels_last is None:
        channels_last = place.type == "cuda" or not any(map(_breaks_channels_last, network.modules()))
    if channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Task(
        model=network,
        opt=optimizer(config, network, loader.batches_per_epoch),
        loader=loader,
        data=data,
        objective=objective(config, classes, place),
        lr=config.build_lr(),
        device=place,
        dtype=torch.bfloat16 if resolve(config).training.precision == "bfloat16" else torch.float32,
        channels_last=channels_last,
        compile=place.type == "cuda" if training.compile is None else training.compile,
    )


def _breaks_channels_last(module: nn.Module) -> bool:
    """Whether torch 2.13 computes the gradient of its weight wrongly in channels_last on a CPU (2 to 7 channels)."""
    if not isinstance(module, nn.Conv2d) or max(module.kernel_size) > 1:
        return False
    return max(module.stride) > 1 and 1 < module.in_channels // module.groups < 8
