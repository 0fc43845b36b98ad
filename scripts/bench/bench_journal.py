#!/usr/bin/env python
"""Measure what a journal costs, and what checking every tile costs with it (`--verify`).

The same product from zarr to zarr runs without either, with a journal, and with both, in changing order. C is
durable at the end of each run. Without a journal, C is written in place and synced once at the end. The
result is the ratio of T to that of the run without a journal in the same round.
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import zarr
from keeping import keep
from keeping import output as output_option
from keeping import work as work_option
from linked import linked_zarr

import oocgemm
from oocgemm.jobs import output as target
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.stores.capabilities import Durable

WAYS = ("plain", "journal", "journal and verify")


class WithoutJournal(target.Unjournaled):
    """An output in local files that is written without a journal."""

    def seal(self) -> None:
        matrix: Any = self.matrix
        durable: Durable = matrix
        durable.sync_blocks([((0, durable.shape[0]), (0, durable.shape[1]))])
        durable.set_finished(True)


def without_journal(job: PreparedRun) -> target.Target:
    return WithoutJournal(job)


def make(path: Path, rows: int, cols: int, chunk: int, dtype: str, seed: int) -> None:
    """Create an array of normal random numbers.

    To save time, only the first rows are drawn; others repeat them, shifted.
    """
    drawn = np.random.default_rng(seed).standard_normal((chunk, cols)).astype(dtype)
    array = zarr.create_array(path, shape=(rows, cols), chunks=(chunk, chunk), dtype=dtype, compressors=None)
    for row in range(0, rows, chunk):
        array[row : row + chunk] = np.roll(drawn, row // chunk, axis=1)[: rows - row]


def once(folder: Path, way: str, beta: float, options: dict[str, Any]) -> oocgemm.Result:
    """Run the product in one of three ways: without a journal, with it, or with it and with checks."""
    c = folder / "C.zarr"
    shutil.rmtree(c, ignore_errors=True)
    if beta != 0:
        shutil.copytree(folder / "old.zarr", c)
    os.sync()  # Sync earlier writes now, so that the timed run does not.
    with patch.object(target, "open_target", without_journal if way == "plain" else target.open_target):
        a, b, verify = folder / "A.zarr", folder / "B.zarr", "verify" in way
        return oocgemm.gemm(a, b, c, beta=beta, verify=verify, **options)


@click.command()
@click.option("--backend", type=click.Choice(["host", "cuda"]), default="host", show_default=True)
@click.option("--size", default="6000x6000x6000", show_default=True, help="MxNxK.")
@click.option("--chunk", default=1000, show_default=True)
@click.option("--dtype", default="float64", show_default=True)
@click.option("--device-memory", default="256MiB", show_default=True)
@click.option("--host-memory", default="256MiB", show_default=True)
@click.option("--beta", "betas", type=float, multiple=True, default=(0.0, 0.5), show_default=True)
@click.option(
    "--linked",
    type=int,
    help="Make the chunk files of A and B hard links to this many files, to exceed the disk.",
)
@click.option("--rounds", default=5, show_default=True, help="Measured rounds, after a warm-up round.")
@click.option("--seconds", default=3600.0, show_default=True, help="Start no further round after this time.")
@work_option
@output_option
def main(
    backend: str,
    size: str,
    chunk: int,
    dtype: str,
    device_memory: str,
    host_memory: str,
    betas: tuple[float, ...],
    linked: int | None,
    rounds: int,
    seconds: float,
    work: Path | None,
    output: Path | None,
) -> None:
    """Run rounds of products with and without a journal, and write their times to a file."""
    m, n, k = map(int, size.split("x"))
    options = {"backend": backend, "device_memory": device_memory, "host_memory": host_memory}
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        folder = Path(temporary)
        for seed, (name, rows, cols) in enumerate((("A", m, k), ("B", k, n), ("old", m, n))):
            if linked and name != "old":
                linked_zarr(folder / f"{name}.zarr", (rows, cols), chunk, linked, seed, dtype=dtype)
            elif name != "old" or any(betas):
                make(folder / f"{name}.zarr", rows, cols, chunk, dtype, seed)
        started = time.monotonic()
        samples: dict[float, dict[str, list[float]]] = {beta: {way: [] for way in WAYS} for beta in betas}
        for turn in range(rounds + 1):
            if turn > 1 and time.monotonic() - started > seconds:
                break
            for beta in betas:
                for way in WAYS if turn % 2 else WAYS[::-1]:
                    result = once(folder, way, beta, options)
                    click.echo(f"round {turn}, beta = {beta:g}: {way} {result.report.wall:.3f} s")
                    if turn:  # round 0 is a warm-up and is not counted
                        samples[beta][way].append(result.report.wall)
    header = result.timeline.header
    for beta, taken in samples.items():
        ratios = {
            way: [one / plain for one, plain in zip(taken[way], taken["plain"], strict=True)]
            for way in WAYS[1:]
        }
        found = {
            "what": f"{m} x {n} x {k} {dtype}, beta = {beta:g}, zarr to zarr, device memory {device_memory}, "
            f"host memory {host_memory}" + (f"; chunk files hard-linked to {linked}" if linked else ""),
            "chunk": chunk,
            "machine": header["machine"] | header["backend"],
            "versions": header["versions"],
            "samples_seconds": taken,
            "over_plain": {
                way: {"min": min(over), "median": statistics.median(over), "max": max(over)}
                for way, over in ratios.items()
            },
        }
        for way in WAYS:
            over = f", ratio {found['over_plain'][way]}" if way in ratios else ""
            click.echo(f"beta = {beta:g}: {way} {statistics.median(taken[way]):.3f} s{over}")
        keep(output, f"{backend} {size} {dtype} beta = {beta:g}", found)


if __name__ == "__main__":
    main()
