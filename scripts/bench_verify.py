#!/usr/bin/env python
"""What it costs to check every tile (`--verify`) and to keep a journal: the same product with and without, in turns.

Operands of normal random numbers, in memory or as zarr arrays of uncompressed chunks. From memory the contenders are a
plain run and a verified one; from disk a run without a journal, one with, and one with both.
Ratios are of runs in the same round, in changing order. Samples go to a JSON file, a key a case; cases of other
invocations are kept.
"""

import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import zarr

import oocgemm
from oocgemm import stores

CHUNK = 1024


def filled(rng: np.random.Generator, n: int, dtype: str) -> Any:
    """Normal random numbers, drawn once for some rows and shifted for the others."""
    x, drawn = np.empty((n, n), dtype), rng.standard_normal((CHUNK, n)).astype(dtype)
    for top in range(0, n, CHUNK):
        x[top : top + CHUNK] = np.roll(drawn, top + 1, axis=1)[: n - top]
    return x


def stored(folder: Path, name: str, x: Any) -> Path:
    options: dict[str, Any] = {"chunks": (CHUNK, CHUNK), "compressors": None, "overwrite": True}
    zarr.create_array(folder / name, data=x, **options)
    return folder / name


class Case:
    """One product, run in several ways."""

    def __init__(self, n: int, dtype: str, folder: Path | None, options: dict[str, Any]) -> None:
        rng = np.random.default_rng(0)
        a, b = filled(rng, n, dtype), filled(rng, n, dtype)
        self.ways = ("plain", "verify") if folder is None else ("plain", "journal", "journal and verify")
        self._options = options
        self._folder = folder
        self._n, self._dtype = n, dtype
        self._a: Any
        self._b: Any
        self._a, self._b = (a, b) if folder is None else (stored(folder, "A", a), stored(folder, "B", b))
        self._c = np.zeros((n, n), dtype) if folder is None else None

    def run(self, way: str) -> oocgemm.Result:
        options = self._options | {"verify": "verify" in way}
        if self._folder is None:
            return oocgemm.matmul(self._a, self._b, out=self._c, **options)
        place = self._folder / "C"
        shutil.rmtree(place, ignore_errors=True)
        kept = stores.sidecar if "journal" in way else lambda source: None
        with patch.object(stores, "sidecar", kept):
            return oocgemm.matmul(self._a, self._b, out=place, **options)


@click.command()
@click.option("--backend", default="auto", show_default=True)
@click.option("--size", default=6000, show_default=True)
@click.option("--dtype", default="float64", show_default=True, type=click.Choice(["float32", "float64"]))
@click.option("--device-memory", default="600MiB", show_default=True)
@click.option("--host-memory", default="400MiB", show_default=True)
@click.option(
    "--folder", type=click.Path(file_okay=False), help="Zarr to zarr in this folder.  [default: in memory]"
)
@click.option("--repeats", default=7, show_default=True)
@click.option("--seconds", default=600.0, show_default=True, help="Begin no further round after so long.")
@click.option("--output", type=click.Path(), default="scripts/results/bench_verify.json", show_default=True)
def main(
    backend: str,
    size: int,
    dtype: str,
    device_memory: str,
    host_memory: str,
    folder: str | None,
    repeats: int,
    seconds: float,
    output: str,
) -> None:
    options = {"backend": backend, "device_memory": device_memory, "host_memory": host_memory}
    place = Path(folder) if folder else None
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    case = Case(size, dtype, place, options)
    samples: dict[str, list[float]] = {way: [] for way in case.ways}
    checks: list[dict[str, Any]] = []
    started = time.monotonic()
    for turn in range(repeats + 1):  # the first is not counted
        if turn > 1 and time.monotonic() - started > seconds:
            break
        order = case.ways if turn % 2 else case.ways[::-1]
        for way in order:
            result = case.run(way)
            if turn:
                samples[way].append(result.report.wall)
                if result.report.checks is not None:
                    checks.append(result.report.checks)
            print(f"{way} {result.report.wall:.3f} s", flush=True)
    ratios = {
        way: sorted(with_it / plain for with_it, plain in zip(samples[way], samples["plain"], strict=True))
        for way in case.ways[1:]
    }
    header = result.timeline.header
    found = {
        "what": f"{size}^3 {dtype}, {'zarr to zarr' if folder else 'in memory'}, device memory {device_memory}, host memory "
        f"{host_memory}",
        "machine": header["machine"] | header["backend"],
        "versions": header["versions"],
        "plan": result.plan.to_dict(),
        "samples_seconds": samples,
        "over_plain": {
            way: {"min": values[0], "median": statistics.median(values), "max": values[-1]}
            for way, values in ratios.items()
        },
        "best_over_best": {way: min(samples[way]) / min(samples["plain"]) for way in ratios},
        "checks": checks[-1],
    }
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    cases = json.loads(path.read_text()) if path.exists() else {}
    key = f"{header['backend']['name']} {dtype} {size} {'zarr' if folder else 'memory'}"
    path.write_text(json.dumps(cases | {key: found}, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("over_plain", "best_over_best", "checks")}, indent=1))


if __name__ == "__main__":
    main()
