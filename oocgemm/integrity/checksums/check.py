"""Check tiles of C against checksums of the blocks of A and B that they were computed from.

The method is algorithm-based fault tolerance. Source: Huang and Abraham, *Algorithm-based fault tolerance for
matrix operations* (1984).

A tile of C is the sum over p of products A_p B_p. A_p and B_p are panels: the blocks of op(A) and op(B) that
one step multiplies. The tile is checked in blocks of about 128 x 128 elements. Let C be one block, C0 its old
content, and A_p and B_p the rows and columns of the panels that contribute to it. Let x and y be vectors of
random signs, +1 or -1: x has one per row of the block, y one per column. Then

    x^T C y  =  alpha sum_p (x^T A_p) (B_p y)  +  beta x^T C0 y

The vectors x^T A_p and B_p y are the checksums of the panels. They are computed once per panel:

- On the host backend, the threads that read a panel compute its checksums from the data as it arrives. If the
  panel is damaged in memory later, the checksums are still right.
- A GPU has faster memory, so it computes the checksums itself, after the panel's upload (`checksums.device`).
  If the panel is damaged before that, its checksums are those of the damaged panel. So host and GPU both
  compute a digest of every 64th row of the panel, and the two digests are compared. This does not detect
  damage in the other rows.

Except for such damage, the digests or the two sides of the equation differ if something damages a panel in
memory or in transit, the accumulator of a tile, or a strip (some rows of the finished tile) during its
download. Each strip is checked in the buffer that it is then written from. Wrong data from storage is not
detected here. `oocgemm verify` detects it, because it reads A and B again.

The two sides also differ by rounding errors, which `oocgemm.integrity.rounding` bounds. The bound grows with
the number of additions per element of C, and with the norm of |A| |B| in the block. That norm is at most the
sum over p of |A_p| |B_p|, where |A_p| and |B_p| are Frobenius norms. If a block exceeds its bound, its tile
is computed again and checked with other signs. Errors below the bound pass. A larger error in a single
element is detected with any signs.

If a row of op(A) has an Inf or NaN, all elements of that row of C must be nonfinite. The same holds for
columns of op(B). All other elements of C must be finite, unless C0 is nonfinite there or a sum could have
overflowed. Only this pattern is checked in blocks with nonfinite elements.
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
    """The checks of all strips of C that one run writes. A strip is some rows of a finished tile.

    `summing` computes the checksums on the device. If it is None, the host computes them. A run that repeats
    failed tiles passes the failed strips as `only`. It then checks and writes these alone, because the store
    already has the other strips of the same tiles.
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
        # `Rounding` takes two numbers of successive rounded operations. The first is for an element of C:
        # `depth` operations in a panel (`depth` is the panel's extent along k), and two per panel, a scaling
        # and an addition. The second is for checksums: `depth` operations in a panel, one addition per panel,
        # and 4 * SIDE. That is SIDE for the sum over the rows of a block, and SIDE for the sum over its
        # columns, for each of the two checksums that are compared.
        self._rounding = Rounding(problem, depth + 2 * panels, depth + panels + 4 * SIDE)
        self.failed: dict[Strip, float] = {}
        self.blocks = self.undecided = 0
        self._counting = threading.Lock()

    def transfer(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> bool:
        """Run a Read and compute its checksums; or check a strip of C and, if it is correct, run its Write.

        Returns False if the strip failed its check, so that the store does not have it; otherwise True.
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
        """Prepare the check of an operation that is being submitted to the device.

        If the host computes the checksums, they are updated for the operation. If a GPU computes them, the
        digests that the operation's data must have are recorded.
        """
        self._sums.submit(operation)

    def failing(self) -> Plan:
        """Return a plan that computes again only the tiles of which a strip (some rows) failed its check."""
        tiles = {tile for tile, _ in self.failed}
        return replace(self._plan, done=self._plan.done | (set(self._plan.schedule().tiles) - tiles))

    def figures(self, again: "Checks | None" = None) -> dict[str, Any]:
        """Return the results and the cost of the checks, for the report.

        If tiles were recomputed, `again` has the checks of the second run. Its blocks and its times on host
        threads are added to those of this run.

        Returns a dictionary. Three of its keys need an explanation; the others say what they count or time:

        - "undecided": the number of blocks whose sums are nonfinite, so that only the positions of their
          nonfinite elements were checked.
        - "seconds": the time in which at least one host thread was checking. "thread_seconds" is the sum of
          the times of all host threads.
        - "tier": "host" or "device", where the checksums were computed.
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

    def raise_first_failure(self) -> None:
        """Raise `ExecutionError` if any strip has failed its check. The message names the first of them."""
        for (tile, rows), excess in sorted(self.failed.items()):
            (left, right), others = self._plan.grid.cols(tile[1]), len(self.failed) - 1
            more = f" and {others} more" if others else ""
            much = f" {excess:.3g} times more than rounding allows," if isfinite(excess) else ""
            raise ExecutionError(
                f"C[{rows[0]}:{rows[1]}, {left}:{right}] of tile {tile}{more} differs from its checksums,"
                f"{much} twice in a row: the device, the memory or the BLAS computes or copies wrongly; "
                "test this machine, then run again"
            )

    def _excess(self, strip: StripSums, columns: Sequence[Array]) -> float | None:
        """Return None for a correct strip, otherwise the largest ratio of a block's error to its error bound.

        The ratio is infinite if a digest differs, or if elements are nonfinite that must be finite, or finite
        that must be nonfinite.
        """
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
        """Return, for each block of a strip of C, whether its nonfinite elements are where they must be.

        - An element must be nonfinite if its row of op(A) or its column of op(B) has an Inf or NaN.
        - It may be nonfinite if its row of the old C has an Inf or NaN. It may also be nonfinite in blocks
          that `overflow` flags, because sums could have overflowed there.
        - It may be Inf, but not NaN, in blocks that `too_large` flags, because results could have exceeded
          the range of C's dtype there.
        - All other elements must be finite.
        """
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
