#!/usr/bin/env python
"""The process that `bench_cpu.py` starts for one product: prepare, wait for a line on stdin, multiply, check.

To prepare, it imports the library, multiplies a small product in the same way and, for NumPy, reads A and B.
The other libraries are used as their documentation says, with blocks as large as the budget allows.
"""

import json
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocgemm.backends.host.blas import blas_name
from oocgemm.planning.units import parse_size

SMALL = 512  # rows and columns of the warm-up product
CHECKED_ROWS = 4


@dataclass(frozen=True)
class Case:
    """One product: extents, dtype, rows and columns of a stored chunk, and memory budgets."""

    m: int
    k: int
    n: int
    dtype: str
    chunk: int
    device: str
    host: str

    @property
    def budget(self) -> int:
        return parse_size(self.device) + parse_size(self.host)

    def blocks(self, count: int) -> tuple[int, int, int]:
        """Return block extents (m, k, n) such that `count` blocks fit the budget.

        Each extent is the largest such divisor of the matrix's extent that is a multiple of the chunk.
        """
        max_side = int((self.budget / count / np.dtype(self.dtype).itemsize) ** 0.5)

        def part(extent: int) -> int:
            chunks = extent // self.chunk
            return self.chunk * max(
                c for c in range(1, chunks + 1) if chunks % c == 0 and c * self.chunk <= max_side
            )

        return part(self.m), part(self.k), part(self.n)


@dataclass
class Job:
    """What a contender gets: the paths of A, B and C, and its settings. `told` collects what it reports."""

    case: Case
    operands: Path
    place: Path
    settings: dict[str, str] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    result: Any = None

    @property
    def zarrs(self) -> tuple[str, str]:
        return str(self.operands / "A.zarr"), str(self.operands / "B.zarr")

    def new_zarr(self) -> Any:
        case = self.case
        return zarr.create_array(
            self.place,
            shape=(case.m, case.n),
            chunks=(case.chunk, case.chunk),
            dtype=case.dtype,
            compressors=None,
        )


def in_core(job: Job) -> Callable[[], None]:
    """Multiply with NumPy, with A, B and C in memory."""
    a, b = (zarr.open_array(place, mode="r")[:] for place in job.zarrs)

    def product() -> None:
        job.result = a @ b

    return product


def library(job: Job) -> Callable[[], None]:
    """Multiply with oocgemm, called from Python."""
    import oocgemm

    def product() -> None:
        result = oocgemm.gemm(
            *job.zarrs,
            c=str(job.place),
            backend="host",
            device_memory=job.case.device,
            host_memory=job.case.host,
            tile=job.settings.get("tile"),
            timeline=job.settings.get("timeline"),
        )
        job.told.update(plan=str(result.plan.tile), report=result.report.to_dict())

    return product


def command(job: Job) -> Callable[[], None]:
    """Multiply with `oocgemm run`, including its start-up.

    The command selects AVX-512 kernels where OpenBLAS by itself does not. It may therefore use other BLAS
    kernels than the in-core product.
    """
    budgets = ("--device-memory", job.case.device, "--host-memory", job.case.host)
    line = ["-m", "oocgemm", "run", *job.zarrs, str(job.place), "--backend", "host", "--quiet", *budgets]

    def product() -> None:
        subprocess.run([sys.executable, *line], check=True)

    return product


def dask(job: Job) -> Callable[[], None]:
    """Multiply with dask.array, one block at a time with all BLAS threads.

    With `--set dask=threads` it multiplies several blocks at once.
    """
    import dask
    from dask import array

    m, k, n = job.case.blocks(int(job.settings.get("dask_blocks", 6)))

    def product() -> None:
        left, right = job.zarrs
        a, b = array.from_zarr(left, chunks=(m, k)), array.from_zarr(right, chunks=(k, n))
        with dask.config.set(scheduler=job.settings.get("dask", "synchronous")):
            (a @ b).to_zarr(job.new_zarr())

    return product


def cubed(job: Job) -> Callable[[], None]:
    """Multiply with cubed on its local executor.

    `allowed_mem` is the budget. Nothing is reserved for Python.
    """
    import cubed
    from cubed import array_api

    spec = cubed.Spec(
        str(job.place.parent / "cubed"),
        allowed_mem=job.case.budget,
        reserved_mem=0,
        executor_name=job.settings.get("cubed", "single-threaded"),
        zarr_compressor=None,
    )
    m, k, n = job.case.blocks(int(job.settings.get("cubed_blocks", 10)))

    def product() -> None:
        a, b = (cubed.from_zarr(place, spec=spec) for place in job.zarrs)
        a, b = a.rechunk((m, k)), b.rechunk((k, n))
        cubed.to_zarr(array_api.matmul(a, b), str(job.place))

    return product


def blosc2(job: Job) -> Callable[[], None]:
    """Multiply with python-blosc2, from arrays on disk in its own format.

    The arrays were converted before, uncompressed, with the chunks that blosc2 chooses.
    """
    import blosc2

    a, b = (blosc2.open(place.replace(".zarr", ".b2nd"), mode="r") for place in job.zarrs)

    def product() -> None:
        job.result = blosc2.matmul(a, b, urlpath=str(job.place), mode="w", cparams={"clevel": 0})

    return product


CONTENDERS: dict[str, Callable[[Job], Callable[[], None]]] = {
    "in-core": in_core,
    "oocgemm": library,
    "oocgemm run": command,
    "dask": dask,
    "cubed": cubed,
    "blosc2": blosc2,
}


def make_operands(folder: Path, case: Case, converted: bool) -> None:
    """Create A and B of normal random numbers, uncompressed, unless they exist.

    With `converted`, also create them in blosc2's format.
    """
    rng = np.random.default_rng(0)
    for name, shape in (("A", (case.m, case.k)), ("B", (case.k, case.n))):
        bands = [slice(top, min(top + case.chunk, shape[0])) for top in range(0, shape[0], case.chunk)]
        place = folder / f"{name}.zarr"
        if not place.exists():
            chunks = (case.chunk, case.chunk)
            array = zarr.create_array(place, shape=shape, dtype=case.dtype, chunks=chunks, compressors=None)
            for band in bands:
                array[band] = rng.standard_normal((band.stop - band.start, shape[1])).astype(case.dtype)
        place = folder / f"{name}.b2nd"
        if converted and not place.exists():
            import blosc2

            array = zarr.open_array(folder / f"{name}.zarr", mode="r")
            other = blosc2.empty(
                shape, np.dtype(case.dtype), urlpath=str(place), mode="w", cparams={"clevel": 0}
            )
            for band in bands:
                other[band] = array[band]


def check(job: Job) -> None:
    """Check some rows of C against NumPy, within the rounding error of sums of k terms."""
    case = job.case
    c = zarr.open_array(job.place, mode="r") if job.result is None else job.result
    a, b = (zarr.open_array(place, mode="r") for place in job.zarrs)
    rows = [int(row) for row in np.random.default_rng(1).choice(case.m, CHECKED_ROWS, replace=False)]
    left = np.concatenate([np.asarray(a[row : row + 1], "float64") for row in rows])
    found = np.concatenate([np.asarray(c[row : row + 1]) for row in rows])
    wanted, bound = np.zeros((2, CHECKED_ROWS, case.n))
    for top in range(0, case.k, case.chunk):
        right = np.asarray(b[top : top + case.chunk], "float64")
        part = left[:, top : top + case.chunk]
        wanted += part @ right
        bound += np.abs(part) @ np.abs(right)
    worst = float((np.abs(found - wanted) / bound).max() / (case.k * np.finfo(case.dtype).eps))
    if not worst <= 1:  # also true if `worst` is NaN
        raise SystemExit(f"the result is wrong: its error is {worst} times the rounding bound")


def prefault(case: Case) -> None:
    """Write to as much memory as C and the budget take, and free it.

    A virtual machine may obtain memory from its host when a page is first used, at seconds per GB. Otherwise
    the first contender would pay for that.
    """
    size = case.m * case.n * np.dtype(case.dtype).itemsize + case.budget
    np.empty(size, np.uint8)[:: mmap.PAGESIZE] = 1


def main() -> None:
    arguments = json.loads(sys.argv[1])
    name, case, settings = arguments["contender"], Case(**arguments["case"]), arguments["settings"]
    with tempfile.TemporaryDirectory() as folder:
        half = SMALL // 2
        little = Case(SMALL, SMALL, SMALL, case.dtype, half, case.device, case.host)
        make_operands(Path(folder), little, converted=name == "blosc2")
        CONTENDERS[name](Job(little, Path(folder), Path(folder, "C")))()
    job = Job(case, Path(arguments["operands"]), Path(arguments["place"]), settings)
    product = CONTENDERS[name](job)
    print("ready", flush=True)
    sys.stdin.readline()
    prefault(case)
    print("start", flush=True)
    started = time.perf_counter()
    product()
    seconds = time.perf_counter() - started
    print("done", flush=True)
    check(job)
    print(json.dumps({"seconds": seconds, "blas": blas_name()} | job.told))


if __name__ == "__main__":
    main()
