"""Check tiles of C against checksums of the blocks of A and B that they were computed from.

The method is algorithm-based fault tolerance. Source: Huang and Abraham, *Algorithm-based fault tolerance for
matrix operations* (1984).

A tile is checked in blocks of about 128 x 128 elements. Let C be one block and C0 its old content. Step p
computes the product A_p B_p, where A_p and B_p are the rows and columns of its two panels that belong to the
block. The vectors x and y have one random sign (+1 or -1) per row and per column of the block. Then

    x^T C y  =  alpha sum_p (x^T A_p) (B_p y)  +  beta x^T C0 y

The vectors x^T A_p and B_p y are the checksums of the panels. They are computed once per panel:

- On the host backend, the threads that read a panel compute its checksums from the data as it arrives. Later
  damage to the panel in memory is therefore detected.
- A GPU computes the checksums after the panel's upload (`checksums.device`). To detect earlier damage, host
  and GPU both compute a digest of every 64th row of the panel. Earlier damage to other rows is not detected.

The check also detects damage to the accumulator and to a strip during its download. Each strip is checked in
the buffer from which it is written. If an epilogue changes the strip, or if C is not stored, the sums are
those of the accumulator before that (`GemmProblem.checks_sums`). What is then made of it is checked by
samples (`oocgemm.integrity.samples`). Wrong data from storage is not detected here, but by `oocgemm verify`,
which reads A and B again.

The two sides of the equation also differ by rounding errors, which `oocgemm.integrity.rounding` bounds. If
the difference exceeds the bound, the tile is computed again and checked with other signs. Smaller
differences pass. An error of a single element is detected with any signs if it is well above the bound.

Blocks with nonfinite elements are checked only for the positions of these elements. If a row of op(A) or a
column of op(B) has an Inf or NaN, the whole row or column of C must be nonfinite. All other elements must be
finite, unless C0 is nonfinite there or a sum could have overflowed.
"""

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from time import perf_counter_ns
from typing import Any

import numpy as np

from oocgemm.backends.base import Array, HostBlock, Session
from oocgemm.engine.staging import Staging
from oocgemm.errors import ExecutionError
from oocgemm.integrity.checksums.device import DeviceSums
from oocgemm.integrity.checksums.host import HostSums, StripSums
from oocgemm.integrity.rounding import Rounding
from oocgemm.planning import Kind, Operation, Plan
from oocgemm.planning.check_blocks import SIDE
from oocgemm.planning.tiling import Range, Tile
from oocgemm.timeline.spans import BusyTime

Strip = tuple[Tile, Range]


class Checks:
    """The checks of all strips of C that one run writes.

    `session` is the session of the run. It computes the checksums, if the plan asks the device for them;
    otherwise the host does. If `only` is given, only these strips are checked and written. A run that repeats
    tiles passes the strips that failed.
    """

    def __init__(
        self, plan: Plan, seed: int, session: Session, only: Collection[Strip] | None = None
    ) -> None:
        self._plan = plan
        self._problem = plan.problem
        self._early = plan.problem.checks_sums
        # The product that is compared with its checksums.
        problem = plan.problem.as_summed if self._early else plan.problem
        self._only = only
        self._busy = BusyTime()
        self._summing = summing = session.checksums
        self._session = session
        if session.strip_sums is not None:
            session.strip_sums.begin(seed)
        self._sums: HostSums | DeviceSums
        if summing is None:
            self._sums = HostSums(plan, seed, self._busy)
        else:
            self._sums = DeviceSums(plan, seed, self._busy, summing)
        depth, panels = min(plan.tile.k, problem.depth), plan.grid.steps
        # The arguments are maximum numbers of successive rounded operations. For an element of C, each step
        # takes one per index along k (`depth`), and two to scale the product and add it to the accumulator.
        # For a checksum, a step takes one addition after the product. Each of the two compared checksums sums
        # over at most SIDE rows and SIDE columns of a block.
        self._rounding = Rounding(problem, depth + 2 * panels, depth + panels + 4 * SIDE)
        self.failed: dict[Strip, float] = {}
        self.blocks = self.undecided = 0
        self._counting = threading.Lock()

    def transfer(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> bool:
        """Run a Read and compute its checksums; or check a strip of C and, if it is correct, run its Write.

        Returns False if the strip failed its check and was not written; otherwise True.
        """
        if operation.kind is Kind.READ:
            self._sums.read(staging, operation, columns)
            return True
        strip = operation.tile, operation.m
        if self._only is not None and strip not in self._only:
            return True
        if not self._early:
            self._check(operation, self._sums.strip(staging, operation, columns), columns)
        elif self._session.strip_sums is not None:
            self._check_sums(operation)
        if strip in self.failed:
            return False
        staging.transfer(operation, columns)
        return True

    def submit(self, operation: Operation, host: HostBlock) -> None:
        """Prepare the check of an operation that is being submitted to the device.

        If the host computes checksums, update them. If a GPU does, record the digests that it must find. The
        host backend has added up the products of a strip when its Finish is submitted, so they are checked.
        """
        self._sums.submit(operation, host)
        if self._early and operation.kind is Kind.FINISH and self._session.strip_sums is None:
            self._check_sums(operation)

    def ended(self, operation: Operation) -> None:
        """Check the strip of a Finish that has ended on a GPU, if no Write of the strip follows."""
        selects = self._early and not self._problem.sink.stores_c
        if selects and operation.kind is Kind.FINISH and self._session.strip_sums is not None:
            self._check_sums(operation)

    def failing(self) -> Plan:
        """Return a plan that computes again only the tiles of which a strip failed its check."""
        tiles = {tile for tile, _ in self.failed}
        return replace(self._plan, done=self._plan.done | (set(self._plan.schedule().tiles) - tiles))

    def figures(self, again: "Checks | None" = None) -> dict[str, Any]:
        """Return the results and the cost of the checks, for the report.

        If tiles were recomputed, `again` has the checks of the second run, which are counted too.

        Returns a dictionary. Some of its keys:

        - "undecided": the number of blocks in which only the positions of nonfinite elements were checked.
        - "seconds": the time in which at least one host thread was checking.
        - "thread_seconds": the checking time of all host threads together.
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

    def raise_first_failure(self, often: str = " twice in a row") -> None:
        """Raise `ExecutionError` if any strip has failed its check. The message names the first of them."""
        for (tile, rows), excess in sorted(self.failed.items()):
            (left, right), others = self._plan.grid.span(tile, rows), len(self.failed) - 1
            more = f" and {others} more" if others else ""
            much = f" {excess:.3g} times more than rounding allows," if isfinite(excess) else ""
            raise ExecutionError(
                f"C[{rows[0]}:{rows[1]}, {left}:{right}] of tile {tile}{more} differs from its checksums,"
                f"{much}{often}: the device, the memory or the BLAS computes or copies wrongly; "
                "test this machine, then run again"
            )

    def _check_sums(self, operation: Operation) -> None:
        """Check the accumulator of a strip. `operation` is its Finish, or its Write on a GPU.

        Raises `ExecutionError` if it is wrong, and if it cannot be computed again, since what was selected of
        it cannot be taken back.
        """
        if self._only is not None and (operation.tile, operation.m) not in self._only:
            return
        assert isinstance(self._sums, HostSums)
        if self._session.strip_sums is not None:
            found = self._session.strip_sums.take(operation)
        else:
            found = self._sums.of_strip(operation, self._session.view(operation, operation.reads[0]))
        self._check(operation, self._sums.expected(operation, *found), None)
        if self.failed and not self._problem.sink.stores_c:
            self.raise_first_failure("")

    def _check(self, operation: Operation, sums: StripSums, columns: Sequence[Array] | None) -> None:
        """Compare the checksums of a strip. Note the strip in `failed` if they differ too much."""
        start = perf_counter_ns()
        excess = self._excess(sums, columns)
        self._busy.append((start, perf_counter_ns()))
        if excess is not None:
            self.failed[operation.tile, operation.m] = excess

    def _excess(self, strip: StripSums, columns: Sequence[Array] | None) -> float | None:
        """Return None for a correct strip, otherwise the largest ratio of a block's error to its error bound.

        `columns` are the elements of the strip; None if they are on the device.

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
        self, columns: Sequence[Array] | None, strip: StripSums, overflow: Array, too_large: Array
    ) -> Array:
        """Return, for each block of a strip of C, whether its nonfinite elements are where they must be.

        Without `columns`, return whether it has nonfinite elements if it must, and none if it must not.

        - An element must be nonfinite if its row of op(A) or its column of op(B) has an Inf or NaN.
        - It may be nonfinite if its row of the old C has an Inf or NaN.
        - It may be nonfinite if `overflow` is set for its block: its sum could have overflowed.
        - It may be Inf, but not NaN, if `too_large` is set for its block: it could exceed C's dtype.
        - All other elements must be finite.
        """
        a, b, old = strip.nonfinite
        across = np.diff(strip.cols)
        right = np.ones(overflow.shape, bool)
        if columns is None:
            rows_with = np.logical_or.reduceat(a, strip.rows[:-1])
            must = rows_with[:, None] | np.logical_or.reduceat(b, strip.cols[:-1])
            finite = np.isfinite(strip.found[0])
            return np.where(finite, ~must, must | overflow)
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
