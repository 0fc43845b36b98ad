"""A process that runs jobs, one after the other: ``python -m oocgemm.service.job_worker FOLDER``.

Between jobs, it keeps what takes long to make: imported modules, the CUDA context, cuBLAS, loaded kernels,
streams, and a little pinned memory (`oocgemm.release` says how much). Its standard input is a socket to the
server. The server sends orders: JSON objects with ``attempt``, ``spec``, ``device`` and
``confine``. The worker answers with `BEGUN` when it has the lock of the job, and with `IDLE` when the attempt
has ended and it waits for another order. It calls the verb of a job, with ``resume=True`` if the
verb can be resumed.

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
- ``before.json``: the state of the files of C before the first attempt, if the job replaces or changes an old
  C. If the job saves its result at the end: which file or folder that is.
- ``tiles``: a line for each finished tile: the numbers of the attempt and of the pass, row and column.
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
import shutil
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
from oocgemm.service.job_planner import call, needs_before
from oocgemm.service.job_spec import in_memory, out_of, with_paths
from oocgemm.service.previews import shown_of
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
        if spec.get("saves"):
            return _saved(folder, order)
        resume = _resumes(folder, out_of(spec), spec)
        return _computed(folder, order, spec, resume=resume)[0]
    except (OocGemmError, MemoryError, OSError) as error:
        text = str(error) or type(error).__name__
        for found, shown in _ADVICE:
            text = text.replace(found, shown)
        print(f"Error: {text}", file=sys.stderr)
        code = 3 if isinstance(error, BudgetError) else 2 if isinstance(error, InputError) else 1
        if spec.get("saves") and code in UNHARMED:  # no attempt will follow
            shutil.rmtree(_beside(spec), ignore_errors=True)
        return {"exit_code": code, "error": text}


def _computed(
    folder: Path, order: Mapping[str, Any], spec: Mapping[str, Any], *, resume: bool
) -> tuple[dict[str, Any], Any]:
    """Call the verb of a job. Return the status of the attempt, and what the verb has returned."""
    from oocgemm.jobs.options import options_of  # this imports NumPy

    options: dict[str, Any] = {"timeline": folder / TIMELINE} | (
        {} if in_memory(spec) else {"resume": resume}
    )
    known, passes, begun = options_of(spec.get("verb", "gemm")), list[Any](), monotonic()
    with open(folder / TILES, "a", buffering=1) as tiles:
        result = call(
            spec,
            **{name: value for name, value in options.items() if name in known},
            device=order["device"] if spec["options"]["backend"] == "cuda" else 0,
            progress=_noting(order["attempt"], passes, tiles.write, folder / LIVE),
        )
    run = getattr(result, "run", result)
    log = getattr(run, "log", None)
    if not passes and hasattr(run, "plan"):  # the result was complete already
        passes.append(run.plan)
    done = {"exit_code": 0, "error": None, "seconds": monotonic() - begun if log is None else log.wall / 1e9}
    flops, kept = sum(plan.flops for plan in passes), sum(len(plan.done) for plan in passes)
    return done | {"flops": flops, "kept_tiles": kept} | shown_of(result), result


def _saved(folder: Path, order: Mapping[str, Any]) -> dict[str, Any]:
    """Run an attempt of a job whose result is saved at the end. Return its status.

    The result is saved in a folder beside its place, where a complete result gets the name of the place. Its
    identity is recorded before it is moved to its place. So later attempts recognize it in both places, and
    compute nothing. In that folder, `pca` keeps the state after each pass, too.
    """
    from oocgemm.stores.files import sync_path

    spec, place = order["spec"], Path(out_of(order["spec"]))
    beside, before = _beside(spec), read_json(folder / BEFORE)
    made = beside / place.name
    if before is None:
        shutil.rmtree(beside, ignore_errors=True)  # an earlier job may have failed
        _write(folder / BEFORE, before := {"made": None}, durable=True)
    status = before.get("status") or {"exit_code": 0, "error": None}
    if before["made"] is not None and before["made"] == _identity(place):
        return status
    beside.mkdir(parents=True, exist_ok=True)
    if not made.exists():
        new = beside / "new" / place.name
        shutil.rmtree(new.parent, ignore_errors=True)
        new.parent.mkdir()
        status, result = _computed(folder, order, with_paths(spec, _at(made)), resume=True)
        if not made.exists():  # the verb has not saved it
            _save(result, new)
            new.rename(made)
    sync_tree(made)
    _write(folder / BEFORE, {"made": _identity(made), "status": status}, durable=True)
    try:
        if made.is_dir():
            made.rename(place)  # fails if something is there
        else:
            os.link(made, place)
    except OSError as error:
        if not os.path.lexists(place):
            raise
        raise InputError(f"something exists at {place}: give another path, or remove it") from error
    sync_path(place.parent)
    shutil.rmtree(beside, ignore_errors=True)
    return status


def _beside(spec: Mapping[str, Any]) -> Path:
    """Return the folder in which a result is saved before it is moved to its place."""
    place = Path(out_of(spec))
    return place.with_name(f".{place.name}.job")


def _at(place: Path) -> Callable[[str, str, bool], str]:
    """Return a change of the paths of a spec: the result is at another place."""
    return lambda name, path, write: str(place) if write else path


def _save(result: Any, path: Path) -> None:
    """Save the result of a verb at a path: by its own method, or an array as a .npy file."""
    if hasattr(result, "save"):
        result.save(path)
        return
    import numpy as np

    np.save(path, result)


def _identity(path: Path) -> list[int] | None:
    """Return numbers that identify a file or folder, wherever it is moved; None if it is missing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_dev, status.st_ino]


def sync_tree(top: Path) -> None:
    """Make a file durable, or a folder and all in it."""
    from oocgemm.stores.files import sync_path

    for path in (top, *top.rglob("*"), top.parent):
        sync_path(path)


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


def _resumes(folder: Path, c: str, spec: Mapping[str, Any]) -> bool:
    """Return whether a job continues the run at C.

    A job continues what an earlier attempt of it has begun. If none has begun, C is as it was before the
    first attempt. It then continues an unfinished run of the same product, unless it replaces or changes an
    old C.
    """
    if not needs_before(spec):
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


def _noting(attempt: int, passes: list[Any], write: Callable[[str], object], now: Path) -> Any:
    """Return a progress callback that calls `write` with a line per finished tile, and updates `now`.

    It appends the plan of each pass to `passes`. A tile is finished when it has been written, or, if C is not
    stored, when it has been multiplied.
    """

    def begin(plan: Any) -> Callable[[Any], None]:
        number, stored = len(passes), plan.problem.sink.stores_c
        passes.append(plan)
        left: Counter[tuple[int, int]] = Counter()
        steps = -(-plan.problem.k // max(1, plan.tile.k))
        watch = live_observer(plan, now)

        def observe(span: Any) -> None:
            watch(span)
            if span.kind == ("write" if stored else "multiply"):
                tile = span.tile
                left[tile] = left.get(tile, plan.tile_bytes(tile) if stored else steps)
                left[tile] -= span.bytes if stored else 1
                if left[tile] <= 0:
                    del left[tile]
                    write(f"{attempt} {number} {tile[0]} {tile[1]}\n")

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
