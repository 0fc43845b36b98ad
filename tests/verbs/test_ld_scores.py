"""LD scores: sums of squared correlations of near variants, equal to NumPy's on every executor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from tests.support.command import command
from tests.support.fake_cuda import fake_cuda
from tests.support.suite import examples

RNG = np.random.default_rng(4)
GENOTYPES = RNG.integers(0, 3, (40, 90)).astype(np.int8)
Array = Any


def expected(x: Array, window: int, *, adjusted: bool = False) -> Array:
    """Sum the squares over the rows of the whole matrix of correlations of columns."""
    r = np.corrcoef(x.T).reshape(x.shape[1], x.shape[1])
    squares = r**2 - adjusted * (1 - r**2) / (len(x) - 2)
    i, j = np.indices(r.shape)
    return np.where(abs(i - j) <= window, squares, 0).sum(axis=1)


@given(
    shape=st.tuples(st.integers(3, 30), st.integers(2, 40)),
    window=st.integers(0, 45),
    adjusted=st.booleans(),
    tile=st.sampled_from([None, "3x3x4", "8x8x30", "16x16x7"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(100, quick=25), deadline=None)
def test_scores_are_those_of_numpy(
    shape: tuple[int, int], window: int, adjusted: bool, tile: str | None, seed: int
) -> None:
    x = np.random.default_rng(seed).standard_normal(shape)
    options: Any = {"window": window, "adjusted": adjusted, "tile": tile, "backend": "host"}
    found = oocgemm.ld_scores(x, **options, verify=True)
    np.testing.assert_allclose(found.scores, expected(x, window, adjusted=adjusted), rtol=1e-9)
    turned = oocgemm.ld_scores(np.ascontiguousarray(x.T), axis=0, **options)
    np.testing.assert_allclose(turned.scores, found.scores, rtol=1e-12)


def test_perfectly_correlated_variants_count_fully() -> None:
    x = np.repeat(GENOTYPES[:, :1], 6, axis=1)
    found = oocgemm.ld_scores(x, window=2, backend="host")
    np.testing.assert_allclose(found.scores, [3, 4, 5, 5, 4, 3], rtol=1e-6)


@pytest.mark.parametrize("devices", ["0,0", "0,0,0"])
@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_bits_do_not_depend_on_the_number_of_devices(backend: str, devices: str) -> None:
    x = RNG.standard_normal((30, 70)).astype(np.float32)
    how: Any = {"window": 9, "tile": "8x8x16", "backend": backend}
    if backend == "host":
        one, several = (oocgemm.ld_scores(x, **how, devices=each) for each in (None, devices))
    else:
        with fake_cuda():
            how["kernel"] = "cublas"
            one, several = (oocgemm.ld_scores(x, **how, devices=each) for each in (None, devices))
    np.testing.assert_array_equal(one.scores, several.scores)
    np.testing.assert_allclose(one.scores, expected(x, 9), rtol=1e-4)


def test_only_tiles_near_the_diagonal_are_computed() -> None:
    x = np.random.default_rng(5).standard_normal((20, 640))
    plan = oocgemm.ld_scores(x, window=10, tile="16x16x20", backend="host", dry_run=True)
    assert plan.steps == 40 * 3 - 2


def test_variants_without_variation_are_refused_or_left_out() -> None:
    x = GENOTYPES.copy()
    x[:, [3, 50]] = 1
    with pytest.raises(oocgemm.InputError, match=r"3.*constant='drop'"):
        oocgemm.ld_scores(x, window=4, backend="host")
    with pytest.warns(oocgemm.DataWarning, match="left out"):
        found = oocgemm.ld_scores(x, window=4, constant="drop", backend="host")
    assert np.flatnonzero(np.isnan(found.scores)).tolist() == [3, 50]
    kept = np.delete(x, [3, 50], axis=1)
    np.testing.assert_allclose(np.delete(found.scores, [3, 50]), expected(kept, 4), rtol=1e-5)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("window = None is not a number of variants", {}),
        ("window = 1.5 is not a number of variants", {"window": 1.5}),
        ("window = inf is not a distance in kb", {"window": np.inf, "unit": "kb"}),
        ("unit = 'mb': choose one of variants, kb, cm", {"window": 1, "unit": "mb"}),
        ("unit = 'kb' needs the positions", {"window": 1, "unit": "kb"}),
        ("positions are not used", {"window": 1, "positions": np.arange(90)}),
        ("chromosomes have shape", {"window": 1, "chromosomes": np.arange(9)}),
        ("on 2 chromosomes, in 90 runs", {"window": 1, "chromosomes": np.arange(90) % 2}),
        ("variant 1 of X is at position 8, and", {"window": 1, "unit": "cm", "positions": 9 - np.arange(90)}),
        ("or not finite", {"window": 1, "unit": "cm", "positions": np.full(90, np.nan)}),
        ("positions at no.npy cannot be read", {"window": 1, "unit": "cm", "positions": "no.npy"}),
        ("window = -1 is not a number", {"window": -1}),
        ("window = True is not", {"window": True}),
        ("constant = 'nan': choose one of raise, drop", {"window": 1, "constant": "nan"}),
        ("axis = 2", {"window": 1, "axis": 2}),
    ],
)
def test_wrong_options_are_named(message: str, options: Any) -> None:
    with pytest.raises(oocgemm.InputError, match=message):
        oocgemm.ld_scores(GENOTYPES, backend="host", **options)
    with pytest.raises(oocgemm.InputError, match="X has 2 individuals, and adjusted scores need at least 3"):
        oocgemm.ld_scores(GENOTYPES[:2], window=1, adjusted=True, backend="host")


def test_the_command_saves_the_scores(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", GENOTYPES)
    words = "ld-scores", tmp_path / "x.npy", tmp_path / "l2.npy", "--window", "7", "--backend", "host"
    shown = command(*words, "--dry-run")
    assert shown.code == 0, shown.err
    assert "band 7" in shown.out
    assert not (tmp_path / "l2.npy").exists()
    assert command(*words).code == 0
    np.testing.assert_allclose(np.load(tmp_path / "l2.npy"), expected(GENOTYPES, 7), rtol=1e-5)
    missing = command(*words[:3], "--backend", "host")
    assert (missing.code, "window = None" in missing.err) == (2, True)
