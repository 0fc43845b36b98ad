"""Make finished tiles of C durable and record them in the journal, in a background thread."""

import threading
from abc import ABC, abstractmethod
from queue import SimpleQueue

from oocgemm.errors import ExecutionError
from oocgemm.jobs.journal import Journal
from oocgemm.jobs.object_journal import ObjectJournal
from oocgemm.planning import TileGrid
from oocgemm.planning.tiling import Tile
from oocgemm.stores.durable import Durable
from oocgemm.system.threads import start


class TileQueue(ABC):
    """Finished tiles that are committed in a thread, while other tiles are computed.

    `recorded` is the number of tiles that a later run need not compute again.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Tile | None] = SimpleQueue()
        self._error: ExecutionError | None = None
        self.recorded = 0
        self._thread = threading.Thread(target=self._work, name="oocgemm-journal")
        start(self._thread)

    @abstractmethod
    def commit(self, tile: Tile) -> None:
        """Make one tile durable, record that, and increase `recorded`."""

    def finished(self, tile: Tile) -> None:
        """Queue a tile that is written but not durable. Raises `ExecutionError` if an earlier tile failed."""
        if self._error is not None:
            raise self._error
        self._queue.put(tile)

    def close(self) -> None:
        """Wait until all queued tiles are recorded. Raises `ExecutionError` if one failed."""
        self.stop()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Wait until all queued tiles are recorded, or one has failed. Raises nothing."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (tile := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self.commit(tile)
                except BaseException as error:
                    self._error = ExecutionError(f"tile {tile} of C cannot be made durable: {error}")


def tile_fingerprint(matrix: Durable, grid: TileGrid, tile: Tile) -> str | None:
    """Return the fingerprint of the files of a tile; None if these files also contain other tiles."""
    found = [matrix.block_fingerprint(*block) for block in grid.blocks(tile)]
    known = [fingerprint for fingerprint in found if fingerprint is not None]
    return "+".join(known) if len(known) == len(found) else None


class Committer(TileQueue):
    """Makes finished tiles of C durable in C, and records them in the journal of C.

    With `redo`, a tile's new content is first made durable in files outside C, and then moved into C. If
    beta != 0, this keeps the old content, from which the tile is computed, until the new one is durable.
    """

    def __init__(
        self, journal: Journal | ObjectJournal, matrix: Durable, grid: TileGrid, *, redo: bool
    ) -> None:
        self._journal = journal
        self._matrix = matrix
        self._grid = grid
        self._redo = redo
        super().__init__()

    def commit(self, tile: Tile) -> None:
        """Make one tile durable in C, and record that in the journal."""
        blocks = self._grid.blocks(tile)
        for block in blocks:
            self._matrix.sync_block(*block)
        if self._redo:
            self._journal.commit(tile)
            self.recorded += 1
            for block in blocks:
                self._matrix.apply_redo(*block)
        self._journal.done(tile, tile_fingerprint(self._matrix, self._grid, tile))
        self.recorded += not self._redo
