"""Models by name: those of this package, and any function that returns an ``nn.Module``."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from mirrorquant._registry import Registry, imported
from mirrorquant.errors import MirrorquantError

_Builder = TypeVar("_Builder", bound=Callable[..., nn.Module])


class ModelError(MirrorquantError, ValueError):
    """A model cannot be built as requested."""


_MODELS = Registry[Callable[..., nn.Module]]("model", ModelError, "MODULE:FUNCTION")
_LABELS: dict[str, str] = {}


def register(name: str, label: str = "") -> Callable[[_Builder], _Builder]:
    """Registers a class, or a function that returns a model, as ``name``; reports use the ``label``.

    Its signature defines the options of the model. A model remembers the options it was built with, so that a packed
    file can name them. All modules of this package are imported: a new file here adds a model.
    """

    def wrap(function: _Builder) -> _Builder:
        @functools.wraps(function, updated=())
        def built(*arguments: Any, **options: Any) -> nn.Module:
            model = function(*arguments, **options)
            bound = inspect.signature(function).bind(*arguments, **options)
            bound.apply_defaults()
            model.built_as = {"name": name, "options": dict(bound.arguments)}  # type: ignore[assignment]
            return model

        _MODELS[name] = built
        _LABELS[name] = label
        return cast(_Builder, function if inspect.isclass(function) else built)  # pickle needs the class itself

    return wrap


def names() -> list[str]:
    """Names of the registered models, sorted.

    >>> "resnet18" in names()
    True
    """
    return sorted(_MODELS)


def label(name: str) -> str:
    """A model as it is usually written: ``resnet18`` is ResNet-18. Returns an unknown name as it is."""
    return _LABELS.get(name) or name


def options(name: str) -> list[str]:
    """The options of a registered model, except for the number of classes.

    >>> options("resnet18")
    ['affine', 'stem_stride', 'stem']
    """
    return [option for option in inspect.signature(_MODELS[name]).parameters if option != "classes"]


def build(name: str, classes: int, **options: Any) -> nn.Module:
    """Builds a model by name, or with a custom function, given as ``"module:function"``.

    A custom function gets ``classes=classes`` if it has a parameter of that name, and the other ``options`` as they
    are. The model has the default initialization of its torch layers; see :func:`initialize` for the paper's.

    Raises:
        ModelError: no such model, no such function, an option that it does not take, or a result that is not an
            ``nn.Module`` or has lazy layers without a shape.

    >>> build("resnet18", 200, stem_stride=2).conv1.stride
    (2, 2)
    >>> build("mirrorquant.models:digitsnet", 26).fc.out_features
    26
    >>> build("resnet81", 10)
    Traceback (most recent call last):
    mirrorquant.models.registry.ModelError: There is no model 'resnet81'. Did you mean 'resnet18'? ...
    """
    function = imported("Model", name, ModelError) if ":" in name else _MODELS[name]
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # as of functions that are not written in Python
        raise ModelError(f"Model {name!r} cannot be built: {error}; write a function that calls it.") from error
    if "classes" in signature.parameters:
        options["classes"] = classes
    try:
        signature.bind(**options)
    except TypeError as error:
        expected = f"it takes {list(signature.parameters)}"
        raise ModelError(f"Model {name!r} cannot be built with {list(options)}: {error}; {expected}.") from error
    model = function(**options)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name!r} returned {type(model).__name__}, expected an nn.Module: return the model itself.")
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise ModelError(f"{name!r} returned a model with lazy layers: call it with a batch before returning it.")
    return model


def identify(model: nn.Module) -> dict[str, Any] | None:
    """The name and options from which :func:`build` makes such a model; None for a custom one.

    A model that was changed after it was built counts as custom.

    >>> identify(build("vgg16", 100, affine=True))
    {'name': 'vgg16', 'options': {'classes': 100, 'affine': True}}
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
