"""Text for messages: from files, made safe to print, and from errors, in one line."""

__all__ = ["first_line", "printable"]

_MOST = 1000


def printable(text: str) -> str:
    """The text in one line of at most 1,000 characters that moves no cursor and hides nothing.

    Control characters, bidirectional overrides, invisible characters and lone surrogates become their escapes, and a
    text that is too long loses its middle.

    >>> printable("conv\\x1b[2J\\n\\u202etxt")
    'conv\\\\x1b[2J\\\\n\\\\u202etxt'
    """
    if len(text) > _MOST:
        text = f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """An error in one line: its class and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
