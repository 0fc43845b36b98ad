#!/usr/bin/env python
"""Products from zarr to zarr in a memory budget: oocgemm, dask, cubed and blosc2 against NumPy in-core.

Each product runs in its own process (`cpu_contenders.py`) on the same arrays on disk. Imports, the start of
BLAS threads and a small warm-up product are not timed. Each round runs every contender once, and ratios
compare runs of the same round. Before a cold run the files of A and B are evicted from the page cache. Before
a warm run they are read into it. NumPy has A and B in memory and leaves C there. The other contenders write
C, and only oocgemm makes C durable. Another process samples the memory, and the figure is the growth since
the start of the product. The script also records how long the cores worked for other processes: discard
rounds in which that was much.

Results go to one file with a key per case and BLAS kernel family, so that rounds of different processors are
not mixed. A later invocation adds its rounds to the file. Contenders that are not installed are skipped with
a message: run scripts/setup bench to install them.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from cpu_contenders import CONTENDERS, Case, make_operands

from oocgemm.backends.host.blas import blas_name
from oocgemm.machine.info import info

TOP = Path(__file__).resolve().parent
PEERS = ("dask", "cubed", "blosc2")
PACKAGES = ("oocgemm", "numpy", "zarr", *PEERS)
SAMPLING_SECONDS = 0.2  # interval between two samples of memory; each sample takes processor time
Round = dict[str, dict[str, Any]]  # the figures of each run of a round, by `label`


def label(name: str, cold: bool) -> str:
    """Return the key under which a round stores the figures of a contender."""
    return f"{name}, cold" if cold else name


LABELS = [label(name, cold) for name in CONTENDERS for cold in (False, True)]


def set_cache(folder: Path, cold: bool) -> None:
    """Evict every file below a folder from the page cache, or read it into the page cache."""
    os.sync()
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb", buffering=0) as file:
            if cold:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(8 << 20):
                    pass


def anonymous_bytes(process: int) -> int:
    """Return the anonymous memory of a process and its children, in bytes."""
    total = 0
    with contextlib.suppress(OSError):  # the process may end at any moment
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        total = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(anonymous_bytes(int(one)) for one in (task / "children").read_text().split())
    return total


def busy_elsewhere(process: int) -> float:
    """Return the processor time that all other processes have used since boot, in seconds.

    Subtract two results to get the time used in between.
    """
    ticks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = ticks[:8]
    own = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11:15]
    all_ticks = user + nice + system + irq + softirq + steal
    return (all_ticks - sum(map(int, own))) / os.sysconf("SC_CLK_TCK")


def remove(*places: Path) -> None:
    """Delete files and folders, if they exist."""
    for place in places:
        if place.exists():
            (shutil.rmtree if place.is_dir() else os.unlink)(place)


def run(name: str, cold: bool, folder: Path, case: Case, settings: dict[str, str]) -> dict[str, Any]:
    """Run one product of one contender.

    Return its seconds, the growth of its memory in bytes from the start to the peak, and what it printed.
    """
    place = folder.parent / "C"
    leftovers = (place, folder.parent / "cubed")
    remove(*leftovers)  # files that a killed run has left
    arguments = {"contender": name, "case": asdict(case), "operands": str(folder), "place": str(place)}
    line = [
        sys.executable,
        str(TOP / "cpu_contenders.py"),
        json.dumps(arguments | {"settings": settings}),
    ]
    finished = threading.Event()
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # wait for "ready"
        set_cache(folder, cold)
        with contextlib.suppress(BrokenPipeError):
            print("go", file=process.stdin, flush=True)
        process.stdout.readline()  # wait for "start"
        base = peak = anonymous_bytes(process.pid)
        elsewhere = -busy_elsewhere(process.pid)

        def sample() -> None:
            nonlocal peak
            while not finished.wait(SAMPLING_SECONDS):
                peak = max(peak, anonymous_bytes(process.pid))

        sampler = threading.Thread(target=sample)
        sampler.start()
        process.stdout.readline()  # wait for "done"
        elsewhere += busy_elsewhere(process.pid)
        finished.set()
        sampler.join()
        last = process.stdout.readline()
    remove(*leftovers)
    if process.returncode:
        raise click.ClickException(f"{name} failed")
    found: dict[str, Any] = json.loads(last)
    memory = {"base_mib": base / 2**20, "peak_mib": (peak - base) / 2**20}
    return found | memory | {"busy_elsewhere_seconds": elsewhere}


def spread(values: list[float], digits: str = ".3f") -> str:
    """Format values as median (minimum-maximum)."""
    if not values:
        return "-"
    return f"{statistics.median(values):{digits}} ({min(values):{digits}}-{max(values):{digits}})"


def summary(rounds: list[Round]) -> Iterator[str]:
    """Yield a line per contender: seconds, speed relative to in-core in the same rounds, peak memory."""
    for name in LABELS:
        having = [one for one in rounds if name in one]
        if having:
            seconds = spread([one[name]["seconds"] for one in having])
            both = [one for one in having if "in-core" in one]
            of_in_core = spread([one["in-core"]["seconds"] / one[name]["seconds"] for one in both])
            peak = max(one[name].get("peak_mib", 0) for one in having)
            figures = f"of in-core {of_in_core:20}  peak {peak:5.0f} MiB  runs {len(having)}"
            yield f"{name:18} {seconds:24} s  {figures}"


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@click.command()
@click.option("--size", default="12000x12000x12000", show_default=True, metavar="MxKxN")
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@click.option("--chunk", default=1000, show_default=True, help="Side of the stored chunks.")
@click.option("--device-memory", default="960MiB", show_default=True)
@click.option("--host-memory", default="64MiB", show_default=True)
@click.option(
    "--contender", "names", multiple=True, type=click.Choice(list(CONTENDERS)), help="[default: all]"
)
@click.option("--cold/--warm", default=None, help="State of the page cache.  [default: each in turn]")
@click.option("--rounds", default=3, show_default=True)
@click.option("--discard", default=1, show_default=True, help="Warm-up rounds, not counted.")
@click.option("--fresh", is_flag=True, help="Discard the rounds of this case in the results file.")
@click.option("--data", type=click.Path(), help="Keep the operands in this folder for the next time.")
@click.option("--output", type=click.Path(), default=str(TOP / "results" / "bench_cpu.json"))
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Setting of a contender, such as dask=threads.",
)
def main(
    size: str,
    dtype: str,
    chunk: int,
    device_memory: str,
    host_memory: str,
    names: tuple[str, ...],
    cold: bool | None,
    rounds: int,
    discard: int,
    fresh: bool,
    data: str | None,
    output: str,
    settings: tuple[str, ...],
) -> None:
    m, k, n = (int(extent) for extent in size.split("x"))
    case = Case(m, k, n, dtype, chunk, device_memory, host_memory)
    parsed_settings = dict(setting.split("=", 1) for setting in settings)
    chosen = list(names or CONTENDERS)
    for name in [peer for peer in PEERS if peer in chosen and peer not in versions()]:
        click.echo(f"skipping {name}: it is not installed (run scripts/setup bench)")
        chosen.remove(name)
    if not chosen:
        return
    states = (False, True) if cold is None else (cold,)
    # The in-core product reads no files while it is timed, so it runs once and not for each state of the page
    # cache.
    turns = [(name, state) for name in chosen for state in (states if name != "in-core" else (False,))]
    record = Path(output)
    cases = json.loads(record.read_text())["cases"] if record.exists() else {}
    key = f"{size} {dtype} {blas_name()}"
    done: list[Round] = [] if fresh or key not in cases else cases[key]["rounds"]
    with contextlib.ExitStack() as stack:
        top = data or stack.enter_context(tempfile.TemporaryDirectory(prefix="oocgemm-bench-", dir="."))
        folder = Path(top).absolute() / f"{size}-{dtype}"
        folder.mkdir(parents=True, exist_ok=True)
        make_operands(folder, case, converted="blosc2" in chosen)
        for number in range(discard + rounds):
            one: Round = {}
            first = number % len(turns)  # each round starts with another contender
            for name, state in turns[first:] + turns[:first]:
                found = one[label(name, state)] = run(name, state, folder, case, parsed_settings)
                which = f"round {number - discard + 1}" if number >= discard else "not counted"
                figures = f"{found['seconds']:.3f} s, {found['peak_mib']:.0f} MiB"
                others = f"other processes used {found['busy_elsewhere_seconds']:.2f} s of the cores"
                click.echo(f"{which}: {label(name, state)} {figures}, {others}")
            if number < discard:
                continue
            done.append(one)
            cases[key] = {
                "case": asdict(case),
                "budget_mib": case.budget / 2**20,
                "machine": info()["machine"],
                "versions": versions(),
                "date": str(datetime.now(UTC).date()),
                "rounds": done,
            }
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
    click.echo(f"\n{key}; median (minimum-maximum):")
    for line in summary(done):
        click.echo(line)


if __name__ == "__main__":
    main()
