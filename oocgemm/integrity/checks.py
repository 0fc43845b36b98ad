"""Tiles of C held against checksums of the panels that they were made from: algorithm-based fault tolerance.

After Huang and Abraham, *Algorithm-based fault tolerance for matrix operations* (1984). With random signs x on the
rows of a block of C and y on its columns,

    x^T C y  =  alpha sum_p (x^T A_p) (B_p y)  +  beta x^T C0 y

The sums x^T A_p and B_p y are taken once of each panel. Where the device is the host, by the threads that read it, as its
pieces arrive; nothing of the right-hand side comes from a slot after that. A device with memory of its own, which is far
faster to read, takes them when the panel has come (`oocgemm.integrity.sums_device`), and a digest too: it must be that which those
threads took. So what happens to a panel in a slot or on the way, to an accumulator or to a strip on its way out makes digests
or the two sides differ. A strip is judged before it is written, from the memory that it is written from. What was read
wrongly is beyond this: `oocgemm verify` reads all again.

The two sides may differ by rounding, as `oocgemm.integrity.rounding` reckons it for the longest chain of additions, the depth of a
panel and the number of panels. The norm of |A| |B| in a block is at most the sum over the panels of |A_p| |B_p|,
Frobenius norms of their parts in the block. A tile that fails is computed again and judged with other signs. Errors below
the bound pass; an error in a single element is found if it is larger, whatever the signs.

An Inf or NaN in a row of op(A) or a column of op(B) must be one in all of that row or column of C, and no other may be
there unless a sum could have overflowed. In blocks that hold any only this is checked.
"""

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from time import perf_counter_ns
from typing import Any

import numpy as np

from oocgemm.backends.base import Array, Checksums
from oocgemm.engine.staging import Staging
from oocgemm.errors import ExecutionError
from oocgemm.integrity.rounding import Rounding
from oocgemm.integrity.sums_device import DeviceSums
from oocgemm.integrity.sums_host import HostSums, StripSums
from oocgemm.planning import Kind, Operation, Plan
from oocgemm.planning.check_blocks import SIDE
from oocgemm.planning.tiling import Span, Tile
from oocgemm.timeline.busy import BusyTime

Strip = tuple[Tile, Span]


class Checks:
    """The checks of one run, by checksums of the host's, or by those of a device that is `summing`. With `only`, of these
    strips, all others being right and not to be written again."""

    def __init__(
        self, plan: Plan, seed: int, summing: Checksums | None, only: Collection[Strip] | None = None
    ) -> None:
        self._plan = plan
        self._problem = problem = plan.problem
        self._only = only
        self._busy = BusyTime()
        self._summing = summing
        self._sums: HostSums | DeviceSums
        if summing is None:
            self._sums = HostSums(plan, seed, self._busy)
        else:
            self._sums = DeviceSums(plan, seed, self._busy, summing)
        depth, panels = min(plan.tile.k, problem.depth), plan.grid.steps + plan.grid.ramp
        # Each panel's product is summed, scaled and added. The checksums go over the rows and columns of a block, on
        # both sides, and over k.
        self._rounding = Rounding(problem, depth + 2 * panels, depth + panels + 4 * SIDE)
        self.failed: dict[Strip, float] = {}
        self.blocks = self.undecided = 0
        self._counting = threading.Lock()

    def transfer(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> bool:
        """Do a Read and take checksums of it, or judge a strip and, if it is right, do its Write. Returns whether the
        strip is as it should be in the store."""
        if operation.kind is Kind.READ:
            self._sums.read(staging, operation, columns)
            return True
        strip = operation.tile, operation.m
        if self._only is not None and strip not in self._only:
            return True
        sums = self._sums.strip(staging, operation, columns)
        start = perf_counter_ns()
        excess = self._judge(sums, columns)
        self._busy.append((start, perf_counter_ns()))
        if excess is not None:
            self.failed[strip] = excess
            return False
        staging.transfer(operation, columns)
        return True

    def submit(self, operation: Operation) -> None:
        """Follow an operation of the device as it is issued."""
        self._sums.submit(operation)

    def failing(self) -> Plan:
        """The plan of the tiles of which strips have failed."""
        tiles = {tile for tile, _ in self.failed}
        return replace(self._plan, done=self._plan.done | (set(self._plan.schedule().tiles) - tiles))

    def figures(self, again: "Checks | None" = None) -> dict[str, Any]:
        """What was checked, what of it computed `again` and checked, which tier took the checksums, and what that cost:
        seconds in which any thread was at it, seconds of all threads, and seconds in which the device was."""
        runs = [self] if again is None else [self, again]
        return {
            "tiles": len(self._plan.schedule().tiles),
            "blocks": sum(checks.blocks for checks in runs),
            "undecided": sum(checks.undecided for checks in runs),
            "recomputed": sorted({tile for tile, _ in self.failed}),
            "seconds": sum(checks._busy.covered for checks in runs) / 1e9,
            "thread_seconds": sum(checks._busy.total for checks in runs) / 1e9,
            "tier": self._problem.checked,
            "device_seconds": self._summing.busy.covered / 1e9 if self._summing is not None else 0.0,
        }

    def complain(self) -> None:
        """Raise `ExecutionError` for a strip that has failed."""
        for (tile, rows), excess in sorted(self.failed.items()):
            (left, right), others = self._plan.grid.cols(tile[1]), len(self.failed) - 1
            more = f" and {others} more" if others else ""
            much = f" {excess:.3g} times more than rounding allows," if isfinite(excess) else ""
            raise ExecutionError(
                f"C[{rows[0]}:{rows[1]}, {left}:{right}] of tile {tile}{more} differs from its checksums,{much} twice in a "
                "row: the device, the memory or the BLAS computes or copies wrongly"
            )

    def _judge(self, strip: StripSums, columns: Sequence[Array]) -> float | None:
        """None if a strip is right; otherwise how many times its worst block is over its bound."""
        if strip.damaged:
            self._count(strip.product[0].size, 0)
            return float("inf")
        (sums, norms), (product, norm), (old, old_norm) = strip.found, strip.product, strip.old
        rounding = self._rounding
        with np.errstate(all="ignore"):
            elements = np.outer(np.diff(strip.rows), np.diff(strip.cols))
            most = rounding.norm(norm, old_norm)
            bound = rounding.tolerance(most, norms, elements)
            expected = rounding.alpha * product + rounding.beta * old
            off = np.abs(sums - expected)
            right = off <= bound
            decided = np.isfinite(sums) & np.isfinite(expected) & np.isfinite(bound)
            if not decided.all():
                overflow = rounding.may_overflow(norm, most)
                right = np.where(decided, right, self._pattern(columns, strip, *overflow))
            excess = np.where(decided & (bound > 0), off / bound, np.inf)
        self._count(right.size, int((right & ~decided).sum()))
        return None if right.all() else float(excess[~right].max())

    def _count(self, blocks: int, undecided: int) -> None:
        with self._counting:
            self.blocks += blocks
            self.undecided += undecided

    def _pattern(
        self, columns: Sequence[Array], strip: StripSums, overflow: Array, too_large: Array
    ) -> Array:
        """For the blocks of a strip whether Inf and NaN are where they must be, and only where they may be."""
        a, b, old = strip.broken
        across = np.diff(strip.cols)
        right = np.ones(overflow.shape, bool)
        for i, rows in enumerate(pairwise(strip.rows)):
            part = slice(*rows)
            there = np.concatenate([~np.isfinite(group[part]) for group in columns], axis=1)
            infinite = np.concatenate([np.isinf(group[part]) for group in columns], axis=1)
            spoiled = a[part, None] | b
            must = spoiled & self._rounding.multiplies
            may = spoiled | old[part, None] | np.repeat(overflow[i], across)
            may |= infinite & np.repeat(too_large[i], across)
            wrong = (there & ~may) | (must & ~there)
            right[i] = ~np.logical_or.reduceat(wrong.any(axis=0), strip.cols[:-1])
        return right
