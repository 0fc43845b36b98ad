"""Predict the time of a candidate with formulas, so that the planner can score thousands of candidates.

`oocgemm.planning.cost.simulate` is slower and more exact. It serves to compare the few best candidates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oocgemm.planning.cost.by_tile import Share, drain_end, shares, tile_seconds
from oocgemm.planning.cost.footprint import Candidate, extents
from oocgemm.planning.cost.lanes import LANES, LOADING, PanelStream, count_copies, lane_seconds, panel_streams
from oocgemm.planning.cost.loads import estimate_loads
from oocgemm.planning.cost.machine import STRIP_OVERHEAD, MachineModel
from oocgemm.planning.cost.price import panel_rate, strip_rate
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileGrid, TileShape, ceil_div

# Concurrent lanes that are busy for t_1, t_2, ... seconds take (sum of t_i^p)^(1/p) seconds, with p =
# OVERLAP_NORM. This agrees with measurements on a GPU: two equally long lanes take 6% longer than one.
OVERLAP_NORM = 12
# Fraction of the time of a Write during which a CPU core is busy. The core waits for the disk in the rest.
WRITE_CPU_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted seconds of a run in `total`, and the parts that it was computed from.

    `lanes` has the seconds for which each lane is busy; lanes overlap. `start_up` is the time before the
    first multiplication, `bubbles` the waits between multiplications, and `tail` the time after the last
    multiplication.
    """

    lanes: Mapping[str, float]
    start_up: float
    bubbles: float
    tail: float
    total: float

    @property
    def bottleneck(self) -> str:
        """Name of the lane that is busy longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])

    @property
    def serial(self) -> float:
        """Seconds that the run would take if no operations overlapped."""
        return sum(self.lanes.values()) + self.start_up + self.bubbles + self.tail


def read_amplification(setting: Setting, tile: TileShape) -> dict[str, float]:
    """Return the ratio of the bytes read to the bytes needed, for A and for B."""
    problem, layouts = setting.problem, setting.layouts
    return {
        "A": layouts.a.read_amplification((problem.m, problem.depth), (tile.m, tile.k)),
        "B": layouts.b.read_amplification((problem.depth, problem.n), (tile.k, tile.n)),
    }


def min_seconds(setting: Setting, tile: TileShape) -> float:
    """Return a lower bound on the predicted time of all candidates with the tile shape `tile`.

    The bound assumes that both budgets are used only to cache panels, and that every tile uses all cached
    panels.
    """
    problem, layouts, machine, budgets = setting.problem, setting.layouts, setting.machine, setting.budgets
    grid, (m, n, k) = TileGrid.of(problem, tile), extents(problem, tile)
    (down, across), depth = grid.shape, problem.depth
    a = across * problem.m * depth * problem.itemsizes["A"]
    b = down * depth * problem.n * problem.itemsizes["B"]
    reuses = down * across - 1
    rate = max(
        panel_rate(setting, layouts.a, (problem.m, depth), (m, k)),
        panel_rate(setting, layouts.b, (depth, problem.n), (k, n)),
    )
    compute = machine.multiply_seconds(problem.rate, problem.flops, m, n, k)
    up = (a + b - reuses * budgets.device) / machine.h2d
    read = (a + b - reuses * (budgets.device + budgets.host)) / rate
    return compute + max(0.0, read) if machine.shares_cores else max(compute, up, read)


def predict(setting: Setting, candidate: Candidate, loads: Loads | None = None) -> Prediction:
    """Predict the seconds of a candidate. If the bytes of its `loads` are not given, estimate them."""
    problem, machine = setting.problem, setting.machine
    tile, slots = candidate.tile, candidate.slots
    grid = TileGrid.of(problem, tile)
    tiles = grid.shape[0] * grid.shape[1]
    if tiles == 0:
        return Prediction(dict.fromkeys(LANES, 0.0), 0, 0, 0, 0)
    loads = loads or estimate_loads(problem, grid, slots, candidate.traversal)
    streams = panel_streams(setting, tile, slots, loads)
    lanes, first = lane_seconds(setting, candidate, grid, loads, streams)
    panel_a, panel_b = (s.panel for s in streams)
    m, n, _ = extents(problem, tile)
    tile_bytes = m * n * problem.itemsizes["C"]
    accumulators = slots.c * m * n * problem.itemsizes["acc"] if slots.unified else 0
    start_up = accumulators * machine.arena_seconds_per_byte + first
    # Steps that run strip by strip (some rows of a tile at a time) overlap the download and the write of a
    # tile: its last steps and, with one accumulator, the first steps of the next tile.
    strips = ceil_div(m, slots.strip)
    write_rate = strip_rate(setting, (slots.strip, n))
    down = machine.download_rate(setting.layouts.c, (slots.strip, n))
    # If the host slots have room for a whole tile, it is downloaded without waits for storage.
    roomy = not slots.unified and slots.host_c >= strips
    drain = tile_bytes / (down if roomy else write_rate if slots.unified else min(down, write_rate))
    if problem.reads_c:
        drain += tile_bytes / machine.h2d
    step = lanes["compute"] / (tiles * grid.steps)
    last_steps, turn_steps = min(slots.last_steps, grid.steps), min(slots.turn_steps, ceil_div(grid.steps, 2))
    by_strips = (tiles - 1) * min(2 * turn_steps, grid.steps) + last_steps
    lanes["issue"] = machine.issue * (
        count_copies(problem, slots, tiles * strips, loads, panel_a, panel_b)
        + tiles * grid.steps * (2 if problem.planes else 1)
        + by_strips * (strips - 1)
    )
    # A product of a strip is less efficient than one of the whole tile, because it has fewer rows.
    if strips > 1:
        narrower = (1 + machine.half_width / slots.strip) / (1 + machine.half_width / m)
        lanes["compute"] += by_strips * step * ((narrower if slots.unified else STRIP_OVERHEAD) - 1)
    parts, bubbles = shares(problem, grid, candidate.traversal, loads), 0.0
    if len(parts) > 1 and not machine.shares_cores:
        bubbles += _first_tile_faults(streams, machine, parts[0], grid.steps, lanes["compute"])
    elif not machine.shares_cores:
        # `shares` has not estimated the tiles one by one. Assume that every page fault delays
        # multiplications.
        start_up += sum(s.faulted for s in streams) * machine.arena_seconds_per_byte
    if slots.c == 1 and tiles > 1:
        exposed = max(drain - 2 * turn_steps * step, drain / strips)
        # Panels of the next tile arrive late if no buffer is free for them before this tile ends.
        changing, panel = (slots.b, panel_b) if candidate.traversal.axis == 0 else (slots.a, panel_a)
        late = max(0, 2 * turn_steps - changing) * panel
        others = (1 - parts[-1].computed) * problem.m * problem.n / (m * n)
        bubbles += others * (exposed + late / (machine.read if slots.unified else machine.h2d))
    per_element = lanes["compute"] / (problem.m * problem.n)
    bubbles += _bursts(streams, machine, grid.steps, per_element * m * n, first_tile=len(parts) < tiles)
    drain_terms = lanes["write"] + lanes["encode"], last_steps / grid.steps, strips
    busy, tail = _combine(slots, machine, grid.steps, lanes, first, bubbles, parts, drain_terms)
    return Prediction(lanes, start_up, bubbles, tail, start_up + busy + tail)


def _combine(
    slots: Slots,
    machine: MachineModel,
    steps: int,
    lanes: Mapping[str, float],
    first: float,
    bubbles: float,
    parts: Sequence[Share],
    drain_terms: tuple[float, float, int],
) -> tuple[float, float]:
    """Compute the time of the run from the busy times of its lanes.

    Returns two numbers of seconds: from the start of the first multiplication to the end of the last one, and
    from then until all of C is written. `drain_terms` are the last three arguments of `drain_end`.
    """
    if machine.shares_cores:
        # The cores that multiply also copy, so that the times add up. Most of the time of a Write is spent
        # waiting for the disk, and keeps no core busy. The time `first` counts as start-up instead.
        busy = sum(lanes.values()) - (1 - WRITE_CPU_SHARE) * lanes["write"] + bubbles - first
        tail = drain_end(parts, tile_seconds(parts, busy, 0.0, prefetch=False), busy, *drain_terms) - busy
        return busy, tail
    occupied = _occupied(lanes, first, in_turn=1 in (slots.host_a, slots.host_b))
    loading = max(occupied[lane] for lane in LOADING)
    each = tile_seconds(parts, occupied["compute"], loading, prefetch=max(slots.a, slots.b) >= steps)
    # Some tiles wait for their panels even if, summed over all tiles, loading takes less time than computing.
    uneven = max(0.0, sum(each) - max(occupied["compute"], loading))
    without_output = occupied | {"write": 0.0, "encode": 0.0}
    computed = _overlapped(without_output, bubbles) + uneven
    busy = max(computed, _overlapped(occupied, bubbles))
    # The tail ends at the later of two times: when all of C would have been written without any bubbles, and
    # when the last tile has been written, which is computed after all bubbles.
    smooth = _overlapped(without_output, 0.0) + uneven
    drained = drain_end(parts, each, smooth, *drain_terms)
    return busy, max(drained, drain_end(parts[-1:], each[-1:], computed, *drain_terms), busy) - busy


def _occupied(lanes: Mapping[str, float], first: float, *, in_turn: bool) -> dict[str, float]:
    """Return the seconds for which each lane is busy after the start-up.

    `first` is the time to load the first panels, in seconds. It is part of the start-up, and is subtracted
    from the times of the lanes that load panels.

    `in_turn` tells that reads and uploads cannot overlap, because an operand has a single host slot. The time
    of "h2d" is then added to that of "read". The time of "prepare" is added to that of "compute", since both
    lanes use the GPU.
    """
    reading = lanes["read"] + lanes["h2d"] if in_turn else lanes["read"]
    loading = {lane: max(0.0, (reading if lane == "read" else lanes[lane]) - first) for lane in LOADING}
    return {**lanes, **loading, "compute": lanes["compute"] + lanes["prepare"], "prepare": 0.0}


def _overlapped(lanes: Mapping[str, float], bubbles: float) -> float:
    """Return the seconds that concurrent lanes take together.

    They take as long as the busiest lane, and a little longer if another lane is busy for nearly as long
    (`OVERLAP_NORM`). `bubbles`, the seconds of waits between multiplications, count as busy time of
    "compute".
    """
    longest = max(lanes.values()) or 1.0
    busy = longest * sum((x / longest) ** OVERLAP_NORM for x in lanes.values()) ** (1 / OVERLAP_NORM)
    return float(busy + max(0.0, lanes["compute"] + bubbles - longest))


def _bursts(
    streams: tuple[PanelStream, PanelStream],
    machine: MachineModel,
    steps: int,
    tile_seconds: float,
    *,
    first_tile: bool,
) -> float:
    """Return the seconds for which multiplications wait because many panels are needed at once.

    `tile_seconds` is the time to compute one tile.

    - The first tile loads all its panels while it is computed. It waits if loading takes longer than
      computing. This wait is left out unless `first_tile`: `oocgemm.planning.cost.by_tile` may include it
      already.
    - A later tile loads all its panels if none is cached. It waits if loading takes longer than computing
      this tile and the one before it.
    """
    if machine.shares_cores:
        return 0.0
    first = again = 0.0
    for s in streams:
        seconds = s.tile / min(s.rate, s.upload_rate)
        first += seconds
        if s.tile and s.slots >= steps > 1:
            again += max(0.0, seconds - 2 * tile_seconds) * (s.read / s.tile - 1)
    return max(0.0, first - tile_seconds) * first_tile + again


def _first_tile_faults(
    streams: tuple[PanelStream, PanelStream],
    machine: MachineModel,
    beginning: Share,
    steps: int,
    compute: float,
) -> float:
    """Return the seconds for which page faults delay the multiplications of the first tile.

    The first panels of the run are read into host slots whose pages are not mapped yet.
    """
    loading = beginning.loaded * sum(s.read / s.rate for s in streams)
    spare = max(0.0, beginning.computed * compute - loading)
    # Per operand: the fraction of the first tile's steps that read into new host slots, and the seconds that
    # page faults take in these steps.
    faults = [
        (min(1.0, s.host_slots / steps), min(s.host_slots * s.panel, s.tile) * machine.arena_seconds_per_byte)
        for s in streams
        if s.faulted
    ]
    late = (sum(t * min(1.0, upto / share) for share, t in faults) - upto * spare for upto, _ in faults)
    return max((0.0, *late))
