"""A run that differs from the unfinished one, or would damage C, is refused with the difference."""

import os
from pathlib import Path

import numpy as np
import pytest
import zarr

from oocgemm import stores
from oocgemm.cli.process import EXIT_FAILED, EXIT_USAGE
from oocgemm.jobs.journal import Journal
from tests.support.command import contents, run
from tests.support.suite import thinned
from tests.support.unfinished_runs import (
    KINDS,
    TILE,
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


@pytest.mark.parametrize(
    "part",
    thinned(DIFFERENCES, [part for part in DIFFERENCES if not part.startswith(("beta", "A is", "B is"))]),
)
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


def test_trusting_operands_excludes_operands_at_other_paths(here: Path) -> None:
    unfinished("c")
    done = run("old", "b", "c", *TILE, "--resume", "--trust-operands")
    assert (done.code, "/old and was at" in done.err) == (EXIT_USAGE, True)


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


def test_a_c_changed_since_completion_is_not_taken_as_done(here: Path) -> None:
    assert run("a", "b", "c", *TILE).code == 0
    (here / "c" / "c" / "0" / "0").write_bytes(bytes(128))
    assert "C has changed since" in run("a", "b", "c", *TILE, "--resume").err


@pytest.mark.parametrize("c", KINDS)
def test_a_second_run_is_refused_while_the_first_lives(here: Path, c: str) -> None:
    unfinished(c)
    folder = stores.sidecar(c)
    assert isinstance(folder, Path)
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
    assert "pass overwrite=True (--overwrite)" in run("a", "b", "c", "--resume").err
    assert run("a", "b", "c", "--overwrite").code == 0
