"""Decide which worker computes which part. Pure: the coordinator reports what happened, and asks what to
do."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from oocgemm.planning.tiling import Tile

# A part fails after this many attempts that finished none of its tiles. A worker is not used any more after
# this many failed attempts in a row, if there are others.
MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class Failed:
    """A part that failed too often, with the last reason."""

    part: int
    why: str


@dataclass
class _Part:
    left: set[Tile]
    attempts: int = 0  # begun so far
    fruitless: int = 0  # ended in a row without a finished tile
    failed_on: set[str] = field(default_factory=set)


@dataclass
class _Running:
    part: int
    left: int  # number of unfinished tiles of the part when the attempt began


class Window:
    """The parts of a run, each with its unfinished tiles, and the workers that compute them.

    Each worker computes at most one part at a time, and each part is given to at most one worker.
    """

    def __init__(self, parts: Mapping[int, Collection[Tile]]) -> None:
        """Begin with the unfinished tiles of each part. Parts are given out in the order of the mapping."""
        self._parts = {number: _Part(set(tiles)) for number, tiles in parts.items() if tiles}
        self._part_of = {tile: number for number, part in self._parts.items() for tile in part.left}
        self._running: dict[str, _Running] = {}
        self._failures: dict[str, int] = {}  # failed attempts in a row, by worker

    @property
    def complete(self) -> bool:
        """Whether no tile is left."""
        return not self._part_of

    def is_left(self, tile: Tile) -> bool:
        """Tell whether a tile is not finished."""
        return tile in self._part_of

    def left(self, part: int) -> frozenset[Tile]:
        """Return the unfinished tiles of a part."""
        return frozenset(self._parts[part].left)

    def next(self, worker: str, workers: Collection[str]) -> tuple[int, int] | None:
        """Give a worker that has no part the next one.

        Returns the number of the part, and the number of the attempt at it, from 1 on. Returns None if there
        is no part for this worker. A part that failed on a worker is given to another one if there is another
        one among `workers`, all those present.
        """
        usable = [name for name in workers if self._failures.get(name, 0) < MAX_ATTEMPTS]
        if usable and worker not in usable:
            return None
        taken = {running.part for running in self._running.values()}
        for number, part in self._parts.items():
            others = [name for name in usable or workers if name not in part.failed_on]
            if part.left and number not in taken and (worker in others or not others):
                part.attempts += 1
                self._running[worker] = _Running(number, len(part.left))
                return number, part.attempts
        return None

    def tile_done(self, tile: Tile) -> bool:
        """Note that a tile is finished. Return False if it was finished before, or is in no part."""
        number = self._part_of.pop(tile, None)
        if number is None:
            return False
        self._parts[number].left.discard(tile)
        return True

    def ended(self, worker: str, failure: str | None) -> Failed | None:
        """Note that the attempt of a worker has ended, and why if it failed.

        Returns the part if it has now failed too often. Its tiles that are left are given out again
        otherwise.
        """
        running = self._running.pop(worker)
        part = self._parts[running.part]
        if failure is None:
            self._failures.pop(worker, None)
            return None
        self._failures[worker] = self._failures.get(worker, 0) + 1
        part.failed_on.add(worker)
        part.fruitless = part.fruitless + 1 if len(part.left) == running.left else 0
        if part.left and part.fruitless >= MAX_ATTEMPTS:
            return Failed(running.part, failure)
        return None
