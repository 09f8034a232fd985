"""The JSON in the metadata of files: written so that it can be read back, and checked when it is read."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from torch import nn

from mirrorquant.errors import MirrorquantError
from mirrorquant.packing.bits import PackError
from mirrorquant.packing.model import PackedModel
from mirrorquant.select import unwrapped

__all__ = ["InvalidError", "about_of", "about_text", "check", "from_json", "read_about", "to_json", "typed"]

_MOST_TEXT = 1 << 24
_MOST_DEEP = 32

T = TypeVar("T")


class InvalidError(MirrorquantError, ValueError):
    """A problem in a file, for the reader to raise again with the name of the file."""


def check(right: bool, problem: str) -> None:
    """Raises an error if something is not right."""
    if not right:
        raise InvalidError(problem)


def typed(value: Any, kind: type[T], what: str) -> T:
    """The value, which must be an object or a string."""
    if not isinstance(value, kind):
        raise InvalidError(f"its {what} is {value!r:.60}, expected {'an object' if kind is dict else 'a string'}")
    return value


def from_json(text: bytes | str, what: str) -> dict[str, Any]:
    """An object in JSON, in UTF-8 if it is bytes, without repeated keys, lone surrogates or infinite numbers."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check(len(dict(pairs)) == len(pairs), "a key occurs twice")
        return dict(pairs)

    try:
        content = json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=unique)
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
        depth = _depth(content)
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"its {what} is not valid JSON ({error})") from error
    check(depth <= _MOST_DEEP, f"its {what} is nested more than {_MOST_DEEP} deep")
    return typed(content, dict, what)


def _depth(content: Any) -> int:
    inner = content.values() if isinstance(content, dict) else content
    return 1 + max(map(_depth, inner), default=0) if isinstance(content, dict | list) else 0


def to_json(value: dict[str, Any]) -> str:
    """A description as JSON in ASCII that can be read back."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        from_json(text, "text")
    except (TypeError, ValueError, RecursionError) as error:
        raise PackError(f"about is {value['about']!r}, expected what JSON can hold ({error})") from error
    if len(text) > _MOST_TEXT:
        raise PackError(f"the metadata have {len(text):,} characters, but at most {_MOST_TEXT:,} can be stored")
    return text


def about_of(model: nn.Module, about: dict[str, Any] | None = None) -> dict[str, Any]:
    """The metadata of a model: the caller's, or else that of the file it was loaded from."""
    if not isinstance(about, dict | None):
        raise PackError(f"about is {about!r}, expected a dictionary")
    if about is not None:
        return about
    model = unwrapped(model)
    return dict(vars(model).get("about", {})) if isinstance(model, PackedModel) else {}


def about_text(about: dict[str, Any]) -> str:
    """The metadata of a model, as JSON for the files of other runtimes."""
    return to_json({"about": about})


def read_about(text: str) -> dict[str, Any]:
    """The metadata from a text by ``about_text``; empty if the text is something else."""
    try:
        return typed(from_json(text, "description").get("about"), dict, "about")
    except InvalidError:
        return {}
