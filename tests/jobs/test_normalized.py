"""Rows are scaled to a sum before all other steps, as scanpy's `normalize_total` does, in every verb."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import InputError
from oocgemm.stores.transform import Transform
from tests.support.backends_here import BACKENDS, running_on
from tests.support.command import command

Array = NDArray[Any]


def counts(seed: int, shape: tuple[int, int], dtype: str = "f4") -> Array:
    """Draw counts, of which many are 0; row 2 has none."""
    rng = np.random.default_rng(seed)
    x = rng.poisson(rng.gamma(0.5, 4, shape)).clip(0, 100).astype(dtype)
    x[2] = 0
    return x


def normalized(x: Array, target: float = 1e4) -> Array:
    """Return what `scanpy.pp.normalize_total` makes of x: rows without counts are divided by 1."""
    sums = np.nansum(x.astype(np.float64), axis=1, keepdims=True)
    return x / (np.where(sums == 0, 1, sums) / target)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=12)
@given(
    dtype=st.sampled_from(["int8", "uint8", "uint16", "int32", "int64", "float32", "float64"]),
    how=st.sampled_from(["memory", "fortran", "zarr"]),
    side=st.sampled_from("ab"),
    swaps=st.booleans(),
    log1p=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_products_are_those_of_normalized_rows(
    backend: str,
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    how: str,
    side: str,
    swaps: bool,
    log1p: bool,
    seed: int,
) -> None:
    x = counts(seed, (12, 9), dtype)
    expected = np.log1p(normalized(x)) if log1p else normalized(x)
    stored: Any = np.asfortranarray(x) if how == "fortran" else x
    if how == "zarr":
        stored = tmp_path_factory.mktemp("x") / "x.zarr"
        zarr.create_array(stored, data=x, chunks=(5, 4))
    change = Transform(target_sum=1e4, log1p=log1p)
    with running_on(backend) as options:
        if side == "a":
            y, op = np.eye(12 if swaps else 9), expected.T if swaps else expected
            found = oocgemm.matmul(stored, y, trans_a=swaps, transform_a=change, tile="8x8x8", **options)
        else:
            y, op = np.eye(9 if swaps else 12), expected.T if swaps else expected
            found = oocgemm.matmul(y, stored, trans_b=swaps, transform_b=change, tile="8x8x8", **options)
    np.testing.assert_allclose(found, op, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.filterwarnings("ignore:.*equal elements")
def test_statistics_are_those_of_normalized_rows(backend: str, axis: int, tmp_path: Path) -> None:
    x = counts(3, (20, 15))
    x[:, 4] = 0  # a gene without counts
    zarr.create_array(tmp_path / "x", data=x, chunks=(8, 8))
    wide, change = np.log1p(normalized(x)), Transform(target_sum=1e4, log1p=True)
    lines = wide if axis == 0 else wide.T
    with running_on(backend) as options:
        cov = oocgemm.cov(tmp_path / "x", axis=axis, transform=change, **options).out
        np.testing.assert_allclose(cov, np.cov(lines), rtol=1e-4, atol=1e-5)
        kept = oocgemm.corr(tmp_path / "x", axis=axis, transform=change, constant="drop", **options)
        chosen = np.flatnonzero(lines.std(1) > 0)
        np.testing.assert_allclose(kept.out, np.corrcoef(lines[chosen]), atol=1e-5)
        if axis == 0:
            best = oocgemm.similarity(tmp_path / "x", transform=change, topk=1, metric="dot", **options)
            inner = lines @ lines.T
            np.fill_diagonal(inner, -np.inf)
            np.testing.assert_allclose(np.asarray(best.scores)[:, 0], inner.max(1), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*equal elements")
def test_sums_are_those_of_all_columns_though_some_are_left_out() -> None:
    """A column of one number per sum is constant after the scaling, and left out, but counts in the sums."""
    x = counts(5, (10, 6), "f8")
    x[2] = 3
    x[:, 0] = x[:, 1:].sum(1)  # half of each sum
    change = Transform(target_sum=64.0)
    found = oocgemm.corr(x, axis=1, transform=change, constant="drop", backend="host")
    assert len(found.out) == 5
    np.testing.assert_allclose(found.out, np.corrcoef(normalized(x, 64.0).T[1:]), atol=1e-12)


def test_nan_is_no_count() -> None:
    x = counts(7, (9, 8))
    x[4, 3] = np.nan
    change = Transform(target_sum=100.0, missing=float("nan"), impute=7)
    found = oocgemm.gemm(x, np.eye(8), transform_a=change, backend="host").out
    expected = normalized(x, 100.0)
    expected[4, 3] = 7
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_factors_may_be_given() -> None:
    x, factors = counts(8, (6, 5)), np.arange(1.0, 7)
    change = Transform(target_sum=factors)
    found = oocgemm.gemm(x, np.eye(5), transform_a=change, backend="host").out
    np.testing.assert_allclose(found, x * factors[:, None], rtol=1e-7)
    x[4] = 2
    with pytest.warns(oocgemm.DataWarning, match="equal elements"):
        kept = oocgemm.corr(x, transform=change, constant="drop", backend="host").out
    rows = np.flatnonzero(x.std(1) > 0)
    np.testing.assert_allclose(kept, np.corrcoef(x[rows]), atol=1e-6)
    with pytest.raises(InputError, match="target_sum has 6 elements, and A has 5 rows"):
        oocgemm.gemm(x[:5], np.eye(5), transform_a=change, backend="host")


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"target_sum": 0}, "target_sum = 0: pass a positive number"),
        ({"target_sum": True}, "target_sum = True"),
        ({"target_sum": 1e4, "missing": -1}, "missing = -1 with target_sum"),
        ({"missing": -1, "impute": np.inf}, "impute = inf: pass 'mean', a finite number"),
    ],
)
def test_other_targets_are_refused(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Transform(**given_)


def test_rows_that_have_no_sum_are_refused() -> None:
    x = counts(9, (6, 5))
    x[3] = -1
    with pytest.raises(InputError, match=r"row 3 of A has the sum -5, .*one of 1 such rows"):
        oocgemm.gemm(x, np.eye(5), transform_a=Transform(target_sum=10), backend="host")
    with pytest.raises(InputError, match="row 3 of X has the sum -5"):
        oocgemm.pca(x, 2, transform=Transform(target_sum=10), backend="host")


@pytest.mark.parametrize("method", ["exact", "randomized"])
@pytest.mark.parametrize(("devices", "rows"), [(None, None), ("0,0", None), (None, [9, 3, 4, 8, 0, 11])])
@pytest.mark.parametrize(
    "change",
    [
        {"target_sum": 1e4},
        {"target_sum": 1e4, "log1p": True, "scale": "k"},
        {"target_sum": 1e2, "missing": float("nan"), "impute": 3},
    ],
)
def test_principal_components_are_those_of_normalized_rows(
    tmp_path: Path, method: str, devices: Any, rows: Any, change: dict[str, Any]
) -> None:
    x = counts(3, (40, 7), "f8")
    x[:, 0] += np.arange(40)
    if "missing" in change:
        x[5, 3] = x[11, 2] = np.nan
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(4, 7))
    operand: Any = str(tmp_path / "x.zarr")
    if rows is not None:
        x, operand = x[rows], oocgemm.keep(operand, rows)
    wide = normalized(x, change["target_sum"])
    wide = np.where(np.isnan(wide), 3, wide)
    if change.get("log1p"):
        wide = np.log1p(wide)
        wide = wide / wide.std(axis=0)
    known = np.linalg.svd(wide - wide.mean(axis=0), full_matrices=False)
    found = oocgemm.pca(
        operand, 3, transform=Transform(**change), backend="host", method=method, devices=devices, tol=1e-10,
        iterations=60, scores=True, decode=True,
    )  # fmt: skip
    np.testing.assert_allclose(found.singular_values, known[1][:3], rtol=1e-6)
    assert found.scores is not None
    np.testing.assert_allclose(np.abs(found.scores), np.abs(known[0] * known[1])[:, :3], rtol=1e-3, atol=1e-2)


def test_the_command_line_takes_a_target(tmp_path: Path) -> None:
    x = counts(11, (12, 7))
    np.save(tmp_path / "x.npy", x)
    done = command(
        *("cov", str(tmp_path / "x.npy"), str(tmp_path / "c.npy"), "--axis", "1", "--backend", "host"),
        *("--transform", "target_sum=1e4,log1p"),
    )
    assert done.code == 0, done.err
    np.testing.assert_allclose(np.load(tmp_path / "c.npy"), np.cov(np.log1p(normalized(x)).T), rtol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "int16", "float32"])
def test_missing_elements_may_become_any_number(dtype: str) -> None:
    x = np.arange(24).reshape(6, 4).astype(dtype)
    x[3, 2] = -1
    change = Transform(missing=-1, impute=2.5)
    found = oocgemm.gemm(x, np.eye(4), transform_a=change, backend="host").out
    np.testing.assert_array_equal(found, np.where(x == -1, 2.5, x))
