"""The version of this package, wherever its code lies: installed or not."""

__version__ = "0.1.0"
