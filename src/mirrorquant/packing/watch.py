"""What a forward pass depends on besides its inputs: attributes, globals and closures, and whether they stay the same.

A traced graph is a snapshot: whatever Python read while it was traced is a constant of it. So all of that is written
down here while a network is traced, and compared before each call of the graph.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import importlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mirrorquant.packing.bits import PackError

__all__ = ["MISSING", "Followed", "Watch", "frozen", "is_library", "is_numpy_scalar"]

MISSING = object()
_MOST = 2000  # a larger object is not compared at each call
_ATOMS = (int, float, complex, str, bytes, type(None), type(...), enum.Enum, range, slice)
_TORCH_ATOMS = (torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size)
_IDENTITIES = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_CONTAINERS = (list, tuple, collections.deque)
# What these modules do has an effect or gives another answer each time.
_EFFECTS = {"random", "_random", "secrets", "time", "datetime", "_datetime", "uuid", "_uuid", "os", "posix", "nt", "io"}
_EFFECTS |= {"_io", "logging", "socket", "_socket", "subprocess"}
_IMPORT = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
_EFFECT_BUILTINS = ("print", "open", "input", "exec", "eval", "globals", "locals", "vars", "id")


class _Same:
    """Equal to itself alone, as an object whose content does not matter; and while the count stays, as a tensor's."""

    def __init__(self, value: Any, count: int = 0) -> None:
        self.value, self.count = value, count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value and self.count == other.count

    __hash__ = None  # type: ignore[assignment]


def frozen(value: Any) -> Any:
    """What the value is now, to be compared with what it is later; raises where that cannot be told."""
    return _frozen(value, itertools.count(), {})


def _frozen(value: Any, steps: Iterator[int], seen: dict[int, int]) -> Any:
    if next(steps) > _MOST:
        raise PackError("which is too large to be compared at each call")
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, (*_ATOMS, *_TORCH_ATOMS)) or is_numpy_scalar(value):
        return type(value), repr(value) if isinstance(value, slice) else value
    if isinstance(value, Tensor):
        return _Same(value, 0 if value.is_inference() else value._version)
    if isinstance(value, (nn.Module, *_IDENTITIES)) or value is MISSING:
        return _Same(value)
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)

    def each(values: Any) -> list[Any]:
        return [_frozen(one, steps, seen) for one in values]

    if isinstance(value, types.FunctionType):
        return _Same(value), [] if is_library(value.__module__) else each(_held(value))
    if isinstance(value, types.MethodType):
        return each((value.__self__, value.__func__))
    if isinstance(value, functools.partial):
        return each((value.func, value.args, value.keywords))
    if isinstance(value, _CONTAINERS):
        return type(value), each(value)
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, each(sorted(value, key=repr))))
    if isinstance(value, dict):
        return type(value), each(value), each(value.values())
    if isinstance(value, types.MappingProxyType):
        return each((dict(value),))
    if type(value).__module__.split(".")[0] == "torch" and not _is_compiled(type(value)):
        return _Same(value)
    if any(map(_is_compiled, type(value).__mro__[:-1])):
        raise PackError("whose state cannot be compared")
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return _Same(value), each((getattr(value, "__dict__", None), [getattr(value, name, None) for name in slots]))


def is_numpy_scalar(value: Any) -> bool:
    """Whether it is one number of numpy's, without numpy being imported for the question."""
    return type(value).__module__ == "numpy" and any(kind.__name__ == "generic" for kind in type(value).__mro__)


def _held(function: types.FunctionType) -> Iterator[Any]:
    """The default arguments and closure of a function."""
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # noqa: PERF203 (an empty cell has no other sign)
            yield MISSING


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _is_compiled(kind: type) -> bool:
    """Whether a class is written in C, so that nothing shows its state."""
    if not kind.__flags__ & 1 << 9:  # created by a class statement, or as such a class is
        return True
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    compiled = kind.__module__ in sys.builtin_module_names if file is None else not file.endswith((".py", ".pyc"))
    return compiled or kind.__module__.split(".")[0] == "numpy"


def is_library(name: Any) -> bool:
    """Whether a module is one whose functions are known to depend on their arguments alone, but for `_EFFECTS`."""
    name = str(name)
    root = name.split(".")[0]
    ours = name.startswith(("mirrorquant.packing", "mirrorquant.nn"))
    return root == "torch" or ours or (root in sys.stdlib_module_names and root != "__main__")


class Watch:
    """Everything that the network's Python read while it was traced, and what it must not do."""

    def __init__(self) -> None:
        self.attributes: dict[tuple[str, str], Callable[[], Any]] = {}
        self.outside: dict[tuple[int, str], tuple[str, Any, Callable[[], Any]]] = {}
        self.values: dict[Any, Any] = {}
        self.called: Any = None  # the function in C that is at work
        self.autocast = False
        self.refusal: PackError | None = None
        self._studied: set[types.CodeType] = set()
        self._imports = 0
        self._text: str | None = None

    def refuse(self, reason: str) -> NoReturn:
        """Ends tracing, even if forward catches the error."""
        self.refusal = self.refusal or PackError(f"{reason}{_place()}")
        raise self.refusal

    # What it read.

    def attribute(self, path: str, name: str, read: Callable[[], Any]) -> None:
        """An attribute of the module at this path was read."""
        if (path, name) not in self.attributes:
            self.attributes[path, name] = read
            self.values[path, name] = self._frozen(_told(path, name), read())

    def _outside(self, owner: Any, name: str, read: Callable[[], Any]) -> None:
        key = (id(owner), name)
        if key not in self.outside:
            self.outside[key] = (name, owner, read)
            self.values[key] = self._frozen(name, read())

    def method(self, kind: type, name: str) -> None:
        """A method of a class is about to run: its code, its defaults and its closure are read."""
        home = next((base for base in kind.__mro__ if name in vars(base)), kind)
        if not is_library(home.__module__):
            self._outside(home, f"{home.__name__}.{name}", lambda: getattr(home, name, MISSING))

    def text(self, name: str) -> str:
        """A value becomes part of a text, which must be a message of ``torch._assert``: what comes next tells."""
        self._text = name
        return name

    def _frozen(self, told: str, value: Any) -> Any:
        try:
            return frozen(value)
        except PackError as error:
            self.refuse(f"forward reads {told} ({type(value).__name__}), {error}")

    @staticmethod
    def _is(before: Any, value: Any) -> bool:
        try:
            return bool(before == frozen(value))
        except PackError:  # as it could be before
            return False

    def refuse_changes(self) -> None:
        """Raises where something that was read has been changed since."""
        for (path, name), read in self.attributes.items():
            if not self._is(self.values[path, name], read()):
                self.refuse(f"forward changes {_told(path, name)}")
        for key, (name, _, read) in self.outside.items():
            if not self._is(self.values[key], read()):
                self.refuse(f"forward changes {name}, which it shares with other code")

    # What it ran.

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        """A profiler's hook, which sees each call that Python makes in this thread."""
        name = str(frame.f_globals.get("__name__", ""))
        if frame.f_code is _IMPORT and event in ("call", "return"):
            self._imports += 1 if event == "call" else -1
        if self._imports or name.startswith("mirrorquant.packing"):
            return
        if self._text is not None:
            self._follow_text(frame, event, name)
        if event == "c_call":
            self.called = argument
            if not is_library(name):
                self._refuse_effects(argument)
            if "autocast" in getattr(argument, "__name__", ""):
                self._note_autocast(False)
        elif event == "c_return":
            self.called = None
        elif event == "call":
            if frame.f_code is torch.autocast.__enter__.__code__:
                self._note_autocast(frame.f_locals["self"]._enabled)
            if name.split(".")[0] in _EFFECTS or name in ("torch.random", "torch.cuda.random"):
                caller = frame.f_back
                if caller is not None and not is_library(caller.f_globals.get("__name__", "")):
                    self.refuse(f"forward calls {name}.{frame.f_code.co_name}")
            if not is_library(name) and frame.f_code not in self._studied:
                self._studied.add(frame.f_code)
                self._study(frame)

    def _follow_text(self, frame: types.FrameType, event: str, name: str) -> None:
        """Refuses a text if the next thing that forward does, but for proxies' own work, is not ``torch._assert``."""
        by = frame.f_back if event == "call" else frame
        if name.startswith("torch.fx.") or by is None or is_library(by.f_globals.get("__name__", "")):
            return
        text, self._text = self._text, None
        if event != "call" or frame.f_code is not torch._assert.__code__:
            self.refuse(f"forward makes text of {text}")

    def _note_autocast(self, enabled: bool) -> None:
        """Where forward asks for autocast or switches it off, its graph stands for calls without it."""
        if enabled or torch._C._is_any_autocast_enabled():
            self.refuse("forward runs with autocast")
        self.autocast = True

    def _refuse_effects(self, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        kind = owner if isinstance(owner, type) else type(owner)
        module = owner.__name__ if isinstance(owner, types.ModuleType) else kind.__module__
        named = getattr(function, "__module__", None) or module
        name = getattr(function, "__name__", str(function))
        roots = {str(place).split(".")[0] for place in (module, named)}
        odd = named == "builtins" and name in _EFFECT_BUILTINS and isinstance(owner, types.ModuleType)
        if roots & _EFFECTS or str(named).startswith("numpy.random") or odd:
            self.refuse(f"forward calls {name if odd else f'{named}.{name}'}")

    def _study(self, frame: types.FrameType) -> None:
        """Notes which globals a function refers to; refuses what cannot be followed in it."""
        code, space = frame.f_code, frame.f_globals
        before: Any = None
        pending: tuple[str, Any] | None = None
        for step in dis.get_instructions(code):
            if pending is not None:
                self._global(space, *pending, step.argval if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else None)
                pending = None
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self.refuse(f"forward assigns to the global {step.argval}")
            if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars:
                self.refuse(f"forward assigns to the variable {step.argval} of an enclosing function")
            if step.opname == "MATCH_CLASS" or (step.opname == "LOAD_ATTR" and step.argval == "__class__"):
                self.refuse("forward asks for the type of an object")
            if step.opname == "IS_OP" and not (before is not None and before.opname == "LOAD_CONST"):
                self.refuse("forward asks whether two objects are the same one")
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                if step.argval in space:
                    pending = (step.argval, space[step.argval])
                elif step.argval == "type":
                    self.refuse("forward asks for the type of an object")
            before = step
        if pending is not None:
            self._global(space, *pending, None)

    def _global(self, space: dict[str, Any], name: str, value: Any, attribute: str | None) -> None:
        if isinstance(value, types.ModuleType) and value.__name__ == "numpy" and attribute == "random":
            self.refuse("forward draws random numbers (numpy.random)")
        self._outside(space, name, lambda: space.get(name, MISSING))
        own = isinstance(value, (types.ModuleType, type)) and not is_library(_module_name(value))
        if own and attribute is not None and _module_name(value).split(".")[0] != "numpy":
            self._outside(value, f"{name}.{attribute}", lambda: getattr(value, attribute, MISSING))


def _place() -> str:
    """The line of forward, or of what it calls, that is at work; nothing where none is."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and is_library(frame.f_globals.get("__name__", "")):
        if frame.f_code.co_name == "run":  # the tracer's: forward is not, or no longer, at work
            return ""
        frame = frame.f_back
    return "" if frame is None else f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _module_name(value: Any) -> str:
    return str(value.__name__ if isinstance(value, types.ModuleType) else value.__module__)


def _told(path: str, name: str) -> str:
    return ".".join(part for part in ("self", path, name) if part)


class Followed:
    """What has to be as it was when the network was traced, for comparison before each call."""

    def __init__(self, watch: Watch, network: nn.Module) -> None:
        self.objects: list[tuple[Mapping[str, Any], str, Any]] = []
        self.children: list[tuple[dict[str, Any], list[tuple[str, Any]]]] = []
        self.values: list[tuple[str, Callable[[], Any], Any]] = []
        for path, name in watch.attributes:
            module = network.get_submodule(path)
            space = next((space for space in (vars(module), module._modules) if name in space), None)
            if name == "_modules":
                self.children.append((module._modules, list(module._modules.items())))
            elif space is not None and _simple(space[name]):
                self.objects.append((space, name, space[name]))
            else:
                now = functools.partial(getattr, module, name, MISSING)
                self.values.append((_told(path, name), now, frozen(now())))
        for key, (name, owner, read) in watch.outside.items():
            space, leaf = (owner if isinstance(owner, dict) else vars(owner)), name.rpartition(".")[2]
            if leaf in space and _simple(space[leaf]):
                self.objects.append((space, leaf, space[leaf]))
            else:
                self.values.append((name, read, watch.values[key]))

    def changed(self) -> str | None:
        """Something that is not as it was."""
        for space, name, value in self.objects:
            if (now := space.get(name, MISSING)) is not value and frozen(now) != frozen(value):
                return name
        for children, items in self.children:
            if list(children.items()) != items:
                return "a list of modules"
        for name, read, value in self.values:
            if frozen(read()) != value:
                return name
        return None


def _simple(value: Any) -> bool:
    """Whether the object cannot change, so that it is enough that it is the same one."""
    if isinstance(value, tuple):
        return all(map(_simple, value))
    if isinstance(value, types.FunctionType):
        return is_library(value.__module__) or all(map(_simple, _held(value)))
    return isinstance(value, (*_ATOMS, *_TORCH_ATOMS, nn.Module, *_IDENTITIES)) and not isinstance(value, slice)
