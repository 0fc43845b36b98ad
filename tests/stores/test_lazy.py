"""Lazy arrays are read in pieces. Several threads read them only if the package is known to allow that."""

import importlib
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import BudgetError, ExecutionError, InputError
from oocgemm.stores import lazy, open_matrix
from oocgemm.stores.lazy import LazyMatrix
from tests.support.backends_here import BACKENDS, running_on
from tests.support.problems import Array
from tests.support.suite import slow

_rng = np.random.default_rng(0)
A, B = (_rng.integers(-3, 4, shape).astype(float) for shape in ((130, 90), (90, 70)))
PRODUCT = A @ B


class Sliced:
    """An array that can only be sliced.

    It records its largest slice and the largest number of concurrent readers.
    """

    def __init__(self, array: Array, chunks: object = None, delay: float = 0.0) -> None:
        self.shape, self.dtype, self.chunks = array.shape, array.dtype, chunks
        self.largest = self.most_readers = 0
        self._array, self._delay, self._readers = array, delay, 0
        self._counting = threading.Lock()

    def __getitem__(self, key: Any) -> Array:
        block: Array = self._array[key]
        with self._counting:
            self._readers += 1
            self.most_readers = max(self.most_readers, self._readers)
            self.largest = max(self.largest, block.size)
        time.sleep(self._delay)
        with self._counting:
            self._readers -= 1
        return block.copy()

    def __array__(self, *_: object, **__: object) -> Array:
        pytest.fail("the whole array is converted")


def module(name: str) -> Any:
    return pytest.importorskip(name)


def multiply(a: Any, b: Any, **options: Any) -> Any:
    return oocgemm.matmul(a, b, **({"backend": "host"} | options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_object_with_slices_is_never_converted_whole(backend: str) -> None:
    a, b = Sliced(A, chunks=(20, 30)), Sliced(B)
    with running_on(backend) as options:
        np.testing.assert_array_equal(multiply(a, b, **options), PRODUCT)
        np.testing.assert_array_equal(multiply(Sliced(A.T), b, trans_a="T", **options), PRODUCT)


def test_pieces_are_no_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "BATCH_BYTES", 8)
    a, b = Sliced(A, chunks=(20, 30)), Sliced(B)
    np.testing.assert_array_equal(multiply(a, b), PRODUCT)
    assert a.largest == 600
    assert b.largest == 70  # without chunks it is read row by row


@pytest.mark.parametrize("concurrent", [False, True])
def test_only_known_packages_are_read_by_several_threads(
    monkeypatch: pytest.MonkeyPatch, concurrent: bool
) -> None:
    if concurrent:
        monkeypatch.setattr(lazy, "CONCURRENT", ("tests",))
    size = 1200
    a = Sliced(np.ones((size, size)), chunks=(400, 400), delay=0.05)
    matrix = open_matrix("A", a)
    out = np.empty((size, size))
    threads = [
        threading.Thread(target=matrix.read, args=((r, r + 400), (0, size), out[r : r + 400]))
        for r in range(0, size, 400)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (a.most_readers > 1) is concurrent
    assert (out == 1).all()


def test_objects_of_one_unknown_package_share_one_lock() -> None:
    first, second = (open_matrix("A", Sliced(A)) for _ in range(2))
    assert isinstance(first, LazyMatrix)
    assert isinstance(second, LazyMatrix)
    assert first._turn is second._turn


def test_the_plan_counts_what_a_chunk_takes() -> None:
    a = Sliced(np.ones((2000, 2000)), chunks=(1000, 1000))
    with pytest.raises(BudgetError, match=r"host memory 16 MiB cannot hold .* rechunk A"):
        multiply(a, np.ones((2000, 2)), device_memory="64MiB", host_memory="16MiB")
    planned = oocgemm.plan(a, np.ones((2000, 2)), backend="host", device_memory="64MiB", host_memory="64MiB")
    assert planned.footprint.host["scratch"] >= 3 * 8_000_000


def test_panels_are_aligned_to_the_chunks() -> None:
    a = Sliced(np.ones((3000, 3000)), chunks=(300, 500))
    planned = oocgemm.plan(
        a, np.ones((3000, 3000)), backend="host", device_memory="48MiB", host_memory="48MiB"
    )
    assert planned.tile.m % 300 == planned.tile.k % 500 == 0


@pytest.mark.parametrize(
    "chunks", [((50, 10, 70), (1, 80, 9)), *slow(((20, 30),), ((1, 1),), ((500, 500),))], ids=str
)
def test_dask_arrays_are_operands(chunks: Any) -> None:
    array = module("dask.array")
    a, b = array.from_array(A, chunks=chunks), array.from_array(B, chunks=(40, 11))
    np.testing.assert_array_equal(multiply(a, b), PRODUCT)
    np.testing.assert_array_equal(multiply((a * 2).T, b + 1, trans_a="T"), 2 * A @ (B + 1))


def test_dask_chunks_are_computed_by_the_reader_threads() -> None:
    array = module("dask.array")
    names = set()

    def block(_: Array) -> Array:
        names.add(threading.current_thread().name)
        return np.ones((300, 300))

    a = array.map_blocks(block, array.zeros((900, 900), chunks=(300, 300)), dtype="f8", meta=np.empty((0, 0)))
    assert (multiply(a, np.eye(900)) == 1).all()
    assert all(name.startswith("oocgemm-reader") for name in names), names


def test_a_dask_scheduler_that_was_chosen_is_kept() -> None:
    array, dask = module("dask.array"), module("dask")
    calls = []

    def scheduler(graph: Any, keys: Any, **options: Any) -> Any:
        calls.append(keys)
        return importlib.import_module("dask.local").get_sync(graph, keys, **options)

    with dask.config.set(scheduler=scheduler):
        np.testing.assert_array_equal(multiply(array.from_array(A, chunks=(50, 50)), B), PRODUCT)
    assert calls


@pytest.mark.parametrize(
    "options", [{}, {"chunks": (20, 30)}, {"chunks": (64, 64), "compression": "gzip"}], ids=str
)
@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<c16"])
def test_hdf5_datasets_are_operands(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    h5py = module("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        a = file.create_dataset("a", data=A.astype(dtype), **options)
        np.testing.assert_array_equal(multiply(a, B.astype(a.dtype.newbyteorder("="))), PRODUCT)


def test_xarray_arrays_are_operands(tmp_path: Path) -> None:
    xarray, array = module("xarray"), module("dask.array")
    in_memory = xarray.DataArray(A)
    computed = xarray.DataArray(array.from_array(A, chunks=(20, 30)))
    xarray.Dataset({"a": (("x", "y"), A)}).to_zarr(
        tmp_path / "a", zarr_format=2, encoding={"a": {"chunks": (20, 30)}}
    )
    with xarray.open_dataset(tmp_path / "a", engine="zarr", chunks=None) as stored:
        for a in (in_memory, computed, stored["a"]):
            np.testing.assert_array_equal(multiply(a, B), PRODUCT)
        matrix = open_matrix("A", stored["a"])
        assert matrix.layout.read_chunk == (20, 30)
    assert open_matrix("A", computed).describe()["store"] == "dask"


def test_tensorstore_arrays_are_operands(tmp_path: Path) -> None:
    tensorstore = module("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "a")}}
    layout = tensorstore.ChunkLayout(read_chunk_shape=[20, 30], write_chunk_shape=[40, 60])
    a = tensorstore.open(
        spec, create=True, dtype=tensorstore.float64, shape=A.shape, chunk_layout=layout
    ).result()
    a[...] = A
    assert open_matrix("A", a).layout.read_chunk == (20, 30)
    np.testing.assert_array_equal(multiply(a, B), PRODUCT)
    # The array's own indices start at 30.
    np.testing.assert_array_equal(multiply(a[30:90], B), PRODUCT[30:90])


def test_a_lazy_product_is_verified() -> None:
    assert oocgemm.verify(Sliced(A, chunks=(20, 30)), Sliced(B), PRODUCT).ok


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.tolist(),
        memoryview,
        lambda x: module("pandas").DataFrame(x),
        lambda x: module("torch").from_numpy(x),
    ],
    ids=["list", "memoryview", "pandas", "torch"],
)
def test_what_lies_in_memory_is_taken_as_it_is(make: Any) -> None:
    a = make(A)
    assert open_matrix("A", a).layout.in_memory
    np.testing.assert_array_equal(multiply(a, B), PRODUCT)


class Unsliced(Sliced):
    def __getitem__(self, key: Any) -> Array:
        raise TypeError("no slices")


class Sparse(Sliced):
    def __getitem__(self, key: Any) -> Any:
        return object()

    def toarray(self) -> None:
        pass


class Collection:
    __dask_graph__ = None


def _unknown() -> Any:
    a = Sliced(A)
    a.shape = (float("nan"), 90)
    return a


@pytest.mark.parametrize(
    ("a", "part"),
    [
        (
            Unsliced(A),
            r"A: Unsliced cannot be sliced as \[0:1, 0:1\] \(no slices\): convert it with np.asarray",
        ),
        (Sparse(A), r"A: slicing Sparse does not give an array: convert it with .toarray\(\)"),
        (Collection(), r"A: Collection is not an array: convert it with .to_dask_array"),
        (_unknown(), r"A has the unknown shape \(nan, 90\): call A.compute_chunk_sizes"),
        (Sliced(A[0]), "A has 1 dimensions"),
        ({"x": A}, r"A: dict is a collection: give one array of it \('x'\)"),
    ],
    ids=["no slices", "sparse", "collection", "unknown shape", "vector", "dict"],
)
def test_a_lazy_object_that_is_no_operand_is_named(a: Any, part: str) -> None:
    with pytest.raises(InputError, match=part):
        multiply(a, B)


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (lambda x: np.ma.masked_array(x, True), "elements are masked"),
        (lambda x: x.astype("f4"), r"and dtype float32, where .* float64 were expected"),
        (lambda x: x[:1], r"returned a block of shape \(1, 90\)"),
    ],
    ids=["masked", "dtype", "shape"],
)
def test_a_block_that_is_not_as_announced_ends_the_run(block: Any, part: str) -> None:
    class Liar(Sliced):
        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            return block(found) if found.size else found

    with pytest.raises(ExecutionError, match=part):
        multiply(Liar(A), B)


def test_c_cannot_be_lazy() -> None:
    with pytest.raises(InputError, match="C cannot be written to"):
        multiply(A, B, out=Sliced(PRODUCT))
