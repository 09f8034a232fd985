"""Fusion: packed layers that do the work of their neighbors, too: sign -> layer -> batch norm -> addition -> ReLU.

``torch.compile`` traces a network at its first call, and its guards notice all later changes. AOTAutograd turns the
trace into graphs of ATen operators that change nothing in place, so that a layer can be computed in the place of its
last neighbor, with images in the memory layout that the kernels prefer.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mirrorquant.levels import BINARY
from mirrorquant.packing.kernels import ops
from mirrorquant.packing.kernels.layer import Epilogue, Geometry

__all__ = ["compiled", "fuse"]

_aten = torch.ops.aten
_CONV, _LINEAR = torch.ops.mirrorquant.conv2d.default, torch.ops.mirrorquant.linear.default
_NORM = _aten._native_batch_norm_legit_no_training.default
_STRIDED = (_aten.as_strided.default, _aten.as_strided_scatter.default, _aten.view.dtype)
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_numbers = itertools.count()


def compiled(network: nn.Module) -> Callable[..., Any]:
    """The network as a function: compiled at its first call, and again when something that it depends on changes."""
    modules = list(network.modules())
    hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    hooks += [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    kinds = {kind for module in modules for kind in type(module).__mro__ if kind.__module__.split(".")[0] != "torch"}
    run: Callable[..., Any] | None = None
    before: list[Any] = []

    def call(*inputs: Any, **options: Any) -> Any:
        nonlocal run, before
        now: list[Any] = [tuple(some) for some in hooks if some]  # and methods: torch has no guards for these two
        now += [value for kind in kinds for value in vars(kind).values() if type(value) is types.FunctionType]
        if run is None or now != before:
            code = _call.__code__.replace(co_name=f"packed_{next(_numbers)}")  # the key of torch's compiled code
            run, before = torch.compile(types.FunctionType(code, globals()), backend=_backend()), now
        return run(network, inputs, options)

    return call


def _call(network: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return network(*inputs, **options)


@cache
def _backend() -> Callable[..., Any]:
    """One for all networks, since torch never forgets a backend."""
    from torch._dynamo.backends.common import aot_autograd  # which takes seconds to import
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def compile_graph(module: fx.GraphModule, inputs: Any) -> Any:
        fuse(module.graph)
        return make_boxed_func(fx.GraphModule(module, module.graph).forward)

    functional = aot_autograd(fw_compiler=compile_graph, inference_compiler=compile_graph)

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        for node in list(module.graph.nodes):
            if node.target in _DROPOUTS and node.kwargs.get("training", (*node.args, True, True)[2]) is False:
                node.replace_all_uses_with(node.args[0])  # its result, of which AOTAutograd would make a copy
                module.graph.erase_node(node)
        module.recompile()
        return functional(module, inputs)

    return backend


def fuse(graph: fx.Graph) -> None:
    """Rewrites a graph of ATen operators without changes in place: one call for each packed layer and its neighbors."""
    for node in list(graph.nodes):
        if node.target in (_aten.view.default, _aten._unsafe_view.default):
            node.target = _aten.reshape.default
        elif _minds_layout(node):
            for source in node.all_input_nodes:
                node.replace_input_with(source, _laid_out(graph, source, node))
    _keep_layout_of_outputs(graph)
    for node in list(graph.nodes):
        if node.target in (_CONV, _LINEAR) and node.meta["val"].device.type in ("cpu", "cuda"):
            _fuse_layer(graph, node)
        elif node.target is _aten.convolution.default:
            _fold_into_weight(graph, node)
    graph.eliminate_dead_code()
    graph.lint()


def _fuse_layer(graph: fx.Graph, node: fx.Node) -> None:
    fields: Any
    x, prepared, *fields = node.args
    geometry, epilogue = Geometry.of(*fields[:-4]), Epilogue(*fields[-4:])
    if epilogue.residual is not None or epilogue.relu:
        return
    source, last = _signed(x), node
    if source is not None and geometry.levels == tuple(BINARY):
        x, geometry = source, geometry._replace(activation="binary")
    norm = _norm_after(node) if node.target is _CONV or node.meta["val"].dim() == 2 else None
    if norm is not None:
        last = _only_user(norm)
        epilogue = Epilogue(*_fold(graph, norm, epilogue.scale, epilogue.shift))
    residual = _added_to(last)
    if residual is not None:
        last, epilogue = _only_user(last), epilogue._replace(residual=residual)
    follower = _only_user(last)
    if follower is not None and follower.target is _aten.relu.default:
        last, epilogue = follower, epilogue._replace(relu=True)
    with graph.inserting_before(last):
        done = graph.call_function(ops.run, (x, prepared, geometry, epilogue, node.target is _LINEAR))
    done.meta = last.meta
    last.replace_all_uses_with(done)


def _fold_into_weight(graph: fx.Graph, node: fx.Node) -> None:
    """The batch norm after a convolution that computes with floats, in its weight."""
    x, weight, bias, *window = node.args
    norm = _norm_after(node)
    if norm is None or weight.op != "placeholder" or node.args[6]:  # type: ignore[union-attr]
        return
    last = _only_user(norm)
    tensors = _fold(graph, norm, weight, bias)
    with graph.inserting_before(last):
        done = graph.call_function(_aten.convolution.default, (x, *tensors, *window))
    done.meta = last.meta
    last.replace_all_uses_with(done)


def _fold(graph: fx.Graph, norm: fx.Node, kernel: Any, shift: Any) -> list[Any]:
    """The kernel and the shift of a layer with the batch norm that follows it."""
    with graph.inserting_before(_only_user(norm)):
        folded = graph.call_function(_cached(_folded), (*norm.args[1:5], norm.args[6], kernel, shift))
        return [graph.call_function(operator.getitem, (folded, place)) for place in (0, 1)]


# What stands beside a layer.


def _only_user(node: fx.Node) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _signed(node: Any) -> Any:
    """The x of ``BinaryActivation()(x)``, if the node is that: where(x >= 0, 1, full_like(x, -1))."""
    if node.target is not _aten.where.self:
        return None
    condition, one, other = node.args
    found = [(part.target, part.args) for part in (condition, one, other) if isinstance(part, fx.Node)]
    x = condition.args[0]
    wanted = [(_aten.ge.Scalar, (x, 0.0)), (_aten.scalar_tensor.default, (1.0,)), (_aten.full_like.default, (x, -1.0))]
    return x if found == wanted else None


def _norm_after(node: fx.Node) -> Any:
    """The batch norm that alone uses the node, and is used for its result alone."""
    norm = _only_user(node)
    if norm is None or norm.target is not _NORM or norm.args[0] is not node:
        return None
    result = _only_user(norm)
    return norm if result is not None and result.target is operator.getitem and result.args[1] == 0 else None


def _added_to(node: fx.Node) -> Any:
    """What is added to the node, by its only user: a tensor like it."""
    follower = _only_user(node)
    if follower is None or follower.target is not _aten.add.Tensor or follower.kwargs:
        return None
    first, second = follower.args
    other = second if first is node else first
    if not isinstance(other, fx.Node) or other is node or not isinstance(other.meta["val"], Tensor):
        return None
    one, two = node.meta["val"], other.meta["val"]
    return other if one.shape == two.shape and one.dtype == two.dtype and one.device == two.device else None


# Memory.


def _minds_layout(node: fx.Node) -> bool:
    """Whether the result depends on the memory layout of the inputs: strides, or the order in which noise is drawn."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    known = node.target.namespace in ("aten", "prims", "mirrorquant") and node.target not in _STRIDED
    return not known or torch.Tag.nondeterministic_seeded in node.target.tags


def _keep_layout_of_outputs(graph: fx.Graph) -> None:
    """Gives the outputs the memory layout of the trace, and shared memory where they shared it."""
    owners: dict[int, fx.Node] = {}
    shown: dict[fx.Node, list[fx.Node]] = {}
    output = next(iter(reversed(graph.nodes)))
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            owner = owners.setdefault(node.meta["val"].untyped_storage()._cdata, node)
            if output in node.users:
                shown.setdefault(owner, []).append(node)
    for owner, nodes in shown.items():
        if len(nodes) == 1:
            output.replace_input_with(nodes[0], _laid_out(graph, nodes[0], output))
        else:
            kept = _laid_out(graph, owner, owner.next)
            owner.replace_all_uses_with(kept, lambda user, kept=kept: user is not kept)  # type: ignore[misc]


def _laid_out(graph: fx.Graph, source: fx.Node, place: fx.Node) -> fx.Node:
    """The source, before another node, in memory as it was traced."""
    value = source.meta.get("val")
    if source.op == "placeholder" or not isinstance(value, Tensor) or value.dim() < 2:
        return source
    with graph.inserting_before(place):
        if value.is_contiguous():
            found = graph.call_function(ops.contiguous, (source,))
        else:
            strides = value.stride()
            order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
            found = graph.call_function(_ordered, (source, tuple(order)))
    found.meta = source.meta
    return found


def _ordered(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The tensor with its dimensions in this order in memory."""
    return x.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])


# What runs.


def _cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called again only when one of its tensors was replaced or changed."""
    kept: tuple[tuple[Any, ...], list[int] | None, Any] = ((), None, None)

    def call(*values: Any) -> Any:
        nonlocal kept
        before, counts, result = kept
        if counts is None or not all(map(operator.is_, values, before)) or _counts(values) != counts:
            result = function(*values)
            kept = values, _counts(values), result
        return result

    return call


def _counts(values: tuple[Any, ...]) -> list[int] | None:
    """How often each tensor was changed; None where torch does not count that."""
    try:
        return [value._version for value in values if isinstance(value, Tensor)]
    except RuntimeError:  # an inference tensor
        return None


def _folded(
    weight: Any, bias: Any, mean: Tensor, variance: Tensor, eps: float, kernel: Any, shift: Any
) -> list[Tensor]:
    """norm(kernel * y + shift) as one kernel and shift, computed in float64; None as a kernel is ones."""
    kernel = torch.ones_like(mean, dtype=torch.float32) if kernel is None else kernel
    slope = (variance.double() + eps).rsqrt() * (1 if weight is None else weight.double())
    moved = ((0 if shift is None else shift.double()) - mean.double()) * slope
    moved = moved + (0 if bias is None else bias.double())
    slope = slope.reshape(-1, *[1] * (kernel.dim() - 1))
    return [(kernel * slope).to(kernel.dtype), moved.to(kernel.dtype)]
