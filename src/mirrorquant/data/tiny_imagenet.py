"""TinyImageNet in its official layout: 64×64 images of 200 classes, 500 per class to train, 50 per class to validate.

The labels of the official test images are not public. As in the paper, the official validation set is used both to
choose the model and to measure it: `val` and `test` are one object. Say so when you report a result.

`wnids.txt` and `val/val_annotations.txt` say which images are read. Class and image counts and image sizes are checked.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from mirrorquant import _files

from .base import Data, DataError, Images
from .pictures import decode_once
from .registry import register

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
REMEDY = f"Unpack {URL} in the folder {{root}}; it is not downloaded automatically."
CACHE = "mirrorquant-decoded.bin"
SIDE, CLASSES, TRAIN, VAL = 64, 200, 500, 50  # images per class


@register("tinyimagenet", label="TinyImageNet", shape=(3, 64, 64), classes=200, remedy=REMEDY)
def load(root: Path, *, download: bool) -> Data:
    """TinyImageNet from `tiny-imagenet-200` in `root`, or from `root` itself; classes in the order of their ids.

    The first time, all images are decoded and kept in a file of 1.35 GB in that folder. `download` is ignored.
    """
    folder = root if (root / "wnids.txt").is_file() else root / "tiny-imagenet-200"
    classes = tuple(sorted(set(_lines(folder / "wnids.txt"))))
    if len(classes) != CLASSES:
        raise DataError(f"{folder / 'wnids.txt'} lists {len(classes)} classes, expected {CLASSES}.")
    train = {path: wnid for wnid in classes for path in sorted((folder / "train" / wnid / "images").glob("*.JPEG"))}
    rows = [f"{line}\t".split("\t") for line in _lines(folder / "val" / "val_annotations.txt")]
    val = {folder / "val" / "images" / Path(name).name: wnid for name, wnid, *_ in rows}
    for split, files, count in (("train", train, TRAIN), ("val", val, VAL)):
        found = Counter(files.values())
        for wnid in sorted({*classes, *found}):
            expected = count if wnid in classes else 0
            if found[wnid] != expected:
                raise DataError(f"{folder / split} has {found[wnid]} images of the class {wnid}, expected {expected}.")
    labels = torch.tensor([classes.index(wnid) for wnid in (*train.values(), *val.values())])
    every = Images(decode_once([*train, *val], SIDE, folder / CACHE), labels, classes)
    fit, held = every.take(slice(len(train))), every.take(slice(len(train), None))
    return Data("tinyimagenet", fit, held, held, MEAN, STD, augment="resized-crop-flip")


def _lines(path: Path) -> list[str]:
    return _files.read_regular(path).decode(errors="replace").splitlines()
