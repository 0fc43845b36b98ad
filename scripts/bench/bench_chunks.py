#!/usr/bin/env python
"""Measure how fast zarr arrays of small and large chunks are read into slots, and what limits it.

Float32 matrices are stored with several codecs and chunk sizes. They are read panel by panel, with the page
cache warm:

- ours: the parts of a panel are read by two threads, as in a run.
- zarr: `array[rows, columns]` of zarr-python, with its own threads.
- loop: two threads open, read, decode and copy one chunk at a time, with numcodecs and NumPy.
- codec: two threads only decode the chunks, with numcodecs, from memory into memory that stays in the
  processor's cache. This is the most that numcodecs allows.

Rates are in bytes of elements per second. The ways take turns, and each counts with its fastest panel.

With --product, T of a product of arrays with zarr's default codec and chunks is compared with T of the same
product of uncompressed arrays.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numcodecs
import numpy as np
import zarr
from keeping import keep, output, work
from panel_reads import PANEL, THREADS, in_threads, ours, panels, seconds
from zarr.codecs import BloscCodec

import oocgemm
from oocgemm.planning.units import format_size
from oocgemm.stores import Array, open_matrix, pieces

CHUNKS = {"64 KiB": (128, 128), "256 KiB": (256, 256), "1 MiB": (512, 512), "8 MiB": (1024, 2048)}
# Codecs: how zarr names them, and how numcodecs does.
CODECS: dict[str, tuple[Any, Any]] = {
    "raw": (None, None),
    "zstd": ("auto", numcodecs.Zstd(0)),  # zarr's default
    "blosc-lz4": (BloscCodec(cname="lz4"), numcodecs.Blosc()),
    "blosc-zstd": (BloscCodec(cname="zstd"), numcodecs.Blosc()),
}


def data(kind: str, shape: tuple[int, int]) -> Array:
    """Return a matrix: numbers of 12 bits each, or mostly zeros, such as counts of cells and genes."""
    rng = np.random.default_rng(0)
    if kind == "12 bits":
        return (rng.integers(0, 1 << 12, shape) / 4096).astype("f4")
    return np.where(rng.random(shape, "f4") < 0.1, rng.integers(1, 64, shape), 0).astype("f4")


def chunks_of(
    folder: Path, shape: tuple[int, int], chunk: tuple[int, int], slot: Array
) -> list[list[tuple[Path, Array]]]:
    """Return for each panel the files of its chunks, and the view of the slot for each."""
    out = slot.reshape(PANEL, PANEL)
    return [
        [
            (folder / "c" / str(r[0] // chunk[0]) / str(c[0] // chunk[1]), view)
            for r, c in pieces(rows, cols, chunk, 1)
            for view in [out[r[0] - rows[0] : r[1] - rows[0], c[0] - cols[0] : c[1] - cols[0]]]
        ]
        for rows, cols in panels(shape)
    ]


def measure(
    values: Array, codec: str, chunk: tuple[int, int], folder: Path, pool: ThreadPoolExecutor, budget: float
) -> dict[str, Any]:
    """Store a matrix with a codec and chunks, and measure the ways to read it. Return rates in bytes/s."""
    compressors, decoder = CODECS[codec]
    place = folder / f"{codec}-{chunk[0]}.zarr"
    array = zarr.create_array(place, data=values, chunks=chunk, compressors=compressors)
    matrix, slot = open_matrix("A", str(place)), np.ones(PANEL * PANEL, values.dtype)
    listed = chunks_of(place, values.shape, chunk, slot)
    local = threading.local()

    def decode(stored: bytes) -> Array:
        if not hasattr(local, "memory"):
            local.memory = np.ones(chunk, values.dtype)
        decoder.decode(stored, out=local.memory)
        return local.memory

    def read(path: Path, view: Array) -> None:
        stored = path.read_bytes()
        view[...] = decode(stored) if decoder else np.frombuffer(stored, values.dtype).reshape(chunk)

    def loop() -> Iterator[None]:
        for panel in listed:
            in_threads(pool, THREADS, read, panel)
            yield

    def with_zarr() -> Iterator[None]:
        for rows, cols in panels(values.shape):
            array[slice(*rows), slice(*cols)]
            yield

    in_memory = [[(path.read_bytes(),) for path, _ in panel] for panel in listed] if decoder else []

    def codec_alone() -> Iterator[None]:
        for panel in in_memory:
            in_threads(pool, THREADS, decode, panel)
            yield

    ways: dict[str, Callable[[], Iterator[None]]] = {
        "ours": lambda: ours(matrix, slot, pool),
        "zarr": with_zarr,
        "loop": loop,
    }
    if decoder:
        ways["codec"] = codec_alone
    measured = seconds(ways, budget)
    stored = sum(path.stat().st_size for panel in listed for path, _ in panel)
    return {
        "chunk_bytes": chunk[0] * chunk[1] * values.itemsize,
        "compression": values.nbytes / stored,
        "rates": {name: slot.nbytes / times["wall"] for name, times in measured.items()},
        "seconds": measured,
    }


def product(n: int, turns: int, folder: Path) -> dict[str, Any]:
    """Multiply matrices as zarr stores them by default, and uncompressed ones. Return the times T of each."""
    paths = {kind: [str(folder / f"{kind}-{name}.zarr") for name in "AB"] for kind in ("default", "raw")}
    for number in range(2):
        values = data("12 bits", (n, n)) + np.float32(number)
        zarr.create_array(paths["default"][number], data=values)
        zarr.create_array(paths["raw"][number], data=values, compressors=None)
    found: dict[str, Any] = {"n": n, "chunk": zarr.open_array(paths["default"][0]).chunks, "seconds": {}}
    c = np.ones((n, n), "f4")
    for turn in range(turns + 1):
        for kind, (a, b) in paths.items():
            started = time.perf_counter()
            oocgemm.gemm(a, b, c, backend="host")
            if turn:  # the first turn faults memory in
                found["seconds"].setdefault(kind, []).append(time.perf_counter() - started)
                print(f"{kind} {found['seconds'][kind][-1]:.2f} s", flush=True)
    times = found["seconds"]
    return found | {"ratios": [x / y for x, y in zip(times["default"], times["raw"], strict=True)]}


@click.command()
@click.option("--product", "n", type=int, help="Measure only a product of this size.")
@click.option("--turns", default=3, show_default=True, help="How often the product is measured.")
@click.option(
    "--size", default=4096, show_default=True, help="Columns of the matrix; it has half as many rows."
)
@click.option(
    "--seconds", "budget", default=1.5, show_default=True, help="How long each array is measured, at least."
)
@work
@output
def main(n: int | None, turns: int, size: int, budget: float, work: Path | None, output: Path | None) -> None:
    """Measure all codecs and chunk sizes, or a product, and print and store the rates or times."""
    if n is not None:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            keep(output, "product", product(n, turns, Path(folder)) | {"load": os.getloadavg()[1]})
        return
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for kind in ("12 bits", "mostly zeros"):
            values = data(kind, (size // 2, size))
            print(f"{kind}: {size // 2} x {size} float32, {format_size(values.nbytes)}")
            for codec in CODECS:
                for name, chunk in CHUNKS.items():
                    if codec == "raw" and kind != "12 bits":
                        continue
                    with tempfile.TemporaryDirectory(dir=work) as folder:
                        case = measure(values, codec, chunk, Path(folder), pool, budget)
                    found[f"{kind}, {codec}, {name}"] = {"data": kind, "codec": codec, "chunk": name} | case
                    rates = (f"{way} {rate / 1e9:.2f}" for way, rate in case["rates"].items())
                    print(f"{codec:10} {name:8}", *rates, "GB/s", flush=True)
    keep(
        output,
        "chunks",
        {"rows": size // 2, "columns": size, "panel": PANEL, "load": os.getloadavg()[1], "arrays": found},
    )


if __name__ == "__main__":
    main()
