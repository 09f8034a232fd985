"""Files that are written completely or not at all, and safe reading of files from others."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal


def open_regular(path: str | os.PathLike[str], mode: Literal["rb", "ab"] = "rb") -> BinaryIO:
    """Opens a file; a FIFO, socket, device or directory raises OSError instead of blocking forever."""
    return open(path, mode, opener=_open_regular)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file; anything else raises OSError."""
    with open_regular(path) as file:
        return file.read()


def write_atomically(
    path: Path, content: bytes | bytearray, error: type[Exception], *, spare: Path | None = None
) -> None:
    """Writes a temporary file, synchronizes it and renames it; a failure raises ``error``, which names the file.

    Afterwards file and name survive a power cut, and a file that was there before has the name ``spare``, if given.
    Several processes may write the same file at once, as the ranks of a distributed training do: the last one wins.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.writing")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if spare is not None and path.exists():
            os.replace(path, spare)
        os.replace(temporary, path)
    except OSError as problem:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise error(f"{path} could not be written ({problem.strerror}); what was there before is intact") from problem
    with suppress(OSError):  # Windows and some file systems cannot synchronize a folder
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _open_regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)  # a FIFO would wait for its other end
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # Python itself rejects a directory, as one
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return handle
