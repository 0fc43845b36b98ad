"""Read a stored matrix once, and compute the sums of Freivalds' check.

Each thread reads a piece (whole chunks of the store, or some rows of them). It passes the piece to a callback
in parts, converted to double precision.

`Sums` and `Rows` store op(B) y and op(A) (op(B) y), for a vector y of random signs, and norms that bound
their rounding errors. `oocgemm.integrity.freivalds` compares them with C y.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import field, replace
from itertools import pairwise

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.backends.checksums import VECTORS
from oocgemm.integrity.rounding import MAX_SQUARES, MIN_SQUARES, ONE_THREAD, norms, wide_dtype
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import format_size
from oocgemm.stores import Matrix, pieces
from oocgemm.stores.base import Retries
from oocgemm.system.resources import allocate
from oocgemm.values import dataclass

# Default number of elements that a thread reads at a time, and passes to one call of the callback of
# `Passes.each`. With fewer, the calls would be so short that threads mostly wait for the GIL.
PIECE = 1 << 18
# Limits on the number of columns of a part in `Passes.each`. A part with at most this many columns and
# MIN_ROWS rows is so small that the BLAS multiplies it in one thread. `Passes.each` takes a number between
# MIN_WIDTH and MAX_WIDTH. With `cuts`, parts with few rows may have up to MAX_CUT_WIDTH columns: otherwise
# calls are too short.
MIN_WIDTH, MAX_WIDTH, MAX_CUT_WIDTH = 1 << 6, 1 << 10, 1 << 13
MIN_ROWS = 8

# The callback of `Passes.each`. Its arguments are the rows, the columns and the elements of one part of a
# matrix, and the elements of the same part of a second matrix (None if there is none).
Act = Callable[[Range, Range, Array, Array | None], None]


@dataclass(frozen=True)
class Oriented:
    """A stored matrix that is read as it is, or transposed (`swapped`), or conjugated, or both."""

    matrix: Matrix
    swapped: bool = False
    conjugate: bool = False
    retries: Retries = field(default_factory=Retries, compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.matrix.shape
        return (cols, rows) if self.swapped else (rows, cols)

    @property
    def chunk(self) -> tuple[int, int]:
        rows, cols = self.matrix.layout.read_chunk
        return (cols, rows) if self.swapped else (rows, cols)

    def transposed(self) -> "Oriented":
        return replace(self, swapped=not self.swapped)

    def pieces(self, rows: Range, cols: Range, min_elements: int) -> Iterator[tuple[Range, Range]]:
        """Yield the pieces of a block, of at least `min_elements`: whole chunks, or rows of chunks."""
        size = min(min_elements, max(1, self.matrix.shape[0] * self.matrix.shape[1]))
        for r, c in pieces(*self._stored(rows, cols), self._cut_along(min_elements), size):
            yield (c, r) if self.swapped else (r, c)

    def read(self, rows: Range, cols: Range, out: Array) -> Array:
        """Read a block into `out`, a byte array of sufficient size. Return it in the stored dtype."""
        (r0, r1), (c0, c1) = stored = self._stored(rows, cols)
        shape = r1 - r0, c1 - c0
        block = out[: shape[0] * shape[1] * self.matrix.dtype.itemsize].view(self.matrix.dtype).reshape(shape)
        self.retries.read(self.matrix, *stored, block)
        return block.T if self.swapped else block

    def piece_bytes(self, min_elements: int) -> int:
        """Return the memory, in bytes, that a thread needs for the largest piece and for decoding it."""
        height, width = self._cut_along(min_elements)
        # A piece is one large unit (see `_cut_along`), or several units with fewer than 2 * `min_elements`
        # elements together.
        elements = min(max(height * width, 2 * min_elements), self.matrix.shape[0] * self.matrix.shape[1])
        return elements * self.matrix.dtype.itemsize + self.matrix.layout.decode_bytes

    def _cut_along(self, min_elements: int) -> tuple[int, int]:
        """Return the shape, as stored, of the units from which `pieces` forms pieces.

        A unit is a whole chunk. If the store can read parts of chunks, a unit is some rows of a chunk, with
        at most `min_elements`.
        """
        layout = self.matrix.layout
        height, width = (min(pair) for pair in zip(layout.read_chunk, self.matrix.shape, strict=True))
        height, width = max(1, height), max(1, width)
        if layout.partial_reads and layout.read_chunk != (1, 1):
            height = max(1, min(height, min_elements // width))
        return height, width

    def _stored(self, rows: Range, cols: Range) -> tuple[Range, Range]:
        return (cols, rows) if self.swapped else (rows, cols)


class Passes:
    """Reads blocks of matrices in several threads. Each reads at least `piece` elements at a time."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        threads: int,
        piece: int,
        report: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self._pool = pool
        self._threads = threads
        self._piece = piece
        self._report = report
        self._buffers: dict[tuple[int, int], Array] = {}
        self.bytes = 0  # bytes read so far

    def each(
        self,
        x: Oriented,
        rows: Range,
        cols: Range,
        act: Act | None,
        *,
        cuts: Sequence[int] = (),
        columns: int = 1,
        beside: Oriented | None = None,
    ) -> None:
        """Read a block of a matrix in several threads, and call `act` with each part of it, if given.

        Parts begin at the columns `cuts`. They are so small that the BLAS multiplies them by `columns`
        columns in one thread. The same block of another matrix `beside`, if given, is read and passed to
        `act` too. If a thread fails, all threads stop, and its error is raised.
        """
        if rows[0] == rows[1] or cols[0] == cols[1]:
            return
        left, lock, stop = x.pieces(rows, cols, self._piece), threading.Lock(), threading.Event()
        itemsize = x.matrix.dtype.itemsize
        read, total = 0, (rows[1] - rows[0]) * (cols[1] - cols[0]) * itemsize

        def work(thread: int) -> int:
            nonlocal read
            done = 0
            while not stop.is_set():
                with lock:
                    piece = next(left, None)
                if piece is None:
                    break
                both = [
                    one.read(*piece, self._buffer((thread, number), one.piece_bytes(self._piece)))
                    for number, one in enumerate((x, beside))
                    if one is not None
                ]
                done += sum(block.nbytes for block in both)
                if act is not None:
                    self._call(thread, (x, beside), piece, both, act, cuts, columns)
                with lock:
                    read += both[0].nbytes
                    self._report(f"reading {x.matrix.name}, {100 * read // total}% of {format_size(total)}")
            return done

        def guarded(thread: int) -> int:
            try:
                return work(thread)
            except BaseException:
                stop.set()
                raise

        futures = [self._pool.submit(guarded, thread) for thread in range(self._threads)]
        try:
            self.bytes += sum(future.result() for future in futures)
        finally:
            stop.set()
            wait(futures)

    def _call(
        self,
        thread: int,
        sources: tuple[Oriented, Oriented | None],
        piece: tuple[Range, Range],
        blocks: Sequence[Array],
        act: Act,
        cuts: Sequence[int],
        columns: int,
    ) -> None:
        """Cut a piece into parts and call `act` with each. `sources` are `x` and `beside` of `each`."""
        (top, bottom), (first, last) = piece
        borders = [first, *(cut for cut in cuts if first < cut < last), last]
        width = max(MIN_WIDTH, min(MAX_WIDTH, ONE_THREAD // (MIN_ROWS * columns)))
        if cuts:
            width = max(width, min(MAX_CUT_WIDTH, self._piece // (bottom - top)))
        with np.errstate(all="ignore"):
            for start, stop in pairwise(borders):
                for left in range(start, stop, width):
                    right = min(stop, left + width)
                    height = max(1, self._piece // max(right - left, columns))
                    for r0 in range(top, bottom, height):
                        r1 = min(bottom, r0 + height)
                        parts = [
                            self._wide(
                                thread,
                                number,
                                source,
                                block[r0 - top : r1 - top, left - first : right - first],
                            )
                            for number, (source, block) in enumerate(zip(sources, blocks, strict=False))
                        ]
                        act((r0, r1), (left, right), parts[0], parts[1] if len(parts) > 1 else None)

    def _wide(self, thread: int, number: int, source: Oriented | None, part: Array) -> Array:
        """Return a part in double precision, conjugated if `source` is. It is valid until the next call."""
        assert source is not None
        wide = wide_dtype(part.dtype)
        if part.dtype == wide and not source.conjugate:
            return part
        buffer = self._buffer((thread, number + 2), self._piece * wide.itemsize)
        shape = part.shape[::-1] if source.swapped else part.shape
        wide_part = buffer[: part.size * wide.itemsize].view(wide).reshape(shape)
        wide_part = wide_part.T if source.swapped else wide_part
        np.copyto(wide_part, part)
        if source.conjugate:
            np.conjugate(wide_part, out=wide_part)
        return wide_part

    def _buffer(self, key: tuple[int, int], size: int) -> Array:
        """Return a buffer for (thread, purpose). An old one is reused if it fits: its pages are mapped."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size:
            self._buffers.pop(key, None)
            buffer = self._buffers[key] = allocate(size)
        return buffer


# If the norms of some rows of op(B) differ by at most this factor, `Sums.terms` uses the largest for all of
# them. This saves time, and makes the error bound at most ALIKE times larger.
ALIKE = 2
# `Sums.square` squares norms only if all of them are 0 or between these limits: other squares could overflow
# or underflow.
MIN_NORM, MAX_NORM = 1e-100, 1e100
# If a result of `Sums.terms` is below MIN_SHARE times the largest norm of a row of op(B), squares may have
# underflowed. The result is then replaced by an upper bound that needs no squares.
MIN_SHARE = 1e-120


class Sums:
    """The products op(B) y with random sign vectors y, for the range `span` of k.

    Each group of columns of C has `VECTORS` vectors, which are zero elsewhere. `values` has a row per index
    along k and a column per vector; `norms` the 2-norm of each row of op(B) within each group: shape
    (indices, groups).
    """

    def __init__(self, span: Range, groups: int, dtype: np.dtype[np.generic]) -> None:
        extent = span[1] - span[0]
        self.span = span
        self.values = np.zeros((extent, groups * VECTORS), dtype)
        self.norms = np.zeros((extent, groups))
        self._squares: Array | None = None
        self._largest = 0.0

    def square(self) -> None:
        """Square the norms for `terms`, unless a square would overflow or underflow.

        With an appended column of ones, `terms` also gets the sum of squares of each row of op(A).
        """
        self._largest = float(self.norms.max(initial=0))
        inside = (self.norms == 0) | ((self.norms > MIN_NORM) & (self.norms < MAX_NORM))
        if inside.all():
            self._squares = np.ones((len(self.norms), self.norms.shape[1] + 1))
            np.square(self.norms, out=self._squares[:, :-1])

    def terms(self, x: Array, inside: slice) -> Array:
        """Return sqrt(sum_p |x_ip norms_pg|^2), or a larger value, for each row i of `x` and each group g.

        `x` is a part of op(A), whose columns p are the rows `inside` of `norms`. The result is the 2-norm of
        the products a_ip b_pj over these p and over the columns j of group g. If the norms of each group are
        alike, the largest one replaces the others, which is faster and at most `ALIKE` times too large. If
        squares could overflow or underflow, the result is sum_p |x_ip| norms_pg. It is nonfinite if `x` has
        an Inf or NaN.
        """
        sizes = self.norms[inside]
        largest = sizes.max(axis=0)
        if (largest <= ALIKE * sizes.min(axis=0)).all():
            return np.asarray(row_norms(x)[:, None] * largest)
        if self._squares is None:
            return np.asarray(np.abs(x) @ sizes)
        squares = x * x if x.dtype.kind != "c" else x.real * x.real + x.imag * x.imag
        found = product(squares, self._squares[inside])
        if not np.isfinite(found[:, -1]).all():
            return np.full((len(x), self.norms.shape[1]), np.nan)
        terms = np.sqrt(found[:, :-1])
        small = (terms < MIN_SHARE * self._largest).any(axis=1)
        if small.any():
            terms[small] = np.abs(x[small]) @ sizes
        return np.asarray(terms)


class Rows:
    """The products op(A) op(B) y with random sign vectors y, for the rows `span` of C.

    `expected` has a column per vector. For each row and group of columns, `terms` is the 2-norm of all terms
    a_ip b_pj (`Sums.terms`), and `bias` the result of `bias_of`. `nonfinite` flags rows of op(A) with an Inf
    or NaN.
    """

    def __init__(self, span: Range, groups: int, dtype: np.dtype[np.generic]) -> None:
        extent = span[1] - span[0]
        self.span = span
        self.expected = np.zeros((extent, groups * VECTORS), dtype)
        self.terms, self.bias = np.zeros((extent, groups)), np.zeros((extent, groups))
        self.nonfinite = np.zeros(extent, bool)

    def add_final_bias(self) -> None:
        """Replace `bias` by its estimate over all of k where this is larger: parts may hide a common sign."""
        np.maximum(self.bias, bias_of(self.expected, self.terms), out=self.bias)


def bias_of(sums: Array, terms: Array) -> Array:
    """Estimate by how much larger partial sums of op(A) op(B) are than sums of terms with random signs.

    A partial sum adds the terms a_ip b_pj of one element over a part of k. If most terms have the same sign,
    partial sums are larger, and so are their rounding errors. For each row and group of columns, `sums`
    are the products of the partial sums with `VECTORS` vectors of random signs, and `terms` the 2-norms of
    the terms. Returns the 2-norm of the partial sums, estimated from `sums`, less 2.5 times `terms` for the
    error of the estimate; at least 0.
    """
    # The mean of the absolute values of `sums` is about 0.8 times the 2-norm of the partial sums.
    sizes = np.abs(sums).reshape(*terms.shape, VECTORS).mean(axis=2)
    return np.asarray(np.maximum(1.25 * sizes - 2.5 * terms, 0))


def product(x: Array, y: Array) -> Array:
    """Return ``x @ y``, computed in parts so small that the BLAS uses only the calling thread."""
    out = np.empty((len(x), y.shape[1]), np.result_type(x, y))
    height = max(1, ONE_THREAD // max(1, y.size))
    for top in range(0, len(x), height):
        np.matmul(x[top : top + height], y, out=out[top : top + height])
    return out


def row_norms(x: Array) -> Array:
    """Return the 2-norms of the rows of a double-precision matrix, without overflow or underflow."""
    if x.strides[1] == x.itemsize or x.shape[1] == 1:
        squares = np.vecdot(x, x).real
    else:  # not vecdot, which is slow on rows that are not contiguous, as in a transposed matrix
        squares = (x.real * x.real + x.imag * x.imag if x.dtype.kind == "c" else x * x).sum(axis=1)
    out = ~((squares > MIN_SQUARES) & (squares < MAX_SQUARES))
    found = np.sqrt(squares)
    if out.any():
        found[out] = norms(np.ascontiguousarray(x[out]))
    return np.asarray(found)
