"""CIFAR-10 and CIFAR-100 in their official binary layout: a record is one or two label bytes, then 3×32×32 pixels.

The first 45,000 training images train, the last 5,000 validate, the 10,000 test images test. The files of CIFAR-10 are
checked by SHA-256. Those of CIFAR-100 are checked by size and labels only: a changed pixel is not noticed there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .base import Data, DataError, Images
from .files import REMEDY, fetch, locate, read
from .registry import register

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
PIXELS, VAL = 3 * 32 * 32, 5_000

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR10_SHA256 = {  # in the order of the images
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10_RECORDS = 10_000  # per file
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
CIFAR100_MD5 = "03b5dce01913d631647c71ecec9e9cb8"
CIFAR100_PER_CLASS = {"train.bin": 500, "test.bin": 100}
_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(_NAMES.split())


@register("cifar10", label="CIFAR-10", shape=(3, 32, 32), classes=10, remedy=f"Unpack {CIFAR10_URL} in {REMEDY}")
def cifar10(root: Path, *, download: bool) -> Data:
    """CIFAR-10 from `cifar-10-batches-bin` in `root`, or from `root` itself; missing files are downloaded."""
    folder = locate((root / "cifar-10-batches-bin", root), CIFAR10_SHA256)
    fetch(CIFAR10_URL, [folder / name for name in CIFAR10_SHA256], download=download, md5=CIFAR10_MD5)
    size = CIFAR10_RECORDS * (1 + PIXELS)
    *train, test = (read(folder / name, size, sha256).view(-1, 1 + PIXELS) for name, sha256 in CIFAR10_SHA256.items())
    return _data("cifar10", torch.cat(train), test, CIFAR10_CLASSES)


@register("cifar100", label="CIFAR-100", shape=(3, 32, 32), classes=100, remedy=f"Unpack {CIFAR100_URL} in {REMEDY}")
def cifar100(root: Path, *, download: bool) -> Data:
    """CIFAR-100 with its 100 fine labels from `cifar-100-binary` in `root`, or from `root` itself, or downloaded."""
    folder = locate((root / "cifar-100-binary", root), CIFAR100_PER_CLASS)
    fetch(CIFAR100_URL, [folder / name for name in CIFAR100_PER_CLASS], download=download, md5=CIFAR100_MD5)
    parts = []
    for name, per_class in CIFAR100_PER_CLASS.items():
        records = read(folder / name, 100 * per_class * (2 + PIXELS)).view(-1, 2 + PIXELS)
        if records[:, 1].bincount(minlength=100).tolist() != [per_class] * 100:
            raise DataError(f"The labels in {folder / name} are damaged, expected {per_class} images per class.")
        parts.append(records)
    return _data("cifar100", parts[0], parts[1], CIFAR100_CLASSES)


def _data(name: str, train: Tensor, test: Tensor, classes: tuple[str, ...]) -> Data:
    fit, rest = (
        Images(records[:, -PIXELS:].reshape(-1, 3, 32, 32), records[:, -PIXELS - 1].long(), classes)
        for records in (train, test)
    )
    return Data(name, fit.take(slice(-VAL)), fit.take(slice(-VAL, None)), rest, MEAN, STD, augment="crop-flip")
