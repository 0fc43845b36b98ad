"""Give parts to workers, move the tiles that they finish into C, and replace workers that die.

`Window` decides which worker computes which part. It is pure: the `Coordinator` reports what happened, and
asks what to do.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import BrokenExecutor, CancelledError
from dataclasses import field
from pathlib import Path
from threading import Event
from typing import Any

from oocgemm.distributed import processes as in_worker
from oocgemm.distributed.attempts import (
    LOG,
    AttemptId,
    Fence,
    SharedResult,
    Tail,
    old_attempts,
    remove_attempts,
)
from oocgemm.distributed.crew import Crew, Task
from oocgemm.distributed.survey import (
    Survey,
    WorkerFacts,
    check_alike,
    check_cores,
    check_memory,
    environment_of,
)
from oocgemm.distributed.tasks import Given, PartSpec
from oocgemm.errors import ExecutionError, InputError, OocGemmError
from oocgemm.jobs.journal import ATTEMPTS, COORDINATOR, GIVEN
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.planning.partition import Part
from oocgemm.planning.tiling import Tile
from oocgemm.system.cache import write_whole
from oocgemm.system.threads import Cancel
from oocgemm.timeline.log import WorkerLog
from oocgemm.values import dataclass

# A part fails after this many attempts that finished none of its tiles. A worker is not used any more after
# this many failed attempts in a row, if there are other workers.
MAX_ATTEMPTS = 3
# Poll intervals in seconds: of the journals of the attempts, and of the list of workers.
POLL, POLL_WORKERS = 0.1, 0.5
# Seconds in which files that a worker has flushed must become visible to this process. Network file systems
# cache what folders contain, usually for up to a minute.
MAX_INVISIBLE = 90.0
# Seconds in which child processes must end when the run stops, and seconds that a run waits without any
# worker.
MAX_STOP, MAX_ALONE = 2.0, 60.0
# Seconds that an attempt may go on when its part is complete. It needs a moment to complete its log.
MAX_SURPLUS = 5.0
logger = logging.getLogger("oocgemm")


@dataclass(frozen=True)
class Failed:
    """A part that failed too often, with the last reason."""

    part: int
    why: str


@dataclass
class _Unfinished:
    left: set[Tile]
    attempts: int = 0  # begun so far
    fruitless: int = 0  # ended in a row without a finished tile
    failed_on: set[str] = field(default_factory=set)


@dataclass
class _Given:
    part: int
    left: int  # number of unfinished tiles of the part when the attempt began


class Window:
    """The parts of a run, each with its unfinished tiles, and the workers that compute them.

    Each worker computes at most one part at a time, and each part is given to at most one worker.
    """

    def __init__(self, parts: Mapping[int, Collection[Tile]]) -> None:
        """Begin with the unfinished tiles of each part. Parts are given out in the order of the mapping."""
        self._parts = {number: _Unfinished(set(tiles)) for number, tiles in parts.items() if tiles}
        self._part_of = {tile: number for number, part in self._parts.items() for tile in part.left}
        self._running: dict[str, _Given] = {}
        self._failures: dict[str, int] = {}  # failed attempts in a row, by worker

    @property
    def complete(self) -> bool:
        return not self._part_of

    def is_left(self, tile: Tile) -> bool:
        return tile in self._part_of

    def left(self, part: int) -> frozenset[Tile]:
        return frozenset(self._parts[part].left)

    def next(self, worker: str, workers: Collection[str]) -> tuple[int, int] | None:
        """Return the number of the next part for a worker that has none, and the number of the attempt at it.

        Returns None if there is no part for this worker. A part that failed on a worker is given to another
        worker if there is one among `workers`, the workers that are present.
        """
        usable = [name for name in workers if self._failures.get(name, 0) < MAX_ATTEMPTS]
        if usable and worker not in usable:
            return None
        taken = {running.part for running in self._running.values()}
        for number, part in self._parts.items():
            others = [name for name in usable or workers if name not in part.failed_on]
            if part.left and number not in taken and (worker in others or not others):
                part.attempts += 1
                self._running[worker] = _Given(number, len(part.left))
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

        Returns the part if it has now failed too often. Otherwise its unfinished tiles are given out again.
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


@dataclass
class _Running:
    """An attempt in a worker. `ended` and `surplus` are the times when its task, and its part, were done."""

    attempt: AttemptId
    task: Task
    ended: float | None = None
    surplus: float | None = None


class Coordinator:
    """Runs the parts of one run.

    `logs` describes the attempts that have ended. `results` has the results of the successful attempts.
    """

    def __init__(
        self,
        job: PreparedRun,
        header: dict[str, Any],
        sidecar: Path,
        result: SharedResult,
        parts: tuple[Part, ...],
        crew: Crew,
        survey: Survey,
        found: Mapping[str, WorkerFacts],
        given: Given,
        finished: Callable[[Tile], None],
    ) -> None:
        """Prepare a run.

        - `header`: the header of the run's journal.
        - `sidecar`: a folder that all workers see, such as the folder of C's journal.
        - `result`: takes over the tiles that attempts have finished.
        - `parts`: the parts, in the order in which they are begun.
        - `survey`: surveys the workers that join during the run.
        - `found`: the workers of the crew that take part from the beginning, by name.
        - `given`: the data that all workers get.
        - `finished`: called with each tile that has been taken over.
        """
        self._job, self._header = job, header
        self._sidecar, self._result = sidecar, result
        self._parts = {part.number: part for part in parts}
        self._tiles = {part.number: frozenset(part.tiles(job.plan.grid)) for part in parts}
        self._window = Window({n: tiles - job.plan.done for n, tiles in self._tiles.items()})
        self._crew = crew
        self._found = dict(found)
        self._known = dict(found)  # including workers that have vanished
        self._survey, self._nonce = survey, sidecar / ATTEMPTS / "nonce"
        self._asked: dict[str, Task] = {}  # the surveys of workers that have joined
        self._refused: set[str] = set()
        self._given, self._finished = given, finished
        self._running: dict[str, _Running] = {}
        self._tails: dict[AttemptId, Tail] = {}
        self._unseen: dict[AttemptId, dict[Tile, str]] = {}  # finished tiles whose files are not visible yet
        self._polled = self._peopled = time.monotonic()
        self._wake = Event()
        self._error: BaseException | None = None
        self.logs: list[WorkerLog] = []
        self.results: list[dict[str, Any]] = []

    def run(self, cancel: Cancel) -> None:
        """Compute all parts; return when all their tiles are in C, and no child process is left.

        Raises the first error: of the input, of a part that failed too often, or of `cancel`.
        """
        self._take_over()
        write_whole(self._sidecar / GIVEN, self._given.packed())
        fence = Fence(self._sidecar / COORDINATOR)
        try:
            with cancel.calling(self._stop):
                while not self._window.complete:
                    self._find_workers()
                    self._begin_parts(fence)
                    self._wake.wait(POLL)
                    self._wake.clear()
                    self._collect_tiles()
                    self._collect_ended()
                    self._end_surplus(fence)
                    if fence.taken_over:
                        raise ExecutionError(f"another run has begun to write C in {self._sidecar}")
                    if self._error is not None:
                        raise self._error
                self._await_last()
        finally:
            fence.close()
            self._end_all()

    def _stop(self, error: BaseException) -> None:
        self._error = error
        self._wake.set()

    def _take_over(self) -> None:
        """Move the tiles into C that attempts of an earlier coordinator finished; remove these attempts.

        These attempts belong to this run: a run that starts anew removes all attempts of earlier runs.
        """
        for attempt in old_attempts(self._sidecar):
            tail = Tail(attempt.folder(self._sidecar))
            for tile, files in tail.new():
                if self._window.is_left(tile):
                    self._adopt(tail.folder, tile, files)
        remove_attempts(self._sidecar)

    def _find_workers(self) -> None:
        now = time.monotonic()
        if self._crew.grows and now - self._polled >= POLL_WORKERS:
            self._polled = now
            names = self._crew.names()
            for name in [name for name in self._found if name not in names]:
                del self._found[name]
                if name in self._running:
                    self._running[name].task.cancel()
                    self._ended(name, "the worker has vanished")
            self._greet(names)
        if self._found:
            self._peopled = now
        elif now - self._peopled > MAX_ALONE:
            raise ExecutionError(f"no worker has been left for {MAX_ALONE:.0f} s: {self._crew.remedy}")

    def _greet(self, names: Collection[str]) -> None:
        """Survey the workers that have joined, and let those take part that can compute the product."""
        for name in names:
            if name not in self._found and name not in self._refused and name not in self._asked:
                self._nonce.parent.mkdir(exist_ok=True)
                self._survey.write(self._nonce)
                self._asked[name] = self._survey.ask(name, self._nonce)
        for name in [name for name, task in self._asked.items() if task.done() or name not in names]:
            found = self._joined(name, self._asked.pop(name)) if name in names else None
            if found is None:
                self._refused.add(name)
            else:
                self._found[name] = self._known[name] = found

    def _joined(self, name: str, task: Task) -> WorkerFacts | None:
        """Return the facts of a worker that has joined; None if it cannot take part."""
        try:
            joined = self._survey.timed(self._survey.read(name, task, self._nonce))
            check_alike([next(iter(self._known.values())), joined])
            check_memory(self._job.plan, [joined])
            check_cores([joined], self._job.output.noted["threads"])
        except OocGemmError as error:
            logger.warning("%s does not take part: %s", name, error)
            return None
        return joined

    def _begin_parts(self, fence: Fence) -> None:
        for name in self._found:
            if name in self._running or (given := self._window.next(name, self._found.keys())) is None:
                continue
            number, count = given
            attempt = AttemptId(fence.epoch, number, count)
            folder = attempt.folder(self._sidecar)
            folder.mkdir(parents=True)
            part, worker = self._parts[number], self._known[name]
            spec = PartSpec(
                header=self._header,
                library=worker.library,
                given=str(self._sidecar / GIVEN),
                rows=part.rows,
                cols=part.cols,
                done=tuple(sorted(self._tiles[number] - self._window.left(number))),
                folder=str(folder),
                fence=str(self._sidecar / COORDINATOR),
                epoch=fence.epoch,
                attempt=attempt.name,
            )
            # If the worker has a GPU, the child process that answered the survey computes the part.
            threads = self._job.output.noted["threads"] if worker.backend == "host" else None
            text = json.dumps(spec.to_dict() | {"environment": environment_of(threads)})
            task = self._crew.submit(name, in_worker.run, text)
            task.add_done_callback(lambda _: self._wake.set())
            self._running[name] = _Running(attempt, task)
            self._tails[attempt] = Tail(folder)
            logger.info("%s begins %s (attempt %d)", name, part, count)

    def _collect_tiles(self) -> None:
        """Move the tiles into C that attempts have finished since the last call."""
        for attempt, tail in self._tails.items():
            waiting = self._unseen.pop(attempt, {}) | dict(tail.new())
            for tile, files in waiting.items():
                if not self._window.is_left(tile):
                    continue  # another attempt was first
                if not self._adopt(tail.folder, tile, files):
                    self._unseen.setdefault(attempt, {})[tile] = files

    def _adopt(self, folder: Path, tile: Tile, files: str) -> bool:
        """Take over a tile that an attempt has finished. Return False if its files are not visible yet."""
        if not self._result.adopt(folder, tile, files):
            return False
        self._window.tile_done(tile)
        self._finished(tile)
        return True

    def _collect_ended(self) -> None:
        for name, running in list(self._running.items()):
            if not running.task.done():
                continue
            running.ended = running.ended or time.monotonic()
            why = self._why_failed(name, running)
            left = self._window.left(running.attempt.part)
            if why is None and left:  # it succeeded, so its files will be visible soon
                if time.monotonic() - running.ended < MAX_INVISIBLE:
                    continue
                why = f"its files are not visible here after {MAX_INVISIBLE:.0f} s"
            self._ended(name, why)

    def _why_failed(self, name: str, running: _Running) -> str | None:
        """Return why an attempt failed; None if it succeeded. Raise errors that every attempt would meet."""
        try:
            result = running.task.result()
        except BrokenExecutor as error:
            raise ExecutionError(f"the executor has failed: {error}") from error
        except (Exception, CancelledError) as error:
            return f"{type(error).__name__}: {error}"
        if "error" not in result:
            self.results.append(result)
            return None
        if result["fatal"]:
            kind = InputError if result["error"].endswith("InputError") else ExecutionError
            raise kind(f"{name}: {result['message']}")
        return str(result["message"])

    def _ended(self, name: str, why: str | None) -> None:
        """Note that an attempt has ended, and `why` if it failed.

        Raises `ExecutionError` if its part has failed too often.
        """
        attempt = self._running.pop(name).attempt
        part = self._parts[attempt.part]
        if not self._window.left(part.number):
            why = None
        log = attempt.folder(self._sidecar) / LOG
        known = self._known[name]
        self.logs.append(
            WorkerLog(
                *(name, known.host, known.described["device"], known.offset_ns, known.error_ns, str(log)),
                *(part.number, attempt.number, why is not None),
            )
        )
        if why is not None:
            logger.warning("%s: %s failed (attempt %d): %s", name, part, attempt.number, why)
        failed = self._window.ended(name, why)
        if failed is not None:
            raise ExecutionError(f"{part} failed {MAX_ATTEMPTS} times, the last time on {name}: {failed.why}")

    def _end_surplus(self, fence: Fence) -> None:
        """End the attempts at parts that are complete, since another attempt finished their last tiles."""
        now = time.monotonic()
        for running in self._running.values():
            if not self._window.left(running.attempt.part):
                running.surplus = running.surplus or now
                if now - running.surplus > MAX_SURPLUS:
                    fence.end([running.attempt.name])

    def _await_last(self) -> None:
        """Wait for the attempts that have just finished the last tiles: they still complete their logs."""
        until = time.monotonic() + MAX_STOP
        while self._running and time.monotonic() < until:
            self._wake.wait(POLL)
            self._wake.clear()
            self._collect_ended()

    def _end_all(self) -> None:
        """Wait until the child processes have ended. The fence has told them to end."""
        self._crew.interrupt()
        until = time.monotonic() + MAX_STOP
        tasks = [running.task for running in self._running.values()]
        while any(not task.done() for task in tasks) and time.monotonic() < until:
            self._wake.wait(POLL)
            self._wake.clear()
        for task in (*tasks, *self._asked.values()):
            task.cancel()
