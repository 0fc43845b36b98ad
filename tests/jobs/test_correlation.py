"""`corr` and `cov` agree with NumPy on every backend, dense, with a threshold, and with `topk`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import InputError
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.suite import each_value

Array = NDArray[Any]
TOLERANCE = {"float64": 1e-13, "float32": 1e-5}


def sample(dtype: str, axis: int) -> tuple[Array, Array]:
    """Return a matrix whose variables are along `axis`, and in float64 with the variables as rows.

    Its means are a hundred times its deviations, so that products of uncentered elements would cancel.
    """
    x = (np.random.default_rng(0).standard_normal((90, 33)) * 8 + 100).astype(dtype)
    return (x, x.astype(float)) if axis == 0 else (x.T.copy(), x.astype(float))


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int32"])
def test_dense_results_agree_with_numpy(engine: Engine, axis: int, dtype: str) -> None:
    x, wide = sample(dtype, axis)
    with running_on(engine) as options:
        given: Any = {"axis": axis, "tile": "40x40x10", **options}
        correlations, covariances = oocgemm.corr(x, **given).out, oocgemm.cov(x, ddof=0, **given).out
    assert correlations.dtype == ("float64" if dtype == "float64" else "float32")
    tolerance = TOLERANCE[correlations.dtype.name]
    np.testing.assert_allclose(correlations, np.corrcoef(wide), rtol=0, atol=tolerance)
    np.testing.assert_allclose(covariances, np.cov(wide, ddof=0), rtol=0, atol=100 * tolerance)
    np.testing.assert_array_equal(correlations, correlations.T)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axis", [0, 1])
def test_sparse_results_agree_with_numpy(engine: Engine, axis: int) -> None:
    x, wide = sample("float32", axis)
    reference = np.corrcoef(wide)
    np.fill_diagonal(reference, 0)
    with running_on(engine) as options:
        given: Any = {"axis": axis, "tile": "40x40x10", **options}
        pairs, best = oocgemm.corr(x, threshold=0.3, **given), oocgemm.corr(x, topk=4, **given)
    assert (np.abs(np.abs(reference) - 0.3) > 1e-5).all(), "no coefficient may be so near to the threshold"
    rows, columns = np.nonzero(np.abs(reference) >= 0.3)
    assert (reference[rows, columns] < 0).any()
    np.testing.assert_array_equal(pairs.rows, rows)
    np.testing.assert_array_equal(pairs.indices, columns)
    np.testing.assert_allclose(pairs.scores, reference[rows, columns], rtol=0, atol=1e-6)
    np.fill_diagonal(reference, -2)
    np.testing.assert_allclose(best.scores, np.sort(reference)[:, :-5:-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(reference, best.indices, 1), best.scores, atol=1e-6)


def test_arrays_on_disk_are_read_and_written_and_runs_resume(tmp_path: Path) -> None:
    x, wide = sample("float32", 0)
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(40, 33))
    where, out = tmp_path / "x.zarr", tmp_path / "r.zarr"
    oocgemm.corr(where, out, backend="host")
    found = oocgemm.corr(where, out, backend="host", resume=True)
    assert not found.plan.steps
    np.testing.assert_allclose(found.out[:], np.corrcoef(wide), rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="the transform of A is"):
        oocgemm.gram(where, out, uplo="full", backend="host", resume=True)


def test_checksums_cover_standardized_rows() -> None:
    x, wide = sample("float64", 0)
    found = oocgemm.corr(x, backend="host", verify=True)
    assert found.report.checks is not None
    np.testing.assert_allclose(found.out, np.corrcoef(wide), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        ([[1.0, np.nan], [1.0, 2.0]], {}, "row 0 of X has elements that are Inf or NaN"),
        ([[1.0, 2j], [1.0, 2.0]], {}, "X is of dtype complex128"),
        ([[1.0, 2.0], [1.0, 3.0]], {"axis": 2}, "axis = 2"),
        ([[1.0, 2.0], [1.0, 3.0]], {"topk": 1, "resume": True}, "corr does not take the option resume"),
        ([[1.0, 2.0], [1.0, 3.0]], {"topk": 1, "out": "c.zarr"}, "kept in memory: drop out"),
        ([[1.0, 2.0], [1.0, 3.0]], {"topk": 1, "threshold": 0.1}, "pass either topk"),
    ],
)
def test_bad_input_is_refused(x: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        oocgemm.corr(x, backend="host", **options)


def test_a_covariance_needs_more_elements_than_ddof() -> None:
    with pytest.raises(InputError, match="ddof = 1 divides by 0"):
        oocgemm.cov([[1.0], [2.0]], backend="host")


def test_options_that_do_not_apply_are_type_errors() -> None:
    with pytest.raises(TypeError, match="unexpected option 'alpha'"):
        oocgemm.corr(np.eye(3), alpha=2)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_host_computes_half_of_the_diagonal_of_coefficients(dtype: str) -> None:
    """The other half is mirrored after the epilogue, which also runs over the elements that it replaces."""
    x = np.random.default_rng(0).standard_normal((90, 40)).astype(dtype)
    result = oocgemm.corr(x, backend="host")
    assert result.plan.problem.halves_diagonal
    assert result.plan.problem.finishes
    np.testing.assert_array_equal(result.out, np.asarray(result.out).T)
    np.testing.assert_allclose(result.out, np.corrcoef(x.astype(float)), atol=3e-6)
    assert not oocgemm.corr(x, topk=3, backend="host").run.plan.problem.halves_diagonal
