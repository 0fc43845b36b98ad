"""How tiles are cut into the blocks that are checked, and the memory that their checksums take.

Blocks are near `SIDE` x `SIDE` and never reach over a strip: a strip is judged when it leaves.

Where the device takes the checksums (`GemmProblem.checked`) they lie behind what they belong to, in its slot, and what
holds of the slot holds of them: a panel's behind the panel, those of a tile's strips behind the tile, those of a finished
strip behind it, and behind a strip's slot on the host those that come down with it. In bytes, each part from a boundary of
`PART`, a number in double precision being 8 or, complex, 16:

    panel:  head  flags [extent]  norms [blocks][depth / SIDE] 8  sums [blocks][depth]
    strip:  found  made  old      each: head  rows [strip]  columns [width]  sums [down][across]  norms [down][across] 8

A head is two words: the digest (in `made`, 1 after a panel with a wrong one), and whether any flag is set. Flags, `rows` and `columns` of a strip too, are bytes, 1 for what is not finite.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from oocgemm.planning.problem import DTYPES, GemmProblem
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.tiling import TileShape, ceil_div, round_up

# Small blocks find small errors and cost memory, one part in SIDE of the panels.
SIDE = 128
# Elements that a thread brings to double precision at a time, where operands are narrower.
WIDENED = 1 << 18
PART = 16
HEAD = 16
# Rows of a stored panel from one that a digest takes to the next, as in kernels/check_sums.cu.
DIGESTED = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """An extent in strips, each of `per` blocks of `size`, the last of each perhaps shorter, as the last strip may be."""

    extent: int
    strip: int
    size: int
    per: int

    @classmethod
    def of(cls, extent: int, strip: int) -> "Cut":
        """Strips are cut evenly, a shorter last one as the others, so that a strip alone is cut as it is in its tile."""
        strip = max(1, strip)
        size = ceil_div(strip, ceil_div(strip, SIDE))
        return cls(extent, strip, size, ceil_div(strip, size))

    @property
    def blocks(self) -> int:
        whole, rest = divmod(self.extent, self.strip)
        return whole * self.per + ceil_div(rest, self.size)

    @property
    def strips(self) -> int:
        return ceil_div(self.extent, self.strip)


def borders(extent: int, strip: int) -> list[int]:
    """Where the blocks of a tile begin along one axis, and the end.

    >>> borders(500, 200), borders(450, 200), borders(3, 128)
    ([0, 100, 200, 300, 400, 500], [0, 100, 200, 300, 400, 450], [0, 3])
    """
    cut = Cut.of(extent, strip)
    strips = range(0, extent, cut.strip)
    return [0, *(b for top in strips for b in _inside(top, min(top + cut.strip, extent), cut.size))]


def _inside(top: int, bottom: int, size: int) -> Iterator[int]:
    for border in range(top + size, bottom + size, size):
        yield min(border, bottom)


@dataclass(frozen=True, slots=True)
class PanelRoom:
    """Where the parts of a panel's checksums begin, on the device; the head is at 0."""

    flags: int
    norms: int
    sums: int
    end: int

    @classmethod
    def of(cls, problem: GemmProblem, extent: int, depth: int, strip: int) -> "PanelRoom":
        """For a panel of that extent, in strips, and depth."""
        blocks = Cut.of(extent, strip).blocks
        norms = round_up(HEAD + extent, PART)
        sums = round_up(norms + 8 * blocks * ceil_div(depth, SIDE), PART)
        return cls(HEAD, norms, sums, round_up(sums + _wide(problem) * blocks * depth, PART))


@dataclass(frozen=True, slots=True)
class Part:
    """Where sums, norms and flags of one part of a strip's checksums begin; the head is at `begin`."""

    begin: int
    rows: int
    cols: int
    sums: int
    norms: int
    end: int

    @classmethod
    def of(cls, begin: int, wide: int, blocks: int, rows: int, cols: int) -> "Part":
        flags = begin + HEAD
        sums = round_up(flags + rows + cols, PART)
        norms = sums + wide * blocks
        return cls(begin, flags, flags + rows, sums, norms, round_up(norms + 8 * blocks, PART))


@dataclass(frozen=True, slots=True)
class StripRoom:
    """Where the checksums of a strip lie on the device: of what is `found` in it, of what it was `made` of, of the `old` C.
    A strip has at most `down` x `across` blocks, and always so many across as its tile can have."""

    down: int
    across: int
    found: Part
    made: Part
    old: Part

    @property
    def end(self) -> int:
        return self.old.end

    @classmethod
    def of(cls, problem: GemmProblem, tile: TileShape, strip: int) -> "StripRoom":
        w, h = min(tile.m, problem.m), min(tile.n, problem.n)
        down, across, wide = Cut.of(w, strip).per, Cut.of(h, h).blocks, _wide(problem)
        strip, blocks = min(strip, w), down * across
        found = Part.of(0, wide, blocks, 0, 0)
        made = Part.of(found.end, wide, blocks, strip, h)
        if problem.reads_c:
            return cls(down, across, found, made, Part.of(made.end, wide, blocks, strip, 0))
        return cls(down, across, found, made, Part(*[made.end] * 6))


def room_bytes(problem: GemmProblem, tile: TileShape, strip: int) -> dict[tuple[str, str], int]:
    """Bytes of checksums behind a slot by tier and operand, where the device takes them."""
    if problem.checked != "device":
        return {}
    w, h, r = min(tile.m, problem.m), min(tile.n, problem.n), min(tile.k, problem.depth)
    of_strip = StripRoom.of(problem, tile, strip).end
    return {
        ("device", "A"): PanelRoom.of(problem, w, r, strip).end,
        ("device", "B"): PanelRoom.of(problem, h, r, h).end,
        ("device", "C"): Cut.of(w, strip).strips * of_strip,
        ("device", "D"): of_strip,
        ("host", "C"): of_strip,
    }


def room_share(problem: GemmProblem) -> float:
    """About what checksums on the device add to a slot, as a part of it: somewhat more than in most cases."""
    if problem.checked != "device":
        return 0.0
    return 1.3 * _wide(problem) / (SIDE * problem.itemsizes["A"]) + 0.005


def panel_check_bytes(problem: GemmProblem, tile: TileShape, strip: int) -> tuple[int, int]:
    """Bytes on the host of the checksums of one panel of op(A), and of op(B); none where the host takes none."""
    if problem.checked != "host":
        return 0, 0
    down, across, deep = _blocks(problem, tile, strip)
    return down * (deep + 1) * _wide(problem), across * (deep + 1) * _wide(problem)


def check_bytes(problem: GemmProblem, tile: TileShape, slots: Slots, io_threads: int) -> int:
    """Host memory that checking takes: checksums of every panel held, sums of the tiles in work, signs, and room to
    bring narrow elements to double precision; where the device takes the checksums, what panels are weighted with, and
    a strip's checksums once more while it is judged."""
    if not problem.checked:
        return 0
    if problem.checked == "device":
        return 12 * sum(weights(problem, tile)) + 4 * StripRoom.of(problem, tile, slots.strip).end
    a, b = panel_check_bytes(problem, tile, slots.strip)
    down, across, _ = _blocks(problem, tile, slots.strip)
    wide = _wide(problem)
    tiles = (slots.c + 1) * down * across * (2 * wide + 16)
    widened = 0 if problem.itemsizes["A"] == wide else (io_threads + 2) * WIDENED * wide
    return (
        (slots.a + slots.host_a) * a
        + (slots.b + slots.host_b) * b
        + tiles
        + 8 * (problem.m + problem.n)
        + widened
    )


def weights(problem: GemmProblem, tile: TileShape) -> tuple[int, int]:
    """How many rows a stored panel or strip may have, and how many words of 4 bytes in a row."""
    most = max(1, min(tile.m, problem.m), min(tile.n, problem.n), min(tile.k, problem.depth))
    return most, ceil_div(most * max(problem.itemsizes["A"], problem.itemsizes["C"]), 4)


def _blocks(problem: GemmProblem, tile: TileShape, strip: int) -> tuple[int, int, int]:
    """Blocks of a tile down and across, and the depth of its panels."""
    w, h, r = min(tile.m, problem.m), min(tile.n, problem.n), min(tile.k, problem.depth)
    return Cut.of(w, strip).blocks, Cut.of(h, h).blocks, r


def _wide(problem: GemmProblem) -> int:
    """Bytes of a number in double precision."""
    return 16 if DTYPES[problem.acc_dtype].is_complex else 8
