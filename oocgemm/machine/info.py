"""Collect what `oocgemm info` shows: processor, GPU, versions, and the rates that predict run times."""

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache as cached
from importlib.util import find_spec
from typing import Any

from oocgemm import backends
from oocgemm.backends import Backend
from oocgemm.backends.base import known_dtypes
from oocgemm.errors import BackendError
from oocgemm.machine.models import models, probe_factors
from oocgemm.planning import MachineModel, StoreRates
from oocgemm.planning.cost.calibration import link_rates
from oocgemm.system import cache
from oocgemm.system.installed import __version__, compiled, installed_versions
from oocgemm.system.resources import available_memory

# The names of the rates that are measured per file system.
STORAGE = {field.name for field in fields(StoreRates)}
# Optional packages, each with its purpose and the extra in `pip install 'oocgemm[EXTRA]'` that installs it.
OPTIONAL = {
    "ml_dtypes": ("bfloat16 operands", "bfloat16"),
    "resvg_py": ("PNG pictures of reports", "png"),
    "fastapi": ("the server of oocgemm serve", "service"),
    "h5py": ("HDF5, h5ad and netCDF4 operands", "hdf5"),
    "isal": ("faster decompression of gzip", "hdf5"),
}

# Compiles the host code, if there is a C compiler.
REINSTALL = "pip install --force-reinstall --no-deps --no-binary oocgemm oocgemm"


def info() -> dict[str, Any]:
    """Return information on this machine as plain data.

    Returns:
        A dictionary with these keys. Sizes are in bytes, rates in bytes per second or flop/s.

        - "versions": of Python, oocgemm and packages;
        - "machine": processor and memory, and whether there is "compiled" code for copies on the host;
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

    "kernels" and "links" are the rates that plans use. "sources" has up to three values for each rate: the
    default, "assumed"; that of the probe, "probed"; and that of the calibration, "measured". The rates
    that neither a calibration nor a probe has measured are listed in "assumed".
    """
    here = cache.file_system(".")
    device = backends.identity(engine)
    known = models(engine.name, device, [here], [here])
    store = known.calibration.stores.get(here) if known.calibration else None
    kernels, links = _rates(known.best), link_rates(known.best, store)
    measured: dict[str, float] = {}
    if known.calibration is not None:
        calibrated = known.calibration.model(known.default, [here], [here])
        names = {
            *(name.replace(" ", "_") for name in known.calibration.kernels),
            *known.calibration.rates,
            *(STORAGE if store is not None else ()),
        }
        found = _rates(calibrated) | link_rates(calibrated, store)
        measured = {name: rate for name, rate in found.items() if name in names}
    assumed = _rates(known.default) | link_rates(known.default, None)
    scaled = {name.replace(" ", "_"): factor for name, factor in probe_factors(engine.name, device).items()}
    probed = {name: factor * assumed[name] for name, factor in scaled.items() if name in assumed}
    return engine.describe() | {
        "free": engine.free_memory(),
        "rates": known.best.name,
        "kernels": kernels,
        "links": links,
        "assumed": [name for name in (*kernels, *links) if name not in measured and name not in probed],
        "sources": {
            name: {
                source: rates[name]
                for source, rates in (("assumed", assumed), ("probed", probed), ("measured", measured))
                if name in rates
            }
            for name in (*kernels, *links)
        },
    }


def _rates(machine: MachineModel) -> dict[str, float]:
    """Return the peaks of the kernels that this installation can use."""
    dtypes = known_dtypes()
    return {
        name.replace(" ", "_"): rate.peak
        for name, rate in machine.kernels.items()
        if name.removeprefix("emulated ") in dtypes
    }


def _missing(found: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the packages and measurements that this machine lacks.

    Each is a dictionary: "what" is missing, what it is "for", and the "command" that adds it. `found` is the
    result of `info` so far.
    """
    extra = backends.cuda_extra()
    if extra and not {"cupy", f"cupy-{extra}x"} & found["versions"].keys():
        yield _lacking("cupy", "products on the GPU", f"pip install 'oocgemm[{extra}]'")
    if not found["machine"]["compiled"]:
        purpose = "fast copies of arrays in memory to a GPU; needs a C compiler"
        yield _lacking("compiled host code", purpose, REINSTALL)
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


def machine() -> dict[str, Any]:
    """Return the platform, the processor, the number of cores for this process, and the RAM in bytes.

    "compiled" tells whether there is compiled code for copies on the host.
    """
    return {
        "platform": _platform(),
        "processor": cache.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "compiled": compiled() is not None,
    }


@cached
def _platform() -> str:
    # `platform.platform` would start a process, uname -p.
    kernel, libc = os.uname(), os.confstr("CS_GNU_LIBC_VERSION") if hasattr(os, "confstr") else ""
    parts = kernel.sysname, kernel.release, kernel.machine, libc and f"with-{libc.replace(' ', '')}"
    return "-".join(filter(None, parts))


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
        "h5py",
        "isal",
    )
    return {"python": platform.python_version(), "oocgemm": __version__} | found
