"""Files of C, and all folders above them, are flushed to the disk, many at the same time."""

import threading
from pathlib import Path

import pytest

from oocgemm.stores import files

NAMES = ("c/0/0", "c/0/1", "c/1/0", "c/1/missing", "zarr.json")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "MIN_SYNCED", 2)
    for name in NAMES:
        (tmp_path / "C" / name).parent.mkdir(parents=True, exist_ok=True)
        if "missing" not in name:
            (tmp_path / "C" / name).touch()
    return tmp_path / "C"


@pytest.mark.parametrize("threads", [True, False])
def test_every_file_and_folder_is_flushed_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    flushed, right = list[str](), files.sync_path

    def sync(path: Path) -> None:
        right(path)
        flushed.append(str(path.relative_to(root)))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(files, "sync_path", sync)
    if not threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    folders = [".", "c", "c/0", "c/1"]
    files.sync_files(root, NAMES, contents=False)
    assert sorted(flushed) == folders
    flushed.clear()
    files.sync_files(root, NAMES)
    assert sorted(flushed) == sorted([*folders, *(name for name in NAMES if "missing" not in name)])


def test_files_are_flushed_at_the_same_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(len(NAMES) + 4, timeout=60)
    monkeypatch.setattr(files, "sync_path", lambda path: together.wait())
    files.sync_files(root, NAMES)


def test_an_error_is_raised(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(path: Path) -> None:
        if path.name == "1":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "sync_path", sync)
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_files(root, NAMES)
