"""`verify=True`: errors between reading and writing are found and put right."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.backends.base import DoneToken, Pageable
from oocgemm.backends.host.backend import HostSession
from oocgemm.errors import ExecutionError
from oocgemm.planning import Kind, Op, Operation
from oocgemm.planning.cost import machine as machine_model
from oocgemm.planning.search import slot_counts
from oocgemm.planning.tiling import Range
from tests.support.faulty_runs import saved
from tests.support.problems import Array, reference, scaled
from tests.support.suite import each_value, slow
from tests.support.tampering import ENGINES, SUMMED, checked, one_element, operands, product, tampering


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


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("change", "kind"), FAULTS)
@pytest.mark.parametrize("dtype", ["float64", "float16", *slow(("float32",), ("complex128",))])
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
                return DoneToken((now := perf_counter_ns(), now))
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


def damaged(panel: Pageable, change: Callable[[Array], None]) -> Pageable:
    """Return a panel of which the device receives changed data."""
    (rows, cols), changed = panel.shape, np.empty(panel.shape, panel.dtype)
    panel.move((0, rows), (0, cols), changed)
    change(changed)

    def move(rows: Range, cols: Range, part: Array) -> None:
        part[...] = changed[slice(*rows), slice(*cols)]

    return Pageable(panel.shape, panel.dtype, move)


ODD: dict[str, Callable[[Array], Array]] = {
    "every second column": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "columns in reverse order": lambda x: x[:, ::-1].copy()[:, ::-1],
    "another byte order": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "a memory map": lambda x: x,
}


@pytest.mark.parametrize("engine", SUMMED)
@pytest.mark.parametrize("kind", ODD)
def test_digests_are_of_what_the_device_receives(engine: str, kind: str, tmp_path: Path) -> None:
    """Rows of arrays in memory may be strided, in another byte order, or in a file."""
    a, b, _ = operands()
    x, y = ODD[kind](a), ODD[kind](b)
    if kind == "a memory map":
        x, y = (np.load(path, mmap_mode="r") for path in saved(tmp_path, a, b))
    result = product(engine, x, y, tile="80x100x30")
    assert checked(result)["recomputed"] == []
    np.testing.assert_array_equal(result.out, a @ b)


@each_value
@pytest.mark.parametrize("engine", SUMMED)
@pytest.mark.parametrize("change", [flipped, rows_swapped, of_another_panel])
@pytest.mark.parametrize("operand", ["A", "B", "C"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_panel_corrupted_before_upload_is_corrected(
    engine: str, change: Callable[[Array], None], operand: str, dtype: str, stored: bool, tmp_path: Path
) -> None:
    """The data change after the host has computed their digest.

    Panels of stored operands, and strips of C, change in their host slots. Panels of operands in memory
    change on the way to the device.
    """
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
            assert isinstance(host, Pageable) == (operand != "C" and not stored)
            if isinstance(host, Pageable):
                host = damaged(host, change)
            else:
                change(host[0])
        return right(self, operation, host, after)

    plain, found = c.copy(), c.copy()
    options: dict[str, Any] = {"tile": "80x100x30", "beta": 1}
    x, y = saved(tmp_path, a, b) if stored else (a, b)
    product(engine, x, y, plain, **options)
    with patch.object(session, "submit", submit):
        result = product(engine, x, y, found, **options)
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
@pytest.mark.parametrize("verify", [True, *slow((False,))])
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
