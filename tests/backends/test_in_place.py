"""The host backend multiplies arrays in memory where they are, without copying their blocks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.planning import Budgets, InMemory, Layouts, Op, default_model, make_plan
from oocgemm.planning.search.shapes import MIN_CALL_ROWS
from oocgemm.stores.arrays import ArrayMatrix
from tests.support.plan_cases import problem
from tests.support.problems import assert_same, integer_c, integers, reference, spoil, stored
from tests.support.suite import examples

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
A, B = integers(RNG, (50, 70), "float64"), integers(RNG, (70, 40), "float64")
OPS = st.sampled_from(list(Op))


def embedded(x: Array, how: str) -> Array:
    """Return an equal array whose elements lie in memory as `how` says."""
    if how == "columns of a wider array":
        wide = np.full((x.shape[0], x.shape[1] + 5), 99, x.dtype)
        wide[:, 3:-2] = x
        return wide[:, 3:-2]
    if how == "every second row":
        tall = np.full((2 * x.shape[0], x.shape[1]), 99, x.dtype)
        tall[::2] = x
        return tall[::2]
    if how == "columns in reverse order":
        return np.ascontiguousarray(x[:, ::-1])[:, ::-1]
    if how == "column-major":
        return np.asfortranarray(x)
    if how == "unaligned":
        space = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        space[...] = x
        return space
    return x.copy()


PLACES = st.sampled_from(
    [
        "contiguous",
        "columns of a wider array",
        "every second row",
        "columns in reverse order",
        "column-major",
        "unaligned",
    ]
)


@given(data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_arrays_with_any_strides_give_the_exact_product(data: st.DataObject) -> None:
    # Extents of 1 are frequent: BLAS multiplies vectors by other functions.
    m, n, k = (data.draw(st.just(1) | st.integers(1, 30)) for _ in range(3))
    dtype = data.draw(st.sampled_from(["float32", "float64", "complex64", "complex128", "float16", "int8"]))
    op_a, op_b, beta = data.draw(OPS), data.draw(OPS), data.draw(st.sampled_from([0, 2]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    a, b = (
        embedded(integers(rng, shape, dtype), data.draw(PLACES))
        for shape in (stored(op_a, m, k), stored(op_b, k, n))
    )
    c = embedded(integer_c(rng, (m, n), dtype), data.draw(PLACES))
    expected = reference(1, op_a, a, op_b, b, beta, c)
    if beta == 0:
        spoil(c)
    tile = data.draw(st.none() | st.builds("{}x{}x{}".format, *(st.integers(1, 35),) * 3))
    oocgemm.gemm(a, b, c, beta=beta, trans_a=op_a, trans_b=op_b, tile=tile, backend="host")
    assert_same(c, expected)


def test_elements_beside_c_are_not_overwritten() -> None:
    wide = np.full((50, 60), 99.0)
    oocgemm.gemm(A, B, wide[:, 10:50], tile="20x20x20", backend="host")
    assert_same(wide[:, 10:50], A @ B)
    assert np.all(wide[:, :10] == 99)
    assert np.all(wide[:, 50:] == 99)


def test_no_block_of_an_array_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*arguments: object) -> None:
        raise AssertionError("a block was copied")

    monkeypatch.setattr(ArrayMatrix, "read", copied)
    monkeypatch.setattr(ArrayMatrix, "write", copied)
    out = np.ones((50, 40))
    result = oocgemm.gemm(A, B, out, beta=1.0, tile="20x20x20", backend="host")
    assert_same(out, A @ B + 1)
    assert result.plan.in_place == {"A", "B", "C"}
    assert set(result.plan.traffic.values()) == {0}


def test_a_product_in_place_needs_no_memory_and_one_step_per_row_of_tiles() -> None:
    layout = InMemory(in_place=True)
    machine = default_model("host", 2)
    budgets = Budgets(machine.device_reserve, machine.host_reserve)
    for m, n, k in ((20000, 20000, 20000), (500, 500, 500000), (100000, 5000, 1), (5, 3, 0)):
        plan = make_plan(problem(m, n, k), budgets, machine, Layouts(layout, layout, layout))
        assert (plan.tile.n, plan.grid.steps) == (n, 1)
        assert plan.tile.m >= min(m, MIN_CALL_ROWS)
        assert plan.footprint.device_total <= budgets.device


def test_only_arrays_in_memory_are_multiplied_in_place(tmp_path: Path) -> None:
    np.save(tmp_path / "B.npy", B)
    result = oocgemm.gemm(A, tmp_path / "B.npy", tmp_path / "C.npy", tile="20x20x20", backend="host")
    assert result.plan.in_place == {"A"}
    assert_same(np.load(tmp_path / "C.npy"), A @ B)
    mapped = np.load(tmp_path / "B.npy", mmap_mode="r")
    assert oocgemm.gemm(A, mapped, np.zeros((50, 40)), backend="host").plan.in_place == {"A", "C"}


@pytest.mark.parametrize("verify", [False, True])
def test_blocks_pass_through_slots_only_to_be_checked(verify: bool) -> None:
    out = np.zeros((50, 40))
    result = oocgemm.gemm(A, B, out, tile="20x20x20", verify=verify, backend="host")
    assert result.plan.in_place == (set() if verify else {"A", "B", "C"})
    assert_same(out, A @ B)


def test_a_result_wider_or_narrower_than_the_sums_is_not_in_place() -> None:
    a, b = A.astype("float16"), B.astype("float16")
    result = oocgemm.gemm(a, b, np.zeros((50, 40), "float16"), backend="host")
    assert result.plan.in_place == {"A", "B"}
