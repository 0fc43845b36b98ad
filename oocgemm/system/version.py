"""State the version of this package, installed or not."""

__version__ = "0.1.0"
