"""Killed runs are resumed, keep their finished tiles and give the same bits. Other runs are refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import stores
from oocgemm.backends.host.backend import HostBackend
from oocgemm.cli.output import EXIT_FAILED, EXIT_USAGE
from oocgemm.errors import BackendError, ExecutionError, InputError
from oocgemm.jobs.committer import Committer
from oocgemm.jobs.journal import ATTRIBUTE, JOURNAL, Journal, read
from oocgemm.planning import (
    Budgets,
    GemmProblem,
    Layouts,
    Slots,
    TileShape,
    default_model,
    make_plan,
    resumed_plan,
)
from oocgemm.planning.tiling import Range, Tile
from oocgemm.stores.npy import NpyMatrix
from oocgemm.stores.zarr.matrix import ZarrMatrix
from tests.command import Finished, contents, own_threads, run
from tests.crash_points import CASES
from tests.faults import Fault, faulty_stores
from tests.suite import slow

TOP = Path(__file__).resolve().parent.parent
TILE = ("--tile", "4x4x4")
RNG = np.random.default_rng(5)
A, B, C = (RNG.standard_normal((12, 12)) for _ in range(3))
KINDS = ("c", "c.npy")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, array in (("a", A), ("b", B), ("old", C)):
        zarr.create_array(name, data=array, chunks=(4, 4), compressors=None)
        np.save(name, array)
    return tmp_path


@contextmanager
def failing_after(tiles: int) -> Iterator[None]:
    """Make runs fail during the block when `tiles` tiles are finished."""
    right, seen = Committer.commit, 0

    def keep(self: Committer, tile: Tile) -> None:
        nonlocal seen
        seen += 1
        if seen > tiles:
            raise OSError(5, "Input/output error")
        right(self, tile)

    with patch.object(Committer, "commit", keep):
        yield


def unfinished(c: str, *options: str, tiles: int = 2) -> Finished:
    with failing_after(tiles):
        done = run("a", "b", c, *TILE, *options)
    assert (done.code, own_threads()) == (EXIT_FAILED, [])
    return done


def stored(c: str) -> bytes:
    return bytes(np.load(c).data if c.endswith(".npy") else np.asarray(zarr.open_array(c, mode="r")[:]).data)


@pytest.mark.parametrize(
    ("case", "stride"), [("new.npy", 11), ("in place", 11), *slow(*((case, 1) for case in CASES))]
)
def test_a_run_may_end_before_any_step(case: str, stride: int) -> None:
    """A run may end before any system call that changes a file, and so may the run that resumes it."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a sync takes no time there
    with tempfile.TemporaryDirectory(dir=in_memory) as work:
        line = [sys.executable, "-m", "tests.crash_points", case, work, str(stride)]
        done = subprocess.run(line, cwd=TOP, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 15


@pytest.mark.timeout(900)  # it took more than five minutes when other programs used the cores too
@pytest.mark.parametrize(("kills", "cases"), [(2, 1), *slow((50, 10))])
def test_a_run_killed_at_random_gives_the_same_bits(tmp_path: Path, kills: int, cases: int) -> None:
    output = tmp_path / "torture.json"
    line = [
        sys.executable,
        str(TOP / "scripts" / "torture.py"),
        "--kills",
        str(kills),
        "--output",
        str(output),
    ]
    line += [argument for number in range(cases) for argument in ("--case", str(number))]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())["host"]
    assert found["kills"] >= kills
    assert sum(bool(case["kills"]) for case in found["cases"]) >= 0.8 * cases
    # Few kills do not hit every phase.
    assert {"in a tile", "in a commit"} <= found["phases"].keys() or cases < 10


@pytest.mark.parametrize("beta", ["0", "0.5"])
@pytest.mark.parametrize("c", KINDS)
def test_a_failed_run_reports_its_progress_and_can_be_resumed(here: Path, c: str, beta: str) -> None:
    options = (*TILE, "--beta", beta)
    right = f"right-{c}"
    if beta != "0":
        for name in (c, right):
            old = here / f"old{Path(name).suffix}"
            (shutil.copytree if old.is_dir() else shutil.copyfile)(old, name)
    assert run("a", "b", right, *options).code == 0
    done = unfinished(c, *options)
    assert "2 of 9 tiles are done: the same command with --resume computes the others" in done.err
    if c == "c":
        assert zarr.open_array(c, mode="r").attrs["oocgemm"] == {"complete": False}
    else:
        assert beta != "0" or not Path(c).exists()
    again = run("a", "b", c, *options)
    assert (again.code, "2 of 9 tiles are done: pass --resume" in again.err) == (EXIT_USAGE, True)
    resumed = run("a", "b", c, *options, "--resume", "--json")
    plan = resumed.json()["plan"]
    assert (resumed.code, plan["tiles_done_before"], plan["steps"], plan["flops"]) == (
        0,
        2,
        7 * 3,
        7 * 2 * 4 * 4 * 12,
    )
    assert plan["required"]["write"] == 7 * 4 * 4 * 8
    assert plan["required"]["read"] == (12 * 12 * 2 + (7 * 4 * 4 if beta != "0" else 0)) * 8
    assert stored(c) == stored(right)
    before = contents(here)
    assert run("a", "b", c, *options, "--resume", "--quiet") == Finished(0, "", "")
    assert contents(here) == before


def test_a_run_stops_once_a_tile_cannot_be_made_durable(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, written = Committer.finished, []

    def finished(self: Committer, tile: Tile) -> None:
        written.append(tile)
        right(self, tile)
        while self._error is None:
            time.sleep(0.001)

    monkeypatch.setattr(Committer, "finished", finished)
    unfinished("c", tiles=0)
    assert 1 <= len(written) < 9


DIFFERENCES = {
    "alpha is 2.0 and was 1.0": ("a", "b", "--alpha", "2"),
    "beta is 0.25 and was 0.5": ("a", "b", "--beta", "0.25"),
    "trans_a is T and was N": ("a", "b", "--transpose-a"),
    "tile is 8x4x4 and was 4x4x4": ("a", "b", "--tile", "8x4x4"),
    "/old and was at": ("old", "b"),
    "A is at ": ("a.npy", "b"),
    "B is at ": ("a", "b.npy"),
}


def test_auto_and_its_kernel_resume_each_other(here: Path) -> None:
    unfinished("c")
    assert run("a", "b", "c", "--kernel", "blas", "--resume").code == 0


def test_another_kernel_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished("c")
    monkeypatch.setattr(
        "oocgemm.backends.host.backend.HostBackend.arithmetic", lambda self, problem, kernel: "tiled"
    )
    done = run("a", "b", "c", "--resume")
    assert (done.code, "kernel is tiled and was blas" in done.err) == (EXIT_USAGE, True)


@pytest.mark.parametrize("part", DIFFERENCES)
def test_another_problem_is_refused_with_the_difference(here: Path, part: str) -> None:
    zarr.create_array("c", data=C, chunks=(4, 4))
    unfinished("c", "--beta", "0.5")
    before = contents(here)
    a, b, *options = DIFFERENCES[part]
    beta = () if "--beta" in options else ("--beta", "0.5")
    done = run(a, b, "c", *beta, *options, "--resume")
    assert (done.code, done.out, done.err.count("\n")) == (EXIT_USAGE, "", 1)
    assert part in done.err
    assert contents(here) == before
    # Options that are not repeated keep their values.
    assert run("a", "b", "c", "--beta", "0.5", "--resume", "--quiet").code == 0


@pytest.mark.parametrize("operand", ["a", "a.npy"])
def test_operands_that_changed_are_refused(here: Path, operand: str) -> None:
    with failing_after(2):
        assert run(operand, "b", "c", *TILE).code == EXIT_FAILED
    path = here / operand if operand.endswith(".npy") else here / "a" / "c" / "1" / "1"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    done = run(operand, "b", "c", *TILE, "--resume")
    assert "the content of A has changed" in done.err
    assert done.code == EXIT_USAGE


def test_operand_bytes_changed_with_restored_times_are_found(here: Path) -> None:
    unfinished("c")
    path = here / "a" / "c" / "1" / "1"
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = run("a", "b", "c", *TILE, "--resume")
    assert (done.code, done.err.count("\n")) == (EXIT_USAGE, 1)
    assert "A has changed: modification times of its files are the same" in done.err


def test_a_run_with_a_repaired_operand_resumes_if_trusted(here: Path) -> None:
    path = here / "a" / "c" / "2" / "2"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    done = run("a", "b", "c", *TILE)
    assert (done.code, "damaged or truncated" in done.err) == (EXIT_FAILED, True)
    assert "--resume computes the others (add --trust-operands if" in done.err
    path.write_bytes(whole)
    refused = run("a", "b", "c", *TILE, "--resume")
    assert (refused.code, "pass --trust-operands" in refused.err) == (EXIT_USAGE, True)
    resumed = run("a", "b", "c", *TILE, "--resume", "--trust-operands", "--json")
    assert (resumed.code, resumed.json()["plan"]["tiles_done_before"] > 0) == (0, True)
    np.testing.assert_allclose(np.asarray(zarr.open_array("c", mode="r")[:]), A @ B)


def test_trusting_operands_excludes_operands_at_other_paths(here: Path) -> None:
    unfinished("c")
    done = run("old", "b", "c", *TILE, "--resume", "--trust-operands")
    assert (done.code, "/old and was at" in done.err) == (EXIT_USAGE, True)


@pytest.mark.parametrize("c", KINDS)
@pytest.mark.parametrize("complete", [False, True])
def test_overwrite_replaces_the_result_of_another_run(here: Path, c: str, complete: bool) -> None:
    assert run("a", "b", c, *TILE).code == 0 if complete else unfinished(c)
    done = run("a", "b", c, *TILE, "--alpha", "2", "--resume")
    assert "or start over with --overwrite in place of --resume" in done.err
    assert run("a", "b", c, *TILE, "--alpha", "2").code == EXIT_USAGE
    assert run("a", "b", c, *TILE, "--alpha", "2", "--overwrite").code == 0
    assert run("a", "b", f"right-{c}", *TILE, "--alpha", "2").code == 0
    assert stored(c) == stored(f"right-{c}")


def finished_chunk(c: Path) -> Path:
    """Return the chunk file of a finished tile."""
    record = read(c / ".oocgemm")
    assert record is not None
    row, col = min(record.done)
    return c / "c" / str(row) / str(col)


@pytest.mark.parametrize("how", ["deleted", "rewritten", "cut short"])
def test_a_finished_tile_that_was_damaged_is_computed_again(here: Path, how: str) -> None:
    options = ("--chunks", "4x4")
    assert run("a", "b", "right", *TILE, *options).code == 0
    unfinished("c", *options, tiles=3)
    path = finished_chunk(here / "c")
    match how:
        case "deleted":
            path.unlink()
        case "rewritten":
            path.write_bytes(bytes(128))
        case "cut short":
            path.write_bytes(path.read_bytes()[:-8])
    resumed = run("a", "b", "c", *TILE, *options, "--resume", "--json")
    assert (resumed.code, resumed.json()["plan"]["tiles_done_before"]) == (0, 2)
    assert stored("c") == stored("right")


def test_a_damaged_tile_that_needs_the_old_c_is_refused(here: Path) -> None:
    zarr.create_array("c", data=C, chunks=(4, 4), compressors=None)
    unfinished("c", "--beta", "0.5")
    finished_chunk(here / "c").unlink()
    before = contents(here)
    done = run("a", "b", "c", *TILE, "--beta", "0.5", "--resume")
    assert (done.code, done.err.count("\n")) == (EXIT_USAGE, 1)
    assert (
        "files of 1 of 2 finished tiles of C are missing or have changed, for example those of C[0:4, 0:4]"
        in done.err
    )
    assert contents(here) == before


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


@pytest.mark.parametrize("lines", [0, 1, 3])
@pytest.mark.parametrize("c", KINDS)
def test_a_truncated_journal_does_not_apply_beta_twice(here: Path, c: str, lines: int) -> None:
    zarr.create_array("c", data=C, chunks=(4, 4), compressors=None)
    np.save("c.npy", C)
    unfinished(c, "--beta", "0.5")
    folder = stores.sidecar(c)
    assert folder is not None
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
    assert run("a", "b", "c", *TILE, "--beta", "0.5").code == 0
    path = here / "c" / ".oocgemm" / JOURNAL
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    before = contents(here)
    done = run("a", "b", "c", *TILE, "--beta", "0.5", "--resume")
    assert (done.code, "lists 2 committed tiles of C, but 9 were committed" in done.err) == (EXIT_USAGE, True)
    assert contents(here) == before


def test_a_c_changed_since_completion_is_not_taken_as_done(here: Path) -> None:
    assert run("a", "b", "c", *TILE).code == 0
    (here / "c" / "c" / "0" / "0").write_bytes(bytes(128))
    assert "C has changed since" in run("a", "b", "c", *TILE, "--resume").err


@pytest.mark.parametrize("c", KINDS)
def test_a_c_that_was_removed_is_created_again(here: Path, c: str) -> None:
    assert run("a", "b", c, *TILE).code == 0
    before = stored(c)
    Path(c).unlink() if c.endswith(".npy") else shutil.rmtree(c)
    assert run("a", "b", c, *TILE, "--resume").code == 0
    assert stored(c) == before


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


def test_nothing_is_appended_to_a_torn_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, keep, lines = os.write, Committer.commit, 0

    def write(descriptor: int, data: bytes) -> int:
        nonlocal lines
        lines += 1
        if lines == 3:
            right(descriptor, data[:9])
            raise OSError(28, "No space left on device")
        return right(descriptor, data)

    def late(self: Committer, tile: Tile) -> None:
        while lines == 1 and self._queue.qsize() < 5:
            time.sleep(0.001)
        keep(self, tile)

    with monkeypatch.context() as patches:
        patches.setattr(os, "write", write)
        patches.setattr(Committer, "commit", late)
        assert "cannot be made durable" in run("a", "b", "c", *TILE).err
    assert run("a", "b", "c", *TILE, "--resume").code == 0
    np.testing.assert_allclose(np.asarray(zarr.open_array("c", mode="r")[:]), A @ B)


@pytest.mark.parametrize("c", KINDS)
def test_a_second_run_is_refused_while_the_first_lives(here: Path, c: str) -> None:
    unfinished(c)
    folder = stores.sidecar(c)
    assert folder is not None
    held = Journal(folder)
    try:
        for options in ((), ("--resume",), ("--overwrite",)):
            done = run("a", "b", c, *TILE, *options)
            assert (done.code, done.out) == (EXIT_USAGE, "")
            assert f"another run is writing C (process {os.getpid()} on " in done.err
    finally:
        held.close()
    assert run("a", "b", c, *TILE, "--resume").code == 0  # the file of the lock remains, but is not locked


@pytest.mark.parametrize("c", KINDS)
def test_an_unfinished_c_is_refused_as_an_operand(here: Path, c: str) -> None:
    if c.endswith(".npy"):
        np.save(c, C)  # this file is overwritten in place
    unfinished(c, *(("--overwrite",) if c.endswith(".npy") else ()))
    for operands in ((c, "b"), ("a", c)):
        done = run(*operands, "new")
        assert (done.code, "is the result of an unfinished run" in done.err) == (EXIT_USAGE, True)
    assert not Path("new").exists()


def test_an_unfinished_c_without_its_journal_is_refused(here: Path) -> None:
    unfinished("c")
    for path in (here / "c" / ".oocgemm").iterdir():
        path.unlink()
    assert "C is the result of an unfinished run" in run("a", "b", "c", "--beta", "1").err
    assert "pass --overwrite" in run("a", "b", "c", "--resume").err
    assert run("a", "b", "c", "--overwrite").code == 0


@pytest.mark.parametrize("c", KINDS)
def test_overwriting_an_unfinished_c_needs_beta_zero(here: Path, c: str) -> None:
    unfinished(c)
    assert run("a", "b", c, "--tile", "4x4x12", "--alpha", "2", "--overwrite").code == 0
    assert run("a", "b", "right", "--tile", "4x4x12", "--alpha", "2").code == 0
    assert stored(c) == stored("right")
    unfinished(c, "--beta", "0.5")
    done = run("a", "b", c, *TILE, "--beta", "0.5", "--overwrite")
    assert (done.code, "pass --resume to continue it, or remove C" in done.err) == (EXIT_USAGE, True)


@pytest.mark.parametrize("c", KINDS)
@pytest.mark.parametrize("beta", ["0", "0.5"])
def test_a_run_that_fails_before_a_tile_is_done_leaves_nothing(here: Path, c: str, beta: str) -> None:
    if beta != "0":
        zarr.create_array("c", data=C, chunks=(4, 4), compressors=None)
        np.save("c.npy", C)
    before = contents(here)
    unfinished(c, "--beta", beta, tiles=0)
    assert contents(here) == before


@pytest.mark.parametrize("kind", [ZarrMatrix, NpyMatrix])
def test_a_tile_whose_commit_raises_is_applied_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """The commit of the first tile fails after it has changed C, so that beta C must not be added again."""
    c, right = "c" if kind is ZarrMatrix else "c.npy", kind.apply_redo
    for place in (c, "right"):
        zarr.create_array(place, data=C, chunks=(4, 4), compressors=None) if c == "c" else np.save(place, C)

    def apply_redo(self: Any, rows: Range, cols: Range) -> None:
        right(self, rows, cols)
        raise OSError(5, "Input/output error")

    options = (*TILE, "--beta", "0.5")
    monkeypatch.setattr(kind, "apply_redo", apply_redo)
    assert run("a", "b", c, *options).code == EXIT_FAILED
    monkeypatch.setattr(kind, "apply_redo", right)
    assert run("a", "b", c, *options, "--resume").code == 0
    assert run("a", "b", "right" + Path(c).suffix, *options).code == 0
    assert stored(c) == stored("right" + Path(c).suffix)


@pytest.mark.parametrize("tiles", [0, 2])
@pytest.mark.parametrize("c", KINDS)
def test_a_c_that_is_overwritten_in_part_stays_unfinished(here: Path, c: str, tiles: int) -> None:
    """C stays marked as unfinished if no tile was finished, and after runs that fail before they write."""
    zarr.create_array("c", data=C, chunks=(4, 4), compressors=None, attributes={"kept": 1})
    np.save("c.npy", C)
    unfinished(c, "--overwrite", tiles=tiles)
    for fails in (
        patch.object(HostBackend, "open", side_effect=BackendError("no room")),
        faulty_stores(read_A=Fault(ValueError("no number"))),
        nullcontext(),
    ):
        assert c != "c" or zarr.open_array("c", mode="r").attrs["oocgemm"] == {"complete": False}
        assert "unfinished run" in run("a", c, "new").err
        with fails:
            code = run("a", "b", c, "--overwrite").code
    assert code == 0
    assert dict(zarr.open_array("c", mode="r").attrs) == {"kept": 1}


def test_chunks_left_out_need_no_sync(here: Path) -> None:
    zarr.create_array("zero", shape=(12, 12), dtype="f8", chunks=(4, 4))
    zarr.create_array("c", shape=(12, 12), dtype="f8", chunks=(2, 2), shards=(4, 4))
    assert run("zero", "b", "c", *TILE, "--overwrite").code == 0
    assert not (here / "c" / "c").exists()


@pytest.mark.parametrize("shards", [(4, 4), None])
def test_a_tile_of_nothing_but_zeros_replaces_the_old_one(here: Path, shards: tuple[int, int] | None) -> None:
    values = np.arange(144.0).reshape(12, 12)
    c = zarr.create_array("c", data=-values @ values, chunks=(2, 2), shards=shards)
    oocgemm.gemm(values, values, here / "c", beta=1, tile="4x4x4", backend="host")
    np.testing.assert_array_equal(c[:], np.zeros((12, 12)))


@pytest.mark.parametrize("beta", ["0", "0.5"])
def test_no_folder_stays_next_to_a_finished_npy_file(here: Path, beta: str) -> None:
    if beta != "0":
        np.save("c.npy", C)
    names = {path.name for path in here.iterdir()} | {"c.npy"}
    assert run("a", "b", "c.npy", *TILE, "--beta", beta).code == 0
    assert {path.name for path in here.iterdir()} == names
    before = stored("c.npy")
    assert run("a", "b", "c.npy", *TILE, "--beta", beta, "--resume", "--quiet") == Finished(0, "", "")
    assert (stored("c.npy"), {path.name for path in here.iterdir()}) == (before, names)
    done = run("a", "b", "c.npy", *TILE, "--beta", beta, "--alpha", "2", "--resume")
    assert (done.code, "alpha is 2.0 and was 1.0" in done.err) == (EXIT_USAGE, True)


@pytest.mark.parametrize("beta", ["0", "0.5"])
def test_without_extended_attributes_the_folder_stays(here: Path, beta: str) -> None:
    if beta != "0":
        np.save("c.npy", C)
    with patch.object(os, "setxattr", side_effect=OSError(95, "Operation not supported")):
        assert run("a", "b", "c.npy", *TILE, "--beta", beta).code == 0
    before = contents(here)
    assert "c.npy.oocgemm/journal" in before
    assert run("a", "b", "c.npy", *TILE, "--beta", beta, "--resume", "--quiet") == Finished(0, "", "")
    assert contents(here) == before


def test_a_second_update_that_failed_is_not_taken_for_done(here: Path) -> None:
    shutil.copy("old.npy", "c.npy")
    options = (*TILE, "--beta", "0.5")
    assert run("a", "b", "c.npy", *options).code == 0
    once = np.load("c.npy")
    unfinished("c.npy", *options, tiles=0)
    assert run("a", "b", "c.npy", *options, "--resume").code == 0
    np.testing.assert_allclose(np.load("c.npy"), A @ B + 0.5 * once)


@pytest.mark.parametrize("value", [b"", b"nonsense", b"00000000 {}\n"])
def test_an_attribute_that_cannot_be_parsed_is_ignored(here: Path, value: bytes) -> None:
    assert run("a", "b", "c.npy", *TILE).code == 0
    os.setxattr("c.npy", ATTRIBUTE, value)
    assert run("c.npy", "b", "d", *TILE).code == 0
    done = run("a", "b", "c.npy", *TILE, "--resume")
    assert (done.code, "without a journal" in done.err) == (EXIT_USAGE, True)


@pytest.mark.parametrize("c", KINDS)
def test_finished_tiles_survive_failures_of_later_runs(here: Path, c: str) -> None:
    assert run("a", "b", c, *TILE).code == 0
    before = contents(here)
    assert run("a", "b", c, *TILE, "--resume", "--timeline", "/proc/log").code == EXIT_USAGE
    assert contents(here) == before


@pytest.mark.parametrize("c", ["c", "c.npy"])
def test_files_put_at_c_by_others_are_kept(here: Path, c: str) -> None:
    right = Journal.start

    def late(self: Journal, header: dict[str, object]) -> None:
        right(self, header)
        if c == "c":
            zarr.create_array("c", data=C, chunks=(4, 4), compressors=None)
        else:
            np.save("c.npy", C)

    with patch.object(Journal, "start", late):
        done = run("a", "b", c, *TILE)
    # A .npy file is renamed into place at the end, so the run fails only then.
    assert done.code == (EXIT_USAGE if c == "c" else EXIT_FAILED)
    assert stored(c) == bytes(C.data)
    if c == "c.npy":
        assert "another file was put at C's path; the result is in" in done.err
        Path(c).unlink()
        assert run("a", "b", c, "--resume").code == 0
        np.testing.assert_allclose(np.load(c), A @ B)


def test_a_run_with_operands_in_memory_cannot_be_resumed(here: Path) -> None:
    with pytest.raises(InputError, match="only if C is at a local path"):
        oocgemm.matmul("a", "b", backend="host", resume=True)
    with failing_after(2), pytest.raises(ExecutionError):
        oocgemm.matmul(A, "b", out="c", tile="4x4x4", backend="host")
    with pytest.raises(InputError, match="A is or was in memory"):
        oocgemm.matmul(A, "b", out="c", tile="4x4x4", backend="host", resume=True)


def test_a_zarr_array_in_a_group_is_resumed(here: Path) -> None:
    group = zarr.create_group("group")
    c = group.create_array("c", shape=(12, 12), chunks=(4, 4), dtype="float64", attributes={"kept": 1})
    with failing_after(2), pytest.raises(ExecutionError):
        oocgemm.gemm("a", "b", c, tile="4x4x4", backend="host")
    assert [name for name, _ in zarr.open_group("group").members()] == ["c"]
    oocgemm.gemm("a", "b", c, tile="4x4x4", backend="host", resume=True)
    found = zarr.open_array("group/c", mode="r")
    np.testing.assert_allclose(np.asarray(found[:]), A @ B)
    assert dict(found.attrs) == {"kept": 1}


def test_with_less_memory_a_run_resumes_with_fewer_panels() -> None:
    problem = GemmProblem(64, 64, 640, "float64", "float64", "float64", "float64")
    machine = default_model("cuda", 2)
    roomy = make_plan(problem, Budgets(1 << 30, 1 << 30), machine, Layouts(), TileShape(16, 16, 16))
    done = frozenset({(0, 0), (0, 1)})

    def again(device: int) -> Slots:
        budgets = Budgets(device, 1 << 30)
        plan = resumed_plan(problem, budgets, machine, Layouts(), roomy.candidate, done)
        assert plan.footprint.device_total <= device
        assert (plan.tile, plan.slots.strip, plan.slots.c) == (roomy.tile, roomy.slots.strip, roomy.slots.c)
        assert (0, 0) not in plan.schedule().tiles
        by_strips = [(s.last_steps, s.turn_steps) for s in (plan.slots, roomy.slots)]
        assert by_strips[0] == by_strips[1]  # the bits of the result depend on these
        return plan.slots

    assert again(1 << 30) == roomy.slots
    held = roomy.footprint.device_total
    assert again(held - 1).a < roomy.slots.a
    with pytest.raises(oocgemm.BudgetError, match="the plan that the run was begun with"):
        again(held // 8)


STUCK = """
import time
from pathlib import Path
from oocgemm.backends.host.backend import HostSession
from oocgemm.cli.main import main
HostSession._multiply = lambda *arguments: Path("stuck").touch() or time.sleep(600)
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), *slow((signal.SIGTERM, 143))])
@pytest.mark.parametrize("stuck", [False, True], ids=["between operations", "amid a long one"])
def test_a_signal_ends_a_run_promptly(here: Path, number: int, code: int, stuck: bool) -> None:
    array = np.lib.format.open_memmap("large.npy", mode="w+", dtype=np.float64, shape=(2000, 2000))
    del array  # the file has no blocks on the disk, since it contains only zeros
    start = [sys.executable, *(("-c", STUCK) if stuck else ("-m", "oocgemm"))]
    arguments = [
        "run",
        "large.npy",
        "large.npy",
        "c",
        "--backend",
        "host",
        "--tile",
        "50x50x50",
        "--chunks",
        "50x50",
    ]
    journal = here / "c" / ".oocgemm" / JOURNAL
    with subprocess.Popen(
        [*start, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(TOP)},
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                done = journal.read_bytes().count(b"\n") if journal.exists() else 0
                if (here / "stuck").exists() if stuck else done >= 3:
                    break
                time.sleep(0.01)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (code, ""), err
    last = err.splitlines()[-1]
    assert last.startswith("Interrupted. ")
    assert last.endswith("of 1600 tiles are done: the same command with --resume computes the others")


def test_removing_a_folder_does_not_follow_its_links(tmp_path: Path) -> None:
    journal, elsewhere = tmp_path / "C.zarr" / ".oocgemm", tmp_path / "elsewhere"
    for folder in (journal, elsewhere):
        folder.mkdir(parents=True)
    (elsewhere / "0").write_bytes(b"chunk")
    (journal.parent / "c").symlink_to(elsewhere)
    stores.clear(journal)
    assert not journal.parent.exists()
    assert [path.name for path in elsewhere.iterdir()] == ["0"]
