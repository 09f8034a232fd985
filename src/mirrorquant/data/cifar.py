"""CIFAR-10 and CIFAR-100 in their official binary layout: a record is the label byte or bytes, then 3×32×32 pixels.

The first 45,000 training images train, the last 5,000 validate, the 10,000 test images test. CIFAR-10 is checked byte
for byte, by SHA-256. No such digests of the CIFAR-100 files are known here: their sizes, their labels and the number
of images of each class are checked, so a changed pixel passes there unless the files were downloaded by this module.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .base import Data, DataError, Images, check_digest, read
from .fetch import command, fetch_folder
from .registry import register

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
SIDE, PIXELS, VAL = 32, 3 * 32 * 32, 5_000
RECORDS = 10_000  # in each of the CIFAR-10 files

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR10_SHA256: dict[str, str | None] = {  # of the records; the order of the files is the order of the images
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
CIFAR100_MD5 = "03b5dce01913d631647c71ecec9e9cb8"
CIFAR100_PER_CLASS = {"train": 500, "test": 100}
_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
_SUPERCLASSES = """
4 1 14 8 0 6 7 7 18 3 3 14 9 18 7 11 3 9 7 11 6 11 5 10 7 6 13 15 3 15 0 11 1 10 12 14 16 9 11 5 5 19 8 8 15 13 14
17 18 10 16 4 17 4 2 0 17 4 18 17 10 3 2 12 12 16 12 1 9 19 2 10 0 1 16 12 9 13 15 13 16 19 2 4 6 19 5 5 8 19 18 1 2
15 6 0 17 8 14 13
"""
CIFAR100_CLASSES = tuple(_NAMES.split())
CIFAR100_COARSE = torch.tensor([int(label) for label in _SUPERCLASSES.split()])  # of each class


@register("cifar10", label="CIFAR-10", shape=(3, 32, 32), classes=10)
def cifar10(root: Path, *, download: bool) -> Data:
    """CIFAR-10 from `cifar-10-batches-bin` in `root`, or `root` itself, or else downloaded."""
    files = "data_batch_1.bin to data_batch_5.bin and test_batch.bin"
    remedy = f"Unpack {CIFAR10_URL} so that {root / 'cifar-10-batches-bin'} holds {files}."
    folder = _find(root, "cifar-10-batches-bin", "test_batch.bin")
    pickles = _find(root, "cifar-10-batches-py", "test_batch")
    if folder is None and pickles is not None:
        raise DataError(f"{pickles} is the Python version of CIFAR-10, but only the binary version is read. {remedy}")
    if folder is None:
        folder = root / "cifar-10-batches-bin"
        _download("cifar10", CIFAR10_URL, CIFAR10_MD5, folder, remedy, download)
    parts = []
    for name, sha256 in CIFAR10_SHA256.items():
        path = folder / f"{name}.bin"
        content = read(path, RECORDS * (1 + PIXELS), remedy)
        records = torch.frombuffer(content, dtype=torch.uint8).view(RECORDS, 1 + PIXELS)
        _check_labels(path, records[:, 0], len(CIFAR10_CLASSES), remedy)
        check_digest(path, content, sha256, remedy)
        parts.append(records)
    return _data("cifar10", torch.cat(parts[:-1]), parts[-1], CIFAR10_CLASSES)


@register("cifar100", label="CIFAR-100", shape=(3, 32, 32), classes=100)
def cifar100(root: Path, *, download: bool) -> Data:
    """CIFAR-100 with its 100 fine labels from `cifar-100-binary` in `root`, or `root` itself, or else downloaded."""
    remedy = f"Unpack {CIFAR100_URL} so that {root / 'cifar-100-binary'} holds train.bin and test.bin."
    folder = _find(root, "cifar-100-binary", "test.bin")
    if folder is None:
        folder = root / "cifar-100-binary"
        _download("cifar100", CIFAR100_URL, CIFAR100_MD5, folder, remedy, download)
    parts = []
    for name, per_class in CIFAR100_PER_CLASS.items():
        path, count = folder / f"{name}.bin", per_class * len(CIFAR100_CLASSES)
        content = read(path, count * (2 + PIXELS), remedy)
        records = torch.frombuffer(content, dtype=torch.uint8).view(count, 2 + PIXELS)
        _check_labels(path, records[:, 1], len(CIFAR100_CLASSES), remedy)
        found = torch.bincount(records[:, 1], minlength=len(CIFAR100_CLASSES))
        if (found != per_class).any():
            wrong = int((found != per_class).nonzero()[0])
            raise DataError(f"{path} has {found[wrong]} images of class {wrong}, expected {per_class}. {remedy}")
        if (records[:, 0] != CIFAR100_COARSE[records[:, 1].long()]).any():
            raise DataError(f"{path} has a coarse label that does not go with its fine label. {remedy}")
        parts.append(records)
    return _data("cifar100", parts[0], parts[1], CIFAR100_CLASSES)


def _find(root: Path, folder: str, file: str) -> Path | None:
    if (root / folder).is_dir():
        return root / folder
    return root if root.name == folder or (root / file).is_file() else None


def _download(name: str, url: str, md5: str, folder: Path, remedy: str, allowed: bool) -> None:
    if not allowed:
        raise DataError(f"{folder} does not exist, and downloading is off. {remedy} {command(name, folder.parent)}")
    fetch_folder(url, md5, folder, remedy)


def _check_labels(path: Path, labels: Tensor, classes: int, remedy: str) -> None:
    if int(labels.max()) >= classes:
        where = int((labels >= classes).nonzero()[0])
        raise DataError(f"{path} has label {labels[where]} at image {where}, expected 0 to {classes - 1}. {remedy}")


def _data(name: str, train: Tensor, test: Tensor, classes: tuple[str, ...]) -> Data:
    fit, rest = (_images(records, classes) for records in (train, test))
    return Data(name, fit.take(slice(-VAL)), fit.take(slice(-VAL, None)), rest, MEAN, STD, augment="crop-flip")


def _images(records: Tensor, classes: tuple[str, ...]) -> Images:
    pixels = records[:, -PIXELS:].reshape(-1, 3, SIDE, SIDE)
    return Images(pixels.contiguous(), records[:, -PIXELS - 1].long(), classes)
