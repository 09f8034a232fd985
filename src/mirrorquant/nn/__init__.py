"""Layers for networks with few-valued weights *and* activations.

>>> import torch
>>> from mirrorquant.nn import BinaryActivation
>>> BinaryActivation()(torch.tensor([-0.2, 0.0, 3.0]))
tensor([-1.,  1.,  1.])
"""

from mirrorquant.nn.activation import BinaryActivation

__all__ = ["BinaryActivation"]
