#!/usr/bin/env python
"""Measure products whose C the GPU compresses, beside the host, and beside an uncompressed C.

A and B are in memory. C is a new zarr array each time. All ways of storing C take turns.
"""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from keeping import keep, output, work

import oocgemm
from oocgemm import backends
from oocgemm.stores import Array

CODECS = "blosc-lz4", "blosc-zstd", "zstd"
# dtype, shape m x k x n, and what A and B consist of.
CASES = {
    "float64, integers": ("f8", (24576, 2048, 24576), "integers"),
    "float64, normal": ("f8", (24576, 2048, 24576), "normal"),
    "float32, normal": ("f4", (32768, 2048, 32768), "normal"),
}


def elements(rng: np.random.Generator, dtype: str, kind: str, shape: tuple[int, int]) -> Array:
    """Draw integers of three bits, or numbers of the normal distribution."""
    if kind == "integers":
        return rng.integers(0, 8, shape, np.int8).astype(dtype)
    return rng.standard_normal(shape, np.float32).astype(dtype)


def multiply(a: Array, b: Array, path: Path, way: str, memory: str) -> tuple[float, int, str]:
    """Store a product. Return the seconds, the bytes of the files, and how the GPU compressed C."""
    codec, _, by = way.partition(", ")
    shutil.rmtree(path, ignore_errors=True)
    given: dict[str, Any] = {"backend": "cuda", "device_memory": memory, "host_memory": memory}
    started = time.perf_counter()
    if by == "host":
        with patch("oocgemm.jobs.prepare.codec_of_c", lambda *_: ""):
            result = oocgemm.gemm(a, b, str(path), compressor=codec, **given)
    else:
        result = oocgemm.gemm(a, b, str(path), compressor=codec, **given)
    seconds = time.perf_counter() - started
    size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    shutil.rmtree(path)
    return seconds, size, result.plan.layouts.c.encoded


def measure(name: str, folder: Path, memory: str, repeats: int) -> Mapping[str, Any]:
    """Run a product in all ways, in turns. Return the seconds of each run, and the sizes."""
    dtype, (m, k, n), kind = CASES[name]
    rng = np.random.default_rng(0)
    a, b = elements(rng, dtype, kind, (m, k)), elements(rng, dtype, kind, (k, n))
    ways = ["none", *(f"{codec}, {by}" for codec in CODECS for by in ("gpu", "host"))]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sizes: dict[str, int] = {}
    for turn in range(repeats + 1):  # the first turn loads libraries, and is left out
        for way, times in seconds.items():
            taken, sizes[way], encoded = multiply(a, b, folder / "C.zarr", way, memory)
            assert (encoded != "") == way.endswith("gpu"), f"{way}: compressed by the GPU: {encoded!r}"
            if turn:
                times.append(taken)
    size = m * n * np.dtype(dtype).itemsize
    for way, times in seconds.items():
        print(f"{name:20} {way:18} {min(times):.3f} s, stored {sizes[way] / size:.3f}", flush=True)
    return {"shape": [m, k, n], "bytes": size, "stored": sizes, "seconds": seconds}


@click.command()
@click.option("--memory", default="40GiB", show_default=True, help="Device and host budget.")
@click.option("--repeats", default=2, show_default=True, help="Turns that count.")
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="Only these products.")
@work
@output
def main(memory: str, repeats: int, names: tuple[str, ...], work: Path | None, output: Path | None) -> None:
    """Measure the products, and print and store their times."""
    found: dict[str, Any] = {}
    device = backends.open_backend("cuda").describe()["device"]
    for name in names or CASES:
        with TemporaryDirectory(dir=work) as folder:
            found[name] = measure(name, Path(folder), memory, repeats)
        keep(output, "encoding", {"device": device, "memory": memory, "products": found})


if __name__ == "__main__":
    main()
