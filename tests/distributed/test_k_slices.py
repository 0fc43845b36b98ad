"""Products whose k is divided into slices: partial products of workers, added in order."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.planning import Plan
from oocgemm.planning.partition import Partition, divide, partition
from oocgemm.timeline import read_log
from tests.support.clusters import all_ended, children, content, environment, fresh, store_operands
from tests.support.staying import Stay
from tests.support.suite import slow

EXTENT, TILE, MEMORY = 96, "24x32x16", "400MiB"  # 4 x 3 tiles of 6 steps
PARTITION = "oocgemm.distributed.distribute.partition"


def sliced(count: int, down: int = 1) -> Callable[..., Partition]:
    """Return a function that divides a plan into slices of k."""

    def divided(plan: Plan, workers: int, **options: Any) -> Partition:
        found = partition(plan, workers, keep_tile=True)
        return replace(found, grid=(down, 1, count), parts=divide(plan.grid, down, 1, count))

    return divided


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def multiply(folder: Path, c: str, **options: Any) -> oocgemm.Result:
    defaults: dict[str, Any] = {"tile": TILE, "memory": MEMORY, "backend": "host"}
    result: oocgemm.Result = oocgemm.gemm(
        folder / "A.zarr", folder / "B.zarr", folder / c, **(defaults | options)
    )
    return result


@pytest.mark.parametrize(
    ("dtype", "out", "trans", "c", "alpha", "beta"),
    [
        ("float64", "float64", ("N", "T"), "C.zarr", 2, -3),
        *slow(
            ("int8", "int32", ("N", "N"), "C.zarr", 1, 0),
            ("float64", "float64", ("T", "N"), "C.npy", 1, 0),
            ("float64", "float64", ("T", "T"), "C.npy", 3, 1),
            ("float32", "float32", ("N", "N"), "C.zarr", -1, 1),
            ("float16", "float32", ("N", "T"), "C.zarr", 1, 0),
            ("int8", "float64", ("T", "N"), "C.zarr", 3, 2),
            ("complex128", "complex128", ("C", "N"), "C.zarr", 1j, 2),
        ),
    ],
)
def test_sums_of_slices_are_exact_on_small_integers(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    out: str,
    trans: tuple[str, str],
    c: str,
    alpha: complex,
    beta: complex,
) -> None:
    rng = np.random.default_rng(5)
    m, n, k = 70, 90, 101  # neither whole tiles nor whole steps
    a, b, old = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((m, k), (k, n), (m, n)))
    if dtype == "complex128":
        a = a + 1j * rng.integers(-3, 4, (m, k))
    stored = [
        x if op == "N" else (x.T if op == "T" else x.conj().T) for x, op in zip((a, b), trans, strict=True)
    ]
    for name, array in zip("AB", stored, strict=True):
        zarr.create_array(here / f"{name}.zarr", data=np.ascontiguousarray(array), chunks=(13, 17))
    if beta and c.endswith(".npy"):
        np.save(here / c, old.astype(out))
    elif beta:
        zarr.create_array(here / c, data=old.astype(out), chunks=(24, 32))
    monkeypatch.setattr(PARTITION, sliced(3))
    result = multiply(
        here, c, workers=2, trans_a=trans[0], trans_b=trans[1], alpha=alpha, beta=beta, out_dtype=out
    )
    wide = complex if dtype == "complex128" else np.float64
    expected = alpha * (a.astype(wide) @ b.astype(wide)) + beta * old
    np.testing.assert_array_equal(np.asarray(result), expected)
    assert np.asarray(result).dtype == out
    content(here / c)  # checks that nothing else is left
    assert all_ended(here)


def test_bits_do_not_depend_on_the_number_of_workers(
    here: Path, stay: Stay, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay(60)
    store_operands(here, EXTENT, "float32")
    found = []
    for workers in (1, 3):
        fresh(here, here / "C.zarr", old=False)
        monkeypatch.setattr(PARTITION, sliced(3, down=workers))
        multiply(here, "C.zarr", workers=workers)
        found.append(content(here / "C.zarr"))
    assert found[0] == found[1]


def test_the_report_counts_slices_and_their_sum(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_operands(here, EXTENT)
    monkeypatch.setattr(PARTITION, sliced(3))
    result = multiply(here, "C.zarr", workers=2, timeline=here / "log.jsonl")
    down, across = result.plan.grid.shape
    tiles = {(i, j) for i in range(down) for j in range(across)}
    size = EXTENT * EXTENT * 8
    for timeline in (result.timeline, read_log(here / "log.jsonl")):
        spans = timeline.spans
        assert {span.tile for span in spans} == tiles
        assert sum(span.flops for span in spans) == result.plan.flops
        workers = timeline.header["workers"]
        (adding,) = (w for w, worker in enumerate(workers) if worker["name"] == "coordinator")
        assert [part["reduces"] for part in workers[adding]["parts"]] == [True]
        added = [span for span in spans if span.worker == adding]
        assert sum(span.bytes for span in added if span.kind == "read") == 3 * size
        assert sum(span.bytes for span in added if span.kind == "write") == size
        assert not any(part["thrown_away"] for worker in workers for part in worker["parts"])
    assert timeline.header["unread"] == []
    assert result.report.exposed["reduce"] > 0


SCRIPT = """
import sys
import oocgemm.distributed.distribute as run
from tests.distributed.test_k_slices import multiply, sliced
from pathlib import Path
run.partition = sliced(3)
multiply(Path(sys.argv[1]), "C.zarr", workers=2, resume=len(sys.argv) > 2)
"""


@pytest.mark.slow
def test_a_killed_coordinator_resumes_in_slices(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_operands(here, EXTENT)
    monkeypatch.setattr(PARTITION, sliced(3))
    multiply(here, "C.zarr", workers=2)
    expected = content(here / "C.zarr")
    fresh(here, here / "C.zarr", old=False)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(here)])
    journal = here / "C.zarr" / ".oocgemm" / "partial" / ".oocgemm" / "journal"
    while process.poll() is None and not (journal.exists() and b'"done"' in journal.read_bytes()):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all_ended(here)
    with pytest.raises(oocgemm.InputError, match=r"3 slices.*--workers 1 --resume"):
        multiply(here, "C.zarr", resume=True)
    before = journal.read_bytes().count(b'"done"')
    assert before
    monkeypatch.setattr(PARTITION, sliced(1))  # the slices are those of the journal
    multiply(here, "C.zarr", workers=1, resume=True)
    assert content(here / "C.zarr") == expected
    assert not children(here)
