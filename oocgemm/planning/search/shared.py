"""Choose how to run a product on several devices of one host.

Each device computes a share of C. The planner for one device plans this share, with storage and the host's
copies slowed down by the other devices. The tile shape that it chooses is used for all of C. It is tried with
each way to spread the devices over tile rows and tile columns, with one tile per device and with several. The
plan with the shortest predicted time is chosen.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from math import inf

from oocgemm.errors import BudgetError
from oocgemm.planning.cost.footprint import Candidate, Footprint, footprint, scratch_bytes
from oocgemm.planning.cost.machine import MachineModel
from oocgemm.planning.cost.shares import own_setting, slowed
from oocgemm.planning.plan import Plan, Scored
from oocgemm.planning.problem import GemmProblem
from oocgemm.planning.schedule.dealing import arrangement
from oocgemm.planning.search.candidates import io_threads
from oocgemm.planning.search.guarded import guarded_plan
from oocgemm.planning.search.planner import MIN_GAIN
from oocgemm.planning.search.refusals import check_tile, too_small
from oocgemm.planning.search.shapes import alignments
from oocgemm.planning.setting import Budgets, Layouts, Setting
from oocgemm.planning.tiling import TileGrid, TileShape, ceil_div, round_up

# Numbers of tiles per device, down and across, that are tried. With two, the two tiles may go through k in
# opposite directions, so that the tiles of a round have the same direction.
TILES_PER_DEVICE = ((1, 1), (2, 1), (1, 2))
# This many tile shapes, those with which the share of a device takes least time, are planned for all devices.
MAX_SHAPES = 8
# The host budget of one device is the largest of these parts of the whole one with which the slots of all
# devices fit. If even the smallest part is too large, each device gets an equal share.
HOST_PARTS = (1.0, 0.75, 0.6, 0.5, 0.35, 0.25, 0.18, 0.125)


@lru_cache(64)
def shared_plan(
    problem: GemmProblem,
    budgets: Budgets,
    machines: tuple[MachineModel, ...],
    assumed: frozenset[str],
    layouts: Layouts,
    tile: TileShape | None,
    devices: int,
) -> Plan:
    """Choose a plan for several devices of the same kind.

    Args:
        problem, machines, assumed, layouts, tile: as for `guarded_plan`.
        budgets: the device budget is for each device, the host budget for all together.
        devices: number of devices.

    Raises what `guarded_plan` raises.
    """
    search = _Search(Setting(problem, machines[-1], layouts, budgets, devices), machines, assumed)
    if tile is not None:
        check_tile(search.setting, tile)
    plans = [search.planned(shape) for shape in ([tile] if tile is not None else search.shapes())]
    # Of plans that take about as long, the one that moves fewer bytes depends less on exact rates.
    limit = (1 + MIN_GAIN) * min(plan.prediction.total for plan in plans)
    plans.sort(key=lambda plan: (max(limit, plan.prediction.total), plan.prediction.serial))
    return replace(plans[0], considered=tuple(Scored(plan.candidate, plan.prediction) for plan in plans))


class _Search:
    """Plans the share of one device, and turns its plan into one for all devices."""

    def __init__(self, setting: Setting, machines: tuple[MachineModel, ...], assumed: frozenset[str]) -> None:
        self.setting = setting
        self._machines, self._assumed = machines, assumed
        # Bytes of host memory that the run needs once, not per device.
        self._once = scratch_bytes(setting, io_threads(setting)) + setting.machine.host_reserve

    def shapes(self) -> Collection[TileShape]:
        """Return the best tile shapes for the share of a device, of all ways to divide C into shares.

        Raises `BudgetError` if there is none.
        """
        devices, found = self.setting.devices, dict[TileShape, float]()
        refused: BudgetError | None = None
        for down in range(1, devices + 1):
            for more_down, more_across in TILES_PER_DEVICE if devices % down == 0 else ():
                across = devices // down
                own = self._own(None, self._extents(down * more_down, across * more_across))
                try:
                    alone = self._alone(own, (down, across), 1 / devices, None)
                    seconds = more_down * more_across * alone.prediction.total
                    found[alone.tile] = min(seconds, found.get(alone.tile, inf))
                except BudgetError as error:
                    refused = error
        if not found and refused is not None:
            raise refused
        return sorted(found, key=found.__getitem__)[:MAX_SHAPES]

    def planned(self, tile: TileShape) -> Plan:
        """Return the plan for a tile shape, with the slots that suit the share of one device."""
        setting, devices = self.setting, self.setting.devices
        grid = TileGrid.of(setting.problem, tile)
        arranged = arrangement(devices, setting.problem, grid, apart=setting.works_apart)
        rows, cols = (ceil_div(*pair) for pair in zip(grid.shape, arranged, strict=True))
        own = self._own(tile, (rows * tile.m, cols * tile.n))
        for part in (*(x for x in HOST_PARTS if x > 1 / devices), 1 / devices):
            candidate = _widened(self._alone(own, arranged, part, tile).candidate, arranged, grid)
            if footprint(setting, candidate).host_total <= setting.budgets.host:
                break
        return Plan(
            *(setting.problem, setting.layouts, setting.budgets, setting.machine, candidate),
            devices=devices,
        )

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

    def _alone(self, own: Setting, arranged: tuple[int, int], part: float, tile: TileShape | None) -> Plan:
        """Plan the share `own` of one device within a part of the host budget.

        Raises `BudgetError` if no plan fits. The message names budgets that suffice for all devices.
        """
        budgets, devices, once = self.setting.budgets, self.setting.devices, self._once
        host = int((budgets.host - once) * part) + once
        # About as many panels are read for all devices in a step, per panel of one device.
        reading = sum(arranged) / 2
        machines = tuple(slowed(machine, reading, devices) for machine in self._machines)
        given = own.problem, Budgets(budgets.device, host), machines, self._assumed, own.layouts, tile
        try:
            return guarded_plan(*given)
        except BudgetError as error:
            if error.needed is None:
                raise
            device, on_host = error.needed
            host = once + devices * max(0, on_host - once)
            needed = Footprint({"slots": device}, {"slots": host, "scratch": 0})
            raise too_small(budgets, needed, f"the smallest plan for {devices} devices") from error


def _widened(alone: Candidate, arranged: tuple[int, int], grid: TileGrid) -> Candidate:
    """Return the candidate for all devices, from that for the share of one of them."""
    slots, order = alone.slots, alone.traversal
    on_host = (
        min(here * count, max(here, lines * grid.steps))
        for here, count, lines in zip((slots.host_a, slots.host_b), arranged, grid.shape, strict=True)
    )
    host_a, host_b = on_host
    order = replace(order, band=order.band * arranged[order.axis])
    return replace(alone, slots=replace(slots, host_a=host_a, host_b=host_b), traversal=order, ramp=0)
