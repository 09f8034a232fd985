"""MobileNetV2: inverted residuals at width 1.0; "adapted for CIFAR", with three strides of 2, or as for ImageNet."""

from torch import Tensor, nn
from torch.nn.functional import relu

from mirrorquant.models.registry import ModelError, register

# Expansion, channels, blocks, stride of the first block for CIFAR and for ImageNet, where the stem has stride 2 too.
_STAGES = (
    (1, 16, 1, 1, 1),
    (6, 24, 2, 1, 2),
    (6, 32, 3, 2, 2),
    (6, 64, 4, 2, 2),
    (6, 96, 3, 1, 1),
    (6, 160, 3, 2, 2),
    (6, 320, 1, 1, 1),
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
        for expansion, width, blocks, first_stride, _ in _STAGES:
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


class ImageNetResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise convolution, 1x1 linear projection; the input is added where the shape is the same.

    A block without expansion (by 1) has no first convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int, *, expansion: int, affine: bool) -> None:
        super().__init__()
        inner = expansion * inputs
        self.conv = nn.Sequential()
        if expansion != 1:
            self.conv.append(_activated(nn.Conv2d(inputs, inner, 1, bias=False), affine))
        self.conv.append(_activated(nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False), affine))
        self.conv.append(nn.Conv2d(inner, width, 1, bias=False))
        self.conv.append(nn.BatchNorm2d(width, affine=affine))
        self.added = stride == 1 and inputs == width

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, with ``width`` channels and 1/``stride`` of the resolution."""
        residual: Tensor = self.conv(x)
        return x + residual if self.added else residual


class ImageNetMobileNetV2(nn.Module):
    """The standard MobileNetV2 for 224x224 colour images: five strides of 2, ReLU6, no dropout.

    ``features`` are the stem, the inverted residuals and the convolution to 1280 channels; then come a global average
    pool and ``classifier``. Parameters have the names of public checkpoints, which load if ``affine``.

    >>> sum(parameter.numel() for parameter in ImageNetMobileNetV2(affine=True).parameters())
    3504872
    """

    def __init__(self, classes: int = 1000, *, affine: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(_activated(nn.Conv2d(3, 32, 3, 2, padding=1, bias=False), affine))
        inputs = 32
        for expansion, width, blocks, _, first_stride in _STAGES:
            for stride in [first_stride] + [1] * (blocks - 1):
                self.features.append(ImageNetResidual(inputs, width, stride, expansion=expansion, affine=affine))
                inputs = width
        self.features.append(_activated(nn.Conv2d(inputs, 1280, 1, bias=False), affine))
        self.classifier = nn.Sequential(nn.Identity(), nn.Linear(1280, classes))  # the first place is dropout's

    def forward(self, images: Tensor) -> Tensor:
        """The logits of a batch of images."""
        logits: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return logits


def _activated(convolution: nn.Conv2d, affine: bool) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels, affine=affine), nn.ReLU6())


@register("mobilenetv2", label="MobileNetV2")
def mobilenetv2(classes: int = 10, *, affine: bool = False, stem: str = "cifar") -> nn.Module:
    """MobileNetV2: :class:`MobileNetV2` for ``stem="cifar"``, :class:`ImageNetMobileNetV2` for ``stem="imagenet"``.

    >>> type(mobilenetv2(stem="imagenet")).__name__
    'ImageNetMobileNetV2'
    """
    if stem not in ("cifar", "imagenet"):
        raise ModelError(f"stem is {stem!r}, but it must be cifar or imagenet")
    network = ImageNetMobileNetV2 if stem == "imagenet" else MobileNetV2
    return network(classes, affine=affine)
