"""Failed runs keep their finished tiles. A resumed run computes the others."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.cli.process import EXIT_FAILED, EXIT_USAGE
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs.resume import Committer
from oocgemm.planning import (
    Budgets,
    Layouts,
    Slots,
    TileShape,
    default_model,
    make_plan,
    resumed_plan,
)
from oocgemm.planning.schedule.operation import Block
from oocgemm.planning.tiling import Range, Tile
from oocgemm.stores.npy import NpyMatrix
from oocgemm.stores.zarr_matrix import ZarrMatrix
from tests.support.command import Finished, contents, run
from tests.support.products import product_of
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
    stored,
    unfinished,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    store_operands()
    return tmp_path


@each_value
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

    def finished(self: Committer, tile: Tile, blocks: Sequence[Block]) -> None:
        written.append(tile)
        right(self, tile, blocks)
        while self._error is None:
            time.sleep(0.001)

    monkeypatch.setattr(Committer, "finished", finished)
    unfinished("c", tiles=0)
    assert 1 <= len(written) < 9


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


@each_value
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


@pytest.mark.parametrize("c", KINDS)
def test_a_c_that_was_removed_is_created_again(here: Path, c: str) -> None:
    assert run("a", "b", c, *TILE).code == 0
    before = stored(c)
    Path(c).unlink() if c.endswith(".npy") else shutil.rmtree(c)
    assert run("a", "b", c, *TILE, "--resume").code == 0
    assert stored(c) == before


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


def test_a_second_update_that_failed_is_not_taken_for_done(here: Path) -> None:
    shutil.copy("old.npy", "c.npy")
    options = (*TILE, "--beta", "0.5")
    assert run("a", "b", "c.npy", *options).code == 0
    once = np.load("c.npy")
    unfinished("c.npy", *options, tiles=0)
    assert run("a", "b", "c.npy", *options, "--resume").code == 0
    np.testing.assert_allclose(np.load("c.npy"), A @ B + 0.5 * once)


@pytest.mark.parametrize("c", KINDS)
def test_finished_tiles_survive_failures_of_later_runs(here: Path, c: str) -> None:
    assert run("a", "b", c, *TILE).code == 0
    before = contents(here)
    assert run("a", "b", c, *TILE, "--resume", "--timeline", "/proc/log").code == EXIT_USAGE
    assert contents(here) == before


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
    problem = product_of(64, 64, 640, "float64", "float64", "float64", "float64")
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
