"""Measure the fixed cost of calls and commands: small products beside CuPy or NumPy, short commands beside T.

    python scripts/bench/bench_calls.py calls --backend cuda --sizes 64,512,1024,2048,4096
    python scripts/bench/bench_calls.py commands --backend cuda --sizes 2048,16384 --folder /tmp/operands

Calls multiply pageable arrays of small integers, after five calls that are not counted. oocgemm, with and
without short runs in one thread, and CuPy (`asarray`, `@`, `asnumpy`) take turns. On the host, NumPy stands
in for CuPy. Every result must equal that of NumPy. Times are medians, with least and most, in milliseconds.
"""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

import oocgemm
from oocgemm.engine import executor

Call = Callable[[Any, Any], Any]


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    return [int(size) for size in value.split(",")]


def described(seconds: list[float]) -> str:
    """Return the median, the least and the most of some times, in milliseconds."""
    median, least, most = statistics.median(seconds), min(seconds), max(seconds)
    return f"{1e3 * median:8.2f} ({1e3 * least:.2f} to {1e3 * most:.2f})"


def reference(backend: str) -> Call:
    """Return a function that multiplies two arrays with CuPy, or with NumPy on the host."""
    if backend == "host":
        return lambda a, b: a @ b
    import cupy

    return lambda a, b: cupy.asnumpy(cupy.asarray(a) @ cupy.asarray(b))


@click.group()
def main() -> None:
    """Measure the fixed cost of calls and commands."""


@main.command()
@click.option("--backend", default="cuda")
@click.option("--sizes", callback=_sizes, default="64,512,1024,2048,4096")
@click.option("--dtype", default="float64")
@click.option("--samples", default=50)
@click.option("--short-bytes", default=1 << 40, help="Largest product that the short run takes, in bytes.")
def calls(backend: str, sizes: list[int], dtype: str, samples: int, short_bytes: int) -> None:
    """Time warm calls of `oocgemm.matmul`."""
    limit = executor.MAX_STREAMED_STEPS
    executor.MAX_SHORT_BYTES = executor.MAX_STREAMED_BYTES = short_bytes

    def product(steps: int) -> Call:
        def multiply(a: Any, b: Any) -> Any:
            executor.MAX_STREAMED_STEPS = steps
            return oocgemm.matmul(a, b, backend=backend)

        return multiply

    contenders = {"short": product(limit), "threads": product(-1), "reference": reference(backend)}
    for size in sizes:
        rng = np.random.default_rng(size)
        a, b = (rng.integers(-3, 4, (size, size)).astype(dtype) for _ in "ab")
        expected = a @ b
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for sample in range(samples + 5):
            for name, multiply in contenders.items():
                start = perf_counter()
                found = multiply(a, b)
                seconds = perf_counter() - start
                if sample >= 5:
                    times[name].append(seconds)
                elif not np.array_equal(found, expected):
                    raise SystemExit(f"{name}: the product of {size} x {size} matrices is wrong")
        above = statistics.median(times["short"]) - statistics.median(times["reference"])
        print(f"{size}^3 {dtype}", *(f"{name} {described(found)}" for name, found in times.items()), sep="  ")
        print(f"    above the reference: {1e3 * above:.2f} ms", flush=True)


@main.command()
@click.option("--backend", default="cuda")
@click.option("--sizes", callback=_sizes, default="2048,16384")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where the operands are made.")
@click.option("--samples", default=7)
def commands(backend: str, sizes: list[int], folder: Path, samples: int) -> None:
    """Time the process of `oocgemm run` on zarr arrays, beside the T that it reports."""
    import zarr

    for size in sizes:
        places = [folder / f"{name}-{size}.zarr" for name in "abc"]
        for place in places[:2]:
            if not place.exists():
                side = min(size, 2048)
                options: dict[str, Any] = {"shape": (size, size), "chunks": (side, side), "dtype": "float64"}
                array = zarr.create_array(place, compressors=None, **options)
                for row in range(0, size, side):
                    array[row : row + side] = np.random.default_rng(row).random((min(side, size - row), size))
        command = [sys.executable, "-m", "oocgemm", "run", *map(str, places), "--backend", backend, "--json"]
        walls, overheads = [], []
        for _ in range(samples):
            shutil.rmtree(places[2], ignore_errors=True)
            start = perf_counter()
            done = subprocess.run(command, capture_output=True, check=True)
            walls.append(perf_counter() - start)
            overheads.append(walls[-1] - float(json.loads(done.stdout)["report"]["wall"]))
        shutil.rmtree(places[2], ignore_errors=True)
        print(f"{size}^3: process {described(walls)}, process - T {described(overheads)} ms", flush=True)


if __name__ == "__main__":
    main()
