"""The process of one job: ``python -m oocgemm.service.job FOLDER ATTEMPT``.

It takes the lock of the job before anything else, so that the server knows that it is alive, whatever becomes
of the server. It then confines itself to the folders that the order allows, and computes the product with
``resume=True``. NumPy starts threads when it is imported, and Landlock would not restrict them. So NumPy, and
every module that uses it, is imported after that. Files in the folder of the job:

- ``order.json``: what to compute, and the number of the attempt; as ``confine``, the folders that the process
  may ``read`` and ``write``, or null for all. Written by the server.
- ``lock``: locked while the process is alive.
- ``owner.json``: the process that has the lock.
- ``before.json``: what there was at the path of C before the first attempt.
- ``tiles``: a line for each tile that has been written: the number of the attempt, row and column.
- ``live.json``: what the process does now (`oocgemm.service.live`).
- ``result.json``: how the process ended. It is renamed into place when it is durable.
- ``timeline``: the timeline of the run. ``log``: what the process printed.
- ``tmp``: temporary files of the run.
"""

import fcntl
import json
import os
import shutil
import signal
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oocgemm.errors import BudgetError, InputError, OocGemmError
from oocgemm.service import live
from oocgemm.service.confine.landlock import restrict

ORDER, LOCK, OWNER, BEFORE = "order.json", "lock", "owner.json", "before.json"
TILES, RESULT, TIMELINE, LOG, TEMPORARY = "tiles", "result.json", "timeline", "log", "tmp"
# struct flock of Linux on 64-bit machines: type, whence, start, length, pid.
FLOCK = "hhqqi0q"
# Exit statuses beside those of `oocgemm run`: another process has the lock, or SIGTERM stopped the job.
BUSY, STOPPED = 75, 143


def main(folder: Path, attempt: int) -> int:
    """Run the job of a folder; return the exit status of the process."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The lock belongs to the open file, and is free when the process ends. Others can ask for it.
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except (BlockingIOError, PermissionError):
        return BUSY
    order = json.loads((folder / ORDER).read_bytes())
    if order["attempt"] != attempt:
        return BUSY  # the server has started another process since
    signal.signal(signal.SIGTERM, _stop)
    status: dict[str, Any] = {"exit_code": STOPPED, "error": "stopped by SIGTERM"}
    try:
        write_json(folder / OWNER, {"attempt": attempt, "pid": os.getpid(), "start": start_of(os.getpid())})
        status = _run(folder, order)
    except KeyboardInterrupt:
        pass
    except Exception as error:
        traceback.print_exc()
        status = {"exit_code": 1, "error": f"{type(error).__name__}: {error}"}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        shutil.rmtree(folder / TEMPORARY, ignore_errors=True)
        write_json(folder / RESULT, {"attempt": attempt} | status)
    return int(status["exit_code"])


def _stop(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _confine(folder: Path, allowed: Mapping[str, Any] | None) -> None:
    """Restrict this process to its folder, and to the folders that its order allows; None for no restriction.

    Temporary files go to a folder of the job: others could replace those in a shared one by links.
    """
    temporary = folder / TEMPORARY
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    os.environ["TMPDIR"] = str(temporary)
    if allowed is not None:
        read, write = ([Path(each) for each in allowed[mode]] for mode in ("read", "write"))
        restrict(read, [*write, folder])


def _run(folder: Path, order: Mapping[str, Any]) -> dict[str, Any]:
    """Confine this process, and compute the product; return how that ended."""
    spec = order["spec"]
    try:
        _confine(folder, order["confine"])
        from oocgemm.jobs import api
        from oocgemm.service.spec import arguments

        options = arguments(spec)
        with open(folder / TILES, "a", buffering=1) as tiles:
            result = api.gemm(
                spec["a"],
                spec["b"],
                spec["c"],
                **options,
                device=order["device"] if options["backend"] == "cuda" else 0,
                resume=_resumes(folder, spec["c"], options),
                timeline=folder / TIMELINE,
                progress=_noting(order["attempt"], tiles.write, folder / live.LIVE),
            )
    except (OocGemmError, MemoryError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        code = 3 if isinstance(error, BudgetError) else 2 if isinstance(error, InputError) else 1
        return {"exit_code": code, "error": str(error) or type(error).__name__}
    wall = result.log.wall / 1e9
    return {
        "exit_code": 0,
        "error": None,
        "seconds": wall,
        "flops": result.plan.flops,
        "kept_tiles": len(result.plan.done),
    }


def _resumes(folder: Path, c: str, options: Mapping[str, Any]) -> bool:
    """Return whether to continue what there is at C.

    A job continues what an earlier attempt of it has begun. If none has begun, C is as it was before the
    first attempt. It then continues an unfinished run of the same product, unless it replaces or changes an
    old C.
    """
    before, now = folder / BEFORE, _state_of(c)
    if not before.exists():
        write_json(before, now)
    if json.loads(before.read_bytes()) != now:
        return True
    return not options.get("overwrite") and not options.get("beta")


def _state_of(c: str) -> dict[str, list[int] | None]:
    """Return what changes as soon as a run writes to C or to its journal."""
    from oocgemm.jobs.destination import Destination
    from oocgemm.jobs.journal import JOURNAL

    journal = Destination.parse(c).journal_folder
    paths = {"c": Path(c), "journal": Path(c) if journal is None else journal / JOURNAL}
    return {name: _stamp(path) for name, path in paths.items()}


def _stamp(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def _noting(attempt: int, write: Callable[[str], object], now: Path) -> Any:
    """Return a progress callback that writes a line per finished tile, and the file `now`."""

    def begin(plan: Any) -> Callable[[Any], None]:
        left: Counter[tuple[int, int]] = Counter()
        watch = live.observer(plan, now)

        def observe(span: Any) -> None:
            watch(span)
            if span.kind == "write":
                tile = span.tile
                left[tile] = left.get(tile, plan.tile_bytes(tile)) - span.bytes
                if left[tile] <= 0:
                    del left[tile]
                    write(f"{attempt} {tile[0]} {tile[1]}\n")

        return observe

    return begin


def start_of(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if there is no such process.

    Together with the pid, it identifies a process until the machine is booted again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file so that it is either complete and durable, or not there."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with open(new, "w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(new, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
