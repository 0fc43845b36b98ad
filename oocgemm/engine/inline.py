"""Runs a short schedule in the calling thread, without queues and locks. The waits come with the plan."""

import sys
from collections import deque
from collections.abc import Callable, Generator, Sized
from contextlib import ExitStack, closing, suppress

from oocgemm.backends.base import Array, Pageable, Stream, Token
from oocgemm.engine.executor import STORE_KINDS, Cancelled, Run, located_error
from oocgemm.planning import Kind, Operation, Plan

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


def is_short(plan: Plan) -> bool:
    """Return whether a plan's operations take so little time that one thread should start all of them."""
    layouts, problem, sizes = plan.layouts, plan.problem, plan.problem.itemsizes
    if not problem.planes and all(map(plan.is_direct, "ABC")):
        return plan.steps <= (MAX_ENQUEUED_STEPS if plan.devices == 1 else MAX_STREAMED_STEPS)
    if plan.steps > MAX_STREAMED_STEPS or not (layouts.operands_in_memory and layouts.c.in_memory):
        return False
    streamed = all(map(plan.slots.streams, "ABC")) and not problem.planes
    if plan.steps > MAX_SHORT_STEPS and not streamed:
        return False
    m, n, k = problem.m, problem.n, problem.depth
    size = m * k * sizes["A"] + k * n * sizes["B"] + m * n * sizes["C"]
    return size <= (MAX_STREAMED_BYTES if streamed else MAX_SHORT_BYTES)


def is_brief(plan: Plan) -> bool:
    """Return whether a run is so short that the thread of the caller should do all of it.

    Pageable arrays are copied by threads. To leave the run to one more thread costs nothing then: 512^3 took
    0.1 ms less.
    """
    return plan.setting.enqueues and is_short(plan) and plan.prediction.total < MAX_BRIEF


# Their launches name their streams, so that the thread need not be prepared for each of them (`worker`).
_COPIES = (Kind.UPLOAD, Kind.DOWNLOAD)


# While more operations of pinned arrays than this have been started and not been recorded, the thread waits
# for the first of them. With about 80 pending, the driver would block the thread, which keeps the GIL then.
MAX_UNRECORDED = 64

# The method of some sessions that starts all operations of the last run again. It takes A, B and C, and the
# program, and returns a generator that starts the operations and yields their tokens; None if they must be
# submitted one by one.
Repeat = Callable[[list[Array], Sized], Generator[Token, None, None] | None]


class InlineRun(Run):
    """Executes a short plan's schedule once (`is_short`).

    Operations are started in program order, but every one that would wait for the host is put off: a Write,
    and what needs a copy of pageable memory that is in progress. So all copies that can begin do so first.
    What can begin later does so before the thread waits for a copy.
    """

    def _run(self) -> None:
        self._program = self._plan.program
        self._tokens: list[Token | None] = []
        self._started: list[int] = []
        self._recorded = 0
        direct = all(map(self._plan.is_direct, "ABC"))
        self._max_unrecorded = MAX_UNRECORDED if direct else sys.maxsize
        repeat = getattr(self._session, "repeat", None)
        if repeat is None or not self._repeated(repeat):
            self._start_all()
        self._record_all_but(0)

    def _start_all(self) -> None:
        """Start the operations one by one."""
        self._copying: dict[int, Callable[[], Token]] = {}  # copies of pageable memory that have begun
        self._put_off: dict[Stream, deque[int]] = {}  # all of `late` but Writes
        self._entered: Stream | None = None
        late, blocked = list[int](), set[Stream]()
        with ExitStack() as self._worker:
            try:
                for i, (operation, waits) in enumerate(self._program):
                    self._tokens.append(None)
                    stream = Stream.of(operation)
                    writes = operation.kind is Kind.WRITE and self._session.asynchronous
                    # A stream runs its operations in program order, and waits are derived from that.
                    if writes or stream in blocked or any(self._tokens[wait] is None for wait in waits):
                        late.append(i)
                        blocked.add(stream)
                        if not writes:
                            self._put_off.setdefault(stream, deque()).append(i)
                    else:
                        self._start(i)
                        self._record_all_but(self._max_unrecorded)
                for i in sorted(late, key=lambda i: self._program[i][0].kind is Kind.WRITE):
                    if self._tokens[i] is None and i not in self._copying:
                        self._start(i)
            except Cancelled:
                pass
            except BaseException as error:
                self._fail(error)
            while self._copying:
                self._finish(next(iter(self._copying)))

    def _repeated(self, repeat: Repeat) -> bool:
        """Start all operations as the last run did. Return False if that is impossible."""
        if self._error is not None:
            return False
        try:
            again = repeat(self._staging.arrays, self._program)
            if again is None:
                return False
            self.wrote = True
            with closing(again):
                for i, token in enumerate(again):
                    self._tokens.append(token)
                    self._started.append(i)
                    self._record_all_but(self._max_unrecorded)
                    if self._error is not None:
                        break
        except BaseException as error:
            self._fail(located_error(error, "the operations of the run"))
        return True

    def _record_all_but(self, count: int) -> None:
        """Wait for all but the last `count` operations, in the order of their start; pass on their spans."""
        while len(self._started) - self._recorded > count:
            i = self._started[self._recorded]
            token = self._tokens[i]
            self._recorded += 1
            if token is not None:
                operation, waits = self._program[i]
                self._record(self._first + i, operation, [self._first + wait for wait in waits], token)

    def _start(self, i: int) -> None:
        """Run, submit or begin an operation. Raises `Cancelled` if it fails, or if the run has failed."""
        operation, waits = self._program[i]
        tokens = [self._token(wait) for wait in waits]
        if self._error is not None:
            raise Cancelled
        self._started.append(i)
        try:
            with self._annotate(operation):
                if operation.kind in STORE_KINDS:
                    self._tokens[i] = self._transfer(operation, tokens)
                    return
                self._enter(operation)
                host = self._host_block(operation)
                if isinstance(host, Pageable):
                    begun = self._begun.pop(operation, None)
                    self._copying[i] = begun or self._session.begin(operation, host, tokens)
                else:
                    self._tokens[i] = self._session.submit(operation, host, tokens)
        except BaseException as error:
            self._fail(located_error(error, operation))
            raise Cancelled from None

    def _enter(self, operation: Operation) -> None:
        """Prepare this thread for the launches of an operation."""
        stream, entered = Stream.of(operation), self._entered
        if entered is not None and operation.kind in _COPIES and stream.device == entered.device:
            return
        if stream != entered:
            self._worker.close()
            self._worker.enter_context(self._session.worker(stream))
            self._entered = stream

    def _token(self, i: int) -> Token:
        """Return the token of an operation. Start the operation, and wait for its copy, if necessary."""
        if self._tokens[i] is None and i not in self._copying:
            self._start(i)
        if i in self._copying:
            self._finish(i)
        token = self._tokens[i]
        if token is None:
            raise Cancelled
        return token

    def _start_ready(self) -> None:
        """Start the operations that need not wait for a copy, in program order per stream."""
        for queue in self._put_off.values():
            while queue and self._error is None:
                i = queue[0]
                started = self._tokens[i] is not None or i in self._copying
                if not started and any(self._tokens[wait] is None for wait in self._program[i][1]):
                    break
                queue.popleft()
                if not started:
                    with suppress(Cancelled):
                        self._start(i)

    def _finish(self, i: int) -> None:
        """Wait until a block of pageable memory has been read or written."""
        self._start_ready()
        try:
            self._tokens[i] = self._copying.pop(i)()
        except BaseException as error:
            self._fail(located_error(error, self._program[i][0]))
