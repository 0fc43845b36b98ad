"""Check tiles of C against checksums of their panels: algorithm-based fault tolerance.

Source: Huang and Abraham, *Algorithm-based fault tolerance for matrix operations* (1984). With random signs x
on the rows of a block of C and y on its columns,

    x^T C y  =  alpha sum_p (x^T A_p) (B_p y)  +  beta x^T C0 y

The sums x^T A_p and B_p y are taken once per panel.

- On the host backend, the threads that read a panel take its sums as its pieces arrive. The right-hand side
  uses nothing that is read from a slot later.
- A device has faster memory, so it takes the sums once the panel has arrived (`checksums.device`). It also
  takes a digest, which must equal the digest that the reading threads took.

Damage to a panel in a slot or in transit, to an accumulator, or to a strip on its way out therefore makes two
digests or the two sides of the equation differ. A strip is checked before it is written, in the memory that
it is written from. Data that storage returns wrongly is not detected: `oocgemm verify` reads it again.

The two sides may differ by rounding. `oocgemm.integrity.rounding` bounds that from the longest chain of
additions, the depth of a panel and the number of panels. The norm of |A| |B| in a block is at most the sum
over the panels of |A_p| |B_p|, the Frobenius norms of their parts in the block. A tile that fails is computed
again and checked with other signs. Errors below the bound pass. An error above it in a single element is
found with any signs.

A nonfinite element in a row of op(A) or a column of op(B) must make all of that row or column of C nonfinite.
No other element may be nonfinite, unless a sum could have overflowed. Blocks with nonfinite elements are
checked for this pattern only.
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
from oocgemm.integrity.checksums.device import DeviceSums
from oocgemm.integrity.checksums.host import HostSums, StripSums
from oocgemm.integrity.rounding import Rounding
from oocgemm.planning import Kind, Operation, Plan
from oocgemm.planning.check_blocks import SIDE
from oocgemm.planning.tiling import Range, Tile
from oocgemm.timeline.busy import BusyTime

Strip = tuple[Tile, Range]


class Checks:
    """The checks of one run's strips, with checksums taken by the host, or by a device that has a `summing`.

    With `only`, just these strips are checked and written: all others are correct already.
    """

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
        # Each panel's product is summed, scaled and added. The checksums add up the rows and columns of a
        # block, on both sides of the equation, and k.
        self._rounding = Rounding(problem, depth + 2 * panels, depth + panels + 4 * SIDE)
        self.failed: dict[Strip, float] = {}
        self.blocks = self.undecided = 0
        self._counting = threading.Lock()

    def transfer(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> bool:
        """Run a Read and take its checksums, or check a strip and run its Write if the strip is correct.

        Returns whether the store now has the correct strip.
        """
        if operation.kind is Kind.READ:
            self._sums.read(staging, operation, columns)
            return True
        strip = operation.tile, operation.m
        if self._only is not None and strip not in self._only:
            return True
        sums = self._sums.strip(staging, operation, columns)
        start = perf_counter_ns()
        excess = self._excess(sums, columns)
        self._busy.append((start, perf_counter_ns()))
        if excess is not None:
            self.failed[strip] = excess
            return False
        staging.transfer(operation, columns)
        return True

    def submit(self, operation: Operation) -> None:
        """Track an operation of the device as it is submitted."""
        self._sums.submit(operation)

    def failing(self) -> Plan:
        """Return a plan of the tiles with failed strips."""
        tiles = {tile for tile, _ in self.failed}
        return replace(self._plan, done=self._plan.done | (set(self._plan.schedule().tiles) - tiles))

    def figures(self, again: "Checks | None" = None) -> dict[str, Any]:
        """Return the figures for the report, including those of the second check `again` of recomputed tiles.

        They are the numbers of tiles and blocks, the recomputed tiles, the tier that took the checksums, and
        the cost: `seconds` with any thread busy, the sum over all threads, and the device's seconds.
        """
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
        """Raise `ExecutionError` for the first failed strip."""
        for (tile, rows), excess in sorted(self.failed.items()):
            (left, right), others = self._plan.grid.cols(tile[1]), len(self.failed) - 1
            more = f" and {others} more" if others else ""
            much = f" {excess:.3g} times more than rounding allows," if isfinite(excess) else ""
            raise ExecutionError(
                f"C[{rows[0]}:{rows[1]}, {left}:{right}] of tile {tile}{more} differs from its checksums,"
                f"{much} twice in a row: the device, the memory or the BLAS computes or copies wrongly; "
                "test the hardware"
            )

    def _excess(self, strip: StripSums, columns: Sequence[Array]) -> float | None:
        """Return None for a correct strip, otherwise the worst ratio of a block's error to its bound."""
        if strip.damaged:
            self._count(strip.product[0].size, 0)
            return float("inf")
        (sums, norms), (product, norm), (old, old_norm) = strip.found, strip.product, strip.old
        rounding = self._rounding
        with np.errstate(all="ignore"):
            elements = np.outer(np.diff(strip.rows), np.diff(strip.cols))
            total = rounding.norm(norm, old_norm)
            bound = rounding.tolerance(total, norms, elements)
            expected = rounding.alpha * product + rounding.beta * old
            difference = np.abs(sums - expected)
            right = difference <= bound
            decided = np.isfinite(sums) & np.isfinite(expected) & np.isfinite(bound)
            if not decided.all():
                overflow = rounding.may_overflow(norm, total)
                right = np.where(decided, right, self._pattern_is_right(columns, strip, *overflow))
            excess = np.where(decided & (bound > 0), difference / bound, np.inf)
        self._count(right.size, int((right & ~decided).sum()))
        return None if right.all() else float(excess[~right].max())

    def _count(self, blocks: int, undecided: int) -> None:
        with self._counting:
            self.blocks += blocks
            self.undecided += undecided

    def _pattern_is_right(
        self, columns: Sequence[Array], strip: StripSums, overflow: Array, too_large: Array
    ) -> Array:
        """Return, per block of a strip, whether elements are nonfinite exactly where they must or may be."""
        a, b, old = strip.nonfinite
        across = np.diff(strip.cols)
        right = np.ones(overflow.shape, bool)
        for i, rows in enumerate(pairwise(strip.rows)):
            part = slice(*rows)
            found = np.concatenate([~np.isfinite(group[part]) for group in columns], axis=1)
            infinite = np.concatenate([np.isinf(group[part]) for group in columns], axis=1)
            nonfinite = a[part, None] | b
            must = nonfinite & self._rounding.multiplies
            may = nonfinite | old[part, None] | np.repeat(overflow[i], across)
            may |= infinite & np.repeat(too_large[i], across)
            wrong = (found & ~may) | (must & ~found)
            right[i] = ~np.logical_or.reduceat(wrong.any(axis=0), strip.cols[:-1])
        return right
