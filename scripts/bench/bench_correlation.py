"""Measure `gram`, `cov` and `corr` of an array, beside `gram` or NumPy, in the same run and in turn.

    python scripts/bench/bench_correlation.py --backend cuda
    python scripts/bench/bench_correlation.py --backend host --case 20000x600:1 --case 3000x2000:0

A case is the shape of X and the axis that survives: 200000x2000:1 is X^T X of 2000 columns. X is an array in
memory, whose means are ten times its deviations. Results are compared with NumPy for a few rows and columns.
On a GPU, `cov` and `corr` are compared with `gram`. On the host, each verb is compared with NumPy: X^T X,
`np.cov` and `np.corrcoef`; the latter two compute in float64. The ratios are those of the medians. The first
round is not counted. The results go to a JSON file with a key per case. Other cases in the file are kept.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from device_arrays import BAND, spread, touched
from keeping import keep, output

import oocgemm

CASES = "200000x2000:1", "20000x2000:0"
COMPARED = 40  # rows and columns of the result that are compared


def made(rows: int, cols: int, dtype: str) -> Any:
    """Return an array of random numbers around 10."""
    x = np.empty((rows, cols), dtype)

    def fill(number: int) -> None:
        part = x[number * BAND : (number + 1) * BAND]
        part[...] = np.random.default_rng(number).standard_normal(part.shape, np.float32) + 10

    spread(fill, -(-rows // BAND))
    return x


def check(x: Any, axis: int, way: str, c: Any) -> None:
    """Compare some elements of a result with NumPy."""
    lines = np.linspace(0, x.shape[axis] - 1, COMPARED).astype(int)
    some = np.asarray(x[lines] if axis == 0 else x[:, lines].T, np.float64)
    right = {"gram": lambda: some @ some.T, "cov": lambda: np.cov(some), "corr": lambda: np.corrcoef(some)}[
        way
    ]()
    np.testing.assert_allclose(c[np.ix_(lines, lines)], right, rtol=1e-3, atol=2e-4)


@click.command()
@click.option("--backend", default="cuda", show_default=True)
@click.option("--case", "cases", multiple=True, default=CASES, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--rounds", default=7, show_default=True)
@output
def main(backend: str, cases: tuple[str, ...], dtype: str, rounds: int, output: Path | None) -> None:
    """Measure all cases."""
    for case in cases:
        shape, axis = case.split(":")
        rows, cols = map(int, shape.split("x"))
        found = compared(made(rows, cols, dtype), int(axis), backend, rounds)
        name = f"{backend} {dtype} {rows}x{cols} axis {axis}"
        keep(output or Path("scripts/bench/results/bench_correlation.json"), name, found)
        print(
            name,
            json.dumps({key: found[key] for key in ("median_seconds", "ratio", "plans")}, indent=1),
            flush=True,
        )


def compared(x: Any, axis: int, backend: str, rounds: int) -> dict[str, Any]:
    """Run all in turn and return what was measured."""
    count, lines = x.shape[axis], x if axis == 0 else x.T
    target: Any = touched((count, count), x.dtype)
    ways: dict[str, Any] = {"gram": oocgemm.gram, "cov": oocgemm.cov, "corr": oocgemm.corr}
    beside: dict[str, Callable[[], Any]] = {}
    if backend == "host":
        beside = {
            "NumPy, gram": lambda: np.matmul(lines, lines.T, out=target),
            "NumPy, cov": lambda: np.cov(lines),
            "NumPy, corr": lambda: np.corrcoef(lines),
        }
    seconds: dict[str, list[float]] = {way: [] for name in ways for way in (name, f"NumPy, {name}")}
    seconds = {way: taken for way, taken in seconds.items() if way in ways | beside}
    plans: dict[str, str] = {}
    for turn in range(rounds + 1):
        for way, taken in seconds.items():
            begun = time.perf_counter()
            result = beside[way]() if way in beside else ways[way](x, target, axis=axis, backend=backend)
            lasted = time.perf_counter() - begun
            if turn:
                taken.append(lasted)
            elif way in ways:
                check(x, axis, way, target)
                plans[way] = f"{result.plan.tile}, {result.plan.footprint.device_total >> 20} MiB"
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    others = {way: f"NumPy, {way}" if beside else "gram" for way in ways}
    ratio = {way: medians[way] / medians[other] for way, other in others.items()}
    return {"median_seconds": medians, "ratio": ratio, "seconds": seconds, "plans": plans}


if __name__ == "__main__":
    main()
