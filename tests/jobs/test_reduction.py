"""`reduce` computes from C what NumPy computes, without storing C."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oocgemm
from oocgemm import MatVec, RankOne, Reduce, Scale, Threshold, TopK
from oocgemm.errors import InputError
from tests.support.backends_here import ENGINES, Engine, needs_gpu, running_on
from tests.support.fake_cuda import fake_cuda
from tests.support.suite import each_value, examples

Array = NDArray[Any]
RNG = np.random.default_rng(31)
M, N, K = 61, 47, 13
KINDS: dict[str, Any] = {"sum": np.sum, "sumsq": lambda c, axis: np.square(c).sum(axis), "max": np.max}


def integers(*shape: int) -> Array:
    return RNG.integers(-3, 4, shape).astype(np.float64)


U, V = integers(M), integers(N)
STEPS: list[Any] = [Scale(U, value=0.5), RankOne(U, V)]


def changed(c: Array) -> Array:
    return np.asarray(c * (0.5 * U[:, None]) + U[:, None] * V)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "int8"])
def test_reductions_of_integers_are_exact(engine: Engine, dtype: str) -> None:
    if engine[1] == "tiled" and dtype == "int8":
        pytest.skip("the kernel tiled has no int8")
    a, b = integers(M, K), integers(K, N)
    for steps, c in (([], a @ b), (STEPS, changed(a @ b))):
        for (kind, function), axis in zip(KINDS.items(), (0, 1, 1), strict=True):
            with running_on(engine) as options:
                given: Any = {"to": Reduce(kind, axis), "epilogue": steps, "tile": "32x16x5", **options}
                found = oocgemm.reduce(a.astype(dtype), b.astype(dtype), **given)
            np.testing.assert_array_equal(found, function(c, axis))


@pytest.mark.parametrize("kind", ["sum", "sumsq"])
def test_sums_of_no_elements_are_zero(kind: str) -> None:
    a, none = integers(M, K), np.empty((K, 0))
    made = SimpleNamespace(zeros=np.zeros, empty=lambda shape, dtype: np.full(shape, np.nan, dtype))
    with patch("oocgemm.jobs.output.np", made):
        found = oocgemm.reduce(a, none, to=Reduce(kind), backend="host")
    np.testing.assert_array_equal(found, np.zeros(M))
    assert oocgemm.reduce(a, none, to=Reduce(kind, 0), backend="host").shape == (0,)


@pytest.mark.parametrize("axis", [0, 1])
def test_no_element_of_an_empty_matrix_is_the_largest(axis: int) -> None:
    a, b = np.empty((M * axis, K)), np.empty((K, N * (1 - axis)))
    with pytest.raises(InputError, match="C has no elements"):
        oocgemm.reduce(a, b, to=Reduce("max", axis), backend="host")


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "int8"])
def test_elements_are_selected_from_any_product(engine: Engine, dtype: str) -> None:
    if engine[1] == "tiled" and dtype == "int8":
        pytest.skip("the kernel tiled has no int8")
    a, b = integers(M, K), integers(K, N)
    for steps, c in (([], a @ b), (STEPS, changed(a @ b))):
        with running_on(engine) as options:
            given: Any = {"epilogue": steps, "tile": "32x16x5", **options}
            found = oocgemm.reduce(a.astype(dtype), b.astype(dtype), to=TopK(5), **given)
        order = np.lexsort((np.broadcast_to(np.arange(N), c.shape), -c))[:, :5]
        np.testing.assert_array_equal(found.indices, order)
        np.testing.assert_array_equal(found.scores, np.take_along_axis(c, order, 1))
        for absolute in (False, True):
            with running_on(engine) as options:
                given = {"epilogue": steps, "tile": "32x16x5", **options}
                to = Threshold(9, absolute=absolute)
                pairs = oocgemm.reduce(a.astype(dtype), b.astype(dtype), to=to, **given)
            rows, cols = np.nonzero((np.abs(c) if absolute else c) >= 9)
            np.testing.assert_array_equal(pairs.rows, rows)
            np.testing.assert_array_equal(pairs.indices, cols)
            np.testing.assert_array_equal(pairs.scores, c[rows, cols])


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_products_with_vectors_of_integers_are_exact(engine: Engine, dtype: str) -> None:
    if engine[1] == "tiled" and dtype == "float16":
        pytest.skip("the kernel tiled is slow")
    a, b, v = integers(M, K), integers(K, N), integers(N, 3)
    for steps, c in (([], a @ b), (STEPS, changed(a @ b))):
        for factor in (v, v[:, 0]):
            with running_on(engine) as options:
                given: Any = {"epilogue": steps, "tile": "32x16x5", **options}
                found = oocgemm.reduce(a.astype(dtype), b.astype(dtype), to=MatVec(factor), **given)
            np.testing.assert_array_equal(found, c @ factor)


def test_without_b_a_is_multiplied_by_its_transpose() -> None:
    a = integers(M, K)
    for trans, c in ((False, a @ a.T), (True, a.T @ a)):
        given: Any = {"trans_a": trans, "backend": "host"}
        steps = [RankOne(rows=np.arange(len(c)))]
        for axis in (0, 1):
            found = oocgemm.reduce(a, to=Reduce("sum", axis), epilogue=steps, **given)
            np.testing.assert_array_equal(found, (c + np.arange(len(c))[:, None]).sum(axis))
        own = oocgemm.reduce(a, to=TopK(1, exclude_self=True), **given).indices[:, 0]
        assert (own != np.arange(len(c))).all()


@pytest.mark.parametrize(
    "engine", ["host", "host-staged", "fake-cuda", pytest.param("cuda", marks=needs_gpu)]
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_elements_of_a_product_with_itself_are_selected(engine: str, symmetric: bool) -> None:
    a, numbers = integers(M, K), integers(M)
    others = numbers if symmetric else integers(M)
    steps = [RankOne(numbers, others), Scale(value=2)]
    c = 2 * (a @ a.T + np.outer(numbers, others))
    np.fill_diagonal(c, -np.inf)
    given: Any = {"epilogue": steps, "tile": "16x16x5"}
    with running_on(engine) as options:
        pairs = oocgemm.reduce(a, to=Threshold(20, exclude_self=True), **given, **options)
    rows, cols = np.nonzero(c >= 20)
    np.testing.assert_array_equal(pairs.rows, rows)
    np.testing.assert_array_equal(pairs.indices, cols)
    np.testing.assert_array_equal(pairs.scores, c[rows, cols])
    with running_on(engine) as options:
        found = oocgemm.reduce(a, to=TopK(4, exclude_self=True), **given, **options)
    order = np.lexsort((np.broadcast_to(np.arange(M), c.shape), -c))[:, :4]
    np.testing.assert_array_equal(found.indices, order)


def test_columns_of_transposed_operands_are_reduced() -> None:
    a, b = integers(K, M), integers(N, K)
    given: Any = {"trans_a": "T", "trans_b": "T", "backend": "host", "epilogue": STEPS}
    found = oocgemm.reduce(a, b, to=Reduce("sum", 0), **given)
    np.testing.assert_array_equal(found, changed(a.T @ b.T).sum(0))


def test_nan_is_the_largest_element() -> None:
    a, b = integers(M, K), integers(K, N)
    a[3] = np.nan
    found = oocgemm.reduce(a, b, to=Reduce("max"), tile="16x16x5", backend="host")
    np.testing.assert_array_equal(found, (a @ b).max(1))


@settings(max_examples=examples(20, quick=8), deadline=None)
@given(
    seed=st.integers(0, 99),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9)),
    tile=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 4)),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_reductions_are_exact_in_any_order_of_operations(
    seed: int, shape: tuple[int, int, int], tile: tuple[int, int, int], kind: str
) -> None:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-2, 3, x).astype(float) for x in ((shape[0], shape[2]), (shape[2], shape[1])))
    with fake_cuda(seed) as device:
        how: Any = {"backend": "cuda", "kernel": "cublas", "tile": "x".join(map(str, tile))}
        found = oocgemm.reduce(a, b, to=Reduce(kind), epilogue=[Scale(value=2)], **how)
        device.check()
    np.testing.assert_array_equal(found, KINDS[kind](2 * (a @ b), 1))


def test_the_product_is_not_stored() -> None:
    x = np.zeros((400_000, 2), np.float32)  # the product would take 596 GiB
    planned: Any = None

    def note(plan: Any) -> Any:
        nonlocal planned
        planned = plan
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        oocgemm.reduce(x, to=Reduce("max"), backend="host", memory="256MiB", progress=note)
    assert planned.traffic["write"] == 8 * 400_000


def test_bad_input_is_refused() -> None:
    a, b, call = integers(M, K), integers(K, N), cast(Any, oocgemm.reduce)
    for message, to, options in (
        ("topk = 48, but C has 47 columns", TopK(48), {}),
        ("topk = 0 is not a number of rows", TopK(0), {}),
        ("can be compared with 61 rows", TopK(62), {"b": None}),
        ("threshold = nan is not a number", Threshold(np.nan), {}),
        ("Reduce\\('mean'\\): choose one of sum, sumsq, max", Reduce("mean"), {}),
        ("axis = 2: pass 1", Reduce("sum", 2), {}),
        ("V has 46 rows, and C has 47 columns", MatVec(np.ones(46)), {}),
        ("pass a TopK, a Threshold, a Reduce or a MatVec", 3, {}),
        ("need a C that is stored", Reduce("sum"), {"epilogue": [oocgemm.Add(a @ b)]}),
        ("need a C that is stored", TopK(2), {"epilogue": [oocgemm.Cast("float32")]}),
        ("does not take the option resume", TopK(2), {"resume": True}),
        ("complex numbers have no order", TopK(2), {"a": a.astype(complex), "b": b.astype(complex)}),
        ("A is of dtype int8, and products with V", MatVec(np.ones(N)), {"a": a.astype("i1")}),
    ):
        with pytest.raises(InputError, match=message):
            call(**{"a": a, "b": b, "to": to, "backend": "host"} | options)


def test_a_run_that_was_killed_while_it_saved_can_be_repeated(tmp_path: Path) -> None:
    zarr.create_group(f"{tmp_path}/n.zarr.unfinished").create_array("indices", data=np.ones(3))
    found = oocgemm.reduce(integers(M, K), to=TopK(2), backend="host")
    found.save(tmp_path / "n.zarr")
    saved = zarr.open_group(tmp_path / "n.zarr", mode="r")
    np.testing.assert_array_equal(cast(Any, saved["indices"])[:], found.indices)
    assert [place.name for place in tmp_path.iterdir()] == ["n.zarr"]
