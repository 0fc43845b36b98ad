"""Compiled code and Python give chunk files the same fingerprints."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from oocgemm.stores import files
from oocgemm.stores.files import chunk_fingerprints
from oocgemm.system.installed import compiled

KEYS: dict[str, Callable[[tuple[int, int]], str]] = {
    "default": lambda at: f"c/{at[0]}/{at[1]}",
    "version 2": lambda at: f"{at[0]}.{at[1]}",
    "unknown": lambda at: f"{at[1]}.{at[0]}",
}


@pytest.fixture(params=KEYS)
def key(request: pytest.FixtureRequest) -> Callable[[tuple[int, int]], str]:
    return KEYS[request.param]


@pytest.mark.skipif(compiled() is None, reason="the C sources are not compiled")
@pytest.mark.parametrize("most", [files.MAX_FINGERPRINTED, 10])
@pytest.mark.parametrize("each", [files.MIN_FILES, 4])
def test_compiled_code_gives_the_same_fingerprints(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: Callable[[tuple[int, int]], str],
    most: int,
    each: int,
) -> None:
    monkeypatch.setattr(files, "MAX_FINGERPRINTED", most)
    monkeypatch.setattr(files, "MIN_FILES", each)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    folder = tmp_path / "é %d"
    for number in range(35):
        path = folder / key(divmod(number, 7))
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 5:  # the other chunks are not stored
            path.write_bytes(bytes(number))
            os.utime(path, ns=(0, (-1) ** number * 123456789123456789))
    found = chunk_fingerprints(folder, key, (5, 7))
    monkeypatch.setattr("oocgemm.stores.files.compiled", lambda: None)
    assert chunk_fingerprints(folder, key, (5, 7)) == found
    assert chunk_fingerprints(folder, key, (5, 6)) != found


@pytest.mark.skipif(compiled() is None, reason="the C sources are not compiled")
def test_without_a_thread_the_caller_reads_all_statuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        (tmp_path / f"{number // 3}.{number % 3}").write_bytes(bytes(number))
    right = chunk_fingerprints(tmp_path, KEYS["version 2"], (3, 3))

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(files, "MIN_FILES", 2)
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert chunk_fingerprints(tmp_path, KEYS["version 2"], (3, 3)) == right


def test_any_change_of_a_file_changes_the_fingerprint(
    tmp_path: Path, key: Callable[[tuple[int, int]], str]
) -> None:
    for number in range(6):
        path = tmp_path / key(divmod(number, 3))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(9))
        os.utime(path, ns=(0, 5))
    first = chunk_fingerprints(tmp_path, key, (2, 3))
    os.utime(path, ns=(0, 6))
    second = chunk_fingerprints(tmp_path, key, (2, 3))
    path.unlink()
    third = chunk_fingerprints(tmp_path, key, (2, 3))
    assert len({found["content"] for found in (first, second, third)}) == 3
