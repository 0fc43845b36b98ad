#!/usr/bin/env python
"""Measure how much six runs, each limited by a different cause, gain from following their advice.

The timeline of each run says what limits its speed, what to change, and the predicted gain. The script makes
that change. It then runs the product with and without the change, alternately, and compares the predicted
gain with the measured one. The cases are:

- disk: raw chunk files, read several times, which another process continuously evicts from the page cache.
- decode: zstd chunks, decoded several times.
- pcie: tiles that are too narrow, chosen by hand, for which panels are uploaded repeatedly.
- kernel: a plain kernel instead of cuBLAS.
- download: a product of little depth, whose large C is in memory.
- none: a run limited by cuBLAS, for which no gain may be predicted.

The prediction for the kernel uses its calibrated rate: run `oocgemm calibrate` first. All measured times go
to a JSON file with a key per case.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from bench_cpu import set_cache
from zarr.codecs import ZstdCodec

import oocgemm
from oocgemm.planning.units import parse_size
from oocgemm.reports.advice import diagnosis_lines, fit, remedy
from oocgemm.timeline import diagnose

EVICTION_INTERVAL = 0.02  # seconds between two evictions of the files from the page cache
MAX_GAIN_ERROR = 0.2  # largest relative error of a predicted gain that passes


@dataclass(frozen=True)
class Case:
    """A product of extents `size` (m, n, k), its budgets, and the causes that may limit its speed.

    `operands` says where A and B are: "memory", or "raw" or "zstd" for chunk files.
    """

    size: tuple[int, int, int]
    operands: str
    device: str
    host: str
    bounds: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    cold: bool = False
    chunk: int = 1024


CASES = {
    "disk": Case((16384, 16384, 16384), "raw", "1GiB", "1GiB", ("read",), cold=True),
    "decode": Case((16384, 16384, 16384), "zstd", "1GiB", "1GiB", ("decode",)),
    "pcie": Case(
        (32768, 32768, 12288), "raw", "768MiB", "10GiB", ("h2d",), {"tile": "16384x1024x2048"}, chunk=2048
    ),
    "kernel": Case((16384, 16384, 16384), "memory", "4GiB", "8GiB", ("compute",), {"kernel": "register"}),
    # A C in memory is written by two copies, one after the other, so that more than one cause may be the
    # largest.
    "download": Case((32768, 32768, 1024), "memory", "2GiB", "256MiB", ("accumulator", "write", "tail")),
    "none": Case((16384, 16384, 98304), "memory", "6GiB", "8GiB", ("compute",)),
}


def operand(folder: Path, name: str, shape: tuple[int, int], kind: str, chunk: int) -> Any:
    """Create an operand of random integers. Unlike random real numbers, they compress well."""

    def block(row: int, rows: int) -> Any:
        chance = np.random.default_rng((row, *shape))
        return chance.integers(-64, 65, (rows, shape[1]), dtype=np.int8).astype(np.float64)

    if kind == "memory":
        array: Any = np.empty(shape)
    else:
        codec = ZstdCodec(level=1) if kind == "zstd" else None
        chunks = min(chunk, shape[0]), min(chunk, shape[1])
        array = zarr.create_array(
            folder / f"{name}.zarr", shape=shape, dtype="float64", chunks=chunks, compressors=codec
        )

    def fill(row: int) -> None:
        rows = min(chunk, shape[0] - row)
        array[row : row + rows] = block(row, rows)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(fill, range(0, shape[0], chunk)))
    return array


@contextmanager
def evicting(folder: Path, cold: bool) -> Iterator[None]:
    """If `cold`, continuously evict all files of a folder from the page cache during the block.

    Another process does this, since a thread would compete with the run for the GIL.
    """
    if not cold:
        yield
        return
    set_cache(folder, cold=True)
    loop = f"while True: time.sleep({EVICTION_INTERVAL}); set_cache(pathlib.Path(sys.argv[1]), cold=True)"
    code = f"import pathlib, sys, time\nfrom bench_cpu import set_cache\n{loop}"
    process = subprocess.Popen([sys.executable, "-c", code, str(folder.resolve())], cwd=Path(__file__).parent)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(case: Case, folder: Path, rounds: int, backend: str, shrink: int) -> dict[str, Any]:
    m, n, k = (max(1, extent // shrink) for extent in case.size)
    a = operand(folder, "A", (m, k), case.operands, case.chunk)
    b = operand(folder, "B", (k, n), case.operands, case.chunk)
    c = np.zeros((m, n))
    if case.operands != "memory":
        a, b = str(folder / "A.zarr"), str(folder / "B.zarr")
    usual = {"device_memory": case.device, "host_memory": case.host, "backend": backend} | case.options

    def run(settings: dict[str, Any]) -> oocgemm.Result:
        # Write to as much memory as the run needs, so that a virtual machine obtains it before the run.
        np.empty(parse_size(case.host), np.uint8)[::4096] = 0
        with evicting(folder, case.cold):
            return oocgemm.gemm(a, b, c=c, timeline=folder / "run.jsonl", **settings)

    def summarised(result: oocgemm.Result) -> dict[str, Any]:
        timeline, figures = result.timeline, result.report
        diagnosis = diagnose(timeline, figures)
        fitted = fit(timeline, figures)
        advised = remedy(timeline, figures, diagnosis, fitted)
        return {
            "bound": diagnosis.verdict.bound,
            "lines": diagnosis_lines(figures, timeline, advise=True),
            "settings": dict(advised.settings),
            "change": advised.change,
            "promised": None if advised.seconds is None else 1 - advised.seconds / figures.wall,
            "modelled_seconds": fitted.seconds(fitted.plan) if fitted else None,
            "seconds": figures.wall,
            "lanes": figures.lanes,
            "exposed": figures.exposed,
            "plan": {
                x: result.timeline.header["plan"][x] for x in ("tile", "tiles", "slots", "predicted_seconds")
            },
        }

    run(usual)  # This warm-up loads libraries and obtains memory, so that the timed runs do not.
    first = summarised(run(usual))
    print(*first["lines"], sep="\n  ", flush=True)
    print("  ", first["plan"], {x: round(lane["busy"], 3) for x, lane in first["lanes"].items()}, flush=True)
    before, after, summaries = [], [], [first]
    changed: dict[str, Any] = {}
    if first["settings"]:
        run(usual | first["settings"])
    for _ in range(rounds):
        summaries.append(summarised(run(usual)))
        before.append(summaries[-1]["seconds"])
        if first["settings"]:
            changed = summarised(run(usual | first["settings"]))
            after.append(changed["seconds"])
    gained = 1 - statistics.median(after) / statistics.median(before) if after else None
    promised = first["promised"]
    found = {
        "what": f"{m} x {n} x {k} float64, operands {case.operands}, device {case.device}, host {case.host}",
        "expected": case.bounds,
        "bounds": [one["bound"] for one in summaries],
        "right": all(one["bound"] in case.bounds for one in summaries),
        "promised": promised,
        "promised_in_each": [one["promised"] for one in summaries],
        "gained": gained,
        "within": abs(gained / promised - 1) <= MAX_GAIN_ERROR if gained is not None and promised else None,
        "seconds_before": before,
        "seconds_after": after,
        "before": first,
        "after": changed,
    }
    print({x: found[x] for x in ("bounds", "right", "promised_in_each", "gained", "within")}, flush=True)
    print("  ", before, after, changed.get("plan"), flush=True)
    print("  ", {x: round(lane["busy"], 3) for x, lane in changed.get("lanes", {}).items()}, flush=True)
    return found


@click.command()
@click.argument("cases", nargs=-1, type=click.Choice(list(CASES)))
@click.option("--folder", type=click.Path(path_type=Path), default=Path("bench-diagnosis"), show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--backend", default="cuda", show_default=True)
@click.option("--shrink", default=1, show_default=True, help="Divide all extents by this, for a quick trial.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("scripts/bench/results/bench_diagnosis.json"),
    show_default=True,
)
def main(cases: tuple[str, ...], folder: Path, rounds: int, backend: str, shrink: int, output: Path) -> None:
    for name in cases or CASES:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started = time.perf_counter()
        print(name, flush=True)
        found = measure(CASES[name], folder, rounds, backend, shrink)
        shutil.rmtree(folder)
        print(f"  {time.perf_counter() - started:.0f} s in total", flush=True)
        known = json.loads(output.read_text()) if output.exists() else {}
        output.write_text(json.dumps(known | {name: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
