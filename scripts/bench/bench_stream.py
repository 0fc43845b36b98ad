#!/usr/bin/env python
"""Measure products of NumPy arrays in host memory, against in-core cuBLAS and other ways to stream them.

Each round runs every contender once: in-core cuBLAS (all matrices on the device), `oocgemm.matmul` (native
and emulated), cuBLASXt with several block sizes, and a synchronous loop of CuPy calls over the tiles of the
same plan. oocgemm and cuBLASXt run with pageable arrays, and with arrays that were pinned before. That
pinning is not timed. No budget limits cuBLASXt. Every result is checked against in-core. All measured times
go to a JSON file with a key per case. Other cases in the file are kept.
"""

import ctypes
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import cupy
import numpy as np
from cupy.cuda import runtime

import oocgemm
from oocgemm.planning import Plan
from oocgemm.timeline import in_place

BLOCKS = (1024, 2048, 4096, 8192, 16384)
MAX_SLOW_BLOCK = 2048  # cuBLASXt with blocks up to this size is slow, so it runs only once
# Names of the runs of oocgemm, and the `compute` argument of each. Runs whose name ends in "pinned" use
# pinned arrays. The loop of CuPy calls uses the plan of the last one.
OURS = {
    "emulated": "emulated",
    "oocgemm": "native",
    "emulated_pinned": "emulated",
    "oocgemm_pinned": "native",
}


@contextmanager
def pinned(*arrays: Any) -> Iterator[None]:
    """Pin arrays for the duration of the block, as a caller of the library could."""
    for x in arrays:
        runtime.hostRegister(x.ctypes.data, x.nbytes, 0)
    try:
        yield
    finally:
        for x in arrays:
            runtime.hostUnregister(x.ctypes.data)


def in_core_seconds(a: cupy.ndarray, b: cupy.ndarray, out: cupy.ndarray) -> float:
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    cupy.matmul(a, b, out=out)
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


def prefault(size: int = 4 << 30) -> None:
    """Write to memory before a timed run, and free it.

    The memory of a virtual machine grows when a page is first used. Otherwise the first contender would pay
    for that.
    """
    np.empty(size, np.uint8)[::4096] = 0


class CublasXt:
    """cuBLASXt, called with ctypes in the library that CuPy has loaded."""

    def __init__(self, dtype: str) -> None:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libcublas.so" in line}
        self._library = ctypes.CDLL(min(paths))
        self._handle = ctypes.c_void_p()
        self._check(self._library.cublasXtCreate(ctypes.byref(self._handle)))
        devices = (ctypes.c_int * 1)(0)
        self._check(self._library.cublasXtDeviceSelect(self._handle, 1, devices))
        self._gemm = getattr(self._library, {"float32": "cublasXtSgemm", "float64": "cublasXtDgemm"}[dtype])
        self._scalar = {"float32": ctypes.c_float, "float64": ctypes.c_double}[dtype]

    def seconds(self, a: Any, b: Any, c: Any, block: int) -> float:
        """Compute c = a @ b and return the seconds.

        The arrays are row-major, so cuBLASXt computes c^T = b^T a^T.
        """
        self._check(self._library.cublasXtSetBlockDim(self._handle, block))
        one, zero = self._scalar(1), self._scalar(0)
        (m, k), n = a.shape, b.shape[1]
        started = time.perf_counter()
        self._check(
            self._gemm(
                *(self._handle, 0, 0, ctypes.c_size_t(n), ctypes.c_size_t(m), ctypes.c_size_t(k)),
                *(ctypes.byref(one), ctypes.c_void_p(b.ctypes.data), ctypes.c_size_t(n)),
                *(ctypes.c_void_p(a.ctypes.data), ctypes.c_size_t(k)),
                *(ctypes.byref(zero), ctypes.c_void_p(c.ctypes.data), ctypes.c_size_t(n)),
            )
        )
        runtime.deviceSynchronize()
        return time.perf_counter() - started

    def close(self) -> None:
        self._check(self._library.cublasXtDestroy(self._handle))

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLASXt returns {status}")


def loop_seconds(a: Any, b: Any, c: Any, plan: Plan) -> float:
    """Run a plain loop over the tiles of the plan, and return its seconds.

    Each step copies a pair of panels, multiplies them and waits.
    """
    tile, grid = plan.tile, plan.grid
    started = time.perf_counter()
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            rows, cols = slice(*grid.rows(i)), slice(*grid.cols(j))
            total = cupy.zeros((rows.stop - rows.start, cols.stop - cols.start), a.dtype)
            for p in range(0, a.shape[1], tile.k):
                left = cupy.asarray(a[rows, p : p + tile.k])
                right = cupy.asarray(b[p : p + tile.k, cols])
                total += left @ right
            c[rows, cols] = total.get()
            del total
    return time.perf_counter() - started


def worst_error(c: Any, reference: cupy.ndarray, bound: cupy.ndarray) -> float:
    """Return the largest |dC| / (k eps |A| |B|), where dC is the difference to the reference.

    NaN counts as infinite.
    """
    worst = 0.0
    for row in range(0, c.shape[0], 4096):
        block = cupy.asarray(c[row : row + 4096])
        ratio = cupy.abs(block - reference[row : row + 4096]) / bound[row : row + 4096]
        worst = max(worst, float(cupy.where(cupy.isnan(ratio), cupy.inf, ratio).max()))
    return worst


def random_operands(size: int, dtype: str) -> list[cupy.ndarray]:
    """Return normal random A and B on the device."""
    rng = cupy.random.default_rng(0)
    operands = [cupy.empty((size, size), dtype) for _ in range(2)]
    for row in range(0, size, 2048):
        for x in operands:
            x[row : row + 2048] = rng.standard_normal(x[row : row + 2048].shape, dtype=dtype)
    return operands


@click.command()
@click.option("--size", default=24576, show_default=True)
@click.option("--dtype", default="float64", show_default=True, type=click.Choice(["float32", "float64"]))
@click.option("--device-memory", default="3GiB", show_default=True)
@click.option("--host-memory", default="8GiB", show_default=True)
@click.option("--repeats", default=5, show_default=True)
@click.option(
    "--xt-repeats", default=2, show_default=True, help="Runs of cuBLASXt per block size; 0 skips it."
)
@click.option("--loop/--no-loop", default=True, help="Run the synchronous loop of CuPy calls.")
@click.option(
    "--output", type=click.Path(), default="scripts/bench/results/bench_stream.json", show_default=True
)
@click.option("--timeline", type=click.Path(), default=None, help="Keep the timeline of the last run.")
def main(
    size: int,
    dtype: str,
    device_memory: str,
    host_memory: str,
    repeats: int,
    xt_repeats: int,
    loop: bool,
    output: str,
    timeline: str | None,
) -> None:
    device_a, device_b = random_operands(size, dtype)
    a, b = device_a.get(), device_b.get()
    c = np.zeros_like(a)
    scratch = cupy.empty_like(device_a)
    in_core_seconds(device_a, device_b, scratch)
    samples: dict[str, list[float]] = {name: [] for name in ("in_core", *OURS)}
    results: dict[str, oocgemm.Result] = {}
    shares: dict[str, list[float | None]] = {name: [] for name in OURS}
    options = {"device_memory": device_memory, "host_memory": host_memory, "backend": "cuda"}
    errors: dict[str, float] = {}
    for repeat in range(repeats + 1):
        samples["in_core"].append(in_core_seconds(device_a, device_b, scratch))
        if repeat == 0:
            bound = size * float(np.finfo(dtype).eps) * (cupy.abs(device_a) @ cupy.abs(device_b))
        for name, compute in OURS.items():
            if repeat == 0:
                c[...] = np.nan
            prefault()
            kept = timeline if name == "oocgemm_pinned" else None
            with pinned(a, b, c) if name.endswith("_pinned") else nullcontext():
                result = oocgemm.gemm(a, b, c=c, compute=compute, timeline=kept, **options)
            samples[name].append(result.report.wall)
            shares[name].append(result.report.compute_share)
            results[name] = result
            if repeat == 0:
                errors[name] = worst_error(c, scratch, bound)
        print(", ".join(f"{name} {samples[name][-1]:.4f} s" for name in ("in_core", *OURS)), flush=True)
        if repeat == 0:
            del bound
            print(f"worst errors over their bound {errors}", flush=True)
            assert all(error <= 1 for error in errors.values()), "a result is wrong"
            samples, shares = ({name: [] for name in each} for each in (samples, shares))
    if loop:
        samples["cupy_loop"] = [loop_seconds(a, b, c, result.plan) for _ in range(2)]
        print(f"loop {samples['cupy_loop']}", flush=True)
        cupy.get_default_memory_pool().free_all_blocks()
    if xt_repeats:
        peers(a, b, c, dtype, xt_repeats, samples)
    median = {name: statistics.median(values) for name, values in samples.items()}
    of_in_core = {
        name: [x / y for x, y in zip(samples["in_core"], samples[name], strict=True)] for name in OURS
    }
    header = result.timeline.header
    found = {
        "what": f"{size}^3 {dtype}, device memory {device_memory}, host memory {host_memory}",
        "machine": header["machine"] | header["backend"],
        "versions": header["versions"],
        "plan": result.plan.to_dict(),
        "in_place": {name: in_place(result.timeline) for name, result in results.items()},
        "samples_seconds": samples,
        "median_seconds": median,
        "compute_share": shares,
        "of_in_core": median["in_core"] / median["oocgemm"],
        "of_in_core_samples": of_in_core,
        "times_xt": {
            name: value / median["oocgemm_pinned" if "pinned" in name else "oocgemm"]
            for name, value in median.items()
            if "xt" in name
        },
        "worst_error_over_bound": errors,
        "report": results["oocgemm"].report.to_dict(),
        "pinned_report": results["oocgemm_pinned"].report.to_dict(),
    }
    keep(Path(output), f"{dtype} {size}", found)
    brief = ("of_in_core", "of_in_core_samples", "median_seconds", "times_xt")
    print(json.dumps({key: found[key] for key in brief}, indent=1))
    print({cause: round(s * 1e3, 1) for cause, s in result.report.exposed.items()}, result.plan.tile)
    print(
        {lane: (round(v["busy"], 3), round(v["bytes"] / 1e9, 2)) for lane, v in result.report.lanes.items()}
    )


def keep(path: Path, case: str, found: dict[str, Any]) -> None:
    """Add the results of a case to the results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cases = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(cases | {case: found}, indent=1) + "\n")


def peers(a: Any, b: Any, c: Any, dtype: str, repeats: int, samples: dict[str, list[float]]) -> None:
    """Time cuBLASXt and the pinning of all arrays, and add the times to `samples`."""
    xt = CublasXt(dtype)
    started = time.perf_counter()
    with pinned(a, b, c):
        pass
    # Time of pinning and unpinning, which is in no other sample.
    samples["pinning"] = [time.perf_counter() - started]
    for kind in ("pageable", "pinned"):
        with pinned(a, b, c) if kind == "pinned" else nullcontext():
            for block in BLOCKS:
                name = f"xt {block} {kind}"
                # The first run of all loads the library, so it is repeated and not counted.
                warm_up = block == BLOCKS[0] and kind == "pageable"
                times = [
                    xt.seconds(a, b, c, block)
                    for _ in range((1 if block <= MAX_SLOW_BLOCK else repeats) + warm_up)
                ]
                samples[name] = times[warm_up:]
                print(name, samples[name], flush=True)
    xt.close()


if __name__ == "__main__":
    main()
