"""Journals that are torn, truncated, damaged or of an earlier version are noticed."""

import json
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from oocgemm import stores
from oocgemm.cli.process import EXIT_USAGE
from oocgemm.jobs.journal import JOURNAL, Journal, read
from oocgemm.jobs.resume import Committer
from oocgemm.planning.schedule.operation import Block
from oocgemm.planning.tiling import Tile
from tests.support.command import contents, run
from tests.support.suite import each_value
from tests.support.unfinished_runs import (
    KINDS,
    TILE,
    A,
    B,
    C,
    failing_after,
    finished_chunk,
    store_operands,
    unfinished,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    store_operands()
    return tmp_path


def relined(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Rewrite a journal with changed entries."""
    entries = change([json.loads(line.partition(b" ")[2]) for line in path.read_bytes().splitlines()])
    texts = [json.dumps(entry).encode() for entry in entries]
    path.write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in texts))


def test_a_journal_without_fingerprints_is_read(here: Path) -> None:
    """Earlier versions wrote no fingerprints of files."""
    unfinished("c", "--chunks", "4x4")
    finished_chunk(here / "c").touch()

    def older(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for operand in entries[0]["run"]["identity"]["operands"].values():
            del operand["changes"]
        return [{name: value for name, value in entry.items() if name != "files"} for entry in entries]

    relined(here / "c" / ".oocgemm" / JOURNAL, older)
    resumed = run("a", "b", "c", *TILE, "--resume", "--json")
    assert (resumed.code, resumed.json()["plan"]["tiles_done_before"]) == (0, 2)


@each_value
@pytest.mark.parametrize("lines", [0, 1, 3])
@pytest.mark.parametrize("c", KINDS)
def test_a_truncated_journal_does_not_apply_beta_twice(here: Path, c: str, lines: int) -> None:
    zarr.create_array("c", data=C, chunks=(4, 4), compressors=None)
    np.save("c.npy", C)
    unfinished(c, "--beta", "0.5")
    folder = stores.sidecar(c)
    assert isinstance(folder, Path)
    path = folder / JOURNAL
    whole = path.read_bytes()
    if lines:
        path.write_bytes(b"".join(whole.splitlines(keepends=True)[:lines]))
    else:
        path.unlink()
    before = contents(here)
    for options in (("--resume",), ()):
        done = run("a", "b", c, *TILE, "--beta", "0.5", *options)
        assert (done.code, "it was truncated" in done.err) == (EXIT_USAGE, True)
        assert contents(here) == before
    path.write_bytes(whole)
    assert run("a", "b", c, *TILE, "--beta", "0.5", "--resume").code == 0
    np.testing.assert_allclose(
        np.load(c) if c.endswith("npy") else np.asarray(zarr.open_array(c, mode="r")[:]), A @ B + 0.5 * C
    )


def test_a_journal_truncated_after_the_end_is_detected(here: Path) -> None:
    zarr.create_array("c", data=C, chunks=(4, 4), compressors=None)
    with failing_after(9):  # a line per tile
        assert run("a", "b", "c", *TILE, "--beta", "0.5").code == 0
    path = here / "c" / ".oocgemm" / JOURNAL
    kept = path.read_bytes().splitlines(keepends=True)[:5]
    path.write_bytes(b"".join(kept))
    listed = sum(b'{"commit"' in line for line in kept)
    before = contents(here)
    done = run("a", "b", "c", *TILE, "--beta", "0.5", "--resume")
    said = f"lists {listed} committed tiles of C, but 9 were committed"
    assert (done.code, said in done.err) == (EXIT_USAGE, True)
    assert contents(here) == before


def test_a_torn_last_line_is_dropped_and_a_damaged_one_refused(here: Path) -> None:
    unfinished("c", tiles=3)
    path = here / "c" / ".oocgemm" / JOURNAL
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 4
    for length in range(len(lines[-1])):
        path.write_bytes(b"".join(lines[:3]) + lines[3][:length])
        record = read(path.parent)
        assert record is not None
        assert (len(record.done), record.length) == (2, len(b"".join(lines[:3])))
    path.write_bytes(b"".join([*lines[:2], b"0" * 8 + lines[2][8:], lines[3]]))
    done = run("a", "b", "c", *TILE, "--resume")
    assert (done.code, "is damaged in line 3" in done.err) == (EXIT_USAGE, True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:-3])
    for _ in ("the others", "none"):  # the first resume removes the incomplete line from the journal
        assert run("a", "b", "c", *TILE, "--resume").code == 0
    np.testing.assert_allclose(np.asarray(zarr.open_array("c", mode="r")[:]), A @ B)


def test_an_append_of_several_tiles_is_kept_whole_or_not_at_all(here: Path) -> None:
    unfinished("c", tiles=3)
    folder = here / "c" / ".oocgemm"
    whole = (folder / JOURNAL).read_bytes()
    journal = Journal(folder)
    journal.resume()
    journal.done({(2, 1): "x", (2, 2): "y"})
    journal.close()
    added = (folder / JOURNAL).read_bytes()[len(whole) :]
    # A killed run leaves the beginning of the append. A power failure may leave zeros anywhere in it.
    torn = [added[:at] for at in range(len(added))]
    torn += [bytes(at) + added[at:] for at in range(1, len(added))]
    torn += [added[:at] + bytes(len(added) - at) for at in range(len(added))]
    for rest in torn:
        (folder / JOURNAL).write_bytes(whole + rest)
        record = read(folder)
        assert record is not None
        assert (len(record.done), record.length) == (3, len(whole))
    (folder / JOURNAL).write_bytes(whole + added)
    record = read(folder)
    assert record is not None
    assert record.done >= {(2, 1), (2, 2)}


def test_nothing_is_appended_to_a_torn_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, keep, lines = os.write, Committer.commit, 0

    def write(descriptor: int, data: bytes) -> int:
        nonlocal lines
        lines += 1
        if lines == 2:
            right(descriptor, data[:9])
            raise OSError(28, "No space left on device")
        return right(descriptor, data)

    def late(self: Committer, tiles: Mapping[Tile, Sequence[Block]]) -> None:
        while lines == 1 and self._queue.qsize() < 5:
            time.sleep(0.001)
        keep(self, tiles)

    with monkeypatch.context() as patches:
        patches.setattr(os, "write", write)
        patches.setattr(Committer, "commit", late)
        assert "cannot be made durable" in run("a", "b", "c", *TILE).err
    assert run("a", "b", "c", *TILE, "--resume").code == 0
    np.testing.assert_allclose(np.asarray(zarr.open_array("c", mode="r")[:]), A @ B)
