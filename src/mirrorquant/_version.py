"""The version of mirrorquant, read by the build and by the package."""

__version__ = "0.2.0"
