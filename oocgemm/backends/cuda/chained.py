"""Runs a plan of two chained products on a CUDA device (`problem.Updated`)."""

from collections.abc import Sequence
from typing import Any

from oocgemm.backends.base import Array, Pinned
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.copies import upload
from oocgemm.backends.cuda.session import CudaSession
from oocgemm.kernels.spec import Call
from oocgemm.planning import Kind, Op, Operation
from oocgemm.planning.expansion import factor_bytes
from oocgemm.planning.tiling import length


class ChainedSession(CudaSession):
    """A session whose Multiply first adds the product of its panel's adjoint and Q to the panel of B.

    Both products are on the stream of the Multiply, so that the first one ends before the second one begins.
    """

    def use_factor(self, factor: Array) -> None:
        # Q is behind the numbers of the transform, just before the workspace. Its rows are as long as those
        # of C, so that they are aligned alike.
        self._factor = self._arena + self._work - factor_bytes(self._problem)
        with self._device:
            upload(self._factor, factor, self._streams["compute"])

    def _launches(
        self, op: Operation, host: Sequence[Array] | Pinned, stream: Any
    ) -> list[cuda_calls.Launch]:
        launches = super()._launches(op, host, stream)
        if op.kind is Kind.MULTIPLY:
            launches.insert(0, self._multiplier.choose(self._first_product(op)))
        return launches

    def _first_product(self, op: Operation) -> Call:
        problem, depth, (a, b) = self._problem, length(op.k), self._addresses(op.reads)
        adjoint, lda = (Op.N, problem.m) if problem.trans_a.swaps else (Op.T, depth)
        kind, extents = (problem.a_dtype, adjoint, Op.N), (depth, problem.b.changed_columns, problem.m)
        how = problem.compute, self._multiplier.kernels.device, self._arena + self._work
        n = problem.n
        return Call(*kind, *extents, 1.0, a, lda, self._factor, n, 1.0, b, n, *how)
