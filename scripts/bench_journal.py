#!/usr/bin/env python
"""What the journal costs: a product with it and without, in turn, C being durable at the end of both.

Without it C is written to its place and synced as a whole when all of it is there. T is that of the run; what is given is
the ratio of each pair's.
"""

import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import zarr

import oocgemm
from oocgemm import target
from oocgemm.job import Job
from oocgemm.stores.durable import Durable


class Unkept(target.Plain):
    """A C in local files without a journal."""

    def seal(self) -> None:
        matrix: Any = self.matrix
        durable: Durable = matrix
        durable.sync_block((0, durable.shape[0]), (0, durable.shape[1]))
        durable.set_finished(True)


def without_journal(work: Job, c: Any) -> target.Target:
    return Unkept(work, c)


def make(path: Path, rows: int, cols: int, chunk: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    array = zarr.create_array(path, shape=(rows, cols), chunks=(chunk, chunk), dtype=dtype, compressors=None)
    for row in range(0, rows, chunk):
        array[row : row + chunk] = rng.standard_normal((min(chunk, rows - row), cols)).astype(dtype)


def seconds(folder: Path, journal: bool, beta: float, options: dict[str, Any]) -> float:
    """T of one run."""
    c = folder / "C.zarr"
    shutil.rmtree(c, ignore_errors=True)
    if beta != 0:
        shutil.copytree(folder / "old.zarr", c)
    os.sync()  # or the first to sync anything pays for that
    with patch.object(target, "open_target", target.open_target if journal else without_journal):
        return oocgemm.gemm(folder / "A.zarr", folder / "B.zarr", c, beta=beta, **options).report.wall


@click.command()
@click.option("--backend", type=click.Choice(["host", "cuda"]), default="host", show_default=True)
@click.option("--size", default="6000x6000x6000", show_default=True, help="MxNxK.")
@click.option("--chunk", default=1000, show_default=True)
@click.option("--dtype", default="float64", show_default=True)
@click.option("--device-memory", default="256MiB", show_default=True)
@click.option("--host-memory", default="256MiB", show_default=True)
@click.option("--beta", "betas", type=float, multiple=True, default=(0.0, 0.5), show_default=True)
@click.option(
    "--rounds", default=5, show_default=True, help="Pairs that are measured, after one that is not."
)
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder for the matrices.  [default: a temporary one]"
)
@click.option("--output", type=click.Path(path_type=Path), help="JSON to add the samples to.")
def main(
    backend: str,
    size: str,
    chunk: int,
    dtype: str,
    device_memory: str,
    host_memory: str,
    betas: tuple[float, ...],
    rounds: int,
    work: Path | None,
    output: Path | None,
) -> None:
    """Measure pairs of runs, in either order by turns."""
    m, n, k = map(int, size.split("x"))
    options = {"backend": backend, "device_memory": device_memory, "host_memory": host_memory}
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        folder = Path(temporary)
        for seed, (name, rows, cols) in enumerate((("A", m, k), ("B", k, n), ("old", m, n))):
            make(folder / f"{name}.zarr", rows, cols, chunk, dtype, seed)
        for beta in betas:
            samples: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(rounds + 1):
                for journal in (turn % 2 == 0, turn % 2 == 1):
                    taken = seconds(folder, journal, beta, options)
                    if turn:
                        samples[journal].append(taken)
            ratios = [a / b for a, b in zip(samples[True], samples[False], strict=True)]
            found = {
                "with": samples[True],
                "without": samples[False],
                "ratios": ratios,
                "median": statistics.median(ratios),
            }
            click.echo(
                f"beta = {beta}: with a journal {statistics.median(samples[True]):.3f} s, without "
                f"{statistics.median(samples[False]):.3f} s, ratio {found['median']:.4f} "
                f"({min(ratios):.4f}-{max(ratios):.4f})"
            )
            if output is not None:
                kept = json.loads(output.read_text()) if output.exists() else {}
                kept[f"{backend} {size} {dtype} beta = {beta}"] = found | {"chunk": chunk, **options}
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
