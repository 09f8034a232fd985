"""A folder of custom images, one subfolder per class: `folder:PATH`, or `folder:PATH:SIZE` for images of SIZE×SIZE.

    PATH/train/<class>/*.png, PATH/val/<class>/*.png, PATH/test/<class>/*.png
    PATH/<class>/*.png, which is split here: of each class 80 % train, 10 % validate, 10 % test

Without `test` the `val` images serve as both; without `val` a tenth of the training images of each class validate. A
split that is made here depends on the names of the files alone. Images are PNG or JPEG; the largest central square of
each is resized, as it is stored: orientations in EXIF are ignored.
"""

from __future__ import annotations

from pathlib import Path

import torch

from .base import Data, DataError, Images, shuffled, statistics
from .files import entries, sized
from .pictures import decode
from .registry import register

SIZE = 64
LAYOUT = "Expected PATH/train/<class>/*.png with PATH/val or PATH/test, or PATH/<class>/*.png; .jpg and .jpeg work too."
Files = dict[str, list[Path]]


@register("folder:PATH", remedy=LAYOUT)
def load(text: str) -> Data:
    """The images under a path; mean and standard deviation are those of the training images."""
    path, size = sized(text, "folder", SIZE)
    if not 1 <= size <= 1024:
        raise DataError(f"The image size {size} is out of range, expected 1 to 1024.")
    train, val, test = _splits(path)
    classes = tuple(train)
    fit, held = _images(train, classes, size), _images(val, classes, size)
    rest = held if test is val else _images(test, classes, size)
    mean, std = statistics(fit.images)
    augment = "crop-flip" if size <= 32 else "resized-crop-flip"
    return Data(f"folder:{path}:{size}", fit, held, rest, mean, std, augment)


def _splits(path: Path) -> tuple[Files, Files, Files]:
    if not (path / "train").is_dir():
        return _split(_classes(path), held_out=2)
    for name in ("valid", "validation"):
        if (path / name).is_dir():
            raise DataError(f"{path} has train/ and {name}/: rename {name} to val, or move it away.")
    train, val, test = (_classes(path / split) if (path / split).is_dir() else {} for split in ("train", "val", "test"))
    if not val and not test:
        raise DataError(f"{path} has train/ but neither val/ nor test/.")
    for name in sorted({*val, *test} - set(train)):
        raise DataError(f"{path}: the class {name} has no training images. Add {path / 'train' / name}, or remove it.")
    if not val:
        train, val, _ = _split(train, held_out=1)
    return train, val, test or val


def _classes(path: Path) -> Files:
    """The image files in each subfolder, without hidden files."""
    return {
        name: [path / name / image for image in entries(path / name, folders=False)]
        for name in entries(path, folders=True)
    }


def _split(classes: Files, held_out: int) -> tuple[Files, Files, Files]:
    """Training images, and one tenth of each class, at least one image, for each of the `held_out` other splits."""
    train, val, test = Files(), Files(), Files()
    for name, files in classes.items():
        if len(files) <= held_out:
            raise DataError(f"{files[0].parent} has {len(files)} images, expected at least {held_out + 1} to split.")
        tenth = max(1, len(files) // 10)
        mixed = [files[i] for i in shuffled(len(files), name)]
        val[name], test[name], train[name] = mixed[:tenth], mixed[tenth : tenth * held_out], mixed[tenth * held_out :]
    return train, val, test


def _images(files: Files, classes: tuple[str, ...], size: int) -> Images:
    labels = torch.tensor([classes.index(name) for name, paths in files.items() for _ in paths])
    return Images(decode([path for paths in files.values() for path in paths], size, fit=True), labels, classes)
