"""Bound the rounding errors of a product, of sums with random signs, and of the steps of an epilogue.

With unit roundoff u, a sum of n products in any order has an error of at most gamma_n |A| |B| in each
element, where gamma_n = n u / (1 - n u) (Higham, *Accuracy and Stability of Numerical Algorithms*, 2002,
section 3.5).

The rest is for sums of elements of C with random signs, in Freivalds' check. Let y be a vector of random
signs (+1 or -1) on a group of columns, independent of C. The sum is y^T C_i, where C_i are the elements of
row i in the group. The symbols are:

    R_ij    the rounding error of C_ij; R_i has those of row i
    u       the unit roundoff of the accumulator's dtype
    c       the number of successive rounded additions that compute one element of C
    S_ij    sum_p (a_ip b_pj)^2, the sum of the squared terms of C_ij

There are two bounds, and the user chooses between them. Each bound holds for one sum with a probability of at
least 1 - 2 exp(-t). The value of t depends on the number of sums: the probability that the check of a correct
C fails is at most `FALSE_ALARM`.

*Probabilistic.* Sources: Higham and Mary, *A new approach to probabilistic rounding error analysis* (2019);
*Sharper probabilistic backward error analysis for basic linear algebra kernels with random data* (2020).
The errors of single operations are assumed to be independent and uniformly distributed, with mean 0. The
error of one addition is then sub-Gaussian with variance u^2 |s|^2 / 3, where s is the rounded partial sum. If
the terms have random signs, s is about sqrt(S_ij), in any order of summation. Hoeffding's inequality, applied
to R and to y, gives

    |y^T R_i|  <=  t u sqrt(c / 3) sqrt(sum_j S_ij)

If most terms have the same sign, partial sums are larger, and their rounding errors may repeat. The check
therefore estimates by how much partial sums exceed those of random signs (`passes.bias_of`), and adds to
the bound sqrt(2 t) times this estimate times min(gamma_c, 6 sqrt(c) u), with gamma_c = c u / (1 - c u).

*Worst case.* |R_ij| <= gamma_c (|A| |B|)_ij, whatever the errors of single operations are (Higham, *Accuracy
and Stability of Numerical Algorithms*, 2002, section 3.5). Only y is random here:

    |y^T R_i|  <=  sqrt(2 t) |R_i|

With a reduced precision (tf32, bf16), the operands are rounded before the product, and both bounds get
another summand. It is larger than for independent errors, because the error of an element of A affects its
whole row of C.

*Epilogues.* `RoundedElements` bounds the results that a run may compute from an element of the product. The
product c of a row and a column, computed in float64, lies between c - e and c + e as the run computes it, for
a bound e of the rounding error. Each step of an epilogue is monotonic in c. So it maps the interval to the
interval between the images of its ends. Intervals are widened by the rounding errors of the steps, which are
computed in float64, and of the cast to the dtype in which elements are stored or compared.
"""

from math import log, sqrt
from typing import Any

import numpy as np

from oocgemm.backends.base import Array, Finishing, limits_of, numpy_dtype
from oocgemm.errors import InputError
from oocgemm.planning import GemmProblem
from oocgemm.planning.emulation import EXACT_LIMIT
from oocgemm.planning.sinks import SELECTED, Step

# A sum of squares between these limits is accurate: no square overflowed, and squares that underflowed are
# too small to matter. If a sum is not between them, the norm is computed from scaled elements instead.
MIN_SQUARES, MAX_SQUARES = 1e-270, 1e290
# The unit roundoff of float64.
DOUBLE = 2.0**-53
# If m n k of a matrix product is at most this, OpenBLAS computes it in the calling thread.
ONE_THREAD = 1 << 18
# The error bound of a sum of elements with random signs, divided by the 2-norm of their rounding errors.
# `Rounding` gives the probability that a correct sum exceeds the bound.
MAX_DEVIATION = 8
# Maximum number of rounded operations of the epilogue on one element of C.
EPILOGUE = 8
# Relative error that one operand gets when it is rounded, or truncated, to the precision of `--compute`.
OPERANDS = {"native": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-7, "emulated": 0.0}


def gamma(n: float, u: float) -> float:
    """Return n u / (1 - n u), the relative error bound of n successive rounded operations.

    `u` is the unit roundoff. The bound is infinite if n u >= 1.

    >>> gamma(0, 1e-16), gamma(1e20, 1e-16)
    (0.0, inf)
    """
    return n * u / (1 - n * u) if n * u < 1 else float("inf")


def sum_error(n: float, u: float) -> float:
    """Return the relative error bound of a sum of n terms with unit roundoff u, at most `gamma`.

    6 sqrt(n) u holds with high probability if the rounding errors have mean 0 (Higham and Mary, 2019). It may
    fail for large n if the errors all have the same sign.
    """
    return min(gamma(n, u), 6 * float(np.sqrt(n)) * u)


class Rounding:
    """The error bound of a sum of elements of C with random signs.

    A check computes such a sum from C, and predicts it from A and B. If C is correct, these two values rarely
    differ by more than the bound.

    Let R be the vector of the rounding errors of the summed elements, |R| its 2-norm, and T `MAX_DEVIATION`.
    The signs do not depend on R. So the probability that the error of a sum exceeds T |R| is small:

    - below exp(-T / e) with random signs on rows and columns (moments of a Rademacher chaos),
    - below 2 exp(-T^2 / 2) with random signs on columns only (Hoeffding's inequality).

    The error bound is T times an upper bound of |R|, which is usually far above |R|. The actual probability
    is therefore much smaller.

    Args:
        problem: the product.
        chain: maximum number of successive rounded operations that compute one element of C.
        check_chain: number of successive rounded operations that compute and predict a sum, in double
            precision.

    Attributes:
        alpha, beta: the scalars of the product, rounded to the accumulator's dtype.
    """

    alpha: complex
    beta: complex

    def __init__(self, problem: GemmProblem, chain: int, check_chain: int) -> None:
        # If `problem.exact`, only the epilogue rounds. It computes in float64.
        accumulator = numpy_dtype("float64" if problem.exact else problem.acc_dtype)
        self._integer = numpy_dtype(problem.c_dtype).kind == "i"
        limits = np.finfo(accumulator)
        stored = limits if self._integer else limits_of(problem.c_dtype)
        # An operation on complex numbers counts as four rounded operations, because a complex product takes
        # four real products.
        factor, unit = 4 if accumulator.kind == "c" else 1, float(limits.eps) / 2
        self._operands = 2 * OPERANDS[problem.compute]
        self._chain = factor * ((0 if problem.exact else chain) + EPILOGUE)
        self._check_chain = factor * (check_chain + EPILOGUE)
        self._relative = sum_error(self._chain, unit) + self._operands
        self._check_error = sum_error(self._check_chain, DOUBLE)
        self._accumulator, self._unit = accumulator, unit
        self._epilogue = sum_error(factor * EPILOGUE, unit)
        self._stored = float(stored.eps) / 2 if problem.finishes else 0.0
        scalars = problem.applied_alpha, problem.beta
        self.alpha, self.beta = (accumulator.type(x).item() for x in scalars)
        self.multiplies = self.alpha != 0
        underflow = (problem.depth + 2) * (1 + abs(self.alpha) + abs(self.beta)) * float(limits.tiny)
        self._underflow = underflow + (float(stored.smallest_subnormal) if problem.finishes else 0.0)
        self.max_finite, self._max_stored = float(limits.max) / 16, float(stored.max) * 0.99

    def norm(self, product: Array, old: Array) -> Array:
        """Return upper bounds of norms of |alpha| |A| |B| + |beta| |C0| from those of |A| |B| and C0."""
        return np.asarray(abs(self.alpha) * product + (abs(self.beta) * old if self.beta else 0))

    def tolerance(self, norm: Array, stored: Array, elements: Array | float) -> Array:
        """Return the error bounds of sums of elements of C with random signs.

        For each sum, `norm` is the result of the method `norm`, and `stored` the norm of its elements of C as
        stored. The bound is 0 for a C of integers whose sums are exact in float64.
        """
        root = np.sqrt(elements)
        if self._integer:
            return np.where(root * norm < EXACT_LIMIT / 2, 0.0, self._check_error * root * norm)
        rounding = np.minimum(MAX_DEVIATION, root) * (self._relative * norm + self._stored * stored)
        return np.asarray(rounding + self._check_error * root * norm + elements * self._underflow)

    def may_overflow(self, product: Array, norm: Array) -> tuple[Array, Array]:
        """Return two arrays of flags: sums may overflow to Inf or NaN; the cast to C's dtype may give Inf.

        For each set of elements of C, `product` is the norm of |A| |B|, and `norm` the result of the method
        `norm`.
        """
        return ~((product < self.max_finite) & (norm < self.max_finite)), ~(norm < self._max_stored)


def norms(x: Array) -> Array:
    """Return the 2-norms along the last axis, without overflow or underflow; nonfinite with an Inf or NaN."""
    sizes = np.abs(x)
    largest = sizes.max(axis=-1, initial=0)
    scaled = sizes / np.where(largest > 0, largest, 1)[..., None]
    return np.asarray(largest * np.sqrt(np.vecdot(scaled, scaled)))


def block_squares(blocks: Array) -> Array:
    """Return the sum of squares of each block of an array of shape (blocks, rows, columns).

    This is fastest if the last axis is contiguous.
    """
    flat = blocks.view(np.float64) if blocks.dtype.kind == "c" else blocks
    return np.asarray(np.vecdot(flat, flat).sum(axis=-1))


def block_norms(blocks: Array, squares: Array) -> Array:
    """Return the Frobenius norms of the blocks of an array of shape (blocks, rows, columns).

    If a sum of squares has overflowed or underflowed, all are computed from scaled elements instead.
    """
    if squares.min() > MIN_SQUARES and squares.max() < MAX_SQUARES:
        return np.asarray(np.sqrt(squares))
    return norms(norms(blocks.astype(wide_dtype(blocks.dtype), copy=False)))


def signed(x: Array, blocks: Array) -> Array:
    """Multiply the rows of blocks (blocks, rows, columns) by signs (blocks, rows); return sums of rows."""
    if blocks.dtype.kind == "c":
        # Otherwise einsum would convert the signs to complex numbers, and multiply twice as often.
        real, imaginary = (np.einsum("gi,gij->gj", x, part) for part in (blocks.real, blocks.imag))
        return np.asarray(real + 1j * imaginary)
    return np.asarray(np.einsum("gi,gij->gj", x, blocks))


def add_product(c: Array, a: Array, b: Array) -> None:
    """Compute ``c += a @ b.T`` in parts so small that the BLAS uses one thread: the run needs the cores."""
    deep = max(1, ONE_THREAD // (8 * max(1, len(b))))
    for left in range(0, a.shape[1], deep):
        part = b[:, left : left + deep]
        down = max(1, ONE_THREAD // part.size)
        for top in range(0, len(a), down):
            c[top : top + down] += a[top : top + down, left : left + deep] @ part.T


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return float64, or complex128 for a complex dtype."""
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


# The names of the two error bounds that the docstring of this module explains.
BOUNDS = ("probabilistic", "worst-case")
# Maximum probability that a check fails although C is correct.
FALSE_ALARM = 1e-6


class SumTolerance(Rounding):
    """The error bound of sums of at most `elements` elements of C with random signs, for Freivalds' check.

    For each element, k products are added up, and the check compares `tests` sums. Raises `InputError` if the
    worst-case bound is infinite, because k is too large for the accumulator's precision.
    """

    def __init__(self, problem: GemmProblem, bound: str, k: int, elements: int, tests: int) -> None:
        super().__init__(problem, k, k + 2 * elements)
        self._probabilistic = bound == "probabilistic"
        # By the Cauchy-Schwarz inequality, a sum of k terms is at most sqrt(k) times their 2-norm.
        self._terms = sqrt(k)
        self._t = log(2 * max(1, tests) / FALSE_ALARM)
        self._signs = sqrt(2 * self._t)
        chain, check, unit = self._chain, self._check_chain, self._unit
        self._walk = self._t / sqrt(3) * (sqrt(chain) * unit + sqrt(check) * DOUBLE)
        self._bias = self._signs * (sum_error(chain, unit) + sum_error(check, DOUBLE))
        self._worst = gamma(chain, unit) + self._operands + gamma(check, DOUBLE) * sqrt(elements)
        if not (self._probabilistic or np.isfinite(self._worst)):
            raise InputError(
                f"the worst-case bound is infinite for sums of {k} products in {self._accumulator}, whose "
                f"unit roundoff is {unit:.2g}: use the probabilistic bound (--bound probabilistic)"
            )

    @property
    def needs_stored(self) -> bool:
        """Whether `of_sums` needs norms of the stored C: the cast to its dtype rounds."""
        return bool(self._stored)

    def product_norm(self, terms: Array) -> Array:
        """Return upper bounds of the norms of |A| |B| over the elements of each sum."""
        return np.asarray(self._terms * terms)

    def of_sums(self, terms: Array, bias: Array, old: Array, stored: Array, elements: Array) -> Array:
        """Return the error bounds of sums of elements of C with random signs.

        For each sum, `terms` is sqrt(sum_j S_ij), `bias` the result of `passes.bias_of`, `old` and `stored`
        are norms of the old C and of C as stored, and `elements` is their number.
        """
        alpha, beta = abs(self.alpha), abs(self.beta)
        old = beta * old if beta else np.zeros_like(old)
        root = np.sqrt(elements)
        largest = alpha * self.product_norm(terms) + old
        if self._integer:  # sums of integers below EXACT_LIMIT have no rounding errors in float64
            return np.where(root * largest < EXACT_LIMIT / 2, 0.0, self._check_error * root * largest)
        signs = np.minimum(self._signs, root)
        if self._probabilistic:
            reduced = self._operands * ((self._t + self._signs) * terms + self._signs * bias)
            rounding = alpha * (self._walk * terms + self._bias * bias + reduced)
            rounding += self._signs * self._epilogue * old
        else:
            rounding = signs * self._worst * largest
        return np.asarray(rounding + signs * self._stored * stored + elements * self._underflow)


Interval = tuple[Array, Array]

# The rounding error of a step, and that of a cast, in units of the roundoff. The device may contract a
# product and a sum, and scores are products of three factors.
STEP_ERROR, CAST_ERROR = 16, 8
# The error of an element of the accumulator, in units of the bound for sums of independent errors. Tensor
# cores truncate, so that errors may have the same sign.
BIAS = 4
# The largest error of gamma times a squared distance, whatever the norms of rows are.
DISTANCE_ERROR = 1e-2


class RoundedElements:
    """Bounds of the elements that a run computes: of C if it is stored, otherwise of selected elements."""

    def __init__(self, problem: GemmProblem, finishing: Finishing) -> None:
        self._problem, self._finishing = problem, finishing
        self._alpha = problem.applied_alpha.real
        depth = problem.depth
        # At most one rounded operation per index along k, and two per panel.
        self._rounding = Rounding(problem.as_summed, 3 * depth, depth)
        stored = problem.c_dtype if problem.sink.stores_c else problem.acc_dtype
        scores = {SELECTED[name]: name for name in ("float32", "float64")}.get(problem.c_dtype, "")
        limits = limits_of(scores or (stored if stored != "int32" else "float64"))
        self._unit, self._largest = float(limits.eps) / 2, float(limits.max) * 0.99
        wide = "float32" if problem.acc_dtype == "float32" else "float64"
        tiny = float(np.finfo(wide).tiny)  # devices may replace smaller numbers by 0
        self._tiny = max(tiny, float(limits.smallest_subnormal))
        # The exponential is computed in the dtype of the sums. Its relative error grows with the argument.
        # The largest argument is that whose exponential is the smallest normal number.
        # Squared distances are those of the elements before they were rounded.
        self._elements = 0.0 if problem.exact else 2 * float(limits_of(problem.a_dtype).eps)
        self._distance = np.inf
        if (
            problem.measures_distances
            and problem.epilogue[0].kind == "gaussian"
            and not OPERANDS[problem.compute]
        ):
            self._distance = DISTANCE_ERROR / problem.epilogue[0].value
        self._exp_error = (4 - np.log(tiny)) * float(np.finfo(wide).eps) / 2

    def bounds(self, sums: Array, norms: Array, rows: Any, cols: Any, d: Array | None = None) -> Interval:
        """Return the interval in which each element lies.

        `sums` are products of rows of op(A) and columns of op(B) in float64, or squared distances, and
        `norms` products of the 2-norms. `rows` and `cols`, their indices in C, select the numbers of the
        steps, so their shapes must fit those of `sums`. `d` are the elements of the further matrix D, if the
        epilogue reads it.
        """
        with np.errstate(all="ignore"):
            if self._problem.measures_distances:
                u, v = self._finishing.numbers[0]
                assert u is not None
                assert v is not None
                sums = (u[rows] + v[cols] - sums) / 2
            error = BIAS * self._rounding.tolerance(norms, np.zeros_like(norms), 1.0)
            if self._problem.is_corrected:  # for centers, in float64, of sums of numbers below 2^7
                error = error + 16 * DOUBLE * np.sqrt(self._problem.depth) * 2.0**14 * self._problem.depth
            # The accumulator may overflow where float64 does not, and then be Inf or NaN.
            if self._problem.measures_distances:
                error = np.minimum(error, self._distance / 2)
            error = np.where(BIAS * norms < self._rounding.max_finite, error, np.nan)
            low, high = _sorted(self._alpha * (sums - error), self._alpha * (sums + error))
            numbers = self._finishing.numbers
            for step, (u, v) in zip(self._problem.epilogue, numbers, strict=True):
                of_row, of_col = 1.0 if u is None else u[rows], 1.0 if v is None else v[cols]
                low, high = self._changed(step, (low, high), of_row, of_col, d)
            if self._finishing.scales is not None:
                scale = self._finishing.scales[rows] * self._finishing.scales[cols]
                low, high = (np.clip(x * scale, -1, 1) for x in (low, high))
            low, high = _widened(low, high, CAST_ERROR * self._unit, self._tiny)
            low, high = (np.where(x > self._largest, np.inf, x) for x in (low, high))
            return tuple(np.where(x < -self._largest, -np.inf, x) for x in (low, high))  # type: ignore[return-value]

    def _changed(self, step: Step, found: Interval, u: Any, v: Any, d: Array | None) -> Interval:
        low, high = found
        added: Any = 0.0
        match step.kind:
            case "scale" | "correlation":
                factor = step.value * u * v
                low, high = _sorted(low * factor, high * factor)
            case "rank_one":
                added = step.value * u * v
            case "add":
                assert d is not None
                added = step.value * d
            case "divide":
                low, high = _sorted(low / d, high / d)
            case "divide_or_zero":
                low, high = (np.where(d == 0, 0, x) for x in _sorted(low / d, high / d))
            case "gaussian" | "distance":
                low, high = (np.maximum(u + v - 2 * x, 0) for x in (high, low))
                # Distances that are only compared are computed in the dtype of scores.
                errors = 2 * self._elements if self._problem.sink.ranks_distances else self._elements
                rounded = np.minimum(errors * (u + v), self._distance)
                low, high = _widened(low, high, 0, STEP_ERROR * DOUBLE * (u + v) + rounded)
                if step.kind == "distance":
                    return _sorted(step.value * np.maximum(low, 0), step.value * high)
                low, high = np.exp(-step.value * high), np.exp(-step.value * low)
                return _widened(low, high, self._exp_error, self._tiny)
            case "jaccard" | "hamming":  # both decrease as c increases
                low, high = (_fraction(step, x, u, v) for x in (high, low))
            case "root":
                low, high = (np.sqrt(np.maximum(x, 0)) for x in found)
            case "identical":
                return tuple(np.where((u == v) & ~np.isnan(x), step.value, x) for x in found)  # type: ignore[return-value]
            case "squared":
                low, high = _sorted(low * low, high * high)
                low = np.where((found[0] < 0) & (found[1] > 0), 0, low)
                low, high, added = (1 + step.value) * low, (1 + step.value) * high, -step.value
            case "within":
                other = np.nan if step.value else 0
                return tuple(np.where(u <= v, x, other) for x in found)  # type: ignore[return-value]
            case _:
                raise AssertionError(f"{step} is unknown")
        low, high = _widened(low + added, high + added, STEP_ERROR * DOUBLE, STEP_ERROR * DOUBLE * abs(added))
        if step.kind == "correlation":
            low, high = np.clip(low, -1, 1), np.clip(high, -1, 1)
        return low, high


def _fraction(step: Step, c: Array, u: Any, v: Any) -> Array:
    """Return the step "jaccard" or "hamming" of elements c."""
    if step.kind == "hamming":
        return np.asarray((u + v - 2 * c) / step.value)
    either = u + v - c
    return np.asarray((either - c) / np.where(either == 0, 1, either))


def contains(found: Interval, value: Array) -> Array:
    """Return whether each value is in its interval.

    An interval without a finite end, or with a NaN, contains all values.
    """
    low, high = found
    unknown = ~(np.isfinite(low) | np.isfinite(high)) | np.isnan(low) | np.isnan(high)
    return np.asarray(((value >= low) & (value <= high)) | unknown)


def _sorted(x: Array, y: Array) -> Interval:
    return np.minimum(x, y), np.maximum(x, y)  # both keep NaN


def _widened(low: Array, high: Array, relative: float, absolute: Any) -> Interval:
    return low - (relative * abs(low) + absolute), high + (relative * abs(high) + absolute)
