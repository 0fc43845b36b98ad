"""Products of int8 by the code of the CUDA backend, without a GPU.

g++ compiles the kernels, and NumPy stands for cublasGemmEx. test_kernels_gpu.py and test_int8.py test the
same on a GPU.
"""

import ctypes
import importlib
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oocgemm.backends.host.finish import finish as finish_on_host
from oocgemm.errors import ExecutionError
from oocgemm.kernels.compile import compiled
from oocgemm.kernels.launches import finish_options
from oocgemm.kernels.spec import Call
from oocgemm.planning import Op
from oocgemm.planning.emulation import workspace_layout
from tests.backends.test_int8 import exact, numbers
from tests.support.fake_cuda import fake_cuda
from tests.support.native import launcher
from tests.support.nvrtc import Nvrtc, resources
from tests.support.problems import Array, stored
from tests.support.suite import slow

ACCUMULATED, STORED = ("int", "double"), {"int": 2**31 - 1, "long long": 2**53, "float": None, "double": None}


@pytest.mark.parametrize("arch", ["sm_80", *slow(("sm_90a",), ("sm_100",))])
def test_the_kernels_compile_without_spills(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    wanted = [("int8_pack", [f"-DOOC_K_MAJOR={k_major}"]) for k_major in (0, 1)]
    wanted += [("int8_add", [f"-DOOC_ACCUMULATED={kind}"]) for kind in ACCUMULATED]
    for accumulated, (kept, most) in product(ACCUMULATED, STORED.items()):
        macros = [f"-DOOC_ACCUMULATED={accumulated}", f"-DOOC_STORED={kept}"]
        wanted.append(("int8_finish", macros + ([f"-DOOC_MAX={most}.0"] if most else [])))
    cubin = tmp_path / "code.cubin"
    for source, told in wanted:
        cubin.write_bytes(compiled(Nvrtc(), source, arch, told))
        taken = resources(cubin, source)
        assert (taken.stack, taken.local) == (0, 0), f"{source} for {arch} with {told} spills: {taken}"


class Processor:
    """Runs kernels on the CPU, and counts their launches."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def plain(self, source: str, entry: str, macros: tuple[str, ...]) -> Callable[..., None]:
        kernel = launcher(source, entry, macros)

        def launch(grid: tuple[int, ...], *values: Any) -> None:
            assert min(grid) > 0
            self.launched.append(source)
            kernel(grid, (256, 1, 1), *values)

        return launch


def memory(address: int, kind: Any, rows: int, cols: int, ld: int) -> Array:
    """Return a view of the row-major matrix at an address."""
    whole = np.ctypeslib.as_array((kind * ((rows - 1) * ld + cols)).from_address(address))
    return np.lib.stride_tricks.as_strided(whole, (rows, cols), (ld * whole.itemsize, whole.itemsize))


def gemm_ex(*given: Any) -> None:
    """Stand for cublasGemmEx with int8 operands whose rows run along k, and a column-major C.

    Operands that are not aligned to 16 bytes are refused, as by cuBLAS.
    """
    _, op_left, op_right, m, n, k, alpha, left, left_type, ld_left, right, right_type, ld_right = given[:13]
    beta, c, c_type, ldc, compute, _ = given[13:]
    assert (op_left, op_right, left_type, right_type, c_type, compute) == (1, 0, 3, 3, 10, 72)
    assert all(x % 16 == 0 for x in (k, ld_left, ld_right, ldc, left, right, c))
    scalars = [int(memory(x, ctypes.c_int32, 1, 1, 1)[0, 0]) for x in (alpha, beta)]
    assert scalars in ([1, 0], [1, 1])
    held = memory(c, ctypes.c_int32, n, m, ldc)
    a, b = memory(right, ctypes.c_int8, n, k, ld_right), memory(left, ctypes.c_int8, m, k, ld_left)
    held[...] = exact(a, b.T) + (held if scalars[1] else 0)


@pytest.fixture(scope="module")
def int8() -> Iterator[Any]:
    """Return the module that multiplies int8 on a device, with the kernels that it launches."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    with fake_cuda(), pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("oocgemm.backends.cuda.multiplier")
        # The fake reads host memory, as the kernels compiled for the CPU do.
        patch.setattr(module.cublas, "gemmEx", gemm_ex)
        patch.setattr(module, "STRIP_ROWS", 4)
        yield SimpleNamespace(module=module, kernels=Processor())


def placed(x: Array, pad: int | None) -> tuple[Array, Array]:
    """Return a larger matrix filled with 77, and a part of it that contains x.

    The part is aligned to 16 bytes if `pad` is None, else it starts `pad` elements later.
    """
    rows, cols = x.shape
    ld = -(-cols // 16) * 16 if pad is None else cols + pad
    whole = np.full(rows * ld + 64, 77, x.dtype)
    start = (-whole.ctypes.data % 64) // x.itemsize + (pad or 0)
    inner = np.lib.stride_tricks.as_strided(whole[start:], (rows, cols), (ld * x.itemsize, x.itemsize))
    inner[...] = x
    return whole, inner


def add_up(int8: Any, call: Call) -> None:
    """Compute C += op(A) @ op(B) in float64, in the way in which `Multiplier.accumulate` does with cuBLAS."""
    module, kernels = int8.module, int8.kernels
    module.by_strips(
        kernels, module.packed(kernels, call), "float64", lambda part: module.int8_gemm(kernels, 0, part)
    )


@pytest.mark.parametrize(("op_a", "op_b"), [(Op.N, Op.C), (Op.T, Op.N)])
@pytest.mark.parametrize("wide", [*slow((False,)), True])
def test_products_are_exact_however_operands_lie(int8: Any, op_a: Op, op_b: Op, wide: bool) -> None:
    rng = np.random.default_rng(1)
    shapes = (5, 70, 65), (8, 32, 48), (1, 1, 1)
    for (m, n, k), (pad, beta) in product(shapes, ((None, 0), (None, 1), (0, -1), (3, 0))):
        a, b = numbers(rng, stored(op_a, m, k)), numbers(rng, stored(op_b, k, n))
        c = rng.integers(-(2**20), 2**20, (m, n)).astype(np.float64 if wide else np.int32)
        wanted = exact(a, b, op_a, op_b) + beta * c
        if not beta:
            c[...] = np.nan if wide else 2**31 - 1
        (_, left), (_, right), (whole, held) = (placed(x, pad) for x in (a, b, c))
        work, at = placed(np.zeros((1, workspace_layout(m, n, k).end), np.int8), None)
        ld_a, ld_b, ld_c = (x.strides[0] // x.itemsize for x in (left, right, held))
        call = Call(
            *("int8", op_a, op_b, m, n, k, 1, left.ctypes.data, ld_a, right.ctypes.data, ld_b),
            *(beta, held.ctypes.data, ld_c),
            work=at.ctypes.data,
        )
        int8.kernels.launched.clear()
        if wide:
            add_up(int8, call)
        else:
            int8.module.int8_gemm(int8.kernels, 0, call)
        np.testing.assert_array_equal(held, wanted, f"{m} {n} {k} {pad}")
        held[...] = 77
        assert (whole == 77).all(), "something beside C was written"
        assert (
            np.delete(work, slice((-work.ctypes.data) % 64, (-work.ctypes.data) % 64 + at.size)) == 77
        ).all()
        in_place = pad != 3 and (op_a, op_b) == (Op.N, Op.C) and k % 16 == 0
        assert ("int8_pack" in int8.kernels.launched) == (not in_place)


@pytest.mark.parametrize(
    ("sums", "c_dtype"),
    [("int32", "int32"), ("float64", "int64"), *slow(("float64", "int32"), ("float64", "float32"))],
)
def test_a_strip_is_finished_as_on_the_host(int8: Any, sums: Any, c_dtype: str) -> None:
    rng = np.random.default_rng(2)
    integer = c_dtype.startswith("int")
    cases: list[tuple[float, float, int]] = [(1, 0, 0), (-3, 2, 5)]
    cases += [(1, 1, np.iinfo(c_dtype).max), (1, 1, np.iinfo(c_dtype).min)] if integer else [(0.7, -1.3, 5)]
    if c_dtype == "int64":
        # The result fits into int64, but its sum in float64 may be inexact, so it is refused.
        cases.append((-1, 1, 2**53))
    ends = []
    for alpha, beta, before in cases:
        held = rng.integers(-1000, 1000, (3, 45)).astype(sums)
        held = np.abs(held) + 1 if before == 2**53 else held
        c = np.full((3, 45), before, c_dtype)
        expected, flag = c.copy(), np.zeros(1, np.int32)
        if beta == 0:
            c[...] = np.iinfo(c_dtype).max if integer else np.nan
        finish = int8.kernels.plain("int8_finish", "int8_finish", finish_options(sums, c_dtype))
        source, result, too_large = (ctypes.c_void_p(x.ctypes.data) for x in (held, c, flag))
        scalars = ctypes.c_double(alpha), ctypes.c_double(beta)
        finish((1, 1, 1), ctypes.c_longlong(c.size), source, *scalars, result, too_large)
        try:
            finish_on_host(held.astype(np.float64), alpha, beta, expected, np.empty(3 * 8 * 50, np.uint8))
        except ExecutionError:
            ends.append(True)
            assert flag[0] == 1
            continue
        ends.append(False)
        assert flag[0] == 0
        if integer:
            np.testing.assert_array_equal(c, expected)
        else:
            np.testing.assert_allclose(c, expected, rtol=4 * float(np.finfo(c_dtype).eps), atol=1e-12)
    assert ends == ([False, False, True, True, True][: len(cases)] if integer else [False] * 3)
