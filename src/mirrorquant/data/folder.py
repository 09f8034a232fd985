"""A folder of custom images, one subfolder per class: `folder:PATH`, or `folder:PATH:SIZE` for images of SIZE×SIZE.

    PATH/train/<class>/*.png, PATH/val/<class>/*.png, PATH/test/<class>/*.png
    PATH/<class>/*.png, which is split here: of each class 80 % train, 10 % val, 10 % test

Without `test` the `val` images serve as both; without `val` a tenth of the training images of each class validate. A
split that is made here depends on the names of the files alone. Images are PNG or JPEG; each is resized until its
shorter side is SIZE and its centre is cut out.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .base import Data, DataError, Images, shuffled, statistics
from .pictures import decode
from .registry import register

SIZE = 64
LAYOUT = "Expected PATH/train/<class>/*.png and PATH/val or PATH/test alike, or PATH/<class>/*.png; .jpg and .jpeg too."
Files = dict[str, list[Path]]


@register("folder:PATH")
def load(text: str) -> Data:
    """The images under a path; mean and standard deviation are those of the training images."""
    match = re.fullmatch(r"(.+?)(?::(\d{1,6}))?", text)
    path, size = (Path(match[1]), int(match[2] or SIZE)) if match else (None, SIZE)
    if path is None or not path.is_dir():
        raise DataError(f"{text or 'folder:'} is not a folder. {LAYOUT}")
    if not 1 <= size <= 1024:
        raise DataError(f"The image size {size} is out of range, expected 1 to 1024.")
    train, val, test = _splits(path)
    classes = tuple(sorted(train))
    fit, held = _images(train, classes, size), _images(val, classes, size)
    rest = held if test is val else _images(test, classes, size)
    mean, std = statistics(fit.images)
    augment = "crop-flip" if size <= 32 else "resized-crop-flip"
    return Data(f"folder:{path}:{size}", fit, held, rest, mean, std, augment)


def _splits(path: Path) -> tuple[Files, Files, Files]:
    if not (path / "train").is_dir():
        return _split(_classes(path), held_out=2)
    train = _classes(path / "train")
    val, test = (_classes(path / s) if (path / s).is_dir() else None for s in ("val", "test"))
    if val is None and test is None:
        raise DataError(f"{path} has train/ but neither val/ nor test/. {LAYOUT}")
    if val is None:
        train, val, _ = _split(train, held_out=1)
    test = val if test is None else test
    for name in sorted({*val, *test} - set(train)):
        raise DataError(f"{path}: the class {name} has no training images. Add {path / 'train' / name}, or remove it.")
    return train, val, test


def _classes(path: Path) -> Files:
    """The image files of each subfolder; hidden files are passed over, any other file is refused."""
    found: Files = {}
    for entry in sorted(path.iterdir()):
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            raise DataError(f"{entry} is not a folder of images of one class. {LAYOUT}")
        found[entry.name] = sorted(file for file in entry.iterdir() if not file.name.startswith("."))
        for file in found[entry.name]:
            if file.suffix.lower() not in (".png", ".jpg", ".jpeg"):
                raise DataError(f"{file} is not named .png, .jpg or .jpeg. Convert it or move it away.")
        if not found[entry.name]:
            raise DataError(f"{entry} has no images. {LAYOUT}")
    if not found:
        raise DataError(f"{path} has no classes. {LAYOUT}")
    return found


def _split(classes: Files, held_out: int) -> tuple[Files, Files, Files]:
    """Training images, and `held_out` tenths of each class, at least one image each, as `val` and `test`."""
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
    paths = [path for name in files for path in files[name]]
    return Images(decode(paths, size, fit=True, remedy="Replace it or move it away."), labels, classes)
