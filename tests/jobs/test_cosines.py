"""Cosines and correlations are in [-1, 1], exact at thresholds, and defined where rows do not vary."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import oocgemm
from oocgemm import Correlation, Threshold, TopK
from oocgemm.backends.base import numpy_dtype
from oocgemm.errors import DataWarning, InputError
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.suite import slow

Array = NDArray[Any]
TILES = (None, "40x40x9", "17x17x33")
DTYPES = ["float32", *slow(("float64",), ("float16",), ("bfloat16",), ("int8",))]


def copied(dtype: str, rows: int = 90, depth: int = 33) -> tuple[Array, Array]:
    """Draw rows of which many are copies, or negated copies, of others; and which original each copies."""
    rng = np.random.default_rng(0)
    of = rng.integers(rows // 6, size=rows)
    signs = rng.choice([-1, 1], rows)
    x = (rng.standard_normal((rows // 6, depth)) * 30 + 20)[of] * signs[:, None]
    return x.astype(numpy_dtype(dtype)), (of + 1) * signs


def pairs_of(same: Array) -> int:
    return int((same[:, None] == same).sum()) - len(same)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_equal_rows_have_a_cosine_and_a_correlation_of_1(engine: Engine, dtype: str) -> None:
    e, same = copied(dtype)
    for tile in TILES if dtype == "float32" else TILES[:1]:
        with running_on(engine) as options:
            given: Any = {"tile": tile, "verify": tile is None, **options}
            by_reduce = oocgemm.reduce(
                *(e, np.ascontiguousarray(e[::-1].T)),
                to=Threshold(1.0),
                epilogue=[Correlation()],
                **given,
            )
            found = oocgemm.similarity(e, threshold=1.0, **given), oocgemm.corr(e, threshold=1.0, **given)
            best = oocgemm.similarity(e, topk=20, **given), oocgemm.corr(e, topk=20, **given)
            dense = oocgemm.corr(e, **given).out, oocgemm.gemm(e, e, trans_b="T", epilogue=[Correlation()])
        assert len(found[0].indices) == pairs_of(same)
        np.testing.assert_array_equal(same[found[0].rows], same[found[0].indices])
        assert len(found[1].indices) == pairs_of(np.abs(same))  # magnitudes count
        assert len(by_reduce.indices) == pairs_of(same) + len(e)
        for scores in (found[0].scores, np.abs(found[1].scores), by_reduce.scores):
            assert (scores == 1).all()
        for result in (*(each.scores for each in best), *map(np.asarray, dense)):
            assert np.abs(result.astype(float)).max() <= 1


@pytest.mark.parametrize("engine", ENGINES)
def test_pairs_at_a_threshold_are_compared_exactly(engine: Engine) -> None:
    e = np.random.default_rng(2).standard_normal((20, 65)).astype(np.float32)
    wide = e.astype(np.float64)
    centered = wide - wide.mean(1, keepdims=True)
    for x, correlates in ((wide, False), (centered, True)):
        squares = np.square(x).sum(1)
        exact = x @ x.T / np.sqrt(squares[:, None] * squares)
        for i, j in ((3, 7), (11, 2)):
            for change in (-1e-14, 1e-14):
                least = abs(exact[i, j]) + change
                wanted = (np.abs(exact) if correlates else exact) >= least
                np.fill_diagonal(wanted, False)
                with running_on(engine) as options:
                    if correlates:
                        found = oocgemm.corr(e, threshold=least, **options)
                    else:
                        found = oocgemm.similarity(e, threshold=least, **options)
                        to, steps = Threshold(least, exclude_self=True), [Correlation()]
                        other = oocgemm.reduce(e, e.T.copy(), to=to, epilogue=steps, **options)
                        np.testing.assert_array_equal(found.indices, other.indices)
                np.testing.assert_array_equal(found.rows, np.nonzero(wanted)[0])
                np.testing.assert_array_equal(found.indices, np.nonzero(wanted)[1])
    whole = np.array([[1.0, 0.0], [3.0, 4.0], [4.0, 3.0], [6.0, 8.0]], np.float32)
    with running_on(engine) as options:
        assert oocgemm.similarity(whole, threshold=0.6, **options).rows.tolist().count(0) == 3
        assert oocgemm.similarity(whole, threshold=0.8, **options).rows.tolist().count(0) == 1


def test_pairs_near_a_threshold_are_computed_again_in_blocks_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oocgemm.jobs.pairs.DEPTH", 8)
    monkeypatch.setattr("oocgemm.jobs.pairs.PRODUCTS", 50)
    monkeypatch.setattr("oocgemm.jobs.verify.memory_of", lambda request: 4 * 16 * 8 * 11)
    e, same = copied("float32")
    zarr.create_array(tmp_path / "e.zarr", data=e, chunks=(13, 7))
    found = oocgemm.similarity(tmp_path / "e.zarr", threshold=1.0, backend="host", exclude_self=False)
    assert len(found.indices) == pairs_of(same) + len(e)
    np.testing.assert_array_equal(same[found.rows], same[found.indices])
    turned = oocgemm.corr(np.asfortranarray(e.T), axis=1, threshold=1.0, backend="host")
    assert len(turned.indices) == pairs_of(np.abs(same))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_row_has_the_cosine_0(engine: Engine, dtype: str) -> None:
    rng = np.random.default_rng(1)
    e = rng.integers(1, 9, (30, 7)).astype(numpy_dtype(dtype))
    e[[4, 20]] = 0
    with running_on(engine) as options:
        given: Any = {"tile": "8x8x3", "verify": True, **options}
        best = oocgemm.similarity(e, topk=29, **given)
        pairs = oocgemm.similarity(e, threshold=0.0, **given)
        steps = {"epilogue": [Correlation()], **given}
        by_reduce = oocgemm.reduce(e, e.T.copy(), to=TopK(30), **steps)
        dense = np.asarray(oocgemm.gemm(e, e, trans_b="T", **steps).out).astype(float)
    assert (best.scores[[4, 20]] == 0).all()
    assert (best.scores[0, -2:] == 0).all()
    assert len(pairs.indices) == 30 * 29
    assert (by_reduce.scores[4] == 0).all()
    assert (dense[20] == 0).all()
    assert (dense[:, 20] == 0).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("axis", "dtype"),
    [
        (0, "float32"),
        *slow((1, "float32"), (1, "float64"), (0, "float16"), (1, "int8"), (0, "int8"), (0, "int32")),
    ],
)
def test_correlations_of_constant_rows_are_those_of_numpy(engine: Engine, axis: int, dtype: str) -> None:
    x = (np.random.default_rng(0).standard_normal((40, 12)) * 20).astype(dtype)
    x[3], x[17] = 7, 0
    kept = np.setdiff1d(np.arange(40), [3, 17])
    with np.errstate(all="ignore"):
        expected = np.corrcoef(x.astype(float))
    given: Any = {"axis": axis, "tile": "11x11x5", "verify": True}
    x = x if axis == 0 else np.ascontiguousarray(x.T)
    line = "column" if axis else "row"
    with running_on(engine) as options:
        given |= options
        with pytest.warns(DataWarning, match=rf"^2 of 40 {line}s of X have equal elements \(3, 17\)") as seen:
            dense = oocgemm.corr(x, **given)
        assert len(seen) == 1
        assert seen[0].filename == __file__
        with pytest.warns(DataWarning, match="2 of 40"):
            best = oocgemm.corr(x, topk=39, **given)
        with pytest.warns(DataWarning, match="2 of 40"):
            pairs = oocgemm.corr(x, threshold=0.2, **given)
        with pytest.warns(DataWarning, match="left out"):
            dropped = oocgemm.corr(x, constant="drop", **given)
        with pytest.warns(DataWarning, match="left out"):
            nearest = oocgemm.corr(x, constant="drop", topk=37, **given)
        for more in ({}, {"topk": 2}, {"threshold": 0.1}):
            with pytest.raises(InputError, match=r"2 of 40 .*\(3, 17\).*pass constant='drop'"):
                oocgemm.corr(x, constant="raise", **more, **given)
    np.testing.assert_allclose(dense.out, expected, rtol=0, atol=1e-5)
    assert np.isnan(best.scores[3]).all()
    assert np.isnan(best.scores[0, -2:]).all()
    assert best.indices[0, -2:].tolist() == [3, 17]
    np.fill_diagonal(expected, 0)
    assert len(pairs.indices) == np.count_nonzero(np.abs(expected) >= 0.2)
    assert dense.kept is None
    for result in (dropped, nearest.run):
        np.testing.assert_array_equal(result.kept, kept)
    np.fill_diagonal(expected, 1)
    np.testing.assert_allclose(dropped.out, expected[np.ix_(kept, kept)], rtol=0, atol=1e-5)
    assert nearest.indices.max() == 37


def test_a_row_of_tiny_differences_is_not_constant() -> None:
    x = np.random.default_rng(0).standard_normal((5, 9))
    np.testing.assert_allclose(oocgemm.corr(x * 2.0**-400, backend="host").out, np.corrcoef(x), atol=1e-12)
    with pytest.raises(InputError, match=r"differ by too little for float64: multiply X by 2\.0\*\*400"):
        oocgemm.corr(x * 2.0**-600, backend="host")


def test_a_row_of_tiny_elements_is_not_zero() -> None:
    e = np.random.default_rng(0).standard_normal((5, 9)) + 3
    e[2] *= 2.0**-400
    assert oocgemm.similarity(e, topk=4, backend="host").scores.min() > 0
    e[2] *= 2.0**-200
    with pytest.raises(InputError, match=r"row 2 of E .* too small to be squared .* 2\.0\*\*400"):
        oocgemm.similarity(e, topk=4, backend="host")
    assert oocgemm.similarity(e * 2.0**400, topk=4, backend="host").scores.min() > 0


def test_no_row_is_left() -> None:
    with pytest.raises(InputError, match="all rows of X have equal elements"):
        oocgemm.corr(np.ones((3, 4)), constant="drop", backend="host")
    with pytest.raises(InputError, match="constant = 'ignore': choose one of nan, drop, raise"):
        oocgemm.corr(np.eye(3), constant="ignore", backend="host")


def test_commands_print_one_line_about_constant_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).standard_normal((20, 6))
    x[[2, 9]] = 1
    zarr.create_array("x.zarr", data=x, chunks=(7, 6))
    done = command("corr", "x.zarr", "r.npy", "--backend", "host", "--quiet")
    assert done.code == 0
    assert done.err.startswith("Warning: 2 of 20 rows of X have equal elements (2, 9): ")
    assert done.err.count("\n") == 1
    assert np.isnan(np.load("r.npy")[2]).all()
    done = command("corr", "x.zarr", "s.zarr", "--topk", "3", "--constant", "drop", "--backend", "host")
    assert done.err.count("Warning: 2 of 20 rows") == 1
    kept = zarr.open_array("s.zarr/kept", mode="r")[:]
    np.testing.assert_array_equal(kept, np.setdiff1d(np.arange(20), [2, 9]))
    done = command("corr", "x.zarr", "t.npy", "--constant", "raise", "--backend", "host")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert not Path("t.npy").exists()


def test_dropped_rows_of_a_stored_result_resume(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((60, 20)).astype(np.float32)
    x[::7] = 5
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(16, 20))
    given: Any = {"backend": "host", "constant": "drop"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        oocgemm.corr(tmp_path / "x.zarr", tmp_path / "r.zarr", **given)
        found = oocgemm.corr(tmp_path / "x.zarr", tmp_path / "r.zarr", resume=True, **given)
    assert not found.plan.steps
    np.testing.assert_allclose(found.out[:], np.corrcoef(x[found.kept].astype(float)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5), (0, 0)])
def test_no_rows_have_no_correlations(shape: tuple[int, int]) -> None:
    assert np.asarray(oocgemm.corr(np.ones(shape), backend="host")).shape == (0, 0)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_without_elements_are_refused(axis: int) -> None:
    x = np.ones((5, 0) if axis == 0 else (0, 5))
    with pytest.raises(oocgemm.InputError, match="have no elements"):
        oocgemm.corr(x, axis=axis, backend="host")
