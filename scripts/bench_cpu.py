#!/usr/bin/env python
"""The host backend, from zarr to zarr within a memory budget, against NumPy's in-core `A @ B`, in one run.

Both are timed from call to result in one process with one BLAS, interleaved, after a warm-up. The peak of
anonymous memory is measured in processes of their own: one that runs the product, one that only imports.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr

import oocgemm
from oocgemm.backends.blas import blas_name
from oocgemm.units import parse_size


def anonymous_bytes() -> int:
    """Memory of this process that is not mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not report RssAnon")


def peak_of(arguments: list[str]) -> int:
    """Peak of anonymous memory of a process that calls the library with these arguments, sampled all along."""
    command = [sys.executable, __file__, "--measure", json.dumps(arguments)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure(arguments: list[str]) -> None:
    peak, done = anonymous_bytes(), threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    if arguments:
        a, b, c, device, host = arguments
        oocgemm.matmul(a, b, out=c, device_memory=device, host_memory=host, backend="host", overwrite=True)
    done.set()
    sampler.join()
    print(max(peak, anonymous_bytes()))


@click.command()
@click.option("--size", default=12000, show_default=True)
@click.option("--dtype", default="float64", show_default=True)
@click.option("--chunk", default=1000, show_default=True)
@click.option("--device-memory", default="960MiB", show_default=True)
@click.option("--host-memory", default="64MiB", show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--output", type=click.Path(), default="scripts/results/bench_cpu.json", show_default=True)
@click.option("--timeline", type=click.Path(), default=None, help="Keep the timeline of the last run.")
@click.option("--measure", "child", default=None, hidden=True)
def main(
    size: int,
    dtype: str,
    chunk: int,
    device_memory: str,
    host_memory: str,
    repeats: int,
    output: str,
    timeline: str | None,
    child: str | None,
) -> None:
    if child is not None:
        measure(json.loads(child))
        return
    with tempfile.TemporaryDirectory(prefix="oocgemm-bench-", dir=".") as folder:
        found = bench(Path(folder), size, dtype, chunk, device_memory, host_memory, repeats, timeline)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(json.dumps(found, indent=1) + "\n")
    keys = ("plan", "median_seconds", "of_in_core", "ratios", "peak_over_imports_mib", "budget_mib")
    print(json.dumps({key: found[key] for key in keys}, indent=1))


def bench(
    work: Path,
    size: int,
    dtype: str,
    chunk: int,
    device_memory: str,
    host_memory: str,
    repeats: int,
    timeline: str | None,
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    places = [str(work / name) for name in ("A.zarr", "B.zarr", "C.zarr")]
    operands = []
    for place in places[:2]:
        matrix = rng.standard_normal((size, size)).astype(dtype)
        array = zarr.create_array(
            place, shape=matrix.shape, dtype=dtype, chunks=(chunk, chunk), compressors=None
        )
        array[:] = matrix
        operands.append(matrix)
    a, b = operands
    samples: dict[str, list[float]] = {"in_core": [], "oocgemm": []}
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        c = a @ b
        in_core = time.perf_counter() - started
        started = time.perf_counter()
        result = oocgemm.matmul(
            *places[:2],
            out=places[2],
            backend="host",
            device_memory=device_memory,
            host_memory=host_memory,
            overwrite=repeat > 0,
            timeline=timeline,
        )
        call = time.perf_counter() - started
        print(f"in-core {in_core:.2f} s, oocgemm {result.report.wall:.2f} s (call {call:.2f} s)", flush=True)
        if repeat == 0:
            bound = size * np.finfo(dtype).eps * (np.abs(a[:200]) @ np.abs(b))
            difference = np.abs(np.asarray(result.out[:200]) - c[:200])
            largest = float((difference / bound).max())
            same = bool(np.allclose(np.asarray(result.out[-500:]), c[-500:], rtol=1e-6, atol=1e-6))
            assert largest <= 1, "the result is wrong"
            assert same, "the result is wrong"
        else:
            samples["in_core"].append(in_core)
            samples["oocgemm"].append(result.report.wall)
        del c
    report = result.report
    del a, b, operands
    imports = peak_of([])
    peak = peak_of([*places, device_memory, host_memory])
    median = {name: statistics.median(values) for name, values in samples.items()}
    pairs = zip(samples["in_core"], samples["oocgemm"], strict=True)
    return {
        "what": f"{size}^3 {dtype}, device {device_memory} and host {host_memory}, chunks {chunk}, page cache warm",
        "machine": result.timeline.header["machine"],
        "versions": result.timeline.header["versions"],
        "blas": blas_name(),
        "plan": str(result.plan.tile),
        "slots": result.plan.to_dict()["slots"],
        "samples_seconds": samples,
        "median_seconds": median,
        "of_in_core": median["in_core"] / median["oocgemm"],
        "ratios": [one / other for one, other in pairs],
        "budget_mib": (parse_size(device_memory) + parse_size(host_memory)) / 2**20,
        "peak_over_imports_mib": (peak - imports) / 2**20,
        "imports_mib": imports / 2**20,
        "largest_error_over_bound": largest,
        "report": report.to_dict(),
    }


if __name__ == "__main__":
    main()
