"""Predict the time of a candidate in closed form, so that a planner can score thousands of them.

`oocgemm.planning.cost.simulate` runs the schedules of the few best candidates.
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

# Order of the norm that combines the times of concurrent lanes. Two equally long lanes take 2^(1/12) times as
# long as one, 6% more; a lane of four fifths of the longest adds 0.5%. That agrees with measurements on a
# GPU. It also makes the planner prefer less traffic among plans that perfect overlap would make equal.
OVERLAP_NORM = 12
# Share of the time of a Write that a core is busy with it; the disk does the rest.
WRITE_CPU_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds: the busy time of each lane, and how they add up.

    `start_up` passes before the first multiplication. `bubbles` are waits between multiplications. `tail`
    passes after the last multiplication.
    """

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
        """Seconds if nothing overlapped."""
        return sum(self.lanes.values()) + self.start_up + self.bubbles + self.tail


def read_amplification(setting: Setting, tile: TileShape) -> dict[str, float]:
    """Ratio of the bytes read to the bytes needed, for A and B."""
    problem, layouts = setting.problem, setting.layouts
    return {
        "A": layouts.a.read_amplification((problem.m, problem.depth), (tile.m, tile.k)),
        "B": layouts.b.read_amplification((problem.depth, problem.n), (tile.k, tile.n)),
    }


def least_seconds(setting: Setting, tile: TileShape) -> float:
    """Lower bound on the predicted time of any candidate of that tile shape.

    Between two tiles, the memory keeps at most as many bytes as the budgets allow.
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
    """Predict the seconds of a candidate, with the given `loads` or with estimated ones."""
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
    # The drain of strips is hidden by the steps that run strip by strip: the last ones of the tile and, with
    # one accumulator, the first ones of the next.
    strips = ceil_div(m, slots.strip)
    write_rate = strip_rate(setting, (slots.strip, n))
    # If host slots have room for a whole tile, it drains at the rate of the link.
    roomy = not slots.unified and slots.host_c >= strips
    drain = tile_bytes / (
        machine.d2h if roomy else write_rate if slots.unified else min(machine.d2h, write_rate)
    )
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
    # Strips have fewer rows than the tile. On a GPU, their rows are chosen to fill its waves.
    if strips > 1:
        narrower = (1 + machine.half_width / slots.strip) / (1 + machine.half_width / m)
        lanes["compute"] += by_strips * step * ((narrower if slots.unified else STRIP_OVERHEAD) - 1)
    parts, bubbles = shares(problem, grid, candidate.traversal, loads), 0.0
    if len(parts) > 1 and not machine.shares_cores:
        bubbles += _first_tile_faults(streams, machine, parts[0], grid.steps, lanes["compute"])
    elif not machine.shares_cores:  # with many tiles, the first ones wait for page faults in any case
        start_up += sum(s.faulted for s in streams) * machine.arena_seconds_per_byte
    if slots.c == 1 and tiles > 1:
        exposed = max(drain - 2 * turn_steps * step, drain / strips)
        # Panels that have no free slot before the tile ends are late.
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
    """Combine the lanes: seconds until the last multiplication ends, and until C has drained after it.

    `drain_terms` are the last arguments of `drain_end`.
    """
    if machine.shares_cores:
        # Every copy takes time from the cores that multiply, also that of the first panels. A disk does most
        # of the work of a Write by itself.
        busy = sum(lanes.values()) - (1 - WRITE_CPU_SHARE) * lanes["write"] + bubbles - first
        tail = drain_end(parts, tile_seconds(parts, busy, 0.0, prefetch=False), busy, *drain_terms) - busy
        return busy, tail
    occupied = _occupied(lanes, first, in_turn=1 in (slots.host_a, slots.host_b))
    loading = max(occupied[lane] for lane in LOADING)
    each = tile_seconds(parts, occupied["compute"], loading, prefetch=max(slots.a, slots.b) >= steps)
    # A tile may wait for its own panels even if the loading lanes are not busy on average.
    uneven = max(0.0, sum(each) - max(occupied["compute"], loading))
    without_output = occupied | {"write": 0.0, "encode": 0.0}
    computed = _overlapped(without_output, bubbles) + uneven
    busy = max(computed, _overlapped(occupied, bubbles))
    # C also drains during the bubbles. The end is the later of two: when all of C has drained if output takes
    # longest, and when the last tile has drained after its last step.
    smooth = _overlapped(without_output, 0.0) + uneven
    drained = drain_end(parts, each, smooth, *drain_terms)
    return busy, max(drained, drain_end(parts[-1:], each[-1:], computed, *drain_terms), busy) - busy


def _occupied(lanes: Mapping[str, float], first: float, *, in_turn: bool) -> dict[str, float]:
    """Seconds for which each lane is busy after the first panels are loaded.

    With one host slot per operand, reads and uploads run `in_turn`. Preparing takes its time from concurrent
    multiplications.
    """
    reading = lanes["read"] + lanes["h2d"] if in_turn else lanes["read"]
    loading = {lane: max(0.0, (reading if lane == "read" else lanes[lane]) - first) for lane in LOADING}
    return {**lanes, **loading, "compute": lanes["compute"] + lanes["prepare"], "prepare": 0.0}


def _overlapped(lanes: Mapping[str, float], bubbles: float) -> float:
    """Seconds of concurrent lanes.

    The longest lane hides the others, but one nearly as long delays it, by jitter and by sharing memory
    bandwidth. Bubbles cost nothing where multiplications wait for a longer lane anyway.
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
    """Seconds by which bursts of loads are late even if the loading lanes are not busy on average.

    The first tile loads all its panels while it is computed; that counts if `first_tile`. So does a later
    tile whose cached panels change, but its loads may start one tile earlier.
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
    """Seconds by which page faults delay the first tile's panels.

    Faults concern the panels of its first steps, which are read into slots for the first time. Time to spare
    at later steps does not hide them.
    """
    loading = beginning.loaded * sum(s.read / s.rate for s in streams)
    spare = max(0.0, beginning.computed * compute - loading)
    # Per operand: the share of the tile's steps that read into untouched slots, and the seconds of the
    # faults.
    faults = [
        (min(1.0, s.host_slots / steps), min(s.host_slots * s.panel, s.tile) * machine.arena_seconds_per_byte)
        for s in streams
        if s.faulted
    ]
    late = (sum(t * min(1.0, upto / share) for share, t in faults) - upto * spare for upto, _ in faults)
    return max((0.0, *late))
