"""Apply alpha and beta to a strip of C on the host, and cast the strip to C's dtype.

`too_large` is the error that all backends raise for an element that does not fit C's dtype.
"""

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.errors import ExecutionError
from oocgemm.planning.cost.footprint import FINISH_ARRAYS, FINISH_PIECE
from oocgemm.planning.integers import EXACT_LIMIT


def finish(sums: Array, alpha: float, beta: float, result: Array, workspace: Array) -> None:
    """Compute ``result = alpha sums + beta result`` in the dtype of sums, and round to the dtype of result.

    Args:
        sums: the accumulated products, C-contiguous. The dtype is float32, or float64 if all values are
            integers.
        alpha, beta: scalars. beta = 0 never reads result.
        result: array of the shape of sums, C-contiguous.
        workspace: bytes for `FINISH_ARRAYS` temporary arrays of `FINISH_PIECE` elements in the dtype of sums.
            A smaller workspace is slower. Minimum: one element per array.

    Raises:
        ExecutionError: result has an integer dtype, and an element is outside the range of that dtype, or
            is so large (2^53) that float64 may have rounded it.
    """
    limits = np.iinfo(result.dtype) if result.dtype.kind == "i" else None
    scalars = sums.dtype.type(alpha), sums.dtype.type(beta)
    # Pieces of fixed length keep the temporary arrays in the cache, for any shape.
    piece = min(FINISH_PIECE, workspace.size // (FINISH_ARRAYS * sums.itemsize))
    spaces = workspace.view(sums.dtype)[: FINISH_ARRAYS * piece].reshape(FINISH_ARRAYS, piece)
    flat, old_flat = sums.reshape(-1), result.reshape(-1)
    with np.errstate(all="ignore"):  # Inf and NaN propagate silently, as in BLAS
        for start in range(0, flat.size, piece):
            old = old_flat[start : start + piece]
            value, kept, size = spaces[:, : old.size]
            np.multiply(flat[start : start + piece], scalars[0], out=value)
            if limits is not None:
                np.abs(value, out=size)
            if beta:
                np.multiply(old, scalars[1], out=kept, dtype=sums.dtype)
                value += kept
                if limits is not None:
                    size += np.abs(kept, out=kept)
            if limits is not None and not (
                size.max() < EXACT_LIMIT and limits.min <= value.min() and value.max() <= limits.max
            ):
                raise too_large(result.dtype.name)
            old[...] = value


def too_large(c_dtype: str) -> ExecutionError:
    """Return the error for an element of C that does not fit C's integer dtype."""
    if c_dtype == "int32":
        limit, wider = "int32 holds (2^31 - 1)", "int64"
    else:
        limit, wider = "can be summed exactly (2^53)", "float64"
    return ExecutionError(
        f"an element of C is larger than {limit}: pass out_dtype='{wider}' (--out-dtype {wider})"
    )
