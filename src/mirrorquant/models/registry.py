"""Models by name: those of this package, and any function that returns an ``nn.Module``."""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from mirrorquant.errors import MirrorquantError

__all__ = ["ModelError", "build", "builder", "identify", "label", "names", "options", "register"]

_BUILDERS: dict[str, Callable[..., nn.Module]] = {}
_LABELS: dict[str, str] = {}
_Model = TypeVar("_Model", bound=nn.Module)


class ModelError(MirrorquantError, ValueError):
    """A model that cannot be built as asked."""


def register(name: str, label: str = "") -> Callable[[Callable[..., _Model]], Callable[..., _Model]]:
    """Makes a function that returns a model known as ``name``; reports call it ``label``.

    The signature of the function says which options the model has. A model remembers the options it was built with, so
    that a packed file can name them. A module added to this package is imported with it: one file adds a model.
    """

    def wrap(function: Callable[..., _Model]) -> Callable[..., _Model]:
        if name in _BUILDERS:
            raise ModelError(f"there is a model {name!r} already, {_BUILDERS[name].__module__}: choose another name")

        @functools.wraps(function)
        def built(*arguments: Any, **options: Any) -> _Model:
            model = function(*arguments, **options)
            bound = inspect.signature(function).bind(*arguments, **options)
            bound.apply_defaults()
            model.built_as = {"name": name, "options": dict(bound.arguments)}  # type: ignore[assignment]
            return model

        _BUILDERS[name] = built
        _LABELS[name] = label or name
        return built

    return wrap


def names() -> list[str]:
    """Names of the registered models, sorted.

    >>> names()
    ['digitsnet', 'mobilenetv2', 'resnet18', 'vgg16']
    """
    return sorted(_BUILDERS)


def label(name: str) -> str:
    """A model as it is usually written: ``resnet18`` is ResNet-18; an unknown name as it is."""
    return _LABELS.get(name, name)


def options(name: str) -> list[str]:
    """The options that a registered model takes, apart from the number of classes.

    >>> options("resnet18")
    ['affine', 'stem_stride']
    """
    return [option for option in inspect.signature(builder(name)).parameters if option != "classes"]


def build(name: str, classes: int, **options: Any) -> nn.Module:
    """A model by name, or from ``"module:function"``, a function that returns a custom one.

    A custom function gets ``classes=classes`` if it has a parameter of that name. Other ``options`` are passed on. The
    model has the initialization of its torch layers; see :func:`initialize` for the paper's.

    Raises:
        ModelError: no such model, no such function, an option that it does not take, or a result that is not an
            ``nn.Module`` or has lazy layers without a shape.

    >>> build("resnet18", 200, stem_stride=2).conv1.stride
    (2, 2)
    >>> build("mirrorquant.models:digitsnet", 26).fc.out_features
    26
    >>> build("resnet81", 10)
    Traceback (most recent call last):
    mirrorquant.models.registry.ModelError: no model 'resnet81'; did you mean 'resnet18'? ...
    """
    function = _imported(name) if ":" in name else builder(name)
    accepted = inspect.signature(function).parameters
    if "classes" in accepted:
        options["classes"] = classes
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    unknown = [] if takes_any else [option for option in options if option not in accepted]
    if unknown:
        raise ModelError(
            f"model {name!r} does not take {unknown}, only {list(accepted)}: remove the option or fix its name"
        )
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ModelError(f"model {name!r} cannot be called with {list(options)} alone: {error}") from error
    model = function(**options)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name!r} returned {type(model).__name__}, expected an nn.Module: return the model itself")
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise ModelError(
            f"{name!r} returned a model with lazy layers: call it with a batch of images before returning it"
        )
    return model


def identify(model: nn.Module) -> dict[str, Any] | None:
    """Name and options from which :func:`build` makes such a model; None for a custom one.

    A model that was changed after it was built is custom, whatever its class.

    >>> identify(build("resnet18", 100, stem_stride=2))
    {'name': 'resnet18', 'options': {'classes': 100, 'affine': False, 'stem_stride': 2}}
    >>> identify(nn.Sequential())
    """
    found: dict[str, Any] | None = vars(model).get("built_as")
    if found is None:
        return None
    with torch.device("meta"):
        same = build(found["name"], **found["options"])
    return found if _structure(same) == _structure(model) else None


def _structure(model: nn.Module) -> tuple[str, dict[str, torch.Size]]:
    return repr(model), {name: tensor.shape for name, tensor in model.state_dict().items()}


def builder(name: str) -> Callable[..., nn.Module]:
    """The function that builds a registered model."""
    if name not in _BUILDERS:
        near = difflib.get_close_matches(name, _BUILDERS, n=1, cutoff=0.0)
        raise ModelError(
            f"no model {name!r}; did you mean {near[0]!r}? Models are {', '.join(names())}, "
            "or 'module:function' for a custom one"
        )
    return _BUILDERS[name]


def _imported(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise ModelError(f"model {name!r}: expected 'module:function', with the module's full name before the colon")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ModelError(
            f"model {name!r}: no module {error.name!r}, expected 'module:function' of something importable: "
            "install it, or put its folder on PYTHONPATH"
        ) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(function_name, dir(module), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "check the part after the colon"
        raise ModelError(f"model {name!r}: no function {function_name!r} in module {module_name!r}; {hint}")
    if isinstance(function, nn.Module):
        raise ModelError(f"{name!r} is a {type(function).__name__}, expected a function that returns a model")
    return function
