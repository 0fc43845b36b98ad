"""Measure `gram` relative to `gemm(X, X^T)`, in the same run and in turn.

    python scripts/bench/bench_gram.py --backend host --size 8192
    python scripts/bench/bench_gram.py --backend cuda --size 32768 --dtype float64 --uplo lower --uplo full
    python scripts/bench/bench_gram.py --backend cuda --size 32768 --depth 262144 --dtype int8 --pinned
    python scripts/bench/bench_gram.py --backend host --size 6000 --depth 20000 --folder /tmp/gram

X holds small integers, so that C is exact: a sample of rows of both results is compared with NumPy. X and C
are NumPy arrays, which can be pinned, or zarr arrays of raw chunks in a folder. The ratio is that of the
medians; `cpu_ratio` is that of the CPU time of this process, which other programs on the machine disturb
less. The first round is not counted. The results go to a JSON file with a key per case. Other cases in the
file are kept.
"""

import json
import shutil
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from device_arrays import filled, pin, spread, touched
from keeping import keep, output

import oocgemm

# Rows that are compared at a time, and rows of C that are compared.
BAND, COMPARED = 512, 64


def check(x: Any, c: Any, uplo: str) -> None:
    """Compare some rows of C with NumPy. Elements in the triangle that is not stored are left out."""
    rows = np.linspace(0, x.shape[0] - 1, COMPARED).astype(int)
    right = np.stack([np.asarray(x[row]) for row in rows]).astype("float64").T
    stored = np.stack([np.asarray(c[row]) for row in rows]).astype("float64")
    columns = np.arange(x.shape[0])
    compared = {"lower": columns <= rows[:, None], "upper": columns >= rows[:, None]}.get(uplo, True)

    def check_band(number: int) -> None:
        part = slice(number * BAND, (number + 1) * BAND)
        wanted = (np.asarray(x[part]).astype("float64") @ right).T
        kept = np.broadcast_to(compared, stored.shape)[:, part]
        np.testing.assert_array_equal(stored[:, part][kept], wanted[kept])

    spread(check_band, -(-x.shape[0] // BAND))


@click.command()
@click.option("--backend", default="host", show_default=True)
@click.option("--size", default=8192, show_default=True, help="Rows of X.")
@click.option("--depth", type=int, help="Columns of X.  [default: as many as rows]")
@click.option("--dtype", "dtypes", multiple=True, default=("float64",), show_default=True)
@click.option("--uplo", "triangles", multiple=True, default=("full",), show_default=True)
@click.option("--folder", type=Path, help="Keep X and C in zarr arrays in this folder.  [default: in memory]")
@click.option("--pinned", is_flag=True, help="Pin X and C in memory, before they are timed.")
@click.option("--chunk", default=1024, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--device-memory")
@click.option("--host-memory")
@click.option("--tile")
@click.option("--verify", is_flag=True)
@output
def main(
    backend: str,
    size: int,
    depth: int | None,
    dtypes: tuple[str, ...],
    triangles: tuple[str, ...],
    folder: Path | None,
    pinned: bool,
    chunk: int,
    rounds: int,
    device_memory: str | None,
    host_memory: str | None,
    tile: str | None,
    verify: bool,
    output: Path | None,
) -> None:
    options: dict[str, Any] = {
        "backend": backend,
        "device_memory": device_memory,
        "host_memory": host_memory,
        "verify": verify,
    }
    k = depth or size
    for dtype, uplo in product(dtypes, triangles):
        place = "zarr" if folder else "pinned memory" if pinned else "memory"
        found = compared(size, k, dtype, uplo, folder, place, chunk, rounds, tile, options)
        name = f"{backend} {dtype} {size}x{k} {uplo} {place}"
        keep(output or Path("scripts/bench/results/bench_gram.json"), name, found)
        shown = ("median_seconds", "ratio", "ratios", "cpu_ratio", "read", "h2d", "plans")
        print(name, json.dumps({key: found[key] for key in shown}, indent=1), flush=True)


def compared(
    n: int,
    k: int,
    dtype: str,
    uplo: str,
    folder: Path | None,
    place: str,
    chunk: int,
    rounds: int,
    tile: str | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Run both in turn and return what was measured."""
    c_dtype = "int32" if dtype == "int8" else dtype
    x: Any = filled((n, k), dtype, seed=0)
    targets: dict[str, Any]
    if folder is None:
        # The same array for both, whose pages are resident.
        target = touched((n, n), c_dtype)
        targets, operand = {"gemm": target, "gram": target}, x
        if place == "pinned memory":
            pin(x, target)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        chunks = min(chunk, n), min(chunk, k)
        operand = folder / "x.zarr"
        zarr.create_array(operand, shape=(n, k), dtype=dtype, chunks=chunks, compressors=None)[:] = x
        targets = {"gemm": folder / "gemm.zarr", "gram": folder / "gram.zarr"}
    seconds: dict[str, list[float]] = {"gemm": [], "gram": []}
    cpu: dict[str, list[float]] = {"gemm": [], "gram": []}
    last: dict[str, Any] = {}
    for turn in range(rounds + 1):
        for way in ("gemm", "gram") if turn % 2 else ("gram", "gemm"):
            if folder is not None:
                shutil.rmtree(targets[way], ignore_errors=True)
            busy = time.process_time()
            if way == "gemm":
                result = oocgemm.gemm(operand, operand, targets[way], trans_b="T", **options)
            else:
                result = oocgemm.gram(operand, targets[way], uplo=uplo, tile=tile, **options)
            busy = time.process_time() - busy
            if turn:
                seconds[way].append(result.report.wall)
                cpu[way].append(busy)
            last[way] = result
            exposed = {cause: round(value, 3) for cause, value in result.report.exposed.items()}
            print(f"{dtype} {way} {result.report.wall:.3f} s, {exposed}, tile {result.plan.tile}", flush=True)
            if turn == 0:
                c = targets[way] if folder is None else zarr.open_array(targets[way], mode="r")
                check(x, c, uplo if way == "gram" else "full")
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    header = last["gram"].timeline.header
    plans = {way: result.plan for way, result in last.items()}
    return {
        "what": f"X {n} x {k} {dtype}, C {uplo}, in {place}",
        "backend": header["backend"],
        "samples_seconds": seconds,
        "median_seconds": medians,
        "ratio": medians["gram"] / medians["gemm"],
        "cpu_seconds": cpu,
        "cpu_ratio": statistics.median(cpu["gram"]) / statistics.median(cpu["gemm"]),
        "ratios": sorted(a / b for a, b in zip(seconds["gram"], seconds["gemm"], strict=True)),
        "flops": {way: result.report.flops for way, result in last.items()},
        "exposed_seconds": {way: result.report.exposed for way, result in last.items()},
        "compute_share": {way: result.report.compute_share for way, result in last.items()},
        "read": {way: [plan.traffic["read"], plan.least["read"]] for way, plan in plans.items()},
        "h2d": {way: [plan.traffic["h2d"], plan.least["h2d"]] for way, plan in plans.items()},
        "plans": {
            way: f"tile {plan.tile}, grid {plan.grid.shape}, strip {plan.slots.strip}, slots C {plan.slots.c}"
            f" A {plan.slots.a}, host A {plan.slots.host_a} C {plan.slots.host_c}, drain {plan.slots.drain}"
            for way, plan in plans.items()
        },
        "predicted_seconds": {way: plan.prediction.total for way, plan in plans.items()},
    }


if __name__ == "__main__":
    main()
