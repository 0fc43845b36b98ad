"""A short probe: a few rates of this machine, measured once and kept, for better predictions of times.

The default rates of the machine model are those of one kind of machine. The probe compares some of them with
this machine, in less than a second: products in float32 and float64, copies between host and device,
and staging. Other rates are scaled with the one that they resemble most. A calibration (`oocgemm calibrate`)
measures all rates, and takes the place of the probe.

A run takes the probe if it is predicted to take at least `MIN_SECONDS`, and the result can be kept. What is
measured beside other work is not kept. Setting the environment variable OOCGEMM_PROBE to 0 turns probes off.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import isfinite
from pathlib import Path
from typing import Any

from oocgemm import backends
from oocgemm.backends import Backend
from oocgemm.planning import MachineModel, Plan, TileShape, default_model
from oocgemm.planning.cost.rates import scaled
from oocgemm.system import cache
from oocgemm.system.cpu import CpuTimes, used_since

logger = logging.getLogger("oocgemm")

FORMAT, VERSION = "oocgemm-probe", 1
MIN_SECONDS = 3.0
# If other programs used more than this share of the CPU cores meanwhile, the probe is not kept.
MAX_OTHERS = 0.1
# A factor beyond this one, or below its inverse, is taken for a fault of the measurement.
MAX_FACTOR = 32.0
# The rates that each measured rate stands for. The threads that stage arrays also read cached files.
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


def factors(backend: str, device: str | None) -> Mapping[str, float]:
    """Return by which factor rates of this machine differ from the defaults, by name; empty if unknown.

    If `device` is None, the device that was probed last counts.
    """
    if not _enabled():
        return {}
    for path, written in cache.newest(_folder, f"{cache.machine_key()}-{backend}-"):
        found = _read(path, written)
        if found and device in (None, found["device"]):
            return {rate: found["factors"][name] for name in found["factors"] for rate in MEASURED[name]}
    return {}


def version() -> object:
    """Return a value that changes if the result of `factors` may have changed."""
    return cache.version(_folder) if _enabled() else None


def taken(engine: Backend, plan: Plan) -> bool:
    """Probe the machine if a plan takes long and rates are unknown. Return whether they have become known.

    Never raises: predicted times are less exact without the probe, and products are the same.
    """
    device = backends.identity(engine)
    known = not _enabled() or plan.machine.calibrated or device in _tried
    if known or plan.prediction.total < MIN_SECONDS or factors(engine.name, device):
        return False
    _tried.add(device)
    try:
        if not _keepable():
            return False
        before = CpuTimes.now()
        found = measure(engine, default_model(engine.name, plan.machine.cores, plan.machine.compiled))
        used = used_since(before)
        if used is not None and used["busy_seconds"] - used["own_seconds"] > MAX_OTHERS * used["cores"]:
            return False
        keep(engine, found)
    except Exception:
        logger.debug("the machine was not probed", exc_info=True)
        return False
    return True


# Identities of devices for which this process has tried a probe.
_tried = set[str]()


def measure(engine: Backend, machine: MachineModel) -> dict[str, float]:
    """Measure the rates in `MEASURED`. Return them as factors of those of `machine`."""
    # These modules import the executor, which a process that only plans does not need.
    from oocgemm import stores
    from oocgemm.machine.measure.sampling import numbers, typical
    from oocgemm.machine.measure.streaming import loading_seconds, rate_of, streaming
    from oocgemm.machine.measure.workbench import Workbench
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


def keep(engine: Backend, found: Mapping[str, float]) -> None:
    """Store what `measure` returned, for later plans. Raises `OSError`."""
    device = backends.identity(engine)
    facts = {"format": FORMAT, "version": VERSION, "device": device, "factors": dict(found)}
    path = _folder() / cache.file_name(cache.machine_key(), engine.name, device)
    cache.write_whole(path, json.dumps(facts).encode())


def probed(defaults: MachineModel, backend: str, device: str | None) -> MachineModel:
    """Return the default model with the rates that were probed, or the default model itself."""
    known = factors(backend, device)
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
    """Read a probe; None if the file is no valid one. `written` (time and size) changes if the file does."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            return None
        known = {name: float(data["factors"][name]) for name in data["factors"] if name in MEASURED}
        plausible = all(isfinite(x) and 1 / MAX_FACTOR <= x <= MAX_FACTOR for x in known.values())
        return {"device": str(data["device"]), "factors": known} if known and plausible else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
