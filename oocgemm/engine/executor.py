"""Runs a schedule. Each operation waits for earlier ones, as follows from the buffers that they use.

The calling thread takes the operations in program order, and queues them per stream. Operations wait only for
earlier ones, which are queued already. So there is no deadlock. Who starts them depends on the run:

- *A short run* (`is_short`): the calling thread, one after another. An operation that would wait for the host
  is put off: a Write, and what needs a copy of pageable memory that is in progress. So all copies that can
  begin do so first. What can begin later does so before the thread waits for a copy.
- *Any other run*: threads. Reads, Writes and the operations of the host backend run in threads of their
  stream. So do copies between GPUs, whose threads wait for the other GPU. The other operations of a GPU,
  except Prepare, are only enqueued, which takes microseconds. So they need no threads of their own: any
  thread that has submitted an operation also submits those that waited only for that one. The calling thread
  pauses while too many operations are unfinished (backpressure). One more thread waits for the operations,
  and records them.

The streams of a GPU wait for each other. No thread does that for them.

The first failure, or a request to cancel, stops the run: no new operation starts, all threads are joined, and
the first error is raised. Signals do not interrupt a run (`threads.shielded`).
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from queue import SimpleQueue
from time import perf_counter_ns, sleep
from typing import Protocol

from oocgemm.backends.base import Array, DoneToken, HostBlock, Pageable, Session, Stream, Token
from oocgemm.engine.host_blocks import is_pageable
from oocgemm.engine.staging import Staging
from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import Kind, Lane, Operation, Plan, Tier
from oocgemm.planning.cost.coding import PANELS
from oocgemm.planning.cost.machine import CODEC_WORKERS, DIGESTING_WORKERS, REMOTE_WORKERS, STORE_WORKERS
from oocgemm.planning.schedule.hazards import HazardTracker
from oocgemm.planning.tiling import Tile
from oocgemm.system.threads import Cancel, short_switch_interval, start
from oocgemm.timeline import Span


@cache
def annotation() -> Callable[[Operation], AbstractContextManager[object]]:
    """Return a function that takes an operation and returns a context manager. The context manager marks the
    operation as an NVTX range for profilers, or does nothing if the package nvtx is missing."""
    try:
        from nvtx import annotate
    except ImportError:
        return nullcontext
    return lambda operation: annotate(str(operation))


def _acquired_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class Completion:
    """The state of one operation: queued, submitted or cancelled.

    `posted` is False while the operation is queued. `token` is None unless it has been submitted.
    """

    number: int
    token: Token | None = None
    posted: bool = False
    _pending: threading.Lock = field(default_factory=_acquired_lock)

    def submitted(self) -> Token:
        """Wait until the operation has been submitted, and return its token.

        Raises `Cancelled` if the operation has been cancelled.
        """
        with self._pending:
            if self.token is None:
                raise Cancelled
            return self.token

    def post(self) -> None:
        """Wake the threads that wait in `submitted`. Called once."""
        self.posted = True
        self._pending.release()


class Cancelled(Exception):  # noqa: N818 - not an error itself: it follows from an error elsewhere
    """Raised in a thread that waits for an operation that will not run, because an earlier one has failed."""


Item = tuple[Operation, Sequence[Completion], Completion]


def is_ready(item: Item) -> bool:
    for wait in item[1]:  # noqa: SIM110 - a generator would take twice as long for the few waits
        if not wait.posted:
            return False
    return True


# Queuing pauses while more than MAX_IN_FLIGHT + MAX_IN_FLIGHT_PER_STRIP * (strips per tile) operations are
# unfinished, which bounds the memory for them. The second term lets the next tile start while the strips of
# the previous tile are still downloaded and written.
MAX_IN_FLIGHT, MAX_IN_FLIGHT_PER_STRIP = 256, 16
# Completion poll interval, in seconds. Waking a thread at each completion instead would take the GIL from the
# threads that submit and decode.
POLL_INTERVAL = 4e-3
# Number of pageable blocks that are copied at the same time on a stream: while the last pieces of one block
# are copied, other threads begin the next block.
PAGEABLE_WORKERS = 4
STORE_KINDS = (Kind.READ, Kind.WRITE)
# Their launches name their streams. So the thread that starts them may be prepared for any stream (`worker`).
_COPIES = (Kind.UPLOAD, Kind.DOWNLOAD)
# A run takes less time than its threads take to start if it has at most MAX_SHORT_STEPS steps, and if A, B
# and C are in memory and have at most MAX_SHORT_BYTES bytes together. So its operations run one after another
# in one thread.
MAX_SHORT_STEPS, MAX_SHORT_BYTES = 16, 128 << 20
# Without host slots, no operation keeps that thread busy: it only enqueues them on the GPU, or hands them to
# the threads of the ring. So there may be more steps, and more bytes. The progress of such a run is not
# shown, which takes about 0.2 s for MAX_STREAMED_BYTES of pageable arrays.
MAX_STREAMED_STEPS, MAX_STREAMED_BYTES = 64, 2 << 30
# The maximum number of steps whose blocks the GPU copies from and to pinned arrays. One thread enqueues an
# operation in 20 to 60 us, the threads of a long run need 200 us. Per operation, the run takes about 3 KB.
MAX_ENQUEUED_STEPS = 2048
# A run from pinned memory that takes less time than this, in seconds, is not handed to another thread, which
# takes 0.4 to 0.6 ms. An interrupt takes effect when it has ended.
MAX_BRIEF = 0.25
# While more operations of pinned arrays than this have been started and not been recorded, the thread of a
# short run waits for the first of them. With about 80 pending, the driver would block the thread, which keeps
# the GIL then.
MAX_UNRECORDED = 64
# The key of a queue whose thread submits asynchronous operations that are ready as soon as they are queued.
_WAKEUP = Stream(0, "asynchronous")

Observer = Callable[[Span], None]


class Verifier(Protocol):
    """Checks strips of C (some rows of a tile) before they are written. Many threads call its methods."""

    def transfer(self, staging: Staging, operation: Operation, columns: Sequence[Array]) -> bool:
        """Run a Read or a Write between a store and `columns`, the memory of its host slot.

        Returns:
            False if a strip of C fails the check; it is not written then. True in all other cases.
        """
        ...

    def submit(self, operation: Operation, host: HostBlock) -> None:
        """Note an operation that is about to be submitted to the device, with its host memory."""
        ...

    def ended(self, operation: Operation) -> None:
        """Note an operation that has ended."""
        ...


# Runs or submits an operation. If its block is being copied, the returned function waits for that.
Perform = Callable[[Operation, list[Token]], Token | Callable[[], Token]]


@cache
def _compute(stream: Stream) -> Stream:
    """Return the stream of Multiplies on the device of a stream."""
    return stream._replace(lane=Lane.COMPUTE.value)


def is_short(plan: Plan) -> bool:
    """Return whether a plan's operations take so little time that one thread should start all of them."""
    layouts, problem = plan.layouts, plan.problem
    if plan.all_direct and not problem.planes:
        return plan.steps <= (MAX_ENQUEUED_STEPS if plan.devices == 1 else MAX_STREAMED_STEPS)
    if plan.steps > MAX_STREAMED_STEPS or not (layouts.operands_in_memory and layouts.c.in_memory):
        return False
    streamed = all(map(plan.slots.streams, "ABC")) and not problem.planes
    if plan.steps > MAX_SHORT_STEPS and not streamed:
        return False
    m, n, k, sizes = problem.m, problem.n, problem.depth, problem.itemsizes
    size = m * k * sizes["A"] + k * n * sizes["B"] + m * n * sizes["C"]
    return size <= (MAX_STREAMED_BYTES if streamed else MAX_SHORT_BYTES)


def is_brief(plan: Plan) -> bool:
    """Return whether a run is so short that the thread of the caller should do all of it.

    Pageable arrays are copied by threads. To leave the run to one more thread costs nothing then: 512^3 took
    0.1 ms less.
    """
    return plan.setting.enqueues and is_short(plan) and plan.prediction.total < MAX_BRIEF


class Run:
    """Executes a plan's schedule once."""

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
        begun: dict[Operation, Token | Callable[[], Token]] | None = None,
    ) -> None:
        """Prepare a run. If a callback raises, the run fails.

        Args:
            plan: has the schedule.
            session, staging: have the plan's buffers on the device and in host memory.
            origin_ns: zero of the times in spans, in nanoseconds of `perf_counter_ns`.
            observe: called with the span (times and waits) of every operation that has ended. One thread
                makes all calls, in the order of submission.
            finished: called once per tile when the whole tile has been written, but perhaps not synced to
                the disk. The thread that ran the tile's last Write calls it.
            verifier: checks strips of C. A strip that fails is not written.
            first: the number that the first operation gets. Spans refer to operations by number.
            begun: Uploads that the session has begun (`prefetch.Prefetch`). The run takes them out.
        """
        self._plan = plan
        self._session = session
        self._staging = staging
        self._origin = origin_ns
        self._observe = observe
        self._finished = finished
        self._verifier = verifier
        self._first = first
        self._begun = {} if begun is None else begun
        self._unwritten: dict[Tile, int] = {}  # bytes still to be written of each partly written tile
        self._writing = threading.Lock()
        self._queues: dict[Stream, tuple[SimpleQueue[Item | None], list[threading.Thread]]] = {}
        self._alone = is_short(plan)  # whether the calling thread starts all operations
        self._unstarted: dict[Stream, deque[Item]] = {}  # of the operations that have no thread of their own
        self._submitting = threading.Lock()
        self._rescan = False  # whether an operation without a thread of its own may have become ready
        self._annotate = annotation()
        self._in_flight: SimpleQueue[Item | None] = SimpleQueue()
        self._all_submitted = threading.Event()
        # Of a short run: copies of pageable memory that have begun, and what the thread is prepared for.
        self._copying: dict[Completion, tuple[Operation, Callable[[], Token]]] = {}
        self._entered: Stream | None = None
        self._worker = ExitStack()
        self._ended = 0
        self._error: BaseException | None = None
        self._failing = threading.Lock()
        self.wrote = plan.layouts.c.in_place  # whether any write to C may have begun

    def execute(self, cancel: Cancel | None = None) -> None:
        """Run the schedule; return when the last operation has ended and all threads are joined.

        Raises the first error: an operation's, or that of `cancel`. Run it where no signal can interrupt it.
        """
        with short_switch_interval(), (cancel or Cancel()).calling(self._fail):
            self._run_alone() if self._alone else self._run_in_threads()
        first, self._error = self._error, None  # breaks a reference cycle through the error's frames
        if first is not None:
            raise first

    def _items(self) -> Iterator[Item]:
        """Yield the operations in program order, each with those that it waits for."""
        if self._alone:  # a plan keeps the waits of a short run
            completions = list[Completion]()
            for operation, waits in self._plan.program:
                completions.append(Completion(self._first + len(completions)))
                yield operation, [completions[i] for i in waits], completions[-1]
            return
        tracker: HazardTracker[Completion] = HazardTracker()
        for number, operation in enumerate(self._plan.schedule(), self._first):
            completion = Completion(number)
            yield operation, tracker.admit(operation, completion), completion

    def _run_alone(self) -> None:
        """Start all operations in this thread."""
        with self._worker:
            try:
                self._start_all()
            except BaseException as error:
                self._fail(error)
            while self._copying:
                self._end_copy()
        self._record_all_but(0)

    def _start_all(self) -> None:
        """Start the operations that need not wait for the host, in program order, and then the other ones."""
        max_unrecorded = MAX_UNRECORDED if self._plan.all_direct else sys.maxsize
        puts_off_writes = bool(self._session.asynchronous)
        for item in self._items():
            operation, stream = item[0], Stream.of(item[0])
            queue = self._unstarted.setdefault(stream, deque())
            # A stream runs its operations in program order, and waits are derived from that.
            if queue or not is_ready(item) or (puts_off_writes and operation.kind is Kind.WRITE):
                queue.append(item)
                continue
            self._start(item, stream)
            self._record_all_but(max_unrecorded)
            if self._error is not None:
                return
        while self._error is None and self._start_ready():
            if self._copying:
                self._end_copy()

    def _start_ready(self) -> bool:
        """Start the operations that need not wait for a copy. Return whether anything is left to do.

        A Write waits for the device. So it is started when all else has been.
        """
        while self._error is None and (stream := self._next_stream()):
            queue = self._unstarted[stream]
            if self._copying and queue[0][0].kind is Kind.WRITE:
                break
            self._start(queue.popleft(), stream)
        return bool(self._copying) or any(self._unstarted.values())

    def _start(self, item: Item, stream: Stream) -> None:
        """Run, submit or begin an operation of a stream in this thread."""
        kind, entered = item[0].kind, self._entered
        if kind in STORE_KINDS:
            self._step(item, self._transfer)
            return
        if kind in _COPIES:
            stream = entered if entered is not None and entered.device == stream.device else _compute(stream)
        if stream != entered:
            try:
                self._worker.close()
                self._worker.enter_context(self._session.worker(stream))
                self._entered = stream
            except BaseException as error:
                self._fail(located_error(error, item[0]))
        self._step(item, self._submit)

    def _end_copy(self) -> None:
        """Wait until a block of pageable memory has been read or written.

        It is the block that the earliest operation waits for, which lets the GPU go on: blocks of C whose
        copies began before may take longer. If there is none, it is the block whose copy began first.
        """
        heads = (
            items[0] for items in self._unstarted.values() if items and items[0][0].kind is not Kind.WRITE
        )
        _, waits = min(((item[2].number, item[1]) for item in heads), default=(0, ()))
        completion = next(filter(self._copying.__contains__, waits), next(iter(self._copying)))
        operation, ended = self._copying.pop(completion)
        try:
            completion.token = ended()
        except BaseException as error:
            self._fail(located_error(error, operation))
        completion.post()

    def _record_all_but(self, count: int) -> None:
        """Wait for all but the last `count` operations, in the order of their start; pass on their spans."""
        while self._in_flight.qsize() > count:
            item = self._in_flight.get()
            if item is not None:
                self._record(item)

    def _run_in_threads(self) -> None:
        """Run the operations in one or more threads per stream. Collect their spans in another thread."""
        collector = threading.Thread(target=self._collect, name="oocgemm-timeline")
        start(collector)
        try:
            self._dispatch()
        except BaseException as error:
            self._fail(error)
        for queue, threads in self._queues.values():
            for _ in threads:
                queue.put(None)
            for thread in threads:
                thread.join()
        self._all_submitted.set()
        self._in_flight.put(None)
        collector.join()

    def _dispatch(self) -> None:
        """Queue the schedule's operations in program order."""
        strips = -(-self._plan.tile.m // max(1, self._plan.slots.strip))
        limit = self._plan.devices * (MAX_IN_FLIGHT + MAX_IN_FLIGHT_PER_STRIP * strips)
        for queued, item in enumerate(self._items()):
            while self._error is None and queued - self._ended > limit:
                sleep(POLL_INTERVAL)
            if self._error is not None:
                return
            operation = item[0]
            if self._is_asynchronous(operation):
                self._unstarted.setdefault(Stream.of(operation), deque()).append(item)
                # If it is not ready, it is submitted when the last operation that it waits for has been.
                if is_ready(item):
                    self._queue(_WAKEUP, 1, self._submit_on_wakeup).put(item)
            else:
                self._queue_of(operation).put(item)

    def _is_asynchronous(self, operation: Operation) -> bool:
        """Return whether an operation is only enqueued: no thread waits for the host or another device."""
        on_device = operation.kind in self._session.asynchronous and not operation.peer
        return on_device and not is_pageable(self._plan, operation)

    def _submit_on_wakeup(self, queue: "SimpleQueue[Item | None]") -> None:
        while queue.get() is not None:
            self._submit_ready()

    def _submit_ready(self) -> None:
        """Submit every asynchronous operation whose waits have all been submitted.

        If another thread is submitting, this returns at once, and the other thread rescans the queues.
        """
        self._rescan = True
        while self._rescan and self._submitting.acquire(blocking=False):
            try:
                self._rescan = False
                while stream := self._next_stream():
                    self._submit_from(stream)
            finally:
                self._submitting.release()

    def _next_stream(self) -> Stream | None:
        """Return the stream of the operation to start next: the earliest ready one, but Writes come last.

        In another order, a strip's Download might be submitted after the Multiplies of later strips, and
        would start late.
        """
        heads = [(items[0], stream) for stream, items in list(self._unstarted.items()) if items]
        ready = (
            (item[0].kind is Kind.WRITE, item[2].number, stream) for item, stream in heads if is_ready(item)
        )
        return min(ready, default=(False, 0, None))[2]

    def _submit_from(self, stream: Stream) -> None:
        """Submit operations of a stream, until the next operation to submit belongs to another stream."""
        try:
            with nullcontext() if self._error is not None else self._session.worker(stream):
                while self._next_stream() == stream:
                    self._step(self._unstarted[stream].popleft(), self._submit)
        except BaseException as error:  # raised by `worker`, for example because the device is lost
            self._fail(located_error(error, f"stream {stream.lane}"))

    def _queue_of(self, operation: Operation) -> "SimpleQueue[Item | None]":
        """Return the queue of an operation's stream."""
        stream, on_store = Stream.of(operation), operation.kind in STORE_KINDS
        if on_store and not self._plan.slots.unified:
            stream = stream._replace(device=0)  # storage is common to all devices, and so are host slots
        store_workers = DIGESTING_WORKERS if self._plan.problem.checked == "device" else STORE_WORKERS
        store_workers = CODEC_WORKERS if operation.coded else store_workers
        remote = self._plan.layouts.remote
        store_workers = REMOTE_WORKERS if remote else store_workers
        workers = store_workers if on_store and (remote or self._plan.candidate.io_threads > 1) else 1
        if is_pageable(self._plan, operation):
            workers = PANELS if self._plan.decoded else PAGEABLE_WORKERS
        return self._queue(stream, workers, partial(self._work, stream, on_store))

    def _queue(
        self, stream: Stream, workers: int, work: Callable[["SimpleQueue[Item | None]"], None]
    ) -> "SimpleQueue[Item | None]":
        """Return the queue of a stream. At most `workers` threads run `work`.

        Each call starts one more thread. To start all of them at once would delay the first operation.
        """
        queue, threads = self._queues.setdefault(stream, (SimpleQueue(), []))
        if len(threads) < workers:
            thread = threading.Thread(
                target=work, args=(queue,), name=f"oocgemm-{stream.lane}-{len(threads)}"
            )
            start(thread)
            threads.append(thread)
        return queue

    def _work(self, stream: Stream, on_store: bool, queue: "SimpleQueue[Item | None]") -> None:
        """Run the operations of a stream's queue until it yields None. The stream's threads call this."""
        context: AbstractContextManager[None] = nullcontext() if on_store else self._session.worker(stream)
        ended = False
        try:
            perform = self._transfer if on_store else self._submit
            with context:
                while (item := queue.get()) is not None:
                    self._step(item, perform)
                    if self._unstarted:
                        self._submit_ready()
                ended = True
        except BaseException as error:  # raised by `worker`, for example because the device is lost
            self._fail(located_error(error, f"stream {stream.lane}"))
            while not ended and (item := queue.get()) is not None:
                item[2].post()

    def _step(self, item: Item, perform: Perform) -> None:
        """Run or submit an operation when all operations that it waits for have been submitted."""
        operation, waits, completion = item
        try:
            tokens = [wait.submitted() for wait in waits]
            if self._error is None:
                with self._annotate(operation):
                    token = perform(operation, tokens)
                    if not callable(token):
                        completion.token = token
                    elif self._alone:
                        self._copying[completion] = operation, token
                        self._in_flight.put(item)
                        return
                    else:
                        completion.token = token()
        except Cancelled:
            pass
        except BaseException as error:
            self._fail(located_error(error, operation))
        if completion.token is not None:
            self._in_flight.put(item)
        completion.post()

    def _transfer(self, operation: Operation, tokens: list[Token]) -> Token:
        """Run a Read (from a store to a buffer) or a Write (from a buffer to a store)."""
        for token in tokens:
            token.synchronize()
        reading = operation.kind is Kind.READ
        region = (operation.writes if reading else operation.reads)[0]
        # If device and host share one memory, Reads and Writes use the device slots directly.
        on_host = region.slot.tier is Tier.HOST
        columns: Sequence[Array]
        in_place = self._staging.is_in_place(operation)
        if in_place:
            columns = []  # the panel or the result is in the caller's memory
        elif on_host:
            columns = self._staging.columns(region.slot, operation)
        else:
            columns = [self._session.view(operation, region)]
        self.wrote = self.wrote or not reading
        start = perf_counter_ns()
        passed = True
        if self._verifier is None:
            if not in_place:
                self._staging.transfer(operation, columns)
        else:
            passed = self._verifier.transfer(self._staging, operation, columns)
        token = DoneToken(start, perf_counter_ns(), moved=not in_place)
        if self._finished is not None and not reading and passed:
            self._count_written(operation)
        return token

    def _count_written(self, write: Operation) -> None:
        """Count a Write's bytes as written; call `finished` if no byte of its tile is left to write."""
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

    def _submit(self, operation: Operation, tokens: list[Token]) -> Token | Callable[[], Token]:
        """Submit an operation that runs on the device to the backend."""
        begun = self._begun.pop(operation, None) if self._begun else None
        if begun is not None and not callable(begun) and self._verifier is None:
            return begun
        host = self._host_block(operation)
        if begun is not None:
            return begun
        if self._alone and isinstance(host, Pageable):
            return self._session.begin(operation, host, tokens)
        return self._session.submit(operation, host, tokens)

    def _host_block(self, operation: Operation) -> HostBlock:
        """Return the host memory of an operation that is about to be submitted."""
        host: HostBlock = []
        if operation.kind is Kind.UPLOAD and not operation.peer:
            host = self._staging.upload_source(operation)
        elif operation.kind is Kind.DOWNLOAD:
            host = self._staging.prepare_download(operation)
            self.wrote = self.wrote or self._plan.slots.streams("C")
        if self._verifier is not None:
            self._verifier.submit(operation, host)
        return host

    def _collect(self) -> None:
        """Wait for submitted operations in order, and pass the span of each to the observer.

        Runs in a thread of its own, because it waits for the device.
        """
        while (item := self._in_flight.get()) is not None:
            if self._in_flight.empty():
                self._all_submitted.wait(POLL_INTERVAL)
            self._record(item)
            self._ended += 1

    def _record(self, item: Item) -> None:
        """Wait for an operation, if it has been submitted, and pass its span to the observer."""
        operation, waits, completion = item
        token = completion.token
        if token is None:
            return
        try:
            token.synchronize()
            start, end = token.interval()
            if self._verifier is not None:
                self._verifier.ended(operation)
            if token.bytes is not None:
                operation = operation._replace(bytes=token.bytes)
            numbers = (wait.number for wait in waits)
            self._observe(
                Span.of(completion.number, operation, start - self._origin, end - self._origin, numbers)
            )
        except BaseException as error:
            self._fail(located_error(error, operation))

    def _fail(self, error: BaseException) -> None:
        with self._failing:
            if self._error is None:
                self._error = error
        self._staging.stop()


def located_error(error: BaseException, where: Operation | str) -> BaseException:
    """Return an error that names the operation that failed.

    Interrupts are returned unchanged, and so are errors of the request: X does not fit its transform.
    """
    if not isinstance(error, Exception) or isinstance(error, InputError):
        return error
    located = ExecutionError(f"{where}: {error or type(error).__name__}")
    located.__cause__ = error
    return located
