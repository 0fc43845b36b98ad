"""Estimate in closed form how long each lane is busy, and how the panels of each operand arrive."""

from dataclasses import dataclass
from math import prod

from oocgemm.planning.cost.footprint import Candidate, extents
from oocgemm.planning.cost.price import panel_rate, strip_rate
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import Layout, Shape, TileGrid, TileShape, ceil_div

# The last is the GIL, under which operations are issued one after another.
LANES = ("read", "decode", "h2d", "prepare", "compute", "d2h", "encode", "write", "issue")
LOADING = ("read", "decode", "h2d")


@dataclass(frozen=True, slots=True)
class PanelStream:
    """How the panels of op(A) or op(B) are loaded.

    `lane` is "read" or "decode". `rate` and `upload_rate` are in bytes per second. `read` is the bytes that
    the run reads, `panel` those of one panel, and `tile` those of all panels of a tile. `slots` and
    `host_slots` are numbers of slots. `direct` panels bypass the host's slots.
    """

    lane: str
    rate: float
    upload_rate: float
    read: float
    panel: int
    tile: int
    slots: int
    host_slots: int
    direct: bool

    @property
    def faulted(self) -> float:
        """Bytes that are read into host memory for the first time, so that its pages are faulted in."""
        return 0.0 if self.direct else min(self.read, self.host_slots * self.panel)


def panel_streams(
    setting: Setting, tile: TileShape, slots: Slots, loads: Loads
) -> tuple[PanelStream, PanelStream]:
    """Describe how the panels of op(A) and of op(B) are loaded."""
    problem, layouts, machine = setting.problem, setting.layouts, setting.machine
    m, n, k = extents(problem, tile)
    depth = problem.depth

    def stream(
        layout: Layout, whole: Shape, panel: Shape, of_tile: Shape, size: int, read: float, counts: Shape
    ) -> PanelStream:
        return PanelStream(
            "decode" if layout.decode_bytes else "read",
            panel_rate(setting, layout, whole, panel),
            machine.upload_rate(layout, panel),
            read,
            prod(panel) * size,
            prod(of_tile) * size,
            *counts,
            layout.is_direct(panel),
        )

    a, b = problem.itemsizes["A"], problem.itemsizes["B"]
    of_a, of_b = (slots.a, slots.host_a), (slots.b, slots.host_b)
    return (
        stream(layouts.a, (problem.m, depth), (m, k), (m, depth), a, loads.a_read, of_a),
        stream(layouts.b, (depth, problem.n), (k, n), (depth, n), b, loads.b_read, of_b),
    )


def lane_seconds(
    setting: Setting,
    candidate: Candidate,
    grid: TileGrid,
    loads: Loads,
    streams: tuple[PanelStream, PanelStream],
) -> tuple[dict[str, float], float]:
    """Estimate the busy seconds of each lane but "issue", and the seconds to load the first panels."""
    problem, layouts, machine = setting.problem, setting.layouts, setting.machine
    slots, (m, n, k) = candidate.slots, extents(problem, candidate.tile)
    down, across = grid.shape
    steps = down * across * grid.steps
    lanes = dict.fromkeys(LANES, 0.0)
    lanes["compute"] = (
        machine.multiply_seconds(problem.rate, problem.flops, m, n, k)
        * machine.wave_quantization(problem.rate, m, n)
        + steps * machine.step_latency
    )
    first = 0.0
    if problem.planes:
        prepared = (problem.m * across + problem.n * down) * problem.depth * problem.itemsizes["A"]
        lanes["prepare"] = prepared / machine.prepare + steps * machine.step_latency
        first = lanes["prepare"] / steps
    for s in streams:
        lanes[s.lane] += s.read / s.rate + s.faulted * machine.arena_seconds_per_byte
        if s.host_slots:
            faults = machine.arena_seconds_per_byte * s.panel if s.faulted else 0.0
            first += s.panel / s.upload_rate + faults
        first += s.panel / s.rate
    c_bytes = problem.m * problem.n * problem.itemsizes["C"]
    c_in = c_bytes if problem.reads_c else 0
    if c_in:
        seconds = c_in / panel_rate(setting, layouts.c, (problem.m, problem.n), (m, n))
        lanes["decode" if layouts.c.decode_bytes else "read"] += seconds
        first += seconds / (down * across)
    strips = down * across * ceil_div(m, slots.strip)
    lanes["encode" if layouts.c.encodes else "write"] = (
        c_bytes / strip_rate(setting, (slots.strip, n)) + strips * machine.write_latency
    )
    if not slots.unified:
        up = loads.a_up / streams[0].upload_rate + loads.b_up / streams[1].upload_rate + c_in / machine.h2d
        lanes["h2d"] = up + 2 * steps * machine.copy_latency
        lanes["d2h"] = c_bytes / machine.d2h
    return lanes, first


def count_copies(
    problem: GemmProblem, slots: Slots, strips: int, loads: Loads, panel_a: int, panel_b: int
) -> float:
    """Estimate how many operations load panels of `panel_a` and `panel_b` bytes and move strips of C."""
    panels = loads.a_read / panel_a + loads.b_read / panel_b if problem.depth else 0.0
    if not slots.unified:
        panels += loads.a_up / panel_a + loads.b_up / panel_b if problem.depth else 0.0
    each = 1 if slots.unified else 2
    return panels + strips * (each + (each if problem.reads_c else 0) + int(problem.finishes))
