"""How long a candidate takes, in closed form, so that a planner can score thousands of them.

`oocgemm.planning.cost.simulate` walks the real schedule of the few best.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from oocgemm.planning.cost.by_tile import Share, drain_end, shares, tile_seconds
from oocgemm.planning.cost.footprint import Candidate, Layouts, MachineModel, extents
from oocgemm.planning.cost.machine import AT_ONCE
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.tiling import Layout, Range, TileGrid, TileShape, ceil_div, round_up

# Two lanes of equal length take longer than one by 2^(1/12), 6%; one four fifths as long adds half a percent. That is about
# what was seen on an H200, and it makes the planner prefer less traffic among plans that a perfect overlap would make equal.
CLOSENESS = 12
# Share of the time of a Write past the page cache that a core has to do with it.
WRITING = 0.25
# Seconds that taking the digest of a panel adds to reading it, for each byte: about what was seen beside an H200.
DIGESTING = 2.5e-12
# So much longer takes a tile strip by strip: 47 to 51 Tflop/s where whole ones made 50 to 52, in float32 on an H200.
BY_STRIPS = 1.03
# Of C, what a multiprocessor works on at a time: cuBLAS's kernels for large products of CUDA 13 on an H200. Those that are not
# here have small blocks, or choose among many.
BLOCKS = {"float32": (256, 128), "float64": (64, 128)}
SMALL_BLOCK = 64, 64
# So much longer takes at most a tile that ends with some multiprocessors idle: where it would be more, cuBLAS has other blocks.
MAX_UNFILLED = 1.1
# The last is the interpreter, in which operations are issued one after another.
LANES = ("read", "decode", "h2d", "prepare", "compute", "d2h", "encode", "write", "issue")
LOADING = ("read", "decode", "h2d")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds: busy time of each lane, and how they add up."""

    lanes: Mapping[str, float]
    start_up: float
    bubbles: float
    tail: float
    total: float

    @property
    def bottleneck(self) -> str:
        """The lane that is busy longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])

    @property
    def serial(self) -> float:
        """Seconds if nothing overlapped: all that the machine has to do, and all that it waits."""
        return sum(self.lanes.values()) + self.start_up + self.bubbles + self.tail


def amplification(problem: GemmProblem, tile: TileShape, layouts: Layouts) -> dict[str, float]:
    """Bytes of the chunks touched over bytes wanted, for reads of A and B."""
    return {
        "A": layouts.a.read_amplification((problem.m, problem.depth), (tile.m, tile.k)),
        "B": layouts.b.read_amplification((problem.depth, problem.n), (tile.k, tile.n)),
    }


def closed_loads(problem: GemmProblem, grid: TileGrid, slots: Slots, traversal: Traversal) -> Loads:
    """About what `Schedule.loads` counts: the share of a panel's next uses that its slots bridge."""
    down, across = grid.shape
    if down * across == 0:
        return Loads(0, 0, 0, 0)
    a = problem.m * problem.depth * problem.itemsizes["A"]
    b = problem.depth * problem.n * problem.itemsizes["B"]
    a_up, b_up = _tier_loads(down, across, grid.steps, slots.a, slots.b, traversal)
    if slots.unified:
        return Loads(a * a_up, b * b_up, a * a_up, b * b_up)
    a_read, b_read = _tier_loads(down, across, grid.steps, slots.host_a, slots.host_b, traversal)
    return Loads(a * a_up, b * b_up, a * min(a_up, a_read), b * min(b_up, b_read))


def _tier_loads(
    down: int, across: int, steps: int, a_slots: int, b_slots: int, traversal: Traversal
) -> tuple[float, float]:
    """How many times over op(A) and op(B) are loaded into that many slots."""
    if traversal.axis == 1:
        b, a = _tier_loads(across, down, steps, b_slots, a_slots, traversal.along_rows)
        return a, b
    band = min(traversal.band, down)
    bands = ceil_div(down, band)
    # A row comes round again after the other rows of its band; a column after each row of the band, and then
    # after all the other columns.
    a = 1 + (across - 1) * (1 - _bridged(a_slots, band * steps))
    b = 1 + (bands - 1) * (1 - _bridged(b_slots, across * steps))
    return a, b + bands * (band - 1) * (1 - _bridged(b_slots, steps))


def _bridged(slots: int, panels: int) -> float:
    """Share of that many panels, used in turn there and back, that are still there when their turn comes again: each
    turn begins with the slots full of what comes first."""
    return min(1.0, slots / panels)


def panel_rate(
    problem: GemmProblem, machine: MachineModel, layout: Layout, whole: Range, panel: Range
) -> float:
    """Bytes per second of what is read of an operand of that shape in such panels, what is read beside them, and taking their
    digests, counted as time."""
    rate = machine.store_rate(layout, panel) / layout.read_amplification(whole, panel)
    return 1 / (1 / rate + DIGESTING) if problem.checked == "device" else rate


def strip_rate(problem: GemmProblem, machine: MachineModel, layout: Layout, strip: Range) -> float:
    """Bytes per second of strips of C from the host's slots to where they belong."""
    if layout.line:
        return 1 / (1 / machine.write + machine.segment / layout.segment_bytes(strip))
    if not layout.in_memory:
        return machine.write
    # Those that are checked are looked at in their slots.
    return AT_ONCE if layout.is_direct(strip) and not problem.checked else machine.memory


def multiply_seconds(
    problem: GemmProblem, machine: MachineModel, flops: float, w: int, h: int, r: int
) -> float:
    """Time of products of w x h x r blocks with that many flops in all, if they come out even (`unfilled`)."""
    if flops == 0:
        return 0.0
    rate = machine.kernels[problem.rate]
    return (
        flops
        / rate.peak
        * (1 + rate.half_depth / r)
        * (1 + machine.half_width / w)
        * (1 + machine.half_width / h)
    )


def wave_quantization(problem: GemmProblem, machine: MachineModel, w: int, h: int) -> float:
    """Time of a tile over what it would be if all multiprocessors were busy until its end: each works on one whole block of it
    after another. In float32 9832 x 9832 are 39 x 77 blocks, 22.75 for each of 132, which takes as long as 23 for each."""
    if machine.shares_cores:
        return 1.0
    rows, cols = BLOCKS.get(problem.rate, SMALL_BLOCK)
    blocks = round_up(ceil_div(w, rows) * ceil_div(h, cols), machine.multiprocessors)
    return min(MAX_UNFILLED, blocks * rows * cols / (w * h))


def least_seconds(
    problem: GemmProblem, tile: TileShape, device: int, host: int, layouts: Layouts, machine: MachineModel
) -> float:
    """No candidate of that tile shape takes less: from one tile to the next these bytes of memory keep no more than they hold."""
    grid, (w, h, r) = TileGrid.of(problem, tile), extents(problem, tile)
    (down, across), k = grid.shape, problem.depth
    a, b = across * problem.m * k * problem.itemsizes["A"], down * k * problem.n * problem.itemsizes["B"]
    again = down * across - 1
    rate = max(
        panel_rate(problem, machine, layouts.a, (problem.m, k), (w, r)),
        panel_rate(problem, machine, layouts.b, (k, problem.n), (r, h)),
    )
    compute = multiply_seconds(problem, machine, problem.flops, w, h, r)
    up = (a + b - again * device) / machine.h2d
    read = (a + b - again * (device + host)) / rate
    return compute + max(0.0, read) if machine.shares_cores else max(compute, up, read)


def predict(
    problem: GemmProblem,
    candidate: Candidate,
    layouts: Layouts,
    machine: MachineModel,
    loads: Loads | None = None,
) -> Prediction:
    """Seconds a candidate takes; with `loads` from exactly these."""
    tile, slots = candidate.tile, candidate.slots
    grid = TileGrid.of(problem, tile)
    tiles = grid.shape[0] * grid.shape[1]
    if tiles == 0:
        return Prediction(dict.fromkeys(LANES, 0.0), 0, 0, 0, 0)
    loads = loads or closed_loads(problem, grid, slots, candidate.traversal)
    streams = _streams(problem, tile, slots, layouts, machine, loads)
    lanes, first = _lanes(problem, candidate, layouts, machine, grid, loads, streams)
    panel_a, panel_b = (s.panel for s in streams)
    w, h, _ = extents(problem, tile)
    tile_bytes = w * h * problem.itemsizes["C"]
    accumulators = slots.c * w * h * problem.itemsizes["acc"] if slots.unified else 0
    start_up = accumulators * machine.arena_seconds_per_byte + first
    # What leaves strip by strip hides behind the steps that go strip by strip: the last of this tile and, with one
    # accumulator, the first of the next.
    strips = ceil_div(w, slots.strip)
    write_rate = strip_rate(problem, machine, layouts.c, (slots.strip, h))
    # It leaves the device as fast as the link goes if the host has room for all of it.
    roomy = not slots.unified and slots.host_c >= strips
    leaving = tile_bytes / (
        machine.d2h if roomy else write_rate if slots.unified else min(machine.d2h, write_rate)
    )
    if problem.reads_c:
        leaving += tile_bytes / machine.h2d
    step = lanes["compute"] / (tiles * grid.steps)
    drain, between = min(slots.last_steps, grid.steps), min(slots.turn_steps, ceil_div(grid.steps, 2))
    by_strips = (tiles - 1) * min(2 * between, grid.steps) + drain
    lanes["issue"] = machine.issue * (
        _operations(problem, slots, tiles * strips, loads, panel_a, panel_b)
        + tiles * grid.steps * (2 if problem.planes else 1)
        + by_strips * (strips - 1)
    )
    # Strips are narrower than the tile; those of a GPU are cut so that they fill it.
    if strips > 1:
        wider = (1 + machine.half_width / slots.strip) / (1 + machine.half_width / w)
        lanes["compute"] += by_strips * step * ((wider if slots.unified else BY_STRIPS) - 1)
    parts, bubbles = shares(problem, grid, candidate.traversal, loads), 0.0
    if len(parts) > 1 and not machine.shares_cores:
        bubbles += _touching(streams, machine, parts[0], grid.steps, lanes["compute"])
    elif not machine.shares_cores:  # the first of many tiles wait for theirs anyway
        start_up += sum(s.touched for s in streams) * machine.arena_seconds_per_byte
    if slots.c == 1 and tiles > 1:
        shown = max(leaving - 2 * between * step, leaving / strips)
        # Panels that find no free slot before the tile has ended come late.
        changing, panel = (slots.b, panel_b) if candidate.traversal.axis == 0 else (slots.a, panel_a)
        coming = max(0, 2 * between - changing) * panel
        others = (1 - parts[-1].made) * problem.m * problem.n / (w * h)
        bubbles += others * (shown + coming / (machine.read if slots.unified else machine.h2d))
    an_element = lanes["compute"] / (problem.m * problem.n)
    bubbles += _bursts(streams, machine, grid.steps, an_element * w * h, alone=len(parts) < tiles)
    out = lanes["write"] + lanes["encode"], drain / grid.steps, strips
    busy, tail = _together(slots, machine, grid.steps, lanes, first, bubbles, parts, out)
    return Prediction(lanes, start_up, bubbles, tail, start_up + busy + tail)


def _together(
    slots: Slots,
    machine: MachineModel,
    steps: int,
    lanes: Mapping[str, float],
    first: float,
    bubbles: float,
    parts: Sequence[Share],
    out: tuple[float, float, int],
) -> tuple[float, float]:
    """Seconds that lanes take together, and those in which C leaves after that: what `gone` is told of that in `out`."""
    if machine.shares_cores:
        # Every copy takes its time from the cores that multiply, that of the first panels too; a disk that is written to
        # does most of it itself.
        busy = sum(lanes.values()) - (1 - WRITING) * lanes["write"] + bubbles - first
        tail = drain_end(parts, tile_seconds(parts, busy, 0.0, ahead=False), busy, *out) - busy
        return busy, tail
    held_up = _held_up(lanes, first, one_by_one=1 in (slots.host_a, slots.host_b))
    loading = max(held_up[lane] for lane in LOADING)
    each = tile_seconds(parts, held_up["compute"], loading, ahead=max(slots.a, slots.b) >= steps)
    # Tiles wait for their own panels, though lanes are long enough on the whole.
    uneven = max(0.0, sum(each) - max(held_up["compute"], loading))
    but_out = held_up | {"write": 0.0, "encode": 0.0}
    pace = _side_by_side(but_out, bubbles) + uneven
    busy = max(pace, _side_by_side(held_up, bubbles))
    # C leaves in the bubbles, too: all of it, if that takes longest, and in any case the last tile after its end.
    smooth = _side_by_side(but_out, 0.0) + uneven
    return busy, max(
        drain_end(parts, each, smooth, *out), drain_end(parts[-1:], each[-1:], pace, *out), busy
    ) - busy


def _held_up(lanes: Mapping[str, float], first: float, *, one_by_one: bool) -> dict[str, float]:
    """Seconds for which lanes are busy beside others. What comes before the first multiplication holds up all but those
    that bring it, and with one slot on the host these take turns; beside a multiplication preparing takes as long from that."""
    turns = lanes["read"] + lanes["h2d"] if one_by_one else lanes["read"]
    bringing = {lane: max(0.0, (turns if lane == "read" else lanes[lane]) - first) for lane in LOADING}
    return {**lanes, **bringing, "compute": lanes["compute"] + lanes["prepare"], "prepare": 0.0}


def _side_by_side(lanes: Mapping[str, float], bubbles: float) -> float:
    """Seconds that lanes take together. They hide behind the longest one; one nearly as long disturbs it, by jitter and on the
    memory they share. Bubbles hide where the kernel waits for a longer lane anyway."""
    longest = max(lanes.values()) or 1.0
    busy = longest * sum((x / longest) ** CLOSENESS for x in lanes.values()) ** (1 / CLOSENESS)
    return float(busy + max(0.0, lanes["compute"] + bubbles - longest))


def _operations(
    problem: GemmProblem, slots: Slots, strips: int, loads: Loads, panel_a: int, panel_b: int
) -> float:
    """How many operations load panels of so many bytes and bring strips of C in and out."""
    panels = loads.a_read / panel_a + loads.b_read / panel_b if problem.depth else 0.0
    if not slots.unified:
        panels += loads.a_up / panel_a + loads.b_up / panel_b if problem.depth else 0.0
    each = 1 if slots.unified else 2
    return panels + strips * (each + (each if problem.reads_c else 0) + int(problem.finishes))


@dataclass(frozen=True, slots=True)
class _Stream:
    """How the panels of op(A) or op(B) come in, in bytes and bytes per second."""

    lane: str
    rate: float
    up: float  # to the device
    read: float  # in all
    panel: int
    strip: int  # the panels of a tile
    slots: int
    on_host: int  # slots there
    straight: bool  # past those

    @property
    def touched(self) -> float:
        """Bytes that are read into memory on the host that is used for the first time."""
        return 0.0 if self.straight else min(self.read, self.on_host * self.panel)


def _streams(
    problem: GemmProblem, tile: TileShape, slots: Slots, layouts: Layouts, machine: MachineModel, loads: Loads
) -> tuple[_Stream, _Stream]:
    (w, h, r), k = extents(problem, tile), problem.depth

    def stream(
        layout: Layout,
        whole: Range,
        panel: Range,
        strip: Range,
        size: int,
        read: float,
        held: tuple[int, int],
    ) -> _Stream:
        rate = panel_rate(problem, machine, layout, whole, panel)
        lane = "decode" if layout.decode_bytes else "read"
        return _Stream(
            lane,
            rate,
            machine.upload_rate(layout, panel),
            read,
            prod(panel) * size,
            prod(strip) * size,
            *held,
            layout.is_direct(panel),
        )

    a, b = problem.itemsizes["A"], problem.itemsizes["B"]
    return (
        stream(layouts.a, (problem.m, k), (w, r), (w, k), a, loads.a_read, (slots.a, slots.host_a)),
        stream(layouts.b, (k, problem.n), (r, h), (k, h), b, loads.b_read, (slots.b, slots.host_b)),
    )


def _bursts(
    streams: tuple[_Stream, _Stream], machine: MachineModel, steps: int, tile_seconds: float, *, alone: bool
) -> float:
    """Seconds by which loads come too late although lanes are long enough on the whole: the first tile loads all its
    panels while it runs, which counts `alone` where tiles are not reckoned one by one, and so does a later one whose kept panels
    change; these can begin a tile ahead."""
    if machine.shares_cores:
        return 0.0
    first = again = 0.0
    for s in streams:
        seconds = s.strip / min(s.rate, s.up)
        first += seconds
        if s.strip and s.slots >= steps > 1:
            again += max(0.0, seconds - 2 * tile_seconds) * (s.read / s.strip - 1)
    return max(0.0, first - tile_seconds) * alone + again


def _touching(
    streams: tuple[_Stream, _Stream],
    machine: MachineModel,
    beginning: Share,
    steps: int,
    compute: float,
) -> float:
    """Seconds by which the panels of the first tile come late that are read into slots for the first time: those of its first
    steps, whatever time there is to spare at others."""
    loading = beginning.loaded * sum(s.read / s.rate for s in streams)
    spare = max(0.0, beginning.made * compute - loading)
    # The share of the tile's steps that find untouched slots, and seconds that these take.
    touching = [
        (min(1.0, s.on_host / steps), min(s.on_host * s.panel, s.strip) * machine.arena_seconds_per_byte)
        for s in streams
        if s.touched
    ]
    late = (sum(t * min(1.0, upto / share) for share, t in touching) - upto * spare for upto, _ in touching)
    return max((0.0, *late))


def _lanes(
    problem: GemmProblem,
    candidate: Candidate,
    layouts: Layouts,
    machine: MachineModel,
    grid: TileGrid,
    loads: Loads,
    streams: tuple[_Stream, _Stream],
) -> tuple[dict[str, float], float]:
    """Seconds that each lane is busy, and seconds until the first panels are there."""
    slots, (w, h, r) = candidate.slots, extents(problem, candidate.tile)
    down, across = grid.shape
    steps = down * across * grid.steps
    lanes = dict.fromkeys(LANES, 0.0)
    lanes["compute"] = (
        multiply_seconds(problem, machine, problem.flops, w, h, r) * wave_quantization(problem, machine, w, h)
        + steps * machine.step_latency
    )
    first = 0.0
    if problem.planes:
        raw = (problem.m * across + problem.n * down) * problem.depth * problem.itemsizes["A"]
        lanes["prepare"] = raw / machine.prepare + steps * machine.step_latency
        first = lanes["prepare"] / steps
    for s in streams:
        lanes[s.lane] += s.read / s.rate + s.touched * machine.arena_seconds_per_byte
        if s.on_host:
            first += s.panel / s.up + (machine.arena_seconds_per_byte * s.panel if s.touched else 0.0)
        first += s.panel / s.rate
    c_bytes = problem.m * problem.n * problem.itemsizes["C"]
    c_in = c_bytes if problem.reads_c else 0
    if c_in:
        seconds = c_in / panel_rate(problem, machine, layouts.c, (problem.m, problem.n), (w, h))
        lanes["decode" if layouts.c.decode_bytes else "read"] += seconds
        first += seconds / (down * across)
    strips = down * across * ceil_div(w, slots.strip)
    lanes["encode" if layouts.c.encodes else "write"] = (
        c_bytes / strip_rate(problem, machine, layouts.c, (slots.strip, h)) + strips * machine.write_latency
    )
    if not slots.unified:
        up = loads.a_up / streams[0].up + loads.b_up / streams[1].up + c_in / machine.h2d
        lanes["h2d"] = up + 2 * steps * machine.copy_latency
        lanes["d2h"] = c_bytes / machine.d2h
    return lanes, first
