"""Open or create C for a run, and complete or abandon it.

Only a C in local files or in an object store has a journal.
"""

import shutil
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, cast
from uuid import uuid4

import numpy as np

from oocgemm import stores
from oocgemm.backends.base import numpy_dtype
from oocgemm.engine.executor import Finished
from oocgemm.errors import ExecutionError, InputError, OocGemmError
from oocgemm.jobs.journal import (
    ATTEMPTS,
    COORDINATOR,
    GIVEN,
    JOURNAL,
    LOCK,
    PARTIAL,
    REDO,
    Journal,
    ObjectJournal,
)
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.jobs.resume import Committer, Earlier
from oocgemm.planning.units import format_size
from oocgemm.stores import Matrix
from oocgemm.stores.arrays import RankedMatrix, SparseMatrix
from oocgemm.stores.base import Folder
from oocgemm.stores.capabilities import DATA, SIDECAR, Durable, ResumableMatrix
from oocgemm.stores.files import sync_path
from oocgemm.system.installed import __version__
from oocgemm.system.resources import available_for, available_memory

# Share of the available memory that the elements of a sparse C may take. A run copies them at its end.
SPARSE_SHARE = 0.4


class Target(ABC):
    """C while a run writes it.

    As a context manager, it calls `abandon` if the `with` block raises, and `close` in any case. `matrix` is
    C. `written` tells whether the run has begun to write to C. `whole` tells whether C has all tiles when the
    run of this process ends. `finished` is called with each tile that has been written to blocks of C,
    perhaps not yet to the disk; None if no tile is recorded.
    """

    matrix: Matrix
    finished: Finished | None = None
    written = False
    whole = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.abandon()
        finally:
            self.close()

    @abstractmethod
    def seal(self) -> None:
        """Make all of C durable, then mark it as complete."""

    @abstractmethod
    def abandon(self) -> None:
        """After a failed run, keep what a later run can resume from, and remove the rest."""

    @abstractmethod
    def close(self) -> None:
        """Release locks and files."""


def open_target(job: PreparedRun) -> Target:
    """Return C, opened or created for a run. Raises `InputError` if that is impossible."""
    if job.output.earlier is None:
        return Unjournaled(job)
    return Complete(job) if job.output.earlier.complete else Journaled(job, job.output.earlier)


class Unjournaled(Target):
    """A C without a journal: in memory, or in a remote store."""

    def __init__(self, job: PreparedRun) -> None:
        self._was_complete, self._uplo = _was_complete(job), job.plan.problem.cover.name
        self.matrix = create_output(job)
        if isinstance(self.matrix, Durable):
            self.matrix.set_finished(False)

    def seal(self) -> None:
        if isinstance(self.matrix, Durable):
            self.matrix.sync()
            self.matrix.set_finished(True, self._uplo)

    def abandon(self) -> None:
        if self._was_complete and not self.written and isinstance(self.matrix, Durable):
            self.matrix.set_finished(True)

    def close(self) -> None:
        pass


class Complete(Target):
    """A C that is complete already: the run that should be resumed had finished. Nothing is written."""

    def __init__(self, job: PreparedRun) -> None:
        assert job.output.matrix is not None
        self.matrix = job.output.matrix

    def seal(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


class Journaled(Target):
    """A C with a journal, in local files or in an object store.

    `oocgemm.jobs.journal` describes the order of writes.
    """

    matrix: ResumableMatrix

    def __init__(self, job: PreparedRun, earlier: Earlier) -> None:
        self._earlier = earlier
        found = job.output.matrix
        self._creates, self._created = found is None, False
        ended = earlier.record is None or earlier.record.complete is not None
        self._was_complete = ended and _was_complete(job)
        self._redo, self._uplo = job.plan.problem.updates_c, job.plan.problem.cover.name
        if found is not None:
            self.matrix = cast(ResumableMatrix, found)
        try:
            self._journal = open_journal(earlier.folder)
        except OocGemmError:
            raise
        except OSError as error:
            what = f"create {job.request.c}" if self._creates else f"keep a journal in {earlier.folder}"
            raise InputError(f"C: cannot {what}: {error.strerror}") from error
        if self._journal.record != earlier.record:
            self._journal.close()
            raise InputError(f"another run has just changed the journal in {earlier.folder}: try again")
        self._committer: Committer | None = None
        try:
            self._open(job)
            self._committer = Committer(self._journal, self.matrix, redo=self._redo)
            self.finished = self._committer.finished
        except BaseException:
            self.abandon()
            self.close()
            raise

    def _open(self, job: PreparedRun) -> None:
        """Start or continue the journal, then open or create C for writing."""
        earlier, plan = self._earlier, job.plan
        if earlier.resumed:
            self._journal.resume()
            self._header = earlier.header
        else:
            self._remove_parts()  # parts of an earlier run do not belong to this run
            if isinstance(earlier.folder, Path) and earlier.record is None:
                (earlier.folder / DATA).unlink(missing_ok=True)  # an unfinished C without a journal
            self._header = header_of(job)
            if not isinstance(earlier.folder, Path):
                self._header["name"] = uuid4().hex
            self._journal.start(self._header)
        if self._creates and earlier.recreates:
            stores.clear(earlier.folder, keep=(JOURNAL, LOCK, PARTIAL))
        self.matrix = cast(ResumableMatrix, create_output(job, earlier.folder))
        self._created = self._creates
        if isinstance(self._journal, ObjectJournal):
            cast(Any, self.matrix).guard = self._journal.check_lease
        if earlier.resumed:
            self.matrix.delete_partial_files()
        self.matrix.set_finished(False)
        if self._redo:
            redo = earlier.folder / REDO
            # In an object store, a suspended process of another run could still write redo objects. The
            # name of this run keeps them apart.
            self.matrix.redirect_writes(redo / self._header["name"] if "name" in self._header else redo)
            for tile in earlier.committed:
                for block in plan.grid.blocks(tile):
                    self.matrix.apply_redo(*block)
            stores.remove(redo)  # removes the files of tiles that have no commit
            if isinstance(redo, Path):
                redo.mkdir()
                sync_path(redo.parent)

    @property
    def header(self) -> dict[str, Any]:
        """The header of the journal, which another process needs to compute a part of this run."""
        return self._header

    def seal(self) -> None:
        assert self._committer is not None
        self._committer.close()
        self._journal.check_in_place()
        # All tiles are in C. After `complete`, no run would remove files that a killed run has left here.
        stores.remove(self._earlier.folder / REDO)
        self._remove_parts()
        self.matrix.set_finished(True, self._uplo)
        self._journal.complete({"content": self.matrix.files_fingerprint()})
        # The journal of a zarr array stays in its folder. The journal of a .npy file is
        # moved into that file.
        if self._earlier.folder.name != SIDECAR and isinstance(self._journal, Journal):
            self._journal.move_into_c()

    def abandon(self) -> None:
        kept = 0
        if self._committer is not None:
            self._committer.stop()
            kept = self._committer.recorded
        untouched = self._creates or (self._was_complete and (self._redo or not self.written))
        # Keep C and the journal if a later run can resume. Keep them also if the old C may be overwritten in
        # part: the journal then shows that C is unfinished.
        if self._earlier.resumed or kept or not untouched or (self._earlier.folder / PARTIAL).exists():
            return
        with suppress(OSError, ExecutionError):
            # Raises if the folder now belongs to another run, whose files must not be removed.
            self._journal.check_in_place()
            if not self._creates:
                self.matrix.set_finished(True)
            stores.clear(self._earlier.folder, c=self._created)

    def close(self) -> None:
        self._journal.close()

    def _remove_parts(self) -> None:
        """Remove the files and folders that distributed runs have left in the folder of the journal."""
        folder = self._earlier.folder
        if isinstance(folder, Path):
            for name in (ATTEMPTS, PARTIAL):
                remove_shared(folder / name)
            for name in (COORDINATOR, GIVEN):
                (folder / name).unlink(missing_ok=True)


def remove_shared(folder: Path) -> None:
    """Remove a folder in which other processes may still be writing. Their writes fail from now on.

    The folder is renamed first, so that no file can be created in it while its files are removed.
    """
    removed = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)  # left by a process that was killed in this function
    with suppress(OSError):
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def open_journal(folder: Folder) -> Journal | ObjectJournal:
    """Return the journal in a folder, open for writing. Raises `InputError` if another run writes there."""
    return Journal(folder) if isinstance(folder, Path) else ObjectJournal(folder)


def create_output(job: PreparedRun, folder: Folder | None = None) -> Matrix:
    """Create C, or reserve disk space for an existing C; return C. `folder` contains the journal, if any."""
    found, c = job.output.matrix, job.request.c
    if found is not None:
        stores.reserve(found)
        return found
    problem = job.plan.problem
    if (rule := job.request.into.rule(problem, job.finishing.scales)) is not None:
        score = numpy_dtype(problem.c_dtype)
        score = score["score"] if problem.sink.bounded else score
        limit = int(SPARSE_SHARE * available_memory())
        return SparseMatrix("C", (problem.m, problem.n), score, rule, limit, job.request.into.spills)
    shape, dtype = problem.stored_shape, numpy_dtype(problem.c_dtype)
    if c.path:
        options = job.plan.chunks, job.output.compressor
        return stores.create_output("C", c.path, shape, dtype, *options, folder=folder)
    size = shape[0] * shape[1] * dtype.itemsize
    available = available_for(size)
    if size > available:
        raise InputError(
            f"C takes {format_size(size)}, more than the {format_size(available)} of memory that are "
            "available: pass a path for C, to store it on disk"
        )
    if job.merges_rows:
        return RankedMatrix("C", np.empty(shape, dtype))
    # The other triangle of a Gram matrix is never written, nor is a sum of no elements.
    make = np.zeros if problem.triangle or problem.sink.begins_with_zeros else np.empty
    return stores.open_matrix("C", make(shape, dtype), writable=True)


def _was_complete(job: PreparedRun) -> bool:
    """Tell whether C exists and is not marked as the result of an unfinished run."""
    return job.output.matrix is not None and not job.output.matrix.describe().get("unfinished")


def header_of(job: PreparedRun) -> dict[str, Any]:
    """Return the first line of the journal: what is computed, and by which plan."""
    plan = job.plan
    return {
        "version": __version__,
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": job.output.identity,
        "given": {
            "tile": str(plan.tile),
            "chunks": "x".join(map(str, plan.chunks)),
            "compressor": job.output.compressor or "none",
        },
        "candidate": asdict(plan.candidate),
        "tiles": list(plan.grid.shape),
        "count": plan.grid.count,
        "created": job.output.matrix is None,
    } | dict(job.output.noted)
