"""`similarity` finds the same rows as a sort of all similarities, on every backend."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oocgemm
from oocgemm.backends.base import numpy_dtype
from oocgemm.errors import ExecutionError, InputError
from tests.support.backends_here import ENGINES, REAL_BACKENDS, Engine, running_on
from tests.support.fake_cuda import fake_cuda
from tests.support.suite import each_value, examples

Array = NDArray[Any]


def embedded(seed: int, rows: int, depth: int, dtype: str = "float32") -> Array:
    """Draw rows of small integers, none of which is zero. Many of their similarities are equal."""
    e = np.random.default_rng(seed).integers(-2, 3, (rows, depth))
    e[~e.any(1), 0] = 1
    return e.astype(numpy_dtype(dtype))


def all_scores(e: Array, metric: str, score: Any) -> tuple[Array, Array]:
    """Return the columns and the similarities of all pairs of rows."""
    wide = e.astype(np.float64)
    scores = (wide @ wide.T).astype(score)
    if metric == "cosine":
        inverse = (1 / np.sqrt(np.square(wide).sum(1))).astype(score)
        scores = np.clip(scores * (inverse[:, None] * inverse), -1, 1)
    return np.broadcast_to(np.arange(len(e)), scores.shape), scores


def expected(e: Array, topk: int, metric: str, exclude_self: bool, score: Any) -> tuple[Array, Array]:
    """Return the indices and the scores of the most similar rows, by a sort of all of them."""
    columns, scores = all_scores(e, metric, score)
    own = np.eye(len(e), dtype=bool) & exclude_self
    order = np.lexsort((columns, -scores, own))[:, :topk]
    return order, np.take_along_axis(scores, order, 1)


def check(found: oocgemm.Neighbors, e: Array, topk: int, metric: str, exclude_self: bool = True) -> None:
    indices, scores = expected(e, topk, metric, exclude_self, found.scores.dtype)
    assert found.indices.dtype == np.int64
    np.testing.assert_array_equal(found.indices, indices)
    np.testing.assert_array_equal(found.scores, scores)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8"])
def test_the_rows_are_those_of_a_sort(engine: Engine, metric: str, dtype: str) -> None:
    e = embedded(0, 211, 9, dtype)
    for tile in (None, "50x50x4"):
        with running_on(engine) as options:
            found = oocgemm.similarity(e, topk=20, metric=metric, tile=tile, **options)
        assert found.scores.dtype == ("float32" if dtype in ("float32", "float16") else "float64")
        check(found, e, 20, metric)


def check_pairs(found: oocgemm.Pairs, e: Array, least: float, metric: str, exclude_self: bool = True) -> None:
    _, scores = all_scores(e, metric, np.dtype(np.float64))
    # Of rows of small integers, no other cosine is so near to the threshold.
    wanted = scores >= (least if metric == "dot" else least - 1e-12)
    if exclude_self:
        np.fill_diagonal(wanted, False)
    rows, columns = np.nonzero(wanted)
    assert found.indptr.dtype == found.indices.dtype == np.int64
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.indices, columns)
    tolerance = 0.0 if metric == "dot" else 4 * float(np.finfo(found.scores.dtype).eps)
    np.testing.assert_allclose(found.scores, scores[wanted], rtol=tolerance, atol=0)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("metric", "least"), [("cosine", 0.6), ("dot", 9), ("dot", -100), ("dot", 1000)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8"])
def test_the_pairs_are_all_above_the_threshold(engine: Engine, metric: str, least: float, dtype: str) -> None:
    e = embedded(0, 211, 9, dtype)
    for tile in (None, "50x50x4"):
        with running_on(engine) as options:
            found = oocgemm.similarity(e, threshold=least, metric=metric, tile=tile, **options)
        check_pairs(found, e, least, metric)


@settings(max_examples=examples(20, quick=8), deadline=None)
@given(st.data())
def test_any_tiles_find_the_same_pairs(data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 6))
    exclude_self, least = data.draw(st.booleans()), data.draw(st.integers(-9, 9))
    side, depth = data.draw(st.integers(1, n)), data.draw(st.integers(1, k))
    tile = f"{side}x{side}x{depth}"
    e = embedded(data.draw(st.integers(0, 99)), n, k)
    for engine in ("host", "fake-cuda"):
        with running_on(engine) as options:
            found = oocgemm.similarity(
                e, threshold=least, metric="dot", exclude_self=exclude_self, tile=tile, **options
            )
        check_pairs(found, e, least, "dot", exclude_self)


@pytest.mark.parametrize("engine", ["host", "fake-cuda"])
def test_pairs_that_take_too_much_memory_stop_the_run(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocgemm.jobs.output.SPARSE_SHARE", 1e-9)
    with running_on(engine) as options, pytest.raises(ExecutionError, match="pass a larger threshold"):
        oocgemm.similarity(np.ones((200, 2)), threshold=0, **options)


@settings(max_examples=examples(30, quick=8), deadline=None)
@given(st.data())
def test_any_tiles_and_numbers_of_rows_are_exact(data: st.DataObject) -> None:
    n, k = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 6))
    exclude_self, metric = data.draw(st.booleans()), data.draw(st.sampled_from(["cosine", "dot"]))
    topk = data.draw(st.integers(1, n - exclude_self))
    side, depth = data.draw(st.integers(1, n)), data.draw(st.integers(1, k))
    tile = f"{side}x{side}x{depth}"
    e = embedded(data.draw(st.integers(0, 99)), n, k)
    found = oocgemm.similarity(
        e, topk=topk, metric=metric, exclude_self=exclude_self, backend="host", tile=tile
    )
    check(found, e, topk, metric, exclude_self)


@each_value
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_streams_of_a_gpu_may_run_in_any_order(seed: int, dtype: str) -> None:
    e = embedded(seed, 150, 7, dtype)
    with fake_cuda(seed) as device:
        found = oocgemm.similarity(e, topk=10, backend="cuda", kernel="cublas", tile="40x40x3")
        device.check()
    check(found, e, 10, "cosine")


@pytest.mark.parametrize("backend", REAL_BACKENDS)
def test_rows_are_read_from_zarr(backend: str, tmp_path: Path) -> None:
    e = embedded(1, 300, 20)
    zarr.create_array(tmp_path / "e.zarr", data=e, chunks=(64, 20))
    check(oocgemm.similarity(tmp_path / "e.zarr", topk=5, backend=backend), e, 5, "cosine")
    np.save(tmp_path / "e.npy", np.asfortranarray(e))
    check(oocgemm.similarity(tmp_path / "e.npy", topk=5, metric="dot", backend=backend), e, 5, "dot")


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_any_norms_have_the_same_cosines(engine: Engine, dtype: str) -> None:
    """Squares of these norms underflow or overflow. Multiplied by powers of 2, rows have the same cosines."""
    e = embedded(3, 90, 9)
    for low, high in ((-67, -66), (-130, -129), (110, 111), (-130, 120)):
        powers = np.random.default_rng(0).integers(low, high, (90, 1))
        scaled = np.ldexp(e.astype(np.float64), powers).astype(numpy_dtype(dtype))
        for columns in (False, True):
            x = np.asfortranarray(scaled) if columns else scaled
            with running_on(engine) as options:
                found = oocgemm.similarity(x, topk=10, tile="40x40x4", **options)
                pairs = oocgemm.similarity(x, threshold=0.6, tile="40x40x4", verify=True, **options)
            check(found, e, 10, "cosine")
            check_pairs(pairs, e, 0.6, "cosine")


def test_a_product_larger_than_the_memory_is_not_stored() -> None:
    e = embedded(2, 4000, 4)
    found = oocgemm.similarity(e, topk=3, metric="dot", backend="host", memory="40MiB")
    assert found.run.plan.grid.count > 3
    assert found.run.plan.footprint.device_total < 40 << 20 < 4 * 4000 * 4000
    check(found, e, 3, "dot")


def test_nan_ranks_last_and_zeros_are_equal() -> None:
    e = np.array([[1.0], [-0.0], [np.nan], [0.0], [2.0]])
    found = oocgemm.similarity(e, topk=4, metric="dot", backend="host")
    assert found.indices[0].tolist() == [4, 1, 3, 2]
    assert found.indices[2].tolist() == [0, 1, 3, 4]
    assert not np.signbit(found.scores[0, 1:3]).any()


def test_the_timeline_and_the_report_cover_the_run(tmp_path: Path) -> None:
    e = embedded(3, 200, 8)
    log = tmp_path / "log"
    found = oocgemm.similarity(e, topk=7, backend="host", tile="50x50x8", timeline=log)
    assert found.run.report.traffic["write"]["bytes"] == 200 * 7 * 8
    # Of 4 x 4 tiles, those of the lower triangle are computed.
    assert oocgemm.report(oocgemm.read_log(log)).flops == 10 * 2 * 50 * 50 * 8
    assert found.run.c is None


@pytest.mark.parametrize(
    ("e", "options", "message"),
    [
        (np.ones((5, 2)), {"topk": 5}, "compared with 4 rows besides itself: pass a topk from 1 to 4"),
        (np.ones((5, 2)), {"topk": 6, "exclude_self": False}, "compared with 5 rows: pass a topk from 1"),
        (np.ones((5, 2)), {"topk": 0}, "topk = 0"),
        (np.ones((5, 2)), {"topk": 1.5}, "pass a positive integer"),
        (np.ones((5, 2)), {}, "pass either topk"),
        (np.ones((5, 2)), {"topk": 1, "threshold": 1}, "pass either topk"),
        (np.ones((5, 2)), {"threshold": float("nan")}, "threshold = nan is not a number"),
        (np.ones((5, 2), complex), {"threshold": 1}, "complex numbers have no order"),
        (np.ones((5, 2)), {"topk": 1, "metric": "euclidean"}, "choose one of cosine, dot"),
        (np.ones((5, 2)), {"topk": 1, "metric": None}, "metric = None: choose one of cosine, dot"),
        (np.ones((5, 2)), {"topk": 1, "resume": True}, "does not take the option resume"),
        (np.ones((5, 2), complex), {"topk": 1}, "complex numbers have no order"),
        (np.diag([1, np.nan, 1]), {"topk": 1}, "row 1 of E has elements that are Inf or NaN"),
        (np.ones(5), {"topk": 1}, "E has 1 dimensions"),
    ],
)
def test_bad_input_is_refused(e: Array, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        oocgemm.similarity(e, backend="host", **options)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected option 'top'"):
        oocgemm.similarity(np.ones((5, 2)), topk=1, top=3)  # type: ignore[call-overload]
