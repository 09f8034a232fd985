"""DigitsNet: three convolutions for small grey images, to try a method in seconds on a laptop. Not in the paper."""

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from mirrorquant.models.registry import register


@register("digitsnet", label="DigitsNet")
class DigitsNet(nn.Module):
    """3x3 convolutions ``conv1`` to ``conv3`` with max-pools in between, global average pool, linear ``fc``.

    For images of 4x4 pixels or more, such as 1x8x8 UCI digits and 1x28x28 Fashion-MNIST. An image has ``channels``; the
    first convolution has ``width`` channels, the other two have twice as many. ``affine`` gives batch norm a learnable
    scale and shift.

    >>> import torch
    >>> DigitsNet()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10, *, affine: bool = False, channels: int = 1, width: int = 32) -> None:
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
