#!/usr/bin/env python
"""Measure what checking every tile costs (`--verify`), with the same product run with and without checks.

A and B are normal random numbers in memory; `bench_journal.py` measures products from disk, with a journal.
Other products than gemm are of A alone: a Gram matrix, one with an epilogue, correlations, and the most
similar rows of a matrix with 256 columns. Ratios compare runs of the same round, and the order within a round
alternates. All measured times go to a JSON file with a key per case. Other cases in the file are kept.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from keeping import keep

import oocgemm

CHUNK = 1024
WIDTH = 256  # columns of the matrix whose similar rows are found
TOPK = 50


def computed(product: str, a: Any, b: Any, c: Any, **options: Any) -> oocgemm.Result:
    """Compute a product once."""
    match product:
        case "gram":
            return oocgemm.gram(a, c, **options)
        case "epilogue":
            scale = np.linspace(1, 2, len(a))
            return oocgemm.gram(a, c, epilogue=[oocgemm.Scale(scale, scale)], **options)
        case "corr":
            return oocgemm.corr(a, c, **options)
        case "similarity":
            return oocgemm.similarity(a[:, :WIDTH], topk=TOPK, **options).run
    return oocgemm.gemm(a, b, c=c, **options)


def filled(rng: np.random.Generator, n: int, dtype: str) -> Any:
    """Return normal random numbers.

    To save time, only the first rows are drawn; others repeat them, shifted.
    """
    x, drawn = np.empty((n, n), dtype), rng.standard_normal((CHUNK, n)).astype(dtype)
    for top in range(0, n, CHUNK):
        x[top : top + CHUNK] = np.roll(drawn, top + 1, axis=1)[: n - top]
    return x


@click.command()
@click.option(
    "--product",
    type=click.Choice(["gemm", "gram", "epilogue", "corr", "similarity"]),
    default="gemm",
    show_default=True,
)
@click.option("--backend", default="auto", show_default=True)
@click.option("--size", default=6000, show_default=True)
@click.option("--dtype", default="float64", show_default=True, type=click.Choice(["float32", "float64"]))
@click.option("--device-memory", default="600MiB", show_default=True)
@click.option("--host-memory", default="400MiB", show_default=True)
@click.option("--repeats", default=7, show_default=True)
@click.option("--seconds", default=600.0, show_default=True, help="Start no further round after this time.")
@click.option(
    "--output", type=click.Path(), default="scripts/bench/results/bench_verify.json", show_default=True
)
def main(
    product: str,
    backend: str,
    size: int,
    dtype: str,
    device_memory: str,
    host_memory: str,
    repeats: int,
    seconds: float,
    output: str,
) -> None:
    options = {"backend": backend, "device_memory": device_memory, "host_memory": host_memory}
    rng = np.random.default_rng(0)
    a, c = filled(rng, size, dtype), np.zeros((size, size), dtype)
    b = filled(rng, size, dtype) if product == "gemm" else a
    ways = ("plain", "verify")
    samples: dict[str, list[float]] = {way: [] for way in ways}
    checks: list[dict[str, Any]] = []
    started = time.monotonic()
    for turn in range(repeats + 1):  # round 0 is a warm-up and is not counted
        if turn > 1 and time.monotonic() - started > seconds:
            break
        for way in ways if turn % 2 else ways[::-1]:
            result = computed(product, a, b, c, verify=way == "verify", **options)
            if turn:
                samples[way].append(result.report.wall)
                if result.report.checks is not None:
                    checks.append(result.report.checks)
            print(f"{way} {result.report.wall:.3f} s", flush=True)
    ratios = {
        way: sorted(with_it / plain for with_it, plain in zip(samples[way], samples["plain"], strict=True))
        for way in ways[1:]
    }
    header = result.timeline.header
    of = {
        "gemm": f"{size}^3",
        "gram": f"gram, {size}^3",
        "epilogue": f"gram with an epilogue, {size}^3",
        "corr": f"corr, {size}^3",
        "similarity": f"similarity, {size} x {WIDTH}, topk {TOPK}",
    }[product]
    found = {
        "what": f"{of} {dtype}, in memory, device memory {device_memory}, host memory {host_memory}",
        "machine": header["machine"] | header["backend"],
        "versions": header["versions"],
        "plan": result.plan.to_dict(),
        "samples_seconds": samples,
        "over_plain": {
            way: {"min": values[0], "median": statistics.median(values), "max": values[-1]}
            for way, values in ratios.items()
        },
        "best_over_best": {way: min(samples[way]) / min(samples["plain"]) for way in ratios},
        "checks": checks[-1],
    }
    named = "" if product == "gemm" else f" {product}"
    keep(Path(output), f"{header['backend']['name']}{named} {dtype} {size} memory", found)
    print(json.dumps({name: found[name] for name in ("over_plain", "best_over_best", "checks")}, indent=1))


if __name__ == "__main__":
    main()
