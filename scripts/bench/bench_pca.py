#!/usr/bin/env python
"""Time principal components of a matrix on disk and in memory, with other libraries and with oocgemm.

    python scripts/bench/bench_pca.py --rounds 3
    python scripts/bench/bench_pca.py --backend cuda --rows 200000 --components 20

The matrix has singular values that decay as 1 / sqrt(i), plus noise, and columns with other means. It is a
.npy file and a zarr array with default chunks and compression, both of which the page cache holds. On the
CPU, NumPy, scikit-learn and dask are compared, and on a GPU cupy and torch in core. Each contender has a
process of its own, in turns. It makes two calls, and reports of the second one the seconds, the memory that
it took at most, beyond what the process had before, and the maximum error of the singular values relative to
the first one. The exact values are those of X^T X in float64. Contenders that are not installed are left out.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from keeping import keep, output
from numpy.typing import NDArray

import oocgemm

Array = NDArray[Any]
# Host memory that oocgemm may take on the CPU, and rows that IncrementalPCA and dask take at a time.
MEMORY, BATCH = "600MiB", 4000
# Directions of the matrix besides noise.
RANK = 200
# Up to this many columns, the exact singular values are computed.
MAX_EXACT = 4000
# Power iterations of the other libraries: 4 is scikit-learn's default for 50 of 2000 components and above.
POWER = 4


def _centered(x: Array) -> Array:
    return np.asarray(x - x.mean(0))


def _sklearn_randomized(path: str, k: int, backend: str) -> Array:
    from sklearn.decomposition import PCA

    found = PCA(k, svd_solver="randomized", iterated_power=POWER, random_state=0)
    return np.asarray(found.fit(np.load(path)).singular_values_)


def _sklearn_incremental(path: str, k: int, backend: str) -> Array:
    from sklearn.decomposition import IncrementalPCA

    found = IncrementalPCA(k, batch_size=BATCH).fit(np.load(path, mmap_mode="r"))
    return np.asarray(found.singular_values_)


def _sklearn_truncated(path: str, k: int, backend: str) -> Array:
    from sklearn.decomposition import TruncatedSVD

    # It does not center, and so gets a centered copy.
    found = TruncatedSVD(k, n_iter=POWER, random_state=0).fit(_centered(np.load(path)))
    return np.asarray(found.singular_values_)


def _dask_compressed(path: str, k: int, backend: str) -> Array:
    import dask.array as da

    x = da.from_array(np.load(path, mmap_mode="r"), chunks=(BATCH, -1))
    options = {"iterator": "QR", "n_power_iter": POWER, "seed": 0}  # plain powers overflow float32
    _, values, _ = da.linalg.svd_compressed(x - x.mean(0), k, **options)
    return np.asarray(values.compute())


@cache
def _loaded(path: str) -> Array:
    """Return the matrix in memory. Only the first call, which is not counted, reads it."""
    return np.asarray(np.load(path))


def _numpy_exact(path: str, k: int, backend: str) -> Array:
    x = _loaded(path)
    mean = x.mean(0, dtype=np.float64)
    gram = (x.T @ x).astype(np.float64) - len(x) * np.outer(mean, mean)
    return np.asarray(np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[: -k - 1 : -1], 0)))


def _torch_exact(path: str, k: int, backend: str) -> Array:
    import torch

    x = torch.from_numpy(_loaded(path)).cuda()
    x -= x.mean(0)
    found = torch.linalg.eigvalsh((x.T @ x).double())[-k:].flip(0)
    return np.asarray(found.clamp(min=0).sqrt().cpu())


def _torch_lowrank(path: str, k: int, backend: str) -> Array:
    import torch

    torch.manual_seed(0)
    x = torch.from_numpy(_loaded(path)).cuda()
    return np.asarray(torch.pca_lowrank(x, k + 10, niter=POWER)[1][:k].cpu())


def _ours(path: str, k: int, backend: str, **options: Any) -> Array:
    if backend == "host":
        options["memory"] = MEMORY
    return oocgemm.pca(path, k, backend=backend, **options).singular_values


def _ours_from_zarr(path: str, k: int, backend: str) -> Array:
    return _ours(str(Path(path).with_suffix(".zarr")), k, backend)


def _ours_in_memory(path: str, k: int, backend: str) -> Array:
    return oocgemm.pca(_loaded(path), k, backend=backend).singular_values


def _cupy_in_core(path: str, k: int, backend: str) -> Array:
    """Upload X, and compute on the GPU as scikit-learn does: one product per half iteration."""
    import cupy

    x = cupy.asarray(np.load(path, mmap_mode="r"))
    mean, ones = x.mean(0), cupy.ones((len(x), 1), x.dtype)
    basis = cupy.random.default_rng(0).standard_normal((x.shape[1], k + 10), cupy.float32)
    for _ in range(POWER + 1):
        left, _ = cupy.linalg.qr(x @ basis - ones @ (mean @ basis)[None])
        right = x.T @ left - mean[:, None] @ (ones.T @ left)
        basis, _ = cupy.linalg.qr(right)
    values = cupy.linalg.svd(right, compute_uv=False)[:k]
    found = cupy.asnumpy(values)
    del x
    cupy.get_default_memory_pool().free_all_blocks()
    return np.asarray(found)


Contenders = dict[str, tuple[str, Callable[[str, int, str], Array]]]
OURS: Contenders = {
    "oocgemm": ("oocgemm", _ours),
    "oocgemm, randomized": ("oocgemm", partial(_ours, method="randomized")),
    "oocgemm, with scores": ("oocgemm", partial(_ours, scores=True)),
    "oocgemm, zarr": ("oocgemm", _ours_from_zarr),
    "oocgemm, in memory": ("oocgemm", _ours_in_memory),
}
# Per backend: the contenders, with the package that each needs.
CONTENDERS: dict[str, Contenders] = {
    "host": {
        "sklearn PCA randomized": ("sklearn", _sklearn_randomized),
        "sklearn IncrementalPCA": ("sklearn", _sklearn_incremental),
        "sklearn TruncatedSVD": ("sklearn", _sklearn_truncated),
        "dask svd_compressed": ("dask", _dask_compressed),
        "NumPy, X^T X, in memory": ("numpy", _numpy_exact),
    }
    | OURS,
    "cuda": {
        "cupy, randomized": ("cupy", _cupy_in_core),
        "torch, X^T X, in memory": ("torch", _torch_exact),
        "torch pca_lowrank, in memory": ("torch", _torch_lowrank),
    }
    | OURS,
}


def write(path: Path, rows: int, cols: int) -> Array | None:
    """Write the matrix, band by band. Return X^T X of the centered matrix, or None if that takes long."""
    exact = cols <= MAX_EXACT
    rng = np.random.default_rng(0)
    right = np.linalg.qr(rng.standard_normal((cols, RANK)))[0].T.astype(np.float32)
    right *= (100 / np.sqrt(np.arange(1, RANK + 1))).astype(np.float32)[:, None]
    mean = rng.uniform(0, 10, cols).astype(np.float32)
    noise = rng.standard_normal((BATCH, cols), np.float32) / 10
    x = np.lib.format.open_memmap(path, "w+", np.float32, (rows, cols))
    gram, total = np.zeros((cols, cols) if exact else 0), np.zeros(cols)
    for top in range(0, rows, BATCH):
        band = x[top : top + BATCH]
        band[...] = rng.standard_normal((len(band), RANK), np.float32) @ right
        band += np.roll(noise, top // BATCH, axis=1)[: len(band)]
        band += mean
        if exact:
            wide = band - mean
            gram += wide.T @ wide  # of a band in float32, added in float64
            total += wide.sum(0, dtype=np.float64)
    return gram - np.outer(total, total) / rows if exact else None


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text().split(field + ":")[1]
    return int(status.split()[0]) << 10


def measure(name: str, path: str, backend: str, k: int, exact: Path) -> dict[str, Any]:
    """Call a contender twice, and describe the second call. Runs in a process of its own."""
    call = CONTENDERS[backend][name][1]
    found = call(path, k, backend)
    Path("/proc/self/clear_refs").write_text("5")  # resets the largest size so far
    before, start = _memory("VmRSS"), time.perf_counter()
    call(path, k, backend)
    seconds = time.perf_counter() - start
    error = None
    if exact.exists():
        right = np.load(exact)[:k]
        error = float(np.max(np.abs(found - right)) / right[0])
    return {"seconds": seconds, "bytes": _memory("VmHWM") - before, "error": error}


@click.command()
@click.option("--backend", default="host", show_default=True, type=click.Choice(list(CONTENDERS)))
@click.option("--rows", default=100_000, show_default=True)
@click.option("--cols", default=2000, show_default=True)
@click.option("--components", default=50, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--contender", "chosen", multiple=True, help="Only these.  [default: all that are installed]")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the matrix.")
@click.option("--child", nargs=3, hidden=True)
@output
def main(
    backend: str,
    rows: int,
    cols: int,
    components: int,
    rounds: int,
    chosen: tuple[str, ...],
    work: Path | None,
    child: tuple[str, str, str] | None,
    output: Path | None,
) -> None:
    if child is not None:
        name, path, exact = child
        print(json.dumps(measure(name, path, backend, components, Path(exact))))
        return
    packages = {name: package for name, (package, _) in CONTENDERS[backend].items()}
    names = [name for name in chosen or packages if importlib.util.find_spec(packages[name])]
    found: dict[str, list[Any]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        path, exact = Path(folder) / "x.npy", Path(folder) / "exact.npy"
        gram = write(path, rows, cols)
        zarr.create_array(path.with_suffix(".zarr"), data=np.load(path, mmap_mode="r"))
        if gram is not None:
            np.save(exact, np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0)))
        del gram
        command = [sys.executable, __file__, "--backend", backend, "--components", str(components), "--child"]
        for name in rounds * names:
            done = subprocess.run(
                [*command, name, str(path), str(exact)], stdout=subprocess.PIPE, text=True, check=True
            )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    result = {
        "what": f"{components} components of {rows} x {cols} float32",
        "power": POWER,
        "samples": found,
        "median_seconds": {n: statistics.median(x["seconds"] for x in found[n]) for n in names},
        "median_bytes": {n: statistics.median(x["bytes"] for x in found[n]) for n in names},
        "error": {n: found[n][0]["error"] for n in names},
    }
    keep(output or Path("scripts/bench/results/bench_pca.json"), f"{backend} {result['what']}", result)
    for name in names:
        seconds, size = result["median_seconds"][name], result["median_bytes"][name] / 2**20
        print(f"{name:28} {seconds:8.3f} s {size:8.0f} MiB  error {result['error'][name]}")


if __name__ == "__main__":
    main()
