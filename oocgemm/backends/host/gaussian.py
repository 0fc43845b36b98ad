"""Makes strips of a product strips of a Gaussian kernel matrix, with NumPy."""

import numpy as np

from oocgemm.backends.base import Array

# Elements that are changed at once. Their temporary arrays fit into a CPU cache.
PIECE = 1 << 15


def make_gaussian(strip: Array, rows: Array, cols: Array, gamma: float) -> None:
    """Replace each element c of a strip by exp(-gamma d2) with d2 = rows[i] + cols[j] - 2 c, but at least 0.

    d2 is computed in float64. NaN stays NaN.
    """
    height = max(1, PIECE // max(1, strip.shape[1]))
    for top in range(0, len(strip), height):
        part = strip[top : top + height]
        d2 = part.astype(np.float64)
        with np.errstate(all="ignore"):
            d2 *= -2
            d2 += rows[top : top + height, None]
            d2 += cols
            np.maximum(d2, 0, out=d2)  # keeps NaN
            d2 *= -gamma
            np.exp(d2.astype(part.dtype, copy=False), out=part)
