"""Measure `similarity` or `corr` beside the plain product in GPU memory, or a NumPy loop, in the same run.

    python scripts/bench/bench_similarity.py --backend cuda --rows 1000000 --depth 256
    python scripts/bench/bench_similarity.py --backend cuda --rows 200000 --depth 300 --what corr \\
        --threshold 0.2
    python scripts/bench/bench_similarity.py --backend host --rows 20000 --depth 256

The plain product multiplies the same matrix and its transpose, tile by tile, with cuBLAS. Its operands are in
GPU memory, and its tiles overwrite one another. The NumPy loop multiplies bands of rows, and calls
`argpartition`, or compares with the threshold. Our seconds are those of the whole call. The rate counts all
elements of the product, of which we compute one triangle. The matrix holds small integers, so that
similarities are exact and have many ties. A sample of rows is compared with NumPy: similarities in every bit,
correlations within rounding errors. The results go to a JSON file with a key per case.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from keeping import keep, output
from numpy.typing import NDArray

import oocgemm

Array = NDArray[Any]
# Rows and columns of a tile of the plain product, rows that the NumPy loop multiplies together, and rows that
# are compared.
TILE, BAND, COMPARED = 16384, 1024, 32


def filled(rows: int, depth: int, dtype: str) -> Array:
    """Return a matrix of small integers without zero rows."""
    rng = np.random.default_rng(0)
    e = np.empty((rows, depth), dtype)
    for top in range(0, rows, 1 << 16):
        band = e[top : top + (1 << 16)]
        band[...] = rng.integers(-8, 9, band.shape, np.int8)
    e[:, 0] += e[:, 0] == 0
    return e


def check(e: Array, found: Any, metric: str, threshold: float | None) -> None:
    """Compare a sample of rows with NumPy, in float64 for correlations."""
    score = np.dtype("float64") if metric == "corr" else found.scores.dtype
    bands = [x.astype(float) for x in np.array_split(e, 64)]
    if metric == "corr":
        bands = [x - x.mean(1, keepdims=True) for x in bands]
    inverse = (1 / np.sqrt(np.concatenate([np.square(x).sum(1) for x in bands]))).astype(score)
    bands = [x.astype(score) for x in bands]
    whole = np.concatenate(bands)
    for row in np.linspace(0, len(e) - 1, COMPARED).astype(int):
        scores = np.concatenate([x @ whole[row] for x in bands])
        if metric != "dot":
            scores *= inverse[row] * inverse
        scores[row] = -np.inf if threshold is None else 0
        if threshold is None:
            order = np.lexsort((np.arange(len(e)), -scores))[: found.indices.shape[1]]
            np.testing.assert_array_equal(found.indices[row], order)
            np.testing.assert_array_equal(found.scores[row], scores[order])
            continue
        part = slice(found.indptr[row], found.indptr[row + 1])
        rounding = 1e-5 if metric == "corr" else 0.0
        magnitude = np.abs(scores) if metric == "corr" else scores
        missing = np.setdiff1d(np.flatnonzero(magnitude >= threshold + rounding), found.indices[part])
        wrong = magnitude[found.indices[part]] < threshold - rounding
        assert not missing.size, f"row {row}: {missing} are missing"
        assert not wrong.any(), f"row {row}: {found.indices[part][wrong]} are below the threshold"
        np.testing.assert_allclose(found.scores[part], scores[found.indices[part]], rtol=0, atol=rounding)


def plain(e: Array) -> float:
    """Return the seconds of the product in GPU memory."""
    import cupy

    there = cupy.asarray(e)
    side = min(TILE, len(e))
    c = cupy.empty((side, side), e.dtype)
    cupy.matmul(there[:side], there[:side].T, out=c)
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    for top in range(0, len(e), side):
        for left in range(0, len(e), side):
            a, b = there[top : top + side], there[left : left + side]
            cupy.matmul(a, b.T, out=c.ravel()[: len(a) * len(b)].reshape(len(a), len(b)))
    cupy.cuda.Device().synchronize()
    seconds = time.perf_counter() - start
    del there, c
    cupy.get_default_memory_pool().free_all_blocks()
    return seconds


def loop(e: Array, topk: int, threshold: float | None) -> float:
    """Return the seconds of a loop of NumPy calls that searches inner products in the same way."""
    start = time.perf_counter()
    for top in range(0, len(e), BAND):
        scores = e[top : top + BAND] @ e.T
        rows = np.arange(len(scores))[:, None]
        scores[rows[:, 0], top + rows[:, 0]] = -np.inf
        if threshold is not None:
            at = np.nonzero(scores >= threshold)
            scores[at].copy()
            continue
        best = np.argpartition(scores, len(e) - topk, axis=1)[:, -topk:]
        np.take_along_axis(best, np.argsort(-scores[rows, best], axis=1), 1)
    return time.perf_counter() - start


@click.command()
@click.option("--backend", default="cuda", show_default=True)
@click.option("--rows", default=200_000, show_default=True)
@click.option("--depth", default=256, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--topk", default=50, show_default=True)
@click.option("--threshold", type=float, help="Find all pairs above it, in place of the most similar rows.")
@click.option("--what", default="cosine", show_default=True, help="cosine, dot or corr.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--device-memory")
@click.option("--tile")
@output
def main(
    backend: str,
    rows: int,
    depth: int,
    dtype: str,
    topk: int,
    threshold: float | None,
    what: str,
    rounds: int,
    device_memory: str | None,
    tile: str | None,
    output: Path | None,
) -> None:
    e = filled(rows, depth, dtype)
    options: dict[str, Any] = {"backend": backend, "tile": tile, "device_memory": device_memory}
    options |= {"topk": topk} if threshold is None else {"threshold": threshold}
    options |= {} if what == "corr" else {"metric": what}
    find: Any = oocgemm.corr if what == "corr" else oocgemm.similarity
    find(e[:2000], **options)  # loads libraries and kernels
    other = "plain" if backend == "cuda" else "loop"
    seconds: dict[str, list[float]] = {"ours": [], other: []}
    found = None
    for _ in range(rounds):
        started = time.perf_counter()
        found = find(e, **options)
        seconds["ours"].append(time.perf_counter() - started)
        oocgemm.release()
        seconds[other].append(plain(e) if backend == "cuda" else loop(e, topk, threshold))
        print({name: round(values[-1], 3) for name, values in seconds.items()}, flush=True)
    assert found is not None
    check(e, found, what, threshold)
    flops = 2 * rows * rows * depth
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    kept = f"top {topk}" if threshold is None else f"threshold {threshold}"
    plan, report = found.run.plan, found.run.report
    result = {
        "what": f"E {rows} x {depth} {dtype}, {what}, {kept}",
        "found": int(found.indices.size),
        "samples_seconds": seconds,
        "median_seconds": medians,
        "rate_of_other": sorted(b / a for a, b in zip(*seconds.values(), strict=True)),
        "flop_rates": {name: flops / value for name, value in medians.items()},
        "compute_share": report.compute_share,
        "exposed": report.exposed,
        "plan": f"tile {plan.tile}, grid {plan.grid.shape}, {plan.candidate.traversal}",
        "predicted_seconds": plan.prediction.total,
        "traffic": plan.traffic,
    }
    name = f"{backend} {dtype} {rows}x{depth} {what} {kept}"
    keep(output or Path("scripts/bench/results/bench_similarity.json"), name, result)
    print(name, json.dumps(result, indent=1), flush=True)


if __name__ == "__main__":
    main()
