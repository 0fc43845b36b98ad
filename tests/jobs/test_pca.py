"""`pca` finds the components that NumPy's SVD finds, from X as it is stored."""

from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import BudgetError, InputError
from oocgemm.jobs import pca_passes, row_slices
from oocgemm.jobs import run as running
from tests.support.backends_here import BACKENDS, running_on
from tests.support.suite import each_value, examples

Array = NDArray[Any]
METHODS = ["exact", "randomized"]


def low_rank(rows: int, cols: int, rank: int = 12, noise: float = 0.1, mean: float = 3.0) -> Array:
    """Return a matrix of a few large singular values, with columns of other means."""
    rng = np.random.default_rng(rows)
    x = (rng.standard_normal((rows, rank)) * np.linspace(20, 5, rank)) @ rng.standard_normal((rank, cols))
    return np.asarray(x + noise * rng.standard_normal((rows, cols)) + mean * rng.standard_normal(cols))


def check(found: oocgemm.PCA, changed: Array, k: int, rtol: float) -> None:
    """Compare with an exact SVD of the transformed matrix. `rtol` is relative to the first singular value."""
    _, exact, right = np.linalg.svd(changed, full_matrices=False)
    np.testing.assert_allclose(found.singular_values, exact[:k], rtol=0, atol=rtol * exact[0])
    np.testing.assert_allclose(found.explained_variance, found.singular_values**2 / (len(changed) - 1))
    wide = found.components.astype(np.float64)
    np.testing.assert_allclose(wide @ wide.T, np.eye(k), atol=10 * rtol)
    assert (wide[np.arange(k), np.abs(wide).argmax(1)] > 0).all()
    # The components span the same space. Each alone is as exact as its singular value is apart from others.
    np.testing.assert_allclose(np.linalg.norm(wide @ right[:k].T, axis=1), 1, atol=1e3 * rtol)
    if found.scores is not None:
        scale = exact[0] * rtol * 100
        np.testing.assert_allclose(found.scores, changed @ wide.T, rtol=0, atol=scale)


@each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("method", ["auto", "exact", "randomized"])
def test_components_are_those_of_an_exact_svd(backend: str, dtype: str, center: bool, method: str) -> None:
    x = low_rank(300, 80).astype(dtype)
    wide = x.astype(np.float64)
    with running_on(backend) as options:
        found = oocgemm.pca(x, 12, center=center, scores=True, tol=0, method=method, **options)
    check(found, wide - wide.mean(0) if center else wide, 12, 1e-6 if dtype == "float32" else 1e-12)
    np.testing.assert_allclose(found.mean, wide.mean(0) if center else 0, atol=1e-5)
    assert found.passes == 7
    assert found.components.dtype == dtype


@each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("method", METHODS)
def test_transforms_are_those_of_the_elements(backend: str, order: Any, method: str) -> None:
    x = np.abs(low_rank(200, 40)).astype(np.float32)
    wide = np.log1p(x.astype(np.float64))
    transform = oocgemm.Transform(log1p=True, scale="k")
    with running_on(backend) as options:
        given = np.asarray(x, order=order)
        how: dict[str, Any] = {"transform": transform, "iterations": 9, "method": method}
        found = oocgemm.pca(given, 5, scores=True, **how, **options)
    check(found, (wide - wide.mean(0)) / wide.std(0), 5, 1e-6)
    np.testing.assert_allclose(found.mean, wide.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.scale, wide.std(0), rtol=1e-6)


@each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [240, 60])
def test_missing_genotypes_become_means(backend: str, method: str, rows: int) -> None:
    rng = np.random.default_rng(2)
    share = rng.uniform(0.1, 0.5, (3, 90))[np.arange(rows) % 3]
    x = rng.binomial(2, share).astype(np.int8)
    x[rng.random(x.shape) < 0.05] = -1
    mean = np.ma.masked_equal(x, -1).mean(0).data
    z = np.where(x == -1, 0, x - mean) / np.sqrt(mean * (1 - mean / 2))
    transform = oocgemm.Transform(missing=-1, scale="hwe")
    with running_on(backend) as options:
        how: dict[str, Any] = {"transform": transform, "iterations": 10, "method": method}
        found = oocgemm.pca(x, 2, scores=True, **how, **options)
    check(found, z, 2, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_given_centers_need_not_be_means(backend: str, method: str) -> None:
    x = low_rank(150, 30).astype(np.float32)
    center, scale = np.arange(30.0) - 12, np.arange(30.0) % 4 + 1
    with running_on(backend) as options:
        transform = oocgemm.Transform(center=center, scale=scale)
        how: dict[str, Any] = {"transform": transform, "iterations": 9, "method": method}
        found = oocgemm.pca(x, 4, scores=True, **how, **options)
    check(found, (x.astype(np.float64) - center) / scale, 4, 2e-6)


def test_large_means_do_not_hide_the_components() -> None:
    x = low_rank(500, 60, mean=0)
    x /= x.std()
    for mean in (5.0, 50.0, 1000.0):
        far = (x + mean).astype(np.float32)
        wide = far.astype(np.float64)
        _, exact, _ = np.linalg.svd(wide - wide.mean(0), full_matrices=False)
        for iterations in (1, 6):
            found = oocgemm.pca(far, 11, backend="host", iterations=iterations, tol=0, scores=True)
            rounded = 1e-5 if iterations == 6 else 0.6
            np.testing.assert_allclose(found.singular_values, exact[:11], rtol=rounded)
            assert found.scores is not None
            np.testing.assert_allclose(
                found.scores, (wide - wide.mean(0)) @ found.components.T, atol=1e-5 * exact[0]
            )


@settings(max_examples=examples(30, quick=8), deadline=None)
@given(rows=st.integers(1, 30), cols=st.integers(1, 30), rank=st.integers(0, 5), data=st.data())
@pytest.mark.parametrize("method", METHODS)
def test_matrices_of_any_shape_and_rank(method: str, rows: int, cols: int, rank: int, data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = (rng.integers(-2, 3, (rows, rank)) @ rng.integers(-2, 3, (rank, cols))).astype(np.float64)
    k = data.draw(st.integers(1, min(rows, cols)))
    found = oocgemm.pca(x, k, center=False, backend="host", scores=True, method=method)
    exact = np.linalg.svd(x, compute_uv=False)
    np.testing.assert_allclose(found.singular_values, exact[:k], rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(found.components @ found.components.T, np.eye(k), atol=1e-9)
    if k >= np.linalg.matrix_rank(x):
        assert found.scores is not None
        np.testing.assert_allclose(found.scores @ found.components, x, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_small_singular_values_are_accurate(method: str) -> None:
    rng = np.random.default_rng(8)
    left, right = (np.linalg.qr(rng.standard_normal((n, 30)))[0] for n in (400, 90))
    exact = 10.0 ** -np.linspace(0, 4, 30)
    x = (left * exact) @ right.T
    given: dict[str, Any] = {"center": False, "backend": "host", "method": method}
    wide = oocgemm.pca(x, 20, **given).singular_values
    np.testing.assert_allclose(wide, exact[:20], rtol=1e-10 if method == "randomized" else 1e-9)
    narrow = oocgemm.pca(x.astype(np.float32), 20, **given).singular_values
    np.testing.assert_allclose(narrow, exact[:20], rtol=1e-3)


@pytest.mark.slow
def test_few_reads_suffice_if_singular_values_decay_slowly() -> None:
    rng = np.random.default_rng(1)
    left, right = (np.linalg.qr(rng.standard_normal((n, 500)))[0] for n in (1500, 500))
    exact = 1 / np.sqrt(np.arange(1, 501))
    x = ((left * exact) @ right.T).astype(np.float32)
    errors = []
    for iterations in (1, 3, 6):
        found = oocgemm.pca(x, 30, center=False, backend="host", iterations=iterations, tol=0)
        errors.append(np.max(np.abs(found.singular_values - exact[:30]) / exact[:30]))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 2e-3


def test_a_seed_repeats_every_bit() -> None:
    x = low_rank(200, 40).astype(np.float32)
    given: dict[str, Any] = {"iterations": 2, "backend": "host", "method": "randomized"}
    first, again, other = (oocgemm.pca(x, 3, seed=seed, **given) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.components, again.components)
    assert (first.components != other.components).any()


def test_x_is_read_once_per_iteration(tmp_path: Path) -> None:
    x = low_rank(600, 50).astype(np.float32)
    zarr.create_array(f"{tmp_path}/x.zarr", data=x, chunks=(64, 25))
    read = 0
    run = running.run_request

    def counted(request: Any) -> oocgemm.Result:
        nonlocal read
        result = run(request)
        read += sum(
            span.bytes
            for span in result.timeline.spans
            if span.kind in ("read", "decode") and span.operand == "A"
        )
        return result

    with patch.object(row_slices, "run_request", counted):
        oocgemm.pca(f"{tmp_path}/x.zarr", 5, iterations=4, tol=0, backend="host")
    assert read == 4 * x.nbytes
    planned = oocgemm.plan_pca(f"{tmp_path}/x.zarr", 5, iterations=4, tol=0, backend="host")
    assert planned.bytes_read == read
    assert "X is read at most 4 times" in str(planned)


def test_budgets_cover_the_matrices_between_passes(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((20, 5000), np.float32))
    given: dict[str, Any] = {"backend": "host", "device_memory": "64MiB", "method": "randomized"}
    for call in (oocgemm.plan_pca, oocgemm.pca):
        with pytest.raises(BudgetError, match="host memory 25 MiB cannot hold"):
            cast(Any, call)(tmp_path / "x.npy", 15, host_memory="25MiB", **given)
    planned = oocgemm.plan_pca(tmp_path / "x.npy", 15, host_memory="32MiB", **given)
    width = planned.pass_plan.problem.n
    assert planned.pass_plan.footprint.host_total >= pca_passes.MAX_MATRICES * 8 * 5000 * width


class KilledError(Exception):
    """Stands for a kill between two passes."""


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_a_killed_run_is_resumed_to_the_same_bits(tmp_path: Path, passes: int) -> None:
    x = low_rank(300, 40).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    arguments: dict[str, Any] = {"iterations": 4, "tol": 0, "scores": True, "backend": "host", "seed": 3}
    whole = oocgemm.pca(tmp_path / "x.npy", 6, **arguments)
    run, made = running.run_request, 0

    def killed(request: Any) -> oocgemm.Result:
        nonlocal made
        if made == passes:
            raise KilledError
        made += 1
        return run(request)

    out = tmp_path / "p.zarr"
    with (
        patch.object(row_slices, "run_request", killed),
        pytest.raises(KilledError),
    ):
        oocgemm.pca(tmp_path / "x.npy", 6, out, **arguments)
    assert not out.exists()
    with pytest.raises(InputError, match="there is an unfinished run"):
        oocgemm.pca(tmp_path / "x.npy", 6, out, **arguments)
    with pytest.raises(InputError, match="other arguments \\(seed\\)"):
        oocgemm.pca(tmp_path / "x.npy", 6, out, resume=True, **arguments | {"seed": 4})
    made = 0
    with patch.object(row_slices, "run_request", side_effect=run) as counted:
        found = oocgemm.pca(tmp_path / "x.npy", 6, out, resume=True, **arguments)
    assert counted.call_count == 4 - passes + 1  # the last one computes the scores
    for name in (
        "components",
        "singular_values",
        "explained_variance",
        "mean",
        "scores",
        "residuals",
        "errors",
    ):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
        np.testing.assert_array_equal(zarr.open_array(f"{out}/{name}", mode="r")[:], getattr(whole, name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.zarr", "x.npy"]


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    x = low_rank(40, 20)
    (tmp_path / "p.zarr.pca-state.npz").write_bytes(b"not an archive")
    with pytest.raises(InputError, match="cannot be read"):
        oocgemm.pca(x, 2, tmp_path / "p.zarr", resume=True, backend="host")


def test_bad_input_is_refused(tmp_path: Path) -> None:
    x = low_rank(40, 20)
    broken = x.copy()
    broken[7, 3] = np.nan
    constant = x.copy()
    constant[:, 5] = 2
    (tmp_path / "taken").mkdir()
    t, call = oocgemm.Transform, cast(Any, oocgemm.pca)
    cases: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("k = 21, but X has 40 rows and 20 columns", x, {"k": 21}),
        ("k = 0: pass an integer of at least 1", x, {"k": 0}),
        ("k = True", x, {"k": True}),
        ("iterations = 0", x, {"iterations": 0}),
        ("seed = -1", x, {"seed": -1}),
        *(
            (f"tol = {tol!r}: pass a number of at least 0", x, {"tol": tol})
            for tol in (-1, True, np.inf, "1")
        ),
        ("column 3 of X has elements that are NaN or Inf", broken, {}),
        ("column 3 of X has elements that are Inf or NaN", broken, {"transform": t(scale="k")}),
        ("the scale of column 5 of X is 0", constant, {"transform": t(scale="k")}),
        ("center has 19 elements, and X has 20 columns", x, {"transform": t(center=np.zeros(19))}),
        ("center = False, but the transform has centers", x, {"transform": t(center="k"), "center": False}),
        ("cast = 'float16', but components", x, {"transform": t(cast="float16")}),
        ("transforms are for real operands", x.astype(complex), {}),
        ("something exists at", x, {"out": tmp_path / "taken"}),
        ("can be resumed only if its result is saved", x, {"resume": True}),
    )
    for message, operand, options in cases:
        with pytest.raises(InputError, match=message.replace("(", "\\(")):
            call(operand, **{"k": 3, "backend": "host"} | options)
    with pytest.raises(InputError, match="the reads of X are coordinated by one process"):
        oocgemm.pca(x, 3, workers=2)  # type: ignore[call-overload]


def test_directions_that_rounding_hides_are_left_out() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((30, 6)))[0]
    state = pca_passes.start(30, 6, 0)
    state = pca_passes.advance(state, (basis, basis * np.array([4, 1, 1, 0, 0, 0.0])), 1e-7)
    assert state.found is not None
    np.testing.assert_allclose(state.found.values, [2, 1, 1, 0, 0, 0], rtol=1e-12)
    completed = pca_passes.completed(basis[:, :2], 6)
    np.testing.assert_allclose(completed.T @ completed, np.eye(6), atol=1e-12)
