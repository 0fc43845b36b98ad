"""Begins the first uploads of a run, so that the GPU copies while the rest of the run is prepared."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice

from oocgemm.backends.base import Pageable, Pinned, Session, Stream, Token
from oocgemm.engine.executor import is_short, located_error
from oocgemm.engine.staging import host_block
from oocgemm.planning import Kind, Operation, Plan
from oocgemm.planning.schedule.hazards import Program
from oocgemm.stores import Matrix
from oocgemm.stores.base import Retries

# At most MAX_BEGUN Uploads begin before the run, and only those among its first MAX_SEEN operations. Copies
# of more blocks would share streams (`backends.cuda.pageable.MAX_STREAMS`), and wait for each other.
MAX_BEGUN, MAX_SEEN = 4, 24


class Prefetch:
    """The open session of a run, and the uploads that have begun.

    Attributes:
        session: the memory and the streams of the run.
        retries: repeats reads of files that fail.
        begun: per Upload that has begun, by its place in the schedule, its token, or the function that waits
            until its block has been read and returns its token. The run takes them out.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.retries = session, Retries()
        self.begun: dict[int, Token | Callable[[], Token]] = {}
        self._called = False

    def begin(self, plan: Plan, operands: Mapping[str, Matrix]) -> None:
        """Begin the first Uploads that wait for no other operation, unless that was done before.

        Only Uploads of arrays in memory, and of files in the page cache that compiled code reads, can begin.
        Reads of other files may have to be repeated, and only a run can be told to stop that. `operands` are
        A and B by name.
        """
        streamed = [operand for operand in ("A", "B") if plan.slots.streams(operand)]
        if self._called or not self.session.begins_at_once or not streamed:
            return
        self._called = True
        # A plan keeps its program, so one of many operations is not asked for it.
        program = plan.program if is_short(plan) or self.session.repeats else Program(plan.schedule())
        first = [
            (number, operation)
            for number, (operation, waits) in enumerate(islice(program, MAX_SEEN))
            if not waits and operation.kind is Kind.UPLOAD and operation.operand in streamed
        ]
        if first:
            with self.session.worker(Stream(first[0][1].device, first[0][1].stream)):
                for number, operation in first[:MAX_BEGUN]:
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
        """Wait for all that has begun, and close the session."""
        if failed:
            self.retries.stop()
        while self.begun:
            begun = self.begun.popitem()[1]
            with suppress(Exception):  # the run has failed already
                if callable(begun):
                    begun()
        self.session.close(failed)
