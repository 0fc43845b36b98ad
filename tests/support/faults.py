"""Stores and backends that fail at a chosen call, are slow, or transfer few bytes at a time.

`nothing_left` checks that a run which fails for such a reason leaves nothing behind.
"""

import gc
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from oocgemm import backends, stores
from oocgemm.backends.base import Backend, Session, Token
from oocgemm.backends.host import backend as host
from oocgemm.engine import staging
from oocgemm.planning import Kind, Operation, Plan
from oocgemm.planning.tiling import Range
from oocgemm.stores import Matrix, opening
from oocgemm.system import resources
from tests.support.command import own_threads
from tests.support.problems import Array


@dataclass
class Fault:
    """Makes calls fail: call number `first`, counted from 1, and the `times - 1` calls after it.

    Calls also take up to twice `delay` seconds longer.
    """

    error: BaseException | None = None
    first: int = 1
    times: int = 1 << 30
    delay: float = 0.0
    calls: int = 0
    counting: Any = field(default_factory=threading.Lock, repr=False)

    def strike(self) -> None:
        with self.counting:
            self.calls += 1
            struck = self.first <= self.calls < self.first + self.times
        if self.delay:
            time.sleep(self.delay * (self.calls % 3))
        if struck and self.error is not None:
            # A copy is raised: its traceback refers to the frames, and so would the original, which tests
            # keep.
            raise copy(self.error)


def faulty(matrix: Matrix, read: Fault | None, write: Fault | None) -> Matrix:
    """Make reads and writes of a matrix fail as the given faults say."""
    kind: Any = type(matrix)

    class Faulty(kind):  # type: ignore[misc]
        def cached_chunks(self) -> None:
            """Return None: compiled code would read chunks without `read`."""

        def read(self, rows: Range, cols: Range, out: Array) -> None:
            if read:
                read.strike()
            super().read(rows, cols, out)

        def write(self, rows: Range, cols: Range, data: Array) -> None:
            if write:
                write.strike()
            super().write(rows, cols, data)

    matrix.__class__ = Faulty
    # It is never multiplied in place, which would take no reads and writes.
    matrix.layout = matrix.layout.changed(in_place=False, pinned=False)
    return matrix


@contextmanager
def faulty_stores(**faults: Fault) -> Iterator[None]:
    """Make reads and writes of operands fail during the block, by names such as `read_A` and `write_C`.

    A GPU reads and writes arrays in memory by other means: there, only stored operands fail.
    """
    open_any, creating, new_layout = stores.open_matrix, stores.create_output, stores.new_layout

    def wrapped(name: str, matrix: Matrix) -> Any:
        return faulty(matrix, faults.get(f"read_{name}"), faults.get(f"write_{name}"))

    def open_matrix(name: str, source: Any, **options: Any) -> Any:
        return wrapped(name, open_any(name, source, **options))

    def create_output(name: str, *rest: Any, **options: Any) -> Any:
        return wrapped(name, creating(name, *rest, **options))

    with (
        patch.object(stores, "open_matrix", open_matrix),
        patch.object(opening, "open_matrix", open_matrix),  # by which `open_pair` opens A and B
        patch.object(stores, "create_output", create_output),
        patch.object(stores, "new_layout", lambda *of: new_layout(*of).changed(in_place=False, pinned=False)),
    ):
        yield


@dataclass(frozen=True)
class LateToken:
    """An operation that was issued and ends or fails later, as operations of a GPU do."""

    done: Future[Token]
    times = None

    def synchronize(self) -> None:
        if (error := self.done.exception()) is not None:
            raise copy(error)  # a copy, since the traceback of the original would keep the frames alive

    def interval(self) -> tuple[int, int]:
        assert self.done.done(), "nobody has waited for it"
        return self.done.result().interval()

    @property
    def bytes(self) -> int | None:
        return self.done.result().bytes


ON_DEVICE = tuple(kind for kind in Kind if kind not in (Kind.READ, Kind.WRITE))


class FaultySession:
    """A session whose operations fail as the faults say, by the kind of operation.

    With `late` they are asynchronous and fail when they run, in one thread per stream. Otherwise they fail
    when issued.
    """

    def __init__(self, session: Session, faults: dict[str, Fault], late: bool) -> None:
        self._session, self._faults, self._late = session, faults, late
        self.asynchronous = ON_DEVICE if late else ()
        self._streams: dict[str, ThreadPoolExecutor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def submit(self, operation: Operation, data: Sequence[Array], after: Sequence[Token]) -> Token:
        fault = self._faults.get(operation.kind.value, Fault())

        def work() -> Token:
            for token in after:
                token.synchronize()
            fault.strike()
            return self._session.submit(operation, data, after)

        if not self._late:
            return work()
        stream = self._streams.setdefault(operation.stream, ThreadPoolExecutor(1))
        return LateToken(stream.submit(work))

    def close(self, failed: bool = False) -> None:
        for stream in self._streams.values():
            stream.shutdown()
        self._session.close(failed)


class FaultyBackend:
    """A backend that may fail to open, and whose sessions may fail.

    `free` lists the bytes of free memory that it reports, one number per call.
    """

    def __init__(self, backend: Backend, faults: dict[str, Fault], late: bool, free: list[int]) -> None:
        self._backend, self._faults, self._late, self._free = backend, faults, late, free

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def free_memory(self) -> int:
        return self._free.pop(0) if self._free else self._backend.free_memory()

    def open(self, plan: Plan, kernel: str) -> Any:
        if fault := self._faults.get("open"):
            fault.strike()
        return FaultySession(self._backend.open(plan, kernel), self._faults, self._late)


@contextmanager
def faulty_backend(late: bool = False, free: Sequence[int] = (), /, **faults: Fault) -> Iterator[None]:
    """Make backends fail when they open (`open`), or at operations of a kind such as `upload`."""
    opening = backends.open_backend

    def open_backend(name: str, device: int = 0) -> Any:
        return FaultyBackend(opening(name, device), faults, late, list(free))

    with patch.object(backends, "open_backend", open_backend):
        yield


@contextmanager
def bytewise(most: int) -> Iterator[None]:
    """Make the system read and write at most `most` bytes per call, which POSIX allows."""

    def limited(buffers: Sequence[Any]) -> list[Any]:
        taken, room = [], most
        for buffer in buffers:
            part = memoryview(buffer).cast("B")[:room]
            taken.append(part)
            room -= len(part)
            if not room:
                break
        return taken

    def preadv(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        return reading(descriptor, limited(buffers), offset, flags)

    def pwritev(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        return writing(descriptor, limited(buffers), offset, flags)

    def write(descriptor: int, data: Any) -> int:
        return appending(descriptor, data[:most])

    reading, writing, appending = os.preadv, os.pwritev, os.write
    with (
        patch.object(os, "preadv", preadv),
        patch.object(os, "pwritev", pwritev),
        patch.object(os, "write", write),
    ):
        yield


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Check that the block returns what it takes: threads, memory of slots, and files of a folder.

    No file of the folder may remain open or mapped.
    """
    arenas: list[weakref.ref[Any]] = []
    allocating = resources.allocate

    def allocate(size: int) -> Array:
        arena = allocating(size)
        arenas.append(weakref.ref(_underlying(arena)))
        return arena

    before = _open_files(folder)
    with patch.object(staging, "allocate", allocate), patch.object(host, "allocate", allocate):
        yield
    assert own_threads() == []
    # zarr's own thread keeps an exception that went through it, and the memory that this refers to, for a
    # moment longer. Then the garbage collector frees it.
    until = time.monotonic() + 5
    while any(arena() is not None for arena in arenas) and time.monotonic() < until:
        time.sleep(0.01)
        gc.collect()
    assert [arena for arena in arenas if arena() is not None] == []
    gc.collect()  # Files stay mapped as long as there are arrays that view the maps.
    after = _open_files(folder)
    assert after == before, (before, after)


def _underlying(array: Any) -> Any:
    """Return the object that owns an array's memory."""
    while isinstance(array, memoryview) or getattr(array, "base", None) is not None:
        array = array.obj if isinstance(array, memoryview) else array.base
    return array


def _open_files(folder: Path) -> list[str]:
    """Return the paths of the files in a folder that are open or mapped."""
    found = [
        line.split(maxsplit=5)[5]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(folder) in line
    ]
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself is closed already
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(name for name in found if str(folder) in name)


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[Callable[[], None]]:
    """Mount a disk of `size` bytes at a new folder, and yield a function that makes it read-only.

    Raises `PermissionError` if this process may not mount.
    """
    place.mkdir()
    options = f"size={size}"
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=False, capture_output=True
    ).returncode:
        raise PermissionError("this process may mount nothing")
    try:
        yield lambda: _remount(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _remount(place: Path) -> None:
    command = ["mount", "-o", "remount,ro", str(place)]
    while subprocess.run(command, check=False, capture_output=True).returncode:
        time.sleep(0.001)  # the disk is busy because a file is being written
