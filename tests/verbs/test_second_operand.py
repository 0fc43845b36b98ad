"""`corr`, `cov` and `similarity` of the rows of two operands agree with NumPy on every executor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.errors import InputError
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.plink import genotypes, write_bed

Array = Any
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "int8": 1e-5}


def two(dtype: str) -> tuple[Array, Array]:
    """Return matrices of 40 and 27 rows, whose means are far larger than their deviations."""
    rng = np.random.default_rng(3)
    return tuple((rng.standard_normal((rows, 19)) * 8 + 90).astype(dtype) for rows in (40, 27))  # type: ignore[return-value]


def coefficients(x: Array, y: Array, function: Any = np.corrcoef) -> Array:
    """Return the block of a NumPy matrix of all rows that has rows of x and columns of y."""
    return function(np.vstack([x, y]).astype(float))[: len(x), len(x) :]


def cosines(x: Array, y: Array) -> Array:
    x, y = (each.astype(float) / np.linalg.norm(each.astype(float), axis=1)[:, None] for each in (x, y))
    return x @ y.T


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_stored_results_agree_with_numpy(engine: Engine, axis: int, dtype: str) -> None:
    x, y = two(dtype)
    given = [each.T.copy() if axis else each for each in (x, y)]
    with running_on(engine) as options:
        how: Any = {"y": given[1], "axis": axis, "tile": "16x16x8", **options}
        found = [oocgemm.corr(given[0], **how).out, oocgemm.cov(given[0], **how).out]
    for result, function, scale in zip(found, (np.corrcoef, np.cov), (1, 100), strict=True):
        tolerance = TOLERANCE[dtype] * scale
        np.testing.assert_allclose(result, coefficients(x, y, function), rtol=0, atol=tolerance)


@pytest.mark.parametrize("engine", ENGINES)
def test_selected_elements_agree_with_numpy(engine: Engine) -> None:
    x, y = two("float32")
    for verb, expected in ((oocgemm.corr, coefficients(x, y)), (oocgemm.similarity, cosines(x, y))):
        least = float(np.quantile(np.abs(expected), 0.8))
        with running_on(engine) as options:
            how: Any = {"y": y, "tile": "16x16x8", "verify": True, **options}
            best, pairs = verb(x, topk=4, **how), verb(x, threshold=least, **how)
        np.testing.assert_allclose(best.scores, np.sort(expected)[:, :-5:-1], rtol=0, atol=1e-6)
        np.testing.assert_allclose(np.take_along_axis(expected, best.indices, 1), best.scores, atol=1e-6)
        near = np.abs(np.abs(expected) - least) < 1e-6
        dense = np.zeros(expected.shape, bool)
        dense[pairs.rows, pairs.indices] = True
        wanted = np.abs(expected) >= least
        assert ((dense == wanted) | near).all()
        assert dense.any()
        np.testing.assert_allclose(pairs.scores, expected[pairs.rows, pairs.indices], rtol=0, atol=1e-6)


def test_inner_products_of_integers_are_exact() -> None:
    x, y = (
        np.random.default_rng(n).integers(-9, 9, (rows, 21)).astype(np.int8) for n, rows in enumerate((9, 14))
    )
    found = oocgemm.similarity(x, y=y, topk=14, metric="dot", tile="4x4x8", backend="host")
    np.testing.assert_array_equal(found.scores, -np.sort(-(x.astype(int) @ y.T.astype(int))))
    equal = oocgemm.similarity(x, y=x, threshold=1.0, backend="host")
    np.testing.assert_array_equal(equal.indices, np.arange(9))


@pytest.mark.parametrize("options", [{"devices": "0,0"}, {"workers": 2, "memory": "400MiB"}])
def test_other_executors_compute_the_same(options: Any, tmp_path: Path) -> None:
    x, y = two("float64")
    for name, array in (("x", x), ("y", y)):
        zarr.create_array(tmp_path / f"{name}.zarr", data=array, chunks=(8, 8))
    given: Any = {"y": tmp_path / "y.zarr", "tile": "8x8x8", "backend": "host", "verify": True, **options}
    for verb, function in ((oocgemm.corr, np.corrcoef), (oocgemm.cov, np.cov)):
        found = verb(tmp_path / "x.zarr", tmp_path / f"{verb.__name__}.zarr", **given)
        np.testing.assert_allclose(found.out[:], coefficients(x, y, function), rtol=1e-11, atol=1e-11)
    found = oocgemm.similarity(tmp_path / "x.zarr", topk=3, **given)
    np.testing.assert_allclose(found.scores, np.sort(cosines(x, y))[:, :-4:-1], rtol=1e-12)


def test_an_interrupted_run_resumes_with_the_same_operands_only(tmp_path: Path) -> None:
    x, y = two("float64")
    for name, array in (("x", x), ("y", y), ("other", y + np.eye(27, 19))):
        np.save(tmp_path / f"{name}.npy", array)
    first, out = tmp_path / "x.npy", tmp_path / "r.zarr"
    given: Any = {"y": tmp_path / "y.npy", "tile": "8x8x8", "backend": "host"}
    written: list[str] = []

    def observe(span: Any) -> None:
        written.append(span.kind)
        if written.count("write") > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        oocgemm.corr(first, out, progress=lambda plan: observe, **given)
    with pytest.raises(InputError, match="transform of B"):
        oocgemm.corr(first, out, resume=True, **given | {"y": tmp_path / "other.npy"})
    found = oocgemm.corr(first, out, resume=True, **given)
    assert 0 < len(found.plan.done) < found.plan.grid.count
    np.testing.assert_allclose(found.out[:], coefficients(x, y), rtol=0, atol=1e-13)


def test_missing_genotypes_of_both_operands_are_replaced_by_means(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    found: list[Array] = []
    for name in "xy":
        stored = genotypes(rng, 30, 25)
        write_bed(tmp_path / f"{name}.bed", stored)
        wide = stored.astype(float)
        wide[stored < 0] = np.nan
        assert (stored < 0).any()
        found.append(np.where(np.isnan(wide), np.nanmean(wide, axis=0), wide))
    r = oocgemm.corr(tmp_path / "x.bed", y=tmp_path / "y.bed", backend="host").out
    np.testing.assert_allclose(r, coefficients(found[0], found[1]), rtol=0, atol=1e-5)


def test_rows_of_equal_elements_have_no_coefficients() -> None:
    x, y = two("float64")
    y[4] = 7
    with pytest.warns(oocgemm.DataWarning, match=r"1 of 27 rows of Y has equal elements \(4\)"):
        found = oocgemm.corr(x, y=y, backend="host").out
    assert np.isnan(found[:, 4]).all()
    assert np.isnan(found).sum() == 40
    with pytest.raises(InputError, match="1 of 27 rows of Y"):
        oocgemm.corr(x, y=y, constant="raise", backend="host")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"y": np.ones((3, 4))}, "a row of X has 19 elements and a row of Y has 4"),
        ({"y": np.ones((27, 19)), "axis": 1}, "a column of X has 40 elements and a column of Y has 27"),
        ({"y": np.ones((3, 19)), "axis": 2}, "axis = 2"),
        ({"y": np.ones((3, 19)), "constant": "drop"}, "constant = 'drop'"),
        ({"y": np.ones((3, 19)), "topk": 4}, "topk = 4"),
        ({"y": "missing.zarr"}, "missing.zarr"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(options: Any, message: str, tmp_path: Path) -> None:
    given: Any = options | ({} if "topk" in options else {"out": tmp_path / "r.zarr"})
    with pytest.raises(InputError, match=message):
        oocgemm.corr(two("float64")[0], backend="host", **given)
    assert not any(tmp_path.iterdir())


def test_commands_take_a_second_operand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = two("float64")
    zarr.create_array("x.zarr", data=x)
    np.save("y.npy", y)
    more = ("--y", "y.npy", "--backend", "host", "--quiet")
    for words in (
        ("corr", "x.zarr", "r.npy", *more),
        ("cov", "x.zarr", "v.npy", *more),
        ("corr", "x.zarr", "best.zarr", "--topk", "2", *more),
        ("similarity", "x.zarr", "pairs.zarr", "--threshold", "0.9", *more),
    ):
        done = command(*words)
        assert done.code == 0, done.err
    np.testing.assert_allclose(np.load("r.npy"), coefficients(x, y), rtol=0, atol=1e-13)
    np.testing.assert_allclose(np.load("v.npy"), coefficients(x, y, np.cov), rtol=1e-10)
    best: Any = zarr.open_group("best.zarr", mode="r")
    np.testing.assert_allclose(best["scores"][:], np.sort(coefficients(x, y))[:, :-3:-1], atol=1e-13)
    pairs: Any = zarr.open_group("pairs.zarr", mode="r")
    assert len(pairs["indices"][:]) == (cosines(x, y) >= 0.9).sum()
