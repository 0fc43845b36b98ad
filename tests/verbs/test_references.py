"""Results equal those of pandas, xarray, scipy and scanpy, where these packages are installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm

pytestmark = pytest.mark.slow
Array = Any
HOST: Any = {"backend": "host"}


def with_nan(shape: tuple[int, int], share: float = 0.2) -> Array:
    rng = np.random.default_rng(0)
    return np.where(rng.random(shape) < share, np.nan, rng.normal(size=shape))


def test_correlations_are_those_of_pandas() -> None:
    pandas: Any = pytest.importorskip("pandas")
    x = with_nan((60, 8))
    frame = pandas.DataFrame(x)
    found = oocgemm.corr(x, axis=1, pairwise=True, **HOST).out
    np.testing.assert_allclose(found, frame.corr().values, atol=1e-12)
    found = oocgemm.cov(x, axis=1, pairwise=True, **HOST).out
    np.testing.assert_allclose(found, frame.cov().values, atol=1e-12)
    complete = frame.fillna(frame.mean())
    for how in ({"impute": "mean"}, {"missing": float("nan")}):
        found = oocgemm.corr(x, axis=1, **how, **HOST).out
        np.testing.assert_allclose(found, complete.corr().values, atol=1e-12)
    found = oocgemm.cov(x, axis=1, impute=0.5, **HOST).out
    np.testing.assert_allclose(found, frame.fillna(0.5).cov().values, atol=1e-12)
    kept = frame[frame[0] > 0][[5, 1, 7]]
    some = oocgemm.keep(x, rows=(frame[0] > 0).values, cols=[5, 1, 7])
    found = oocgemm.cov(some, axis=1, pairwise=True, **HOST).out
    np.testing.assert_allclose(found, kept.cov().values, atol=1e-12)


def test_distances_and_components_are_those_of_scipy_and_scikit_learn() -> None:
    distance: Any = pytest.importorskip("scipy.spatial.distance")
    decomposition: Any = pytest.importorskip("sklearn.decomposition")
    impute: Any = pytest.importorskip("sklearn.impute")
    x = with_nan((50, 9))
    for strategy, given in (("mean", "mean"), ("constant", 0.25)):
        complete = impute.SimpleImputer(strategy=strategy, fill_value=0.25).fit_transform(x)
        found = oocgemm.distances(x, impute=given, **HOST).out
        np.testing.assert_allclose(found, distance.cdist(complete, complete), atol=1e-7)
        expected = decomposition.PCA(4).fit(complete).singular_values_
        found = oocgemm.pca(x, 4, impute=given, tol=1e-10, **HOST).singular_values
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_packed_and_missing_elements_are_those_of_xarray(tmp_path: Path) -> None:
    xarray: Any = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    x = with_nan((30, 12)).reshape(30, 3, 4).round(2)
    data = xarray.Dataset({"t": (("time", "lat", "lon"), x)})
    packing = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 2.0, "_FillValue": -32768}
    data.to_netcdf(tmp_path / "t.nc", encoding={"t": packing}, engine="netcdf4")
    read = xarray.open_dataset(tmp_path / "t.nc", mask_and_scale=True)["t"].values.reshape(30, 12)
    complete = np.where(np.isnan(read), np.nanmean(read, axis=0), read)
    field = oocgemm.as_matrix(f"{tmp_path / 't.nc'}::/t", rows="time")
    found = oocgemm.cov(field, axis=1, impute="mean", **HOST).out
    np.testing.assert_allclose(found, np.cov(complete, rowvar=False), rtol=1e-5, atol=1e-6)
    days = np.arange(30) % 3 > 0
    some = read[days]
    complete = np.where(np.isnan(some), np.nanmean(some, axis=0), some)
    found = oocgemm.corr(oocgemm.keep(field, rows=days), axis=1, impute="mean", **HOST).out
    np.testing.assert_allclose(found, np.corrcoef(complete, rowvar=False), atol=1e-5)


@pytest.mark.parametrize("form", ["csr", "csc", "dense"])
def test_cells_are_those_of_scanpy(tmp_path: Path, form: str) -> None:
    scanpy: Any = pytest.importorskip("scanpy")
    sparse: Any = pytest.importorskip("scipy.sparse")
    anndata: Any = pytest.importorskip("anndata")
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.gamma(0.4, 2, (200, 40))).astype(np.float32)
    counts[3] = 0
    stored = {"csr": sparse.csr_matrix, "csc": sparse.csc_matrix, "dense": np.asarray}[form](counts)
    anndata.AnnData(stored).write_h5ad(tmp_path / "cells.h5ad")
    cells = anndata.AnnData(counts.copy())
    scanpy.pp.normalize_total(cells, target_sum=1e4)
    scanpy.pp.log1p(cells)
    path = f"{tmp_path / 'cells.h5ad'}::/X"
    change = oocgemm.Transform(target_sum=1e4, log1p=True)
    logs = np.asarray(cells.X, dtype=float)
    found = oocgemm.gram(path, axis=1, transform=change, **HOST).out
    np.testing.assert_allclose(found, logs.T @ logs, rtol=1e-4)
    scanpy.pp.pca(cells, n_comps=5, svd_solver="full")
    components = oocgemm.pca(path, 5, transform=change, tol=1e-8, scores=True, **HOST)
    np.testing.assert_allclose(components.explained_variance, cells.uns["pca"]["variance"], rtol=1e-4)
    assert components.scores is not None
    np.testing.assert_allclose(np.abs(components.scores), np.abs(cells.obsm["X_pca"]), rtol=1e-2, atol=5e-2)
    genes = np.arange(40) % 3 > 0  # selected after cells are normalized
    part = oocgemm.gram(oocgemm.keep(path, cols=genes), axis=1, transform=change, **HOST).out
    np.testing.assert_allclose(part, (logs.T @ logs)[genes][:, genes], rtol=1e-4)
    means, deviations = logs.mean(axis=0), logs.std(axis=0, ddof=1)
    scanpy.pp.scale(cells, max_value=2)
    whole = oocgemm.Transform(
        target_sum=1e4, log1p=True, center=means, scale=deviations, clip=(-2, 2), cast="float64"
    )
    scaled = np.asarray(cells.X, dtype=float)
    found = oocgemm.gram(path, transform=whole, **HOST).out
    np.testing.assert_allclose(found, scaled @ scaled.T, rtol=1e-3, atol=1e-3)
    scanpy.pp.pca(cells, n_comps=4, svd_solver="full")
    components = oocgemm.pca(path, 4, transform=whole, tol=1e-8, iterations=40, **HOST)
    np.testing.assert_allclose(components.explained_variance, cells.uns["pca"]["variance"], rtol=1e-3)
