"""Every verb shows its plans without running, in the library and on the command line."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import oocgemm
from oocgemm.jobs import run as running
from oocgemm.jobs.options import VERBS
from oocgemm.jobs.run import run_request
from tests.support import support_cells
from tests.support.command import command

X = np.random.default_rng(3).integers(0, 3, (40, 30)).astype("float64")
V = np.ones(40)
# Calls of each verb: arguments, options, and the number of the plans.
CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], int]]] = {
    "gemm": [
        ((X, X), {"trans_b": "T"}, 1),
        ((X, X), {"trans_b": "T", "tile": "16x16x30", "verify": True}, 1),
    ],
    "gram": [((X,), {}, 1), ((X,), {"axis": 1, "uplo": "lower"}, 1)],
    "corr": [
        ((X,), {}, 1),
        ((X,), {"topk": 3}, 1),
        ((X,), {"threshold": 0.5, "axis": 1}, 1),
        ((X,), {"constant": "drop"}, 1),
    ],
    "cov": [((X,), {"ddof": 0}, 1)],
    "similarity": [((X,), {"topk": 2}, 1), ((X,), {"threshold": 0.9, "metric": "dot"}, 1)],
    "grm": [((X,), {}, 1), ((X,), {"pairwise": True, "method": "vanraden", "missing": None}, 2)],
    "pca": [((X, 2), {"iterations": 3, "scores": True}, 1), ((X, 2), {"method": "exact"}, 1)],
    "kernel_matmul": [((X, V), {"gamma": 0.5}, 1), ((X, np.ones((40, 2)), X), {"gamma": 0.5}, 1)],
    "lstsq": [((X, V), {}, 1), ((X, np.ones((40, 2))), {"intercept": True}, 1)],
    "ridge": [((X, V, 0.5), {}, 1), ((X, V, [1, 2]), {"refine": False}, 1)],
    "reduce": [
        ((X,), {"to": oocgemm.Reduce("sum")}, 1),
        ((X,), {"to": oocgemm.MatVec(V)}, 1),
        ((X, X), {"to": oocgemm.TopK(2), "trans_b": "T"}, 1),
        ((X,), {"to": oocgemm.Threshold(3.0)}, 1),
    ],
}


# Other verbs are called as in the tests of what runs where.
CALLS |= {
    verb: [((X, *call.more), call.options, 1)]
    for verb, call in support_cells.CALLS.items()
    if verb not in CALLS
}


def test_every_verb_is_tried() -> None:
    assert {*CALLS} == {*VERBS}


@pytest.mark.parametrize(
    ("verb", "call"),
    [(verb, call) for verb, calls in CALLS.items() for call in calls],
)
def test_a_dry_run_returns_plans_and_computes_nothing(verb: str, call: Any, tmp_path: Path) -> None:
    given, options, count = call
    engine: dict[str, Any] = {"backend": "host", "memory": "64MiB"}
    found = getattr(oocgemm, verb)(*given, **options, **engine, dry_run=True)
    plans = found if isinstance(found, tuple) else (found.pass_plan if verb == "pca" else found,)
    assert len(plans) == count
    for plan in plans:
        assert isinstance(plan, oocgemm.Plan)
        assert plan.footprint.host_total + plan.footprint.device_total <= 64 << 20
    # A run of several passes does more, and the plan of `grm` has numbers that the run has not found yet.
    if verb not in ("pca", "svd", "lstsq", "ridge", "grm"):
        np.testing.assert_array_equal(plans[0].run().out, done(verb, *given, **options, **engine))


def done(verb: str, *given: Any, **options: Any) -> Any:
    """Return what the run of a verb stores in place of C."""
    found: list[oocgemm.Result] = []

    def keeping(request: Any) -> oocgemm.Result:
        found.append(run_request(request))
        return found[-1]

    with patch.object(running, "run_request", keeping):
        getattr(oocgemm, verb)(*given, **options)
    return found[-1].out


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "c.zarr"
    for verb in ("gram", "corr", "cov", "grm"):
        getattr(oocgemm, verb)(X, out, backend="host", dry_run=True)
    oocgemm.gemm(X, X, out, trans_b="T", backend="host", dry_run=True)
    oocgemm.pca(X, 2, out, backend="host", dry_run=True)
    assert not any(tmp_path.iterdir())


def test_matmul_and_a_plan_have_dry_runs_too() -> None:
    plan = oocgemm.matmul(X, X.T, backend="host", dry_run=True)
    assert isinstance(plan, oocgemm.Plan)
    assert oocgemm.gemm(plan=plan, dry_run=True) is plan


COMMANDS = {
    "run": ("x.npy", "x.npy", "c.npy", "--transpose-b"),
    "gram": ("x.npy",),
    "corr": ("x.npy", "c.npy"),
    "corr --topk": ("x.npy", "c.zarr", "--topk", "2"),
    "cov": ("x.npy", "c.npy"),
    "similarity": ("x.npy", "c.zarr", "--topk", "2"),
    "grm": ("x.npy", "c.npy", "--pairwise"),
    "pca": ("x.npy", "--components", "2"),
    "svd": ("x.npy", "c.zarr"),
    "lstsq": ("x.npy", "x.npy", "c.zarr"),
    "ridge": ("x.npy", "x.npy", "c.zarr", "--alpha", "1,2"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_so_do_commands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    words = (name.split(maxsplit=1)[0], *COMMANDS[name], "--backend", "host", "--dry-run")
    shown = command(*words)
    assert shown.code == 0, shown.err
    assert "tile" in shown.out
    printed = json.loads(command(*words, "--json").out)
    assert printed.get("pass", printed)["tile"]
    assert ("before" in printed) == (name == "grm")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
