"""MobileNetV2, "adapted for CIFAR": inverted residuals at width 1.0, with three of ImageNet's five strides of 2."""

from torch import Tensor, nn
from torch.nn.functional import relu

from mirrorquant.models.registry import register

# Expansion, channels, blocks, stride of the first block. For ImageNet the stem and the second stage have stride 2 too.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise convolution, 1x1 linear projection, and a shortcut around them if the stride is 1.

    The shortcut is the identity, or a 1x1 convolution with batch norm where the number of channels changes.
    """

    def __init__(self, inputs: int, width: int, stride: int, *, expansion: int, affine: bool) -> None:
        super().__init__()
        inner = expansion * inputs
        self.expand = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner, affine=affine)
        self.depthwise = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False)
        self.bn2 = nn.BatchNorm2d(inner, affine=affine)
        self.project = nn.Conv2d(inner, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width, affine=affine)
        self.shortcut: nn.Module | None = None
        if stride == 1 and inputs == width:
            self.shortcut = nn.Identity()
        elif stride == 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width, affine=affine))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, with ``width`` channels and 1/``stride`` of the resolution."""
        inner = relu(self.bn1(self.expand(x)))
        inner = relu(self.bn2(self.depthwise(inner)))
        residual: Tensor = self.bn3(self.project(inner))
        return residual if self.shortcut is None else residual + self.shortcut(x)


@register("mobilenetv2", label="MobileNetV2")
class MobileNetV2(nn.Module):
    """A stem ``conv1``, ``stages`` of inverted residuals, ``conv2`` to 1280 channels, global pool, linear ``fc``.

    For 32x32 colour images. The paper says only "adapted for CIFAR". This is the common adaptation: stride 1 in the
    stem and in the second stage, an expansion in every block, a 1x1 convolution as shortcut where a block of stride 1
    changes the number of channels; ReLU instead of ReLU6, because "in all the models [...] ReLU nonlinearity [is]
    used". ``affine`` gives batch norm a learnable scale and shift; with them there are 2,296,922 parameters, the figure
    known for this adaptation.

    >>> sum(parameter.numel() for parameter in MobileNetV2().parameters())
    2261834
    """

    def __init__(self, classes: int = 10, *, affine: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32, affine=affine)
        self.stages, inputs = nn.Sequential(), 32
        for expansion, width, blocks, first_stride in _STAGES:
            stage = nn.Sequential()
            for stride in [first_stride] + [1] * (blocks - 1):
                stage.append(InvertedResidual(inputs, width, stride, expansion=expansion, affine=affine))
                inputs = width
            self.stages.append(stage)
        self.conv2 = nn.Conv2d(inputs, 1280, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(1280, affine=affine)
        self.fc = nn.Linear(1280, classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = self.stages(relu(self.bn1(self.conv1(images))))
        x = relu(self.bn2(self.conv2(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits
