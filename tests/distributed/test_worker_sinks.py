"""Workers select, reduce and apply C, which is not stored, with the bits of one process."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import MatVec, Reduce, Threshold, TopK
from oocgemm.distributed import attempts
from tests.support.clusters import all_ended, children
from tests.support.small_runs import EXTENT, MEMORY, prepare
from tests.support.staying import Stay
from tests.support.suite import slow

OPTIONS: dict[str, Any] = {"tile": "16x16x16", "memory": MEMORY, "backend": "host"}
V = np.linspace(-1, 1, EXTENT)
Arrays = Sequence[np.ndarray[Any, Any]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return prepare(tmp_path, monkeypatch)


def arrays(found: Any) -> Arrays:
    """Return the arrays of a result."""
    if isinstance(found, oocgemm.Neighbors):
        return found.indices, found.scores
    if isinstance(found, oocgemm.Pairs):
        return found.indptr, found.indices, found.scores
    return (found,)


def reduced(to: Any, **more: Any) -> Callable[..., Any]:
    return lambda here, **options: oocgemm.reduce(
        here / "A.zarr", here / "B.zarr", to=to, **OPTIONS, **more, **options
    )


def of_rows(verb: str, *args: Any, **more: Any) -> Callable[..., Any]:
    return lambda here, **options: getattr(oocgemm, verb)(
        here / "A.zarr", *args, **OPTIONS, **more, **options
    )


CASES: dict[str, Callable[..., Any]] = {
    "sums": reduced(Reduce("sum"), verify=True),
    "similar": of_rows("similarity", topk=5),
    "pairs": of_rows("similarity", threshold=0.1, verify=True),
}
SLOW: dict[str, Callable[..., Any]] = {
    "squares of columns": reduced(Reduce("sumsq", axis=0)),
    "largest": reduced(Reduce("max")),
    "vectors": reduced(MatVec(np.stack([V, V**2], axis=1)), epilogue=[oocgemm.Scale(rows=V)]),
    "top": reduced(TopK(3), verify=True),
    "above": reduced(Threshold(10.0, absolute=True)),
    "correlated": of_rows("corr", topk=4),
    "correlations": of_rows("corr", threshold=0.2),
    "kernel": of_rows("kernel_matmul", V, gamma=0.01),
}


@pytest.mark.parametrize(("cases", "workers"), [(CASES, 2), *slow((SLOW, 3))], ids=["few", "all others"])
def test_the_bits_are_those_of_one_process(
    here: Path, cases: dict[str, Callable[..., Any]], workers: int, stay: Stay, subtests: pytest.Subtests
) -> None:
    stay(60)
    for case, call in cases.items():
        with subtests.test(case):
            for one, many in zip(arrays(call(here)), arrays(call(here, workers=workers)), strict=True):
                assert np.array_equal(one, many)
    oocgemm.release()
    assert all_ended(here)
    assert not list(here.glob("oocgemm-*"))


def test_the_state_of_a_killed_attempt_does_not_count(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = arrays(CASES["sums"](here))
    adopt, merged = attempts.States.adopt, attempts.merge_state
    times: list[int] = []

    def killing(self: Any, folder: Path, tile: Any, files: str) -> bool:
        if not times:
            for child in children(here):
                os.kill(child.pid, signal.SIGKILL)
        return adopt(self, folder, tile, files)

    def counted(matrix: Any, state: Any) -> None:
        times.append(len(state))
        merged(matrix, state)

    monkeypatch.setattr(attempts.States, "adopt", killing)
    monkeypatch.setattr(attempts, "merge_state", counted)
    assert np.array_equal(arrays(CASES["sums"](here, workers=2))[0], right[0])
    assert sum(times) == EXTENT // 16  # each row of tiles once


def test_operands_in_memory_are_refused_by_their_names() -> None:
    with pytest.raises(oocgemm.CombinationError, match="E is a ndarray, which other processes cannot read"):
        oocgemm.similarity(np.eye(4), topk=1, workers=2)
