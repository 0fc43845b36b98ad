"""Marks operations as NVTX ranges, which profilers show."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

from oocgemm.planning import Operation


@cache
def annotation() -> Callable[[Operation], AbstractContextManager[object]]:
    """Return a function that takes an operation and returns a context manager. The context manager marks the
    operation as an NVTX range for profilers, or does nothing if the package nvtx is missing."""
    try:
        from nvtx import annotate
    except ImportError:
        return nullcontext
    return lambda operation: annotate(str(operation))
