"""The steps of an epilogue and reductions of rows, with NumPy."""

from collections.abc import Sequence

import numpy as np

from oocgemm.backends.base import Array, Numbers
from oocgemm.planning.epilogue import Step

# Elements that are changed at once. Their temporary arrays fit into a CPU cache.
PIECE = 1 << 15


def run_chain(
    steps: Sequence[Step],
    numbers: Sequence[Numbers],
    sums: Array,
    scalars: tuple[float, float],
    result: Array,
    *,
    reads: bool,
) -> None:
    """Apply a chain to ``alpha sums + beta result``, and round to the dtype of `result`.

    Args:
        steps: of the chain (`oocgemm.planning.epilogue`).
        numbers: of each step, those per row and those per column of the strip; None for 1.
        sums: a strip of products.
        scalars: alpha and beta.
        result: array of the strip's shape, which may be `sums`.
        reads: whether `result` contains the further matrix D or the old C.
    """
    alpha, beta = scalars
    height = max(1, PIECE // max(1, sums.shape[1]))
    for top in range(0, len(sums), height):
        here = slice(top, top + height)
        with np.errstate(all="ignore"):
            c = sums[here].astype(np.float64)
            c *= alpha
            d = result[here].astype(np.float64) if reads else c
            if beta:
                c += beta * d
            for step, (rows, cols) in zip(steps, numbers, strict=True):
                u = 1.0 if rows is None else rows[here, None]
                c = _changed(step, c, u, 1.0 if cols is None else cols, d, sums.dtype)
            result[here] = c


def _changed(
    step: Step, c: Array, u: Array | float, v: Array | float, d: Array, summed: np.dtype[np.generic]
) -> Array:
    """Return what a step makes of the elements c. It may change them in place."""
    match step.kind:
        case "scale":
            c *= step.value * u * v
        case "rank_one":
            c += step.value * u * v
        case "add":
            c += step.value * d
        case "divide":
            c /= d
        case "divide_or_zero":
            c /= d
            c[d == 0] = 0
        case "correlation":
            c *= step.value * u * v
            np.clip(c, -1, 1, out=c)  # keeps NaN
        case "gaussian":
            c *= -2
            c += u
            c += v
            np.maximum(c, 0, out=c)  # keeps NaN
            c *= -step.value
            # The exponential is that of the dtype of the sums, as on a GPU.
            c = np.exp(c.astype(np.float32 if summed == np.float32 else np.float64))
            c = c.astype(np.float64, copy=False)
        case "identical":
            c[(u == v) & ~np.isnan(c)] = 1
        case "squared":
            c *= c
            c -= step.value * (1 - c)
        case "within":
            c[~(np.abs(u - v) <= step.value)] = 0
        case _:
            raise AssertionError(f"{step} is unknown")
    return c


def reduce_rows(reduction: str, strip: Array, kept: Array, *, begins: bool) -> None:
    """Add the sums, the sums of squares or the largest elements of the rows of a strip to `kept`.

    With `begins`, `kept` has no value yet. NaN is the largest element.
    """
    height = max(1, PIECE // max(1, strip.shape[1]))
    for top in range(0, len(strip), height):
        c, to = strip[top : top + height].astype(np.float64), kept[top : top + height]
        with np.errstate(all="ignore"):
            if reduction == "max":
                found = c.max(1)
                to[...] = found if begins else np.maximum(to, found)
                continue
            if reduction == "sumsq":
                c *= c
            found = c.sum(1)
            to[...] = found if begins else to + found
