"""Builds what a configuration describes: device, model, optimizer, objective, and the task made of all of them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from mirrorquant import _files, models
from mirrorquant.data import Loader
from mirrorquant.data import load as load_data
from mirrorquant.health import unwarned
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.select import NORMS, split
from mirrorquant.train import checkpoint
from mirrorquant.train.config import Config, ConfigError
from mirrorquant.train.objective import Objective
from mirrorquant.train.task import Task

__all__ = ["device", "model", "objective", "optimizer", "resolve", "start_from", "task"]


def device(config: Config) -> torch.device:
    """The device; auto is CUDA where there is one."""
    name = config.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda|cuda:(0|[1-9]\d?)", name, re.ASCII):
        raise ConfigError(f"device is {name!r}, but it must be auto, cpu, cuda or cuda:N")
    found = torch.device(name)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def resolve(config: Config) -> Config:
    """The configuration with the precision that auto means on its device; it stays the same if the run moves."""
    if config.precision != "auto":
        return config
    return dataclasses.replace(config, precision="bfloat16" if device(config).type == "cuda" else "float32")


def model(config: Config, classes: int, channels: int) -> nn.Module:
    """The model with the paper's initialization, drawn from the seed; a custom model initializes itself."""
    torch.manual_seed(config.seed)
    if ":" in config.model:
        return models.build(config.model, classes)
    options = {"channels": channels, **dataclasses.asdict(config)}
    chosen = {name: options[name] for name in models.options(config.model) if name in options}
    built = models.build(config.model, classes, **chosen)
    models.initialize(built, torch.Generator().manual_seed(config.seed))
    return built


def start_from(file: str, model: nn.Module) -> None:
    """Loads pretrained weights: a state_dict by torch.save, a safetensors file, a run's folder or its ``best.pt``.

    Raises:
        ConfigError: the file cannot be read, or its tensors are not those of the model; names the first difference.
    """
    saved, own = _saved(Path(file)), model.state_dict()
    for name in dict.fromkeys([*own, *saved]):
        path, _, leaf = name.rpartition(".")
        norm = leaf in ("weight", "bias") and isinstance(dict(model.named_modules()).get(path), NORMS)
        if name not in own:
            remedy = "its batch norm is affine: add affine=true" if norm else "it must be of the same network"
            raise ConfigError(f"init {file} has {name}, which the model has not: {remedy}")
        if name not in saved:
            remedy = "its batch norm is not affine: add affine=false" if norm else "it must be of the same network"
            raise ConfigError(f"init {file} has no {name}, which the model has: {remedy}")
        if saved[name].shape != own[name].shape:
            shapes = f"{tuple(saved[name].shape)}, but the model needs {tuple(own[name].shape)}"
            packed = saved[name].dtype == torch.uint8 and own[name].is_floating_point()
            remedy = "it is packed: name the run instead" if packed else "it must be of the same network"
            raise ConfigError(f"{name} of init {file} has shape {shapes}: {remedy}")
    model.load_state_dict(saved)


def _saved(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name."""
    from mirrorquant.train.run_folder import BEST, RunFolder  # which builds models itself

    try:
        if path.is_dir() or path.name in BEST:
            state: Any = checkpoint.load(RunFolder(path).best if path.is_dir() else path)
        elif path.suffix == ".safetensors":
            state = safetensors.load(_files.read_regular(path))
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except checkpoint.CheckpointError:
        raise
    except OSError as error:
        raise ConfigError(f"init {path} cannot be read ({error.strerror})") from error
    except Exception as error:  # a crafted file can fail in any way
        expected = "expected a state_dict by torch.save, a safetensors file or a run"
        raise ConfigError(f"init {path} cannot be loaded ({type(error).__name__}), {expected}") from error
    state = state.get("model", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ConfigError(f"init {path} holds no state_dict: write it by torch.save(model.state_dict(), {str(path)!r})")
    return state


def optimizer(config: Config, model: nn.Module, batches_per_epoch: int) -> MirrorDescent:
    """The base optimizer of the configuration, wrapped by its method."""
    learnt = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not learnt:
        raise ConfigError(f"model {config.model} has no parameter that requires a gradient: nothing can be trained")
    classes = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        options |= {"momentum": config.momentum, "nesterov": config.nesterov}
    groups: list[dict[str, Any]] = [{"params": learnt}]
    try:
        if config.method != "ref":  # the paper quantizes everything; in a custom model, some parameters must stay float
            groups = split(model, skip=config.skip, everything=":" not in config.model)
        base: torch.optim.Optimizer = classes[config.optimizer](groups, **options)
        with unwarned():  # the paper's ternary networks start at zero, by design; the end of a run reports problems
            return MirrorDescent(base, method=config.build_method(), anneal=config.build_beta(batches_per_epoch))
    except ValueError as error:
        about = f"skip is {','.join(config.skip)}" if config.skip else f"model {config.model}"
        raise ConfigError(f"{about}: {error}") from error


def objective(config: Config, classes: int, device: torch.device) -> Objective:
    """The objective, with the best network of the teacher's run if there is one."""
    options = {each.name: config[each.name] for each in dataclasses.fields(Objective)}
    teacher = None
    if config.teacher:
        from mirrorquant.train.run_folder import Best  # which builds models itself

        best = Best.load(config.teacher)
        if best.images["classes"] != classes:
            raise ConfigError(f"teacher {config.teacher} has {best.images['classes']} classes, but there are {classes}")
        teacher = best.model.requires_grad_(False).eval().to(device)
    return Objective(**{**options, "teacher": teacher})


def task(config: Config, *, download: bool = True, init: bool = True) -> Task:
    """Everything that an engine needs, on the device of the configuration.

    A run that goes on from a checkpoint needs neither ``download`` nor ``init``, the file of pretrained weights.
    """
    place = device(config)
    data = load_data(config.data, config.data_root, download=download).to(place)
    classes = len(data.classes)
    try:
        loader = Loader(data, batch_size=config.batch_size, seed=config.seed, augment=config.augment)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    network = model(config, classes, data.shape[0])
    if init and config.init:
        start_from(config.init, network)
    network.to(place)
    channels_last = config.channels_last
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
        dtype=getattr(torch, resolve(config).precision),
        channels_last=channels_last,
        compile=place.type == "cuda" if config.compile is None else config.compile,
    )


def _breaks_channels_last(module: nn.Module) -> bool:
    """Whether torch 2.13 computes the gradient of its weight wrongly in channels_last on a CPU (2 to 7 channels)."""
    if not isinstance(module, nn.Conv2d) or max(module.kernel_size) > 1:
        return False
    return max(module.stride) > 1 and 1 < module.in_channels // module.groups < 8
