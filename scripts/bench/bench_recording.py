#!/usr/bin/env python
"""Measure what recording the timeline costs, with the same product run alternately with and without it.

The script reports three numbers: the ratio of T within each pair of runs, the processor time of recording the
same spans once more relative to T, and the size of the log. The second is an upper bound on the cost, since a
separate thread records during a run.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
from bench_journal import make

import oocgemm
from oocgemm.jobs import execute as recorded_runs
from oocgemm.timeline import Recorder, Timeline


class Unrecorded(Recorder):
    """A recorder that discards its spans."""

    def add(self, span: Any) -> None:
        self.spans += 1

    def finish(self, wall: int, facts: Any) -> None:
        self.spans = 0
        super().finish(wall, facts)


def seconds(folder: Path, recorded: bool, options: dict[str, Any]) -> tuple[float, Timeline]:
    """Return T of one run in seconds, and its timeline."""
    shutil.rmtree(folder / "C.zarr", ignore_errors=True)
    os.sync()  # Sync earlier writes now, so that the timed run does not.
    log = folder / "run.jsonl" if recorded else None
    with patch.object(recorded_runs, "Recorder", Recorder if recorded else Unrecorded):
        operands = folder / "A.zarr", folder / "B.zarr", folder / "C.zarr"
        run = oocgemm.gemm(*operands, timeline=log, **options).timeline
    return run.wall / 1e9, run


def recording(run: Timeline, path: Path) -> float:
    """Return the processor time of recording the spans of a finished run once more, in seconds."""
    began = time.process_time()
    log = Recorder(run.header, path)
    for span in sorted(run.spans, key=lambda span: span.end):
        log.add(span)
    log.finish(run.wall, {})
    log.close()
    return time.process_time() - began


@click.command()
@click.option("--backend", type=click.Choice(["host", "cuda"]), default="host", show_default=True)
@click.option("--size", default="6000x6000x6000", show_default=True, help="MxNxK.")
@click.option("--chunk", default=1000, show_default=True)
@click.option("--dtype", default="float64", show_default=True)
@click.option("--device-memory", default="256MiB", show_default=True)
@click.option("--host-memory", default="256MiB", show_default=True)
@click.option("--tile", help="Tile shape MxNxK.  [default: as planned]")
@click.option("--rounds", default=10, show_default=True, help="Measured pairs, after a warm-up pair.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder for the matrices.  [default: a temporary one]"
)
@click.option("--output", type=click.Path(path_type=Path), help="JSON to add the samples to.")
def main(
    size: str, chunk: int, dtype: str, rounds: int, work: Path | None, output: Path | None, **options: Any
) -> None:
    """Run pairs of products with and without recording, in alternating order, and save their times."""
    m, n, k = map(int, size.split("x"))
    samples: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        folder = Path(temporary)
        for seed, (name, rows, cols) in enumerate((("A", m, k), ("B", k, n))):
            make(folder / f"{name}.zarr", rows, cols, chunk, dtype, seed)
        for turn in range(rounds + 1):
            for recorded in (turn % 2 == 0, turn % 2 == 1):
                taken, run = seconds(folder, recorded, options)
                if recorded:
                    kept = run
                if turn:
                    samples[recorded].append(taken)
        again = statistics.median(recording(kept, folder / "again.jsonl") for _ in range(5))
        log_bytes = (folder / "run.jsonl").stat().st_size
    ratios = [a / b for a, b in zip(samples[True], samples[False], strict=True)]
    found = {
        "with": samples[True],
        "without": samples[False],
        "ratios": ratios,
        "median": statistics.median(ratios),
        "least_over_least": min(samples[True]) / min(samples[False]),
        "recording_seconds": again,
        "share": again / statistics.median(samples[True]),
        "steps": kept.header["plan"]["steps"],
        "spans": len(kept.spans),
        "log_bytes": log_bytes,
    }
    recorded, unrecorded = (statistics.median(samples[way]) for way in (True, False))
    click.echo(f"{found['steps']} steps, {found['spans']} spans, a log of {log_bytes} bytes")
    click.echo(f"recorded {recorded:.3f} s, not recorded {unrecorded:.3f} s")
    click.echo(f"ratio {found['median']:.4f} ({min(ratios):.4f}-{max(ratios):.4f})")
    click.echo(f"recording takes {1e3 * again:.2f} ms, {100 * found['share']:.3f}% of T")
    if output is not None:
        results = json.loads(output.read_text()) if output.exists() else {}
        results[f"{options['backend']} {size} {dtype} tile = {options['tile']}"] = found | {
            "chunk": chunk,
            **options,
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
