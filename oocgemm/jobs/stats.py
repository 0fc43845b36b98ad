"""Statistics of the rows or columns of an array, in one pass over it.

The genotypes in a .bed file are counted without decoding them.
"""

import hashlib
import io
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.backends import Backend
from oocgemm.backends.base import Swept
from oocgemm.engine.host_blocks import pageable
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs.findings import once
from oocgemm.jobs.options import Operand, Size
from oocgemm.jobs.streaming import SCRATCH, Moments, moments, reduced
from oocgemm.planning import Budgets, Op
from oocgemm.planning.elements import ElementStep
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import parse_size
from oocgemm.stores import Array, Genotypes, Matrix, pieces
from oocgemm.stores.base import failure
from oocgemm.stores.capabilities import MISSING
from oocgemm.stores.declared import accepting
from oocgemm.stores.element_forms import Numbers
from oocgemm.stores.genetics import PER_BYTE
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import chain_of, change_of
from oocgemm.system import cache
from oocgemm.system.resources import available_memory

# Bytes of the file that are counted at a time. Temporary arrays have six times as many bytes.
_SLAB = 64 << 10
# The low bit of each genotype in a word.
_LOW = np.uint64(0x5555_5555_5555_5555)

logger = logging.getLogger("oocgemm")

# Number of results that the cache keeps, and the version of their format and of their arithmetic.
MAX_CACHED, VERSION = 32, 1
# Smaller matrices, in bytes, are read on the host: to open a device takes longer. Blocks of others have about
# this many bytes.
MIN_SWEPT, SWEPT_BLOCK = 4 << 20, 16 << 20


def genotype_counts(matrix: Genotypes, memory: int) -> Array:
    """Return how many genotypes of each variant are 0, 1, 2 and missing, an array with four columns.

    Words of 32 genotypes are counted by their bits: a high bit alone stands for 1, a low bit alone for a
    missing genotype, both for 0. So this is much faster than a pass over the elements.

    Args:
        matrix: the genotypes.
        memory: upper bound in bytes for the pass, unless one thread needs more.

    Raises:
        ExecutionError: the file cannot be read.
    """
    packed = matrix.packed()
    variants, width = packed.shape
    individuals = matrix.shape[1 - matrix.variant_axis]
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
    """Count genotypes in rows of bytes. The count of genotype 2, which has no bits, is left at 0."""
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
    """Count the bits in each row. A block has so few that uint32 holds them, and it is fast."""
    return np.asarray(np.bitwise_count(words).sum(1, dtype=np.uint32)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics per column or per row of an array, each an array with one number for each of them.

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
        x: a two-dimensional operand as for `gemm`; also int32 or int64. Not complex.
        axis: the axis that is reduced, as in NumPy: 0 (default) for one number per column, which
            ``gram(x)`` needs, or 1 for one number per row.
        missing: code of missing elements, such as -1 or NaN, which are left out. By default that of missing
            genotypes for a .bed file, and none for other operands.
        log1p: of log(1 + x) in place of x.
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
    transform = Transform(missing=missing, log1p=log1p)
    transform.result("X", matrix.dtype)  # refuses complex operands
    matrix, op = stores.by_rows(accepting(matrix, transform.code("X", matrix.dtype)), Op.N)
    memory = available_memory() // 2 if host_memory is None else parse_size(host_memory)
    return stats_of(matrix, axis ^ op.swaps, transform, memory)


# A pass over a matrix on a device, which reduces an axis: `swept` with its first arguments.
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

    Of `transform`, only the code of missing elements and `log1p` matter. Without `extremes`, the caller does
    not use `min` and `max`, which are then not found unless the statistics are cached. With `sweep`, the pass
    is one on a device, if it can be.
    """
    code = transform.code(matrix.name, matrix.dtype)
    place = _place(matrix, axis, code, transform.log1p)
    found = None if place is None else _load(place, matrix.shape[1 - axis])
    if found is None:
        logger.info("reading %s for statistics of its %s", matrix.name, ("columns", "rows")[axis])
        wanted = extremes or place is not None
        found = None if sweep is None else sweep(matrix, axis, code, transform.log1p)
        found = found or _computed(matrix, axis, code, transform.log1p, memory, extremes=wanted)
        if place is not None:
            _save(place, found)
    return found


def _computed(
    matrix: Matrix, axis: int, code: float | None, log1p: bool, memory: int, *, extremes: bool
) -> Stats:
    if isinstance(matrix, Genotypes) and matrix.variant_axis != axis and code == MISSING and not log1p:
        return _of_genotypes(genotype_counts(matrix, memory))
    found = Moments(matrix.shape[1 - axis])

    def act(rows: Range, cols: Range, raw: Array) -> Moments:
        return moments(raw, axis, code, log1p, extremes=extremes)

    for rows, cols, part in reduced(matrix, axis, memory, SCRATCH, act):
        found.add(slice(*(cols if axis == 0 else rows)), part)
    return Stats(found.count, found.missing, *found.finished())


def swept(
    engine: Backend, budgets: Budgets, matrix: Matrix, axis: int, code: float | None, log1p: bool
) -> Stats | None:
    """Return statistics that the device of a backend finds; None if the host shall find them.

    The blocks that the device reads, and so the bits of the result, depend on the matrix alone.

    Raises `ExecutionError` if a block cannot be read.
    """
    chain = chain_of(matrix)
    source = matrix if chain is None else chain.source
    size = source.shape[0] * source.shape[1] * source.dtype.itemsize
    counts = isinstance(matrix, Genotypes) and matrix.variant_axis != axis and code == MISSING and not log1p
    if size < MIN_SWEPT or counts or source.dtype.kind == "c":
        return None
    steps, numbers = tuple[ElementStep, ...](), tuple[Numbers, ...]()
    if chain is not None:
        assert chain.numbers is not None, "the matrix was opened only to plan"
        steps, numbers = chain.steps, chain.numbers
    if log1p:
        steps, numbers = (*steps, ElementStep("log1p")), (*numbers, None)

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
    """Return the statistics of variants from their numbers of genotypes 0, 1, 2 and missing ones."""
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
    """Save statistics, and remove the oldest ones of other arrays if there are too many."""
    file, named = io.BytesIO(), {field.name: getattr(found, field.name) for field in fields(Stats)}
    np.savez(file, **named)
    with suppress(OSError):  # without the cache, later runs make a pass again
        cache.write_whole(place, file.getvalue())
        kept: list[Any] = sorted(place.parent.glob("*.npz"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-MAX_CACHED]:
            path.unlink(missing_ok=True)
