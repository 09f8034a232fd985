"""Fetching a data set from its official site: nothing is unpacked, or seen by a reader, before its checksum agrees."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shlex
import shutil
import tarfile
import tempfile
import urllib.request
from pathlib import Path, PurePosixPath

from .base import DataError

TIMEOUT = 30.0  # seconds without a byte
CHUNK = 1 << 20


def fetch(url: str, md5: str, target: Path, remedy: str) -> None:
    """Download `url` to the file `target`, which appears only once it is complete and its MD5 agrees."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as temporary:
            part = Path(temporary) / "part"
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response, part.open("wb") as file:
                while chunk := response.read(CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() != md5:
                raise DataError(f"{url} gave a file with MD5 {digest.hexdigest()}, expected {md5}. {remedy}")
            os.replace(part, target)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url} could not be downloaded to {target.parent} ({error}). {remedy}") from error


def command(name: str, root: Path) -> str:
    """How to download a data set, for the error that is raised when downloading is off."""
    call = f"from mirrorquant import data; data.load({json.dumps(name)}, {json.dumps(str(root))})"
    return f"Or download it: python -c {shlex.quote(call)}"


def fetch_folder(url: str, md5: str, target: Path, remedy: str) -> None:
    """Download a tar archive and unpack its folder `target.name` to `target`, which appears only once complete."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as temporary:
            archive = Path(temporary) / "archive"
            fetch(url, md5, archive, remedy)
            with tarfile.open(archive) as tar:
                _unpack(tar, Path(temporary))
            os.replace(Path(temporary) / target.name, target)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{url} could not be unpacked to {target} ({error}). {remedy}") from error


def _unpack(tar: tarfile.TarFile, folder: Path) -> None:
    """The files of an archive; of links and devices nothing. (The filters of `tarfile` came with Python 3.11.4.)"""
    for member in tar:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts:
            raise tarfile.TarError(f"{member.name!r} would lie outside the folder")
        content = tar.extractfile(member) if member.isfile() else None
        if content is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with content, (folder / path).open("wb") as file:
                shutil.copyfileobj(content, file)
