"""The plain rungs' own sources, compiled by g++ and run on the processor: exact on shapes that have every edge."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oocgemm.backends.kernel import Kernel, Params, arguments, options
from oocgemm.backends.ladder import LADDER
from oocgemm.backends.sources import kernel_folder
from oocgemm.plan import Op
from tests.gemm_cases import Array, Case, integer_case, triple_loop
from tests.test_kernels import call

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

RUNGS = [
    pytest.param(kernel, params, id=f"{kernel.name}-{index}")
    for kernel in LADDER
    if kernel.instruction is None
    and kernel.source
    in ("naive", "naive_grid", "single_block", "tiled", "register", "liang_normal", "liang_opt")
    for index, params in enumerate(kernel.variants)
]
SHIM = Path(__file__).parent / "lockstep.hpp"
# All sizes at once are no multiple of any tile, so that every edge of each is met; a k of one step, of more, and of none.
SHAPES = ((37, 70, 19), (33, 65, 35), (3, 5, 0))


def built(kernel: Kernel, params: Params, dtype: str, ops: tuple[Op, Op], folder: Path) -> Any:
    """The kernel as a function of the processor."""
    source = folder / f"{kernel.source}.cu"
    text = (kernel_folder() / source.name).read_text(encoding="utf-8")
    source.write_text(text.replace("extern __shared__", "extern"), encoding="utf-8")
    macros = *options(kernel, dtype, *ops, params), "-DDYNAMIC_SHARED=262144"
    names = f'-DSOURCE="{source}"', f"-DFUNCTION={kernel.entry or kernel.source}"
    library = folder / f"{kernel.source}.so"
    flags = "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{kernel_folder()}"
    subprocess.run(["g++", *flags, *macros, *names, "-x", "c++", SHIM, "-o", library], check=True)
    return ctypes.CDLL(str(library)).run


def product(run: Any, kernel: Kernel, params: Params, case: Case) -> Array:
    """The case's C by the kernel."""
    c, dtype = case.c.copy(), case.a.dtype.name
    whole = call(
        *(*case.shape, dtype, (case.op_a, case.op_b)),
        a=case.a.ctypes.data, b=case.b.ctypes.data, c=c.ctypes.data, alpha=case.alpha, beta=case.beta,
    )  # fmt: skip
    for part in kernel.parts(whole, params):
        launch = kernel.launch(part, params)
        sizes = (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(*launch.block)
        run(ctypes.byref(arguments(part)), *sizes)
    return c


@pytest.mark.parametrize(("kernel", "params"), RUNGS)
def test_a_rung_is_exact_on_the_processor(kernel: Kernel, params: Params, tmp_path: Path) -> None:
    if kernel.name == "naive_grid":
        params = {**params, "COVER_M": 24, "COVER_N": 40}
    dtype, ops = ("complex64", (Op.C, Op.T)) if params == kernel.variants[0] else ("float64", (Op.N, Op.N))
    run, rng = built(kernel, params, dtype, ops, tmp_path), np.random.default_rng(1)
    for shape, scalars in zip(SHAPES, ((2, 0), (1, -1), (3, 2)), strict=True):
        case = integer_case(rng, dtype, ops, shape, scalars)
        np.testing.assert_array_equal(
            product(run, kernel, params, case), triple_loop(case), f"{params} {shape}"
        )
