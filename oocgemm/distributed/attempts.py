"""The files of an attempt of a worker at a part: redo files of tiles, a journal that lists them, and a log.

An attempt has the folder ``attempts/NAME`` in the journal's folder of C:

- ``redo/`` has the redo files of tiles of C, as `oocgemm.stores.durable` describes them;
- ``journal`` has a line ``{"done": tile, "files": fingerprint}`` for each tile whose redo files are durable;
- ``log.jsonl`` is the timeline of the attempt.

The coordinator creates the folder, and the child process everything in it. If the folder has been removed,
the child process cannot create its journal. So no tile of an attempt that was given up counts later.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from oocgemm.errors import ExecutionError
from oocgemm.jobs.committer import TileQueue
from oocgemm.jobs.journal import ATTEMPTS, JOURNAL, REDO
from oocgemm.jobs.journal_lines import append_line, done_entries, parse_line
from oocgemm.jobs.output import Target, remove_shared
from oocgemm.jobs.prepare import Job
from oocgemm.planning import TileGrid
from oocgemm.planning.tiling import Tile
from oocgemm.stores.durable import Durable
from oocgemm.stores.files import open_regular

LOG = "log.jsonl"
_NAME = re.compile(r"(?P<epoch>[0-9a-f]+)-(?P<part>\d+)-(?P<number>\d+)")


@dataclass(frozen=True)
class Attempt:
    """An attempt at the part with the number `part`. `number` counts the attempts at a part from 1."""

    epoch: str
    part: int
    number: int

    @property
    def name(self) -> str:
        """The name of the attempt's folder. No other attempt ever has it, since epochs are random."""
        return f"{self.epoch}-{self.part}-{self.number}"

    def folder(self, sidecar: Path) -> Path:
        """Return the attempt's folder, given the journal's folder of C."""
        return sidecar / ATTEMPTS / self.name


def old_attempts(sidecar: Path) -> list[Attempt]:
    """Return the attempts that earlier coordinators left in the journal's folder of C, sorted by name."""
    folder = sidecar / ATTEMPTS
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = (_NAME.fullmatch(name) for name in names)
    return [Attempt(x["epoch"], int(x["part"]), int(x["number"])) for x in found if x]


def remove_attempts(sidecar: Path) -> None:
    """Remove all attempts. Child processes that still write there fail."""
    remove_shared(sidecar / ATTEMPTS)


def clean_up(folder: Path) -> None:
    """Remove what a child process has written to its folder since the coordinator removed the folder."""
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
            if entries is None:  # its rest has not been written yet
                return
            self._read += len(line)
            for entry in entries:
                yield (entry["done"][0], entry["done"][1]), entry["files"]


class AttemptTarget(Target):
    """C while a child process computes a part: its tiles go to redo files in the attempt's folder."""

    matrix: Durable

    def __init__(self, job: Job, folder: Path) -> None:
        """Begin an attempt. Raises `ExecutionError` if its folder has been removed."""
        self.matrix = cast(Durable, job.output.matrix)
        try:
            self._file = os.open(folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise ExecutionError(f"the attempt cannot be begun in {folder}: {error.strerror}") from error
        self.matrix.redirect_writes(folder / REDO)
        self._committer = _AttemptCommitter(self._file, self.matrix, job.plan.grid, folder / REDO)

    def finished(self, tile: Tile) -> None:
        self._committer.finished(tile)

    def seal(self) -> None:
        self._committer.close()

    def abandon(self) -> None:
        self._committer.stop()

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._file)


class _AttemptCommitter(TileQueue):
    """Makes the redo files of tiles durable, and adds the tiles to the journal of the attempt."""

    def __init__(self, file: int, matrix: Durable, grid: TileGrid, redo: Path) -> None:
        self._file = file
        self._matrix = matrix
        self._grid = grid
        self._folder = redo
        super().__init__()

    def commit(self, tiles: Sequence[Tile]) -> None:
        """Flush the redo files of tiles, and add lines for them to the attempt's journal."""
        blocks = {tile: (self._grid.rows(tile[0]), self._grid.cols(tile[1])) for tile in tiles}
        self._matrix.sync_blocks(list(blocks.values()))
        files = {tile: self._matrix.redo_fingerprint(self._folder, *blocks[tile]) for tile in tiles}
        append_line(self._file, done_entries(files))
        self.recorded += len(tiles)
