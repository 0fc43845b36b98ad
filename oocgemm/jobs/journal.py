"""The journal of a run: what it is about, and which tiles of C are done for good.

It lies in a folder of its own with C (`stores.sidecar`) and is a file of lines, each a JSON object behind its
checksum. A line is on the disk before anything is done that relies on it, so that only the last can be torn, and a torn
one is as good as not written::

    run       the header: what is computed from what, and the plan; put in place whole, by renaming
    commit    a tile, beta != 0 only: its new content is whole on the disk, beside C
    done      a tile: its new content is in C, on the disk; and a stamp of its files (sizes and modification times)
    complete  the last: C is whole

What a run does, in this order; `->` is a sync of what was done before it::

    lock the folder; header ->                                     nothing of C was touched yet
    create C, or mark it as unfinished ->                          its attributes say so
    for each tile, beta = 0:     write chunks to C -> done ->
    for each tile, beta != 0:    write chunks to redo/ -> commit -> count -> bring them to C -> done ->
    take the mark off C ->
    complete ->
    C is a .npy file: copy header and complete into an attribute of it -> remove the folder

With beta = 0 a tile may be written any number of times, so one that is not done is computed again. With beta != 0 the
new tile is computed from the old one, so the old one stays as it is until the new one is safe: killed before the commit,
the tile is computed again from what C holds; after it, the rest of the new content is brought to C (chunk files are renamed,
blocks of a .npy file copied; those already there are there, and copying once more changes nothing) and the old one is
not needed any more. Either way it is applied once. What else may be found, and what it means:

    no journal                     no run has begun here; a folder without one is removed, or used
    header, no C or half of it     C was being created: it is created anew
    tiles done, C marked           go on with the others
    all done, C marked or not      take the mark off, and complete

A tile whose files are not as the stamp says is not done. With beta = 0 it is computed again. With beta != 0 it cannot be,
and the run is refused. So is one whose journal has been cut back: it would add its tiles once more. The number of tiles
committed is therefore kept in a file beside the journal, before any of them changes C: it is never more than the journal
lists.

The lock is the system's (flock) on a file in that folder: it ends with the process that holds it, however that ends.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
import warnings
import zlib
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from oocgemm import stores
from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import TileGrid
from oocgemm.planning.tiling import Tile
from oocgemm.stores.durable import Durable, sync_path
from oocgemm.system.threads import start

FORMAT = 1
JOURNAL, LOCK, REDO, COUNT = "journal", "lock", "redo", "count"
# Extended attribute of a complete .npy file: the first and the last line of its journal.
ATTRIBUTE = "user.oocgemm.jobs.journal"
# A lock that is held for an instant, by one who only looks, is waited for.
TRIES, PAUSE = 5, 0.02


@dataclass(frozen=True)
class Record:
    """What a journal says. `committed` tiles are not done; `complete` is None while tiles may be missing. `files` has the
    stamps of done tiles, as far as they have any."""

    header: dict[str, Any]
    done: frozenset[Tile]
    files: dict[Tile, str]
    committed: frozenset[Tile]
    commits: int  # tiles that were ever committed
    complete: dict[str, Any] | None
    length: int  # bytes of the whole lines


def read(folder: Path) -> Record | None:
    """Return the journal in a folder, or what a complete C kept of it; None if there is neither.

    Raises `InputError` for a journal that is damaged, cut back, removed or of another format.
    """
    path = folder / JOURNAL
    try:
        return _record(path, folder, path.read_bytes())
    except FileNotFoundError:
        record = _kept_in_c(folder)
        if record is None:
            _check_count(folder, 0)
        return record
    except OSError as error:
        raise InputError(f"C: cannot look for a journal at {path}: {error.strerror}") from error


def _kept_in_c(folder: Path) -> Record | None:
    """Return what `Journal.move_into_c` stored. An attribute that cannot be read says nothing of C."""
    c = stores.place(folder)
    with suppress(OSError, InputError):
        return _record(c, folder, os.getxattr(c, ATTRIBUTE))
    return None


def _record(path: Path, folder: Path, content: bytes) -> Record:
    """Parse the content of a journal. `path` is where it was read."""
    header: dict[str, Any] = {}
    files: dict[Tile, str | None] = {}
    commits: set[Tile] = set()
    complete: dict[str, Any] | None = None
    whole = length = 0  # lines, and bytes of them
    torn = False
    for line in BytesIO(content):
        entry = _parsed(line[:-1]) if line.endswith(b"\n") else None
        if entry is None:
            torn = True
            continue
        if torn:
            break
        if whole == 0:
            header = _checked_header(path, entry)
        whole, length = whole + 1, length + len(line)
        if "done" in entry:
            files[_tile(entry["done"])] = entry.get("files")
        if "commit" in entry:
            commits.add(_tile(entry["commit"]))
        complete = complete or entry.get("complete")
    else:
        torn = whole == 0
    if torn:
        raise InputError(
            f"the journal {path} is damaged in line {whole + 1}: C cannot be trusted; remove C and {folder}"
        )
    done, committed = frozenset(files), frozenset(commits)
    if complete is not None:
        down, across = header["tiles"]
        done = frozenset(product(range(down), range(across)))
    if complete is None:
        _check_count(folder, len(committed))
    stamped = {tile: stamp for tile, stamp in files.items() if stamp is not None}
    return Record(header, done, stamped, committed - done, len(committed), complete, length)


def _checked_header(path: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Return what the first line of a journal says of its run. Raises `InputError` for a format that this version cannot read."""
    header: dict[str, Any] = entry.get("run", {})
    if header.get("format") != FORMAT:
        raise InputError(
            f"the journal {path} is of format {header.get('format')}, this version reads {FORMAT}: finish the run with "
            f"the version that began it, oocgemm {header.get('version')}"
        )
    return header


def _check_count(folder: Path, listed: int) -> None:
    """Raise `InputError` if more tiles were committed than the journal lists."""
    try:
        committed = int((folder / COUNT).read_bytes() or b"0")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise InputError(f"C: cannot read {folder / COUNT}: {error}") from error
    if committed > listed:
        raise InputError(
            f"the journal {folder / JOURNAL} lists {listed} tiles of C as committed, {committed} were: it has been cut back, "
            f"and going on would add them to C twice; restore C from a copy and remove {folder}"
        )


def owner(folder: Path) -> str | None:
    """The living process that runs with the journal in a folder, if any."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 200).decode(errors="replace").strip()
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return None


class Journal:
    """The journal in a folder, locked and open for what is to be added. Raises `InputError` where another run has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Names that may be new: the folder's in C, C's, and those of folders above that are yet to be made.
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
        """Begin anew, in place of what there was."""
        (self.folder / COUNT).unlink(missing_ok=True)
        path, new = self.folder / JOURNAL, self.folder / f"{JOURNAL}.new"
        self._file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._append({"run": {"format": FORMAT} | header})
        os.replace(new, path)
        self._sync_names()
        with suppress(OSError):  # of an earlier run, which C will not be the result of
            os.removexattr(stores.place(self.folder), ATTRIBUTE)

    def resume(self) -> None:
        """Go on behind the last whole line."""
        assert self.record is not None
        self._committed = self.record.commits
        self._file = os.open(self.folder / JOURNAL, os.O_WRONLY)
        os.ftruncate(self._file, self.record.length)
        os.lseek(self._file, 0, os.SEEK_END)
        self._sync_names()  # which the run that was to do it may not have come to

    def commit(self, tile: Tile) -> None:
        """Record that the tile's new content is on the disk, beside C."""
        self._add({"commit": tile})
        if self._count is None:
            self._count = os.open(self.folder / COUNT, os.O_WRONLY | os.O_CREAT, 0o666)
            sync_path(self.folder)
        self._committed += 1
        os.lseek(self._count, 0, os.SEEK_SET)
        os.write(self._count, b"%020d" % self._committed)
        os.fdatasync(self._count)

    def done(self, tile: Tile, files: str | None) -> None:
        """Record that the tile's new content is on the disk, in C, and the stamp of its files."""
        self._add({"done": tile} | ({} if files is None else {"files": files}))

    def complete(self, said: dict[str, Any]) -> None:
        """Record that C is whole, and on the disk."""
        self._add({"complete": said})

    def move_into_c(self) -> None:
        """Store the journal of a complete C in an attribute of its file and remove the folder beside it.

        `resume` still needs to know which run completed C: with beta != 0 a second application would be wrong. The
        folder stays where the file system has no extended attributes, or none of this length.
        """
        first, *_, last = (self.folder / JOURNAL).read_bytes().splitlines(keepends=True)
        c = stores.place(self.folder)
        with suppress(OSError):
            os.setxattr(c, ATTRIBUTE, first + last)
            sync_path(c)
            stores.clear(self.folder, c=False)

    def check_in_place(self) -> None:
        """Raises `OSError` if the folder that is locked is at its place no more: what is written to a C that was taken
        away would make half an array, or spoil that of another run."""
        assert self._lock is not None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._lock), os.stat(self.folder / LOCK)):
                return
        raise FileNotFoundError(errno.ENOENT, "C was taken away while it was written", str(self.folder))

    def close(self) -> None:
        """Let go of it."""
        for descriptor in (self._file, self._count, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._count = self._lock = None

    def _sync_names(self) -> None:
        """Bring the journal's name to the disk, and those of the folders that lead to it."""
        for folder in (self.folder, *self.folder.parents[: self._levels]):
            with suppress(PermissionError):  # one that may not be listed
                sync_path(folder)

    def _add(self, entry: dict[str, Any]) -> None:
        self.check_in_place()
        self._append(entry)

    def _append(self, entry: dict[str, Any]) -> None:
        assert self._file is not None
        text = json.dumps(entry, separators=(",", ":")).encode()
        line = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
        while line:
            line = line[os.write(self._file, line) :]
        os.fdatasync(self._file)


class Keeper:
    """Brings finished tiles to the disk and records them, in a thread of its own while others are computed."""

    def __init__(self, journal: Journal, matrix: Durable, grid: TileGrid, *, redo: bool) -> None:
        self._journal = journal
        self._matrix = matrix
        self._grid = grid
        self._redo = redo
        self._queue: SimpleQueue[Tile | None] = SimpleQueue()
        self._error: ExecutionError | None = None
        self.kept = 0
        self._thread = threading.Thread(target=self._work, name="oocgemm-journal")
        start(self._thread)

    def finished(self, tile: Tile) -> None:
        """A tile is written as far as its writer is concerned. Raises what keeping an earlier one has failed with."""
        if self._error is not None:
            raise self._error
        self._queue.put(tile)

    def close(self) -> None:
        """Wait until all tiles are recorded. Raises what that has failed with."""
        self.stop()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """The same, but raises nothing."""
        self._queue.put(None)
        self._thread.join()

    def keep(self, tile: Tile) -> None:
        """Make one tile durable, and record it."""
        block = self._grid.rows(tile[0]), self._grid.cols(tile[1])
        self._matrix.sync_block(*block)
        if self._redo:
            self._journal.commit(tile)
            self.kept += 1
            self._matrix.adopt(*block)
        self._journal.done(tile, self._matrix.block_stamp(*block))
        self.kept += not self._redo

    def _work(self) -> None:
        while (tile := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self.keep(tile)
                except BaseException as error:
                    self._error = ExecutionError(f"bringing tile {tile} of C to the disk: {error}")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line's object; None if it is not whole."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _tile(entry: list[int]) -> Tile:
    return entry[0], entry[1]


def _lock(folder: Path) -> int:
    """A descriptor that holds the folder's lock."""
    path, holder = folder / LOCK, "it has only just begun"
    for attempt in range(TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another run takes the folder away
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                os.close(descriptor)
                raise
            warnings.warn(
                f"{folder} is on a file system without locks: let no other run write C", stacklevel=2
            )
            return descriptor
        os.close(descriptor)
        if attempt < TRIES - 1:
            time.sleep(PAUSE)
    raise InputError(busy(folder, holder))


def busy(folder: Path, holder: str) -> str:
    """What is said to a second run on one C."""
    return f"another run is writing C ({holder}, which holds {folder / LOCK}): wait for it, or stop it"
