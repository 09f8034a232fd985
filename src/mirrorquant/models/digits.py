"""DigitsNet: three convolutions for small grey images, on which a method can be tried in seconds on a laptop."""

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from mirrorquant.models.registry import register


class DigitsNet(nn.Module):
    """Convolutions ``conv1`` to ``conv3`` of 3x3 with max-pools in between, global average pool, linear ``fc``."""

    def __init__(self, classes: int, *, affine: bool, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width, affine=affine)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * width, affine=affine)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(2 * width, affine=affine)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = max_pool2d(relu(self.bn1(self.conv1(images))), 2)
        x = max_pool2d(relu(self.bn2(self.conv2(x))), 2)
        x = relu(self.bn3(self.conv3(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


@register("digitsnet", label="DigitsNet")
def digitsnet(classes: int = 10, *, affine: bool = False, channels: int = 1, width: int = 32) -> DigitsNet:
    """A small network for images of 4x4 pixels or more: 1x8x8 UCI digits, 1x28x28 Fashion-MNIST. Not in the paper.

    ``channels`` are those of an image; ``width`` is the number of channels of the first convolution, the other two have
    twice as many. ``affine`` is the learnable scale and shift of batch norm. For 10 classes, one channel and
    ``affine=False`` there are 56,234 parameters in 5 tensors.

    >>> import torch
    >>> digitsnet()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    return DigitsNet(classes, affine=affine, channels=channels, width=width)
