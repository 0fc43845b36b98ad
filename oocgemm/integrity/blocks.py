"""Divide a check by Freivalds' algorithm into blocks that fit into its memory."""

from dataclasses import dataclass

from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.checksums import VECTORS
from oocgemm.errors import BudgetError
from oocgemm.integrity.passes import MAX_CUT_WIDTH, PIECE, Oriented
from oocgemm.integrity.rounding import wide_dtype
from oocgemm.planning import GemmProblem
from oocgemm.planning.tiling import ceil_div
from oocgemm.planning.units import format_size

# Minimum columns of C per group, if C has that many. Narrower groups would reveal smaller errors, but take
# longer: op(A) is multiplied once per group.
GROUP = 1024
# Limits the number of groups of columns. The check multiplies op(A) by random vectors once per group, which
# takes about as long as reading op(A). All these multiplications together may take this share of the time to
# read A, B and C.
MAX_SHARE = 1 / 2
# Minimum rows of C, and minimum extent along k, of a block, unless the matrices are
# smaller. If a chunk is larger, its extent is the minimum.
MIN_BLOCK = 256
# Minimum number of elements that a thread reads at a time. Each group of columns has at least as many in C
# and in op(B), if these are large enough.
MIN_PIECE = 1 << 15


@dataclass(frozen=True)
class Operands:
    """The matrices of the product to verify: op(A), op(B), C, and the old C (None if beta is 0)."""

    left: Oriented
    right: Oriented
    result: Oriented
    before: Oriented | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """m, n and k."""
        return *self.result.shape, self.left.shape[1]

    def transposed(self) -> "Operands":
        """Return the transposed product, C^T = op(B)^T op(A)^T, whose rows are the columns of C."""
        before = self.before.transposed() if self.before else None
        return Operands(self.right.transposed(), self.left.transposed(), self.result.transposed(), before)

    def all(self) -> list[Oriented]:
        """Return op(A), op(B), C and, unless beta is 0, the old C."""
        return [x for x in (self.left, self.right, self.result, self.before) if x is not None]


@dataclass(frozen=True)
class Blocks:
    """How a check divides its work to fit into its memory.

    Attributes:
        group: columns of C per group. Each group has its own random vectors.
        rows: rows of C that are processed at a time.
        depth: extent along k that is processed at a time.
        threads: number of threads that read the matrices.
        piece: number of elements that each thread reads at a time.
    """

    group: int
    rows: int
    depth: int
    threads: int
    piece: int


def cut(problem: GemmProblem, x: Operands, memory: int, threads: int, groups: int | None = None) -> Blocks:
    """Divide a check so that it takes at most `memory` bytes.

    `threads` and `groups` are maximum numbers.

    Raises:
        BudgetError: `memory` is too small even for one thread, one group and the smallest blocks.
    """
    m, n, k = x.shape
    k = k if problem.depth else 0
    wide = wide_dtype(numpy_dtype(problem.acc_dtype)).itemsize
    affordable = int(MAX_SHARE * (m * k + k * n + m * n) / max(1, m * k))
    # Threads multiply op(B) and C by random vectors in parts, and a part lies in one group. If m or k is
    # small, groups get more columns, because small parts are multiplied slowly.
    worthwhile = ceil_div(n, max(GROUP, MIN_PIECE // max(1, min(m, k))))
    groups = max(1, min(worthwhile, affordable, groups or affordable))
    # Bytes for flags: one per column of C (excluded or not), and one per row of C and group (wrong or not).
    # Only one group is counted here.
    fixed = n + m
    # Bytes per group and row of C: expected sums, two temporary arrays of the same size, norms and flags.
    # Bytes per group and index along k: sums, norms and the squares of norms.
    per_row, per_depth = 3 * VECTORS * wide + 128, VECTORS * wide + 24
    tall = max(MIN_BLOCK, x.left.chunk[0], x.result.chunk[0])
    deep = max(MIN_BLOCK, x.left.chunk[1], x.right.chunk[0])

    def scratch(threads: int, piece: int) -> int:
        pieces = max(y.piece_bytes(piece) for y in x.all()) + (x.before.piece_bytes(piece) if x.before else 0)
        # per thread: elements as read; converted elements, squares and products, 8 arrays; random signs
        return threads * (pieces + 8 * piece * wide + VECTORS * MAX_CUT_WIDTH * wide)

    piece = PIECE
    while piece > MIN_PIECE and scratch(threads, piece) > memory // 2:
        piece //= 2
    while threads > 1 and scratch(threads, piece) + fixed > memory // 2:
        threads -= 1
    taken = scratch(threads, piece) + fixed
    minimum = taken + per_row * min(m, tall) + per_depth * min(k, deep)
    if memory < minimum:
        raise BudgetError(
            f"verifying takes at least {format_size(minimum)}, --host-memory is {format_size(memory)}: "
            f"pass --host-memory {ceil_div(minimum, 1 << 20)}MiB",
            least=minimum,
        )
    free = memory - taken
    while True:
        rows_bytes, depth_bytes = per_row * groups + groups, per_depth * groups
        if m * rows_bytes + min(k, deep) * depth_bytes <= free:
            return _blocks(n, groups, m, (free - m * rows_bytes) // depth_bytes, deep, k, threads, piece)
        if k * depth_bytes + min(m, tall) * rows_bytes <= free:
            rows = (free - k * depth_bytes) // rows_bytes
            return _blocks(n, groups, rows // tall * tall or rows, k, deep, k, threads, piece)
        if groups == 1:
            break
        groups //= 2
    # Neither all rows of C nor all of k fit. op(B) is then read once per block of rows, so blocks of rows are
    # made as large as possible, and blocks along k as small as allowed.
    rows = (free - min(k, deep) * depth_bytes) // rows_bytes
    return _blocks(n, 1, max(1, rows // tall * tall or rows), min(k, deep), deep, k, threads, piece)


def _blocks(
    n: int, groups: int, rows: int, depth: int, deep: int, k: int, threads: int, piece: int
) -> Blocks:
    depth = k if depth >= k else depth // deep * deep or depth
    return Blocks(max(1, ceil_div(n, groups)), max(1, rows), max(1, depth), threads, piece)
