"""How the product is cut: tiles of C, panels of op(A) and op(B), and how they lie on the chunks of the arrays.

A *nominal* extent is what a slot is made for; a *valid* extent is what the matrix has there. They differ at
the far edges only:

           h        h     (valid < h)
        +--------+--------+---+
      w |  (0,0) |  (0,1) |   |
        +--------+--------+---+     rows(i) = [i w, min((i + 1) w, m))
      w |  (1,0) |  (1,1) |   |
        +--------+--------+---+
        +--------+--------+---+     valid < w
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, inf

from oocgemm.planning.problem import GemmProblem, Op

Span = tuple[int, int]
Tile = tuple[int, int]


def ceil_div(a: int, b: int) -> int:
    """The least integer not below a / b.

    >>> ceil_div(7, 3), ceil_div(6, 3), ceil_div(0, 3)
    (3, 2, 0)
    """
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The least multiple of b not below a.

    >>> round_up(7, 3), round_up(6, 3)
    (9, 6)
    """
    return ceil_div(a, b) * b


@dataclass(frozen=True, slots=True)
class TileShape:
    """Nominal extents: a tile of C is m x n, a panel of op(A) is m x k, a panel of op(B) is k x n."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    def within(self, problem: GemmProblem) -> "TileShape":
        """Clip the extents to those of the product: a larger tile would hold no more."""
        m, n, k = (max(1, extent) for extent in (problem.m, problem.n, problem.k))
        return TileShape(min(self.m, m), min(self.n, n), min(self.k, k))


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The tiles and steps of a problem of m x n x k elements (k being the depth really multiplied).

    With a `ramp` tile (0, 0), which the others wait for, has 1 + ramp thin steps in place of step 0, each as deep as
    all before it: thin panels are there sooner, so that the kernel begins sooner. They are numbered from `steps` on.
    """

    m: int
    n: int
    k: int
    tile: TileShape
    ramp: int = 0

    @classmethod
    def of(cls, problem: GemmProblem, tile: TileShape, ramp: int = 0) -> "TileGrid":
        return cls(problem.m, problem.n, problem.depth, tile, ramp)

    @property
    def shape(self) -> tuple[int, int]:
        """Tiles down and across."""
        return ceil_div(self.m, self.tile.m), ceil_div(self.n, self.tile.n)

    @property
    def steps(self) -> int:
        """Steps in a tile. At least one: where k = 0 a step of no depth leaves beta * C."""
        return max(1, ceil_div(self.k, self.tile.k))

    def rows(self, i: int) -> Span:
        """Valid rows of C in tile row i."""
        return i * self.tile.m, min((i + 1) * self.tile.m, self.m)

    def cols(self, j: int) -> Span:
        """Valid columns of C in tile column j."""
        return j * self.tile.n, min((j + 1) * self.tile.n, self.n)

    def elements(self, tile: Tile) -> int:
        """Elements of C in a tile."""
        (m0, m1), (n0, n1) = self.rows(tile[0]), self.cols(tile[1])
        return (m1 - m0) * (n1 - n0)

    def depth(self, p: int) -> Span:
        """Valid extent along k of step p."""
        start = p * self.tile.k
        if start < self.k or p == 0:
            return start, min(start + self.tile.k, self.k)
        thin = p - self.steps
        return (self.tile.k >> (self.ramp - thin + 1) if thin else 0), self.tile.k >> (self.ramp - thin)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stored array lies on its store, in the orientation of op(X).

    `read_chunk` is what a reader opens at a time; unless `partial_reads`, the whole of it is read and decoded
    whatever part is wanted. `write_chunk` is what one writer must own: a chunk, or a shard; with `free_chunks`
    the array is yet to be created and the planner chooses. `decode_bytes` is the host memory that reading one
    chunk takes beside its destination, `encode_bytes` that of writing one, and `encodes` says that a codec has
    work to do then. Elements of `itemsize` bytes lie side by side along axis `contiguous`, in lines of `line` elements, or
    of a chunk's extent where that is 0. `scratch_bytes` is the host memory that a thread takes to read or write a part of
    them. Panels of an array in memory with `wide` of these or
    more in a row, if that is not 0, may be copied to a device from where they lie; where the memory is `held` locked by whom it
    belongs to, those half as wide, and far thinner ones among them.
    """

    read_chunk: tuple[int, int] = (1, 1)
    write_chunk: tuple[int, int] = (1, 1)
    partial_reads: bool = True
    decode_bytes: int = 0
    encode_bytes: int = 0
    encodes: bool = False
    in_memory: bool = False
    free_chunks: bool = False
    contiguous: int = 1
    line: int = 0
    itemsize: int = 8
    scratch_bytes: int = 0
    wide: int = 0
    held: bool = False

    def oriented(self, op: Op) -> "Layout":
        """The same in the orientation of op(X)."""
        if not op.swaps:
            return self
        return replace(
            self,
            read_chunk=self.read_chunk[::-1],
            write_chunk=self.write_chunk[::-1],
            contiguous=1 - self.contiguous,
        )

    def spread(self, panel: Span) -> float:
        """Elements of the lines that panels of that shape cross, over those that they take: 1 for whole lines."""
        extent = panel[self.contiguous]
        if not self.partial_reads or self.in_memory or not extent:
            return 1.0
        if self.line:
            return max(1.0, self.line / extent)
        return cover_ratio(PANELS * extent, extent, self.read_chunk[self.contiguous])

    def segment(self, panel: Span) -> float:
        """Mean bytes of the segments that panels of that shape are read or written in; inf for whole lines.

        >>> npy, raw = Layout(line=4000, itemsize=8), Layout((500, 500), itemsize=8)
        >>> [npy.segment((64, r)) for r in (1000, 4000)], [raw.segment((64, r)) for r in (250, 500, 750)]
        ([8000.0, inf], [2000.0, inf, 6000.0])
        """
        extent, chunk = panel[self.contiguous], self.read_chunk[self.contiguous]
        if not self.partial_reads or self.in_memory or not extent:
            return inf
        if self.line:
            segments = float(extent < self.line)
        else:  # panels begin at multiples of their extent: parts of chunks on average, whole ones left out
            even = gcd(extent, chunk)
            segments = (extent + chunk - even - max(0, extent - chunk + even)) / chunk
        return extent * self.itemsize / segments if segments else inf

    def part_bytes(self, panel: Span) -> int:
        """Host memory that a thread takes to read panels of that shape, if they take a part of each line."""
        return self.scratch_bytes if self.line or self.segment(panel) < inf else 0

    def in_place(self, panel: Span) -> bool:
        """Whether panels of that shape are worth copying to a device, or from one, where the array lies."""
        return 0 < self.wide <= panel[self.contiguous] * (2 if self.held else 1)

    def straight(self, panel: Span, thin: Span | None = None) -> bool:
        """Whether panels of that shape are copied with nothing done on the host, or `thin` ones among them."""
        row = (thin or panel)[self.contiguous]
        return self.held and self.in_place(panel) and self.wide <= EASE * row

    def cover(self, extents: Span, panel: Span) -> float:
        """Read amplification: bytes read and decoded over bytes wanted, panels of that shape being read."""
        if self.partial_reads:
            return 1.0
        return cover_ratio(extents[0], panel[0], self.read_chunk[0]) * cover_ratio(
            extents[1], panel[1], self.read_chunk[1]
        )


PANELS = 64  # in a row, that are looked at
# Of arrays that are locked anyway panels that much narrower are copied from where they lie, if most are not: the first ones.
EASE = 8


@lru_cache(4096)  # candidates share extents
def cover_ratio(extent: int, panel: int, chunk: int) -> float:
    """How much longer than `extent` are the chunks that its panels touch: read amplification along one axis.

    >>> cover_ratio(100, 10, 5), cover_ratio(100, 10, 20), cover_ratio(90, 30, 20)
    (1.0, 2.0, 1.2222222222222223)
    """
    if extent == 0 or chunk == 1 or panel % chunk == 0:
        return 1.0
    count = ceil_div(extent, panel)
    sampled = min(count, 512)
    covered = 0
    for i in range(sampled):
        lo, hi = i * panel, min((i + 1) * panel, extent)
        covered += min(round_up(hi, chunk), extent) - lo // chunk * chunk
    return covered / min(sampled * panel, extent)
