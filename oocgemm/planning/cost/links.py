"""Select and name those rates of a machine that reports show."""

from oocgemm.planning.cost.calibration import Calibration, StoreRates
from oocgemm.planning.cost.machine import MachineModel, default_model

# The names that reports use for fields of `MachineModel` and `StoreRates`, in the order in which data flow.
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
    """Return the rates of `LINKS` that apply to a machine, in bytes per second.

    "read_cold", the rate of reads from the disk, is included only if `store` is given.
    """
    found = {name: getattr(machine, name) for name in LINKS if hasattr(machine, name)}
    if store is not None:
        found["read_cold"] = store.read_cold
    return {
        name: found[name]
        for name in LINKS
        if name in found and not (machine.unified and name in ("h2d", "d2h"))
    }


def calibrated_rates(found: Calibration) -> dict[str, float]:
    """Return the rates of `LINKS` in a calibration, with those of the file system measured last."""
    return link_rates(found.model(default_model(found.backend, 1)), list(found.stores.values())[-1])
