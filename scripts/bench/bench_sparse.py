"""Measure products of sparse matrices: on the host beside scipy, on a GPU principal components.

    python scripts/bench/bench_sparse.py host --rows 20000 --columns 1000
    python scripts/bench/bench_sparse.py pca --rows 1300000 --columns 5000 --device-memory 8GiB

`host` computes X^T X of a CSR matrix by `gram` and by scipy's ``X.T @ X``, by turns, in one process. X is in
memory, and in a h5ad file that the page cache has. The results are compared: elements are small integers, so
that they are equal. `pca` writes a CSR matrix of counts to zarr as AnnData does, and finds its components
three times. Counts follow factors whose variances decay, with noise. Some singular values are compared with
the norms of X v, computed by NumPy in float64 for the components v that were found.
"""

import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from keeping import keep, output, work
from numpy.typing import NDArray

import oocgemm

Array = NDArray[Any]
RESULTS = Path(__file__).resolve().parent / "results" / "bench_sparse.json"


def made(rows: int, columns: int, density: float, seed: int = 0) -> dict[str, Array]:
    """Return the parts of a CSR matrix of small integers in float32, with sorted indices."""
    rng = np.random.default_rng(seed)
    counts = rng.binomial(columns, density, rows)
    # Gaps of a geometric distribution give places in ascending order; those beyond the columns are left out.
    starts = np.append(0, np.cumsum(counts))
    indices = np.empty(starts[-1], np.int32)
    for top in range(0, rows, 4096):
        end = min(top + 4096, rows)
        keys = rng.random((end - top, columns), np.float32)
        order = np.argsort(keys, axis=1)
        kept = np.arange(columns) < counts[top:end, None]
        places = np.where(kept, order, columns)
        places.sort(axis=1)
        indices[starts[top] : starts[end]] = places[kept]
    data = rng.integers(1, 5, len(indices)).astype(np.float32)
    return {"data": data, "indices": indices, "indptr": starts}


def banded(rows: int, columns: int, density: float, seed: int = 0) -> dict[str, Array]:
    """Return parts like those of `made`, made faster: an entry in each of equal bands of columns."""
    rng, count = np.random.default_rng(seed), max(1, round(density * columns))
    width = columns // count
    indices = np.tile(np.arange(count, dtype=np.int32) * width, (rows, 1))
    indices += rng.integers(0, width, indices.shape, np.int8 if width < 128 else np.int32)
    # counts and a signal of a few dimensions, so that components are well separated
    signal = rng.integers(0, 4, rows, np.int32)[:, None] == (np.arange(count) % 7)
    data = (1 + rng.integers(0, 3, indices.shape, np.int8) + 3 * signal).astype(np.float32)
    return {"data": data.ravel(), "indices": indices.ravel(), "indptr": np.arange(rows + 1) * count}


# Rows that are made, written and checked at a time.
ROWS = 8192


class Cells:
    """A CSR matrix of counts in a zarr store: cells that follow factors whose variances decay, with noise.

    Each row has an entry in each of equal bands of columns, at a random place.
    """

    def __init__(self, path: Path, rows: int, columns: int, density: float, factors: int) -> None:
        self.shape, self.count = (rows, columns), max(1, round(density * columns))
        self._width, self._seed = columns // self.count, 7
        rng = np.random.default_rng(self._seed)
        self._loadings = rng.standard_normal((factors, columns), np.float32)
        self._loadings *= np.geomspace(1, 0.3, factors, dtype=np.float32)[:, None]
        attributes = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [rows, columns]}
        group = zarr.create_group(path, overwrite=True).create_group("X", attributes=attributes)
        made: dict[str, Any] = {"shape": rows * self.count, "chunks": ROWS * self.count, "compressors": None}
        self._data = group.create_array("data", dtype="f4", **made)
        self._indices = group.create_array("indices", dtype="i4", **made)
        group.create_array("indptr", data=np.arange(rows + 1) * self.count)
        self.address = f"{path}/X"
        self._each(self._make)

    def _each(self, act: Callable[[int, int], Any]) -> list[Any]:
        with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
            starts = range(0, self.shape[0], ROWS)
            return list(pool.map(lambda top: act(top, min(top + ROWS, self.shape[0])), starts))

    def _make(self, top: int, end: int) -> None:
        rng, shape = np.random.default_rng((self._seed, top)), (end - top, self.count)
        places = np.arange(self.count, dtype=np.int32) * self._width + rng.integers(
            0, self._width, shape, np.int8
        )
        rates = rng.standard_normal((end - top, len(self._loadings)), np.float32) @ self._loadings
        counts = 6 + np.take_along_axis(rates, places, 1) + rng.random(shape, np.float32)
        part = slice(top * self.count, end * self.count)
        self._data[part] = np.floor(np.maximum(counts, 1)).ravel()
        self._indices[part] = places.astype(np.int32).ravel()

    def norms(self, vectors: Array, means: Array) -> Array:
        """Return the norms of the products of X, with its columns centered, and vectors, in float64."""

        def squares(top: int, end: int) -> Array:
            part = slice(top * self.count, end * self.count)
            data, places = (np.asarray(x[part]).reshape(-1, self.count) for x in (self._data, self._indices))
            products = [np.einsum("ij,ij->i", data, v[places]) - means @ v for v in vectors]
            return np.array([np.einsum("i,i", x, x) for x in products])

        return np.sqrt(np.sum(self._each(squares), axis=0))


def write(path: Path, shape: tuple[int, int], parts: dict[str, Array], *, compressed: bool = False) -> str:
    """Write a CSR matrix in AnnData's format, to h5ad or zarr. Return its address."""
    attributes = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(shape)}
    if path.suffix == ".h5ad":
        import h5py

        with h5py.File(path, "w") as file:
            for name, part in parts.items():
                file.create_dataset(f"X/{name}", data=part, maxshape=(None,))
            file["X"].attrs.update(attributes)
        return f"{path}::/X"
    group = zarr.create_group(path, overwrite=True).create_group("X", attributes=attributes)
    for name, part in parts.items():
        group.create_array(name, data=part, **({} if compressed else {"compressors": None}))
    return f"{path}/X"


def check(folder: Path, columns: int, density: float, options: dict[str, Any]) -> None:
    """Compare the Gram matrix of a small matrix with NumPy's: elements are small integers."""
    parts, rows = banded(20_000, columns, density), 20_000
    dense = np.zeros((rows, columns), np.float32)
    dense[np.repeat(np.arange(rows), np.diff(parts["indptr"])), parts["indices"]] = parts["data"]
    for compressed in (False, True):
        path = write(folder / f"small{compressed}.zarr", dense.shape, parts, compressed=compressed)
        found = oocgemm.gram(path, axis=1, uplo="full", **options)
        assert np.array_equal(found.out, dense.T @ dense)
        print(f"checked, {found.plan.decoded or 'not'} decoded by the GPU", flush=True)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


@click.group()
def main() -> None:
    """Measure products of sparse matrices."""


@main.command()
@click.option("--rows", default=20000, show_default=True)
@click.option("--columns", default=1000, show_default=True)
@click.option("--density", default=[0.05, 0.1, 0.2], show_default=True, multiple=True)
@click.option("--rounds", default=5, show_default=True)
@work
@output
def host(
    rows: int, columns: int, density: tuple[float, ...], rounds: int, work: Path | None, output: Path | None
) -> None:
    """Compare with scipy on the CPU."""
    import scipy.sparse  # type: ignore[import-not-found]

    options: dict[str, Any] = {"axis": 1, "uplo": "full", "backend": "host"}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        for share in density:
            parts = made(rows, columns, share)
            x = scipy.sparse.csr_array((parts["data"], parts["indices"], parts["indptr"]), (rows, columns))
            path = write(Path(folder) / f"{share}.h5ad", (rows, columns), parts)
            calls: dict[str, Callable[[], Any]] = {
                "memory": lambda x=x: oocgemm.gram(x, **options).out,
                "h5ad": lambda path=path: oocgemm.gram(path, **options).out,
                "scipy": lambda x=x: (x.T @ x).toarray(),
            }
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            found = {name: call() for name, call in calls.items()}  # loads libraries
            assert all(np.array_equal(result, found["scipy"]) for result in found.values())
            for _ in range(rounds):
                for name, call in calls.items():
                    seconds[name].append(timed(call)[0])
            # Other programs slow down ours, which uses all cores, more than scipy, which uses one.
            least = {name: min(values) for name, values in seconds.items()}
            ratios = {name: round(least["scipy"] / least[name], 2) for name in ("memory", "h5ad")}
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            result = {"samples_seconds": seconds, "median_seconds": medians, "scipy_over_ours": ratios}
            print(f"density {share}", {k: round(v, 3) for k, v in least.items()}, ratios, flush=True)
            keep(output or RESULTS, f"host {rows}x{columns} {share}", result)


@main.command()
@click.option("--rows", default=1_300_000, show_default=True)
@click.option("--columns", default=5000, show_default=True)
@click.option("--density", default=0.05, show_default=True)
@click.option("--components", default=100, show_default=True)
@click.option("--method", default="auto", show_default=True)
@click.option("--backend", default="cuda", show_default=True)
@click.option("--device-memory", default="8GiB", show_default=True)
@click.option("--host-memory")
@click.option("--profile", is_flag=True, help="Print a profile of one more call.")
@work
@output
def pca(
    rows: int,
    columns: int,
    density: float,
    components: int,
    method: str,
    backend: str,
    device_memory: str,
    host_memory: str | None,
    profile: bool,
    work: Path | None,
    output: Path | None,
) -> None:
    """Find principal components of a CSR matrix in a zarr store, three times."""
    options: dict[str, Any] = {"backend": backend, "host_memory": host_memory}
    options |= {"device_memory": device_memory} if backend == "cuda" else {}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        check(Path(folder), columns, density, options)
        took, x = timed(lambda: Cells(Path(folder) / "cells.zarr", rows, columns, density, components))
        print(f"made {rows * x.count:,} entries in {took:.1f} s", flush=True)

        def call() -> Any:
            return oocgemm.pca(x.address, components, method=method, **options)

        print(oocgemm.pca(x.address, components, method=method, dry_run=True, **options), flush=True)
        seconds = list[float]()
        for _ in range(3):
            took, found = timed(call)
            seconds.append(took)
            print(f"{took:.2f} s, {found.passes} passes", flush=True)
        some = [0, components // 2, components - 1]
        norms = x.norms(found.components[some].astype(np.float64), found.mean)
        values = found.singular_values
        errors = abs(norms - values[some]) / values[0]
        print(
            f"errors relative to s_1: {errors}; s: {values[some]}; converged: {found.converged}", flush=True
        )
        product = oocgemm.gram(x.address, axis=1, transform=oocgemm.Transform(center="k"), **options)
        print(f"gram: {product.report.wall:.2f} s, decoded: {product.plan.decoded or 'by the host'}")
        print(product.report.exposed, product.report.lanes, flush=True)
        if profile:
            with cProfile.Profile() as kept:
                call()
            pstats.Stats(kept).sort_stats("cumulative").print_stats("oocgemm|numpy", 45)
        result = {"seconds": seconds, "density": density, "components": components, "passes": found.passes}
        result |= {"errors": errors.tolist(), "values": values[some].tolist()}
        result["gram_seconds"] = product.report.wall
        keep(output or RESULTS, f"{backend} pca {rows}x{columns}", result)


if __name__ == "__main__":
    main()
