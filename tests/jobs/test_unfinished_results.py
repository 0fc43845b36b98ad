"""A C that is written in part stays marked as unfinished. A finished one keeps nothing of the run."""

import os
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import stores
from oocgemm.backends.host.backend import HostBackend
from oocgemm.cli.process import EXIT_FAILED, EXIT_USAGE
from oocgemm.errors import BackendError
from oocgemm.jobs.journal import ATTRIBUTE, Journal
from tests.support.command import Finished, contents, run
from tests.support.faults import Fault, faulty_stores
from tests.support.suite import each_value
from tests.support.unfinished_runs import KINDS, TILE, A, B, C, store_operands, stored, unfinished


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    store_operands()
    return tmp_path


@pytest.mark.parametrize("c", KINDS)
def test_overwriting_an_unfinished_c_needs_beta_zero(here: Path, c: str) -> None:
    unfinished(c)
    assert run("a", "b", c, "--tile", "4x4x12", "--alpha", "2", "--overwrite").code == 0
    assert run("a", "b", "right", "--tile", "4x4x12", "--alpha", "2").code == 0
    assert stored(c) == stored("right")
    unfinished(c, "--beta", "0.5")
    done = run("a", "b", c, *TILE, "--beta", "0.5", "--overwrite")
    assert (done.code, "pass --resume to continue it, or remove C" in done.err) == (EXIT_USAGE, True)


@each_value
@pytest.mark.parametrize("c", KINDS)
@pytest.mark.parametrize("beta", ["0", "0.5"])
def test_a_run_that_fails_before_a_tile_is_done_leaves_nothing(here: Path, c: str, beta: str) -> None:
    if beta != "0":
        zarr.create_array("c", data=C, chunks=(4, 4), compressors=None)
        np.save("c.npy", C)
    before = contents(here)
    unfinished(c, "--beta", beta, tiles=0)
    assert contents(here) == before


@each_value
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


@pytest.mark.parametrize("value", [b"", b"nonsense", b"00000000 {}\n"])
def test_an_attribute_that_cannot_be_parsed_is_ignored(here: Path, value: bytes) -> None:
    assert run("a", "b", "c.npy", *TILE).code == 0
    os.setxattr("c.npy", ATTRIBUTE, value)
    assert run("c.npy", "b", "d", *TILE).code == 0
    done = run("a", "b", "c.npy", *TILE, "--resume")
    assert (done.code, "without a journal" in done.err) == (EXIT_USAGE, True)


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


def test_removing_a_folder_does_not_follow_its_links(tmp_path: Path) -> None:
    journal, elsewhere = tmp_path / "C.zarr" / ".oocgemm", tmp_path / "elsewhere"
    for folder in (journal, elsewhere):
        folder.mkdir(parents=True)
    (elsewhere / "0").write_bytes(b"chunk")
    (journal.parent / "c").symlink_to(elsewhere)
    stores.clear(journal)
    assert not journal.parent.exists()
    assert [path.name for path in elsewhere.iterdir()] == ["0"]
