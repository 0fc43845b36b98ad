"""Runs a schedule. Which earlier operations an operation waits for follows from the buffers that they use.

The calling thread takes the operations in program order, and queues them per stream. Operations wait only for
earlier ones, which are queued already. So there is no deadlock. Which threads start the operations depends on
the run:

- *A short run* (`is_short`): the calling thread starts one operation after another. It puts off operations
  that would wait for the host: Writes, and operations that need a copy of pageable memory that is in
  progress. So all copies that can begin do so first. Before the thread waits for a copy, it starts the
  operations that have become ready.
- *Any other run*: several threads start the operations. Reads, Writes and the operations of the host backend
  run in threads of their stream. So do copies between GPUs, whose threads wait for the other GPU. The other
  operations of a GPU, except Prepare, are only enqueued, which takes microseconds. So they need no threads of
  their own: any thread that has submitted an operation also submits the operations that waited only for this
  one. The calling thread pauses while too many operations are unfinished (backpressure). One more thread
  waits for the operations, and records them.

The first Uploads may begin earlier, while the rest of the run is prepared (`Prefetch`).

The streams of a GPU wait for each other. No thread does that for them.

The first failure, or a request to cancel, stops the run: no new operation starts, all threads are joined, and
the first error is raised. Signals do not interrupt a run (`threads.shielded`).
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import field
from functools import cache, partial
from itertools import islice
from queue import SimpleQueue
from time import perf_counter_ns, sleep
from typing import Protocol, cast

from oocgemm.backends.base import (
    MAX_ENQUEUED_STEPS,
    Array,
    DoneToken,
    HostBlock,
    Pageable,
    Pinned,
    Session,
    Stream,
    Token,
)
from oocgemm.engine.staging import Staging, host_block
from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import Kind, Lane, Operation, Plan, Tier
from oocgemm.planning.cost.coding import PANELS
from oocgemm.planning.cost.machine import CODEC_WORKERS, DIGESTING_WORKERS, REMOTE_WORKERS, STORE_WORKERS
from oocgemm.planning.schedule.operation import STORE_KINDS, Block, HazardTracker, Program
from oocgemm.planning.tiling import Tile
from oocgemm.stores import Matrix
from oocgemm.stores.base import Retries
from oocgemm.system.threads import Cancel, short_switch_interval, start
from oocgemm.timeline import Span
from oocgemm.values import dataclass


class Completion:
    """The state of one operation: queued, submitted or cancelled.

    `posted` is False while the operation is queued. `token` is None unless it has been submitted.
    """

    __slots__ = ("_pending", "number", "posted", "token")

    def __init__(self, number: int) -> None:
        self.number, self.posted = number, False
        self.token: Token | None = None
        self._pending = threading.Lock()
        self._pending.acquire()

    def submitted(self) -> Token:
        """Wait until the operation has been submitted, and return its token.

        Raises `Cancelled` if the operation has been cancelled.
        """
        if not self.posted:
            with self._pending:
                pass
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
# Runs or submits an operation, and returns its token. If the block of the operation is still being copied, it
# returns a function instead, which waits for the copy and returns the token.
Perform = Callable[[Item, list[Token]], Token | Callable[[], Token]]


@cache
def annotation() -> Callable[[str], AbstractContextManager[object]] | None:
    """Return `nvtx.annotate`, which marks a `with` block as a range for profilers; None without nvtx."""
    try:
        from nvtx import annotate
    except ImportError:
        return None
    return cast(Callable[[str], AbstractContextManager[object]], annotate)


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
# The launches of copies name their streams. So a thread that is prepared for any stream of the device
# (`Session.worker`) can start them.
_COPIES = (Kind.UPLOAD, Kind.DOWNLOAD)
# A run takes less time than its threads take to start if it has at most MAX_SHORT_STEPS steps, and if A, B
# and C are in memory and have at most MAX_SHORT_BYTES bytes together. So its operations run one after another
# in one thread.
MAX_SHORT_STEPS, MAX_SHORT_BYTES = 16, 128 << 20
# The limits for a run without host slots. They are higher, because no operation keeps the thread busy: it
# only enqueues operations on the GPU, or passes them to the threads of the ring. Such a run shows no
# progress. It takes about 0.2 s for MAX_STREAMED_BYTES of pageable arrays.
MAX_STREAMED_STEPS, MAX_STREAMED_BYTES = 64, 2 << 30
# A run of pinned arrays that is predicted to take less than this, in seconds, stays in the thread of the
# caller: passing it to another thread takes 0.4 to 0.6 ms. An interrupt takes effect after such a run.
MAX_BRIEF = 0.25
# Maximum number of operations that a short run of pinned arrays has started, but not recorded. Above it, the
# thread waits for the first of them. With about 80 of them, the driver would block the thread, which would
# still have the GIL.
MAX_UNRECORDED = 64
# At most MAX_BEGUN Uploads begin before the run, and only those among its first MAX_SEEN operations. Threads
# copy one block after the other, so that more would not arrive sooner.
MAX_BEGUN, MAX_SEEN = 4, 24
# The key of a queue whose thread submits asynchronous operations that are ready as soon as they are queued.
_WAKEUP = Stream(0, "asynchronous")

Observer = Callable[[Span], object]
# Called with a tile that has been written, and with the blocks of C that it fills.
Finished = Callable[[Tile, Sequence[Block]], None]


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

    Only runs of pinned arrays are. Pageable arrays are copied by other threads in any case, so that one more
    thread costs nothing: a product of 512^3 took 0.1 ms less with it.
    """
    return plan.setting.enqueues and is_short(plan) and plan.prediction.total < MAX_BRIEF


class Prefetch:
    """The open session of a run, and the uploads that have begun while the rest of the run is prepared.

    Attributes:
        session: the memory and the streams of the run.
        retries: repeats reads of files that fail.
        begun: maps the place in the schedule of each Upload that has begun to its token, or to a function
            that waits until the block has been read and returns the token. The run removes the entries.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.retries = session, Retries()
        self.begun: dict[int, Token | Callable[[], Token]] = {}
        self._called = False

    def begin(self, plan: Plan, operands: Mapping[str, Matrix]) -> None:
        """Begin the first Uploads that wait for no other operation. A second call does nothing.

        Only Uploads of arrays in memory, and of files in the page cache that compiled code reads, can begin.
        Reads of other files may have to be repeated, and only a run can be told to stop repeating. `operands`
        maps "A" and "B" to the matrices.
        """
        streamed = [operand for operand in ("A", "B") if plan.slots.streams(operand)]
        if self._called or not self.session.begins_at_once or not streamed:
            return
        self._called = True
        # A plan keeps its program in memory. So if the program is long, another one is made and dropped.
        program = plan.program if is_short(plan) or self.session.repeats else Program(plan.schedule())
        found = (
            (number, operation)
            for number, (operation, waits) in enumerate(islice(program, MAX_SEEN))
            if not waits and operation.kind is Kind.UPLOAD and operation.operand in streamed
        )
        with ExitStack() as entered:
            # Each begins as soon as it is found: to find the last one may take a millisecond.
            for count, (number, operation) in enumerate(islice(found, MAX_BEGUN)):
                if not count:
                    stream = Stream(operation.device, operation.stream)
                    entered.enter_context(self.session.worker(stream))
                try:
                    self._begin(plan, operands[operation.operand], number, operation)
                except Exception as error:
                    located = located_error(error, operation)
                    if located is error:
                        raise
                    raise located from error

    def _begin(self, plan: Plan, matrix: Matrix, number: int, operation: Operation) -> None:
        block = host_block(plan, matrix, operation, self.retries.read)
        if isinstance(block, Pageable) and (block.memory is not None or block.stored is not None):
            self.begun[number] = self.session.begin(operation, block, [])
        elif isinstance(block, Pinned) and self.session.keeps(operation):
            self.begun[number] = self.session.submit(operation, block, [])

    def close(self, *, failed: bool) -> None:
        """Wait for all Uploads that have begun, and close the session."""
        if failed:
            self.retries.stop()
        while self.begun:
            begun = self.begun.popitem()[1]
            with suppress(Exception):  # the run has failed already
                if callable(begun):
                    begun()
        self.session.close(failed)


@dataclass(slots=True)
class StreamThreads:
    """The threads that run the operations of a stream. Each calls `work`, which takes them from `queue`."""

    stream: Stream
    most: int
    work: Callable[["SimpleQueue[Item | None]"], None]
    queue: "SimpleQueue[Item | None]" = field(default_factory=SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)

    def put(self, item: Item) -> None:
        """Queue an operation, and start one more thread if there are fewer than `most`.

        Starting all threads at once would delay the first operation.
        """
        if len(self.threads) < self.most:
            name = f"oocgemm-{self.stream.lane}-{len(self.threads)}"
            thread = threading.Thread(target=self.work, args=(self.queue,), name=name)
            start(thread)
            self.threads.append(thread)
        self.queue.put(item)

    def join(self) -> None:
        """End the threads when they have run all operations."""
        for _ in self.threads:
            self.queue.put(None)
        for thread in self.threads:
            thread.join()


class Run:
    """Executes a plan's schedule once."""

    def __init__(
        self,
        plan: Plan,
        session: Session,
        staging: Staging,
        origin_ns: int,
        observers: Sequence[Observer],
        finished: Finished | None = None,
        verifier: Verifier | None = None,
        first: int = 0,
        begun: dict[int, Token | Callable[[], Token]] | None = None,
        started: Callable[[], object] | None = None,
    ) -> None:
        """Prepare a run. If a callback raises, the run fails.

        Args:
            plan: has the schedule.
            session, staging: have the plan's buffers on the device and in host memory.
            origin_ns: zero of the times in spans, in nanoseconds of `perf_counter_ns`.
            observers: called with the span (times and waits) of every operation that has ended. One thread
                makes all calls, in the order of submission.
            finished: called once per tile when the whole tile has been written, but perhaps not synced to
                the disk. The thread that ran the tile's last Write calls it.
            verifier: checks strips of C. A strip that fails is not written.
            first: the number that the first operation gets. Spans refer to operations by number.
            begun: Uploads that the session has begun (`Prefetch`), by their places in the schedule.
                The run removes them from the dict.
            started: called when the first operation has ended.
        """
        self._plan = plan
        self._session = session
        self._staging = staging
        self._origin = origin_ns
        self._observers = observers
        self._finished = finished
        self._verifier = verifier
        self._first = first
        self._begun = {} if begun is None else begun
        self._started = started
        self._mirrored = plan.grid.cover.mirrored
        self._in_place = plan.in_place
        # Operands whose Reads and Writes do nothing. Writes of a Gram matrix in place mirror it.
        self._stays = self._in_place - ({"C"} if self._mirrored else set())
        # Operands whose blocks go between pageable memory, or a file, and the device. The thread that submits
        # an operation on such a block is busy until the copies of the block have been issued.
        self._pageable = {x for x in "ABC" if plan.slots.streams(x) and not plan.is_direct(x)}
        self._writes_c = plan.slots.streams("C")  # a Download writes to C
        self._unwritten: dict[Tile, int] = {}  # Writes that are left of each partly written tile
        self._writing = threading.Lock()
        self._workers: dict[Stream, StreamThreads] = {}
        self._alone = is_short(plan)  # whether the calling thread starts all operations
        self._unstarted: dict[Stream, deque[Item]] = {}  # operations that have no thread of their own
        self._submitting = threading.Lock()
        self._rescan = False  # whether an operation without a thread of its own may have become ready
        self._annotate = annotation()
        self._in_flight: SimpleQueue[Item | None] = SimpleQueue()
        self._all_submitted = threading.Event()
        # In a short run: the copies of pageable memory that have begun, and the stream that the thread is
        # prepared for.
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
        """Yield each operation in program order, with the completions that it waits for and its own."""
        if self._alone or self._session.repeats:  # the plan keeps its operations and their waits
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
        """Start the operations that need not wait for the host, in program order. Then start all others."""
        max_unrecorded = MAX_UNRECORDED if self._plan.all_direct else sys.maxsize
        puts_off_writes = bool(self._session.asynchronous)
        for item in self._items():
            operation, stream = item[0], Stream(item[0].device, item[0].stream)
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
        """Start the operations that need not wait for a copy. Return whether an operation or a copy is left.

        A Write waits for the device. So a Write only starts if no other operation is ready or being copied.
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
            same = entered is not None and entered.device == stream.device
            stream = entered if entered is not None and same else Stream(stream.device, Lane.COMPUTE.value)
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

        This is the block that the earliest operation in the queues waits for, so that the GPU can go on:
        blocks of C whose copies began before may take longer. If that operation waits for no block, it is
        the block whose copy began first.
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
        for workers in self._workers.values():
            workers.join()
        self._workers.clear()  # it refers to this run
        self._all_submitted.set()
        self._in_flight.put(None)
        collector.join()

    def _dispatch(self) -> None:
        """Queue the schedule's operations in program order."""
        strips = -(-self._plan.tile.m // max(1, self._plan.slots.strip))
        limit = self._plan.devices * (MAX_IN_FLIGHT + MAX_IN_FLIGHT_PER_STRIP * strips)
        # Operations on the same operand in one stream have the same workers, or none.
        found: dict[tuple[int, str, str], StreamThreads | None] = {}
        wakeup = self._workers[_WAKEUP] = StreamThreads(_WAKEUP, 1, self._submit_on_wakeup)
        for queued, item in enumerate(self._items()):
            while self._error is None and queued - self._ended > limit:
                sleep(POLL_INTERVAL)
            if self._error is not None:
                return
            operation = item[0]
            key = operation.device, operation.stream, operation.operand
            if key not in found:
                found[key] = self._workers_of(operation)
            workers = found[key]
            if workers is not None:
                workers.put(item)
                continue
            self._unstarted.setdefault(Stream(operation.device, operation.stream), deque()).append(item)
            # An operation that is not ready is submitted after the last operation that it waits for.
            if is_ready(item):
                wakeup.put(item)

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

    def _workers_of(self, operation: Operation) -> StreamThreads | None:
        """Return the threads of an operation's stream; None if any thread can enqueue it without waiting."""
        on_store = operation.kind in STORE_KINDS
        pageable = operation.kind in _COPIES and operation.operand in self._pageable
        if operation.kind in self._session.asynchronous and not (operation.peer or pageable):
            return None
        stream = Stream(operation.device, operation.stream)
        if on_store and not self._plan.slots.unified:
            stream = stream._replace(device=0)  # storage is common to all devices, and so are host slots
        most, remote = 1, self._plan.layouts.remote
        if on_store and (remote or self._plan.candidate.io_threads > 1):
            most = DIGESTING_WORKERS if self._plan.lowered.device_sums else STORE_WORKERS
            most = CODEC_WORKERS if operation.coded else most
            most = REMOTE_WORKERS if remote else most
        if pageable and not operation.peer:
            most = PANELS if self._plan.decoded else PAGEABLE_WORKERS
        workers = self._workers.setdefault(
            stream, StreamThreads(stream, 0, partial(self._work, stream, on_store))
        )
        workers.most = max(workers.most, most)
        return workers

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
                if self._annotate is None:
                    token = perform(item, tokens)
                else:
                    with self._annotate(str(operation)):
                        token = perform(item, tokens)
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

    def _transfer(self, item: Item, tokens: list[Token]) -> Token:
        """Run a Read (store to buffer) or a Write (buffer to store). Return its token, which has ended."""
        operation = item[0]
        for token in tokens:
            if token.times is None:
                token.synchronize()
        reading = operation.kind is Kind.READ
        stays = operation.operand in self._stays
        columns: Sequence[Array] = []  # stays empty if the panel or the result is in the caller's memory
        if not stays:
            region = (operation.writes if reading else operation.reads)[0]
            # If device and host share one memory, Reads and Writes use the device slots directly.
            if region.slot.tier is Tier.HOST:
                columns = self._staging.slots.columns(region.slot, operation)
            else:
                columns = [self._session.view(operation, region)]
        self.wrote = self.wrote or not reading
        start, passed = perf_counter_ns(), True
        if self._verifier is not None:
            passed = self._verifier.transfer(self._staging, operation, columns)
        elif not stays:
            self._staging.transfer(operation, columns)
        token = DoneToken((start, perf_counter_ns()), 0 if operation.operand in self._in_place else None)
        if self._finished is not None and not reading and passed:
            self._count_written(operation, self._finished)
        return token

    def _count_written(self, write: Operation, finished: Finished) -> None:
        """Count a Write; call `finished` if it is the last one of its tile."""
        tile = write.tile
        with self._writing:
            left = self._unwritten.pop(tile, write.parts) - 1
            if left:
                self._unwritten[tile] = left
        if not left:
            mirrored = self._mirrored and tile[0] != tile[1]
            finished(tile, [write.whole, write.whole[::-1]] if mirrored else [write.whole])

    def _submit(self, item: Item, tokens: list[Token]) -> Token | Callable[[], Token]:
        """Submit an operation of the device, unless it has begun. Return what `Perform` describes."""
        operation, _, completion = item
        begun = self._begun.pop(completion.number - self._first, None) if self._begun else None
        if begun is not None and not callable(begun) and self._verifier is None:
            return begun
        host: HostBlock = []
        if operation.kind is Kind.UPLOAD and not operation.peer:
            host = self._staging.upload_source(operation)
        elif operation.kind is Kind.DOWNLOAD:
            host = self._staging.prepare_download(operation)
            self.wrote = self.wrote or self._writes_c
        if self._verifier is not None:
            self._verifier.submit(operation, host)
        if begun is not None:
            return begun
        if self._alone and isinstance(host, Pageable):
            return self._session.begin(operation, host, tokens)
        return self._session.submit(operation, host, tokens)

    def _collect(self) -> None:
        """Wait for submitted operations in order, and pass the span of each to the observers."""
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
            times = token.times
            if times is None:
                token.synchronize()
                times = token.interval()
            if self._verifier is not None:
                self._verifier.ended(operation)
            if self._started is not None:
                self._started()
                self._started = None
            begin, end = times[0] - self._origin, times[1] - self._origin
            numbers = tuple([wait.number for wait in waits])
            span = span_of(completion.number, operation, begin, end, numbers, token.bytes)
            for observe in self._observers:
                observe(span)
        except BaseException as error:
            self._fail(located_error(error, operation))

    def _fail(self, error: BaseException) -> None:
        with self._failing:
            if self._error is None:
                self._error = error
        self._staging.stop()


def located_error(error: BaseException, where: Operation | str) -> BaseException:
    """Return an error that names the operation that failed.

    Interrupts are returned unchanged. So are errors of the request, such as an X that does not fit its
    transform.
    """
    if not isinstance(error, Exception) or isinstance(error, InputError):
        return error
    located = ExecutionError(f"{where}: {error or type(error).__name__}")
    located.__cause__ = error
    return located


def span_of(
    number: int, op: Operation, start: int, end: int, waits: tuple[int, ...], moved: int | None = None
) -> Span:
    """Return the span of an operation that ran from `start` to `end`, and copied `moved` bytes if given."""
    size = op.bytes if moved is None else moved
    place = op.lane, op.stream, op.device, op.tile, op.step
    return Span(number, op.kind, op.operand, *place, start, end, size, op.flops, waits)
