"""Make finished tiles of C durable and record them in the journal, in a background thread."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from oocgemm.errors import ExecutionError
from oocgemm.jobs.journal import Journal
from oocgemm.jobs.object_journal import ObjectJournal
from oocgemm.planning import TileGrid
from oocgemm.planning.tiling import Tile
from oocgemm.stores.capabilities import Resumable
from oocgemm.system.threads import start

MAX_NAMED = 8  # maximum number of tiles that an error message lists


class TileQueue(ABC):
    """Finished tiles that are committed in a thread, while other tiles are computed.

    All tiles that are queued when the thread is ready are committed together. While the disk writes other
    blocks, flushing many files takes little longer than flushing one: each flush waits for these writes.

    `recorded` is the number of tiles that a later run need not compute again.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Tile | None] = SimpleQueue()
        self._error: ExecutionError | None = None
        self.recorded = 0
        self._thread = threading.Thread(target=self._work, name="oocgemm-journal")
        start(self._thread)

    @abstractmethod
    def commit(self, tiles: Sequence[Tile]) -> None:
        """Make tiles durable, record that, and increase `recorded`."""

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
        ended = False
        while not ended:
            tiles = [self._queue.get()]
            with suppress(Empty):
                while True:
                    tiles.append(self._queue.get_nowait())
            ended = None in tiles
            given = [tile for tile in tiles if tile is not None]
            if given and self._error is None:
                try:
                    self.commit(given)
                except BaseException as error:
                    self._error = ExecutionError(f"{_named(given)} of C cannot be made durable: {error}")


def _named(tiles: Sequence[Tile]) -> str:
    """Return a text with the numbers of tiles, at most `MAX_NAMED` of them."""
    if len(tiles) == 1:
        return f"tile {tiles[0]}"
    more = ", ..." if len(tiles) > MAX_NAMED else ""
    return f"one of the tiles {', '.join(map(str, tiles[:MAX_NAMED]))}{more}"


def tile_fingerprint(matrix: Resumable, grid: TileGrid, tile: Tile) -> str | None:
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
        self, journal: Journal | ObjectJournal, matrix: Resumable, grid: TileGrid, *, redo: bool
    ) -> None:
        self._journal = journal
        self._matrix = matrix
        self._grid = grid
        self._redo = redo
        super().__init__()

    def commit(self, tiles: Sequence[Tile]) -> None:
        """Make tiles durable in C, and record that in the journal."""
        blocks = [block for tile in tiles for block in self._grid.blocks(tile)]
        self._matrix.sync_blocks(blocks)
        if self._redo:
            self._journal.commit(tiles)
            self.recorded += len(tiles)
            for block in blocks:
                self._matrix.apply_redo(*block)
        self._journal.done({tile: tile_fingerprint(self._matrix, self._grid, tile) for tile in tiles})
        self.recorded += 0 if self._redo else len(tiles)
