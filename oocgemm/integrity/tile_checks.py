"""Check each tile of C against checksums of the blocks of A and B from which it was computed.

*Digests.* A device may compute the checksums. Then digests detect damage to its input. The host computes a
digest of each panel that it reads. The device computes the digest again, and the checksums, from the data in
device memory. Each Multiply compares the digests of host and device for its two panels. If they differ, it
marks its results as damaged. For a strip of C, the device computes the digest before the download, and the
host compares it afterwards.

The digest of a stored matrix is a sum over its rows r and the 32-bit words j of a row::

    sum of u_r v_j w_rj  modulo 2^32

Word w_rj is read in big-endian order: its first byte in memory is its highest. The weights u_r and v_j are
odd pseudorandom numbers, the same in every run. Threads may add in any order, because the sum is exact.

The digest of a strip covers every row. The digest of a panel covers every 64th row, because all rows would
take the host as long as copying the panel. If other rows are damaged before the device computes the
checksums, this is not detected.

In the rows that it covers, a digest detects:

- Damage to a single word: always, because an odd weight times a nonzero difference is not 0 modulo 2^32.
- Flipped signs of two elements, on a little-endian machine: except with a probability of 2^-24 for float32,
  and of at most 2^-8 for 16-bit dtypes.
- Unrelated data, such as another panel: except with a probability near 2^-32.

In general, let 2^s and 2^t be the highest powers of two that divide the changes of two damaged words. The
damage is detected if s and t differ, and missed with a probability of 2^(t - 31) if they are equal. So two
flipped highest bits (t = 31) are always missed. Big-endian order moves signs and exponents to low bits of
words on a little-endian machine, where t is small.

*Checksums.* The method is algorithm-based fault tolerance. Source: Huang and Abraham,
*Algorithm-based fault tolerance for matrix operations* (1984).

A tile is checked in blocks of about 128 x 128 elements. Let C be one block and C0 its old content. Step p
computes the product A_p B_p, where A_p and B_p are the rows and columns of its two panels that belong to the
block. The vectors x and y have one random sign (+1 or -1) per row and per column of the block. Then

    x^T C y  =  alpha sum_p (x^T A_p) (B_p y)  +  beta x^T C0 y

The vectors x^T A_p and B_p y are the checksums of the panels. They are computed once per panel:

- On the host backend, the threads that read a panel compute its checksums from the data as it arrives. Later
  damage to the panel in memory is therefore detected.
- A GPU computes the checksums after the panel's upload (`DeviceChecksums`). To detect earlier damage, host
  and GPU both compute a digest of every 64th row of the panel. Earlier damage to other rows is not detected.

The check also detects damage to the accumulator and to a strip during its download. Each strip is checked in
the buffer from which it is written. If an epilogue changes the strip, or if C is not stored, the check
uses the accumulator before the epilogue (`GemmProblem.checks_sums`). Samples check the results that are then
computed from the accumulator (`oocgemm.integrity.samples`). Wrong data from storage is not detected here, but
by `oocgemm verify`, which reads A and B again.

The two sides of the equation also differ by rounding errors, which `oocgemm.integrity.rounding` bounds. If
the difference exceeds the bound, the tile is computed again and checked with other signs. Smaller
differences pass. An error of a single element is detected with any signs if it is well above the bound.

Blocks with nonfinite elements are checked only for the positions of these elements. If a row of op(A) or a
column of op(B) has an Inf or NaN, the whole row or column of C must be nonfinite. All other elements must be
finite, unless C0 is nonfinite there or a sum could have overflowed.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oocgemm.backends.base import (
    Array,
    Checksums,
    HostBlock,
    Pageable,
    Pinned,
    Session,
    numpy_dtype,
)
from oocgemm.backends.checksums import ROW_WEIGHTS, WORD_WEIGHTS, random_words
from oocgemm.engine.staging import Staging, located
from oocgemm.errors import ExecutionError
from oocgemm.integrity.host_checksums import HostSums, StripSums
from oocgemm.integrity.rounding import Rounding, wide_dtype
from oocgemm.planning import Kind, Operation, Plan, Slot
from oocgemm.planning.device_memory import DIGEST_ROWS, HEAD, SIDE, PartOffsets, borders, digest_weights
from oocgemm.planning.tiling import Range, Tile, length
from oocgemm.timeline.spans import BusyTime

_WORD = 4
_MODULUS = 1 << 32


class Weights:
    """The random odd weights of a digest. A word's weight is the product of those of its row and column."""

    def __init__(self, rows: int, words: int) -> None:
        self.rows, self.words = (
            (random_words(stream, count) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
            for stream, count in ((ROW_WEIGHTS, rows), (WORD_WEIGHTS, words))
        )

    def digest(self, piece: Array, top: int, left: int, every: int) -> int:
        """Return the digest of one row in `every` of a piece at row `top` and column `left`."""
        skipped = -top % every
        return self.digest_of_rows(piece[skipped::every], range(top + skipped, top + len(piece), every), left)

    def digest_of_rows(self, piece: Array, numbers: range, left: int) -> int:
        """Return the digest of rows with these numbers, from column `left` on. Rows must be contiguous."""
        rows, total = self.rows[numbers.start : numbers.stop : numbers.step], 0
        for first, words in in_words(piece, left):
            # einsum accepts words that are unaligned or in a foreign byte order
            columns = np.einsum("i,ij->j", rows, words)
            total += int(np.vecdot(columns, self.words[first : first + len(columns)]))
        return total % _MODULUS


def in_words(piece: Array, left: int) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """Cut the rows of a piece of a matrix, from its column `left` on, into 32-bit words.

    Yields the index of the first word within a row of the matrix, and words of shape (rows, words). If a word
    lies only partly in the piece, its other bytes are zeros.
    """
    raw = piece.view(np.uint8)
    begin = left * piece.itemsize
    end = begin + raw.shape[1]
    first, last = -(-begin // _WORD), end // _WORD
    if first < last:
        yield first, raw[:, _WORD * first - begin : _WORD * last - begin].view(">u4")
    cuts = [(begin, min(end, _WORD * first)), (max(begin, _WORD * last), end)]
    for start, stop in dict.fromkeys(cut for cut in cuts if cut[0] % _WORD or cut[1] % _WORD):
        filled = np.zeros((len(raw), _WORD), np.uint8)
        number = start // _WORD
        filled[:, start - number * _WORD : stop - number * _WORD] = raw[:, start - begin : stop - begin]
        yield number, filled.view(">u4")


class DeviceSums:
    """The checksums of one run, computed by a GPU (`summing`). GPU and host both compute digests."""

    def __init__(self, plan: Plan, seed: int, busy: BusyTime, summing: Checksums) -> None:
        self._plan = plan
        self._problem = plan.problem
        self._wide = wide_dtype(numpy_dtype(plan.problem.acc_dtype))
        self._weights = Weights(*digest_weights(plan.problem, plan.tile))
        # The digests that the content of each slot, and each uploaded strip of the old C, must have.
        self._digests: dict[Slot, int] = {}
        self._old: dict[tuple[Tile, Range], int] = {}
        self._busy = busy
        self._summing = summing
        summing.begin(seed)

    def read(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> None:
        """Run a Read and compute the digest of the data that it reads.

        For A and B, the calling thread computes the digest after the Read, which is faster because the digest
        covers few rows.
        """
        digest = self._digest(operation)
        if operation.operand == "C":
            staging.transfer(operation, columns, digest)
        else:
            staging.transfer(operation, columns)
            for part in located(operation, columns):
                digest(*part)
        self._digests[operation.writes[0].slot] = digest.value

    def submit(self, operation: Operation, host: HostBlock) -> None:
        """Record the digests that the device must find. Call this before an operation is submitted."""
        if operation.kind is Kind.UPLOAD:
            if isinstance(host, Pageable):
                digest = self._digest_of_pageable(host)
            elif isinstance(host, Pinned):
                whole = self._digest(operation)
                whole(*operation.stored, host.array)
                digest = whole.value
            else:
                digest = self._digests[operation.reads[0].slot]
            if operation.operand == "C":
                self._old[operation.tile, operation.m] = digest
            else:
                self._digests[operation.writes[0].slot] = digest
        elif operation.kind is Kind.MULTIPLY and operation.k[0] < operation.k[1]:
            a, b = (self._digests[region.slot] for region in operation.reads[:2])
            self._summing.expected = a, b

    def strip(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> StripSums:
        """Return the checksums of a strip of C, which the Download has copied to the host with the strip."""
        digest = self._digest(operation)
        staging.inspect(operation, columns, digest)
        start = perf_counter_ns()
        room, problem = self._summing.room, self._problem
        downloaded = staging.slots.checksum_bytes(operation.reads[0].slot)
        (height, width), strip = map(length, operation.stored), self._plan.slots.strip
        rows, cols = borders(height, strip), borders(width, width)
        blocks = len(rows) - 1, len(cols) - 1

        def numbers(part: PartOffsets) -> tuple[Array, Array]:
            return tuple(
                downloaded[begin:][: room.down * room.across * dtype.itemsize]
                .view(dtype)
                .reshape(room.down, room.across)[: blocks[0], : blocks[1]]
                for begin, dtype in ((part.sums, self._wide), (part.norms, np.dtype(np.float64)))
            )  # type: ignore[return-value]

        def flags(begin: int, count: int) -> Array:
            return downloaded[begin : begin + count].view(bool)

        def head(part: PartOffsets) -> int:
            return int(downloaded[part.begin :][:HEAD].view(np.uint64)[0])

        found, made, old = room.found, room.made, room.old
        damaged = head(found) != digest.value or head(made) != 0
        sums, norms = numbers(found)
        nothing = np.zeros(blocks, self._wide), np.zeros(blocks)
        of_old, old_rows = nothing, np.zeros(height, bool)
        if problem.reads_c:
            damaged = damaged or head(old) != self._old.pop((operation.tile, operation.m))
            of_old, old_rows = numbers(old), flags(old.rows, height)
        checksums = StripSums(
            rows,
            cols,
            (sums, norms if problem.finishes else nothing[1]),
            numbers(made),
            of_old,
            (flags(made.rows, height), flags(made.cols, width), old_rows),
            damaged,
        )
        self._busy.append((start, perf_counter_ns()))
        return checksums

    def _digest_of_pageable(self, panel: Pageable) -> int:
        """Return the digest of a panel in memory, whose rows may be strided or in another byte order.

        `panel.move` converts them to what the device receives. It also checks memory maps of files.
        """
        start, (height, width) = perf_counter_ns(), panel.shape
        numbers = range(0, height, DIGEST_ROWS)
        rows = np.empty((len(numbers), width), panel.dtype)
        for i, r in enumerate(numbers):
            panel.move((r, r + 1), (0, width), rows[i : i + 1])
        digest = self._weights.digest_of_rows(rows, numbers, 0)
        self._busy.append((start, perf_counter_ns()))
        return digest

    def _digest(self, operation: Operation) -> "Digest":
        (top, _), (left, _) = operation.stored
        every = 1 if operation.operand == "C" else DIGEST_ROWS
        return Digest(self._weights, top, left, every, self._busy)


class Digest:
    """The digest of one row in `every` of a matrix that several threads read in pieces.

    `top` and `left` are the row and the column of the stored operand at which the matrix begins.
    """

    def __init__(self, weights: Weights, top: int, left: int, every: int, busy: BusyTime) -> None:
        self.value = 0
        self._weights = weights
        self._top, self._left, self._every = top, left, every
        self._busy = busy
        self._lock = threading.Lock()

    def __call__(self, rows: Range, cols: Range, piece: Array) -> None:
        start = perf_counter_ns()
        part = self._weights.digest(piece, rows[0] - self._top, cols[0] - self._left, self._every)
        with self._lock:
            self.value = (self.value + part) % _MODULUS
        self._busy.append((start, perf_counter_ns()))


Strip = tuple[Tile, Range]


class Checks:
    """The checks of the strips of C that one run writes: of all, or of those in `only` if tiles are repeated.

    The session computes the checksums, if the plan asks the device for them; otherwise the host does.
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
        """Run a Read and note its checksums, or the Write of a correct strip. Return False if it fails."""
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

        The host backend has added up the products of a strip when its Finish is submitted. So the strip is
        checked then, if its accumulator is what is checked.
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
        """Return a plan that computes only the tiles again that have a strip that failed its check."""
        tiles = {tile for tile, _ in self.failed}
        return replace(self._plan, done=self._plan.done | (set(self._plan.schedule().tiles) - tiles))

    def figures(self, again: "Checks | None" = None) -> dict[str, Any]:
        """Return the results and the cost of the checks, including the checks of repeated tiles (`again`).

        "undecided" counts blocks in which only the positions of nonfinite elements were checked. "seconds" is
        the time in which at least one host thread was checking, "thread_seconds" the time of all threads
        together.
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
        """Check the accumulator of a strip, at its Finish, or at its Write on a GPU.

        If the accumulator is wrong and C is not stored, raise an error: elements that were selected
        from this strip cannot be taken back and computed again.
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

        `columns` are the elements of the strip; None if they are on the device. The ratio is infinite if a
        digest differs, or if an element is wrongly finite or wrongly nonfinite.
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

        An element must be nonfinite if its row of op(A) or its column of op(B) has an Inf or NaN. It may be
        nonfinite if its row of the old C has an Inf or NaN, or if `overflow` is set for its block. It may be
        Inf if `too_large` is set. All other elements must be finite. Without `columns`, return whether the
        block has nonfinite elements if it must, and none if it must not.
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
