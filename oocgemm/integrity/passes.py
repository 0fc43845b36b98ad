"""One pass over a stored matrix: threads read it in pieces, and hand strips of them in double precision to a function."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from oocgemm.backends.base import Array
from oocgemm.integrity.rounding import ONE_THREAD, wide_dtype
from oocgemm.planning.tiling import Span
from oocgemm.planning.units import format_size
from oocgemm.stores import Matrix, pieces
from oocgemm.system.memory import allocate

# Elements that a thread reads at a time, but for whole chunks that must be decoded, and of a strip. With a quarter of them,
# which would fit into a core's own cache, threads wait for the GIL most of the time.
PIECE = 1 << 18
# Columns of a strip. It is multiplied in calls that the BLAS does in one thread, of at least MIN_ROWS rows. A strip with cuts may
# have up to MAX_CUT_WIDTH, where the matrix has few rows.
MIN_WIDTH, MAX_WIDTH, MAX_CUT_WIDTH = 1 << 6, 1 << 10, 1 << 13
MIN_ROWS = 8

# Called with rows, columns and elements of a strip, and the elements there of the matrix beside it, if there is one.
Act = Callable[[Span, Span, Array, Array | None], None]


@dataclass(frozen=True)
class Oriented:
    """A stored matrix, transposed and conjugated on the fly."""

    matrix: Matrix
    swapped: bool = False
    conjugate: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.matrix.shape
        return (cols, rows) if self.swapped else (rows, cols)

    @property
    def chunk(self) -> tuple[int, int]:
        """Extents of a chunk, oriented."""
        rows, cols = self.matrix.layout.read_chunk
        return (cols, rows) if self.swapped else (rows, cols)

    def transposed(self) -> "Oriented":
        return replace(self, swapped=not self.swapped)

    def pieces(self, rows: Span, cols: Span, least: int) -> Iterator[tuple[Span, Span]]:
        """Cut a block as it is best read, into pieces of about `least` elements or of whole chunks."""
        size = min(least, max(1, self.matrix.shape[0] * self.matrix.shape[1]))
        for r, c in pieces(*self._stored(rows, cols), self._cut_along(least), size):
            yield (c, r) if self.swapped else (r, c)

    def read(self, rows: Span, cols: Span, out: Array) -> Array:
        """Read a block into memory of that many bytes or more, and return it in the matrix's own dtype."""
        (r0, r1), (c0, c1) = stored = self._stored(rows, cols)
        shape = r1 - r0, c1 - c0
        block = out[: shape[0] * shape[1] * self.matrix.dtype.itemsize].view(self.matrix.dtype).reshape(shape)
        self.matrix.read(*stored, block)
        return block.T if self.swapped else block

    def piece_bytes(self, least: int) -> int:
        """Memory that a thread needs for the largest piece, and to decode it."""
        height, width = self._cut_along(least)
        # Cut along borders that lie closer than `least` elements, a piece has less than twice as many.
        elements = min(max(height * width, 2 * least), self.matrix.shape[0] * self.matrix.shape[1])
        return elements * self.matrix.dtype.itemsize + self.matrix.layout.decode_bytes

    def _cut_along(self, least: int) -> tuple[int, int]:
        """Extents that pieces are multiples of: a chunk, or some rows of a chunk that can be read in part."""
        layout = self.matrix.layout
        height, width = (min(pair) for pair in zip(layout.read_chunk, self.matrix.shape, strict=True))
        height, width = max(1, height), max(1, width)
        if layout.partial_reads and layout.read_chunk != (1, 1):
            height = max(1, min(height, least // width))
        return height, width

    def _stored(self, rows: Span, cols: Span) -> tuple[Span, Span]:
        return (cols, rows) if self.swapped else (rows, cols)


class Passes:
    """Passes by `threads` threads of a pool, in pieces of at least `piece` elements."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        threads: int,
        piece: int,
        say: Callable[[str], None] = lambda doing: None,
    ) -> None:
        """`say` is called with what is being read and how far, by one thread at a time."""
        self._pool = pool
        self._threads = threads
        self._piece = piece
        self._say = say
        self._buffers: dict[tuple[int, int], Array] = {}
        self.bytes = 0  # read so far

    def each(
        self,
        x: Oriented,
        rows: Span,
        cols: Span,
        act: Act | None,
        *,
        cuts: Sequence[int] = (),
        columns: int = 1,
        beside: Oriented | None = None,
    ) -> None:
        """Read a block of a matrix and, if given, the same block of another `beside` it. Call `act`, from several
        threads, with each strip. A strip has none of the `cuts` inside, and a shape that suits a multiplication by so
        many `columns`. Raises the first error, when all threads have stopped."""
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
                    self._say(f"reading {x.matrix.name}, {100 * read // total}% of {format_size(total)}")
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
        piece: tuple[Span, Span],
        blocks: Sequence[Array],
        act: Act,
        cuts: Sequence[int],
        columns: int,
    ) -> None:
        """Call `act` with each strip of a piece, of which `blocks` are the elements in each source."""
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
        """A part of a piece in double precision; in its own memory unless it is already."""
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
        """Memory of one thread for one purpose, the same at the next call. Its pages are faulted in once."""
        held = self._buffers.get(key)
        if held is None or held.size < size:
            self._buffers.pop(key, None)
            held = self._buffers[key] = allocate(size)
        return held
