"""Choose how to run a product on several devices of one host.

Each device computes a share of C. The planner for one device plans the share for some ways to divide C, with
storage and the host's copies slowed down by the other devices. The tile shapes with which the clock predicts
the shortest times for a share are used for all of C, and the plan with the shortest predicted time is chosen.

If C is a triangle, its tiles are dealt to the devices, so that each has about as many. Fewer tiles load fewer
panels. More tiles are divided more evenly. So tiles of several sizes are tried, in the order of a bound on
the time of the device with the largest share.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import inf, prod
from operator import itemgetter

from oocgemm.errors import BudgetError
from oocgemm.planning.cost.clock import (
    Prediction,
    estimate_shared_loads,
    own_setting,
    predict_shared,
    predict_triangle,
    slowed,
)
from oocgemm.planning.cost.footprint import Candidate, Footprint, footprint, line_bytes, scratch_bytes
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.layout import Layouts
from oocgemm.planning.plan import Plan, Scored
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.dealing import arrangement
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.search.planner import MAX_EXPLAINED, make_plan
from oocgemm.planning.search.refusals import check_tile, too_small
from oocgemm.planning.search.shapes import alignments
from oocgemm.planning.search.slot_counts import io_threads
from oocgemm.planning.search.squares import Squares, smallest
from oocgemm.planning.setting import Budgets, Setting
from oocgemm.planning.tiling import TileGrid, TileShape, ceil_div, round_up
from oocgemm.planning.units import ceil_size, parse_size

# Numbers of tiles per device, down and across. With two, the two tiles may go through k in opposite
# directions, so that the tiles of a round have the same direction. The best DIVISIONS ways to divide C are
# tried with all of these numbers, if their panels are at most MAX_PANELS times as large as those of the best.
TILES_PER_DEVICE = ((1, 1), (2, 1), (1, 2), (2, 2))
DIVISIONS, MAX_PANELS = 2, 1.6
# Numbers of tile rows of a triangle, and of strips of a tile on the diagonal when shapes are ranked.
LINES, STRIPS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32), 4
# At most PLANNED shapes are planned for all devices. For a triangle, the best DEPTHS depths of each side come
# first.
PLANNED, DEPTHS = 4, 2
# Time of a search, relative to the search for a plan for one device: for each share, and for the best share.
QUICK, LONG = 0.0, 0.5
# The host budget of one device is the largest of these parts of the whole budget with which the slots of all
# devices fit. If even the smallest part is too large, each device gets an equal share.
HOST_PARTS = (1.0, 0.75, 0.6, 0.5, 0.35, 0.25, 0.18, 0.125)
# Predicted times for several devices with at most these relative differences count as about equal, and as
# nearly equal. With two sessions on one H100, small tiles took 6% longer than large ones. By the predictions,
# they were 1% faster. On two H100s, tiles of 65536 rows lost 3% to their first panels and last strips. By the
# predictions, they lost 1.5%.
ALIKE, NEARLY = 0.02, 0.005
# Maximum number of times that larger budgets are tried, to recommend some that suffice.
MAX_GROWN = 6


@lru_cache(64)
def shared_plan(
    problem: GemmProblem,
    budgets: Budgets,
    machine: MachineModel,
    layouts: Layouts,
    tile: TileShape | None,
    devices: int,
) -> Plan:
    """Choose a plan for several devices of the same kind.

    Args:
        problem, machine, layouts, tile: as for `make_plan`.
        budgets: the device budget is for each device, the host budget for all together.
        devices: number of devices.

    Raises what `make_plan` raises. The budgets that a `BudgetError` names have been tried: they suffice.
    """
    setting = Setting(problem, machine, layouts, budgets, devices)
    if tile is not None:
        check_tile(setting, tile)
    try:
        ranked = _ranked(_plans(setting, tile))
    except BudgetError as error:
        raise _sufficing(setting, error, tile) from error
    shown = tuple(Scored(plan.candidate, prediction) for plan, prediction, _ in ranked[:MAX_EXPLAINED])
    return replace(ranked[0][0], considered=shown)


# A plan, its predicted time, and the bytes of panels that are read; both with estimated loads, since it may
# take seconds to count them.
_Predicted = tuple[Plan, Prediction, float]


def _predicted(plan: Plan) -> _Predicted:
    given = plan.setting, plan.candidate
    if plan.problem.cover.square:
        return plan, predict_triangle(*given, plan.share), 0.0
    loads = estimate_shared_loads(*given, plan.rounds)
    return plan, predict_shared(*given, loads, plan.rounds), loads.a_read + loads.b_read


def _ranked(plans: Sequence[Plan]) -> list[_Predicted]:
    """Return the plans with their predictions, the best one first.

    Among plans that take about as long (`ALIKE`), those that read least depend least on exact rates. Among
    these, the best one has the least work for all lanes, if it takes nearly as long (`NEARLY`).
    """
    found = sorted(map(_predicted, plans), key=lambda one: one[1].total)
    alike = [one for one in found if one[1].total <= (1 + ALIKE) * found[0][1].total]
    least = (1 + ALIKE) * min(read for *_, read in alike)
    few = [one for one in alike if one[2] <= least]
    limit = (1 + NEARLY) * few[0][1].total
    best = min(few, key=lambda one: (max(limit, one[1].total), one[1].serial))
    return [best, *(one for one in found if one is not best)]


def _plans(setting: Setting, tile: TileShape | None) -> list[Plan]:
    """Return plans for `tile`, or for the best shapes that fit. Raises `BudgetError` if none fits."""
    found, refused = list[Plan](), None
    shapes = (
        [tile] if tile else _triangle_shapes(setting) if setting.problem.cover.square else _shapes(setting)
    )
    for shape in shapes:
        try:
            found.append(_planned(setting, shape, chosen=tile is None))
        except BudgetError as error:
            refused = error
        if len(found) == PLANNED:
            break
    if not found and refused is not None:
        raise refused
    return found


def _shapes(setting: Setting) -> list[TileShape]:
    """List tile shapes for the share of a device, fastest first. Raises `BudgetError` if no share fits."""
    found, refused = dict[TileShape, float](), None
    seconds = dict[tuple[int, int], float]()

    def search(division: tuple[int, int], tiles: tuple[int, int], effort: float) -> None:
        nonlocal refused
        share = _extents(setting, division[0] * tiles[0], division[1] * tiles[1])
        try:
            alone = _alone(setting, own_setting(setting, None, *share), division, 1.0, None, effort)
        except BudgetError as error:
            refused = error
            return
        total = prod(tiles) * alone.prediction.total
        found[alone.tile] = min(total, found.get(alone.tile, inf))
        seconds[division] = min(total, seconds.get(division, inf))

    for division in _divisions(setting):
        search(division, TILES_PER_DEVICE[0], QUICK)
    best = sorted(seconds, key=seconds.__getitem__)[:DIVISIONS]
    for division, tiles in product(best or _divisions(setting), TILES_PER_DEVICE[1:]):
        search(division, tiles, QUICK)
    for division in best[:1]:
        search(division, TILES_PER_DEVICE[0], LONG)
    if not found and refused is not None:
        raise refused
    return sorted(found, key=found.__getitem__)


def _divisions(setting: Setting) -> list[tuple[int, int]]:
    """Return the numbers of shares down and across in which the devices may divide C."""
    devices, problem = setting.devices, setting.problem
    found = {
        (down, devices // down): problem.m / down + problem.n * down / devices
        for down in range(1, devices + 1)
        if devices % down == 0 and (down == devices or not problem.keeps_rows)
    }
    limit = MAX_PANELS * min(found.values())
    return [division for division, panels in found.items() if panels <= limit]


def _extents(setting: Setting, down: int, across: int) -> tuple[int, int]:
    """Return the extents of a share if C is divided into `down` x `across` shares, in whole chunks."""
    problem, found = setting.problem, list[int]()
    for extent, count, fitting in zip(
        (problem.m, problem.n), (down, across), alignments(setting), strict=True
    ):
        share = ceil_div(extent, count)
        unit = next((x for x in reversed(fitting) if 4 * x <= share), fitting[0])
        found.append(min(extent, round_up(share, unit)))
    return found[0], found[1]


def _triangle_shapes(setting: Setting) -> list[TileShape]:
    """List square tile shapes in whole chunks of C: the most promising first, the smallest possible last."""
    least, n = smallest(setting, None).tile, setting.problem.m
    if not n:
        return [least]
    prices = Prices(replace(setting, machine=slowed(setting.machine, 1.0, setting.devices)))
    squares, ranked = Squares(prices, setting.machine.io_threads), list[tuple[float, int, TileShape]]()
    lines = (count for count in LINES if count <= 8 * setting.devices)
    for side in dict.fromkeys(min(n, max(least.m, round_up(ceil_div(n, x), least.m))) for x in lines):
        strips = Candidate(TileShape(side, side, 1), Slots(strip=ceil_div(side, STRIPS)))
        share = _plan(setting, strips).share
        depths = (*squares.depths, min(setting.problem.depth, 2 * squares.depths[-1]))
        bounded = [(squares.of(TileShape(side, side, max(1, k))), k) for k in dict.fromkeys(depths)]
        of_side = sorted((share * found[0][0], max(1, k)) for found, k in bounded if found)
        ranked += [
            (seconds, number >= DEPTHS, TileShape(side, side, k))
            for number, (seconds, k) in enumerate(of_side)
        ]
    return [*(shape for *_, shape in sorted(ranked, key=itemgetter(1, 0))), least]


def _plan(setting: Setting, candidate: Candidate) -> Plan:
    given = setting.problem, setting.layouts, setting.budgets, setting.machine, candidate
    return Plan(*given, devices=setting.devices)


def _planned(setting: Setting, tile: TileShape, *, chosen: bool) -> Plan:
    """Return the plan for a tile shape, with the slots that suit the share of one device.

    If the tile shape is `chosen` here, and each device has one tile at most, all tiles go through k forwards,
    so that devices pass panels on. If the caller has given it, the bits of C must be those of one device.

    Raises `BudgetError` if no such plan fits. The message names budgets that may suffice.
    """
    devices, grid = setting.devices, TileGrid.of(setting.problem, tile)
    arranged = (1, 1)
    own = replace(setting, devices=1)
    if not setting.problem.cover.square:
        arranged = arrangement(devices, setting.problem, grid, apart=setting.works_apart)
        rows, cols = (ceil_div(*pair) for pair in zip(grid.shape, arranged, strict=True))
        own = own_setting(setting, tile, rows * tile.m, cols * tile.n)
    for part in (*(x for x in HOST_PARTS if x > 1 / devices), 1 / devices):
        alone = _alone(setting, own, arranged, part, tile, LONG).candidate
        candidate = _widened(alone, devices, arranged, grid)
        if chosen and not (grid.cover.square or setting.works_apart):
            candidate = _passing(setting, candidate, arranged, grid)
        used = footprint(setting, candidate)
        if used.host_total <= setting.budgets.host:
            return _plan(setting, candidate)
    raise _refusal(setting, used.device_total, used.host_total)


def _alone(
    setting: Setting,
    own: Setting,
    arranged: tuple[int, int],
    part: float,
    tile: TileShape | None,
    effort: float,
) -> Plan:
    """Return a plan for the share `own` of one device within a part of the host budget.

    Raises `BudgetError` if no plan fits. The message names budgets that may suffice for all devices.
    """
    budgets, devices = setting.budgets, setting.devices
    # Bytes of host memory that the run needs once, not per device.
    once = scratch_bytes(setting, io_threads(setting)) + setting.machine.host_reserve
    host = int((budgets.host - once) * part) + once
    # The second argument is about how many panels are read for all devices per panel of one device.
    machine = slowed(setting.machine, sum(arranged) / 2, devices)
    # Each device has the numbers of all rows and columns of C, not only those of its share.
    others = line_bytes(setting.problem) - line_bytes(own.problem)
    given = Budgets(max(0, budgets.device - others), host)
    try:
        return make_plan(own.problem, given, machine, own.layouts, tile, effort)
    except BudgetError as error:
        if error.needed is None:
            raise
        device, on_host = error.needed
        host = once + devices * max(0, on_host - once)
        raise _refusal(setting, device + others, host) from error


def _widened(alone: Candidate, devices: int, arranged: tuple[int, int], grid: TileGrid) -> Candidate:
    """Return the candidate for all devices, given the candidate for the share of one device."""
    slots, order = alone.slots, alone.traversal
    host_a, host_b = (
        min(here * count, max(here, lines * grid.steps))
        for here, count, lines in zip((slots.host_a, slots.host_b), arranged, grid.shape, strict=True)
    )
    order = replace(order, band=order.band * arranged[order.axis])
    return replace(alone, slots=replace(slots, host_a=host_a, host_b=host_b), traversal=order, ends=devices)


def _passing(setting: Setting, candidate: Candidate, arranged: tuple[int, int], grid: TileGrid) -> Candidate:
    """Return the candidate with which the devices wait least for panels that they copy from each other.

    If each device has one tile at most, all tiles go through k forwards, so that devices use a panel in the
    same step. A device keeps a panel until the others have copied it. So that the next panels arrive
    meanwhile, there is one slot more than a tile row or column has devices, if memory suffices.
    """
    slots, order = candidate.slots, candidate.traversal
    if 1 < grid.count <= setting.devices:
        order = replace(order, alternates=False)
    least = max(arranged) + 1
    a = max(slots.a, least) if slots.streams("A") else slots.a
    b = max(slots.b, least) if slots.streams("B") else slots.b
    more = replace(candidate, slots=replace(slots, a=a, b=b), traversal=order)
    fits = footprint(setting, more).device_total <= setting.budgets.device
    return more if fits else replace(candidate, traversal=order)


def _sufficing(setting: Setting, error: BudgetError, tile: TileShape | None) -> BudgetError:
    """Return an error like `error` that names budgets with which a plan is found."""
    given, needed = setting.budgets, error.needed
    if needed is None:
        return error
    for _ in range(MAX_GROWN):
        device, host = needed
        if not setting.machine.unified:
            # Rings grow with the host budget, so that the bytes that the message names are tried.
            device, host = max(device, given.device), parse_size(ceil_size(host))
        try:
            _plans(replace(setting, budgets=Budgets(device, host)), tile)
        except BudgetError as larger:
            more = larger.needed or needed
            needed = max(needed[0], more[0]), max(host, more[1])
        else:
            return _refusal(setting, needed[0], host)
    return _refusal(setting, *needed)


def _refusal(setting: Setting, device: int, host: int) -> BudgetError:
    """Create the error for budgets below these bytes: `device` for each device, `host` for all together."""
    needed = Footprint({"slots": device}, {"slots": host, "scratch": 0})
    return too_small(setting, needed, f"the smallest plan for {setting.devices} devices")
