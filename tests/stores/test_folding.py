"""Arrays of any number of dimensions, folded into matrices, equal NumPy's transposes and reshapes."""

import random
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import InputError
from oocgemm.stores import Matrix, open_matrix
from oocgemm.stores.arrays import ArrayMatrix
from oocgemm.stores.boxes import BoxMatrix
from oocgemm.stores.npy import NpyMatrix
from oocgemm.stores.zarr_matrix import ZarrMatrix

Array = Any
X = np.arange(4.0 * 5 * 6).reshape(4, 5, 6)


def whole(matrix: Matrix) -> Array:
    return block(matrix, (0, matrix.shape[0]), (0, matrix.shape[1]))


def block(matrix: Matrix, rows: tuple[int, int], cols: tuple[int, int]) -> Array:
    """Return a block, read into memory with gaps between its rows."""
    out = np.full((rows[1] - rows[0], cols[1] - cols[0] + 3), 99, matrix.dtype)
    matrix.read(rows, cols, out[:, :-3])
    assert (out[:, -3:] == 99).all()
    return out[:, :-3]


class Case:
    """An array, its chunks, and a fold of it."""

    def __init__(self, draw: st.DrawFn) -> None:
        extent = st.integers(1, 5)
        self.shape = tuple(draw(st.lists(extent, min_size=2, max_size=4)))
        # Chunks that are whole or single along an axis are frequent: they may be rectangles.
        self.chunks = tuple(
            draw(st.one_of(st.just(n), st.just(1), st.integers(1, n + 1))) for n in self.shape
        )
        axes = draw(st.permutations(range(len(self.shape))))
        if draw(st.booleans()):
            axes = sorted(axes)
        split, dropped = draw(st.integers(0, len(axes))), draw(st.integers(0, 1))
        self.isel: dict[int, Any] = {}
        if dropped and split < len(axes) - 1:
            self.isel[axes[-1]] = draw(st.integers(0, self.shape[axes[-1]] - 1))
            axes = axes[:-1]
        for axis in axes:
            if draw(st.integers(0, 3)) == 0:
                start = draw(st.integers(0, self.shape[axis] - 1))
                self.isel[axis] = slice(start, draw(st.integers(start + 1, self.shape[axis])))
        self.rows, self.cols = axes[:split], axes[split:]
        self.order: Any = draw(st.sampled_from("CF"))
        self.seed = draw(st.integers(0, 9))

    @property
    def array(self) -> Array:
        return np.random.default_rng(self.seed).integers(-99, 99, self.shape).astype(np.float32)

    @property
    def expected(self) -> Array:
        index = tuple(
            slice(at, at + 1) if isinstance(at := self.isel.get(axis, slice(None)), int) else at
            for axis in range(len(self.shape))
        )
        part = self.array[index]
        dropped = [axis for axis, at in self.isel.items() if isinstance(at, int)]
        turned = part.transpose([*self.rows, *self.cols, *dropped])
        extents = [prod(part.shape[axis] for axis in group) for group in (self.rows, self.cols)]
        return turned.reshape(extents)

    def __repr__(self) -> str:
        return f"{self.shape} in {self.chunks} {self.order}: {self.rows} x {self.cols}, {self.isel}"


CASES = st.composite(Case)()


def check(case: Case, source: Any) -> Matrix:
    """Check a folded array as a whole and in blocks. Return the matrix."""
    matrix = open_matrix("A", oocgemm.as_matrix(source, case.rows, case.cols, case.isel))
    expected, some = case.expected, random.Random(case.seed)
    assert matrix.shape == expected.shape
    np.testing.assert_array_equal(whole(matrix), expected)
    for _ in range(4):
        (top, bottom), (left, right) = (sorted(some.sample(range(n + 1), 2)) for n in expected.shape)
        found = block(matrix, (top, bottom), (left, right))
        np.testing.assert_array_equal(found, expected[top:bottom, left:right])
    return matrix


@given(CASES)
@settings(max_examples=60)
def test_arrays_and_npy_files_fold_as_in_numpy(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    array = np.asarray(case.array, order=case.order)
    check(case, array)
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    np.save(path, array)
    check(case, str(path))
    check(case, np.load(path, mmap_mode="r"))


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("compressor", [None, "auto"])
@given(case=CASES)
@settings(max_examples=40)
def test_zarr_arrays_fold_as_in_numpy(
    tmp_path_factory: pytest.TempPathFactory, zarr_format: Any, compressor: Any, case: Case
) -> None:
    path = tmp_path_factory.mktemp("zarr") / "a.zarr"
    array = np.where(case.array > 50, 0, case.array)  # some chunks may not be stored
    options: Any = {"order": case.order} if zarr_format == 2 else {}
    zarr.create_array(
        path, data=array, chunks=case.chunks, compressors=compressor, zarr_format=zarr_format, **options
    )
    source = oocgemm.as_matrix(str(path), case.rows, case.cols, case.isel)
    expected = case.expected
    np.testing.assert_array_equal(whole(open_matrix("A", source)), np.where(expected > 50, 0, expected))


@given(case=CASES)
@settings(max_examples=40)
def test_sharded_zarr_arrays_fold_as_in_numpy(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    path = tmp_path_factory.mktemp("zarr") / "a.zarr"
    shards = tuple(
        -(-n // c) * c if case.seed % 2 else 2 * c for n, c in zip(case.shape, case.chunks, strict=True)
    )
    zarr.create_array(path, data=case.array, chunks=case.chunks, shards=shards)
    check(case, str(path))


@given(case=CASES)
@settings(max_examples=40)
@pytest.mark.filterwarnings("ignore:A at .* is read by h5py")
def test_hdf5_datasets_fold_as_in_numpy(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    path = tmp_path_factory.mktemp("h5") / "a.h5"
    chunks = tuple(map(min, case.chunks, case.shape))
    with h5py.File(path, "w") as file:
        file.create_dataset("chunked", data=case.array, chunks=chunks)
        file.create_dataset("packed", data=case.array, chunks=chunks, compression="gzip")
        file["plain"] = case.array
    for name in ("chunked", "packed", "plain"):
        check(case, f"{path}::{name}")
    with h5py.File(path) as file:
        check(case, file["chunked"])


@pytest.mark.parametrize(
    ("chunks", "rows", "cols", "kept"),
    [
        ((1, 5, 6), [0], [1, 2], (1, 30)),
        ((2, 5, 6), [0], [1, 2], (2, 30)),
        ((1, 1, 6), [0, 1], [2], (1, 6)),
        ((2, 5, 3), [0, 1], [2], (10, 3)),
        ((4, 5, 6), [1, 2], [0], (30, 4)),  # chunks are stored column by column
        ((4, 5, 6), [1], [0, 2], None),  # a chunk has neither rows nor columns
        ((2, 5, 3), [0], [1, 2], None),  # a chunk has parts of rows of the array
        ((3, 5, 6), [0], [1, 2], (3, 30)),  # the last chunk extends beyond the array
        ((3, 5, 6), [2], [0, 1], (6, 15)),
    ],
)
def test_chunks_that_are_rectangles_are_chunks_of_the_matrix(
    tmp_path: Path, chunks: Sequence[int], rows: Sequence[int], cols: Sequence[int], kept: Any
) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=X, chunks=tuple(chunks), compressors=None)
    matrix = open_matrix("A", oocgemm.as_matrix(str(tmp_path / "a.zarr"), rows, cols))
    if kept is None:
        assert isinstance(matrix, BoxMatrix)
        return
    assert isinstance(matrix, ZarrMatrix)
    assert matrix.layout.read_chunk == kept
    assert matrix.direct is not None
    # The same kind of layout as that of an array with two dimensions and these chunks.
    order: Any = "F" if matrix.direct.encoding.order == "F" else "C"
    flat = X.transpose([*rows, *cols]).reshape(matrix.shape)
    zarr.create_array(
        tmp_path / "b.zarr", data=flat, chunks=kept, compressors=None, zarr_format=2, order=order
    )
    assert open_matrix("A", str(tmp_path / "b.zarr")).layout == matrix.layout


def test_folded_arrays_in_memory_are_views() -> None:
    for rows, cols in (([0], [1, 2]), ([0, 1], [2]), ([2], [0, 1])):
        matrix = open_matrix("A", oocgemm.as_matrix(X, rows, cols))
        assert isinstance(matrix, ArrayMatrix)
        assert np.shares_memory(matrix.array, X)
    assert isinstance(open_matrix("A", oocgemm.as_matrix(X, [1], [0, 2])), BoxMatrix)


def test_the_last_axes_of_a_file_are_its_lines(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    path = str(tmp_path / "a.npy")
    for view in (
        oocgemm.as_matrix(path, [0], [1, 2]),
        oocgemm.as_matrix(path, [0, 1], [2], {0: slice(1, 3)}),
        oocgemm.as_matrix(path, [1], [2], {0: 3}),
        oocgemm.as_matrix(path, [2], [1], {0: 3}),
    ):
        assert isinstance(open_matrix("A", view), NpyMatrix)


@pytest.mark.filterwarnings("ignore:A at .* is read by h5py")
def test_axes_are_found_by_name(tmp_path: Path) -> None:
    names = ["time", "lat", "lon"]
    expected = X[1:3].transpose(2, 0, 1)[:, :, 4]
    zarr.create_array(tmp_path / "3", data=X, dimension_names=names)
    two = zarr.create_array(tmp_path / "2", data=X, zarr_format=2)
    two.attrs["_ARRAY_DIMENSIONS"] = names
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = X
        for at, name in enumerate(names):
            file[name] = np.arange(X.shape[at])
            file[name].make_scale(name)
            file["x"].dims[at].attach_scale(file[name])
        file["labels"] = X
        for at, name in enumerate(names):
            file["labels"].dims[at].label = name
    isel: Any = {"time": slice(1, 3), "lat": 4}
    for source in ("2", "3", "a.h5::x", "a.h5::labels"):
        view = oocgemm.as_matrix(str(tmp_path / source), "lon", isel=isel)
        np.testing.assert_array_equal(whole(open_matrix("A", view)), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "X at .* has 3 dimensions .time 4, lat 5, lon 6., and 3 of them are left for a matrix"),
        ({"rows": "level"}, "and no axis 'level': pass names or positions of its axes"),
        ({"rows": 3}, "and no axis 3"),
        ({"rows": ["time", 0]}, "axis 'time' is named twice"),
        ({"rows": ["time"], "cols": ["lat"]}, "of which 'lon' are neither rows nor columns"),
        ({"rows": ["time"], "isel": {"time": 1}}, "axis 'time' is dropped by isel"),
        ({"isel": {"time": 4}}, "axis 0 has no index 4: pass one from 0 to 3"),
        ({"isel": {"time": 1, 0: 2}}, "isel names axis 0 twice"),
    ],
)
def test_axes_that_an_array_does_not_have_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=X, dimension_names=["time", "lat", "lon"])
    with pytest.raises(InputError, match=message):
        oocgemm.gram(oocgemm.as_matrix(str(tmp_path / "a.zarr"), **options))


@pytest.mark.parametrize(
    "bad", [{"rows": 1.5}, {"rows": [True]}, {"isel": {0: "x"}}, {"isel": {0: slice(0, 4, 2)}}]
)
def test_other_values_are_refused_at_once(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="pass"):
        oocgemm.as_matrix(X, **bad)


def test_the_remedy_for_more_dimensions_works(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=X, dimension_names=["time", "lat", "lon"])
    operands: dict[str, Any] = {"zarr": str(tmp_path / "a.zarr"), "memory": X}
    for operand in operands.values():
        with pytest.raises(InputError, match=r"X has 3 dimensions .*, a matrix has 2: fold them") as caught:
            oocgemm.gram(operand)
        code = str(caught.value).partition("such as ")[2].partition(" (--rows")[0]
        found = oocgemm.gram(eval(code, {"oocgemm": oocgemm, "X": operand}), backend="host").out
        flat = X.reshape(4, 30)
        np.testing.assert_array_equal(found, flat @ flat.T)


def test_c_may_not_be_in_the_memory_of_a_folded_operand() -> None:
    array = np.arange(2.0 * 3 * 4).reshape(2, 3, 4)
    view = oocgemm.as_matrix(array, [1], [0, 2])
    with pytest.raises(InputError, match="is the same array as X or overlaps it"):
        oocgemm.gram(view, array.reshape(8, 3)[:3], overwrite=True)


def test_missing_chunks_of_folded_arrays_are_fill_values_unless_they_are_deleted(tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=X.shape, chunks=(1, 5, 6), dtype="f8", fill_value=7, compressors=None
    )
    array[0] = X[0]
    array[2] = X[2]
    matrix = open_matrix("A", oocgemm.as_matrix(str(tmp_path / "a.zarr"), [0]))
    expected = np.full((4, 30), 7.0)
    expected[[0, 2]] = X[[0, 2]].reshape(2, 30)
    np.testing.assert_array_equal(whole(matrix), expected)
    (tmp_path / "a.zarr" / "c" / "2" / "0" / "0").unlink()
    with pytest.raises(oocgemm.ExecutionError, match="is missing"):
        whole(matrix)


@pytest.mark.parametrize("isel", [None, {0: slice(2, 7)}, {1: 1}, {0: slice(2, 8), 1: slice(1, 3)}])
@pytest.mark.parametrize("filters", [{}, {"compression": "gzip", "shuffle": True}, {"fletcher32": True}])
def test_hdf5_chunks_that_are_rectangles_are_read_without_h5py(
    tmp_path: Path, filters: dict[str, Any], isel: Any
) -> None:
    x = np.arange(9 * 4 * 5, dtype="<f4").reshape(9, 4, 5) + 1
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("x", x.shape, "f4", chunks=(2, 1, 5), maxshape=(None, 4, 5), **filters)
        data[:4], data[6:] = x[:4], x[6:]  # some chunks are not stored
        expected = data[:]
    source = oocgemm.as_matrix(f"{tmp_path}/a.h5::x", rows=[0], isel=isel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix = open_matrix("A", source)
    expected = expected[tuple((isel or {}).get(axis, slice(None)) for axis in range(3))]
    np.testing.assert_array_equal(whole(matrix), expected.reshape(matrix.shape))
    assert matrix.describe()["direct"]
