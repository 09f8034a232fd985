"""Fashion-MNIST in its official IDX files, compressed or not: 28×28 grey images of ten kinds of clothing.

The first 55,000 training images train, the last 5,000 validate, the 10,000 test images test. Files are looked for in
`root`, in the subfolders where other tools keep them, and where Debian's package `dataset-fashion-mnist` installs
them. Their content is checked by SHA-256.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from .base import Data, Images
from .files import REMEDY, fetch, locate, read
from .registry import register

MEAN, STD = (0.2860,), (0.3530,)
VAL = 5_000
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
SYSTEM = Path("/usr/share/datasets/fashion-mnist")
FILES: dict[str, tuple[int, str]] = {  # number of images, SHA-256 of the content
    "train-images-idx3-ubyte": (60_000, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
    "train-labels-idx1-ubyte": (60_000, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    "t10k-images-idx3-ubyte": (10_000, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
    "t10k-labels-idx1-ubyte": (10_000, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
}
CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@register(
    "fashion-mnist", label="Fashion-MNIST", shape=(1, 28, 28), classes=10, remedy=f"Put the files of {URL} in {REMEDY}"
)
def load(root: Path, *, download: bool) -> Data:
    """Fashion-MNIST from the first folder that has one of its files; files missing there are downloaded."""
    places = (root / "fashion-mnist", root, root / "FashionMNIST" / "raw", SYSTEM)
    folder = locate(places, [f"{name}{end}" for name in FILES for end in ("", ".gz")])
    found = [_content(folder, name, download) for name in FILES]
    fit, test = (Images(x.view(-1, 1, 28, 28), y.long(), CLASSES) for x, y in (found[:2], found[2:]))
    train, val = fit.take(slice(-VAL)), fit.take(slice(-VAL, None))
    return Data("fashion-mnist", train, val, test, MEAN, STD, augment="crop-flip")


def _content(folder: Path, name: str, download: bool) -> Tensor:
    """The content of an IDX file, without the big-endian numbers before it: a magic one and the shape."""
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
        fetch(f"{URL}{path.name}", [path], download=download)
    count, sha256 = FILES[name]
    header, pixels = (16, 28 * 28) if "images" in name else (8, 1)
    return read(path, header + count * pixels, sha256)[header:]
