"""Multiplies a Gaussian kernel matrix and a matrix V on a CUDA device (`GemmProblem.applied`)."""

from collections.abc import Sequence
from ctypes import c_double, c_longlong, c_void_p
from functools import partial
from typing import Any

from oocgemm.backends.base import Array, Correction, Pinned, Scales, Transforms
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.copies import upload
from oocgemm.backends.cuda.session import CudaSession
from oocgemm.kernels.gaussian import gaussian_grid, gaussian_options
from oocgemm.kernels.spec import Call
from oocgemm.planning import Kind, Op, Operation
from oocgemm.planning.expansion import correction_bytes, factor_bytes
from oocgemm.planning.tiling import length


class AppliedSession(CudaSession):
    """A session whose Finish changes a strip of C in its accumulator, and multiplies it and V."""

    def use_transforms(self, transforms: Transforms, correction: Correction, scales: Scales) -> None:
        assert correction is not None
        self._norms = self._arena + self._vectors
        kinds = gaussian_options(self._problem.acc_dtype)
        with self._device:
            self._gaussian = self._multiplier.kernels.plain("gaussian", "gaussian", kinds)
            address = self._norms
            for norms, size in zip(correction, correction_bytes(self._problem), strict=True):
                upload(address, norms, self._streams["compute"])
                address += size

    def use_factor(self, factor: Array) -> None:
        self._factor = self._arena + self._work - factor_bytes(self._problem)
        with self._device:
            upload(self._factor, factor, self._streams["compute"])

    def _launches(
        self, op: Operation, host: Sequence[Array] | Pinned, stream: Any
    ) -> list[cuda_calls.Launch]:
        if op.kind is not Kind.FINISH:
            return super()._launches(op, host, stream)
        return [cuda_calls.in_python(partial(self._change, op)), self._multiplier.choose(self._product(op))]

    def _change(self, op: Operation) -> None:
        rows, cols = length(op.m), length(op.n)
        at = self._norms + 8 * op.m[0], self._norms + correction_bytes(self._problem)[0] + 8 * op.n[0]
        self._gaussian(
            gaussian_grid(rows, cols),
            *map(c_longlong, (rows, cols)),
            *map(c_void_p, at),
            c_double(self._problem.gamma),
            c_void_p(self._address(op.reads[0])),
        )

    def _product(self, op: Operation) -> Call:
        """Return the product of the strip and its rows of V, which is added to what is kept of its rows."""
        problem, count = self._problem, self._problem.applied
        itemsize = problem.itemsizes["acc"]
        strip, kept = self._address(op.reads[0]), self._address(op.writes[0])
        factor = self._factor + op.n[0] * count * itemsize
        kind, extents = (problem.acc_dtype, Op.N, Op.N), (length(op.m), count, length(op.n))
        how = "native", self._multiplier.kernels.device, self._arena + self._work
        beta = 0.0 if op.first else 1.0
        return Call(*kind, *extents, 1.0, strip, length(op.n), factor, count, beta, kept, count, *how)
