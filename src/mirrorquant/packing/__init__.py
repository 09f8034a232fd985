"""Packed models: weights of a few levels at their true size, in memory, on disk and at run time.

``pack`` makes a finalized model run on the bits of its weights and ``unpack`` takes that back; ``save`` and ``load``
keep it at one bit per weight. ``kernels`` runs it.

>>> import tempfile, torch, mirrorquant as mq
>>> model = mq.models.digitsnet(affine=True)
>>> for parameter in model.parameters():
...     _ = parameter.data.sign_()
>>> packed = mq.pack(model)
>>> packed.runs["conv3.weight"]                          # a large network would run on bits
'float: fewer than 65,536 weights'
>>> path = tempfile.mkdtemp() + "/digits.safetensors"
>>> mq.save(packed, path)
>>> x = torch.randn(4, 1, 8, 8)
>>> torch.equal(mq.load(path)(x).argmax(1), model.eval()(x).argmax(1))
True
"""

from mirrorquant.packing import kernels
from mirrorquant.packing.bits import PackedTensor, PackError
from mirrorquant.packing.file import Contents, load, read, save
from mirrorquant.packing.layers import PackedConv2d, PackedLinear
from mirrorquant.packing.model import PackedModel, pack, unpack

__all__ = [
    "Contents",
    "PackError",
    "PackedConv2d",
    "PackedLinear",
    "PackedModel",
    "PackedTensor",
    "kernels",
    "load",
    "pack",
    "read",
    "save",
    "unpack",
]
