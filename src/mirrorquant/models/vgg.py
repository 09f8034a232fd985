"""VGG-16, "adapted for CIFAR": thirteen convolutions, fully-connected layers of size 512, no dropout."""

from collections import OrderedDict

from torch import Tensor, nn

from mirrorquant.models.registry import register

_CHANNELS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_HIDDEN = 512


class VGG(nn.Module):
    """Five groups of 3x3 convolutions, each closed by a max-pool, then three fully-connected layers.

    Layers carry the names of the VGG paper: ``features.conv1_1`` to ``features.conv5_3``, then ``classifier.fc1`` to
    ``classifier.fc3``.
    """

    def __init__(self, classes: int, *, affine: bool) -> None:
        super().__init__()
        self.features = _features(affine)
        self.classifier = _classifier(classes, affine)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of a batch of images; five pools leave one pixel of a 32x32 image, a larger one is averaged."""
        logits: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return logits


@register("vgg16", label="VGG-16")
def vgg16(classes: int = 10, *, affine: bool = False) -> VGG:
    """VGG-16 for 32x32 colour images, or larger ones.

    "The size of the fully-connected layers of VGG-16 is set to 512 and no dropout layers are employed." Convolutions
    have biases, batch norm and ReLU follow all layers but the last. ``affine``: with learnable scale and shift.

    >>> sum(parameter.numel() for parameter in vgg16().parameters())
    15245130
    """
    return VGG(classes, affine=affine)


def _features(affine: bool) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = 3
    for group, widths in enumerate(_CHANNELS, start=1):
        for layer, width in enumerate(widths, start=1):
            layers[f"conv{group}_{layer}"] = nn.Conv2d(inputs, width, 3, padding=1)
            layers[f"bn{group}_{layer}"] = nn.BatchNorm2d(width, affine=affine)
            layers[f"relu{group}_{layer}"] = nn.ReLU()
            inputs = width
        layers[f"pool{group}"] = nn.MaxPool2d(2)
    return nn.Sequential(layers)


def _classifier(classes: int, affine: bool) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            fc1=nn.Linear(_CHANNELS[-1][-1], _HIDDEN),
            bn1=nn.BatchNorm1d(_HIDDEN, affine=affine),
            relu1=nn.ReLU(),
            fc2=nn.Linear(_HIDDEN, _HIDDEN),
            bn2=nn.BatchNorm1d(_HIDDEN, affine=affine),
            relu2=nn.ReLU(),
            fc3=nn.Linear(_HIDDEN, classes),
        )
    )
