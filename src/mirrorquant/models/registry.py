"""Models by name: those of this package, and any function that returns an ``nn.Module``."""

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mirrorquant.models.digitsnet import DigitsNet, digitsnet
from mirrorquant.models.mobilenet import MobileNetV2, mobilenetv2
from mirrorquant.models.resnet import ResNet, resnet18
from mirrorquant.models.vgg import VGG, vgg16

_MODELS: dict[str, Callable[..., nn.Module]] = {
    "digitsnet": digitsnet,
    "mobilenetv2": mobilenetv2,
    "resnet18": resnet18,
    "vgg16": vgg16,
}


class ModelError(ValueError):
    """A model that cannot be built as asked."""


def names() -> list[str]:
    """Names of the models of this package, sorted.

    Example:
        >>> from mirrorquant import models
        >>> models.names()
        ['digitsnet', 'mobilenetv2', 'resnet18', 'vgg16']
    """
    return sorted(_MODELS)


def build(name: str, classes: int, **options: Any) -> nn.Module:
    """Build a model by name, or by ``"module:function"`` for your own function that returns a model.

    Args:
        name: one of :func:`names`, or ``"module:function"``. The function of a user is called with
            ``classes=classes`` when it has a parameter of that name; otherwise it decides by itself how many logits
            there are.
        classes: number of logits.
        options: passed to the function, for example ``affine=True`` or ``stem_stride=2``.

    Returns:
        The model, with the initialization that its layers have in torch; see :func:`initialize` for the paper's.

    Raises:
        ModelError: no such model, no such function, an option that it does not take, or a result that is not an
            ``nn.Module`` or has lazy layers without a shape.

    Example:
        >>> from mirrorquant import models
        >>> models.build("resnet18", 200, stem_stride=2).conv1.stride
        (2, 2)
        >>> models.build("mirrorquant.models:digitsnet", 26).fc.out_features
        26
        >>> models.build("resnet81", 10)
        Traceback (most recent call last):
        ...
        mirrorquant.models.registry.ModelError: no model 'resnet81'; did you mean 'resnet18'? ...
    """
    function = _imported(name) if ":" in name else _own(name)
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
    """Name and options from which :func:`build` makes such a model; None if it is none of this package's.

    A model that was changed after it was built is none, whatever its class.

    Example:
        >>> from mirrorquant import models
        >>> models.identify(models.resnet18(100, stem_stride=2))
        {'name': 'resnet18', 'options': {'classes': 100, 'affine': False, 'stem_stride': 2}}
        >>> models.identify(nn.Sequential())
    """
    if type(model) not in _OPTIONS:
        return None
    name, options_of = _OPTIONS[type(model)]
    try:
        options = options_of(model)
        with torch.device("meta"):
            same = build(name, **options)
    except (AttributeError, TypeError, ModelError):  # a layer was replaced
        return None
    return {"name": name, "options": options} if _structure(same) == _structure(model) else None


def _structure(model: nn.Module) -> tuple[str, dict[str, torch.Size]]:
    return repr(model), {name: tensor.shape for name, tensor in model.state_dict().items()}


_OPTIONS: dict[type[nn.Module], tuple[str, Callable[[Any], dict[str, Any]]]] = {
    DigitsNet: (
        "digitsnet",
        lambda m: {
            "classes": m.fc.out_features,
            "affine": m.bn1.affine,
            "channels": m.conv1.in_channels,
            "width": m.conv1.out_channels,
        },
    ),
    MobileNetV2: ("mobilenetv2", lambda m: {"classes": m.fc.out_features, "affine": m.bn1.affine}),
    ResNet: (
        "resnet18",
        lambda m: {"classes": m.fc.out_features, "affine": m.bn1.affine, "stem_stride": m.conv1.stride[0]},
    ),
    VGG: (
        "vgg16",
        lambda m: {"classes": m.classifier.fc3.out_features, "affine": m.classifier.bn1.affine},
    ),
}


def _own(name: str) -> Callable[..., nn.Module]:
    if name not in _MODELS:
        near = difflib.get_close_matches(name, _MODELS, n=1, cutoff=0.0)
        raise ModelError(
            f"no model {name!r}; did you mean {near[0]!r}? Models are {', '.join(names())}, "
            "or 'module:function' for a function of your own"
        )
    return _MODELS[name]


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
