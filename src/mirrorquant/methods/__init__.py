"""Methods: the paper's algorithms and the baselines it compares with, each a few lines of hooks.

Quantization methods "mainly differ in the constraint set, the projection used, and how backpropagation through the
projection is performed": a method defines just these. A plain optimizer moves a latent tensor x̃ by −D; the
model's weight is its image. One step k, with β_k the annealing hyperparameter:

    latent.grad = pull_back(dL/dw, latent, β)        # default: the gradient itself, which is mirror descent
    latent      = latent − step_scale(β) · D         # the base optimizer; step_scale is 1, and β in the primal forms
    latent      = settle(latent, β, lr)              # default: unchanged
    weight      = project(latent, β_{k+1})

A custom method is a subclass, usable as an object, or by its name once it is defined:

>>> import torch, mirrorquant as mq
>>> class Clip(mq.Method):
...     '''BinaryRelax-like: projects by clipping.'''
...     name = "clip"
...     def project(self, latent, beta):
...         return (beta * latent).clamp(self.levels[0], self.levels[-1])
>>> mq.methods.get("clip", mq.BINARY)
Clip(levels=Levels(-1.0, 1.0))

A custom projection needs no method at all, and any method can scale its levels to the weights:

>>> arctan = mq.mirror_from(lambda x: 2 / torch.pi * torch.atan(x), (-1, 1))
>>> method = mq.methods.MD(mirror=arctan)
>>> mq.methods.MDTanhS(mq.levels.auto("ternary", per="channel"))
MDTanhS(levels=Levels(-1.0, 0.0, 1.0), scale=Scale(per='channel', how='computed', size='mean'))

A module added to this package is imported with it, so its methods are known by name everywhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from mirrorquant._registry import suggestion
from mirrorquant.levels import BINARY, Levels
from mirrorquant.methods.base import Method
from mirrorquant.methods.baselines import BC, PQ, REF, BCClip, PQLevels
from mirrorquant.methods.softmax import PMF, MDSoftmax, MDSoftmaxBounded, MDSoftmaxS, PMFExact
from mirrorquant.methods.tanh import MD, GDTanh, MDTanh, MDTanhBounded, MDTanhS

__all__ = ["BC", "MD", "PMF", "PQ", "REF", "GDTanh", "MDSoftmax", "MDSoftmaxBounded", "MDSoftmaxS", "MDTanh"]
__all__ += ["BCClip", "MDTanhBounded", "MDTanhS", "Method", "PMFExact", "PQLevels", "get", "names"]

RENAMED = {
    "md-tanh": "md-tanh-bounded",
    "md-tanh-primal": "md-tanh",
    "md-softmax": "md-softmax-bounded",
    "md-softmax-primal": "md-softmax",
    "pmf": "pmf-exact",
    "pmf-authors": "pmf",
}
"""Names in files of version 0.1, where they differ from today's."""

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)


def get(method: str | Method, levels: Iterable[float] | str | None = None) -> Method:
    """A method by name, for the given levels (-1 and +1 by default); a method object as it is.

    >>> get("md-tanh-s", [-1, 0, 1])
    MDTanhS(levels=Levels(-1.0, 0.0, 1.0))
    """
    if isinstance(method, Method):
        given = None if levels is None else Levels.of(levels)
        if given is not None and (given != method.levels or given.scale is not None):
            raise ValueError(f"{method} brings its own levels, but {given} were given too: give one")
        return method
    if method not in Method.registry:
        hint = suggestion(str(method), names()) or f" Known are {', '.join(names())}."
        raise ValueError(f"There is no method {method!r}.{hint}")
    return Method.registry[method](Levels.of(BINARY if levels is None else levels))


def names() -> list[str]:
    """The names of all methods; ``get(name).describe()`` describes one in a line.

    >>> for name in names():
    ...     print(f"{name:13} {get(name).describe()}")
    ref           Floating-point reference: nothing is quantized.
    bc            BinaryConnect: sign(w̃) forward, straight-through gradient where w̃ is in the hull.
    ...
    """
    return list(Method.registry)
