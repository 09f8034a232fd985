"""Fashion-MNIST in its official IDX files, compressed or not: 28×28 grey images of ten kinds of clothing.

The first 55,000 training images train, the last 5,000 validate, the 10,000 test images test. Files are looked for in
`root`, in the folders that other tools keep them in under it, and where Debian's package `dataset-fashion-mnist`
installs them. What they hold is checked byte for byte, by SHA-256.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import torch
from torch import Tensor

from mirrorquant import _files

from .base import Data, DataError, Images, check_digest, read
from .fetch import command, fetch
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
SHA256: dict[str, str | None] = {  # of what they hold
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@register("fashion-mnist", label="Fashion-MNIST", shape=(1, 28, 28), classes=10)
def load(root: Path, *, download: bool) -> Data:
    """Fashion-MNIST from the first folder that has one of its files; what `root/fashion-mnist` lacks is downloaded."""
    own = root / "fashion-mnist"
    remedy = f"Put the four files {', '.join(f'{name}.gz' for name in SHAPES)} of {URL} in {own}."
    places = (own, root, root / "FashionMNIST" / "raw", SYSTEM)
    folder = next((p for p in places if any(_has(p, name) for name in SHAPES)), None)
    if folder is None and not download:
        how = command("fashion-mnist", root)
        raise DataError(f"No file of Fashion-MNIST is in {own}, and downloading is off. {remedy} {how}")
    folder = folder or own
    for name, md5 in MD5.items():
        if download and folder == own and not _has(own, name):  # all of them, or what a download that broke off left
            fetch(f"{URL}{name}.gz", md5, own / f"{name}.gz", remedy)
    images, labels, *rest = (read_idx(folder, name, shape, SHA256[name], remedy) for name, shape in SHAPES.items())
    fit, test = _images(images, labels), _images(*rest)
    train, val = fit.take(slice(-VAL)), fit.take(slice(-VAL, None))
    return Data("fashion-mnist", train, val, test, MEAN, STD, augment="crop-flip")


def _has(folder: Path, name: str) -> bool:
    return any((folder / f"{name}{end}").exists() for end in ("", ".gz"))


def read_idx(folder: Path, name: str, shape: tuple[int, ...], sha256: str | None, remedy: str) -> Tensor:
    """The bytes of an IDX file, compressed or not: big-endian numbers that say the shape, then the content."""
    header = b"".join(n.to_bytes(4, "big") for n in (0x800 + len(shape), *shape))
    size = len(header) + torch.Size(shape).numel()
    path = folder / name
    if path.exists():
        content = read(path, size, remedy)
    else:
        path = folder / f"{name}.gz"
        content = _read_gzip(path, size, remedy)
    if content[: len(header)] != header:
        found = content[: len(header)].hex()
        raise DataError(f"{path} starts with {found}, expected {header.hex()}: bytes of shape {shape}. {remedy}")
    values = torch.frombuffer(content, dtype=torch.uint8, offset=len(header)).view(shape)
    if len(shape) == 1 and int(values.max()) >= len(CLASSES):
        raise DataError(f"{path} has label {values.max()}, expected 0 to {len(CLASSES) - 1}. {remedy}")
    check_digest(path, content, sha256, remedy)
    return values


def _read_gzip(path: Path, size: int, remedy: str) -> bytearray:
    try:
        with _files.open_regular(path) as compressed, gzip.open(compressed) as file:
            content = bytearray(file.read(size + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}). {remedy}") from error
    if len(content) != size:
        found = f"more than {size:,}" if len(content) > size else f"{len(content):,}"
        raise DataError(f"{path} holds {found} bytes, expected {size:,}. {remedy}")
    return content


def _images(images: Tensor, labels: Tensor) -> Images:
    return Images(images.unsqueeze(1), labels.long(), CLASSES)
