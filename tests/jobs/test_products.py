"""Whole runs on every backend and kernel give what NumPy gives, bit for bit on small integers."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import zarr
import zarr.codecs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.backends.host.blas import numpy_gemm
from oocgemm.engine import staging
from oocgemm.errors import InputError
from oocgemm.planning import Op
from oocgemm.stores import zarr_chunks as chunks
from oocgemm.stores.codecs import Encoding
from tests.support.backends_here import BACKENDS, ENGINES, REAL_ENGINES, Engine, running_on, staged
from tests.support.problems import (
    ALL_DTYPES,
    DTYPES,
    applied,
    assert_same,
    integer_c,
    integers,
    reference,
    spoil,
    stored,
)
from tests.support.suite import each_value, examples

SCALARS = st.sampled_from([0, 1, -1, 2])
EXTENTS = st.one_of(st.integers(1, 40), st.sampled_from([1, 2, 13, 31, 64]))
OPS = st.sampled_from(list(Op))


@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
@settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_product_is_exact(engine: Engine, data: st.DataObject) -> None:
    m, n = data.draw(EXTENTS), data.draw(EXTENTS)
    k = data.draw(st.one_of(st.just(0), EXTENTS))
    dtype, op_a, op_b = data.draw(st.sampled_from(ALL_DTYPES)), data.draw(OPS), data.draw(OPS)
    alpha, beta = data.draw(SCALARS), data.draw(SCALARS)
    # Small tiles would take too long on a fake GPU.
    extents = st.integers(16 if engine[0] == "fake-cuda" else 1, 45)
    tile = data.draw(st.none() | st.builds("{}x{}x{}".format, *(extents,) * 3))
    seed = data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    a, b = (integers(rng, s, dtype) for s in (stored(op_a, m, k), stored(op_b, k, n)))
    c = integer_c(rng, (m, n), dtype)
    expected = reference(alpha, op_a, a, op_b, b, beta, c)
    if beta == 0:
        spoil(c)  # with beta = 0, C must not be read
    with running_on(engine, seed=seed) as options:
        options |= {"trans_a": op_a, "trans_b": op_b, "tile": tile}
        result = oocgemm.gemm(a, b, c, alpha=alpha, beta=beta, **options)
    assert result.out is c
    assert_same(c, expected)
    crossed = {link: moved["bytes"] for link, moved in result.report.traffic.items()}
    assert crossed == result.plan.traffic
    assert all(moved >= result.plan.least[link] for link, moved in result.plan.traffic.items())


@given(data=st.data())
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_chunking_and_budget_is_exact(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("run")
    m, n, k = (data.draw(st.integers(1, 60)) for _ in range(3))
    dtype, op_a, op_b = data.draw(st.sampled_from(ALL_DTYPES)), data.draw(OPS), data.draw(OPS)
    beta = data.draw(st.sampled_from([0, 1]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    a, b = (integers(rng, s, dtype) for s in (stored(op_a, m, k), stored(op_b, k, n)))
    c = integer_c(rng, (m, n), dtype)
    for name, array in (("A", a), ("B", b), ("C", c)):
        _store(folder / name, array, data)
    # Budgets from slightly more than the smallest plan needs, to far more.
    device = (16 << 20) + data.draw(st.sampled_from([12_000, 40_000, 400_000]))
    host = (8 << 20) + data.draw(st.sampled_from([60_000, 200_000, 2_000_000]))
    options: dict[str, Any] = {"trans_a": op_a, "trans_b": op_b, "backend": "host", "overwrite": True}
    options |= {"device_memory": device, "host_memory": host, "beta": beta}
    try:
        with staged(data.draw(st.integers(1, 4))) if data.draw(st.booleans()) else nullcontext():
            result = oocgemm.gemm(*(folder / name for name in "ABC"), **options)
    except oocgemm.BudgetError as error:
        assert error.least is not None
        assert error.least > min(device, host)
        return
    assert_same(zarr.open_array(folder / "C")[:], reference(1, op_a, a, op_b, b, beta, c))  # type: ignore[arg-type]
    footprint = result.plan.footprint
    assert footprint.device_total <= device
    assert footprint.host_total <= host


def _store(path: Path, array: np.ndarray[Any, Any], data: st.DataObject) -> None:
    """Store an array as zarr, in a random format, with random chunks, compression and shards."""
    chunks = tuple(data.draw(st.integers(1, extent)) for extent in array.shape)
    kind = data.draw(st.sampled_from(["v3", "v3-zstd", "v3-sharded", "v3-big", "v2", "v2-F", "v2-zstd"]))
    options: dict[str, Any] = {"compressors": None}
    if kind.endswith("zstd"):
        options = {}
    elif kind == "v3-sharded":
        options["shards"] = tuple(c * data.draw(st.integers(1, 3)) for c in chunks)
    elif kind == "v3-big":
        options["serializer"] = zarr.codecs.BytesCodec(endian="big")
    elif kind == "v2-F":
        options["order"] = "F"
    zarr.create_array(path, data=array, chunks=chunks, zarr_format=int(kind[1]), **options)  # type: ignore[arg-type]


@each_value
@pytest.mark.parametrize("engine", REAL_ENGINES)
@pytest.mark.parametrize("tile", ["32x48x24", "20x13x17"])  # along the borders of chunks, and across them
@pytest.mark.parametrize("op", list(Op))
def test_compressed_panels_are_exact_and_decoded_in_place(
    engine: Engine, tile: str, op: Op, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    m, n, k = 61, 70, 90
    for name, shape in (("A", stored(op, m, k)), ("B", stored(op, k, n))):
        zarr.create_array(tmp_path / name, data=integers(rng, shape, "float32"), chunks=(8, 8))
    a, b = (zarr.open_array(tmp_path / name)[:] for name in "AB")
    in_place: list[bool] = []

    def decode(self: Encoding, stored: Any, shape: tuple[int, int], into: Any) -> Any:
        in_place.append(into is not None)
        return plainly(self, stored, shape, into)

    plainly = Encoding.decode
    with (
        running_on(engine, io_threads=2) as options,
        patch.object(staging, "BATCH_BYTES", 1),
        patch.object(chunks, "MAX_DECODED", 0),  # smaller chunks are decoded in scratch memory
        patch.object(Encoding, "decode", decode),
    ):
        given: dict[str, Any] = {"trans_a": op, "trans_b": op, "tile": tile}
        result = oocgemm.gemm(tmp_path / "A", tmp_path / "B", **given, **options)
    assert_same(result.out, reference(1, op, a, op, b, 0, None))  # type: ignore[arg-type]
    if not result.plan.machine.unified and tile == "32x48x24":
        # Most chunks are decoded directly into the panel. Only those that the edge of a matrix cuts off are
        # not.
        assert sum(in_place) / len(in_place) > 0.7


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("compressor", [None, "auto"])
def test_chunks_of_c_come_whole_and_exact_from_their_slots(
    engine: Engine,
    verify: bool,
    compressor: Literal["auto"] | None,
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(6)
    a, b, c = (integers(rng, shape, "float64") for shape in ((61, 30), (30, 70), (61, 70)))
    c[3, 5] = np.inf  # an Inf in the old C, which the checks must expect in the result
    zarr.create_array(tmp_path / "C", data=c, chunks=(8, 12), compressors=compressor)
    contiguous: list[bool] = []

    def encode(self: Encoding, part: Any, shape: tuple[int, int], fill: Any) -> Any:
        contiguous.append(part.flags.c_contiguous)
        return plainly(self, part, shape, fill)

    plainly = Encoding.encode
    with (
        running_on(engine, io_threads=2) as options,
        patch.object(staging, "BATCH_BYTES", 1),
        patch.object(Encoding, "encode", encode),
    ):
        given: dict[str, Any] = {"beta": 1, "verify": verify, "tile": "24x36x10"}
        result = oocgemm.gemm(a, b, tmp_path / "C", **given, **options)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "C")[:], a @ b + c)
    if not result.plan.machine.unified:
        assert len(contiguous) == 8 * 6
        assert all(contiguous)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_propagate_and_beta_zero_hides_them(backend: str) -> None:
    a = np.array([[1.0, np.nan], [np.inf, 2.0], [0.0, 0.0]])
    b = np.array([[1.0, 0.0], [0.0, 1.0]])
    c = np.full((3, 2), np.nan)
    with running_on(backend) as options:
        oocgemm.gemm(a, b, c, tile="2x2x1", **options)
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(c, a @ b)
        oocgemm.gemm(a, b, c, alpha=0, **options)  # alpha = 0 reads neither A nor B
    np.testing.assert_array_equal(c, np.zeros((3, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
def test_empty_extents_give_beta_c(backend: str, m: int, n: int, k: int, tmp_path: Path) -> None:
    c = np.full((m, n), 3.0)
    with running_on(backend) as options:
        oocgemm.gemm(np.ones((m, k)), np.ones((k, n)), c, beta=2, **options)
        np.testing.assert_array_equal(c, np.full((m, n), 6.0))
        for name in ("C.zarr", "C.npy"):
            out = oocgemm.matmul(np.ones((m, k)), np.ones((k, n)), out=tmp_path / name, **options)
            np.testing.assert_array_equal(out[:], np.zeros((m, n)))


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("alpha", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
@pytest.mark.parametrize("verify", [False, True])
def test_nothing_to_multiply_gives_beta_c_whatever_alpha_is(
    engine: Engine, alpha: float, dtype: str, verify: bool
) -> None:
    """The result is beta C, as BLAS defines it for k = 0."""
    c_dtype = "float64" if dtype == "int8" else dtype
    a, b = np.ones((3, 0), dtype), np.ones((0, 2), dtype)
    given: dict[str, Any] = {"alpha": alpha, "verify": verify, "out_dtype": c_dtype}
    with running_on(engine) as options:
        for beta in (0, 2):
            c = np.full((3, 2), 3, c_dtype)
            oocgemm.gemm(a, b, c, beta=beta, **given, **options)
            np.testing.assert_array_equal(c, np.full((3, 2), 3 * beta, c_dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_accumulates_in_float32(backend: str) -> None:
    k = 4096
    a, b = np.full((2, k), 1, np.float16), np.full((k, 3), 0.5, np.float16)
    # In float16 the running sum would stop growing at 1024, where half a unit in the last place exceeds 0.5.
    with running_on(backend) as options:
        result = oocgemm.gemm(a, b, tile="2x3x100", **options)
    np.testing.assert_array_equal(result.out, np.full((2, 3), 2048, np.float16))


def test_npy_memory_maps_and_views_are_operands(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    a, b = integers(rng, (30, 20), "float64"), integers(rng, (20, 25), "float64")
    np.save(tmp_path / "A.npy", a)
    mapped = np.load(tmp_path / "A.npy", mmap_mode="r")
    strided = np.asfortranarray(b)[::-1]
    expected = a @ b[::-1]
    for left in (tmp_path / "A.npy", mapped, a):
        out = oocgemm.matmul(left, strided, out=tmp_path / "C.npy", overwrite=True, backend="host")
        np.testing.assert_array_equal(out, expected)
    swapped = a.astype(">f8")
    np.testing.assert_array_equal(oocgemm.matmul(swapped, strided, backend="host"), expected)


@pytest.mark.parametrize("op", ["N", "T", "C"])
def test_a_fortran_ordered_operand_is_taken_as_a_transpose(op: Any) -> None:
    """A Fortran-ordered X is X.T in C order, with the other op. It is therefore as fast.

    A complex conjugate transpose has no counterpart without a transpose.
    """
    rng = np.random.default_rng(5)
    real, imaginary = integers(rng, (30, 20), "float64"), integers(rng, (30, 20), "float64")
    a = real + 1j * imaginary
    given = np.asfortranarray(a if op == "N" else a.T)
    expected = (a.conj() if op == "C" else a) @ (a.T if op == "N" else a.T.copy())
    result = oocgemm.gemm(given, a, trans_a=op, trans_b="T", backend="host", tile="16x16x5")
    np.testing.assert_array_equal(result.out, expected)
    assert result.plan.problem.trans_a == {"N": "T", "T": "N", "C": "C"}[op]
    assert oocgemm.plan(a, a.T, backend="host").problem.trans_b == "T"
    # A single row is in C and in Fortran order.
    assert oocgemm.plan(a[:1], a[:1].T, backend="host").problem.trans_b == "N"


def test_zarr_arrays_and_other_stores_are_operands() -> None:
    store = zarr.storage.MemoryStore()
    rng = np.random.default_rng(4)
    a = integers(rng, (30, 20), "float32")
    array = zarr.create_array(store, name="x/A", data=a, chunks=(7, 6))
    out = zarr.create_array(store, name="C", shape=(30, 30), dtype="f4", chunks=(8, 8))
    result = oocgemm.gemm(array, array, out, trans_b="T", backend="host", tile="16x16x5")
    np.testing.assert_array_equal(out[:], a @ a.T)
    assert result.out is out


def test_a_chunk_that_is_missing_reads_as_the_fill_value(tmp_path: Path) -> None:
    for name, compressed in (("raw", False), ("zstd", True)):
        options: dict[str, Any] = {} if compressed else {"compressors": None}
        array = zarr.create_array(
            tmp_path / name, shape=(20, 20), chunks=(10, 10), dtype="f8", fill_value=2, **options
        )
        array[:10, :10] = 1
        out = oocgemm.matmul(array, np.eye(20), backend="host")
        np.testing.assert_array_equal(out, array[:])
        assert set(np.unique(out)) == {1.0, 2.0}


@pytest.mark.parametrize("op_a", list(Op))
@pytest.mark.parametrize("op_b", list(Op))
def test_numpys_own_product_stands_in_for_blas(op_a: Op, op_b: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocgemm.backends.host.blas._BLOCK", 7)
    rng = np.random.default_rng(5)
    a, b = integers(rng, stored(op_a, 20, 9), "complex128"), integers(rng, stored(op_b, 9, 15), "complex128")
    c = integers(rng, (20, 15), "complex128")
    expected = 2j * applied(op_a, a) @ applied(op_b, b) - c
    numpy_gemm(op_a, op_b, 2j, a, b, -1, c)
    np.testing.assert_array_equal(c, expected)
    c[...] = np.nan
    numpy_gemm(op_a, op_b, 1, a, b, 0, c)
    np.testing.assert_array_equal(c, applied(op_a, a) @ applied(op_b, b))


def test_the_sum_does_not_depend_on_what_else_is_computed() -> None:
    """The order of steps along k depends on the tile's coordinates alone, so equal plans give equal bits."""
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((60, 70)), rng.standard_normal((70, 50))
    first = oocgemm.matmul(a, b, tile="20x20x9", backend="host")
    again = oocgemm.matmul(a, b, tile="20x20x9", backend="host")
    np.testing.assert_array_equal(first, again)
    bound = 70 * np.finfo(float).eps * (np.abs(a) @ np.abs(b))
    assert (np.abs(first - a @ b) <= bound).all()


def test_no_thread_outlives_a_run() -> None:
    oocgemm.matmul(np.ones((5, 5)), np.ones((5, 5)), backend="host")  # its thread is kept
    before = set(threading.enumerate())
    oocgemm.matmul(np.ones((50, 50)), np.ones((50, 50)), tile="10x10x10", backend="host")
    with pytest.raises(InputError):
        oocgemm.matmul(np.ones((5, 4)), np.ones((5, 4)), backend="host")
    assert set(threading.enumerate()) <= before
