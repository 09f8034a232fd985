"""Packed models: a network whose convolution and linear layers run on the bits of their weights.

A packed model keeps the state of the original model, so ``unpack`` returns the same model. Modules that have no kernel
for bits, or would be slower with it, are the plain ones, with floats that were unpacked once. It runs compiled: each
packed layer also does the work of the batch norm, the addition and the ReLU that follow it, and of the sign that
precedes it.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._prims_common import suggest_memory_format
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from mirrorquant import _owners
from mirrorquant.levels import Levels
from mirrorquant.nn import BinaryActivation
from mirrorquant.packing.bits import DTYPES, PackedTensor, PackError, off_level
from mirrorquant.packing.fuse import compiled
from mirrorquant.packing.layers import PackedConv2d, PackedLinear, fewest_rows, why_floats
from mirrorquant.select import Pattern, _listed, _matching, _names, unwrapped

__all__ = ["PackedModel", "pack", "unpack"]

Entry = PackedTensor | Tensor
_LAYERS: dict[type[nn.Module], Any] = {nn.Conv2d: PackedConv2d, nn.Linear: PackedLinear}
_PACKED = (PackedConv2d, PackedLinear)
_FEWEST_FUSED = 1 << 18  # weights of convolutions that make up for the overhead of a compiled call
_CLOSEST = 1e-3  # of the largest level: the least distance between levels


def pack(
    model: nn.Module,
    *,
    levels: Sequence[float] | None = None,
    skip: Pattern | Sequence[Pattern] = (),
    fuse: bool = True,
    int8: bool = False,
) -> PackedModel:
    """A copy of a finalized model that holds its weights as bits and computes with them.

    Any module may have quantized weights; all are saved as bits. Convolutions (``Conv2d``) and linear layers compute
    with them. Layers that bits would slow down, or that have no kernel for bits, use floats that are unpacked once:
    depthwise convolutions, linear layers with fewer than 65,536 weights, attention, recurrent layers, embeddings, ...
    ``packed.runs`` and ``mq.summary(packed)`` say for each tensor which it is, and why. The copy is for inference: it
    is in ``eval`` mode and stays there.

    Args:
        model: the model, after ``MirrorDescent.finalize()``. It is not modified.
        levels: the levels of all ``Conv2d`` and linear layers; a weight with another value raises an error that names
            it; a scale on them, of the tensor or of each channel, is found. By default the levels of each layer are
            those of its optimizer. If that is gone, they are found in the weights: at most 16 values, at least a
            thousandth of the largest apart; with a scale for each channel, levels in the ratio of whole numbers up to
            8, as -1, 0, 1 or -3, -1, 1, 3. Layers that have other values stay in float; a weight that an optimizer has
            not finalized raises an error.
        skip: patterns of the layers that stay in float, as in :func:`mirrorquant.split`.
        fuse: whether packed layers take over the batch norm, addition and ReLU that follow them, by ``torch.compile``,
            in networks where that is faster: with 262,144 or more weights in convolutions, or binary activations. The
            first call compiles the model, in 2 to 3 seconds for a ResNet-18; so does the first call with another
            batch size, after which any batch size runs. If something that ``forward`` depends on changes, the next call
            compiles again. A model that branches on values of tensors is compiled in pieces. One that torch cannot
            compile runs without fusion after a warning, and the call in which that happened is repeated.
        int8: whether linear layers quantize their inputs to 8 bits, row by row: faster, and no longer exact.

    Returns:
        A model with the same results, except for the rounding of float32.

    Raises:
        PackError: no weight is on levels, a layer is not on the given levels, or one is still being trained.

    Example:
        >>> import torch, mirrorquant as mq
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 2))
        >>> _ = model[0].weight.data.copy_(mq.BINARY.nearest(model[0].weight.data))
        >>> packed = mq.pack(model)
        >>> packed.runs
        {'0.weight': 'bits'}
        >>> mq.pack(model, levels=mq.BINARY)
        Traceback (most recent call last):
        ...
        mirrorquant.packing.bits.PackError: 2.weight contains ..., which is none of the levels -1, 1, ...
    """
    model = unwrapped(model)
    if isinstance(model, PackedModel):
        if levels is None and not skip:
            packed = assemble(model.plain, copy.deepcopy(model.entries()), fuse=fuse, int8=int8)
        else:
            packed = pack(unpack(model), levels=levels, skip=skip, fuse=fuse, int8=int8)
        packed.about = dict(model.about)
        return packed
    for name, tensor in state(packable(model)):
        if hasattr(tensor, "full_tensor"):
            raise PackError(
                f"{name} is spread over several processes, but a packed model runs in one: call mq.save(model, path) in"
                " all of them, and mq.load(path, plain) with a model that is not sharded"
            )
    entries = entries_of(model, None if levels is None else Levels.of(levels), skip)
    return assemble(skeleton(model), entries, fuse=fuse, int8=int8)


def unpack(model: PackedModel) -> nn.Module:
    """The plain model behind a packed one: the same class, and the same numbers to the bit.

    Example:
        >>> import torch, mirrorquant as mq
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> _ = model[0].weight.data.sign_()
        >>> again = mq.unpack(mq.pack(model))
        >>> all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
        True
    """
    if not isinstance(model, PackedModel):
        raise PackError(f"the model is a {type(model).__name__}, expected the result of mq.pack or mq.load")
    return restored(model.plain, model.entries())


class PackedModel(nn.Module):
    """A network on bits, in ``eval`` mode; made by :func:`pack` or :func:`mirrorquant.load`.

    ``network`` is the model with packed layers in the places of its own; ``plain`` is the model itself without numbers
    (on the meta device). ``fused`` says whether ``network`` is compiled, so that its layers do the work of their
    neighbors; ``network`` itself can always be called, too. ``runs`` has a word on each quantized tensor by its name:
    ``bits``, or ``float:`` and the reason. ``about`` is the metadata of the file that the model was loaded from.
    Changes through ``tensor.data``, which torch does not count, go unnoticed by batch norms that were
    compiled.
    """

    plain: nn.Module
    fused: bool
    runs: dict[str, str]
    about: dict[str, Any]
    _levels: dict[str, Levels]
    _run: Callable[..., Any] | None
    _guarded: bool = True  # whether a call may have to do more than the network

    def __init__(
        self, network: nn.Module, plain: nn.Module, runs: dict[str, str], levels: dict[str, Levels], *, fuse: bool
    ) -> None:
        super().__init__()
        self.network = network.eval()
        self.__dict__["plain"] = plain  # not registered, because it has no numbers
        self.runs, self._levels, self.about = runs, levels, {}
        self.training, self.fused, self._run = False, fuse and bool(self.layers()), None
        self._guarded = self.fused

    def register_forward_hook(self, *hook: Any, **options: Any) -> Any:
        """Like that of any module; from here on, calls take the way that runs hooks."""
        self._guarded = True
        return super().register_forward_hook(*hook, **options)

    def register_forward_pre_hook(self, *hook: Any, **options: Any) -> Any:
        """Like that of any module; from here on, calls take the way that runs hooks."""
        self._guarded = True
        return super().register_forward_pre_hook(*hook, **options)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """As of any module, but with less overhead for small networks that run as they are."""
        if self._guarded or is_grad_enabled() or self._compiled_call_impl is not None:
            return super().__call__(*inputs, **options)
        network: Any = self._modules["network"]
        return (network._compiled_call_impl or network._call_impl)(*inputs, **options)  # its __call__, without a frame

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The result of the plain model in ``eval`` mode, without a gradient."""
        if is_grad_enabled():
            with torch.no_grad():
                return self.forward(*inputs, **options)
        network = self._modules["network"]
        assert network is not None
        if not self.fused or torch.compiler.is_compiling():
            return network(*inputs, **options)
        if self._run is None:
            self._run = compiled(network)
        try:
            return self._run(*inputs, **options)
        except torch._dynamo.exc.TorchDynamoException as error:
            result = self.network(*inputs, **options)  # raises the error of the network itself, if it has one
            self.fused = False
            reason = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])
            warnings.warn(
                f"{type(self.network).__name__} runs packed, but batch norms and additions are not folded into its "
                f"layers, because torch cannot compile it: {reason}. Pass fuse=False to accept that",
                stacklevel=2,
            )
            return result

    def __getstate__(self) -> dict[str, Any]:
        """The state without compiled code."""
        return {**self.__dict__, "_run": None}

    def layers(self) -> list[str]:
        """The names of the layers that run on bits."""
        return [name for name, layer in self.network.named_modules() if isinstance(layer, _PACKED)]

    def entries(self) -> dict[str, Entry]:
        """Each tensor of the plain model's state by its name: as bits, or as it is."""
        found: dict[str, Entry] = {}
        tensors = dict(state(self.network))
        for name in dict(state(self.plain)):
            path, _, leaf = name.rpartition(".")
            layer, levels = self.network.get_submodule(path), self._levels.get(name)
            if isinstance(layer, _PACKED) and leaf == "weight":
                found[name] = layer.weight_bits
            else:  # what runs as floats is not kept as bits
                found[name] = (levels and PackedTensor.of(tensors[name], levels)) or tensors[name]
        return found

    def train(self, mode: bool = True) -> PackedModel:
        """Stays in ``eval`` mode, also as a part of a model that trains: bits are trained by no optimizer."""
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PackedModel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        cast = {name: tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype) for name, tensor in state(self.plain)}
        self.__dict__["plain"] = filled(self.plain, cast)
        return self


# A model apart from its numbers.


def state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once, in the model's order."""
    if not isinstance(model, nn.Module):
        raise PackError(f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    kept, modules = model.state_dict(keep_vars=True), dict(model.named_modules(remove_duplicate=False))
    known = {name for each in (model.named_parameters, model.named_buffers) for name, _ in each(remove_duplicate=False)}
    for name in kept:
        if name not in known and not isinstance(modules.get(name.rpartition(".")[0]), PackedTensor):
            problem = "extra state, or the new name of a tensor, and neither a parameter nor a buffer"
            raise PackError(f"{name} is {problem}: it cannot be packed")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in tensors if name in kept]


def packable(model: nn.Module) -> nn.Module:
    """The model, unless a part of it is packed already or has no shape yet."""
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, (PackedModel, *_PACKED)):
            remedy = "put the plain module in its place, which mq.unpack returns, or save that part by itself"
            raise PackError(f"{path or 'the model'} is packed already: {remedy}")
        if any(map(is_lazy, [*module.parameters(recurse=False), *module.buffers(recurse=False)])):
            raise PackError(f"{path or 'the model'} has no shape yet: run one batch through the model first")
    return model


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and persistent buffers hold no numbers."""
    return filled(model, {name: tensor.detach().to("meta") for name, tensor in state(model)})


def filled(model: nn.Module, tensors: Mapping[str, Tensor], layers: Mapping[str, nn.Module] | None = None) -> nn.Module:
    """A copy of a model with these tensors and layers in the places of its own; tied tensors stay tied."""
    memo = _memo(model, layers or {})
    for name, tensor in state(model):
        if name in tensors:
            new = tensors[name].detach()
            if new.dim() == 4:
                new = new.contiguous(memory_format=suggest_memory_format(tensor))  # which bits do not have
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
    return copy.deepcopy(model, memo)


def held(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
    """The tensors that a copy of a model with these layers in place still refers to, in a list or object, too."""
    memo, copies = _memo(model, layers), dict[str, weakref.ref[Tensor]]()
    for name, tensor in state(model):
        memo[id(tensor)] = nn.Parameter(tensor.detach().to("meta"), requires_grad=False)
        copies[name] = weakref.ref(memo[id(tensor)])
    copied = copy.deepcopy(model, memo)
    memo.clear()
    found = {name for name, each in copies.items() if each() is not None}
    del copied
    return found


def _memo(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[int, Any]:
    """What deepcopy puts in the places of layers, and of the tensors that it cannot copy."""
    return _computed(model) | {id(model.get_submodule(path)): layer for path, layer in layers.items()}


def restored(plain: nn.Module, entries: Mapping[str, Entry]) -> nn.Module:
    """A copy of a model with these tensors in the places of its own, all of them as numbers."""
    return filled(plain, {name: _numbers(entry) for name, entry in entries.items()})


def _numbers(entry: Entry) -> Tensor:
    return entry.unpack() if isinstance(entry, PackedTensor) else entry.detach().clone()


def _computed(model: nn.Module) -> dict[int, Any]:
    """Copies of the tensors with a gradient's history that modules keep: activations, a weight under ``weight_norm``.

    By their ids, for the memo of deepcopy, which cannot copy such tensors.
    """
    kept = [value for module in model.modules() for value in tree_leaves(vars(module)) if isinstance(value, Tensor)]
    return {id(tensor): tensor.detach().clone() for tensor in kept if not tensor.is_leaf}


# From tensors to bits.


def entries_of(model: nn.Module, levels: Levels | None, skip: Pattern | Sequence[Pattern] = ()) -> dict[str, Entry]:
    """Each tensor of a model by its name, parameters on levels as bits; at least one weight must come as bits.

    A layer that is not on given ``levels`` is an error.
    """
    names = {id(tensor): name for name, tensor in state(model)}
    parameters = {name for name, _ in model.named_parameters()} - _skipped(model, skip)
    layers = [names[id(m.weight)] for m in model.modules() if type(m) in _LAYERS and id(m.weight) in names]
    entries: dict[str, Entry] = {}
    for name, part in state(model):
        tensor = whole(part)
        entries[name] = tensor.detach()
        if name not in parameters:
            continue
        bits = PackedTensor.of(tensor, levels) if name in layers and levels else as_bits(part, levels)
        if levels is None and tensor.dim() > 1:
            _refuse_unfinished(name, part, bits)
        if bits is not None:
            entries[name] = bits
        elif levels is not None and name in layers:
            raise PackError(_off(name, tensor.detach(), levels))
    weights = [name for name, p in model.named_parameters() if p.dim() > 1 and name in parameters]
    if not weights:
        raise PackError(f"{type(model).__name__} has no weight to pack")
    if not any(isinstance(entries[name], PackedTensor) for name in weights):
        raise PackError(_off(weights[0], whole(dict(state(model))[weights[0]]).detach(), levels))
    return entries


def as_bits(parameter: Tensor, levels: Levels | None = None) -> PackedTensor | None:
    """A parameter as bits: on given levels, on those of its optimizer if that still lives, or on any that are found."""
    tensor = whole(parameter)
    known = [each for each in (levels, _owners.levels(parameter)) if each]
    return next((bits for each in [*known, None] if (bits := PackedTensor.of(tensor, each)) is not None), None)


def _refuse_unfinished(name: str, tensor: Tensor, bits: PackedTensor | None) -> None:
    """Raises an error for a weight on its way to its levels, whose few distinct values may look like a level set.

    Levels are at least a thousandth of the largest one apart; values next to +-1 that a projection has not yet rounded
    are closer.
    """
    problem = ""
    if _owners.owner(tensor) is not None:
        count = torch.unique(whole(tensor).detach()).numel()
        problem = f"belongs to a MirrorDescent that is not finalized, and has {count} distinct values"
    elif bits is not None and bits.scale is None:
        gap = min(high - low for low, high in pairwise(bits.levels))
        if gap < _CLOSEST * max(map(abs, bits.levels)):
            problem = f"has {len(bits.levels)} distinct values, some only {gap:.2g} apart, so they are not levels"
    if problem:
        raise PackError(f"{name} {problem}: call `opt.finalize()` first, or pass levels= to pack it as it is")


def whole(tensor: Tensor) -> Tensor:
    """A DTensor, which FSDP2 spreads over processes, gathered in each of them; any other tensor as it is."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def _skipped(model: nn.Module, skip: Pattern | Sequence[Pattern]) -> set[str]:
    """The names of the parameters that stay as they are; a tied one goes by all of its names, as in ``split``."""
    names = _names(model)
    try:
        found = {parameter for pattern in _listed(skip) for parameter in _matching(model, names, pattern)}
    except ValueError as error:
        raise PackError(f"skip: {error}") from error
    return {all_names[0] for parameter, all_names in names.items() if parameter in found}


def _off(name: str, tensor: Tensor, levels: Levels | None) -> str:
    if tensor.dtype not in DTYPES:
        return f"{name} is {tensor.dtype}, which cannot be on levels: cast it to float32, or skip it"
    value = off_level(tensor, levels)
    if levels is None:
        remedy = (
            "call `opt.finalize()`, or pass the levels that its channels have a scale on: mq.pack(model, levels=...)"
        )
        return f"{name} is not quantized (contains {value:g}), nor is any other weight: {remedy}"
    found = f"{name} contains {value:g}, which is none of the levels {', '.join(f'{q:g}' for q in levels)}"
    remedy = "call `opt.finalize()`, pass other levels, or skip this layer"
    if tensor.element_size() < 4 and any(abs(math.frexp(level)[0]) != 0.5 for level in levels if level):
        remedy += f"; with a scale, levels of {tensor.dtype} must be 0 and powers of two: finalize in float32"
    return f"{found}, nor are its channels on them with a scale: {remedy}"


# From bits to a network that runs.


def assemble(plain: nn.Module, entries: dict[str, Entry], *, fuse: bool = True, int8: bool = False) -> PackedModel:
    """A packed model from a skeleton and its tensors; a layer is packed if its weight comes as bits, and that pays."""
    names = {id(tensor): name for name, tensor in state(plain)}
    fuse = fuse and _fusion_pays(plain, entries)
    levels = {name: entry.levels for name, entry in entries.items() if isinstance(entry, PackedTensor)}
    layers: dict[str, nn.Module] = {}
    runs: dict[str, list[str]] = {name: [] for name in levels}
    for path, module in plain.named_modules():
        own = {key: names.get(id(p), "") for key, p in module.named_parameters(recurse=False)}
        weight, bias = (entries.get(own.get(key, "")) for key in ("weight", "bias"))
        why = _why_floats(plain, path, weight, int8=int8, fused=fuse)
        if not why:
            options = {"int8": int8} if isinstance(module, nn.Linear) else {}
            layers[path] = _LAYERS[type(module)](module, weight, None if bias is None else _numbers(bias), **options)
        for key, name in own.items():
            if name in levels:
                reason = "a vector" if len(entries[name].shape) < 2 else why
                rows = 1 if int8 else fewest_rows(module)
                bits = "bits" if rows == 1 else f"bits from {rows} rows on; float: fewer rows are faster"
                runs[name].append(bits if not why and key == "weight" else f"float: {reason}")
    used = held(plain, layers)
    tensors = {  # bits are unpacked for whatever computes with numbers, even if a packed layer shares them
        name: _numbers(entry) for name, entry in entries.items() if isinstance(entry, Tensor) or name in used
    }
    network = filled(plain, tensors, layers).requires_grad_(False)
    joined = {name: "; ".join(dict.fromkeys(found)) for name, found in runs.items()}
    return PackedModel(network, plain, joined, levels, fuse=fuse and not isinstance(network, _PACKED))


def _fusion_pays(plain: nn.Module, entries: Mapping[str, Entry]) -> bool:
    """Whether a compiled network is faster: with large convolutions as bits, or after signs."""
    if any(isinstance(module, BinaryActivation) for module in plain.modules()):
        return True
    names = {id(tensor): name for name, tensor in state(plain)}
    kernels = {names.get(id(module.weight)): module for module in plain.modules() if type(module) is nn.Conv2d}
    on_bits = [layer for name, layer in kernels.items() if isinstance(entries.get(name or ""), PackedTensor)]
    return sum(layer.weight.numel() for layer in on_bits) >= _FEWEST_FUSED


def _why_floats(plain: nn.Module, path: str, weight: Entry | None, *, int8: bool, fused: bool) -> str:
    """Why a module runs with floats; empty if it runs on bits."""
    module, parent = plain.get_submodule(path), plain.get_submodule(path.rpartition(".")[0])
    if type(module) not in _LAYERS or not isinstance(weight, PackedTensor):
        kind = type(module)
        return f"{'nn.' * kind.__module__.startswith('torch.nn.')}{kind.__name__} has no kernel for bits"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return "the layer has hooks, or a forward of its own"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "nn.TransformerEncoderLayer computes with the weights of its layers"
    if not weight.planes.numel():
        return "it is empty"
    assert isinstance(module, (nn.Conv2d, nn.Linear))
    if int8 and isinstance(module, nn.Linear):
        return ""
    if weight.dtype == torch.float64:
        return "float64 has no kernel for bits"
    return why_floats(module, weight.levels, fused=fused)
