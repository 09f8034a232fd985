"""Selection: which parameters are quantized, by name pattern and module type.

>>> from torch import nn
>>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
>>> floats, quantized = split(model, skip=["3", "*.bias"])
>>> [name for name, _ in quantized["params"]]
['0.weight']
>>> [name for name, _ in floats["params"]]
['0.bias', '1.weight', '1.bias', '3.weight', '3.bias']
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

__all__ = ["NORMS", "split", "unwrapped"]

NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Pattern = str | type[nn.Module]
_PARTS = ("_g", "_v", "_orig")  # as torch.nn.utils calls them


def split(
    model: nn.Module,
    *,
    skip: Pattern | Sequence[Pattern] = (),
    only: Pattern | Sequence[Pattern] | None = None,
    norms: bool = False,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: what stays in float (method ``ref``), and what is quantized.

    A pattern is a shell-style glob, matched against a parameter's full name and the path of each module above it, or a
    module type. ``"fc"`` is the module of that name, ``"*bn*"`` whatever has bn in its path, ``"*.bias"`` all biases,
    ``nn.Linear`` all linear layers. A tied parameter goes by all of its names.

    Args:
        model: any module; one in torch.compile or DistributedDataParallel goes by the names that it has outside.
        skip: patterns of what stays in float.
        only: patterns of what is quantized, where not everything is.
        norms: whether the scales and shifts of normalization layers are quantized too.

    Returns:
        One or two groups of named parameters: float first, where there is any. Frozen parameters are in neither.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}, expected a torch.nn.Module: pass the model itself")
    model = unwrapped(model)
    skip, only = _listed(skip), None if only is None else _listed(only)
    names = {p: all_names for p, all_names in _names(model).items() if p.requires_grad}
    if not names:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient: nothing can be quantized")
    kept = {p for pattern in skip for p in _matching(model, names, pattern)}
    chosen = set(names) if only is None else {p for pattern in only for p in _matching(model, names, pattern)}
    if not norms:
        kept |= {p for module in model.modules() if isinstance(module, NORMS) for p in module.parameters(recurse=False)}
    chosen -= kept
    quantized = [(all_names[0], p) for p, all_names in names.items() if p in chosen]
    floats = [(all_names[0], p) for p, all_names in names.items() if p not in chosen]
    if not quantized:
        told = f"skip={_show(skip)}" + ("" if only is None else f" and only={_show(only)}")
        hint = "" if norms else "; those of normalization layers stay in float unless norms=True"
        raise ValueError(f"{told}: none of {len(names)} parameters is left to quantize{hint}")
    for name, _ in quantized:
        if "parametrizations" in name.split("."):
            raise ValueError(
                f"{name} belongs to a parametrization, so that its layer's weight would not be on levels if it were: "
                "apply torch.nn.utils.parametrize.remove_parametrizations first, or skip the layer"
            )
        if _is_part(model, name):
            raise ValueError(
                f"{name} is what its layer's weight is computed from (weight_norm, spectral_norm or pruning), so that "
                "the weight would not be on levels if it were: remove that first, as by "
                "torch.nn.utils.remove_weight_norm, or skip the layer"
            )
    return ([{"params": floats, "method": "ref"}] if floats else []) + [{"params": quantized}]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel and DistributedDataParallel, which put their own names before its.

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


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter with all of its names, in the model's order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _is_part(model: nn.Module, name: str) -> bool:
    """Whether a hook computes another tensor of its module from this parameter, as torch.nn.utils.weight_norm does."""
    path, _, leaf = name.rpartition(".")
    whole = leaf.rpartition("_")[0]
    return leaf.endswith(_PARTS) and isinstance(vars(model.get_submodule(path)).get(whole), torch.Tensor)


def _matching(model: nn.Module, names: dict[nn.Parameter, list[str]], pattern: Pattern) -> set[torch.Tensor]:
    if isinstance(pattern, type):
        owners = [module for module in model.modules() if isinstance(module, pattern)]
        found: set[torch.Tensor] = {p for module in owners for p in module.parameters() if p in names}
    else:
        found = {p for p, all_names in names.items() if any(_under(name, pattern) for name in all_names)}
    if not found:
        every = [name for all_names in names.values() for name in all_names]
        near = difflib.get_close_matches(str(pattern), every, 3, cutoff=0) if isinstance(pattern, str) else every[:3]
        raise ValueError(f"the pattern {_show([pattern])} matches no parameter; there are {', '.join(near)}, ...")
    return found


def _under(name: str, pattern: str) -> bool:
    """Whether the pattern matches the parameter's name or the path of a module above it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _listed(patterns: Pattern | Sequence[Pattern]) -> Sequence[Pattern]:
    return [patterns] if isinstance(patterns, (str, type)) else patterns


def _show(patterns: Sequence[Pattern]) -> str:
    return "[" + ", ".join(p.__name__ if isinstance(p, type) else repr(p) for p in patterns) + "]"
