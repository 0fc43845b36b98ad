#!/usr/bin/env python
"""Measure products of compressed arrays that the GPU decodes, beside the host.

Each product runs in turns with decoding by the GPU, where the plan chooses it, and with decoding by the host.
int8 genotypes, and float32 matrices with zarr's default codec and chunks, are also multiplied uncompressed,
from the page cache. Arrays are filled with copies of a few chunks, since only their number matters.
"""

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import zarr
from keeping import keep, output, work
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

import oocgemm
from oocgemm import backends
from oocgemm.stores import Array

DISTINCT = 8  # chunks with different elements
THREADS = 16


@dataclass(frozen=True)
class Case:
    """A product: of A and B, or of X and its transpose if X is int8.

    `chunk` are rows and columns of a chunk. `codecs` are zarr's compressors, None for none. float32 matrices
    have `SQUARE` rows and columns, and the default chunks of zarr for these.
    """

    dtype: str
    chunk: tuple[int, int]
    codecs: Any


SQUARE = 32768
SMALLER = 4  # k of the first product, which is left out, is smaller by this factor
SHUFFLED = BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")
BITS = BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle")
LZ4 = BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")
ZSTD = ZstdCodec(level=0)  # the default of zarr
CHECKED = Crc32cCodec()
CASES = {
    "float64, blosc-zstd, 8 MiB": Case("f8", (1024, 1024), [SHUFFLED]),
    "float64, blosc-zstd and crc32c, 8 MiB": Case("f8", (1024, 1024), [SHUFFLED, CHECKED]),
    "float64, blosc-lz4, 8 MiB": Case("f8", (1024, 1024), [LZ4]),
    "float64, zstd, 1 MiB": Case("f8", (512, 256), [ZSTD]),
    "float64, zstd, 8 MiB": Case("f8", (1024, 1024), [ZSTD]),
    "int8, blosc-zstd with bitshuffle, 8 MiB": Case("i1", (2048, 4096), [BITS]),
    "int8, uncompressed, 8 MiB": Case("i1", (2048, 4096), None),
    "float32, zarr's default: zstd, 4 MiB": Case("f4", (1024, 1024), [ZSTD]),
    "float32, uncompressed, 4 MiB": Case("f4", (1024, 1024), None),
}


def elements(rng: np.random.Generator, dtype: str, shape: tuple[int, int]) -> Array:
    """Draw numbers of six bits, or genotypes."""
    if dtype != "i1":
        return rng.integers(0, 64, shape).astype(dtype)
    return rng.choice(np.array([0, 1, 2, -1], np.int8), shape, p=[0.6, 0.25, 0.13, 0.02])


def store(path: Path, case: Case, shape: tuple[int, int]) -> int:
    """Store an array, whose extents are multiples of the chunk. Return the bytes of its files."""
    rng, (height, width) = np.random.default_rng(0), case.chunk
    with TemporaryDirectory(dir=path.parent) as name:
        few = zarr.create_array(
            f"{name}/x", shape=(height, DISTINCT * width), dtype=case.dtype, chunks=case.chunk,
            compressors=case.codecs,
        )  # fmt: skip
        few[:] = elements(rng, case.dtype, few.shape)
        chunks = [Path(name, "x", "c", "0", str(j)).read_bytes() for j in range(DISTINCT)]
    zarr.create_array(str(path), shape=shape, dtype=case.dtype, chunks=case.chunk, compressors=case.codecs)
    rows, cols = shape[0] // height, shape[1] // width
    for i in range(rows):
        (path / "c" / str(i)).mkdir(parents=True)

    def write(number: int) -> int:
        i, j = divmod(number, cols)
        return (path / "c" / str(i) / str(j)).write_bytes(chunks[(i + j) % DISTINCT])

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(write, range(rows * cols)))


def product(folder: Path, case: Case, k: int, memory: str) -> tuple[Callable[[], Any], int, int]:
    """Store the operands. Return a function that multiplies them, their bytes, and those of their files."""
    folder.mkdir(exist_ok=True)
    budgets: dict[str, Any] = {"backend": "cuda", "device_memory": memory, "host_memory": memory}
    if case.dtype == "i1":
        rows = 10 * case.chunk[0]
        size = store(folder / "X", case, (rows, k))
        return lambda: oocgemm.gram(str(folder / "X"), uplo="lower", **budgets), rows * k, size
    rows = SQUARE if case.dtype == "f4" else 4096
    size = store(folder / "A", case, (rows, k)) + store(folder / "B", case, (k, rows))
    width = np.dtype(case.dtype).itemsize
    return lambda: oocgemm.gemm(str(folder / "A"), str(folder / "B"), **budgets), 2 * rows * k * width, size


def measure(name: str, folder: Path, k: int, memory: str, repeats: int) -> Mapping[str, Any]:
    """Run a product in turns with both decoders. Return the seconds of each run, and what was planned."""
    multiply, size, stored = product(folder, CASES[name], k, memory)
    decoders = ("gpu", "host") if CASES[name].codecs else ("host",)
    seconds: dict[str, list[float]] = {decoder: [] for decoder in decoders}
    decoded, traces = "", set[float]()
    product(folder / "small", CASES[name], k // SMALLER, memory)[0]()  # loads libraries
    for _ in range(repeats):
        for decoder, times in seconds.items():
            started = time.perf_counter()
            if decoder == "host":
                with patch("oocgemm.jobs.prepare.codings", lambda *_: {}):
                    result = multiply()
            else:
                result = multiply()
                decoded = result.plan.decoded
            times.append(time.perf_counter() - started)
            traces.add(float(np.trace(np.asarray(result.out), dtype=np.float64)))
    # Sums of float32 in another order are rounded differently.
    assert max(traces) - min(traces) <= 1e-6 * max(traces), f"the products differ: {traces}"
    print(f"{name:42} stored {stored / size:.3f}, decoded by the GPU: {decoded or '-'}")
    for decoder, times in seconds.items():
        each = ", ".join(f"{t:.3f}" for t in times)
        print(f"    {decoder:5} {min(times):.3f} s ({each}), {size / min(times) / 1e9:.1f} GB/s", flush=True)
    return {"k": k, "bytes": size, "stored": stored, "decoded": decoded, "seconds": seconds}


@click.command()
@click.option("--k", default=1 << 20, show_default=True, help="k of the float64 products.")
@click.option("--k-int8", default=1 << 19, show_default=True, help="k of the int8 products.")
@click.option("--memory", default="40GiB", show_default=True, help="Device and host budget.")
@click.option("--repeats", default=3, show_default=True, help="Runs with each decoder that count.")
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="Only these products.")
@work
@output
def main(
    k: int,
    k_int8: int,
    memory: str,
    repeats: int,
    names: tuple[str, ...],
    work: Path | None,
    output: Path | None,
) -> None:
    """Measure the products, and print and store their times."""
    found: dict[str, Any] = {}  # with what earlier calls have added to the file
    if output is not None and output.exists():
        found = json.loads(output.read_text())["decoding"]["products"]
    device = backends.open_backend("cuda").describe()["device"]
    for name in names or CASES:
        with TemporaryDirectory(dir=work) as folder:
            depth = {"f8": k, "i1": k_int8, "f4": SQUARE}[CASES[name].dtype]
            found[name] = measure(name, Path(folder), depth, memory, repeats)
        keep(output, "decoding", {"device": device, "memory": memory, "products": found})


if __name__ == "__main__":
    main()
