"""Packed models: a network whose convolution and linear layers run on the bits of their weights.

A packed model keeps the state of the model that it was made from, in bits where that is on levels and unchanged
elsewhere, so ``unpack`` gives the very model back. How it *runs* is another matter: where the network can be traced,
each packed layer takes over the batch norm, the addition and the ReLU that follow it, and the sign that precedes it.
"""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from mirrorquant.levels import Levels
from mirrorquant.nn import BinaryActivation
from mirrorquant.packing.bits import PackedTensor, PackError, off_level
from mirrorquant.packing.layers import PackedConv2d, PackedLinear
from mirrorquant.select import Pattern, _listed, _matching, _names, unwrapped

__all__ = ["PackedModel", "pack", "unpack"]

Entry = PackedTensor | Tensor
_LAYERS = (nn.Conv2d, nn.Linear)
_PACKED = (PackedConv2d, PackedLinear)
_NORMS: dict[type, type[nn.BatchNorm1d] | type[nn.BatchNorm2d]] = {
    PackedConv2d: nn.BatchNorm2d,
    PackedLinear: nn.BatchNorm1d,
}


def pack(
    model: nn.Module,
    *,
    levels: Sequence[float] | None = None,
    skip: Pattern | Sequence[Pattern] = (),
    fuse: bool = True,
    int8: bool = False,
) -> PackedModel:
    """A copy of a finalized model that holds its weights as bits and computes with them.

    Convolutions (``Conv2d``) and linear layers are packed; all else stays as it is. The copy is for inference: it is in
    ``eval`` mode and stays there.

    Args:
        model: the model, after ``MirrorDescent.finalize()``. It is left alone.
        levels: what the weights of every such layer are on; a weight that is not is refused, with its name and value.
            Unless given, the levels of each layer are read off its weights, and layers without any stay in float.
        skip: patterns of the layers that stay in float, as in :func:`mirrorquant.split`.
        fuse: whether packed layers take over batch norm, addition and ReLU that follow them. A model that torch.fx
            cannot trace runs without that, and a warning says so.
        int8: whether linear layers quantize their inputs to 8 bits, row by row: faster, and no longer exact.

    Returns:
        A model with the same results, but for the rounding of float32.

    Raises:
        PackError: no layer is on levels, or one is not on those that were given.

    Example:
        >>> import torch, mirrorquant as mq
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
        >>> _ = model[0].weight.data.sign_()
        >>> packed = mq.pack(model)
        >>> packed.layers()
        ['0']
        >>> mq.pack(model, levels=mq.BINARY)
        Traceback (most recent call last):
        ...
        mirrorquant.packing.bits.PackError: 2.weight holds ..., which is none of the levels -1, 1: ...
    """
    model = unwrapped(model)
    if isinstance(model, PackedModel):
        if levels is None and not skip:
            return assemble(model.plain, copy.deepcopy(model.entries()), fuse=fuse, int8=int8)
        model = unpack(model)
    _refuse_sharded(model)
    entries = entries_of(model, None if levels is None else Levels.of(levels), skip)
    return assemble(skeleton(model), entries, fuse=fuse, int8=int8)


def unpack(model: PackedModel) -> nn.Module:
    """The plain model that a packed one was made from: the same class, and the same numbers to the bit.

    Example:
        >>> import torch, mirrorquant as mq
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> _ = model[0].weight.data.sign_()
        >>> again = mq.unpack(mq.pack(model))
        >>> all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
        True
    """
    if not isinstance(model, PackedModel):
        raise PackError(f"the model is a {type(model).__name__}, expected what mq.pack or mq.load returned")
    return filled(model.plain, {name: _float(entry) for name, entry in model.entries().items()})


class PackedModel(nn.Module):
    """A network on bits, in ``eval`` mode; made by :func:`pack` or :func:`mirrorquant.load`.

    ``network`` is the model with packed layers in the places of its own; ``plain`` is the model itself without numbers
    (on the meta device), ``fused`` says whether the layers took over what surrounds them.
    """

    plain: nn.Module
    graph: fx.GraphModule | None

    def __init__(self, network: nn.Module, plain: nn.Module, graph: fx.Graph | None) -> None:
        super().__init__()
        self.network = network.eval()
        self.inputs = 0 if graph is None else sum(node.op == "placeholder" for node in graph.nodes)
        # Not registered: one shares its modules with the network, the other has no numbers.
        self.__dict__.update(plain=plain, graph=None if graph is None else fx.GraphModule(network, graph))
        self.training = False
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def forward(self, *inputs: Any, **options: Any) -> Any:
        """What the plain model returns in ``eval`` mode, without a gradient."""
        if self.graph is None or options or len(inputs) != self.inputs:  # optional arguments were not traced
            return self.network(*inputs, **options)
        return self.graph(*map(_channels_last, inputs))

    @property
    def fused(self) -> bool:
        """Whether the layers took over the batch norms, additions and activations around them."""
        return self.graph is not None

    def layers(self) -> list[str]:
        """The names of the packed layers."""
        return [name for name, module in self.network.named_modules() if isinstance(module, _PACKED)]

    def entries(self) -> dict[str, Entry]:
        """Each tensor of the plain model's state by its name: as bits, or as it is."""
        found: dict[str, Entry] = {}
        tensors = dict(state(self.network))
        for name in dict(state(self.plain)):
            path, _, leaf = name.rpartition(".")
            layer = self.network.get_submodule(path)
            if isinstance(layer, _PACKED):
                bits = layer.weight_bits if leaf == "weight" else layer.bias_bits
                entry = layer.bias_float if bits is None else bits
                assert entry is not None
                found[name] = entry
            else:
                found[name] = tensors[name]
        return found

    def train(self, mode: bool = True) -> PackedModel:
        """Refused, but for ``eval``: bits cannot be trained."""
        if mode:
            raise PackError("a packed model cannot be trained: train the plain one, which mq.unpack gives back")
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PackedModel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        cast = {name: tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype) for name, tensor in state(self.plain)}
        self.__dict__["plain"] = filled(self.plain, cast)
        self._refresh()
        return self

    def _refresh(self) -> None:
        for module in self.network.modules():
            if isinstance(module, _PACKED):
                module.refresh()
        if self.graph is not None:  # which refers to parameters of the network by themselves, too
            self.__dict__["graph"] = fx.GraphModule(self.network, self.graph.graph)


def _channels_last(value: Any) -> Any:
    """Images as the kernels like them best."""
    images = isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()
    return value.contiguous(memory_format=torch.channels_last) if images else value


def _after_loading(model: nn.Module, keys: Any) -> None:
    assert isinstance(model, PackedModel)
    model._refresh()


# A model apart from its numbers.


def state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once, in the model's order."""
    kept = model.state_dict(keep_vars=True)
    odd = [name for name, value in kept.items() if not isinstance(value, Tensor)]
    if odd:
        raise PackError(f"{odd[0]} is no tensor, but extra state of a module: it cannot be packed")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in tensors if name in kept]


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and persistent buffers hold no numbers."""
    return filled(model, {name: tensor.detach().to("meta") for name, tensor in state(model)})


def filled(model: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """A copy of a model with these tensors in the places of its own; what is tied stays tied."""
    memo = _computed(model)
    for name, tensor in state(model):
        new = tensors[name].detach()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
    return copy.deepcopy(model, memo)


def _computed(model: nn.Module) -> dict[int, Any]:
    """Copies of the tensors with a gradient's history that modules keep: activations, a weight under ``weight_norm``.

    By their ids, as deepcopy looks for what it need not copy: it refuses such tensors.
    """
    kept = [value for module in model.modules() for value in tree_leaves(vars(module)) if isinstance(value, Tensor)]
    return {id(tensor): tensor.detach().clone() for tensor in kept if not tensor.is_leaf}


def _float(entry: Entry) -> Tensor:
    return entry.unpack() if isinstance(entry, PackedTensor) else entry.detach().clone()


# From tensors to bits.


def entries_of(
    model: nn.Module, levels: Levels | None, skip: Pattern | Sequence[Pattern] = (), *, stored: bool = False
) -> dict[str, Entry]:
    """Each tensor of a model by its name, parameters on levels as bits; refuses a layer that should be and is not.

    At least one layer must come as bits; of what is only ``stored``, a weight of any module.
    """
    if not isinstance(model, nn.Module):
        raise PackError(f"the model is a {type(model).__name__}, expected a torch.nn.Module")
    parameters = {name for name, _ in model.named_parameters()} - _skipped(model, skip)
    names = {id(tensor): name for name, tensor in state(model)}
    layers = [names[id(m.weight)] for m in model.modules() if type(m) in _LAYERS and id(m.weight) in names]
    entries: dict[str, Entry] = {}
    for name, part in state(model):
        tensor = _whole(part)
        entries[name] = tensor.detach()
        if name not in parameters:
            continue
        bits = PackedTensor.of(tensor, levels) or (PackedTensor.of(tensor) if name not in layers else None)
        if bits is not None:
            entries[name] = bits
        elif levels is not None and name in layers:
            raise PackError(_off(name, tensor.detach(), levels))
    wanted = [name for name, p in model.named_parameters() if p.dim() > 1] if stored else layers
    if not any(isinstance(entries.get(name), PackedTensor) for name in wanted):
        left = [name for name in wanted if name in parameters]
        if not left:
            what = "weight to store as bits" if stored else "Conv2d or Linear layer to pack"
            raise PackError(f"{type(model).__name__} has no {what}")
        raise PackError(_off(left[0], _whole(dict(state(model))[left[0]]).detach(), levels))
    return entries


def _is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, as FSDP2 and tensor parallelism make them."""
    return hasattr(tensor, "full_tensor")


def _whole(tensor: Tensor) -> Tensor:
    """A tensor that is spread over processes, gathered in each of them; any other as it is."""
    whole: Tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def _refuse_sharded(model: nn.Module) -> None:
    sharded = [name for name, tensor in model.named_parameters() if _is_sharded(tensor)]
    if sharded:
        raise PackError(
            f"{sharded[0]} is spread over several processes, but a packed model runs in one: call mq.save(model, path) "
            "in all of them, and mq.load(path, plain) with a model that is not sharded"
        )


def _skipped(model: nn.Module, skip: Pattern | Sequence[Pattern]) -> set[str]:
    """The names of the parameters that stay as they are; a tied one goes by all of its names, as in ``split``."""
    names = _names(model)
    try:
        found = {parameter for pattern in _listed(skip) for parameter in _matching(model, names, pattern)}
    except ValueError as error:
        raise PackError(f"skip: {error}") from error
    return {all_names[0] for parameter, all_names in names.items() if parameter in found}


def _off(name: str, tensor: Tensor, levels: Levels | None) -> str:
    wanted = "on no few levels" if levels is None else f"none of the levels {', '.join(f'{q:g}' for q in levels)}"
    value = off_level(tensor, levels)
    return (
        f"{name} holds {value:g}, which is {wanted}: finalize() puts weights on their levels, skip leaves a layer out"
    )


# From bits to a network that runs.


def assemble(plain: nn.Module, entries: dict[str, Entry], *, fuse: bool = True, int8: bool = False) -> PackedModel:
    """A packed model from a skeleton and its tensors; a layer whose weight comes as bits is packed."""
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}
    names = {id(tensor): name for name, tensor in state(plain)}
    layers: dict[str, nn.Module] = {}
    for path, module in plain.named_modules():
        if type(module) not in _LAYERS or _hooked(module):
            continue
        weight, bias = (entries.get(names.get(id(getattr(module, name)), "")) for name in ("weight", "bias"))
        if isinstance(weight, PackedTensor) and weight.planes.numel():
            bias = bias.detach().clone() if isinstance(bias, Tensor) else bias
            if isinstance(module, nn.Linear):
                layers[path] = PackedLinear.of(module, weight, bias, int8=int8)
            elif isinstance(module, nn.Conv2d):
                layers[path] = PackedConv2d.of(module, weight, bias)
    kept = [module for path, module in plain.named_modules() if path not in layers]
    used = {names.get(id(parameter)) for module in kept for parameter in module.parameters(recurse=False)}
    for name, entry in entries.items():
        if isinstance(entry, PackedTensor) and name in used:  # also by a module that shares it with a packed layer
            tensors[name] = entry.unpack()
    network = _with_layers(plain, tensors, layers).eval()
    return PackedModel(network, plain, _trace(network) if fuse else None)


def _with_layers(plain: nn.Module, tensors: dict[str, Tensor], layers: dict[str, nn.Module]) -> nn.Module:
    """A copy of the skeleton with these tensors and these layers in the places of its own."""
    memo: dict[int, Any] = {id(plain.get_submodule(path)): layer for path, layer in layers.items()}
    for name, tensor in state(plain):
        if name in tensors:
            new = tensors[name].detach().clone()
            memo[id(tensor)] = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
    network: nn.Module = copy.deepcopy(plain, memo)
    return network


def _hooked(module: nn.Module) -> bool:
    """Whether calling it does more than its class says: by a hook, or by a ``forward`` that was put into the object."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


# Fusion.


class _Proxy(fx.Proxy):
    """Tells ``x += y``, which changes x for all who hold it, from ``x = x + y``; torch.fx takes one for the other."""

    def _changed(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._changed(operator.itruediv, other)


class _Tracer(fx.Tracer):
    """Sees packed layers as nodes, and of the network's arguments those that it cannot do without."""

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        needed = [p.name for p in parameters if p.default is p.empty]
        if not needed or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters if p.name in needed):
            raise PackError(f"it takes the arguments {[str(p) for p in parameters]}")
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in needed)]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return isinstance(module, (*_PACKED, BinaryActivation)) or super().is_leaf_module(module, qualified_name)


def trace(network: nn.Module) -> fx.Graph:
    """The network's graph, layers being its nodes; raises whatever keeps torch.fx from seeing it.

    What a forward pass leaves in attributes is not left there by this one, whose values are no tensors.
    """
    hooked = [name or type(network).__name__ for name, module in network.named_modules() if _hooked(module)]
    if hooked:
        raise PackError(f"{hooked[0]} has a forward hook, or a forward that is not of its class")
    layers = [module for module in network.modules() if isinstance(module, _PACKED)]
    before = [(module, dict(vars(module))) for module in network.modules()]
    try:
        for layer in layers:
            layer.traced = True
        with torch.no_grad(), _honest(network):  # as it runs
            return _Tracer().trace(network)
    finally:
        for module, attributes in before:
            constants = {name: value for name, value in vars(module).items() if name.startswith("_tensor_constant")}
            module.__dict__.clear()
            module.__dict__.update({**constants, **attributes})


@contextmanager
def _honest(network: nn.Module) -> Iterator[None]:
    """Refuses to tell the network that a stand-in for a tensor is none, where it asks by isinstance or is_tensor."""

    def guarded(value: Any, kind: Any) -> bool:
        answer = isinstance(value, kind)
        if not answer and isinstance(value, fx.Proxy) and issubclass(Tensor, kind):
            raise PackError(f"it asks whether {value} is a Tensor")
        return answer

    forwards = [inspect.unwrap(type(module).forward) for module in network.modules() if not _is_torch(module)]
    spaces = [getattr(function, "__globals__", {}) for function in (*forwards, torch.is_tensor)]
    mine = [space for space in spaces if space.setdefault("isinstance", guarded) is guarded]
    try:
        yield
    finally:
        for space in mine:
            space.pop("isinstance", None)


def _is_torch(module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] in ("torch", "mirrorquant")


def _trace(network: nn.Module) -> fx.Graph | None:
    if isinstance(network, _PACKED):
        return None
    try:
        graph = trace(network)
        _refuse_changed_views(network, graph)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"torch.fx cannot trace {type(network).__name__} ({reason}): it runs packed, but batch norms and additions "
            "are not folded into its layers. Pass fuse=False if that is as it should be",
            stacklevel=4,
        )
        return None
    _fuse(network, graph)
    graph.lint()
    return graph


def _fuse(network: nn.Module, graph: fx.Graph) -> None:
    """Lets each packed layer do what surrounds it: sign -> layer -> batch norm -> addition -> ReLU."""
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "view":
            size = node.args[1:] or (node.kwargs.get("size"),)
            if size[0] is not None and not isinstance(size[0], torch.dtype):
                # In channels_last the dimensions of a view may not lie as they did.
                node.target, node.args, node.kwargs = "reshape", (node.args[0], *size), {}
        elif node.op == "call_method" and node.target == "view_as":
            node.target = "reshape_as"
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    for node in list(graph.nodes):
        layer = _module(network, node)
        if not isinstance(layer, _PACKED) or called.count(node.target) > 1 or len(node.args) != 1 or node.kwargs:
            continue
        source = node.args[0]
        if _is_sign(network, source) and not _changes_between(network, graph, source, node) and layer.take_sign():
            node.args = source.args
        last = node
        follower = _only_user(last)
        norm = _module(network, follower)
        if isinstance(norm, _NORMS[type(layer)]) and _folds(norm, layer) and called.count(follower.target) == 1:
            layer.fold(norm)
            last, follower = follower, _only_user(follower)
        residual = _added(last, follower)
        start = source if layer.after_sign else node
        if residual is not None and not _changes_between(network, graph, start, follower):
            last, added, follower = follower, follower, _only_user(follower)
        else:
            residual = None
        relu = follower is not None and _is_relu(network, follower)
        last = follower if relu else last
        with graph.inserting_before(node if residual is None else added):
            extras = {"residual": residual} if residual else {}
            done = graph.call_module(node.target, node.args, {**extras, "relu": bool(relu), "fused": True})
        last.replace_all_uses_with(done)
        while last is not node:
            last, gone = next(arg for arg in last.args if arg is not residual), last
            graph.erase_node(gone)
        graph.erase_node(node)
        if layer.after_sign and not source.users:
            graph.erase_node(source)


def _module(network: nn.Module, node: Any) -> nn.Module | None:
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    return network.get_submodule(str(node.target))


def _is_sign(network: nn.Module, node: Any) -> bool:
    return isinstance(_module(network, node), BinaryActivation) and len(node.args) == 1


def _only_user(node: fx.Node) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _folds(norm: nn.BatchNorm1d | nn.BatchNorm2d, layer: PackedConv2d | PackedLinear) -> bool:
    known = type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d) and norm.num_features == layer.weight_bits.shape[0]
    return known and norm.running_mean is not None and norm.running_var is not None and not _hooked(norm)


def _added(node: fx.Node, follower: Any) -> fx.Node | None:
    """What the follower adds to the node, if that is all it does."""
    if not isinstance(follower, fx.Node) or follower.kwargs or len(follower.args) != 2:
        return None
    functions = follower.op == "call_function" and follower.target in (operator.add, torch.add, operator.iadd)
    methods = follower.op == "call_method" and follower.target in ("add", "add_")
    first, second = follower.args
    if not (functions or methods) or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    in_place = follower.target in (operator.iadd, "add_")
    if first is second or (in_place and first is not node):
        return None
    return second if first is node else first


def _changes_between(network: nn.Module, graph: fx.Graph, start: fx.Node, end: fx.Node) -> bool:
    """Whether a tensor may be changed in place between two nodes, so that the first cannot be moved to the second."""
    nodes = list(graph.nodes)
    return any(in_place(network, node) for node in nodes[nodes.index(start) + 1 : nodes.index(end)])


def in_place(network: nn.Module, node: fx.Node) -> bool:
    """Whether a node changes a tensor that it was given."""
    module, name = _module(network, node), str(getattr(node.target, "__name__", node.target))
    if getattr(module, "inplace", False) or node.kwargs.get("inplace") or node.kwargs.get("out") is not None:
        return True
    return node.op != "call_module" and ((name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE)


_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "setitem")


def origins(network: nn.Module, graph: fx.Graph, *, copied: bool) -> dict[fx.Node, fx.Node]:
    """For each node the one whose memory it shows, in the same order; with ``copied``, also where it may be a copy."""
    modules, names = (_VIEW_MODULES + _COPY_MODULES, _VIEWS + _COPIES) if copied else (_VIEW_MODULES, _VIEWS)
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        name = str(getattr(node.target, "__name__", node.target))
        shows = type(_module(network, node)) in modules if node.op == "call_module" else name in names
        found[node] = found[source] if isinstance(source, fx.Node) and (shows or in_place(network, node)) else node
    return found


_VIEWS = ("squeeze", "unsqueeze", "dropout")
_COPIES = ("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "contiguous")  # in another layout
_VIEW_MODULES = (nn.Identity, nn.Dropout, nn.Dropout2d)
_COPY_MODULES = (nn.Flatten, nn.Unflatten)


def _refuse_changed_views(network: nn.Module, graph: fx.Graph) -> None:
    """In channels_last a view may become a copy, which a change of what it shows does not reach, nor the reverse."""
    views, copies = (origins(network, graph, copied=copied) for copied in (False, True))
    nodes = list(graph.nodes)
    for place, node in enumerate(nodes):
        if in_place(network, node):
            for other in nodes[:place]:
                apart = copies[other] is copies[node] and views[other] is not views[node]
                if apart and not other.users.keys().isdisjoint(nodes[place + 1 :]):
                    raise PackError(f"{node.name} changes {other.name} in place, by a view of the same memory")


def _is_relu(network: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(_module(network, node)) is nn.ReLU
    if node.op == "call_function":
        return node.target in (F.relu, torch.relu, torch.relu_, F.relu_) and len(node.args) == 1
    return node.op == "call_method" and node.target in ("relu", "relu_")
