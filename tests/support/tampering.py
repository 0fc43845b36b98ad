"""Checked products, and changes of their data in memory that checks must find."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import oocgemm
from oocgemm.backends.base import DoneToken
from oocgemm.backends.host.backend import HostSession
from oocgemm.engine import executor
from oocgemm.engine.staging import Staging
from oocgemm.integrity.tile_checks import Checks
from oocgemm.planning import Kind, Operation
from tests.support.backends_here import CUDA, needs_gpu, staged
from tests.support.problems import Array, integers
from tests.support.summing import summed

ENGINES = [
    pytest.param("host"),
    pytest.param("host-staged"),
    pytest.param("host-summed"),  # the checksums are computed by a fake device
    pytest.param("cuda", marks=needs_gpu),
]
SUMMED = ENGINES[2:]


def in_threads() -> Any:
    """Run short products in threads too, which hand each operation to `submit`, where tests change data."""
    return patch.object(executor, "MAX_STREAMED_STEPS", -1)


SETTINGS: dict[str, Callable[[], Any]] = {
    "host-staged": staged,
    "host-summed": summed,
    "cuda": in_threads,
}


def product(engine: str, a: Any, b: Any, c: Array | None = None, **options: Any) -> oocgemm.Result:
    with SETTINGS.get(engine, nullcontext)():
        result: oocgemm.Result = oocgemm.gemm(
            a, b, c, backend=engine.partition("-")[0], verify=True, **options
        )
        return result


def checked(result: oocgemm.Result) -> dict[str, Any]:
    found = result.report.checks
    assert found is not None
    return dict(found)


def tampering(change: Callable[[Array], None], kind: Kind, tile: tuple[int, int], times: int) -> Any:
    """Change the output of a tile's operation in memory, `times` times.

    On the device this is a panel, or an accumulator before its download. On the host it is some rows of C
    before they are written.
    """
    left = times

    def of(operation: Operation) -> bool:
        nonlocal left
        # The old C is left out: it may be uploaded before or after the panels.
        panel = kind is not Kind.UPLOAD or operation.operand != "C"
        if operation.kind is kind and panel and operation.tile == tile and left:
            left -= 1
            return True
        return False

    if kind is Kind.WRITE:
        right = Checks.transfer

        def transfer(self: Checks, staging: Staging, operation: Operation, columns: Sequence[Array]) -> bool:
            if of(operation):
                change(columns[0])
            return right(self, staging, operation, columns)

        return patch.object(Checks, "transfer", transfer)
    return on_device(of, change)


@contextmanager
def on_device(of: Callable[[Operation], bool], change: Callable[[Array], None]) -> Iterator[None]:
    """Change the outputs of the operations that `of` selects, on the device."""
    on_host = HostSession.submit

    def submit(self: HostSession, operation: Operation, host: Any, after: Any) -> DoneToken:
        token = on_host(self, operation, host, after)
        if of(operation):
            change(self.view(operation, operation.writes[0]))
        return token

    with patch.object(HostSession, "submit", submit):
        if not CUDA:
            yield
            return
        import cupy

        from oocgemm.backends.cuda.session import CudaSession

        on_cuda = CudaSession.submit

        def submit_on_cuda(self: CudaSession, operation: Operation, host: Any, after: Any) -> Any:
            token = on_cuda(self, operation, host, after)
            if of(operation):
                token.synchronize()
                region = operation.writes[0]
                problem = self._problem
                name = problem.acc_dtype if region.slot.operand == "C" else problem.a_dtype
                held = np.empty(region.stop - region.start, name)
                address = self._address(region)
                cupy.cuda.runtime.memcpy(held.ctypes.data, address, held.nbytes, 2)
                change(held.reshape(1, -1))
                cupy.cuda.runtime.memcpy(address, held.ctypes.data, held.nbytes, 1)
            return token

        with patch.object(CudaSession, "submit", submit_on_cuda):
            yield


def one_element(view: Array) -> None:
    view[view.shape[0] // 2, view.shape[1] // 3] += 1


def operands(dtype: str = "float64") -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(7)
    return integers(rng, (150, 90), dtype), integers(rng, (90, 160), dtype), integers(rng, (150, 160), dtype)
