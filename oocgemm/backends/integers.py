"""The Finish of exact sums on the host, and what is said on any backend of those that C cannot hold."""

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.errors import ExecutionError
from oocgemm.plan.integers import LIMIT


def finish(sums: Array, alpha: float, beta: float, result: Array) -> None:
    """``result = alpha sums + beta result`` in float64, sums being integers; beta = 0 never reads result.

    Raises `ExecutionError` where result is of integers and one of them may not be exact, or is more than it holds.
    """
    limits = np.iinfo(result.dtype) if result.dtype.kind == "i" else None
    with np.errstate(all="ignore"):
        for row, old in zip(sums, result, strict=True):  # by row: no temporary of the strip's size
            value = np.multiply(row, alpha, dtype=np.float64)
            size = np.abs(value)
            if beta:
                kept = np.multiply(old, beta, dtype=np.float64)
                value += kept
                size += np.abs(kept)
            if limits is not None and not (
                size.max() < LIMIT and limits.min <= value.min() and value.max() <= limits.max
            ):
                raise too_large(result.dtype.name)
            old[...] = value


def too_large(c_dtype: str) -> ExecutionError:
    """What ends a run whose sums C cannot hold."""
    if c_dtype == "int32":
        held, wider = "int32 holds (2^31 - 1)", "int64"
    else:
        held, wider = "can be summed exactly (2^53)", "float64"
    return ExecutionError(
        f"an element of C is more than {held}: pass out_dtype='{wider}' (--out-dtype {wider})"
    )
