"""One job of a worker: it computes the product with ``resume=True`` and leaves a result.

The files of a job lie in its folder. The worker sees them by hard links in its own folder (`launch.hand`), so
nothing is renamed: every file is written in place, by the process that has the lock.

- ``lock``: locked while a process computes the job. It contains the number of the latest attempt, which the
  server writes.
- ``owner.json``: the process that has the lock.
- ``before.json``: what there was at the path of C before the first attempt. Only jobs that replace or change
  an old C have it.
- ``tiles``: a line for each tile that has been written: the number of the attempt, row and column.
- ``live.json``: what the process does now (`oocgemm.service.live`).
- ``result.json``: how the attempt ended. It is durable when the lock is free.
- ``timeline``: the timeline of the run. ``log``: what the process printed.

Why files that are written in place are enough:

- Only the process with the lock writes these files, apart from the number in ``lock``.
- The result is read when that process has ended, or has said that the attempt has ended. It is then complete,
  or the process died within the write. An incomplete JSON object cannot be parsed, and counts as none.
- If the machine stops, every process ends with it. So ``lock`` and ``owner.json`` need not be durable. An
  attempt without a durable result is repeated. The journal of C says what is done.
- ``before.json`` is durable before the run writes to C. If it is incomplete, C is as it was.
"""

import fcntl
import json
import os
import signal
import struct
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oocgemm.errors import BudgetError, DataWarning, InputError, OocGemmError
from oocgemm.service import live
from oocgemm.system.text import plain

LOCK, OWNER, BEFORE, TILES = "lock", "owner.json", "before.json", "tiles"
RESULT, TIMELINE, LOG = "result.json", "timeline", "log"
FILES = (LOCK, OWNER, BEFORE, TILES, live.LIVE, RESULT, TIMELINE, LOG)
# struct flock of Linux on 64-bit machines: type, whence, start, length, pid.
FLOCK = "hhqqi0q"
# Exit statuses beside those of `oocgemm run`: another process has the lock, or SIGTERM stopped the job.
BUSY, STOPPED = 75, 143
# Advice of a run, and what a job says instead.
_ADVICE = (
    (" in place of --resume", ""),
    ("drop --resume to start from the present C", "submit a new job to start from the present C"),
    (" and drop --resume", " and submit a new job"),
)
# Warnings about the data that are noted, and characters of each.
MAX_WARNINGS, MAX_WARNING = 100, 2000
# Statuses after which the process is as before: success, wrong input, and budgets that are too small.
UNHARMED = frozenset({0, 2, 3})


def run(folder: Path, order: Mapping[str, Any], begin: Callable[[], object]) -> tuple[int, bool]:
    """Run an attempt of a job.

    Args:
        folder: has the files of the job.
        order: ``attempt``, its number; ``spec``, what to compute; ``device``, the number of the device.
        begin: called when this process has the lock; raises an `OocGemmError` if it cannot compute a job.

    Returns:
        The exit status, and whether this process can run another job.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return BUSY, False  # a later server has removed the folder of this worker
    try:
        # The lock belongs to the open file, and is free when the process ends. Others can ask for it.
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        if int(os.pread(lock, 32, 0)) != order["attempt"]:
            return BUSY, False  # the server has started another attempt since
        with _printing_to(folder / LOG):
            return _attempt(folder, order, begin)
    except (BlockingIOError, PermissionError):
        return BUSY, False
    finally:
        os.close(lock)


def _attempt(folder: Path, order: Mapping[str, Any], begin: Callable[[], object]) -> tuple[int, bool]:
    """Run an attempt, and write its result. Then SIGTERM is ignored."""
    attempt, keep = order["attempt"], False
    status: dict[str, Any] = {"exit_code": STOPPED, "error": "stopped by SIGTERM"}
    warned: list[str] = []
    try:
        _write(folder / OWNER, {"attempt": attempt, "pid": os.getpid(), "start": start_of(os.getpid())})
        begin()
        with _noting_warnings(warned):
            status = _compute(folder, order)
        keep = status["exit_code"] in UNHARMED
    except KeyboardInterrupt:
        pass
    except InputError as error:
        status = {"exit_code": 2, "error": str(error)}
    except Exception as error:
        traceback.print_exc()
        status = {"exit_code": 1, "error": f"{type(error).__name__}: {error}"}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _write(folder / RESULT, {"attempt": attempt, "warnings": warned} | status, durable=True)
    return int(status["exit_code"]), keep


def _compute(folder: Path, order: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the product; return how that ended."""
    spec = order["spec"]
    try:
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
        text = _for_jobs(str(error)) or type(error).__name__
        print(f"Error: {text}", file=sys.stderr)
        code = 3 if isinstance(error, BudgetError) else 2 if isinstance(error, InputError) else 1
        return {"exit_code": code, "error": text}
    wall = result.log.wall / 1e9
    return {
        "exit_code": 0,
        "error": None,
        "seconds": wall,
        "flops": result.plan.flops,
        "kept_tiles": len(result.plan.done),
    }


def _for_jobs(message: str) -> str:
    """Return the message of an error of a run for a job, which always resumes and has no option for that."""
    for found, shown in _ADVICE:
        message = message.replace(found, shown)
    return message


@contextmanager
def _noting_warnings(noted: list[str]) -> Iterator[None]:
    """Print warnings in the `with` block on one line each, and note those about the data."""

    def show(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
        text = plain(str(message))[:MAX_WARNING]
        print(f"Warning: {text}", file=sys.stderr)
        if issubclass(category, DataWarning) and text not in noted and len(noted) < MAX_WARNINGS:
            noted.append(text)

    with warnings.catch_warnings():
        warnings.simplefilter("always", DataWarning)  # also if an earlier job has issued the same
        warnings.showwarning = show
        yield


@contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    """Append what this process prints to a file, and nothing that it prints later."""
    _redirect(log)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        _redirect(Path(os.devnull))


def _redirect(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    for output in (1, 2):
        os.dup2(descriptor, output)
    os.close(descriptor)


def _resumes(folder: Path, c: str, options: Mapping[str, Any]) -> bool:
    """Return whether to continue what there is at C.

    A job continues what an earlier attempt of it has begun. If none has begun, C is as it was before the
    first attempt. It then continues an unfinished run of the same product, unless it replaces or changes an
    old C.
    """
    if not needs_before(options):
        return True
    now = _state_of(c)
    before = read_json(folder / BEFORE)
    if before is None:
        _write(folder / BEFORE, now, durable=True)
    return before not in (None, now)


def needs_before(options: Mapping[str, Any]) -> bool:
    """Return whether a job with these options replaces or changes an old C."""
    return bool(options.get("overwrite") or options.get("beta"))


def _state_of(c: str) -> dict[str, list[int] | None]:
    """Return what changes as soon as a run writes to C or to its journal."""
    from oocgemm.jobs.destination import Destination
    from oocgemm.jobs.journal import JOURNAL

    journal = Destination.parse(c).journal_folder
    paths = {"c": Path(c), "journal": journal / JOURNAL if isinstance(journal, Path) else Path(c)}
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


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is none, or only a part of one."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found


def _write(path: Path, data: Mapping[str, Any], *, durable: bool = False) -> None:
    """Replace the contents of a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(descriptor, json.dumps(data).encode())
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
