"""Choose the numbers of slots (buffers) for a tile shape, and of I/O threads.

Each kind of slot gets the minimum that the schedule needs. The memory left over caches panels of A and B that
are used again.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, prod

from oocgemm.planning.cost.bound import bound
from oocgemm.planning.cost.coding import PANELS, slot_frames
from oocgemm.planning.cost.footprint import Candidate, extents, footprint, scratch_bytes, slot_bytes
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.device_memory import panel_checksum_bytes
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.setting import Setting
from oocgemm.planning.sinks import ORDERED
from oocgemm.planning.tiling import TileGrid, TileShape, ceil_div, round_up

# Target size in bytes of a strip, the rows of a tile that are downloaded together. Larger strips start to be
# written later. Smaller ones do not reach the full rate of the link.
STRIP_BYTES = 32 << 20
# Tensor cores multiply so fast that thin strips of C cost more. So if all arrays are pinned, a strip has at
# least this many waves of thread blocks of `TENSOR_BLOCK` elements. With 1.2 waves, 20480^3 in bfloat16 took
# 50 ms, with 4.8 waves 42 ms.
STRIP_WAVES, TENSOR_BLOCK, TENSOR_DTYPES = 4, 128 * 256, ("float16", "bfloat16")
# Unless memory is scarce, a tile has at most STRIPS strips on the host backend, and at most STAGED_STRIPS
# with a GPU. More strips would only take more operations to issue.
STRIPS = 3
STAGED_STRIPS = 10
# If the host caches panels, a strip (some rows of a tile of C) takes at most 1 / HOST_SHARE of the host
# budget. This leaves memory to panels. Strips are larger if a tile would otherwise have more than MAX_STRIPS
# of them.
HOST_SHARE = 400
MAX_STRIPS = 64
# Maximum number of steps of a tile that run strip by strip. Each needs slots for its two panels. On an H200,
# 16384^3 in float64 from pageable arrays took 162 ms with five such steps and 176 ms with one (same tiles).
MAX_DRAIN = 16
# Minimum size of a large chunk, in bytes. For large chunks, more threads are used (`io_threads`). For smaller
# ones, more threads do not help: most of the time is taken by opening and closing files.
LARGE_CHUNK = 8 << 20
# Device slots per operand for blocks of a pageable array, if at least half of the device budget is left then.
# Several of its blocks are copied at the same time: one alone does not keep all threads and the link busy.
PAGEABLE_SLOTS = 4


class FreeMemory:
    """The free memory for a tile shape and a number of I/O threads. Each part of it is computed once."""

    def __init__(self, setting: Setting, tile: TileShape, io_threads: int) -> None:
        self.setting, self.tile, self._io_threads = setting, tile, io_threads
        self._sizes: dict[int, dict[tuple[str, str], int]] = {}
        self._without_slots: dict[int, tuple[int, int]] = {}

    def sizes(self, strip: int) -> dict[tuple[str, str], int]:
        """Return the bytes of one buffer by (tier, operand), which `slot_bytes` has computed."""
        if strip not in self._sizes:
            frames = slot_frames(self.setting, self.tile, strip)
            self._sizes[strip] = slot_bytes(self.setting.problem, self.tile, strip, frames)
        return self._sizes[strip]

    def free(self, slots: Slots) -> tuple[int, int]:
        """Return the bytes of the budgets that are left on the device and on the host.

        If the host computes checksums, it stores those of every panel on the device. Then only as many device
        bytes are returned as the host has memory for their checksums. That memory is not part of the returned
        host bytes.
        """
        if self.setting.problem.checked == "host":
            return self._with_checksums(slots)
        # Besides slots, only the memory for checksums and for old elements of C depends on the strip.
        depends = self.setting.problem.checked or self.setting.restores_outside
        strip = slots.strip if depends else 0
        if strip not in self._without_slots:
            self._without_slots[strip] = self._left(Slots(0, 0, 0, 0, 0, 0, 0, slots.strip))
        device, host = self._without_slots[strip]
        size, in_place = self.sizes(slots.strip), self.setting.layouts.in_place
        for operand, count in (
            *(("A", slots.a), ("B", slots.b), ("C", slots.c)),
            *(("D", slots.finish), ("P", slots.planes)),
        ):
            if operand not in in_place:
                device -= count * size["device", operand]
        strips = self.setting.devices * slots.host_c
        for operand, count in (("A", slots.host_a), ("B", slots.host_b), ("C", strips)):
            host -= count * size["host", operand]
        return device, host

    def _left(self, slots: Slots) -> tuple[int, int]:
        used = footprint(self.setting, Candidate(self.tile, slots, io_threads=self._io_threads))
        budgets = self.setting.budgets
        return budgets.device - used.device_total, budgets.host - used.host_total

    def _with_checksums(self, slots: Slots) -> tuple[int, int]:
        (device, host), size = self._left(slots), self.sizes(slots.strip)
        checks = panel_checksum_bytes(self.setting.problem, self.tile, slots.strip)
        share = max(check / max(1, size["device", x]) for x, check in zip("AB", checks, strict=True))
        if share and min(device, host) > 0:
            device = min(device, int(host / share))
            host -= ceil(device * share)
        return device, host


# Which operand (0: A, 1: B) gets slots, and up to how many in all, in the order in which memory is given out.
Wanted = tuple[tuple[int, int], ...]


def slot_counts(
    prices: Prices, tile: TileShape, c: int, io_threads: int
) -> Iterator[tuple[float, Candidate]]:
    """Yield candidates that have the tile shape `tile`, `c` accumulators and `io_threads` I/O threads.

    Each is yielded with a lower bound on its seconds. The candidates differ in their traversals, and in
    whether the host caches panels. `_filled` adds slots beyond the minimum numbers.
    """
    setting = prices.setting
    problem, machine = setting.problem, setting.machine
    memory = FreeMemory(setting, tile, io_threads)
    base = _min_slots(memory, c)
    if base is None:
        return
    size = memory.sizes(base.strip)
    base = _draining(prices, memory, base)
    grid = TileGrid.of(problem, tile)
    (down, across), steps = grid.shape, grid.steps
    free, host_free = memory.free(base)
    # With host slots for a whole tile of C, the GPU need not wait until a tile has been written to storage.
    whole = ceil_div(extents(problem, tile)[0], base.strip) + 1
    if base.host_c and machine.write < machine.d2h and whole * size["host", "C"] <= host_free // 2:
        base = replace(base, host_c=max(whole, base.host_c))
    free, host_free = memory.free(base)
    device = size["device", "A"], size["device", "B"]
    checks = panel_checksum_bytes(problem, tile, base.strip)
    on_host_bytes = (
        0 if base.host_a == 0 else size["host", "A"] + checks[0],
        0 if base.host_b == 0 else size["host", "B"] + checks[1],
    )
    ordered = problem.sink.merge == ORDERED
    caches = down * across > 0 and setting.host_caches_panels
    for axis in (0, 1) if min(down, across) > 1 else (0,):
        # Sums of rows are added in ascending order of columns, on any number of devices.
        traversal = Traversal(axis, turns=axis == 1 or not ordered)
        if ordered and not traversal.ascends:
            continue
        # The panels that are used again soonest get memory first: those of a tile row (axis 0) or of a tile
        # column (axis 1), then all panels of the other operand.
        lines, others = grid.shape[axis], grid.shape[1 - axis]
        line = axis, steps if others > 1 else 0
        passing = 1 - axis, others * steps if lines > 1 else 0
        # The remaining memory is for panels of the next line, which are then prefetched. The clock predicts
        # no gain, but on an H200, an int8 product took 54 ms with these slots, and 60 ms without them.
        next_line = axis, 2 * steps if min(lines, others) > 1 and not machine.unified else 0
        counts = _filled((base.a, base.b), free, device, (line, passing, next_line))
        lean = Candidate(tile, replace(base, a=counts[0], b=counts[1]), traversal, io_threads)
        least = bound(prices, lean)
        yield least, lean
        # More panels in host slots save reads, but the first uses of the slots cause page faults.
        if not caches:
            continue
        on_host = base.host_a, base.host_b
        if counts[axis] >= line[1]:
            orders: tuple[tuple[Wanted, Wanted], ...] = (((line, passing, next_line), (passing,)),)
        else:
            orders = ((line, passing, next_line), (line, passing)), ((passing, line), (line, passing))
        for first, second in orders:
            a, b = _filled((base.a, base.b), free, device, first)
            host_a, host_b = _filled(on_host, host_free, on_host_bytes, second)
            caching = replace(lean, slots=replace(base, a=a, b=b, host_a=host_a, host_b=host_b))
            seconds = bound(prices, caching)
            if seconds < least:
                least = seconds
                yield seconds, caching


def _filled(counts: tuple[int, int], free: int, sizes: tuple[int, int], wanted: Wanted) -> tuple[int, int]:
    """Fill `free` bytes with slots for panels of A and B, and return the numbers of slots.

    `counts` are the minimum numbers of slots.
    """
    found = list(counts)
    for operand, count in wanted:
        if count > found[operand] and sizes[operand]:
            more = min(count - found[operand], max(0, free // sizes[operand]))
            found[operand] += more
            free -= more * sizes[operand]
    return found[0], found[1]


def _draining(prices: Prices, memory: FreeMemory, base: Slots) -> Slots:
    """Return the slots for several last steps of a tile to run strip by strip, which hides its download.

    The device stores the panels of all these steps at the same time. So they are the fewest steps that take
    longer than the download, as far as the slots to add take at most a quarter of the free memory.
    """
    setting, tile = prices.setting, memory.tile
    problem, sizes = setting.problem, memory.sizes(base.strip)
    (m, n), k = extents(problem, tile)[:2], min(tile.k, problem.depth)
    # Emulated products have slots for the residues of two steps. If elements are selected, little is
    # downloaded.
    if problem.planes or not problem.sink.stores_c or problem.b.one_tile or base.strip >= m:
        return base
    step = prices.multiply(m, m, n, k)
    strips = m / base.strip
    seconds = strips * (prices.write if base.unified else prices.download)(base.strip, n)
    several = m < problem.m or n < problem.n
    free = memory.free(base)[0]
    for drain in range(min(TileGrid.of(problem, tile).steps, MAX_DRAIN, int(seconds / step) + 1), 1, -1):
        panels, planes = drain + several, drain + 1 if problem.prepares else 0
        slots = replace(base, a=max(panels, base.a), b=max(panels, base.b), drain=drain, planes=planes)
        more = (slots.a - base.a, "A"), (slots.b - base.b, "B"), (slots.planes - base.planes, "P")
        if sum(count * sizes["device", operand] for count, operand in more) <= free // 4:
            return slots
    return base


def _min_slots(memory: FreeMemory, c: int) -> Slots | None:
    """Return the minimum numbers of slots with which a tile shape runs well, or None if they do not fit.

    Each operand gets two slots on the device. On the host, it gets up to three: with only one, reads and
    uploads cannot overlap, and a third absorbs variations in the time of reads.
    """
    setting, tile = memory.setting, memory.tile
    problem, machine, budgets, layouts = setting.problem, setting.machine, setting.budgets, setting.layouts
    unit = setting.c_chunks(tile)[0]
    row_bytes = max(1, min(tile.n, problem.n) * problem.itemsizes["C"])
    # Strips (blocks of rows) should be large, since each takes several operations. Smaller ones are tried if
    # memory is scarce.
    wanted = max(STRIP_BYTES // row_bytes, ceil_div(tile.m, STRIPS if machine.unified else STAGED_STRIPS), 1)
    if setting.enqueues and problem.a_dtype in TENSOR_DTYPES:
        wave = machine.multiprocessors * TENSOR_BLOCK
        wanted = max(wanted, STRIP_WAVES * wave // min(tile.n, problem.n))
    if not machine.shares_cores:
        wanted = machine.strip_rows(wanted, min(tile.n, problem.n))
    if setting.layouts.c.in_place or problem.sink.per_row or problem.b.one_tile:
        wanted = tile.m  # no strip is written, so that strips would only take more operations
    max_rows = tile.m
    if setting.host_caches_panels and not (problem.sink.per_row or problem.b.one_tile):
        max_rows = max(budgets.host // HOST_SHARE // row_bytes, ceil_div(tile.m, MAX_STRIPS))
    sizes = (wanted, STRIP_BYTES // row_bytes, STRIP_BYTES // 32 // row_bytes, 1)
    strips = sorted(
        {min(round_up(max(1, min(rows, max_rows)), unit), tile.m) for rows in sizes}, reverse=True
    )
    if problem.b.one_tile:
        strips = [tile.m]
    through_slots = [not route.streams for route in setting.routes.values()]
    grid = TileGrid.of(problem, tile)
    panels = [
        max(2, tiles * grid.steps) if setting.routes[operand].staged_ahead else 2
        for operand, tiles in zip("AB", grid.shape, strict=True)
    ]
    wanted_slots = [PANELS] if layouts.codings.a or layouts.codings.b else []
    counts = [[min(slots, of) for of in panels] for slots in (*wanted_slots, PAGEABLE_SLOTS)]
    for host in (0,) if machine.unified else (3, 2, 1):
        for rows in strips:
            host_a, host_b, host_c = (host * needed for needed in through_slots)
            for (a, b), least in (*((many, budgets.device // 2) for many in counts), ((2, 2), 0)):
                slots = Slots(
                    *(a, b, c, host_a, host_b, host_c, problem.finish_slots, rows),
                    planes=2 if problem.prepares else 0,
                    unified=machine.unified,
                )
                free, host_free = memory.free(slots)
                if free >= least and host_free >= 0:
                    return slots
    return None


def io_threads(setting: Setting) -> int:
    """Choose the number of reader threads, which is also the number of writer threads.

    - The number is `MachineModel.io_threads` for plain copies.
    - It is 1.5 times as large, but at most one per core, if a GPU multiplies and the CPU does more than plain
      reads: A or B has large chunks (`LARGE_CHUNK`), both are in host memory, or reads compute digests.
    - It is at least `MachineModel.codec_threads` if chunks are decoded or encoded.
    - It is reduced until the temporary memory of all threads takes at most half of the host budget.
    """
    problem, machine, layouts = setting.problem, setting.machine, setting.layouts
    read = (layouts.a, layouts.b, layouts.c) if problem.reads_c else (layouts.a, layouts.b)
    codecs = layouts.c.writing.encodes or any(layout.decode_bytes for layout in read)
    threads = machine.io_threads
    large = any(
        prod(layout.read_chunk) * problem.itemsizes[operand] >= LARGE_CHUNK
        for operand, layout in (("A", layouts.a), ("B", layouts.b))
    )
    more = large or problem.checked == "device" or not setting.host_caches_panels
    if more and not machine.shares_cores:
        threads = max(threads, min(machine.cores, threads * 3 // 2))
    if codecs:
        threads = max(threads, machine.codec_threads)
    while threads > 1 and scratch_bytes(setting, threads) > setting.budgets.host // 2:
        threads -= 1
    return threads
