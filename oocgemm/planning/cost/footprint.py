"""What a machine does and what a plan holds: rates, bytes on each tier, least bytes over each link."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

from oocgemm.planning.check_blocks import checksum_bytes, host_check_bytes
from oocgemm.planning.cost.machine import KernelRate, MachineModel, default_model
from oocgemm.planning.emulation import HOST_WORK, plane_offsets, work_bytes
from oocgemm.planning.integers import workspace_layout
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.schedule.traversal import ROW_BY_ROW, Traversal
from oocgemm.planning.tiling import Layout, TileShape, round_up

__all__ = ["KernelRate", "MachineModel", "default_model"]  # beside what is defined here

# Slots start on these boundaries: what cuBLAS and direct I/O want.
DEVICE_ALIGNMENT = 512
HOST_ALIGNMENT = 4096
# The host finishes strips in pieces of at most so many elements, which stay in a cache, with so many temporaries of a piece.
# The temporaries lie where panels are cast to the accumulator's dtype, or in room for the smallest piece.
FINISH_PIECE, MIN_FINISH_PIECE, FINISH_ARRAYS = 4096, 512, 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run a problem: what a planner chooses among."""

    tile: TileShape
    slots: Slots
    traversal: Traversal = ROW_BY_ROW
    io_threads: int = 1
    ramp: int = 0  # of the grid


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of op(A), op(B) and C."""

    a: Layout = field(default_factory=Layout)
    b: Layout = field(default_factory=Layout)
    c: Layout = field(default_factory=Layout)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on each tier, by purpose. The sums are what the budgets bound."""

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_total(self) -> int:
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())


def extents(problem: GemmProblem, tile: TileShape) -> tuple[int, int, int]:
    """Valid w, h and r of the largest tile."""
    return min(tile.m, problem.m), min(tile.n, problem.n), min(tile.k, problem.depth)


def slot_bytes(problem: GemmProblem, tile: TileShape, strip: int) -> dict[tuple[str, str], int]:
    """Bytes of one slot by tier and operand, aligned: of what it holds, and of the checksums behind that."""
    sizes = payload_bytes(problem, tile, strip)
    for slot, more in checksum_bytes(problem, tile, strip).items():
        sizes[slot] += round_up(more, DEVICE_ALIGNMENT if slot[0] == "device" else HOST_ALIGNMENT)
    return sizes


def payload_bytes(problem: GemmProblem, tile: TileShape, strip: int) -> dict[tuple[str, str], int]:
    """Bytes of what one slot holds by tier and operand, aligned: where its checksums begin if it has any."""
    w, h, r = extents(problem, tile)
    sizes = problem.itemsizes
    strip = min(strip, w)
    return {
        ("device", "A"): round_up(w * r * sizes["A"], DEVICE_ALIGNMENT),
        ("device", "B"): round_up(r * h * sizes["B"], DEVICE_ALIGNMENT),
        ("device", "C"): round_up(w * h * sizes["acc"], DEVICE_ALIGNMENT),
        ("device", "P"): plane_offsets(problem.planes, w, h, r).end if problem.planes else 0,
        ("device", "D"): round_up(strip * h * sizes["C"], DEVICE_ALIGNMENT),
        ("host", "A"): round_up(w * r * sizes["A"], HOST_ALIGNMENT),
        ("host", "B"): round_up(r * h * sizes["B"], HOST_ALIGNMENT),
        ("host", "C"): round_up(strip * h * sizes["C"], HOST_ALIGNMENT),
    }


def scratch_bytes(
    problem: GemmProblem, layouts: Layouts, io_threads: int, tile: TileShape | None = None
) -> int:
    """Host memory that reading and writing take beside the slots: as many threads read as write, and each of them works
    on one chunk, or on parts of lines where panels of the tile cut these."""
    sources = (layouts.a, layouts.b, *([layouts.c] if problem.reads_c else []))
    reading, writing = max(source.decode_bytes for source in sources), layouts.c.encode_bytes
    if tile is not None:
        w, h, r = extents(problem, tile)
        panels = zip(sources, ((w, r), (r, h), (w, h)), strict=False)
        reading = max(reading, *(source.line_scratch(panel) for source, panel in panels))
        writing = max(writing, layouts.c.scratch_bytes if layouts.c.line else 0)
    return io_threads * (reading + writing)


def footprint(
    problem: GemmProblem, candidate: Candidate, layouts: Layouts, machine: MachineModel
) -> Footprint:
    """What a candidate holds on each tier."""
    tile, slots = candidate.tile, candidate.slots
    size = slot_bytes(problem, tile, slots.strip)
    device = {
        "C": slots.c * size["device", "C"],
        "A": slots.a * size["device", "A"],
        "B": slots.b * size["device", "B"],
        "finish": slots.finish * size["device", "D"],
        "planes": slots.planes * size["device", "P"],
        "work": work_room(problem, tile, machine),
        "reserve": machine.device_reserve,
    }
    host = {
        "A": slots.host_a * size["host", "A"],
        "B": slots.host_b * size["host", "B"],
        "C": slots.host_c * size["host", "C"],
        "scratch": scratch_bytes(problem, layouts, candidate.io_threads, tile),
        "checks": host_check_bytes(problem, tile, slots, candidate.io_threads),
        "reserve": machine.host_reserve,
    }
    return Footprint(device, host)


def casts(problem: GemmProblem, machine: MachineModel) -> bool:
    """Whether panels are brought to the accumulator's dtype to be multiplied: the backend has no mixed product."""
    return machine.casts_panels and problem.a_dtype != problem.acc_dtype


def work_room(problem: GemmProblem, tile: TileShape, machine: MachineModel) -> int:
    """Bytes beside the slots that a step is multiplied in."""
    w, h, r = extents(problem, tile)
    if problem.planes:
        return HOST_WORK if machine.casts_panels else work_bytes(problem.planes, w, h)
    if casts(problem, machine):
        size = problem.itemsizes["acc"]
        finish = FINISH_ARRAYS * min(MIN_FINISH_PIECE, w * h) * size if problem.finishes else 0
        return round_up(max((w + h) * r * size, finish), DEVICE_ALIGNMENT)
    return workspace_layout(w, h, r).end if problem.exact else 0


def panel_room(problem: GemmProblem, machine: MachineModel) -> int:
    """Bytes that each element of a step's panels takes beside itself: of two steps' residues, or of this step's copy."""
    if problem.planes:
        return 2 * problem.planes
    return problem.itemsizes["acc"] if casts(problem, machine) else int(problem.exact)


@dataclass(frozen=True, slots=True)
class Part:
    """What of C a run computes: so many elements, which lie in so many rows and columns."""

    rows: int
    cols: int
    elements: int


def whole(problem: GemmProblem) -> Part:
    """All of it."""
    return Part(problem.m, problem.n, problem.m * problem.n)


def least_bytes(problem: GemmProblem, memory: int, part: Part | None = None) -> int:
    """Fewest bytes that any schedule must bring into a fast memory of that many bytes, for a part of C.

    With M elements of it, each operand read at least once:

    - beta = 0:  max(m k + k n, 2 m n k / sqrt(M) - 2 M - m n)
    - otherwise: max(m k + k n + m n, 2 m n k / sqrt(M) - 2 M)

    after Smith, Lowery, Langou and van de Geijn, *A tight I/O lower bound for matrix multiplication* (2019).
    M counts elements of the narrowest dtype involved, so that the bound holds for mixed dtypes too. For a part of C, m n
    is its elements, and m k and k n are of the rows and columns that it lies in.
    """
    part = part or whole(problem)
    sizes = problem.itemsizes
    narrowest = min(sizes.values())
    elements = max(1, memory // narrowest)
    once = required_bytes(problem, part)["h2d"]
    streaming = 2 * part.elements * problem.depth / sqrt(elements) - 2 * elements
    if not problem.reads_c:
        streaming -= part.elements
    return max(once, int(streaming * narrowest))


def required_bytes(problem: GemmProblem, part: Part | None = None) -> dict[str, int]:
    """Bytes each link carries if every element that a part of C takes crosses it once."""
    part = part or whole(problem)
    sizes = problem.itemsizes
    c_bytes = part.elements * sizes["C"]
    up = (
        part.rows * problem.depth * sizes["A"]
        + problem.depth * part.cols * sizes["B"]
        + (c_bytes if problem.reads_c else 0)
    )
    return {"read": up, "h2d": up, "d2h": c_bytes, "write": c_bytes}
