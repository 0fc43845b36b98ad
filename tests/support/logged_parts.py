"""Small distributed runs on the host backend: a child process for each attempt at a part, with its own log.

`python -m tests.support.logged_parts FOLDER TOP:BOTTOM:LEFT:RIGHT:KILL_AFTER` computes the tiles in a
rectangle of the grid. All other tiles of the plan are marked done. If KILL_AFTER is positive, the process
kills itself after so many writes.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns, time

import numpy as np
import zarr

import oocgemm
from oocgemm.jobs.option_groups import Options
from oocgemm.jobs.request import parse
from oocgemm.jobs.run import PreparedJob
from oocgemm.planning import Plan
from oocgemm.system.threads import Cancel
from oocgemm.timeline import Recorder, Span, Timeline, log
from oocgemm.timeline.log import WorkerLog, merge

M, N, K, TILE = 240, 200, 160, "80x50x40"
GRID = (3, 4)


@dataclass(frozen=True)
class Part:
    """One attempt: the name of the worker, the tiles, and the number of writes after which it is killed."""

    worker: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    kill_after: int = 0


def operands(folder: Path) -> None:
    """Write A and B, of small integers, to a folder."""
    rng = np.random.default_rng(7)
    for name, shape, chunks in (("a", (M, K), (80, 40)), ("b", (K, N), (40, 50))):
        data = rng.integers(-9, 9, shape).astype("float64")
        zarr.create_array(folder / f"{name}.zarr", data=data, chunks=chunks)


def distributed_run(folder: Path, parts: list[Part], offset_ns: int = 0) -> tuple[Timeline, list[WorkerLog]]:
    """Run parts one after another, each in a child process; return the merged timeline and the logs.

    `offset_ns` is the clock offset that each worker reports.
    """
    began, started = perf_counter_ns(), time()
    logs = []
    for number, part in enumerate(parts):
        home = folder / f"part{number}"
        home.mkdir()
        ranges = ":".join(str(x) for x in (*part.rows, *part.cols, part.kill_after))
        done = subprocess.run([sys.executable, "-m", "tests.support.logged_parts", home, ranges], check=False)
        assert done.returncode == (-signal.SIGKILL if part.kill_after else 0)
        logs.append(
            WorkerLog(
                *(part.worker, f"host of {part.worker}", "2 cores", offset_ns, 1000),
                *(str(home / "log.jsonl"), number, 0, part.kill_after > 0),
            )
        )
    sources = [str(folder / f"{name}.zarr") for name in "ab"]
    plan = oocgemm.plan(sources[0], sources[1], tile=TILE, backend="host")
    header: dict[str, object] = {"started": started, "plan": plan.to_dict()}
    return merged(header, logs, perf_counter_ns() - began), logs


def merged(header: dict[str, object], logs: list[WorkerLog], wall: int, path: Path | None = None) -> Timeline:
    """Merge the logs of attempts; return the timeline of a run of `wall` nanoseconds."""
    recorder = Recorder(header, path)
    recorder.finish(wall, merge(recorder, logs))
    recorder.close()
    return recorder.timeline()


def main(home: Path, top: int, bottom: int, left: int, right: int, kill_after: int) -> None:
    """Compute the tiles of one part, in this process."""
    folder = home.parent
    sources = [str(folder / f"{name}.zarr") for name in "ab"]
    options: Options = {
        "tile": TILE,
        "chunks": (80, 50),
        "backend": "host",
        "timeline": str(home / "log.jsonl"),
    }
    prepared = PreparedJob(parse(sources[0], sources[1], str(home / "c.zarr"), options))
    job = prepared._job
    inside = {(i, j) for i in range(top, bottom) for j in range(left, right)}
    every = {(i, j) for i in range(GRID[0]) for j in range(GRID[1])}
    assert job.plan.grid.shape == GRID
    prepared._job = replace(job, plan=replace(job.plan, done=frozenset(every - inside)))
    prepared.run(_killer(kill_after), Cancel())


def _killer(after: int) -> Callable[[Plan], Callable[[Span], None]] | None:
    """Return a progress callback that kills the process after some writes. 0 means never."""
    if not after:
        return None
    log.FLUSH_SECONDS = 0.0  # the log of a killed process ends with its last operation
    left = after

    def count(span: Span) -> None:
        nonlocal left
        left -= span.kind == "write"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda plan: count


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2].split(":")))
