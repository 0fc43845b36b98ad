"""Check C with checksums that a device computes, and with digests that detect damage to their input.

The host computes a digest of each panel that it reads. The device computes the digest again, and the
checksums, from the data in device memory. Each Multiply compares the digests of host and device for its two
panels. If they differ, it marks its results as damaged. For a strip of C, the device computes the digest
before the download, and the host compares it afterwards.

The digest of a stored matrix is a sum over its rows r and the 32-bit words j of a row::

    sum of u_r v_j w_rj  modulo 2^32

Word w_rj is read in big-endian order: its first byte in memory is its highest. The weights u_r and v_j are
odd pseudorandom numbers, the same in every run. Threads may add in any order, because the sum is exact.

The digest of a strip covers every row. The digest of a panel covers every 64th row, because all rows would
take the host as long as copying the panel. If other rows are
damaged before the device computes the checksums, this is not detected.

In the rows that it covers, a digest detects:

- Damage to a single word: always, because an odd weight times a nonzero difference is not 0 modulo 2^32.
- Flipped signs of two elements, on a little-endian machine: except with a probability of 2^-24 for float32,
  and of at most 2^-8 for 16-bit dtypes.
- Unrelated data, such as another panel: except with a probability near 2^-32.

In general, let 2^s and 2^t be the highest powers of two that divide the changes of two damaged words. The
damage is detected if s and t differ, and missed with a probability of 2^(t - 31) if they are equal. So two
flipped highest bits (t = 31) are always missed. Big-endian order moves signs and exponents to low bits of
words on a little-endian machine, where t is small.
"""

import threading
from collections.abc import Iterator, Sequence
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from oocgemm.backends.base import Array, Checksums, HostBlock, Pageable, Pinned, numpy_dtype, stored_shape
from oocgemm.backends.checksums import ROW_WEIGHTS, WORD_WEIGHTS, random_words
from oocgemm.engine.host_blocks import stored_block
from oocgemm.engine.staging import Staging
from oocgemm.integrity.checksums.host import StripSums
from oocgemm.integrity.rounding import wide_dtype
from oocgemm.planning import Kind, Op, Operation, Plan, Slot
from oocgemm.planning.check_blocks import DIGEST_ROWS, HEAD, PartOffsets, borders, digest_weights
from oocgemm.planning.tiling import Range, Tile
from oocgemm.timeline.spans import BusyTime

_WORD = 4
_MODULUS = 1 << 32


class Weights:
    """The random odd weights of a digest.

    The digest is a weighted sum of 32-bit words. `rows` has a random odd number per row, and `words` one per
    word of a row. The weight of a word is the product of these two numbers.
    """

    def __init__(self, rows: int, words: int) -> None:
        self.rows, self.words = (
            (random_words(stream, count) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
            for stream, count in ((ROW_WEIGHTS, rows), (WORD_WEIGHTS, words))
        )

    def digest(self, piece: Array, top: int, left: int, every: int) -> int:
        """Return the digest of one piece of a matrix.

        The piece begins at row `top` and column `left` of the matrix. Only rows whose index in the matrix is
        a multiple of `every` are hashed. The digest of the matrix is the sum over its pieces, modulo 2^32.
        """
        skipped = -top % every
        return self.digest_of_rows(piece[skipped::every], range(top + skipped, top + len(piece), every), left)

    def digest_of_rows(self, piece: Array, numbers: range, left: int) -> int:
        """Return the digest of rows with these numbers in the matrix, from column `left` on.

        The elements of a row must be contiguous.
        """
        rows, total = self.rows[numbers.start : numbers.stop : numbers.step], 0
        for first, words in in_words(piece, left):
            # einsum accepts words that are unaligned or in a foreign byte order
            columns = np.einsum("i,ij->j", rows, words)
            total += int(np.vecdot(columns, self.words[first : first + len(columns)]))
        return total % _MODULUS


def in_words(piece: Array, left: int) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """Cut the rows of a piece of a matrix into 32-bit words.

    Words are counted from the start of a row of the matrix. The piece begins at column `left`. If it contains
    only some bytes of a word, the other bytes are taken as zeros.

    Yields:
        The index of the first word within a row of the matrix, and an array of words of shape (rows, words).
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
    """The checksums of one run, computed by a GPU. GPU and host both compute digests.

    `summing` is the interface to the GPU. Host threads append the intervals in which they compute digests,
    (start, end) in nanoseconds, to `busy`.
    """

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

        For C, each reading thread computes the digest of what it has read. For A and B, the calling thread
        computes the digest after the Read, which is faster because the digest covers few rows.
        """
        digest = self._digest(operation)
        if operation.operand == "C":
            staging.transfer(operation, columns, digest)
        else:
            staging.transfer(operation, columns)
            for part in staging.groups(operation, columns):
                digest(*part)
        self._digests[operation.writes[0].slot] = digest.value

    def submit(self, operation: Operation, host: HostBlock) -> None:
        """Record which digests the device must find when it executes an operation.

        For an Upload, the digest of its source `host` is recorded for the target. For a Multiply, the digests
        of its two panels are passed to the device. Call this method before each operation is submitted.
        """
        if operation.kind is Kind.UPLOAD:
            if isinstance(host, Pageable):
                digest = self._digest_of_pageable(host)
            elif isinstance(host, Pinned):
                whole = self._digest(operation)
                whole(*stored_block(self._plan, operation), host.array)
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
        """Return the checksums of a strip of C that is about to be written.

        The device has computed them, and the Download has copied them to the host together with the strip.
        """
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
        rows, cols = operation.block
        op = {"A": self._problem.trans_a, "B": self._problem.trans_b}.get(operation.operand, Op.N)
        top, left = (cols[0], rows[0]) if op.swaps else (rows[0], cols[0])
        every = 1 if operation.operand == "C" else DIGEST_ROWS
        return Digest(self._weights, top, left, every, self._busy)


class Digest:
    """The digest of a matrix that several threads read in pieces, in any order.

    The digest covers only rows whose index in the matrix is a multiple of `every`. `top` and `left` are the
    row and the column of the stored operand at which the matrix begins.
    """

    def __init__(self, weights: Weights, top: int, left: int, every: int, busy: BusyTime) -> None:
        self.value = 0
        self._weights = weights
        self._top, self._left, self._every = top, left, every
        self._busy = busy
        self._lock = threading.Lock()

    def __call__(self, rows: Range, cols: Range, piece: Array) -> None:
        """Add the words of a piece to the digest. `rows` and `cols` are its place in the stored operand."""
        start = perf_counter_ns()
        part = self._weights.digest(piece, rows[0] - self._top, cols[0] - self._left, self._every)
        with self._lock:
            self.value = (self.value + part) % _MODULUS
        self._busy.append((start, perf_counter_ns()))
