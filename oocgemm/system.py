"""What there is to work with: processor, device, versions, and the rates that are known of them."""

import os
import platform
from collections.abc import Collection
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from oocgemm import backends, cache
from oocgemm.backends.memory import available_memory
from oocgemm.errors import BackendError
from oocgemm.plan import MachineModel, default_model
from oocgemm.stores import Matrix
from oocgemm.units import format_size


def info() -> dict[str, Any]:
    """What there is to work with: versions, processor, device, and what is missing with the way to get it."""
    found: dict[str, Any] = {"versions": versions(), "machine": machine()}
    found["machine"]["memory"] = format_size(found["machine"]["memory"])
    found["machine"]["available"] = format_size(available_memory())
    host = backends.open_backend("host")
    found["host backend"] = host.describe() | {"rates": model("host", backends.identity(host)).name}
    missing = backends.missing_for_cuda()
    if missing is None:
        try:
            cuda = backends.open_backend("cuda")
            rates = model("cuda", backends.identity(cuda)).name
            found["cuda backend"] = cuda.describe() | {
                "free": format_size(cuda.free_memory()),
                "rates": rates,
            }
        except BackendError as error:
            missing = str(error)
    if missing is not None:
        found["cuda backend"] = {"missing": missing}
    return found


def model(
    backend: str, device: str | None = None, reads: Collection[str] = (), writes: Collection[str] = ()
) -> MachineModel:
    """What is known of the machine: as calibrated for that device and those file systems, or else the defaults."""
    defaults = default_model(backend, len(os.sched_getaffinity(0)))
    found, note = cache.load(backend, device)
    if found is not None:
        return found.model(defaults, reads, writes)
    return replace(defaults, name="; ".join(filter(None, (defaults.name, note))))


def stored_on(*matrices: Matrix | None) -> set[str]:
    """The file systems that matrices lie on, those in memory left out."""
    found = set()
    for matrix in matrices:
        if matrix is not None and not matrix.layout.in_memory:
            numbers = [i[1] for i in matrix.identities() if isinstance(i, tuple) and i[0] == "file"]
            found |= {cache.device_id(number) for number in numbers} or {"elsewhere"}
    return found


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": cache.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "oocgemm": "unknown"}
    for package in ("oocgemm", "numpy", "zarr", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
