"""A session that stays open for the next run of the same plan, and may make the same launches again.

Opening a session takes as long as copying 10 MB, and preparing the launches of an operation as long as
copying 4 MB. So the session of a run in memory is kept. Of a short run from pinned memory, it also keeps the
launches. If A, B and C of the next run have the same addresses, it makes these launches again, with the same
waits, in the same order and on the same streams.
"""

from collections.abc import Callable, Generator, Sequence, Sized
from contextlib import suppress

from cupy.cuda import runtime

from oocgemm.backends.base import Array, Stream, Token
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import CudaToken, Work, own_tokens, spins
from oocgemm.backends.cuda.host_memory import HostMemory
from oocgemm.backends.cuda.session import CudaSession
from oocgemm.backends.cuda.warm import reuse
from oocgemm.planning import Kind, Operation, Plan


def is_repeatable(plan: Plan) -> bool:
    """Return whether all that a run does on the device follows from the plan and the operands' addresses."""
    p, layouts = plan.problem, plan.layouts
    depends = p.prepares or p.b.shares or p.is_corrected or p.epilogue or p.b.changed_columns or p.checked
    depends = depends or not p.sink.stores_c
    in_memory = layouts.operands_in_memory and layouts.c.in_memory and all(map(plan.slots.streams, "ABC"))
    return plan.devices == 1 and in_memory and not depends


class RepeatedSession(CudaSession):
    """A session of a plan that `is_repeatable`."""

    def __init__(self, device: int, plan: Plan, kernel: str) -> None:
        self._run_by, self._keeps_launches = (plan, kernel), spins(plan)
        # Where A, B and C are, and per operation the function that enqueues it again, and its token.
        self._at: list[object] = []
        self._made: list[tuple[Callable[[], int], CudaToken]] = []
        # How many of the operations are Uploads before any other one, and the tokens of those that this run
        # has started already.
        self._first_uploads, self._prefetched = 0, list[Token]()
        super().__init__(device, plan, kernel)

    def runs(self, plan: Plan, kernel: str) -> bool:
        return self._run_by[0] is plan and self._run_by[1] == kernel and self._multiplier.is_current

    def reopen(self) -> None:
        """Begin another run of the plan. The session was closed. This run allocates no device memory."""
        self._closed, self._free_before, self._prefetched = False, None, []
        self._host = HostMemory(self._device)
        self._host.take(self._run_by[0], self._multiplier.kernels, 0)

    def prefetch(self, operands: Sequence[Array]) -> None:
        """Begin to upload the first blocks, if A, B and C have the addresses that they had in the last run.

        The GPU copies them while the rest of the run is prepared. C is not changed.
        """
        if self._made and list(map(_place, operands)) == self._at:
            with self._device:
                self._prefetched += map(self._start_again, self._made[: self._first_uploads])

    def repeat(self, operands: Sequence[Array], program: Sized) -> Generator[Token, None, None] | None:
        """Return a generator that starts all operations of the last run again, and yields their tokens.

        Return None if A, B and C have other addresses, or if the last run did not start all operations of
        `program`. The launches of the operations that follow are then remembered. Return None also for a run
        that is not short, or not from pinned memory.
        """
        if not self._keeps_launches:
            return None
        at = list(map(_place, operands))
        if at != self._at or len(self._made) != len(program):
            self._at, self._made, self._first_uploads = at, [], 0
            return None
        return self._all_again()

    def _all_again(self) -> Generator[Token, None, None]:
        yield from self._prefetched
        with self.worker(Stream(0, "compute")):
            yield from map(self._start_again, self._made[len(self._prefetched) :])

    def _start_again(self, made: tuple[Callable[[], int], CudaToken]) -> Token:
        enqueue, token = made
        own = Work(token.own.start, enqueue(), token.end)
        return CudaToken(token.stream, own, token.end, self._clock, token.check)

    def _enqueue(
        self, operation: Operation, launches: list[cuda_calls.Launch], after: Sequence[Token]
    ) -> CudaToken:
        token = super()._enqueue(operation, launches, after)
        if self._at:  # otherwise `repeat` was not called, and will not be
            waits = [x.end for x in own_tokens(after, self._clock) if x.stream != operation.stream]
            own, stream = token.own, self._streams[operation.stream]
            again = cuda_calls.recording_around(launches, own.start, own.end, stream, waits)
            if operation.kind is Kind.UPLOAD and len(self._made) == self._first_uploads:
                self._first_uploads += 1
            self._made.append((again, token))
        return token

    def close(self, failed: bool = False) -> None:
        if not (failed or self._closed):
            try:
                self._loading.wait()
                with self._device:
                    runtime.deviceSynchronize()
                    self._host.close(keep=True)
                    self._closed = True
                    self._warm.keep(self)
            except Exception:
                failed = True
            else:
                return
        super().close(failed)

    def drop(self) -> None:
        with suppress(Exception):  # after a failed launch, every CUDA call raises
            self._multiplier.close()


def _place(x: Array) -> object:
    """Return where the elements of an array are."""
    return x.ctypes.data, x.strides


def reopened(device: int, plan: Plan, kernel: str) -> RepeatedSession | None:
    """Open again the idle session of the last run of a plan. Return None if there is none."""
    session = reuse(device, plan, kernel)
    if session is None:
        return None
    assert isinstance(session, RepeatedSession)
    session.reopen()
    return session
