"""Text for messages and tables: made safe to print, errors in one line, cells in columns."""

from collections.abc import Collection, Sequence

__all__ = ["aligned", "first_line", "printable", "table"]

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


def table(rows: Sequence[Sequence[str]], right: Collection[str] = (), *, rule: bool = False) -> str:
    """Rows as aligned text; the columns under the headers in ``right`` end together. A rule may follow the header.

    >>> print(table([["tensor", "bits"], ["conv1", "32"]], right=["bits"], rule=True))
    tensor  bits
    ------  ----
    conv1     32
    """
    lines = aligned(rows, right)
    if rule:
        lines.insert(1, ["-" * len(cell) for cell in lines[0]])
    return "\n".join("  ".join(line).rstrip() for line in lines)


def aligned(rows: Sequence[Sequence[str]], right: Collection[str], least: int = 0) -> list[list[str]]:
    """The cells of a table, padded to the widths of their columns, or to ``least``."""
    widths = [max(least, *map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if name in right else str.ljust for name in rows[0]]
    return [[pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)] for row in rows]
