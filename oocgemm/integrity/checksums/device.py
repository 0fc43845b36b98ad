"""Use checksums that a device takes, and digests that prove that it took them of the right panels.

The host takes only the digest of a panel that it has read (kernels/checks/check_sums.cu has the formula). A digest
is a sum of the words of every 64th row, weighted by position. It is a sum of integers modulo 2^32, hence
exact in any order. For a strip of C it covers every row. The device takes the digest again, with its
checksums, of the data that arrived in the slot. Each Multiply compares the two digests, and marks all that it
writes as damaged if they differ. A wrong panel, a stale one, or one in the wrong place is therefore found. On
the way out the device takes the digest first.

A digest of every row would take the host as long as copying the panel, or longer. In the rows that are
covered, any single flipped bit is found, since weights are odd. Other damage is missed with a probability
near 2^-32. The exception is damage to just two 16-bit numbers, in their highest bits only: that is missed
with 2^-8.
"""

import threading
from collections.abc import Iterator, Sequence
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from oocgemm.backends.base import Array, Checksums, numpy_dtype, stored_shape
from oocgemm.backends.random_words import ROW_WEIGHTS, WORD_WEIGHTS, random_words
from oocgemm.engine.staging import Staging
from oocgemm.integrity.checksums.host import StripSums
from oocgemm.integrity.rounding import wide_dtype
from oocgemm.planning import Kind, Op, Operation, Plan, Slot
from oocgemm.planning.check_blocks import DIGEST_ROWS, HEAD, PartOffsets, borders, digest_weights
from oocgemm.planning.tiling import Range, Tile
from oocgemm.timeline.busy import BusyTime

_WORD = 4
_MODULUS = 1 << 32


class Weights:
    """The weights of the rows of a stored panel or strip, and of the words in a row."""

    def __init__(self, rows: int, words: int) -> None:
        self.rows, self.words = (
            (random_words(stream, count) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
            for stream, count in ((ROW_WEIGHTS, rows), (WORD_WEIGHTS, words))
        )

    def digest(self, piece: Array, top: int, left: int, every: int) -> int:
        """Return the contribution of a piece to a digest of every `every`-th row.

        `top` and `left` are the piece's first row and column in the whole.
        """
        skipped, total = -top % every, 0
        rows = self.rows[top + skipped : top + len(piece) : every]
        for first, words in in_words(piece[skipped::every], left):
            # einsum copies parts into an aligned, native buffer, so any alignment and byte order is accepted.
            columns = np.einsum("i,ij->j", rows, words)
            total += int(np.vecdot(columns, self.words[first : first + len(columns)]))
        return total % _MODULUS


def in_words(piece: Array, left: int) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """Yield rows of a piece, which begins at column `left`, as words: their first number, and (rows, words).

    A word that is only partly in the piece is padded with zeros.
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
    """The checksums of one run, taken by a device. The host's own work is recorded in `busy`."""

    def __init__(self, plan: Plan, seed: int, busy: BusyTime, summing: Checksums) -> None:
        self._plan = plan
        self._problem = plan.problem
        self._wide = wide_dtype(numpy_dtype(plan.problem.acc_dtype))
        self._weights = Weights(*digest_weights(plan.problem, plan.tile))
        self._digests: dict[Slot, int] = {}  # of the panel in each slot, on either tier
        self._old: dict[tuple[Tile, Range], int] = {}  # of strips of the old C
        self._busy = busy
        self._summing = summing
        summing.begin(seed)

    def read(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> None:
        """Run a Read and take its digest.

        The reading threads take the digest of C, which covers every row. That of a panel is taken in one go
        afterwards: it covers so few rows that the overhead per piece would exceed the work.
        """
        digest = self._digest(operation)
        if operation.operand == "C":
            staging.transfer(operation, columns, digest)
        else:
            for part in staging.groups(operation, staging.transfer(operation, columns)):
                digest(*part)
        self._digests[operation.writes[0].slot] = digest.value

    def submit(self, operation: Operation) -> None:
        """Track which panel is in which slot, and hence which digests a Multiply must find."""
        if operation.kind is Kind.UPLOAD:
            digest = self._digests[operation.reads[0].slot]
            if operation.operand == "C":
                self._old[operation.tile, operation.m] = digest
            else:
                self._digests[operation.writes[0].slot] = digest
        elif operation.kind is Kind.MULTIPLY and operation.k[0] < operation.k[1]:
            a, b = (self._digests[region.slot] for region in operation.reads[:2])
            self._summing.expected = a, b

    def strip(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> StripSums:
        """Return the checksums of a strip that is about to be written. They were downloaded with it."""
        digest = self._digest(operation)
        staging.inspect(operation, columns, digest)
        start = perf_counter_ns()
        room, problem = self._summing.room, self._problem
        downloaded = staging.checksum_bytes(operation.reads[0].slot)
        (height, width), strip = stored_shape(operation, problem), self._plan.slots.strip
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

    def _digest(self, operation: Operation) -> "Digest":
        rows, cols = operation.block
        op = {"A": self._problem.trans_a, "B": self._problem.trans_b}.get(operation.operand, Op.N)
        top, left = (cols[0], rows[0]) if op.swaps else (rows[0], cols[0])
        every = 1 if operation.operand == "C" else DIGEST_ROWS
        return Digest(self._weights, top, left, every, self._busy)


class Digest:
    """The digest of a panel whose pieces arrive from several threads in any order."""

    def __init__(self, weights: Weights, top: int, left: int, every: int, busy: BusyTime) -> None:
        self.value = 0
        self._weights = weights
        self._top, self._left, self._every = top, left, every
        self._busy = busy
        self._lock = threading.Lock()

    def __call__(self, rows: Range, cols: Range, piece: Array) -> None:
        """Add a piece. Its ranges are those of the stored matrix."""
        start = perf_counter_ns()
        part = self._weights.digest(piece, rows[0] - self._top, cols[0] - self._left, self._every)
        with self._lock:
            self.value = (self.value + part) % _MODULUS
        self._busy.append((start, perf_counter_ns()))
