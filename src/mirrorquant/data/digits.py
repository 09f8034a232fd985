"""The 1,797 handwritten digits of 8×8 pixels, shipped with the package: a data set for examples and tests.

They are the test images of *Optical Recognition of Handwritten Digits* by E. Alpaydin and C. Kaynak (1998), UCI Machine
Learning Repository, CC BY 4.0; see the file NOTICE beside this one. A pixel p counts the ink of a 4×4 block, 0 to 16.
It becomes v = p·255 // 16, from which p = (v·16 + 254) // 255.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import one_hot

from .base import Data, Images, shuffled, statistics
from .files import read
from .registry import register

FILE = Path(__file__).with_name("digits.bin.gz")
SHA256 = "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"
COUNT, VAL, TEST = 1797, 18, 36  # images; images of each digit that validate and that test


@register("digits", label="UCI digits", shape=(1, 8, 8), classes=10, remedy="Install mirrorquant again.")
def load(root: Path | None = None, *, download: bool = False) -> Data:
    """1,257 training, 180 validation and 360 test images; of each digit 18 validate and 36 test. They need no folder.

    >>> data = load()
    >>> data.shape, len(data.train), len(data.val), len(data.test)
    ((1, 8, 8), 1257, 180, 360)
    """
    records = read(FILE, COUNT * 65, SHA256).view(COUNT, 65)[torch.tensor(shuffled(COUNT, "digits"))]
    images, labels = (records[:, :64].int() * 255 // 16).byte().view(COUNT, 1, 8, 8), records[:, 64].long()
    every = Images(images, labels, tuple("0123456789"))
    rank = one_hot(labels).cumsum(0).gather(1, labels[:, None])[:, 0]  # 1 for the first image of its digit
    part = (rank > VAL).int() + (rank > VAL + TEST)
    val, test, train = (every.take(part == i) for i in range(3))
    mean, std = statistics(train.images)
    return Data("digits", train, val, test, mean, std, augment="shift")
