"""Compute on the host the checksums of blocks of A and B, and of the computed rows of C.

The threads that read a block compute its checksums. These are stored under the name of the buffer that
contains the block. When the block is copied to another buffer, its checksums are copied too. They are not
computed again from a buffer, so later damage to the buffer cannot change them.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from itertools import groupby, pairwise
from time import perf_counter_ns

import numpy as np

from oocgemm.backends.base import Array, HostBlock, numpy_dtype
from oocgemm.backends.checksums import signs
from oocgemm.engine.staging import Staging, located
from oocgemm.integrity.rounding import add_product, block_norms, block_squares, signed, wide_dtype
from oocgemm.planning import Kind, Op, Operation, Plan, Slot
from oocgemm.planning.device_memory import WIDENING_ELEMENTS, borders
from oocgemm.planning.tiling import Range, Tile
from oocgemm.stores.arrays import scratch_array
from oocgemm.timeline.spans import BusyTime
from oocgemm.values import dataclass


@dataclass
class StripSums:
    """The checksums that decide whether a strip of C is correct.

    Block (i, j) of the strip has rows `rows[i]` to `rows[i + 1]` and columns `cols[j]` to `cols[j + 1]`.
    Three matrices have two numbers per block: the sum of elements with random signs, and an upper bound of
    the norm. They are the computed strip (`found`, with bounds of 0 if they are not used), op(A) op(B) as
    predicted from A and B (`product`), and the `old` C. `nonfinite` flags the rows of op(A), columns of op(B)
    and rows of the old C with an Inf or NaN. If `damaged`, a digest differs, so that the checksums may be
    those of damaged data.
    """

    rows: list[int]
    cols: list[int]
    found: tuple[Array, Array]
    product: tuple[Array, Array]
    old: tuple[Array, Array]
    nonfinite: tuple[Array, Array, Array]
    damaged: bool = False


@dataclass
class BlockSums:
    """Checksums of one matrix (a panel, or a strip of C), added up piece by piece.

    The matrix is cut into blocks along one axis as stored. Checksums are sums along this `axis` with random
    signs.

    Attributes:
        begin: where the matrix begins in the stored operand: along `axis`, then along the other axis.
        conjugate: whether to conjugate the sums.
        signs: 1.0 or -1.0, one per index along `axis`.
        borders: where the blocks begin, and where the last block ends, counted from `begin`.
        sums: of shape (blocks, extent of the other axis).
        norms: the Frobenius norm of each block.
        nonfinite: flags of the indices along `axis` with an Inf or NaN; None if no Inf or NaN was found yet.
        sums_only: whether to compute `sums` alone.
    """

    begin: tuple[int, int]
    axis: int
    conjugate: bool
    signs: Array
    borders: list[int]
    sums: Array
    norms: Array
    nonfinite: Array | None = None
    sums_only: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, rows: Range, cols: Range, piece: Array) -> None:
        """Add a piece of the matrix, as stored. `rows` and `cols` are its position in the stored operand."""
        if self.axis == 1:
            rows, cols, piece = cols, rows, piece.T
        top, left = rows[0] - self.begin[0], cols[0] - self.begin[1]
        with np.errstate(all="ignore"):
            for first, blocks, offset in runs(piece, top, self.borders):
                count, size, width = blocks.shape
                start = top + offset
                x = self.signs[start : start + count * size].reshape(count, size)
                sums, squares = np.empty((count, width), self.sums.dtype), np.zeros(count)
                for groups, wide, where in widened(blocks):
                    sums[groups, where] = signed(x[groups], wide)
                    if not self.sums_only:
                        # `block_squares` is fastest if the last axis is contiguous, and `piece` was
                        # transposed if `axis` is 1.
                        squares[groups] += block_squares(wide.swapaxes(1, 2) if self.axis else wide)
                target, at = slice(first, first + count), slice(left, left + width)
                if self.conjugate:
                    sums = sums.conj()
                parts = squares if self.sums_only else block_norms(blocks, squares)
                with self._lock:
                    self.sums[target, at] += sums
                    self.norms[target] = np.hypot(self.norms[target], parts)
                if not np.isfinite(parts).all():
                    self._note(start, blocks)

    def _note(self, top: int, blocks: Array) -> None:
        found = ~np.isfinite(blocks).all(axis=2).reshape(-1)
        with self._lock:
            if self.nonfinite is None:
                self.nonfinite = np.zeros(self.borders[-1], bool)
            self.nonfinite[top : top + len(found)] |= found


@dataclass
class TileSums:
    """The checksums that a tile of C must have, added up while its product is computed.

    The arrays have one value per block. `product` is the sum of elements of op(A) op(B) with random signs,
    `norm` an upper bound of the norm of |A| |B|. `old` and `old_norm` are the same for the old C. `nonfinite`
    is as in `StripSums`. `unchecked` is the number of rows that have not been checked.
    """

    rows: list[int]
    cols: list[int]
    product: Array
    norm: Array
    old: Array
    old_norm: Array
    nonfinite: tuple[Array, Array, Array]
    unchecked: int


class HostSums:
    """The checksums of one run, computed by host threads. `busy` records when they compute."""

    def __init__(self, plan: Plan, seed: int, busy: BusyTime) -> None:
        self._plan = plan
        self._problem = problem = plan.problem
        self._wide = wide_dtype(numpy_dtype(problem.acc_dtype))
        # In a Gram matrix, a panel is a panel of both A and B. So rows and columns have equal signs.
        self._signs = signs(seed, 0, problem.m), signs(seed, int(not problem.b.shares), problem.n)
        self._panels: dict[Slot, BlockSums] = {}
        self._tiles: dict[Tile, TileSums] = {}
        self._checking = threading.Lock()
        self._busy = busy

    def read(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> None:
        """Run a Read, and compute checksums of the data in the threads that read it."""
        region = operation.writes[0]
        sums = self._old(operation) if operation.operand == "C" else self._panel(operation)
        if operation.operand != "C":
            # delete the checksums of the panel that the Read overwrites
            self._panels.pop(region.slot, None)

        def add(rows: Range, cols: Range, piece: Array) -> None:
            start = perf_counter_ns()
            sums.add(rows, cols, piece)
            self._busy.append((start, perf_counter_ns()))

        staging.transfer(operation, columns, add)
        if operation.operand != "C":
            self._panels[region.slot] = sums
            return
        tile = self._tile(operation.tile)
        rows, cols = self._blocks(tile, operation)
        with np.errstate(all="ignore"):
            tile.old[rows, cols] = self._across(tile, operation, sums)
        tile.old_norm[rows, cols] = sums.norms[:, None]
        if sums.nonfinite is not None:
            tile.nonfinite[2][tile.rows[rows.start] : tile.rows[rows.stop]] = sums.nonfinite

    def submit(self, operation: Operation, host: HostBlock) -> None:
        """Copy the checksums of an uploaded panel; add up the products of the checksums of two panels."""
        if operation.kind is Kind.UPLOAD and operation.operand != "C":
            self._panels[operation.writes[0].slot] = self._panels[operation.reads[0].slot]
        elif operation.kind is Kind.MULTIPLY and operation.k[0] < operation.k[1]:
            start = perf_counter_ns()
            a, b = (self._panels[region.slot] for region in operation.reads[:2])
            tile = self._tile(operation.tile)
            rows, cols = self._blocks(tile, operation)
            # op(B) of a Gram matrix is the conjugate transpose of op(A).
            right = b.sums[cols].conj() if self._problem.b.shares else b.sums[cols]
            with np.errstate(all="ignore"):
                add_product(tile.product[rows, cols], a.sums[rows], right)
                tile.norm[rows, cols] += np.outer(a.norms[rows], b.norms[cols])
            for flags, found in zip(tile.nonfinite[:2], (a.nonfinite, b.nonfinite), strict=True):
                if found is not None:
                    flags[:] |= found
            self._busy.append((start, perf_counter_ns()))

    def strip(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> StripSums:
        """Return the computed and the predicted checksums of a strip of C. Call this once per strip."""
        parts = located(operation, columns)
        return self.expected(
            operation, *self._computed(operation, parts, sums_only=not self._problem.finishes)
        )

    def of_strip(self, operation: Operation, strip: Array) -> tuple[Array, Array]:
        """Return the sums of the blocks of a strip of the accumulator. The bound does not use the norms."""
        return self._computed(operation, [(*operation.block, strip)], sums_only=True)

    def _computed(
        self, operation: Operation, parts: Iterable[tuple[Range, Range, Array]], *, sums_only: bool
    ) -> tuple[Array, Array]:
        start = perf_counter_ns()
        found = self._old(operation)
        found.sums_only = sums_only
        for part in parts:
            found.add(*part)
        with np.errstate(all="ignore"):
            sums = self._across(self._tile(operation.tile), operation, found)
        self._busy.append((start, perf_counter_ns()))
        return sums, found.norms[:, None]

    def expected(self, operation: Operation, sums: Array, norms: Array) -> StripSums:
        """Return the given sums and norms of a strip with the predicted ones.

        Call this once per strip: after the last strip of a tile, the checksums of the tile are deleted.
        """
        tile = self._tile(operation.tile)
        rows, cols = self._blocks(tile, operation)
        top, bottom = tile.rows[rows.start], tile.rows[rows.stop]
        left, right = tile.cols[cols.start], tile.cols[cols.stop]
        with self._checking:
            tile.unchecked -= bottom - top
            if not tile.unchecked:
                del self._tiles[operation.tile]
        return StripSums(
            [row - top for row in tile.rows[rows.start : rows.stop + 1]],
            [col - left for col in tile.cols[cols.start : cols.stop + 1]],
            (sums, norms),
            (tile.product[rows, cols], tile.norm[rows, cols]),
            (tile.old[rows, cols], tile.old_norm[rows, cols]),
            (tile.nonfinite[0][top:bottom], tile.nonfinite[1][left:right], tile.nonfinite[2][top:bottom]),
        )

    def _across(self, tile: TileSums, operation: Operation, sums: BlockSums) -> Array:
        """Return, for each block of a strip of C, the sum of its elements with random signs."""
        y, cols = self._signs[1][slice(*operation.n)], self._blocks(tile, operation)[1]
        starts = [col - tile.cols[cols.start] for col in tile.cols[cols]]
        return np.asarray(np.add.reduceat(sums.sums * y, starts, axis=1))

    def _panel(self, operation: Operation) -> BlockSums:
        on_a = operation.operand == "A"
        op = self._problem.trans_a if on_a else self._problem.trans_b
        span, k = operation.m if on_a else operation.n, operation.k
        extent = span[1] - span[0]
        cuts = borders(extent, self._plan.slots.strip if on_a else extent)
        signs_of, axis = self._signs[not on_a][slice(*span)], int(on_a == op.swaps)
        return self._empty((span[0], k[0]), axis, op is Op.C, signs_of, cuts, k[1] - k[0])

    def _old(self, operation: Operation) -> BlockSums:
        (top, bottom), (left, right) = operation.block
        cuts = borders(bottom - top, self._plan.slots.strip)
        return self._empty((top, left), 0, False, self._signs[0][top:bottom], cuts, right - left)

    def _empty(
        self, begin: tuple[int, int], axis: int, conjugate: bool, x: Array, cuts: list[int], depth: int
    ) -> BlockSums:
        sums, norms = np.zeros((len(cuts) - 1, depth), self._wide), np.zeros(len(cuts) - 1)
        return BlockSums(begin, axis, conjugate, x, cuts, sums, norms)

    def _tile(self, tile: Tile) -> TileSums:
        """Return the checksums of a tile. The first call for a tile creates them with all sums zero."""
        if tile not in self._tiles:
            height, width = (b - a for a, b in (self._plan.grid.rows(tile[0]), self._plan.grid.cols(tile[1])))
            strip = self._plan.slots.strip
            across = strip if self._problem.cover.square else width
            rows, cols = borders(height, strip), borders(width, across)
            shape = len(rows) - 1, len(cols) - 1
            nonfinite = np.zeros(height, bool), np.zeros(width, bool), np.zeros(height, bool)
            sums, bounds = [np.zeros(shape, self._wide) for _ in "CO"], [np.zeros(shape) for _ in "CO"]
            empty = TileSums(rows, cols, sums[0], bounds[0], sums[1], bounds[1], nonfinite, height)
            # If another thread has created the tile's checksums in the meantime, return those.
            return self._tiles.setdefault(tile, empty)
        return self._tiles[tile]

    def _blocks(self, tile: TileSums, operation: Operation) -> tuple[slice, slice]:
        """Return the rows and columns of the arrays of `TileSums` for an operation's elements of C."""
        grid = self._plan.grid
        top, left = grid.rows(operation.tile[0])[0], grid.cols(operation.tile[1])[0]
        first, last = (tile.rows.index(row - top) for row in operation.m)
        start, stop = (tile.cols.index(col - left) for col in operation.n)
        return slice(first, last), slice(start, stop)


def runs(piece: Array, top: int, cuts: list[int]) -> Iterator[tuple[int, Array, int]]:
    """Cut a piece of a matrix, from its row `top` on, where blocks begin: at the rows `cuts`.

    Yields each run of blocks that have the same number of rows in the piece: the index of the first block, an
    array of shape (blocks, rows, columns), and the row of the piece at which the run begins.
    """
    stop = top + piece.shape[0]
    first = bisect_right(cuts, top) - 1
    inner = [b for b in cuts[first + 1 :] if b < stop]
    inside = [top, *inner, stop]
    heights = [b - a for a, b in pairwise(inside)]
    at = 0
    for height, group in groupby(heights):
        count = len(list(group))
        end = at + count * height
        yield first, piece[at:end].reshape(count, height, piece.shape[1]), at
        first, at = first + count, end


def widened(blocks: Array) -> Iterator[tuple[slice, Array, slice]]:
    """Convert an array of shape (blocks, rows, columns) to double precision, in parts.

    Yields the blocks, the elements and the columns of each part. A part is valid until the next part. It has
    at most `WIDENING_ELEMENTS` elements, unless one column has more. An array in double precision is yielded
    whole.
    """
    wide = wide_dtype(blocks.dtype)
    count, size, width = blocks.shape
    if blocks.dtype == wide:
        yield slice(0, count), blocks, slice(0, width)
        return
    across = max(1, min(width, WIDENING_ELEMENTS // size))
    several = max(1, WIDENING_ELEMENTS // (size * across))
    for first in range(0, count, several):
        groups = slice(first, min(first + several, count))
        for left in range(0, width, across):
            cols = slice(left, min(left + across, width))
            part = blocks[groups, :, cols]
            # The copy keeps the order of the axes, so that source and copy are contiguous along the same
            # axis.
            turned = part.strides[2] != part.itemsize
            shape = (part.shape[0], *part.shape[:0:-1]) if turned else part.shape
            room = scratch_array("widened", shape, wide)
            room = room.swapaxes(1, 2) if turned else room
            np.copyto(room, part)
            yield groups, room, cols
