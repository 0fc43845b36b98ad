"""The simpler kernels, compiled by g++ for the CPU, are exact on shapes with all kinds of edges."""

import ctypes
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from oocgemm.kernels.ladder import LADDER
from oocgemm.kernels.spec import Kernel, Params, arguments, options
from oocgemm.planning import Op
from tests.kernels.test_kernels import call
from tests.support.gemm_cases import Array, Case, integer_case, triple_loop
from tests.support.native import launcher
from tests.support.suite import each_value

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

RUNGS = [
    pytest.param(
        kernel,
        params,
        id=f"{kernel.name}-{index}",
        marks=[pytest.mark.slow] if index and (kernel.name, index) != ("naive", 2) else [],
    )
    for kernel in LADDER
    if kernel.instruction is None
    and kernel.source
    in ("naive", "naive_grid", "single_block", "tiled", "register", "liang_normal", "liang_opt")
    for index, params in enumerate(kernel.variants)
]
# No size is a multiple of any tile, so that every kernel meets tiles that are cut off at every edge. k is
# more than one step, exactly one step or less, and 0.
SHAPES = ((37, 70, 19), (33, 65, 35), (3, 5, 0))


def product(run: Callable[..., None], kernel: Kernel, params: Params, case: Case) -> Array:
    """Return C of a case, computed by a kernel."""
    c, dtype = case.c.copy(), case.a.dtype.name
    whole = call(
        *(*case.shape, dtype, (case.op_a, case.op_b)),
        a=case.a.ctypes.data, b=case.b.ctypes.data, c=c.ctypes.data, alpha=case.alpha, beta=case.beta,
    )  # fmt: skip
    for part in kernel.parts(whole, params):
        launch = kernel.launch(part, params)
        run(launch.grid, launch.block, arguments(part))
    return c


@pytest.mark.parametrize(("kernel", "params"), RUNGS)
def test_a_rung_is_exact_on_the_processor(kernel: Kernel, params: Params) -> None:
    if kernel.name == "naive_grid":
        params = {**params, "COVER_M": 24, "COVER_N": 40}
    kinds = ("complex64", (Op.C, Op.T)), ("float64", (Op.N, Op.N)), ("int8", (Op.T, Op.N))
    dtype, ops = kinds[min(2, kernel.variants.index(params))] if params in kernel.variants else kinds[0]
    macros = *options(kernel, dtype, *ops, params), "-DDYNAMIC_SHARED=262144"
    run = launcher(kernel.source, kernel.entry or kernel.source, macros)
    rng = np.random.default_rng(1)
    for shape, scalars in zip(SHAPES, ((2, 0), (1, -1), (3, 2)), strict=True):
        case = integer_case(rng, dtype, ops, shape, scalars)
        np.testing.assert_array_equal(
            product(run, kernel, params, case), triple_loop(case), f"{params} {shape}"
        )


@each_value
@pytest.mark.parametrize("skipped", [0, 1, 4])
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_finish_takes_all_elements_at_any_address(skipped: int, beta: float) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    macros = "-DOOC_STORED=bfloat_t", "-DOOC_ACCUMULATED=float"
    run = launcher("finish", "finish", macros)
    rng = np.random.default_rng(2)
    sums = rng.standard_normal(1100).astype(np.float32)
    old = rng.standard_normal(1100).astype(ml_dtypes.bfloat16)
    for count in (1000, 1003, 2):
        source, result = sums[skipped:], old.copy()
        real, place = ctypes.c_double, ctypes.c_void_p
        values = real(3.0), real(0.0), place(source.ctypes.data), real(beta), real(0.0)
        run((2, 1, 1), (64, 1, 1), ctypes.c_longlong(count), *values, place(result[skipped:].ctypes.data))
        expected = old.copy()
        wide = 3 * source[:count] + (
            np.float32(beta) * old[skipped:][:count].astype(np.float32) if beta else 0
        )
        expected[skipped : skipped + count] = wide.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(result.view(np.uint16), expected.view(np.uint16))
