"""Choose how to compute a triangle of C, such as that of a Gram matrix, on several devices of one host.

The tiles of the triangle are dealt to the devices, so that each has about as many. Fewer tiles load fewer
panels, and more of them are divided more evenly. So tiles of several sizes are tried: formulas rank them by
the time of the device with the largest share. For the best ones, the planner for one device plans the whole
triangle, with storage and the host's copies slowed down by the other devices, and with a part of the host's
memory. The plan with the shortest predicted time is chosen.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from oocgemm.errors import BudgetError
from oocgemm.planning.cost.footprint import Candidate, Footprint, footprint, scratch_bytes
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.cost.shares import predict_triangle, slowed
from oocgemm.planning.plan import Plan, schedule_of
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.schedule.shared import SharedSchedule
from oocgemm.planning.search.gram import depths_of, estimate, smallest
from oocgemm.planning.search.planner import make_plan
from oocgemm.planning.search.refusals import too_small
from oocgemm.planning.setting import Budgets, Setting
from oocgemm.planning.tiling import TileShape, ceil_div, round_up

# Numbers of tile rows that are tried.
LINES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
# Number of strips of a tile on the diagonal when shapes are ranked.
STRIPS = 4
# Of these shapes, at least PLANNED are planned, the most promising ones, with at most DEPTHS depths per side.
PLANNED, DEPTHS = 4, 2
# The host budget of one device is the largest of these parts of the whole one with which all devices fit.
PARTS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125)


def triangle_plans(setting: Setting, tile: TileShape | None) -> list[Plan]:
    """Return plans for all devices, the best one first: with `tile`, or with the best shapes that fit.

    Raises `BudgetError` if none fits.
    """
    found, refused = list[Plan](), None
    for shape in [tile] if tile else _ranked(setting):
        if len(found) == PLANNED:
            break
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


def _ranked(setting: Setting) -> list[TileShape]:
    """Return the tile shapes to try, the most promising ones first; none if C is empty."""
    if not setting.problem.m:
        return []
    machine = slowed(setting.machine, 1.0, setting.devices)
    prices = Prices(replace(setting, machine=machine))

    @cache
    def share(side: int) -> float:
        """Return the part of the triangle that the device with the largest share computes."""
        slots = Slots(strip=ceil_div(side, STRIPS))
        schedule = schedule_of(setting, Candidate(TileShape(side, side, 1), slots))
        assert isinstance(schedule, SharedSchedule)
        return schedule.largest / max(1, schedule.elements)

    def seconds(shape: TileShape) -> float:
        return share(shape.m) * estimate(prices, shape, machine.io_threads)

    ranked, depths = sorted(dict.fromkeys(_shapes(prices)), key=seconds), Counter[int]()
    order = {}
    for shape in ranked:
        depths[shape.m] += 1
        order[shape] = depths[shape.m] > DEPTHS
    return sorted(ranked, key=order.__getitem__)


def _shapes(prices: Prices) -> Iterator[TileShape]:
    """Yield the tile shapes to try: square ones, in whole chunks."""
    setting, depths = prices.setting, depths_of(prices)
    least, most = smallest(setting, None).tile, max(1, setting.problem.m)
    sides = (round_up(ceil_div(most, lines), least.m) for lines in LINES if lines <= 8 * setting.devices)
    for side in dict.fromkeys(min(most, max(least.m, side)) for side in sides):
        for k in (*depths, min(setting.problem.depth, 2 * depths[-1])):
            yield TileShape(side, side, max(1, k))


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
