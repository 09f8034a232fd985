"""Reading and downloading the files of a data set; a file is only used if its size and its checksum are right."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import re
import tarfile
import urllib.request
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from mirrorquant import _files

from .base import DataError

SUFFIXES = (".png", ".jpg", ".jpeg")
TIMEOUT = 30.0  # seconds without a byte
REMEDY = "the folder {root}. Or delete damaged files, then mirrorquant.data.load({name!r}, {root!r}) downloads them."


def locate(folders: Sequence[Path], names: Collection[str]) -> Path:
    """The first folder that has one of the files; the first folder if none has."""
    return next((folder for folder in folders for name in names if (folder / name).exists()), folders[0])


def read(path: Path, size: int, sha256: str | None = None) -> Tensor:
    """The bytes of a file, decompressed if it ends with ``.gz``; another size or SHA-256 raises `DataError`."""
    try:
        with _files.open_regular(path) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            content = bytearray(file.read(size + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    if len(content) != size:
        found = f"more than {size:,}" if len(content) > size else f"{len(content):,}"
        raise DataError(f"{path} has {found} bytes, expected {size:,}.")
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(f"{path} is altered: its SHA-256 is not {sha256}.")
    return torch.frombuffer(content, dtype=torch.uint8)


def sized(text: str, kind: str, size: int) -> tuple[Path, int]:
    """The folder and the size that PATH or PATH:SIZE names."""
    match = re.fullmatch(r"(.+?)(?::(\d{1,6}))?", text)
    if match is None or not Path(match[1]).is_dir():
        raise DataError(f"{text or f'{kind}:'} is not a folder.")
    return Path(match[1]), int(match[2] or size)


def entries(folder: Path, *, folders: bool, ignored: Collection[str] = ()) -> list[str]:
    """The sorted names of all class folders, or of all images, in a folder; any other visible file is refused."""
    names = []
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.startswith(".") or entry.name in ignored:
                continue
            if folders and not entry.is_dir():
                raise DataError(f"{entry.path} is not a folder of images of one class.")
            if not folders and not entry.name.lower().endswith(SUFFIXES):
                raise DataError(f"{entry.path} is not named .png, .jpg or .jpeg: convert it or move it away.")
            names.append(entry.name)
    if not names:
        raise DataError(f"{folder} has no {'classes' if folders else 'images'}.")
    return sorted(names)


def fetch(url: str, paths: Sequence[Path], *, download: bool, md5: str | None = None) -> None:
    """Downloads the files that are missing, from a tar archive that has all of them, or from the `url` of a single one.

    Each appears only when it is complete and, if `md5` is given, the download has it. Other members are ignored.
    """
    missing = {path.name: path for path in paths if not path.exists()}
    if not missing:
        return
    if not download:
        raise DataError(f"{next(iter(missing.values()))} is missing, and downloading is off.")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            content: bytes = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url} cannot be downloaded ({error}).") from error
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 not in (None, found):
        raise DataError(f"{url} has the MD5 {found}, expected {md5}.")
    for name, file in _members(content) if ".tar" in url else [(paths[0].name, content)]:
        if name in missing:
            missing[name].parent.mkdir(parents=True, exist_ok=True)
            _files.write_atomically(missing[name], file, DataError)


def _members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if file := tar.extractfile(member):
                yield PurePosixPath(member.name).name, file.read()
