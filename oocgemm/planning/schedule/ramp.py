"""Thin first steps: the kernel begins sooner with them, and may wait the longer for the first whole ones."""

from itertools import islice
from math import lcm, prod

from oocgemm.planning.cost.footprint import Layouts, MachineModel, extents
from oocgemm.planning.cost.predict import multiply_seconds, panel_rate
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.traversal import step_order
from oocgemm.planning.tiling import TileGrid, TileShape

# The thinnest first step: half as deep twice over, and deep enough for a kernel to be worth starting.
MAX_HALVINGS = 2
THINNEST = 256


def best_ramp(problem: GemmProblem, machine: MachineModel, layouts: Layouts, tile: TileShape) -> int:
    """How often the depth of the first step is to be halved (`TileGrid`), lest the kernel wait for its first panels.

    Where panels take about as long to come as to multiply, it waits for the first whole one as long as for a first step
    that is whole; and thin ones take the link longer where rows of an array are copied from where they lie.
    """
    unit = lcm(layouts.a.read_chunk[1], layouts.b.read_chunk[0])
    most = _most_halvings(problem.depth, tile.k, unit)
    if most == 0:
        return 0
    # Of equals, to the microsecond, the thinnest: the panels may come sooner than they are believed to.
    return min(range(most, -1, -1), key=lambda ramp: round(_waited(problem, machine, layouts, tile, ramp), 6))


def _most_halvings(k: int, r: int, unit: int) -> int:
    """How often r can be halved so that thin steps are whole multiples of `unit` and not too thin."""
    halvings = 0
    while (
        halvings < MAX_HALVINGS
        and k > r
        and (r >> halvings) % (2 * unit) == 0
        and r >> (halvings + 1) >= THINNEST
    ):
        halvings += 1
    return halvings


def _waited(
    problem: GemmProblem, machine: MachineModel, layouts: Layouts, tile: TileShape, ramp: int
) -> float:
    """Seconds for which the kernel has waited when it begins its second whole step, from where on all is the same."""
    (w, h, r), k, grid = extents(problem, tile), problem.depth, TileGrid.of(problem, tile, ramp)
    read = uploaded = multiplied = waited = 0.0
    for step in islice(step_order((0, 0), grid.steps, ramp), ramp + 2):
        start, stop = grid.depth(step)
        deep = stop - start
        for layout, whole, panel, thin, size in (
            (layouts.a, (problem.m, k), (w, r), (w, deep), problem.itemsizes["A"]),
            (layouts.b, (k, problem.n), (r, h), (deep, h), problem.itemsizes["B"]),
        ):
            untouched = 0.0 if layout.is_direct(panel) else machine.arena_seconds_per_byte
            read += prod(thin) * size * (1 / panel_rate(problem, machine, layout, whole, panel) + untouched)
            uploaded = max(read, uploaded) + prod(thin) * size / machine.upload_rate(layout, panel, thin)
        waited = max(waited, uploaded - multiplied)
        flops = problem.flops * w * h * deep / (problem.m * problem.n * k)
        multiplied += multiply_seconds(problem, machine, flops, w, h, deep) + machine.step_latency
    return waited
