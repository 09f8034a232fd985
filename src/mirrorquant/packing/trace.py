"""Tracing: the graph of a network's forward pass, refused wherever it would not do what the network does.

A throwaway copy of the network is traced, whose modules are of subclasses that write down what is read of them. So
neither the network nor its classes nor the globals of any module are touched, whatever other threads do with them.
"""

from __future__ import annotations

import copy
import gc
import inspect
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mirrorquant.nn import BinaryActivation
from mirrorquant.packing.bits import PackError
from mirrorquant.packing.layers import PackedConv2d, PackedLinear
from mirrorquant.packing.watch import MISSING, Watch, is_library, is_numpy_scalar

__all__ = ["Traced", "hooked", "trace"]

CONSTANT = "_tensor_constant"
_PACKED = (PackedConv2d, PackedLinear)
_LOCK = threading.RLock()  # torch counts its dispatch modes for all threads together
AUGMENTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")


class Traced(NamedTuple):
    """A graph, the names of the tensors that it refers to, and what was read to make it."""

    graph: fx.Graph
    constants: dict[str, Tensor]
    watch: Watch


def trace(network: nn.Module) -> Traced:
    """The network's graph, layers being its nodes; raises an error that says why where there can be none.

    The graph stands for calls with the arguments that have no default, all of them tensors.
    """
    odd = [name or type(network).__name__ for name, module in network.named_modules() if hooked(module)]
    if odd or _globally_hooked():
        raise PackError(
            f"{odd[0] if odd else 'every module'} has a forward hook, or a forward that is not of its class"
        )
    held = [value for module in network.modules() for value in tree_leaves(vars(module)) if isinstance(value, Tensor)]
    copied = copy.deepcopy(network, {id(tensor): tensor for tensor in held})
    watch = Watch()
    with _LOCK:
        first, second = (_Tracer(copied, watch, held).run() for _ in range(2))
    if not _alike(first, second):
        raise PackError("forward does not do the same each time")
    return first


def hooked(module: nn.Module) -> bool:
    """Whether calling it does more than its class says: by a hook, or by a ``forward`` that was put into the object."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _globally_hooked() -> bool:
    return bool(nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks)


def _alike(first: Traced, second: Traced) -> bool:
    nodes = [[(n.op, n.target, str(n.args), str(n.kwargs)) for n in traced.graph.nodes] for traced in (first, second)]
    return nodes[0] == nodes[1] and all(
        tensor.dtype == other.dtype and (tensor.is_meta or torch.equal(tensor.nan_to_num(7), other.nan_to_num(7)))
        for tensor, other in zip(first.constants.values(), second.constants.values(), strict=True)
    )


class _Proxy(fx.Proxy):
    """Stands for a value. It answers no question that a tensor would answer otherwise."""

    def __init__(self, node: fx.Node, tracer: Any) -> None:
        self.__dict__.update(node=node, tracer=tracer)

    def _refuse(self, reason: str) -> NoReturn:
        self._watch.refuse(reason)

    @property
    def _watch(self) -> Watch:
        tracer: Any = self.tracer
        watch: Watch = tracer.watch
        return watch

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For isinstance, where the answer is known: the graph stands for calls with tensors."""
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if caller.startswith(("torch.", "mirrorquant.packing")):
            return type(self)
        if self._watch.called is not isinstance and (caller == "torch" or not is_library(caller)):
            return type(self)  # for a function in C, which must not take it for a tensor
        if self.node.op != "placeholder":
            self._refuse(f"forward asks for the type of {self.node.name}")
        return Tensor

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(f"forward sets the attribute {name} of a tensor")

    def __hash__(self) -> int:
        if is_library(sys._getframe(1).f_globals.get("__name__", "")):
            return id(self)
        self._refuse(f"forward looks for {self.node.name} in a dictionary or set")

    def __len__(self) -> int:
        self._refuse(f"forward asks for the length of {self.node.name}")

    def __float__(self) -> float:
        hint = " by math.sqrt (which ** 0.5 would not do)" if self._watch.called is math.sqrt else ""
        self._refuse(f"forward makes a Python number of {self.node.name}{hint}")

    def __str__(self) -> str:
        self._refuse(f"forward makes text of {self.node.name}")

    def __format__(self, spec: str) -> str:
        return self._watch.text(self.node.name)

    __int__ = __index__ = __complex__ = __float__

    def __setitem__(self, place: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, place, value), {})


def _augmented(name: str) -> Callable[..., Any]:
    """``x += y`` changes x for everyone who holds it; torch.fx takes it for ``x = x + y``."""
    function = getattr(operator, f"i{name}")

    def method(self: _Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name in AUGMENTED:
    setattr(_Proxy, f"__i{_name}__", _augmented(_name))


class _Attribute(_Proxy):
    """An attribute of a value, which becomes a node if it is not called at once."""

    def __init__(self, root: _Proxy, name: str) -> None:
        self.__dict__.update(root=root, attr=name, tracer=root.tracer, made=None)

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self.__dict__["made"] is None:
            made = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {})
            self.__dict__["made"] = made.node
        node: fx.Node = self.__dict__["made"]
        return node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class _Watched:
    """Comes before a module's class: calls become nodes, reads are written down, writes refused."""

    _tracer: _Tracer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self)._tracer.call(self, args, kwargs)

    def __getattribute__(self, name: str) -> Any:
        return type(self)._tracer.read(self, name, super().__getattribute__(name))

    def __getattr__(self, name: str) -> Any:
        try:
            value = super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            type(self)._tracer.read(self, name, MISSING)
            raise
        return type(self)._tracer.read(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        type(self)._tracer.watch.refuse(f"forward sets {type(self)._tracer.told(self, name)}")

    def __delattr__(self, name: str) -> None:
        type(self)._tracer.watch.refuse(f"forward deletes {type(self)._tracer.told(self, name)}")


class _Tracer(fx.Tracer):
    """Sees packed layers as nodes, and of the network's arguments those that it cannot do without.

    Unlike its base it replaces nothing in torch or in anybody's modules while it works.
    """

    def __init__(self, network: nn.Module, watch: Watch, held: list[Tensor]) -> None:
        super().__init__()
        self.root, self.watch, self.held = network, watch, {id(tensor) for tensor in held}
        self.graph = fx.Graph(tracer_cls=fx.Tracer)
        self.constants: dict[str, Tensor] = {}
        self.paths = {id(module): path for path, module in reversed([*network.named_modules(remove_duplicate=False)])}
        self.kinds = {id(module): type(module) for module in network.modules()}
        self._proxies: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def run(self) -> Traced:
        """Traces the network."""
        modules = list(self.root.modules())
        before = [[dict(space) for space in _spaces(module)] for module in modules]
        inputs = self._inputs(type(self.root).forward)
        self.watch.method(type(self.root), "forward")
        with torch.no_grad(), _Eager(self.watch, self.held), self._watched(modules), self._profiled():
            result = self.root.forward(*inputs)
        if self.watch.refusal is not None:  # which forward caught
            raise self.watch.refusal
        self.create_node("output", "output", (self.create_arg(result),), {}, None)
        for module, spaces in zip(modules, before, strict=True):
            for was, now in zip(spaces, _spaces(module), strict=True):
                odd = [name for name in {**was, **now} if was.get(name, MISSING) is not now.get(name, MISSING)]
                if odd:
                    self.watch.refuse(f"forward changes {self.told(module, odd[0])}")
        self.watch.refuse_changes()
        return Traced(self.graph, self.constants, self.watch)

    def _inputs(self, forward: Any) -> list[Any]:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        needed = [p.name for p in parameters if p.default is p.empty]
        if not needed or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters if p.name in needed):
            self.watch.refuse(f"it takes the arguments {[str(p) for p in parameters]}")
        return [self.create_proxy("placeholder", name, (), {}) for name in needed]

    @contextmanager
    def _watched(self, modules: list[nn.Module]) -> Iterator[None]:
        kinds = {type(module) for module in modules}
        members = {"_tracer": self}
        watched = {
            kind: type(kind.__name__, (_Watched, kind), {**members, "__module__": kind.__module__}) for kind in kinds
        }
        try:
            for module in modules:
                if isinstance(module, _PACKED):
                    module.traced = True
                module.__class__ = watched[type(module)]
            yield
        finally:
            for module in modules:
                object.__setattr__(module, "__class__", self.kinds[id(module)])
                vars(module).pop("traced", None)

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """Has the watch see each call; whatever profiles this thread already is away meanwhile.

        No garbage is collected, so that only what forward calls is called.
        """
        before, collects = sys.getprofile(), gc.isenabled()
        if before is not None and not callable(before):
            self.watch.refuse("a profiler that cannot be suspended is at work")
        gc.disable()
        sys.setprofile(self.watch)
        try:
            yield
        finally:
            sys.setprofile(before)
            if collects:
                gc.enable()

    # What the modules do while they are traced.

    def told(self, module: Any, name: str) -> str:
        """An attribute, as the network's forward would name it."""
        if id(module) not in self.paths:
            self.watch.refuse(f"forward makes a module ({type(module).__name__})")
        return ".".join(part for part in ("self", self.paths[id(module)], name) if part)

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called: a node where it is a leaf."""
        if id(module) not in self.paths:
            self.watch.refuse(f"forward calls a module ({type(module).__name__}) that is not part of the network")
        path, kind = self.paths[id(module)], self.kinds[id(module)]
        if self._is_leaf(kind):
            return self.create_proxy("call_module", path, args, kwargs)
        self.watch.method(kind, "forward")
        return module.forward(*args, **kwargs)

    def _is_leaf(self, kind: type) -> bool:
        if kind.__module__.startswith(("torch._dynamo", "torch.jit")):
            self.watch.refuse(f"a part of it is a {kind.__name__}")
        inside = kind.__module__.startswith(("torch.nn", "torch.ao.nn"))
        return issubclass(kind, (*_PACKED, BinaryActivation)) or (inside and not issubclass(kind, nn.Sequential))

    def read(self, module: Any, name: str, value: Any) -> Any:
        """An attribute is read: a node where it is a tensor, else a value that must stay as it is."""
        if name.startswith("__") and name.endswith("__"):
            if name == "__dict__" and not is_library(sys._getframe(2).f_globals.get("__name__", "")):
                self.watch.refuse(f"forward reads {self.told(module, name)}")
            return value
        told = self.told(module, name)
        if name in ("_parameters", "_buffers"):
            self.watch.refuse(f"forward goes through {told}")
        kind = self.kinds[id(module)]
        if isinstance(inspect.getattr_static(kind, name, None), property) or isinstance(value, fx.Proxy):
            return value
        path = self.paths[id(module)]
        if isinstance(value, Tensor):
            self.held.add(id(value))
            return self._tensor(f"{path}.{name}" if path else name, value)
        self._refuse_stranger(module, name, value)
        space = next((s for s in (module.__dict__, module.__dict__["_modules"]) if name in s), None)
        if space is None and inspect.isroutine(value):
            self.watch.method(kind, name)
        elif space is None:
            self.watch.attribute(path, name, lambda: getattr(kind, name, MISSING))
        else:
            self.watch.attribute(path, name, lambda: space.get(name, MISSING))
        return value

    def _refuse_stranger(self, module: Any, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and id(value) not in self.paths:
            self.watch.refuse(f"{self.told(module, name)} is a module that is not part of the network")

    def _tensor(self, name: str, value: Tensor) -> Any:
        name = self._names.setdefault(id(value), name)  # what is tied is one tensor
        if name not in self._proxies:
            self._proxies[name] = self.create_proxy("get_attr", name, (), {})
        return self._proxies[name]

    # What torch.fx asks.

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Tensor):
            if id(a) in self.held and id(a) not in self._names:
                names = [*self.root.named_parameters(), *self.root.named_buffers()]
                self._names.update({id(tensor): name for name, tensor in reversed(names) if tensor is a})
            if id(a) in self._names:
                return self._tensor(self._names[id(a)], a).node
            name = next((name for name, tensor in self.constants.items() if tensor is a), None)
            if name is None:
                name = f"{CONSTANT}{len(self.constants)}"
                self.constants[name] = a
            return self.create_node("get_attr", name, (), {})
        if isinstance(a, nn.Module):
            self.watch.refuse(f"forward passes a module ({type(a).__name__}) to a function")
        return super().create_arg(a.item() if is_numpy_scalar(a) else a)  # whose text is no Python in the graph's code

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.watch.refuse(f"forward branches on the value of {obj.node.name}")

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        self.watch.refuse(f"forward iterates over {obj.node.name}")


def _spaces(module: nn.Module) -> list[dict[str, Any]]:
    """The dictionaries in which a module keeps its attributes."""
    space = vars(module)
    return [space, space["_parameters"], space["_buffers"], space["_modules"]]


class _Eager(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators that run while tracing, whose results are constants of the graph."""

    def __init__(self, watch: Watch, held: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch, self.held, self.fresh, self.kept = watch, held, set[int](), list[Tensor]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to import the compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.watch.refuse(f"forward draws random numbers ({name})")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(id(tensor) in self.held for tensor in inputs):
            self.watch.refuse(
                f"forward computes with the network's own tensors in a way that cannot be followed ({name})"
            )
        if func._schema.is_mutable and not all(_storage(tensor) in self.fresh for tensor in inputs):
            self.watch.refuse(f"forward changes a tensor that it did not create ({name})")
        result = func(*args, **(kwargs or {}))
        old = {_storage(tensor) for tensor in inputs} - self.fresh
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage(leaf) not in old:
                self.fresh.add(_storage(leaf))
                self.kept.append(leaf)  # so that its place is not taken by another
        return result


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
