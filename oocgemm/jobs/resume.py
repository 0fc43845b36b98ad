"""Find what an earlier run left at C, and check that a new run may resume it.

`Committer` makes finished tiles durable in a background thread, and records the fingerprints of their files.
A later run recognizes finished tiles by these fingerprints. No other code of this module writes.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from oocgemm import stores
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs import support
from oocgemm.jobs.journal import REDO, Journal, ObjectJournal, Record, busy, owner, read
from oocgemm.jobs.request import Destination
from oocgemm.planning import Candidate, GemmProblem, TileGrid, TileShape
from oocgemm.planning.cover import GRAMS
from oocgemm.planning.plan import recorded_candidate
from oocgemm.planning.schedule.operation import Block
from oocgemm.planning.tiling import Tile
from oocgemm.stores import Matrix
from oocgemm.stores.base import Folder
from oocgemm.stores.capabilities import DATA, Resumable
from oocgemm.stores.transformed import change_of
from oocgemm.system.threads import start
from oocgemm.values import dataclass

MAX_NAMED = 8  # maximum number of tiles that an error message lists

# The entry "gram" in the identity of a product that is not a Gram matrix.
NOT_GRAM = "no"


class TileQueue(ABC):
    """Finished tiles that are committed in a thread, while other tiles are computed.

    All tiles that are queued when the thread is ready are committed together. While the disk writes other
    blocks, flushing many files takes little longer than flushing one: each flush waits for these writes.

    `recorded` is the number of tiles that a later run need not compute again.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Tile, Sequence[Block]] | None] = SimpleQueue()
        self._error: ExecutionError | None = None
        self.recorded = 0
        self._thread = threading.Thread(target=self._work, name="oocgemm-journal")
        start(self._thread)

    @abstractmethod
    def commit(self, tiles: Mapping[Tile, Sequence[Block]]) -> None:
        """Make tiles durable, record this, and increase `recorded`. `tiles` has the blocks of each tile."""

    def finished(self, tile: Tile, blocks: Sequence[Block]) -> None:
        """Queue a tile that is written to blocks of C, but not durable.

        Raises `ExecutionError` if an earlier tile failed.
        """
        if self._error is not None:
            raise self._error
        self._queue.put((tile, blocks))

    def close(self) -> None:
        """Wait until all queued tiles are recorded. Raises `ExecutionError` if a tile failed."""
        self.stop()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Wait until all queued tiles are recorded, or a tile has failed. Raises nothing."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        ended = False
        while not ended:
            tiles = [self._queue.get()]
            with suppress(Empty):
                while True:
                    tiles.append(self._queue.get_nowait())
            ended = None in tiles
            given = dict(filter(None, tiles))
            if given and self._error is None:
                try:
                    self.commit(given)
                except BaseException as error:
                    named = _named(list(given))
                    self._error = ExecutionError(f"{named} of C cannot be made durable: {error}")


def _named(tiles: Sequence[Tile]) -> str:
    """Return a text with the numbers of tiles, at most `MAX_NAMED` of them."""
    if len(tiles) == 1:
        return f"tile {tiles[0]}"
    more = ", ..." if len(tiles) > MAX_NAMED else ""
    return f"one of the tiles {', '.join(map(str, tiles[:MAX_NAMED]))}{more}"


def tile_fingerprint(matrix: Resumable, blocks: Sequence[Block]) -> str | None:
    """Return the fingerprint of the files of a tile; None if these files also contain other tiles."""
    found = []
    for block in blocks:
        if (fingerprint := matrix.block_fingerprint(*block)) is None:
            return None
        found.append(fingerprint)
    return "+".join(found)


class Committer(TileQueue):
    """Makes finished tiles of C durable in C, and records them in the journal of C.

    With `redo`, a tile's new content is first made durable in files outside C, and then moved into C. If
    beta != 0, this keeps the old content, from which the tile is computed, until the new one is durable.
    """

    def __init__(self, journal: Journal | ObjectJournal, matrix: Resumable, *, redo: bool) -> None:
        self._journal = journal
        self._matrix = matrix
        self._redo = redo
        super().__init__()

    def commit(self, tiles: Mapping[Tile, Sequence[Block]]) -> None:
        """Make tiles durable in C, and record that in the journal."""
        blocks = list(chain.from_iterable(tiles.values()))
        self._matrix.sync_blocks(blocks)
        if self._redo:
            self._journal.commit(list(tiles))
            self.recorded += len(tiles)
            for block in blocks:
                self._matrix.apply_redo(*block)
        self._journal.done({tile: tile_fingerprint(self._matrix, own) for tile, own in tiles.items()})
        self.recorded += 0 if self._redo else len(tiles)


@dataclass(frozen=True)
class Earlier:
    """The journal of an earlier run at C, and whether the new run resumes that run.

    `record` is the content of the journal in `folder`, or None if there is none yet. `resumed` tells whether
    the new run continues the earlier one. `lost` has the finished tiles whose files are missing or have
    changed.
    """

    folder: Folder
    record: Record | None
    resumed: bool
    lost: frozenset[Tile] = frozenset()

    @property
    def local(self) -> Path:
        """The folder, which must be local."""
        assert isinstance(self.folder, Path)
        return self.folder

    @property
    def recreates(self) -> bool:
        """Whether C must be created again: an unfinished run created it, and no tile of it is kept."""
        if self.record is None or self.record.complete is not None:
            return False
        return self.record.header["created"] and not self.done

    @property
    def complete(self) -> bool:
        """Whether all of C is durable already, so that the resumed run has nothing left to do."""
        return self.resumed and self.record is not None and self.record.complete is not None

    @property
    def header(self) -> dict[str, Any]:
        """The header of the journal: identity, options and plan of the earlier run."""
        assert self.record is not None
        return self.record.header

    @property
    def candidate(self) -> Candidate:
        """The choices that define the earlier run's plan, such as the tile shape, slots and traversal."""
        return recorded_candidate(self.header["candidate"])

    @property
    def committed(self) -> frozenset[Tile]:
        """Tiles whose new content is durable in files outside C, and must still be moved into C."""
        return self.record.committed if self.record and self.resumed else frozenset()

    @property
    def done(self) -> frozenset[Tile]:
        """Tiles that the new run does not compute, since the earlier run has computed them."""
        if self.record is None or not self.resumed:
            return frozenset()
        return (self.record.done | self.record.committed) - self.lost


def find_earlier(c: Destination, *, resume: bool, overwrite: bool, reads_c: bool) -> Earlier | None:
    """Find the journal at C; return None if C can have none, as in memory or a remote store.

    Raises `InputError` in these cases:

    - Another run is writing to C.
    - An earlier run that wrote C is unfinished, and `resume` is not set. If beta = 0, `overwrite` permits
      this.
    - `resume` is set, but C can have no journal.
    - `resume` is set, and C exists without a journal. With `overwrite` or beta != 0, this is permitted.
    - An unfinished C has lost its journal. If beta = 0, `overwrite` permits this.
    """
    folder = c.journal_folder
    if folder is None:
        if resume:
            raise support.refusal(support.ONE, "resume without a path")
        return None
    record = read(folder)
    holder = owner(folder)
    if holder is not None:
        raise InputError(busy(folder, holder))
    if record is None:
        if resume and not (overwrite or reads_c) and c.is_path_in_use():
            raise InputError(
                f"C exists at {c} without a journal, so it is unknown which run computed it: check it with "
                "oocgemm verify, or pass overwrite=True (--overwrite) to compute it again"
            )
        if isinstance(folder, Path) and not overwrite and (folder / DATA).exists():
            raise InputError(
                f"C at {c} is unfinished, and its journal in {folder} is lost, so that it is unknown which "
                "tiles are done: pass overwrite=True (--overwrite) to compute all of it again"
            )
        if isinstance(folder, Path) and reads_c and (folder / REDO).exists():
            raise InputError(
                f"C at {c} is unfinished, and its journal in {folder} is lost, so that beta could be applied "
                f"twice to some tiles: restore C from a copy, remove {folder} and run again"
            )
        return Earlier(folder, None, resumed=False)
    if record.complete is None and not resume and (reads_c or not overwrite):
        restart = f"remove C and its journal {folder}" if reads_c else "--overwrite"
        raise InputError(
            f"C is the result of an unfinished run, {_share(record)}: pass --resume to continue it, or "
            f"{restart} to start over"
        )
    removed = record.complete is not None and not stores.c_exists(folder)
    return Earlier(folder, record, resumed=resume and not removed)


def find_lost(earlier: Earlier, c: Matrix, problem: GemmProblem) -> Earlier:
    """Return the earlier run with its lost tiles: finished tiles whose files are missing or have changed.

    Raises `InputError` if there are any and beta != 0: without the old C they cannot be computed again.
    """
    record = earlier.record
    assert record is not None
    grid = TileGrid.of(problem, earlier.candidate.tile)
    lost = frozenset(
        tile
        for tile, files in record.files.items()
        if tile_fingerprint(cast(Resumable, c), grid.blocks(tile)) != files
    )
    if lost and problem.updates_c:
        (top, bottom), (left, right) = (
            cut(min(lost)[axis]) for axis, cut in enumerate((grid.rows, grid.cols))
        )
        raise InputError(
            f"files of {len(lost)} of {len(record.done)} finished tiles of C are missing or have changed, "
            f"for example those of C[{top}:{bottom}, {left}:{right}]; beta = {problem.beta} needs the old C, "
            "which was overwritten: restore C from a copy, remove its journal "
            f"{earlier.folder} and start over"
        )
    return replace(earlier, lost=lost)


def resume_hint(c: Any) -> str:
    """Return how many tiles of an interrupted run are done, and how to resume it; "" without such a run."""
    folder = Destination.parse(c).journal_folder
    with suppress(InputError, OSError):
        record = read(folder) if folder is not None else None
        if record is not None and record.complete is None:
            share, left = _share(record), "computes the others"
            return f"{share}: the same command with --resume {'completes C' if _is_full(record) else left}"
    return ""


def check_complete(*operands: Matrix) -> None:
    """Raise `InputError` for an operand that is the result of an unfinished run."""
    for operand in operands:
        described = operand.describe()
        complete = not described.get("unfinished", False)
        if described["store"] == "npy":  # a .npy file has no mark, only a journal
            folder = stores.sidecar(described["path"])
            record = read(folder) if folder is not None else None
            complete = record is None or record.complete is not None
        if not complete:
            raise InputError(
                f"{operand.name} is the result of an unfinished run: complete that run first, with --resume"
            )


def recorded_uplo(c: Matrix) -> str:
    """Return which triangle of a Gram matrix is stored, if the run that stored it has recorded that.

    Return "lower", "upper" or "full", or "" without a record. The record of a zarr array is an attribute.
    That of a .npy file is the journal of its run, which is ignored if the file has changed since.
    """
    described = c.describe()
    uplo = described.get("uplo")
    if described["store"] == "npy" and (folder := stores.sidecar(described["path"])) is not None:
        record = read(folder)
        if record is not None and record.complete is not None:
            same = cast(Resumable, c).files_fingerprint() == record.complete["content"]
            uplo = record.uplo if same else ""
    return str(uplo) if uplo in GRAMS and c.shape[0] == c.shape[1] else ""


def check_uplo(c: Matrix, problem: GemmProblem) -> None:
    """Raise `InputError` if a run needs old elements of C, but C stores only the other triangle."""
    uplo = recorded_uplo(c)
    needed = "upper" if problem.cover.upper else "lower"
    if uplo in ("lower", "upper") and uplo != (needed if problem.cover.halves else ""):
        raise InputError(
            f"beta = {problem.beta}, and C stores only the {uplo} triangle of a Gram matrix: update it by "
            f"gram with uplo = {uplo!r} (--uplo {uplo})"
        )


def identify(
    problem: GemmProblem,
    a: Matrix,
    b: Matrix,
    c: Matrix | None,
    arithmetic: dict[str, str],
    d: Matrix | None = None,
    numbers: str = "",
) -> dict[str, Any]:
    """Describe what a run computes, from which operands, and with which arithmetic.

    `d` is the further matrix that the epilogue reads, and `numbers` a digest of the numbers of its steps.

    Two runs with the same description and the same plan give the same bits.
    """
    existing = c.fingerprint() if c is not None else None
    described = {name: str(value) for name, value in problem.record().items() if name != "checked"}
    further = {} if d is None else {"D": d.fingerprint()}
    return {
        "problem": described | {"gram": problem.cover.name or NOT_GRAM},
        "arithmetic": arithmetic,
        "operands": {"A": a.fingerprint(), "B": b.fingerprint()} | further,
        "numbers": numbers,
        "transforms": {"A": change_of(a), "B": change_of(b)},
        "C": existing["metadata"] if existing is not None else None,
    }


def check_same(
    earlier: Earlier,
    now: dict[str, Any],
    c: Matrix | None,
    tile: TileShape | None,
    chunks: tuple[int, int] | None,
    compressor: str | None,
    *,
    trust_operands: bool,
) -> None:
    """Raise `InputError`, with the differences, if the new run may not resume the earlier one.

    `now` is the result of `identify` for the new run. If `tile`, `chunks` or `compressor` is None, the value
    of the earlier run is used. With `trust_operands`, files of A and B may have changed.
    """
    then, given = earlier.header["identity"], earlier.header["given"]
    changed = [] if trust_operands else list(_changes(then, now))
    found = list(_differences(then, now))
    asked = {
        "tile": tile and str(tile),
        "chunks": chunks and "x".join(map(str, chunks)),
        "compressor": compressor,
    }
    found += [
        f"{name} is {value} and was {given[name]}"
        for name, value in asked.items()
        if value not in (None, given[name])
    ]
    started = earlier.header["begun"]
    record = earlier.record
    assert record is not None
    restart = "start over with --overwrite in place of --resume"
    if complex(now["problem"]["beta"]) != 0:
        restart = "drop --resume to start from the present C"
        if record.complete is None:
            restart = f"restore C, remove its journal {earlier.folder} and drop --resume"
    if found:
        raise InputError(
            f"the run at C, started {started}, differs from this one: {'; '.join(found + changed)}. Resume "
            f"it with its own operands and options, or {restart}"
        )
    if changed:
        raise InputError(
            f"{'; '.join(changed)}. If A and B have the same values as before, for example after a repair, "
            f"pass --trust-operands: finished tiles are kept. Otherwise {restart}"
        )
    if (
        record.complete is not None
        and c is not None
        and cast(Resumable, c).files_fingerprint() != record.complete["content"]
    ):
        raise InputError(f"C has changed since it was completed by the run of {started}: {restart}")


def _share(record: Record) -> str:
    """Return a clause for messages that says how many tiles are done."""
    return f"{len(record.done | record.committed)} of {_count(record)} tiles are done"


def _is_full(record: Record) -> bool:
    return len(record.done) == _count(record)


def _count(record: Record) -> int:
    """Return the number of tiles of a run."""
    return int(record.header["count"])


def _differences(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield the differences between two results of `identify`, except changed contents of operand files."""
    for part in ("problem", "arithmetic"):
        for name in now[part]:
            old, new = then[part].get(name), now[part][name]
            if old != new:
                shown = "uplo" if name == "gram" and NOT_GRAM not in (old, new) else name
                yield f"{shown} is {new} and was {old}"
    for name, new in now["transforms"].items():
        old = then["transforms"].get(name, "")
        if old != new:
            yield f"the transform of {name} is {new or 'none'} and was {old or 'none'}"
    if then["numbers"] != now["numbers"]:
        yield "the numbers of the epilogue have changed"
    for name, old in then["operands"].items():
        new = now["operands"].get(name)
        if old is None or new is None:
            yield f"{name} is or was in memory, where changes cannot be detected"
        elif old["path"] != new["path"]:
            yield f"{name} is at {new['path']} and was at {old['path']}"
        elif old["metadata"] != new["metadata"]:
            yield f"the metadata of {name} has changed"
    if then["C"] is not None and now["C"] != then["C"]:
        yield "the metadata of C has changed"


def _changes(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield the operands whose files have changed between two results of `identify`.

    Times of inode change (ctime) are compared only if the journal of the earlier run contains them.
    """
    for name, old in then["operands"].items():
        new = now["operands"].get(name)
        if old is None or new is None:
            continue
        if old["content"] != new["content"]:
            yield f"the content of {name} has changed (sizes or modification times of its files)"
        elif old.get("changes", new["changes"]) != new["changes"]:
            yield (
                f"{name} has changed: modification times of its files are the same, times of inode change "
                "are not (it was written to, or chmod, a rename or a hard link changed its inodes)"
            )
