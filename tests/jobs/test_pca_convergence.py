"""The randomized method of `pca` says how far components are from convergence, and when it stops."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import DataWarning, InputError
from oocgemm.jobs import row_slices
from oocgemm.jobs import run as running
from tests.jobs.test_pca import KilledError, low_rank
from tests.support.backends_here import ENGINES, Engine, running_on
from tests.support.command import command
from tests.support.suite import each_value

Array = NDArray[Any]
pca = partial(oocgemm.pca, method="randomized")
RNG = np.random.default_rng(5)


def flat(rows: int = 200, cols: int = 60) -> Array:
    """Return counts without structure, whose singular values hardly differ."""
    return np.asarray(RNG.poisson(3, (rows, cols)), np.float32)


def decaying(power: float, rows: int = 150, cols: int = 60) -> Array:
    left, right = (np.linalg.qr(RNG.standard_normal((n, cols)))[0] for n in (rows, cols))
    return np.asarray((left / np.arange(1, cols + 1) ** power) @ right.T)


MATRICES = {"flat": flat(), "slow": decaying(0.5), "fast": decaying(2), "low rank": low_rank(150, 60)}


def changed_by(x: Array, transform: oocgemm.Transform | None, *, center: bool) -> Array:
    wide = x.astype(np.float64)
    if transform is not None and transform.missing is not None:
        wide = np.where(wide == transform.missing, np.nan, wide)
        wide = np.where(np.isnan(wide), np.nanmean(wide, 0), wide)
    if center:
        wide = wide - wide.mean(0)
    return np.asarray(wide / wide.std(0) if transform is not None and transform.scale is not None else wide)


def expected(x: Array, found: oocgemm.PCA) -> Array:
    """Return the residuals of components of a transformed matrix."""
    v, s = found.components.astype(np.float64).T, found.singular_values
    return np.asarray(np.linalg.norm(x.T @ (x @ v) - v * s**2, axis=0) / s[0] ** 2)


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.filterwarnings("ignore::oocgemm.DataWarning")
def test_residuals_are_those_of_the_components(
    engine: Engine, name: str, iterations: int, dtype: str
) -> None:
    x = MATRICES[name].astype(dtype)
    with running_on(engine) as options:
        for center in (True, False):
            found = pca(x, 6, center=center, iterations=iterations, tol=0, **options)
            assert found.residuals.shape == found.errors.shape == (6,)
            right = expected(changed_by(x, None, center=center), found)
            np.testing.assert_allclose(found.residuals, right, atol=2e-6 if dtype == "float32" else 1e-13)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("mean", [0, 1000])
@pytest.mark.filterwarnings("ignore::oocgemm.DataWarning")
def test_residuals_of_transformed_elements(center: bool, mean: float) -> None:
    x = (low_rank(300, 60, mean=0) + mean).astype(np.float32)
    found = pca(x, 4, center=center, iterations=2, tol=0, backend="host")
    np.testing.assert_allclose(
        found.residuals, expected(changed_by(x, None, center=center), found), atol=1e-5
    )
    if center:
        genotypes = RNG.integers(-1, 3, (200, 60)).astype(np.int8)
        for operand, transform in (
            (x, oocgemm.Transform(scale="k")),
            (genotypes, oocgemm.Transform(missing=-1)),
        ):
            found = pca(operand, 4, transform=transform, iterations=2, tol=0, backend="host")
            right = expected(changed_by(operand, transform, center=True), found)
            np.testing.assert_allclose(found.residuals, right, atol=1e-5)


@each_value
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("tol", [0.01, 0.3])
def test_components_that_converged_are_near_the_exact_ones(name: str, dtype: str, tol: float) -> None:
    x = MATRICES[name].astype(dtype)
    wide = changed_by(x, None, center=True)
    _, exact, right = np.linalg.svd(wide, full_matrices=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pca(x, 6, iterations=200, tol=tol, backend="host")
    assert found.converged
    assert (found.errors < tol).all()
    assert 3 <= found.passes < 200
    sines = np.sqrt(np.maximum(0, 1 - np.square((found.components * right[:6]).sum(1))))
    rounding = 2e-3 if dtype == "float32" else 1e-6
    assert (sines < tol + rounding).all()
    np.testing.assert_allclose(found.singular_values, exact[:6], rtol=tol**2 + 1e-5)
    # One pass less is not enough.
    if found.passes > 3:
        with pytest.warns(DataWarning, match="have not converged"):
            pca(x, 6, iterations=found.passes - 1, tol=tol, backend="host")


@pytest.mark.parametrize("shape", [(1200, 300), (100, 300)])
def test_a_flat_spectrum_is_reported_by_default(shape: tuple[int, int]) -> None:
    with pytest.warns(DataWarning) as caught:
        found = pca(flat(*shape), 20, backend="host")
    assert len(caught) == 1
    wrong = (found.errors >= 0.01).sum()
    message = str(caught[0].message)
    assert message.startswith(f"{wrong} of 20 components have not converged after 6 iterations")
    assert f"is {found.errors.max():.2g} of the gap to its neighbours, and tol is 0.01" in message
    assert (found.converged, found.passes) == (False, 6)


def test_the_remedies_of_the_warning_work() -> None:
    x = MATRICES["slow"].astype(np.float32)
    with pytest.warns(
        DataWarning, match=r"Pass more iterations, such as iterations=6 \(--iterations 6\), fewer"
    ):
        pca(x, 8, iterations=3, backend="host")
    for k, more in ((8, {"iterations": 48}), (1, {"iterations": 9}), (8, {"iterations": 3, "tol": 100.0})):
        assert pca(x, k, backend="host", **more).converged


def test_without_a_tolerance_x_is_read_as_often_as_asked() -> None:
    for name, x in MATRICES.items():
        found = pca(x, 6, tol=0, iterations=5, backend="host")
        assert found.passes == 5, name


def test_equal_singular_values_converge() -> None:
    """Equal singular values have no vectors of their own: any of the space they span will do."""
    for values in (np.ones(30), np.repeat([5.0, 2, 1], 10), np.r_[3, 3, np.zeros(28)]):
        left, right = (np.linalg.qr(RNG.standard_normal((n, 30)))[0] for n in (90, 30))
        for x in ((left * values) @ right.T, np.diag(values)):
            for dtype in ("float32", "float64"):
                found = pca(x.astype(dtype), 4, center=False, iterations=40, backend="host")
                assert found.converged
                np.testing.assert_allclose(found.singular_values, values[:4], atol=1e-4)


def test_all_of_a_small_matrix_converges() -> None:
    for shape in ((5, 30), (30, 5), (1, 1), (1, 7), (7, 1)):
        x = RNG.standard_normal(shape)
        found = pca(x, min(shape), center=False, backend="host")
        assert found.converged
        np.testing.assert_allclose(found.singular_values, np.linalg.svd(x, compute_uv=False), rtol=1e-9)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_killed_run_ends_after_the_same_pass(tmp_path: Path, passes: int) -> None:
    x = MATRICES["slow"].astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    given: dict[str, Any] = {"scores": True, "backend": "host", "iterations": 30}
    whole = pca(tmp_path / "x.npy", 6, **given)
    assert 3 < whole.passes < 31
    run, made, out = running.run_request, 0, tmp_path / "p.zarr"

    def killed(request: Any) -> oocgemm.Result:
        nonlocal made
        made += 1
        if made > passes:
            raise KilledError
        return run(request)

    with patch.object(row_slices, "run_request", killed), pytest.raises(KilledError):
        pca(tmp_path / "x.npy", 6, out, **given)
    with pytest.raises(InputError, match="other arguments \\(tol\\)"):
        pca(tmp_path / "x.npy", 6, out, resume=True, tol=0.02, **given)
    with patch.object(row_slices, "run_request", side_effect=run) as counted:
        found = pca(tmp_path / "x.npy", 6, out, resume=True, **given)
    assert counted.call_count == whole.passes - passes  # the last one computes the scores
    for name in ("components", "singular_values", "residuals", "errors", "scores"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
        np.testing.assert_array_equal(zarr.open_array(f"{out}/{name}", mode="r")[:], getattr(whole, name))
    assert (found.passes, found.converged) == (whole.passes, whole.converged)


@pytest.mark.filterwarnings("always::oocgemm.DataWarning")
def test_the_command_prints_residuals_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", MATRICES["flat"])
    line = "pca", "x.npy", "--components", "4", "--method", "randomized", "--backend", "host"
    done = command(*line[:2], "p.zarr", *line[2:])
    with pytest.warns(DataWarning):
        found = pca("x.npy", 4, backend="host")
    listed = ", ".join(f"{number:.2g}" for number in found.residuals)
    assert f"\nresiduals:       {listed}\n" in done.out
    assert done.err.count("have not converged after 6 iterations") == 1
    assert len([text for text in done.err.splitlines() if "converged" in text]) == 1
    quiet = command(*line[:2], "q.zarr", *line[2:], "--quiet")
    assert (quiet.code, quiet.out, quiet.err.count("have not converged")) == (0, "", 1)
    shown = command(*line[:2], "r.zarr", *line[2:], "--json").json()
    assert (shown["residuals"], shown["errors"]) == (found.residuals.tolist(), found.errors.tolist())
    assert shown["converged"] is False
    done = command(*line[:2], "s.zarr", *line[2:], "--tol", "1000", "--json")
    assert (done.json()["converged"], done.json()["passes"], done.err) == (True, 3, "")
    assert "X is read at most 9 times" in command(*line, "--iterations", "9", "--dry-run").out
    assert "tol = -1.0: pass a number" in command(*line[:2], "t.zarr", *line[2:], "--tol", "-1").err
