"""Bound what a run may make of an element of the product, which is known up to its rounding error.

The product c of a row and a column, computed in float64, lies between c - e and c + e as the run computes it,
for a bound e of the rounding error. Each step of an epilogue is monotonic in c. So it maps the interval to
the interval between the images of its ends. Intervals are widened by the rounding errors of the steps, which
are computed in float64, and of the cast to the dtype in which elements are stored or compared.
"""

from typing import Any

import numpy as np

from oocgemm.backends.base import Array, Finishing, limits_of
from oocgemm.integrity.rounding import DOUBLE, OPERANDS, Rounding
from oocgemm.planning import GemmProblem
from oocgemm.planning.epilogue import Step
from oocgemm.planning.sinks import SELECTED

Interval = tuple[Array, Array]

# The rounding error of a step, and that of a cast, in units of the roundoff. The device may contract a
# product and a sum, and scores are products of three factors.
STEP_ERROR, CAST_ERROR = 16, 8
# The error of an element of the accumulator, in units of the bound for sums of independent errors. Tensor
# cores truncate, so that errors may have the same sign.
BIAS = 4
# The largest error of gamma times a squared distance, whatever the norms of rows are.
DISTANCE_ERROR = 1e-2


class Elements:
    """What a run may make of elements of a product: of C if it is stored, else of what is selected."""

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
        # The exponential is computed in the dtype of the sums. Its relative error grows with the argument,
        # which is at most that of the smallest normal number.
        # Squared distances are those of elements before they were rounded.
        self._elements = 0.0 if problem.exact else 2 * float(limits_of(problem.a_dtype).eps)
        self._distance = np.inf
        if problem.measures_distances and not OPERANDS[problem.compute]:
            self._distance = DISTANCE_ERROR / problem.epilogue[0].value
        self._exp_error = (4 - np.log(tiny)) * float(np.finfo(wide).eps) / 2

    def bounds(self, sums: Array, norms: Array, rows: Any, cols: Any, d: Array | None = None) -> Interval:
        """Return the interval in which each element lies.

        Args:
            sums: products of rows of op(A) and columns of op(B), in float64; their squared distances if the
                problem `measures_distances`.
            norms: the 2-norms of these rows, multiplied by those of the columns.
            rows, cols: the indices of these rows and columns in C. They select the numbers of the steps, so
                their shapes must fit those of `sums`.
            d: the elements of the further matrix D, if the epilogue reads it.
        """
        with np.errstate(all="ignore"):
            if self._problem.measures_distances:
                u, v = self._finishing.numbers[0]
                assert u is not None
                assert v is not None
                sums = (u[rows] + v[cols] - sums) / 2
            error = BIAS * self._rounding.tolerance(norms, np.zeros_like(norms), 1.0)
            if self._problem.centered:  # centers are subtracted in float64, from sums of numbers below 2^7
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
            case "gaussian":
                low, high = (np.maximum(u + v - 2 * x, 0) for x in (high, low))
                rounded = np.minimum(self._elements * (u + v), self._distance)
                low, high = _widened(low, high, 0, STEP_ERROR * DOUBLE * (u + v) + rounded)
                low, high = np.exp(-step.value * high), np.exp(-step.value * low)
                return _widened(low, high, self._exp_error, self._tiny)
            case "identical":
                return tuple(np.where((u == v) & ~np.isnan(x), 1, x) for x in found)  # type: ignore[return-value]
            case "squared":
                low, high = _sorted(low * low, high * high)
                low = np.where((found[0] < 0) & (found[1] > 0), 0, low)
                low, high, added = (1 + step.value) * low, (1 + step.value) * high, -step.value
            case "within":
                return tuple(np.where(abs(u - v) <= step.value, x, 0) for x in found)  # type: ignore[return-value]
            case _:
                raise AssertionError(f"{step} is unknown")
        low, high = _widened(low + added, high + added, STEP_ERROR * DOUBLE, STEP_ERROR * DOUBLE * abs(added))
        if step.kind == "correlation":
            low, high = np.clip(low, -1, 1), np.clip(high, -1, 1)
        return low, high


def contains(found: Interval, value: Array) -> Array:
    """Return whether each value is in its interval.

    An interval of which no end is finite, or one end is NaN, bounds nothing. So it contains every value.
    """
    low, high = found
    unknown = ~(np.isfinite(low) | np.isfinite(high)) | np.isnan(low) | np.isnan(high)
    return np.asarray(((value >= low) & (value <= high)) | unknown)


def _sorted(x: Array, y: Array) -> Interval:
    return np.minimum(x, y), np.maximum(x, y)  # both keep NaN


def _widened(low: Array, high: Array, relative: float, absolute: Any) -> Interval:
    return low - (relative * abs(low) + absolute), high + (relative * abs(high) + absolute)
