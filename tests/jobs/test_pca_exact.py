"""The exact method of `pca` agrees with an SVD in float64, for several spectra, shapes and budgets."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import BudgetError, DataWarning, InputError
from oocgemm.jobs import pca_gram
from tests.support.command import command

Array = NDArray[Any]
RNG = np.random.default_rng(11)

SPECTRA = {
    "slow": 1 / np.sqrt(np.arange(1, 61)),
    "fast": 0.5 ** np.arange(60),
    "tiny tail": np.r_[np.ones(3), np.full(57, 1e-5)],
    "tail of noise": np.r_[np.linspace(2, 1, 5), np.full(55, 1e-3)],
    "low rank": np.r_[np.linspace(3, 1, 4), np.zeros(56)],
}


def of(values: Array, rows: int, cols: int) -> Array:
    count = min(rows, cols)
    left, right = (np.linalg.qr(RNG.standard_normal((n, count)))[0] for n in (rows, cols))
    return np.asarray((left * values[:count]) @ right.T)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("shape", [(400, 60), (60, 400)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_singular_values_are_those_of_float64(name: str, shape: tuple[int, int], dtype: str) -> None:
    x = of(SPECTRA[name], *shape).astype(dtype)
    for center in (True, False):
        wide = x.astype(np.float64)
        exact = np.linalg.svd(wide - wide.mean(0) if center else wide, compute_uv=False)
        found = oocgemm.pca(x, 10, center=center, method="exact", iterations=30, backend="host")
        np.testing.assert_allclose(found.singular_values, exact[:10], rtol=0, atol=1e-5 * exact[0])
        assert found.converged


def test_columns_of_two_values_have_biased_sums() -> None:
    """All terms of their sums of squares are equal, and so are the rounding errors of these terms."""
    mask = RNG.random((20000, 40)) < 0.3
    x = ((mask - mask.mean(0)) / mask.std(0)).astype(np.float32)
    wide = x.astype(np.float64)
    exact = np.linalg.svd(wide, compute_uv=False)
    found = oocgemm.pca(x, 10, center=False, method="exact", backend="host")
    np.testing.assert_allclose(found.singular_values, exact[:10], rtol=0, atol=1e-5 * exact[0])


def test_components_that_the_gram_matrix_hides_are_refined() -> None:
    x = of(SPECTRA["tail of noise"], 400, 60).astype(np.float32)
    given: dict[str, Any] = {"center": False, "method": "exact", "backend": "host"}
    assert oocgemm.pca(x, 4, **given).passes == 1
    assert oocgemm.pca(x, 8, iterations=40, **given).passes > 1
    with pytest.warns(DataWarning, match="have not converged after 1 iterations"):
        found = oocgemm.pca(x, 8, iterations=1, **given)
    np.testing.assert_array_equal(found.errors, [0] * 5 + [1] * 3)


def test_auto_reads_x_once_and_without_tolerance_as_often_as_asked() -> None:
    x = of(SPECTRA["slow"], 400, 60)
    assert oocgemm.pca(x, 5, backend="host").passes == 1
    assert oocgemm.pca(x, 5, tol=0, iterations=4, backend="host").passes == 4
    assert oocgemm.pca(x.T, 5, iterations=1, tol=1e9, backend="host").passes == 1
    with pytest.raises(InputError, match="method = 'svd': choose one of auto, exact, randomized"):
        oocgemm.pca(x, 5, method="svd", backend="host")


def test_a_gram_matrix_must_fit_into_memory() -> None:
    x = np.ones((1200, 1000), np.float32)
    given: dict[str, Any] = {"backend": "host", "memory": "37MiB"}
    assert oocgemm.plan_pca(x, 3, **given).method == "randomized"
    with pytest.raises(BudgetError, match=r"method = 'exact' needs .* pass memory='") as e:
        oocgemm.plan_pca(x, 3, method="exact", **given)
    memory = str(e.value).split("memory='")[1].split("'")[0]
    assert oocgemm.plan_pca(x, 3, method="exact", backend="host", memory=memory).method == "exact"


def test_a_run_resumes_after_the_gram_matrix(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "x.zarr", data=of(SPECTRA["slow"], 400, 60), chunks=(100, 60))
    given: dict[str, Any] = {"method": "exact", "scores": True, "backend": "host"}
    whole = oocgemm.pca(tmp_path / "x.zarr", 5, **given)
    with (
        patch("oocgemm.jobs.pca_passes.PcaPasses.scores", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        oocgemm.pca(tmp_path / "x.zarr", 5, tmp_path / "p.zarr", **given)
    with patch("oocgemm.jobs.pca_passes.PcaPasses.gram", side_effect=AssertionError):
        found = oocgemm.pca(tmp_path / "x.zarr", 5, tmp_path / "p.zarr", resume=True, **given)
    for name in ("components", "singular_values", "scores", "errors"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))


def test_the_command_takes_the_method(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", of(SPECTRA["slow"], 400, 60))
    line = "pca", tmp_path / "x.npy", "--components", "3", "--backend", "host", "--dry-run"
    assert "Exact method" in command(*line, "--method", "exact").out
    assert "Exact method" not in command(*line, "--method", "randomized").out


@pytest.mark.parametrize(
    "values",
    [1 / np.arange(1.0, 601), 0.5 ** np.arange(600), np.ones(600), np.zeros(600), np.linspace(2, 1, 600),
     np.repeat([5.0, 4, 3], [6, 9, 585])],
)  # fmt: skip
def test_largest_eigenvalues_are_those_of_lapack(values: Array) -> None:
    basis = np.linalg.qr(RNG.standard_normal((600, 600)))[0]
    s = (basis * values) @ basis.T
    s = (s + s.T) / 2
    found = pca_gram.largest(s, 6, 12, 0)
    np.testing.assert_allclose(found.values[:6], values[:6], atol=1e-12 * max(1, values[0]))
    v = found.vectors
    np.testing.assert_allclose(v.T @ v, np.eye(12), atol=1e-12)
    np.testing.assert_allclose(s @ v[:, :6], v[:, :6] * found.values[:6], atol=1e-11)
