"""Collect what `oocgemm info` shows: processor, GPU, versions, and the rates that predict run times."""

import os
import platform
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache as cached
from importlib.util import find_spec
from typing import Any

from oocgemm import backends
from oocgemm.backends import Backend
from oocgemm.backends.base import known_dtypes
from oocgemm.errors import BackendError
from oocgemm.planning import MachineModel, StoreRates, default_model
from oocgemm.planning.cost.links import link_rates
from oocgemm.stores import Matrix
from oocgemm.system import cache
from oocgemm.system.memory import available_memory
from oocgemm.system.version import __version__, installed_versions

# The names of the rates that are measured per file system.
STORAGE = {field.name for field in fields(StoreRates)}
# Optional packages, each with its purpose and the extra in `pip install 'oocgemm[EXTRA]'` that installs it.
OPTIONAL = {
    "ml_dtypes": ("bfloat16 operands", "bfloat16"),
    "resvg_py": ("PNG pictures of reports", "png"),
    "zarrs": ("faster reads of arrays with filters", "zarrs"),
}


def info() -> dict[str, Any]:
    """Return information on this machine as plain data.

    Returns:
        A dictionary with these keys. Sizes are in bytes, rates in bytes per second or flop/s.

        - "versions": of Python, oocgemm and packages;
        - "machine": processor and memory;
        - "host_backend", "cuda_backend": the backend's properties and the rates that predict run times, for
          the file system of the current folder;
        - "missing": packages and measurements that this machine lacks, each with the command that adds it.
    """
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
    """Return the properties of a backend, and its rates.

    "assumed" lists the rates that were not measured on this machine but are defaults.
    """
    device, here = backends.identity(engine), cache.file_system(".")
    used, (calibration, _) = model(engine.name, device, [here], [here]), cache.load(engine.name, device)
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
        for name, rate in used.kernels.items()
        if name.removeprefix("emulated ") in dtypes
    }
    links = link_rates(used, calibration.stores.get(here) if calibration else None)
    return engine.describe() | {
        "free": engine.free_memory(),
        "rates": used.name,
        "kernels": kernels,
        "links": links,
        "assumed": [name for name in (*kernels, *links) if name not in measured],
    }


def _missing(found: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the packages and measurements that this machine lacks.

    Each is a dictionary: "what" is missing, what it is "for", and the "command" that adds it. `found` is the
    result of `info` so far.
    """
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
                "plans with the rates of this machine",
                f"oocgemm calibrate --backend {name}{where}",
            )


def _lacking(what: str, purpose: str, command: str) -> dict[str, str]:
    return {"what": what, "for": purpose, "command": command}


def model(
    backend: str, device: str | None = None, reads: Collection[str] = (), writes: Collection[str] = ()
) -> MachineModel:
    """Return the rates that predict run times: those that `oocgemm calibrate` has saved, otherwise defaults.

    Args:
        backend: "host" or "cuda".
        device: identity of the device, as `backends.identity` returns it.
        reads, writes: ids of the file systems that operands are read from and C is written to.
    """
    defaults = default_model(backend, len(os.sched_getaffinity(0)))
    found, note = cache.load(backend, device)
    if found is not None:
        return found.model(defaults, reads, writes)
    return replace(defaults, name="; ".join(filter(None, (defaults.name, note))))


def stored_on(*matrices: Matrix | None) -> set[str]:
    """Return the ids of the file systems that store these matrices. Matrices in memory are left out."""
    found = set()
    for matrix in matrices:
        if matrix is not None and not matrix.layout.in_memory:
            numbers = [i[1] for i in matrix.identities() if isinstance(i, tuple) and i[0] == "file"]
            found |= {cache.device_id(number) for number in numbers} or {"elsewhere"}
    return found


def machine() -> dict[str, Any]:
    """Return the platform, the processor, the number of cores for this process, and the RAM in bytes."""
    # `platform.platform` would start a process, uname -p.
    kernel, libc = os.uname(), os.confstr("CS_GNU_LIBC_VERSION") if hasattr(os, "confstr") else ""
    parts = kernel.sysname, kernel.release, kernel.machine, libc and f"with-{libc.replace(' ', '')}"
    return {
        "platform": "-".join(filter(None, parts)),
        "processor": cache.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


@cached
def versions() -> Mapping[str, str]:
    """Return the versions of Python, of oocgemm, and of the relevant packages that are installed."""
    found = installed_versions(
        "numpy",
        "zarr",
        "numcodecs",
        "cupy",
        "cupy-cuda13x",
        "cupy-cuda12x",
        "ml_dtypes",
        "resvg-py",
        "zarrs",
    )
    return {"python": platform.python_version(), "oocgemm": __version__} | found
