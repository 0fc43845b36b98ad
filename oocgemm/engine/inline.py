"""Runs a short schedule in the calling thread, without queues and locks. The waits come with the plan."""

import sys
from collections import deque
from collections.abc import Callable, Generator, Sized
from contextlib import ExitStack, closing, suppress

from oocgemm.backends.base import Array, Pageable, Stream, Token
from oocgemm.engine.completion import Cancelled
from oocgemm.engine.executor import STORE_KINDS, Run, located_error
from oocgemm.planning import Kind, Operation

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
    """Executes a short plan's schedule once (`short.is_short`).

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
