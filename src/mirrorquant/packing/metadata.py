"""The JSON in the metadata of files: written so that it can be read back, and checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import nn

from mirrorquant import models
from mirrorquant.packing.bits import MOST_LEVELS, PackError
from mirrorquant.packing.model import PackedModel
from mirrorquant.select import unwrapped

__all__ = ["about_of", "about_text", "check", "field", "from_json", "read_about", "to_json"]

_MOST_TEXT = 1 << 24
_MOST_DEEP = 32
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def check(right: bool, problem: str) -> None:
    """Raises an error if something is not right."""
    if not right:
        raise PackError(problem)


_FIELDS: dict[str, tuple[type, Callable[[Any], bool], str]] = {  # a type, a test of the value or of its parts, in words
    "__metadata__": (dict, lambda part: True, "an object"),
    "about": (dict, lambda part: True, "an object"),
    "packed": (dict, lambda part: isinstance(part, dict), "an object of objects"),
    "library": (str, lambda text: True, "a string"),
    "shape": (list, lambda size: type(size) is int and 0 <= size < 1 << 62, "a list of sizes"),
    "levels": (list, lambda level: type(level) in (int, float), f"2 to {MOST_LEVELS} numbers"),
    "dtype": (str, lambda name: name in _FLOATS, f"one of {', '.join(_FLOATS)}"),
    "name": (str, lambda name: name in models.names(), f"one of {', '.join(models.names())}"),
    "options": (dict, lambda n: type(n) is bool or (type(n) is int and 0 < n < 1 << 31), "sizes and switches"),
}


def field(values: dict[str, Any], key: str, what: str) -> Any:
    """A value of an object in JSON; raises an error unless it is right for this field."""
    kind, is_right, expected = _FIELDS[key]
    value = values.get(key)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    short = not isinstance(value, list) or len(value) <= MOST_LEVELS
    right = isinstance(value, kind) and short and all(map(is_right, parts))
    check(right, f"{what}: {key} is {value!r:.60}, expected {expected}")
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
    except (ValueError, TypeError, RecursionError) as error:
        raise PackError(f"its {what} is not valid JSON ({error})") from error
    check(depth <= _MOST_DEEP, f"its {what} is nested more than {_MOST_DEEP} deep")
    if not isinstance(content, dict):
        raise PackError(f"its {what} is {content!r:.60}, expected an object")
    return content


def _depth(content: Any) -> int:
    inner = content.values() if isinstance(content, dict) else content
    return 1 + max(map(_depth, inner), default=0) if isinstance(content, dict | list) else 0


def to_json(value: dict[str, Any]) -> str:
    """A description as JSON in ASCII that can be read back."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        from_json(text, "text")
    except (TypeError, ValueError, RecursionError) as error:
        raise PackError(f"about is {value['about']!r}, but JSON cannot hold it ({error})") from error
    check(len(text) <= _MOST_TEXT, f"the metadata have {len(text):,} characters, more than {_MOST_TEXT:,}")
    return text


def about_of(model: nn.Module, about: dict[str, Any] | None = None) -> dict[str, Any]:
    """The metadata of a model: the caller's, or else that of the file it was loaded from."""
    check(isinstance(about, dict | None), f"about is {about!r}, expected a dictionary")
    if about is not None:
        return about
    model = unwrapped(model)
    return dict(model.about) if isinstance(model, PackedModel) else {}


def about_text(about: dict[str, Any]) -> str:
    """The metadata of a model, as JSON for the files of other runtimes."""
    return to_json({"about": about})


def read_about(text: str) -> dict[str, Any]:
    """The metadata from a text by ``about_text``; empty if the text is something else."""
    try:
        return field(from_json(text, "description"), "about", "its description")  # type: ignore[no-any-return]
    except PackError:
        return {}
