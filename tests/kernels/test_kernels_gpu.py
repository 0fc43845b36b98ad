"""Every kernel on a GPU, for any shape.

Products are exact on small integers, and within the error bound on random numbers.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.kernels import RUNGS, tuning
from oocgemm.kernels.ladder import LADDER
from oocgemm.kernels.spec import Call, Kernel, Params
from oocgemm.kernels.tuning import Measured, Tuning
from oocgemm.planning import OPERANDS, Op
from oocgemm.planning.emulation import workspace_layout
from tests.support.backends_here import CUDA
from tests.support.gemm_cases import (
    ODD_SHAPES,
    OP_PAIRS,
    Array,
    Case,
    assert_close,
    integer_case,
    random_case,
    triple_loop,
)
from tests.support.problems import assert_same, integer_c, integers, reference, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="no CUDA device answers"),
    # A kernel that hangs cannot be interrupted by a signal, so the timeout ends the process.
    pytest.mark.timeout(60, method="thread"),
]

ENTRIES = [pytest.param(kernel, id=f"{kernel.name}-{kernel.source}") for kernel in LADDER]
SCALARS = st.sampled_from([0, 1, -1, 2])


@pytest.fixture(scope="module")
def multiplier() -> Iterator[Any]:
    from oocgemm.backends.cuda.multiplier import Multiplier

    made = Multiplier(0)
    yield made
    made.close()


def product(
    multiplier: Any, kernel: Kernel | None, params: Params, case: Case, pad: int | None, compute: str
) -> Array | None:
    """Return C of a case, computed by a kernel, or by cuBLAS if `kernel` is None.

    Returns None if the kernel refuses the call. Each operand begins `pad` elements into a larger array, of
    which nothing else may change. If `pad` is None, addresses and rows are aligned to 16 bytes.
    """
    import cupy

    def placed(x: Array) -> tuple[Any, Any]:
        rows, cols = x.shape
        start, ld = (8, -(-cols // 8) * 8 + 16) if pad is None else (pad, cols + pad)
        room = cupy.full((rows + 2, ld), 77, x.dtype)
        inner = room[1:-1, start : start + cols]
        inner[...] = cupy.asarray(x)
        return room, inner

    (_, a), (_, b), (around, c) = (placed(x) for x in (case.a, case.b, case.c))
    work = cupy.full(workspace_layout(*case.shape).end, 77, cupy.int8)
    leading = [x.strides[0] // x.itemsize for x in (a, b, c)]
    call = Call(
        *(case.a.dtype.name, case.op_a, case.op_b, *case.shape, case.alpha, a.data.ptr, leading[0]),
        *(b.data.ptr, leading[1], case.beta, c.data.ptr, leading[2], compute, multiplier.kernels.device),
        work=work.data.ptr,
    )
    if kernel is not None and kernel.refusal(call, params) is not None:
        return None
    multiplier.run(kernel, params, call)
    result: Array = c.get()
    c[...] = 77
    assert bool((around == 77).all()), "something beside C was written"
    return result


@pytest.mark.parametrize("kernel", ENTRIES)
def test_small_integers_are_exact(multiplier: Any, kernel: Kernel) -> None:
    rng, done = np.random.default_rng(1), 0
    for dtype in kernel.dtypes:
        for ops in OP_PAIRS:
            for shape in ODD_SHAPES:
                case = integer_case(rng, dtype, ops, shape, ((2, 0), (1, -1))[done % 2])
                for compute in kernel.compute:
                    for pad in (0, 3, None):
                        got = product(multiplier, kernel, kernel.variants[0], case, pad, compute)
                        if got is not None:
                            np.testing.assert_array_equal(
                                got, triple_loop(case), f"{dtype} {ops} {shape} {pad}"
                            )
                            done += 1
    assert done


def test_int8_by_cublas_is_exact_however_it_lies(multiplier: Any) -> None:
    rng = np.random.default_rng(7)
    for number, (ops, shape, pad) in enumerate(
        itertools.product(OP_PAIRS, [*ODD_SHAPES[:-1], (130, 144, 80), (64, 48, 5000)], (0, 3, None))
    ):
        case = integer_case(rng, "int8", ops, shape, ((1, 0), (1, -1), (1, 1))[number % 3])
        got = product(multiplier, None, {}, case, pad, "native")
        old = None if case.beta == 0 else case.c
        assert got is not None
        assert_same(got, reference(case.alpha, ops[0], case.a, ops[1], case.b, case.beta, old))


@pytest.mark.parametrize("kernel", ENTRIES)
def test_every_variant_is_exact(multiplier: Any, kernel: Kernel) -> None:
    rng = np.random.default_rng(2)
    for params in kernel.variants:
        done = 0
        for number, shape in enumerate([*ODD_SHAPES, (130, 140, 70), (700, 600, 300)]):
            case = integer_case(rng, kernel.dtypes[0], (Op.N, Op.T), shape, (1, number % 3))
            got = product(multiplier, kernel, params, case, None, kernel.compute[0])
            if got is not None:
                done += 1
                old = None if case.beta == 0 else case.c
                assert_same(got, reference(case.alpha, case.op_a, case.a, case.op_b, case.b, case.beta, old))
        assert done > 1


@pytest.mark.parametrize("kernel", ENTRIES)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_shape_is_exact(multiplier: Any, kernel: Kernel, data: st.DataObject) -> None:
    dtype, ops = data.draw(st.sampled_from(kernel.dtypes)), data.draw(st.sampled_from(OP_PAIRS))
    m, n, k = (data.draw(st.integers(1, 150)) for _ in range(3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    case = integer_case(rng, dtype, ops, (m, n, k), (data.draw(SCALARS), data.draw(SCALARS)))
    got = product(
        multiplier,
        kernel,
        kernel.variants[0],
        case,
        data.draw(st.none() | st.integers(0, 9)),
        kernel.compute[0],
    )
    if got is not None:
        old = None if case.beta == 0 else case.c
        assert_same(got, reference(case.alpha, ops[0], case.a, ops[1], case.b, case.beta, old))


@pytest.mark.parametrize("kernel", [*ENTRIES, pytest.param(None, id="cublas")])
def test_random_numbers_are_within_the_bound(multiplier: Any, kernel: Kernel | None) -> None:
    rng = np.random.default_rng(3)
    for dtype in (dtype for dtype in (kernel.dtypes if kernel else OPERANDS) if dtype != "int8"):
        for shape in ((259, 197, 515), (64, 48, 80)):
            case = random_case(rng, dtype, (Op.N, Op.N), shape)
            for compute in kernel.compute if kernel else ("native",):
                got = product(multiplier, kernel, kernel.variants[0] if kernel else {}, case, None, compute)
                if got is not None:
                    assert_close(got, case, compute)


@pytest.mark.parametrize("kernel", ENTRIES)
def test_nan_and_infinity_go_where_they_belong(multiplier: Any, kernel: Kernel) -> None:
    case = random_case(np.random.default_rng(4), kernel.dtypes[0], (Op.N, Op.N), (37, 41, 43))
    case.a[5, 7], case.b[11, 13] = np.nan, np.inf
    got = product(multiplier, kernel, kernel.variants[0], case, None, kernel.compute[0])
    assert got is not None
    expected = np.zeros(got.shape, bool)
    expected[5, :], expected[:, 13] = True, True
    np.testing.assert_array_equal(~np.isfinite(got), expected)


@pytest.mark.parametrize("name", RUNGS)
def test_a_whole_run_takes_the_kernel_it_is_told(name: str) -> None:
    rng = np.random.default_rng(5)
    entries = [kernel for kernel in LADDER if kernel.name == name and "native" in kernel.compute]
    for dtype in ("float64", "float32", "float16", "int8"):
        if not any(dtype in kernel.dtypes for kernel in entries):
            continue
        for op_a, op_b in ((Op.N, Op.N), (Op.T, Op.C)):
            a, b = integers(rng, stored(op_a, 150, 130), dtype), integers(rng, stored(op_b, 130, 170), dtype)
            c = integer_c(rng, (150, 170), dtype)
            expected = reference(1, op_a, a, op_b, b, 1, c)
            ran: list[str] = []
            with watched(ran):
                oocgemm.gemm(
                    *(a, b, c),
                    beta=1,
                    trans_a=op_a,
                    trans_b=op_b,
                    backend="cuda",
                    kernel=name,
                    tile="64x48x40",
                )
            assert_same(c, expected)
            assert set(ran) == {name}


@pytest.mark.parametrize("fastest", ["register", "cublas"])
def test_auto_takes_what_was_measured_fastest(
    fastest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oocgemm.backends.cuda.multiplier import device_name

    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    rungs = {kernel.name: kernel.variants[0] for kernel in LADDER if kernel.name in ("register", "tiled")}
    measured = {
        name: Measured(2e12 if name == fastest else 1e12, params)
        for name, params in {"cublas": {}, **rungs}.items()
    }
    tuning.save(Tuning(device_name(0), "", {"float64": dict.fromkeys(tuning.CLASSES, measured)}))
    a, b = (integers(np.random.default_rng(6), (100, 100), "float64") for _ in "AB")
    result = oocgemm.gemm(a, b, backend="cuda", kernel="auto")
    assert result.timeline.header["backend"]["multiplied by"] == [fastest]
    assert_same(result.out, a @ b)


@contextmanager
def watched(ran: list[str]) -> Iterator[None]:
    """During the block, append the name of each kernel that is launched to `ran`."""
    from oocgemm.backends.cuda.launch import Kernels

    with pytest.MonkeyPatch.context() as patch:
        launch = Kernels.multiply

        def noted(self: Any, kernel: Kernel, call: Call, params: Params) -> None:
            ran.append(kernel.name)
            launch(self, kernel, call, params)

        patch.setattr(Kernels, "multiply", noted)
        yield
