"""Check two chained products, ``Z = X^T (X Q + 1 row)``, by Freivalds' algorithm (`integrity.freivalds`).

For vectors y of random signs, Z y must be ``X^T (X (Q y) + 1 (row y))``. X is read once more for it. A single
wrong element of Z is found with any signs, if it is above the rounding error.

Rounding errors are taken to be independent and of mean 0 (Higham and Mary, 2019). With the roundoff u, a sum
of n terms then has an error of about u sqrt(n) times its largest partial sum, which is about as large as the
2-norm of the terms, or as the sum. So row j of Z y has an error of about

    u (sqrt(rows) |z_j| + |x_j| |T| + |x_j| E)
    E = (|X| |Q| + sqrt(cols) |T|) / sqrt(rows) + sqrt(rows) |c| |Q|

for row j of Z, column j of X, T = X Q + 1 row, and the means c of the columns of X. E is the error of T. Its
last part is for rows of X that are alike, whose errors are too. The norm of T is about that of T y.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.backends.checksums import SignVectors
from oocgemm.errors import ExecutionError
from oocgemm.integrity.passes import Oriented
from oocgemm.integrity.sign_sums import product
from oocgemm.stores.arrays import scratch_array

# Number of vectors of random signs.
COMBINATIONS = 2
# The bound of an error, divided by its estimate.
DEVIATION = 32
# Elements of X that a thread converts to float64 at a time.
PIECE = 1 << 18


def check_chained(
    x: Oriented,
    factor: Array,
    row: Array,
    result: Array,
    *,
    band: int,
    threads: int,
    report: Callable[[], None],
    seed: int = 0,
) -> None:
    """Raise `ExecutionError` if `result` is not ``X^T (X Q + 1 row)`` within rounding error.

    Args:
        x: X.
        factor: Q, and further columns of zeros.
        row: the row that is added to each row of X Q.
        result: the product.
        band: rows of X that a thread reads at a time.
        threads: number of threads that read X.
        report: called for each band that is read. The check ends if it raises.
        seed: of the random signs.
    """
    rows, cols = x.shape
    signs = SignVectors(seed).part(0, len(row))[:, :COMBINATIONS]
    right, added = factor.astype(np.float64) @ signs, row.astype(np.float64) @ signs
    expected, length = np.zeros((cols, COMBINATIONS)), np.zeros(COMBINATIONS)
    squares, totals = np.zeros(cols), np.zeros(cols)
    lock = threading.Lock()

    def act(top: int) -> None:
        bottom = min(rows, top + band)
        room = scratch_array("band", ((bottom - top) * cols * x.matrix.dtype.itemsize,), np.dtype(np.uint8))
        block = x.read((top, bottom), (0, cols), room)
        report()
        found, size, sums = np.zeros_like(expected), np.zeros((2, cols)), np.zeros(COMBINATIONS)
        height = max(1, PIECE // max(1, cols))
        with np.errstate(all="ignore"):
            for start in range(0, len(block), height):
                part = block[start : start + height].astype(np.float64)
                t = product(part, right) + added
                found += product(part.T, t)
                size += np.einsum("ij,ij->j", part, part), part.sum(axis=0)
                sums += np.einsum("ij,ij->j", t, t)
        with lock:
            np.add(expected, found, out=expected)
            np.add(squares, size[0], out=squares)
            np.add(totals, size[1], out=totals)
            np.add(length, sums, out=length)

    _in_threads(act, range(0, rows, band), threads)
    unit = float(np.finfo(result.dtype).eps) / 2
    with np.errstate(all="ignore"):
        of_t, of_q = np.sqrt(length.mean()), np.linalg.norm(factor.astype(np.float64))
        of_z = np.linalg.norm(result.astype(np.float64), axis=1)
        errors = (np.sqrt(squares.sum()) * of_q + np.sqrt(cols) * of_t) / np.sqrt(rows)
        errors += np.linalg.norm(totals) / np.sqrt(rows) * of_q
        bound = np.sqrt(rows) * of_z + np.sqrt(squares) * (of_t + errors)
        bound = DEVIATION * unit * bound + len(row) * float(np.finfo(result.dtype).tiny)
        difference = np.abs(result.astype(np.float64) @ signs - expected).max(axis=1)
        # Sums that are that large may overflow. The caller reports elements that are not finite.
        fits = np.sqrt(squares) * of_t < float(np.finfo(result.dtype).max) / 16
        decided = np.isfinite(expected).all(axis=1) & fits
        wrong = np.flatnonzero(decided & ~(difference <= bound))
    if wrong.size:
        j = wrong[0]
        raise ExecutionError(
            f"row {j} of a product with X (one of {wrong.size} such rows of {cols}) differs from the same "
            f"product on the host by {difference[j]:.3g}, and rounding allows {bound[j]:.3g}: the device, "
            "the memory or the BLAS computes or copies wrongly; test this machine, then run again"
        )


def _in_threads(act: Callable[[int], None], tops: range, threads: int) -> None:
    with ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-chained") as pool:
        for _ in pool.map(act, tops):
            pass
