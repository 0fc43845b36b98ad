"""A process that runs jobs, one after the other: ``python -m oocgemm.service.job_worker FOLDER``.

Between jobs, it keeps what takes long to make: imported modules, the CUDA context, cuBLAS, loaded kernels,
streams, and a little pinned memory (`oocgemm.release` says how much). Its standard input is a socket to the
server. The server sends orders: JSON objects with ``attempt``, ``spec``, ``device`` and
``confine``. The worker answers with `BEGUN` when it has the lock of the job, and with `IDLE` when the attempt
has ended and it waits for another order. It computes each product with ``resume=True``.

A worker ends

- when the server has closed the socket, or has died: after its job, or at once if it has none;
- after SIGTERM, which stops its job;
- after a job that has failed, except by wrong input or budgets. Memory may be short or lost then, and a CUDA
  context is unusable after most errors. The next attempt gets a new process.

The worker restricts itself to its folder, and to the folders that ``confine`` of its first order allows. All
orders of a server allow the same folders. NumPy starts threads when it is imported, and Landlock would not
restrict these. So NumPy, and every module that uses it, is imported after the restriction.

Jobs of several owners share a worker. A job leaves in memory its spec, and parts of arrays in the roots,
which all owners may read. A job runs no code of its owner. So another job could see these data only by a
defect of this package or of a library that decodes chunks.

The files of a job lie in its folder. The worker sees them by hard links in its own folder, which otherwise
has only temporary files. Renaming would break these links, so nothing is renamed: every file is written in
place, by the process that has the lock.

- ``lock``: locked while a process computes the job. It contains the number of the latest attempt, which the
  server writes.
- ``owner.json``: the process that has the lock.
- ``before.json``: the state of the files of C before the first attempt. Only jobs that replace or change an
  old C have this file.
- ``tiles``: a line for each tile that has been written: the number of the attempt, row and column.
- ``live.json``: what the process does now, in one line. One write overwrites the line, so a reader always
  sees a complete first line.
- ``result.json``: how the attempt ended. It is durable when the lock is free.
- ``timeline``: the timeline of the run. ``log``: what the process printed.

Why files that are written in place are enough:

- Only the process with the lock writes these files, apart from the number in ``lock``.
- The result is read when that process has ended, or has said that the attempt has ended. The result is then
  complete, or the process died during the write. An incomplete JSON object cannot be parsed, and counts as no
  result.
- If the machine stops, every process ends with it. So ``lock`` and ``owner.json`` need not be durable. An
  attempt without a durable result is repeated. The journal of C says what is done.
- ``before.json`` is durable before the run writes to C. If it is incomplete, C is as it was.
"""

import fcntl
import json
import os
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from oocgemm.errors import BudgetError, DataWarning, InputError, OocGemmError
from oocgemm.service.confinement import restrict_to
from oocgemm.service.job_planner import arguments, needs_before
from oocgemm.system.text import plain
from oocgemm.system.threads import process_start

# Answers of a worker, and the maximum bytes of an order.
BEGUN, IDLE, MAX_ORDER = b"begun", b"idle", 1 << 18
# The files of a job.
LOCK, OWNER, BEFORE, TILES = "lock", "owner.json", "before.json", "tiles"
LIVE, RESULT, TIMELINE, LOG = "live.json", "result.json", "timeline", "log"
FILES = (LOCK, OWNER, BEFORE, TILES, LIVE, RESULT, TIMELINE, LOG)
# Seconds between two updates of the file `LIVE`.
LIVE_SECONDS = 0.5
# struct flock of Linux on 64-bit machines: type, whence, start, length, pid.
FLOCK = "hhqqi0q"
# Exit statuses beside those of `oocgemm run`: another process has the lock, or SIGTERM stopped the job.
BUSY, STOPPED = 75, 143
# Pairs of texts: advice of a run, and what a job says instead. A job always resumes, and has no option for
# that.
_ADVICE = (
    (" in place of --resume", ""),
    ("drop --resume to start from the present C", "submit a new job to start from the present C"),
    (" and drop --resume", " and submit a new job"),
)
# Maximum number of noted warnings about the data, and maximum characters of a warning.
MAX_WARNINGS, MAX_WARNING = 100, 2000
# Statuses that leave the process usable: success, wrong input, and budgets that are too small.
UNHARMED = frozenset({0, 2, 3})


def main(folder: Path) -> int:
    """Carry out the orders of a server; return the exit status of the process."""
    server = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        # A later server removes folders that are not locked. This one is locked until this process ends.
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH)
    except FileNotFoundError:
        return BUSY
    confined = False
    try:
        signal.signal(signal.SIGTERM, _stop)
        while (order := _receive(server)) is not None:

            def begin(allowed: Any = order["confine"]) -> None:
                nonlocal confined
                _tell(server, BEGUN)
                if allowed is not None and not confined:
                    restrict_to(allowed, folder)
                    confined = True

            status, keep = run(folder, order, begin)
            if not keep:
                return status
            from oocgemm.backends import shrink  # the job has imported it already; it needs NumPy

            shrink()  # free memory that the server does not count for an idle worker
            signal.signal(signal.SIGTERM, _stop)
            _tell(server, IDLE)
    except KeyboardInterrupt:
        return STOPPED
    return 0


def _stop(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _receive(server: socket.socket) -> dict[str, Any] | None:
    """Wait for an order; return None if there is no server that could send one."""
    try:
        message = server.recv(MAX_ORDER)
    except ConnectionError:
        return None
    found: dict[str, Any] | None = json.loads(message) if message else None
    return found


def _tell(server: socket.socket, message: bytes) -> None:
    with suppress(OSError):  # the server has died
        server.send(message)


def run(folder: Path, order: Mapping[str, Any], begin: Callable[[], object]) -> tuple[int, bool]:
    """Run an attempt of a job. Return its exit status, and whether this process can run another job.

    `begin` is called when this process has the lock. It raises an `OocGemmError` if the process cannot
    compute jobs.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return BUSY, False  # a later server has removed the folder of this worker
    try:
        # The lock belongs to the open file, and is free when the process ends. Other processes can query it.
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
    """Run an attempt, write its result, and return what `run` returns. SIGTERM is ignored afterwards."""
    attempt, keep = order["attempt"], False
    status: dict[str, Any] = {"exit_code": STOPPED, "error": "stopped by SIGTERM"}
    warned: list[str] = []
    try:
        _write(folder / OWNER, {"attempt": attempt, "pid": os.getpid(), "start": process_start(os.getpid())})
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
    spec = order["spec"]
    try:
        from oocgemm.verbs.gemm import gemm  # this imports NumPy

        options = arguments(spec)
        with open(folder / TILES, "a", buffering=1) as tiles:
            result = gemm(
                spec["a"],
                spec["b"],
                spec["c"],
                **options,
                device=order["device"] if options["backend"] == "cuda" else 0,
                resume=_resumes(folder, spec["c"], options),
                timeline=folder / TIMELINE,
                progress=_noting(order["attempt"], tiles.write, folder / LIVE),
            )
    except (OocGemmError, MemoryError, OSError) as error:
        text = str(error) or type(error).__name__
        for found, shown in _ADVICE:
            text = text.replace(found, shown)
        print(f"Error: {text}", file=sys.stderr)
        code = 3 if isinstance(error, BudgetError) else 2 if isinstance(error, InputError) else 1
        return {"exit_code": code, "error": text}
    done = {"exit_code": 0, "error": None, "seconds": result.log.wall / 1e9}
    return done | {"flops": result.plan.flops, "kept_tiles": len(result.plan.done)}


@contextmanager
def _noting_warnings(noted: list[str]) -> Iterator[None]:
    """Print each warning in the `with` block on one line, and append those about the data to `noted`."""

    def show(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
        text = plain(str(message))[:MAX_WARNING]
        print(f"Warning: {text}", file=sys.stderr)
        if issubclass(category, DataWarning) and text not in noted and len(noted) < MAX_WARNINGS:
            noted.append(text)

    with warnings.catch_warnings():
        warnings.simplefilter("always", DataWarning)  # even if an earlier job issued the same warning
        warnings.showwarning = show
        yield


@contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    """Append what this process prints in the `with` block to a file. Drop what it prints later."""
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
    """Return whether a job continues the run at C.

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


def _state_of(c: str) -> dict[str, list[int] | None]:
    """Return the facts about C and its journal that change as soon as a run writes to either."""
    from oocgemm.jobs.journal import JOURNAL
    from oocgemm.jobs.request import Destination

    journal = Destination.parse(c).journal_folder
    found: dict[str, list[int] | None] = {"c": None, "journal": None}
    paths = Path(c), journal / JOURNAL if isinstance(journal, Path) else Path(c)
    for name, path in zip(found, paths, strict=True):
        with suppress(FileNotFoundError):
            stat = path.stat()
            found[name] = [stat.st_ino, stat.st_size, stat.st_mtime_ns]
    return found


def _noting(attempt: int, write: Callable[[str], object], now: Path) -> Any:
    """Return a progress callback that calls `write` with a line per finished tile, and updates `now`."""

    def begin(plan: Any) -> Callable[[Any], None]:
        left: Counter[tuple[int, int]] = Counter()
        watch = live_observer(plan, now)

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


def live_observer(plan: Any, path: Path) -> Callable[[Any], None]:
    """Return a callback for finished operations of a plan, which keeps the file `LIVE` up to date."""
    from oocgemm.timeline.activities import MAX_RECENT, recent_activity

    recent: deque[Any] = deque(maxlen=MAX_RECENT)
    flops, written = 0, monotonic()
    path.write_bytes(b"")  # remove what an earlier attempt wrote

    def observe(span: Any) -> None:
        nonlocal flops, written
        recent.append(span)
        flops += span.flops
        if monotonic() - written < LIVE_SECONDS:
            return
        written = monotonic()
        busy, limit = recent_activity(recent, multiplied=flops >= plan.flops)
        line = json.dumps({"busy": busy, "limit": limit or None}).encode() + b"\n"
        with suppress(OSError), open(path, "r+b", buffering=0) as file:  # a full disk must not fail the job
            file.write(line)

    return observe


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the first line of a file; None if it is missing or incomplete."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[0])
    except (FileNotFoundError, ValueError):
        return None
    return found


def _write(path: Path, data: Mapping[str, Any], *, durable: bool = False) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(descriptor, json.dumps(data).encode())
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
