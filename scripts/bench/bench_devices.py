#!/usr/bin/env python
"""Measure runs on several GPUs of one host: time, bytes read, and whether C has the bits of one GPU.

    python scripts/bench/bench_devices.py --output devices.json --timelines timelines.tar.gz
    python scripts/bench/bench_devices.py --backend host --scale 64 --rounds 1 --output /tmp/devices.json

A case multiplies two matrices on several lists of devices, in turns, after a round that is not measured. In
that round, a digest of each C is compared with that of the first list. The matrices have small integers, so
that C is exact whatever the tiles are. The sources are:

- "page-cache": zarr arrays on a disk (--disk), whose few distinct chunk files stay in the page cache. C is a
  NumPy array whose pages are faulted in.
- "memory" and "pinned": NumPy arrays, in pageable and in pinned memory. C too.
- "zarr": zarr arrays on a tmpfs (--folder). C too.

In the case "dask", a LocalCUDACluster of dask-cuda with one worker per GPU takes turns with `--devices all`.

Every case runs in a process of its own, the most important one first. A sample that would not end within
--minutes is left out. Each sample is stored when it ends, with the prediction of its plan. The timeline of
the slowest sample of each list is kept.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from device_arrays import digest_of, fault_in, filled, pin, remove, touched
from keeping import here
from linked import linked_zarr

import oocgemm
from oocgemm.timeline import report

CHUNK, DISTINCT = 2048, 64
DASK = "dask"


@dataclass(frozen=True)
class Case:
    """Products of two matrices from `source`, on every list in `devices`, in turns.

    `size` is m, k and n of the product: three numbers, or one for all of them. Matrices of other shapes than
    squares are in memory.
    """

    source: str
    size: int | tuple[int, int, int]
    devices: tuple[str, ...]
    rounds: int = 2
    dtype: str = "float64"

    @property
    def name(self) -> str:
        """What identifies the case."""
        size = self.size if isinstance(self.size, int) else "x".join(map(str, self.size))
        return f"{self.source} {size} {self.dtype}: {' | '.join(self.devices)}"


EVERY, TWICE = ("0", "all"), ("0", "0,0")
CASES = (
    Case("page-cache", 65536, EVERY),
    Case("memory", 65536, EVERY),
    Case("memory", 40960, TWICE),
    Case("memory", 53248, TWICE),
    Case("page-cache", 45056, TWICE),
    Case("page-cache", 32768, TWICE),
    Case("zarr", 65536, EVERY),
    Case("zarr", 65536, ("all", DASK)),
    Case("zarr", 45056, TWICE),
    Case("pinned", 65536, EVERY),
    Case("memory", 65536, TWICE),
    *(
        Case(source, size, EVERY, 4, dtype)
        for size, dtype in (
            ((4000, 400_000, 4000), "float32"),
            ((800_000, 1000, 1000), "float32"),
            (30_000, "float64"),
        )
        for source in ("memory", "pinned")
    ),
)


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON with the samples.")
@click.option("--timelines", type=click.Path(path_type=Path), help="tar.gz for the kept timelines.")
@click.option("--minutes", default=8.0, show_default=True, help="No sample ends later than this.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("/dev/shm/oocgemm-devices"))
@click.option(
    "--disk",
    type=click.Path(path_type=Path),
    default=Path(tempfile.gettempdir()) / "oocgemm-devices-disk",
    help="Folder for arrays that are read from the page cache. It is deleted.  [default: in the temp folder]",
)
@click.option("--backend", default="cuda", show_default=True)
@click.option("--scale", default=1, show_default=True, help="Divide all sizes by this number.")
@click.option("--rounds", type=int, help="Samples per list.  [default: those of the case]")
@click.option("--only", multiple=True, help="Measure only cases whose name contains this text.")
@click.option("--devices", multiple=True, help="Measure these lists in all cases but dask.")
@click.option("--prefault", default=160, show_default=True, help="GiB of memory to fault in before.")
@click.option("--number", type=int, hidden=True, help="Measure this case in this process.")
@click.option("--until", type=float, hidden=True)
def main(
    output: Path,
    timelines: Path | None,
    minutes: float,
    folder: Path,
    disk: Path,
    backend: str,
    scale: int,
    rounds: int | None,
    only: tuple[str, ...],
    devices: tuple[str, ...],
    prefault: int,
    number: int | None,
    until: float | None,
) -> None:
    if number is not None and until is not None:
        bench = Bench(CASES[number], output, (folder, disk), backend, scale, rounds, devices, until)
        bench.run()
        return
    until = time.time() + 60 * minutes
    output.unlink(missing_ok=True)
    if backend == "cuda":
        fault_in(prefault << 30)
    arguments = [*sys.argv[1:], "--until", str(until)]
    for index, case in enumerate(CASES):
        if (only and not any(text in case.name for text in only)) or time.time() > until:
            continue
        if case.source == "pinned" and backend != "cuda":
            continue
        print(f"== {case.name}", flush=True)
        # A process of its own: a case that fails or hangs leaves time and memory to the others.
        command = [sys.executable, __file__, *arguments, "--number", str(index)]
        child = subprocess.Popen(command, start_new_session=True)
        try:
            child.wait(max(1.0, until - time.time()))
        except subprocess.TimeoutExpired:
            print(f"   {case.name} was stopped: the time is over", flush=True)
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if timelines is not None:
        pack(logs_of(folder), timelines)
    for arrays in (folder, disk):
        shutil.rmtree(arrays, ignore_errors=True)
    shutil.rmtree(logs_of(folder), ignore_errors=True)
    if output.exists():
        summarize(output)


class Bench:
    """Measures one case."""

    def __init__(
        self,
        case: Case,
        output: Path,
        folders: tuple[Path, Path],
        backend: str,
        scale: int,
        rounds: int | None,
        devices: tuple[str, ...],
        until: float,
    ) -> None:
        self.case, self.output, (self.folder, self.disk) = case, output, folders
        self.backend, self.until = backend, until
        whole = (case.size,) * 3 if isinstance(case.size, int) else case.size
        self.extents = [extent // scale for extent in whole]
        self.size = max(self.extents[::2])  # rows or columns of C
        self.rounds = rounds or case.rounds
        self.lists = devices if devices and DASK not in case.devices else case.devices
        if backend == "host":
            self.lists = tuple("0,0" if given == "all" else given for given in self.lists)
        self.lasted: dict[str, float] = {}  # seconds of the latest run, by list
        self.slowest: defaultdict[str, float] = defaultdict(float)
        self.digest: int | None = None
        self.logs = logs_of(self.folder)
        self.client: Any = None
        self.workers = ""  # the kind of cluster

    def run(self) -> None:
        """Run the rounds. An error of one list leaves out only that list."""
        self.logs.mkdir(parents=True, exist_ok=True)
        begun = time.time()
        with self.operands() as (a, b, c), self.cluster():
            print(f"   prepared in {time.time() - begun:.1f} s", flush=True)
            lists = list(self.lists)
            for number in range(self.rounds + 1):
                for given in list(lists):
                    guess = self.lasted.get(given, 2.0) + 2.0
                    if time.time() + guess > self.until:
                        print(f"   devices {given}: no time for round {number}", flush=True)
                        continue
                    try:
                        self.sample(number, given, a, b, c)
                    except Exception as error:
                        traceback.print_exc()
                        self.keep({"devices": given, "error": f"{type(error).__name__}: {error}"})
                        lists.remove(given)

    def sample(self, number: int, given: str, a: Any, b: Any, c: Any) -> None:
        """Run a product on one list of devices, and store what was measured."""
        kind = "dask " if DASK in self.lists else ""
        log = self.logs / f"{kind}{self.case.source} {self.size} {given}.jsonl".replace(" ", "_")
        fresh = log.with_suffix(".new")
        if isinstance(c, Path):
            remove(c)
        how: dict[str, Any] = {"client": self.client} if given == DASK else {"devices": given}
        begun = time.time()
        result = oocgemm.gemm(a, b, c, backend=self.backend, timeline=fresh, **how)
        self.lasted[given] = time.time() - begun
        seconds, plan = result.log.wall / 1e9, result.plan
        found: dict[str, Any] = {"devices": given, "round": number, "seconds": seconds}
        found["predicted"] = plan.prediction.total
        found["plan"] = {
            "tile": str(plan.tile),
            "tiles": plan.grid.shape,
            "slots": f"{plan.slots.a}+{plan.slots.b}+{plan.slots.c}, host {plan.slots.host_a}+"
            f"{plan.slots.host_b}+{plan.slots.host_c}",
            "traversal": str(plan.candidate.traversal),
            "lanes": dict(plan.prediction.lanes),
        }
        spans = result.timeline.spans
        # Panels without host slots are read when they are uploaded, but not when they are copied from a GPU.
        streamed = [operand for operand in "AB" if plan.slots.streams(operand)]
        found["h2d_bytes"] = sum(span.bytes for span in spans if span.lane == "h2d")
        found["read_bytes"] = sum(
            span.bytes
            for span in spans
            if span.lane in ("read", "decode")
            or (span.lane == "h2d" and span.operand in streamed and span.stream != "peer")
        )
        described = result.log.header.get("devices") or []
        found["names"] = [f"{each['number']}: {each['device']}" for each in described]
        if given == DASK:
            found["workers"] = self.workers
            found["names"] = [f"{one['name']}: {one['device']}" for one in result.log.header["workers"]]
        with suppress(Exception):
            shares = range(1 if given == DASK else len(described))
            found["compute_shares"] = [report(result.timeline, each).compute_share for each in shares]
        if number == 0:
            digest = digest_of(c, self.size, self.case.dtype)
            self.digest = digest if self.digest is None else self.digest
            found["equal_bits"] = digest == self.digest
        self.keep(found)
        bits = {True: ", bits equal", False: ", BITS DIFFER"}.get(bool(found.get("equal_bits")), "")
        bits = bits if number == 0 else ""
        shown = [round(share or 0, 3) for share in found.get("compute_shares", [])]
        print(
            f"   round {number} devices {given}: {seconds:.3f} s, predicted {plan.prediction.total:.3f}, "
            f"tile {plan.tile}, read {found['read_bytes'] / 1e9:.1f} GB, "
            f"h2d {found['h2d_bytes'] / 1e9:.1f} GB, compute shares {shown}, "
            f"{'; '.join(found['names'])}{bits}",
            flush=True,
        )
        if number and seconds > self.slowest[given]:
            self.slowest[given] = seconds
            os.replace(fresh, log)
        fresh.unlink(missing_ok=True)

    def keep(self, sample: dict[str, Any]) -> None:
        """Add a sample to the results file."""
        kept = json.loads(self.output.read_text()) if self.output.exists() else here() | {"cases": {}}
        kept["cases"].setdefault(self.case.name, []).append({"extents": self.extents} | sample)
        fresh = self.output.with_suffix(".new")
        fresh.write_text(json.dumps(kept, indent=1, default=str) + "\n")
        os.replace(fresh, self.output)

    @contextmanager
    def operands(self) -> Iterator[tuple[Any, Any, Any]]:
        """Create A and B, and what to pass as C."""
        (m, k, n), dtype = self.extents, self.case.dtype
        if self.case.source == "page-cache":
            shutil.rmtree(self.folder, ignore_errors=True)  # frees memory
            yield *self.stored(self.disk), touched((m, n), dtype)
            return
        if self.case.source == "zarr":
            yield *self.stored(self.folder), self.folder / "C"
            remove(self.folder / "C")
            return
        shutil.rmtree(self.folder, ignore_errors=True)  # frees memory
        a, b, c = (filled(x, dtype, seed) for seed, x in enumerate(((m, k), (k, n), (m, n))))
        if self.case.source == "pinned":
            pin(a, b, c)
        yield a, b, c

    def stored(self, folder: Path) -> tuple[Path, Path]:
        """Return A and B as zarr arrays in a folder. Cases of the same size use the same arrays."""
        a, b = (folder / f"{name} {self.size}" for name in "AB")
        if not b.exists():
            shutil.rmtree(folder, ignore_errors=True)
            chunk = min(CHUNK, self.size)
            while self.size % chunk:
                chunk //= 2
            for seed, path in enumerate((a, b)):
                shape = self.size, self.size
                linked_zarr(path, shape, chunk, DISTINCT, seed, dtype=self.case.dtype, integers=True)
        return a, b

    @contextmanager
    def cluster(self) -> Iterator[None]:
        """Start the workers for a case with dask."""
        if DASK not in self.lists:
            yield
            return
        import distributed

        connect: Any = distributed.Client  # its constructor has no types
        with workers(self.backend) as (kind, cluster), connect(cluster) as client:
            self.client, self.workers = client, kind
            yield


@contextmanager
def workers(backend: str) -> Iterator[tuple[str, Any]]:
    """Start a dask cluster with one worker per GPU: that of dask-cuda, or plain workers if that fails.

    Yield its kind and the cluster.
    """
    common: dict[str, Any] = {"dashboard_address": None, "threads_per_worker": 1}
    count = oocgemm.backends.open_backend("cuda").device_count() if backend == "cuda" else 2
    try:
        from dask_cuda import LocalCUDACluster  # type: ignore[import-not-found]

        cluster = LocalCUDACluster(
            CUDA_VISIBLE_DEVICES=list(range(count)), memory_limit=None, local_directory="/tmp", **common
        )
    except Exception:
        traceback.print_exc()
        print("   dask-cuda does not start: plain dask workers are used", flush=True)
    else:
        print(f"   LocalCUDACluster with {len(cluster.workers)} workers", flush=True)
        with cluster:
            yield "dask-cuda", cluster
        return
    import distributed

    local: Any = distributed.LocalCluster  # its constructor has no types

    with local(n_workers=0, processes=False, protocol="tcp", host="127.0.0.1", **common) as plain:
        command = [sys.executable, "-m", "distributed.cli.dask_worker", plain.scheduler_address]
        command += ["--nthreads", "1", "--memory-limit", "0", "--no-dashboard", "--local-directory", "/tmp"]
        started = [
            subprocess.Popen(
                command,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for gpu in range(count)
        ]
        try:
            until = time.time() + 30
            while len(plain.scheduler_info["workers"]) < count and time.time() < until:
                time.sleep(0.1)
            yield "dask", plain
        finally:
            for process in started:
                process.terminate()
                process.wait()


def logs_of(folder: Path) -> Path:
    """Return the folder for timelines."""
    return Path(tempfile.gettempdir()) / f"{folder.name}-logs"


def pack(logs: Path, target: Path) -> None:
    """Put all timelines into one archive."""
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(logs.glob("*.jsonl")):
            archive.add(path, path.name)


def summarize(output: Path) -> None:
    """Print medians, relative to the first list of each case."""
    print("case, devices: median s (least to most), speed, predicted s, read GB, relative")
    for name, samples in json.loads(output.read_text())["cases"].items():
        measured = [one for one in samples if one.get("round")]
        first: tuple[float, int] | None = None
        for given in dict.fromkeys(one["devices"] for one in measured):
            mine = [one for one in measured if one["devices"] == given]
            times, read = [one["seconds"] for one in mine], mine[-1]["read_bytes"]
            first = first or (statistics.median(times), read)
            middle = statistics.median(times)
            print(
                f"{name:34} {given:5}{middle:8.3f} ({min(times):.3f} to {max(times):.3f}) "
                f"{first[0] / middle:6.3f} {mine[-1]['predicted']:8.3f} {read / 1e9:8.1f} "
                f"{read / max(1, first[1]):6.3f}"
            )
        for one in samples:
            if "error" in one:
                print(f"{name:34} {one['devices']:5}{one['error']}")


if __name__ == "__main__":
    main()
