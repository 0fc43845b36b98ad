"""Errors about what cannot be an operand say what to pass instead, and that works."""

import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.errors import InputError, NotFoundError
from oocgemm.stores import open_matrix
from tests.support.command import run
from tests.support.hdf5_files import whole

A = np.arange(9.0).reshape(3, 3)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda path: None, "A is None: pass an array or a path"),
        (os.fsencode, r"A is bytes: pass a path as a string, '(.*)'"),
        (lambda path: open(path, "rb"), r"A is an open file: pass its path, '(.*)'"),  # noqa: SIM115
        (lambda path: io.BytesIO(b"x"), "A is an open file: pass its path, or an array"),
        (lambda path: object(), "A is not an array of numbers: pass an array with two dimensions, or a path"),
        (lambda path: [None, path], "A is not an array of numbers"),
        (lambda path: np.array(None), "A is not an array of numbers"),
        (lambda path: lambda: 0, "A is not an array of numbers"),
        (lambda path: {1, 2}, "A is not an array of numbers"),
        (lambda path: 3.5, r"A has 0 dimensions, a matrix has 2: reshape it"),
        (lambda path: [1, 2], r"A has 1 dimensions, a matrix has 2: reshape it"),
    ],
)
def test_what_is_no_array_is_named_as_what_it_is(tmp_path: Path, make: Any, part: str) -> None:
    path = str(tmp_path / "a.npy")
    np.save(path, A)
    operand = make(path)
    with pytest.raises(InputError, match=part) as caught:
        oocgemm.matmul(operand, np.eye(3))
    found = re.search(part, str(caught.value))
    if found is not None and found.groups():
        np.testing.assert_array_equal(oocgemm.matmul(found[1], np.eye(3)), A)
    if isinstance(operand, io.IOBase):
        operand.close()


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
def test_a_zarr_group_lists_its_arrays(
    tmp_path: Path, zarr_format: Any, consolidated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    group = zarr.open_group("g", mode="w", zarr_format=zarr_format)
    group.create_array("X", data=A)
    group.create_group("layers").create_group("deep").create_array("counts", data=A)
    group.create_group("empty")
    if consolidated:
        zarr.consolidate_metadata("g")
    Path("g/other").mkdir()
    expected = r"g is a zarr group, not an array; give an array in it: X, layers/deep/counts$"
    for operand in ("g", zarr.open_group("g", mode="r")):
        with pytest.raises(InputError, match=expected):
            open_matrix("A", operand)
    for name in ("X", "layers/deep/counts"):
        np.testing.assert_array_equal(oocgemm.matmul(f"g/{name}", np.eye(3)), A)
    with pytest.raises(InputError, match=r"g/empty is a zarr group, not an array$"):
        oocgemm.matmul("g/empty", np.eye(3))
    np.save("B.npy", np.eye(3))
    assert re.search(expected, run("g", "B.npy", "C").err, re.MULTILINE)
    for number in range(20):
        group.create_array(f"a{number:02}", data=A)
    with pytest.raises(InputError, match=r"give an array in it: X, a00, a01, .*, a06, and more$"):
        oocgemm.matmul("g", np.eye(3))


def test_a_collection_lists_its_arrays(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["s/y"] = A, A
        file["broken"] = h5py.SoftLink("/nowhere")
        with pytest.raises(InputError, match=r"File is a collection: give one array of it \('x'\)"):
            oocgemm.matmul(file, np.eye(3))
        with pytest.raises(InputError, match=r"Group is a collection: give one array of it \('y'\)"):
            oocgemm.matmul(file["s"], np.eye(3))
    with pytest.raises(InputError, match="it has no arrays itself; give an array in one of 'a', 'b'"):
        open_matrix("A", {"a": {"x": A}, "b": {}})
    with pytest.raises(InputError, match="dict is a collection: it is empty"):
        open_matrix("A", {})


@contextmanager
def unprivileged() -> Iterator[None]:
    """Drop root's permission to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that others may search: pytest's are for root only."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    for each in (path, *path.rglob("*")):
        each.chmod(0o755)
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("kind", "closed"),
    [
        *(("zarr 3", each) for each in ("zarr.json", "", "..")),
        *(("zarr 2", each) for each in (".zarray", ".zattrs", "", "..")),
        *((kind, each) for kind in ("npy", "hdf5") for each in ("", "..")),
    ],
)
def test_a_file_without_permission_is_reported_as_such(folder: Path, kind: str, closed: str) -> None:
    place = folder / "below" / {"npy": "a.npy", "hdf5": "a.h5"}.get(kind, "a.zarr")
    place.parent.mkdir()
    if kind == "npy":
        np.save(place, A)
    elif kind == "hdf5":
        with h5py.File(place, "w") as file:
            file["x"] = A
    else:
        zarr.create_array(place, data=A, zarr_format=int(kind[-1]), attributes={"a": 1})  # type: ignore[arg-type]
    address = f"{place}::x" if kind == "hdf5" else str(place)
    np.testing.assert_array_equal(whole(open_matrix("A", address)), A)
    hidden = place.parent if closed == ".." else place / closed if closed else place
    mode = hidden.stat().st_mode
    hidden.chmod(0)
    with unprivileged(), pytest.raises(InputError, match=r"A.*(?i:permission denied)") as caught:
        open_matrix("A", address)
    assert not isinstance(caught.value, NotFoundError)
    assert "no zarr array" not in str(caught.value)
    hidden.chmod(mode)  # the remedy
    np.testing.assert_array_equal(whole(open_matrix("A", address)), A)


class Strict:
    """A lazy array that has no empty slices, as many formats."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype, self._array = array.shape, array.dtype, array

    def __getitem__(self, key: tuple[slice, slice]) -> Any:
        if any(part.stop <= part.start for part in key):
            raise IndexError("a slice must have elements")
        return self._array[key]


@pytest.mark.parametrize("dtype", ["f4", "f8", "i1", "c16"])
def test_lazy_arrays_without_empty_slices_are_multiplied(dtype: str) -> None:
    a, b = A.astype(dtype), np.eye(3, dtype=dtype)
    np.testing.assert_array_equal(oocgemm.matmul(Strict(a), Strict(b)), a @ b)
    for shape in ((0, 3), (3, 0), (0, 0)):
        matrix = open_matrix("A", Strict(np.zeros(shape, dtype)))
        assert matrix.shape == shape


@pytest.mark.parametrize("mode", ["r+", "w+"])
@pytest.mark.parametrize(
    ("a", "c"),
    [
        (np.s_[:10, :20], np.s_[10:20, :20]),
        (np.s_[:10, :20], np.s_[:10, 20:40]),
        (np.s_[0:20:2, :20], np.s_[1:20:2, :20]),
        (np.s_[:10, 0:40:2], np.s_[:10, 1:40:2]),
        (np.s_[20:30, :20], np.s_[30:, 20:]),
    ],
)
def test_disjoint_blocks_of_one_memory_map_are_multiplied(tmp_path: Path, mode: Any, a: Any, c: Any) -> None:
    made = np.lib.format.open_memmap(tmp_path / "m.npy", "w+", "f8", (40, 40))
    made[...] = np.random.default_rng(0).integers(-9, 9, (40, 40))
    whole = made if mode == "w+" else np.load(tmp_path / "m.npy", mmap_mode="r+")
    before = whole.copy()
    b = np.random.default_rng(1).integers(-9, 9, (20, 20)).astype("f8")
    oocgemm.gemm(whole[a], b, whole[c], beta=1.0)
    before[c] += before[a] @ b
    np.testing.assert_array_equal(whole, before)
    # Also in the file, and with an operand that is changed on load.
    transform = oocgemm.Transform(scale=np.full(20, 2.0))
    oocgemm.gemm(whole[a], b, whole[c], transform_a=transform)
    before[c] = before[a] / 2 @ b
    whole.flush()
    np.testing.assert_array_equal(np.load(tmp_path / "m.npy"), before)


@pytest.mark.parametrize("c", [np.s_[5:15, :20], np.s_[:10, 19:39], np.s_[:10, :20]])
def test_overlapping_blocks_of_one_memory_map_are_refused(tmp_path: Path, c: Any) -> None:
    whole = np.lib.format.open_memmap(tmp_path / "m.npy", "w+", "f8", (40, 40))
    other = np.load(tmp_path / "m.npy", mmap_mode="r")
    for a in (whole[:10, :20], other[:10, :20], str(tmp_path / "m.npy")):
        b = np.eye(20) if not isinstance(a, str) else np.ones((40, 20))
        target = whole[c] if not isinstance(a, str) else whole[:, :20]
        with pytest.raises(InputError, match="C is the same array as A or overlaps it"):
            oocgemm.gemm(a, b, target)
