"""A fused network: its graph, and whether that still stands for the network."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn

from mirrorquant.packing.fuse import Memory, fuse, keeps_layout, refuse_changed_state
from mirrorquant.packing.layers import PackedConv2d, PackedLinear
from mirrorquant.packing.trace import trace
from mirrorquant.packing.watch import Followed

__all__ = ["Fusion", "fusion_of"]

_PACKED = (PackedConv2d, PackedLinear)


def fusion_of(network: nn.Module) -> Fusion | None:
    """The network fused, or None with a warning that says why not."""
    for layer in network.modules():
        if isinstance(layer, _PACKED):
            layer.part()
    try:
        return Fusion(network)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"{type(network).__name__} runs packed, but batch norms and additions are not folded into its layers, "
            f"because its forward cannot be traced: {reason}. Pass fuse=False to accept that without a warning",
            stacklevel=6,
        )
        return None


class Fusion:
    """The graph of a network whose packed layers do the work of their neighbours, too.

    ``layout`` says that tensors must lie as the network's own forward would lay them out; ``autocast`` that forward
    asks for autocast or switches it off, so that the graph does not stand for calls under autocast.
    """

    def __init__(self, network: nn.Module) -> None:
        traced = trace(network)
        memory = Memory(network, traced.graph)
        refuse_changed_state(memory)
        self.network, self.graph, self.layout = network, traced.graph, keeps_layout(memory)
        self.autocast = traced.watch.autocast
        self.inputs = sum(node.op == "placeholder" for node in traced.graph.nodes)
        vars(network).update(traced.constants)
        self._names = [str(node.target) for node in traced.graph.nodes if node.op == "get_attr"]
        self._followed = Followed(traced.watch, network)
        fuse(network, self.graph, layout=self.layout)
        self.graph.lint()
        modules = list(network.modules())
        norms = [norm for module in modules if isinstance(module, _PACKED) for norm in module.norm]
        self._folded = [(norm, name) for norm in norms for name in ("weight", "bias", "running_mean", "running_var")]
        self._followed.objects += [
            (vars(norm), name, vars(norm)[name]) for norm in norms for name in ("training", "eps")
        ]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._hooks += [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
        self._spaces = [vars(module) for module in modules]
        self._warned = False

    def module(self) -> fx.GraphModule:
        """The graph, with the network's tensors as they are now."""
        read = [(self.network.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in self._names]
        places = [_place(*one) for one in read + self._folded]
        tensors = [(space, name, space[name]) for space, name in places]
        counted = [tensor for _, _, tensor in tensors if tensor is not None and not tensor.is_inference()]
        self._tensors, self._versions = tensors, [(tensor, tensor._version) for tensor in counted]
        return fx.GraphModule(self.network, self.graph)

    def takes(self, inputs: tuple[Any, ...]) -> bool:
        """Whether the graph stands for a call with these inputs."""
        if self.autocast and torch._C._is_any_autocast_enabled():
            return False
        return len(inputs) == self.inputs and all(isinstance(value, Tensor) for value in inputs)

    def state(self) -> str:
        """Whether the graph stands for the network as it is now: same; moved, with other tensors; or changed."""
        changed = self._changed()
        if changed is None and torch.compiler.is_compiling():
            return "same"  # tensors have stand-ins then
        if changed is None:
            moved = any(space[name] is not tensor for space, name, tensor in self._tensors)
            return "moved" if moved or any(tensor._version != n for tensor, n in self._versions) else "same"
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{changed} has changed since {type(self.network).__name__} was packed: from now on it runs without "
                "batch norms and additions folded into its layers. Pack it again to fold them",
                stacklevel=6,
            )
        return "changed"

    def _changed(self) -> str | None:
        changed = self._followed.changed()
        if changed is None and any(self._hooks):
            return "a forward hook"
        if changed is None and any("forward" in space for space in self._spaces):
            return "forward"
        if changed is None:
            for space, name, tensor in self._tensors:
                if space.get(name) is not tensor and (tensor is None or not isinstance(space.get(name), Tensor)):
                    return name
        return changed


# A compiler asks once, when it compiles. The decorator for it would import the compiler, which takes seconds.
Fusion.state._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _place(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary that holds a tensor of a module."""
    spaces: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
    return next(space for space in spaces if name in space), name
