"""The inputs of the planner: problem, machine, layouts of the arrays, and memory budgets."""

from dataclasses import replace
from functools import cached_property, lru_cache
from math import isqrt
from typing import Any

from oocgemm.planning.cost.machine import NEW_CHUNK_BYTES, MachineModel
from oocgemm.planning.layout import (
    Coding,
    Decoded,
    Direct,
    Encoded,
    InPlace,
    Layout,
    Layouts,
    Ringed,
    Route,
    Slotted,
)
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.tiling import Shape, TileShape, ceil_div
from oocgemm.values import dataclass

# Target size of the chunks of a new C, in bytes. Buffers of this size are cheap to allocate repeatedly, and a
# disk writes them at its full rate.
CHUNK_BYTES = NEW_CHUNK_BYTES
# A Gram matrix is computed in about this many strips, unless its chunks would then have fewer rows than
# MIN_GRAM_CHUNK. With S strips, a fraction of 1 / S more than the triangle is multiplied.
GRAM_STRIPS, MIN_GRAM_CHUNK = 16, 256


# Seconds to enqueue an operation, if one thread only enqueues operations, and if A, B and C have at most
# ENQUEUED_BYTES bytes. Larger products were slower with the smaller tiles that so short a time suggests.
ENQUEUE, ENQUEUED_BYTES = 60e-6, 512 << 20


@dataclass(frozen=True, slots=True)
class Budgets:
    """Hard upper bounds, in bytes, on the memory that a run occupies on the device and on the host.

    `memory` is the size in the option ``memory``, or 0 if that option was not given: the bound on the host
    budget or, if the memory of the device is host memory, on both budgets together.
    """

    device: int
    host: int
    memory: int = 0

    def by_option(self, *, unified: bool) -> dict[str, int]:
        """Return the sizes in bytes by the options of a run that they belong to.

        >>> Budgets(1, 2).by_option(unified=True), Budgets(3, 1, 4).by_option(unified=True)
        ({'device_memory': 1, 'host_memory': 2}, {'memory': 4})
        """
        if not self.memory:
            return {"device_memory": self.device, "host_memory": self.host}
        on_device = {} if unified else {"device_memory": self.device}
        return on_device | {"memory": self.memory}


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

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once: it takes as long as enqueuing an operation, and caches ask for it."""
        return hash((self.problem, self.machine, self.layouts, self.budgets, self.devices))

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of texts differ from process to process.
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @cached_property
    def routes(self) -> dict[str, Route]:
        """How the blocks of "A", "B" and "C" travel between their arrays and the multiplication."""
        layouts, codings = self.layouts, self.layouts.codings
        a, b = self._route(layouts.a, codings.a), self._route(layouts.b, codings.b)
        return {"A": a, "B": b, "C": self._route_of_c(layouts.c, codings.c)}

    def _route(self, layout: Layout, coding: Coding | None) -> Route:
        """Choose the route of A or B.

        Arrays in host memory or in the page cache need no host slots. But the host computes checksums in host
        slots. There it also computes digests of blocks that it reads from files.
        """
        unified, checked = self.machine.unified, self.problem.checked
        if layout.in_place and unified:
            return InPlace(layout)
        if unified or checked == "host" or not (layout.in_memory or (layout.page_cached and not checked)):
            return Slotted(layout, digests=checked == "device")
        if coding is not None:
            return Decoded(layout, coding)
        return Direct(layout) if layout.pinned else Ringed(layout)

    def _route_of_c(self, layout: Layout, coding: Coding | None) -> Route:
        """Choose the route of C.

        If checksums are computed, a C that is stored is checked in host slots. There, strips of a Gram matrix
        are mirrored unless a GPU does it, and get the old elements outside of a triangle.
        """
        mirrored = self.problem.cover.halves and self.machine.multiprocessors == 1
        in_slots = self.problem.sink.stores_c and (self.problem.checked or mirrored)
        if layout.in_place and self.machine.unified:
            return InPlace(layout)
        if self.machine.unified or in_slots or not layout.in_memory:
            return Slotted(layout) if coding is None else Encoded(layout)
        return Direct(layout) if layout.pinned else Ringed(layout)

    @property
    def keeps_outside(self) -> bool:
        """Whether old elements outside of the triangle that is stored are read, and written again."""
        return self._has_outside and not self.routes["C"].streams

    @property
    def restores_outside(self) -> bool:
        """Whether a GPU overwrites elements outside of the triangle, which the run saves and restores."""
        return self._has_outside and self.routes["C"].streams

    @property
    def _has_outside(self) -> bool:
        return self.problem.triangle != "" and self.layouts.c.writing.existing

    @cached_property
    def turns_on_device(self) -> bool:
        """Whether the device transposes strips of a whole Gram matrix for their second Download."""
        return self.routes["C"].streams and self.problem.cover.mirrored

    @cached_property
    def enqueues(self) -> bool:
        """Whether one thread enqueues all operations: arrays are pinned, C is not emulated or checked."""
        layouts = self.layouts.a, self.layouts.b, self.layouts.c
        return all(x.pinned for x in layouts) and not (self.problem.checked or self.problem.planes)

    @property
    def enqueued(self) -> "Setting":
        """This setting. If `enqueues`, it has the times of operations that one thread only enqueues."""
        if not self.enqueues:
            return self
        problem, sizes, machine = self.problem, self.problem.itemsizes, self.machine.enqueued()
        operands = problem.depth * (problem.m * sizes["A"] + problem.n * sizes["B"])
        if operands + problem.m * problem.n * sizes["C"] <= ENQUEUED_BYTES:
            machine = replace(machine, issue=min(machine.issue, ENQUEUE))
        return replace(self, machine=machine)

    @cached_property
    def host_caches_panels(self) -> bool:
        """Whether it pays to cache panels of A and B in host slots, so that they are not read again.

        It does not if A and B are in host memory already, or if the device shares the host's memory.
        """
        operands = self.routes["A"], self.routes["B"]
        return not self.machine.unified and not all(x.layout.in_memory or x.streams for x in operands)

    @cached_property
    def works_apart(self) -> bool:
        """Whether devices share no panels, because they multiply in host memory."""
        return self.machine.unified

    def c_chunks(self, tile: TileShape) -> Shape:
        """Return the shape of C's chunks: those of an existing C, or chunks of a new C for this tile shape.

        Chunks of a new C have about `CHUNK_BYTES` bytes, at most twice as many, and are nearly square. No
        chunk crosses the border between two tiles.
        """
        if not self.layouts.c.writing.free:
            return self.layouts.c.writing.chunk
        elements = CHUNK_BYTES // self.problem.itemsizes["C"]
        if self.problem.cover.square:
            # Chunks are square, so that the strips of a staircase begin and end at borders of chunks in both
            # directions. They are smaller if strips of whole chunks would be thick for the matrix.
            target = min(isqrt(elements), max(MIN_GRAM_CHUNK, self.problem.m // GRAM_STRIPS))
            side = _dividing_extent(target, tile.m, self.problem.m)
            return side, side
        rows = _dividing_extent(isqrt(elements), tile.m, self.problem.m)
        return rows, _dividing_extent(max(1, elements // rows), tile.n, self.problem.n)


@lru_cache(4096)
def _dividing_extent(target: int, nominal: int, extent: int) -> int:
    """Choose a chunk extent that divides the tile extent `nominal`, or a tile that spans the `extent` of C.

    The result is near `target`, and at most sqrt(2) times `target`. If no divisor of `extent` is near, the
    last chunk of a tile that spans C is shorter.
    """
    whole = min(nominal, extent)
    divisors = [d for q in range(1, isqrt(whole) + 1) if whole % q == 0 for d in (q, whole // q)]
    best = max((d for d in divisors if d * d <= 2 * target * target), default=1)
    if nominal >= extent and 2 * best * best < target * target:
        return max(1, ceil_div(extent, max(1, ceil_div(extent, target))))
    return best
