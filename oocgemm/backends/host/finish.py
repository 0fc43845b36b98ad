"""Finishes strips of C on the host, when their products have been added up.

- `finish` applies alpha and beta, and casts to C's dtype.
- `run_chain` applies the epilogue.
- A `Keeper` updates what is kept of the rows of C, one class per sink (`oocgemm.planning.sinks`).
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import numpy as np

from oocgemm.backends.base import Array, Finishing, Numbers, too_large
from oocgemm.backends.host.blas import gemm, threads
from oocgemm.backends.host.selection import in_dtype, select
from oocgemm.planning import GemmProblem, Op, Operation
from oocgemm.planning.cost.footprint import FINISH_ARRAYS, FINISH_PIECE
from oocgemm.planning.device_memory import NONE
from oocgemm.planning.elements import ElementStep
from oocgemm.planning.emulation import EXACT_LIMIT
from oocgemm.planning.schedule.operations import mirrored_columns
from oocgemm.planning.sinks import Applied, Largest, Reduced, Sink, Step
from oocgemm.planning.tiling import length
from oocgemm.stores.transformed import apply
from oocgemm.system.installed import compiled


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


# Steps of compiled code, by their numbers in kernels/host/host.h.
COMPILED = ("scale", "rank_one", "correlation", "squared", "within")


class _CompiledStep(ctypes.Structure):
    """struct ooc_step of kernels/host/host.h."""

    _fields_ = (
        ("kind", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("rows", "cols")),
        ("value", ctypes.c_double),
    )


class _CompiledChain(ctypes.Structure):
    """struct ooc_chain of kernels/host/host.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "result")),
        *((name, ctypes.c_size_t) for name in ("sums_double", "result_double", "height", "width")),
        ("alpha", ctypes.c_double),
        ("steps", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
    )


def run_compiled(
    steps: Sequence[Step], numbers: Sequence[Numbers], sums: Array, alpha: float, result: Array
) -> bool:
    """Apply a chain by compiled code, with the same bits. Return False if NumPy must do it (`run_chain`)."""
    library, arrays = compiled(), (sums, result)
    known = all(x.dtype in (np.float32, np.float64) and x.flags.c_contiguous for x in arrays)
    if library is None or not known or any(step.kind not in COMPILED for step in steps):
        return False
    given = [[None if x is None else np.ascontiguousarray(x, np.float64) for x in pair] for pair in numbers]
    addresses = ((None if x is None else x.ctypes.data for x in pair) for pair in given)
    every = (
        _CompiledStep(COMPILED.index(step.kind), *pair, step.value)
        for step, pair in zip(steps, addresses, strict=True)
    )
    chain = (_CompiledStep * len(steps))(*every)
    places = (x.ctypes.data for x in arrays)
    wide = (x.dtype == np.float64 for x in arrays)
    found = _CompiledChain(*places, *wide, *sums.shape, alpha, ctypes.addressof(chain), len(steps))
    library.ooc_run_chain(ctypes.byref(found), ctypes.c_size_t(threads()))
    return True


# Elements that are changed at once. Their temporary arrays fit into a CPU cache.
PIECE = 1 << 15


def expand(steps: Sequence[ElementStep], panel: Array, result: Array) -> None:
    """Write a panel after steps without numbers to `result`."""
    numbers = [None] * len(steps)
    rows, cols = panel.shape
    width = max(1, min(cols, PIECE))
    for top, left in product(range(0, rows, height := max(1, PIECE // width)), range(0, cols, width)):
        here = slice(top, top + height), slice(left, left + width)
        result[here] = apply(steps, numbers, panel[here].astype(np.float64))


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
        steps: the steps of the chain (`oocgemm.planning.sinks`).
        numbers: per step, its numbers per row and per column of the strip. None stands for 1.
        sums: a strip of products. With several terms, an array of rows x terms x columns, whose sums the
            first step combines.
        scalars: alpha and beta.
        result: array of rows x columns, which may be `sums`, or begin where they begin.
        reads: whether `result` contains the further matrix D or the old C.
    """
    alpha, beta = scalars
    if not reads and run_compiled(steps, numbers, sums, alpha, result):
        return
    height = max(1, PIECE // max(1, prod(sums.shape[1:])))
    for top in range(0, len(sums), height):
        here = slice(top, top + height)
        with np.errstate(all="ignore"):
            c = sums[here].astype(np.float64)
            if alpha != 1:
                c *= alpha
            combines = c.ndim == 3
            if combines:
                c = _COMBINED[steps[0].kind](steps[0].value, *c.swapaxes(0, 1))
            d = result[here].astype(np.float64) if reads else c
            if beta:
                c += beta * d
            for step, (rows, cols) in zip(steps[combines:], numbers[combines:], strict=True):
                u = 1.0 if rows is None else rows[here, None]
                c = _changed(step, c, u, 1.0 if cols is None else cols, d, sums.dtype)
            result[here] = c


def _covariances(value: float, n: Array, sx: Array, sy: Array, sxy: Array) -> Array:
    found: Array = (sxy - sx * sy / n) / (n - value)
    found[n <= value] = np.nan
    return found


def _correlations(value: float, n: Array, sx: Array, sy: Array, sxy: Array, sxx: Array, syy: Array) -> Array:
    of_x, of_y = n * sxx - sx * sx, n * syy - sy * sy
    found: Array = np.clip((n * sxy - sx * sy) / (np.sqrt(of_x) * np.sqrt(of_y)), -1, 1)
    found[~((of_x > value * n * sxx) & (of_y > value * n * syy))] = np.nan
    return found


def _kinships(value: float, n: Array, of_x: Array, of_y: Array, xy: Array) -> Array:
    found: Array = 0.5 - (2 * n - of_x - of_y - 2 * xy) / (4 * np.minimum(of_x, of_y))
    return found


# What the first step makes of the sums of several terms (`oocgemm.planning.sinks.COMBINING`).
_COMBINED: dict[str, Callable[..., Array]] = {
    "pairwise_covariance": _covariances,
    "pairwise_correlation": _correlations,
    "pairwise_kinship": _kinships,
    "shared_alleles": lambda value, n, both, xy: 0.5 + 0.5 * (both + xy) / n,
    "ibs0": lambda value, same, xy: 0.5 * (same - xy),
    "ibs1": lambda value, n, both, same: n - both - same,
    "ibs2": lambda value, both, same, xy: both + 0.5 * (same + xy),
}


def _changed(
    step: Step, c: Array, u: Array | float, v: Array | float, d: Array, summed: np.dtype[np.generic]
) -> Array:
    """Return the elements c after a step. The step may change c in place."""
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
            c = _apart(c, u, v)
            np.maximum(c, 0, out=c)  # keeps NaN
            c *= -step.value
            # The exponential is that of the dtype of the sums, as on a GPU.
            c = np.exp(c.astype(np.float32 if summed == np.float32 else np.float64))
            c = c.astype(np.float64, copy=False)
        case "distance":
            c = _apart(c, u, v)
            np.maximum(c, 0, out=c)  # keeps NaN
            if step.value != 1:
                c *= step.value
        case "jaccard":
            either = u + v - c
            c = either - c
            c /= np.where(either == 0, 1, either)
        case "hamming":
            c = _apart(c, u, v)
            c /= step.value
        case "root":
            np.sqrt(c, out=c)
        case "identical":
            same = np.equal(u, v)
            if same.any():
                c[same & ~np.isnan(c)] = step.value
        case "squared":
            c *= c
            c -= step.value * (1 - c)
        case "kinship":
            c = 0.5 - (2 * step.value - u - v - 2 * c) / (4 * np.minimum(u, v))
        case "within":
            np.copyto(c, np.nan if step.value else 0, where=~np.asarray(u <= v))
        case _:
            raise AssertionError(f"{step} is unknown")
    return c


def _apart(c: Array, u: Array | float, v: Array | float) -> Array:
    """Return u + v - 2 c, in place of c."""
    c *= -2
    c += u
    c += v
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


class Keeper(ABC):
    """Updates the elements that are kept for the rows of C.

    Args of the constructor:
        problem: the product.
        rows: what is kept, `Sink.per_row` elements for each row of C.
        finishing: the numbers that a Finish uses.
        factor: the matrix V, if the sink has one.
    """

    def __init__(self, problem: GemmProblem, rows: Array, finishing: Finishing, factor: Array | None) -> None:
        self._problem, self._rows, self._finishing, self._factor = problem, rows, finishing, factor

    @abstractmethod
    def keep(self, op: Operation, strip: Array) -> None:
        """Add a strip of C, which is in the accumulator's dtype."""


class _Largest(Keeper):
    def __init__(self, problem: GemmProblem, rows: Array, finishing: Finishing, factor: Array | None) -> None:
        super().__init__(problem, rows, finishing, factor)
        rows.view(np.uint8)[...] = NONE
        self._factors = in_dtype(finishing.factors(problem.sink), rows.dtype["score"])

    def keep(self, op: Operation, strip: Array) -> None:
        """Update the elements of the rows of a strip, and of its columns that are mirrored."""
        sink = self._problem.sink
        assert isinstance(sink, Largest)
        cols = mirrored_columns(op.m, op.n) if self._problem.cover.halves else (0, 0)
        for (m, n), block in (((op.m, op.n), strip), ((cols, op.m), strip[:, : length(cols)].T)):
            if length(m):
                at = m[0], n[0]
                select(self._rows[slice(*m)], block, self._factors, at, sink.excludes_self)


class _Reduced(Keeper):
    def keep(self, op: Operation, strip: Array) -> None:
        sink = self._problem.sink
        assert isinstance(sink, Reduced)
        reduce_rows(sink.reduction, strip, self._rows[slice(*op.m), 0], begins=op.first)


class _Applied(Keeper):
    def keep(self, op: Operation, strip: Array) -> None:
        assert self._factor is not None
        beta = 0.0 if op.first else 1.0
        gemm(Op.N, Op.N, 1.0, strip, self._factor[slice(*op.n)], beta, self._rows[slice(*op.m)])


KEEPERS: dict[type[Sink], type[Keeper]] = {Largest: _Largest, Reduced: _Reduced, Applied: _Applied}
