"""Tiles of C held against checksums of the panels that they were made from: algorithm-based fault tolerance.

After Huang and Abraham, *Algorithm-based fault tolerance for matrix operations* (1984). With random signs x on the
rows of a block of C and y on its columns,

    x^T C y  =  alpha sum_p (x^T A_p) (B_p y)  +  beta x^T C0 y

The sums x^T A_p and B_p y are taken by the threads that read a panel, as its pieces arrive, and follow the panel from
slot to slot as the schedule says. Nothing of the right-hand side comes from a slot after that: what happens to a panel
there, to an accumulator or to a strip on its way out makes the two sides differ. A strip is judged before it is written,
from the memory that it is written from. What was read wrongly is beyond this: `oocgemm verify` reads all again.

The two sides may differ by rounding, as `oocgemm.bounds` reckons it for the longest chain of additions, the depth of a
panel and the number of panels. The norm of |A| |B| in a block is at most the sum over the panels of |A_p| |B_p|,
Frobenius norms of their parts in the block. A tile that fails is computed again and judged with other signs. Errors below
the bound pass; an error in a single element is found if it is larger, whatever the signs.

An Inf or NaN in a row of op(A) or a column of op(B) must be one in all of that row or column of C, and no other may be
there unless a sum could have overflowed. In blocks that hold any only this is checked.
"""

import threading
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from time import perf_counter_ns
from typing import Any

import numpy as np

from oocgemm.backends.base import Array, numpy_dtype
from oocgemm.bounds import Rounding, add_product, block_norms, block_squares, signed, signs, wide_dtype
from oocgemm.errors import ExecutionError
from oocgemm.plan import Kind, Op, Operation, Plan, Slot
from oocgemm.plan.checking import SIDE, WIDENED, borders
from oocgemm.plan.tiling import Span, Tile
from oocgemm.staging import Staging
from oocgemm.timeline.figures import length, union

Strip = tuple[Tile, Span]


@dataclass
class Sums:
    """Checksums of a panel as it is read: for every block along its summed axis the signed sums, one a depth, and the
    2-norm; and which of its rows (or columns) hold an Inf or a NaN, if any does."""

    begin: tuple[int, int]
    axis: int
    conjugate: bool
    signs: Array
    borders: list[int]
    sums: Array
    norms: Array
    broken: Array | None = None
    bare: bool = False  # the signed sums alone
    _adding: threading.Lock = field(default_factory=threading.Lock)

    def add(self, rows: Span, cols: Span, piece: Array) -> None:
        """Take in a piece, in stored orientation, its spans those of the stored matrix."""
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
                    if not self.bare:  # along what lies side by side
                        squares[groups] += block_squares(wide.swapaxes(1, 2) if self.axis else wide)
                target, at = slice(first, first + count), slice(left, left + width)
                if self.conjugate:
                    sums = sums.conj()
                parts = squares if self.bare else block_norms(blocks, squares)
                with self._adding:
                    self.sums[target, at] += sums
                    self.norms[target] = np.hypot(self.norms[target], parts)
                if not np.isfinite(parts).all():
                    self._note(start, blocks)

    def _note(self, top: int, blocks: Array) -> None:
        found = ~np.isfinite(blocks).all(axis=2).reshape(-1)
        with self._adding:
            if self.broken is None:
                self.broken = np.zeros(self.borders[-1], bool)
            self.broken[top : top + len(found)] |= found


@dataclass
class TileSums:
    """What a tile is held against: for each of its blocks the sum that it must have, the bound of its norm, both
    for the product and for the old C; and the rows and columns that are not finite."""

    rows: list[int]
    cols: list[int]
    product: Array
    norm: Array
    old: Array
    old_norm: Array
    broken: tuple[Array, Array, Array]
    unjudged: int


class Checks:
    """The checks of one run. With `only`, of these strips, all others being right and not to be written again."""

    def __init__(self, plan: Plan, seed: int, only: Collection[Strip] | None = None) -> None:
        self._plan = plan
        self._problem = problem = plan.problem
        self._only = only
        self._wide = wide_dtype(numpy_dtype(problem.acc_dtype))
        self._signs = signs(seed, 0, problem.m), signs(seed, 1, problem.n)
        self._panels: dict[Slot, Sums] = {}
        self._tiles: dict[Tile, TileSums] = {}
        depth, panels = min(plan.tile.r, problem.depth), plan.grid.steps + plan.grid.ramp
        # Each panel's product is summed, scaled and added. The checksums go over the rows and columns of a block, on
        # both sides, and over k.
        self._rounding = Rounding(problem, depth + 2 * panels, depth + panels + 4 * SIDE)
        self._busy: list[tuple[int, int]] = []
        self.failed: dict[Strip, float] = {}
        self.blocks = self.undecided = 0

    def transfer(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> bool:
        """Do a Read and take checksums of it, or judge a strip and, if it is right, do its Write. Returns whether the
        strip is as it should be in the store."""
        if operation.kind is Kind.READ:
            self._read(staging, operation, columns)
            return True
        strip = operation.tile, operation.m
        if self._only is not None and strip not in self._only:
            return True
        start = perf_counter_ns()
        (view,) = columns
        excess = self._judge(operation, view)
        self._busy.append((start, perf_counter_ns()))
        if excess is not None:
            self.failed[strip] = excess
            return False
        staging.transfer(operation, columns)
        return True

    def submit(self, operation: Operation) -> None:
        """Follow an operation of the device as it is issued: a panel goes from slot to slot, or is multiplied."""
        if operation.kind is Kind.UPLOAD and operation.operand != "C":
            self._panels[operation.writes[0].slot] = self._panels[operation.reads[0].slot]
        elif operation.kind is Kind.MULTIPLY and operation.k[0] < operation.k[1]:
            start = perf_counter_ns()
            a, b = (self._panels[region.slot] for region in operation.reads[:2])
            tile = self._tile(operation.tile)
            rows = self._blocks(tile, operation)
            with np.errstate(all="ignore"):
                add_product(tile.product[rows], a.sums[rows], b.sums)
                tile.norm[rows] += np.outer(a.norms[rows], b.norms)
            for held, found in zip(tile.broken[:2], (a.broken, b.broken), strict=True):
                if found is not None:
                    held[:] |= found
            self._busy.append((start, perf_counter_ns()))

    def failing(self) -> Plan:
        """The plan of the tiles of which strips have failed."""
        tiles = {tile for tile, _ in self.failed}
        return replace(self._plan, done=self._plan.done | (set(self._plan.schedule().tiles) - tiles))

    def figures(self, again: "Checks | None" = None) -> dict[str, Any]:
        """What was checked, what of it computed `again` and checked, and what that cost: seconds in which any thread
        was at it, and seconds of all threads."""
        runs = [self] if again is None else [self, again]
        busy = [interval for checks in runs for interval in checks._busy]
        return {
            "tiles": len(self._plan.schedule().tiles),
            "blocks": sum(checks.blocks for checks in runs),
            "undecided": sum(checks.undecided for checks in runs),
            "recomputed": sorted({tile for tile, _ in self.failed}),
            "seconds": length(union(busy)) / 1e9,
            "thread_seconds": length(busy) / 1e9,
        }

    def complain(self) -> None:
        """Raise `ExecutionError` for a strip that has failed."""
        for (tile, rows), excess in sorted(self.failed.items()):
            (left, right), others = self._plan.grid.cols(tile[1]), len(self.failed) - 1
            more = f" and {others} more" if others else ""
            raise ExecutionError(
                f"C[{rows[0]}:{rows[1]}, {left}:{right}] of tile {tile}{more} differs from its checksums, {excess:.3g} times "
                "more than rounding allows, twice in a row: the device, the memory or the BLAS computes wrong results"
            )

    def _read(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> None:
        region = operation.writes[0]
        sums = self._old(operation) if operation.operand == "C" else self._panel(operation)
        if operation.operand != "C":
            self._panels.pop(region.slot, None)  # its panel is being overwritten

        def look(rows: Span, cols: Span, piece: Array) -> None:
            start = perf_counter_ns()
            sums.add(rows, cols, piece)
            self._busy.append((start, perf_counter_ns()))

        staging.transfer(operation, columns, look)
        if operation.operand != "C":
            self._panels[region.slot] = sums
            return
        tile = self._tile(operation.tile)
        rows = self._blocks(tile, operation)
        y = self._signs[1][slice(*operation.n)]
        with np.errstate(all="ignore"):
            tile.old[rows] = np.add.reduceat(sums.sums * y, tile.cols[:-1], axis=1)
        tile.old_norm[rows] = sums.norms[:, None]
        if sums.broken is not None:
            tile.broken[2][tile.rows[rows.start] : tile.rows[rows.stop]] = sums.broken

    def _panel(self, operation: Operation) -> Sums:
        """Empty checksums of a panel of op(A) or op(B)."""
        on_a = operation.operand == "A"
        op = self._problem.trans_a if on_a else self._problem.trans_b
        span, k = operation.m if on_a else operation.n, operation.k
        extent = span[1] - span[0]
        cuts = borders(extent, self._plan.slots.strip if on_a else extent)
        return self._empty(
            (span[0], k[0]),
            int(on_a == op.swaps),
            op is Op.C,
            self._signs[not on_a][slice(*span)],
            cuts,
            k[1] - k[0],
        )

    def _old(self, operation: Operation) -> Sums:
        """Empty checksums of a strip of C."""
        (top, bottom), (left, right) = operation.block
        cuts = borders(bottom - top, self._plan.slots.strip)
        return self._empty((top, left), 0, False, self._signs[0][top:bottom], cuts, right - left)

    def _empty(
        self, begin: tuple[int, int], axis: int, conjugate: bool, x: Array, cuts: list[int], depth: int
    ) -> Sums:
        count = len(cuts) - 1
        return Sums(begin, axis, conjugate, x, cuts, np.zeros((count, depth), self._wide), np.zeros(count))

    def _tile(self, tile: Tile) -> TileSums:
        """The sums of a tile, begun when it first appears."""
        if tile not in self._tiles:
            height, width = (b - a for a, b in (self._plan.grid.rows(tile[0]), self._plan.grid.cols(tile[1])))
            rows, cols = borders(height, self._plan.slots.strip), borders(width, width)
            shape = len(rows) - 1, len(cols) - 1
            broken = np.zeros(height, bool), np.zeros(width, bool), np.zeros(height, bool)
            sums, bounds = [np.zeros(shape, self._wide) for _ in "CO"], [np.zeros(shape) for _ in "CO"]
            begun = TileSums(rows, cols, sums[0], bounds[0], sums[1], bounds[1], broken, height)
            return self._tiles.setdefault(tile, begun)  # whichever thread came first
        return self._tiles[tile]

    def _blocks(self, tile: TileSums, operation: Operation) -> slice:
        """The blocks of a tile, down, that an operation's rows are cut into."""
        top = self._plan.grid.rows(operation.tile[0])[0]
        first, last = (tile.rows.index(row - top) for row in operation.m)
        return slice(first, last)

    def _judge(self, operation: Operation, view: Array) -> float | None:
        """None if a strip is right; otherwise how many times its worst block is over its bound."""
        tile = self._tile(operation.tile)
        rows = self._blocks(tile, operation)
        found = self._old(operation)
        found.bare = not self._problem.finishes
        found.add(operation.m, operation.n, view)
        y = self._signs[1][slice(*operation.n)]
        with np.errstate(all="ignore"):
            sums = np.add.reduceat(found.sums * y, tile.cols[:-1], axis=1)
            elements = np.outer(np.diff(tile.rows)[rows], np.diff(tile.cols))
            norm = self._rounding.norm(tile.norm[rows], tile.old_norm[rows])
            bound = self._rounding.tolerance(norm, found.norms[:, None], elements)
            expected = self._rounding.alpha * tile.product[rows] + self._rounding.beta * tile.old[rows]
            off = np.abs(sums - expected)
            right = off <= bound
            decided = np.isfinite(sums) & np.isfinite(expected) & np.isfinite(bound)
            if not decided.all():
                overflow = self._rounding.may_overflow(tile.norm[rows], norm)
                right = np.where(decided, right, self._pattern(view, tile, rows, *overflow))
            excess = np.where(decided & (bound > 0), off / bound, np.inf)
        self.blocks += right.size
        self.undecided += int((right & ~decided).sum())
        tile.unjudged -= operation.m[1] - operation.m[0]
        if not tile.unjudged:
            del self._tiles[operation.tile]
        return None if right.all() else float(excess[~right].max())

    def _pattern(self, view: Array, tile: TileSums, rows: slice, overflow: Array, too_large: Array) -> Array:
        """For the blocks of a strip whether Inf and NaN are where they must be, and only where they may be."""
        top, bottom = tile.rows[rows.start], tile.rows[rows.stop]
        a, b, old = tile.broken[0][top:bottom], tile.broken[1], tile.broken[2][top:bottom]
        down, across = np.diff(tile.rows)[rows], np.diff(tile.cols)
        right = np.ones(overflow.shape, bool)
        for i, height in enumerate(down):
            part = slice(int(down[:i].sum()), int(down[:i].sum() + height))
            there, infinite = ~np.isfinite(view[part]), np.isinf(view[part])
            spoiled = a[part, None] | b
            must = spoiled & self._rounding.multiplies
            may = spoiled | old[part, None] | np.repeat(overflow[i], across)
            may |= infinite & np.repeat(too_large[i], across)
            wrong = (there & ~may) | (must & ~there)
            right[i] = ~np.logical_or.reduceat(wrong.any(axis=0), tile.cols[:-1])
        return right


def runs(piece: Array, top: int, cuts: list[int]) -> Iterator[tuple[int, Array, int]]:
    """A piece whose first row is row `top` of a panel, cut where blocks begin: the number of the first block, several
    of the same height as one array (blocks, rows, columns), and where they begin in the piece."""
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
    """Blocks in double precision: which blocks, their elements, which columns. All at a time if they are in it already,
    else as many as stay in a cache: each call costs the interpreter, for which all threads queue."""
    wide = wide_dtype(blocks.dtype)
    count, size, width = blocks.shape
    if blocks.dtype == wide:
        yield slice(0, count), blocks, slice(0, width)
        return
    across = max(1, min(width, WIDENED // size))
    several = max(1, WIDENED // (size * across))
    for first in range(0, count, several):
        groups = slice(first, min(first + several, count))
        for left in range(0, width, across):
            cols = slice(left, min(left + across, width))
            yield groups, blocks[groups, :, cols].astype(wide, order="K"), cols
