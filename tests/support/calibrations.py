"""A calibration that was measured elsewhere, and a folder in which calibrating takes little time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from oocgemm.machine.calibrate import SIZES, Sizes
from oocgemm.planning import Calibration, KernelRate, StoreRates
from oocgemm.planning.cost import machine
from oocgemm.system import cache

TINY = Sizes(
    side=64, depths=(8, 16, 32), block=(64, 64), copies=(1, 8, 64), seconds=0.002, streamed=(64, 64), chunk=16
)
LAX = 1e5  # allowed residual of fits: tiny workloads measure the scheduler rather than the hardware
STORES = {"8:1": StoreRates(4e9, 3e9, 2e9, 1e9), "8:2": StoreRates(8e9, 2e9, 1e9, 5e8)}
MEASURED = Calibration(
    machine="another",
    backend="cuda",
    device="NVIDIA H200",
    date="2026-11-21",
    multiprocessors=114,
    kernels={"float64": KernelRate(5.3e13, 80.5), "float32": KernelRate(5.1e13, 0.0)},
    rates={
        "h2d": 5.5e10,
        "d2h": 5.4e10,
        "memory": 3e10,
        "decode": 9e9,
        "arena_seconds_per_byte": 0.0,
        "issue": 1e-4,
    },
    stores=STORES,
    samples={"kernels": {"float64": {"256": 4.6e13}}, "copies": {}, "path": "/data", "seconds": 30.5},
)


def known(**changes: Any) -> Calibration:
    """Return `MEASURED` as a calibration of this machine."""
    return replace(MEASURED, machine=cache.machine_key(), **changes)


def folder_of_matrices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create two small matrices in a new working directory. The cache folder is another one, and empty."""
    monkeypatch.setenv("OOCGEMM_CACHE", str(folder / "cache"))
    monkeypatch.setitem(SIZES, "host", TINY)
    monkeypatch.setattr(machine, "MAX_RESIDUAL", LAX)
    work = folder / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    zarr.create_array("raw", data=np.eye(40), chunks=(10, 10), compressors=None)
    zarr.create_array("zstd", data=np.eye(40), chunks=(10, 10))
    return work
