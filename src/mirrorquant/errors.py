"""The base class of all errors that this package raises on purpose."""

__all__ = ["MirrorquantError"]


class MirrorquantError(Exception):
    """A problem that the message explains: what was given, what was expected, and what to do."""
