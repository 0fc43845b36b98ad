"""`verify=True`: errors between reading and writing are found and repaired, and correct tiles pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.backends.base import DoneToken
from oocgemm.backends.host.backend import HostSession
from oocgemm.engine.staging import Staging
from oocgemm.errors import ExecutionError
from oocgemm.integrity.checksums.check import Checks
from oocgemm.integrity.checksums.host import HostSums
from oocgemm.planning import Kind, Op, Operation
from oocgemm.planning.cost import machine as machine_model
from oocgemm.planning.search import slot_counts
from tests.backends_here import CUDA, needs_gpu, staged
from tests.problems import DTYPES, Array, drawn_product, integers, reference, scaled
from tests.suite import examples
from tests.summing import summed

ENGINES = [
    pytest.param("host"),
    pytest.param("host-staged"),
    pytest.param("host-summed"),  # the checksums are computed by a fake device
    pytest.param("cuda", marks=needs_gpu),
]
SUMMED = ENGINES[2:]
SETTINGS = {"host-staged": staged, "host-summed": summed}


def product(engine: str, a: Array, b: Array, c: Array | None = None, **options: Any) -> oocgemm.Result:
    with SETTINGS.get(engine, nullcontext)():
        return oocgemm.gemm(a, b, c, backend=engine.partition("-")[0], verify=True, **options)


def checked(result: oocgemm.Result) -> dict[str, Any]:
    found = result.report.checks
    assert found is not None
    return dict(found)


# Correct runs


@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_correct_products_pass(engine: str, data: st.DataObject) -> None:
    a, b, c, options = drawn_product(data)
    tile = data.draw(st.none() | st.builds("{}x{}x{}".format, *(st.integers(10, 200),) * 3), "tile")
    result = product(engine, a, b, c, tile=tile, **options)
    found = checked(result)
    assert found["recomputed"] == []
    assert found["blocks"] > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_numbers_are_decided(engine: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (scaled(rng, (300, 300), dtype, "normal") for _ in "ABC")
    found = checked(product(engine, a, b, c, alpha=0.5, beta=2, tile="150x200x64"))
    assert found["undecided"] == 0
    assert found["tiles"] == 4


# Runs with errors


def tampering(change: Callable[[Array], None], kind: Kind, tile: tuple[int, int], times: int) -> Any:
    """Change the output of a tile's operation in memory, `times` times.

    On the device this is a panel, or an accumulator before its download. On the host it is some rows of C
    before they are written.
    """
    left = times

    def of(operation: Operation) -> bool:
        nonlocal left
        # The old C is left out: it may be uploaded before or after the panels.
        panel = kind is not Kind.UPLOAD or operation.operand != "C"
        if operation.kind is kind and panel and operation.tile == tile and left:
            left -= 1
            return True
        return False

    if kind is Kind.WRITE:
        right = Checks.transfer

        def transfer(self: Checks, staging: Staging, operation: Operation, columns: Sequence[Array]) -> bool:
            if of(operation):
                change(columns[0])
            return right(self, staging, operation, columns)

        return patch.object(Checks, "transfer", transfer)
    return _on_device(of, change)


@contextmanager
def _on_device(of: Callable[[Operation], bool], change: Callable[[Array], None]) -> Iterator[None]:
    """Change the outputs of the operations that `of` selects, on the device."""
    on_host = HostSession.submit

    def submit(self: HostSession, operation: Operation, host: Any, after: Any) -> DoneToken:
        token = on_host(self, operation, host, after)
        if of(operation):
            change(self.view(operation, operation.writes[0]))
        return token

    with patch.object(HostSession, "submit", submit):
        if not CUDA:
            yield
            return
        import cupy

        from oocgemm.backends.cuda.session import CudaSession

        on_cuda = CudaSession.submit

        def submit_on_cuda(self: CudaSession, operation: Operation, host: Any, after: Any) -> Any:
            token = on_cuda(self, operation, host, after)
            if of(operation):
                token.synchronize()
                region = operation.writes[0]
                problem = self._problem
                name = problem.acc_dtype if region.slot.operand == "C" else problem.a_dtype
                held = np.empty(region.stop - region.start, name)
                address = self._address(region)
                cupy.cuda.runtime.memcpy(held.ctypes.data, address, held.nbytes, 2)
                change(held.reshape(1, -1))
                cupy.cuda.runtime.memcpy(address, held.ctypes.data, held.nbytes, 1)
            return token

        with patch.object(CudaSession, "submit", submit_on_cuda):
            yield


def one_element(view: Array) -> None:
    view[view.shape[0] // 2, view.shape[1] // 3] += 1


def one_element_much(view: Array) -> None:
    view[view.shape[0] // 2, view.shape[1] // 3] += 64


def one_nan(view: Array) -> None:
    view[-1, -1] = np.nan


def one_infinity(view: Array) -> None:
    view[0, 0] = np.inf


def swapped(view: Array) -> None:
    view[...] = view[:, ::-1].copy()


FAULTS = [
    pytest.param(one_element, Kind.MULTIPLY, id="an element of the accumulator"),
    pytest.param(one_element, Kind.WRITE, id="an element of a strip on the host"),
    pytest.param(one_nan, Kind.MULTIPLY, id="a NaN in the accumulator"),
    pytest.param(one_infinity, Kind.WRITE, id="an infinity in a strip"),
    pytest.param(swapped, Kind.UPLOAD, id="a panel in another order"),
]


def operands(dtype: str = "float64") -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(7)
    return integers(rng, (150, 90), dtype), integers(rng, (90, 160), dtype), integers(rng, (150, 160), dtype)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("change", "kind"), FAULTS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128", "float16"])
@pytest.mark.parametrize("beta", [0, 1])
def test_an_error_in_a_tile_is_put_right(
    engine: str,
    change: Callable[[Array], None],
    kind: Kind,
    dtype: str,
    beta: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if engine == "host" and kind is Kind.UPLOAD:
        pytest.skip("nothing is uploaded where the device is the host")
    monkeypatch.setattr(slot_counts, "STRIP_BYTES", 1)
    # Several strips per tile, of which some are right and are already written.
    monkeypatch.setattr(slot_counts, "STAGED_STRIPS", 4)
    monkeypatch.setattr(slot_counts, "STRIPS", 4)
    monkeypatch.setattr(machine_model, "STRIP_BLOCK", 1)
    a, b, c = operands(dtype)
    expected = reference(1, Op.N, a, Op.N, b, beta, c)
    if dtype == "float16" and change is one_element:
        # In float16, rounding changes the sums of a block by more than one_element does.
        change = one_element_much
    with tampering(change, kind, (1, 1), times=1):
        result = product(engine, a, b, c, beta=beta, tile="80x100x30")
    assert result.plan.slots.strip < result.plan.tile.m
    # The wrong panel is multiplied in another tile of the row or column too, so that tile is also recomputed.
    *others, last = checked(result)["recomputed"]
    assert last == [1, 1]
    assert others in ([[0, 1]], [[1, 0]]) if kind is Kind.UPLOAD else not others
    np.testing.assert_array_equal(c, expected.astype(dtype) if c.dtype.kind == "c" else expected.real)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_number_where_there_must_be_none_is_an_error(engine: str) -> None:
    a, b, _ = operands()
    a[10, 20], b[30, 40] = np.nan, np.inf
    with np.errstate(all="ignore"):
        expected = a @ b

    def heal(view: Array) -> None:
        view[10, 3] = 1

    with tampering(heal, Kind.WRITE, (0, 0), times=1):
        result = product(engine, a, b, tile="80x100x30")
    assert checked(result)["recomputed"] == [[0, 0]]
    np.testing.assert_array_equal(result.out, expected)


@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize("operand", ["A", "B"])
def test_a_stale_slot_is_noticed(engine: str, operand: str) -> None:
    """One upload is skipped, so that the device buffer still contains the previous panel."""
    a, b, _ = operands()
    left = 1

    def stale(right: Callable[..., Any]) -> Callable[..., Any]:
        def submit(self: Any, operation: Operation, host: Any, after: Any) -> Any:
            nonlocal left
            if operation.kind is Kind.UPLOAD and (operation.operand, operation.step) == (operand, 2) and left:
                left -= 1
                for token in after:
                    token.synchronize()
                return DoneToken(now := perf_counter_ns(), now)
            return right(self, operation, host, after)

        return submit

    session: Any = HostSession
    if engine == "cuda":
        from oocgemm.backends.cuda.session import CudaSession as session  # noqa: N813
    with patch.object(session, "submit", stale(session.submit)):
        result = product(engine, a, b, tile="150x160x30")
    assert checked(result)["recomputed"] == [[0, 0]]
    np.testing.assert_array_equal(result.out, a @ b)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_that_comes_again_ends_the_run(engine: str, tmp_path: Path) -> None:
    a, b, _ = operands()
    with (
        tampering(one_element, Kind.WRITE, (1, 1), times=2),
        pytest.raises(
            ExecutionError, match=r"C\[80:150, 100:160\] of tile \(1, 1\) differs from its checksums"
        ),
    ):
        product(engine, a, b, tile="80x100x30")
    with (
        tampering(one_element, Kind.MULTIPLY, (1, 1), times=10**6),
        pytest.raises(ExecutionError, match="twice"),
    ):
        product(engine, a, b, tile="80x100x30")


def flipped(panel: Array) -> None:
    """Flip the lowest bit of one element, in a row that digests cover.

    The change is far smaller than rounding errors.
    """
    panel.view(np.uint8)[0, 2 * panel.itemsize] ^= 1


def rows_swapped(panel: Array) -> None:
    panel[[0, 5]] = panel[[5, 0]]


def of_another_panel(panel: Array) -> None:
    panel[...] = np.roll(panel, 7, axis=1)


@pytest.mark.parametrize("engine", SUMMED)
@pytest.mark.parametrize("change", [flipped, rows_swapped, of_another_panel])
@pytest.mark.parametrize("operand", ["A", "B", "C"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_panel_corrupted_before_upload_is_corrected(
    engine: str, change: Callable[[Array], None], operand: str, dtype: str
) -> None:
    """The panel changes in host memory after it was read and before it is uploaded."""
    rng = np.random.default_rng(8)
    a, b, c = (scaled(rng, shape, dtype, "normal") for shape in ((150, 90), (90, 160), (150, 160)))
    left = 1
    session: Any = HostSession
    if engine == "cuda":
        from oocgemm.backends.cuda.session import CudaSession as session  # noqa: N813
    right = session.submit

    def submit(self: Any, operation: Operation, host: Any, after: Any) -> Any:
        nonlocal left
        if (
            operation.kind is Kind.UPLOAD
            and (operation.operand, operation.tile) == (operand, (0, 0))
            and left
        ):
            left -= 1
            for token in after:
                token.synchronize()
            change(host[0])
        return right(self, operation, host, after)

    plain, found = c.copy(), c.copy()
    options: dict[str, Any] = {"tile": "80x100x30", "beta": 1}
    product(engine, a, b, plain, **options)
    with patch.object(session, "submit", submit):
        result = product(engine, a, b, found, **options)
    assert not left
    assert [0, 0] in checked(result)["recomputed"]
    np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize("engine", SUMMED)
def test_one_bit_of_a_strip_on_its_way_out_is_put_right(engine: str) -> None:
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((150, 90)), rng.standard_normal((90, 160))
    plain = product(engine, a, b, tile="80x100x30").out
    with tampering(flipped, Kind.WRITE, (1, 0), times=1):
        result = product(engine, a, b, tile="80x100x30")
    found = checked(result)
    assert found["recomputed"] == [[1, 0]]
    assert found["tier"] == "device"
    np.testing.assert_array_equal(result.out, plain)


def test_a_wrong_strip_never_reaches_the_store(tmp_path: Path) -> None:
    a, b, _ = operands()
    with tampering(one_element, Kind.WRITE, (0, 0), times=2), pytest.raises(ExecutionError):
        oocgemm.gemm(
            a,
            b,
            zarr.create_array(tmp_path / "C", shape=(150, 160), dtype="f8", chunks=(80, 100)),
            backend="host",
            verify=True,
            tile="80x100x30",
        )
    found = zarr.open_array(tmp_path / "C")[:]
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found[:80, :100], 0)
    np.testing.assert_array_equal(found[80:, 100:], (a @ b)[80:, 100:])


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("verify", [True, False])
def test_a_tile_that_failed_is_left_to_resume(tmp_path: Path, beta: int, verify: bool) -> None:
    """The tile is not recorded as done, but all others are, so that resuming computes only this tile."""
    a, b, c = operands()
    for name, x in (("A", a), ("B", b), ("C", c)):
        if name != "C" or beta:
            zarr.create_array(tmp_path / name, data=x, chunks=(80, 100), compressors=None)
    paths = [tmp_path / name for name in "ABC"]
    options: dict[str, Any] = {"beta": beta, "backend": "host", "tile": "80x100x30"}
    with tampering(one_element, Kind.WRITE, (1, 0), times=2), pytest.raises(ExecutionError, match="twice"):
        oocgemm.gemm(*paths, verify=True, **options)
    result = oocgemm.gemm(*paths, resume=True, verify=verify, **options)
    assert {span.tile for span in result.timeline.spans} == {(1, 0)}
    np.testing.assert_array_equal(zarr.open_array(paths[2])[:], a @ b + beta * c)


def test_without_verify_nothing_is_noticed() -> None:
    """The changes that the other tests make are errors, which a run without checks does not notice."""
    a, b, _ = operands()
    with _on_device(lambda o: o.kind is Kind.MULTIPLY and o.tile == (0, 0), one_element):
        result = oocgemm.gemm(a, b, backend="host", tile="80x100x30")
    assert result.report.checks is None
    assert (result.out != a @ b).any()


# Memory and strips


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("beta", [0, 1])
def test_a_last_strip_that_is_shorter_passes(engine: str, beta: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_counts, "STRIP_BYTES", 1)
    monkeypatch.setattr(slot_counts, "STAGED_STRIPS", 3)
    monkeypatch.setattr(slot_counts, "STRIPS", 3)
    rng = np.random.default_rng(9)
    a, b, c = (scaled(rng, shape, "float64", "normal") for shape in ((1000, 60), (60, 90), (1000, 90)))
    result = product(engine, a, b, c, beta=beta, tile="700x90x60")
    assert 700 % result.plan.slots.strip > 128
    assert checked(result)["recomputed"] == []


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_checksums_are_within_the_plan(data: st.DataObject) -> None:
    """The memory that checksums take is at most what the plan reserves for them."""
    m, n, k = (data.draw(st.integers(50, 400)) for _ in "mnk")
    most = 0
    right = HostSums.submit

    def submit(self: HostSums, operation: Operation) -> None:
        nonlocal most
        right(self, operation)
        sums = {id(x): x.sums.nbytes + x.norms.nbytes for x in list(self._panels.values())}
        tiles = ([x.product, x.norm, x.old, x.old_norm] for x in list(self._tiles.values()))
        most = max(most, sum(sums.values()) + sum(x.nbytes for tile in tiles for x in tile))

    dtype = data.draw(st.sampled_from(DTYPES))
    a, b = np.ones((m, k), dtype), np.ones((k, n), dtype)
    with patch.object(HostSums, "submit", submit):
        result = product(
            data.draw(st.sampled_from(["host", "host-staged"])),
            a,
            b,
            tile="64x80x40",
            device_memory="40MiB",
            host_memory="40MiB",
        )
    footprint = result.plan.footprint
    assert 0 < most + 8 * (m + n) <= footprint.host["checks"]
    assert footprint.host_total <= result.plan.budgets.host


@pytest.mark.parametrize("engine", SUMMED)
def test_a_device_that_takes_checksums_keeps_to_its_budget(engine: str) -> None:
    rng = np.random.default_rng(10)
    a, b = rng.standard_normal((700, 500)), rng.standard_normal((500, 600))
    result = product(engine, a, b, device_memory="100MiB", host_memory="20MiB", tile="160x150x64")
    held = result.timeline.header["held"]
    assert 0 < held["device"] <= result.plan.footprint.device_total <= 100 << 20
    assert 0 < held["host"] <= result.plan.footprint.host_total <= 20 << 20
    assert checked(result)["undecided"] == 0
