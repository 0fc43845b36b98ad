"""Choose how to compute a triangle of C, such as that of a Gram matrix, on several devices of one host.

The tiles of the triangle are dealt to the devices, so that each has about as many. The planner for one device
plans the whole triangle with tiles of several sizes, with storage and the host's copies slowed down by the
other devices, and with a part of the host's memory. The plan with the shortest predicted time is chosen:
fewer tiles load fewer panels, and more of them are divided more evenly.
"""

from collections.abc import Iterator
from dataclasses import replace

from oocgemm.errors import BudgetError
from oocgemm.planning.cost.footprint import Footprint, footprint, scratch_bytes
from oocgemm.planning.cost.shares import predict_triangle, slowed
from oocgemm.planning.plan import Plan
from oocgemm.planning.search.gram import smallest
from oocgemm.planning.search.planner import make_plan
from oocgemm.planning.search.refusals import too_small
from oocgemm.planning.setting import Budgets, Setting
from oocgemm.planning.tiling import TileShape, ceil_div, round_up

# Numbers of tile rows that are tried, and depths of panels, relative to that of a plan for one device.
LINES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
DEPTHS = (0.5, 1.0, 2.0)
# The host budget of one device is the largest of these parts of the whole one with which all devices fit.
PARTS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125)


def triangle_plans(setting: Setting, tile: TileShape | None) -> list[Plan]:
    """Return plans for all devices, the best one first: with `tile`, or with the best shapes that fit.

    Raises `BudgetError` if none fits.
    """
    found, refused = list[Plan](), None
    for shape in [tile] if tile else _shapes(setting):
        try:
            found.append(_planned(setting, shape))
        except BudgetError as error:
            refused = error
    if not found and tile is None:
        found.append(_planned(setting, smallest(setting, None).tile))
    if not found:
        assert refused is not None
        raise refused
    # The prediction of a plan would count its loads first.
    return sorted(found, key=lambda plan: predict_triangle(setting, plan.candidate, plan.share).total)


def _shapes(setting: Setting) -> Iterator[TileShape]:
    """Yield the tile shapes to try: square ones, in whole chunks."""
    problem, devices = setting.problem, setting.devices
    least = smallest(setting, None).tile
    try:
        depth = make_plan(problem, setting.budgets, setting.machine, setting.layouts).tile.k
    except BudgetError:
        depth = least.k
    most = max(1, problem.m)
    sides = (round_up(ceil_div(most, lines), least.m) for lines in LINES if lines <= 8 * devices)
    for side in dict.fromkeys(min(most, max(least.m, side)) for side in sides):
        for k in dict.fromkeys(max(1, min(problem.depth, int(depth * part))) for part in DEPTHS):
            yield TileShape(side, side, k)


def _planned(setting: Setting, tile: TileShape) -> Plan:
    """Return the plan for a tile shape. Raises `BudgetError` if it does not fit."""
    devices, budgets = setting.devices, setting.budgets
    machine = slowed(setting.machine, 1.0, devices)
    once = scratch_bytes(setting, machine.io_threads, tile) + machine.host_reserve
    needed = 0, 0
    for part in (*(x for x in PARTS if x > 1 / devices), 1 / devices):
        own = Budgets(budgets.device, int((budgets.host - once) * part) + once)
        try:
            alone = make_plan(setting.problem, own, machine, setting.layouts, tile)
        except BudgetError as error:
            if error.needed is None:
                raise
            needed = error.needed[0], once + devices * max(0, error.needed[1] - once)
            break
        candidate = replace(alone.candidate, ends=devices)
        used = footprint(setting, candidate)
        if used.host_total <= budgets.host:
            given = setting.problem, setting.layouts, budgets, setting.machine, candidate
            return Plan(*given, devices=devices)
        needed = used.device_total, used.host_total
    size = Footprint({"slots": needed[0]}, {"slots": needed[1], "scratch": 0})
    raise too_small(setting, size, f"the smallest plan for {devices} devices")
