"""Transforms on the command line, and in reports."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.support import TOP
from tests.support.command import command
from tests.support.transforms import genotypes, standardised


def test_the_commands_transform_verify_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = genotypes(np.random.default_rng(8), 40, 60)
    zarr.create_array("x.zarr", data=x, chunks=(20, 30))
    np.save("means.npy", np.full(60, 1.0))
    change = "missing=-1,center=k,scale=k"
    done = command(
        "gram", "x.zarr", "k.zarr", "--transform", change, "--backend", "host", "--timeline", "log"
    )
    assert done.code == 0, done.err
    z = standardised(x)
    np.testing.assert_allclose(np.tril(zarr.open_array("k.zarr", mode="r")[:]), np.tril(z @ z.T), atol=1e-4)
    page = command("report", "log", "--html", "page.html")
    assert page.code == 0, page.err
    assert "missing=-1, center=k, scale=k to float32" in Path("page.html").read_text()
    given = ("verify", "x.zarr", "x.zarr", "k.zarr", "--transpose-b", "--gram", "lower")
    assert command(*given, "--transform-a", change, "--transform-b", change).code == 0
    assert command(*given, "--transform-a", change, "--transform-b", "missing=-1,cast=float32").code == 1
    other = "missing=-1, impute=0, center=means.npy, scale=k"
    done = command(
        "run", "x.zarr", "x.zarr", "c.npy", "--transpose-b", "--backend", "host",
        "--transform-a", other, "--transform-b", "log1p,missing=-1,impute=0",
    )  # fmt: skip
    assert done.code == 0, done.err
    kept = np.where(x == -1, np.nan, x.astype(float))
    left, right = (np.where(x == -1, 0, kept) - 1) / np.nanstd(kept, 0), np.log1p(np.where(x == -1, 0.0, x))
    np.testing.assert_allclose(np.load("c.npy"), left @ right.T, atol=1e-4)
    done = command("gram", "x.zarr", "i.npy", "--transform", "missing=-1,impute=means.npy", "--quiet")
    assert done.code == 0, done.err
    filled = np.where(x == -1, 1.0, x)
    np.testing.assert_array_equal(np.tril(np.load("i.npy")), np.tril(filled @ filled.T))
    planned = command(
        "gram", "x.zarr", "--dry-run", "--backend", "cuda", "--device-memory", "1GiB",
        "--transform", f"{change},cast=float16",
    )  # fmt: skip
    assert "float16 from int8 into" in planned.out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing", "'missing' is not part of a transform: write missing=CODE"),
        ("log1p=1", "'log1p=1' is not part of a transform"),
        ("mean=0", "'mean=0' is not part of a transform"),
        ("missing=x", "missing=x is not a number"),
        ("impute=median", "impute=median is not a number"),
        ("impute=none.npy", "impute=none.npy is neither"),
        ("center=k,center=k", "center is given twice"),
        ("scale=none.npy", "scale=none.npy is neither k nor a readable .npy file"),
        ("cast=int9", "cast = 'int9': choose one of"),
    ],
)
def test_wrong_options_are_refused(given: str, message: str) -> None:
    done = command("gram", "x.zarr", "k.zarr", "--transform", given)
    assert (done.code, message in " ".join(done.err.split())) == (2, True), done.err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformed_products_killed_at_random_have_the_same_bits(tmp_path: Path) -> None:
    line = [
        sys.executable,
        str(TOP / "scripts/bench/torture.py"),
        "--kills",
        "50",
        "--case",
        "14",
        "--case",
        "15",
    ]
    line += ["--output", str(tmp_path / "torture.json")]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "torture.json").read_text())["host"]["kills"] >= 50
