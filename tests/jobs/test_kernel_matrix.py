"""`kernel_matmul` multiplies a Gaussian kernel matrix and V, without storing the matrix."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oocgemm
from oocgemm.backends.base import numpy_dtype
from oocgemm.errors import InputError
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.fake_cuda import fake_cuda
from tests.support.suite import each_value, examples

Array = NDArray[Any]


def kernel_matrix(x: Array, y: Array, gamma: float) -> Array:
    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.asarray(np.exp(-gamma * np.square(x[:, None] - y[None]).sum(2)))


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_products_are_those_of_the_whole_matrix(engine: Engine, dtype: str) -> None:
    if engine[1] == "tiled" and "16" in dtype:
        pytest.skip("the kernel tiled is slow")
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-2, 3, (n, 7)).astype(numpy_dtype(dtype)) for n in (93, 61))
    for tile in (None, "40x25x3"):
        for columns in (1, 5):
            v = rng.standard_normal((61, columns))
            with running_on(engine) as options:
                found = oocgemm.kernel_matmul(x, v, y, gamma=0.1, tile=tile, **options)
            wide = np.float64 if dtype == "float64" else np.float32
            assert found.dtype == wide
            tolerance = 1e-12 if dtype == "float64" else 2e-5
            np.testing.assert_allclose(found, kernel_matrix(x, y, 0.1) @ v, atol=tolerance)


@settings(max_examples=examples(25, quick=8), deadline=None)
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 40),
    others=st.integers(1, 40),
    columns=st.integers(1, 6),
    tile=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 4)),
)
def test_no_operation_overtakes_another(seed: int, rows: int, others: int, columns: int, tile: Any) -> None:
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-2, 3, (n, 4)).astype(np.float64) for n in (rows, others))
    v = rng.standard_normal((others, columns))
    with fake_cuda(seed) as device:
        given: Any = {"backend": "cuda", "kernel": "cublas", "tile": "x".join(map(str, tile))}
        found = oocgemm.kernel_matmul(x, v, y, gamma=0.5, **given)
        device.check()
    np.testing.assert_allclose(found, kernel_matrix(x, y, 0.5) @ v, atol=1e-12)


def test_operands_are_read_from_disk_within_a_budget(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1200, 20)).astype(np.float32)
    zarr.create_array(f"{tmp_path}/x.zarr", data=x, chunks=(200, 20))
    v = rng.standard_normal(1200)
    found = oocgemm.kernel_matmul(f"{tmp_path}/x.zarr", v, gamma=0.02, backend="host", memory="32MiB")
    np.testing.assert_allclose(found, kernel_matrix(x, x, 0.02) @ v, atol=1e-3)


def test_the_matrix_is_not_stored() -> None:
    x = np.zeros((400_000, 2), np.float32)  # its kernel matrix would take 596 GiB
    planned: Any = None

    def note(plan: Any) -> Any:
        nonlocal planned
        planned = plan
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        oocgemm.kernel_matmul(x, np.ones(400_000), gamma=1, backend="host", memory="256MiB", progress=note)
    assert planned.traffic["write"] == 4 * 400_000


def test_rounding_gives_no_negative_distances() -> None:
    x = np.full((50, 30), 1000.1, np.float32)
    found = oocgemm.kernel_matmul(x, np.eye(50), gamma=100, backend="host")
    assert (found <= 1).all()
    x[3] = np.nan
    found = oocgemm.kernel_matmul(x, np.eye(50), gamma=100, backend="host")
    assert np.isnan(found[3]).all()


def test_bad_input_is_refused() -> None:
    x, call = np.ones((9, 4)), cast(Any, oocgemm.kernel_matmul)
    for message, arguments, options in (
        ("V has 8 rows, and C has 9 columns", (x, np.ones(8)), {}),
        ("V has 9 rows, and C has 5 columns", (x, np.ones(9), np.ones((5, 4))), {}),
        ("op\\(A\\) is 9 x 4 and op\\(B\\) is 3 x 9", (x, np.ones(9), np.ones((9, 3))), {}),
        ("gamma = 0: pass a positive number", (x, np.ones(9)), {"gamma": 0}),
        ("gamma = inf", (x, np.ones(9)), {"gamma": np.inf}),
        ("gamma = '1'", (x, np.ones(9)), {"gamma": "1"}),
        ("of shape \\(9, 1, 1\\)", (x, np.ones((9, 1, 1))), {}),
        ("dtype complex128", (x, np.ones(9, complex)), {}),
        ("X is of dtype int8", (x.astype(np.int8), np.ones(9)), {}),
        ("X is of dtype complex64", (x.astype(np.complex64), np.ones(9)), {}),
        ("does not take the option resume", (x, np.ones(9)), {"resume": True}),
    ):
        with pytest.raises(InputError, match=message):
            call(*arguments, **{"gamma": 1.0, "backend": "host"} | options)
