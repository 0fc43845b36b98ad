"""`neighbors` and `distances` agree with the definitions in NumPy, with SciPy's conventions."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import InputError
from oocgemm.jobs import nearest, operands, pairs
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.suite import each_value, examples

Array = Any
METRICS = ("euclidean", "sqeuclidean", "cosine")


def exact(x: Array, y: Array, metric: str) -> Array:
    """Return all distances in float64, from differences of rows."""
    x, y = x.astype(float), y.astype(float)
    if metric == "cosine":
        norms = np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1)
        x, y = (z / np.where(n > 0, n, 1)[:, None] for z, n in zip((x, y), norms, strict=True))
        found = ((x[:, None] - y) ** 2).sum(axis=2) / 2
        return np.where((norms[0][:, None] > 0) & (norms[1] > 0), found, 1)
    squares = ((x[:, None] - y) ** 2).sum(axis=2)
    return squares if metric == "sqeuclidean" else np.sqrt(squares)


def two(dtype: str, offset: float = 50) -> tuple[Array, Array]:
    rng = np.random.default_rng(6)
    x, y = ((rng.standard_normal((rows, 19)) * 8 + offset).astype(dtype) for rows in (44, 37))
    return x, y


def check(found: oocgemm.Nearest, expected: Array, topk: int) -> None:
    """Compare with the smallest elements of each row. Equal ones are in ascending order."""
    order = np.argsort(expected, axis=1, kind="stable")[:, :topk]
    np.testing.assert_array_equal(found.indices, order)
    tolerance = max(1e-13, 4 * float(np.finfo(found.distances.dtype).eps))
    np.testing.assert_allclose(found.distances, np.take_along_axis(expected, order, 1), rtol=tolerance)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "float16"])
def test_results_agree_with_numpy(engine: Engine, metric: str, dtype: str) -> None:
    x, y = two(dtype)
    if dtype == "float64" and metric == "cosine":
        x, y = x - 50, y - 50  # otherwise rows are nearly parallel: 1 - c cancels
    for other in (None, y):
        expected = exact(x, x if other is None else other, metric)
        with running_on(engine) as options:
            how: Any = {"y": other, "metric": metric, "tile": "16x16x8", "verify": True, **options}
            stored = oocgemm.distances(x, **how).out
            best = oocgemm.neighbors(x, topk=4, **how)
            if other is None:
                np.fill_diagonal(expected, np.inf)
            radius = float(np.quantile(expected, 0.1))
            near = oocgemm.neighbors(x, radius=radius, **how)
        wide = dtype in ("float64", "int8")
        assert stored.dtype == best.distances.dtype == ("float64" if wide else "float32")
        every = np.where(np.isinf(expected), 0, expected)
        eps, error = np.finfo(stored.dtype).eps, every.max() * (1e-13 if wide else 1e-7)
        np.testing.assert_allclose(stored, every, rtol=4 * eps, atol=error)
        check(best, expected, 4)
        assert near.indptr is not None
        rows = np.repeat(np.arange(len(x)), np.diff(near.indptr))
        assert len(rows) == (expected <= radius).sum()
        np.testing.assert_allclose(near.distances, expected[rows, near.indices], rtol=max(1e-13, 4 * eps))
        for start, stop in zip(near.indptr, near.indptr[1:], strict=False):
            assert (np.diff(near.distances[start:stop]) >= 0).all()


@given(
    shape=st.tuples(st.integers(2, 40), st.integers(1, 30)),
    metric=st.sampled_from(METRICS),
    tile=st.sampled_from([None, "3x3x4", "16x16x7"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60, quick=15), deadline=None)
def test_distances_of_small_integers_are_exact(
    shape: tuple[int, int], metric: str, tile: str | None, seed: int
) -> None:
    x = np.random.default_rng(seed).integers(-2, 3, shape).astype(np.int8)
    options: Any = {"metric": metric, "tile": tile, "backend": "host"}
    expected = exact(x, x, metric)
    tolerance = 1e-15 if metric == "cosine" else 0
    np.testing.assert_allclose(oocgemm.distances(x, **options).out, expected, rtol=tolerance, atol=tolerance)
    found = oocgemm.neighbors(x, topk=len(x), exclude_self=False, **options)
    if metric == "cosine":
        np.testing.assert_allclose(found.distances, np.sort(expected), atol=1e-15)
    else:
        check(found, expected, len(x))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("excluded", [True, False])
def test_rows_that_float32_cannot_rank_are_searched_again(engine: Engine, excluded: bool) -> None:
    rng = np.random.default_rng(8)
    center = np.where(rng.random((70, 1)) < 0.5, 3000.0, -3000.0)  # the mean is far from all rows
    x = (rng.standard_normal((70, 12)) * 0.3 + center).astype(np.float32)
    expected = exact(x, x, "euclidean")
    if excluded:
        np.fill_diagonal(expected, np.inf)
    again: list[int] = []
    search = nearest.Search._in_float64

    def noting(self: Any, rows: Array) -> Any:
        again.append(len(rows))
        return search(self, rows)

    with running_on(engine) as options, patch.object(nearest.Search, "_in_float64", noting):
        found = oocgemm.neighbors(x, topk=3, exclude_self=excluded, tile="16x16x8", **options)
    assert again
    assert again[0] > 60
    check(found, expected, 3)


def test_rows_that_float32_ranks_are_not_searched_again() -> None:
    x = np.random.default_rng(9).standard_normal((90, 30)).astype(np.float32)
    with patch.object(nearest.Search, "_in_float64", side_effect=AssertionError):
        oocgemm.neighbors(x, topk=2, backend="host")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("columns", [False, True])
def test_a_center_from_some_rows_finds_the_same(
    engine: Engine, columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "SAMPLED_LINES", 16)
    monkeypatch.setattr(operands, "SAMPLED_RUN", 4)
    monkeypatch.setattr(pairs, "PART", 40)  # pairs are in several parts
    x, y = two("float32", 2000)
    x[:20] -= 4000  # rows are sorted by clusters
    x[7, 3], x[9, 1], y[5, 5] = np.nan, np.nan, np.inf
    x = np.asfortranarray(x) if columns else x
    kept = np.setdiff1d(np.arange(len(x)), [7, 9])
    expected = exact(x, x, "euclidean")
    expected[np.isnan(expected)] = np.inf
    np.fill_diagonal(expected, np.inf)
    with running_on(engine) as options:
        found = oocgemm.neighbors(x, topk=3, tile="16x16x8", **options)
        other = oocgemm.neighbors(x, y=y, topk=3, tile="16x16x8", **options)
    order = np.argsort(expected, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(found.indices[kept], order[kept])
    finite = np.nan_to_num(exact(x, y, "euclidean"), nan=np.inf)
    np.testing.assert_allclose(other.distances[kept], np.sort(finite)[kept, :3], rtol=1e-6)


def test_equal_rows_zero_rows_and_nan() -> None:
    x = np.array([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0], [2.0, 4.0], [5.0, 1.0]], np.float32) + 0
    found = oocgemm.neighbors(x, radius=0, backend="host")
    assert found.indices.tolist() == [2, 0]
    assert found.indptr is not None
    assert found.indptr.tolist() == [0, 1, 1, 2, 2, 2]
    cosine = oocgemm.distances(x, metric="cosine", backend="host").out
    np.testing.assert_array_equal(cosine[1], np.ones(5))
    np.testing.assert_allclose(cosine[0, [2, 3]], 0, atol=1e-7)
    zero = oocgemm.neighbors(x, metric="cosine", topk=4, backend="host")
    np.testing.assert_array_equal(zero.distances[1], np.ones(4))
    assert zero.indices[1].tolist() == [0, 2, 3, 4]
    x[4] = np.nan
    last = oocgemm.neighbors(x, topk=4, backend="host")
    assert (last.indices[:4, -1] == 4).all()
    assert np.isnan(last.distances[:4, -1]).all()
    assert np.isfinite(last.distances[:4, :-1]).all()
    assert 4 not in oocgemm.neighbors(x, radius=1e6, backend="host").indices


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("int8", "float32"), ("uint8", "int16")])
def test_operands_may_have_two_dtypes(metric: str, dtypes: tuple[str, str]) -> None:
    x, y = (each.astype(dtype) for each, dtype in zip(two("float64"), dtypes, strict=True))
    how: Any = {"y": y, "metric": metric, "backend": "host"}
    expected, wide = exact(x, y, metric), "float64" in dtypes
    stored, best = oocgemm.distances(x, **how).out, oocgemm.neighbors(x, topk=3, **how).distances
    assert stored.dtype == best.dtype == ("float64" if wide else "float32")
    tolerance = 1e-11 if wide else 1e-6
    np.testing.assert_allclose(stored, expected, rtol=tolerance, atol=tolerance * expected.max())
    np.testing.assert_allclose(best, np.sort(expected)[:, :3], rtol=tolerance)


@pytest.mark.parametrize("options", [{"devices": "0,0"}, {"workers": 2, "memory": "400MiB"}])
def test_other_executors_find_the_same(options: Any, tmp_path: Path) -> None:
    x, y = two("float32")
    for name, array in (("x", x), ("y", y)):
        zarr.create_array(tmp_path / f"{name}.zarr", data=array, chunks=(8, 8))
    how: Any = {"y": tmp_path / "y.zarr", "tile": "8x8x8", "backend": "host", **options}
    check(oocgemm.neighbors(tmp_path / "x.zarr", topk=5, **how), exact(x, y, "euclidean"), 5)
    found = oocgemm.distances(tmp_path / "x.zarr", tmp_path / "d.zarr", **how)
    np.testing.assert_allclose(found.out[:], exact(x, y, "euclidean"), rtol=1e-6)


def test_an_interrupted_run_of_distances_is_resumed(tmp_path: Path) -> None:
    x, _ = two("float64")
    np.save(tmp_path / "x.npy", x)
    given: Any = {"tile": "8x8x8", "backend": "host"}
    written: list[str] = []

    def observe(span: Any) -> None:
        written.append(span.kind)
        if written.count("write") > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        oocgemm.distances(tmp_path / "x.npy", tmp_path / "d.zarr", progress=lambda plan: observe, **given)
    with pytest.raises(InputError, match="epilogue"):
        oocgemm.distances(tmp_path / "x.npy", tmp_path / "d.zarr", metric="sqeuclidean", resume=True, **given)
    found = oocgemm.distances(tmp_path / "x.npy", tmp_path / "d.zarr", resume=True, **given)
    assert 0 < len(found.plan.done) < found.plan.grid.count
    np.testing.assert_array_equal(found.out[:], oocgemm.distances(x, **given).out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pass either topk"),
        ({"topk": 2, "radius": 1.0}, "pass either topk"),
        ({"topk": 44}, "topk = 44, but a row of X can be compared with 43 rows"),
        ({"topk": 0}, "topk = 0"),
        ({"radius": -1.0}, "radius = -1.0"),
        ({"radius": float("nan")}, "radius = nan"),
        ({"topk": 2, "metric": "dot"}, "metric = 'dot'"),
        ({"topk": 2, "y": np.ones((5, 4))}, "a row of X has 19 elements and a row of Y has 4"),
        ({"topk": 6, "y": np.ones((5, 19))}, "topk = 6"),
        ({"topk": 2, "resume": True}, "neighbors does not take the option resume"),
    ],
)
def test_bad_input_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        oocgemm.neighbors(two("float64")[0], backend="host", **options)


def test_distances_that_overflow_and_complex_rows_are_refused(tmp_path: Path) -> None:
    for x, message in ((np.array([[1e200, 1], [-1e200, 2]]), "overflow"), (np.eye(2) + 1j, "complex128")):
        with pytest.raises(InputError, match=message):
            oocgemm.distances(x, tmp_path / "d.zarr", backend="host")
    assert not any(tmp_path.iterdir())


def test_commands_store_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = two("float64")
    zarr.create_array("x.zarr", data=x)
    np.save("y.npy", y)
    more = ("--backend", "host", "--quiet")
    for words in (
        ("neighbors", "x.zarr", "best.zarr", "--topk", "2", *more),
        ("neighbors", "x.zarr", "near.zarr", "--radius", "30", "--y", "y.npy", *more),
        ("distances", "x.zarr", "d.npy", "--y", "y.npy", "--metric", "sqeuclidean", *more),
    ):
        done = command(*words)
        assert done.code == 0, done.err
    expected = exact(x, y, "euclidean")
    best: Any = zarr.open_group("best.zarr", mode="r")
    own = exact(x, x, "euclidean")
    np.testing.assert_allclose(best["distances"][:], np.sort(own)[:, 1:3], rtol=1e-12)
    near: Any = zarr.open_group("near.zarr", mode="r")
    assert near["indptr"][-1] == len(near["indices"][:]) == (expected <= 30).sum() > 0
    np.testing.assert_allclose(np.load("d.npy"), expected**2, rtol=1e-12)
    refused = command("neighbors", "x.zarr", "best.zarr", "--topk", "2", *more)
    assert refused.code == 2
    assert "something exists at best.zarr" in refused.err
