"""How far a product may be from the exact one, and sums in double precision that it is held against.

With u the unit roundoff, a sum of n products in any order errs in each element by at most gamma_n |A| |B|,
gamma_n = n u / (1 - n u) (Higham, *Accuracy and Stability of Numerical Algorithms*, 2002, section 3.5).
"""

from typing import Any

import numpy as np

from oocgemm.backends.base import Array, limits_of, numpy_dtype
from oocgemm.planning import GemmProblem
from oocgemm.planning.integers import LIMIT

# Squares between these lose nothing to underflow and overflow that matters.
SMALLEST, LARGEST = 1e-270, 1e290
DOUBLE = 2.0**-53
ONE_THREAD = 1 << 18  # multiplications that OpenBLAS does in one thread
T = 8
# What one operand may be off by, relatively, when it is rounded, or cut off, to a reduced precision.
OPERANDS = {"native": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-7, "emulated": 0.0}


def gamma(n: float, u: float) -> float:
    """Relative error of n rounded operations in a row; infinite where it bounds nothing.

    >>> gamma(0, 1e-16), gamma(1e20, 1e-16)
    (0.0, inf)
    """
    return n * u / (1 - n * u) if n * u < 1 else float("inf")


def sum_error(n: float, u: float) -> float:
    """Relative error of a sum of n terms: gamma_n, or 6 sqrt(n) u where that is less.

    The latter holds with high probability for rounding errors of mean 0 (Higham and Mary, *A new approach to
    probabilistic rounding error analysis*, 2019), and for the lengths summed in one go here even where each goes the
    same way.
    """
    return min(gamma(n, u), 6 * float(np.sqrt(n)) * u)


class Rounding:
    """What sums of a product's elements, taken with random signs, may be off by, and what its scalars really are.

    Each element of C is a `chain` of so many additions and the sums are one of `own` more, in double precision.

    The errors R of some elements have a 2-norm of at most the bound of one times the norm of |A| |B| there. Signs being
    random, R adds up to more than T |R| with a probability below exp(-T / e) whatever it is, signs on rows and columns
    both (moments of a Rademacher chaos), or 2 exp(-T^2 / 2) with signs on columns only (Hoeffding); and in truth far more
    rarely, since rounding errors are a small part of their bounds.
    """

    alpha: complex
    beta: complex

    def __init__(self, problem: GemmProblem, chain: int, own: int) -> None:
        # Exact sums are scaled and added to C in float64, whatever they were summed in.
        accumulator = numpy_dtype("float64" if problem.exact else problem.acc_dtype)
        self._whole = numpy_dtype(problem.c_dtype).kind == "i"
        limits = np.finfo(accumulator)
        stored = limits if self._whole else limits_of(problem.c_dtype)
        # Products of complex numbers are four, added up.
        factor = 4 if accumulator.kind == "c" else 1
        self._relative = (
            sum_error(factor * ((0 if problem.exact else chain) + 8), float(limits.eps) / 2)
            + 2 * OPERANDS[problem.compute]
        )
        self._own = sum_error(factor * (own + 8), DOUBLE)
        self._stored = float(stored.eps) / 2 if problem.finishes else 0.0
        scalars = problem.applied_alpha, problem.beta
        self.alpha, self.beta = (accumulator.type(x).item() for x in scalars)
        self.multiplies = self.alpha != 0
        underflow = (problem.depth + 2) * (1 + abs(self.alpha) + abs(self.beta)) * float(limits.tiny)
        self._least = underflow + (float(stored.smallest_subnormal) if problem.finishes else 0.0)
        self.most, self._most_stored = float(limits.max) / 16, float(stored.max) * 0.99

    def norm(self, product: Array, old: Array) -> Array:
        """Norms of |alpha| |A| |B| + |beta| |C0| from those of |A| |B| and of the old C."""
        return np.asarray(abs(self.alpha) * product + (abs(self.beta) * old if self.beta else 0))

    def tolerance(self, norm: Array, stored: Array, elements: Array | float) -> Array:
        """What sums over so many `elements` may be off by, their norms being `norm` and that of C there `stored`. Nothing
        where C is of integers, as long as none of these sums could have rounded itself."""
        root = np.sqrt(elements)
        if self._whole:
            return np.where(root * norm < LIMIT / 2, 0.0, self._own * root * norm)
        rounding = np.minimum(T, root) * (self._relative * norm + self._stored * stored)
        return np.asarray(rounding + self._own * root * norm + elements * self._least)

    def may_overflow(self, product: Array, norm: Array) -> tuple[Array, Array]:
        """Where a sum could have left the range of its dtype, so that an Inf or NaN says nothing; and where an element
        could have left that of C's, so that an Inf does."""
        return ~((product < self.most) & (norm < self.most)), ~(norm < self._most_stored)


def norms(x: Array) -> Array:
    """2-norms of a double-precision array along its last axis, safe from overflow and underflow; NaN or Inf where it
    holds either."""
    sizes = np.abs(x)
    most = sizes.max(axis=-1, initial=0)
    scaled = sizes / np.where(most > 0, most, 1)[..., None]
    return np.asarray(most * np.sqrt(np.vecdot(scaled, scaled)))


def block_squares(blocks: Array) -> Array:
    """Sums of the squares in double-precision blocks (number, rows, columns); columns should lie side by side."""
    flat = blocks.view(np.float64) if blocks.dtype.kind == "c" else blocks
    return np.asarray(np.vecdot(flat, flat).sum(axis=-1))


def block_norms(blocks: Array, squares: Array) -> Array:
    """Frobenius norms of blocks by the sums of their squares; by the elements, where squares have left their range. NaN or
    Inf where a block holds either."""
    if squares.min() > SMALLEST and squares.max() < LARGEST:
        return np.asarray(np.sqrt(squares))
    return norms(norms(blocks.astype(wide_dtype(blocks.dtype), copy=False)))


def signed(x: Array, blocks: Array) -> Array:
    """For each of some double-precision blocks (number, rows, columns) the sum of its rows times the signs x."""
    if blocks.dtype.kind == "c":  # in parts: NumPy would make the signs complex first
        real, imaginary = (np.einsum("gi,gij->gj", x, part) for part in (blocks.real, blocks.imag))
        return np.asarray(real + 1j * imaginary)
    return np.asarray(np.einsum("gi,gij->gj", x, blocks))


def add_product(c: Array, a: Array, b: Array) -> None:
    """``c += a @ b.T``, in parts for which the BLAS takes no second thread: its threads would wait for one another where
    all cores are busy, many times longer than the product takes."""
    deep = max(1, ONE_THREAD // (8 * max(1, len(b))))
    for left in range(0, a.shape[1], deep):
        part = b[:, left : left + deep]
        down = max(1, ONE_THREAD // part.size)
        for top in range(0, len(a), down):
            c[top : top + down] += a[top : top + down, left : left + deep] @ part.T


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Double precision, complex for complex."""
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
