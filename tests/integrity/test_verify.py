"""`oocgemm verify`: correct results from any program pass, and wrong ones are found and located."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.backends.checksums import VECTORS, SignVectors
from oocgemm.errors import BudgetError, InputError
from oocgemm.integrity import freivalds
from oocgemm.planning import Op
from oocgemm.stores.arrays import ArrayMatrix
from tests.support.command import command
from tests.support.problems import DTYPES, EXTENTS, Array, drawn_product, integers, reference, stored
from tests.support.suite import examples, slow


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_correct_products_pass(data: st.DataObject) -> None:
    a, b, c, options = drawn_product(data)
    before = c.copy()
    oocgemm.gemm(a, b, c, backend="host", **options)
    found = oocgemm.verify(a, b, c, c_before=before, seed=data.draw(st.integers(0, 99)), **options)
    assert found.ok, found


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
def test_a_wrong_element_is_located(dtype: str, data: st.DataObject) -> None:
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
    c[i, j] += off * {"float16": 32, "complex64": 8}.get(dtype, 1)  # an error larger than those of rounding
    found = oocgemm.verify(a, b, c, beta=beta, c_before=before, trans_a=op_a, trans_b=op_b)
    assert not found.ok
    assert (found.rows, found.cols, found.wrong_rows) == ((i, i + 1), (j, j + 1), 1)


def test_infinities_do_not_hide_errors_beside_them() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((200, 100)), rng.standard_normal((100, 150))
    a[3, 4], b[7, 60] = np.nan, np.inf
    with np.errstate(all="ignore"):
        c = a @ b
    assert oocgemm.verify(a, b, c).ok
    for place in ((10, 20), (150, 149)):
        wrong = c.copy()
        wrong[place] += 1e-6
        found = oocgemm.verify(a, b, wrong)
        assert (found.rows, found.cols) == tuple((x, x + 1) for x in place)
    for place in ((3, 10), (20, 60)):  # places at which every correct element is nonfinite
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
    assert "C[100:150, 350:400] is wrong: 50 of these rows" in found.err
    assert "--overwrite" in found.err
    said = command("verify", a, b, c, "--json")
    assert said.code == 1
    assert (said.json()["ok"], said.json()["rows"], said.json()["cols"]) == (False, [100, 150], [350, 400])
    (c / "c" / "2" / "7").unlink()  # a missing chunk is read as zeros, so the result stays wrong
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
    assert found.ok
    assert found.bytes == 8 * (a.size + b.size + 700 * 800)
    assert largest <= 12_000


def least_memory(a: Any, b: Any, c: Any, **options: Any) -> int:
    """Return the bytes that a `BudgetError` asks for. Checks that the size in its message suffices."""
    with pytest.raises(BudgetError, match="--host-memory is 1 MiB: pass --host-memory") as short:
        oocgemm.verify(a, b, c, host_memory="1MiB", **options)
    assert oocgemm.verify(a, b, c, host_memory=str(short.value).split()[-1], **options).ok
    assert short.value.least is not None
    return short.value.least


def test_fewer_groups_where_memory_is_short() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((500, 2000)), rng.standard_normal((2000, 3000))
    c = a @ b
    assert oocgemm.verify(a, b, c).groups == 3
    found = oocgemm.verify(a, b, c, host_memory=least_memory(a, b, c))
    assert (found.ok, found.groups) == (True, 1)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_blocks_of_rows_and_depth_find_the_same(dtype: str) -> None:
    rng = np.random.default_rng(7)
    a, b = integers(rng, (900, 800), dtype), integers(rng, (800, 3), dtype)
    a[700, 600], b[500, 1] = np.inf, np.nan
    before = integers(rng, (900, 3), dtype)
    with np.errstate(all="ignore"):
        c = a @ b + 2 * before
    options: dict[str, Any] = {"beta": 2, "c_before": before}
    least = least_memory(a, b, c, **options)
    found = oocgemm.verify(a, b, c, host_memory=least, **options)
    passes = found.bytes / (a.nbytes + b.nbytes + 2 * c.nbytes)
    assert found.ok
    assert passes > 1.001  # the memory has no room for all rows or all of k, so op(B) is read more than once
    c[650, 2] += 1000
    found = oocgemm.verify(a, b, c, host_memory=least, **options)
    assert (found.rows, found.cols) == ((650, 651), (2, 3))


def test_vectors_are_the_same_in_any_parts() -> None:
    whole = SignVectors(5).part(0, 1000)
    assert whole.shape == (1000, VECTORS)
    assert set(np.unique(whole)) == {-1.0, 1.0}
    assert np.all(abs(whole.sum(axis=0)) < 150)
    for start, stop in ((0, 1), (31, 33), (100, 1000), (999, 1000)):
        np.testing.assert_array_equal(SignVectors(5).part(start, stop), whole[start:stop])
    assert not np.array_equal(SignVectors(6).part(0, 1000), whole)


# A program that verifies a product, and prints how much more anonymous memory that takes than a small one.
PEAK = """
import sys, threading
import numpy as np
import oocgemm
def held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
names = [name + ".npy" for name in "abc"]
oocgemm.verify(*(np.ones((4, 4)) for _ in "ab"), np.full((4, 4), 4.0))
before, peak, done = held(), 0, threading.Event()
def sample():
    global peak
    while not done.wait(0.001):
        peak = max(peak, held())
thread = threading.Thread(target=sample)
thread.start()
found = oocgemm.verify(*names, host_memory=int(sys.argv[1]))
done.set()
thread.join()
assert found.ok
print(peak - before)
"""


@pytest.mark.parametrize(("m", "k", "n"), [(3, 2, 3_000_000), *slow((1_000_000, 2, 3), (3, 1_000_000, 4))])
def test_memory_stays_within_its_bound(tmp_path: Path, m: int, k: int, n: int) -> None:
    rng = np.random.default_rng(9)
    a, b = integers(rng, (m, k), "float64"), integers(rng, (k, n), "float64")
    for name, array in zip("abc", (a, b, a @ b), strict=True):
        np.save(tmp_path / name, array)
    bound = 32 << 20
    line = [sys.executable, "-c", PEAK, str(bound)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout) < bound + (4 << 20)


def test_single_precision_errors_are_found_50_times_smaller() -> None:
    """The error is compared with 48 u sqrt(k) times the norm of |A| |B| in a group of rows.

    u is the unit roundoff.
    """
    rng = np.random.default_rng(10)
    for k in (1000, 4000):
        a, b = (rng.standard_normal(shape).astype("f4") for shape in ((300, k), (k, 1000)))
        c = a @ b
        right = oocgemm.verify(a, b, c)
        norm = np.linalg.norm(abs(a) @ abs(b), axis=1).max()
        before = 48 * 2.0**-24 * np.sqrt(k) * norm
        assert right.ok
        assert right.tolerance < before / 50
        c[100, 700] += before / 25
        found = oocgemm.verify(a, b, c)
        assert (found.rows, found.cols) == ((100, 101), (700, 701))


def test_the_worst_case_bound_is_an_option(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    a, b = (rng.standard_normal((300, 300)).astype("f4") for _ in "ab")
    c = a @ b
    sharp, sure = (oocgemm.verify(a, b, c, bound=bound) for bound in ("probabilistic", "worst-case"))
    assert (sharp.ok, sure.ok) == (True, True)
    assert sure.tolerance > 100 * sharp.tolerance
    c[3, 4] += 10 * sharp.tolerance
    assert not oocgemm.verify(a, b, c).ok
    assert oocgemm.verify(a, b, c, bound="worst-case").ok
    c[3, 4] += 3 * sure.tolerance
    assert not oocgemm.verify(a, b, c, bound="worst-case").ok
    for name, array in zip("abc", (a, b, c), strict=True):
        np.save(tmp_path / name, array)
    line: list[str | Path] = ["verify", *(tmp_path / f"{name}.npy" for name in "abc")]
    assert "rounding errors are independent" in command(*line).out.replace("\n", "")
    worst = command(*line, "--bound", "worst-case").out.replace("\n", "")
    assert "all rounding errors have their largest size" in worst
    with pytest.raises(InputError, match="unknown bound 'none'"):
        oocgemm.verify(a, b, c, bound="none")
    long = np.broadcast_to(np.float32(0), (1, 1 << 24))
    with pytest.raises(InputError, match="the worst-case bound is infinite for sums of 16777216"):
        oocgemm.verify(long, long, np.zeros((1, 1), "f4"), trans_b=True, bound="worst-case")


def by_columns(a: Array, b: Array) -> Array:
    """Return a product whose terms are added one by one, in the dtype of A and B."""
    c = np.zeros((len(a), b.shape[1]), a.dtype)
    for p in range(len(b)):
        c += a[:, p : p + 1] * b[p]
    return c


def structured(kind: str, rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    """Return operands whose partial sums change at random, grow steadily, or cancel."""
    a, b = rng.random((m, k)), rng.random((k, n))
    match kind:
        case "normal":
            a, b = a * 2 - 1, b * 2 - 1
        case "constant":
            a[...], b[...] = 0.1, 0.1
        case "rank 1":
            b[...] = rng.standard_normal((k, 1))
        case "cancelling":
            b[k // 2 : k // 2 * 2] = -b[: k // 2]
            a[:, k // 2 : k // 2 * 2] = a[:, : k // 2]
        case "alternating":
            a[...], b[...] = a[:, :1], b[:1] * (-1.0) ** np.arange(k)[:, None]
        case "scaled":
            a, b = a * 10.0 ** rng.uniform(-8, 8, (m, 1)) - 0.5, b * 10.0 ** rng.uniform(-8, 8, (k, 1))
        case "sparse":
            a, b = a * (rng.random((m, k)) < 0.02), b * (rng.random((k, n)) < 0.02)
    return a, b


@pytest.mark.parametrize(
    "kind",
    [
        *("normal", "cancelling"),
        *slow(("scaled",), ("positive",), ("constant",), ("rank 1",), ("alternating",), ("sparse",)),
    ],
)
def test_no_correct_product_fails(kind: str) -> None:
    rng = np.random.default_rng(12)
    for m, k, n in ((300, 1, 20), (60, 200, 900), (40, 1024, 400), (20, 6000, 100)):
        for dtype in ("f4", "f8", "c8"):
            a, b = (x.astype(dtype) for x in structured(kind, rng, m, k, n))
            for c in (a @ b, by_columns(a, b)):
                found = oocgemm.verify(a, b, c, seed=int(rng.integers(99)))
                assert found.ok, (m, k, n, dtype, found.excess)
                assert found.excess < 0.8


def test_all_rows_wrong_hints_at_wrong_operands(tmp_path: Path) -> None:
    rng = np.random.default_rng(13)
    a, b, wide = rng.standard_normal((50, 50)), rng.standard_normal((50, 50)), rng.standard_normal((50, 70))
    for name, array in (("a", a), ("b", b), ("c", a @ b), ("wide", wide), ("turned", wide.T)):
        np.save(tmp_path / name, array)

    def said(*names: str) -> str:
        return command("verify", *(tmp_path / f"{name}.npy" for name in names)).err

    for names in (("a", "a", "c"), ("b", "a", "c")):
        assert "All rows are wrong: check that A and B are the operands" in said(*names)
        assert "the shapes also fit with --transpose-b or --transpose-a or" in said(*names)
        assert "--overwrite" not in said(*names)
    assert "shapes do not match" in said("a", "turned", "wide")
    assert "the shapes fit with --transpose-b" in said("a", "turned", "wide")
    assert "the shapes fit with" not in said("wide", "wide", "wide")
    c = a @ b
    c[3:9] = 0
    np.save(tmp_path / "c", c)
    assert "--overwrite" in said("a", "b", "c")
    assert "All rows" not in said("a", "b", "c")


def test_what_cannot_be_verified_is_refused(tmp_path: Path) -> None:
    a, b = np.ones((4, 3)), np.ones((3, 5))
    c = a @ b
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (c[:3], {}, r"C has shape \(3, 5\)"),
        (c.astype("f4"), {}, "dtype float32"),
        (c, {"beta": 1}, "--c-before"),
        (c, {"beta": 1, "c_before": c}, "the same array"),
        (c, {"beta": 1, "c_before": c[:2].copy()}, "the old C has shape"),
        (None, {}, "all needed"),
    ]
    for wrong, options, message in cases:
        with pytest.raises(InputError, match=message):
            oocgemm.verify(a, b, wrong, **options)
    assert command("verify", tmp_path / "none", tmp_path / "none", tmp_path / "none").code == 2


def test_progress_is_reported_for_each_operand() -> None:
    rng = np.random.default_rng(14)
    a, b = rng.standard_normal((600, 700)), rng.standard_normal((700, 800))
    said: list[str] = []
    oocgemm.verify(a, b, a @ b, say=said.append)
    assert [text.split(",")[0] for text in said if " 100% " in text] == [
        "reading B",
        "reading A",
        "reading C",
    ]


def test_empty_products_pass() -> None:
    for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 4, 0)):
        c = np.zeros((m, n))
        assert oocgemm.verify(np.ones((m, k)), np.ones((k, n)), c).ok
        if c.size:
            c[1, 2] = 1
            assert not oocgemm.verify(np.ones((m, k)), np.ones((k, n)), c).ok


def test_long_float32_sums_pass_and_their_errors_are_found() -> None:
    """The error bound holds for any order of summation, and a chunk of zeros in C exceeds it."""
    rng = np.random.default_rng(8)
    k = 20_000
    for make in (rng.standard_normal, rng.random):
        a, b = make((60, k)).astype("f4"), make((k, 400)).astype("f4")
        c = a @ b
        assert oocgemm.verify(a, b, c).ok
        c[10:30, 100:130] = 0
        found = oocgemm.verify(a, b, c)
        assert (found.rows, found.cols) == ((10, 30), (100, 130))
