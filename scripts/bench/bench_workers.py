#!/usr/bin/env python
"""Measure what it costs to divide a product among processes of this machine.

The command `oocgemm run` computes the same product in one process, and with --workers, in changing order.
Each time is that of the whole command, from its start to its exit. Medians are compared. Nothing else should
run on the machine.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from bench_journal import make
from keeping import keep
from keeping import output as output_option
from keeping import work as work_option


def once(folder: Path, workers: int, memory: str) -> float:
    """Run the command, with one process if `workers` is 0; return the seconds that it took."""
    c = folder / "C.zarr"
    shutil.rmtree(c, ignore_errors=True)
    os.sync()
    command = [sys.executable, "-m", "oocgemm", "run", *map(str, (folder / "A.zarr", folder / "B.zarr", c))]
    command += ["--backend", "host", "--memory", memory, "--quiet"]
    start = time.perf_counter()
    subprocess.run([*command, *(("--workers", str(workers)) if workers else ())], check=True)
    return time.perf_counter() - start


@click.command(help=__doc__)
@click.option("--extent", default=12000, show_default=True, help="Extent of the square matrices.")
@click.option("--memory", default="3GiB", show_default=True, help="Budget of all processes together.")
@click.option("--workers", "counts", type=int, multiple=True, default=(1, 2), help="Numbers of workers.")
@click.option("--rounds", default=3, show_default=True, help="How often each is measured.")
@work_option
@output_option
def main(
    extent: int, memory: str, counts: tuple[int, ...], rounds: int, work: Path | None, output: Path | None
) -> None:
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        for seed, operand in enumerate("AB"):
            make(folder / f"{operand}.zarr", extent, extent, 1000, "float64", seed)
        ways = [0, *counts]
        once(folder, 0, memory)  # fills the page cache
        times: dict[int, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in ways if number % 2 else reversed(ways):
                times[way].append(once(folder, way, memory))
                print(f"{f'{way} workers' if way else 'one process'}: {times[way][-1]:.2f} s", flush=True)
        direct = statistics.median(times[0])
        found = {
            str(way): {"seconds": times[way], "ratio": statistics.median(times[way]) / direct} for way in ways
        }
        for way in counts:
            median = statistics.median(times[way])
            print(f"{way} workers: {median:.2f} s; 1.02 times one process + 2 s: {1.02 * direct + 2:.2f} s")
        keep(
            output, f"{extent}", {"extent": extent, "memory": memory, "load": os.getloadavg(), "times": found}
        )


if __name__ == "__main__":
    main()
