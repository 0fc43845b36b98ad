"""`corr` and `cov` with `pairwise` are what pandas computes of columns that both rows of a pair know."""

from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import CombinationError, InputError
from oocgemm.planning import GemmProblem
from oocgemm.planning.cost.footprint import payload_bytes
from oocgemm.planning.terms import ONE, Terms
from oocgemm.planning.tiling import TileShape
from oocgemm.verbs.pairwise import moments
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.fake_cuda import fake_cuda
from tests.support.plink import genotypes, write_bed
from tests.support.products import product_of
from tests.support.suite import each_value, examples
from tests.support.unfinished_runs import failing_after

Array = NDArray[Any]
TILE = "16x16x20"


def pandas_of(x: Array, y: Array, *, cov: bool = False, ddof: int = 1) -> Array:
    """Return what `DataFrame.corr` or `DataFrame.cov` (`nancorr` in pandas) computes of each pair of rows."""
    found = np.full((len(x), len(y)), np.nan)
    for i, a in enumerate(x):
        for j, b in enumerate(y):
            both = ~(np.isnan(a) | np.isnan(b))
            if both.sum() > (ddof if cov else 0):
                u, v = a[both] - a[both].mean(), b[both] - b[both].mean()
                divisor = both.sum() - ddof if cov else np.sqrt((u @ u) * (v @ v))
                if np.ptp(a[both]) * np.ptp(b[both]) or cov:
                    found[i, j] = u @ v / divisor
    return found


def sample(rows: int, columns: int, seed: int = 0, offset: float = 100.0) -> Array:
    """Return a matrix with NaN, rows of NaN only, and of one known element, whose means are large."""
    rng = np.random.default_rng(seed)
    x: Array = rng.standard_normal((rows, columns)) + offset
    x[rng.random(x.shape) < 0.3] = np.nan
    x[1], x[2, 1:], x[3, : columns // 2] = np.nan, np.nan, 7.25
    x[4] = np.where(np.isnan(x[5]), 1.0, np.nan)  # has no column in common with row 5
    return x


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_results_are_those_of_pandas(engine: Engine, axis: int, dtype: str) -> None:
    x, y = (sample(rows, 90, rows).astype(dtype) for rows in (37, 21))
    a, b = (each.T.copy() if axis else each for each in (x, y))
    wide, other = x.astype(float), y.astype(float)
    tolerance = 1e-12 if dtype == "float64" else 1e-7
    for tile in (None, TILE):
        with running_on(engine) as options:
            how: Any = {"pairwise": True, "axis": axis, "tile": tile, **options}
            found = oocgemm.corr(a, **how).out, oocgemm.cov(a, ddof=0, **how).out
            between = oocgemm.corr(a, y=b, **how).out, oocgemm.cov(a, y=b, **how).out
        assert found[0].dtype == dtype
        for c, right in (
            (found[0], pandas_of(wide, wide)),
            (found[1], pandas_of(wide, wide, cov=True, ddof=0)),
            (between[0], pandas_of(wide, other)),
            (between[1], pandas_of(wide, other, cov=True)),
        ):
            np.testing.assert_allclose(c, right, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(found[0], found[0].T)


@pytest.mark.parametrize("engine", ENGINES)
def test_genotypes_of_bed_files_are_counted_exactly(engine: Engine, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = (genotypes(rng, people, 61, 0.2) for people in (33, 18))
    paths = [write_bed(tmp_path / f"{i}.bed", each) for i, each in enumerate((x, y))]
    wide = [np.where(each < 0, nan, each) for each in (x, y)]
    for tile in (None, TILE):
        with running_on(engine) as options:
            how: Any = {"pairwise": True, "tile": tile, **options}
            of_people = oocgemm.corr(paths[0], **how)
            of_variants = oocgemm.corr(paths[0], axis=1, **how).out
            both = oocgemm.cov(paths[0], y=paths[1], **how).out
        assert of_people.plan.problem.terms.largest == 4
        np.testing.assert_allclose(of_people.out, pandas_of(wide[0], wide[0]), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(of_variants, pandas_of(wide[0].T, wide[0].T), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(both, pandas_of(*wide, cov=True), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("engine", ENGINES)
def test_declared_codes_are_missing(engine: Engine, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    packed = rng.integers(-50, 50, (30, 40)).astype(np.int16)
    packed[rng.random(packed.shape) < 0.2] = -99
    x = zarr.create_array(tmp_path / "x.zarr", data=packed, chunks=(30, 20))
    x.attrs.update({"_FillValue": -99, "scale_factor": 0.5, "add_offset": 3.0})
    plain = zarr.create_array(tmp_path / "plain.zarr", data=packed, chunks=(30, 20))
    plain.attrs.update({"missing_value": -99})
    wide = np.where(packed == -99, nan, packed)
    with running_on(engine) as options:
        how: Any = {"pairwise": True, "tile": TILE, **options}
        found = oocgemm.corr(tmp_path / "x.zarr", **how).out, oocgemm.cov(tmp_path / "x.zarr", **how).out
        unscaled = oocgemm.cov(tmp_path / "plain.zarr", **how).out
    np.testing.assert_allclose(found[0], pandas_of(wide, wide), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found[1], pandas_of(wide, wide, cov=True) / 4, rtol=1e-6)
    np.testing.assert_allclose(unscaled, pandas_of(wide, wide, cov=True), rtol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_pairs_and_neighbors_are_selected(engine: Engine, tmp_path: Path) -> None:
    x = sample(37, 30, 3)
    bed = write_bed(tmp_path / "x.bed", genotypes(np.random.default_rng(4), 37, 30, 0.2))
    known = np.asarray(oocgemm.corr(bed, pairwise=True, backend="host"))
    for given_x, right in ((x, pandas_of(x, x)), (bed, known)):
        np.fill_diagonal(right, nan)
        with running_on(engine) as options:
            how: Any = {"pairwise": True, "tile": TILE, **options}
            pairs, best = oocgemm.corr(given_x, threshold=0.3, **how), oocgemm.corr(given_x, topk=3, **how)
            between = oocgemm.corr(given_x, y=given_x, topk=1, **how)
        rows, columns = np.nonzero(np.abs(np.nan_to_num(right)) >= 0.3)
        np.testing.assert_array_equal(pairs.rows, rows)
        np.testing.assert_array_equal(pairs.indices, columns)
        np.testing.assert_allclose(pairs.scores, right[rows, columns], rtol=1e-6)
        ranked = -np.sort(-np.where(np.isnan(right), -np.inf, right))[:, :3]
        scores = np.where(np.isnan(best.scores), -np.inf, best.scores)
        np.testing.assert_allclose(scores, ranked, rtol=1e-6)
        assert ((between.scores > 0.999) | np.isnan(between.scores)).all()


def test_constant_rows_in_common_have_no_correlation() -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((12, 4000)) * 1e-3 + 1 / 3
    x[:6, :3000] = 0.1  # equal where rows 6 to 11 are known
    x[6:, 3000:] = nan
    found = oocgemm.corr(x, pairwise=True, backend="host").out
    assert np.isnan(found[:6, 6:]).all()
    assert not np.isnan(found[6:, 6:]).any()
    assert not np.isnan(found[:6, :6]).any()


@settings(max_examples=examples(40, quick=10), deadline=None)
@given(
    seed=st.integers(0, 999),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 30)),
    tile=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 9)),
    same=st.booleans(),
    axis=st.integers(0, 1),
)
def test_all_tiles_give_the_bits_of_one_tile(
    seed: int, shape: tuple[int, int, int], tile: tuple[int, int, int], same: bool, axis: int
) -> None:
    """Sums of small integers are exact, so that every order of tiles, steps and streams gives equal bits."""
    rng = np.random.default_rng(seed)
    m, n, k = shape
    x, y = (rng.integers(0, 3, (rows, k)).astype(float) - 1 for rows in (m, n))
    for each in (x, y):
        each[rng.random(each.shape) < 0.2] = nan
        # The mean of what is known of each row becomes 0, so that nothing is rounded.
        pairs = np.concatenate([each, -each], axis=1)
        x, y = (pairs, y) if each is x else (x, pairs)
    x, y = (each.T.copy() if axis else each for each in (x, y))
    how: Any = {"axis": axis, "pairwise": True} | ({} if same else {"y": y})
    right = oocgemm.corr(x, backend="host", **how).out
    height, width, depth = tile
    how["tile"] = f"{height}x{height if same else width}x{depth}"
    np.testing.assert_array_equal(oocgemm.corr(x, backend="host", **how).out, right)
    with fake_cuda(seed) as device:
        np.testing.assert_array_equal(oocgemm.corr(x, backend="cuda", kernel="cublas", **how).out, right)
        device.check()


@pytest.mark.parametrize("engine", [("host", "auto"), ("fake-cuda", "cublas")])
def test_several_devices_give_equal_bits(engine: Engine) -> None:
    x = sample(70, 50, 6)
    with running_on(engine) as options:
        how: Any = {"pairwise": True, "tile": TILE, **options}
        call: Any = partial(oocgemm.corr, x, **how)
        one, two = (call(**more).out for more in ({}, {"devices": [0, 0]}))
        pairs = [call(threshold=0.2, **more).scores for more in ({}, {"devices": [0, 0]})]
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(*pairs)


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    x = sample(60, 50, 7)
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(20, 50))
    call: Any = partial(oocgemm.corr, tmp_path / "x.zarr", tmp_path / "c.zarr", backend="host", tile=TILE)
    with failing_after(3), pytest.raises(oocgemm.ExecutionError):
        call(pairwise=True)
    with pytest.raises(InputError, match="epilogue"):
        oocgemm.cov(
            tmp_path / "x.zarr", tmp_path / "c.zarr", pairwise=True, resume=True, backend="host", tile=TILE
        )
    found = call(pairwise=True, resume=True)
    assert found.plan.done
    np.testing.assert_array_equal(found.out[:], oocgemm.corr(x, pairwise=True, backend="host", tile=TILE).out)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("constant = 'drop' is about whole rows", {"constant": "drop"}),
        ("transform replaces missing elements", {"transform": oocgemm.Transform(missing=nan)}),
        ("row 0 of X has elements that are Inf", {}),
        ("computes one product, and the result is made of several", {"compute": "emulated"}),
    ],
)
def test_bad_input_is_refused(message: str, options: Any) -> None:
    x = sample(6, 9)
    x[0, 0] = np.inf
    with pytest.raises(InputError, match=message):
        oocgemm.corr(x, pairwise=True, backend="host", **options)


def test_verify_is_a_hole(tmp_path: Path) -> None:
    with pytest.raises(CombinationError, match="verify checks one product"):
        oocgemm.corr(sample(6, 9), tmp_path / "c.zarr", pairwise=True, verify=True, backend="host")
    assert not (tmp_path / "c.zarr").exists()


def test_commands_leave_missing_elements_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = sample(20, 30)
    np.save("x.npy", x)
    given = "--pairwise", "--backend", "host", "--quiet"
    for verb, right in (("corr", pandas_of(x, x)), ("cov", pandas_of(x, x, cov=True))):
        assert command(verb, "x.npy", f"{verb}.npy", *given).code == 0
        np.testing.assert_allclose(np.load(f"{verb}.npy"), right, rtol=1e-12, atol=1e-12)
    assert command("corr", "x.npy", "pairs.zarr", "--threshold", "0.3", *given).code == 0
    group: Any = zarr.open_group("pairs.zarr")
    np.testing.assert_array_equal(
        group["scores"][:], oocgemm.corr(x, pairwise=True, threshold=0.3, backend="host").scores
    )


def test_transformed_elements_stay_missing() -> None:
    x = np.abs(sample(20, 40, 8))
    found = oocgemm.corr(x, pairwise=True, transform=oocgemm.Transform(log1p=True), backend="host").out
    np.testing.assert_allclose(found, pandas_of(np.log1p(x), np.log1p(x)), rtol=1e-9, atol=1e-12)


def _problem(terms: Terms) -> GemmProblem:
    found = product_of(40, 30, 20, "float64", "float64", "float64", "float64")
    return GemmProblem.recorded(found.record() | terms.record())


def test_records_of_terms_are_read_again() -> None:
    for code in (nan, -1.0):
        terms = moments(code, squares=True)
        problem = _problem(terms)
        assert problem.terms == terms
        assert GemmProblem.recorded(problem.record()) == problem
        assert isnan(terms.a[0][0].constants[0]) == isnan(code)
    assert "terms" not in _problem(ONE).record()


def test_accumulators_and_maps_are_in_the_footprint_and_products_in_the_clock() -> None:
    one, several = _problem(ONE), _problem(moments(nan, squares=True))
    tile = TileShape(16, 16, 8)
    plain, wide = payload_bytes(one, tile, 8), payload_bytes(several, tile, 8)
    assert wide["device", "C"] == 6 * plain["device", "C"] == 6 * 16 * 16 * 8
    assert wide["device", "P"] == 6 * 16 * 8 * 8
    assert plain["device", "P"] == 0
    assert (wide["device", "A"], wide["host", "C"]) == (plain["device", "A"], plain["host", "C"])
    assert several.flops == 6 * one.flops
