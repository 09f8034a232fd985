"""ImageNet, Imagenette and folders of custom photographs, streamed from their files: `photos:PATH`, `photos:PATH:SIZE`.

    PATH/train/<class>/*.JPEG, PATH/val/<class>/*.JPEG, and PATH/test/<class>/*.JPEG if there is one

Files are PNG or JPEG, named .png, .jpg or .jpeg in small or capital letters. Without `test` the `val` images serve as
both, one object: say so when you report a result. Images have 224×224 pixels, or SIZE×SIZE.

The official validation images of ImageNet lie in one folder. Their classes come from `LOC_val_solution.csv`, or from
a `val.txt` whose lines are the name of a file and its class: its id, or its number from 0 in the order of the ids.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from mirrorquant import _files

from .base import Data, DataError
from .files import entries, sized
from .registry import register
from .streamed import Paths, Photos

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, CLASSES, IMAGENETTE_CLASSES = 224, 1000, 10
KAGGLE, OFFICIAL = "LOC_val_solution.csv", "ILSVRC2012_validation_ground_truth.txt"
LABELS = (KAGGLE, "val.txt", OFFICIAL)

LAYOUT = "Expected PATH/train/<class>/*.jpg and PATH/val/<class>/*.jpg; .jpeg and .png work too."
IMAGENET = "Unpack the images of https://image-net.org/download in {root}/imagenet, as train/<id>/*.JPEG and "
IMAGENET += "val/<id>/*.JPEG; it is not downloaded automatically."
IMAGENETTE = "Unpack https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz in {root}; it is not downloaded "
IMAGENETTE += "automatically."


@register("imagenet", label="ImageNet", shape=(3, SIZE, SIZE), classes=1000, remedy=IMAGENET)
def imagenet(root: Path, *, download: bool) -> Data:
    """ImageNet from `imagenet` in `root` or from `root` itself, also in its layout ILSVRC/Data/CLS-LOC.

    Classes in the order of their ids. `download` is ignored.
    """
    places = [place / inner for place in (root / "imagenet", root) for inner in ("", "ILSVRC/Data/CLS-LOC")]
    folder = _first(places)
    train, classes = _listed(folder / "train")
    if len(classes) != CLASSES:
        raise DataError(f"{folder / 'train'} has {len(classes)} classes, expected {CLASSES}.")
    if any(entry.is_dir() for entry in os.scandir(folder / "val")):
        val, _ = _listed(folder / "val", classes)
    else:
        val = _flat(folder / "val", classes, [folder, folder / "val", root / "imagenet", root])
    return Data("imagenet", train, val, val, MEAN, STD, augment="resized-crop-flip")


@register("imagenette", label="Imagenette", shape=(3, SIZE, SIZE), classes=10, remedy=IMAGENETTE)
def imagenette(root: Path, *, download: bool) -> Data:
    """Imagenette from `imagenette`, `imagenette2`, `imagenette2-320` or `imagenette2-160` in `root`, or from `root`.

    `download` is ignored.
    """
    names = ("imagenette", "imagenette2", "imagenette2-320", "imagenette2-160", "")
    data = _splits("imagenette", _first([root / name for name in names]), SIZE)
    if len(data.classes) != IMAGENETTE_CLASSES:
        raise DataError(f"{root} has {len(data.classes)} classes of Imagenette, expected {IMAGENETTE_CLASSES}.")
    return data


@register("photos:PATH", remedy=LAYOUT)
def photos(text: str) -> Data:
    """The images under a path, normalised as those of ImageNet usually are."""
    return _splits(f"photos:{text}", *sized(text, "photos", SIZE))


def _first(folders: Sequence[Path]) -> Path:
    """The first folder that has the training images."""
    found = next((folder for folder in folders if (folder / "train").is_dir()), None)
    if found is None:
        raise DataError(f"{folders[0] / 'train'} is missing.")
    return found


def _splits(name: str, folder: Path, size: int) -> Data:
    train, classes = _listed(folder / "train", size=size)
    val, _ = _listed(folder / "val", classes, size)
    test = _listed(folder / "test", classes, size)[0] if (folder / "test").is_dir() else val
    return Data(name, train, val, test, MEAN, STD, augment="resized-crop-flip")


def _listed(folder: Path, classes: tuple[str, ...] = (), size: int = SIZE) -> tuple[Photos, tuple[str, ...]]:
    """The images in each subfolder, without hidden files; classes that are not among those given are refused."""
    files: list[str] = []
    labels: list[int] = []
    found = entries(folder, folders=True, ignored=LABELS)
    for name in sorted(set(found) - set(classes or found)):
        raise DataError(f"{folder / name}: the class {name} has no training images. Add them, or move it away.")
    classes = classes or tuple(found)
    for name in found:
        images = entries(folder / name, folders=False)
        files += [f"{folder}{os.sep}{name}{os.sep}{image}" for image in images]
        labels += [classes.index(name)] * len(images)
    return Photos(Paths(files), torch.tensor(labels), classes, size), classes


def _flat(folder: Path, classes: tuple[str, ...], places: Sequence[Path]) -> Photos:
    """The images in a folder without subfolders; a file in one of the `places` says of which class they are."""
    files = [place / name for name in LABELS for place in places if (place / name).is_file()]
    if not files:
        remedy = f"put {KAGGLE} there, or val.txt with the lines FILE CLASS, or move the images to a folder per class"
        raise DataError(f"{folder} has no class folders, and {places[0]} has no file that lists the classes: {remedy}.")
    known = _ground_truth(files[0], classes)
    names = entries(folder, folders=False, ignored=LABELS)
    missing = next((name for name in names if Path(name).stem not in known), None)
    if missing is not None:
        raise DataError(f"{files[0]} does not name the class of {missing}.")
    return Photos(
        Paths(f"{folder}{os.sep}{name}" for name in names),
        torch.tensor([known[Path(name).stem] for name in names], dtype=torch.int64),
        classes,
    )


def _ground_truth(file: Path, classes: tuple[str, ...]) -> dict[str, int]:
    """The classes of images by the name of their file, without its suffix."""
    number = {name: label for label, name in enumerate(classes)}
    number |= {str(label): label for label in range(len(classes))}
    known = {}
    lines = _files.read_regular(file).decode(errors="replace").splitlines()
    for line in lines[file.name == KAGGLE :]:
        words = line.replace(",", " ").split()
        if len(words) == 1:
            remedy = f"use {KAGGLE}, or write val.txt with the lines FILE CLASS"
            raise DataError(f"{file} numbers the classes in another order and has no file names: {remedy}.")
        if words and words[1] not in number:
            raise DataError(f"{file} has the line {line[:80]!r}, expected a file and one of {len(classes)} classes.")
        if words:
            known[Path(words[0]).stem] = number[words[1]]
    return known
