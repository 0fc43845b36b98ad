"""The inputs of the planner: problem, machine, layouts of the arrays, and memory budgets."""

from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt

from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.tiling import Layout, Shape, TileShape, ceil_div

# Target size of the chunks of a new C, in bytes. Buffers of this size are cheap to allocate repeatedly, and a
# disk writes them at its full rate.
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Budgets:
    """Hard upper bounds, in bytes, on the memory that a run occupies on the device and on the host."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of op(A), op(B) and C."""

    a: Layout = field(default_factory=Layout)
    b: Layout = field(default_factory=Layout)
    c: Layout = field(default_factory=Layout)

    @property
    def operands_in_memory(self) -> bool:
        """Whether both A and B are in memory."""
        return self.a.in_memory and self.b.in_memory

    @property
    def in_place(self) -> set[str]:
        """Operands ("A", "B", "C") that the CPU multiplies where they are in the caller's memory."""
        layouts = {"A": self.a, "B": self.b, "C": self.c}
        return {operand for operand, layout in layouts.items() if layout.in_place}


@dataclass(frozen=True)
class Setting:
    """The inputs of the planner: a problem, the machine that runs it, the layouts of its arrays, budgets.

    If a run uses several `devices`, the device budget is for each of them, the host budget for all together.
    """

    problem: GemmProblem
    machine: MachineModel
    layouts: Layouts
    budgets: Budgets
    devices: int = 1

    def streams(self, layout: Layout) -> bool:
        """Whether blocks of an operand with this layout go between its array and the GPU without host slots.

        So do those of arrays in host memory, unless the host computes checksums: it does so in host slots.
        """
        return layout.in_memory and not self.machine.unified and self.problem.checked != "host"

    @property
    def streams_c(self) -> bool:
        """Whether blocks of C need no host slots. If checksums are computed, C is checked in host slots."""
        return self.streams(self.layouts.c) and not self.problem.checked

    @property
    def host_caches_panels(self) -> bool:
        """Whether it pays to cache panels of A and B in host slots, so that they are not read again.

        It does not if A and B are in host memory already, or if the device shares the host's memory.
        """
        return not self.machine.unified and not self.layouts.operands_in_memory

    @property
    def works_apart(self) -> bool:
        """Whether devices share no panels, because neither A nor B has host slots."""
        return self.machine.unified or (self.streams(self.layouts.a) and self.streams(self.layouts.b))

    def c_chunks(self, tile: TileShape) -> Shape:
        """Return the shape of C's chunks: those of an existing C, or chunks of a new C for this tile shape.

        Chunks of a new C have about `CHUNK_BYTES` bytes, at most twice as many, and are nearly square. No
        chunk crosses the border between two tiles.
        """
        if not self.layouts.c.free_chunks:
            return self.layouts.c.write_chunk
        elements = CHUNK_BYTES // self.problem.itemsizes["C"]
        rows = _dividing_extent(isqrt(elements), tile.m, self.problem.m)
        return rows, _dividing_extent(max(1, elements // rows), tile.n, self.problem.n)


@lru_cache(4096)
def _dividing_extent(target: int, nominal: int, extent: int) -> int:
    """Choose a chunk extent that divides the tile extent `nominal`.

    It is near `target`, and at most sqrt(2) times `target`. It need not divide a tile that spans the whole
    `extent` of C.
    """
    if nominal >= extent:
        return max(1, ceil_div(extent, max(1, ceil_div(extent, target))))
    divisors = [d for q in range(1, isqrt(nominal) + 1) if nominal % q == 0 for d in (q, nominal // q)]
    return max(d for d in divisors if d * d <= 2 * target * target)
