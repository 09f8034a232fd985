"""The networks of the paper, as plain ``nn.Module`` objects that know nothing about quantization.

"VGG-16, ResNet-18 and MobileNetV2 architectures adapted for CIFAR dataset are used. [...] In all the models, batch
normalization (with no learnable parameters) and ReLU nonlinearity are used. Only for the floating point networks
(i.e., REF), we keep the learnable parameters for batch norm."

>>> from mirrorquant import models
>>> model = models.build("vgg16", classes=100)
>>> models.initialize(model)
"""

from mirrorquant.models.digitsnet import DigitsNet, digitsnet
from mirrorquant.models.init import initialize
from mirrorquant.models.mobilenet import MobileNetV2, mobilenetv2
from mirrorquant.models.registry import ModelError, build, identify, names
from mirrorquant.models.resnet import ResNet, resnet18
from mirrorquant.models.vgg import VGG, vgg16

__all__ = [
    "VGG",
    "DigitsNet",
    "MobileNetV2",
    "ModelError",
    "ResNet",
    "build",
    "digitsnet",
    "identify",
    "initialize",
    "mobilenetv2",
    "names",
    "resnet18",
    "vgg16",
]
