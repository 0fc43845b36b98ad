"""Choose how to run a product on several devices of one host.

Each device computes a share of C. The planner for one device plans this share, with storage and the host's
copies slowed down by the other devices. The tile shape that it chooses is used for all of C. It is tried with
each way to spread the devices over tile rows and tile columns, with one tile per device and, unless the
product is short, with several. The plan with the shortest predicted time is chosen.

Most of the time would go to shapes that cannot win. So the clock first runs the share of one device as if no
panel was read for this device only. Shapes that take too long even so are not planned for all devices.

*Triangles.* The tiles of the triangle are dealt to the devices, so that each has about as many. Fewer tiles
load fewer panels, and more of them are divided more evenly. So tiles of several sizes are tried: formulas
rank them by the time of the device with the largest share. For the best ones, the planner for one device
plans the whole triangle, with storage and the host's copies slowed down by the other devices, and with a part
of the host's memory. The plan with the shortest predicted time is chosen.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from itertools import product
from math import inf, prod
from operator import itemgetter

from oocgemm.errors import BudgetError
from oocgemm.planning.cost.clock import predict
from oocgemm.planning.cost.footprint import Candidate, Footprint, footprint, line_bytes, scratch_bytes
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.cost.shares import own_setting, predict_triangle, slowed
from oocgemm.planning.layout import Layouts
from oocgemm.planning.plan import Plan, Scored, schedule_of
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.dealing import SharedSchedule, arrangement
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.search.planner import CLOSE, MAX_EXPLAINED, make_plan
from oocgemm.planning.search.refusals import check_tile, too_small
from oocgemm.planning.search.shapes import alignments
from oocgemm.planning.search.slot_counts import io_threads, slot_counts
from oocgemm.planning.search.squares import Squares, smallest
from oocgemm.planning.setting import Budgets, Setting
from oocgemm.planning.tiling import TileGrid, TileShape, ceil_div, round_up
from oocgemm.planning.units import ceil_size, parse_size

# Numbers of tiles per device, down and across, that are tried. With two, the two tiles may go through k in
# opposite directions, so that the tiles of a round have the same direction.
TILES_PER_DEVICE = ((1, 1), (2, 1), (1, 2))
# Shares of C are tried if their panels are at most this many times as large as those of the best division.
MAX_PANELS = 1.6
# Tile shapes that are planned for all devices: at most MAX_CHOSEN that a search chose for the share of a
# device, those with which it takes least time, and MAX_OTHERS that a search has tried.
MAX_CHOSEN, MAX_OTHERS = 8, 2
# Time of the searches, relative to that for a plan for one device: a quick search for each way to divide C
# into one share per device, short ones for smaller shares too, and a longer one for the best share.
QUICK, SHORT, LONG = 0.0, 0.05, 0.5
# The short searches are left out for products that take less than this many seconds, because they would take
# more time than they save: if panels have host slots, and if they have none.
MIN_THOROUGH, MIN_THOROUGH_STREAMED = 1.0, 20.0
# The host budget of one device is the largest of these parts of the whole one with which the slots of all
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
    plans = triangle_plans(setting, tile) if problem.cover.square else _ranked(_ShareSearch(setting), tile)
    shown = plans[:MAX_EXPLAINED]
    return replace(plans[0], considered=tuple(Scored(plan.candidate, plan.prediction) for plan in shown))


def _ranked(search: "_ShareSearch", tile: TileShape | None) -> list[Plan]:
    """Return the plans of a search, the best one first."""
    try:
        plans = [plan for _, plan in sorted(search.plans(tile), key=itemgetter(0))]
    except BudgetError as error:
        raise search.sufficing(error, tile) from error
    # Of plans that take about as long, those that read least depend least on exact rates. Of those that take
    # nearly as long, the one with least work for all lanes does.
    reads = [plan.loads.a_read + plan.loads.b_read for plan in plans]
    limit = (1 + ALIKE) * min(plan.prediction.total for plan in plans)
    alike = [(read, plan) for read, plan in zip(reads, plans, strict=True) if plan.prediction.total <= limit]
    least = (1 + ALIKE) * min(read for read, _ in alike)
    few = [plan for read, plan in alike if read <= least]
    limit = (1 + NEARLY) * min(plan.prediction.total for plan in few)
    best = min(few, key=lambda plan: (max(limit, plan.prediction.total), plan.prediction.serial))
    return [best, *sorted((x for x in plans if x is not best), key=lambda plan: plan.prediction.total)]


# A way to divide C: numbers of shares down and across, and numbers of tiles of each share.
_Division = tuple[tuple[int, int], tuple[int, int]]


class _ShareSearch:
    """Plans the share of one device, and turns its plan into one for all devices."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        # Bytes of host memory that the run needs once, not per device.
        self._once = scratch_bytes(setting, io_threads(setting)) + setting.machine.host_reserve

    def plans(self, tile: TileShape | None) -> Iterator[tuple[int, Plan]]:
        """Yield (number of the shape, plan) for `tile`, or for the best shapes that fit.

        Raises `BudgetError` if none fits.
        """
        if tile is not None:
            yield from self._plans_of([tile])
            return
        streamed = all(self.setting.routes[x].streams for x in "AB")
        try:
            yield from self._plans_of(self.shapes(MIN_THOROUGH_STREAMED if streamed else MIN_THOROUGH))
        except BudgetError:
            yield from self._plans_of(self.shapes(0.0))

    def _plans_of(self, shapes: Sequence[TileShape]) -> Iterator[tuple[int, Plan]]:
        """Yield (number of the shape, plan) for some shapes, in ascending order of bounds on their seconds.

        Shapes that take longer than the best plan before them are left out.
        """
        best, refused = inf, None
        alone = [_Alone(self, shape) for shape in shapes]
        bounds = [each.bound() for each in alone] if len(shapes) > 1 else [0.0]
        for least, number in sorted(zip(bounds, range(len(shapes)), strict=True)):
            limit = (1 + CLOSE) * best
            if least > limit:
                break
            if not alone[number].reaches(limit):
                continue
            try:
                plan = self.planned(shapes[number])
            except BudgetError as error:
                refused = error
                continue
            best = min(best, plan.prediction.total)
            yield number, plan
        if refused is not None and best == inf:
            raise refused

    def sufficing(self, error: BudgetError, tile: TileShape | None) -> BudgetError:
        """Return an error like `error` that names budgets with which a plan is found."""
        setting, given, needed = self.setting, self.setting.budgets, error.needed
        if needed is None:
            return error
        for _ in range(MAX_GROWN):
            device, host = needed
            if not setting.machine.unified:
                # Rings grow with the host budget, so that the bytes that the message names are tried.
                device, host = max(device, given.device), parse_size(ceil_size(host))
            other = replace(setting, budgets=Budgets(device, host))
            try:
                next(_ShareSearch(other).plans(tile))
            except BudgetError as larger:
                more = larger.needed or needed
                needed = max(needed[0], more[0]), max(host, more[1])
            else:
                needed = needed[0], host
                break
        return _refusal(setting, *needed)

    def shapes(self, min_thorough: float) -> list[TileShape]:
        """Return the best tile shapes for the share of a device, of all ways to divide C into shares.

        Products that take at least `min_thorough` seconds are searched thoroughly. Raises `BudgetError` if
        no shape fits.
        """
        found = _Shapes(self)
        with suppress(BudgetError):
            found.search(product(self._divisions(), TILES_PER_DEVICE[:1]), QUICK)
        if found.ranked and found.seconds[found.ranked[0]] < min_thorough:
            found.search(found.ranked[:1], LONG)
            smaller = [shape for tile in found.chosen for shape in self._smaller(tile)]
            return list(dict.fromkeys((*found.chosen, *found.tried, *smaller)))
        found = _Shapes(self)
        found.search(product(self._divisions(), TILES_PER_DEVICE), SHORT)
        found.search(found.ranked[:1], LONG)
        best = sorted(found.chosen, key=found.chosen.__getitem__)[:MAX_CHOSEN]
        others = sorted(found.tried.keys() - set(best), key=lambda tile: (found.tried[tile], str(tile)))
        return best + others[:MAX_OTHERS]

    def _smaller(self, tile: TileShape) -> Iterator[TileShape]:
        """Yield tile shapes with half of the rows, half of the columns, or both.

        They consist of whole chunks, or are as near to half as possible.
        """
        problem, (units_m, units_n) = self.setting.problem, alignments(self.setting)
        for (rows, cols), at in product(((2, 1), (1, 2), (2, 2)), (-1, 0)):
            m = round_up(ceil_div(tile.m, rows), units_m[at])
            n = round_up(ceil_div(tile.n, cols), units_n[at])
            yield replace(tile, m=min(m, problem.m), n=min(n, problem.n))

    def share_of(self, division: tuple[int, int], tiles: tuple[int, int], effort: float) -> Plan:
        """Plan a share of one device if each has some tiles, down and across. Raises `BudgetError`."""
        own = self._own(None, self._extents(division[0] * tiles[0], division[1] * tiles[1]))
        return self._alone(own, division, 1 / self.setting.devices, None, effort)

    def arranged(self, tile: TileShape) -> tuple[int, int]:
        """Return over how many tile rows and columns the devices are spread."""
        setting = self.setting
        grid = TileGrid.of(setting.problem, tile)
        return arrangement(setting.devices, setting.problem, grid, apart=setting.works_apart)

    def _divisions(self) -> list[tuple[int, int]]:
        """Return the numbers of shares down and across in which the devices may divide C."""
        devices, problem = self.setting.devices, self.setting.problem
        found = {
            (down, devices // down): problem.m / down + problem.n * down / devices
            for down in range(1, devices + 1)
            if devices % down == 0 and (down == devices or not problem.keeps_rows)
        }
        limit = MAX_PANELS * min(found.values())
        return [division for division, panels in found.items() if panels <= limit]

    def planned(self, tile: TileShape) -> Plan:
        """Return the plan for a tile shape, with the slots that suit the share of one device.

        Raises `BudgetError` if it does not fit. The message names budgets that may suffice.
        """
        setting, devices = self.setting, self.setting.devices
        grid, arranged = TileGrid.of(setting.problem, tile), self.arranged(tile)
        own = self.own_tiles(tile)
        for part in (*(x for x in HOST_PARTS if x > 1 / devices), 1 / devices):
            candidate = _widened(self._alone(own, arranged, part, tile, LONG).candidate, arranged, grid)
            used = footprint(setting, candidate)
            if used.host_total <= setting.budgets.host:
                return Plan(
                    *(setting.problem, setting.layouts, setting.budgets, setting.machine, candidate),
                    devices=devices,
                )
        raise _refusal(setting, used.device_total, used.host_total)

    def _extents(self, down: int, across: int) -> tuple[int, int]:
        """Return the extents of a share if C is divided into `down` x `across` of them, in whole chunks."""
        problem, units = self.setting.problem, alignments(self.setting)
        found = []
        for extent, count, fitting in zip((problem.m, problem.n), (down, across), units, strict=True):
            share = ceil_div(extent, count)
            unit = next((x for x in reversed(fitting) if 4 * x <= share), fitting[0])
            found.append(min(extent, round_up(share, unit)))
        return found[0], found[1]

    def _own(self, tile: TileShape | None, share: tuple[int, int]) -> Setting:
        return own_setting(self.setting, tile, *share)

    def own_tiles(self, tile: TileShape) -> Setting:
        """Return the setting of the share of one device, in whole tiles."""
        grid = TileGrid.of(self.setting.problem, tile)
        rows, cols = (ceil_div(*pair) for pair in zip(grid.shape, self.arranged(tile), strict=True))
        return self._own(tile, (rows * tile.m, cols * tile.n))

    def _alone(
        self, own: Setting, arranged: tuple[int, int], part: float, tile: TileShape | None, effort: float
    ) -> Plan:
        """Plan the share `own` of one device within a part of the host budget.

        Raises `BudgetError` if no plan fits. The message names budgets that may suffice for all devices.
        """
        budgets, devices, once = self.setting.budgets, self.setting.devices, self._once
        host = int((budgets.host - once) * part) + once
        # About as many panels are read for all devices in a step, per panel of one device.
        reading = sum(arranged) / 2
        machine = slowed(self.setting.machine, reading, devices)
        # Each device has the numbers of all rows and columns of C, not only those of its share.
        others = line_bytes(self.setting.problem) - line_bytes(own.problem)
        given = Budgets(max(0, budgets.device - others), host)
        try:
            return make_plan(own.problem, given, machine, own.layouts, tile, effort)
        except BudgetError as error:
            if error.needed is None:
                raise
            device, on_host = error.needed
            host = once + devices * max(0, on_host - once)
            raise _refusal(self.setting, device + others, host) from error


class _Shapes:
    """The tile shapes that searches for the share of one device have found.

    - `chosen`: those that the searches chose, with the seconds of all tiles of a device.
    - `tried`: all that they tried.
    - `seconds`, `ranked`: the ways to divide C that were searched last, best first.
    """

    def __init__(self, search: _ShareSearch) -> None:
        self._search = search
        self.chosen, self.tried = dict[TileShape, float](), dict[TileShape, float]()
        self.seconds, self.ranked = dict[_Division, float](), list[_Division]()

    def search(self, divisions: Iterable[_Division], effort: float) -> None:
        """Search for the best shapes of some ways to divide C. Raises `BudgetError` if there are none."""
        refused, self.seconds = None, {}
        for division in divisions:
            try:
                alone = self._search.share_of(*division, effort)
            except BudgetError as error:
                refused = error
                continue
            shares, tiles = division
            seconds = self.seconds[division] = prod(tiles) * alone.prediction.total
            self.chosen[alone.tile] = min(seconds, self.chosen.get(alone.tile, inf))
            for scored in alone.considered:
                tile, total = scored.candidate.tile, prod(tiles) * scored.prediction.total
                if self._search.arranged(tile) == shares:
                    self.tried[tile] = min(total, self.tried.get(tile, inf))
        if not self.seconds and refused is not None:
            raise refused
        self.ranked = sorted(self.seconds, key=self.seconds.__getitem__)


class _Alone:
    """The candidates for the share of one device that has all of the host budget, with one tile shape.

    No panel is read for this device only. So a plan for all devices takes at least about as long as they do.
    """

    def __init__(self, search: _ShareSearch, tile: TileShape) -> None:
        setting, own = search.setting, search.own_tiles(tile)
        alone = replace(own, machine=slowed(setting.machine, 1.0, setting.devices))
        tiles = TileGrid.of(own.problem, tile).count
        rounds = ceil_div(TileGrid.of(setting.problem, tile).count, setting.devices)
        self._part, self._prices, self._tile = rounds / max(1, tiles), Prices(alone), tile

    @cached_property
    def _found(self) -> list[tuple[float, Candidate]]:
        return [
            x
            for c in (1, 2)
            for x in slot_counts(self._prices, self._tile, c, io_threads(self._prices.setting))
        ]

    def bound(self) -> float:
        """Return a lower bound on the seconds of all candidates; 0 if none may fit."""
        return self._part * min((least for least, _ in self._found), default=0.0)

    def reaches(self, limit: float) -> bool:
        """Return whether a candidate is predicted to take at most `limit` seconds, or none may fit."""
        if limit == inf or not self._found:
            return True
        setting, most = self._prices.setting, limit / self._part
        return any(
            least <= most and predict(setting, one, self._prices).total <= most for least, one in self._found
        )


def _refusal(setting: Setting, device: int, host: int) -> BudgetError:
    """Create the error for budgets below these bytes, of which those of the device are for each."""
    needed = Footprint({"slots": device}, {"slots": host, "scratch": 0})
    return too_small(setting, needed, f"the smallest plan for {setting.devices} devices")


def _widened(alone: Candidate, arranged: tuple[int, int], grid: TileGrid) -> Candidate:
    """Return the candidate for all devices, from that for the share of one of them."""
    slots, order = alone.slots, alone.traversal
    on_host = (
        min(here * count, max(here, lines * grid.steps))
        for here, count, lines in zip((slots.host_a, slots.host_b), arranged, grid.shape, strict=True)
    )
    host_a, host_b = on_host
    order = replace(order, band=order.band * arranged[order.axis])
    slots = replace(slots, host_a=host_a, host_b=host_b)
    return replace(alone, slots=slots, traversal=order, ends=prod(arranged))


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
    for shape in [tile] if tile else _triangle_shapes(setting):
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


def _triangle_shapes(setting: Setting) -> list[TileShape]:
    """Return the tile shapes to try, the most promising ones first; none if C is empty."""
    if not setting.problem.m:
        return []
    machine = slowed(setting.machine, 1.0, setting.devices)
    prices = Prices(replace(setting, machine=machine))
    squares = Squares(prices, machine.io_threads)

    @cache
    def share(side: int) -> float:
        """Return the part of the triangle that the device with the largest share computes."""
        slots = Slots(strip=ceil_div(side, STRIPS))
        schedule = schedule_of(setting, Candidate(TileShape(side, side, 1), slots))
        assert isinstance(schedule, SharedSchedule)
        return schedule.largest / max(1, schedule.elements)

    def seconds(shape: TileShape) -> float:
        found = squares.of(shape)
        return share(shape.m) * min((least for least, _ in found), default=inf)

    ranked, depths = sorted(dict.fromkeys(_shapes(prices, squares)), key=seconds), Counter[int]()
    order = {}
    for shape in ranked:
        depths[shape.m] += 1
        order[shape] = depths[shape.m] > DEPTHS
    return sorted(ranked, key=order.__getitem__)


def _shapes(prices: Prices, squares: Squares) -> Iterator[TileShape]:
    """Yield the tile shapes to try: square ones, in whole chunks."""
    setting, depths = prices.setting, squares.depths
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
