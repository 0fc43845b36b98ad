"""Least squares: as accurate as NumPy's for condition numbers up to 1e12, by few reads, and else refused."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import BudgetError, InputError
from oocgemm.jobs import row_slices
from oocgemm.jobs.orthonormal import QRFactors, inverted, norm
from oocgemm.jobs.run import run_request
from tests.support.backends_here import BACKENDS, running_on
from tests.support.command import command
from tests.support.plink import write_bed
from tests.support.suite import each_value, examples

Array = Any
EPS = float(np.finfo(np.float64).eps)
ON_HOST: dict[str, Any] = {"backend": "host"}


def conditioned(
    condition: float, rows: int, cols: int, seed: int, *, shape: str = "graded"
) -> tuple[Array, Array]:
    """Draw X with a condition number, and an orthonormal basis of its columns.

    Singular values are "graded", or all 1 but the last one; "columns" have lengths that differ as much.
    """
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((n, cols)))[0] for n in (rows, cols))
    if shape == "columns":
        return left * np.geomspace(1, 1 / condition, cols), left
    values = np.geomspace(1, 1 / condition, cols)
    if shape == "last":
        values[:-1] = 1
    return left * values @ right.T, left


def bound(x: Array, y: Array, b: Array) -> Array:
    """Return the accuracy that is asked for, relative to |b|: of each column of Y."""
    values = np.linalg.svd(x, compute_uv=False)
    condition, residual = values[0] / values[-1], np.linalg.norm(y - x @ b, axis=0)
    return 100 * EPS * (condition + condition**2 * residual / (values[0] * np.linalg.norm(b, axis=0)))


def error(found: Array, b: Array) -> Array:
    return np.linalg.norm(found - b, axis=0) / np.linalg.norm(b, axis=0)


@settings(max_examples=examples(120, quick=40), deadline=None)
@given(
    exponent=st.floats(0, 12),
    cols=st.integers(2, 24),
    shape=st.sampled_from(["graded", "last", "columns"]),
    residual=st.sampled_from([0.0, 1e-9, 1e-3, 1.0]),
    seed=st.integers(0, 999),
)
def test_solutions_are_as_accurate_as_those_of_numpy(
    exponent: float, cols: int, shape: str, residual: float, seed: int
) -> None:
    x, left = conditioned(10**exponent, 300, cols, seed, shape=shape)
    rng = np.random.default_rng(seed)
    y = x @ rng.standard_normal((cols, 2))
    rest = rng.standard_normal((300, 2))
    rest -= left @ (left.T @ rest)
    y += residual * np.linalg.norm(y) * rest / np.linalg.norm(rest)
    expected = np.linalg.lstsq(x, y, rcond=0)[0]
    allowed = bound(x, y, expected)
    found = oocgemm.lstsq(x, y, **ON_HOST)
    assert (error(found.coefficients, expected) <= allowed)[allowed < 0.1].all()
    assert found.passes <= (2 if exponent <= 5 or shape == "columns" else 4)
    values = np.linalg.svd(x, compute_uv=False)
    assert 0.5 < found.condition * values[-1] / values[0] < 1.5
    if residual:
        squares = np.square(y - x @ expected).sum(axis=0)
        np.testing.assert_allclose(found.residual_ss, squares, rtol=1e-4)


@pytest.mark.parametrize("exponent", [0, 2, 4, 6])
def test_one_read_has_errors_of_the_square_of_the_condition_number(exponent: int) -> None:
    x, _ = conditioned(10.0**exponent, 400, 12, exponent)
    b = np.ones((12, 1))
    found = oocgemm.lstsq(x, x @ b, refine=False, **ON_HOST)
    assert found.passes == 1
    assert error(found.coefficients, b) <= 100 * EPS * 10 ** (2 * exponent)


@each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("condition", [1e2, 1e10])
@pytest.mark.parametrize("intercept", [False, True])
def test_every_backend_solves(backend: str, condition: float, intercept: bool) -> None:
    x, _ = conditioned(condition, 200, 9, 1)
    weights = np.arange(200) % 4 / 2  # rows of weight 0 do not count
    y = x @ np.arange(1.0, 10) + 3 * intercept
    y[weights == 0] = 1e3
    with running_on(backend) as options:
        given: dict[str, Any] = {"weights": weights, "intercept": intercept, "verify": True}
        found = oocgemm.lstsq(x, y, **given, **options)
        two = oocgemm.lstsq(x, y, devices="0,0", **given, **options)
    np.testing.assert_allclose(found.coefficients, np.arange(1.0, 10), rtol=1e-13 * condition)
    np.testing.assert_allclose(found.intercept, 3 * intercept, rtol=1e-9, atol=1e-9)
    assert found.residual_ss < 1e-12
    np.testing.assert_allclose(two.coefficients, found.coefficients, rtol=1e-13 * condition)


@pytest.mark.parametrize(
    ("kinds", "rounded"),
    [(("float32", "float64"), 1e-12), (("int8", "int16"), 1e-12), (("uint8",) * 2, 1e-12)],
)
def test_operands_may_have_any_real_dtypes(kinds: tuple[str, str], rounded: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    x, y = (
        rng.integers(0, 9, shape).astype(kind) for shape, kind in zip(((60, 5), (60, 2)), kinds, strict=True)
    )
    zarr.create_array(f"{tmp_path}/x.zarr", data=x, chunks=(16, 3))
    np.save(tmp_path / "y.npy", y)
    found = oocgemm.lstsq(f"{tmp_path}/x.zarr", tmp_path / "y.npy", **ON_HOST)
    expected = np.linalg.lstsq(x.astype(float), y.astype(float))
    np.testing.assert_allclose(found.coefficients, expected[0], rtol=rounded)
    np.testing.assert_allclose(found.residual_ss, expected[1], rtol=rounded)


def test_missing_elements_are_refused_before_a_result_is_written(tmp_path: Path) -> None:
    x = np.ones((20, 2))
    x[:, 1] = np.arange(20)
    y = np.arange(20.0)
    out = tmp_path / "out.zarr"
    x[3, 1] = np.nan
    with pytest.raises(InputError, match="column 1 of X is nan"):
        oocgemm.lstsq(x, y, out, **ON_HOST)
    x[3, 1] = 3
    y[4] = np.inf
    with pytest.raises(InputError, match="column 0 of Y is"):
        oocgemm.lstsq(x, y, out, **ON_HOST)
    assert not [*tmp_path.iterdir()]


def test_declared_elements_are_decoded(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(-99, 99, (50, 4)).astype("int16")
    packed = zarr.create_array(
        f"{tmp_path}/x.zarr", data=x, attributes={"scale_factor": 0.5, "_FillValue": -1000}
    )
    y = (x * 0.5) @ np.arange(4.0)
    found = oocgemm.lstsq(f"{tmp_path}/x.zarr", y.astype("float32"), **ON_HOST)
    np.testing.assert_allclose(found.coefficients, np.arange(4.0), atol=1e-6)
    packed[3, 2] = -1000
    with pytest.raises(oocgemm.OocGemmError, match=r"\[3, 2\]"):
        oocgemm.lstsq(f"{tmp_path}/x.zarr", y, **ON_HOST)


def dependent(rank_gap: float) -> Array:
    x = np.random.default_rng(2).standard_normal((100, 6))
    x[:, 4] = x[:, 1] - x[:, 2] + rank_gap * x[:, 4]
    return x


def test_dependent_columns_are_refused_with_numbers() -> None:
    y = np.ones(100)
    with pytest.raises(
        InputError, match=r"condition number of at least [\d.e+]+, and 4 reads .* 1e12: column"
    ):
        oocgemm.lstsq(dependent(0), y, **ON_HOST)
    with pytest.raises(
        InputError, match=r"at least [\d.e+]+, and one read .* about 1e7: .* pass refine=True"
    ):
        oocgemm.lstsq(dependent(1e-9), y, refine=False, **ON_HOST)
    oocgemm.lstsq(dependent(1e-9), y, **ON_HOST)
    alike = np.random.default_rng(0).standard_normal((100, 3))
    with pytest.raises(InputError, match=r"column [12] of X is nearly"):
        oocgemm.lstsq(alike[:, [0, 1, 1]], y, **ON_HOST)
    with pytest.raises(InputError, match="sum of squares of column 1 of X is 0"):
        oocgemm.lstsq(np.eye(5)[:, :2] * [1, 0], np.ones(5), **ON_HOST)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((np.ones((5, 2)), np.ones(4)), {}, "X has 5 rows, and Y has 4"),
        ((np.ones((2, 3)), np.ones(2)), {}, "X has 2 rows for 3 coefficients"),
        ((np.ones((3, 3)), np.ones(3)), {"intercept": True}, "X has 3 rows for 4 coefficients"),
        ((np.ones((5, 2)) * 1j, np.ones(5)), {}, "X is of dtype complex128"),
        ((np.ones((5, 2)), np.ones(5)), {"weights": [1, 2]}, r"weights have the shape \(2,\)"),
        ((np.ones((5, 2)), np.ones(5)), {"weights": [1, 2, 3, 4, -1]}, r"weights\[4\] = -1"),
        ((np.ones((5, 2)), np.ones(5)), {"weights": [1, 2, np.nan, 4, 1]}, r"weights\[2\] = nan"),
        ((np.ones((5, 0)), np.ones(5)), {}, "X has 0 columns"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        oocgemm.lstsq(*arguments, **options | ON_HOST)


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), True, [1, 0], [], [[1.0]]])
def test_wrong_penalties_are_refused(alpha: Any) -> None:
    with pytest.raises(InputError, match="alpha"):
        oocgemm.ridge(np.eye(4), np.ones(4), alpha, **ON_HOST)


@settings(max_examples=examples(60, quick=20), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 20)),
    alphas=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4),
    intercept=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 999),
)
def test_penalties_are_as_rows_below_x(
    shape: tuple[int, int], alphas: list[float], intercept: bool, weighted: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal(shape), rng.standard_normal((shape[0], 2))
    weights = rng.random(shape[0]) + 0.1 if weighted else np.ones(shape[0])
    found = oocgemm.ridge(x, y, alphas, intercept=intercept, weights=weights if weighted else None, **ON_HOST)
    assert found.passes == 2
    roots, ones = np.sqrt(weights)[:, None], np.ones((shape[0], int(intercept)))
    design = np.hstack([ones, x])
    for at, alpha in enumerate(alphas):
        penalty = np.hstack([np.zeros((shape[1], int(intercept))), np.sqrt(alpha) * np.eye(shape[1])])
        stacked = np.vstack([roots * design, penalty])
        right = np.vstack([roots * y, np.zeros((shape[1], 2))])
        expected = np.linalg.lstsq(stacked, right)[0]
        np.testing.assert_allclose(found.coefficients[at], expected[int(intercept) :], rtol=1e-9, atol=1e-10)
        if intercept:
            np.testing.assert_allclose(found.intercept[at], expected[0], rtol=1e-9, atol=1e-10)
        squares = np.square(roots * (y - design @ expected)).sum(axis=0)
        np.testing.assert_allclose(found.residual_ss[at], squares, rtol=1e-9, atol=1e-10)


def test_several_penalties_take_no_further_reads(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((300, 20))
    zarr.create_array(f"{tmp_path}/x.zarr", data=x, chunks=(50, 20))
    y, read, run = x.sum(axis=1), list[int](), run_request

    def counted(request: Any) -> Any:
        result = run(request)
        spans = result.timeline.spans
        read.append(
            sum(each.bytes for each in spans if each.kind in ("read", "decode") and each.operand == "A")
        )
        return result

    with patch.object(row_slices, "run_request", counted):
        oocgemm.ridge(f"{tmp_path}/x.zarr", y, [0.1, 1, 10], **ON_HOST)
    assert read == [x.nbytes + y.nbytes] * 2


def test_budgets_bound_the_matrices_between_reads() -> None:
    x = np.random.default_rng(0).standard_normal((1100, 1000))
    with pytest.raises(BudgetError, match="1000 coefficients need") as raised:
        oocgemm.lstsq(x, np.ones(1100), memory="64MiB", **ON_HOST)
    assert raised.value.least is not None
    assert oocgemm.lstsq(x, np.ones(1100), memory=raised.value.least + (64 << 20), **ON_HOST).passes == 2


def test_commands_save_what_the_functions_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 3)), rng.standard_normal((40, 2))
    weights = rng.random(40)
    for name, array in (("x", x), ("y", y), ("w", weights)):
        np.save(f"{name}.npy", array)
    done = command(
        "lstsq", "x.npy", "y.npy", "m.zarr", "--intercept", "--weights", "w.npy", "--backend", "host"
    )
    assert done.code == 0, done.err
    assert "X was read 2 times" in done.out
    found = oocgemm.lstsq(x, y, intercept=True, weights=weights, **ON_HOST)
    for name in ("coefficients", "intercept", "residual_ss", "condition"):
        stored = zarr.open_array(f"m.zarr/{name}", mode="r")[:]
        np.testing.assert_array_equal(stored, np.atleast_1d(getattr(found, name)))
    done = command("ridge", "x.npy", "y.npy", "r.zarr", "--alpha", "0.5,2", "--json", "--backend", "host")
    assert done.code == 0, done.err
    np.testing.assert_array_equal(
        zarr.open_array("r.zarr/coefficients", mode="r")[:],
        oocgemm.ridge(x, y, [0.5, 2], **ON_HOST).coefficients,
    )
    assert command("lstsq", "x.npy", "y.npy", "m.zarr").code == 2
    assert command("ridge", "x.npy", "y.npy", "n.zarr", "--alpha", "a").code == 2
    assert {path.name for path in tmp_path.iterdir()} == {"x.npy", "y.npy", "w.npy", "m.zarr", "r.zarr"}


def test_triangles_are_inverted_in_blocks() -> None:
    lower = np.tril(np.random.default_rng(0).standard_normal((300, 300))) + 30 * np.eye(300)
    np.testing.assert_allclose(inverted(lower) @ lower, np.eye(300), atol=1e-12)


def test_norms_are_estimated() -> None:
    x = np.random.default_rng(1).standard_normal((40, 30))
    assert 0.9 < norm(x) / np.linalg.norm(x, 2) <= 1 + 1e-12
    assert norm(np.zeros((3, 3))) == 0


def test_errors_of_factors_are_estimated() -> None:
    for exponent in (2, 5, 9, 11):
        x, _ = conditioned(10.0**exponent, 200, 10, exponent)
        factors = QRFactors.of(x.T @ x)
        for _ in range(3):
            basis = x @ factors.p
            true = np.abs(np.square(basis).sum(axis=0) - 1)
            assert (true <= factors.errors + 1e-13)[factors.errors < 1].all()
            factors = factors.refined(np.ones(10, bool), x.T @ basis)
        np.testing.assert_allclose(np.square(x @ factors.p).sum(axis=0), 1, atol=0.01)


@pytest.mark.parametrize("kind", ["float64", "int8"])
def test_genotypes_must_be_known(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    x = rng.integers(0, 3, (60, 7)).astype(np.int8)
    y = (x @ np.arange(7)).astype(kind)
    known = write_bed(tmp_path / "known.bed", x)
    np.testing.assert_allclose(
        oocgemm.lstsq(known, y, **ON_HOST).coefficients, np.linalg.lstsq(x.astype(float), y)[0], atol=1e-10
    )
    x[5, 2] = -1
    holes = write_bed(tmp_path / "holes.bed", x)
    with pytest.raises(InputError, match="1 missing genotypes"):
        oocgemm.lstsq(holes, y, **ON_HOST)
    with pytest.raises(TypeError, match="unexpected option 'missing'"):
        oocgemm.lstsq(holes, y, missing=-1, **ON_HOST)  # type: ignore[call-overload]
    found = oocgemm.lstsq(holes, y, decode=False, **ON_HOST)
    np.testing.assert_allclose(found.coefficients, np.linalg.lstsq(x.astype(float), y)[0], atol=1e-10)
    # In `svd`, as in `pca`, they are replaced by the means of their variants.
    mean = x[x[:, 2] >= 0, 2].mean()
    filled = np.where(x < 0, mean, x)
    values = np.linalg.svd(filled, compute_uv=False)
    np.testing.assert_allclose(oocgemm.svd(holes, **ON_HOST).singular_values, values, rtol=1e-12)
