"""Begins the first uploads of a run, so that the GPU copies while the rest of the run is prepared."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice

from oocgemm.backends.base import Pageable, Session, Stream, Token
from oocgemm.engine.executor import located_error
from oocgemm.engine.host_blocks import host_block, is_pageable
from oocgemm.engine.inline import is_short
from oocgemm.planning import Kind, Operation, Plan
from oocgemm.planning.schedule.hazards import Program
from oocgemm.stores import Matrix, memory
from oocgemm.stores.base import Retries

# At most MAX_BEGUN Uploads begin before the run, and only those among its first MAX_SEEN operations. Copies
# of more blocks would share streams (`backends.cuda.pageable.MAX_STREAMS`), and wait for each other.
MAX_BEGUN, MAX_SEEN = 4, 24


class Prefetch:
    """The open session of a run, and the uploads that have begun.

    Attributes:
        session: the memory and the streams of the run.
        retries: repeats reads of files that fail.
        begun: per Upload that has begun, the function that waits until its block has been read, and returns
            its token. The run takes them out.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.retries = session, Retries()
        self.begun: dict[Operation, Callable[[], Token]] = {}
        self._called = False

    def begin(self, plan: Plan, operands: Mapping[str, Matrix], c: Matrix | None) -> None:
        """Begin the first Uploads that wait for no other operation, unless that was done before.

        Only Uploads of arrays in memory, and of files in the page cache that compiled code reads, can begin.
        Reads of other files may have to be repeated, and only a run can be told to stop that. `operands` are
        A and B by name. C is None if it does not exist.
        """
        if self._called or not self.session.begins_at_once:
            return
        self._called = True
        prefetch = getattr(self.session, "prefetch", None)
        if prefetch is not None and c is not None:
            with _located("the first uploads"):
                prefetch([*map(memory, (operands["A"], operands["B"], c))])
        # A plan keeps its program, so one of many operations is not asked for it.
        program = plan.program if is_short(plan) else Program(plan.schedule())
        for operation, waits in islice(program, MAX_SEEN):
            operand = operation.operand
            first = operation.kind is Kind.UPLOAD and not waits and operand in ("A", "B")
            if first and is_pageable(plan, operation) and len(self.begun) < MAX_BEGUN:
                block = host_block(plan, operands[operand], operation, self.retries.read)
                if isinstance(block, Pageable) and (block.memory is not None or block.stored is not None):
                    with _located(operation), self.session.worker(Stream.of(operation)):
                        self.begun[operation] = self.session.begin(operation, block, [])

    def close(self, *, failed: bool) -> None:
        """Wait for all that has begun, and close the session."""
        if failed:
            self.retries.stop()
        while self.begun:
            with suppress(Exception):  # the run has failed already
                self.begun.popitem()[1]()
        self.session.close(failed)


@contextmanager
def _located(where: Operation | str) -> Iterator[None]:
    """Let an error in the `with` block name the operation that failed."""
    try:
        yield
    except Exception as error:
        located = located_error(error, where)
        if located is error:
            raise
        raise located from error
