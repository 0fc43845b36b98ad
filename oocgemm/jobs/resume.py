"""What an earlier run has left at C, and whether it is the one that is asked for now. Nothing here writes."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs.destination import Destination
from oocgemm.jobs.journal import Record, busy, owner, read
from oocgemm.planning import Candidate, GemmProblem, TileGrid, TileShape
from oocgemm.planning.serialize import recorded_candidate
from oocgemm.planning.tiling import Tile
from oocgemm.stores import Matrix
from oocgemm.stores.durable import Durable


@dataclass(frozen=True)
class Earlier:
    """The journal in a C's folder, as it was found; `resumed` says that this run goes on with it. The files of `lost` tiles
    are missing or changed: they are not done."""

    folder: Path
    record: Record | None
    resumed: bool
    lost: frozenset[Tile] = frozenset()

    @property
    def anew(self) -> bool:
        """Whether C is the creation of a run that has not ended, and nothing of it is kept: C is created anew."""
        if self.record is None or self.record.complete is not None:
            return False
        return self.record.header["created"] and not self.done

    @property
    def complete(self) -> bool:
        """Whether the run that is resumed has nothing left to do."""
        return self.resumed and self.record is not None and self.record.complete is not None

    @property
    def header(self) -> dict[str, Any]:
        """What the run that is resumed began with."""
        assert self.record is not None
        return self.record.header

    @property
    def candidate(self) -> Candidate:
        """The plan's decisions, as they were taken."""
        return recorded_candidate(self.header["candidate"])

    @property
    def committed(self) -> frozenset[Tile]:
        """Tiles that are only to be brought to C."""
        return self.record.committed if self.record and self.resumed else frozenset()

    @property
    def done(self) -> frozenset[Tile]:
        """Tiles that need not be computed again."""
        if self.record is None or not self.resumed:
            return frozenset()
        return (self.record.done | self.record.committed) - self.lost


def look(c: Destination, *, resume: bool, overwrite: bool, reads_c: bool) -> Earlier | None:
    """What earlier runs have left at C; None where no journal can be kept. Writes nothing.

    Raises `InputError` if another run is writing there, or if one has not ended and this one neither goes on with it
    nor may overwrite it.
    """
    folder = c.journal_folder
    if folder is None:
        if resume:
            raise InputError(
                "only a run with C at a local path keeps a journal to resume from: drop --resume"
            )
        return None
    record = read(folder)
    holder = owner(folder)
    if holder is not None:
        raise InputError(busy(folder, holder))
    if record is None:
        if resume and not (overwrite or reads_c) and c.is_path_in_use():
            raise InputError(
                f"C exists at {c}, and no journal tells which run made it: oocgemm verify checks whether it is the product; "
                "pass --overwrite to compute it anew"
            )
        return Earlier(folder, None, resumed=False)
    if record.complete is None and not resume and (reads_c or not overwrite):
        anew = f"remove C and {folder}" if reads_c else "--overwrite"
        raise InputError(
            f"C is the result of an unfinished run, {_share(record)}: pass --resume to go on with it, or {anew} to begin anew"
        )
    gone = record.complete is not None and not stores.place(folder).exists()
    return Earlier(folder, record, resumed=resume and not gone)


def without_lost(earlier: Earlier, c: Matrix, problem: GemmProblem) -> Earlier:
    """Find the tiles whose files are not as the journal says. Raises `InputError` where they cannot be computed again."""
    record = earlier.record
    assert record is not None
    grid = TileGrid.of(problem, earlier.candidate.tile)
    lost = frozenset(
        tile
        for tile, files in record.files.items()
        if cast(Durable, c).block_stamp(grid.rows(tile[0]), grid.cols(tile[1])) != files
    )
    if lost and problem.reads_c:
        (top, bottom), (left, right) = (
            cut(min(lost)[axis]) for axis, cut in enumerate((grid.rows, grid.cols))
        )
        raise InputError(
            f"files of {len(lost)} of {len(record.done)} finished tiles of C are missing or have changed since, those of "
            f"C[{top}:{bottom}, {left}:{right}] for one; beta = {problem.beta} needs what C was before, which is gone: restore "
            f"C from a copy, remove {earlier.folder} and run anew"
        )
    return replace(earlier, lost=lost)


def how_far(c: Any) -> str:
    """What is left of a run at C that has been stopped, in a sentence; nothing if there is nothing to go on with."""
    folder = Destination.parse(c).journal_folder
    with suppress(InputError):
        record = read(folder) if folder is not None else None
        if record is not None and record.complete is None:
            return f"{_share(record)}: the same command with --resume goes on with the others"
    return ""


def check_whole(*operands: Matrix) -> None:
    """Refuse to read the result of a run that has not ended. Raises `InputError`."""
    for operand in operands:
        said = operand.describe()
        whole = not said.get("unfinished", False)
        if said["store"] == "npy":  # which has no place to say it
            folder = stores.sidecar(said["path"])
            record = read(folder) if folder is not None else None
            whole = record is None or record.complete is not None
        if not whole:
            raise InputError(
                f"{operand.name} is the result of an unfinished run, and not whole: go on with that run first, by --resume"
            )


def identify(
    problem: GemmProblem, a: Matrix, b: Matrix, c: Matrix | None, arithmetic: dict[str, str]
) -> dict[str, Any]:
    """What a run computes, from what and by what: two runs of one identity and one plan give the same bits."""
    kept = c.fingerprint() if c is not None else None
    return {
        "problem": {name: str(value) for name, value in asdict(problem).items() if name != "checked"},
        "arithmetic": arithmetic,
        "operands": {"A": a.fingerprint(), "B": b.fingerprint()},
        "C": kept["metadata"] if kept is not None else None,
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
    """Raises `InputError`, naming the difference, if the run that is resumed is another than the one asked for. Where
    tile, chunks or compressor are not given, they are what they were. With `trust_operands` changed files of A and B are
    no difference."""
    then, given = earlier.header["identity"], earlier.header["given"]
    changed = [] if trust_operands else list(_changes(then, now))
    found = list(_differences(then, now))
    asked = {
        "tile": tile and str(tile),
        "chunks": chunks and "x".join(map(str, chunks)),
        "compressor": compressor,
    }
    found += [
        f"{name} is {value} now and was {given[name]}"
        for name, value in asked.items()
        if value not in (None, given[name])
    ]
    begun = earlier.header["begun"]
    record = earlier.record
    assert record is not None
    anew = "begin anew with --overwrite in place of --resume"
    if complex(now["problem"]["beta"]) != 0:
        anew = "drop --resume to begin with C as it is now"
        if record.complete is None:
            anew = f"restore C, remove {earlier.folder} and drop --resume"
    if found:
        raise InputError(
            f"the run at C, begun {begun}, is another one: {'; '.join(found + changed)}. Resume it with what it was begun "
            f"with, or {anew}"
        )
    if changed:
        raise InputError(
            f"{'; '.join(changed)}. If A and B still hold what they held, as after damage was repaired, go on with "
            f"--trust-operands: tiles that are done stay as they are. Otherwise {anew}"
        )
    if (
        record.complete is not None
        and c is not None
        and cast(Durable, c).stamp() != record.complete["content"]
    ):
        raise InputError(f"C has changed since the run begun {begun} completed it: {anew}")


def _share(record: Record) -> str:
    down, across = record.header["tiles"]
    return f"{len(record.done | record.committed)} of {down * across} tiles are done"


def _differences(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for part in ("problem", "arithmetic"):
        for name in now[part]:
            old, new = then[part].get(name), now[part][name]
            if old != new:
                yield f"{name} is {new} now and was {old}"
    for name, old in then["operands"].items():
        new = now["operands"][name]
        if old is None or new is None:
            yield f"{name} is or was in memory, of which nothing tells whether it is the same"
        elif old["path"] != new["path"]:
            yield f"{name} is at {new['path']} now and was at {old['path']}"
        elif old["metadata"] != new["metadata"]:
            yield f"{name} has changed since, in its metadata"
    if then["C"] is not None and now["C"] != then["C"]:
        yield "C has changed since, in its metadata"


def _changes(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Operands whose files have changed. Journals of earlier versions know nothing of inode changes."""
    for name, old in then["operands"].items():
        new = now["operands"][name]
        if old is None or new is None:
            continue
        if old["content"] != new["content"]:
            yield f"{name} has changed since, in its content (sizes or modification times of its files)"
        elif old.get("changes", new["changes"]) != new["changes"]:
            yield (
                f"{name} has changed since: modification times of its files are the same, times of inode change are not "
                "(it was written to, or chmod, a rename or a hard link has touched it)"
            )
