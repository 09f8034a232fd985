"""Selection: which parameters are quantized, by name pattern and module type.

By default these are the weights of layers that multiply by them; everything else stays in float.

>>> from torch import nn
>>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU(), nn.Flatten(), nn.Linear(8, 2))
>>> floats, quantized = split(model, skip=["4"])
>>> [name for name, _ in quantized["params"]]
['0.weight']
>>> [name for name, _ in floats["params"]]
['0.bias', '1.weight', '1.bias', '2.weight', '4.weight', '4.bias']
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mirrorquant._owners import note_sharded

__all__ = ["NORMS", "listed", "split", "summarized", "unwrapped"]

NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
EMBEDDINGS: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)
MULTIPLYING: tuple[type[nn.Module], ...] = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.MultiheadAttention)
MULTIPLYING += (nn.RNNBase, nn.RNNCellBase)

Pattern = str | type[nn.Module]
Names = dict[nn.Parameter, list[str]]
_NORM, _VECTOR, _EMBEDDING = "normalization", "bias or other vector", "embedding"
_OTHER = "not a weight of a layer that multiplies"


def split(
    model: nn.Module,
    *,
    skip: Pattern | Sequence[Pattern] = (),
    only: Pattern | Sequence[Pattern] | None = None,
    ends: bool = True,
    everything: bool = False,
    norms: bool = False,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: one that stays in float (method ``ref``), and one to be quantized.

    By default the weights of two or more dimensions of linear, bilinear, convolutional, attention and recurrent layers
    (and of subclasses of these) are quantized. Biases, normalization layers, embeddings (also where one is tied to a
    linear layer), slopes, temperatures, positional embeddings and all other parameters of custom modules stay in float.
    ``print(opt)`` shows the selection, and a reason for each parameter in float.

    A pattern is a shell-style glob, matched against a parameter's full name and the path of each module above it, or a
    module type. ``"fc"`` is the module of that name, ``"*bn*"`` all that has bn in its path, ``"*.bias"`` all biases,
    ``nn.Linear`` all linear layers. A tied parameter is matched by any of its names.

    Args:
        model: any module; for one inside torch.compile or DistributedDataParallel, the original names count.
        skip: patterns of parameters that stay in float.
        only: patterns that narrow the selection. A pattern that matches none of the default weights selects all its
            matches: ``only=["*.weight", "pos_embed", nn.Embedding]`` adds a parameter of that name and all embeddings.
        ends: whether the first and the last of the layers that would be quantized are, too.
        everything: select every trained parameter except those of normalization layers, as the paper does.
        norms: also select the scales and shifts of normalization layers.

    Returns:
        One or two groups of named parameters, float first. Frozen parameters are in neither. The float group's ``why``
        has a reason for each of its parameters.

    Example:
        >>> groups = split(nn.Sequential(nn.Linear(64, 64), nn.PReLU()), everything=True)
        >>> [[name for name, _ in group["params"]] for group in groups]
        [['0.weight', '0.bias', '1.weight']]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}, expected a torch.nn.Module: pass the model itself")
    model = unwrapped(model)
    note_sharded(model)
    skip, only = _listed(skip), None if only is None else _listed(only)
    names = {p: all_names for p, all_names in _names(model).items() if p.requires_grad}
    if not names:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient: nothing can be quantized")
    reasons = _reasons(model, names, everything=everything, norms=norms)
    if only is not None:
        found = [_matching(model, names, pattern) for pattern in only]
        allowed = {p for matching in found for p in ({p for p in matching if not reasons[p]} or matching)}
        reasons = {p: "" if p in allowed else "not in only" for p in names}
        if not norms:
            reasons |= {p: _NORM for p in _owned(model, NORMS) if p in allowed}
    reasons |= {p: "skipped" for pattern in skip for p in _matching(model, names, pattern)}
    layers = [m for m in model.modules() if any(reasons.get(p) == "" for p in m.parameters(recurse=False))]
    if not ends and layers:
        for layer, reason in ((layers[0], "first layer"), (layers[-1], "last layer")):
            reasons |= {p: reason for p in layer.parameters(recurse=False) if reasons.get(p) == ""}
    quantized = [(all_names[0], p) for p, all_names in names.items() if not reasons[p]]
    floats = [(all_names[0], p) for p, all_names in names.items() if reasons[p]]
    why = [reasons[p] for _, p in floats]
    if not quantized:
        said = summarized([(name, reasons[p]) for name, p in floats])
        raise ValueError(
            f"none of {len(floats)} parameters is left to quantize ({said}): name parameters with only=, or choose "
            "everything=True; normalization layers stay in float unless norms=True, the first and the last layer if "
            "ends=False"
        )
    for name, _ in quantized:
        _refuse_computed(model, name)
    return ([{"params": floats, "method": "ref", "why": why}] if floats else []) + [{"params": quantized}]


def _reasons(model: nn.Module, names: Names, *, everything: bool, norms: bool) -> dict[torch.Tensor, str]:
    """Why each parameter stays in float without any pattern; empty for one that is quantized."""
    multiplied, embedded, normalizing = _multiplied(model), _owned(model, EMBEDDINGS), _owned(model, NORMS)
    reasons: dict[torch.Tensor, str] = {}
    for p, all_names in names.items():
        if is_lazy(p):
            raise ValueError(f"{all_names[0]} has no shape yet: run one batch through the model, then split it")
        if p in normalizing:
            reasons[p] = "" if norms else _NORM
        elif everything or (p in multiplied and p not in embedded):
            reasons[p] = ""
        else:
            reasons[p] = _EMBEDDING if p in embedded else _VECTOR if p.dim() < 2 else _OTHER
    return reasons


def _owned(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[torch.Tensor]:
    return {p for module in model.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)}


def _multiplied(model: nn.Module) -> set[torch.Tensor]:
    """The weights of layers that multiply by them; for a parametrized weight, the parameters behind it."""
    found: set[torch.Tensor] = set()
    for module in model.modules():
        if isinstance(module, MULTIPLYING):
            own = [*module.named_parameters(recurse=False)]
            for name, computed in getattr(module, "parametrizations", {}).items():
                own += [(name, p) for p in computed.parameters(recurse=False)]
            found |= {p for name, p in own if "weight" in name and not is_lazy(p) and p.dim() > 1}
    return found


def summarized(named: Sequence[tuple[str, str]]) -> str:
    """Names by reason, in short: how many there are, and the first ones.

    >>> summarized([("a", "skipped"), ("b", "skipped"), ("c", "skipped"), ("d", "frozen")])
    'skipped (3: a, b, ...), frozen (1: d)'
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in named:
        by_reason.setdefault(reason, []).append(name)
    return ", ".join(f"{reason} ({len(names)}: {listed(names)})" for reason, names in by_reason.items())


def listed(names: Sequence[str]) -> str:
    """The first two names."""
    return ", ".join([*names[:2], "..."] if len(names) > 2 else names)


def _refuse_computed(model: nn.Module, name: str) -> None:
    """Raises if a layer computes its weight from this parameter, by a parametrization or a hook of torch.nn.utils."""
    path, _, leaf = name.rpartition(".")
    whole = vars(model.get_submodule(path)).get(leaf.rpartition("_")[0])
    hooked = leaf.endswith(("_g", "_v", "_orig")) and isinstance(whole, torch.Tensor)
    if hooked or "parametrizations" in path.split("."):
        raise ValueError(
            f"a layer computes its weight from {name} (by a parametrization, weight_norm, spectral_norm or pruning), "
            "so the weight would not be on the levels: remove that first, as with "
            "torch.nn.utils.parametrize.remove_parametrizations, or skip the layer"
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel and DistributedDataParallel, which prefix its names.

    >>> net = nn.Linear(2, 2)
    >>> unwrapped(nn.DataParallel(net)) is net
    True
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _names(model: nn.Module) -> Names:
    """Each parameter with all of its names, in the model's order."""
    names: Names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _matching(model: nn.Module, names: Names, pattern: Pattern) -> set[torch.Tensor]:
    if isinstance(pattern, type):
        owners = [module for module in model.modules() if isinstance(module, pattern)]
        found: set[torch.Tensor] = {p for module in owners for p in module.parameters() if p in names}
    else:
        found = {p for p, all_names in names.items() if any(_under(name, pattern) for name in all_names)}
    if not found:
        every = [name for all_names in names.values() for name in all_names]
        shown = repr(pattern) if isinstance(pattern, str) else pattern.__name__
        near = ", ".join(difflib.get_close_matches(shown, every, 3, cutoff=0))
        raise ValueError(f"the pattern [{shown}] matches no parameter; there are {near}, ...")
    return found


def _under(name: str, pattern: str) -> bool:
    """Whether the pattern matches the parameter's name or the path of a module above it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _listed(patterns: Pattern | Sequence[Pattern]) -> Sequence[Pattern]:
    return [patterns] if isinstance(patterns, (str, type)) else patterns
