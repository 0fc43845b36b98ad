#!/usr/bin/env python
"""Kills or interrupts real `oocgemm run` processes, resumes them until they are done, and compares bit for bit.

A case is a product with one kind of C: chunk files, compressed, sharded, .npy; new, replaced, or in place with beta != 0.
Half of the kills fall at any instant of a process's life, the others are aimed: within two milliseconds of a line of the
journal, which is where a tile changes hands, or of the journal itself coming to be. After each it is noted what the
journal said. What comes out is compared with an undisturbed run of the same plan, and a last --resume must change
nothing. Exits with 1 if any result differs.

With --signal SIGINT or SIGTERM the signals fall at any instant from the start of a process to its end, and each process
has to end within `MAX_SECONDS_TO_END`.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from keeping import keep
from keeping import output as output_option
from keeping import work as work_option

from oocgemm import stores
from oocgemm.backends.host.blas import CHOICE, better_family
from oocgemm.jobs import journal
from oocgemm.planning import default_model

# Chunks across a matrix, and tiles.
CHUNKS, TILES = 12, 6
# An aimed kill comes this much after what it is aimed at, at most, in seconds.
JITTER = 0.002
# A case that is not done after so many kills is resumed in peace.
MAX_KILLS = 12
# A process ends so soon after SIGINT or SIGTERM.
MAX_SECONDS_TO_END = 2.0


@dataclass(frozen=True)
class Case:
    """A product: the kind of its C, beta, and the shape of its tiles in parts of the matrix."""

    kind: str
    beta: str = "0"
    existing: bool = False
    dtype: str = "float64"
    tiles: tuple[int, int, int] = (TILES, TILES, TILES)
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        how = f"beta = {self.beta}, in place" if self.beta != "0" else "replaced" if self.existing else "new"
        return " ".join((self.kind, self.dtype, "x".join(map(str, self.tiles)), *self.options, f"({how})"))


CASES = (
    Case("raw"),
    Case("raw", beta="0.5", existing=True),
    Case("zstd", tiles=(3, 6, 4)),
    Case("zstd", beta="-1", existing=True),
    Case("sharded", existing=True, tiles=(6, 3, 6)),
    Case("sharded", beta="0.5", existing=True),
    Case("npy", tiles=(4, 6, 3)),
    Case("npy", beta="0.5", existing=True),
    Case("raw", beta="0.5", existing=True, dtype="float16", tiles=(6, 4, 4), options=("--transpose-b",)),
    Case("raw", dtype="complex64", tiles=(6, 6, 2), options=("--adjoint-a", "--alpha", "0.7")),
)


def environment() -> dict[str, str]:
    """That of the processes: the better BLAS kernels at once, so that none starts itself anew."""
    better = better_family()
    return dict(os.environ) | ({CHOICE: better[1]} if better and CHOICE not in os.environ else {})


def make(path: Path, extent: int, kind: str, dtype: str, seed: int) -> None:
    """A matrix of noise, for operands and for a C that exists."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((extent, extent))
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


def content(path: Path) -> bytes:
    """The bits of a result; of a zarr array it must not say that it is unfinished."""
    if path.suffix == ".npy":
        return bytes(np.load(path).data)
    array = zarr.open_array(path, mode="r")
    assert "oocgemm" not in array.attrs, f"{path} says that it is unfinished"
    return bytes(np.asarray(array[:]).data)


class Torture:
    """One case: its operands, its command, its undisturbed result, and what befell the others."""

    def __init__(
        self, case: Case, folder: Path, extent: int, backend: str, rng: random.Random, number: signal.Signals
    ) -> None:
        self.case, self.folder, self.rng, self.signal = case, folder, rng, number
        self.slowest = 0.0  # seconds from a signal to the end of its process
        self.kills: Counter[str] = Counter()
        self.rounds = 0
        suffix = "npy" if case.kind == "npy" else "zarr"
        self.c, self.initial = folder / f"C.{suffix}", folder / f"initial.{suffix}"
        for seed, name in enumerate("AB"):
            make(folder / f"{name}.zarr", extent, "raw", case.dtype, seed)
        if case.existing:
            make(self.initial, extent, case.kind, case.dtype, 2)
        self.environment = environment()
        tile = "x".join(str(extent // parts) for parts in case.tiles)
        itemsize = np.dtype(case.dtype).itemsize
        reserve = default_model(backend, len(os.sched_getaffinity(0))).device_reserve
        memory = reserve + max(8 << 20, 3 * extent * extent * itemsize)
        self.command = [
            *(sys.executable, "-m", "oocgemm", "run"),
            *(str(folder / "A.zarr"), str(folder / "B.zarr"), str(self.c), "--quiet", "--backend", backend),
            *("--tile", tile, "--beta", case.beta, *case.options),
            *("--device-memory", str(memory), "--host-memory", str(2 * memory)),
            *(("--overwrite",) if case.existing and case.beta == "0" else ()),
            *(("--compressor", case.kind) if case.kind == "zstd" and not case.existing else ()),
        ]
        if case.kind in ("raw", "zstd") and not case.existing:
            self.command += ["--chunks", f"{extent // CHUNKS}x{extent // CHUNKS}"]
        found = stores.sidecar(str(self.c))
        assert found is not None
        self.sidecar = found
        self.fresh()
        start = time.monotonic()
        process = self.start()
        while not (self.sidecar / journal.JOURNAL).exists() and process.poll() is None:
            time.sleep(0.001)
        self.start_up = time.monotonic() - start
        self.wait(process)
        self.seconds = time.monotonic() - start
        self.right = content(self.c)

    def fresh(self) -> None:
        """C as it is before any run."""
        for path in (self.c, self.sidecar):
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
        if self.case.existing:
            (shutil.copytree if self.initial.is_dir() else shutil.copyfile)(self.initial, self.c)

    def start(self, *options: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self.command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def wait(self, process: "subprocess.Popen[str]") -> None:
        """A process that is to end by itself, and well."""
        out, err = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(process.args)}: exit code {process.returncode}\n{out}{err}")  # type: ignore[arg-type]

    def go_on(self, kills: int, until: float) -> None:
        """Run to the end again and again, until there were so many kills or it is late by the monotonic clock."""
        while (left := kills - sum(self.kills.values())) > 0 and time.monotonic() < until:
            self.once(left)
            self.rounds += 1
        if self.rounds:
            self.wait(self.start("--resume"))
            if content(self.c) != self.right:
                raise SystemExit(f"{self.case.name}: --resume has changed a C that was complete")

    def once(self, most: int) -> None:
        """Run to the end, killed up to `most` times on the way."""
        self.fresh()
        kills = 0
        while True:
            process = self.start("--resume")
            if kills < min(most, MAX_KILLS) and self.kill(process):
                kills += 1
                self.kills[self.phase()] += 1
                continue
            self.wait(process)
            break
        if content(self.c) != self.right:
            raise SystemExit(
                f"{self.case.name}: after {kills} kills C differs from that of an undisturbed run"
            )

    def kill(self, process: "subprocess.Popen[str]") -> bool:
        """Kill a process at an instant of its life; False if it had ended before."""
        if self.signal is not signal.SIGKILL:
            return self.interrupt(process)
        path, record = self.sidecar / journal.JOURNAL, journal.read(self.sidecar)
        left = 1.0 if record is None else 1 - len(record.done) / tiles_of(record)
        how = self.rng.random()
        if how < 0.1:  # while it starts
            delay = self.rng.uniform(0.5, 1) * self.start_up
        elif how < 0.5:  # while it runs
            self.await_change(process, self.sidecar / journal.LOCK)
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
        """Send the signal at any instant of a process's life; False if the process completed C."""
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
        in_start_up = "init_import_site" in err  # Python's own, before any code of ours
        if process.returncode not in (0, 128 + self.signal, -self.signal) and not in_start_up:
            raise SystemExit(
                f"{self.case.name}: exit code {process.returncode} after {self.signal.name}\n{out}{err}"
            )
        return process.returncode != 0

    def await_change(self, process: "subprocess.Popen[str]", path: Path) -> None:
        """Until a file is written, or made, or the process ends."""
        before = written(path)
        while process.poll() is None and written(path) == before:
            time.sleep(0.0003)

    def phase(self) -> str:
        """Where the last kill fell, by what it left."""
        record = journal.read(self.sidecar)
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
    """Wait so long, or until the process ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(min(0.001, max(0, deadline - time.monotonic())))


def tiles_of(record: journal.Record) -> int:
    down, across = record.header["tiles"]
    return int(down * across)


def written(path: Path) -> tuple[int, int]:
    """Changes when a file does."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


@click.command()
@click.option("--backend", type=click.Choice(["host", "cuda"]), default="host", show_default=True)
@click.option("--kills", default=200, show_default=True, help="How many at least, over all cases.")
@click.option("--seconds", default=3600.0, show_default=True, help="No new round begins after that.")
@click.option("--extent", type=int, help="Rows and columns, a multiple of 12.  [default: 480, cuda 1536]")
@click.option("--case", "numbers", type=int, multiple=True, help="Only these, counted from 0.")
@click.option("--jobs", default=1, show_default=True, help="Cases that are run side by side.")
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
    """Kill runs until there were enough kills, and check what they come to."""
    size = extent or (480 if backend == "host" else 1536)
    started = time.monotonic()
    cases = [CASES[number] for number in numbers] or list(CASES)

    def tortured(number: int, case: Case) -> Torture:
        place = Path(folder) / str(number)
        place.mkdir()
        torture = Torture(case, place, size, backend, random.Random(seed + number), signal.Signals[name])
        torture.go_on(-(-kills // len(cases)), started + seconds)
        times = f"{torture.rounds} times whole, {sum(torture.kills.values())} kills"
        click.echo(f"{case.name}: {times}, {time.monotonic() - started:.0f} s")
        return torture

    with tempfile.TemporaryDirectory(dir=work) as folder, ThreadPoolExecutor(jobs) as pool:
        all_of_them = list(pool.map(tortured, range(len(cases)), cases))
    total = sum((torture.kills for torture in all_of_them), Counter[str]())
    click.echo(f"{total.total()} kills, every result the same bit for bit:")
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
