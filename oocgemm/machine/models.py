"""The machine model that plans are made with: default rates, those of a probe, or those of a calibration."""

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

from oocgemm.machine import probe
from oocgemm.planning import Calibration, MachineModel, default_model
from oocgemm.stores import Matrix
from oocgemm.system import cache
from oocgemm.system.compiled import compiled


@dataclass(frozen=True)
class Models:
    """What is known of the rates of a machine.

    - `default`: the model with default rates.
    - `best`: the model with the rates that are known best. Plans are made with it.
    - `calibration`: the calibration that `best` has its rates from; None if there is none.
    """

    default: MachineModel
    best: MachineModel
    calibration: Calibration | None


def models(
    backend: str,
    device: str | None = None,
    reads: Collection[str] = (),
    writes: Collection[str] = (),
) -> Models:
    """Return the models that predict run times on a device.

    Args:
        backend: "host" or "cuda".
        device: identity of the device, as `backends.identity` returns it.
        reads, writes: ids of the file systems from which operands are read, and to which C is written.
    """
    versions = cache.version(), probe.version()
    defaults = default_model(backend, len(os.sched_getaffinity(0)), compiled() is not None)
    return _models(backend, device, frozenset(reads), frozenset(writes), defaults, versions)


@lru_cache(16)
def _models(
    backend: str,
    device: str | None,
    reads: frozenset[str],
    writes: frozenset[str],
    defaults: MachineModel,
    versions: object,
) -> Models:
    """Read the files of calibrations and probes. `versions` differ if the files may have changed."""
    calibration, note = cache.load(backend, device)
    if calibration is not None:
        return Models(defaults, calibration.model(defaults, reads, writes), calibration)
    best = probe.probed(defaults, backend, device)
    return Models(defaults, replace(best, name="; ".join(filter(None, (best.name, note)))), None)


def stored_on(*matrices: Matrix | None) -> set[str]:
    """Return the ids of the file systems that store these matrices. Others are left out."""
    found = set()
    for matrix in matrices:
        if matrix is not None and not matrix.layout.in_memory and not matrix.layout.requests:
            numbers = [i[1] for i in matrix.identities() if isinstance(i, tuple) and i[0] == "file"]
            found |= {cache.device_id(number) for number in numbers} or {"elsewhere"}
    return found
