"""Fusion: what a traced network's operators do to memory, and layers that take over their neighbours' work.

An operator counts as returning new memory only if it is listed here; every other one may show the memory of any of its
inputs. So an operator that nobody thought of costs speed, and never changes a result.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from mirrorquant.nn import BinaryActivation
from mirrorquant.packing.bits import PackError
from mirrorquant.packing.layers import PackedConv2d, PackedLinear
from mirrorquant.packing.trace import AUGMENTED, CONSTANT, hooked

__all__ = ["Memory", "fuse", "in_place", "keeps_layout", "refuse_changed_state"]

_PACKED = (PackedConv2d, PackedLinear)
_NORMS: dict[type, type[nn.BatchNorm1d] | type[nn.BatchNorm2d]] = {
    PackedConv2d: nn.BatchNorm2d,
    PackedLinear: nn.BatchNorm1d,
}

# New memory, and the same numbers whatever the layout of the inputs; functions, methods and operators go by one name.
_FRESH_NAMES = """
    add sub subtract mul multiply div divide truediv true_divide floordiv floor_divide mod remainder fmod pow neg
    negative abs exp expm1 log log1p log2 sqrt rsqrt square reciprocal sign sin cos tan erf round floor ceil sigmoid
    tanh relu relu6 gelu silu mish hardswish hardsigmoid hardtanh elu selu celu leaky_relu prelu softplus softsign
    softmax log_softmax logsigmoid clamp clip clamp_min clamp_max maximum minimum max min amax amin argmax argmin mean
    sum prod var std norm logsumexp cumsum eq ne lt le gt ge logical_and logical_or logical_not isnan where masked_fill
    cat concat concatenate stack matmul mm bmm addmm linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    batch_norm layer_norm group_norm rms_norm normalize max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d interpolate pad clone zeros_like ones_like full_like
    embedding flip repeat
"""
_FRESH = set(_FRESH_NAMES.split())
# The memory of the first input, by whatever layout.
_VIEWS_NAMES = """
    squeeze unsqueeze transpose swapaxes swapdims permute movedim t narrow select chunk split tensor_split unbind
    expand expand_as broadcast_to detach diagonal unflatten getitem T mT H mH data real imag
"""
_VIEWS = set(_VIEWS_NAMES.split())
_SAME = {"squeeze", "unsqueeze", "detach", "unflatten"}  # of which these show all of it, in order
# The memory of the first input or a copy, depending on the layout.
_COPIES = {"view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "contiguous"}
# No tensor at all.
_NUMBERS_NAMES = "size dim numel nelement ndimension shape ndim dtype device is_floating_point _assert"
_NUMBERS = set(_NUMBERS_NAMES.split())
_STORES = {"fill", "zero", "copy", "setitem"}  # change an input, beside those in _FRESH
_FRESH_MODULES = (
    *_PACKED,
    BinaryActivation,
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm2d),
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.ELU, nn.SELU),
    *(nn.CELU, nn.LeakyReLU, nn.PReLU, nn.Softplus, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.LogSoftmax),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d),
    *(nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.Embedding, nn.LocalResponseNorm),
)
_SAME_MODULES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_COPY_MODULES = (nn.Flatten,)
_STATISTICS = {"batch_norm", "instance_norm", "embedding", "embedding_bag"}  # with some options they change their state


_AUGMENTED = {f"i{name}": name for name in AUGMENTED}


def _name(node: fx.Node) -> str:
    """The operator's name: that of a function or method, or of the attribute that is read."""
    if node.target is getattr:
        return str(node.args[1])
    return str(getattr(node.target, "__name__", node.target))


def _is_torch(node: fx.Node) -> bool:
    """Whether the operator is one of torch's or Python's, so that its name says what it does."""
    if node.op != "call_function":
        return True
    module = str(getattr(node.target, "__module__", None) or "torch")
    return module.split(".")[0] in ("torch", "_operator", "operator", "builtins", "math")


def _option(node: fx.Node, name: str) -> Any:
    """The value of a function's option, given by name or by position; None where there is none."""
    if name in node.kwargs or node.op != "call_function":
        return node.kwargs.get(name)
    try:
        return inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get(name)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # written in C, where what changes an input has a name that ends in _
        return None


def in_place(network: nn.Module, node: fx.Node) -> bool:
    """Whether a node may change a tensor that it was given."""
    if node.op == "call_module":
        module = _module(network, node)
        return bool(getattr(module, "inplace", False)) or bool(getattr(module, "max_norm", None))
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node)
    if name in _STATISTICS and any(value is True for value in (*node.args, *node.kwargs.values())):
        return True
    schema = getattr(node.target, "_schema", None) or getattr(getattr(node.target, "default", None), "_schema", None)
    if schema is not None or not _is_torch(node):
        return schema is None or bool(schema.is_mutable)
    given = _option(node, "inplace") or node.kwargs.get("out") is not None or _option(node, "max_norm") is not None
    return bool(given) or _base(name) != name


def _base(name: str) -> str:
    """The operator without its effect: ``add_`` and ``iadd`` are ``add``."""
    if name.endswith("_") and not name.endswith("__"):
        return name.removesuffix("_")
    if name in ("setitem", "delitem"):
        return f"{name}_"
    return _AUGMENTED.get(name.strip("_"), name)


def _kind(network: nn.Module, node: fx.Node) -> str:
    """What a node gives: fresh memory, a view, its input (same), perhaps a copy, a number, or something unknown."""
    if node.op == "call_module":
        kind = type(_module(network, node))
        sets = {"fresh": _FRESH_MODULES, "same": _SAME_MODULES, "copy": _COPY_MODULES}
        return next((name for name, kinds in sets.items() if kind in kinds), "unknown")
    if node.op not in ("call_function", "call_method") or not _is_torch(node):
        return "fresh" if node.op in ("placeholder", "get_attr", "output") else "unknown"
    name = _name(node)
    if name in _COPIES and any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values())):
        return "unknown"  # the bits of the numbers, as they lie
    if "dropout" in name and _option(node, "training") is False:
        return "same"
    if name in _FRESH and not in_place(network, node):
        return "fresh"
    sets_ = {"same": _SAME, "view": _VIEWS, "copy": _COPIES, "number": _NUMBERS}
    return next((kind for kind, names in sets_.items() if name in names), "unknown")


class Memory:
    """Which nodes of a graph may share memory.

    ``roots[node]`` are the nodes whose memory it may show. ``shown[node]`` is the one whose memory it surely shows, in
    any layout; ``whole[node]`` the one all of whose memory it shows, in order, as long as that lies in order.
    """

    def __init__(self, network: nn.Module, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.roots: dict[fx.Node, set[fx.Node]] = {}
        self.shown: dict[fx.Node, fx.Node] = {}
        self.whole: dict[fx.Node, fx.Node] = {}
        self.kinds = {node: _kind(network, node) for node in self.nodes}
        self.changing = [node for node in self.nodes if in_place(network, node)]
        for node in self.nodes:
            kind, changes = self.kinds[node], node in self.changing
            alias = kind not in ("fresh", "number") or changes
            found = self._touched(node) if alias else set()
            self.roots[node] = set() if kind == "number" else found or {node}
            (source,) = self._sources(node) if len(self._sources(node)) == 1 else (None,)
            known = changes and _known(node)
            surely = source is not None and (known or kind in ("same", "view"))
            wholly = source is not None and (known or kind in ("same", "copy"))
            self.shown[node] = self.shown[source] if surely else node  # type: ignore[index]
            self.whole[node] = self.whole[source] if wholly else node  # type: ignore[index]

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """The inputs whose memory the node may show or change: of a known operator, the first one."""
        first = node.args[0] if node.args else None
        known = self.kinds[node] != "unknown" or (node in self.changing and _known(node))
        return [first] if known and isinstance(first, fx.Node) else node.all_input_nodes

    def _touched(self, node: fx.Node) -> set[fx.Node]:
        return set().union(*(self.roots[source] for source in self._sources(node)))

    def may_share(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether a change of one may be a change of the other."""
        return not self.roots[node].isdisjoint(self.roots[other])

    def changed(self) -> set[fx.Node]:
        """The nodes whose memory may be changed in place."""
        return set().union(*(self._touched(node) for node in self.changing))

    def split_views(self) -> list[tuple[fx.Node, fx.Node]]:
        """Pairs of a change in place and a node that is read after it, and may or may not show what was changed."""
        found = []
        for node in self.changing:
            place = self.nodes.index(node)
            later = set(self.nodes[place + 1 :])
            for other in self.nodes[:place]:
                shares = self.may_share(node, other) and self.shown[other] is not self.shown[node]
                if shares and not later.isdisjoint(other.users):
                    found.append((node, other))
        return found


def _known(node: fx.Node) -> bool:
    """Whether all that a change in place does is to put a result in the place of the first input."""
    if node.op == "call_module":
        return True
    return node.kwargs.get("out") is None and _base(_name(node)).strip("_") in _FRESH - _STATISTICS | _STORES


def refuse_changed_state(memory: Memory) -> None:
    """A graph must not change tensors that it keeps from call to call, nor hand out those that forward would create."""
    changed = memory.changed()
    state = [node for node in memory.nodes if node in changed and node.op == "get_attr"]
    if state:
        told = "a tensor" if str(state[0].target).startswith(CONSTANT) else f"self.{state[0].target}"
        raise PackError(f"forward changes {told} in place")
    for node in memory.nodes[-1].all_input_nodes:
        if any(str(root.target).startswith(CONSTANT) for root in memory.roots[node]):
            raise PackError("forward returns a tensor that does not depend on its inputs")


def keeps_layout(memory: Memory) -> bool:
    """Whether tensors must lie as forward would lay them out; else images may be in channels_last.

    In another layout a view may become a copy, which a change of what it shows does not reach, nor the reverse; the
    caller's tensor must be the one that is changed, and returned; and who knows what an unknown operator looks at.
    """
    inputs = {node for node in memory.nodes if node.op == "placeholder"}
    returned = set().union(*(memory.roots[node] for node in memory.nodes[-1].all_input_nodes))
    unknown = [node for node in memory.nodes if memory.kinds[node] == "unknown"]
    odd = any(node not in memory.changing or not _known(node) for node in unknown)
    return bool(odd or inputs & memory.changed() or inputs & returned or memory.split_views())


def fuse(network: nn.Module, graph: fx.Graph, *, layout: bool) -> None:
    """Lets each packed layer do what surrounds it: sign -> layer -> batch norm -> addition -> ReLU.

    With ``layout`` tensors lie as they would without it; an addition is left alone then, since either term may decide.
    """
    for node in graph.nodes:
        if layout:
            break
        if node.op == "call_method" and node.target == "view":
            size = node.args[1:] or (node.kwargs.get("size"),)
            # In channels_last the dimensions of a view may not lie as they did.
            node.target, node.args, node.kwargs = "reshape", (node.args[0], *size), {}
        elif node.op == "call_method" and node.target == "view_as":
            node.target = "reshape_as"
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    options = {"fused": True, "layout": layout}
    for node in list(graph.nodes):
        layer = _module(network, node)
        if not isinstance(layer, _PACKED) or called.count(node.target) > 1 or len(node.args) != 1 or node.kwargs:
            continue
        source = node.args[0]
        if _is_sign(network, source) and not _changes_between(network, graph, source, node) and layer.take_sign():
            node.args = source.args
        last = node
        follower = _only_user(last)
        norm = _module(network, follower) if _takes(follower, last) else None
        if isinstance(norm, _NORMS[type(layer)]) and _folds(norm, layer) and called.count(follower.target) == 1:
            layer.fold(norm)
            last, follower = follower, _only_user(follower)
        residual = None if layout else _added(last, follower)
        start = source if layer.after_sign else node
        if residual is not None and not _changes_between(network, graph, start, follower):
            last, added, follower = follower, follower, _only_user(follower)
        else:
            residual = None
        relu = _takes(follower, last) and _is_relu(network, follower)
        last = follower if relu else last
        with graph.inserting_before(node if residual is None else added):
            extras = {"residual": residual} if residual else {}
            done = graph.call_module(node.target, node.args, {**extras, **options, "relu": bool(relu)})
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


def _takes(follower: Any, node: fx.Node) -> bool:
    """Whether the node is all that the follower is given, but for options."""
    return isinstance(follower, fx.Node) and follower.args == (node,)


def _folds(norm: nn.BatchNorm1d | nn.BatchNorm2d, layer: PackedConv2d | PackedLinear) -> bool:
    known = type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d) and norm.num_features == layer.weight_bits.shape[0]
    return known and norm.running_mean is not None and norm.running_var is not None and not hooked(norm)


def _added(node: fx.Node, follower: Any) -> fx.Node | None:
    """What the follower adds to the node, if that is all it does."""
    if not isinstance(follower, fx.Node) or follower.kwargs or len(follower.args) != 2:
        return None
    functions = follower.op == "call_function" and follower.target in (operator.add, torch.add, operator.iadd)
    methods = follower.op == "call_method" and follower.target in ("add", "add_")
    first, second = follower.args
    if not (functions or methods) or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    changes = follower.target in (operator.iadd, "add_")
    if first is second or (changes and first is not node):
        return None
    return second if first is node else first


def _changes_between(network: nn.Module, graph: fx.Graph, start: fx.Node, end: fx.Node) -> bool:
    """Whether a tensor may be changed in place between two nodes, so that the first cannot be moved to the second."""
    nodes = list(graph.nodes)
    return any(in_place(network, node) for node in nodes[nodes.index(start) + 1 : nodes.index(end)])


def _is_relu(network: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(_module(network, node)) is nn.ReLU
    if node.op == "call_function":
        return node.target in (F.relu, torch.relu, torch.relu_, F.relu_) and len(node.args) == 1
    return node.op == "call_method" and node.target in ("relu", "relu_")
