"""The 1,797 handwritten digits of 8×8 pixels, shipped with the package: a data set for examples and tests.

They are the test images of *Optical Recognition of Handwritten Digits* by E. Alpaydin and C. Kaynak (1998), UCI Machine
Learning Repository, CC BY 4.0; see the file NOTICE beside this one. A pixel counts the ink of a 4×4 block, 0 to 16;
here it is p·255 // 16, so that p = (v·16 + 254) // 255 gives it back.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from pathlib import Path

import torch

from .base import Data, DataError, Images, check_digest, shuffled, statistics
from .registry import register

FILE = Path(__file__).with_name("digits.bin.gz")
SHA256 = "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"
COUNT, VAL, TEST = 1797, 18, 36  # images, and of each digit to validate and to test


@register("digits", label="UCI digits", shape=(1, 8, 8), classes=10)
def load(root: Path | None = None, *, download: bool = False) -> Data:
    """1,257 training, 180 validation and 360 test images; of each digit 18 validate and 36 test. They need no folder.

    >>> data = load()
    >>> data.shape, len(data.train), len(data.val), len(data.test)
    ((1, 8, 8), 1257, 180, 360)
    """
    remedy = "Install mirrorquant again."
    try:
        content = bytearray(gzip.decompress(FILE.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{FILE} cannot be read ({error}). {remedy}") from error
    check_digest(FILE, content, SHA256, remedy)
    records = torch.frombuffer(content, dtype=torch.uint8).view(COUNT, 65)
    images, labels = (records[:, :64].int() * 255 // 16).byte().view(COUNT, 1, 8, 8), records[:, 64].long()
    every = Images(images, labels, tuple("0123456789"))
    train, val, test = (every.take(torch.tensor(part)) for part in _split(labels.tolist()))
    mean, std = statistics(train.images)
    return Data("digits", train, val, test, mean, std, augment="shift")


def _split(labels: list[int]) -> tuple[list[int], list[int], list[int]]:
    train, val, test = list[int](), list[int](), list[int]()
    seen = Counter[int]()
    for i in shuffled(len(labels), "digits"):
        rank = seen[labels[i]]
        (val if rank < VAL else test if rank < VAL + TEST else train).append(i)
        seen[labels[i]] += 1
    return train, val, test
