"""Bi-Real-Net-18 for ImageNet: the paper's network in which both parameters and activations are binary."""

from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from mirrorquant.models.registry import register
from mirrorquant.nn import BinaryActivation


class BiRealBlock(nn.Module):
    """One 3x3 convolution of signs and a shortcut around it: bn(conv(sign(x))) + downsample(x), no ReLU.

    The shortcut carries real numbers. It is the identity, or a 2x2 average pool, a 1x1 convolution and batch norm where
    the shape changes. With ``prelu``, a PReLU with a slope for each channel follows the addition.
    """

    def __init__(self, inputs: int, width: int, stride: int, *, affine: bool, prelu: bool) -> None:
        super().__init__()
        self.sign = BinaryActivation("polynomial")
        self.conv = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width, affine=affine)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            shortcut = nn.Conv2d(inputs, width, 1, bias=False)
            self.downsample = nn.Sequential(nn.AvgPool2d(stride), shortcut, nn.BatchNorm2d(width, affine=affine))
        self.prelu = nn.PReLU(width) if prelu else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, with ``width`` channels and 1/``stride`` of the resolution."""
        residual = self.bn(self.conv(self.sign(x)))
        output: Tensor = self.prelu(residual + self.downsample(x))
        return output


@register("bireal18", label="Bi-Real-18")
class BiRealNet(nn.Module):
    """A stem ``conv1``, stages ``layer1`` to ``layer4`` of four blocks, global average pool, linear ``fc``.

    For 224x224 colour images; height and width must be multiples of 32. The stem is a 7x7 convolution and a 3x3
    max-pool, both of stride 2. Usually the convolutions of the blocks have binary weights (``mq.split(model,
    only="layer*.conv")``), and the stem, the shortcuts and ``fc`` stay in float. The paper uses "Bireal-Net-18 with
    PReLU activations", which is ``prelu=True``. Batch norm has a learnable scale and shift, unless ``affine=False``.

    >>> sum(parameter.numel() for parameter in BiRealNet(1000).parameters())
    11689512
    """

    def __init__(self, classes: int = 1000, *, affine: bool = True, prelu: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64, affine=affine)
        self.layer1 = _stage(64, 64, stride=1, affine=affine, prelu=prelu)
        self.layer2 = _stage(64, 128, stride=2, affine=affine, prelu=prelu)
        self.layer3 = _stage(128, 256, stride=2, affine=affine, prelu=prelu)
        self.layer4 = _stage(256, 512, stride=2, affine=affine, prelu=prelu)
        self.fc = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = max_pool2d(self.bn1(self.conv1(images)), 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _stage(inputs: int, width: int, *, stride: int, affine: bool, prelu: bool) -> nn.Sequential:
    stage = nn.Sequential(BiRealBlock(inputs, width, stride, affine=affine, prelu=prelu))
    return stage.extend(BiRealBlock(width, width, 1, affine=affine, prelu=prelu) for _ in range(3))
