"""Multiplies a product and V on a CUDA device, without storing the product (`sinks.Applied`)."""

from collections.abc import Sequence

from oocgemm.backends.base import Array, Pinned
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.chained import ChainedSession
from oocgemm.backends.cuda.copies import upload
from oocgemm.backends.cuda.session import CudaSession
from oocgemm.kernels.spec import Call
from oocgemm.planning import Kind, Op, Operation
from oocgemm.planning.expansion import factor_bytes
from oocgemm.planning.problem import Operand, Updated
from oocgemm.planning.sinks import Applied, Sink
from oocgemm.planning.tiling import length


class AppliedSession(CudaSession):
    """A session whose Finish changes a strip of C in its accumulator, and multiplies it and V."""

    def use_factor(self, factor: Array) -> None:
        self._factor = self._arena + self._work - factor_bytes(self._problem)
        with self._device:
            upload(self._factor, factor, self._streams["compute"])

    def _launches(
        self, op: Operation, host: Sequence[Array] | Pinned, stream: object
    ) -> list[cuda_calls.Launch]:
        launches = super()._launches(op, host, stream)
        if op.kind is Kind.FINISH:
            launches.append(self._multiplier.choose(self._product(op)))
        return launches

    def _product(self, op: Operation) -> Call:
        """Return the product of the strip and its rows of V, which is added to what is kept of its rows."""
        problem, count = self._problem, self._problem.sink.per_row
        itemsize = problem.itemsizes["acc"]
        strip, kept = self._address(op.reads[0]), self._address(op.writes[0])
        factor = self._factor + op.n[0] * count * itemsize
        kind, extents = (problem.acc_dtype, Op.N, Op.N), (length(op.m), count, length(op.n))
        how = "native", self._multiplier.kernels.device, self._arena + self._work
        beta = 0.0 if op.first else 1.0
        return Call(*kind, *extents, 1.0, strip, length(op.n), factor, count, beta, kept, count, *how)


# The class of the session of a product, by its sink. Sessions of other sinks are of the class `CudaSession`.
# Sessions by the kind of B, or by the kind of the sink.
SESSIONS: dict[type[Operand | Sink], type[CudaSession]] = {Updated: ChainedSession, Applied: AppliedSession}
