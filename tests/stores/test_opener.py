"""Files are opened and closed without releasing the GIL, as long as that is fast."""

import os
from pathlib import Path

import pytest

from oocgemm.stores import files
from oocgemm.stores.files import MAX_SLOW, Opener, OpenFile


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that `os.open` opened, which releases the GIL."""
    found, right = list[str](), os.open

    def note(path: Path, flags: int) -> int:
        found.append(str(path))
        return right(path, flags)

    monkeypatch.setattr(os, "open", note)
    return found


@pytest.mark.parametrize("library", [True, False], ids=["C library", "no C library"])
def test_a_file_is_read_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: bool) -> None:
    if not library:
        monkeypatch.setattr(files, "_library", None)
    path = tmp_path / "é file"
    path.write_bytes(b"12345")
    with OpenFile(path, Opener()) as file:
        assert file.size == 5
        assert os.pread(file.descriptor, 9, 0) == b"12345"
        assert not os.get_inheritable(file.descriptor)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(file.descriptor)


@pytest.mark.parametrize("library", [True, False], ids=["C library", "no C library"])
def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: bool) -> None:
    if not library:
        monkeypatch.setattr(files, "_library", None)
    with pytest.raises(FileNotFoundError) as raised:
        Opener().open(tmp_path / "missing")
    assert raised.value.filename in (tmp_path / "missing", str(tmp_path / "missing"))


def test_the_gil_is_released_once_files_open_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    fast, slow = Opener(), Opener()
    for _ in range(2 * MAX_SLOW):
        fast.close(fast.open(path)[0])
    assert counted == []
    monkeypatch.setattr(files, "SLOW", -1.0)
    for number in range(2 * MAX_SLOW):
        descriptor, size = slow.open(path)
        slow.close(descriptor)
        assert size == 5
        assert len(counted) == max(0, number + 1 - MAX_SLOW)
