"""Measure what the service adds to the time of its jobs, with workers that stay warm and without.

    python scripts/bench/bench_service.py --backend cuda --size 8192 --jobs 10 --output results.json

It starts ``oocgemm serve`` on a unix socket, runs one product, and then submits the others at once, as a
queue. A and B are float64 zarr arrays without compression, and so is each C. The ratio is the time from the
first submission to the end of the last job, divided by the sum of the T of all jobs. Every C is compared with
A and B by a product with a random vector (Freivalds). Phases between two jobs, in order:

- decide: from the end of the job before, or from its submission, until the job is committed as starting;
- start: until a worker has its lock; begin: until T begins, with imports;
- close: from the end of T until the result is written; notice: until it is durable, and the server knows it.
"""

import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from keeping import keep, output, work

from oocgemm import Client
from oocgemm.service.job_store import JobStore
from oocgemm.service.job_worker import OWNER, RESULT, TIMELINE

MODES = {"warm": 300, "cold": 0}  # seconds for which a worker is kept
PHASES = ("decide", "start", "begin", "close", "notice")


def store_operand(path: Path, size: int, chunk: int, seed: int) -> None:
    """Write a square array of random numbers."""
    array = zarr.create_array(
        path, shape=(size, size), chunks=(chunk, chunk), dtype="f8", compressors=None, overwrite=True
    )
    rng = np.random.default_rng(seed)
    for first in range(0, size, chunk):
        array[first : first + chunk] = rng.random((min(chunk, size - first), size)) - 0.5


@contextmanager
def server(folder: Path, backend: str, seconds: int, options: Sequence[str]) -> Iterator[Client]:
    """Run a server, and return a client of it."""
    command = [
        *(sys.executable, "-m", "oocgemm", "serve", "--backend", backend, "--state", str(folder / "state")),
        *("--root", f"data={folder / 'data'}:ro", "--root", f"out={folder / 'out'}:rw"),
        *("--socket", str(folder / "serve.sock"), "--keep-warm", str(seconds), *options),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("listening"):
                    break
            else:
                raise click.ClickException(f"the server ended with status {process.wait()}")
            yield Client(str(folder / "serve.sock"))
        finally:
            process.send_signal(signal.SIGTERM)


def submit(client: Client, folder: Path, name: str) -> Any:
    """Submit the product A B."""
    return client.submit(folder / "data/A.zarr", folder / "data/B.zarr", folder / "out" / name)


def finished(job: Any) -> Any:
    """Wait for a job; fail unless it has succeeded."""
    if job.wait().state != "succeeded":
        raise click.ClickException(f"job {job.id} has {job.state}: {job.error}")
    return job


def times_of(folder: Path, state: JobStore, job: str) -> dict[str, float]:
    """Return when each phase of a job ended, in seconds since 1970, and its T."""
    at = {one["kind"]: one["at"] for one in state.events(job=job)}
    with open(folder / "state/jobs" / job / TIMELINE) as log:
        started = json.loads(log.readline())["started"]
    result = json.loads((folder / "state/jobs" / job / RESULT).read_bytes())
    changed = {name: (folder / "state/jobs" / job / name).stat().st_mtime for name in (OWNER, RESULT)}
    return {
        "submitted": at["queued"],
        "decide": at["starting"],
        "start": changed[OWNER],
        "begin": started,
        "T": result["seconds"],
        "close": changed[RESULT],
        "notice": at["succeeded"],
    }


def gaps_of(found: dict[str, float], before: float) -> dict[str, float]:
    """Return the seconds of each phase of a job, if the job before it ended at `before`."""
    gaps = {"decide": found["decide"] - max(before, found["submitted"])}
    for phase, last in (("start", "decide"), ("begin", "start")):
        gaps[phase] = found[phase] - found[last]
    gaps["close"] = found["close"] - found["begin"] - found["T"]
    return gaps | {"notice": found["notice"] - found["close"]}


def check(folder: Path, names: Sequence[str], chunk: int) -> None:
    """Compare products with their operands, up to rounding."""
    a, b = (zarr.open_array(folder / f"data/{name}.zarr", mode="r") for name in "AB")
    size = a.shape[0]
    x = np.random.default_rng(9).standard_normal(size)

    def times(array: Any, vector: Any) -> Any:
        return np.concatenate([array[at : at + chunk] @ vector for at in range(0, size, chunk)])

    right = times(a, times(b, x))
    for name in names:
        c = zarr.open_array(folder / "out" / name, mode="r")
        np.testing.assert_allclose(times(c, x), right, rtol=1e-9, atol=1e-9 * size)


def gpu_memory() -> list[int] | None:
    """Return the bytes in use on each GPU, by all programs; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [int(line) << 20 for line in done.stdout.split()]


def resident(pid: int) -> int:
    """Return the bytes of resident memory of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * 4096


def measure(folder: Path, mode: str, backend: str, jobs: int, options: Sequence[str]) -> dict[str, Any]:
    """Run one product, and then the queue; return the times."""
    for name in ("out", "state"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    before = gpu_memory()
    with server(folder, backend, MODES[mode], options) as client:
        begin = time.time()
        first = finished(submit(client, folder, "first.zarr"))
        whole = time.time() - begin
        begin = time.time()
        queue = [submit(client, folder, f"C{number}.zarr") for number in range(jobs)]
        submitted = time.time() - begin
        for job in queue:
            finished(job)
        devices = [each["name"] for each in client.devices()["devices"]]
        owner = json.loads((folder / "state/jobs" / queue[-1].id / OWNER).read_bytes())
        idle = {"gpu": gpu_memory(), "gpu before": before, "resident": resident(owner["pid"])}
    state = JobStore(folder / "state/service.db")
    alone = times_of(folder, state, first.id)
    found = sorted((times_of(folder, state, job.id) for job in queue), key=lambda each: each["decide"])
    state.close()
    ends = [begin, *(each["notice"] for each in found)]
    gaps = [gaps_of(each, before) for each, before in zip(found, ends[:-1], strict=True)]
    wall, total = ends[-1] - begin, sum(each["T"] for each in found)
    return {
        "devices": devices,
        "T": [each["T"] for each in found],
        "sum of T": total,
        "wall": wall,
        "ratio": wall / total,
        "submission of all": submitted,
        "first job": {"wall": whole, "T": alone["T"]} | gaps_of(alone, 0.0),
        "idle worker": idle,
        "gaps": gaps,
        "median gaps": {phase: statistics.median(each[phase] for each in gaps) for phase in PHASES},
    }


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--backend", default="auto", show_default=True)
@click.option("--size", default=8192, show_default=True, help="Rows and columns of A, B and C.")
@click.option("--chunk", default=2048, show_default=True, help="Rows and columns of a chunk.")
@click.option("--jobs", default=10, show_default=True, help="Products in the queue.")
@click.option("--modes", default="warm,cold", show_default=True)
@work
@output
@click.argument("options", nargs=-1)
def main(
    backend: str, size: int, chunk: int, jobs: int, modes: str, work: Path | None, output: Path | None,
    options: tuple[str, ...],
) -> None:  # fmt: skip
    """Measure the service. OPTIONS are passed to `oocgemm serve`."""
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        for seed, operand in enumerate("AB"):
            store_operand(folder / "data" / f"{operand}.zarr", size, chunk, seed)
        results = {}
        for mode in modes.split(","):
            found = results[mode] = measure(folder, mode, backend, jobs, options)
            check(folder, [f"C{number}.zarr" for number in range(jobs)], chunk)
            first, gaps = found["first job"], found["median gaps"]
            print(f"{mode}: {jobs} products in {found['wall']:.3f} s, sum of T {found['sum of T']:.3f} s")
            print(f"  ratio {found['ratio']:.3f}; first job {first['wall']:.3f} s, T {first['T']:.3f} s")
            print(
                "  ms between two:", {phase: round(1e3 * each, 1) for phase, each in gaps.items()}, flush=True
            )
    keep(output, f"{backend} {size}", {"size": size, "chunk": chunk, "jobs": jobs} | results)


if __name__ == "__main__":
    main()
