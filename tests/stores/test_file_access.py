"""Files are read and written past the page cache or through it, with the same result."""

import ctypes
import errno
import fcntl
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zarr

from oocgemm.jobs.output import remove_shared
from oocgemm.stores import files
from oocgemm.stores.arrays import ArrayMatrix
from oocgemm.stores.npy import NpyMatrix, create_npy, open_npy
from oocgemm.stores.zarr_matrix import ZarrMatrix
from oocgemm.system.resources import allocate


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        ((512, 512), "every row on whole sectors"),
        ((300, 1000), "rows that are not"),
        ((1001, 1001), "an odd number of bytes, the last of them no whole sector"),
    ],
)
def test_reading_past_the_page_cache_gives_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunk: tuple[int, int],
    resident: bool,
    why: str,
) -> None:
    monkeypatch.setattr(files, "resident", lambda address, size: resident)
    values = np.random.default_rng(0).standard_normal((1100, 1100))
    array = zarr.create_array(tmp_path / "A", data=values, chunks=chunk, compressors=None)
    for cols in ((0, 1100), (0, chunk[1])):
        matrix = ZarrMatrix("A", array)
        out = allocate(1100 * 1100 * 8).view("f8")[: 1100 * cols[1]].reshape(1100, cols[1])
        for _ in ("past the cache", "through it"):
            out[...] = np.nan
            matrix.read((0, 1100), cols, out)
            np.testing.assert_array_equal(out, values[:, : cols[1]])


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_reads_fall_back_to_the_page_cache_without_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    place, data = tmp_path / "file", np.random.default_rng(0).bytes(1 << 21)
    place.write_bytes(data)
    preadv = files._fill

    def refuse(descriptor: int, rows: Any, offset: int, done: int = 0, flags: int = 0) -> int:
        if flags or fcntl.fcntl(descriptor, fcntl.F_GETFL) & files.O_DIRECT:
            raise OSError(errno.EINVAL if not flags else error, "no")
        return preadv(descriptor, rows, offset, done, flags)

    monkeypatch.setattr(files, "resident", lambda address, size: False)
    monkeypatch.setattr(files, "_fill", refuse)
    out = files.scratch(1 << 21)
    out[...] = 0
    with files.OpenFile(place) as file:
        file.read(0, out, past_cache=True)
    assert out.tobytes() == data


@pytest.mark.parametrize(("share", "expected"), [(0.5, [True, False, False]), (0, [True, True, True])])
def test_what_is_read_again_is_cached_if_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, expected: list[bool]
) -> None:
    monkeypatch.setattr("oocgemm.stores.files.MAX_CACHED_SHARE", share)
    asked: list[bool] = []
    read = files.OpenFile.read

    def note(file: files.OpenFile, offset: int, out: Any, *, past_cache: bool) -> None:
        asked.append(past_cache)
        read(file, offset, out, past_cache=past_cache)

    monkeypatch.setattr(files.OpenFile, "read", note)
    values = np.eye(400)  # smaller chunks are read together, always through the page cache
    array = zarr.create_array(tmp_path / "A", data=values, chunks=(400, 400), compressors=None)
    matrix = ZarrMatrix("A", array)
    for _ in expected:
        matrix.read((0, 400), (0, 400), np.empty((400, 400)))
    assert asked == expected


def test_asking_what_is_in_the_page_cache_is_answered(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(bytes(1 << 20))
    with files.OpenFile(place) as file:
        file.mapped(0, 1 << 20).sum()
        view, _ = file._map(4096, 1 << 19)
        assert files.resident(files._address(view), len(view))


@pytest.mark.parametrize(("held", "answer"), [(8, True), (4, True), (3, False), (0, False)])
def test_half_of_the_pages_looked_at_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, answer: bool
) -> None:
    place = tmp_path / "file"
    place.write_bytes(bytes(1 << 20))
    asked: list[int] = []

    def mincore(address: int, length: int, found: int) -> int:
        asked.append(address)
        # Only the lowest bit says whether the page is cached, the others are undefined.
        ctypes.c_ubyte.from_address(found).value = 0xFE | (len(asked) <= held)
        return 0

    monkeypatch.setattr(files, "_mincore", mincore)
    with files.OpenFile(place) as file:
        view, _ = file._map(0, 1 << 20)
        assert files.resident(files._address(view), len(view)) is answer
    assert [address - asked[0] for address in asked] == list(range(0, 1 << 20, 1 << 17))


def test_rows_of_any_number_and_place_are_filled(tmp_path: Path) -> None:
    place = tmp_path / "file"
    values = np.arange(3000 * 7, dtype="u2").reshape(3000, 7)
    place.write_bytes(b"head" + values.tobytes())
    with files.OpenFile(place) as file:
        out = np.zeros((3000, 9), "u2")
        file.read(4, out[:, 1:8], past_cache=True)
        np.testing.assert_array_equal(out[:, 1:8], values)
        assert not out[:, [0, 8]].any()
        with pytest.raises(EOFError, match="ends 4 bytes too early"):
            file.read(8, out[:, 1:8], past_cache=False)


def test_scratch_is_used_again_and_grows() -> None:
    first = files.scratch(100)
    assert files.scratch(50).ctypes.data == first.ctypes.data
    assert files.scratch(1 << 20).size == 1 << 20


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("cols", [(0, 700), (100, 300), (699, 700)])
def test_blocks_of_mapped_files_are_what_numpy_reads(
    tmp_path: Path, order: Any, cols: tuple[int, int]
) -> None:
    values = np.random.default_rng(0).standard_normal((600, 700))
    np.save(tmp_path / "A.npy", np.asarray(values, order=order))
    for matrix in (
        open_npy("A", tmp_path / "A.npy"),
        ArrayMatrix("A", np.load(tmp_path / "A.npy", mmap_mode="r")[::-1][::-1]),
    ):
        out = np.empty((500, cols[1] - cols[0]))
        matrix.read((77, 577), cols, out)
        np.testing.assert_array_equal(out, values[77:577, slice(*cols)])


def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "replace", Mock(side_effect=full))
    monkeypatch.setattr(NpyMatrix, "reserve", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space"):
        files.publish(tmp_path / "chunk", np.ones((4, 4)), 128, tmp_path)
    with pytest.raises(OSError, match="No space"):
        create_npy("C", tmp_path / "C.npy", (4, 4), np.dtype("f8"))
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    root, data = tmp_path / "attempts" / "1", np.arange(4.0)
    root.mkdir(parents=True)
    files.publish(root / "c" / "0" / "7", data, data.nbytes, root)
    assert (root / "c" / "0" / "7").read_bytes() == data.tobytes()
    remove_shared(root.parent)
    for name in ("7", "c/7", "c/0/7"):
        with pytest.raises(FileNotFoundError):
            files.publish(root / name, data, data.nbytes, root)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not files.O_DIRECT, reason="there is no way past the page cache")
@pytest.mark.parametrize("call", ["open", "pwritev"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSPC])
def test_writes_use_the_page_cache_only_where_direct_io_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    data = files.scratch(8192)
    data[...] = np.arange(8192) % 251
    right, flags = getattr(os, call), []

    def refuse(target: Any, *rest: Any) -> Any:
        flags.append(rest[0] if call == "open" else fcntl.fcntl(target, fcntl.F_GETFL))
        if flags[-1] & files.O_DIRECT:
            raise OSError(number, "no")
        return right(target, *rest)

    monkeypatch.setattr(os, call, refuse)
    if number == errno.EINVAL:
        files.publish(tmp_path / "chunk", data, 8000, tmp_path)
        assert (tmp_path / "chunk").read_bytes() == data[:8000].tobytes()
    else:
        with pytest.raises(OSError, match="no"):
            files.publish(tmp_path / "chunk", data, 8000, tmp_path)
        assert list(tmp_path.iterdir()) == []
    assert len(flags) == (2 if number == errno.EINVAL else 1)


@pytest.mark.skipif(not files.O_DIRECT, reason="there is no way past the page cache")
@pytest.mark.parametrize(
    "what",
    ["file", "rows", "hard link", "symbolic link", "other size", "pipe", "missing", "misaligned", "refused"],
)
def test_only_a_file_of_one_name_is_overwritten_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    place, other, old = tmp_path / "chunk", tmp_path / "other", b"x" * 8192
    data = files.scratch(3 * 8192)[: 2 * 8192].reshape(2, -1)
    data[...] = np.arange(data.size).reshape(2, -1) % 251
    data = (
        data[:, :4096]
        if what == "rows"
        else data.reshape(-1)[: 8192 + 8][8 * (what == "misaligned") :][:8192]
    )
    match what:
        case "symbolic link":
            other.write_bytes(old)
            place.symlink_to(other)
        case "pipe":
            os.mkfifo(place)
        case "missing":
            pass
        case _:
            place.write_bytes(old if what != "other size" else old[1:])
    if what == "hard link":
        os.link(place, other)
    if what == "refused":
        monkeypatch.setattr(os, "pwritev", Mock(side_effect=OSError(errno.EINVAL, "no")))
    before = place.read_bytes() if what not in ("pipe", "missing") else b""
    done = files.overwrite(place, data)
    assert done == (what in ("file", "rows"))
    if what not in ("pipe", "missing"):
        assert place.read_bytes() == (data.tobytes() if done else before)
    if "link" in what:
        assert other.read_bytes() == old
