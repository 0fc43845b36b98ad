"""A disk without space for C is refused, and a run whose disk fills up says how to resume."""

import errno
import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import ExecutionError, InputError
from oocgemm.cli.process import EXIT_FAILED
from oocgemm.stores import open_matrix, zarr_chunks
from oocgemm.stores.files import publish
from tests.support.command import contents, run

_rng = np.random.default_rng(0)
A, B = (_rng.integers(-3, 4, shape).astype(float) for shape in ((40, 30), (30, 50)))
PRODUCT = A @ B
KIB = 1 << 10
# C is 20 chunks, each of which takes 4 KiB on the disk, and 6 tiles.
OPTIONS: dict[str, Any] = {"backend": "host", "tile": "20x20x10", "chunks": (10, 10)}
WHOLE = 80 * KIB


class Disk:
    """A disk with `free` bytes, on which each chunk takes one block of 4 KiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 1 << 40
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=self.free))
        self._publish, self._writing = publish, threading.Lock()
        monkeypatch.setattr(zarr_chunks, "publish", self._write)

    def _write(self, path: Path, data: Any, size: int, root: Path) -> None:
        with self._writing:
            if self.free < 4 * KIB:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self.free -= 0 if path.exists() else 4 * KIB
            self._publish(path, data, size, root)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("free", [0, WHOLE - 1])
def test_a_disk_without_room_is_refused(tmp_path: Path, disk: Disk, free: int) -> None:
    disk.free = free
    for resume in (False, True):
        with pytest.raises(InputError) as raised:
            oocgemm.gemm(A, B, tmp_path / "C", resume=resume, **OPTIONS)
        assert f"C at {tmp_path / 'C'} takes 80 KiB more, and its disk has" in str(raised.value)
        assert contents(tmp_path) == {}


def test_the_room_that_is_said_to_be_missing_is_enough(tmp_path: Path, disk: Disk) -> None:
    disk.free = 10 * KIB
    with pytest.raises(InputError, match="make room for 70 KiB"):
        oocgemm.gemm(A, B, tmp_path / "C", **OPTIONS)
    disk.free += 70 * KIB
    np.testing.assert_array_equal(oocgemm.gemm(A, B, tmp_path / "C", **OPTIONS).out[:], PRODUCT)


def test_a_npy_file_needs_room_for_its_elements(tmp_path: Path, disk: Disk) -> None:
    disk.free = PRODUCT.nbytes - 1
    with pytest.raises(InputError, match=r"C\.npy takes 15\.6 KiB more"):
        oocgemm.gemm(A, B, tmp_path / "C.npy", backend="host")
    assert contents(tmp_path) == {}


def test_chunks_that_are_there_need_no_room(tmp_path: Path, disk: Disk) -> None:
    array = zarr.create_array(tmp_path / "C", shape=(40, 50), dtype="f8", chunks=(10, 10), compressors=None)
    array[:20] = 1
    disk.free = 40 * KIB - 1
    with pytest.raises(InputError, match="takes 40 KiB more"):
        oocgemm.gemm(A, B, tmp_path / "C", overwrite=True, backend="host")
    disk.free += 1 + 40 * KIB  # the space of the chunks that are replaced
    oocgemm.gemm(A, B, tmp_path / "C", overwrite=True, backend="host")
    np.testing.assert_array_equal(array[:], PRODUCT)


def test_what_compressed_chunks_take_is_not_known_before(tmp_path: Path, disk: Disk) -> None:
    disk.free = 0
    with pytest.raises(ExecutionError, match="needs about"):
        oocgemm.gemm(A, B, tmp_path / "C", compressor="zstd", **OPTIONS)


@pytest.mark.parametrize("compressor", ["none", "zstd"])
def test_a_disk_that_fills_up_says_how_to_go_on(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, compressor: str
) -> None:
    a, b, c = (tmp_path / name for name in "ABC")
    zarr.create_array(a, data=A, chunks=(10, 10))
    zarr.create_array(b, data=B, chunks=(10, 10))
    arguments = str(a), str(b), str(c), "--tile", "20x20x10", "--quiet"
    chunks = "--chunks", "10x10", "--compressor", compressor

    def fill() -> Any:  # another program fills the disk after the run has started
        disk.free = 50 * KIB
        return lambda span: None

    with pytest.raises(ExecutionError) as raised:
        oocgemm.gemm(a, b, c, compressor=compressor, progress=lambda plan: fill(), **OPTIONS)
    found = re.search(
        rf"writing C\[.*\]: No space left on device: C at {re.escape(str(c))} needs about (\d+) KiB more, "
        r"2 KiB are free\. "
        r"Make room, then continue with --resume \(resume=True\)",
        str(raised.value),
    )
    assert found is not None, str(raised.value)
    assert int(found[1]) == 30  # KiB missing: 80 for C, minus 48 that are written and 2 that are free
    again = run(*arguments, *chunks, "--resume")
    assert again.code != 0
    assert "80 KiB" not in again.err
    disk.free += int(found[1]) * KIB
    done = run(*arguments, *chunks, "--resume")
    assert (done.code, done.err) == (0, "")
    np.testing.assert_array_equal(zarr.open_array(c)[:], PRODUCT)


def test_a_quota_says_nothing_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def publish(*_: Any) -> None:
        raise over

    monkeypatch.setattr(zarr_chunks, "publish", publish)
    np.save(tmp_path / "A.npy", A)
    np.save(tmp_path / "B.npy", B)
    done = run(tmp_path / "A.npy", tmp_path / "B.npy", tmp_path / "C", "--chunks", "10x10")
    assert done.code == EXIT_FAILED
    assert f"C at {tmp_path / 'C'} needs about 80 KiB more. Make room" in done.err


def test_missing_bytes_are_estimated_from_stored_chunks(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "C", shape=(40, 50), dtype="f8", chunks=(10, 10))
    matrix: Any = open_matrix("C", tmp_path / "C", writable=True)
    assert matrix.missing_bytes() == WHOLE
    array[:30] = 1
    assert matrix.missing_bytes() == 5 * 4 * KIB
