"""`oocgemm verify`: right results pass whatever made them, wrong ones are found and told where."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm import freivalds
from oocgemm.errors import BudgetError, InputError
from oocgemm.plan import Op
from oocgemm.stores.arrays import ArrayMatrix
from tests.command import command
from tests.problems import DTYPES, EXTENTS, Array, drawn_product, integers, reference, stored


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_right_passes(data: st.DataObject) -> None:
    a, b, c, options = drawn_product(data)
    before = c.copy()
    oocgemm.gemm(a, b, c, backend="host", **options)
    found = oocgemm.verify(a, b, c, c_before=before, seed=data.draw(st.integers(0, 99)), **options)
    assert found.right, found


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_wrong_element_is_found_where_it_is(dtype: str, data: st.DataObject) -> None:
    m, n, k = (data.draw(EXTENTS, label) for label in "mnk")
    op_a, op_b = (data.draw(st.sampled_from(list(Op))) for _ in "AB")
    beta = data.draw(st.sampled_from([0, 1]), "beta")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    a, b = integers(rng, stored(op_a, m, k), dtype), integers(rng, stored(op_b, k, n), dtype)
    before = integers(rng, (m, n), dtype)
    exact = reference(1, op_a, a, op_b, b, beta, before)
    c = (exact if np.dtype(dtype).kind == "c" else exact.real).astype(dtype)
    i, j = int(rng.integers(m)), int(rng.integers(n))
    off = data.draw(st.sampled_from([1, np.nan, np.inf]), "off by")
    c[i, j] += off * {"float16": 32, "complex64": 8}.get(dtype, 1)  # above rounding
    found = oocgemm.verify(a, b, c, beta=beta, c_before=before, trans_a=op_a, trans_b=op_b)
    assert not found.right
    assert (found.rows, found.cols, found.wrong_rows) == ((i, i + 1), (j, j + 1), 1)


def test_infinities_do_not_hide_errors_beside_them() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((200, 100)), rng.standard_normal((100, 150))
    a[3, 4], b[7, 60] = np.nan, np.inf
    with np.errstate(all="ignore"):
        c = a @ b
    assert oocgemm.verify(a, b, c).right
    for place in ((10, 20), (150, 149)):
        wrong = c.copy()
        wrong[place] += 1e-6
        found = oocgemm.verify(a, b, wrong)
        assert (found.rows, found.cols) == tuple((x, x + 1) for x in place)
    for place in ((3, 10), (20, 60)):  # where there must be none that is finite
        wrong = c.copy()
        wrong[place] = 1
        found = oocgemm.verify(a, b, wrong)
        assert (found.rows, found.cols) == tuple((x, x + 1) for x in place)


def written(folder: Path, name: str, x: Array, chunk: int) -> Path:
    zarr.create_array(folder / name, data=x, chunks=(chunk, chunk), compressors=None)
    return folder / name


def test_a_chunk_of_zeros_is_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    a = written(tmp_path, "A", rng.standard_normal((300, 200)), 64)
    b = written(tmp_path, "B", rng.standard_normal((200, 500)), 64)
    c = tmp_path / "C"
    oocgemm.matmul(a, b, out=c, backend="host", chunks=(50, 50), tile="100x100x64")
    assert command("verify", a, b, c).code == 0
    whole = (c / "c" / "2" / "7").stat().st_size
    (c / "c" / "2" / "7").write_bytes(bytes(whole))
    found = command("verify", a, b, c)
    assert found.code == 1
    assert found.err.count("\n") == 1
    assert "wrong in C[100:150, 350:400]: 50 rows" in found.err
    assert "--overwrite" in found.err
    said = command("verify", a, b, c, "--json")
    assert said.code == 1
    assert (said.json()["right"], said.json()["rows"], said.json()["cols"]) == (False, [100, 150], [350, 400])
    (c / "c" / "2" / "7").unlink()  # which reads as zeros as well
    assert command("verify", a, b, c).code == 1


def test_each_operand_is_read_once_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((700, 900)), rng.standard_normal((900, 800))
    monkeypatch.setattr(freivalds, "PIECE", 10_000)
    right, largest = ArrayMatrix.read, 0

    def read(self: ArrayMatrix, rows: Any, cols: Any, out: Array) -> None:
        nonlocal largest
        largest = max(largest, out.size)
        right(self, rows, cols, out)

    monkeypatch.setattr(ArrayMatrix, "read", read)
    found = oocgemm.verify(a, b, a @ b)
    assert found.right
    assert found.bytes == 8 * (a.size + b.size + 700 * 800)
    assert largest <= 12_000


def test_fewer_groups_where_memory_is_short() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((500, 2000)), rng.standard_normal((2000, 3000))
    c = a @ b
    assert oocgemm.verify(a, b, c).groups == 3
    with pytest.raises(BudgetError, match="--host-memory is 4 MiB") as short:
        oocgemm.verify(a, b, c, host_memory="4MiB")
    least = short.value.least
    assert least is not None
    found = oocgemm.verify(a, b, c, host_memory=least)
    assert (found.right, found.groups) == (True, 1)


def test_what_cannot_be_verified_is_refused(tmp_path: Path) -> None:
    a, b = np.ones((4, 3)), np.ones((3, 5))
    c = a @ b
    for wrong, options, message in (
        (c[:3], {}, r"C has shape \(3, 5\)"),
        (c.astype("f4"), {}, "dtype float32"),
        (c, {"beta": 1}, "--c-before"),
        (c, {"beta": 1, "c_before": c}, "the same array"),
        (c, {"beta": 1, "c_before": c[:2].copy()}, "the C from before has shape"),
        (None, {}, "all needed"),
    ):
        with pytest.raises(InputError, match=message):
            oocgemm.verify(a, b, wrong, **options)
    assert command("verify", tmp_path / "none", tmp_path / "none", tmp_path / "none").code == 2


def test_empty_products_are_right() -> None:
    for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 4, 0)):
        c = np.zeros((m, n))
        assert oocgemm.verify(np.ones((m, k)), np.ones((k, n)), c).right
        if c.size:
            c[1, 2] = 1
            assert not oocgemm.verify(np.ones((m, k)), np.ones((k, n)), c).right


def test_single_precision_in_long_sums() -> None:
    """Of any order of summation, and sensitive all the same: a chunk of zeros is far off."""
    rng = np.random.default_rng(8)
    k = 20_000
    for make in (rng.standard_normal, rng.random):
        a, b = make((60, k)).astype("f4"), make((k, 400)).astype("f4")
        c = a @ b
        assert oocgemm.verify(a, b, c).right
        c[10:30, 100:130] = 0
        found = oocgemm.verify(a, b, c)
        assert (found.rows, found.cols) == ((10, 30), (100, 130))
