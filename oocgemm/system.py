"""What there is to work with: processor, device, versions, and the rates that are known of them."""

import os
import platform
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from oocgemm import backends, cache
from oocgemm.backends import Backend
from oocgemm.backends.base import known_dtypes
from oocgemm.errors import BackendError
from oocgemm.memory import available_memory
from oocgemm.plan import Calibration, MachineModel, StoreRates, default_model
from oocgemm.stores import Matrix
from oocgemm.version import __version__

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
STORAGE = {field.name for field in fields(StoreRates)}
# Packages that most do without: what they are for, and the extra that brings them.
OPTIONAL = {
    "ml_dtypes": ("operands of bfloat16", "bfloat16"),
    "resvg_py": ("pictures as PNG", "png"),
    "zarrs": ("quick reading of arrays with filters", "zarrs"),
}


def info() -> dict[str, Any]:
    """What there is to work with: versions, processor, backends with the rates that plans go by in the current folder,
    and what is missing with the command that brings it. Bytes, bytes per second, flop/s."""
    found: dict[str, Any] = {"versions": versions(), "machine": machine() | {"available": available_memory()}}
    found["host_backend"] = _described(backends.open_backend("host"))
    missing = backends.missing_for_cuda()
    if missing is None:
        try:
            found["cuda_backend"] = _described(backends.open_backend("cuda"))
        except BackendError as error:
            missing = str(error)
    if missing is not None:
        found["cuda_backend"] = {"missing": missing}
    return found | {"missing": list(_missing(found))}


def _described(engine: Backend) -> dict[str, Any]:
    """A backend, and what plans take its rates to be."""
    device, here = backends.identity(engine), cache.file_system(".")
    believed, (calibration, _) = model(engine.name, device, [here], [here]), cache.load(engine.name, device)
    measured: set[str] = set()
    if calibration is not None:
        measured = {
            *(name.replace(" ", "_") for name in calibration.kernels),
            *calibration.rates,
            *(STORAGE if here in calibration.stores else ()),
        }
    dtypes = known_dtypes()
    kernels = {
        name.replace(" ", "_"): rate.peak
        for name, rate in believed.kernels.items()
        if name.removeprefix("emulated ") in dtypes
    }
    links = link_rates(believed, calibration.stores.get(here) if calibration else None)
    return engine.describe() | {
        "free": engine.free_memory(),
        "rates": believed.name,
        "kernels": kernels,
        "links": links,
        "assumed": [name for name in (*kernels, *links) if name not in measured],
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


def _missing(found: dict[str, Any]) -> Iterator[dict[str, str]]:
    """What `info` has not found, what it is for, and the command that brings it."""
    extra = backends.cuda_extra()
    if extra and not {"cupy", f"cupy-{extra}x"} & found["versions"].keys():
        yield _lacking("cupy", "products on the GPU", f"pip install 'oocgemm[{extra}]'")
    for package, (purpose, extra) in OPTIONAL.items():
        if find_spec(package) is None:
            yield _lacking(package, purpose, f"pip install 'oocgemm[{extra}]'")
    for name in ("host", "cuda"):
        assumed = found[f"{name}_backend"].get("assumed")
        if assumed:
            where = " --path ." if set(assumed) <= STORAGE else ""
            yield _lacking(
                f"rates of {name}",
                "plans that fit this machine",
                f"oocgemm calibrate --backend {name}{where}",
            )


def _lacking(what: str, purpose: str, command: str) -> dict[str, str]:
    return {"what": what, "for": purpose, "command": command}


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
    """Return the versions of Python, of this code, installed or not, and of the packages that are installed."""
    found = {"python": platform.python_version(), "oocgemm": __version__}
    for package in (
        "numpy",
        "zarr",
        "numcodecs",
        "cupy",
        "cupy-cuda13x",
        "cupy-cuda12x",
        "ml_dtypes",
        "resvg-py",
        "zarrs",
    ):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
