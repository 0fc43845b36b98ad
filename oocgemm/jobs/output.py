"""Where a run writes to, from its begin to its end: C in local files, with a journal, or any other C, without."""

import shutil
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Protocol, cast

from oocgemm import stores
from oocgemm.errors import InputError
from oocgemm.jobs import job
from oocgemm.jobs.job import Job
from oocgemm.jobs.journal import JOURNAL, LOCK, REDO, Journal, Keeper
from oocgemm.jobs.resume import Earlier
from oocgemm.machine import info as system
from oocgemm.planning.tiling import Tile
from oocgemm.stores import Matrix
from oocgemm.stores.durable import SIDECAR, Durable, sync_path


class Target(Protocol):
    """A C that is being written."""

    @property
    def matrix(self) -> Matrix:
        """C."""

    def finished(self, tile: Tile) -> None:
        """A tile is written, though perhaps not durable yet."""

    def seal(self) -> None:
        """All of C is written: see that it is durable, and that it says so."""

    def abandon(self, *, written: bool) -> None:
        """The run has failed, with some of C `written` or nothing of it. What can be gone on with stays, and what would
        only be in the way goes."""

    def close(self) -> None:
        """Let go of what is held, at the very end."""


def open_target(work: Job, c: Any) -> Target:
    """Open C for a run, and create it if it does not exist. Raises `InputError` if that is impossible."""
    if work.earlier is None:
        return Plain(work, c)
    return Whole(work) if work.earlier.complete else Kept(work, work.earlier, c)


class Plain:
    """A C without a journal: memory, or a store elsewhere."""

    def __init__(self, work: Job, c: Any) -> None:
        self._was_whole = _was_whole(work)
        self.matrix = job.create_output(work, c)
        self.matrix.set_finished(False)

    def finished(self, tile: Tile) -> None:
        pass

    def seal(self) -> None:
        self.matrix.sync()
        self.matrix.set_finished(True)

    def abandon(self, *, written: bool) -> None:
        if self._was_whole and not written:
            self.matrix.set_finished(True)

    def close(self) -> None:
        pass


class Whole:
    """A C that the resumed run had completed: nothing is written."""

    def __init__(self, work: Job) -> None:
        assert work.c is not None
        self.matrix = work.c

    def finished(self, tile: Tile) -> None:
        raise AssertionError(f"tile {tile} of a complete C was written")

    def seal(self) -> None:
        pass

    def abandon(self, *, written: bool) -> None:
        pass

    def close(self) -> None:
        pass


class Kept:
    """A C in local files, with a journal: see `oocgemm.jobs.journal` for the order of things."""

    matrix: Durable

    def __init__(self, work: Job, earlier: Earlier, c: Any) -> None:
        self._earlier = earlier
        self._creates, self._created = work.c is None, False
        ended = earlier.record is None or earlier.record.complete is not None
        self._was_whole = ended and _was_whole(work)
        self._redo = work.plan.problem.reads_c
        if work.c is not None:
            self.matrix = cast(Durable, work.c)
        try:
            self._journal = Journal(earlier.folder)
        except OSError as error:
            what = f"create {c}" if self._creates else f"keep a journal in {earlier.folder}"
            raise InputError(f"C: cannot {what}: {error.strerror}") from error
        if self._journal.record != earlier.record:
            self._journal.close()
            raise InputError(f"another run was at C just now, by the journal in {earlier.folder}: try again")
        self._keeper: Keeper | None = None
        try:
            self._open(work, c)
            self._keeper = Keeper(self._journal, self.matrix, work.plan.grid, redo=self._redo)
        except BaseException:
            self.abandon(written=False)
            self.close()
            raise

    def _open(self, work: Job, c: Any) -> None:
        """C as it is to be written to, the journal saying so first."""
        earlier, plan = self._earlier, work.plan
        if earlier.resumed:
            self._journal.resume()
        else:
            self._journal.start(_header(work))
        if work.c is None:
            if earlier.anew:
                stores.clear(earlier.folder, keep=(JOURNAL, LOCK))
            self.matrix = cast(Durable, job.create_output(work, c, folder=earlier.folder))
            self._created = True
        if work.c is not None:
            stores.reserve(work.c)
        if earlier.resumed:
            self.matrix.sweep()
        self.matrix.set_finished(False)
        if self._redo:
            redo = earlier.folder / REDO
            self.matrix.redirect(redo)
            for tile in earlier.committed:
                self.matrix.adopt(plan.grid.rows(tile[0]), plan.grid.cols(tile[1]))
            shutil.rmtree(redo, ignore_errors=True)  # of tiles that were not committed
            redo.mkdir()
            sync_path(earlier.folder)

    def finished(self, tile: Tile) -> None:
        assert self._keeper is not None
        self._keeper.finished(tile)

    def seal(self) -> None:
        assert self._keeper is not None
        self._keeper.close()
        self._journal.check_in_place()
        self.matrix.set_finished(True)
        self._journal.complete({"content": self.matrix.stamp()})
        shutil.rmtree(self._earlier.folder / REDO, ignore_errors=True)
        if self._earlier.folder.name != SIDECAR:  # beside a .npy file; in a zarr array it is in nobody's way
            self._journal.move_into_c()

    def abandon(self, *, written: bool) -> None:
        kept = 0
        if self._keeper is not None:
            self._keeper.stop()
            kept = self._keeper.kept
        untouched = self._creates or (self._was_whole and (self._redo or not written))
        if self._earlier.resumed or kept or not untouched:
            return  # there is something to go on with, or C is neither old nor new
        with suppress(OSError):
            self._journal.check_in_place()  # else what is there is another's
            if not self._creates:
                self.matrix.set_finished(True)
            stores.clear(self._earlier.folder, c=self._created)

    def close(self) -> None:
        self._journal.close()


def _was_whole(work: Job) -> bool:
    """Whether there is a C that was not left by a run that has not ended, as far as it says so."""
    return work.c is not None and not work.c.describe().get("unfinished")


def _header(work: Job) -> dict[str, Any]:
    plan = work.plan
    return {
        "version": system.versions()["oocgemm"],
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": work.identity,
        "given": {
            "tile": str(plan.tile),
            "chunks": "x".join(map(str, plan.chunks)),
            "compressor": work.compressor or "none",
        },
        "candidate": asdict(plan.candidate),
        "ramp": plan.grid.ramp,
        "tiles": list(plan.grid.shape),
        "created": work.c is None,
    }
