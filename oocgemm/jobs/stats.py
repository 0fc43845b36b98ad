"""Numbers of the rows or columns of operands, which passes over them find: statistics, norms and corrections.

The genotypes in a .bed file are counted without decoding them.

The product of int8 operands is corrected for their centers, which are subtracted from C by a matrix of rank
one. With the centers u of A and v of B, both of length k:

    (A - 1 u^T) (B - v 1^T)  =  A B - (A v) 1^T - 1 (u^T B - u^T v)

A B is exact. What is subtracted is computed here in float64, in one more pass over A and one over B. If the
device measures X (`oocgemm.jobs.prepare`), it computes what is subtracted too.

A run with several processes makes each pass once: the process that plans it keeps the results in `Findings`,
and sends them to the others. A process that lacks a result makes the pass itself, and finds the same bits.
"""

import hashlib
import inspect
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from oocgemm import stores
from oocgemm.backends import Backend
from oocgemm.backends.base import Correction, Swept
from oocgemm.backends.base import Numbers as LineNumbers
from oocgemm.engine.staging import pageable
from oocgemm.errors import ExecutionError, InputError
from oocgemm.integrity.passes import Oriented
from oocgemm.jobs.option_groups import Operand, Size
from oocgemm.jobs.pairs import ScaledRows, distances_in_memory
from oocgemm.jobs.steps import (
    Add,
    Coefficients,
    Combined,
    Correlation,
    Distance,
    Divide,
    Epilogue,
    Gaussian,
    Hamming,
    Jaccard,
    Kinship,
    Pearson,
    RankOne,
    Scale,
    Squared,
    SquareRoot,
    Within,
    marks_equal,
    vector_of,
)
from oocgemm.jobs.streaming import SCRATCH, Moments, entry_moments, moments, reduced
from oocgemm.planning import Budgets, GemmProblem, Op
from oocgemm.planning.elements import MAX_STEPS, ElementStep, missing_code
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import counted, parse_size
from oocgemm.stores import Array, Genotypes, Matrix, pieces
from oocgemm.stores.arrays import in_float64
from oocgemm.stores.base import failure
from oocgemm.stores.capabilities import MISSING
from oocgemm.stores.genetics import PER_BYTE
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import (
    SLAB,
    Numbers,
    StandardizedMatrix,
    chain_of,
    change_of,
    code_in,
    is_missing,
    positions,
)
from oocgemm.stores.unpacked import accepting, known_missing
from oocgemm.system import cache
from oocgemm.system.resources import available_memory
from oocgemm.values import dataclass

P = ParamSpec("P")
T = TypeVar("T")

# Results of passes over matrices. A key names the result and the matrix.
Findings = dict[str, Any]

# Names of arguments that say how a pass is made. The results do not depend on these arguments.
_MEANS = "memory", "sweep"

_kept: ContextVar[Findings | None] = ContextVar("findings", default=None)

# Bytes of the file that are counted at a time. Temporary arrays have six times as many bytes.
_SLAB = 64 << 10
# The low bit of each genotype in a word.
_LOW = np.uint64(0x5555_5555_5555_5555)

# Maximum number of lines that a message lists.
_LISTED = 5
# Number of results that the cache keeps, and the version of their format and of their arithmetic.
MAX_CACHED, VERSION = 32, 1
# The host makes passes over matrices of fewer than MIN_SWEPT bytes: opening a device would take longer. A
# device reads larger matrices in blocks of about SWEPT_BLOCK bytes.
MIN_SWEPT, SWEPT_BLOCK = 4 << 20, 16 << 20
# Inner products of rows with norms in this range neither overflow in float32 nor lose digits by underflow.
MIN_NORM, MAX_NORM = 2.0**-40, 2.0**60
# Smallest sum of squares, except 0, that loses no digits by underflow in float64.
MIN_SQUARES = 2.0**-968

logger = logging.getLogger("oocgemm")


@contextmanager
def keeping(findings: Findings) -> Iterator[None]:
    """Keep the results of passes in `findings` inside the context, and do not repeat passes found there."""
    token = _kept.set(findings)
    try:
        yield
    finally:
        _kept.reset(token)


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that makes a pass over a matrix, so that equal calls make only one pass.

    The results must not depend on the arguments in `_MEANS`. They are kept inside the context of `keeping`.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def found(*args: P.args, **options: P.kwargs) -> T:
        findings = _kept.get()
        if findings is None:
            return function(*args, **options)
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        details = [_shown(value) for name, value in bound.arguments.items() if name not in _MEANS]
        key = " ".join((function.__name__, *details))
        if key not in findings:
            findings[key] = function(*args, **options)
        result: T = deepcopy(findings[key])  # callers may change the arrays
        return result

    return found


def _shown(value: Any) -> str:
    """Return a text for the value of an argument. Different values have different texts."""
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
    if hasattr(value, "layout"):
        return f"{type(value).__name__} {value.name} {value.shape} {value.dtype} {change_of(value)}"
    if is_dataclass(value):  # the text of a long array would leave most of its elements out
        shown = (_shown(getattr(value, field.name)) for field in fields(value))
        return f"{type(value).__name__}({', '.join(shown)})"
    return str(value)


def packed_of(matrix: Matrix, axis: int, code: float | None, log1p: bool) -> Matrix | None:
    """Return the packed genotypes of a matrix if their counts are its statistics along an axis; else None."""
    fits = isinstance(matrix, Genotypes) and matrix.variant_axis != axis and code == MISSING and not log1p
    return matrix.packed() if fits and isinstance(matrix, Genotypes) else None


def genotype_counts(packed: Matrix, individuals: int, memory: int) -> Array:
    """Return how many genotypes of each variant are 0, 1, 2 and missing, an array with four columns.

    Words of 32 genotypes are counted by their bits: a high bit alone stands for 1, a low bit alone for a
    missing genotype, both for 0. So this is much faster than a pass over the elements.
    """
    variants, width = packed.shape
    found = np.zeros((variants, 4), np.int64)
    unused = width * PER_BYTE - individuals  # genotypes in the last byte of a line

    def act(rows: Range, cols: Range, raw: Array) -> Array:
        if cols[1] == width and unused:
            raw.view(np.uint8)[:, -1] &= 0xFF >> 2 * unused
        counts = _counted(raw)
        counts[:, 2] = min(cols[1] * PER_BYTE, individuals) - cols[0] * PER_BYTE - counts.sum(1)
        return counts

    for rows, _, part in reduced(packed, 1, memory, 8 * max(_SLAB, width), act):
        found[slice(*rows)] += part
    return found


def _counted(raw: Array) -> Array:
    """Return counts of genotypes in rows of bytes. The count of genotype 2, which has no bits, stays 0."""
    counts = np.zeros((len(raw), 4), np.int64)
    width = -(-raw.shape[1] // 8) * 8
    height = max(1, _SLAB // width)
    padded = np.zeros((min(height, len(raw)), width), np.uint8)
    for top in range(0, len(raw), height):
        part = slice(top, min(top + height, len(raw)))
        words = padded[: part.stop - top]
        words[:, : raw.shape[1]] = raw[part].view(np.uint8)
        low = words.view(np.uint64)
        high = low >> np.uint64(1)
        high &= _LOW
        low = low & _LOW
        ones, twos = _bits(low), _bits(high)
        low &= high
        both = _bits(low)
        counts[part, 0], counts[part, 1], counts[part, 3] = both, twos - both, ones - both
    return counts


def _bits(words: Array) -> Array:
    """Return the number of set bits in each row. The sums fit in uint32, which is faster than int64."""
    return np.asarray(np.bitwise_count(words).sum(1, dtype=np.uint32)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics per column or per row of an array. Each is an array with one number per column or row.

    Attributes:
        count: number of elements that are not missing.
        missing: number of missing elements.
        mean, variance: of the elements that are not missing, with the divisor `count`; NaN if there are none.
        min, max: extremes of these elements; NaN if there are none.
    """

    count: Array
    missing: Array
    mean: Array
    variance: Array
    min: Array
    max: Array

    @property
    def std(self) -> Array:
        """Standard deviations: the square roots of the variances."""
        return np.asarray(np.sqrt(self.variance))


def stats(
    x: Operand,
    axis: int = 0,
    *,
    missing: float | None = None,
    log1p: bool = False,
    decode: bool = True,
    host_memory: Size | None = None,
) -> Stats:
    """Compute statistics of the columns or rows of an array in one pass over it, in bounded memory.

    `Transform` takes its means and standard deviations from here. The result for files is cached, with the
    fingerprint of the files (sizes, modification times), in the folder of `oocgemm info`'s calibrations.

    Args:
        x: a two-dimensional operand as for `gemm`. Not complex.
        axis: the axis that is reduced, as in NumPy: 0 (default) for one number per column, which
            ``gram(x)`` needs, or 1 for one number per row.
        missing: code of missing elements, such as -1 or NaN, which are left out. By default what the operand
            declares: the code of missing genotypes for a .bed file, and `_FillValue` and `missing_value`.
        log1p: whether to compute statistics of log(1 + x) in place of x.
        decode: as for `gemm`.
        host_memory: upper bound on memory, in bytes or as "2GiB"; half of the available RAM by default. The
            result is not counted, 48 bytes per column or row.

    Returns:
        The `Stats`. They do not depend on the memory or on the number of threads. Sums of integers are exact
            up to 2^53. Variances are merged from those of blocks by the formula of Chan, Golub and LeVeque
            (1983), which does not cancel.

    Raises:
        InputError: the operand cannot be used.
        ExecutionError: it cannot be read.

    >>> import oocgemm
    >>> oocgemm.stats([[1.0, 2.0], [3.0, 6.0]]).mean
    array([2., 4.])
    """
    if isinstance(axis, bool) or axis not in (0, 1):
        raise InputError(f"axis = {axis!r}: pass 0 for statistics of the columns, or 1 for those of the rows")
    matrix = stores.open_matrix("X", stores.located("X", x), decode=decode)
    if missing is None and decode and isinstance(matrix, Genotypes):
        missing = MISSING
    if missing is None:
        matrix, missing = known_missing(matrix)
    transform = Transform(missing=missing, log1p=log1p)
    transform.result("X", matrix.dtype)  # refuses complex operands
    matrix, op = stores.by_rows(accepting(matrix, transform.code("X", matrix.dtype)), Op.N)
    memory = available_memory() // 2 if host_memory is None else parse_size(host_memory)
    return stats_of(matrix, axis ^ op.swaps, transform, memory)


# A function that makes a pass over a matrix on a device, along an axis: `swept` with its first two arguments.
Sweep = Callable[[Matrix, int, float | None, bool], Stats | None]


@once
def stats_of(
    matrix: Matrix,
    axis: int,
    transform: Transform,
    memory: int,
    *,
    extremes: bool = True,
    sweep: Sweep | None = None,
) -> Stats:
    """Return the statistics of an open matrix along `axis`, from the cache or by a pass in `memory` bytes.

    Only the code of missing elements and `log1p` of `transform` matter. Without `extremes`, `min` and `max`
    are found only if the statistics can be cached. With `sweep`, a device makes the pass if it can.
    """
    code = code_in(matrix, transform)
    place = _place(matrix, axis, code, transform.log1p)
    found = None if place is None else _load(place, matrix.shape[1 - axis])
    if found is None:
        logger.info("reading %s for statistics of its %s", matrix.name, ("columns", "rows")[axis])
        wanted = extremes or place is not None
        listed = entry_moments(matrix, axis, code, transform.log1p, memory)
        found = None if listed is None else _stats(listed)
        found = found or (None if sweep is None else sweep(matrix, axis, code, transform.log1p))
        found = found or _computed(matrix, axis, code, transform.log1p, memory, extremes=wanted)
        if place is not None:
            _save(place, found)
    return found


def _computed(
    matrix: Matrix, axis: int, code: float | None, log1p: bool, memory: int, *, extremes: bool
) -> Stats:
    packed = packed_of(matrix, axis, code, log1p)
    if packed is not None:
        return _of_genotypes(genotype_counts(packed, matrix.shape[axis], memory))
    found = Moments(matrix.shape[1 - axis])

    def act(rows: Range, cols: Range, raw: Array) -> Moments:
        return moments(raw, axis, code, log1p, extremes=extremes)

    for rows, cols, part in reduced(matrix, axis, memory, SCRATCH, act):
        found.add(slice(*(cols if axis == 0 else rows)), part)
    return _stats(found)


def _stats(found: Moments) -> Stats:
    return Stats(found.count, found.missing, *found.finished())


def swept(
    engine: Backend, budgets: Budgets, matrix: Matrix, axis: int, code: float | None, log1p: bool
) -> Stats | None:
    """Return the statistics of a matrix from a pass on a device; None if the host must make the pass.

    The blocks that the device reads, and so the bits of the result, depend on the matrix alone.
    """
    chain = chain_of(matrix)
    source = matrix if chain is None else chain.source
    size = source.shape[0] * source.shape[1] * source.dtype.itemsize
    counts = packed_of(matrix, axis, code, log1p) is not None
    if size < MIN_SWEPT or counts or source.dtype.kind == "c":
        return None
    steps, numbers = tuple[ElementStep, ...](), tuple[Numbers, ...]()
    if chain is not None:
        assert chain.numbers is not None, "the matrix was opened only to plan"
        steps, numbers = chain.steps, chain.numbers
    if log1p:
        steps, numbers = (*steps, ElementStep("log1p")), (*numbers, None)
    if len(steps) > MAX_STEPS:
        return None

    def transfer(matrix: Matrix, rows: Range, cols: Range, part: Array) -> None:
        try:
            matrix.read(rows, cols, part)
        except Exception as error:  # a store may raise any exception
            raise ExecutionError(failure("reading", matrix, rows, cols, error)) from error

    unit, batch = source.layout.read_chunk, SWEPT_BLOCK // source.dtype.itemsize
    unit = (1, min(source.shape[1], batch)) if unit == (1, 1) else unit
    cuts = tuple(pieces((0, source.shape[0]), (0, source.shape[1]), unit, batch))
    block = partial(pageable, source, transfer=transfer, uploading=True)
    given = Swept(source.shape, source.dtype, cuts, block, steps, numbers, code)
    found = engine.moments(given, axis, budgets.host, budgets.device)
    if found is None:
        return None
    count, mean, squares, low, high = found
    none = count == 0
    with np.errstate(invalid="ignore"):  # 0 / 0 where all elements are missing
        variance = np.where((low == high) & np.isfinite(low), 0.0, squares / count)
    mean, low, high = (np.where(none, np.nan, x) for x in (mean, low, high))
    known = count.astype(np.int64)
    return Stats(known, matrix.shape[axis] - known, mean, variance, low, high)


def _of_genotypes(counts: Array) -> Stats:
    """Return the statistics of variants, given the counts of genotypes 0, 1, 2 and missing."""
    each, known = counts[:, :3], counts[:, :3].sum(1)
    total, squares = each @ [0, 1, 2], each @ [0, 1, 4]
    with np.errstate(invalid="ignore"):  # 0 / 0 where no genotype is known
        mean, variance = total / known, (known * squares - total * total) / np.square(known, dtype=float)
    none, some = known == 0, each > 0
    low, high = some.argmax(1).astype(float), 2.0 - some[:, ::-1].argmax(1)
    low[none] = high[none] = np.nan
    return Stats(known, counts[:, 3], mean, variance, low, high)


def _place(matrix: Matrix, axis: int, code: float | None, log1p: bool) -> Path | None:
    """Return the path of the cached statistics; None if changes of the matrix could not be detected."""
    # A view that changes elements has the fingerprint of its matrix, and other statistics.
    known = None if change_of(matrix) else matrix.fingerprint()
    if known is None or not known.get("content"):
        return None
    key = json.dumps([VERSION, known, axis, repr(code), log1p], sort_keys=True, default=str)
    with suppress(InputError):  # without a home directory there is no cache
        return cache.folder() / "stats" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
    return None


def _load(place: Path, extent: int) -> Stats | None:
    with suppress(OSError, ValueError, KeyError), np.load(place, allow_pickle=False) as file:
        found = Stats(**{field.name: file[field.name] for field in fields(Stats)})
        if all(getattr(found, field.name).shape == (extent,) for field in fields(Stats)):
            os.utime(place)
            return found
    return None


def _save(place: Path, found: Stats) -> None:
    """Save statistics. If the cache has too many files, remove the oldest files."""
    file, named = io.BytesIO(), {field.name: getattr(found, field.name) for field in fields(Stats)}
    np.savez(file, **named)
    with suppress(OSError):  # without the cache, later runs make a pass again
        cache.write_whole(place, file.getvalue())
        kept: list[Any] = sorted(place.parent.glob("*.npz"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-MAX_CACHED]:
            path.unlink(missing_ok=True)


def inverse_norms(matrix: Matrix, op: Op, memory: int, remedy: str, *, right: str = "") -> Array:
    """Return 1 / norm of each row of op(matrix), or of each column if it is the right operand.

    For the right operand, `right` is what the caller calls these columns, "row" or "column".

    The result is 0 for a zero row, so that its cosines are 0, as in scikit-learn. Squares are added up in
    float64, in an order that depends on the matrix alone. Raises `InputError` if a row has elements that are
    Inf or NaN, or so small that their squares underflow. `remedy` is the end of the message.
    """
    line, axis = right or "row", int(op.swaps == bool(right))
    sizes = squares(matrix, axis, memory)
    if (lines := np.flatnonzero(~np.isfinite(sizes))).size:
        raise InputError(
            f"{line} {lines[0]} of {matrix.name} has elements that are Inf or NaN, so that its cosine with "
            f"other {line}s is not defined (one of {lines.size} such {line}s): leave them out, or {remedy}"
        )
    small = sizes < MIN_SQUARES
    if matrix.dtype.itemsize == 8 and small.any():
        small &= largest(matrix, axis, memory) > 0
        if (lines := np.flatnonzero(small)).size:
            raise InputError(
                f"{line} {lines[0]} of {matrix.name} has elements that are too small to be squared in "
                f"float64 (one of {lines.size} such {line}s): multiply {matrix.name} by 2.0**400, or {remedy}"
            )
    with np.errstate(divide="ignore"):
        return np.where(sizes > 0, 1 / np.sqrt(sizes), 0.0)


def check_range(problem: GemmProblem, rows: Array, cols: Array) -> None:
    """Raise `InputError` if inner products may leave the range of the dtype in which they are summed.

    `rows` and `cols` are the inverse norms of the rows of op(A) and the columns of op(B).
    """
    name = problem.acc_dtype
    found = [np.sort(1 / x[x > 0]) for x in (rows, cols)]
    if not name.startswith("float") or not all(x.size for x in found):
        return
    limits, (a, b) = np.finfo(name), found
    remedy = "multiply these rows and columns by powers of two, which does not change cosines"
    for end, leaves, what in (
        (0, a[0] * b[0] < limits.tiny, "underflows"),
        (-1, a[-1] / limits.max * b[-1] > 1, "overflows"),
    ):
        if leaves:
            raise InputError(
                f"a row of A has the norm {a[end]:.3g} and a column of B the norm {b[end]:.3g}, whose "
                f"product {what} {name}: {remedy}"
                + (", or pass A and B in float64" if name == "float32" else "")
            )


def factors(matrix: Matrix) -> Array:
    """Return a number for each line of a `standardized` matrix: NaN if all its elements are equal, else 1."""
    chain = chain_of(matrix)
    inverse = None if chain is None else chain.number("scale")
    assert inverse is not None, "lines are not scaled"
    return np.where(inverse == 0, np.nan, 1.0)


def cosine_scales(problem: GemmProblem, e: Matrix, memory: int) -> tuple[Matrix, Array]:
    """Return E and 1 / norm of each of its rows, by which rows and columns of E E^T are multiplied.

    If products of rows could leave the range of float32, each row is multiplied by a power of 2 when it is
    read, which rounds nothing.
    """
    scales = inverse_norms(e, problem.trans_a, memory, "pass metric='dot' (--metric dot)")
    inside = (scales == 0) | ((scales > 1 / MAX_NORM) & (scales < 1 / MIN_NORM))
    if problem.acc_dtype != "float32" or inside.all():
        return e, scales
    scales, exponents = np.frexp(scales)
    axis, numbers = int(problem.trans_a.swaps), (np.ldexp(1.0, exponents),)
    return StandardizedMatrix(e, axis, scaled=True, centered=False, numbers=numbers, dtype=e.dtype), scales


def identities(problem: GemmProblem, a: Matrix, b: Matrix, memory: int) -> tuple[Array, Array]:
    """Return a number for each row of op(A) and each column of op(B). Equal vectors have equal numbers.

    The numbers stand for hashes of 64 bits. So two different vectors have the same number with a probability
    of 2^-64.
    """
    rows = _hashes(a, int(not problem.trans_a.swaps), memory)
    cols = rows if b is a else _hashes(b, int(problem.trans_b.swaps), memory)
    numbers = np.unique(np.concatenate((rows, cols)), return_inverse=True)[1].astype(np.float64)
    return numbers[: len(rows)], numbers[len(rows) :]


def _summed(
    matrix: Matrix,
    axis: int,
    memory: int,
    of_slab: Callable[[Range, Range, Array], Array],
    dtype: type = np.float64,
    scratch: int = SLAB * 10,
) -> Array:
    """Make a pass over a matrix, and return the sums of the results of `of_slab` along an axis.

    `of_slab` is called with the rows and columns of a slab, and its elements in float64, which it may change.
    It must not use a BLAS, whose result may depend on the number of threads. It needs `scratch`
    bytes of memory.
    """

    def of_block(rows: Range, cols: Range, raw: Array) -> Array:
        found: Array = np.zeros(raw.shape[1 - axis], dtype)
        height = max(1, SLAB // raw.shape[1])
        with np.errstate(all="ignore"):
            for top in range(0, len(raw), height):
                part = slice(top, min(top + height, len(raw)))
                slab = rows[0] + part.start, rows[0] + part.stop
                sums = of_slab(slab, cols, in_float64(raw[part]))
                if axis:
                    found[part] = sums
                else:
                    found += sums
        return found

    total: Array = np.zeros(matrix.shape[1 - axis], dtype)
    with np.errstate(all="ignore"):
        for rows, cols, part in reduced(matrix, axis, memory, scratch, of_block):
            total[slice(*(rows if axis else cols))] += part
    return total


@once
def squares(matrix: Matrix, axis: int, memory: int) -> Array:
    """Return the sums of squares along an axis of a matrix, by a pass over it."""
    logger.info("reading %s for the norms of its %s", matrix.name, ("columns", "rows")[axis])

    def of_slab(rows: Range, cols: Range, x: Array) -> Array:
        x *= x
        return np.asarray(x.sum(axis))

    return _summed(matrix, axis, memory, of_slab, scratch=SLAB * 8)


@once
def moved_squares(matrix: Matrix, axis: int, memory: int) -> Array:
    """Return what `squares` does, for distances that are ranked: of a matrix whose lines are centered.

    If its center has the dtype of elements in memory, compiled code finds the sums, in another order.
    """
    chain = chain_of(matrix)
    if chain is not None and [step.kind for step in chain.own_steps] == ["center"]:
        center = np.asarray(chain.number("center"))
        row = center.astype(chain.matrix.dtype)[None]
        if np.array_equal(row[0], center):
            x, y = Oriented(chain.matrix, axis == 0), Oriented(stores.open_matrix("the center", row))
            lines = np.arange(matrix.shape[1 - axis])
            found = distances_in_memory(
                ScaledRows(x), ScaledRows(y), lines, np.zeros((len(lines), 1), np.int64)
            )
            if found is not None:
                return found.ravel()
    return squares(matrix, axis, memory)


@once
def _hashes(matrix: Matrix, axis: int, memory: int) -> Array:
    """Return hashes of the rows or columns along an axis of a matrix, by a pass over it.

    A hash is the sum of the hashes of the elements with their indices, by the finalizer of SplitMix64 (Steele
    et al., 2014). So it does not depend on how blocks are cut.
    """

    def of_slab(rows: Range, cols: Range, x: Array) -> Array:
        x = np.ascontiguousarray(x)
        x += 0.0  # makes -0 equal to 0
        index = np.arange(*(cols if axis else rows), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = x.view(np.uint64)
        bits += index if axis else index[:, None]
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        return np.asarray(bits.sum(axis))

    return _summed(matrix, axis, memory, of_slab, np.uint64, SLAB * 32)


@once
def largest(matrix: Matrix, axis: int, memory: int) -> Array:
    """Return the largest magnitudes along an axis of a matrix, by a pass; NaN where there is a NaN."""
    found = np.zeros(matrix.shape[1 - axis])

    def act(rows: Range, cols: Range, raw: Array) -> Array:
        return np.asarray(np.maximum(raw.max(axis), -raw.min(axis)), np.float64)

    for rows, cols, part in reduced(matrix, axis, memory, SLAB * 8, act):
        at = slice(*(rows if axis else cols))
        np.maximum(found[at], part, out=found[at])
    return found


def correction(problem: GemmProblem, a: Matrix, b: Matrix, memory: int) -> Correction:
    """Return (rows, cols) if C is corrected: rows[i] + cols[j] is subtracted from it; otherwise None.

    Also return None if the device finds these numbers. Passes over A and B take up to `memory` bytes.
    """
    if not problem.is_corrected or not problem.depth or problem.finds_numbers:
        return None
    u, v = _centers(a), _centers(b)
    rows, cols = np.zeros(problem.m), np.zeros(problem.n)
    if v is not None:
        rows = _product(a, int(not problem.trans_a.swaps), v, memory)
    if u is not None:
        cols = rows.copy() if problem.b.shares else _product(b, int(problem.trans_b.swaps), u, memory)
        if v is not None:
            cols -= np.einsum("i,i", u, v)
    alpha = problem.applied_alpha.real
    return alpha * rows, alpha * cols


def _centers(matrix: Matrix) -> Array | None:
    chain = chain_of(matrix)
    return None if chain is None else chain.number("correct")


@once
def _product(matrix: Matrix, k_axis: int, vector: Array, memory: int) -> Array:
    """Return inner products of a vector with rows (`k_axis` 1) or columns (0). A missing element is 0."""
    chain = chain_of(matrix)
    stored, code = (matrix, None) if chain is None else (chain.source, missing_code(chain.steps))

    def of_slab(rows: Range, cols: Range, x: Array) -> Array:
        if code is not None:
            x[positions(is_missing(x, code))] = 0
        along = ("ij,j->i", cols) if k_axis else ("ij,i->j", rows)
        return np.asarray(np.einsum(along[0], x, vector[slice(*along[1])]))

    return _summed(stored, k_axis, memory, of_slab)


def equal_lines(matrix: Matrix, axis: int, lines: Array) -> str:
    """Return a text that counts lines of equal elements, and lists the first ones."""
    numbers = np.flatnonzero(lines)
    which = ", ".join(map(str, numbers[:_LISTED])) + (", ..." if len(numbers) > _LISTED else "")
    verb = "has" if len(numbers) == 1 else "have"
    found = f"{len(numbers)} of {counted(len(lines), ('row', 'column')[axis])} of {matrix.name}"
    return f"{found} {verb} equal elements ({which})"


def undefined(matrix: Matrix, axis: int, lines: Array) -> InputError:
    """Return the error for lines of equal elements, which have no correlations."""
    return InputError(
        f"{equal_lines(matrix, axis, lines)}, so that their correlations are not defined: pass "
        "constant='drop' (--constant drop) to leave them out, or constant='nan' for NaN"
    )


def _means_and_factors(
    problem: GemmProblem, a: Matrix, memory: int, sweep: Sweep | None
) -> tuple[Array, Array]:
    """Return the mean of each row of op(A), and 1 / the norm of its deviations from it.

    Raises `InputError` if a row has equal elements.
    """
    axis, chain = int(problem.trans_a.swaps), chain_of(a)
    a = a if chain is None or chain.steps else chain.source
    found = stats_of(a, 1 - axis, Transform(), memory, sweep=sweep)
    if (lines := found.variance == 0).any():
        raise undefined(a, axis, lines)
    return found.mean, 1 / np.sqrt(found.count * found.variance)


def epilogue_numbers(
    problem: GemmProblem, given: Epilogue, a: Matrix, b: Matrix, memory: int, sweep: Sweep | None
) -> tuple[LineNumbers, ...]:
    """Return the numbers of rows and columns that each step needs.

    Norms take passes over the operands, in `memory` bytes, and means with `sweep` on a device.
    """
    found = list[LineNumbers]()
    for step in given:
        match step:
            case Scale() | RankOne():
                found.append(
                    (vector_of(step.rows, problem.m, "rows"), vector_of(step.cols, problem.n, "cols"))
                )
            case Add() | Divide() | SquareRoot() | Squared() | Combined():
                found.append((None, None))
            case Within():
                found.append((step.rows, step.cols))
            case Kinship():
                found.append((step.heterozygous, step.heterozygous))
            case Coefficients():
                found.append((factors(a), factors(b)))
            case Pearson():
                found += [(each, each) for each in _means_and_factors(problem, a, memory, sweep)]
            case Correlation():
                rows = cols = inverse_norms(a, problem.trans_a, memory, step.instead)
                if b is not a:
                    cols = inverse_norms(b, problem.trans_b, memory, step.instead, right=step.right)
                check_range(problem, rows, cols)
                found.append((rows, cols))
            case Gaussian() | Distance() | Jaccard() | Hamming():
                ranks = isinstance(step, Distance) and step.factor < 0
                norms = moved_squares if ranks else squares
                rows = norms(a, int(not problem.trans_a.swaps), memory)
                cols = rows if b is a else norms(b, int(problem.trans_b.swaps), memory)
                found.append((rows, cols))
                if marks_equal(step):
                    found.append(identities(problem, a, b, memory))
    return tuple(found)
