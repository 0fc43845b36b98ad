"""Distances of pairs agree with NumPy, wherever rows are read from, and candidates are sorted by them."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm import stores
from oocgemm.integrity.passes import Oriented
from oocgemm.jobs import pairs, stats
from oocgemm.jobs.pairs import ScaledRows
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import TransformedMatrix
from oocgemm.system.installed import compiled
from tests.support.suite import each_value, examples

Array = Any


def definition(x: Array, y: Array, rows: Array, cols: Array) -> Array:
    return np.square(x.astype(float)[rows][:, None] - y.astype(float)[cols]).sum(axis=2)


def given_rows(array: Array, scales: Array | None = None, *, swapped: bool = False) -> ScaledRows:
    return ScaledRows(Oriented(stores.open_matrix("X", array), swapped), scales)


@each_value
@pytest.mark.parametrize("with_library", [True, False])
@given(
    dtypes=st.sampled_from([("f4", "f4"), ("f8", "f8"), ("i1", "i1"), ("f4", "f8"), ("f2", "f2")]),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 8), st.integers(0, 40)),
    swapped=st.booleans(),
    scaled=st.booleans(),
    memory=st.sampled_from([1 << 9, 1 << 20]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(80, quick=25), deadline=None)
def test_distances_of_pairs_are_exact_for_small_integers(
    with_library: bool,
    dtypes: tuple[str, str],
    shape: tuple[int, int, int],
    swapped: bool,
    scaled: bool,
    memory: int,
    seed: int,
) -> None:
    m, n, depth = shape
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-9, 10, (count, depth)).astype(of) for count, of in zip((m, n), dtypes, strict=True))
    rows, cols = np.sort(rng.integers(0, m, 6)), rng.integers(0, n, (6, 3))
    scales = [rng.integers(0, 3, count) / 2 if scaled else None for count in (m, n)]
    arrays = [np.ascontiguousarray(each.T) if swapped else each for each in (x, y)]
    left, right = (given_rows(*each, swapped=swapped) for each in zip(arrays, scales, strict=True))
    with patch.object(pairs, "compiled", compiled if with_library else lambda: None):
        found = pairs.squared_distances(left, right, rows, cols, memory)
    if scaled:
        x, y = x * np.asarray(scales[0])[:, None], y * np.asarray(scales[1])[:, None]
    np.testing.assert_array_equal(found, definition(x, y, rows, cols))


def test_bits_do_not_depend_on_where_rows_are_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "DEPTH", 32)
    x = np.random.default_rng(4).standard_normal((50, 77))
    same = given_rows(x)
    rows, cols = np.arange(50), np.random.default_rng(5).integers(0, 50, (50, 4))
    found = pairs.squared_distances(same, same, rows, cols, 1 << 20)
    with patch.object(pairs, "_elements", lambda given: None):
        for memory in (1 << 12, 1 << 20):
            again = pairs.squared_distances(same, same, rows, cols, memory)
            np.testing.assert_array_equal(again, found)
    np.testing.assert_allclose(found, definition(x, x, rows, cols), rtol=1e-14)


@each_value
@pytest.mark.parametrize("with_library", [True, False])
@given(rows=st.integers(0, 5), count=st.integers(1, 300), seed=st.integers(0, 99))
@settings(max_examples=examples(60, quick=20), deadline=None)
def test_candidates_are_sorted_with_nan_last_and_ties_by_index(
    with_library: bool, rows: int, count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    distances = rng.choice([0.0, -0.0, 1.0, 2.5, np.inf, np.nan], (rows, count))
    indices = np.argsort(rng.random((rows, count)), axis=1)
    order = np.lexsort((indices, distances))
    expected = [np.take_along_axis(each, order, 1) for each in (distances, indices)]
    with patch.object(pairs, "compiled", compiled if with_library else lambda: None):
        pairs.sort_candidates(distances, indices)
    np.testing.assert_array_equal(distances, expected[0])
    np.testing.assert_array_equal(indices, expected[1])


def test_norms_of_centered_rows_are_those_of_a_pass() -> None:
    rng = np.random.default_rng(1)
    center = rng.integers(-5, 6, 30).astype(float)
    for dtype in ("float32", "float64", "float16"):
        for axis in (0, 1):
            x = rng.integers(-9, 10, (30, 30)).astype(dtype)
            x[3, 4] = np.nan
            matrix = stores.open_matrix("X", x if axis else np.asfortranarray(x))
            moves = Transform(center=center, cast="float64")
            moved = TransformedMatrix(matrix, moves, axis, "rows", (center,))
            found = stats.moved_squares(moved, axis, 1 << 20)
            np.testing.assert_array_equal(found, stats.squares(moved, axis, 1 << 20))
