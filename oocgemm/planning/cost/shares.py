"""Predict the time of a run on several devices: the time of one device's share of the product.

The devices run in step. So the clock runs only one of them, on a product of as many tile rows and columns as
this device computes. Storage, the host's copies and the time to issue operations are common to all devices.
In the share, they are slower accordingly: storage by the number of panels that are read for all devices per
panel that is read for one. Copies between devices count as uploads.
"""

from dataclasses import dataclass, replace
from math import sqrt

from oocgemm.planning.cost import clock
from oocgemm.planning.cost.clock import Prediction
from oocgemm.planning.cost.footprint import Candidate
from oocgemm.planning.cost.loads import estimate_loads
from oocgemm.planning.cost.machine import MachineModel, scaled
from oocgemm.planning.schedule.dealing import arrangement
from oocgemm.planning.schedule.placement import Loads
from oocgemm.planning.setting import Setting
from oocgemm.planning.tiling import TileGrid, TileShape, ceil_div


@dataclass(frozen=True)
class Share:
    """One device's share of a run of a candidate on several devices.

    The tiles of a round are spread over `down` tile rows and `across` tile columns. `setting` and `candidate`
    are those of a product of the size of the share, on one device that works alone.
    """

    down: int
    across: int
    setting: Setting
    candidate: Candidate

    @classmethod
    def of(cls, setting: Setting, candidate: Candidate) -> "Share":
        """Return the share of each device. It has at least one tile."""
        grid = TileGrid.of(setting.problem, candidate.tile)
        down, across = arrangement(setting.devices, setting.problem, grid, apart=setting.works_apart)
        rows, cols = ceil_div(grid.shape[0], down), ceil_div(grid.shape[1], across)
        slots, order = candidate.slots, candidate.traversal
        on_host = ceil_div(slots.host_a, down), ceil_div(slots.host_b, across)
        slots = replace(slots, host_a=on_host[0], host_b=on_host[1])
        order = replace(order, band=max(1, order.band // (down, across)[order.axis]))
        own = own_setting(setting, candidate.tile, rows * candidate.tile.m, cols * candidate.tile.n)
        return cls(down, across, own, replace(candidate, slots=slots, traversal=order))

    @property
    def tiles(self) -> int:
        """Number of tiles of the share; 1 if C is empty."""
        down, across = TileGrid.of(self.setting.problem, self.candidate.tile).shape
        return max(1, down * across)

    def loads(self) -> Loads:
        """Estimate the bytes of panels that one device loads if it works alone."""
        grid = TileGrid.of(self.setting.problem, self.candidate.tile)
        return estimate_loads(self.setting.problem, grid, self.candidate.slots, self.candidate.traversal)


def own_setting(setting: Setting, tile: TileShape | None, m: int, n: int) -> Setting:
    """Return the setting of a product of m x n elements on one of several devices that works alone.

    With `tile`, the chunks of a new C are those of the whole product.
    """
    problem, layouts = setting.problem, setting.layouts
    if tile is not None and layouts.c.writing.free:
        writing = replace(layouts.c.writing, free=False, chunk=setting.c_chunks(tile))
        layouts = replace(layouts, c=replace(layouts.c, writing=writing))
    own = replace(problem, m=min(problem.m, m), n=min(problem.n, n))
    return Setting(own, setting.machine, layouts, setting.budgets)


def slowed(machine: MachineModel, reading: float, devices: int) -> MachineModel:
    """Return the model of the machine for one of several devices, all of them busy with their shares.

    `reading` is the factor by which reads take longer. Other work that the devices have in common takes
    `devices` times as long. The rate of copies between pageable arrays and pinned buffers follows from the
    number of threads that copy for each device, and from the part of its panels that these threads copy.
    """
    each = 1 / devices
    factors = {"read": 1 / reading, "decode": 1 / reading, "write": each}
    factors["issue"] = devices
    if machine.shares_cores:
        return scaled(machine, factors | dict.fromkeys(("memory", "select", *machine.kernels), each))
    # The threads of a device read only a part of its panels: it copies the others from other devices.
    threads = machine.copy_threads_of(devices) / machine.copy_threads
    factors["memory"] = min(1.0, threads * devices / reading)
    # More threads read for several devices, if there are cores for them.
    io_threads = min(devices * machine.io_threads, max(machine.io_threads, machine.cores // 2))
    return replace(scaled(machine, factors), io_threads=io_threads)


def divided(machine: MachineModel, sessions: int) -> MachineModel:
    """Return the model of the machine for one of several sessions that share a GPU's kernels and its link.

    If device and host memory are the same, return `machine`: `slowed` divides the rates of common resources.
    """
    if sessions == 1 or machine.unified:
        return machine
    return scaled(machine, dict.fromkeys(("h2d", "d2h", "prepare", *machine.kernels), 1 / sessions))


def estimate_shared_loads(setting: Setting, candidate: Candidate, rounds: int) -> Loads:
    """Estimate the bytes of panels of all devices in a number of rounds, in which each computes one tile."""
    if setting.problem.cover.square:
        grid = TileGrid.of(setting.problem, candidate.tile, candidate.slots.strip)
        whole = estimate_loads(setting.problem, grid, candidate.slots, candidate.traversal)
        # The tiles of one of d devices are in more than the d-th part of the lines.
        return replace(whole, a_up=whole.a_up * sqrt(setting.devices))
    share = Share.of(setting, candidate)
    each, part, devices = share.loads(), rounds / share.tiles, setting.devices
    return Loads(
        *(part * devices * each.a_up, part * devices * each.b_up),
        *(part * share.down * each.a_read, part * share.across * each.b_read),
    )


def predict_shared(setting: Setting, candidate: Candidate, loads: Loads, rounds: int) -> Prediction:
    """Predict the seconds of a run on several devices. Lanes of devices are those of one device.

    `loads` are the panels of all devices together. `rounds` is the largest number of tiles of a device.
    """
    share = Share.of(setting, candidate)
    each, part = share.loads(), rounds / share.tiles
    alone = part * (each.a_read + each.b_read)
    reading = max(1.0, (loads.a_read + loads.b_read) / alone) if alone else 1.0
    devices = setting.devices
    machine = slowed(setting.machine, reading, devices)
    setting = replace(share.setting, machine=machine)
    # In a run that was begun by one device, only one device has the last tile. The others may end later.
    drains = candidate.ends >= devices
    return clock.predict(setting, share.candidate, last_drains=drains).part(part)


def predict_triangle(setting: Setting, candidate: Candidate, share: float) -> Prediction:
    """Predict the seconds of a triangle. `share` is the part of C that the busiest device computes."""
    machine = slowed(setting.machine, 1.0, setting.devices)
    return clock.predict(replace(setting, machine=machine, devices=1), candidate).part(share)
