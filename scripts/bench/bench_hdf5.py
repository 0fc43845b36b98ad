#!/usr/bin/env python
"""Measure how fast HDF5 datasets are read into slots, by oocgemm and by h5py.

A float32 matrix is stored in several layouts. It is read panel by panel, with the page cache warm:

- ours: the parts of a panel are read by two threads, as in a run.
- h5py: `Dataset.read_direct` into the panel, with a chunk cache that fits a row of chunks. The faster of one
  and two threads counts.
- npy: the same elements in a .npy file, by oocgemm.

Rates are in bytes of elements per second. The ways take turns, and each counts with its fastest panel. Rates
per second of processor time say what a way costs, also where other programs use the cores.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import h5py
import hdf5plugin
import numpy as np
from keeping import keep, output, work
from panel_reads import PANEL, THREADS, ours, panels, seconds

from oocgemm.planning.units import format_size
from oocgemm.stores import Array, open_matrix

LARGE = (1024, 1024)  # chunks of 4 MiB
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "raw": {"chunks": LARGE},
    "gzip + shuffle": {"chunks": LARGE, "compression": "gzip", "shuffle": True},
    "blosc-lz4": {"chunks": LARGE, **hdf5plugin.Blosc(cname="lz4", shuffle=1)},
    "blosc-zstd": {"chunks": LARGE, **hdf5plugin.Blosc(cname="zstd", clevel=1, shuffle=1)},
    "zstd": {"chunks": LARGE, **hdf5plugin.Zstd(clevel=1)},
    "bitshuffle-lz4": {"chunks": LARGE, **hdf5plugin.Bitshuffle(cname="lz4")},
    "raw, chunks of 64 KiB": {"chunks": (128, 128)},
    "gzip + shuffle, chunks of 64 KiB": {"chunks": (128, 128), "compression": "gzip", "shuffle": True},
}


def with_h5py(path: Path, slot: Array, pool: ThreadPoolExecutor, threads: int, row: int) -> Iterator[None]:
    """Read the panels of a dataset with h5py. With two threads, each reads half of the rows of a panel."""
    with h5py.File(path, rdcc_nbytes=max(row, 1 << 20), rdcc_nslots=10007) as file:
        dataset, out, step = file["x"], slot.reshape(PANEL, PANEL), PANEL // threads

        def read(top: int, left: int, first: int) -> None:
            source = np.s_[top + first : top + first + step, left : left + PANEL]
            dataset.read_direct(out, source, np.s_[first : first + step, :])

        for (top, _), (left, _) in panels(dataset.shape):
            tasks = [pool.submit(read, top, left, first) for first in range(0, PANEL, step)]
            for task in tasks:
                task.result()
            yield


def measure(
    layout: str, values: Array, folder: Path, pool: ThreadPoolExecutor, budget: float
) -> dict[str, Any]:
    """Store the matrix in a layout, and measure the ways to read it. Return rates in bytes/s."""
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, **LAYOUTS[layout])
    stored = path.stat().st_size
    slot = np.ones(PANEL * PANEL, values.dtype)
    matrix, npy = open_matrix("A", f"{path}::/x"), open_matrix("A", folder / "x.npy")
    row = LAYOUTS[layout].get("chunks", (1, 1))[0] * values.shape[1] * values.itemsize
    ways: dict[str, Callable[[], Iterator[None]]] = {
        "ours": lambda: ours(matrix, slot, pool),
        "h5py, 1 thread": lambda: with_h5py(path, slot, pool, 1, row),
        "h5py, 2 threads": lambda: with_h5py(path, slot, pool, 2, row),
    }
    if layout == "contiguous":
        ways["npy"] = lambda: ours(npy, slot, pool)
    measured = seconds(ways, budget)
    rates = {name: slot.nbytes / times["wall"] for name, times in measured.items()}
    best = max(rates["h5py, 1 thread"], rates["h5py, 2 threads"])
    print(f"{layout:34}", *(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items()), flush=True)
    print(f"{'of processor time':34}", *(f"{slot.nbytes / t['cpu'] / 1e9:.2f}" for t in measured.values()))
    os.unlink(path)
    return {
        "rates": rates,
        "seconds": measured,
        "ratio": rates["ours"] / best,
        "compression": values.nbytes / stored,
    }


def index(folder: Path, chunks: int) -> dict[str, Any]:
    """Measure how many seconds it takes to open a dataset of many chunks, in wall and processor time."""
    side = round(chunks**0.5)
    path = folder / "many.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.ones((side * 8, side * 8), "f4"), chunks=(8, 8))
    open_matrix("A", f"{path}::/x")
    wall, own = [], []
    for _ in range(5):
        started = time.perf_counter(), time.process_time()
        open_matrix("A", f"{path}::/x")
        wall.append(time.perf_counter() - started[0])
        own.append(time.process_time() - started[1])
    found = {"chunks": side * side, "seconds": min(wall), "cpu": min(own)}
    print(f"index: {found}")
    return found


@click.command()
@click.option(
    "--size", default=8192, show_default=True, help="Columns of the matrix; it has half as many rows."
)
@click.option(
    "--seconds", "budget", default=20.0, show_default=True, help="How long each layout is measured."
)
@work
@output
def main(size: int, budget: float, work: Path | None, output: Path | None) -> None:
    """Measure all layouts, and print and store the rates."""
    rng = np.random.default_rng(0)
    values = (rng.integers(0, 1 << 12, (size // 2, size)) / 4096).astype("f4")
    print(f"{size // 2} x {size} float32, {format_size(values.nbytes)}")
    with (
        tempfile.TemporaryDirectory(dir=work) as name,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        folder = Path(name)
        np.save(folder / "x.npy", values)
        found = {layout: measure(layout, values, folder, pool, budget) for layout in LAYOUTS}
        keep(
            output,
            "hdf5",
            {
                "rows": size // 2,
                "columns": size,
                "panel": PANEL,
                "load": os.getloadavg()[1],
                "layouts": found,
                "index": index(folder, 102_400),
            },
        )


if __name__ == "__main__":
    main()
