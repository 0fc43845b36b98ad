"""The command pca."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.jobs import pca_passes
from tests.jobs.test_pca import low_rank
from tests.support import TOP
from tests.support.command import command

X = low_rank(120, 30).astype(np.float32)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    zarr.create_array("x.zarr", data=X, chunks=(50, 30))


def saved(name: str) -> Any:
    return zarr.open_array(f"p.zarr/{name}", mode="r")[:]


def test_components_are_stored() -> None:
    given = "pca", "x.zarr", "p.zarr", "--components", "7", "--scores", "--tol", "0", "--backend", "host"
    done = command(*given)
    assert done.code == 0, done.err
    assert "X was read 7 times" in done.out
    assert done.out.endswith("Components: p.zarr\n")
    found = oocgemm.pca("x.zarr", 7, scores=True, tol=0, backend="host")
    for name in (
        "components",
        "singular_values",
        "explained_variance",
        "mean",
        "scale",
        "scores",
        "residuals",
        "errors",
    ):
        np.testing.assert_array_equal(saved(name), getattr(found, name))
    assert "something exists at p.zarr" in command(*given).err


def test_options_reach_the_function() -> None:
    given = (
        "--components",
        "2",
        "--no-center",
        "--seed",
        "3",
        "--oversampling",
        "1",
        "--iterations",
        "2",
        "--tol",
        "0",
        "--verify",
    )
    transform = "--transform", "log1p,scale=k", "--verify"
    np.save("y.npy", np.abs(X))
    done = command("pca", "y.npy", "p.zarr", *given, *transform, "--backend", "host", "--json")
    options: dict[str, Any] = {"center": False, "seed": 3, "oversampling": 1, "iterations": 2, "tol": 0}
    changed = oocgemm.Transform(log1p=True, scale="k")
    found = oocgemm.pca("y.npy", 2, transform=changed, backend="host", **options)
    assert done.json()["singular_values"] == found.singular_values.tolist()
    assert done.json()["passes"] == 2
    np.testing.assert_array_equal(saved("components"), found.components)


def test_a_dry_run_says_how_often_x_is_read() -> None:
    x = "x.zarr", "--method", "randomized"
    done = command("pca", *x, "--components", "3", "--dry-run", "--backend", "host", "--scores")
    assert done.code == 0, done.err
    assert "X is read at most 7 times: 98.4 KiB in all" in done.out
    scaled = "--transform", "scale=k", "--components", "3", "--dry-run", "--backend", "host"
    assert "and once for its statistics" in command("pca", *x, *scaled).out
    plan = command("pca", *x, *scaled, "--json").json()
    assert (plan["passes"], plan["statistics"], plan["bytes_read"]) == (6, True, 7 * X.nbytes)
    assert plan["pass"]["problem"]["m"] == 30
    checked = command("pca", *x, *scaled, "--scores", "--verify")
    assert (
        "X is read at most 7 times, and once for its statistics, and 6 times to check products" in checked.out
    )
    plan = command("pca", *x, *scaled, "--verify", "--json").json()
    assert (plan["checks"], plan["bytes_read"]) == (6, 13 * X.nbytes)
    gpu = "--dry-run", "--backend", "cuda", "--device-memory", "1GiB", "--components", "3"
    assert command("pca", *x, *gpu).code == 0


def test_a_failed_run_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "pca", "x.zarr", "p.zarr", "--components", "3", "--scores", "--backend", "host", "--quiet"

    def fail(*operands: Any, **options: Any) -> None:
        raise oocgemm.ExecutionError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(pca_passes.PcaPasses, "scores", fail)
        done = command(*given)
    assert done.code == 1
    assert "the disk is gone. To continue, add --resume (p.zarr.pca-state.npz has the state)" in done.err
    assert "pass resume=True (--resume)" in command(*given).err
    done = command(*given, "--resume")
    assert (done.code, done.out) == (0, ""), done.err
    assert saved("scores").shape == (120, 3)


# Runs a command, and kills it in the middle or at the end of saving a state: the one with this number.
KILLED = """
import os, signal, sys
from oocgemm.verbs import pca
name, left = sys.argv.pop(1), int(sys.argv.pop(1))
owner = os if name == "replace" else pca
usual = getattr(owner, name)

def dying(*arguments):
    global left
    ours = name == "save_state" or "pca-state" in str(arguments[1])
    left -= ours
    if name == "save_state":
        usual(*arguments)
    if ours and not left:
        os.kill(os.getpid(), signal.SIGKILL)
    if name != "save_state":
        usual(*arguments)

setattr(owner, name, dying)
from oocgemm.cli.main import main
main()
"""


def test_a_run_that_is_killed_again_and_again_gives_the_same_bits() -> None:
    given = "--components", "4", "--scores", "--backend", "host", "--quiet", "--iterations", "5", "--tol", "0"
    assert command("pca", "x.zarr", "whole.zarr", *given).code == 0
    for step in (("save_state", 1), ("replace", 1), ("save_state", 2), ("replace", 2)):
        line = [sys.executable, "-c", KILLED, *map(str, step), "pca", "x.zarr", "p.zarr", *given, "--resume"]
        done = subprocess.run(line, env=os.environ | {"PYTHONPATH": str(TOP)}, check=False)
        assert done.returncode == -signal.SIGKILL
        assert Path("p.zarr.pca-state.npz").exists()
        assert not Path("p.zarr").exists()
    assert command("pca", "x.zarr", "p.zarr", *given, "--resume").code == 0
    for name in ("components", "singular_values", "mean", "scores"):
        np.testing.assert_array_equal(saved(name), zarr.open_array(f"whole.zarr/{name}", mode="r")[:])
    assert sorted(path.name for path in Path().iterdir()) == ["p.zarr", "whole.zarr", "x.zarr"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x.zarr", "p.zarr"), "Missing option '--components'"),
        (("x.zarr", "--components", "3"), "OUT is missing"),
        (("x.zarr", "p.zarr", "--components", "31"), "at most 30 components"),
        (("x.zarr", "s3://b/o", "--components", "3"), "written to local paths only"),
        (("none.zarr", "p.zarr", "--components", "3"), "none.zarr"),
        (("x.zarr", "p.zarr", "--components", "3", "--memory", "1KiB"), "cannot hold the smallest plan"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = command("pca", *arguments, "--backend", "host")
    assert done.code in (2, 3)
    assert message in done.err
    assert not Path("p.zarr").exists()
