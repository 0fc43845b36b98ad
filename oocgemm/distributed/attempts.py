"""The files that the coordinator of a run and its child processes share: attempts, and a sign of life.

An attempt of a worker at a part has the folder ``attempts/NAME`` in the journal's folder of C:

- ``redo/`` has the redo files of tiles of C, as `oocgemm.stores.capabilities` describes them;
- ``journal`` has a line ``{"done": tile, "files": fingerprint}`` for each tile whose redo files are durable;
- ``log.jsonl`` is the timeline of the attempt.

The coordinator creates the folder, and the child process everything in it. If the folder has been removed,
the child process cannot create its journal. So no tile of an attempt that was given up counts later.

If C is not stored, the result of a part, such as sums of rows, is in the memory of the child process. When
all tiles of the part are finished, the child process writes this *state* to a file in the attempt's folder,
and then one line with all tiles to the journal. So an attempt counts as a whole, or not at all. The
coordinator merges states into the result. `Sink.merge` says how. Terms that are added up to one number come
from one part, since a part has whole rows of tiles (`Plan.has_whole_rows`). So bits do not depend on the
number of workers.

The *fence* is the file by which the coordinator shows that it is alive. It rewrites the file twice a second
with another `beat`, and removes it at its end. Each coordinator has a random `epoch`. A child process works
for one epoch. It ends if the file is missing or has another epoch, or if the beat stays the same for `TTL`
seconds. Clocks of different machines are not compared.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, cast
from uuid import uuid4

from oocgemm import stores
from oocgemm.distributed.tasks import pack, unpack
from oocgemm.errors import ExecutionError
from oocgemm.jobs.journal import ATTEMPTS, JOURNAL, REDO, append_line, done_entries, parse_line
from oocgemm.jobs.output import Journaled, Target, create_output, remove_shared
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.jobs.resume import TileQueue
from oocgemm.planning import Plan, TileGrid
from oocgemm.planning.schedule.operation import Block
from oocgemm.planning.tiling import Range, Tile
from oocgemm.stores import Collecting, Matrix
from oocgemm.stores.capabilities import Resumable, ResumableMatrix
from oocgemm.stores.files import fingerprint_of, open_regular, read_regular
from oocgemm.system.cache import write_whole
from oocgemm.system.threads import process_start, running_system, start
from oocgemm.values import dataclass

# Seconds between two beats, and seconds after which a coordinator without a new beat counts as dead.
INTERVAL, TTL = 0.5, 30.0
LOG, STATE = "log.jsonl", "state"
_NAME = re.compile(r"(?P<epoch>[0-9a-f]+)-(?P<part>\d+)-(?P<number>\d+)")


@dataclass(frozen=True)
class Sign:
    """The content of the fence file.

    `pid` and `started` identify the coordinator's process on the machine `machine`. `over` has the names of
    the attempts that should end, for example because another attempt has computed the same tiles.
    """

    epoch: str
    machine: str
    pid: int
    started: int
    beat: int = 0
    over: tuple[str, ...] = ()


class Fence:
    """Rewrites the fence file regularly, in a thread, from its creation to `close`."""

    def __init__(self, path: Path) -> None:
        """Create or replace the fence file. Raises `OSError` if that is impossible."""
        self._path = path
        self._over: set[str] = set()
        self._closing = threading.Event()
        self._sign = Sign(uuid4().hex[:12], machine(), os.getpid(), process_start(os.getpid()) or 0)
        self.taken_over = False  # whether another coordinator has replaced the file
        self._write(0)
        self._thread = threading.Thread(target=self._work, name="oocgemm-fence")
        start(self._thread)

    @property
    def epoch(self) -> str:
        return self._sign.epoch

    def end(self, attempts: Collection[str]) -> None:
        """Tell the child processes of these attempts to end."""
        self._over |= set(attempts)

    def close(self) -> None:
        """Remove the file, which tells all child processes to end. It may be called more than once."""
        self._closing.set()
        self._thread.join()
        if not self.taken_over:
            self._path.unlink(missing_ok=True)

    def _work(self) -> None:
        beat = 0
        while not self._closing.wait(INTERVAL):
            beat += 1
            with suppress(OSError):  # for example, the disk is full: the next beat may succeed
                found = read_sign(self._path)
                self.taken_over = found is not None and found.epoch != self.epoch
                if self.taken_over:
                    return
                self._write(beat)

    def _write(self, beat: int) -> None:
        sign = asdict(self._sign) | {"beat": beat, "over": sorted(self._over)}
        temporary = self._path.with_name(f"{self._path.name}.{self.epoch}")
        temporary.write_text(json.dumps(sign))
        os.replace(temporary, self._path)


def read_sign(path: Path) -> Sign | None:
    """Return the content of the fence file; None if it does not exist.

    Raises `OSError` if it is unknown whether the file exists, or if its content cannot be read.
    """
    try:
        found = json.loads(read_regular(path))
        return Sign(**(found | {"over": tuple(found["over"])}))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise OSError(f"{path} has no sign of a coordinator") from error


class FenceGuard:
    """Tells a child process whether its coordinator still wants it to work."""

    def __init__(self, path: Path, epoch: str, attempt: str) -> None:
        self._path = path
        self._epoch = epoch
        self._attempt = attempt
        self._beat = -1
        self._seen = monotonic()

    def reason_to_end(self) -> str | None:
        """Return why the process should end; None if it should go on."""
        with suppress(OSError):
            sign = read_sign(self._path)
            if sign is None:
                return "its coordinator has ended"
            if sign.epoch != self._epoch:
                return "another coordinator has taken over"
            if self._attempt in sign.over:
                return "its tiles are done"
            if sign.machine == machine() and process_start(sign.pid) != (sign.started or None):
                return "its coordinator has died"
            if sign.beat != self._beat:
                self._beat, self._seen = sign.beat, monotonic()
        if monotonic() - self._seen > TTL:
            return f"its coordinator was silent for {TTL:.0f} s"
        return None


def machine() -> str:
    return " ".join(filter(None, running_system())) or os.uname().nodename


@dataclass(frozen=True)
class AttemptId:
    """An attempt at the part with the number `part`. `number` counts the attempts at a part from 1."""

    epoch: str
    part: int
    number: int

    @property
    def name(self) -> str:
        """The name of the attempt's folder. No other attempt ever has it, since epochs are random."""
        return f"{self.epoch}-{self.part}-{self.number}"

    def folder(self, sidecar: Path) -> Path:
        return sidecar / ATTEMPTS / self.name


def old_attempts(sidecar: Path) -> list[AttemptId]:
    """Return the attempts that earlier coordinators left in the journal's folder of C, sorted by name."""
    folder = sidecar / ATTEMPTS
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = (_NAME.fullmatch(name) for name in names)
    return [AttemptId(x["epoch"], int(x["part"]), int(x["number"])) for x in found if x]


def remove_attempts(sidecar: Path) -> None:
    """Remove all attempts. Child processes that still write there fail."""
    remove_shared(sidecar / ATTEMPTS)


def clean_up(folder: Path) -> None:
    """Remove files that a child process has written to its folder since the coordinator removed it."""
    if not (folder / JOURNAL).exists():
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other attempts, or the journal of C, are there
            folder.parent.rmdir()
            folder.parent.parent.rmdir()


class Tail:
    """Reads the journal of an attempt while a child process appends to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = 0

    def new(self) -> Iterator[tuple[Tile, str]]:
        """Yield the tiles added since the last call, each with the fingerprint of its redo files."""
        try:
            # Open the file anew each time: network file systems then show what other machines have written.
            with open(self.folder / JOURNAL, "rb", opener=open_regular) as file:
                file.seek(self._read)
                content = file.read()
        except OSError:  # not created yet, or the folder was removed
            return
        for line in content.splitlines(keepends=True):
            entries = parse_line(line)
            if entries is None:  # the rest of the line has not been written yet
                return
            self._read += len(line)
            for entry in entries:
                yield (entry["done"][0], entry["done"][1]), entry["files"]


class SharedResult(Protocol):
    """Takes over the tiles that attempts have finished."""

    def adopt(self, folder: Path, tile: Tile, files: str) -> bool:
        """Take over a tile from the folder of an attempt. Return False if its files are not visible yet."""


class RedoFiles:
    """Moves the redo files of attempts into C."""

    def __init__(self, target: Journaled, grid: TileGrid) -> None:
        self._target, self._grid = target, grid

    def adopt(self, folder: Path, tile: Tile, files: str) -> bool:
        """Move a tile's redo files to where C is written, and commit the tile.

        Return False if the files are not visible yet.
        """
        blocks, matrix = self._grid.blocks(tile), self._target.matrix
        if redo_fingerprint(matrix, folder / REDO, blocks) != files:
            return False
        self._target.written = True
        for block in blocks:
            matrix.adopt(folder / REDO, *block)
        assert self._target.finished is not None
        self._target.finished(tile, blocks)
        return True


def redo_fingerprint(matrix: Resumable, folder: Path, blocks: Sequence[tuple[Range, Range]]) -> str:
    """Return a fingerprint of the redo files of a tile in `folder`. `blocks` are the tile's blocks of C."""
    return "+".join(matrix.redo_fingerprint(folder, *block) for block in blocks)


class AttemptTarget(Target):
    """C while a child process computes a part: its tiles go to redo files in the attempt's folder."""

    matrix: ResumableMatrix
    whole = False

    def __init__(self, job: PreparedRun, folder: Path) -> None:
        """Begin an attempt. Raises `ExecutionError` if its folder has been removed."""
        self.matrix = cast(ResumableMatrix, job.output.matrix)
        try:
            self._file = os.open(folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise ExecutionError(f"the attempt cannot be begun in {folder}: {error.strerror}") from error
        self.matrix.redirect_writes(folder / REDO)
        self._committer = _AttemptCommitter(self._file, self.matrix, folder / REDO)
        self.finished = self._committer.finished

    def seal(self) -> None:
        self._committer.close()

    def abandon(self) -> None:
        self._committer.stop()

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._file)


class _AttemptCommitter(TileQueue):
    """Makes the redo files of tiles durable, and adds the tiles to the journal of the attempt."""

    def __init__(self, file: int, matrix: Resumable, redo: Path) -> None:
        self._file = file
        self._matrix = matrix
        self._folder = redo
        super().__init__()

    def commit(self, tiles: Mapping[Tile, Sequence[Block]]) -> None:
        """Flush the redo files of tiles, and add lines for them to the attempt's journal."""
        self._matrix.sync_blocks(list(chain.from_iterable(tiles.values())))
        files = {tile: redo_fingerprint(self._matrix, self._folder, own) for tile, own in tiles.items()}
        append_line(self._file, done_entries(files))
        self.recorded += len(tiles)


def state_of(matrix: Matrix, plan: Plan) -> Sequence[Any]:
    """Return the state of the result of a part: its collected elements, or the rows of its tiles."""
    if isinstance(matrix, Collecting):
        return matrix.state()
    every = stores.memory(matrix)
    lines = sorted({line for tile in plan.tiles for line in (tile if plan.grid.cover.halves else tile[:1])})
    return [(rows, every[slice(*rows)]) for rows in map(plan.grid.rows, lines)]


def merge_state(matrix: Matrix, state: Sequence[Any]) -> None:
    if isinstance(matrix, Collecting):
        matrix.merge(state)
        return
    for rows, kept in state:
        matrix.write(rows, (0, kept.shape[1]), kept)


class StateTarget(Target):
    """The result of a part, in the memory of the child process that computes it."""

    whole = False

    def __init__(self, job: PreparedRun, folder: Path) -> None:
        self.matrix = create_output(job)
        self._folder, self._plan = folder, job.plan

    def seal(self) -> None:
        path = self._folder / STATE
        try:
            write_whole(path, pack(state_of(self.matrix, self._plan)))
            file = os.open(self._folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise ExecutionError(f"the result of a part cannot be written: {error}") from error
        try:
            append_line(file, done_entries(dict.fromkeys(self._plan.tiles, fingerprint_of([path]))))
        finally:
            os.close(file)

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


class States:
    """Merges the states of attempts into the result."""

    def __init__(self, result: Matrix) -> None:
        self._result = result
        self._merged: set[Path] = set()

    def adopt(self, folder: Path, tile: Tile, files: str) -> bool:
        """Merge the state of an attempt, once for all of its tiles. Return False if it is not visible yet."""
        if folder not in self._merged:
            if fingerprint_of([folder / STATE]) != files:
                return False
            merge_state(self._result, unpack(folder / STATE))
            self._merged.add(folder)
        return True
