"""Gaussians of distances do not cancel where rows are far from the origin, and are 1 for equal rows."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import oocgemm
from oocgemm import Gaussian, MatVec, Reduce, Scale, Threshold, TopK, Transform
from oocgemm.backends.base import numpy_dtype
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs import operands
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.suite import slow

Array = NDArray[Any]
GAMMA = 1 / (2 * 150.0**2)


def places(count: int, dtype: str = "float32", seed: int = 0) -> Array:
    """Draw coordinates in metres, some of them twice."""
    rng = np.random.default_rng(seed)
    far = 400.0 if "16" in dtype else 1.0
    x = rng.random((count, 2)) * 1000 / far + np.array([500_000.0, 4_650_000.0]) / far**1.5
    x[count // 2] = x[3]
    return np.asarray(x.astype(numpy_dtype(dtype)))


def gamma_of(dtype: str) -> float:
    return GAMMA * 400**2 if "16" in dtype else GAMMA


def kernel(x: Array, y: Array, gamma: float) -> Array:
    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.asarray(np.exp(-gamma * np.square(x[:, None] - y).sum(2)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", *slow(("float64",), ("float16",), ("bfloat16",))])
def test_coordinates_in_metres_do_not_cancel(engine: Engine, dtype: str) -> None:
    x, gamma = places(90, dtype), gamma_of(dtype)
    y = np.concatenate([x[::3], places(21, dtype, 1)])
    of_x, of_y = kernel(x, x, gamma), kernel(x, y, gamma)
    with running_on(engine) as options:
        given: Any = {"tile": "40x40x1", "verify": True, **options}
        found = oocgemm.kernel_matmul(x, np.eye(90), gamma=gamma, **given)
        other = oocgemm.kernel_matmul(x, np.eye(51), np.asfortranarray(y), gamma=gamma, **given)
        step = {"epilogue": [Gaussian(gamma)], **given}
        dense = oocgemm.gemm(x, y, trans_b="T", **step).out
        half = oocgemm.gram(x, uplo="full", **step).out
        turned = oocgemm.gram(np.ascontiguousarray(x.T), axis=1, uplo="full", **step).out
        sums = oocgemm.reduce(x, to=Reduce("sum"), **step)
        best = oocgemm.reduce(x, y, trans_b="T", to=TopK(51), **step)
        pairs = oocgemm.reduce(x, to=Threshold(0.5), **step)
        product = oocgemm.reduce(x, y, trans_b="T", to=MatVec(np.eye(51)), **step)
    wide = "float64" if dtype == "float64" else "float32"
    assert found.dtype == other.dtype == product.dtype == wide
    assert dense.dtype == numpy_dtype(dtype)
    near, rounded = (1e-12, 1e-12) if dtype == "float64" else (5e-5, 1e-2 if "16" in dtype else 5e-5)
    for got, right in ((found, of_x), (other, of_y), (product, of_y)):
        np.testing.assert_allclose(got, right, rtol=0, atol=near)
        assert (got[right == 1] == 1).all()
    for got, right in ((dense, of_y), (half, of_x), (turned, of_x)):
        np.testing.assert_allclose(got.astype(float), right, rtol=0, atol=rounded)
        assert (got[right == 1] == 1).all()
    np.testing.assert_allclose(sums, of_x.sum(1), rtol=0, atol=90 * near)
    np.testing.assert_allclose(best.scores, -np.sort(-of_y), rtol=0, atol=near)
    assert abs(len(pairs.scores) - (of_x >= 0.5).sum()) <= 2


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_whose_norms_are_too_large_are_multiplied_in_float64(engine: Engine) -> None:
    x = places(60)
    for gamma, dtype in ((1e-4, "float32"), (1.0, "float64"), (1e4, "float64")):
        with running_on(engine) as options:
            given: Any = {"epilogue": [Gaussian(gamma), Scale(value=2)], **options}
            found = oocgemm.gemm(x, x, trans_b="T", verify=True, **given)
            product = oocgemm.kernel_matmul(x, np.eye(60)[:, :4], gamma=gamma, verify=True, **options)
            planned = oocgemm.plan(x, x, trans_b="T", **given | {"device_memory": "1GiB"})
        assert found.plan.problem.a_dtype == planned.problem.a_dtype == dtype
        assert found.out.dtype == np.float32
        assert product.dtype == np.float32
        np.testing.assert_allclose(found.out, 2 * kernel(x, x, gamma), rtol=0, atol=1e-4)
        np.testing.assert_allclose(product, kernel(x, x[:4], gamma), rtol=0, atol=1e-4)


def test_one_row_far_away_needs_float64() -> None:
    x = np.random.default_rng(0).standard_normal((50, 5)).astype(np.float32)
    x[4] = 3e4
    found = oocgemm.gram(x, epilogue=[Gaussian(0.5)], uplo="full", backend="host")
    assert found.plan.problem.a_dtype == "float64"
    np.testing.assert_allclose(found.out, kernel(x, x, 0.5), atol=1e-6)
    given: Any = {"backend": "cuda", "compute": "tf32", "device_memory": "1GiB", "host_memory": "1GiB"}
    with pytest.raises(InputError, match=r"compute = 'tf32' rounds rows.*drop compute"):
        oocgemm.plan(x, x, trans_b="T", epilogue=[Gaussian(0.5)], **given)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("far", [9.96921e36, 1e10])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_row_too_far_for_float64_is_refused(engine: Engine, dtype: str, far: float) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 3)).astype(dtype), rng.standard_normal((20, 3)).astype(dtype)
    bad = x.copy()
    bad[7] = far
    what = (
        r"gamma \* eps \* max \|x - c\|\^2 is \S+ .* at {} 7 of {}, .* Above 0.0001, .*: leave out {}s that"
    )
    with running_on(engine) as options:
        for other in (None, y):
            with pytest.raises(InputError, match=what.format("row", "X", "row")):
                oocgemm.kernel_matmul(bad, np.ones(40 if other is None else 20), other, gamma=0.5, **options)
        with pytest.raises(InputError, match=what.format("row", "Y", "row")):
            oocgemm.kernel_matmul(y, np.ones(40), bad, gamma=0.5, **options)
        step: Any = {"epilogue": [Gaussian(0.5)], **options}
        for given in (bad.T, np.ascontiguousarray(bad.T)):
            with pytest.raises(InputError, match=what.format("column", "X", "column")):
                oocgemm.gram(given, axis=1, uplo="full", **step)
            with pytest.raises(InputError, match=what.format("column", "B", "column")):
                oocgemm.gemm(y, given, **step)
            with pytest.raises(InputError, match=what.format("column", "A", "column")):
                oocgemm.gemm(given, y, trans_a="T", trans_b="T", **step)
        kept = np.delete(bad, 7, axis=0)
        found = oocgemm.kernel_matmul(kept, np.eye(39), gamma=0.5, **options)
        np.testing.assert_allclose(found, kernel(kept, kept, 0.5), rtol=0, atol=5e-5)
        bad[3, 0], bad[4, 1] = np.nan, np.inf  # rows of NaN and Inf are not named
        with pytest.raises(InputError, match=what.format("row", "X", "row")):
            oocgemm.kernel_matmul(bad, np.ones(40), gamma=0.5, **options)


@pytest.mark.parametrize("far", [1e20, 1e160, 1e300])
def test_rows_whose_squares_overflow_are_told_from_inf(far: float) -> None:
    x = np.random.default_rng(0).standard_normal((30, 3))
    x[2], x[5, 1] = np.inf, far
    with pytest.raises(InputError, match=r"is (inf|\S+) for .* at row 5 of X") as caught:
        oocgemm.kernel_matmul(x, np.ones(30), gamma=0.5, backend="host")
    assert ("gamma of at most" in str(caught.value)) == (far < 1e150)
    x[5] = np.inf
    found = oocgemm.gemm(x, x, trans_b="T", epilogue=[Gaussian(0.5)], backend="host").out
    kept = np.setdiff1d(np.arange(30), [2, 5])
    np.testing.assert_allclose(found[np.ix_(kept, kept)], kernel(x[kept], x[kept], 0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clusters_too_far_apart_are_refused_and_the_remedies_work(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(dtype)
    x[20:] = x[20:] * 100 + np.asarray(1e9, dtype)
    with pytest.raises(InputError, match=r"rows lie too far apart for gamma = 0.5.*clusters apart") as caught:
        oocgemm.kernel_matmul(x, np.eye(40), gamma=0.5, backend="host")
    for part in (x[:20], x[20:]):
        found = oocgemm.kernel_matmul(part, np.eye(20), gamma=0.5, backend="host")
        np.testing.assert_allclose(found, kernel(part, part, 0.5), rtol=0, atol=5e-5)
    gamma = float(str(caught.value).rsplit(" ", 1)[1])
    found = oocgemm.kernel_matmul(x, np.eye(40), gamma=gamma, backend="host")
    np.testing.assert_allclose(found, kernel(x, x, gamma), rtol=0, atol=2e-4)


@pytest.mark.parametrize("power", [-95, 70, 95])
def test_products_that_leave_the_range_of_float32_are_computed_in_float64(power: int) -> None:
    x = np.random.default_rng(0).standard_normal((30, 4))
    scaled = np.ldexp(x, power).astype(np.float32)
    gamma = float(np.ldexp(0.1, -2 * power))
    found = oocgemm.kernel_matmul(scaled, np.eye(30), gamma=gamma, backend="host", verify=True)
    np.testing.assert_allclose(found, kernel(scaled, scaled, gamma), rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("depth", [1, 3, *slow((300,))])
def test_equal_rows_are_exactly_1_and_others_are_not(engine: Engine, depth: int) -> None:
    rng = np.random.default_rng(depth)
    x = rng.standard_normal((40, depth)).astype(np.float32) + 7
    x[9] = x[8]
    x[11, 0] = np.nextafter(x[10, 0], np.float32(99))
    x[11, 1:] = x[10, 1:]
    y = np.concatenate([x[::2], x[:3, ::-1] + 1])
    same = (x[:, None] == y).all(2)
    gamma = 4e10 if depth == 1 else 1.0
    with running_on(engine) as options:
        given: Any = {"gamma": gamma, "tile": "17x17x7", **options}
        found = oocgemm.kernel_matmul(x, np.eye(len(y)), np.asfortranarray(y), **given)
        square = oocgemm.kernel_matmul(x, np.eye(40), **given)
    assert (found[same] == 1).all()
    assert (np.diag(square) == 1).all()
    assert square[8, 9] == square[9, 8] == 1
    if depth == 1:
        assert (found[~same] < 0.999).all()
        assert square[10, 11] < 1


@pytest.mark.parametrize("engine", ENGINES)
def test_signs_and_orders_of_elements_count_and_signs_of_zeros_do_not(engine: Engine) -> None:
    x = np.array([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [-1.0, 0.0], [0.0, -1.0]], np.float32)
    with running_on(engine) as options:
        found = oocgemm.kernel_matmul(x, np.eye(5), gamma=1e-12, **options)
        sharp = oocgemm.kernel_matmul(x, np.eye(5), gamma=1.0, **options)
    assert sharp[0, 1] == found[0, 1] == 1
    assert ((sharp == 1).sum(), (found >= 1 - 1e-6).sum()) == (7, 25)


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_and_inf_spoil_only_their_rows(engine: Engine) -> None:
    x = places(30)
    x[4, 1], x[6, 0] = np.nan, np.inf
    with running_on(engine) as options:
        found = oocgemm.gemm(x, x, trans_b="T", epilogue=[Gaussian(GAMMA)], **options).out
    kept = np.setdiff1d(np.arange(30), [4, 6])
    np.testing.assert_allclose(found[np.ix_(kept, kept)], kernel(x[kept], x[kept], GAMMA), rtol=0, atol=5e-5)
    assert np.isnan(found[4]).all()
    assert np.isnan(found[6, 6])
    assert (np.diag(found)[kept] == 1).all()


def test_arrays_on_disk_of_any_format_and_order(tmp_path: Path) -> None:
    x = places(300)
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(70, 2))
    zarr.create_array(tmp_path / "t.zarr", data=x.T, chunks=(1, 110))
    zarr.create_array(tmp_path / "b.zarr", data=x.astype(">f4"), chunks=(70, 1), zarr_format=2)
    np.save(tmp_path / "x.npy", np.asfortranarray(x))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("d", data=x, chunks=(50, 2))
    right, v = kernel(x, x, GAMMA), np.eye(300)
    for place in ("x.zarr", "b.zarr", "x.npy", "x.h5::d"):
        for other in (None, f"{tmp_path}/x.zarr"):
            given: Any = {"gamma": GAMMA, "backend": "host", "memory": "64MiB", "verify": True}
            found = oocgemm.kernel_matmul(f"{tmp_path}/{place}", v, other, **given)
            np.testing.assert_allclose(found, right, rtol=0, atol=5e-5)
            assert (np.diag(found) == 1).all()
    step: Any = {"epilogue": [Gaussian(GAMMA)], "backend": "host", "tile": "90x90x2"}
    out = tmp_path / "k.zarr"
    oocgemm.gemm(tmp_path / "x.zarr", tmp_path / "t.zarr", out, **step)
    again = oocgemm.gemm(tmp_path / "x.zarr", tmp_path / "t.zarr", out, resume=True, **step)
    assert not again.plan.steps
    np.testing.assert_allclose(again.out[:], right, rtol=0, atol=5e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_are_transformed_are_centered_too(engine: Engine) -> None:
    x, scale = places(50), np.array([2.0, 0.5])
    x[3, 1] = np.nan
    transform = Transform(missing=np.nan, impute=np.array([0.0, 4_650_100.0]), scale=scale)
    wide = np.where(np.isnan(x), 4_650_100.0, x.astype(float)) / scale
    with running_on(engine) as options:
        given: Any = {"epilogue": [Gaussian(GAMMA)], "tile": "20x20x1", "verify": True, **options}
        found = oocgemm.gram(x, transform=transform, uplo="full", **given).out
    np.testing.assert_allclose(found, kernel(wide, wide, GAMMA), rtol=0, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_verify_compares_with_exact_distances(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a center, K is wrong, and rounding explains it only if norms are taken for distances."""
    x = places(90)
    monkeypatch.setattr(operands, "centered", lambda problem, a, b, memory: (problem, a, b))
    with running_on(engine) as options:
        step: Any = {"epilogue": [Gaussian(GAMMA)], "verify": True, "tile": "40x40x1", **options}
        with pytest.raises(ExecutionError, match="A and B give a number from"):
            oocgemm.kernel_matmul(x, np.ones(90), gamma=GAMMA, verify=True, **options)
        with pytest.raises(ExecutionError, match="A and B give a number from"):
            oocgemm.gemm(x, x, trans_b="T", **step)
        with pytest.raises(ExecutionError, match=r"A and B give a number from|selected of row"):
            oocgemm.reduce(x, to=TopK(5), **step)
