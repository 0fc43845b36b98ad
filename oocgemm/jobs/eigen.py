"""The largest eigenvalues of a symmetric matrix in memory, and their eigenvectors.

A block Lanczos method (Golub and Underwood, 1977) finds them: the space of Q, S Q, S^2 Q, ... contains good
approximations for a random block Q. All blocks are orthogonal to each other in working precision, so no
eigenvalue is found twice. As long as the block is wider than the number of wanted eigenvectors, equal
eigenvalues are found as often as they occur. Multiplying S by a few hundred vectors takes far less time than
the decomposition of a large S. Where the method needs too many vectors, for a small S or a flat spectrum, S
is decomposed by LAPACK.
"""

from typing import NamedTuple

import numpy as np

from oocgemm.stores import Array

# The space has at most 1 / SHARE of the dimensions of S. Usually, BLOCKS blocks are enough.
SHARE, BLOCKS = 3, 12
# An eigenvector v with the eigenvalue a has converged if |S v - a v| is at most RESIDUAL times the largest
# eigenvalue of S.
RESIDUAL = 2.0**-43
# Flop/s of the decomposition by LAPACK, and of the Lanczos method. Two Zen 5 cores reached 0.8e11 to 1e11 and
# 2e10 to 4e10 for 1000 to 4000 rows, 16 cores of a Xeon 1.9e11 and 4.7e10 for 2000 rows.
LAPACK_RATE, RATE = 1e11, 4e10
# Matrices of the size of S in float64 that exist at the same time: S, and what LAPACK needs.
MAX_MATRICES = 5


class Eigen(NamedTuple):
    """Eigenvalues in descending order, and eigenvectors of the first ones of them as columns."""

    values: Array
    vectors: Array


def largest(s: Array, count: int, width: int, seed: int) -> Eigen:
    """Return the `count` largest eigenvalues of S and their eigenvectors.

    S is symmetric, in float64. `width` is the number of vectors in a block, more than `count` unless S has
    fewer rows. The result has `width` vectors and at least as many values: those beyond `count` are
    approximations. The same seed gives the same bits.
    """
    rows = len(s)
    width = min(width, rows)
    if _is_small(rows, width):
        return _decomposed(s, width)
    room = rows // SHARE
    v, t = np.empty((rows, room), order="F"), np.zeros((room, room))
    block = np.linalg.qr(np.random.default_rng(seed).standard_normal((rows, width)))[0]
    scale, used, tried = 0.0, 0, 0
    while used + width <= room:
        v[:, used : used + width] = block
        product, used = s @ block, used + width
        basis = v[:, :used]
        shares = basis.T @ product
        t[:used, used - width : used] = shares
        t[used - width : used, :used] = shares.T
        product -= basis @ shares
        product -= basis @ (basis.T @ product)  # once leaves rounding errors
        block, coupling = np.linalg.qr(product)
        # The small decompositions together take about as long as the last one.
        if 4 * used >= 5 * tried or used + width > room:
            tried = used
            values, directions = np.linalg.eigh(t[:used, :used])
            values, directions = values[::-1], directions[:, ::-1]
            scale = max(scale, float(np.abs(values).max()))
            residuals = np.linalg.norm(coupling @ directions[used - width :, :count], axis=0)
            if (residuals <= RESIDUAL * scale).all():
                return Eigen(values, basis @ directions[:, :width])
        # Where S maps the space to itself, the next block consists of rounding errors.
        block -= basis @ (basis.T @ block)
        block = np.linalg.qr(block)[0]
    return _decomposed(s, width)


def _decomposed(s: Array, width: int) -> Eigen:
    values, vectors = np.linalg.eigh(s)
    return Eigen(values[::-1], np.ascontiguousarray(vectors[:, ::-1][:, :width]))


def _is_small(rows: int, width: int) -> bool:
    return SHARE * BLOCKS * width > rows


def seconds(rows: int, width: int) -> float:
    """Estimate the time that `largest` takes."""
    if _is_small(rows, width):
        return 9.0 * rows**3 / LAPACK_RATE
    return BLOCKS * (2.0 * rows * rows * width + 4.0 * rows * (BLOCKS * width) * width) / RATE
