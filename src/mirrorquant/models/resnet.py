"""ResNet-18, "adapted for CIFAR": a 3x3 stem without max-pool, then four stages of two basic blocks."""

from torch import Tensor, nn
from torch.nn.functional import relu

from mirrorquant.models.registry import register


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them: relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)).

    The shortcut is the identity, or a 1x1 convolution with batch norm where the shape changes.
    """

    def __init__(self, inputs: int, width: int, stride: int, *, affine: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width, affine=affine)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, affine=affine)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width, affine=affine)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, with ``width`` channels and 1/``stride`` of the resolution."""
        residual = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(residual + self.shortcut(x))


@register("resnet18", label="ResNet-18")
class ResNet(nn.Module):
    """A stem ``conv1``, stages ``layer1`` to ``layer4`` of basic blocks, global average pool, linear ``fc``.

    For 32x32 colour images (``stem_stride=1``) or 64x64 ones (``stem_stride=2``): "For TinyImageNet, the stride of the
    first convolutional layer of ResNet-18 is set to 2 to handle the image size." ``affine`` gives batch norm a
    learnable scale and shift; without it the parameters are those of 17 convolutions, 3 shortcuts and the linear layer.

    >>> sizes = [parameter.numel() for parameter in ResNet().parameters()]
    >>> len(sizes), sum(sizes)
    (22, 11164362)
    """

    def __init__(self, classes: int = 10, *, affine: bool = False, stem_stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, stem_stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64, affine=affine)
        self.layer1 = _stage(64, 64, stride=1, affine=affine)
        self.layer2 = _stage(64, 128, stride=2, affine=affine)
        self.layer3 = _stage(128, 256, stride=2, affine=affine)
        self.layer4 = _stage(256, 512, stride=2, affine=affine)
        self.fc = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = relu(self.bn1(self.conv1(images)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _stage(inputs: int, width: int, *, stride: int, affine: bool) -> nn.Sequential:
    return nn.Sequential(BasicBlock(inputs, width, stride, affine=affine), BasicBlock(width, width, 1, affine=affine))
