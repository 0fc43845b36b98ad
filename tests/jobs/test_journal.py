"""Only one run at a time writes a C, and its journal lists the finished tiles.

Damaged journals are refused.
"""

import errno
import fcntl
import os
import socket
import threading
import time
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import ExecutionError, InputError
from oocgemm.jobs import journal
from oocgemm.jobs.journal import FORMAT, JOURNAL, LOCK, Journal, read
from oocgemm.jobs.resume import Committer, resume_hint
from oocgemm.planning import TileGrid, TileShape
from oocgemm.stores.files import fingerprint_of, sync_path
from tests.support.faults import nothing_left
from tests.support.suite import slow

ME = f"process {os.getpid()} on {socket.gethostname()}\n"
HEADER = b'{"run":{"format":%d}}' % FORMAT
A = np.arange(64.0).reshape(8, 8)


def multiply(c: Path, **options: Any) -> Any:
    return oocgemm.gemm(A, A, c, backend="host", tile="4x4x4", **options).out


def lines(*texts: bytes) -> bytes:
    return b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in texts)


def test_a_lock_names_its_process_and_is_released(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 4000000 of long ago" * 9)
    with nothing_left(tmp_path):
        held = Journal(tmp_path)
        assert (tmp_path / LOCK).read_text() == ME
        with pytest.raises(InputError, match=f"another run is writing C .{ME.strip()}, which"):
            Journal(tmp_path)
        held.close()
        Journal(tmp_path).close()


def test_a_lock_taken_for_an_instant_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LOCK).touch()
    with open(tmp_path / LOCK) as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda pause: fcntl.flock(looking, fcntl.LOCK_UN))
        Journal(tmp_path).close()


@pytest.mark.parametrize("whole", [True, False], ids=["and its folder", "alone"])
@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_lock_file_removed_meanwhile_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, whole: bool
) -> None:
    folder, module = tmp_path / "folder", os if call == "open" else fcntl
    right, left = getattr(module, call), 1

    def act(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            (folder / LOCK).unlink(missing_ok=True)
            if whole:
                folder.rmdir()
        return right(*arguments, **options)

    monkeypatch.setattr(module, call, act)
    with nothing_left(tmp_path):
        held = Journal(folder)
        with pytest.raises(InputError, match="another run"):
            Journal(folder)
        held.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, "no locks")))
    for _ in ("new", "there"):
        with nothing_left(tmp_path), pytest.warns(UserWarning, match="a file system without locks"):
            np.testing.assert_array_equal(multiply(tmp_path / "C", overwrite=True)[:], A @ A)


def test_a_lock_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with nothing_left(tmp_path), pytest.raises(InputError, match=r"cannot create .*Input/output error"):
        multiply(tmp_path / "C")
    zarr.create_array(tmp_path / "old", data=A, chunks=(4, 4))
    with nothing_left(tmp_path), pytest.raises(InputError, match=r"cannot keep a journal in .*Input/output"):
        multiply(tmp_path / "old", overwrite=True)


def test_changes_made_before_locking_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = journal._lock

    def late(folder: Path) -> int:
        descriptor = right(folder)
        monkeypatch.setattr(journal, "_lock", right)
        (folder / JOURNAL).write_bytes(lines(HEADER))
        return descriptor

    monkeypatch.setattr(journal, "_lock", late)
    with nothing_left(tmp_path), pytest.raises(InputError, match="another run has just changed the journal"):
        multiply(tmp_path / "C")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "damaged in line 1"),
        (lines(HEADER, b"[1]", b'{"done":[0,0]}'), "damaged in line 2"),
        (
            lines(b'{"run":{"format":7,"version":"7.0"}}'),
            f"has format 7, this version reads format {FORMAT}: .* oocgemm 7.0",
        ),
        (None, "cannot read the journal .*Is a directory"),
        *slow(
            (b"00000000 {}\n", "damaged in line 1"),
            (lines(HEADER, b"[]", b'{"done":[0,0]}'), "damaged in line 2"),
            (b"torn", "damaged in line 1"),
            (lines(b"[1]"), "damaged in line 1"),
            (lines(b"{no json"), "damaged in line 1"),
            (lines(b"{}"), "has format None"),
        ),
    ],
)
def test_a_damaged_journal_is_refused_and_kept(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "C" / ".oocgemm" / JOURNAL
    path.parent.mkdir(parents=True)
    path.mkdir() if content is None else path.write_bytes(content)
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with nothing_left(tmp_path), pytest.raises(InputError, match=said):
            multiply(tmp_path / "C", **options)
    assert content is None or path.read_bytes() == content
    assert resume_hint(tmp_path / "C") == ""
    with pytest.raises(InputError, match=said):
        read(path.parent)
    with nothing_left(tmp_path), pytest.raises(InputError, match=said):
        Journal(path.parent)


def test_a_header_left_by_a_killed_run_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "C" / ".oocgemm"
    folder.mkdir(parents=True)
    (folder / f"{JOURNAL}.new").write_bytes(b"x" * 10_000)
    multiply(tmp_path / "C")
    found = read(folder)
    assert found is not None
    assert (len(found.done), found.complete is None) == (4, False)
    assert (folder / JOURNAL).stat().st_size == found.length


def test_c_may_be_in_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(path: Path) -> None:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        sync_path(path)

    monkeypatch.setattr("oocgemm.jobs.journal.sync_path", sync)
    np.testing.assert_array_equal(multiply(tmp_path / "C")[:], A @ A)


def test_a_fingerprint_tells_files_apart_by_size_time_and_path(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    found = [fingerprint_of(paths)]
    for content, modified in ((b"x", 1), (b"xy", 1), (b"xy", 2)):
        paths[0].write_bytes(content)
        os.utime(paths[0], ns=(0, modified))
        found.append(fingerprint_of(paths))
    paths[0].rename(paths[1])
    found.append(fingerprint_of(paths))
    assert len(set(found)) == 5


def test_a_resumed_run_syncs_directory_entries_of_earlier_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier run may have been killed before it synced them."""
    folder = tmp_path / "C" / ".oocgemm"
    begun = Journal(folder)
    begun.start({})
    begun.close()
    monkeypatch.setattr(journal, "sync_path", synced := Mock())
    resumed = Journal(folder)
    resumed.resume()
    resumed.close()
    assert synced.mock_calls == [call(folder), call(folder.parent), call(tmp_path)]


@pytest.mark.parametrize("redo", [False, True])
def test_tiles_that_wait_are_committed_together(redo: bool) -> None:
    steps, queued = Mock(), threading.Event()
    steps.matrix.sync_blocks.side_effect = lambda blocks: queued.wait(10)
    steps.matrix.block_fingerprint.side_effect = lambda rows, cols: f"{rows[0]},{cols[0]}"
    grid = TileGrid(2, 8, 2, TileShape(2, 2, 2))
    keeper = Committer(steps.journal, steps.matrix, redo=redo)
    keeper.finished((0, 0), grid.blocks((0, 0)))
    while not steps.matrix.sync_blocks.called:
        time.sleep(0.001)
    for j in (1, 2, 3):
        keeper.finished((0, j), grid.blocks((0, j)))
    queued.set()
    keeper.close()
    assert keeper.recorded == 4
    expected = []
    for columns in ([0], [1, 2, 3]):
        blocks = [((0, 2), (2 * j, 2 * j + 2)) for j in columns]
        expected.append(call.matrix.sync_blocks(blocks))
        if redo:
            expected.append(call.journal.commit([(0, j) for j in columns]))
            expected += [call.matrix.apply_redo(*block) for block in blocks]
        expected += [call.matrix.block_fingerprint(*block) for block in blocks]
        expected.append(call.journal.done({(0, j): f"0,{2 * j}" for j in columns}))
    assert steps.mock_calls == expected


def test_no_tile_is_recorded_after_one_fails() -> None:
    queued, matrix = threading.Event(), Mock()

    def failing(blocks: Any) -> None:
        queued.wait(10)
        raise OSError(errno.EIO, "Input/output error")

    matrix.sync_blocks.side_effect = failing
    record = Mock()
    grid = TileGrid(2, 4, 2, TileShape(2, 2, 2))
    keeper = Committer(record, matrix, redo=False)
    keeper.finished((0, 0), grid.blocks((0, 0)))
    while not matrix.sync_blocks.called:
        time.sleep(0.001)
    keeper.finished((0, 1), grid.blocks((0, 1)))
    queued.set()
    with pytest.raises(ExecutionError, match=r"tile \(0, 0\) of C cannot be made durable.*Input/output"):
        keeper.close()
    matrix.sync_blocks.assert_called_once_with([((0, 2), (0, 2))])
    assert not record.mock_calls
