"""Runs a schedule: one queue a stream, waits derived as the operations go by.

The calling thread walks the schedule in program order, some way ahead of what has ended, derives what each operation
waits for, and puts it on the queue of its stream. Each stream's operations are issued in order, once those they wait for
have been *issued*: a host lane does the work, a device lane hands it to the backend, which
makes its own streams wait. Since every wait is for an operation earlier in program order, and all earlier
ones are on their queues, the earliest unfinished operation can always go on: nothing can deadlock.

A stream whose operations take their time as they are issued has threads of its own. Those that a device only takes orders
for are issued by whichever thread has just ended what they wait for: to wake another one would take longer than to issue.

The first failure anywhere, or a request to cancel, stops the run: whatever waits for a failed operation is cancelled, nothing
new starts, all threads are joined, and the first error is raised. No signal interrupts a run: see `threads.shielded`.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from time import perf_counter_ns, sleep
from typing import Protocol

from oocgemm.backends.base import Array, DoneToken, Session, Token
from oocgemm.engine.staging import Staging
from oocgemm.errors import ExecutionError
from oocgemm.planning import Kind, Operation, Plan, Tier
from oocgemm.planning.cost.machine import CODEC_WORKERS, DIGESTING_WORKERS, STORE_WORKERS
from oocgemm.planning.schedule.hazards import HazardTracker
from oocgemm.planning.tiling import Tile
from oocgemm.system.threads import Cancel, short_switch_interval, start
from oocgemm.timeline import Span

# So many operations, and so many for each strip of a tile, may be on their way at a time: a tile can drain or load while the next
# one is being issued, and a long schedule is not held in memory.
AHEAD, AHEAD_STRIPS = 256, 16
# How often is looked for operations that have ended, in seconds. A thread that is woken for each of them would take the
# interpreter from those that issue and decode; so many are on their way that nothing waits for that.
LOOK_EVERY = 4e-3
_ON_STORE = (Kind.READ, Kind.WRITE)

Observer = Callable[[Span], None]


class Verifier(Protocol):
    """Checks strips of C between the executor and the stores. Its methods are called by many threads."""

    def transfer(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> bool:
        """Do a Read or a Write between a store and `columns`, the slot's memory. Return False for a strip that is wrong: it is
        not written."""
        ...

    def submit(self, operation: Operation) -> None:
        """Follow an operation of the device. Called just before it is submitted."""
        ...


Perform = Callable[[Operation, list[Token]], Token]


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class Completion:
    """An operation on its way: posted with a token when issued, or cancelled."""

    number: int
    token: Token | None = None
    posted: bool = False
    _underway: threading.Lock = field(default_factory=_taken)

    def issued(self) -> Token:
        """The token, once there is one. Raises `_Cancelled` if there never will be."""
        with self._underway:
            if self.token is None:
                raise _Cancelled
            return self.token

    def post(self) -> None:
        """Let those go on who wait for it to be issued. Once."""
        self.posted = True
        self._underway.release()


class _Cancelled(Exception):  # noqa: N818 - not an error: the end of work that another error has stopped
    """This operation will not run, because an earlier one failed."""


_Item = tuple[Operation, Sequence[Completion], Completion]


def _ready(item: _Item) -> bool:
    return all(wait.posted for wait in item[1])


class Run:
    """One execution of a plan's schedule on a backend session and its staging."""

    def __init__(
        self,
        plan: Plan,
        session: Session,
        staging: Staging,
        origin_ns: int,
        observe: Observer,
        finished: Callable[[Tile], None] | None = None,
        verifier: Verifier | None = None,
        first: int = 0,
    ) -> None:
        """`observe` is called with every operation that has ended, by one thread, in the order in which that is noticed.
        `finished` is called for each tile when all of it is written (not synced), by the thread that wrote the last of
        it, once a tile. What either raises fails the run. Strips that the `verifier` finds wrong are not written.
        Operations are numbered from `first` on."""
        self._plan = plan
        self._session = session
        self._staging = staging
        self._origin = origin_ns
        self._observe = observe
        self._finished = finished
        self._verifier = verifier
        self._first = first
        self._unwritten: dict[Tile, int] = {}  # bytes, of tiles that have been written in part
        self._writing = threading.Lock()
        self._streams: dict[str, tuple[SimpleQueue[_Item | None], list[threading.Thread]]] = {}
        self._orders: dict[str, deque[_Item]] = {}  # that a device only takes, by stream
        self._issuing = threading.Lock()
        self._look = False  # whether there may be an order that can be issued
        self._annotate = _annotation()
        self._issued: SimpleQueue[_Item | None] = SimpleQueue()
        self._all_issued = threading.Event()
        self._ended = 0
        self._error: BaseException | None = None
        self._failing = threading.Lock()
        self.wrote = False  # whether anything was begun that overwrites C

    def execute(self, cancel: Cancel | None = None) -> None:
        """Run everything; returns when the last operation has ended and all threads are joined.

        Raises the first error: that of an operation, or that of `cancel`. Must not be called where a signal may
        interrupt it.
        """
        collector = threading.Thread(target=self._collect, name="oocgemm-timeline")
        start(collector)
        with short_switch_interval(), (cancel or Cancel()).calling(self._fail):
            try:
                self._dispatch()
            except BaseException as error:
                self._fail(error)
            for queue, threads in self._streams.values():
                for _ in threads:
                    queue.put(None)
                for thread in threads:
                    thread.join()
            self._all_issued.set()
            self._issued.put(None)
            collector.join()
        first, self._error = self._error, None  # or it would keep itself, and all that its frames refer to
        if first is not None:
            raise first

    def _dispatch(self) -> None:
        tracker: HazardTracker[Completion] = HazardTracker()
        ahead = AHEAD + AHEAD_STRIPS * -(-self._plan.tile.m // max(1, self._plan.slots.strip))
        for number, operation in enumerate(self._plan.schedule(), self._first):
            while self._error is None and number - self._first - self._ended > ahead:
                sleep(LOOK_EVERY)
            if self._error is not None:
                return
            completion = Completion(number)
            waits = tracker.admit(operation, completion)
            item = operation, waits, completion
            if operation.kind in self._session.asynchronous:
                self._orders.setdefault(operation.stream, deque()).append(item)
                # Otherwise the thread that posts the last of them issues it.
                if _ready(item):
                    self._started("orders", 1, self._wait_for_news).put(item)
            else:
                self._queue(operation).put(item)

    def _wait_for_news(self, queue: "SimpleQueue[_Item | None]") -> None:
        while queue.get() is not None:
            self._issue()

    def _issue(self) -> None:
        """Issue all orders that can be issued, unless another thread is about it, which then looks once more."""
        self._look = True
        while self._look and self._issuing.acquire(blocking=False):
            try:
                self._look = False
                while stream := self._next():
                    self._issue_from(stream)
            finally:
                self._issuing.release()

    def _next(self) -> str | None:
        """The stream of that order which comes first in the program of all that can be issued: to issue the multiplications of a
        tile takes longer than to multiply a strip of it, which is to leave as soon as it is done."""
        heads = [(orders[0], stream) for stream, orders in list(self._orders.items()) if orders]
        return min(((item[2].number, stream) for item, stream in heads if _ready(item)), default=(0, None))[1]

    def _issue_from(self, stream: str) -> None:
        """Issue orders of one stream for as long as it is their turn."""
        try:
            with nullcontext() if self._error is not None else self._session.worker(stream):
                while self._next() == stream:
                    self._step(self._orders[stream].popleft(), self._submit)
        except BaseException as error:  # of the context itself: no device, say
            self._fail(_placed(error, f"stream {stream}"))

    def _queue(self, operation: Operation) -> "SimpleQueue[_Item | None]":
        """The queue of the operation's stream."""
        stream = operation.stream
        if stream in self._streams:
            return self._streams[stream][0]
        on_store = operation.kind in _ON_STORE
        side_by_side = DIGESTING_WORKERS if self._plan.problem.checked == "device" else STORE_WORKERS
        side_by_side = CODEC_WORKERS if operation.coded else side_by_side
        workers = side_by_side if on_store and self._plan.candidate.io_threads > 1 else 1
        return self._started(stream, workers, partial(self._work, stream, on_store))

    def _started(
        self, name: str, workers: int, work: Callable[["SimpleQueue[_Item | None]"], None]
    ) -> "SimpleQueue[_Item | None]":
        """The queue of that name, its threads started on first use."""
        if name not in self._streams:
            queue: SimpleQueue[_Item | None] = SimpleQueue()
            threads: list[threading.Thread] = []
            self._streams[name] = queue, threads
            for index in range(workers):
                thread = threading.Thread(target=work, args=(queue,), name=f"oocgemm-{name}-{index}")
                start(thread)
                threads.append(thread)
        return self._streams[name][0]

    def _work(self, stream: str, on_store: bool, queue: "SimpleQueue[_Item | None]") -> None:
        context: AbstractContextManager[None] = nullcontext() if on_store else self._session.worker(stream)
        ended = False
        try:
            perform = self._transfer if on_store else self._submit
            with context:
                while (item := queue.get()) is not None:
                    self._step(item, perform)
                    if self._orders:
                        self._issue()
                ended = True
        except BaseException as error:  # of the context itself: no device, say
            self._fail(_placed(error, f"stream {stream}"))
            while not ended and (item := queue.get()) is not None:
                item[2].post()

    def _step(self, item: _Item, perform: Perform) -> None:
        operation, waits, completion = item
        try:
            tokens = [wait.issued() for wait in waits]
            if self._error is None:
                with self._annotate(operation):
                    completion.token = perform(operation, tokens)
        except _Cancelled:
            pass
        except BaseException as error:
            self._fail(_placed(error, operation))
        if completion.token is not None:
            self._issued.put(item)
        completion.post()

    def _transfer(self, operation: Operation, tokens: list[Token]) -> Token:
        for token in tokens:
            token.synchronize()
        reading = operation.kind is Kind.READ
        region = (operation.writes if reading else operation.reads)[0]
        # Where device and host memory are one, the slots of the device are read into and written from.
        on_host = region.slot.tier is Tier.HOST
        columns: Sequence[Array]
        if on_host and not reading and self._staging.in_place(region.slot):
            columns = []  # the device has brought it to where it goes
        elif on_host:
            columns = self._staging.columns(region.slot, operation)
        else:
            columns = [self._session.view(operation, region)]
        self.wrote = self.wrote or not reading
        start = perf_counter_ns()
        right = True
        if self._verifier is None:
            self._staging.transfer(operation, columns)
        else:
            right = self._verifier.transfer(self._staging, operation, columns)
        moved = not (on_host and self._staging.in_place(region.slot))
        token = DoneToken(start, perf_counter_ns(), moved)
        if self._finished is not None and not reading and right:
            self._count(operation)
        return token

    def _count(self, write: Operation) -> None:
        """Note what a Write has written, and say so when that was the last of its tile."""
        tile = write.tile
        with self._writing:
            left = self._unwritten.pop(tile, None)
            if left is None:
                left = self._plan.tile_bytes(tile)
            left -= write.bytes
            if left:
                self._unwritten[tile] = left
        if left == 0 and self._finished is not None:
            self._finished(tile)

    def _submit(self, operation: Operation, tokens: list[Token]) -> Token:
        host: Sequence[Array] = []
        if operation.kind is Kind.UPLOAD:
            host = self._staging.held(operation)
        elif operation.kind is Kind.DOWNLOAD:
            host = self._staging.room(operation)
            self.wrote = self.wrote or self._staging.in_place(operation.writes[0].slot)
        if self._verifier is not None:
            self._verifier.submit(operation)
        return self._session.submit(operation, host, tokens)

    def _collect(self) -> None:
        """Turn finished operations into spans, apart from the threads that issue."""
        while (item := self._issued.get()) is not None:
            if self._issued.empty():
                self._all_issued.wait(LOOK_EVERY)
            operation, waits, completion = item
            assert completion.token is not None
            try:
                completion.token.synchronize()
                start, end = completion.token.interval()
                times = start - self._origin, end - self._origin
                if isinstance(completion.token, DoneToken) and not completion.token.moved:
                    operation = operation._replace(bytes=0)
                self._observe(Span.of(completion.number, operation, *times, (wait.number for wait in waits)))
            except BaseException as error:
                self._fail(_placed(error, operation))
            self._ended += 1

    def _fail(self, error: BaseException) -> None:
        with self._failing:
            if self._error is None:
                self._error = error
        self._staging.stop()


def _annotation() -> Callable[[Operation], AbstractContextManager[object]]:
    """What makes an NVTX range of an operation, which profilers show, where the package nvtx is installed."""
    try:
        from nvtx import annotate
    except ImportError:
        return nullcontext
    return lambda operation: annotate(str(operation))


def _placed(error: BaseException, where: Operation | str) -> BaseException:
    """An error that says what it stopped; interrupts stay what they are."""
    if not isinstance(error, Exception):
        return error
    placed = ExecutionError(f"{where}: {error or type(error).__name__}")
    placed.__cause__ = error
    return placed
