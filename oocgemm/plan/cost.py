"""What a plan costs: bytes each tier must hold, bytes each link must carry, seconds each lane takes.

Everything here is closed form, so that a planner can score thousands of candidates; `oocgemm.plan.simulate`
walks the real schedule of the few best.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

from oocgemm.plan.machine import KernelRate, MachineModel, default_model
from oocgemm.plan.problem import GemmProblem
from oocgemm.plan.schedule import Slots
from oocgemm.plan.tiling import Layout, TileGrid, TileShape, ceil_div, round_up

__all__ = ["KernelRate", "MachineModel", "default_model"]  # beside what is defined here

# Slots start on these boundaries: what cuBLAS and direct I/O want.
DEVICE_ALIGNMENT = 512
HOST_ALIGNMENT = 4096
# The share of a hidden lane's time that is taken to show all the same: it makes the planner prefer less traffic
# among plans that a perfect overlap would make equal.
UNHIDDEN = 0.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run a problem: what a planner chooses among."""

    tile: TileShape
    slots: Slots
    io_threads: int = 1


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


def slot_bytes(problem: GemmProblem, tile: TileShape, strip: int) -> dict[tuple[str, str], int]:
    """Bytes of one slot by tier and operand, aligned."""
    w, h, r = min(tile.w, problem.m), min(tile.h, problem.n), min(tile.r, problem.depth)
    sizes = problem.itemsizes
    strip = min(strip, w)
    return {
        ("device", "A"): round_up(w * r * sizes["A"], DEVICE_ALIGNMENT),
        ("device", "B"): round_up(r * h * sizes["B"], DEVICE_ALIGNMENT),
        ("device", "C"): round_up(w * h * sizes["acc"], DEVICE_ALIGNMENT),
        ("device", "D"): round_up(strip * h * sizes["C"], DEVICE_ALIGNMENT),
        ("host", "A"): round_up(w * r * sizes["A"], HOST_ALIGNMENT),
        ("host", "B"): round_up(r * h * sizes["B"], HOST_ALIGNMENT),
        ("host", "C"): round_up(strip * h * sizes["C"], HOST_ALIGNMENT),
    }


def scratch_bytes(layouts: Layouts, reads_c: bool, io_threads: int) -> int:
    """Host memory that decoding and encoding take beside the slots: as many threads read as write, each of them
    works on one chunk."""
    decode = max(layouts.a.decode_bytes, layouts.b.decode_bytes, layouts.c.decode_bytes if reads_c else 0)
    return io_threads * (decode + layouts.c.encode_bytes)


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
        "reserve": machine.device_reserve + cast_bytes(problem, tile, machine),
    }
    host = {
        "A": slots.host_a * size["host", "A"],
        "B": slots.host_b * size["host", "B"],
        "C": slots.host_c * size["host", "C"],
        "scratch": scratch_bytes(layouts, problem.reads_c, candidate.io_threads),
        "reserve": machine.host_reserve,
    }
    return Footprint(device, host)


def cast_bytes(problem: GemmProblem, tile: TileShape, machine: MachineModel) -> int:
    """Room for one panel pair in the accumulator's dtype, where the backend has no mixed product."""
    if not machine.casts_panels or problem.a_dtype == problem.acc_dtype:
        return 0
    w, h, r = min(tile.w, problem.m), min(tile.h, problem.n), min(tile.r, problem.depth)
    return round_up((w + h) * r * problem.itemsizes["acc"], DEVICE_ALIGNMENT)


def least_bytes(problem: GemmProblem, memory: int) -> int:
    """Fewest bytes that any schedule must bring into a fast memory of that many bytes.

    With M elements of it, each operand read at least once:

    - beta = 0:  max(m k + k n, 2 m n k / sqrt(M) - 2 M - m n)
    - otherwise: max(m k + k n + m n, 2 m n k / sqrt(M) - 2 M)

    after Smith, Lowery, Langou and van de Geijn, *A tight I/O lower bound for matrix multiplication* (2019).
    M counts elements of the narrowest dtype involved, so that the bound holds for mixed dtypes too.
    """
    m, n, k = problem.m, problem.n, problem.depth
    sizes = problem.itemsizes
    narrowest = min(sizes.values())
    elements = max(1, memory // narrowest)
    once = required_bytes(problem)["h2d"]
    streaming = 2 * m * n * k / sqrt(elements) - 2 * elements - (0 if problem.reads_c else m * n)
    return max(once, int(streaming * narrowest))


def required_bytes(problem: GemmProblem) -> dict[str, int]:
    """Bytes each link carries if every element crosses it once."""
    sizes = problem.itemsizes
    c_bytes = problem.m * problem.n * sizes["C"]
    up = (
        problem.m * problem.depth * sizes["A"]
        + problem.depth * problem.n * sizes["B"]
        + (c_bytes if problem.reads_c else 0)
    )
    return {"read": up, "h2d": up, "d2h": c_bytes, "write": c_bytes}


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


def amplification(problem: GemmProblem, tile: TileShape, layouts: Layouts) -> dict[str, float]:
    """Bytes of the chunks touched over bytes wanted, for reads of A and B."""
    return {
        "A": layouts.a.cover((problem.m, problem.depth), (tile.w, tile.r)),
        "B": layouts.b.cover((problem.depth, problem.n), (tile.r, tile.h)),
    }


def closed_traffic(problem: GemmProblem, grid: TileGrid, slots: Slots) -> dict[str, int]:
    """Bytes over each link in closed form: every tile loads its panels, unless all panels of a strip fit its
    slots. Never below what the schedule really moves, which reuses panels at turns."""
    down, across = grid.shape
    sizes = problem.itemsizes
    a = problem.m * problem.depth * sizes["A"]
    b = problem.depth * problem.n * sizes["B"]
    c = problem.m * problem.n * sizes["C"]
    a_times = 1 if grid.steps < slots.a or grid.steps == 1 else across
    up = a * a_times + b * down + (c if problem.reads_c else 0)
    if slots.unified:
        return {"read": up, "h2d": 0, "d2h": 0, "write": c}
    return {"read": up, "h2d": up, "d2h": c, "write": c}


def predict(
    problem: GemmProblem,
    candidate: Candidate,
    layouts: Layouts,
    machine: MachineModel,
    traffic: Mapping[str, int] | None = None,
) -> Prediction:
    """Seconds a candidate takes, in closed form."""
    tile, slots = candidate.tile, candidate.slots
    grid = TileGrid.of(problem, tile)
    down, across = grid.shape
    tiles = down * across
    if tiles == 0:
        return Prediction(dict.fromkeys(("read", "h2d", "compute", "d2h", "write"), 0.0), 0, 0, 0, 0)
    if traffic is None:
        traffic = closed_traffic(problem, grid, slots)
    w, h, r = min(tile.w, problem.m), min(tile.h, problem.n), min(tile.r, problem.depth)
    sizes = problem.itemsizes
    steps = tiles * grid.steps
    strips = tiles * ceil_div(w, slots.strip)
    amplified = amplification(problem, tile, layouts)
    read_rate = min(
        machine.store_rate(layouts.a, (w, r)) / amplified["A"],
        machine.store_rate(layouts.b, (r, h)) / amplified["B"],
    )
    write_rate = machine.memory if layouts.c.in_memory else machine.write
    lanes = {
        "read": traffic["read"] / read_rate,
        "h2d": traffic["h2d"] / machine.h2d + (0 if slots.unified else 2 * steps * machine.copy_latency),
        "compute": multiply_seconds(problem, machine, problem.flops, w, h, r) + steps * machine.step_latency,
        "d2h": traffic["d2h"] / machine.d2h,
        "write": traffic["write"] / write_rate + strips * machine.write_latency,
    }
    panels = w * r * sizes["A"] + r * h * sizes["B"]
    tile_bytes = w * h * sizes["C"]
    slots_held = footprint(problem, candidate, layouts, machine)
    start_up = (
        (slots_held.host_total + (slots_held.device_total if slots.unified else 0))
        * machine.arena_seconds_per_byte
        + panels / read_rate
        + (0 if slots.unified else panels / machine.h2d)
        + (tile_bytes / read_rate if problem.reads_c else 0)
    )
    # With one accumulator the next tile waits until this one has left (and C, if needed, has come).
    leaving = write_rate if slots.unified else machine.d2h
    hand_over = tile_bytes / leaving + (tile_bytes / machine.h2d if problem.reads_c else 0)
    bubbles = (tiles - 1) * hand_over if slots.c == 1 else 0.0
    tail = tile_bytes / min(machine.d2h, write_rate)
    if machine.shares_cores:
        busy = sum(lanes.values()) + bubbles  # every copy takes its time from the cores that multiply
    else:
        serial = lanes["read"] + lanes["h2d"] if 1 in (slots.host_a, slots.host_b) else 0.0
        busy = max(lanes["compute"] + bubbles, serial, *lanes.values())
        # Lanes hide behind the longest one, but never wholly: jitter, shared memory bandwidth, a wrong model.
        busy += UNHIDDEN * (sum(lanes.values()) - max(lanes.values()))
    return Prediction(lanes, start_up, bubbles, tail, start_up + busy + tail)


def multiply_seconds(
    problem: GemmProblem, machine: MachineModel, flops: float, w: int, h: int, r: int
) -> float:
    """Time of products of w x h x r blocks with that many flops in all."""
    if flops == 0:
        return 0.0
    rate = machine.kernels[problem.a_dtype]
    return flops / rate.peak * (1 + rate.half_depth / r) * (1 + 32 / w) * (1 + 32 / h)
