"""Damaged chunks and timelines end in one line that names them, and in the right exit code.

No other file is changed or lost.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import zarr

from oocgemm.cli.process import EXIT_FAILED, EXIT_USAGE
from tests.support.bad_arrays import A, B, assert_one_line, copy_of, create_everything
from tests.support.command import command, contents, own_threads, run
from tests.support.suite import each_value


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_everything(tmp_path_factory.mktemp("everything"))


@pytest.fixture
def here(everything: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return copy_of(everything, tmp_path / "here", monkeypatch)


def _no_zstd(chunk: Path) -> None:
    chunk.write_bytes(b"\0" * chunk.stat().st_size)


def _cut(chunk: Path) -> None:
    chunk.write_bytes(chunk.read_bytes()[:50])


def _empty(chunk: Path) -> None:
    chunk.write_bytes(b"")


@each_value
@pytest.mark.parametrize("result", ["new", "new.npy"])
@pytest.mark.parametrize(
    ("operand", "damage", "parts"),
    [
        pytest.param("a-zstd", _no_zstd, ("tile (1, 0), step 1", "A[4:8, 4:8]"), id="zstd that is none"),
        pytest.param("a-zstd", _cut, ("tile (1, 0), step 1", "A[4:8, 4:8]"), id="zstd cut short"),
        pytest.param("a-zstd", _empty, ("tile (1, 0), step 1", "A[4:8, 4:8]"), id="zstd of no bytes"),
        pytest.param("a", _cut, ("tile (1, 0), step 1", "chunk c/1/1 in a has 50 bytes"), id="raw cut short"),
        pytest.param(
            "a", _empty, ("tile (1, 0), step 1", "chunk c/1/1 in a has 0 bytes"), id="raw of no bytes"
        ),
    ],
)
def test_a_damaged_chunk_fails_the_run_and_leaves_c_unfinished(
    here: Path, operand: str, damage: Callable[[Path], None], parts: tuple[str, ...], result: str
) -> None:
    damage(here / operand / "c" / "1" / "1")
    before = contents(here)
    done = run(operand, "b", result, "--tile", "4x10x4")
    for part in parts:
        assert_one_line(done, EXIT_FAILED, part)
    assert own_threads() == []
    after = contents(here)
    left = {name: after.pop(name) for name in list(after) if name.startswith("new")}
    assert after == before
    if left:  # the run had finished the first tile when it failed
        assert result != "new" or zarr.open_array(here / "new").attrs["oocgemm"] == {"complete": False}
        assert "new.npy" not in left
        assert_one_line(
            run(operand, "b", result), EXIT_USAGE, "unfinished run, 1 of 3 tiles are done: pass --resume"
        )


def test_a_failing_run_keeps_an_existing_c(here: Path) -> None:
    _cut(here / "a" / "c" / "0" / "0")
    before = contents(here)
    assert_one_line(run("a", "b", "c", "--overwrite"), EXIT_FAILED, "chunk c/0/0")
    assert contents(here) == before
    assert own_threads() == []


def test_a_timeline_that_cannot_be_created_is_refused(here: Path) -> None:
    before = contents(here)
    refused = run("a", "b", "new", "--timeline", "/proc/log")
    assert_one_line(refused, EXIT_USAGE, "the timeline cannot be written to /proc/log")
    assert contents(here) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
def test_an_unwritable_timeline_keeps_the_product(here: Path) -> None:
    done = run("a", "b", "new", "--timeline", "/dev/full")
    assert_one_line(done, EXIT_FAILED, "C is done, but its timeline cannot be written to /dev/full: No space")
    np.testing.assert_array_equal(zarr.open_array(here / "new")[:], A @ B)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "place", ["missing", "plain", "empty", "a.npy", "a/zarr.json", "nothing.npy", "text.npy"]
)
def test_report_refuses_what_is_no_timeline(place: str) -> None:
    assert_one_line(command("report", place), EXIT_USAGE, place)
    assert_one_line(command("report", place, "--json"), EXIT_USAGE, place)


def test_report_refuses_a_cut_header_and_notes_a_cut_timeline(here: Path) -> None:
    assert run("a", "b", "new", "--tile", "4x10x4", "--timeline", "log").code == 0
    whole = (here / "log").read_bytes()
    header = whole.index(b"\n")
    for length in (0, 1, 100, header - 1):
        (here / "cut").write_bytes(whole[:length])
        assert_one_line(command("report", "cut"), EXIT_USAGE, "cut")
    # A log that lacks only its last newline is complete. All shorter ones belong to an unfinished run.
    for length in (*range(header, len(whole) - 1, 101), len(whole) - 2, len(whole) - 1):
        (here / "cut").write_bytes(whole[:length])
        shown = command("report", "cut")
        assert shown.code == 0
        assert shown.out.startswith("Unfinished") == (length < len(whole) - 1)


def test_a_failed_run_keeps_its_timeline(here: Path) -> None:
    _cut(here / "a" / "c" / "1" / "1")
    assert run("a", "b", "new", "--tile", "4x10x4", "--timeline", "log").code == EXIT_FAILED
    shown = command("report", "log", "--json").json()
    assert shown["unfinished"] is True
    assert shown["lanes"]["read"]["operations"] > 0


@pytest.mark.parametrize(
    "line", ["5", "null", '"text"', "[]", "[1, 2]", "{}", '{"spans": 0}', "]"], ids=lambda line: line
)
def test_report_refuses_rows_that_are_no_spans(here: Path, line: str) -> None:
    assert run("a", "b", "new", "--timeline", "log").code == 0
    header = (here / "log").read_text().splitlines()[0]
    (here / "odd").write_text(f"{header}\n{line}\n")
    assert_one_line(command("report", "odd"), EXIT_USAGE, "odd")
    (here / "odd").write_text(json.dumps(json.loads(header) | {"version": 99}) + f"\n{line}\n")
    assert_one_line(command("report", "odd"), EXIT_USAGE, "version 99")


@pytest.mark.parametrize("command_name", ["run", "verify"])
@pytest.mark.parametrize(
    ("what", "zarr_format", "shards"), [("chunks", 2, None), ("chunks", 3, None), ("shards", 3, (4, 4))]
)
def test_an_extent_of_zero_in_the_metadata_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command_name: str,
    what: str,
    zarr_format: Literal[2, 3],
    shards: tuple[int, int] | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"shape": (4, 4), "dtype": "f8", "zarr_format": zarr_format}
    zarr.create_array("a", chunks=(2, 2), shards=shards, **options)[:] = 1
    np.save("b.npy", np.ones((4, 4)))
    np.save("c.npy", np.full((4, 4), 4.0))
    place = Path("a", "zarr.json" if zarr_format == 3 else ".zarray")
    metadata = json.loads(place.read_text())
    if zarr_format == 3:
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = [0, 4]
    else:
        metadata["chunks"] = [0, 4]
    place.write_text(json.dumps(metadata))
    done = command(command_name, "a", "b.npy", "new.npy" if command_name == "run" else "c.npy")
    text = f"A: no zarr array at a: by its metadata, it has {what} of 0 x 4 elements"
    assert_one_line(done, EXIT_USAGE, text)
