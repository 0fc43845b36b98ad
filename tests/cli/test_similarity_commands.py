"""The commands similarity, corr and cov."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from tests.support.command import command

X = np.random.default_rng(5).standard_normal((60, 12))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    zarr.create_array("x.zarr", data=X, chunks=(20, 12))


def saved(group: str, name: str) -> Any:
    return zarr.open_array(f"{group}/{name}", mode="r")[:]


def test_the_most_similar_rows_are_saved() -> None:
    done = command("similarity", "x.zarr", "best.zarr", "--topk", "4", "--backend", "host")
    assert done.code == 0, done.err
    assert "C: best.zarr" in done.out
    found = oocgemm.similarity(X, topk=4, backend="host")
    for name in ("indices", "scores"):
        np.testing.assert_array_equal(saved("best.zarr", name), getattr(found, name))


def test_pairs_above_a_threshold_are_saved() -> None:
    given = "--threshold", "0.4", "--metric", "dot", "--include-self", "--backend", "host", "--quiet"
    done = command("similarity", "x.zarr", "pairs.zarr", *given)
    assert (done.code, done.out) == (0, ""), done.err
    found = oocgemm.similarity(X, threshold=0.4, metric="dot", exclude_self=False, backend="host")
    for name in ("indptr", "indices", "scores"):
        np.testing.assert_array_equal(saved("pairs.zarr", name), getattr(found, name))


def test_correlations_and_covariances_are_stored() -> None:
    for name, *given in (("r.npy",), ("pairs.zarr", "--threshold", "0.5"), ("best.zarr", "--topk", "2")):
        done = command("corr", "x.zarr", name, *given, "--backend", "host", "--json")
        assert done.json()["c"] == name
    np.testing.assert_allclose(np.load("r.npy"), np.corrcoef(X), atol=1e-12)
    assert command("cov", "x.zarr", "v.zarr", "--axis", "1", "--ddof", "0", "--backend", "host").code == 0
    np.testing.assert_allclose(saved(".", "v.zarr"), np.cov(X.T, ddof=0), atol=1e-12)
    assert saved("pairs.zarr", "indptr").shape == (61,)
    assert saved("best.zarr", "indices").shape == (60, 2)


@pytest.mark.parametrize(
    "given",
    [
        ("similarity", "x.zarr", "o.zarr", "--topk", "4"),
        ("similarity", "x.zarr", "o.zarr", "--threshold", "0.4"),
        ("corr", "x.zarr", "o.zarr", "--topk", "4"),
        ("corr", "x.zarr", "o.zarr", "--threshold", "0.4"),
    ],
)
def test_a_verified_selection_says_what_was_computed_again(given: tuple[str, ...]) -> None:
    done = command(*given, "--backend", "host", "--verify")
    assert done.code == 0, done.err
    assert "checked 1 tile in 1 block; recomputed 0" in done.out
    assert re.search(r"computed \d+ elements again in ", done.out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("similarity", "x.zarr", "x.zarr", "--topk", "1"), "something exists at x.zarr"),
        (("similarity", "x.zarr", "s3://b/o", "--topk", "1"), "written to local paths only"),
        (("similarity", "x.zarr", "o.npy", "--topk", "1"), "o.npy would be a .npy file, but results of this"),
        (("corr", "x.zarr", "o.h5", "--topk", "1"), "arrays in a zarr group: give o.zarr"),
        (("similarity", "x.zarr", "o.zarr"), "pass either topk"),
        (("corr", "x.zarr", "o.zarr", "--topk", "2", "--resume"), "corr does not take the option resume"),
        (("corr", "x.zarr", "x.zarr", "--topk", "2"), "something exists at x.zarr"),
        (("cov", "x.zarr", "o.zarr", "--ddof", "12"), "divides by 0"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = command(*arguments, "--backend", "host")
    assert done.code == 2, done
    assert message in done.err
    assert done.err.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["x.zarr"]
