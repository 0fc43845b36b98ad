"""The journal of a run records what the run computes, and which tiles of C are done.

The journal is in a folder inside a zarr array, or next to a .npy file (`stores.sidecar`). Each line is a
CRC-32 and a JSON value: an entry, or a list of entries. Entries that are appended together share a line,
because a power failure may keep any part of an append, such as its end without its beginning. If the process
is killed, or the power fails, only the last line can be torn, which is then ignored. If whole lines follow a
damaged one, the journal is refused::

    run       the header: what is computed, from which operands, and the plan
    commit    beta != 0 only: the new content of a tile is durable, outside C in the subfolder redo/
    done      the new content of a tile is durable, in C. The entry includes a fingerprint of the tile's files
              (sizes, modification times)
    complete  the last line: all of C is durable

A run writes in this order. `->` is an fsync of everything before it::

    lock the folder; header ->                                     C is unchanged so far
    create C, or mark it as unfinished ->                          the mark is an attribute of a zarr array
    for some tiles, beta = 0:    write chunks to C -> done ->
    for some tiles, beta != 0:   write chunks to redo/ -> commit -> count -> move them into C -> done ->
    remove redo/ and what belongs to a distributed run; remove the mark from C ->
    complete ->
    if C is a .npy file: copy header and complete into an extended attribute of it -> remove the folder

Tiles that are written at about the same time take these steps together, with one line for all.

With beta = 0, writing a tile is idempotent: a tile that is not done is computed again.

With beta != 0, the new content of a tile is computed from the old one. If a run is killed before the commit,
the old content is still in C, and the tile is computed again. If it is killed after the commit, the next run
moves the new content into C. Moving is idempotent, so beta is applied to each tile exactly once.

A later run finds one of these states:

    no journal                     no run has begun; a folder without a journal is used again
    header, no C or part of it     C was being created: create it again
    some tiles done, C marked      continue with the other tiles
    all tiles done                 remove the mark, and complete

A tile whose files differ from its fingerprint is computed again. With beta != 0 its old content no longer
exists, so `resume` is refused.

If the journal lost commits, beta would be applied twice to their tiles. Therefore the file `count` next to
the journal contains the number of commits. If the journal lists fewer, `resume` is refused.

The lock is flock(2) on a file in the folder. The system releases it when the process ends for any reason.

If C is in an object store, the journal is an object (`ObjectJournal`), and the lock is a lease (`Lease`).
"""

import errno
import fcntl
import json
import logging
import os
import threading
import time
import uuid
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

from oocgemm import stores
from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning.cover import GRAMS
from oocgemm.planning.tiling import Tile
from oocgemm.stores.base import ChangedError, Folder, RemoteFolder
from oocgemm.stores.files import open_regular, read_regular, sync_path
from oocgemm.system.threads import process_start, running_system, start
from oocgemm.values import dataclass

LOCK = "lock"
# Seconds between renewals of a lease, and seconds after which a lease without a renewal counts as abandoned.
BEAT_SECONDS, LEASE_SECONDS = 10.0, 60.0
# Poll interval, in seconds, for a lease whose holder may have ended.
LOOK_SECONDS = 2.0

logger = logging.getLogger("oocgemm")
# Versions of leases that this process found to be abandoned. It does not wait for such a lease again.
_abandoned: set[str] = set()

FORMAT = 3
JOURNAL, REDO, COUNT = "journal", "redo", "count"
# Only in distributed runs (`oocgemm.distributed`): the folder of the attempts of workers at parts, the file
# by which the coordinator shows its workers that it is alive, the file with the data that all workers get,
# and the array of the partial products of slices of k.
ATTEMPTS, COORDINATOR, GIVEN, PARTIAL = "attempts", "coordinator", "given", "partial"
# Extended attribute in which a complete .npy file stores the first and last lines of its journal.
ATTRIBUTE = "user.oocgemm.journal"
# Number of attempts to lock, and seconds between two attempts. An attempt also fails while `owner` tests the
# lock in another process.
TRIES, PAUSE = 5, 0.02


def done_entries(tiles: Mapping[Tile, str | None]) -> list[dict[str, Any]]:
    """Return the entries for tiles that are durable in C, given the fingerprints of their files."""
    return [{"done": tile} | ({} if files is None else {"files": files}) for tile, files in tiles.items()]


def append_line(file: int, entries: Sequence[dict[str, Any]]) -> None:
    """Append a line with entries to a file, given by its descriptor, and flush the file."""
    rest = memoryview(line_of(entries))
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fdatasync(file)


def line_of(entries: Sequence[dict[str, Any]]) -> bytes:
    text = json.dumps(entries[0] if len(entries) == 1 else entries, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def parse_line(line: bytes) -> list[dict[str, Any]] | None:
    """Return the entries in a line; None if it is torn or damaged."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n"):
        return None
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    entries = found if isinstance(found, list) else [found]
    return entries if entries and all(isinstance(entry, dict) for entry in entries) else None


def lease_holder(folder: RemoteFolder) -> str | None:
    """Return which process holds the lease in a folder, as text; None if none does.

    This can take `LEASE_SECONDS` if the last holder ran on another machine and was killed.
    """
    found = folder.get(LOCK)
    if found is None:
        return None
    state, version = _parsed(found[0]), json.dumps(found[1])
    if not state.get("held") or version in _abandoned:
        return None
    holder = str(state.get("owner", "an unknown process"))
    alive = _is_alive(state.get("process"))
    if alive is None:
        logger.info("waiting up to %g s to see whether %s still writes C", LEASE_SECONDS, holder)
        alive = _changes(folder, found[0])
    if alive:
        return holder
    _abandoned.add(version)
    return None


class Lease:
    """The lease of this process on the result whose journal is in a folder. A thread renews it.

    Only its holder may write C and the journal.

    The lease is an object, ``.oocgemm/lock`` below C. It contains the holder, an epoch (a number that grows
    with each holder), and a number that the holder changes every `BEAT_SECONDS`. Each change is a conditional
    PUT: it succeeds only if the object is still the one that the writer saw last. Of two processes that take
    the lease at once, one fails.

    A lease whose holder has ended is taken over. If the holder ran on this machine, the system says whether
    the holder is alive. Otherwise the lease counts as abandoned if it does not change for `LEASE_SECONDS`.
    Clocks of different machines are never compared.

    A holder that was suspended may come back after another process has taken the lease. It then finds that
    its lease was not renewed for `LEASE_SECONDS / 2`, and writes nothing more. Its next conditional PUT would
    fail in any case. A write that was in flight when the holder was suspended is found when the other process
    completes C (`ObjectMatrix.set_finished`).

    Raises `InputError` if another process holds the lease, or if the store does not support conditional PUTs.
    """

    def __init__(self, folder: RemoteFolder) -> None:
        holder = lease_holder(folder)
        if holder is not None:
            raise InputError(busy(folder, holder))
        found = folder.get(LOCK)
        before = _parsed(found[0]) if found is not None else {}
        self._folder = folder
        self.epoch = int(before.get("epoch", 0)) + 1
        self._lost: str | None = None
        self._beats = 0
        self._ended = threading.Event()
        self._renewing = threading.Lock()
        try:
            self._version = folder.replace(LOCK, self._state(held=True), None if found is None else found[1])
        except ChangedError:
            raise InputError(busy(folder, "a process that has just started")) from None
        self._renewed = _now()
        self._thread = threading.Thread(target=self._renew, name="oocgemm-lease")
        try:
            self._check_conditions()
            start(self._thread)
        except BaseException:
            self._free()
            raise

    def _check_conditions(self) -> None:
        """Raise `InputError` if the store ignores the condition of a PUT."""
        with suppress(ChangedError):
            self._folder.replace(LOCK, self._state(held=False), None)
            raise InputError(
                f"C: the store of {self._folder} ignores the conditions of PUT requests (If-None-Match), so "
                "a second run on the same C could not be refused: write C to another store, or open it by "
                "zarr and pass the array"
            )

    def check(self) -> None:
        """Raise `ExecutionError` if this process may no longer write C."""
        if self._lost is None and _now() - self._renewed > LEASE_SECONDS / 2:
            self._lost = f"was not renewed for {LEASE_SECONDS / 2:g} s"
        if self._lost is not None:
            raise ExecutionError(
                f"the lease on C in {self._folder} {self._lost}, so another run may write C: continue with "
                "--resume (resume=True)"
            )

    def release(self) -> None:
        """Stop the thread, and let other processes take the lease at once."""
        self._ended.set()
        self._thread.join()
        if self._lost is None:
            self._free()

    def _free(self) -> None:
        with suppress(OSError):  # other processes find the lease abandoned after this process has ended
            self._folder.replace(LOCK, self._state(held=False), self._version)

    def confirm(self) -> None:
        """Renew the lease now. Raises `ExecutionError` if this process may no longer write C."""
        with self._renewing:
            started = _now()
            try:
                self._version = self._folder.replace(LOCK, self._state(held=True), self._version)
                self._renewed = started
            except ChangedError:
                self._lost = "was taken by another process"
        self.check()

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and self._lost is None:
            try:
                self.confirm()
            except Exception as error:  # the next renewal may succeed
                logger.warning("the lease on C could not be renewed: %s", error)

    def _state(self, *, held: bool) -> bytes:
        """Return new content for the lease object. No two contents are equal."""
        self._beats += 1
        return json.dumps(
            {
                "epoch": self.epoch,
                "held": held,
                "owner": f"process {os.getpid()} on {os.uname().nodename}",
                "process": _identity(os.getpid()),
                "beat": self._beats,
                "nonce": uuid.uuid4().hex,
            }
        ).encode()


def _now() -> float:
    """Return the time, in seconds, of a clock that also runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _parsed(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(content)
        if isinstance(found, dict):
            return found
    return {}


def _changes(folder: RemoteFolder, content: bytes) -> bool:
    """Return whether the lease changes within `LEASE_SECONDS`, and is still held after the change."""
    until = _now() + LEASE_SECONDS
    while _now() < until:
        time.sleep(LOOK_SECONDS)
        found = folder.get(LOCK)
        if found is None or found[0] != content:
            return found is not None and bool(_parsed(found[0]).get("held"))
    return False


def _identity(pid: int) -> list[str] | None:
    """Return the boot, PID namespace, PID and start time of a process of this machine; None if unknown."""
    start, system = process_start(pid), running_system()
    return None if start is None or not all(system) else [*system, str(pid), str(start)]


def _is_alive(identity: Any) -> bool | None:
    """Return whether a process is alive; None if that is unknown, because it ran on another machine."""
    here = _identity(os.getpid())
    if here is None or not isinstance(identity, list) or len(identity) != 4 or identity[:2] != here[:2]:
        return None
    return identity == _identity(int(identity[2]))


@dataclass(frozen=True)
class Record:
    """The content of a journal, as read from its file.

    `committed` contains the tiles that are committed but not done. `files` maps done tiles to the
    fingerprints of their files, or in a .npy file to checksums of their elements. `complete` is None until
    all of C is durable.
    """

    header: dict[str, Any]
    done: frozenset[Tile]
    files: dict[Tile, str]
    committed: frozenset[Tile]
    commits: int  # number of tiles with a commit line, including those in `done`
    complete: dict[str, Any] | None
    length: int  # length of the file in bytes, without a torn last line

    @property
    def uplo(self) -> str:
        """Which triangle of a Gram matrix the run stores: "lower", "upper" or "full"; "" for other runs."""
        gram = self.header.get("identity", {}).get("problem", {}).get("gram")
        return gram if gram in GRAMS else ""


def read(folder: Folder) -> Record | None:
    """Return the content of the journal for C; None if C has no journal.

    The journal is in `folder`, or in an extended attribute of a complete .npy file. Raises `InputError` if
    the journal is unreadable, damaged, of another format, or has lost lines.
    """
    if not isinstance(folder, Path):
        found = folder.get(JOURNAL)
        return None if found is None else _record(folder / JOURNAL, folder, found[0])
    path = folder / JOURNAL
    try:
        return _record(path, folder, read_regular(path))
    except FileNotFoundError:
        record = _kept_in_c(folder)
        if record is None:
            _check_count(folder, 0)
        return record
    except OSError as error:
        raise InputError(f"C: cannot read the journal {path}: {error.strerror}; make it readable") from error


def _kept_in_c(folder: Path) -> Record | None:
    """Return the record that `Journal.move_into_c` stored in C; None if there is none, or it is damaged."""
    c = stores.place(folder)
    with suppress(OSError, InputError):
        return _record(c, folder, os.getxattr(c, ATTRIBUTE))
    return None


def _record(path: Folder, folder: Folder, content: bytes) -> Record:
    """Return the record in the content of the journal at `path`. Raises `InputError` if it is damaged."""
    header: dict[str, Any] = {}
    files: dict[Tile, str | None] = {}
    commits: set[Tile] = set()
    complete: dict[str, Any] | None = None
    whole = length = 0  # number of lines that are not torn, and their total length in bytes
    torn = False
    for line in BytesIO(content):
        entries = parse_line(line)
        if entries is None:
            torn = True
            continue
        if torn:
            break
        if whole == 0:
            header = _checked_header(path, entries[0])
        whole, length = whole + 1, length + len(line)
        for entry in entries:
            if "done" in entry:
                files[_tile(entry["done"])] = entry.get("files")
            if "commit" in entry:
                commits.add(_tile(entry["commit"]))
            complete = complete or entry.get("complete")
    else:
        torn = whole == 0
    if torn:
        raise InputError(
            f"the journal {path} is damaged in line {whole + 1}, so C may be wrong: remove C and {folder}, "
            "and run again"
        )
    done, committed = frozenset(files), frozenset(commits)
    if complete is not None:
        done = frozenset(_every_tile(header))
    if complete is None and isinstance(folder, Path):
        _check_count(folder, len(committed))
    known = {tile: fingerprint for tile, fingerprint in files.items() if fingerprint is not None}
    return Record(header, done, known, committed - done, len(committed), complete, length)


def _every_tile(header: dict[str, Any]) -> Iterator[Tile]:
    """Yield all tiles that the run with this header computes."""
    down, across = header["tiles"]
    gram = header.get("identity", {}).get("problem", {}).get("gram")
    for i, j in product(range(down), range(across)):
        if not (i < j and gram in ("lower", "full")) and not (i > j and gram == "upper"):
            yield i, j


def _checked_header(path: Folder, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the header in the first line of a journal. Raises `InputError` if it has another format."""
    header: dict[str, Any] = entry.get("run", {})
    if header.get("format") != FORMAT:
        raise InputError(
            f"the journal {path} has format {header.get('format')}, this version reads format {FORMAT}: "
            f"finish the run with the version that began it, oocgemm {header.get('version')}"
        )
    return header


def _check_count(folder: Path, listed: int) -> None:
    """Raise `InputError` if the journal, which has `listed` commits, has fewer than its file `count` says."""
    try:
        committed = int(read_regular(folder / COUNT) or b"0")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise InputError(f"C: cannot read the number of commits in {folder / COUNT}: {error}") from error
    if committed > listed:
        raise InputError(
            f"the journal {folder / JOURNAL} lists {listed} committed tiles of C, but {committed} were "
            "committed: it was truncated, and resuming would apply beta twice to some tiles; restore C "
            f"from a copy, remove {folder} and run again"
        )


def owner(folder: Folder) -> str | None:
    """Return which process has locked a journal's folder, as text with its id and host; None if none has."""
    if not isinstance(folder, Path):
        return lease_holder(folder)
    try:
        descriptor = open_regular(folder / LOCK)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 200).decode(errors="replace").strip()
    except OSError:  # the file system does not support locks, so the owner is unknown
        return None
    finally:
        os.close(descriptor)
    return None


class JournalWriter(ABC):
    """Writes the entries of a journal. A subclass defines `_add`, which adds a line of entries."""

    @abstractmethod
    def _add(self, entries: Sequence[dict[str, Any]]) -> None: ...

    def commit(self, tiles: Sequence[Tile]) -> None:
        """Record that the new content of tiles is durable outside C (redo files), not yet in C."""
        self._add([{"commit": tile} for tile in tiles])

    def done(self, tiles: Mapping[Tile, str | None]) -> None:
        """Record that the new content of tiles is durable in C, with the fingerprints of their files."""
        self._add(done_entries(tiles))

    def complete(self, facts: dict[str, Any]) -> None:
        """Record that all of C is durable."""
        self._add([{"complete": facts}])


class Journal(JournalWriter):
    """The journal in a folder, locked and open for writing. Raises `InputError` if it is locked already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Number of parent folders that `_sync_names` makes durable: two, which contain the directory entries
        # of this folder and of C, and one more for each parent that `_lock` creates.
        self._levels = 2 + sum(not above.exists() for above in folder.parents[1:])
        self._lock: int | None = _lock(folder)
        self._file: int | None = None
        self._count: int | None = None
        self._committed = 0
        try:
            self.record = read(folder)
        except BaseException:
            self.close()
            raise

    def start(self, header: dict[str, Any]) -> None:
        """Replace any old journal by a new one that has only a header."""
        (self.folder / COUNT).unlink(missing_ok=True)
        path, new = self.folder / JOURNAL, self.folder / f"{JOURNAL}.new"
        self._file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        append_line(self._file, [{"run": {"format": FORMAT} | header}])
        os.replace(new, path)
        self._sync_names()
        with suppress(OSError):  # no such attribute, unless an earlier run moved its journal there
            os.removexattr(stores.place(self.folder), ATTRIBUTE)

    def resume(self) -> None:
        """Open the existing journal to append to it, and remove a torn last line."""
        assert self.record is not None
        self._committed = self.record.commits
        self._file = open_regular(self.folder / JOURNAL, os.O_WRONLY)
        os.ftruncate(self._file, self.record.length)
        os.lseek(self._file, 0, os.SEEK_END)
        self._sync_names()  # the earlier run may have been killed before its `start` called this

    def commit(self, tiles: Sequence[Tile]) -> None:
        super().commit(tiles)
        if self._count is None:
            self._count = open_regular(self.folder / COUNT, os.O_WRONLY | os.O_CREAT)
            sync_path(self.folder)
        self._committed += len(tiles)
        os.lseek(self._count, 0, os.SEEK_SET)
        os.write(self._count, b"%020d" % self._committed)
        os.fdatasync(self._count)

    def move_into_c(self) -> None:
        """Move the journal of a complete .npy file from its folder to an extended attribute of that file.

        A later `resume` needs the journal to know that C is complete: with beta != 0, running again would
        apply beta twice. If the file system refuses the attribute, the journal stays in its folder.
        """
        first, *_, last = read_regular(self.folder / JOURNAL).splitlines(keepends=True)
        c = stores.place(self.folder)
        with suppress(OSError):
            os.setxattr(c, ATTRIBUTE, first + last)
            sync_path(c)
            stores.clear(self.folder, c=False)

    def check_in_place(self) -> None:
        """Raise `OSError` if the locked folder was removed or replaced: C may belong to another run now."""
        assert self._lock is not None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._lock), os.stat(self.folder / LOCK)):
                return
        raise FileNotFoundError(errno.ENOENT, "C was removed while it was written", str(self.folder))

    def close(self) -> None:
        """Close the files and release the lock."""
        for descriptor in (self._file, self._count, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._count = self._lock = None

    def _sync_names(self) -> None:
        """Make the directory entries of the journal and of the folders above it durable."""
        for folder in (self.folder, *self.folder.parents[: self._levels]):
            with suppress(PermissionError):  # skip a parent folder that the user may not open
                sync_path(folder)

    def _add(self, entries: Sequence[dict[str, Any]]) -> None:
        self.check_in_place()
        assert self._file is not None
        append_line(self._file, entries)


def _tile(entry: list[int]) -> Tile:
    return entry[0], entry[1]


def _lock(folder: Path) -> int:
    """Lock a folder, which may have to be created, and return the file descriptor of the lock.

    Raises `InputError` if another process has locked it.
    """
    path, holder = folder / LOCK, "a process that has just started"
    for attempt in range(TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # another run has removed the folder since `mkdir`
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                os.close(descriptor)
                raise
            warnings.warn(
                f"{folder} is on a file system without locks: do not start a second run that writes C",
                stacklevel=2,
            )
            return descriptor
        os.close(descriptor)
        if attempt < TRIES - 1:
            time.sleep(PAUSE)
    raise InputError(busy(folder, holder))


def busy(folder: Folder, holder: str) -> str:
    """Return the error message for a C that another run is writing. `holder` is the process of that run."""
    lock, has = folder / LOCK, "has locked" if isinstance(folder, Path) else "holds"
    return f"another run is writing C ({holder}, which {has} {lock}): wait for it, or stop it"


class ObjectJournal(JournalWriter):
    """The journal in a folder of an object store, open for writing. This process holds the lease on C.

    It has the same lines as a journal in a file (`Journal`), and a line with the epoch of each process that
    wrote it. Objects cannot be appended to. Each new line therefore rewrites the journal, by a PUT on
    condition that the journal is still the one that this process wrote last. So only the process that wrote
    the last epoch can add lines. A line is durable when the PUT returns, and is there as a whole or not at
    all.

    For each tile, the order of writes is the same as with files. A PUT that has returned takes the
    place of a flushed file.

    Raises `InputError` if another run holds the lease.
    """

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder = folder
        self._lease = Lease(folder)
        try:
            found = folder.get(JOURNAL)
            self._content: bytes = b"" if found is None else found[0]
            self._version: dict[str, str] | None = None if found is None else found[1]
            self.record = read(folder)
        except BaseException:
            self.close()
            raise

    def start(self, header: dict[str, Any]) -> None:
        """Replace any old journal by a new one that has only a header."""
        self._content = b""
        self._add([{"run": {"format": FORMAT} | header}])
        self._add([{"epoch": self._lease.epoch}])

    def resume(self) -> None:
        """Continue the existing journal."""
        self._add([{"epoch": self._lease.epoch}])

    def check_in_place(self) -> None:
        """Renew the lease on C. Raises `ExecutionError` if this process may no longer write C."""
        self._lease.confirm()

    def check_lease(self) -> None:
        """Raise `ExecutionError` if it is known that this process may no longer write C."""
        self._lease.check()

    def close(self) -> None:
        """Release the lease."""
        self._lease.release()

    def _add(self, entries: Sequence[dict[str, Any]]) -> None:
        self.check_lease()
        content = self._content + line_of(entries)
        try:
            self._version = self.folder.replace(JOURNAL, content, self._version)
        except ChangedError:
            raise ExecutionError(
                f"another run has taken over C: it has changed the journal {self.folder}/{JOURNAL}; this run "
                "stops"
            ) from None
        self._content = content
