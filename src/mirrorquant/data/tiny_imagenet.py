"""TinyImageNet in its official layout: 64×64 images of 200 classes, 500 per class to train, 50 per class to validate.

The labels of the official test images are not public. As in the paper, the official validation set serves twice: it
chooses the model and it measures it, so `val` and `test` are one object, and a result on it is to be reported as such.

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
FOLDER, URL = "tiny-imagenet-200", "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
CACHE = "mirrorquant-decoded.bin"
SIDE, CLASSES, TRAIN, VAL = 64, 200, 500, 50  # images per class


@register("tinyimagenet", label="TinyImageNet", shape=(3, 64, 64), classes=200)
def load(root: Path, *, download: bool) -> Data:
    """TinyImageNet from `tiny-imagenet-200` in `root`, or `root` itself; classes in the order of their ids.

    The first time all images are decoded, and kept so in a file of 1.35 GB in that folder. The archive is
    never downloaded: `download` only changes what the error says.
    """
    folder = root if (root / "wnids.txt").is_file() else root / FOLDER
    remedy = f"Unpack {URL} so that {root / FOLDER} holds wnids.txt, train/ and val/."
    if not folder.is_dir():
        why = "this data set is not downloaded automatically" if download else "downloading is off"
        raise DataError(f"{folder} does not exist, and {why}. {remedy}")
    classes = tuple(sorted(_lines(folder / "wnids.txt", remedy)))
    if len(set(classes)) != CLASSES or len(classes) != CLASSES:
        raise DataError(f"{folder / 'wnids.txt'} lists {len(classes)} classes, expected {CLASSES} different. {remedy}")
    train = [(path, wnid) for wnid in classes for path in _training_files(folder / "train" / wnid / "images", remedy)]
    val = _validation_files(folder / "val", classes, remedy)
    files, wnids = zip(*train, *val, strict=True)
    images = decode_once(files, SIDE, folder / CACHE, remedy=remedy)
    every = Images(images, torch.tensor([classes.index(wnid) for wnid in wnids]), classes)
    fit, held = every.take(slice(len(train))), every.take(slice(len(train), None))
    return Data("tinyimagenet", fit, held, held, MEAN, STD, augment="resized-crop-flip")


def _lines(path: Path, remedy: str) -> list[str]:
    try:
        return _files.read_regular(path).decode("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}). {remedy}") from error


def _training_files(folder: Path, remedy: str) -> list[Path]:
    files = sorted(folder.glob("*.JPEG"))
    if len(files) != TRAIN:
        raise DataError(f"{folder} has {len(files)} files *.JPEG, expected {TRAIN}. {remedy}")
    return files


def _validation_files(folder: Path, classes: tuple[str, ...], remedy: str) -> list[tuple[Path, str]]:
    path = folder / "val_annotations.txt"
    rows = [line.split("\t") for line in _lines(path, remedy)]
    for number, row in enumerate(rows, 1):
        if len(row) != 6 or row[1] not in classes or Path(row[0]).name != row[0]:
            raise DataError(f"{path}, line {number}: {row}, expected a file, a class of wnids.txt and a box. {remedy}")
    counts = Counter(row[1] for row in rows)
    wrong = [wnid for wnid in classes if counts[wnid] != VAL]
    if wrong or len({row[0] for row in rows}) != len(rows):
        raise DataError(f"{path} does not list {VAL} different images for each class {wrong[:3]}. {remedy}")
    return [(folder / "images" / row[0], row[1]) for row in rows]
