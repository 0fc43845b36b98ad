"""Results that are kept in memory: what workers keep of their parts, and how it becomes the whole result.

What a worker keeps of a part of C, such as sums of its rows, is in the memory of its process. When all tiles
of the part are finished, it writes this *state* to a file in the attempt's folder, and then one line with all
tiles to the attempt's journal. So an attempt counts as a whole, or not at all. The coordinator merges states
into the result. `Sink.merge` says how: what is added up to one number comes from one part, since a part has
whole rows of tiles (`Plan.has_whole_rows`). So bits do not depend on the number of workers.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oocgemm import stores
from oocgemm.distributed.tasks import pack, unpack
from oocgemm.errors import ExecutionError
from oocgemm.jobs.journal import JOURNAL, append_line, done_entries
from oocgemm.jobs.output import Target, create_output
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.planning import Plan
from oocgemm.planning.tiling import Tile
from oocgemm.stores import Collecting, Matrix
from oocgemm.stores.files import fingerprint_of
from oocgemm.system.cache import write_whole

STATE = "state"


def state_of(matrix: Matrix, plan: Plan) -> Sequence[Any]:
    """Return what the result of a part has: what it has collected, or the rows of its tiles."""
    if isinstance(matrix, Collecting):
        return matrix.state()
    every = stores.memory(matrix)
    lines = sorted({line for tile in plan.tiles for line in (tile if plan.grid.cover.halves else tile[:1])})
    return [(rows, every[slice(*rows)]) for rows in map(plan.grid.rows, lines)]


def merge_state(matrix: Matrix, state: Sequence[Any]) -> None:
    """Add what a part has to the whole result."""
    if isinstance(matrix, Collecting):
        matrix.merge(state)
        return
    for rows, kept in state:
        matrix.write(rows, (0, kept.shape[1]), kept)


class StateTarget(Target):
    """The result of a part, in the memory of the child process that computes it."""

    whole = False

    def __init__(self, job: PreparedRun, folder: Path) -> None:
        """Begin an attempt in a folder."""
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
        """Merge the state of the attempt that has finished a tile. Return False if it is not visible yet."""
        if folder not in self._merged:
            if fingerprint_of([folder / STATE]) != files:
                return False
            merge_state(self._result, unpack(folder / STATE))
            self._merged.add(folder)
        return True
