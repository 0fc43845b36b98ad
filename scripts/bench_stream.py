#!/usr/bin/env python
"""Streamed products on a GPU against the same product in-core in cuBLAS, all in one run.

Contenders, interleaved: in-core cuBLAS (operands and result on the device), `oocgemm.matmul` from NumPy arrays
in host memory, and `oocgemm.matmul` from zarr to zarr. Every result is checked against in-core, element by
element, with the bound k eps (|A| |B|). Raw samples go to a JSON file.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import cupy
import numpy as np
import zarr

import oocgemm


def in_core_seconds(a: cupy.ndarray, b: cupy.ndarray, out: cupy.ndarray) -> float:
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    cupy.matmul(a, b, out=out)
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


def touch(size: int = 4 << 30) -> None:
    """Have the machine give memory that a run is about to take: a virtual machine's grows as it is first touched, and
    shrinks again, at a cost that says nothing about the contenders."""
    np.empty(size, np.uint8)[::4096] = 0


def worst_error(c: np.ndarray | zarr.Array, reference: cupy.ndarray, bound: cupy.ndarray) -> float:
    """Largest |dC| / (k eps |A| |B|); NaN counts as infinite."""
    worst = 0.0
    for row in range(0, c.shape[0], 4096):
        block = cupy.asarray(c[row : row + 4096])
        ratio = cupy.abs(block - reference[row : row + 4096]) / bound[row : row + 4096]
        value = float(cupy.where(cupy.isnan(ratio), cupy.inf, ratio).max())
        worst = max(worst, value)
    return worst


@click.command()
@click.option("--size", default=24576, show_default=True)
@click.option("--dtype", default="float64", show_default=True)
@click.option("--device-memory", default="3GiB", show_default=True)
@click.option("--host-memory", default="8GiB", show_default=True)
@click.option("--chunk", default=2048, show_default=True)
@click.option("--repeats", default=5, show_default=True)
@click.option(
    "--folder", type=click.Path(), default=None, help="Where the zarr arrays go.  [default: temporary]"
)
@click.option("--output", type=click.Path(), default="scripts/results/bench_stream.json", show_default=True)
@click.option("--timeline", type=click.Path(), default=None, help="Keep the timeline of the last zarr run.")
def main(
    size: int,
    dtype: str,
    device_memory: str,
    host_memory: str,
    chunk: int,
    repeats: int,
    folder: str | None,
    output: str,
    timeline: str | None,
) -> None:
    work = Path(folder or tempfile.mkdtemp(prefix="oocgemm-bench-"))
    rng = cupy.random.default_rng(0)
    device_a, device_b = (rng.standard_normal((size, size), dtype="float64").astype(dtype) for _ in range(2))
    reference = cupy.empty_like(device_a)
    in_core_seconds(device_a, device_b, reference)
    epsilon = float(np.finfo(dtype).eps)
    bound = size * epsilon * (cupy.abs(device_a) @ cupy.abs(device_b))
    a, b = device_a.get(), device_b.get()
    c = np.zeros_like(a)
    for name, array in (("A", a), ("B", b)):
        target = zarr.create_array(
            work / f"{name}.zarr", shape=array.shape, dtype=dtype, chunks=(chunk, chunk), compressors=None
        )
        target[:] = array
    scratch = cupy.empty_like(device_a)
    options = {"device_memory": device_memory, "host_memory": host_memory, "backend": "cuda"}
    samples: dict[str, list[float]] = {"in_core": [], "numpy": [], "zarr": []}
    shares: dict[str, list[float | None]] = {"numpy": [], "zarr": []}
    errors: dict[str, float] = {}
    for repeat in range(repeats + 1):
        in_core = in_core_seconds(device_a, device_b, scratch)
        c[...] = np.nan
        touch()
        from_numpy = oocgemm.matmul(a, b, out=c, **options)
        touch()
        from_zarr = oocgemm.matmul(
            work / "A.zarr",
            work / "B.zarr",
            out=work / "C.zarr",
            overwrite=repeat > 0,
            timeline=timeline,
            **options,
        )
        for name, seconds, result in (
            ("in_core", in_core, None),
            ("numpy", from_numpy.report.wall, from_numpy),
            ("zarr", from_zarr.report.wall, from_zarr),
        ):
            warm_up = repeat == 0
            if not warm_up:
                samples[name].append(seconds)
            if result is not None and not warm_up:
                shares[name].append(result.report.compute_share)
            print(f"{'warm-up ' if warm_up else ''}{name:8} {seconds:.4f} s", flush=True)
        if repeat == 0:
            errors = {
                "numpy": worst_error(c, reference, bound),
                "zarr": worst_error(from_zarr.out, reference, bound),
            }
            print("worst error over its bound:", errors, flush=True)
    process = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "oocgemm", "run", str(work / "A.zarr"), str(work / "B.zarr"), str(work / "D.zarr"),
         "--device-memory", device_memory, "--host-memory", host_memory, "--backend", "cuda", "--quiet"],
        check=True,
    )  # fmt: skip
    process = time.perf_counter() - process
    median = {name: statistics.median(values) for name, values in samples.items()}
    flops = 2 * size**3
    found = {
        "what": f"{size}^3 {dtype}, device memory {device_memory}, host memory {host_memory}, chunks {chunk}",
        "machine": from_zarr.timeline.header["machine"] | from_zarr.timeline.header["backend"],
        "versions": from_zarr.timeline.header["versions"],
        "plan": {"numpy": str(from_numpy.plan.tile), "zarr": str(from_zarr.plan.tile)},
        "slots": {"numpy": from_numpy.plan.to_dict()["slots"], "zarr": from_zarr.plan.to_dict()["slots"]},
        "samples_seconds": samples,
        "compute_share": shares,
        "median_seconds": median,
        "tflops": {name: flops / seconds / 1e12 for name, seconds in median.items()},
        "of_in_core": {name: median["in_core"] / median[name] for name in ("numpy", "zarr")},
        "worst_error_over_bound": errors,
        "process_seconds": process,
        "report": {"numpy": from_numpy.report.to_dict(), "zarr": from_zarr.report.to_dict()},
    }
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(json.dumps(found, indent=1) + "\n")
    print(
        json.dumps(
            {k: found[k] for k in ("plan", "median_seconds", "tflops", "of_in_core", "process_seconds")}
        )
    )
    print(json.dumps(found["report"]))
    assert max(errors.values()) <= 1, "a result is wrong"
    if folder is None:
        os.system(f"rm -rf {work}")


if __name__ == "__main__":
    main()
