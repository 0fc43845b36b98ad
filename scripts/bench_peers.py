#!/usr/bin/env python
"""Time products that users compute with other libraries today, with these libraries and with oocgemm.

    python scripts/bench_peers.py --rounds 3

Cases: all correlations of the rows of a matrix, the most similar rows of each row, and a genetic relationship
matrix of genotypes with missing ones. Contenders that are not installed are left out: scikit-learn, faiss and
dask. Everything runs on the CPU, on the same arrays in memory.
Each contender has a process of its own, in turns.

A process reports the seconds of one call, which is not its first, and the memory that the call took at most,
beyond what the process had before. Results are compared with those of NumPy.
"""

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
CASES = {"corr": (4000, 20000, "float32"), "topk": (20000, 256, "float32"), "grm": (3000, 60000, "int8")}
# Rows or columns that the loops in NumPy take at a time.
BAND = 1024
# Host memory that oocgemm may take.
MEMORY = "400MiB"


def operand(case: str, shrink: int) -> Array:
    rows, cols, dtype = CASES[case]
    rng, shape = np.random.default_rng(0), (rows // shrink, cols // shrink)
    if case != "grm":
        return rng.standard_normal(shape, np.float32)
    x = rng.binomial(2, rng.uniform(0.05, 0.5, shape[1]), shape).astype(dtype)
    x[rng.random(shape) < 0.01] = MISSING
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


def _numpy_grm(x: Array) -> Array:
    found = np.zeros((len(x), len(x)), np.float32)
    for left in range(0, x.shape[1], BAND):
        raw = x[:, left : left + BAND]
        known = raw != MISSING
        mean = np.where(known, raw, 0).sum(0) / known.sum(0)
        share = mean / 2
        z = np.where(known, raw - mean, 0) / np.sqrt(2 * share * (1 - share))
        z = z.astype(np.float32)
        found += z @ z.T
    return found / x.shape[1]


def _our_grm(x: Array) -> Array:
    transform = oocgemm.Transform(missing=MISSING, impute="mean", center="k", scale="hwe")
    options: dict[str, Any] = {"backend": "host", "memory": MEMORY, "alpha": 1 / x.shape[1]}
    return np.asarray(oocgemm.gram(x, uplo="full", transform=transform, **options).out)


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
    "grm": {"NumPy loop": ("numpy", _numpy_grm), "oocgemm.gram": ("oocgemm", _our_grm)},
}


def agreement(case: str, found: Array, right: Array) -> float:
    """Return the share of equal neighbours, or for matrices the largest difference."""
    if case == "topk":
        return float(np.mean([len(np.intersect1d(*pair)) / TOPK for pair in zip(found, right, strict=True)]))
    return float(np.abs(found - right).max())


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
        result = {
            "what": f"{case} of {rows // shrink} x {cols // shrink} {dtype}",
            "samples": found,
            "median_seconds": {n: statistics.median(x["seconds"] for x in found[n]) for n in names},
            "median_bytes": {n: statistics.median(x["bytes"] for x in found[n]) for n in names},
            "agreement": {n: found[n][0]["agreement"] for n in names},
        }
        keep(output or Path("scripts/results/bench_peers.json"), f"cpu {result['what']}", result)
        for name in names:
            print(
                f"{case:5} {name:26} {result['median_seconds'][name]:8.2f} s "
                f"{result['median_bytes'][name] / 2**20:8.0f} MiB  {result['agreement'][name]:.3g}"
            )


if __name__ == "__main__":
    main()
