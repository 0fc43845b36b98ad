"""Define the version of this package, so that it is known even where the package is not installed."""

__version__ = "0.1.0"
