"""Files that appear whole or not at all."""

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes, error: type[Exception]) -> None:
    """Writes beside the file, synchronizes, and moves into place; what goes wrong is an ``error`` that names it.

    Several processes may write the same file at once, as the ranks of a training do: the last one's stays.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.writing")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        raise error(f"{path} could not be written ({problem.strerror}); what was there before is intact") from problem
