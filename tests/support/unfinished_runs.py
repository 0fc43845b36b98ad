"""Runs that fail after some tiles, and what they leave."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import zarr

from oocgemm.cli.process import EXIT_FAILED
from oocgemm.jobs.journal import read
from oocgemm.jobs.resume import Committer
from oocgemm.planning.schedule.operation import Block
from oocgemm.planning.tiling import Tile
from tests.support.built import copy_built
from tests.support.command import Finished, own_threads, run

TILE = ("--tile", "4x4x4")
RNG = np.random.default_rng(5)
A, B, C = (RNG.standard_normal((12, 12)) for _ in range(3))
KINDS = ("c", "c.npy")


@contextmanager
def failing_after(tiles: int) -> Iterator[None]:
    """Make runs fail during the block when `tiles` tiles are finished."""
    right, seen = Committer.commit, 0

    def keep(self: Committer, queued: Mapping[Tile, Sequence[Block]]) -> None:
        nonlocal seen
        for tile, blocks in queued.items():
            seen += 1
            if seen > tiles:
                raise OSError(5, "Input/output error")
            right(self, {tile: blocks})

    with patch.object(Committer, "commit", keep):
        yield


def unfinished(c: str, *options: str, tiles: int = 2) -> Finished:
    with failing_after(tiles):
        done = run("a", "b", c, *TILE, *options)
    assert (done.code, own_threads()) == (EXIT_FAILED, [])
    return done


def stored(c: str) -> bytes:
    return bytes(np.load(c).data if c.endswith(".npy") else np.asarray(zarr.open_array(c, mode="r")[:]).data)


def finished_chunk(c: Path) -> Path:
    """Return the chunk file of a finished tile."""
    record = read(c / ".oocgemm")
    assert record is not None
    row, col = min(record.done)
    return c / "c" / str(row) / str(col)


def store_operands() -> None:
    """Store the operands in the working directory, each as a zarr array and as a .npy file."""
    copy_built("unfinished-operands", _build, Path())


def _build(folder: Path) -> None:
    for name, array in (("a", A), ("b", B), ("old", C)):
        zarr.create_array(folder / name, data=array, chunks=(4, 4), compressors=None)
        np.save(folder / name, array)
