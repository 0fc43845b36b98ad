#!/usr/bin/env python
"""Kill or interrupt real `oocgemm run` processes, resume them, and compare the results bit for bit.

A case (`torture_cases.py`) is a product with one kind of C: uncompressed chunk files, compressed or sharded
ones, or .npy, and new, replaced, or updated in place with beta != 0. Other cases are commands such as grm and
pca; those without --resume are started again. Half of the kills are at random instants of a process's life.
The others come within two milliseconds after a line is added to the journal, which is when the state of a
tile changes, or after the journal is created. The script counts the state in which each kill left the
journal. It compares the result with that of an undisturbed run of the same plan. A last run with --resume
must not change the result. The exit code is 1 if any result differs.

With --signal SIGINT or SIGTERM all signals are at random instants, and each process must end within
`MAX_SECONDS_TO_END`.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from keeping import keep
from keeping import output as output_option
from keeping import work as work_option
from torture_cases import CASES, KERNEL_MATMUL, Case

from oocgemm import stores
from oocgemm.backends.host.blas import CHOICE, better_family
from oocgemm.jobs import journal
from oocgemm.planning import default_model
from oocgemm.stores.genetics import companions

# Number of chunks along each extent of a matrix.
CHUNKS = 12
# Longest delay between a change of the journal and the kill that follows it, in seconds.
JITTER = 0.002
# After this many kills a case is resumed without further kills.
MAX_KILLS = 12
# Longest time that a process may take to end after SIGINT or SIGTERM.
MAX_SECONDS_TO_END = 2.0


def environment() -> dict[str, str]:
    """Return the environment of the processes.

    It selects the BLAS kernels. Otherwise the command would start itself again to select them, and a kill
    could hit the wrong process.
    """
    better = better_family()
    return dict(os.environ) | ({CHOICE: better[1]} if better and CHOICE not in os.environ else {})


def make(path: Path, extent: int, kind: str, dtype: str, seed: int) -> None:
    """Create a matrix of random numbers, for an operand or an existing C."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((extent, extent))
    if dtype == "int8":
        noise = rng.integers(-1, 3, noise.shape)  # genotypes, some of which are missing
    data = (noise + 1j * rng.standard_normal(noise.shape) if dtype.startswith("complex") else noise).astype(
        dtype
    )
    if kind == "npy":
        np.save(path, data)
        return
    chunk = extent // CHUNKS
    shards = (2 * chunk, 2 * chunk) if kind == "sharded" else None
    compressors = zarr.codecs.ZstdCodec(level=1) if kind == "zstd" else None
    zarr.create_array(path, data=data, chunks=(chunk, chunk), shards=shards, compressors=compressors)


def make_sparse(path: Path, extent: int, dtype: str) -> None:
    """Create a CSR matrix of small integers as AnnData does. A tenth of its elements are stored."""
    rng = np.random.default_rng(0)
    rows, indices = np.nonzero(rng.random((extent, extent)) < 0.1)
    starts = np.append(0, np.cumsum(np.bincount(rows, minlength=extent)))
    data = rng.integers(1, 9, len(indices)).astype(dtype)
    group = zarr.create_group(path).create_group("X")
    group.attrs.update({"encoding-type": "csr_matrix", "shape": [extent, extent]})
    for name, part in {"data": data, "indices": indices.astype(np.int32), "indptr": starts}.items():
        group.create_array(name, data=part)


def content(path: Path) -> bytes:
    """Return the bytes of a result. A zarr array must not be marked unfinished."""
    if path.name.endswith(".grm.bin"):
        return b"".join(place.read_bytes() for place in (path, *companions(path)))
    counts = path.with_suffix(f".counts{path.suffix}")
    more = content(counts) if counts.exists() else b""
    if path.suffix == ".npy":
        return bytes(np.load(path).data) + more
    found = zarr.open(path, mode="r")
    if isinstance(found, zarr.Group):
        return b"".join(np.asarray(array[...]).tobytes() for _, array in sorted(found.arrays()))
    mark: Any = found.attrs.get("oocgemm", {})
    assert mark.get("complete", True), f"{path} is marked unfinished"
    return bytes(np.asarray(found[:]).data) + more


class Torture:
    """One case: its operands, its command, its undisturbed result, and the number of kills."""

    def __init__(
        self, case: Case, folder: Path, extent: int, backend: str, rng: random.Random, number: signal.Signals
    ) -> None:
        self.case, self.folder, self.rng, self.signal = case, folder, rng, number
        self.slowest = 0.0  # longest time from a signal to the end of its process, in seconds
        self.kills: Counter[str] = Counter()
        self.rounds = 0
        suffix = case.kind if case.kind in ("npy", "grm.bin") else "zarr"
        self.c, self.initial = folder / f"C.{suffix}", folder / f"initial.{suffix}"
        for seed, name in enumerate("AB"):
            if not (case.sparse and name == "A"):
                make(folder / f"{name}.zarr", extent, "raw", case.dtype, seed)
        if case.sparse:
            make_sparse(folder / "A.zarr", extent, case.dtype)
        if case.existing:
            make(self.initial, extent, case.kind, case.dtype, 2)
        self.environment = environment()
        tile = "x".join(str(extent // parts) for parts in case.tiles)
        itemsize = np.dtype(case.dtype).itemsize
        reserve = default_model(backend, len(os.sched_getaffinity(0))).device_reserve
        memory = reserve + max(8 << 20, 3 * extent * extent * itemsize)
        a, budgets = str(folder / "A.zarr" / ("X" if case.sparse else "")), (str(memory), str(2 * memory))
        self.command = [
            *(sys.executable, "-m", "oocgemm", case.command, a),
            *((str(folder / "B.zarr"),) if case.command == "run" else ()),
            *(str(self.c), "--quiet", "--backend", backend),
            *(() if case.command == "pca" else ("--tile", tile)),
            *(("--beta", case.beta) if case.command in ("run", "gram") else ()),
            *(*case.options, "--device-memory", budgets[0], "--host-memory", budgets[1]),
            *(("--overwrite",) if case.existing and case.beta == "0" else ()),
            *(("--compressor", case.kind) if case.kind == "zstd" and not case.existing else ()),
        ]
        if case.command == "kernel_matmul":
            self.command = [sys.executable, "-c", KERNEL_MATMUL, a, str(self.c), backend, tile, *budgets]
        if case.kind in ("raw", "zstd") and not case.existing:
            self.command += ["--chunks", f"{extent // CHUNKS}x{extent // CHUNKS}"]
        counts = folder / ("C.grm.N.bin" if suffix == "grm.bin" else f"C.counts.{suffix}")
        found = [stores.sidecar(str(path)) for path in (counts, self.c)]
        # The folders of journals, in the order in which the command writes them.
        self.sidecars = [path for path in found if path is not None][2 - case.journals :]
        self.resume = ("--resume",) if case.resumes else ()
        self.fresh()
        start = time.monotonic()
        process = self.start()
        watched = self.sidecars[0] / journal.JOURNAL if self.sidecars else self.c
        while not watched.exists() and process.poll() is None:
            time.sleep(0.001)
        self.start_up = time.monotonic() - start
        self.wait(process)
        self.seconds = time.monotonic() - start
        self.right = content(self.c)

    def fresh(self) -> None:
        """Restore C to its state before any run."""
        for path in self.folder.glob("C.*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if self.case.existing:
            (shutil.copytree if self.initial.is_dir() else shutil.copyfile)(self.initial, self.c)

    def start(self, *options: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self.command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )

    def wait(self, process: "subprocess.Popen[str]") -> None:
        """Wait for a process, which must succeed."""
        out, err = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(process.args)}: exit code {process.returncode}\n{out}{err}")  # type: ignore[arg-type]

    def go_on(self, kills: int, until: float) -> None:
        """Repeat `once` until there were `kills` kills, or until the monotonic clock passes `until`."""
        while (left := kills - sum(self.kills.values())) > 0 and time.monotonic() < until:
            self.once(left)
            self.rounds += 1
        if self.rounds and self.sidecars:
            self.wait(self.start("--resume"))
            if content(self.c) != self.right:
                raise SystemExit(f"{self.case.name}: --resume changed a complete C")

    def once(self, max_kills: int) -> None:
        """Run a product to completion, with up to `max_kills` kills."""
        self.fresh()
        kills = 0
        while True:
            if not self.sidecars and self.c.exists():
                break  # the kill came after the end
            process = self.start(*self.resume)
            if kills < min(max_kills, MAX_KILLS) and self.kill(process):
                kills += 1
                self.kills[self.phase()] += 1
                continue
            self.wait(process)
            break
        if content(self.c) != self.right:
            raise SystemExit(f"{self.case.name}: after {kills} kills C differs from the undisturbed result")

    def kill(self, process: "subprocess.Popen[str]") -> bool:
        """Kill a process at a random instant or after a change of the journal.

        Return False if it ended before.
        """
        if self.signal is not signal.SIGKILL:
            return self.interrupt(process)
        if not self.sidecars:
            pause(process, self.rng.uniform(0.2, 1) * self.seconds)
            process.kill()
            process.communicate()
            return process.returncode < 0
        sidecar = self.rng.choice(self.sidecars)
        path, record = sidecar / journal.JOURNAL, journal.read(sidecar)
        left = 1.0 if record is None else 1 - len(record.done) / tiles_of(record)
        how = self.rng.random()
        if how < 0.1:  # during the start of the process
            delay = self.rng.uniform(0.5, 1) * self.start_up
        elif how < 0.5:  # at a random time of the run
            self.await_change(process, sidecar / journal.LOCK)
            delay = self.rng.uniform(0, left * (self.seconds - self.start_up))
        else:
            for _ in range(self.rng.choice((1, 1, 2, 3, 4, 6))):
                self.await_change(process, path)
            delay = self.rng.uniform(0, JITTER)
        pause(process, delay)
        process.kill()
        process.communicate()
        return process.returncode < 0

    def interrupt(self, process: "subprocess.Popen[str]") -> bool:
        """Send the signal at a random instant. Return False if the process completed C before."""
        pause(process, self.rng.uniform(0, self.seconds))
        process.send_signal(self.signal)
        sent = time.monotonic()
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise SystemExit(f"{self.case.name}: a process was alive 60 s after {self.signal.name}") from None
        seconds = time.monotonic() - sent
        self.slowest = max(self.slowest, seconds)
        if seconds > MAX_SECONDS_TO_END:
            raise SystemExit(
                f"{self.case.name}: a process ended {seconds:.2f} s after {self.signal.name}\n{out}{err}"
            )
        # The signal came while Python itself was starting, before any code of oocgemm ran.
        in_start_up = "init_import_site" in err
        if process.returncode not in (0, 128 + self.signal, -self.signal) and not in_start_up:
            raise SystemExit(
                f"{self.case.name}: exit code {process.returncode} after {self.signal.name}\n{out}{err}"
            )
        return process.returncode != 0

    def await_change(self, process: "subprocess.Popen[str]", path: Path) -> None:
        """Wait until a file is created or written, or the process ends."""
        before = written(path)
        while process.poll() is None and written(path) == before:
            time.sleep(0.0003)

    def phase(self) -> str:
        """Return what the last kill interrupted, judged by the state of the journal."""
        if not self.sidecars:
            return "after the end" if self.c.exists() else "without a journal"
        record = journal.read(self.sidecars[-1])
        if record is None:
            return "before the journal"
        if record.complete is not None:
            return "after the end"
        if record.committed:
            return "in a commit"
        if not record.done:
            return "before the first tile was done"
        return "in a tile" if len(record.done) < tiles_of(record) else "all tiles done, C not sealed"


def pause(process: "subprocess.Popen[str]", seconds: float) -> None:
    """Wait for `seconds`, or until the process ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(min(0.001, max(0, deadline - time.monotonic())))


def tiles_of(record: journal.Record) -> int:
    return int(record.header["count"])


def written(path: Path) -> tuple[int, int]:
    """Return the size and the modification time of a file, or (-1, -1) if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


@click.command()
@click.option("--backend", type=click.Choice(["host", "cuda"]), default="host", show_default=True)
@click.option("--kills", default=200, show_default=True, help="Minimum number over all cases.")
@click.option("--seconds", default=3600.0, show_default=True, help="Start no new round after this time.")
@click.option("--extent", type=int, help="Rows and columns, a multiple of 12.  [default: 480, cuda 1536]")
@click.option("--case", "numbers", type=int, multiple=True, help="Run only these cases, numbered from 0.")
@click.option("--jobs", default=1, show_default=True, help="Cases that run at the same time.")
@click.option("--seed", default=2010, show_default=True)
@click.option(
    "--signal",
    "name",
    type=click.Choice(["SIGKILL", "SIGINT", "SIGTERM"]),
    default="SIGKILL",
    show_default=True,
)
@work_option
@output_option
def main(
    backend: str,
    kills: int,
    seconds: float,
    extent: int | None,
    numbers: Sequence[int],
    jobs: int,
    seed: int,
    name: str,
    work: Path | None,
    output: Path | None,
) -> None:
    """Run all cases until enough runs were killed, and check their results."""
    size = extent or (480 if backend == "host" else 1536)
    started = time.monotonic()
    cases = [CASES[number] for number in numbers] or list(CASES)

    def tortured(number: int, case: Case) -> Torture:
        place = Path(folder) / str(number)
        place.mkdir()
        torture = Torture(case, place, size, backend, random.Random(seed + number), signal.Signals[name])
        torture.go_on(-(-kills // len(cases)), started + seconds)
        times = f"{torture.rounds} completed rounds, {sum(torture.kills.values())} kills"
        click.echo(f"{case.name}: {times}, {time.monotonic() - started:.0f} s")
        return torture

    with tempfile.TemporaryDirectory(dir=work) as folder, ThreadPoolExecutor(jobs) as pool:
        all_of_them = list(pool.map(tortured, range(len(cases)), cases))
    total = sum((torture.kills for torture in all_of_them), Counter[str]())
    click.echo(f"{total.total()} kills; all results are bit-identical:")
    for phase, times in total.most_common():
        click.echo(f"  {times:5}  {phase}")
    slowest = max(torture.slowest for torture in all_of_them)
    if slowest:
        click.echo(f"the slowest process ended {slowest:.2f} s after {name}")
    found: dict[str, Any] = {
        "backend": backend,
        "extent": size,
        "signal": name,
        "kills": total.total(),
        "slowest_end_seconds": round(slowest, 3),
        "phases": dict(total),
    }
    found["cases"] = [
        asdict(torture.case)
        | {"name": torture.case.name, "rounds": torture.rounds, "kills": dict(torture.kills)}
        | {"seconds": round(torture.seconds, 3)}
        for torture in all_of_them
    ]
    keep(output, backend if name == "SIGKILL" else f"{backend} {name}", found)


if __name__ == "__main__":
    main()
