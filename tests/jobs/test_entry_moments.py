"""Statistics of sparse matrices, which are computed from entries alone, equal those of dense arrays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm import stores
from oocgemm.jobs import stats, streaming
from oocgemm.jobs.transforming import by_rows, readable
from oocgemm.planning import Op
from oocgemm.stores import sparse
from tests.support.sparse_files import in_memory, parts_of
from tests.support.suite import examples

Array = Any
FIELDS = ("count", "missing", "mean", "variance", "min", "max")


@pytest.fixture(autouse=True)
def no_dense_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to read sparse matrices as dense blocks."""

    def refused(*args: Any) -> None:
        raise AssertionError("a sparse matrix is read as a dense block")

    monkeypatch.setattr(sparse.SparseOperand, "read", refused)


def check(found: Any, x: Array, axis: int, **options: Any) -> None:
    dense = oocgemm.stats(x, axis, **options)
    for name in FIELDS:
        np.testing.assert_allclose(getattr(found, name), getattr(dense, name), rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(found.min == found.max, dense.min == dense.max)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.tuples(st.integers(1, 12), st.integers(1, 9)),
    st.floats(0, 1),
    st.sampled_from(["csr", "csc"]),
    st.sampled_from(["float32", "int8", "uint16", "float64"]),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.integers(1, 30),
    st.booleans(),
    st.data(),
)
def test_statistics_equal_those_of_dense_arrays(
    shape: tuple[int, int],
    density: float,
    form: str,
    dtype: str,
    missing: int | None,
    log1p: bool,
    piece: int,
    python: bool,
    data: Any,
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    x = (rng.integers(0, 4, shape) * (rng.random(shape) < density)).astype(dtype)
    parts = parts_of(x, form, data.draw(st.sampled_from([np.int32, np.int64, np.uint32, np.int8])))
    axis = data.draw(st.integers(0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "ENTRIES", piece)
        if python:
            patch.setattr(streaming, "compiled", lambda: None)
        options: dict[str, Any] = {"missing": missing, "log1p": log1p}
        found = oocgemm.stats(in_memory(shape, form, parts), axis, **options)
    check(found, x, axis, **options)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_nonfinite_entries_give_nonfinite_statistics(value: float, axis: int) -> None:
    x = np.zeros((5, 4))
    x[1, 2], x[3, 2], x[4, 0] = 1, value, 2
    check(oocgemm.stats(in_memory(x.shape, "csr", parts_of(x, "csr")), axis), x, axis)


@pytest.mark.parametrize("joined", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_joined_and_scaled_matrices(axis: int, joined: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "ENTRIES", 50)
    rng = np.random.default_rng(5)
    x = (rng.integers(1, 5, (60, 40)) * (rng.random((60, 40)) < 0.2)).astype(np.float64)
    x[:, 3] = 0
    operands = [in_memory(part.shape, "csr", parts_of(part, "csr")) for part in np.split(x, 2, joined)]
    check(oocgemm.stats(oocgemm.concat(operands, axis=joined), axis), x, axis)
    how = oocgemm.Transform(target_sum=10, log1p=True)
    matrix = stores.open_matrix("X", oocgemm.concat(operands, axis=joined))
    view, _ = by_rows(matrix, how, Op.N, left=True)
    found = stats.stats_of(readable(view, 1 << 30), axis, oocgemm.Transform(), 1 << 30)
    sums = x.sum(1, keepdims=True)
    check(found, np.log1p(x * np.where(sums > 0, 10 / np.where(sums > 0, sums, 1), 1)), axis)


@pytest.mark.parametrize("axis", [0, 1])
def test_bits_depend_on_the_matrix_alone(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "ENTRIES", 1000)
    x = np.random.default_rng(6).standard_normal((300, 70))
    operand = in_memory(x.shape, "csr", parts_of(x, "csr"))
    found = [oocgemm.stats(operand, axis, host_memory=memory) for memory in (1, "1GiB")]
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(found[0], name), getattr(found[1], name))


def test_entries_at_the_same_place_are_added_up_in_dense_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"data": np.ones(4), "indices": np.array([1, 1, 0, 2]), "indptr": np.array([0, 3, 4])}
    operand = in_memory((2, 3), "csr", parts)
    with pytest.raises(oocgemm.ExecutionError, match="as a dense block"):
        oocgemm.stats(operand)
    monkeypatch.undo()
    np.testing.assert_array_equal(oocgemm.stats(operand).max, [1, 2, 1])


def test_an_index_that_became_wrong_is_refused() -> None:
    x = np.eye(4)
    parts = parts_of(x, "csr")
    matrix = stores.open_matrix("X", in_memory(x.shape, "csr", parts))
    parts["indices"][2] = 99
    with pytest.raises(oocgemm.ExecutionError, match="row 2 has an entry in column 99"):
        stats.stats_of(matrix, 0, oocgemm.Transform(), 1 << 20)
