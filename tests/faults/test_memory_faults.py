"""Host memory, threads or page-locking that the system refuses end a run with an error that says so."""

import errno
import mmap
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import ExecutionError, InputError, OutOfMemoryError, stores
from oocgemm.cli.process import EXIT_FAILED, EXIT_USAGE
from oocgemm.engine import staging
from oocgemm.engine.staging import Staging
from oocgemm.jobs import output
from oocgemm.jobs import prepare as budgets_module
from oocgemm.planning import Kind, Operation, Plan
from oocgemm.stores import files
from oocgemm.system import resources
from tests.support.backends_here import staged
from tests.support.faults import Fault, faulty_stores, nothing_left
from tests.support.faulty_runs import PRODUCT, TILE, A, failure, multiply, saved, store
from tests.support.suite import slow

pytestmark = pytest.mark.usefixtures("zarr_has_its_threads", "retries_are_soon")


@pytest.mark.parametrize("unified", [True, False])
def test_a_plan_for_more_memory_than_there_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unified: bool
) -> None:
    monkeypatch.setattr(budgets_module, "available_for", lambda _: 100 << 20)
    budgets: dict[str, Any] = {"device_memory": "200MiB", "host_memory": "200MiB"}
    a = np.ones((1800, 1800))[:, ::-1]  # not contiguous: it cannot be multiplied in place, without slots
    with nullcontext() if unified else staged():
        said = failure(tmp_path, a, a, tile="1800x1800x1800", **budgets)
        assert "100 MiB are available" in said
        assert ("device_memory=" in said) == unified
        named = dict(re.findall(r"(\w+_memory)='(\w+)'", said))
        assert all(f"--{name.replace('_', '-')} {size}" in said for name, size in named.items())
        np.testing.assert_array_equal(oocgemm.matmul(a, a, backend="host", **budgets | named), a @ a)


def test_a_c_that_no_memory_would_hold_wants_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets_module, "available_for", lambda _: 60 << 20)
    monkeypatch.setattr(output, "available_for", lambda _: 60 << 20)
    column = np.ones((3000, 1))
    options: dict[str, Any] = {"device_memory": "20MiB", "host_memory": "8MiB", "tile": "300x300x1"}
    with pytest.raises(
        InputError, match=r"C takes 68\.7 MiB, more than the 60 MiB of memory that are available: pass a path"
    ):
        oocgemm.gemm(column, column, trans_b="T", backend="host", **options)


@pytest.mark.parametrize("size", [1 << 55, 1 << 63, 1 << 70])
def test_more_memory_than_can_be_addressed_is_refused(size: int) -> None:
    with pytest.raises(OutOfMemoryError, match=r"the system refuses .* pass a smaller --host-memory"):
        resources.allocate(size)


@pytest.mark.parametrize("room", [5, 31, *slow([11], [46])])
def test_memory_that_the_system_refuses_is_one_line(tmp_path: Path, room: int) -> None:
    for name in "AB":
        np.save(tmp_path / f"{name}.npy", np.ones((2000, 2000)))
    # All modules are imported first: an import without memory may end in an error of the interpreter itself.
    code = (
        "import resource, sys, numpy, oocgemm.cli.main, oocgemm.cli.products, oocgemm.backends.host.backend;"
        "import oocgemm.cli.display, rich.progress;"
        "import zarr; numpy.ones((64, 64)) @ numpy.ones((64, 64));"
        "size = int(open('/proc/self/statm').read().split()[0]) * 4096;"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (int(sys.argv.pop(1)) << 20),) * 2); "
        "oocgemm.cli.main.main()"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(room),
        "run",
        "A.npy",
        "B.npy",
        "C.zarr",
        "--backend",
        "host",
    ]
    budgets = ["--device-memory", "80MiB", "--host-memory", "32MiB"]
    done = subprocess.run([*command, *budgets], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (EXIT_FAILED, EXIT_USAGE), (room, done.stderr)
    assert done.stderr.count("\n") == 1, (room, done.stderr)
    assert done.stderr.startswith("Error: ")
    assert not (tmp_path / "C.zarr").exists()


def mapping_files_only(descriptor: int, *rest: Any, **options: Any) -> mmap.mmap:
    """Stand for `mmap.mmap`: map files as usual, but refuse anonymous memory."""
    if descriptor == -1:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return mmap.mmap(descriptor, *rest, **options)


@pytest.mark.parametrize("compressor", ["zstd", "none"])
def test_a_chunk_without_memory_to_decode_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressor: str
) -> None:
    """Memory is refused for a chunk to decode, or for a chunk to encode that extends beyond the edge of C."""
    a = store(tmp_path / "A", "zstd") if compressor == "zstd" else A
    with monkeypatch.context() as patches:
        patches.setattr(files, "_of_thread", threading.local())
        patches.setattr(files, "mmap", SimpleNamespace(**vars(mmap) | {"mmap": mapping_files_only}))
        said = failure(tmp_path, a, tile="16x20x10", chunks=(16, 20), compressor=compressor)
    assert f"{'reading A[' if compressor == 'zstd' else 'writing C['}" in said
    assert re.search("the system refuses .* of host memory for a chunk: pass a smaller --host-memory", said)
    assert "damaged" not in said


@pytest.mark.parametrize("first", range(1, 9))
def test_a_thread_that_cannot_be_started_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    right, fault = threading.Thread.start, Fault(RuntimeError("can't start new thread"), first=first)

    def start(self: threading.Thread) -> None:
        if self.name.startswith("oocgemm"):
            fault.strike()
        right(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    interval = sys.getswitchinterval()
    with staged(2):
        assert "can't start new thread" in failure(tmp_path, A)
    assert sys.getswitchinterval() == interval


def staging_of(
    folder: Path,
    threads: int,
    pin: Callable[[Sequence[Any]], object] = lambda columns: None,
    /,
    **faults: Fault,
) -> tuple[Staging, Plan]:
    """Return host buffers for stored A, B and C whose reads and writes have faults, and their plan."""
    paths = dict(zip("ABC", (*saved(folder, by_columns=True), folder / "C.npy"), strict=True))
    with staged(threads):
        plan = oocgemm.plan(paths["A"], paths["B"], paths["C"], backend="host", tile=TILE)
    np.save(paths["C"], PRODUCT)
    with faulty_stores(**faults):
        operands = {name: stores.open_matrix(name, path) for name, path in paths.items()}
    return Staging(plan, operands, pin), plan


def first_read(plan: Plan) -> Operation:
    """Return the first Read of A."""
    reads = (operation for operation in plan.schedule() if operation.kind is Kind.READ)
    return next(operation for operation in reads if operation.operand == "A")


def test_slots_are_pinned_by_the_thread_that_faults_them_in(tmp_path: Path) -> None:
    """The threads that issue copies do not pin buffers."""
    locked: dict[str, list[Any]] = {}

    def lock(columns: Sequence[Any]) -> None:
        locked.setdefault(threading.current_thread().name, []).append([part.copy() for part in columns])

    moving, plan = staging_of(tmp_path, 3, lock)
    read = first_read(plan)
    moving.transfer(read, moving.slots.columns(read.writes[0].slot, read))
    for operation in plan.schedule():
        if operation.kind is Kind.WRITE:
            moving.slots.await_prefault(operation.reads[0].slot)
    moving.close()
    (m0, m1), (k0, k1) = read.block
    here = threading.current_thread().name
    assert np.array_equal(locked[here][0][0], A[m0:m1, k0:k1])
    assert len(locked[here]) == 1
    (touched,) = (name for name in locked if name != here)
    assert touched.startswith("oocgemm-prefault")
    assert len(locked[touched]) == plan.slots.host_c


@pytest.mark.parametrize("threads", [1, 3])
def test_a_panel_that_cannot_be_read_is_left_alone_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """After the error no thread writes to the panel's buffer any more, since it may be used again."""
    monkeypatch.setattr(staging, "MIN_PIECE_BYTES", 160)
    monkeypatch.setattr(staging, "MAX_PIECE_BYTES", 160)
    fault = Fault(ValueError("wrong"), times=1, delay=0.01)
    moving, plan = staging_of(tmp_path, threads, read_A=fault)
    operation = first_read(plan)
    columns = moving.slots.columns(operation.writes[0].slot, operation)
    with pytest.raises(ExecutionError, match="wrong"):
        moving.transfer(operation, columns)
    calls = fault.calls
    time.sleep(0.05)
    assert fault.calls == calls < len(columns[0]) // 2
    moving.close()


def test_an_error_that_is_kept_keeps_no_slots(tmp_path: Path) -> None:
    kept = []
    with nothing_left(tmp_path), faulty_stores(read_A=Fault(ValueError("wrong"), first=3)):
        try:
            multiply(tmp_path, A)
        except ExecutionError as error:
            kept.append(error)
    assert kept[0].__traceback__ is not None
    placed = kept[0].__cause__
    assert placed is not None
    assert repr(placed.__cause__) == "ValueError('wrong')"
