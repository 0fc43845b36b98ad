"""What is in device memory besides panels and tiles, as byte offsets and sizes.

- *Expanded panels*: those that the device has transformed (`oocgemm.Transform`). A slot of the operand "P"
  contains the results for one step: the expanded panel of op(A), and behind it that of op(B). With several
  terms (`oocgemm.planning.terms`), all maps of a panel follow each other. A panel that is not transformed has
  no part there.
- *Numbers* of steps on elements of A, B and C, and what the device measures to find them.
- *Selected elements* of C. A device slot D contains the largest elements of all rows of C, or those elements
  of a strip that are above a threshold. Many warps of a GPU append to a slot of the second kind. Each append
  is a *segment*: some elements of one row, in ascending order of columns.
- *Checksums* of the blocks in which tiles of C are checked.

Blocks are about `SIDE` x `SIDE` elements. A tile is downloaded and checked in strips (blocks of its rows).
Therefore no block crosses the border between two strips.

If the device computes the checksums (`GemmProblem.checked`), they are stored in the same slot as the data,
behind the data:

- the checksums of a panel are behind the panel;
- the checksums of a tile's strips are behind the tile;
- the checksums of a strip in a slot of the finish kernel are behind that strip;
- the checksums of a strip are downloaded with it, and are behind it in the host slot too.

A strip has three sets of checksums, stored one after another: `found` are those of the computed strip, `made`
those that are predicted from its panels, and `old` those of the elements of C that were read.

The checksums of a panel, and each set of a strip, consist of these parts, with their shapes. Each part is
aligned to `PART` bytes:

    panel:   head   flags [extent]   norms [blocks][depth / SIDE]   sums [blocks][depth]
    set:     head   flags [rows of the strip]   flags [columns]   sums [down][across]   norms [down][across]

- `depth` is the panel's extent along k, `extent` its other extent, and `blocks` the number of blocks in it.
- `down` and `across` are the numbers of blocks along the rows and along the columns of a strip.
- A head is two words. The first is the digest of the panel or strip (in `made`: 1 if a panel had a wrong
  digest). The second tells whether any flag is set.
- A flag is one byte. It is 1 if the row or column contains Inf or NaN. `found` has no flags, and `old` has
  none of columns.
- A norm takes 8 bytes. A sum takes 8 bytes, or 16 if it is complex.
"""

from oocgemm.planning.problem import DTYPES, GemmProblem
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.sinks import Step
from oocgemm.planning.tiling import TileShape, ceil_div, round_up
from oocgemm.values import dataclass

# Alignment of all parts, in bytes: what kernels of products need.
_ALIGNMENT = 512
# Bytes per index along k of the sums that the device finds in panels: the number of elements, their sum, and
# that of their squares.
SUM_BYTES = 24


@dataclass(frozen=True, slots=True)
class MeasureRoom:
    """Byte offsets of the numbers that the device measures. The sums are at 0. `end` is the total size.

    `weights` has a float64 per index along k, `products` one per row of X, and `square` is one number. These
    three are zero at first, and used only if C is corrected.
    """

    weights: int
    products: int
    square: int
    end: int


def measure_room(problem: GemmProblem) -> MeasureRoom:
    """Lay out the measured numbers. All offsets are 0 unless the device finds numbers of steps."""
    if not problem.finds_numbers:
        return MeasureRoom(0, 0, 0, 0)
    weights = SUM_BYTES * problem.depth
    products = weights + 8 * problem.depth
    square = products + 8 * problem.m
    return MeasureRoom(weights, products, square, round_up(square + 8, _ALIGNMENT))


def map_offsets(problem: GemmProblem, m: int, n: int, k: int) -> tuple[dict[str, list[int]], int]:
    """Lay out the expanded panels of an m x n x k step.

    Returns for the roles "A" and "B" the byte offset of each map, or -1 for a map that is the panel itself,
    and the bytes of all.
    """
    offsets, end = dict[str, list[int]](), 0
    for role, rows, operand in (("A", m, problem.a), ("B", n, problem.b)):
        size = round_up(rows * k * DTYPES[operand.dtype].itemsize, _ALIGNMENT)
        offsets[role] = []
        for steps in problem.terms.of(role):
            expands = bool(operand.stored or steps)
            offsets[role].append(end if expands else -1)
            end += size * expands
    return offsets, end


def correction_bytes(problem: GemmProblem) -> tuple[int, int]:
    """Return the bytes on the device of the numbers of rows and of columns that are subtracted from C."""
    rows, cols = (round_up(8 * extent, _ALIGNMENT) for extent in (problem.m, problem.n))
    return (rows, cols) if problem.is_corrected else (0, 0)


def number_offsets(steps: tuple[Step, ...], m: int, n: int) -> tuple[list[tuple[int, int]], int]:
    """Lay out the numbers of a chain for an m x n matrix C, as float64.

    Returns for each step the byte offsets of its numbers per row and per column, or -1, and the bytes of all.
    """
    offsets, end = list[tuple[int, int]](), 0
    for step in steps:
        at = [-1, -1]
        for axis, (used, extent) in enumerate(((step.rows, m), (step.cols, n))):
            if used:
                at[axis], end = end, end + round_up(8 * extent, _ALIGNMENT)
        offsets.append((at[0], at[1]))
    return offsets, end


def epilogue_bytes(problem: GemmProblem) -> int:
    """Return the bytes on the device of the numbers of the epilogue's steps, aligned."""
    return number_offsets(problem.epilogue, problem.m, problem.n)[1]


def scale_bytes(problem: GemmProblem) -> int:
    """Return the bytes on the device of the numbers by which rows and columns of C are scaled, aligned."""
    itemsize = DTYPES[problem.c_dtype].itemsize // 2  # that of a score
    return round_up(itemsize * problem.n, _ALIGNMENT) if problem.sink.scaled else 0


def step_offsets(problem: GemmProblem, operand: str) -> tuple[list[int], int]:
    """Lay out the numbers of an operand's steps on the device, as float64.

    Returns for each step that the device does the byte offset of its numbers, or -1, and the bytes of all.
    """
    offsets, end = list[int](), 0
    for step in (problem.a if operand == "A" else problem.b).prepared:
        offsets.append(end if step.axis else -1)
        end += 8 * problem.stored_extent(operand, step.axis) if step.axis else 0
    return offsets, round_up(end, _ALIGNMENT)


def vector_bytes(problem: GemmProblem) -> int:
    """Return the bytes on the device of the numbers of all operands' steps, aligned."""
    return sum(step_offsets(problem, operand)[1] for operand in problem.operands)


def factor_bytes(problem: GemmProblem) -> int:
    """Return the bytes on the device of a matrix that B or the sink needs there, aligned."""
    elements = problem.b.factor_elements(problem.m, problem.n) + problem.n * problem.sink.vector_elements
    return round_up(elements * problem.acc_itemsize, _ALIGNMENT)


# The value of all bytes of a selected element that stands for none: its score is NaN, and no index is larger.
NONE = 0xFF
# Maximum number of elements in a segment, and minimum number in a segment that is not the last of its row.
SEGMENT, MIN_SEGMENT = 256, 225
# Bytes of the counters of elements and of segments, and of the description of a segment: its row, its number
# of elements, and its first element.
COUNTER_BYTES, SEGMENT_BYTES = 16, 16


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """Byte offsets in a slot. The counters start at 0. `end` is the size of the slot."""

    segments: int
    elements: int
    end: int


def found_layout(problem: GemmProblem, rows: int, cols: int) -> FoundLayout:
    """Lay out a slot with room for all elements of a strip."""
    segments = round_up(COUNTER_BYTES, _ALIGNMENT)
    elements = segments + round_up(rows * (cols // MIN_SEGMENT + 1) * SEGMENT_BYTES, _ALIGNMENT)
    return FoundLayout(
        segments, elements, elements + round_up(rows * cols * problem.itemsizes["C"], _ALIGNMENT)
    )


# Maximum rows and columns of a block. Smaller blocks would detect smaller errors, but need more memory.
SIDE = 128
# Number of narrow elements that a host thread casts to double precision at a time. More would take more
# memory.
WIDENING_ELEMENTS = 1 << 18
# Alignment, in bytes, of the parts that the checksums of a panel or strip consist of.
PART = 16
# Bytes of a head, the first part of the checksums: a digest, and a word that tells whether any flag is set.
HEAD = 16
# A digest covers every DIGEST_ROWS-th row of a stored panel. The CUDA kernels use the same number.
DIGEST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Blocking:
    """Division of one extent of a tile into strips, and of each strip into `per` blocks of `size` elements.

    The rows of a tile are divided into the strips that are downloaded one by one. Its columns are one strip.
    The last strip, and the last block of each strip, may be shorter.
    """

    extent: int
    strip: int
    size: int
    per: int

    @classmethod
    def of(cls, extent: int, strip: int) -> "Blocking":
        """Divide an extent into strips of `strip` elements, and each strip into blocks of at most `SIDE`."""
        strip = max(1, strip)
        size = ceil_div(strip, ceil_div(strip, SIDE))
        return cls(extent, strip, size, ceil_div(strip, size))

    @property
    def blocks(self) -> int:
        """Number of blocks in the extent."""
        whole, rest = divmod(self.extent, self.strip)
        return whole * self.per + ceil_div(rest, self.size)

    @property
    def strips(self) -> int:
        return ceil_div(self.extent, self.strip)


def borders(extent: int, strip: int) -> list[int]:
    """List where the blocks of a tile start along one axis, and the end of the last one.

    >>> borders(500, 200), borders(450, 200), borders(3, 128)
    ([0, 100, 200, 300, 400, 500], [0, 100, 200, 300, 400, 450], [0, 3])
    """
    blocking = Blocking.of(extent, strip)
    size, found = blocking.size, [0]
    for top in range(0, extent, blocking.strip):
        bottom = min(top + blocking.strip, extent)
        found += [min(border, bottom) for border in range(top + size, bottom + size, size)]
    return found


@dataclass(frozen=True, slots=True)
class PanelOffsets:
    """Byte offsets of the parts of a panel's checksums, behind the head, and their total size `end`."""

    flags: int
    norms: int
    sums: int
    end: int

    @classmethod
    def of(cls, problem: GemmProblem, extent: int, depth: int, strip: int) -> "PanelOffsets":
        """Lay out the checksums of a panel of `depth` along k and `extent` along the other axis.

        `strip` is the number of rows per strip of C for a panel of op(A), and the number of columns of the
        tile for a panel of op(B).
        """
        blocks = Blocking.of(extent, strip).blocks
        norms = round_up(HEAD + extent, PART)
        sums = round_up(norms + 8 * blocks * ceil_div(depth, SIDE), PART)
        return cls(HEAD, norms, sums, round_up(sums + _double_bytes(problem) * blocks * depth, PART))


@dataclass(frozen=True, slots=True)
class PartOffsets:
    """Byte offsets of one of the three sets of a strip's checksums (`StripOffsets`).

    The set starts at `begin` with its head. `rows` and `cols` are the flags, one per row and one per column.
    """

    begin: int
    rows: int
    cols: int
    sums: int
    norms: int
    end: int

    @classmethod
    def of(cls, begin: int, double: int, blocks: int, rows: int, cols: int) -> "PartOffsets":
        """Lay out a set from byte `begin` on, with a sum of `double` bytes and a norm per block."""
        flags = begin + HEAD
        sums = round_up(flags + rows + cols, PART)
        norms = sums + double * blocks
        return cls(begin, flags, flags + rows, sums, norms, round_up(norms + 8 * blocks, PART))


@dataclass(frozen=True, slots=True)
class StripOffsets:
    """Byte offsets of the three sets of checksums of a strip of C on the device. `old` is empty if beta = 0.

    Each set has a matrix of sums and one of norms, `down` x `across`: the maximum numbers of blocks. Smaller
    strips leave elements unused.
    """

    down: int
    across: int
    found: PartOffsets
    made: PartOffsets
    old: PartOffsets

    @property
    def end(self) -> int:
        return self.old.end

    @classmethod
    def of(cls, problem: GemmProblem, tile: TileShape, strip: int) -> "StripOffsets":
        m, n = min(tile.m, problem.m), min(tile.n, problem.n)
        down, across, double = Blocking.of(m, strip).per, Blocking.of(n, n).blocks, _double_bytes(problem)
        strip, blocks = min(strip, m), down * across
        found = PartOffsets.of(0, double, blocks, 0, 0)
        made = PartOffsets.of(found.end, double, blocks, strip, n)
        if problem.reads_c:
            return cls(down, across, found, made, PartOffsets.of(made.end, double, blocks, strip, 0))
        return cls(down, across, found, made, PartOffsets(*[made.end] * 6))


def checksum_bytes(problem: GemmProblem, tile: TileShape, strip: int) -> dict[tuple[str, str], int]:
    """Return the bytes of checksums per slot, by (tier, operand); empty unless the device computes them."""
    if problem.checked != "device":
        return {}
    m, n, k = min(tile.m, problem.m), min(tile.n, problem.n), min(tile.k, problem.depth)
    per_strip = StripOffsets.of(problem, tile, strip).end
    return {
        ("device", "A"): PanelOffsets.of(problem, m, k, strip).end,
        ("device", "B"): PanelOffsets.of(problem, n, k, n).end,
        ("device", "C"): Blocking.of(m, strip).strips * per_strip,
        ("device", "D"): per_strip,
        ("host", "C"): per_strip,
    }


def checksum_fraction(problem: GemmProblem) -> float:
    """Estimate the bytes of checksums per byte of data on the device. The estimate tends to be too high."""
    if problem.checked != "device":
        return 0.0
    return 1.3 * _double_bytes(problem) / (SIDE * problem.itemsizes["A"]) + 0.005


def panel_checksum_bytes(problem: GemmProblem, tile: TileShape, strip: int) -> tuple[int, int]:
    """Return the host bytes of checksums per panel of op(A) and of op(B); 0 unless the host computes them."""
    if problem.checked != "host":
        return 0, 0
    down, across, depth = _blocks(problem, tile, strip)
    double = _double_bytes(problem)
    return down * (depth + 1) * double, across * (depth + 1) * double


def host_check_bytes(problem: GemmProblem, tile: TileShape, slots: Slots, io_threads: int) -> int:
    """Return the bytes of host memory that checking takes.

    If the host computes the checksums, it stores those of all panels in slots and of the tiles that are being
    computed, a random sign per row and column of C, and workspaces for casts to double precision. If the
    device computes them, the host stores the weights of digests, and four times the checksums of a strip.
    """
    if not problem.checked:
        return 0
    if problem.checked == "device":
        return 12 * sum(digest_weights(problem, tile)) + 4 * StripOffsets.of(problem, tile, slots.strip).end
    a, b = panel_checksum_bytes(problem, tile, slots.strip)
    down, across, _ = _blocks(problem, tile, slots.strip)
    double = _double_bytes(problem)
    tiles = (slots.c + 1) * down * across * (2 * double + 16)
    widening = 0 if problem.itemsizes["A"] == double else (io_threads + 2) * WIDENING_ELEMENTS * double
    return (
        (slots.a + slots.host_a) * a
        + (slots.b + slots.host_b) * b
        + tiles
        + 8 * (problem.m + problem.n)
        + widening
    )


def digest_weights(problem: GemmProblem, tile: TileShape) -> tuple[int, int]:
    """Return the numbers of row weights and word weights for digests of the largest panel or strip."""
    longest = max(1, min(tile.m, problem.m), min(tile.n, problem.n), min(tile.k, problem.depth))
    return longest, ceil_div(longest * max(problem.itemsizes["A"], problem.itemsizes["C"]), 4)


def _blocks(problem: GemmProblem, tile: TileShape, strip: int) -> tuple[int, int, int]:
    """Return the numbers of blocks down and across a tile, and the depth of its panels."""
    m, n, k = min(tile.m, problem.m), min(tile.n, problem.n), min(tile.k, problem.depth)
    return Blocking.of(m, strip).blocks, Blocking.of(n, strip if problem.cover.square else n).blocks, k


def _double_bytes(problem: GemmProblem) -> int:
    """Bytes per element of a sum in double precision: 8, or 16 if the product is complex."""
    return 16 if DTYPES[problem.acc_dtype].is_complex else 8
