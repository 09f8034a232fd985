"""Fashion-MNIST in its official IDX files, compressed or not: 28×28 grey images of ten kinds of clothing.

The first 55,000 training images train, the last 5,000 validate, the 10,000 test images test. Files are looked for in
`root`, in the subfolders where other tools keep them, and where Debian's package `dataset-fashion-mnist` installs
them. Their content is checked by SHA-256.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .base import Data, Images
from .files import REMEDY, fetch, locate, read
from .registry import register

MEAN, STD = (0.2860,), (0.3530,)
VAL = 5_000
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
SYSTEM = Path("/usr/share/datasets/fashion-mnist")
SHAPES: dict[str, tuple[int, ...]] = {
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}
MD5 = {  # of the compressed files of the official site
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
SHA256 = {  # of their content
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@register(
    "fashion-mnist", label="Fashion-MNIST", shape=(1, 28, 28), classes=10, remedy=f"Put the files of {URL} in {REMEDY}"
)
def load(root: Path, *, download: bool) -> Data:
    """Fashion-MNIST from the first folder that has one of its files; files missing there are downloaded."""
    places = (root / "fashion-mnist", root, root / "FashionMNIST" / "raw", SYSTEM)
    folder = locate(places, [f"{name}{end}" for name in SHAPES for end in ("", ".gz")])
    images, labels, *rest = (_content(folder, name, download).view(shape) for name, shape in SHAPES.items())
    fit, test = _images(images, labels), _images(*rest)
    train, val = fit.take(slice(-VAL)), fit.take(slice(-VAL, None))
    return Data("fashion-mnist", train, val, test, MEAN, STD, augment="crop-flip")


def _content(folder: Path, name: str, download: bool) -> Tensor:
    """The content of an IDX file, without the big-endian numbers before it: a magic one and the shape."""
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
        fetch(f"{URL}{path.name}", MD5[name], [path], download=download)
    header = 4 + 4 * len(SHAPES[name])
    return read(path, header + torch.Size(SHAPES[name]).numel(), SHA256[name])[header:]


def _images(images: Tensor, labels: Tensor) -> Images:
    return Images(images.unsqueeze(1), labels.long(), CLASSES)
