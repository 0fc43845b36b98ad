"""Missing elements are replaced in every statistical verb by the means of variables, or by a number."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import DataWarning, InputError
from oocgemm.jobs import nearest
from tests.support.command import command as run
from tests.support.fake_cuda import fake_cuda
from tests.support.plink import genotypes, write_bed

Array = Any
NAN = float("nan")


def with_gaps(
    seed: int, shape: tuple[int, int], code: float = NAN, share: float = 0.2
) -> tuple[Array, Array]:
    """Return numbers with a code in some places, and these places."""
    rng = np.random.default_rng(seed)
    x, lost = rng.integers(-8, 9, shape).astype(float), rng.random(shape) < share
    x[x == code] = 0
    return np.where(lost, code, x), lost


def filled(x: Array, lost: Array, axis: int) -> Array:
    """Return X with means along an axis in place of missing elements."""
    known = np.where(lost, 0, x)
    mean = known.sum(axis=axis, keepdims=True) / np.maximum((~lost).sum(axis=axis, keepdims=True), 1)
    return np.where(lost, mean, x)


def cosines(x: Array) -> Array:
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    found = unit @ unit.T
    np.fill_diagonal(found, -np.inf)
    return np.sort(found, axis=1)[:, ::-1][:, :2]


def euclidean(x: Array) -> Array:
    return np.sqrt(((x[:, None] - x[None]) ** 2).sum(axis=2))


def singular_values(x: Array) -> Array:
    return np.linalg.svd(x - x.mean(axis=0), compute_uv=False)[:3]


# For each verb: the call, the result, its value for a complete matrix, and the axis along which means are.
VERBS: dict[str, tuple[Callable[..., Any], Callable[[Array], Array], int]] = {
    "corr": (lambda x, **how: oocgemm.corr(x, **how).out, np.corrcoef, 1),
    "corr of columns": (
        lambda x, **how: oocgemm.corr(x, axis=1, **how).out,
        lambda x: np.corrcoef(x, rowvar=False),
        0,
    ),
    "cov": (lambda x, **how: oocgemm.cov(x, **how).out, np.cov, 1),
    "cov of columns": (
        lambda x, **how: oocgemm.cov(x, axis=1, **how).out,
        lambda x: np.cov(x, rowvar=False),
        0,
    ),
    "similarity": (lambda x, **how: oocgemm.similarity(x, topk=2, **how).scores, cosines, 0),
    "neighbors": (
        lambda x, **how: oocgemm.neighbors(x, topk=2, **how).distances,
        lambda x: np.sort(euclidean(x))[:, 1:3],
        0,
    ),
    "distances": (lambda x, **how: oocgemm.distances(x, **how).out, euclidean, 0),
    "pca": (lambda x, **how: oocgemm.pca(x, 3, tol=1e-9, **how).singular_values, singular_values, 0),
    "ld_scores": (
        lambda x, **how: oocgemm.ld_scores(x, window=50, adjusted=False, **how).scores,
        lambda x: (np.corrcoef(x, rowvar=False) ** 2).sum(axis=1),
        0,
    ),
}


@pytest.mark.parametrize("backend", ["host", "device"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("impute", ["mean", 2.5])
def test_missing_elements_are_replaced_in_every_verb(verb: str, impute: Any, backend: str) -> None:
    call, expected, axis = VERBS[verb]
    for code, dtype in ((NAN, np.float64), (-99, np.float32), (-99, np.int16)):
        x, lost = with_gaps(3, (14, 9), code)
        complete = filled(x, lost, axis) if impute == "mean" else np.where(lost, impute, x)
        how: Any = {"missing": code, "impute": impute}
        if backend == "device":
            with fake_cuda():
                found = call(x.astype(dtype), backend="cuda", kernel="cublas", **how)
        else:
            found = call(x.astype(dtype), backend="host", **how)
        np.testing.assert_allclose(found, expected(complete), rtol=2e-5, atol=2e-5, err_msg=f"{code} {dtype}")


@given(
    st.integers(0, 99),
    st.tuples(st.integers(3, 9), st.integers(3, 9)),
    st.sampled_from([0.0, 0.3, 0.6]),
    st.integers(0, 1),
    st.booleans(),
)
@settings(max_examples=40)
def test_correlations_of_what_is_known_equal_numpys(
    seed: int, shape: tuple[int, int], share: float, axis: int, drop: bool
) -> None:
    x, lost = with_gaps(seed, shape, share=share)
    lines = filled(x, lost, 1 - axis)
    lines = lines.T if axis else lines
    varies = np.ptp(lines, axis=1) > 1e-12
    if drop and varies.sum() < 2:
        return
    constant = "drop" if drop else "nan"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = oocgemm.corr(x, axis=axis, impute="mean", constant=constant, backend="host")
    assert bool([w for w in warned if w.category is DataWarning]) == (not varies.all())
    with np.errstate(all="ignore"):
        expected = np.corrcoef(lines[varies] if drop else lines)
    if drop:
        np.testing.assert_array_equal(
            np.arange(len(lines)) if varies.all() else found.kept, np.flatnonzero(varies)
        )
    else:
        expected[~varies] = expected[:, ~varies] = np.nan
    np.testing.assert_allclose(found.out, expected, atol=1e-12)


def test_lines_without_any_known_element_are_left_out() -> None:
    x, _ = with_gaps(0, (6, 8))
    x[2], x[4] = NAN, 3.0
    with pytest.warns(DataWarning, match=r"2 of 6 rows of X have equal elements \(2, 4\)"):
        found = oocgemm.corr(x, missing=NAN, constant="drop", backend="host")
    assert found.kept is not None
    assert found.kept.tolist() == [0, 1, 3, 5]
    assert np.isfinite(found.out).all()
    with pytest.raises(InputError, match="row 2 of X has only missing elements"):
        oocgemm.cov(x, missing=NAN, backend="host")
    with pytest.raises(InputError, match="column 1 of X has only missing elements"):
        oocgemm.pca(np.where(np.arange(8) == 1, NAN, x[[0, 1, 3, 5]]), 1, missing=NAN, backend="host")


def test_the_code_is_what_the_operand_declares(tmp_path: Path) -> None:
    x, lost = with_gaps(1, (10, 7), -99)
    complete = filled(x, lost, 0)
    array = zarr.create_array(tmp_path / "x.zarr", data=x.astype("float32"))
    array.attrs["_FillValue"] = -99.0
    packed = zarr.create_array(tmp_path / "p.zarr", data=np.where(lost, -99, 2 * (x - 1)).astype("int16"))
    packed.attrs.update({"scale_factor": 0.5, "add_offset": 1.0, "missing_value": -99})
    double = zarr.create_array(tmp_path / "d.zarr", data=np.where(lost & (x < 0), -99, x).astype("float32"))
    double.attrs.update({"_FillValue": -99.0, "missing_value": -77.0})
    double[...] = np.where(lost & (np.arange(7) % 2 > 0), -77, double[...])
    for name in ("x", "p", "d"):
        path = str(tmp_path / f"{name}.zarr")
        for rows in (None, np.arange(10) != 3):
            operand = path if rows is None else oocgemm.keep(path, rows)
            some = slice(None) if rows is None else rows
            expected = np.corrcoef(filled(x[some], lost[some], 0), rowvar=False)
            found = oocgemm.corr(operand, axis=1, impute="mean", backend="host").out
            np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=name)
        found = oocgemm.distances(path, impute="mean", backend="host").out
        np.testing.assert_allclose(found, euclidean(complete), atol=1e-4)
        with pytest.raises(InputError, match="missing elements"):
            oocgemm.cov(path, str(tmp_path / "c.zarr"), impute="raise", backend="host")
        assert not (tmp_path / "c.zarr").exists()


def test_genotypes_take_the_means_of_variants_or_a_number(tmp_path: Path) -> None:
    x = genotypes(np.random.default_rng(0), 15, 9, missing=0.2)
    path, lost = str(write_bed(tmp_path / "x.bed", x)), x == -1
    default = oocgemm.corr(path, backend="host").out
    for how in ({"impute": "mean"}, {"missing": -1}, {"missing": -1, "impute": "mean"}):
        options: Any = how
        np.testing.assert_array_equal(oocgemm.corr(path, backend="host", **options).out, default)
    found = oocgemm.corr(path, impute=0, backend="host").out
    np.testing.assert_allclose(found, np.corrcoef(np.where(lost, 0, x)), atol=1e-5)
    with pytest.raises(InputError, match=f"X has {lost.sum()} missing elements"):
        oocgemm.corr(path, impute="raise", backend="host")
    values = oocgemm.pca(path, 2, impute=1, tol=1e-9, backend="host").singular_values
    np.testing.assert_allclose(values, singular_values(np.where(lost, 1, x))[:2], rtol=1e-5)


def test_pairs_leave_out_the_code() -> None:
    for dtype in (np.float32, np.int16):
        x, lost = with_gaps(4, (9, 12), -9)
        coded, plain = x.astype(dtype), np.where(lost, NAN, x).astype(np.float32)
        for verb in (oocgemm.corr, oocgemm.cov):
            found = verb(coded, pairwise=True, missing=-9, backend="host").out
            np.testing.assert_array_equal(found, verb(plain, pairwise=True, backend="host").out)
            with pytest.raises(InputError, match="pairwise leaves them out"):
                verb(coded, pairwise=True, missing=-9, impute=0, backend="host")


def test_steps_of_a_transform_follow() -> None:
    x, lost = with_gaps(2, (9, 6))
    x = np.abs(x)
    logs = np.log1p(x)
    weights = np.arange(1.0, 7.0)
    change = oocgemm.Transform(log1p=True, scale=weights)
    found = oocgemm.cov(x, missing=NAN, transform=change, backend="host").out
    np.testing.assert_allclose(found, np.cov(filled(logs, lost, 1) / weights), atol=1e-12)
    found = oocgemm.distances(x, missing=NAN, transform=change, backend="host").out
    np.testing.assert_allclose(found, euclidean(filled(logs, lost, 0) / weights), atol=1e-12)
    sums = np.nansum(x, axis=1, keepdims=True)
    counted = filled(x * (100 / sums), lost, 1)
    change = oocgemm.Transform(target_sum=100)
    found = oocgemm.cov(x, missing=NAN, transform=change, backend="host").out
    np.testing.assert_allclose(found, np.cov(counted), rtol=1e-9)


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(
    "change", [None, oocgemm.Transform(center="k", scale="k"), oocgemm.Transform(scale="k", log1p=True)]
)
def test_rows_that_are_searched_again_have_the_means_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, second: bool, change: oocgemm.Transform | None
) -> None:
    x, lost = with_gaps(7, (30, 6))
    x = np.abs(x).astype(np.float32)
    errors = nearest.Search._error
    unsure = 1e9 * (np.arange(30) < 2)  # only two rows are searched again
    monkeypatch.setattr(nearest.Search, "_error", lambda self, problem: errors(self, problem) + unsure)
    wide = x.astype(float)
    if change is not None and change.log1p:
        wide = np.log1p(wide)
    complete = filled(wide, lost, 0)
    if change is not None:
        complete = complete / wide.std(axis=0, where=~lost)
    far = euclidean(complete) + (0 if second else np.diag(np.full(30, np.inf)))
    more: Any = {"y": x} if second else {}
    found = oocgemm.neighbors(x, topk=3, missing=NAN, transform=change, backend="host", **more)
    np.testing.assert_allclose(found.distances, np.sort(far)[:, :3], atol=1e-5)


def test_integers_stay_exact_if_a_number_of_their_dtype_replaces() -> None:
    x = np.array([[1, -9, 3], [2, 5, -9], [-9, 7, 1]], np.int8)
    found = oocgemm.similarity(x, topk=2, metric="dot", missing=-9, impute=0, backend="host")
    complete = np.where(x == -9, 0, x).astype(int)
    products = complete @ complete.T
    np.fill_diagonal(products, -(10**6))
    np.testing.assert_array_equal(found.scores, np.sort(products)[:, :0:-1])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"impute": "median"}, "impute = 'median': pass 'mean', a number or 'raise'"),
        ({"missing": -1, "impute": NAN}, "impute = nan"),
        ({"missing": "x"}, "missing = 'x' is not a real number"),
        ({"missing": 300}, "missing = 300 cannot be an element of X, which has dtype int8"),
        ({"missing": NAN}, "missing = nan cannot be an element of X"),
        ({"missing": 3, "transform": oocgemm.Transform(missing=1)}, "the transform of X has missing = 1"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_written(tmp_path: Path, how: Any, message: str) -> None:
    x, out = np.ones((4, 3), np.int8), tmp_path / "c.zarr"
    for verb in (oocgemm.corr, oocgemm.cov, oocgemm.distances):
        with pytest.raises(InputError, match=message):
            verb(x, str(out), backend="host", **how)
    with pytest.raises(InputError, match=message):
        oocgemm.pca(x, 1, backend="host", **how)
    assert not list(tmp_path.iterdir())


def test_codes_are_compared_as_they_are() -> None:
    x = np.array([[0, 1], [-9, 1], [1, 1]], np.int8)
    for how in ({"missing": -9}, {"impute": 0}):
        options: Any = how
        for verb in (oocgemm.distances, lambda x, **more: oocgemm.neighbors(x, topk=1, **more)):
            with pytest.raises(InputError, match="compares codes"):
                verb(x, metric="hamming", **options)


def test_commands_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, lost = with_gaps(5, (8, 6), -9)
    np.save("x.npy", x)
    host = ("--backend", "host", "--quiet")
    done = run("cov", "x.npy", "c.npy", "--missing", "-9", "--impute", "1.5", *host)
    assert done.code == 0, done.err
    np.testing.assert_allclose(np.load("c.npy"), np.cov(np.where(lost, 1.5, x)), atol=1e-12)
    np.save("n.npy", np.where(lost, NAN, x))
    done = run("corr", "n.npy", "top.zarr", "--impute", "mean", "--topk", "3", *host)
    assert done.code == 0, done.err
    done = run("pca", "n.npy", "p.zarr", "--components", "2", "--missing", "nan", *host)
    assert done.code == 0, done.err
    done = run("cov", "n.npy", "d.npy", "--impute", "often", *host)
    assert (done.code, "pass 'mean', a number or 'raise'" in done.err) == (2, True)
