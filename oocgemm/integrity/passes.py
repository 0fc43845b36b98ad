"""Read a stored matrix once: threads read pieces of it and pass strips in double precision to a callback."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.integrity.rounding import ONE_THREAD, wide_dtype
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import format_size
from oocgemm.stores import Matrix, pieces
from oocgemm.system.memory import allocate

# Elements of a strip, and of a piece unless a chunk that must be decoded whole has more. A quarter of this
# would fit into a core's own cache, but then threads wait for the GIL most of the time.
PIECE = 1 << 18
# Columns of a strip. It is multiplied in calls of at least MIN_ROWS rows that the BLAS runs in one thread. A
# strip with cuts may have up to MAX_CUT_WIDTH columns if the matrix has few rows.
MIN_WIDTH, MAX_WIDTH, MAX_CUT_WIDTH = 1 << 6, 1 << 10, 1 << 13
MIN_ROWS = 8

# Takes rows, columns and elements of a strip, and the same elements of the matrix beside it, if there is one.
Act = Callable[[Range, Range, Array, Array | None], None]


@dataclass(frozen=True)
class Oriented:
    """A stored matrix, presented as it is, transposed, or conjugated."""

    matrix: Matrix
    swapped: bool = False
    conjugate: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.matrix.shape
        return (cols, rows) if self.swapped else (rows, cols)

    @property
    def chunk(self) -> tuple[int, int]:
        """The extents of a chunk, oriented."""
        rows, cols = self.matrix.layout.read_chunk
        return (cols, rows) if self.swapped else (rows, cols)

    def transposed(self) -> "Oriented":
        return replace(self, swapped=not self.swapped)

    def pieces(self, rows: Range, cols: Range, least: int) -> Iterator[tuple[Range, Range]]:
        """Cut a block for reading into pieces of about `least` elements, or of whole chunks."""
        size = min(least, max(1, self.matrix.shape[0] * self.matrix.shape[1]))
        for r, c in pieces(*self._stored(rows, cols), self._cut_along(least), size):
            yield (c, r) if self.swapped else (r, c)

    def read(self, rows: Range, cols: Range, out: Array) -> Array:
        """Read a block into `out`, of at least as many bytes. Return it in the matrix's own dtype."""
        (r0, r1), (c0, c1) = stored = self._stored(rows, cols)
        shape = r1 - r0, c1 - c0
        block = out[: shape[0] * shape[1] * self.matrix.dtype.itemsize].view(self.matrix.dtype).reshape(shape)
        self.matrix.read(*stored, block)
        return block.T if self.swapped else block

    def piece_bytes(self, least: int) -> int:
        """Return the memory that a thread needs for the largest piece and for decoding it."""
        height, width = self._cut_along(least)
        # Cut at borders less than `least` elements apart, a piece has less than 2 `least` elements.
        elements = min(max(height * width, 2 * least), self.matrix.shape[0] * self.matrix.shape[1])
        return elements * self.matrix.dtype.itemsize + self.matrix.layout.decode_bytes

    def _cut_along(self, least: int) -> tuple[int, int]:
        """Return the extents that pieces are multiples of: a chunk, or some rows of a chunk.

        Rows are possible only if chunks can be read in part.
        """
        layout = self.matrix.layout
        height, width = (min(pair) for pair in zip(layout.read_chunk, self.matrix.shape, strict=True))
        height, width = max(1, height), max(1, width)
        if layout.partial_reads and layout.read_chunk != (1, 1):
            height = max(1, min(height, least // width))
        return height, width

    def _stored(self, rows: Range, cols: Range) -> tuple[Range, Range]:
        return (cols, rows) if self.swapped else (rows, cols)


class Passes:
    """Reads of whole blocks by `threads` threads of a pool, in pieces of at least `piece` elements."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        threads: int,
        piece: int,
        report: Callable[[str], None] = lambda doing: None,
    ) -> None:
        """`report` is called with the matrix being read and its progress, by one thread at a time."""
        self._pool = pool
        self._threads = threads
        self._piece = piece
        self._report = report
        self._buffers: dict[tuple[int, int], Array] = {}
        self.bytes = 0  # read so far

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
        """Read a block, and the same block of the matrix `beside` if given, and call `act` with each strip.

        Several threads call `act`. A strip crosses none of the `cuts`, and its shape suits a multiplication
        by `columns` columns. Raises the first error once all threads have stopped.
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
                    self._strips(thread, (x, beside), piece, both, act, cuts, columns)
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

    def _strips(
        self,
        thread: int,
        sources: tuple[Oriented, Oriented | None],
        piece: tuple[Range, Range],
        blocks: Sequence[Array],
        act: Act,
        cuts: Sequence[int],
        columns: int,
    ) -> None:
        """Call `act` with each strip of a piece. `blocks` has the piece's elements in each source."""
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
        """Return a part of a piece in double precision, converted into the thread's own buffer if need be."""
        assert source is not None
        wide = wide_dtype(part.dtype)
        if part.dtype == wide and not source.conjugate:
            return part
        buffer = self._buffer((thread, number + 2), self._piece * wide.itemsize)
        shape = part.shape[::-1] if source.swapped else part.shape
        strip = buffer[: part.size * wide.itemsize].view(wide).reshape(shape)
        strip = strip.T if source.swapped else strip
        np.copyto(strip, part)
        if source.conjugate:
            np.conjugate(strip, out=strip)
        return strip

    def _buffer(self, key: tuple[int, int], size: int) -> Array:
        """Return a buffer of one thread for one purpose. Reuse keeps its pages faulted in."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size:
            self._buffers.pop(key, None)
            buffer = self._buffers[key] = allocate(size)
        return buffer
