"""A run has removed its own files beside C before it is marked as complete, so that a kill leaves none."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import ExecutionError, InputError
from oocgemm.jobs import output
from oocgemm.jobs.journal import Journal
from tests.support.command import command
from tests.support.suite import each_value, slow
from tests.support.unfinished_runs import A, B, store_operands, stored

KEPT = {"journal", "lock", "count", "data.npy"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    store_operands()
    return tmp_path


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


@pytest.mark.parametrize(
    ("c", "workers"),
    [
        *(("new", None), ("new.npy", None), ("old", None), ("old.npy", None), ("old", 2)),
        *slow(("new", 2), ("new.npy", 2), ("old.npy", 2)),
    ],
)
def test_nothing_is_left_beside_a_complete_c(
    c: str, workers: int | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[set[str]] = []
    right = Journal.complete

    def complete(self: Journal, facts: dict[str, Any]) -> None:
        right(self, facts)
        found.append(set(os.listdir(self.folder)))

    monkeypatch.setattr(Journal, "complete", complete)
    beta = 2 if c.startswith("old") else 0
    oocgemm.gemm("a", "b", c, beta=beta, backend="host", tile="4x4x4", memory="256MiB", workers=workers)
    assert len(found) == 1
    assert found[0] <= KEPT


def test_a_run_that_is_killed_while_it_removes_its_files_is_resumed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = output.remove_shared, list[Path]()

    def remove(folder: Path) -> None:
        calls.append(folder)
        if folder.exists():  # when the run ends, after the renaming of the folder
            folder.rename(folder.with_name(f"{folder.name}.removed"))
            raise Killed
        right(folder)

    monkeypatch.setattr(output, "remove_shared", remove)
    options: dict[str, Any] = {"backend": "host", "tile": "4x4x4", "memory": "256MiB"}
    with pytest.raises(Killed):
        oocgemm.gemm("a", "b", "c", workers=2, **options)
    assert "attempts.removed" in os.listdir("c/.oocgemm")
    monkeypatch.setattr(output, "remove_shared", right)
    oocgemm.gemm("a", "b", "c", resume=True, **options)
    assert set(os.listdir("c/.oocgemm")) <= KEPT
    np.testing.assert_allclose(np.frombuffer(stored("c")).reshape(12, 12), A @ B)


@each_value
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "write", "unlink"])
def test_a_disk_that_fails_beside_c_ends_a_run_of_workers_in_one_line(
    call: str, number: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(number, os.strerror(number))

    def failing(right: Callable[..., Any]) -> Callable[..., Any]:
        def act(self: Path, *rest: Any, **options: Any) -> Any:
            if self.name.startswith(".oocgemm-"):
                if call == "write":
                    self.touch()
                raise error
            return right(self, *rest, **options)

        return act

    name = {"open": "write_bytes", "write": "write_bytes", "unlink": "unlink"}[call]
    monkeypatch.setattr(Path, name, failing(getattr(Path, name)))
    done = command("run", "a", "b", "c", "--workers", "2", "--backend", "host", "--memory", "256MiB")
    if call == "unlink":  # C is whole, and one small file stays
        assert done.code == 0, done.err
        return
    assert done.code != 0
    assert done.err.startswith(f"Error: C: no file can be created in {here}"), done.err
    assert os.strerror(number) in done.err
    assert not Path("c").exists()


def test_a_journal_that_cannot_be_written_ends_a_run_of_workers_in_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = os.open

    def failing(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if "/c/.oocgemm" in os.path.abspath(os.fspath(path)) and flags & os.O_CREAT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return right(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises((InputError, ExecutionError), match="Input/output error"):
        oocgemm.gemm("a", "b", "c", workers=2, backend="host", memory="256MiB")
