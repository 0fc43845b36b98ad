"""Arguments of the wrong type are refused with an error that names the argument."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import BackendError, BudgetError, ExecutionError, InputError, TileShape
from tests.support.command import contents, own_threads
from tests.support.problems import Array

A, B = np.arange(12.0).reshape(4, 3), np.arange(15.0).reshape(3, 5)


class Tensor:
    """An array of another library, which NumPy can convert."""

    def __init__(self, values: Array) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._values


class DeviceTensor:
    """An array of another library, which NumPy cannot convert, because it is on a device."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise TypeError("can't convert a device tensor\nto host memory")


def gemm(*operands: Any, **options: Any) -> oocgemm.Result:
    result: oocgemm.Result = oocgemm.gemm(*operands, **({"backend": "host"} | options))
    return result


@pytest.mark.parametrize(
    "operand",
    [
        pytest.param(A.tolist(), id="nested lists"),
        pytest.param(tuple(map(tuple, A)), id="nested tuples"),
        pytest.param(Tensor(A), id="an array of another library"),
        pytest.param(A[::-1][::-1], id="a view"),
        pytest.param(np.asfortranarray(A), id="Fortran order"),
        pytest.param(A.astype(">f8"), id="another byte order"),
        pytest.param(memoryview(A.data), id="a buffer"),
    ],
)
def test_whatever_numpy_converts_is_an_operand(operand: Any) -> None:
    np.testing.assert_array_equal(oocgemm.matmul(operand, B, backend="host"), A @ B)


@pytest.mark.parametrize(
    ("operand", "part"),
    [
        pytest.param(2.0, "A has 0 dimensions", id="a scalar"),
        pytest.param(None, "A is None: pass an array or a path", id="nothing"),
        pytest.param({"x": A}, "A: dict is a collection: give one array of it ('x')", id="a mapping"),
        pytest.param(b"a.npy", "A is bytes: pass a path as a string", id="bytes"),
        pytest.param([1.0, 2.0], "A has 1 dimensions", id="a list of numbers"),
        pytest.param(A[None], "A has 3 dimensions", id="a stack of matrices"),
        pytest.param([[1.0], [2.0, 3.0]], "A: list cannot be turned into an array", id="rows of two lengths"),
        pytest.param(A.astype(np.uint64), "A is of dtype uint64", id="integers of 64 bits without a sign"),
        pytest.param(A.astype(np.longdouble), "A is of dtype float128", id="a wider float"),
        pytest.param(A.astype("M8[s]"), "A is of dtype datetime64[s]", id="times"),
        pytest.param(A.T, "op(A) is 3 x 4 and op(B) is 3 x 5", id="a shape that does not match"),
        pytest.param(np.ma.masked_greater(A, 3), "A is a masked array", id="a mask, which would be ignored"),
        pytest.param(
            DeviceTensor(), "A: DeviceTensor cannot be turned into an array: can't", id="on a device"
        ),
        pytest.param("a\0b", "is not a path", id="a path of no file system"),
    ],
)
def test_other_operands_are_input_errors(operand: Any, part: str) -> None:
    for call in (oocgemm.matmul, oocgemm.plan):
        with pytest.raises(InputError) as raised:
            call(operand, B, backend="host")
        assert part in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize(
    ("dtype", "value", "part"),
    [
        ("float32", 1e39, "= 1e+39 is beyond float32 (at most 3.4028235e+38)"),
        ("float32", -1e39, "= -1e+39 is beyond float32 (at most 3.4028235e+38)"),
        ("float16", 1e39, "= 1e+39 is beyond float32 (at most 3.4028235e+38), the dtype in which float16"),
        ("complex64", 1 + 1e39j, "= 1+1e+39j is beyond complex64 (at most 3.4028235e+38)"),
        ("float32", 1e-60, "= 1e-60 rounds to 0 in float32 (at least 1.4012985e-45)"),
    ],
)
def test_a_scalar_beyond_the_accumulator_is_refused(name: str, dtype: str, value: complex, part: str) -> None:
    a, b, c = (np.ones(shape, dtype) for shape in ((4, 3), (3, 5), (4, 5)))
    options: dict[str, Any] = {name: value, "backend": "host"}
    for call in (oocgemm.gemm, oocgemm.plan):
        with pytest.raises(InputError) as raised:
            call(a, b, c, **options)
        assert part in str(raised.value)
    wider = "complex128" if dtype == "complex64" else "float64"
    assert f"convert A, B and C to {wider}" in str(raised.value)
    a, b, c = (x.astype(wider) for x in (a, b, c))
    assert np.isfinite(gemm(a, b, c, **options).out).all()


def _read_only() -> Array:
    array = np.zeros((4, 5))
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "part"),
    [
        pytest.param([[0.0] * 5] * 4, "C cannot be written to", id="lists"),
        pytest.param(3.0, "C cannot be written to", id="a scalar"),
        pytest.param(Tensor(np.zeros((4, 5))), "C cannot be written to", id="what may be a copy"),
        pytest.param(_read_only(), "C cannot be written to", id="a read-only array"),
        pytest.param(np.zeros((5, 4)), "C exists with shape (5, 4)", id="another shape"),
        pytest.param(np.zeros((4, 5), "f4"), "dtype float32, the product has", id="another dtype"),
        pytest.param(np.zeros(20), "C has 1 dimensions", id="a vector"),
    ],
)
def test_an_unusable_c_is_an_input_error(out: Any, part: str) -> None:
    with pytest.raises(InputError) as raised:
        oocgemm.matmul(A, B, out=out, backend="host")
    assert part in str(raised.value)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f8", ">f8"])
def test_c_may_have_any_memory_order(order: Any, dtype: str) -> None:
    out: Array = np.full((4, 5), np.nan, dtype, order)
    assert oocgemm.matmul(A, B, out=out, backend="host") is out
    np.testing.assert_array_equal(out, A @ B)


SPACE = np.arange(64.0).reshape(8, 8)


@pytest.mark.parametrize(
    ("a", "c"),
    [
        pytest.param(SPACE, SPACE, id="the same array"),
        pytest.param(SPACE[:], SPACE, id="a view of all of it"),
        pytest.param(SPACE.T, SPACE, id="its transpose"),
        pytest.param(SPACE, SPACE[::-1], id="its rows reversed"),
        pytest.param(SPACE[:4, :4], SPACE[3:7, 3:7], id="a corner in common"),
        pytest.param(SPACE[:, ::2][:4], SPACE[:4, 3:7], id="columns in common"),
    ],
)
def test_c_may_not_overlap_an_operand(a: Array, c: Array) -> None:
    before = SPACE.copy()
    other = np.ones((a.shape[1], a.shape[1]))
    for operands in ((a, other), (other, a)):
        with pytest.raises(InputError, match="C is the same array as"):
            gemm(*operands, c)
        with pytest.raises(InputError, match="C is the same array as"):
            gemm(*operands, c, beta=1)
    np.testing.assert_array_equal(SPACE, before)


@pytest.mark.parametrize("columns", [(slice(0, 4), slice(4, 8)), (slice(0, 8, 2), slice(1, 8, 2))])
def test_c_may_share_an_array_with_an_operand(columns: tuple[slice, slice]) -> None:
    space = np.arange(32.0).reshape(4, 8)
    a, c = space[:, columns[0]], space[:, columns[1]]
    expected = a @ np.ones((4, 4))
    gemm(a, np.ones((4, 4)), c)
    np.testing.assert_array_equal(c, expected)
    np.testing.assert_array_equal(a, np.arange(32.0).reshape(4, 8)[:, columns[0]])


def test_c_may_not_be_a_map_of_an_operands_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", SPACE)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r+")
    for a, c in ((mapped, tmp_path / "x.npy"), (tmp_path / "x.npy", mapped), (mapped, mapped[:])):
        with pytest.raises(InputError, match="C is the same array as A"):
            gemm(a, SPACE, c, overwrite=True)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), SPACE)


def test_c_may_not_be_an_operand_opened_again_in_a_store() -> None:
    store = zarr.storage.MemoryStore()
    array = zarr.create_array(store, name="x", data=SPACE)
    for c in (array, zarr.open_array(store, path="x")):
        with pytest.raises(InputError, match="C is the same array as A"):
            gemm(array, SPACE, c)
    np.testing.assert_array_equal(array[:], SPACE)


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_an_array_opened_for_reading_is_not_written(tmp_path: Path, compressors: Any) -> None:
    zarr.create_array(tmp_path / "c", data=np.ones((4, 5)), compressors=compressors)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="C is read-only"):
        gemm(A, B, zarr.open_array(tmp_path / "c", mode="r"))
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"alpha": "three"}, "alpha = 'three' is not a number"),
        ({"alpha": None}, "alpha = None is not a number"),
        ({"alpha": np.ones(1)}, "is not a number"),
        ({"alpha": 10**400}, "is not a number"),
        ({"alpha": 1j}, "alpha = 1j is complex, but the operands are real"),
        ({"alpha": complex(1, np.nan)}, "is complex"),
        ({"beta": [1.0]}, "beta = [1.0] is not a number"),
        ({"beta": 1}, "needs an existing C, and none is given"),
        ({"trans_a": "X"}, "trans_a = 'X' is not an op: write 'N', 'T' or 'C'"),
        ({"trans_b": None}, "trans_b = None"),
        ({"tile": (2, 2, 2)}, "as a tile"),
        ({"tile": TileShape(0, 2, 2)}, "extent below 1"),
        ({"device_memory": 0}, "a size must be positive"),
        ({"device_memory": -(2**40)}, "a size must be positive"),
        ({"device_memory": 10**400}, "a size must be below"),
        ({"host_memory": []}, "cannot read [] as a size"),
        ({"host_memory": float("nan")}, "cannot read nan as a size"),
        ({"chunks": (2, 2)}, "C would be an ndarray"),
        ({"compressor": "zip"}, "unknown compressor 'zip'"),
        ({"timeline": "missing/log"}, "folder"),
        ({"timeline": "/"}, "is a folder"),
        ({"timeline": ""}, "is a folder"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_read_is_an_input_error(options: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError) as raised:
        gemm(A, B, **options)
    assert part in str(raised.value)


@pytest.mark.parametrize("chunks", [4, (0, 4), (4,), (4, 4, 4), "44", (1.5, 2), (-1, 2), None, ()], ids=str)
def test_chunks_are_two_positive_integers(tmp_path: Path, chunks: Any) -> None:
    if chunks in (None, ()):
        assert gemm(A, B, tmp_path / "c").out.chunks == (4, 5)  # the default chunks
        return
    with pytest.raises(InputError, match="integers of at least 1"):
        gemm(A, B, tmp_path / "c", chunks=chunks)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("chunks", [[3, 4], (np.int64(3), np.uint8(4))], ids=str)
def test_chunks_may_be_a_list_and_integers_of_numpy(tmp_path: Path, chunks: Any) -> None:
    assert gemm(A, B, tmp_path / "c", chunks=chunks).out.chunks == (3, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 2},
        {"alpha": True, "beta": False},
        {"alpha": np.float32(2)},
        {"alpha": np.array(2.0)},
        {"alpha": 2 + 0j},
        {"device_memory": np.int64(2**30), "host_memory": 2.0**30},
        {"device_memory": "1.5 GB", "host_memory": " 512m "},
        {"trans_a": False, "trans_b": "N"},
        {"tile": TileShape(2, 2, 2)},
        {"tile": "2 x 2 x 2"},
    ],
    ids=str,
)
def test_options_may_have_any_equivalent_type(options: dict[str, Any]) -> None:
    scale = float(np.real(options.get("alpha", 1)))
    np.testing.assert_array_equal(gemm(A, B, **options).out, scale * (A @ B))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_a_nan_scalar_gives_nan(dtype: str) -> None:
    a, b, c = A.astype(dtype), B.astype(dtype), np.ones((4, 5), dtype)
    assert np.isnan(gemm(a, b, alpha=np.nan).out).all()
    assert np.isnan(gemm(a, b, c, beta=np.nan).out).all()


def test_an_unknown_backend_or_kernel_is_refused(tmp_path: Path) -> None:
    for options in ({"backend": "gpu"}, {"backend": None}, {"kernel": "tiled"}, {"kernel": "fast"}):
        with pytest.raises((BackendError, InputError)):
            gemm(A, B, tmp_path / "c", **options)
        assert contents(tmp_path) == {}


@pytest.mark.parametrize("tier", ["device", "host"])
def test_least_of_a_budget_error_suffices(tier: str) -> None:
    with pytest.raises(BudgetError) as raised:
        gemm(A, B, **{f"{tier}_memory": 1})
    assert raised.value.least is not None
    assert f"{raised.value.least} bytes" in str(raised.value)
    np.testing.assert_array_equal(gemm(A, B, **{f"{tier}_memory": raised.value.least}).out, A @ B)


@pytest.mark.parametrize("name", ["c", "c.npy"])
def test_a_store_that_fails_in_a_run_is_an_execution_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oocgemm.stores.zarr_matrix.ZarrMatrix.write", full)
    monkeypatch.setattr("oocgemm.stores.npy.NpyMatrix.write", full)
    with pytest.raises(ExecutionError, match=r"tile \(0, 0\).*writing C\[.*No space left on device"):
        gemm(A, B, tmp_path / name)
    assert contents(tmp_path) == {}
    assert own_threads() == []


def test_a_npy_file_that_cannot_be_created_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, said: object) -> None:
        file.write(b"header")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.lib.format.write_array_header_1_0", full)
    with pytest.raises(InputError, match=r"C: cannot create .*c\.npy.*No space left"):
        gemm(A, B, tmp_path / "c.npy")
    assert contents(tmp_path) == {}


def test_an_empty_path_does_not_name_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_text("of another program")
    monkeypatch.chdir(tmp_path)
    for place in ("", "missing/..", Path("."), "file://"):
        with pytest.raises(InputError):
            gemm(A, B, place)
        assert contents(tmp_path) == {"kept": b"of another program"}
