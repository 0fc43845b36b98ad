"""Rates of a machine under the names that reports and tables give them."""

from oocgemm.planning.cost.machine import Calibration, MachineModel, StoreRates, default_model

# Rates of a machine that people are told, under the names that they are told them by, in the order in which data flow.
LINKS = {
    "read_cold": "read, disk",
    "read": "read, page cache",
    "read_scattered": "read, parts of chunks",
    "decode": "decode, zstd",
    "memory": "read, memory",
    "h2d": "h2d",
    "prepare": "prepare, residues",
    "d2h": "d2h",
    "write": "write",
}


def link_rates(machine: MachineModel, store: StoreRates | None) -> dict[str, float]:
    """The rates of `LINKS` that there are: copies to a device where that is not the host, disks where one was measured."""
    found = {name: getattr(machine, name) for name in LINKS if hasattr(machine, name)}
    if store is not None:
        found["read_cold"] = store.read_cold
    return {
        name: found[name]
        for name in LINKS
        if name in found and not (machine.unified and name in ("h2d", "d2h"))
    }


def calibrated_rates(found: Calibration) -> dict[str, float]:
    """The rates of `LINKS` that were measured, of storage those measured last."""
    return link_rates(found.model(default_model(found.backend, 1)), list(found.stores.values())[-1])
