"""A session that stays open for the next run of the same plan, and keeps the launches of operations.

Opening a session takes as long as copying 10 MB, and preparing the launches of an operation as long as
copying 4 MB. So the session of a run in memory is kept. If the run was short, and its arrays are pinned, the
session also keeps the launches of each operation. If the operation's block in host memory has the same
address in the next run, and if it waits for the same events, the session makes these launches again.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from cupy.cuda import runtime

from oocgemm.backends.base import MAX_ENQUEUED_STEPS, Array, Found, HostBlock, Pageable, Pinned, Token
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.events import CudaToken, Work, own_tokens, spins
from oocgemm.backends.cuda.host_memory import HostMemory
from oocgemm.backends.cuda.session import CudaSession
from oocgemm.backends.cuda.warm import reuse
from oocgemm.planning import Operation, Plan

# Maximum number of operations whose launches are kept, which take about 3 KB each.
MAX_MADE = 8192


def is_repeatable(plan: Plan) -> bool:
    """Return whether all that a run does on the device follows from the plan and the operands' addresses."""
    p, layouts = plan.problem, plan.layouts
    depends = p.prepares or p.b.shares or p.is_corrected or p.epilogue or p.b.changed_columns or p.checked
    depends = depends or not p.sink.stores_c
    in_memory = layouts.operands_in_memory and layouts.c.in_memory and all(map(plan.slots.streams, "ABC"))
    return plan.devices == 1 and in_memory and not depends


class Made(NamedTuple):
    """The launches of an operation.

    Attributes:
        operation: the operation. A reference to it keeps its id from being used again.
        at: where the block in host memory is; None for an operation without one.
        waits: the events for which the operation's stream waits first.
        again: makes the launches, and returns the host time of the first one (`calls.recording_around`).
        token: the handle of the operation that made them.
    """

    operation: Operation
    at: object
    waits: list[Any]
    again: Callable[[], int]
    token: CudaToken


class RepeatedSession(CudaSession):
    """A session of a plan that `is_repeatable`."""

    def __init__(self, device: int, plan: Plan, kernel: str) -> None:
        self._run_by = plan, kernel
        self.repeats = spins(plan) and plan.steps <= MAX_ENQUEUED_STEPS
        self._made = dict[int, Made]()  # by the id of the operation
        super().__init__(device, plan, kernel)

    def keeps(self, operation: Operation) -> bool:
        return id(operation) in self._made

    def runs(self, plan: Plan, kernel: str) -> bool:
        return self._run_by[0] is plan and self._run_by[1] == kernel and self._multiplier.is_current

    def reopen(self) -> None:
        """Begin another run of the plan. The session was closed. This run allocates no device memory."""
        self._closed, self._free_before = False, None
        self._host = HostMemory(self._device)
        self._host.take(self._run_by[0], self._multiplier.kernels, 0)

    def submit(self, operation: Operation, host: HostBlock, after: Sequence[Token]) -> CudaToken:
        if not self.repeats or isinstance(host, Pageable):
            return super().submit(operation, host, after)
        self._wait(operation)
        at = _place(host.array) if isinstance(host, Pinned) else None
        waits = [x.end for x in own_tokens(after, self._clock) if x.stream != operation.stream]
        made = self._made.get(id(operation))
        if made is not None and (made.at, made.waits) == (at, waits):
            token = made.token
            own = Work(token.own.start, made.again(), token.end)
            return CudaToken(token.stream, own, token.end, self._clock, token.check)
        assert not isinstance(host, Found)  # a repeatable plan stores C
        launches = self._launches(operation, host, stream := self._streams[operation.stream])
        with self._host.submitting():
            token = self._enqueue(operation, launches, after)
        if made is not None or len(self._made) < MAX_MADE:
            again = cuda_calls.recording_around(launches, token.own.start, token.end, stream, waits)
            self._made[id(operation)] = Made(operation, at, waits, again, token)
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
    return x.ctypes.data, x.strides


def reopened(device: int, plan: Plan, kernel: str) -> RepeatedSession | None:
    """Open again the idle session of the last run of a plan. Return None if there is none."""
    session = reuse(device, plan, kernel)
    if session is None:
        return None
    assert isinstance(session, RepeatedSession)
    session.reopen()
    return session
