#!/usr/bin/env python
"""Measure `ld` on the CPU beside a loop of NumPy over blocks as wide as the window.

usage: scripts/bench/bench_ld.py [--individuals N] [--variants M] [--window W] [--repeat R] [--out FILE]

Both keep the pairs with r^2 of at least 0.2 of int8 genotypes in memory, in which groups of 8 variants share
80% of the genotypes. They run by turns. The results must have the same pairs.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import oocgemm

RESULTS = Path(__file__).parent / "results" / "bench_ld.json"
MIN_R2, GROUP, SHARED = 0.2, 8, 0.8


def genotypes(individuals: int, variants: int) -> Any:
    rng = np.random.default_rng(7)
    shared = rng.integers(0, 3, (individuals, -(-variants // GROUP)), np.int8).repeat(GROUP, axis=1)
    own = rng.integers(0, 3, (individuals, variants), np.int8)
    return np.where(rng.random((individuals, variants), np.float32) < SHARED, shared[:, :variants], own)


def by_numpy(x: Any, window: int) -> tuple[Any, Any, Any]:
    """Return the first and second variants of pairs, and r, from products of blocks of `window` variants."""
    count, found = x.shape[1], []
    for left in range(0, count, window):
        block = x[:, left : left + 2 * window].astype(np.float32)
        block -= block.mean(axis=0)
        block /= np.linalg.norm(block, axis=0)
        r = block[:, :window].T @ block
        apart = np.arange(r.shape[1]) - np.arange(len(r))[:, None]
        i, j = np.nonzero((apart > 0) & (apart <= window) & (r * r >= MIN_R2))
        found.append((i + left, j + left, r[i, j]))
    rows, cols, r = (np.concatenate(each) for each in zip(*found, strict=True))
    return rows, cols, r


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--individuals", type=int, default=2000)
    parser.add_argument("--variants", type=int, default=20000)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    x = genotypes(given.individuals, given.variants)
    options: Any = {"window": given.window, "min_r2": MIN_R2, "backend": "host"}
    runs = {
        "numpy": lambda: by_numpy(x, given.window),
        "ld": lambda: oocgemm.ld(x, **options),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.repeat):
        for name, run in runs.items():
            started = perf_counter()
            found = run()
            seconds[name].append(perf_counter() - started)
            print(f"{name}: {seconds[name][-1]:.3f} s", flush=True)
            if name == "numpy":
                rows, cols, _ = found
            else:
                assert np.array_equal(np.repeat(np.arange(given.variants), np.diff(found.indptr)), rows)
                assert np.array_equal(found.indices, cols)
    result = {
        "individuals": given.individuals,
        "variants": given.variants,
        "window": given.window,
        "pairs": len(rows),
        "cores": len(os.sched_getaffinity(0)),
        "seconds": seconds,
        "ratio of medians": median(seconds["numpy"]) / median(seconds["ld"]),
        "ratio of minima": min(seconds["numpy"]) / min(seconds["ld"]),
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
