#!/usr/bin/env python
"""Time products that users compute with other libraries today, with these libraries and with oocgemm.

    python scripts/bench/bench_peers.py --rounds 3

Cases: all correlations of the rows of a matrix, the most similar rows of each row, a genetic relationship
matrix of genotypes with missing ones, the same divided by the numbers of variants that both individuals have,
principal components, and the product of a Gaussian kernel matrix and a matrix. Contenders that are not
installed are left out: scikit-learn, faiss and dask. Everything runs on the CPU, on the same arrays in
memory. Each contender has a process of its own, in turns.

A process reports the seconds of one call, which is not its first, and the memory that the call took at most,
beyond what the process had before. Results are compared with those of NumPy.
"""

import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from keeping import keep, output
from numpy.typing import NDArray

import oocgemm

Array = NDArray[Any]
TOPK, MISSING = 50, -1
# Extents of the operand, rows and columns, and its dtype.
CASES = {
    "corr": (3000, 12000, "float32"),
    "topk": (12000, 256, "float32"),
    "grm": (1500, 30000, "int8"),
    "pairwise": (1500, 30000, "int8"),
    "pca": (12000, 600, "float32"),
    "kernel": (10000, 64, "float32"),
}
COMPONENTS, GAMMA, COLUMNS = 20, 0.005, 10
# The names of packages whose modules are named otherwise.
PACKAGES = {"sklearn": "scikit-learn", "faiss": "faiss-cpu"}
# Rows or columns that the loops in NumPy take at a time.
BAND = 1024
# Host memory that oocgemm may take.
MEMORY = "400MiB"


def operand(case: str, shrink: int) -> Array:
    rows, cols, dtype = CASES[case]
    rng, shape = np.random.default_rng(0), (rows // shrink, cols // shrink)
    if case == "pca":
        # Singular values of features that decrease slowly: as of real data, components are hard to find.
        weights = 1 / np.sqrt(1 + np.arange(shape[1], dtype=np.float32))
        return rng.standard_normal(shape, np.float32) * weights
    if case not in ("grm", "pairwise"):
        return rng.standard_normal(shape, np.float32)
    share = rng.uniform(0.05, 0.5, shape[1]).astype(np.float32)
    x = np.zeros(shape, dtype)
    for _ in range(2):  # two alleles, faster than by `binomial`
        x += rng.random(shape, np.float32) < share
    x[rng.random(shape, np.float32) < 0.01] = MISSING
    return x


def _numpy_corr(x: Array) -> Array:
    return np.corrcoef(x)


def _dask_corr(x: Array) -> Array:
    import dask.array as da

    return np.asarray(da.corrcoef(da.from_array(x, chunks=(BAND, -1))).compute())


def _our_corr(x: Array) -> Array:
    return np.asarray(oocgemm.corr(x, backend="host", memory=MEMORY).out)


def _normalized(e: Array) -> Array:
    return np.asarray(e / np.linalg.norm(e, axis=1, keepdims=True))


def _numpy_topk(e: Array) -> Array:
    unit, found = _normalized(e), np.empty((len(e), TOPK), np.int64)
    for top in range(0, len(e), BAND):
        scores = unit[top : top + BAND] @ unit.T
        own = np.arange(len(scores))
        scores[own, top + own] = -np.inf
        best = np.argpartition(scores, -TOPK, axis=1)[:, -TOPK:]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1)
        found[top : top + BAND] = np.take_along_axis(best, order, 1)
    return found


def _sklearn_topk(e: Array) -> Array:
    from sklearn.neighbors import NearestNeighbors

    fitted = NearestNeighbors(n_neighbors=TOPK, metric="cosine", algorithm="brute").fit(e)
    return np.asarray(fitted.kneighbors(return_distance=False))


def _faiss_topk(e: Array) -> Array:
    import faiss

    unit = _normalized(e)
    index = faiss.IndexFlatIP(unit.shape[1])
    index.add(unit)
    _, found = index.search(unit, TOPK + 1)
    others = found != np.arange(len(e))[:, None]
    others[others.all(1), -1] = False  # a row that was not found among its own neighbours
    return np.asarray(found[others].reshape(len(e), TOPK))


def _our_topk(e: Array) -> Array:
    return np.asarray(oocgemm.similarity(e, topk=TOPK, backend="host", memory=MEMORY).indices)


def _standardized(raw: Array) -> tuple[Array, Array]:
    """Return standardized genotypes of some variants, with 0 for missing ones, and which are known."""
    known = raw != MISSING
    mean = np.where(known, raw, 0).sum(0) / known.sum(0)
    share = mean / 2
    z = np.where(known, raw - mean, 0) / np.sqrt(2 * share * (1 - share))
    return z.astype(np.float32), known.astype(np.float32)


def _numpy_grm(x: Array) -> Array:
    found = np.zeros((len(x), len(x)), np.float32)
    for left in range(0, x.shape[1], BAND):
        z, _ = _standardized(x[:, left : left + BAND])
        found += z @ z.T
    return found / x.shape[1]


def _gcta_grm(x: Array) -> Array:
    """Return the matrix as GCTA computes it: sums and numbers of variants, by blocks of variants."""
    sums, counts = np.zeros((2, len(x), len(x)), np.float32)
    for left in range(0, x.shape[1], BAND):
        z, known = _standardized(x[:, left : left + BAND])
        sums += z @ z.T
        counts += known @ known.T
    sums /= counts
    return sums


def _dask_grm(x: Array) -> Array:
    import dask.array as da

    lazy = da.from_array(x, chunks=(-1, BAND)).map_blocks(lambda raw: _standardized(raw)[0], dtype="float32")
    return np.asarray((lazy @ lazy.T).compute()) / x.shape[1]


def _our_grm(x: Array) -> Array:
    return np.asarray(oocgemm.grm(x, backend="host", memory=MEMORY).out)


def _our_pairwise(x: Array) -> Array:
    return np.asarray(oocgemm.grm(x, pairwise=True, backend="host", memory=MEMORY).out)


def _numpy_pca(x: Array) -> Array:
    """Return the variances along the components, from the eigenvalues of the covariance matrix."""
    return np.asarray(np.linalg.eigvalsh(np.cov(x, rowvar=False))[::-1][:COMPONENTS])


def _incremental_pca(x: Array) -> Array:
    from sklearn.decomposition import IncrementalPCA

    return np.asarray(IncrementalPCA(COMPONENTS, batch_size=BAND).fit(x).explained_variance_)


def _sklearn_pca(x: Array) -> Array:
    from sklearn.decomposition import PCA

    return np.asarray(PCA(COMPONENTS, svd_solver="randomized", random_state=0).fit(x).explained_variance_)


def _dask_pca(x: Array) -> Array:
    import dask.array as da

    lazy = da.from_array(x, chunks=(BAND, -1))
    _, values, _ = da.linalg.svd_compressed(lazy - lazy.mean(0), COMPONENTS, n_power_iter=3, seed=0)
    return np.asarray(values.compute()) ** 2 / (len(x) - 1)


def _our_pca(x: Array) -> Array:
    found = oocgemm.pca(x, COMPONENTS, backend="host", memory=MEMORY)
    return np.asarray(found.explained_variance)


def _factor(x: Array) -> Array:
    return np.random.default_rng(1).standard_normal((len(x), COLUMNS), np.float32)


def _numpy_kernel(x: Array) -> Array:
    v, norms, found = _factor(x), np.square(x).sum(1), np.empty((len(x), COLUMNS), np.float32)
    for top in range(0, len(x), BAND):
        here = slice(top, top + BAND)
        d2 = norms[here, None] + norms - 2 * (x[here] @ x.T)
        found[here] = np.exp(-GAMMA * np.maximum(d2, 0)) @ v
    return found


def _sklearn_kernel(x: Array) -> Array:
    from sklearn.metrics.pairwise import rbf_kernel

    return np.asarray(rbf_kernel(x, gamma=GAMMA) @ _factor(x))


def _our_kernel(x: Array) -> Array:
    return oocgemm.kernel_matmul(x, _factor(x), gamma=GAMMA, backend="host", memory=MEMORY)


# By case: the contenders, with the package that each needs. The first one is the reference.
CONTENDERS: dict[str, dict[str, tuple[str, Callable[[Array], Array]]]] = {
    "corr": {
        "numpy.corrcoef": ("numpy", _numpy_corr),
        "dask.array.corrcoef": ("dask", _dask_corr),
        "oocgemm.corr": ("oocgemm", _our_corr),
    },
    "topk": {
        "NumPy loop": ("numpy", _numpy_topk),
        "sklearn NearestNeighbors": ("sklearn", _sklearn_topk),
        "faiss IndexFlatIP": ("faiss", _faiss_topk),
        "oocgemm.similarity": ("oocgemm", _our_topk),
    },
    "grm": {
        "NumPy loop": ("numpy", _numpy_grm),
        "dask": ("dask", _dask_grm),
        "oocgemm.grm": ("oocgemm", _our_grm),
    },
    "pairwise": {
        "GCTA-like loop": ("numpy", _gcta_grm),
        "oocgemm.grm, pairwise": ("oocgemm", _our_pairwise),
    },
    "pca": {
        "numpy.cov, eigvalsh": ("numpy", _numpy_pca),
        "sklearn IncrementalPCA": ("sklearn", _incremental_pca),
        "sklearn PCA, randomized": ("sklearn", _sklearn_pca),
        "dask svd_compressed": ("dask", _dask_pca),
        "oocgemm.pca": ("oocgemm", _our_pca),
    },
    "kernel": {
        "NumPy loop": ("numpy", _numpy_kernel),
        "sklearn rbf_kernel": ("sklearn", _sklearn_kernel),
        "oocgemm.kernel_matmul": ("oocgemm", _our_kernel),
    },
}


def agreement(case: str, found: Array, right: Array) -> float:
    """Return the share of equal neighbours, the largest difference, or for pca the largest relative one."""
    if case == "topk":
        return float(np.mean([len(np.intersect1d(*pair)) / TOPK for pair in zip(found, right, strict=True)]))
    scale = np.abs(right) if case == "pca" else 1
    return float((np.abs(found - right) / scale).max())


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text().split(field + ":")[1]
    return int(status.split()[0]) << 10


def measure(case: str, name: str, shrink: int, reference: Path) -> dict[str, Any]:
    """Call a contender twice, and describe the second call. Runs in a process of its own."""
    x, (_, call) = operand(case, shrink), CONTENDERS[case][name]
    first = call(x)
    if not reference.exists():
        np.save(reference, first)
    agrees = agreement(case, first, np.load(reference))
    del first
    Path("/proc/self/clear_refs").write_text("5")  # resets the largest size so far
    before, start = _memory("VmRSS"), time.perf_counter()
    call(x)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": _memory("VmHWM") - before, "agreement": agrees}


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--only", type=click.Choice(list(CASES)), help="Only this case.")
@click.option("--shrink", default=1, help="Divide all extents by this number: to try the script.")
@click.option("--child", nargs=3, hidden=True)
@output
def main(
    rounds: int, only: str | None, shrink: int, child: tuple[str, str, str] | None, output: Path | None
) -> None:
    if child is not None:
        print(json.dumps(measure(child[0], child[1], shrink, Path(child[2]))))
        return
    for case in [only] if only else CASES:
        names = [name for name, (package, _) in CONTENDERS[case].items() if importlib.util.find_spec(package)]
        found: dict[str, list[Any]] = {name: [] for name in names}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--shrink", str(shrink), "--child", case]
            for name in rounds * names:
                arguments = [*command, name, f"{folder}/reference.npy"]
                done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
        rows, cols, dtype = CASES[case]
        packages = {package: PACKAGES.get(package, package) for package, _ in CONTENDERS[case].values()}
        result = {
            "libraries": {
                name: importlib.metadata.version(name)
                for module, name in packages.items()
                if module != "oocgemm" and importlib.util.find_spec(module)
            },
            "what": f"{case} of {rows // shrink} x {cols // shrink} {dtype}",
            "samples": found,
            "median_seconds": {n: statistics.median(x["seconds"] for x in found[n]) for n in names},
            "median_bytes": {n: statistics.median(x["bytes"] for x in found[n]) for n in names},
            "agreement": {n: found[n][0]["agreement"] for n in names},
        }
        keep(output or Path("scripts/bench/results/bench_peers.json"), f"cpu {result['what']}", result)
        for name in names:
            print(
                f"{case:8} {name:26} {result['median_seconds'][name]:8.2f} s "
                f"{result['median_bytes'][name] / 2**20:8.0f} MiB  {result['agreement'][name]:.3g}"
            )


if __name__ == "__main__":
    main()
