"""Spearman's correlations: those of ranks, with ties averaged, as of `scipy.stats.spearmanr`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import InputError
from oocgemm.jobs.ranks import ranks
from tests.support.backends_here import BACKENDS, running_on
from tests.support.command import command
from tests.support.suite import each_value, examples

Array = Any
ON_HOST: dict[str, Any] = {"backend": "host"}


def ranked(x: Array) -> Array:
    """Rank each row by comparing all pairs of its elements."""
    below = (x[:, None, :] < x[:, :, None]).sum(axis=2)
    equal = (x[:, None, :] == x[:, :, None]).sum(axis=2)
    return below + (equal + 1) / 2


@settings(max_examples=examples(100, quick=30), deadline=None)
@given(
    shape=st.tuples(st.integers(2, 30), st.integers(2, 30)),
    kind=st.sampled_from(["float64", "float32", "int8", "uint8", "bool", "int32"]),
    axis=st.integers(0, 1),
    seed=st.integers(0, 999),
)
def test_coefficients_are_those_of_ranks(shape: tuple[int, int], kind: str, axis: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2 if kind == "bool" else 9, shape).astype(kind)
    lines = x.T if axis else x
    np.testing.assert_array_equal(ranks(np.ascontiguousarray(lines)), ranked(lines))
    kept = ranked(lines).std(axis=1) > 0
    if kept.sum() < 2:
        return
    found = oocgemm.corr(np.compress(kept, x, axis=axis), axis=axis, method="spearman", **ON_HOST).out
    tolerance = 1e-12 if kind == "float64" else 1e-5
    np.testing.assert_allclose(found, np.corrcoef(ranked(lines)[kept]), atol=tolerance)


@each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", [0, 1])
def test_every_backend_and_operand(backend: str, axis: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((40, 40 - 4 * n)).round(1) for n in range(2))
    if axis == 0:
        x, y = x.T, y.T
    zarr.create_array(f"{tmp_path}/x.zarr", data=x, chunks=(7, 9))
    np.save(tmp_path / "y.npy", y)
    one, other = (ranked(each.T if axis else each) for each in (x, y))
    expected = np.corrcoef(one, other)[:40, 40:]
    with running_on(backend) as options:
        given: dict[str, Any] = {"y": tmp_path / "y.npy", "axis": axis, "method": "spearman"} | options
        found = oocgemm.corr(f"{tmp_path}/x.zarr", **given).out
        np.testing.assert_allclose(found, expected, atol=1e-12)
        out = tmp_path / "c.npy"
        oocgemm.corr(f"{tmp_path}/x.zarr", out, host_memory="64MiB", verify=True, **given)
        np.testing.assert_allclose(np.load(out), expected, atol=1e-12)
        best = oocgemm.corr(f"{tmp_path}/x.zarr", topk=2, **given)
    np.testing.assert_allclose(best.scores, np.sort(expected, axis=1)[:, :-3:-1], atol=1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.npy", "x.zarr", "y.npy"]


def test_workers_and_devices_read_the_ranks(tmp_path: Path) -> None:
    x = np.random.default_rng(2).standard_normal((30, 25)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    expected = np.corrcoef(ranked(x))
    for options in ({"workers": 2, "memory": "400MiB"}, {"devices": "0,0"}):
        out = tmp_path / f"c{len(options)}.npy"
        oocgemm.corr(tmp_path / "x.npy", out, method="spearman", **options, **ON_HOST)
        np.testing.assert_allclose(np.load(out), expected, atol=1e-5)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("oocgemm-ranks")]


def test_rows_with_nan_are_refused() -> None:
    x = np.random.default_rng(3).standard_normal((4, 9))
    x[2, 3] = np.inf  # it has a rank
    found = oocgemm.corr(x, method="spearman", **ON_HOST).out
    np.testing.assert_allclose(found, np.corrcoef(ranked(x)), atol=1e-12)
    x[1, 3] = np.nan
    with pytest.raises(InputError, match="row 1 of X has elements that are Inf or NaN"):
        oocgemm.corr(x, method="spearman", **ON_HOST)


def test_what_ranks_exclude_is_refused(tmp_path: Path) -> None:
    x, out = np.arange(12.0).reshape(3, 4), tmp_path / "c.npy"
    options: Any
    for options, name in (
        ({"pairwise": True}, "pairwise"),
        ({"transform": oocgemm.Transform(log1p=True)}, "transform"),
        ({"resume": True}, "resume"),
    ):
        with pytest.raises(InputError, match=f"drop {name}"):
            oocgemm.corr(x, out, method="spearman", **options, **ON_HOST)
    with pytest.raises(InputError, match="complex numbers have no order"):
        oocgemm.corr(x * 1j, out, method="spearman", **ON_HOST)
    with pytest.raises(InputError, match="choose one of pearson, spearman"):
        oocgemm.corr(x, out, method="kendall", **ON_HOST)
    assert isinstance(oocgemm.corr(x, method="spearman", dry_run=True, **ON_HOST), oocgemm.Plan)
    assert not [*tmp_path.iterdir()]


def test_the_command_takes_the_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(4).integers(0, 5, (6, 20)).astype("float64")
    np.save("x.npy", x)
    done = command(
        "corr", "x.npy", "c.npy", "--method", "spearman", "--memory", "100MiB", "--backend", "host"
    )
    assert done.code == 0, done.err
    np.testing.assert_allclose(np.load("c.npy"), np.corrcoef(ranked(x)), atol=1e-12)
    done = command(
        "corr", "x.npy", "p.zarr", "--method", "spearman", "--threshold", "0.1", "--backend", "host"
    )
    assert done.code == 0, done.err
