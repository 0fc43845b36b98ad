"""`verify=True` where an epilogue changes C, or C is not stored: correct results pass, errors are found."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, Timer
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm import Add, Cast, Correlation, Divide, Gaussian, MatVec, RankOne, Reduce, Scale, Threshold, TopK
from oocgemm.backends.checksums import DeviceStripSums
from oocgemm.backends.host import backend as host_backend
from oocgemm.backends.host.finish import run_chain
from oocgemm.errors import ExecutionError, InputError
from oocgemm.integrity import freivalds, samples
from oocgemm.jobs import verify
from oocgemm.planning import Kind
from oocgemm.stores import base
from oocgemm.stores.arrays import SparseMatrix
from tests.support.backends_here import BACKENDS, ENGINES, Engine, running_on
from tests.support.faults import Fault, faulty_stores
from tests.support.problems import Array
from tests.support.suite import each_value, examples
from tests.support.tampering import checked, in_threads, on_device
from tests.support.unfinished_runs import failing_after

RNG = np.random.default_rng(30)
M, N, K = 150, 130, 40
TILE = "64x64x16"
A, B = RNG.integers(-3, 4, (M, K)).astype("f4"), RNG.integers(-3, 4, (K, N)).astype("f4")
U, V = 1.0 + np.arange(M) % 5, 1.0 + np.arange(N) % 3
DTYPES = ["float16", "bfloat16", "float32", "float64", "int8"]

Made = Any
Compute = Callable[..., Made]


def gemm(*steps: Any) -> Compute:
    return lambda **options: oocgemm.gemm(A, B, epilogue=steps, **options)


def reduced(to: Any, *steps: Any, same: bool = False) -> Compute:
    return lambda **options: oocgemm.reduce(A, None if same else B, to=to, epilogue=steps, **options)


# What each function makes of a product, by names of tests.
RESULTS: dict[str, Compute] = {
    "scale": gemm(Scale(U, V, 0.5)),
    "cast": gemm(Cast("float16")),
    "gram": lambda **options: oocgemm.gram(A, uplo="full", epilogue=[Gaussian(0.01)], **options),
    "similarity": lambda **options: oocgemm.similarity(A + 0.5, topk=4, **options),
    "pairs": lambda **options: oocgemm.similarity(A + 0.5, threshold=0.5, **options),
    "corr": lambda **options: oocgemm.corr(A, topk=4, **options),
    "coefficients": lambda **options: oocgemm.corr(A, threshold=0.3, **options),
    "correlations": lambda **options: oocgemm.corr(A, y=B.T, **options),
    "distances": lambda **options: oocgemm.distances(A, y=B.T, **options),
    "neighbors": lambda **options: oocgemm.neighbors(A, y=B.T, topk=3, **options),
    "near": lambda **options: oocgemm.neighbors(A, y=B.T, radius=15.0, **options),
    "top k": reduced(TopK(3)),
    "top k of chain": reduced(TopK(3), Scale(U, V), RankOne(cols=V)),
    "threshold": reduced(Threshold(9.0, absolute=True, exclude_self=True), Scale(value=0.5)),
    "threshold of same": reduced(Threshold(9.0), same=True),
    "sum": reduced(Reduce("sum"), Scale(U)),
    "sumsq": reduced(Reduce("sumsq", axis=0)),
    "max": reduced(Reduce("max"), Correlation()),
    "product": reduced(MatVec(np.ones((N, 2)))),
    "kernel": lambda **options: oocgemm.kernel_matmul(A, np.ones(M), gamma=0.01, **options),
    "centered": lambda **options: oocgemm.gram(
        A.astype("i1"), transform=oocgemm.Transform(center="k", cast="int8"), **options
    ),
}


def arrays(made: Made) -> list[Array]:
    match made:
        case oocgemm.Neighbors():
            return [made.indices, made.scores]
        case oocgemm.Nearest():
            return [made.indices, made.distances]
        case oocgemm.Pairs():
            return [made.indptr, made.indices, made.scores]
        case np.ndarray():
            return [made]
    return [made.out]


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_those_without_verify(engine: Engine, name: str) -> None:
    if engine[1] == "tiled" and name == "centered":
        pytest.skip("the kernel tiled has no int8")
    with running_on(engine) as options:
        plain, verified = (RESULTS[name](tile=TILE, verify=verify, **options) for verify in (False, True))
    for right, found in zip(arrays(plain), arrays(verified), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5)
    run = getattr(verified, "run", verified)
    if isinstance(run, oocgemm.Result):
        figures = checked(run)
        assert figures["recomputed"] == []
        assert figures["undecided"] == 0
        assert figures["sampled"] > 0


@pytest.mark.parametrize("engine", ["host", "host-staged", "fake-cuda"])
@given(data=st.data())
@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
def test_correct_results_pass(engine: str, data: st.DataObject) -> None:
    m, n, k = (data.draw(st.integers(1, 90), x) for x in "mnk")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    spread = data.draw(st.sampled_from([0, 3, 30]), "spread")
    a, b = (
        rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
        for shape in ((m, k), (k, n))
    )
    if dtype == "int8":
        a, b = rng.integers(-128, 128, (m, k)), rng.integers(-128, 128, (k, n))
    if dtype in ("float16", "bfloat16"):
        a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    kind = oocgemm_dtype(dtype)
    a, b = a.astype(kind), b.astype(kind)
    if dtype != "int8" and data.draw(st.integers(0, 4), "broken") == 0:
        a[rng.integers(m), rng.integers(k)] = np.inf
    out = {"int8": "float64"}.get(dtype, dtype)
    u, v, d = rng.standard_normal(m), rng.standard_normal(n), rng.standard_normal((m, n))
    d = d.astype(oocgemm_dtype(out))
    finite = bool(np.isfinite(a.astype("f8")).all() and a.any(1).all() and b.any(0).all())
    any_step = st.sampled_from([Scale(u, v, 3), RankOne(u, v, -2), Scale(value=0.1), RankOne(cols=v)])
    firsts: list[Any] = [Scale(u)]
    if finite:
        firsts.append(Correlation())
    if finite and spread <= 3:  # rows that lie farther apart are refused
        firsts.append(Gaussian(10.0 ** -data.draw(st.integers(0, 4), "gamma")))
    steps = [data.draw(st.sampled_from(firsts), "first"), *data.draw(st.lists(any_step, max_size=2), "steps")]
    tile = data.draw(st.none() | st.builds("{0}x{0}x{1}".format, *(st.integers(5, 60),) * 2), "tile")
    given: dict[str, Any] = {"tile": tile, "verify": True}
    with running_on(engine) as options:
        given |= options
        match data.draw(st.sampled_from(["gemm", "gram", "topk", "threshold", "reduce", "product"]), "what"):
            case "gemm":
                steps += data.draw(st.sampled_from([[], [Add(d, 2)], [Divide(d)], [Cast("float32")]]), "last")
                oocgemm.gemm(a, b, epilogue=steps, **given)
            case "gram":
                uplo = data.draw(st.sampled_from(["lower", "upper"]), "uplo")
                same = [Scale(u, u) if isinstance(x, Scale | RankOne) else x for x in steps]
                oocgemm.gram(a, uplo=uplo, epilogue=same, **given)
            case "topk":
                count = data.draw(st.integers(1, n), "count")
                oocgemm.reduce(a, b, to=TopK(count), epilogue=steps, **given)
            case "threshold":
                least = data.draw(st.sampled_from([-1.0, 0.0, 0.5, 3.0]), "least")
                absolute = data.draw(st.booleans(), "absolute")
                oocgemm.reduce(a, b, to=Threshold(least, absolute, absolute), epilogue=steps, **given)
            case "reduce":
                kind = data.draw(st.sampled_from(["sum", "sumsq", "max"]), "kind")
                oocgemm.reduce(a, b, to=Reduce(kind, data.draw(st.integers(0, 1))), epilogue=steps, **given)
            case "product" if dtype != "int8":
                oocgemm.reduce(a, b, to=MatVec(np.stack([u[:1].repeat(n), v], 1)), epilogue=steps, **given)


def oocgemm_dtype(name: str) -> Any:
    if name == "bfloat16":
        return pytest.importorskip("ml_dtypes").bfloat16
    return np.dtype(name)


@contextmanager
def wrong_sums(times: int) -> Iterator[None]:
    """Change one element of an accumulator, `times` times, when a product of the tile (1, 0) is done."""
    left = times

    def of(operation: Any) -> bool:
        nonlocal left
        hit = operation.kind is Kind.MULTIPLY and operation.tile == (1, 0) and left > 0
        left -= hit
        return bool(hit)

    def change(view: Array) -> None:
        view[view.shape[0] // 2, view.shape[1] // 3] += 1

    with in_threads(), on_device(of, change):
        yield


@each_value
@pytest.mark.parametrize("engine", ["host", "host-staged"])
@pytest.mark.parametrize("name", RESULTS)
def test_a_wrong_element_of_the_accumulator_is_found(engine: str, name: str) -> None:
    """It is computed again if C is stored. What was selected of it cannot be taken back."""
    stored = name in ("scale", "cast", "gram", "centered", "correlations", "distances")
    # By the store of C.
    searched = name in ("pairs", "coefficients", "near", "threshold", "threshold of same")
    with running_on(engine) as options:
        right = RESULTS[name](tile=TILE, verify=True, **options)
        with wrong_sums(1):
            if not (stored or searched):
                with pytest.raises(ExecutionError, match="differs from its checksums"):
                    RESULTS[name](tile=TILE, verify=True, **options)
                return
            found = RESULTS[name](tile=TILE, verify=True, **options)
    run: Any = getattr(found, "run", found)
    assert checked(run)["recomputed"] == [[1, 0]]
    for expected, array in zip(arrays(right), arrays(found), strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", ["scale", "gram", "centered", "similarity", "pairs", "sum", "kernel"])
def test_wrong_sums_of_a_gpu_are_found(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, changed = DeviceStripSums.take, False

    def take(self: DeviceStripSums, operation: Any) -> tuple[Array, Array]:
        nonlocal changed
        sums, norms = right(self, operation)
        if operation.tile == (1, 0) and not changed:
            changed, sums[0, 0] = True, sums[0, 0] + 1
        return sums, norms

    with running_on(backend) as options:
        plain = RESULTS[name](tile=TILE, **options)
        monkeypatch.setattr(DeviceStripSums, "take", take)
        if name not in ("scale", "gram", "centered"):
            with pytest.raises(ExecutionError, match="differs from its checksums"):
                RESULTS[name](tile=TILE, verify=True, **options)
            assert changed
            return
        found = RESULTS[name](tile=TILE, verify=True, **options)
    assert checked(found)["recomputed"] == [[1, 0]]
    np.testing.assert_array_equal(found.out, plain.out)


def test_a_tile_that_is_wrong_twice_ends_the_run() -> None:
    with wrong_sums(99), pytest.raises(ExecutionError, match=r"of tile \(1, 0\).*twice in a row"):
        RESULTS["scale"](tile=TILE, verify=True, backend="host")


def other_chain(change: Callable[[Array], None]) -> Any:
    """Change what each epilogue makes of a strip."""

    def run(steps: Any, numbers: Any, sums: Array, scalars: Any, result: Array, *, reads: bool) -> None:
        run_chain(steps, numbers, sums, scalars, result, reads=reads)
        change(result)

    return patch.object(host_backend, "run_chain", run)


def scaled_row(result: Array) -> None:
    result[3] *= 1.25


def scaled_column(result: Array) -> None:
    result[:, 1] *= 1.25


@pytest.mark.parametrize("change", [scaled_row, scaled_column])
@pytest.mark.parametrize(
    "chain",
    [*(RESULTS[name] for name in ("scale", "gram", "distances")), gemm(RankOne(U, V), Cast("float16"))],
)
@pytest.mark.parametrize("lines", [2, 8])
def test_a_wrong_scale_of_one_row_or_column_is_found(
    change: Callable[[Array], None], chain: Compute, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few elements of each row and of each column are computed again, and that suffices."""
    monkeypatch.setattr(samples, "LINES", lines)
    with other_chain(change), pytest.raises(ExecutionError, match=r"C\[\d+, \d+\] is .*, and A and B give"):
        chain(tile=TILE, verify=True, backend="host")


@pytest.mark.parametrize("name", ["sum", "max", "top k of chain", "threshold", "kernel"])
def test_a_wrong_chain_before_a_reduction_is_found(name: str) -> None:
    def change(result: Array) -> None:
        result += 0.5

    with other_chain(change), pytest.raises(ExecutionError, match=r"are wrong|is .*, and A and B give"):
        RESULTS[name](tile=TILE, verify=True, backend="host")


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Sequence[int]:
    """Check only these rows of a selection whole."""
    rows = [7, 90]
    monkeypatch.setattr(samples, "chosen", lambda rng, extent, count: rows)
    return rows


@contextmanager
def kept_wrongly(change: Callable[[Array], None]) -> Iterator[None]:
    """Change the elements that were selected of the largest ones, as they are returned."""
    right = samples.Samples.check

    def check(self: samples.Samples, made: samples.SampledResult) -> None:
        assert made.kept is not None
        change(made.kept)
        right(self, made)

    with patch.object(samples.Samples, "check", check):
        yield


@pytest.mark.parametrize("name", ["similarity", "corr", "top k", "top k of chain"])
def test_a_missing_element_is_found(name: str, few_rows: Sequence[int]) -> None:
    """The second largest element of a row is replaced by a correct, but smaller one."""

    def change(kept: Array) -> None:
        kept[few_rows[1], 1:-1] = kept[few_rows[1], 2:].copy()

    with kept_wrongly(change), pytest.raises(ExecutionError, match=r"selected of row 90 of C are wrong"):
        RESULTS[name](tile=TILE, verify=True, backend="host")


@each_value
@pytest.mark.parametrize("name", ["similarity", "corr", "top k", "top k of chain"])
@pytest.mark.parametrize("field", ["score", "index"])
@pytest.mark.parametrize("few", [1 << 24, 10])
def test_wrong_scores_of_a_row_are_found(
    name: str, field: str, few: int, few_rows: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in rows that are not computed again, and if only one element of each row is."""
    monkeypatch.setattr(samples, "FEW", few)

    def change(kept: Array) -> None:
        if field == "score":
            kept["score"][33] *= 1.25
        else:
            kept["index"][33] = (kept["index"][33] + 1) % len(kept)

    with kept_wrongly(change), pytest.raises(ExecutionError, match=r"C\[33, \d+\] is"):
        RESULTS[name](tile=TILE, verify=True, backend="host")


@each_value
@pytest.mark.parametrize("name", ["pairs", "coefficients", "threshold"])
@pytest.mark.parametrize("damage", ["score", "column", "missing"])
def test_damage_to_a_sparse_result_is_found(
    name: str, damage: str, few_rows: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = SparseMatrix._order

    def order(self: SparseMatrix) -> tuple[Array, Array, Array]:
        starts, columns, scores = right(self)
        at = starts[few_rows[0]]
        assert starts[few_rows[0] + 1] - at > 1
        match damage:
            case "score":
                scores[starts[40]] *= 1.25
            case "column":
                columns[at] += 1 if columns[at] + 1 < columns[at + 1] else -1
            case "missing":
                columns, scores = np.delete(columns, at), np.delete(scores, at)
                starts = starts - (np.arange(len(starts)) > few_rows[0])
        return starts, columns, scores

    monkeypatch.setattr(SparseMatrix, "_order", order)
    with pytest.raises(ExecutionError, match=r"are wrong|is .*, and A and B give"):
        RESULTS[name](tile=TILE, verify=True, backend="host")


def test_damage_to_a_stored_result_is_found_before_it_is_complete(tmp_path: Path) -> None:
    """A C that was checked and found wrong can be computed again, and is not taken for a result."""
    path = str(tmp_path / "c.npy")
    right = samples.Samples.check

    def check(self: samples.Samples, made: samples.SampledResult) -> None:
        assert made.stored is not None
        c = np.full((1, N), 0.5, "f4")
        made.stored.matrix.write((60, 61), (0, N), c)
        right(self, made)

    options: dict[str, Any] = {"epilogue": [Scale(U)], "verify": True, "backend": "host"}
    with (
        patch.object(samples.Samples, "check", check),
        pytest.raises(ExecutionError, match=r"C\[60, \d+\] is"),
    ):
        oocgemm.gemm(A, B, path, **options)
    assert not Path(path).exists()
    found = oocgemm.gemm(A, B, path, overwrite=True, **options)
    np.testing.assert_array_equal(np.load(path), (A @ B) * U[:, None].astype("f4"))
    assert checked(found)["sampled"] > 0


def test_the_time_for_samples_is_told_from_the_tail(tmp_path: Path) -> None:
    log = str(tmp_path / "log.jsonl")
    result = oocgemm.gemm(A, B, epilogue=[Scale(U)], verify=True, backend="host", tile=TILE, timeline=log)
    for figures in (result.report, oocgemm.report(log)):
        assert figures.checks is not None
        assert figures.exposed["samples"] >= figures.checks["sampled_seconds"] > 0
        assert sum(figures.exposed.values()) == pytest.approx(figures.wall - figures.compute)
        assert "samples" in figures.shares
    plain = oocgemm.gemm(A, B, epilogue=[Scale(U)], backend="host", tile=TILE)
    assert "samples" not in plain.report.exposed


def test_a_resumed_run_checks_all_of_c(tmp_path: Path) -> None:
    a, b, c = (str(tmp_path / name) for name in ("a.npy", "b.npy", "c.zarr"))
    np.save(a, A)
    np.save(b, B)
    options: dict[str, Any] = {"epilogue": [Scale(U, V)], "verify": True, "backend": "host", "tile": TILE}
    with failing_after(4), pytest.raises(ExecutionError):
        oocgemm.gemm(a, b, c, **options)
    found = oocgemm.gemm(a, b, c, resume=True, **options)
    np.testing.assert_array_equal(found.out[:], (A @ B) * np.outer(U, V).astype("f4"))
    assert checked(found)["sampled"] > 0


@pytest.mark.parametrize("name", ["c.npy", "c.zarr"])
def test_a_result_that_is_wrong_is_not_completed_by_resuming(tmp_path: Path, name: str) -> None:
    """All tiles are recorded, so that none is computed. The samples are checked again all the same."""
    a, b, c = (str(tmp_path / part) for part in ("a.npy", "b.npy", name))
    np.save(a, A)
    np.save(b, B)
    options: dict[str, Any] = {"epilogue": [Scale(U)], "verify": True, "backend": "host", "tile": TILE}
    wrong = pytest.raises(ExecutionError, match="is wrong, or A or B has changed")
    with other_chain(scaled_row), wrong:
        oocgemm.gemm(a, b, c, **options)
    with pytest.raises(ExecutionError, match="is wrong, or A or B has changed"):
        oocgemm.gemm(a, b, c, resume=True, **options)


@contextmanager
def failing_again(error: Exception, times: int) -> Iterator[Fault]:
    """Make that many reads of A or X fail, from when the result is checked."""
    fault = Fault(error, first=1 << 62, times=times)

    def arming(check: Callable[..., None]) -> Callable[..., None]:
        def armed(*given: Any, **options: Any) -> None:
            fault.first = fault.calls + 1
            check(*given, **options)

        return armed

    with (
        faulty_stores(read_A=fault, read_X=fault),
        patch.object(samples.Samples, "check", arming(samples.Samples.check)),
        patch.object(verify, "check_chained", arming(freivalds.check_chained)),
    ):
        yield fault


def test_an_operand_that_cannot_be_read_again_is_named() -> None:
    said = pytest.raises(ExecutionError, match=r"cannot be checked: reading A\[.*\]: EOFError: the file ends")
    with failing_again(EOFError("the file ends"), 1), said:
        RESULTS["scale"](tile=TILE, verify=True, backend="host")


PASSING = [
    OSError(errno.EIO, "passing"),
    ConnectionResetError("reset"),
    type("ServerDisconnectedError", (Exception,), {})("gone"),
]


@pytest.mark.usefixtures("retries_are_soon")
@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_reads_of_samples_are_tried_again(error: Exception) -> None:
    with failing_again(error, 2):
        result = RESULTS["scale"](tile=TILE, verify=True, backend="host")
    retried = result.timeline.header["retried"]
    assert len(retried) == 2
    assert all("reading A[" in where and str(error) in where for where in retried)
    with failing_again(error, 2) as fault:
        oocgemm.pca(A, 2, iterations=1, tol=0, verify=True, backend="host")
    assert fault.calls >= fault.first + 2


def test_an_interrupt_ends_the_waiting_for_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Lock()

    def interrupted_soon(error: BaseException) -> bool:
        if first.acquire(blocking=False):
            Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return True

    monkeypatch.setattr(base, "RETRY_AFTER", (30.0,))
    monkeypatch.setattr(base, "transient", interrupted_soon)
    start = time.monotonic()
    # A shell may have started the tests with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with failing_again(PASSING[0], 1 << 30) as fault, pytest.raises(KeyboardInterrupt):
            RESULTS["scale"](tile=TILE, verify=True, backend="host")
    finally:
        signal.signal(signal.SIGINT, before)
    assert fault.calls >= fault.first
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("to", [Threshold(0.0), TopK(3), MatVec(np.ones(N, "f4"))])
def test_sums_that_overflow_are_no_error(to: Any) -> None:
    large = np.where(A > 0, np.float32(1e25), A.astype("f4"))
    with np.errstate(all="ignore"):
        oocgemm.reduce(large, np.float32(1e25) * B.astype("f4"), to=to, verify=True, backend="host")


def test_the_old_c_cannot_be_computed_again() -> None:
    with pytest.raises(InputError, match=r"pass a copy of it as D of a step Add"):
        oocgemm.gemm(A, B, np.zeros((M, N), "f4"), beta=1.0, epilogue=[Scale(U)], verify=True, backend="host")


def test_samples_are_spread_and_inside() -> None:
    rng = np.random.default_rng(0)
    for extent in (1, 15, 16, 17, 40, 1000):
        for count in (1, 3, 16):
            found = samples.chosen(rng, extent, count)
            assert found == sorted(set(found))
            assert 0 <= found[0] <= found[-1] < extent
            assert len(found) <= count
    assert len(samples.chosen(rng, 1000, 16)) == 16
