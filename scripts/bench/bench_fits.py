"""Measure `lstsq`, `ridge`, `svd` and Spearman's correlations beside a Gram matrix of X, and beside NumPy.

    python scripts/bench/bench_fits.py --backend cuda --shape 2000000x1000
    python scripts/bench/bench_fits.py --backend host --shape 200000x200

X is a float32 zarr array without compression, which the page cache holds, and y one of a column. All
contenders run by turns in one process. The unit is `gram`: X^T X in float64. The others are

- "numpy loop": X^T X and X^T y in float64 from blocks of rows, and `numpy.linalg.solve`: one read.
- "dask": `dask.array.linalg.qr` in float64, as its lstsq does, on the host, where it is installed.

The first round is not counted. The results go to a JSON file with a key per case.
"""

import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import zarr
from bench_neighbors import device
from keeping import keep, output, work

import oocgemm

Array = Any
BLOCK = 8192
# Elements of X above which contenders on the host are left out.
MOST = 1e9


def stored(folder: Path, rows: int, cols: int) -> tuple[str, str]:
    """Store X and y; return their paths."""
    x, y = folder / "x.zarr", folder / "y.zarr"
    chunks: dict[str, Any] = {"dtype": "float32", "compressors": None}
    of_x = zarr.create_array(x, shape=(rows, cols), chunks=(min(rows, BLOCK), cols), **chunks)
    of_y = zarr.create_array(y, shape=(rows, 1), chunks=(min(rows, BLOCK), 1), **chunks)
    rng = np.random.default_rng(0)
    for top in range(0, rows, BLOCK):
        block = rng.standard_normal((min(BLOCK, rows - top), cols), np.float32)
        of_x[top : top + BLOCK] = block
        of_y[top : top + BLOCK] = block.sum(axis=1, keepdims=True) + 1
    return str(x), str(y)


def by_blocks(x: str, y: str) -> Array:
    """Solve the normal equations, summed over blocks of rows."""
    of_x, of_y = (zarr.open_array(path, mode="r") for path in (x, y))
    cols = of_x.shape[1]
    gram, right = np.zeros((cols, cols)), np.zeros((cols, 1))
    for top in range(0, of_x.shape[0], BLOCK):
        block = np.asarray(of_x[top : top + BLOCK]).astype(np.float64)
        gram += block.T @ block
        right += block.T @ np.asarray(of_y[top : top + BLOCK])
    return np.linalg.solve(gram, right)


def by_dask(x: str, y: str) -> Array:
    dask: Any = importlib.import_module("dask.array")
    a, b = (dask.from_zarr(path).astype("float64") for path in (x, y))
    q, r = dask.linalg.qr(a)
    triangle, right = importlib.import_module("dask").compute(r, q.T @ b)
    return np.linalg.solve(triangle, right)


def contenders(x: str, y: str, backend: str, *, small: bool) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by its name."""
    how: dict[str, Any] = {"backend": backend}
    wide = oocgemm.Transform(cast="float64")
    run: dict[str, Callable[[], Any]] = {
        "gram": lambda: oocgemm.gram(x, axis=1, transform=wide, **how),
        "lstsq, one read": lambda: oocgemm.lstsq(x, y, refine=False, **how),
        "lstsq": lambda: oocgemm.lstsq(x, y, **how),
        "lstsq, intercept": lambda: oocgemm.lstsq(x, y, intercept=True, **how),
        "ridge, three penalties": lambda: oocgemm.ridge(x, y, [0.1, 1, 10], **how),
        "svd, k = 20": lambda: oocgemm.svd(x, 20, **how),
        "svd, k = 20, with U": lambda: oocgemm.svd(x, 20, u=True, **how),
    }
    if small:
        run["numpy loop"] = lambda: by_blocks(x, y)
        if importlib.util.find_spec("dask") is not None:
            run["dask"] = lambda: by_dask(x, y)
    return run


@click.command()
@click.option("--backend", default="cuda", show_default=True)
@click.option("--shape", multiple=True, default=("2000000x1000",), show_default=True)
@click.option("--rounds", default=3, show_default=True)
@work
@output
def main(backend: str, shape: tuple[str, ...], rounds: int, work: Path | None, output: Path | None) -> None:
    """Measure all cases."""
    for each in shape:
        rows, cols = map(int, each.split("x"))
        with TemporaryDirectory(dir=work) as folder:
            x, y = stored(Path(folder), rows, cols)
            run = contenders(x, y, backend, small=rows * cols <= MOST)
            seconds: dict[str, list[float]] = {name: [] for name in run}
            errors: dict[str, float] = {}
            for turn in range(rounds + 1):
                for name, act in run.items():
                    begun = time.perf_counter()
                    found = act()
                    if turn:
                        seconds[name].append(time.perf_counter() - begun)
                    elif name.startswith(("lstsq", "numpy", "dask")):
                        b = getattr(found, "coefficients", found)
                        errors[name] = float(np.abs(np.asarray(b) - 1).max())
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        kept = {"to_gram": {name: taken / medians["gram"] for name, taken in medians.items()}}
        kept |= {"median_seconds": medians, "errors": errors}
        case = f"{backend} float32 {rows}x{cols}"
        place = output or Path("scripts/bench/results/bench_fits.json")
        keep(place, case, kept | {"seconds": seconds, "device": device(backend)})
        print(case, json.dumps(kept, indent=1), flush=True)


if __name__ == "__main__":
    main()
