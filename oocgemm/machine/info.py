"""The machine: the facts that `oocgemm info` shows, and the rates with which plans are made.

The default rates are those of one kind of machine. The *probe* measures some of these rates on this machine,
in less than a second: products in float32 and float64, copies between host and device, and staging. Each
other rate is scaled with the measured rate that it resembles most. A *calibration* (`oocgemm calibrate`)
measures all rates, and takes the place of the probe.

A run takes the probe if it is predicted to take at least `MIN_SECONDS`, and the result can be kept. A probe
during which other programs used the machine is not kept. Setting the environment variable OOCGEMM_PROBE to 0
turns probes off.
"""

import json
import logging
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache as cached
from functools import lru_cache, partial
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from oocgemm import backends
from oocgemm.backends import Backend
from oocgemm.backends.base import known_dtypes
from oocgemm.errors import BackendError
from oocgemm.planning import Calibration, MachineModel, Plan, StoreRates, TileShape, default_model
from oocgemm.planning.cost.machine import link_rates, scaled
from oocgemm.stores import Matrix
from oocgemm.system import cache
from oocgemm.system.installed import __version__, compiled, installed_versions
from oocgemm.system.resources import CpuTimes, available_memory, used_since
from oocgemm.values import dataclass

logger = logging.getLogger("oocgemm")

FORMAT, VERSION = "oocgemm-probe", 1
MIN_SECONDS = 3.0
# If other programs used more than this share of the CPU cores during the probe, the probe is not kept.
MAX_OTHERS = 0.1
# A factor beyond this one, or below its inverse, is taken for a fault of the measurement.
MAX_FACTOR = 32.0
# For each measured rate, the rates that are scaled with it. The threads that stage arrays also read cached
# files.
MEASURED = {
    "float32": ("float16", "bfloat16", "int8", "float32", "complex64", "emulated float32"),
    "float64": ("float64", "complex128", "emulated float64"),
    "h2d": ("h2d",),
    "d2h": ("d2h",),
    "memory": ("memory", "read"),
}
# Per backend: the extents of the products, and the shape of the float64 matrix that is copied.
SIDES = {"cuda": 4096, "host": 768}
COPIED = {"cuda": (8192, 4096), "host": (4096, 2048)}
SECONDS = 0.03  # duration of one measurement

# Identities of devices for which this process has tried a probe.
_tried = set[str]()


@dataclass(frozen=True)
class Models:
    """The model with default rates, the model for plans, and the calibration.

    `best` has the rates that are known best, from `calibration` if there is one, else from a probe.
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

    `device` is the identity of the device, from `backends.identity`. `reads` and `writes` are ids of the file
    systems from which operands are read, and to which C is written.
    """
    versions = cache.version(), probe_version()
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
    """Return the models from the files of calibrations and probes. `versions` change with the files."""
    calibration, note = cache.load(backend, device)
    if calibration is not None:
        return Models(defaults, calibration.model(defaults, reads, writes), calibration)
    best = _probed(defaults, backend, device)
    return Models(defaults, replace(best, name="; ".join(filter(None, (best.name, note)))), None)


def stored_on(*matrices: Matrix | None) -> set[str]:
    """Return the ids of the file systems that store matrices, except those in memory and object stores."""
    found = set()
    for matrix in matrices:
        if matrix is not None and not matrix.layout.in_memory and not matrix.layout.requests:
            numbers = [i[1] for i in matrix.identities() if isinstance(i, tuple) and i[0] == "file"]
            found |= {cache.device_id(number) for number in numbers} or {"elsewhere"}
    return found


def probe_factors(backend: str, device: str | None) -> Mapping[str, float]:
    """Return by which factor rates of this machine differ from the defaults, by name; empty if unknown.

    If `device` is None, return the factors of the device that was probed last.
    """
    if not _enabled():
        return {}
    for path, written in cache.newest(_folder, f"{cache.machine_key()}-{backend}-"):
        found = _read(path, written)
        if found and device in (None, found["device"]):
            return {rate: found["factors"][name] for name in found["factors"] for rate in MEASURED[name]}
    return {}


def probe_version() -> object:
    """Return a value that changes if the result of `probe_factors` may have changed."""
    return cache.version(_folder) if _enabled() else None


def take_probe(engine: Backend, plan: Plan) -> bool:
    """Probe the machine if a plan takes long and rates are unknown. Return whether they have become known.

    Never raises: predicted times are less exact without the probe, and products are the same.
    """
    device = backends.identity(engine)
    known = not _enabled() or plan.machine.calibrated or device in _tried
    if known or plan.prediction.total < MIN_SECONDS or probe_factors(engine.name, device):
        return False
    _tried.add(device)
    try:
        if not _keepable():
            return False
        before = CpuTimes.now()
        found = measure_probe(engine, default_model(engine.name, plan.machine.cores, plan.machine.compiled))
        used = used_since(before)
        if used is not None and used["busy_seconds"] - used["own_seconds"] > MAX_OTHERS * used["cores"]:
            return False
        keep_probe(engine, found)
    except Exception:
        logger.debug("the machine was not probed", exc_info=True)
        return False
    return True


def measure_probe(engine: Backend, machine: MachineModel) -> dict[str, float]:
    """Measure the rates in `MEASURED`. Return the ratio of each to the rate in `machine`."""
    # These modules import the executor, which a process that only plans does not need.
    from oocgemm import stores
    from oocgemm.machine.workbench import Workbench, loading_seconds, numbers, rate_of, streaming, typical
    from oocgemm.planning import Kind

    found = dict[str, float]()
    side, some = SIDES[engine.name], numbers((64, 1024)).reshape(-1)
    for dtype in ("float32", "float64"):
        with Workbench(engine, machine, dtype, TileShape(side, side, side // 2)) as bench:
            for operand in "AB":
                bench.fill(operand, some.astype(dtype))
            bench.intervals(bench.multiply(side // 2, first=True), bench.multiply(side // 2))
            product = bench.multiply(side // 2)
            expected = machine.multiply_seconds(dtype, product.flops, side, side, side // 2)
            expected *= machine.wave_quantization(dtype, side, side)
            found[dtype] = expected / typical(partial(bench.seconds, product), SECONDS)
            if dtype == "float64" and not machine.unified:
                copies = {"h2d": bench.load(Kind.UPLOAD, "A"), "d2h": bench.download(side // 2)}
                for link, copy in copies.items():
                    rate = copy.bytes / typical(partial(bench.seconds, copy), SECONDS)
                    found[link] = rate / getattr(machine, link)
    source = numbers(COPIED[engine.name])
    matrix = stores.open_matrix("A", source)
    with streaming(engine, machine, matrix, source.shape[1] // 8) as run:
        run()  # the threads and the pinned buffers are new
        rate = rate_of(matrix, typical(lambda: loading_seconds(run()), SECONDS))
    found["memory"] = rate / machine.memory
    return {name: float(f"{factor:.3g}") for name, factor in found.items()}


def keep_probe(engine: Backend, found: Mapping[str, float]) -> None:
    """Store the result of `measure_probe` for later plans. Raises `OSError`."""
    device = backends.identity(engine)
    facts = {"format": FORMAT, "version": VERSION, "device": device, "factors": dict(found)}
    path = _folder() / cache.file_name(cache.machine_key(), engine.name, device)
    cache.write_whole(path, json.dumps(facts).encode())


def _probed(defaults: MachineModel, backend: str, device: str | None) -> MachineModel:
    """Return the default model with the probed rates; the default model itself if there is no probe."""
    known = probe_factors(backend, device)
    if not known:
        return defaults
    return replace(scaled(defaults, known), name=f"{defaults.name}, scaled by a probe of this machine")


def _enabled() -> bool:
    return os.environ.get("OOCGEMM_PROBE", "1") != "0"


def _folder() -> Path:
    return cache.folder() / "probes"


def _keepable() -> bool:
    """Return whether the result of a probe can be stored."""
    _folder().mkdir(parents=True, exist_ok=True)
    return os.access(_folder(), os.W_OK)


@lru_cache(maxsize=16)
def _read(path: str, written: tuple[int, int]) -> dict[str, Any] | None:
    """Return a probe; None if the file is not valid. `written` (time and size) changes with the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            return None
        known = {name: float(data["factors"][name]) for name in data["factors"] if name in MEASURED}
        plausible = all(isfinite(x) and 1 / MAX_FACTOR <= x <= MAX_FACTOR for x in known.values())
        return {"device": str(data["device"]), "factors": known} if known and plausible else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


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

# The command that compiles the host code, if there is a C compiler.
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
    default value, "assumed"; the value of the probe, "probed"; and the value of the calibration, "measured".
    The key "assumed" lists the rates that have only the default value.
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

    Each is a dictionary: "what" is missing, the purpose that it is "for", and the "command" that adds it.
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
