"""Estimate with formulas how long each lane is busy, and how panels arrive."""

from dataclasses import dataclass
from math import prod

from oocgemm.planning.cost.footprint import Candidate, extents
from oocgemm.planning.cost.price import panel_rate, strip_rate
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import Layout, Shape, TileGrid, TileShape, ceil_div

# All lanes whose time is predicted. "issue" is an additional lane: the time in which threads hold the GIL and
# submit operations one after another.
LANES = ("read", "decode", "h2d", "prepare", "compute", "d2h", "encode", "write", "issue")
# The lanes of the operations that load panels of A and B.
LOADING = ("read", "decode", "h2d")


@dataclass(frozen=True, slots=True)
class PanelStream:
    """How the run loads the panels of one operand, op(A) or op(B).

    - `lane`: "read", or "decode" if chunks are compressed.
    - `rate`, `upload_rate`: bytes per second of reading panels and of copying them to the device.
    - `read`: bytes that the whole run reads. `panel`: bytes of one panel. `tile`: bytes of all panels that
      one tile needs.
    - `slots`, `host_slots`: numbers of buffers for panels on the device and on the host.
    """

    lane: str
    rate: float
    upload_rate: float
    read: float
    panel: int
    tile: int
    slots: int
    host_slots: int

    @property
    def faulted(self) -> float:
        """Bytes read into host slots that were not used before. Page faults slow these reads down."""
        return min(self.read, self.host_slots * self.panel)


def panel_streams(
    setting: Setting, tile: TileShape, slots: Slots, loads: Loads
) -> tuple[PanelStream, PanelStream]:
    """Compute how the panels of op(A) and of op(B) are loaded."""
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
    """Estimate for how many seconds each lane is busy, except "issue".

    Also returns the seconds to load the first panels of A and B.
    """
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
        if not slots.unified:
            first += s.panel / s.upload_rate + min(s.faulted, s.panel) * machine.arena_seconds_per_byte
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
        lanes["d2h"] = c_bytes / machine.download_rate(layouts.c, (slots.strip, n))
    return lanes, first


def count_copies(
    problem: GemmProblem, slots: Slots, strips: int, loads: Loads, panel_a: int, panel_b: int
) -> float:
    """Estimate the number of operations that load panels of A and B, or load, finish or store strips of C.

    `panel_a` and `panel_b` are the bytes of a panel of op(A) and of op(B). `strips` is the number of strips
    (blocks of rows) in which C is moved.
    """
    panels = 0.0
    if problem.depth:
        panels += 0.0 if slots.streams("A") else loads.a_read / panel_a
        panels += 0.0 if slots.streams("B") else loads.b_read / panel_b
        panels += 0.0 if slots.unified else loads.a_up / panel_a + loads.b_up / panel_b
    each = 1 if slots.unified or slots.streams("C") else 2
    return panels + strips * (each + (each if problem.reads_c else 0) + int(problem.finishes))
