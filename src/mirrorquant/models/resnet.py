"""ResNet-18 and ResNet-34: four stages of basic blocks, behind a stem for CIFAR or the standard one for ImageNet."""

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from mirrorquant.models.registry import ModelError, register


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them: relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)).

    The shortcut is the identity, or a 1x1 convolution with batch norm where the shape changes.
    """

    shortcut_name = "shortcut"

    def __init__(self, inputs: int, width: int, stride: int, *, affine: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width, affine=affine)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, affine=affine)
        shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            shortcut = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width, affine=affine)
            )
        self.add_module(self.shortcut_name, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, with ``width`` channels and 1/``stride`` of the resolution."""
        residual = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(residual + getattr(self, self.shortcut_name)(x))


class ImageNetBlock(BasicBlock):
    """The same block, whose shortcut has the name that it has in public ImageNet checkpoints."""

    shortcut_name = "downsample"


@register("resnet18", label="ResNet-18")
class ResNet(nn.Module):
    """A stem ``conv1``, stages ``layer1`` to ``layer4`` of basic blocks, global average pool, linear ``fc``.

    ``stem="cifar"`` is a 3x3 convolution without max-pool, for 32x32 colour images (``stem_stride=1``) or 64x64 ones
    (``stem_stride=2``): "For TinyImageNet, the stride of the first convolutional layer of ResNet-18 is set to 2 to
    handle the image size." ``stem="imagenet"`` is "the standard ResNet-18 architecture" for 224x224 images: a 7x7
    convolution and a 3x3 max-pool, both of stride 2. Its parameters have their usual names, so that public checkpoints
    load if ``affine``, which gives batch norm a learnable scale and shift; without it the parameters are those of 17
    convolutions, 3 shortcuts and the linear layer.

    >>> sizes = [parameter.numel() for parameter in ResNet().parameters()]
    >>> len(sizes), sum(sizes)
    (22, 11164362)
    >>> sum(parameter.numel() for parameter in ResNet(1000, affine=True, stem="imagenet").parameters())
    11689512
    """

    blocks = (2, 2, 2, 2)  # of each stage
    stem = "cifar"  # for models that were pickled before there was another one

    def __init__(self, classes: int = 10, *, affine: bool = False, stem_stride: int = 1, stem: str = "cifar") -> None:
        super().__init__()
        if stem not in ("cifar", "imagenet"):
            raise ModelError(f"stem is {stem!r}, but it must be cifar or imagenet")
        if stem == "imagenet" and stem_stride != 1:
            raise ModelError(f"stem_stride is {stem_stride}, but the ImageNet stem has its own strides: leave it out")
        self.stem = stem
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        else:
            self.conv1 = nn.Conv2d(3, 64, 3, stem_stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64, affine=affine)
        self.layer1 = self._stage(0, 64, 64, affine=affine)
        self.layer2 = self._stage(1, 64, 128, affine=affine)
        self.layer3 = self._stage(2, 128, 256, affine=affine)
        self.layer4 = self._stage(3, 256, 512, affine=affine)
        self.fc = nn.Linear(512, classes)

    def _stage(self, number: int, inputs: int, width: int, *, affine: bool) -> nn.Sequential:
        block = ImageNetBlock if self.stem == "imagenet" else BasicBlock
        stage = nn.Sequential(block(inputs, width, 1 if number == 0 else 2, affine=affine))
        return stage.extend(block(width, width, 1, affine=affine) for _ in range(self.blocks[number] - 1))

    def forward(self, images: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = relu(self.bn1(self.conv1(images)))
        if self.stem == "imagenet":
            x = max_pool2d(x, 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


@register("resnet34", label="ResNet-34")
class ResNet34(ResNet):
    """The same with 3, 4, 6 and 3 blocks. For ImageNet it is the paper's teacher: "trained ResNet-34 on ImageNet".

    >>> sum(parameter.numel() for parameter in ResNet34(1000, affine=True, stem="imagenet").parameters())
    21797672
    """

    blocks = (3, 4, 6, 3)
