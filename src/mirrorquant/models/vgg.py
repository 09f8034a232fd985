"""VGG-16, "adapted for CIFAR": thirteen convolutions, fully-connected layers of size 512, no dropout."""

from torch import Tensor, nn

from mirrorquant.models.registry import register

_CHANNELS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@register("vgg16", label="VGG-16")
class VGG(nn.Module):
    """Five groups of 3x3 convolutions with a max-pool at the end of each, then three fully-connected layers.

    "The size of the fully-connected layers of VGG-16 is set to 512 and no dropout layers are employed." Layers have the
    names of the VGG paper: ``features.conv1_1`` to ``features.conv5_3``, then ``classifier.fc1`` to ``classifier.fc3``.
    Convolutions have biases; batch norm, with a learnable scale and shift if ``affine``, and ReLU follow all layers but
    the last. For 32x32 colour images, or larger ones.

    >>> sum(parameter.numel() for parameter in VGG().parameters())
    15245130
    """

    def __init__(self, classes: int = 10, *, affine: bool = False) -> None:
        super().__init__()
        self.features, self.classifier = nn.Sequential(), nn.Sequential()
        inputs = 3
        for group, widths in enumerate(_CHANNELS, start=1):
            for layer, width in enumerate(widths, start=1):
                self.features.add_module(f"conv{group}_{layer}", nn.Conv2d(inputs, width, 3, padding=1))
                self.features.add_module(f"bn{group}_{layer}", nn.BatchNorm2d(width, affine=affine))
                self.features.add_module(f"relu{group}_{layer}", nn.ReLU())
                inputs = width
            self.features.add_module(f"pool{group}", nn.MaxPool2d(2))
        for layer in (1, 2):
            self.classifier.add_module(f"fc{layer}", nn.Linear(inputs, 512))
            self.classifier.add_module(f"bn{layer}", nn.BatchNorm1d(512, affine=affine))
            self.classifier.add_module(f"relu{layer}", nn.ReLU())
        self.classifier.add_module("fc3", nn.Linear(512, classes))

    def forward(self, images: Tensor) -> Tensor:
        """The logits of a batch of images; the pools leave one pixel of a 32x32 image, and a mean of larger ones."""
        logits: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return logits
