"""A disk that is full, read-only or failing ends a run, and C is marked as unfinished."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

import oocgemm
from oocgemm import ExecutionError, InputError, OocGemmError, stores
from oocgemm.stores import zarr_metadata
from tests.support.faults import Fault, faulty_stores, nothing_left, small_disk
from tests.support.faulty_runs import CHUNK, PRODUCT, TILE, A, B, M, N, failure, multiply, once_planned, store
from tests.support.suite import each_value, slow, thinned

pytestmark = pytest.mark.usefixtures("zarr_has_its_threads", "retries_are_soon")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    try:
        with small_disk(tmp_path / "disk", 400 << 10) as turn_read_only:
            yield tmp_path / "disk", turn_read_only
    except PermissionError as error:
        pytest.skip(str(error))


LARGE = np.arange(256.0 * 16).reshape(256, 16) % 7  # its product with its transpose takes 512 KiB
NOISE = np.random.default_rng(0).standard_normal((256, 16))
CS: dict[str, dict[str, Any]] = {
    "raw": {"compressors": None},
    "zstd": {},
    "shards": {"shards": (64, 64)},
    "v2": {"zarr_format": 2, "filters": [numcodecs.Delta("f8")]},
}


def test_a_disk_that_is_full_ends_the_run(disk: tuple[Path, Any]) -> None:
    said = failure(disk[0], NOISE, NOISE, trans_b="T", tile="64x64x16", chunks=(32, 32), compressor="zstd")
    assert "writing C[" in said
    assert "No space left on device" in said


@pytest.mark.parametrize("name", ["C", "C.npy"])
def test_a_disk_without_room_for_c_is_refused(disk: tuple[Path, Any], name: str) -> None:
    with pytest.raises(
        InputError, match="takes 512 KiB more, and its disk has 400 KiB free: make room for 112 KiB"
    ):
        oocgemm.gemm(NOISE, NOISE, disk[0] / name, trans_b="T", backend="host")
    assert list(disk[0].iterdir()) == []


@pytest.mark.parametrize("kind", CS)
def test_a_disk_that_is_full_ends_a_run_over_a_c_that_is_there(disk: tuple[Path, Any], kind: str) -> None:
    c = disk[0] / "C"
    zarr.create_array(c, shape=(256, 256), dtype="f8", **({"chunks": (32, 32)} | CS[kind]))
    said = ""
    with nothing_left(disk[0]):
        try:
            oocgemm.gemm(NOISE, NOISE, c, trans_b="T", tile="64x64x16", backend="host", overwrite=True)
        except OocGemmError as error:
            said = str(error)
    if kind == "raw":
        assert re.search(r"takes 512 KiB more, and its disk has 3\d\d KiB free: make room for", said), said
    else:
        assert "writing C[" in said
        assert re.search(
            rf"No space left on device: C at {c} needs about .* more, .* are free\. Make room", said
        )


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_is_full_has_no_room_for_a_mapped_file(disk: tuple[Path, Any], there: bool) -> None:
    c = disk[0] / "C.npy"
    if there:  # C exists, and none of its blocks are allocated
        np.lib.format.open_memmap(c, mode="w+", dtype="f8", shape=(256, 256)).flush()
    before = sorted(disk[0].iterdir())
    with nothing_left(disk[0]), pytest.raises(InputError, match=r"No space left on device|make room for"):
        oocgemm.gemm(NOISE, NOISE, c, trans_b="T", backend="host", overwrite=there)
    assert sorted(disk[0].iterdir()) == before


def test_a_c_that_cannot_be_created_is_named_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(zarr_metadata, "publish", Mock(side_effect=full))
    assert "C: cannot create a zarr array at" in failure(tmp_path, A)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_read_only_is_refused(disk: tuple[Path, Callable[[], None]]) -> None:
    folder, turn_read_only = disk
    multiply(folder, A)
    np.save(folder / "C.npy", PRODUCT)
    turn_read_only()
    for name in ("new", "new.npy", "C", "C.npy"):
        with nothing_left(folder), pytest.raises(InputError, match=r"[Rr]ead-only"):
            oocgemm.gemm(A, B, folder / name, backend="host", overwrite=True)


@pytest.mark.parametrize("first", thinned(range(1, 40, 3), (1, 10, 22, 34)))
def test_a_run_whose_disk_turns_read_only_can_be_resumed(tmp_path: Path, first: int) -> None:
    """The disk stays read-only while the failed run cleans up, so that nothing can be deleted."""
    a, b, c = store(tmp_path / "A", "raw"), store(tmp_path / "B", "raw", B), tmp_path / "C"
    fault = Fault(OSError(errno.EROFS, os.strerror(errno.EROFS)), first=first)

    def refusing(right: Callable[..., Any]) -> Callable[..., Any]:
        def act(target: Any, *rest: Any, **options: Any) -> Any:
            within = options.get("dir_fd", target)
            path = os.readlink(f"/proc/self/fd/{within}") if isinstance(within, int) else os.fspath(within)
            if path.startswith(str(c)):
                fault.strike()
            return right(target, *rest, **options)

        return act

    calls = ("pwritev", "write", "replace", "unlink", "rmdir", "mkdir", "ftruncate", "fdatasync")
    with ExitStack() as patches, nothing_left(tmp_path):
        for name in calls:
            patches.enter_context(patch.object(os, name, refusing(getattr(os, name))))
        try:
            multiply(tmp_path, a, b)
        except OocGemmError as error:
            assert os.strerror(errno.EROFS) in str(error)
        else:
            assert fault.calls < first
    np.testing.assert_array_equal(multiply(tmp_path, a, b, resume=True).out[:], PRODUCT)


@each_value
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, *slow((errno.EROFS,), (errno.EDQUOT,))])
@pytest.mark.parametrize("call", ["pwritev", "replace", "fsync", "open"])
def test_a_disk_that_fails_at_any_call_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    right, c = getattr(os, call), str(tmp_path / "C")
    fault = Fault(OSError(number, os.strerror(number)), first=1 if call == "fsync" else 3)

    def failing(target: Any, *rest: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        if path.startswith(c) and (call != "open" or rest[0] & os.O_WRONLY):
            fault.strike()
        return right(target, *rest, **options)

    monkeypatch.setattr(os, call, failing)
    said = failure(tmp_path, A)
    assert "to the disk: " in said or "writing C[" in said
    assert os.strerror(number) in said


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), MemoryError("none left")], ids=repr
)
def test_a_tile_that_cannot_be_brought_to_the_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    right, fault = os.fsync, Fault(error)

    def failing(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("C/c/1/1"):
            fault.strike()
        right(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    said = failure(tmp_path, A, chunks=(20, 20))  # lists all tiles that waited, if several did
    assert re.search(r"tiles? .*\(1, 1\).* of C cannot be made durable: ", said)
    assert str(error) in said


def test_a_map_that_cannot_be_brought_to_the_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = np.lib.format.open_memmap(tmp_path / "C.npy", mode="w+", dtype="f8", shape=(M, N))
    failing = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(np.memmap, "flush", failing)
    with pytest.raises(ExecutionError, match="C cannot be written to the disk"):
        oocgemm.gemm(A, B, c, backend="host", tile=TILE)


def test_a_c_without_a_journal_says_whether_it_is_whole() -> None:
    c = zarr.create_array(MemoryStore(), shape=(M, N), dtype="f8", chunks=(CHUNK, CHUNK))
    options: dict[str, Any] = {"backend": "host", "tile": TILE}
    marks: list[dict[str, Any]] = []

    def fails(**faults: Fault) -> dict[str, Any]:
        with faulty_stores(**faults), pytest.raises(ExecutionError):
            oocgemm.gemm(A, B, c, **options)
        return dict(c.attrs)

    unfinished = {"oocgemm": {"complete": False}}
    assert fails(read_A=Fault(ValueError("before anything is written"))) == {}
    assert fails(write_C=Fault(ValueError("once something is"), first=3)) == unfinished
    assert fails(read_A=Fault(ValueError("again"))) == unfinished
    oocgemm.gemm(A, B, c, **options, progress=once_planned(lambda: marks.append(dict(c.attrs))))
    assert (marks, dict(c.attrs)) == ([unfinished], {})


def test_a_c_without_a_sidecar_is_unfinished_until_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "sidecar", lambda c: None)
    with faulty_stores(read_A=Fault(ValueError("no"))), pytest.raises(ExecutionError):
        multiply(tmp_path, A)
    assert zarr.open_array(tmp_path / "C").attrs["oocgemm"] == {"complete": False}


def test_a_timeline_that_finds_the_disk_full_says_so(disk: tuple[Path, Any]) -> None:
    (disk[0] / "filler").write_bytes(b"\0" * (399 << 10))
    with (
        nothing_left(disk[0]),
        pytest.raises(ExecutionError, match="C is done, but its timeline cannot be written"),
    ):
        oocgemm.gemm(A, B, backend="host", tile="4x4x4", timeline=disk[0] / "log")
