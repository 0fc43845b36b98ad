"""The places of an HDF5 dataset's chunks are proved, whatever kind of index the file has, and sparse."""

import ctypes
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import oocgemm
from tests.support.command import run
from tests.support.hdf5_files import opened, whole, write
from tests.support.suite import each_value, examples, thinned

LIBVERS: tuple[Any, ...] = ("earliest", "v108", "v110", "v112", "v114", "latest")
# Each kind of index: a single chunk, implicit and fixed arrays, extensible arrays along either axis, B-trees.
MAXSHAPES = (None, (4, None), (None, 6), (None, None), (9, None), (None, 8), (9, 8), (5, 12))
FILTERS: tuple[dict[str, Any], ...] = ({}, {"compression": "gzip"}, {"shuffle": True, "fletcher32": True})
SHAPES = ((4, 6), (3, 5), *(((4, 2), (2, 6), (1, 1)) if examples(1, 0) else ()))


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is read by h5py")
        yield


def parts(shape: tuple[int, int]) -> Iterator[list[Any]]:
    """Yield regions of a dataset that are written one after the other."""
    yield []
    yield [np.s_[:, :]]
    yield [np.s_[:, :2]]
    yield [np.s_[-1:, :]]
    yield [np.s_[-1:, -1:], np.s_[:1, :1]]
    yield [np.s_[:2, 2:4], np.s_[2:, :2]]


@pytest.mark.parametrize("early", thinned([False, True], [False]))
@pytest.mark.parametrize("libver", thinned(LIBVERS, ("latest",)))
def test_every_kind_of_index_is_read_as_h5py_reads_it(tmp_path: Path, libver: Any, early: bool) -> None:
    path = tmp_path / "x.h5"
    cases = 0
    for shape, maxshape, options in product(SHAPES, MAXSHAPES, FILTERS):
        if maxshape and any(a is not None and a < b for a, b in zip(maxshape, shape, strict=True)):
            continue
        content = np.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
        for regions in parts(shape):
            with h5py.File(path, "w", libver=(libver, "latest")) as file:
                plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                if early:
                    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                dataset = file.create_dataset(
                    *("x", shape, "f8"),
                    chunks=tuple(map(min, (2, 2), shape)),
                    maxshape=maxshape,
                    fillvalue=-1,
                    dcpl=plist,
                    **options,
                )
                for region in regions:
                    dataset[region] = content[region]
                expected = dataset[...]
            with quiet():
                np.testing.assert_array_equal(whole(opened(f"{path}::x")), expected, (maxshape, regions))
            cases += 1
    assert cases > 200


@pytest.mark.parametrize("written", [np.s_[:, :2], np.s_[:, :]])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "i1"])
def test_products_of_datasets_that_grow_along_the_second_axis(
    tmp_path: Path, dtype: str, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = np.arange(1, 41).reshape(8, 5).astype(dtype)
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        dataset = file.create_dataset("x", (8, 5), dtype, chunks=(3, 2), maxshape=(8, None))
        dataset[written] = content[written]
        expected = dataset[...]
    identity = np.eye(5, dtype=np.dtype(dtype).newbyteorder("="))
    with pytest.warns(UserWarning, match="HDF5 does not state where its chunks are: copy it into a dataset"):
        found = oocgemm.matmul(f"{tmp_path}/x.h5::x", identity)
    np.testing.assert_array_equal(found, expected.astype(found.dtype))
    monkeypatch.chdir(tmp_path)
    np.save("i.npy", identity)
    with quiet():
        done = run("x.h5::x", "i.npy", "C.npy", "--verify")
    assert done.code == 0, done.err
    np.testing.assert_array_equal(np.load("C.npy"), expected.astype(found.dtype))
    # The remedy that the warning names.
    with h5py.File("x.h5") as old, h5py.File("y.h5", "w", libver="latest") as new:
        new.create_dataset("x", data=old["x"], chunks=(3, 2), maxshape=(None, None))
    assert opened("y.h5::x").describe()["direct"]
    np.testing.assert_array_equal(whole(opened("y.h5::x")), expected)


@each_value
@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("options", FILTERS)
@pytest.mark.parametrize("block", [0, 512])
def test_a_wrong_index_is_found_whatever_hdf5_lists(
    tmp_path: Path, libver: Any, options: dict[str, Any], block: int
) -> None:
    """Zeros everywhere: the stored bytes do not distinguish the chunks. Their addresses do."""
    from oocgemm.stores.hdf5_chunks import Index, _is_right, listed

    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w", libver=libver, userblock_size=block) as file:
        file.create_dataset("x", (24, 20), "f4", chunks=(2, 2), maxshape=(24, 40), **options)[:, :14] = 0
    with h5py.File(path) as file:
        dataset = file["x"]
        index, why = listed(dataset, path)
        assert (why, len(index.numbers)) == ("", 12 * 7)
        assert _is_right(dataset, path, index)
        i, j = np.divmod(index.numbers, index.grid[1])
        by_columns = np.argsort(j * index.grid[0] + i, kind="stable")
        wrong: list[Index] = [
            replace(index, offsets=index.offsets[::-1]),
            replace(index, offsets=np.roll(index.offsets, 1)),
            replace(index, offsets=index.offsets[by_columns]),
            replace(index, offsets=index.offsets - block if block else index.offsets + 4),
            replace(index, sizes=index.sizes - 1),
            replace(index, masks=index.masks ^ 1),
            replace(index, numbers=index.numbers + index.grid[1] - 7),
        ]
        for each in wrong:
            assert not _is_right(dataset, path, each)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("maxshape", [None, (None, 1500), (None, None)])
def test_chunks_that_are_not_stored_take_no_memory(tmp_path: Path, libver: Any, maxshape: Any) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver=libver) as file:
        late = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        late.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)
        shape = (1500, 1500)
        dataset = file.create_dataset("x", shape, "f4", chunks=(1, 1), maxshape=maxshape, dcpl=late)
        file.create_dataset("empty", shape, "f4", chunks=(1, 1), maxshape=maxshape)
        dataset[1200, 1000:1003], dataset[1499, 1499] = [1, 2, 3], 4
        expected = dataset[1190:1210, 990:1010]
    opened(f"{tmp_path}/x.h5::x")
    tracemalloc.start()
    try:
        matrix, empty = opened(f"{tmp_path}/x.h5::x"), opened(f"{tmp_path}/x.h5::empty")
        out, line = np.empty((20, 20), "f4"), np.empty((1, 1500), "f4")
        matrix.read((1190, 1210), (990, 1010), out)
        np.testing.assert_array_equal(out, expected)
        matrix.read((1499, 1500), (0, 1500), line)
        assert line.sum() == line[0, -1] == 4
        empty.read((0, 20), (0, 20), out)
        assert not out.any()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_the_index_counts_in_the_host_budget(tmp_path: Path) -> None:
    address = write(tmp_path / "x.h5", np.ones((400, 400), "f4"), chunks=(4, 4))
    matrix: Any = opened(address)
    index = matrix._reader.index
    sizes = sum(each.nbytes for each in (index.numbers, index.offsets, index.sizes, index.masks))
    assert (sizes, matrix.layout.resident_bytes) == (280_000, 280_000 + 80_000)
    plan = oocgemm.plan(address, np.ones((400, 8), "f4"))
    assert plan.footprint.host["scratch"] >= 360_000


def test_too_many_chunks_for_a_file_are_read_by_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocgemm.stores.hdf5_chunks.MIN_CHUNKS", 100)
    content = np.arange(400.0).reshape(20, 20)
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        file.create_dataset("x", data=content, chunks=(1, 1))
    with pytest.warns(UserWarning, match=r"it has more than 1\d\d chunks in .* store it in larger chunks"):
        matrix = opened(f"{tmp_path}/x.h5::x")
    np.testing.assert_array_equal(whole(matrix), content)
    write(tmp_path / "y.h5", content, chunks=(5, 5))
    assert opened(f"{tmp_path}/y.h5::x").describe()["direct"]


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"shuffle": True}, {"fletcher32": True}])
def test_chunks_at_the_edges_may_have_no_filters(tmp_path: Path, options: dict[str, Any]) -> None:
    """H5Pset_chunk_opts lets HDF5 store chunks that extend beyond the dataset without filters."""
    library = next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libhdf5-" in line
    )
    call = ctypes.CDLL(library).H5Pset_chunk_opts
    call.argtypes = ctypes.c_int64, ctypes.c_uint
    content = np.arange(42.0).reshape(6, 7)
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4, 4))
        assert call(plist.id, 2) >= 0
        for name in options:
            {"compression": lambda: plist.set_deflate(4), "shuffle": plist.set_shuffle}.get(
                name, plist.set_fletcher32
            )()
        space = h5py.h5s.create_simple(content.shape)
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F64LE, space, dcpl=plist)
        file["x"][...] = content
    with pytest.warns(UserWarning, match="chunks at its edges are stored without its filters"):
        matrix = opened(f"{tmp_path}/x.h5::x")
    np.testing.assert_array_equal(whole(matrix), content)
    # Chunks that extend beyond the dataset usually have the filters.
    write(tmp_path / "y.h5", content, chunks=(4, 4), **options)
    assert opened(f"{tmp_path}/y.h5::x").describe()["direct"]
