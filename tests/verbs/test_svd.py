"""Singular values and vectors: as accurate as NumPy's, by few reads, for tall and for wide matrices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import InputError
from tests.support.backends_here import BACKENDS, running_on
from tests.support.command import command
from tests.support.suite import each_value, examples

Array = Any
EPS = float(np.finfo(np.float64).eps)
ON_HOST: dict[str, Any] = {"backend": "host"}


def drawn(rows: int, cols: int, values: Array, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((n, len(values))))[0] for n in (rows, cols))
    return left * values @ right.T


def check(found: oocgemm.SVD, x: Array, k: int) -> None:
    expected = np.linalg.svd(x, compute_uv=False)
    assert np.abs(found.singular_values - expected[:k]).max() <= 100 * EPS * expected[0]


@settings(max_examples=examples(100, quick=30), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    exponent=st.floats(0, 12),
    share=st.floats(0.01, 1),
    seed=st.integers(0, 99),
)
def test_values_are_those_of_numpy(shape: tuple[int, int], exponent: float, share: float, seed: int) -> None:
    most = min(shape)
    x = drawn(*shape, np.geomspace(1, 10**-exponent, most), seed)
    check(oocgemm.svd(x, **ON_HOST), x, most)
    k = max(1, int(share * most))
    found = oocgemm.svd(x, k, u=True, **ON_HOST)
    check(found, x, k)
    np.testing.assert_allclose(found.u.T @ found.u, np.eye(k), atol=1e-3)
    np.testing.assert_allclose(found.vt @ found.vt.T, np.eye(k), atol=1e-3)
    rest = np.linalg.svd(x, compute_uv=False)[k:].max(initial=0)
    near = np.linalg.norm(found.u * found.singular_values @ found.vt - x, 2)
    assert near <= rest * (1 + 1e-3) + 1e-3 * found.singular_values[-1] + 1e-14


@pytest.mark.parametrize("rank", [0, 1, 20])
def test_values_of_a_matrix_of_low_rank(rank: int) -> None:
    x = drawn(300, 40, np.geomspace(1, 0.01, rank), rank) if rank else np.zeros((300, 40))
    found = oocgemm.svd(x, **ON_HOST)
    if rank:
        check(found, x, 40)
        with pytest.raises(InputError, match=rf"singular value {rank + 1} of 40 is .* pass k={rank} "):
            oocgemm.svd(x, u=True, **ON_HOST)
    else:
        assert not found.singular_values.any()
    np.testing.assert_allclose(found.vt @ found.vt.T, np.eye(40), atol=1e-12)


def test_elements_may_be_of_any_size() -> None:
    for factor in (1e-200, 1e200):
        x = drawn(90, 8, np.geomspace(1, 1e-6, 8), 1) * factor
        found = oocgemm.svd(x, u=True, **ON_HOST)
        check(found, x, 8)
        np.testing.assert_allclose(found.u.T @ found.u, np.eye(8), atol=1e-6)


@each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(200, 30), (30, 200)])
def test_every_backend_finds_and_stores_vectors(backend: str, shape: tuple[int, int], tmp_path: Path) -> None:
    x = drawn(*shape, np.geomspace(1, 1e-9, 30), 3)
    zarr.create_array(f"{tmp_path}/x.zarr", data=x, chunks=(17, 17))
    with running_on(backend) as options:
        found = oocgemm.svd(f"{tmp_path}/x.zarr", u=tmp_path / "u.zarr", verify=True, **options)
        check(found, x, 30)
        check(oocgemm.svd(f"{tmp_path}/x.zarr", devices="0,0", verify=True, **options), x, 30)
    long: Array = zarr.open_array(f"{tmp_path}/u.zarr", mode="r")[:]
    np.testing.assert_allclose(long.T @ long, np.eye(30), atol=1e-5)
    left, right = (long, found.vt) if shape[0] > shape[1] else (found.u, long.T)
    np.testing.assert_allclose(left * found.singular_values @ right, x, atol=1e-13)


def test_a_wide_operand_that_has_no_transpose_is_refused() -> None:
    with pytest.raises(InputError, match="a view of other operands cannot be read as its transpose"):
        oocgemm.svd(oocgemm.concat([np.ones((2, 5)), np.ones((2, 5))]), **ON_HOST)


@pytest.mark.parametrize(("shape", "k"), [((5, 3), 4), ((5, 3), 0), ((5, 3), True), ((5, 0), None)])
def test_wrong_numbers_are_refused(shape: tuple[int, int], k: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="X has 5 rows and"):
        oocgemm.svd(np.ones(shape), k, tmp_path / "s.zarr", **ON_HOST)
    assert not [*tmp_path.iterdir()]


def test_elements_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    x = np.ones((5, 3))
    x[2, 1] = np.nan
    with pytest.raises(InputError, match="NaN"):
        oocgemm.svd(x, 2, tmp_path / "s.zarr", **ON_HOST)
    assert not [*tmp_path.iterdir()]


def test_the_command_saves_what_the_function_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = drawn(60, 9, np.geomspace(1, 0.1, 9), 7).astype("float32")
    np.save("x.npy", x)
    done = command("svd", "x.npy", "s.zarr", "--components", "4", "--u", "u.npy", "--backend", "host")
    assert done.code == 0, done.err
    assert "singular values: 1," in done.out
    found = oocgemm.svd(x, 4, u=True, **ON_HOST)
    np.testing.assert_array_equal(np.load("u.npy"), found.u)
    for name in ("singular_values", "vt"):
        np.testing.assert_array_equal(zarr.open_array(f"s.zarr/{name}", mode="r")[:], getattr(found, name))
    assert command("svd", "x.npy", "s.zarr").code == 2
