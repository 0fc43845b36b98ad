"""Slices of k: views of operands whose product is that of the slices, stacked."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm import stores
from oocgemm.errors import ExecutionError
from oocgemm.planning import TileShape
from oocgemm.planning.partition import Slicing
from oocgemm.planning.tiling import TileGrid, length
from oocgemm.stores.base import SlicedMatrix
from tests.support.products import product_of

EXTENT = st.integers(1, 30)


def grid(m: int, n: int, k: int, tile: TileShape) -> TileGrid:
    problem = product_of(m, n, k, "float64", "float64", "float64", "float64")
    return TileGrid.of(problem, tile)


@given(EXTENT, EXTENT, EXTENT, st.tuples(*[st.integers(1, 9)] * 3), st.integers(1, 5))
def test_slices_cover_k_in_whole_steps(
    m: int, n: int, k: int, tile: tuple[int, int, int], count: int
) -> None:
    cut = grid(m, n, k, TileShape(*tile))
    slicing = Slicing.of(cut, min(count, cut.steps))
    assert [p for part in slicing.ranges for p in range(*part)] == list(range(k))
    assert all(start % tile[2] == 0 and stop > start for start, stop in slicing.ranges)
    assert max(map(length, slicing.ranges)) - min(map(length, slicing.ranges)) <= 2 * tile[2]
    assert m <= slicing.rows < m + tile[0]
    assert slicing.rows % tile[0] == 0


@given(st.data(), EXTENT, EXTENT, EXTENT, st.booleans(), st.booleans())
def test_views_have_the_slices_and_zeros_outside(
    data: st.DataObject, m: int, n: int, k: int, trans_a: bool, trans_b: bool
) -> None:
    tile = TileShape(*(data.draw(st.integers(1, 9)) for _ in range(3)))
    cut = grid(m, n, k, tile)
    slicing = Slicing.of(cut, data.draw(st.integers(1, min(4, cut.steps))))
    number = data.draw(st.integers(0, len(slicing.ranges) - 1))
    a, b = (np.arange(1.0, r * c + 1).reshape(r, c) for r, c in ((m, k), (k, n)))
    stored = a.T if trans_a else a, b.T if trans_b else b
    left, right = (stores.open_matrix(x, np.ascontiguousarray(y)) for x, y in zip("AB", stored, strict=True))
    view_a = SlicedMatrix(left, slicing, transposed=trans_a)
    view_b = SlicedMatrix(right, Slicing(slicing.ranges, slicing.rows, number), transposed=trans_b)
    height = slicing.rows
    right_a, right_b = np.zeros((height * len(slicing.ranges), slicing.depth)), np.zeros((slicing.depth, n))
    for q, (first, end) in enumerate(slicing.ranges):
        right_a[q * height : q * height + m, : end - first] = a[:, first:end]
    first, end = slicing.ranges[number]
    right_b[: end - first] = b[first:end]
    for view, expected in (
        (view_a, right_a.T if trans_a else right_a),
        (view_b, right_b.T if trans_b else right_b),
    ):
        assert view.shape == expected.shape
        (r0, r1), (c0, c1) = (sorted(data.draw(st.tuples(*[st.integers(0, x)] * 2))) for x in expected.shape)
        out = np.full((r1 - r0, c1 - c0), np.nan)
        view.read((r0, r1), (c0, c1), out)
        np.testing.assert_array_equal(out, expected[r0:r1, c0:c1])


def test_an_operand_in_a_file_is_read_in_slices(tmp_path: Path) -> None:
    a = np.arange(60.0).reshape(6, 10)
    np.save(tmp_path / "a.npy", a)
    matrix = stores.open_matrix("A", str(tmp_path / "a.npy"))
    view = SlicedMatrix(matrix, Slicing(((0, 4), (4, 10)), 8), transposed=False)
    out = np.full((16, 6), np.nan)
    view.read((0, 16), (0, 6), out)
    np.testing.assert_array_equal(out[8:14], a[:, 4:])
    assert not out[14:].any()
    assert view.fingerprint() == matrix.fingerprint()
    with pytest.raises(ExecutionError, match="read-only"):
        view.write((0, 1), (0, 1), a[:1, :1])
