"""Squares of very small elements are not lost: they are scaled by a power of two, or refused."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

import oocgemm
from oocgemm import Correlation, Transform
from oocgemm.errors import DataWarning, InputError
from oocgemm.jobs import pca_passes, row_slices
from oocgemm.jobs.run import run_request
from oocgemm.verbs import pca
from tests.jobs.test_pca import METHODS, low_rank
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.suite import each_value

Array = NDArray[Any]
RNG = np.random.default_rng(7)
X = low_rank(120, 40)
# dtypes of elements, and factors by which their squares leave the range of the dtype, or lose digits.
SIZES = [
    *(("float32", factor) for factor in (1e-26, 1e-20, 1e-34, 1e-13, 1e25)),
    *(("float64", factor) for factor in (1e-200, 1e-160, 1e180)),
    ("bfloat16", 1e-26),
    ("float16", 1e-4),
]


def sized(dtype: str, factor: float) -> Array:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    return (X * factor).astype(dtype)


def relative(x: Array, factor: float, *, center: bool) -> Array:
    wide = x.astype(np.float64) / factor
    return np.asarray(wide - wide.mean(0) if center else wide)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("dtype", "factor"), SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_components_do_not_depend_on_the_size_of_elements(
    engine: Engine, dtype: str, factor: float, method: str
) -> None:
    x = sized(dtype, factor)
    for center in (True, False):
        _, exact, right = np.linalg.svd(relative(x, factor, center=center), full_matrices=False)
        with running_on(engine) as options:
            given: dict[str, Any] = {"center": center, "scores": True, "method": method}
            found = oocgemm.pca(x, 5, verify=True, **given, **options)
        np.testing.assert_allclose(found.singular_values / factor, exact[:5], rtol=1e-5)
        np.testing.assert_allclose(abs((found.components * right[:5]).sum(1)), 1, rtol=1e-3)
        assert found.scores is not None
        lengths = np.linalg.norm(found.scores.astype(np.float64) / factor, axis=0)
        np.testing.assert_allclose(lengths, exact[:5], rtol=1e-5)
        assert (found.residuals < 1e-3).all()
        mean = (x.astype(np.float64) / factor).mean(0) if center else 0
        np.testing.assert_allclose(found.mean / factor, mean, atol=1e-3)


@each_value
@pytest.mark.parametrize(
    ("dtype", "factor"),
    [
        *(("float64", factor) for factor in (1e-150, 1e-110, 1e-70, 1e70, 1e100, 1e140, 1e150, 2e153)),
        *(("float32", factor) for factor in (1e-17, 1e15, 1e18)),
    ],
)
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_fourth_powers_of_singular_values_stay_in_range(
    dtype: str, factor: float, center: bool, method: str
) -> None:
    x = sized(dtype, factor)
    exact = np.linalg.svd(relative(x, factor, center=center), compute_uv=False)
    found = oocgemm.pca(x, 5, center=center, backend="host", method=method)
    np.testing.assert_allclose(found.singular_values / factor, exact[:5], rtol=1e-5)
    assert found.converged
    assert (found.residuals < 1e-3).all()
    # Residuals are not lost either: with one pass, there are some.
    given: dict[str, Any] = {"iterations": 1, "oversampling": 0, "method": "randomized"}
    with pytest.warns(DataWarning, match="have not converged after 1 iterations"):
        first = oocgemm.pca(x, 5, center=center, backend="host", **given)
    assert (first.residuals > 0).any()
    assert np.isfinite(first.residuals).all()


def test_scales_that_make_elements_large_or_small_are_counted() -> None:
    for factor in (1e-90, 1e90):
        scale = np.full(40, 1 / factor)
        found = oocgemm.pca(X, 5, transform=Transform(scale=scale), backend="host")
        exact = np.linalg.svd(relative(X, 1, center=True), compute_uv=False)
        np.testing.assert_allclose(found.singular_values / factor, exact[:5], rtol=1e-5)
        assert (found.residuals < 1e-3).all()


def test_nan_has_not_converged() -> None:
    eigenvalues = np.array([2.0, 1.0])
    with np.errstate(invalid="ignore"):
        found = pca_passes.ritz(np.eye(3)[:, :2], np.full((3, 2), np.nan), eigenvalues, 1e-16)
    assert np.isnan(found.errors).all()
    result = oocgemm.pca(X, 2, backend="host")
    text = pca._unconverged(replace(result, errors=np.array([0.0, np.nan])), 6, 0.01)
    assert text.startswith(
        "1 of 2 components have not converged after 6 iterations: the residual of component 2"
    )


@each_value
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("change", ["scale", "missing", "given", "log1p"])
@pytest.mark.parametrize("method", METHODS)
def test_components_of_transformed_elements(order: Any, change: str, method: str) -> None:
    factor = 1e-26
    x = np.asarray(np.abs(X) * factor, np.float32, order=order)
    transform = {
        "scale": Transform(scale="k"),
        "missing": Transform(missing=-1.0),
        "given": Transform(center=np.full(40, factor), scale=np.full(40, 2.0)),
        "log1p": Transform(log1p=True),
    }[change]
    wide = relative(x, factor, center=change != "given")
    if change == "scale":
        wide = wide / wide.std(0) / factor
    if change == "given":
        wide = (wide - 1) / 2
    found = oocgemm.pca(x, 5, transform=transform, backend="host", method=method)
    exact = np.linalg.svd(wide, compute_uv=False)
    np.testing.assert_allclose(found.singular_values / factor, exact[:5], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_of_short_elements_with_missing_ones(dtype: str) -> None:
    x = sized(dtype, 1.0)
    found = oocgemm.pca(x, 4, transform=Transform(missing=-1000.0), scores=True, backend="host")
    assert found.scores is not None
    np.testing.assert_allclose(np.linalg.norm(found.scores, axis=0), found.singular_values, rtol=1e-4)


def test_zeros_stay_zeros() -> None:
    for method, center in product(METHODS, (True, False)):
        given: dict[str, Any] = {"backend": "host", "method": method, "center": center}
        found = oocgemm.pca(np.zeros((20, 9), np.float32), 3, **given)
        np.testing.assert_array_equal(found.singular_values, 0)
        assert found.converged
        for wrong in (np.inf, np.nan):
            x = np.where(np.arange(9) == 3, wrong, np.zeros((20, 9), np.float32))
            with pytest.raises(InputError, match="column 3 of X has elements that are NaN or Inf"):
                oocgemm.pca(x, 3, **given)


def test_a_scaled_run_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", sized("float32", 1e-26))
    given: dict[str, Any] = {"backend": "host", "tol": 0, "iterations": 4}
    whole = oocgemm.pca(tmp_path / "x.npy", 4, **given)
    made = 0

    def killed(request: Any) -> oocgemm.Result:
        nonlocal made
        made += 1
        if made > 2:
            raise KeyboardInterrupt
        return run_request(request)

    with patch.object(row_slices, "run_request", killed), pytest.raises(KeyboardInterrupt):
        oocgemm.pca(tmp_path / "x.npy", 4, tmp_path / "p.zarr", **given)
    found = oocgemm.pca(tmp_path / "x.npy", 4, tmp_path / "p.zarr", resume=True, **given)
    for name in ("components", "singular_values", "mean", "residuals"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "factor"), [("float32", 1e-26), ("float32", 1e-22), ("bfloat16", 1e-26), ("float64", 1e-200)]
)
def test_covariances_that_underflow_are_refused(engine: Engine, axis: int, dtype: str, factor: float) -> None:
    x = sized(dtype, factor)
    x[3:] = (X[3:]).astype(dtype)  # some rows are of usual size
    if axis:
        x = x.T
    line = ("row", "column")[axis]
    message = rf"{line} 0 of X has a variance below .* \(one of 3 such {line}s\)"
    with running_on(engine) as options:
        with pytest.raises(InputError, match=message) as caught:
            oocgemm.cov(x, axis=axis, **options)
        if dtype == "float64":
            assert "multiply X by 2.0**400, which multiplies covariances by 2.0**800" in str(caught.value)
            x = x * 2.0**400
        else:
            assert "underflow float32: pass X in float64" in str(caught.value)
            x = x.astype("float64")
        found = oocgemm.cov(x, axis=axis, **options).out
        np.testing.assert_allclose(found, np.cov(x, rowvar=not axis), rtol=1e-9)


def test_the_command_refuses_them_too(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", sized("float32", 1e-26))
    done = command("cov", tmp_path / "x.npy", tmp_path / "c.npy", "--backend", "host")
    assert (done.code, "its covariances underflow float32: pass X in float64" in done.err) == (2, True)
    assert not (tmp_path / "c.npy").exists()
    done = command("pca", tmp_path / "x.npy", tmp_path / "p.zarr", "--components", "3", "--backend", "host")
    assert (done.code, done.err) == (0, "")
    assert "singular values: 1." in done.out or "e-2" in done.out


def test_constant_and_usual_rows_keep_their_covariances() -> None:
    x = np.stack([np.full(50, 1e-30), RNG.standard_normal(50), 1e-15 * RNG.standard_normal(50)]).astype("f4")
    found = oocgemm.cov(x, backend="host").out
    np.testing.assert_allclose(found, np.cov(x.astype(float)), rtol=1e-4, atol=1e-45)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_correlations_do_not_depend_on_the_size_of_elements(engine: Engine, dtype: str) -> None:
    for factor in (1e-26, 1e-36) if dtype == "float32" else (1e-26, 1e-140):
        x = (X * factor).astype(dtype)
        with running_on(engine) as options:
            found = oocgemm.corr(x, **options).out
            right = np.corrcoef(x.astype(float) / factor)
            np.testing.assert_allclose(found, right, atol=1e-5)
            near = oocgemm.similarity(x, topk=3, **options)
            whole = oocgemm.similarity((X * 1.0).astype(dtype), topk=3, **options)
        np.testing.assert_allclose(near.scores, whole.scores, atol=1e-5)


def cosines_of(x: Array, *, gram: bool) -> Array:
    if gram:
        return np.asarray(oocgemm.gram(x, epilogue=[Correlation()], backend="host").out)
    return np.asarray(oocgemm.gemm(x, x.T.copy(), epilogue=[Correlation()], backend="host").out)


@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize(
    ("dtype", "factor", "what"),
    [
        ("float32", 1e-26, "underflows float32: multiply these rows and columns by powers of two, which"),
        ("float32", 1e24, "overflows float32: multiply these rows and columns by powers of two, which"),
        ("float64", 1e-160, "multiply [AX] by 2.0..400"),
        ("float64", 1e160, "elements that are Inf or NaN"),
        ("bfloat16", 1e-26, "underflows float32: .* does not change cosines, or pass A and B in float64"),
    ],
)
def test_cosines_that_leave_the_range_are_refused(dtype: str, factor: float, what: str, gram: bool) -> None:
    x = sized(dtype, factor)
    x[1:] = X[1:].astype(dtype)
    with pytest.raises(InputError, match=what):
        cosines_of(x, gram=gram)
    larger = x.astype(np.float64)
    larger[0] *= 2.0 ** -np.frexp(factor)[1]
    unit = larger / np.linalg.norm(larger, axis=1, keepdims=True)
    kept = larger if dtype == "float64" else larger.astype(np.float32)
    np.testing.assert_allclose(cosines_of(kept, gram=gram), unit @ unit.T, atol=1e-5)
    if dtype != "float64":
        np.testing.assert_allclose(cosines_of(x.astype(np.float64), gram=gram), unit @ unit.T, atol=1e-9)


def test_standard_deviations_that_underflow_are_not_those_of_equal_elements() -> None:
    x = X * 1e-200
    for call in (
        lambda x: oocgemm.pca(x, 3, transform=Transform(scale="k"), backend="host").singular_values,
        lambda x: oocgemm.gram(x, axis=1, transform=Transform(scale="k"), backend="host").out,
    ):
        with pytest.raises(InputError, match=r"differ by too little for float64 .* multiply X by 2.0\*\*400"):
            call(x)
        call(x * 2.0**400)


@pytest.mark.parametrize("axis", [0, 1])
def test_covariances_that_overflow_float32_are_refused(axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((20, 30))
    large = (x * 1e25).astype("f4")
    with pytest.raises(oocgemm.InputError, match="overflow float32: pass X in float64"):
        oocgemm.cov(large, axis=axis, backend="host")
    expected = np.cov(large.astype("f8"), rowvar=axis == 0)
    np.testing.assert_allclose(oocgemm.cov(large.astype("f8"), axis=axis, backend="host"), expected, 1e-9)
    assert np.all(np.isfinite(np.asarray(oocgemm.cov((x * 1e17).astype("f4"), axis=axis, backend="host"))))
