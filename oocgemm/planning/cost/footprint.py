"""Memory of a plan on device and host: slots, temporary memory, and the ring.

The ring consists of the pinned buffers through which pageable arrays are copied to and from a GPU.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod

from oocgemm.planning.cost.coding import decoding_shape, encoding_bytes, slot_frames
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.device_memory import (
    checksum_bytes,
    correction_bytes,
    epilogue_bytes,
    factor_bytes,
    found_layout,
    host_check_bytes,
    map_offsets,
    measure_room,
    scale_bytes,
    vector_bytes,
)
from oocgemm.planning.emulation import HOST_WORK, plane_offsets, work_bytes, workspace_layout
from oocgemm.planning.layout import request_bytes
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.schedule.traversal import ROW_BY_ROW, Traversal
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileGrid, TileShape, round_up
from oocgemm.values import dataclass

# Alignment, in bytes, of slots (buffers): cuBLAS needs the first, direct I/O the second.
DEVICE_ALIGNMENT = 512
HOST_ALIGNMENT = 4096
# The host backend applies alpha and beta to C in pieces that fit into a CPU cache. A piece has between
# MIN_FINISH_PIECE and FINISH_PIECE elements, as the workspace permits, and needs FINISH_ARRAYS temporary
# arrays of its length.
FINISH_PIECE, MIN_FINISH_PIECE, FINISH_ARRAYS = 4096, 512, 3
# Maximum bytes of a part of a strip that is mirrored, or whose old elements are read, unless a chunk is
# larger.
MIRRORED_BYTES = 4 << 20

# The ring.

# Maximum bytes of a buffer, and of a piece of a block that one thread copies at a time. With larger pieces,
# the last ones of a block keep fewer threads busy. With smaller ones, Python takes longer to issue the copy
# of a piece than the link takes to copy it.
PIECE = 8 << 20
# Minimum bytes of a piece that Python's threads copy. A block is cut into one piece per thread, unless pieces
# would be smaller. Pieces have at least MIN_BUSY_PIECE bytes while those of other blocks wait for a thread.
MIN_PIECE, MIN_BUSY_PIECE = 2 << 20, 8 << 20
# Minimum and maximum bytes of a piece of files that compiled threads read: to open a file takes as long as to
# copy some 50 KiB. The C code chooses the pieces of blocks in memory.
MIN_STORED_PIECE, MAX_STORED_PIECE = 512 << 10, 4 << 20
# Maximum bytes of a thread's pinned memory that uploads by compiled threads go through. While many bytes
# follow each other, they are written through the caches, and should be in the last one when the link reads
# them.
UPLOADED = 8 << 20
# Maximum number of these threads if all blocks are in memory. More would only wait for the driver's lock.
# From the page cache, 8 threads of the host of an H100 read 33 to 45 GB/s, and 12 threads 44 to 68 GB/s.
COMPILED_LANES = 8
# The size of a buffer is a multiple of this many bytes, a page.
PAGE = 4096
# Buffers per thread: one is filled while the other one is copied.
BUFFERS = 2
# Bytes per buffer in which the device marks how much it has copied.
MARKS = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a problem. The planner chooses among candidates.

    `ends` is the number of tiles that the run computes last, at the same time: one per device. The last steps
    of these tiles run strip by strip. A resumed run does this for the same tiles, on any number of devices.
    """

    tile: TileShape
    slots: Slots
    traversal: Traversal = ROW_BY_ROW
    io_threads: int = 1
    ends: int = 1


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a plan occupies on each device and on the host, by purpose. The budgets limit the totals."""

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_total(self) -> int:
        """Bytes on each device."""
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        """Bytes on the host."""
        return sum(self.host.values())


def extents(problem: GemmProblem, tile: TileShape) -> tuple[int, int, int]:
    """Return the valid extents (m, n, k) of the largest tile and its panels."""
    return min(tile.m, problem.m), min(tile.n, problem.n), min(tile.k, problem.depth)


def slot_bytes(
    problem: GemmProblem, tile: TileShape, strip: int, frames: int = 0
) -> dict[tuple[str, str], int]:
    """Return the bytes of one buffer by (tier, operand): the data and the checksums behind them, aligned.

    `frames` are the bytes of a host slot for a strip of C that the GPU encodes (`slot_frames`), or 0.
    """
    sizes = payload_bytes(problem, tile, strip)
    sizes["host", "C"] = frames or sizes["host", "C"]
    for slot, more in checksum_bytes(problem, tile, strip).items():
        sizes[slot] += round_up(more, DEVICE_ALIGNMENT if slot[0] == "device" else HOST_ALIGNMENT)
    return sizes


def payload_bytes(problem: GemmProblem, tile: TileShape, strip: int) -> dict[tuple[str, str], int]:
    """Return the bytes of data in one buffer by (tier, operand), aligned. Checksums start behind the data.

    `Slot` explains the letters of operands.
    """
    m, n, k = extents(problem, tile)
    sizes = problem.itemsizes
    strip = min(strip, m)
    elements = m * n
    if problem.cover.square and m == problem.m:
        elements = TileGrid.of(problem, tile, strip=strip).elements((0, 0)) if m else 0
    return {
        ("device", "A"): round_up(m * k * sizes["A"], DEVICE_ALIGNMENT),
        ("device", "B"): round_up(k * n * sizes["B"], DEVICE_ALIGNMENT),
        ("device", "C"): round_up(elements * sizes["acc"], DEVICE_ALIGNMENT),
        ("device", "P"): plane_offsets(problem.planes, m, n, k).end
        if problem.planes
        else map_offsets(problem, m, n, k)[1],
        ("device", "D"): finished_bytes(problem, strip, n),
        ("host", "A"): round_up(m * k * sizes["A"], HOST_ALIGNMENT),
        ("host", "B"): round_up(k * n * sizes["B"], HOST_ALIGNMENT),
        ("host", "C"): round_up(strip * n * sizes["C"], HOST_ALIGNMENT),
    }


def finished_bytes(problem: GemmProblem, strip: int, n: int) -> int:
    """Return the bytes of a slot for a finished strip of `strip` x n elements, or for elements kept of C."""
    if problem.sink.bounded:
        return found_layout(problem, strip, n).end
    elements = problem.m * problem.sink.per_row if problem.sink.per_row else strip * n
    return round_up(elements * problem.itemsizes["C"], DEVICE_ALIGNMENT)


def line_bytes(problem: GemmProblem) -> int:
    """Return the device bytes of the numbers per row and column of C, and of the elements kept of rows."""
    kept = finished_bytes(problem, 1, 1) if problem.sink.per_row else 0
    return (
        kept
        + sum(correction_bytes(problem))
        + scale_bytes(problem)
        + epilogue_bytes(problem)
        + factor_bytes(problem)
    )


def scratch_bytes(setting: Setting, io_threads: int, tile: TileShape | None = None) -> int:
    """Return the bytes of temporary host memory in which threads read and write chunks.

    `io_threads` threads read, and as many write. Each needs memory to decode or encode one chunk. If `tile`
    is given, the result also includes memory to read and write parts of lines (runs of contiguous elements).
    The threads of the ring read such parts of the operands that they stream. The result also includes other
    memory of arrays, such as the means of columns, and the memory of requests to object stores.
    """
    layouts, ring = setting.layouts, ring_shape(setting)
    sources = "ABC" if setting.problem.reads_c else "AB"
    m, n, k = (1, 1, 1) if tile is None else extents(setting.problem, tile)
    panels = {"A": (m, k), "B": (k, n), "C": (m, n)}
    reading = max(setting.routes[x].read_scratch(None if tile is None else panels[x]) for x in sources)
    streamed = max(setting.routes[x].lane_scratch for x in "AB")
    lanes = 0 if ring is None else setting.devices * ring.lanes
    writing = layouts.c.writing.encode_bytes
    if tile is not None:
        writing = max(writing, layouts.c.write_scratch)
    keeps = setting.keeps_outside
    if keeps or (setting.problem.cover.mirrored and not setting.routes["C"].streams):
        # A thread transposes a part of a strip before it writes the part a second time, or reads old elements
        # of a part before it writes the part.
        part = prod(layouts.c.writing.chunk) * setting.problem.itemsizes["C"]
        writing += max(MIRRORED_BYTES, part) + (layouts.c.decode_bytes if keeps else 0)
    remote = request_bytes(layouts.by_operand, reads_c=setting.problem.reads_c or keeps)
    resident = sum(
        layouts.by_operand[x].resident_bytes for x in sources[len(setting.problem.operands) == 1 :]
    )
    return io_threads * (reading + writing) + lanes * streamed + remote + resident


def footprint(setting: Setting, candidate: Candidate) -> Footprint:
    """Return the bytes that a candidate occupies on each device and on the host."""
    problem, machine, devices = setting.problem, setting.machine, setting.devices
    tile, slots = candidate.tile, candidate.slots
    size = slot_bytes(problem, tile, slots.strip, slot_frames(setting, tile, slots.strip))
    ring = ring_shape(setting)
    decoding = decoding_shape(setting)
    # Slots of operands that are multiplied in place have no memory.
    size |= {("device", operand): 0 for operand in setting.layouts.in_place}
    device = {
        "C": slots.c * size["device", "C"],
        "A": slots.a * size["device", "A"],
        "B": slots.b * size["device", "B"],
        "finish": slots.finish * size["device", "D"],
        "prepared": slots.planes * size["device", "P"],
        "work": workspace_bytes(problem, tile, machine),
        "transform": vector_bytes(problem)
        + sum(correction_bytes(problem))
        + measure_room(problem).end
        + scale_bytes(problem)
        + epilogue_bytes(problem)
        + factor_bytes(problem),
        # Each pinned buffer for Downloads has a buffer on the device, where a piece of a strip is transposed.
        "turned": ring.bytes // 2 if ring is not None and setting.turns_on_device else 0,
        "decode": decoding.device_bytes if decoding is not None else 0,
        "encode": encoding_bytes(setting),
        "reserve": machine.device_reserve,
    }
    # The slots on all devices, whose checksums the host stores if it computes them.
    everywhere = replace(slots, a=devices * slots.a, b=devices * slots.b, c=devices * (slots.c + 1) - 1)
    host = {
        "A": slots.host_a * size["host", "A"],
        "B": slots.host_b * size["host", "B"],
        "C": devices * slots.host_c * size["host", "C"],
        "scratch": scratch_bytes(setting, candidate.io_threads, tile),
        "ring": devices * ring.bytes if ring is not None else 0,
        "decode": devices * decoding.host_bytes if decoding is not None else 0,
        # The old elements of the diagonal blocks of all strips.
        "outside": problem.m * slots.strip * problem.itemsizes["C"] if setting.restores_outside else 0,
        "checks": host_check_bytes(problem, tile, everywhere, candidate.io_threads),
        "reserve": machine.host_reserve,
    }
    return Footprint(device, host)


def casts(problem: GemmProblem, machine: MachineModel) -> bool:
    """Tell whether the machine casts panels to the accumulator's dtype before it multiplies them."""
    return machine.casts_panels and problem.a_dtype != problem.acc_dtype


def workspace_bytes(problem: GemmProblem, tile: TileShape, machine: MachineModel) -> int:
    """Return the bytes of temporary memory to multiply one step's panels, besides the slots."""
    m, n, k = extents(problem, tile)
    if problem.planes:
        return HOST_WORK if machine.casts_panels else work_bytes(problem.planes, m, n)
    if casts(problem, machine):
        size = problem.acc_itemsize
        finish = FINISH_ARRAYS * min(MIN_FINISH_PIECE, m * n) * size if problem.finishes else 0
        return round_up(max((m + n) * k * size, finish), DEVICE_ALIGNMENT)
    return workspace_layout(m, n, k).end if problem.exact else 0


def workspace_per_element(problem: GemmProblem, machine: MachineModel) -> int:
    """Return the bytes of temporary memory per element of a step's two panels.

    For an emulated product, this memory stores residues of the panels. For other products, it stores
    transformed panels, a cast or an int8 copy of the panels, or is not needed.
    """
    if problem.planes:
        return 2 * problem.planes
    return 2 * problem.expanded_itemsize + (
        problem.acc_itemsize if casts(problem, machine) else int(problem.exact)
    )


@dataclass(frozen=True, slots=True)
class RingShape:
    """`lanes` threads copy blocks. One of them belongs to the run.

    A buffer has `piece` bytes for data, and MARKS bytes. Compiled threads divide a lane's memory differently.
    """

    lanes: int
    piece: int

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, for copies in both directions."""
        return 2 * self.lanes * BUFFERS * (self.piece + MARKS)


@lru_cache(64)
def ring_shape(setting: Setting) -> RingShape | None:
    """Choose the shape of the ring of each device; None if no operand is copied through it.

    All rings together take at most a quarter of the host budget, unless that is below 34 KiB per device. If
    the device transposes strips, a ring takes at most a quarter of the device budget, too.
    """
    machine, devices = setting.machine, setting.devices
    copied = [route.layout for route in setting.routes.values() if route.rings]
    if not copied:
        return None
    compiled = machine.compiled and all(x.contiguous_rows for x in copied) and not setting.turns_on_device
    lanes, piece = 1 + machine.copy_threads_of(devices), PIECE
    if compiled:
        lanes = min(lanes, 1 + COMPILED_LANES)
    room = setting.budgets.host // 4 // devices
    if setting.turns_on_device:
        room = min(room, (setting.budgets.device - machine.device_reserve) // 4)
    while piece > PAGE and RingShape(lanes, piece).bytes > room:
        piece //= 2
    while lanes > 2 and RingShape(lanes, piece).bytes > room:
        lanes -= 1
    return RingShape(lanes, piece)
