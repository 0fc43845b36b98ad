"""What the host backend keeps of the rows of C, one class per sink (`oocgemm.planning.sinks`)."""

from abc import ABC, abstractmethod

import numpy as np

from oocgemm.backends.base import Array, Finishing
from oocgemm.backends.host.blas import gemm
from oocgemm.backends.host.epilogue import reduce_rows
from oocgemm.backends.host.selection import select
from oocgemm.planning import GemmProblem, Op, Operation
from oocgemm.planning.schedule.operations import mirrored_columns
from oocgemm.planning.selection import NONE
from oocgemm.planning.sinks import Applied, Largest, Reduced, Sink
from oocgemm.planning.tiling import length


class Keeper(ABC):
    """Updates what is kept of the rows of C.

    Args of the constructor:
        problem: the product.
        rows: what is kept, `Sink.per_row` elements for each row of C.
        finishing: the numbers that a Finish uses.
        factor: the matrix V, if the sink has one.
    """

    def __init__(self, problem: GemmProblem, rows: Array, finishing: Finishing, factor: Array | None) -> None:
        self._problem, self._rows, self._finishing, self._factor = problem, rows, finishing, factor

    @abstractmethod
    def keep(self, op: Operation, strip: Array) -> None:
        """Add a strip of C, which is in the accumulator's dtype."""


class _Largest(Keeper):
    def __init__(self, problem: GemmProblem, rows: Array, finishing: Finishing, factor: Array | None) -> None:
        super().__init__(problem, rows, finishing, factor)
        rows.view(np.uint8)[...] = NONE

    def keep(self, op: Operation, strip: Array) -> None:
        """Update the elements of the rows of a strip, and of its columns that are mirrored."""
        sink = self._problem.sink
        assert isinstance(sink, Largest)
        cols = mirrored_columns(op.m, op.n) if self._problem.b.shares else (0, 0)
        for (m, n), block in (((op.m, op.n), strip), ((cols, op.m), strip[:, : length(cols)].T)):
            if length(m):
                at = m[0], n[0]
                select(self._rows[slice(*m)], block, self._finishing.scales, at, sink.excludes_self)


class _Reduced(Keeper):
    def keep(self, op: Operation, strip: Array) -> None:
        sink = self._problem.sink
        assert isinstance(sink, Reduced)
        reduce_rows(sink.reduction, strip, self._rows[slice(*op.m), 0], begins=op.first)


class _Applied(Keeper):
    def keep(self, op: Operation, strip: Array) -> None:
        assert self._factor is not None
        beta = 0.0 if op.first else 1.0
        gemm(Op.N, Op.N, 1.0, strip, self._factor[slice(*op.n)], beta, self._rows[slice(*op.m)])


KEEPERS: dict[type[Sink], type[Keeper]] = {Largest: _Largest, Reduced: _Reduced, Applied: _Applied}
