"""Builds what a configuration describes: device, model, optimizer, objective, and the task made of all of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from mirrorquant import _files, models, packing
from mirrorquant.data import Data, Extra, Loader, Photos, StreamedLoader, cached
from mirrorquant.data import load as load_data
from mirrorquant.data import loader as load_batches
from mirrorquant.errors import MirrorquantError
from mirrorquant.health import unwarned
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.select import NORMS, split
from mirrorquant.train import checkpoint, recipes
from mirrorquant.train.config import KEYS, Config, ConfigError
from mirrorquant.train.distributed import ALONE, World, own_gpu, world
from mirrorquant.train.objective import Objective, Teacher
from mirrorquant.train.task import Task

__all__ = ["data", "device", "model", "objective", "optimizer", "resolve", "start_from", "task"]


def device(config: Config) -> torch.device:
    """The device; auto is CUDA where there is one."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda|cuda:(0|[1-9]\d?)", name, re.ASCII):
        raise ConfigError(f"device is {name!r}, but it must be auto, cpu, cuda or cuda:N")
    if ":" in name and world().size > 1:
        raise ConfigError(f"device is {name!r}, but several processes need a GPU each: use device=cuda")
    found = torch.device("cuda", own_gpu()) if name == "cuda" else torch.device(name)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def resolve(config: Config) -> Config:
    """The configuration with the precision that auto means on its device; it stays the same if the run moves."""
    if config.precision != "auto":
        return config
    return dataclasses.replace(config, precision="bfloat16" if device(config).type == "cuda" else "float32")


def model(config: Config, classes: int, channels: int) -> nn.Module:
    """The model with the paper's initialization, drawn from the seed; a custom model draws its own from torch's."""
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
            raise ConfigError(f"init {file} has {name}, which the model lacks: {remedy}")
        if name not in saved and leaf == "num_batches_tracked":  # older checkpoints have none
            continue
        if name not in saved:
            remedy = "its batch norm is not affine: add affine=false" if norm else "it must be of the same network"
            raise ConfigError(f"init {file} has no {name}, which the model has: {remedy}")
        if saved[name].shape != own[name].shape:
            shapes = f"{tuple(saved[name].shape)}, but the model needs {tuple(own[name].shape)}"
            packed = saved[name].dtype == torch.uint8 and own[name].is_floating_point()
            remedy = "it is packed: name the run instead" if packed else "it must be of the same network"
            raise ConfigError(f"{name} of init {file} has shape {shapes}: {remedy}")
    model.load_state_dict(saved)


def _require(key: str, name: str) -> None:
    """Raises :class:`ConfigError` with a command if the network of another recipe is needed and not there yet."""
    path = Path(name)
    if name and not path.exists() and (words := recipes.words(path.name)):
        raise ConfigError(f"{key} {name} does not exist: train it first, with mirrorquant train {words} --out {name}")


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
    except checkpoint.CheckpointError as error:
        raise ConfigError(f"init {error}") from error
    except OSError as error:
        raise ConfigError(f"init {path} cannot be read ({error.strerror})") from error
    except Exception as error:  # a crafted file can fail in any way
        expected = "expected a state_dict by torch.save, a safetensors file or a run"
        raise ConfigError(f"init {path} cannot be loaded ({type(error).__name__}), {expected}") from error
    state = state.get("model", state.get("state_dict", state)) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ConfigError(f"init {path} holds no state_dict: write it by torch.save(model.state_dict(), {str(path)!r})")
    wrapped = all(name.startswith("module.") for name in state)  # by DataParallel
    return {name.removeprefix("module."): tensor for name, tensor in state.items()} if wrapped else state


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
            everything = ":" not in config.model
            groups = split(model, skip=config.skip, everything=everything, norms=config.quantize_norms)
        groups = groups if config.decay_norms else _without_norm_decay(groups, model)
        base: torch.optim.Optimizer = classes[config.optimizer](groups, **options)
        with unwarned():  # the paper's ternary networks start at zero, by design; the end of a run reports problems
            opt = MirrorDescent(base, method=config.build_method(), anneal=config.build_beta(batches_per_epoch))
    except ValueError as error:
        about = f"skip is {','.join(config.skip)}" if config.skip else f"model {config.model}"
        raise ConfigError(f"{about}: {error}") from error
    if config.lifted_init:
        _draw_latents(opt, torch.Generator().manual_seed(config.seed))
    return opt


@torch.no_grad()
def _draw_latents(opt: MirrorDescent, generator: torch.Generator) -> None:
    """Draws the latents of lifted methods, like the weights of a layer that has d times as many outputs.

    Each weight then starts from d independent numbers.
    """
    for group in opt.param_groups:
        for p in [p for p in group["params"] if p in opt.state and group["method"].lifts]:
            latent, count = opt.latent(p), len(group["method"].levels)
            first, *rest = p.shape or [1]
            values = models.drawn((count * first, *rest), generator)
            latent.copy_(values.view(first, count, *rest).movedim(1, 0).view(latent.shape))
            latent.copy_(group["method"].settled(opt.state[p], group["beta"], group["lr"]))
    opt.refresh()


def _without_norm_decay(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """The same groups, with the parameters of normalization layers and PReLU in their own, without weight decay."""
    norms = {p for m in model.modules() if isinstance(m, (*NORMS, nn.PReLU)) for p in m.parameters(recurse=False)}
    found = []
    for group in groups:
        why = group.get("why") or [""] * len(group["params"])
        for apart in (False, True):
            own = [
                (named, text) for named, text in zip(group["params"], why, strict=True) if (named[1] in norms) == apart
            ]
            if own:
                params, texts = (list(column) for column in zip(*own, strict=True))
                changed = {"params": params, **({"why": texts} if "why" in group else {})}
                found.append({**group, **changed, **({"weight_decay": 0.0} if apart else {})})
    return found


def objective(config: Config, classes: int, device: torch.device) -> Objective:
    """The objective, with its teacher on the device if there is one."""
    options = {each.name: config[each.name] for each in dataclasses.fields(Objective)}
    teacher = _teacher(config, classes).to(device) if config.teacher else None
    return Objective(**{**options, "teacher": teacher})


def _teacher(config: Config, classes: int) -> Teacher:
    """A run's best network or a packed one, with its factor on the logits, or the module that a function returns."""
    from mirrorquant.train.run_folder import Best  # which builds models itself

    name = config.teacher
    try:
        if not Path(name).exists() and ":" in name:
            return Teacher(name, models.build(name, classes))
        if name.endswith(".safetensors"):
            packed = packing.load(name)
            network, about = packing.unpack(packed), packed.about
        else:
            best = Best.load(name)
            network, about = best.model, best.about
        KEYS["logit_scale"].check("logit_scale", scale := about.get("logit_scale", 1.0))
    except MirrorquantError as error:
        raise ConfigError(f"teacher {name}: {error}") from error
    if about.get("classes", classes) != classes:
        raise ConfigError(f"teacher {name} has {about['classes']} classes, but there are {classes}")
    data = str(about.get("data", config.data))
    if data != config.data and ":" not in data + config.data:
        raise ConfigError(f"teacher {name} was trained on {data}, but this run trains on {config.data}")
    return Teacher(name, network, scale)


def data(config: Config, *, download: bool = True, say: Callable[[str], None] = print) -> Data:
    """The images, where the configuration wants them, at the size that it wants."""
    found = load_data(config.data, config.data_root, download=download)
    if config.image_size:
        found = found.resized(config.image_size)
    if config.train_on == "all":
        found = found.joined()
    if config.cache:
        if not isinstance(found.train, Photos):
            raise ConfigError(f"cache is {config.cache}, but the images of {config.data} are in memory: leave it out")
        found = cached(found, Path(config.cache), say)
    return found.to(device(config))


def task(
    config: Config,
    *,
    download: bool = True,
    init: bool = True,
    world: World = ALONE,
    say: Callable[[str], None] = print,
) -> Task:
    """Everything that an engine needs, on the device of the configuration.

    A run that resumes from a checkpoint needs neither ``download`` nor ``init``, the file of pretrained weights.
    """
    place = device(config)
    _require("teacher", config.teacher)
    if init:
        _require("init", config.init)
    with world.first():
        images = data(config, download=download, say=say)
    loader = _batches(config, images, world)
    config = config.timed(loader.batches_per_epoch)
    torch.manual_seed(config.seed)
    network = model(config, len(images.classes), images.shape[0])
    if init and config.init:
        start_from(config.init, network)
    network = _placed(network, config, place)
    channels_last = config.channels_last
    if channels_last is None:
        channels_last = place.type == "cuda" or not any(map(_breaks_channels_last, network.modules()))
    if channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Task(
        model=network,
        opt=optimizer(config, network, loader.batches_per_epoch),
        loader=loader,
        data=images,
        objective=objective(config, len(images.classes), place),
        lr=config.build_lr(),
        device=place,
        dtype=getattr(torch, resolve(config).precision),
        channels_last=channels_last,
        compile=place.type == "cuda" if config.compile is None else config.compile,
        accumulate=config.accumulate,
        workers=config.workers,
        world=world,
    )


def _batches(config: Config, images: Data, world: World) -> Loader | StreamedLoader:
    """This process's share of the training batches."""
    share = config.accumulate * world.size
    if config.batch_size % share:
        parts = f"accumulate={config.accumulate} and {world.size} processes"
        raise ConfigError(f"batch_size is {config.batch_size}, but it must be divisible by {share} for {parts}")
    if config.cutout >= 2 * max(images.shape[1:]):
        size = "×".join(map(str, images.shape[1:]))
        raise ConfigError(f"cutout is {config.cutout}, which erases all of each {size} image: make it smaller")
    options: dict[str, Any] = {"batch_size": config.batch_size, "seed": config.seed, "augment": config.augment}
    try:
        extra = Extra(**{each.name: config[each.name] for each in dataclasses.fields(Extra)})
        return load_batches(images, **options, part=world.part, workers=config.workers, extra=extra)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _placed(network: nn.Module, config: Config, place: torch.device) -> nn.Module:
    """The network on its device, with batch norms for several processes and for batches in several parts."""
    if config.sync_norms:
        if place.type != "cuda":
            raise ConfigError("sync_norms needs CUDA: on a CPU torch has no batch norm over several processes")
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    if config.accumulate > 1:  # 1 - (1 - m) is not m to the last bit
        _slow_down(network, config.accumulate)
    return network.to(place)


def _slow_down(network: nn.Module, parts: int) -> None:
    """Batch norms whose running statistics move as far in so many parts of a batch as in a whole one."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is not None:  # None: a plain average
            module.momentum = 1 - (1 - module.momentum) ** (1 / parts)


def _breaks_channels_last(module: nn.Module) -> bool:
    """Whether torch 2.13 computes the gradient of its weight wrongly in channels_last on a CPU (2 to 7 channels)."""
    if not isinstance(module, nn.Conv2d) or max(module.kernel_size) > 1:
        return False
    return max(module.stride) > 1 and 1 < module.in_channels // module.groups < 8
