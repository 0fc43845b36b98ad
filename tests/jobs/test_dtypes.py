"""Operands of all dtypes are multiplied as NumPy multiplies their converted elements, on each backend."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import oocgemm
from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import MULTIPLIED
from oocgemm.stores.transformed import multiplied_dtype
from tests.support.backends_here import BACKENDS, running_on
from tests.support.command import command
from tests.support.suite import slow

Array = NDArray[Any]
DTYPES = [name for name in MULTIPLIED if name != "bfloat16"]
INTEGERS = ["bool", "int8", "uint8"]  # multiplied without rounding


def values(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Array:
    """Draw integers whose products of 40 elements are exact in any dtype, among them the limits of bytes."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    limits: dict[str, tuple[int, int]] = {"int8": (-128, 127), "uint8": (0, 255)}
    if np.dtype(dtype).kind == "u":
        low, high = limits.get(dtype, (0, 60))
    else:
        low, high = limits.get(dtype, (-4, 4) if dtype == "float16" else (-60, 60))
    return rng.integers(low, high + 1, shape).astype(dtype)


def stored(folder: Path, how: str, x: Array) -> Any:
    folder.mkdir(exist_ok=True)
    if how == "fortran":
        return np.asfortranarray(x)
    if how == "npy":
        np.save(folder / "x.npy", x)
        return folder / "x.npy"
    if how == "zarr":
        zarr.create_array(folder / "x.zarr", data=x, chunks=(8, 16), overwrite=True)
        return folder / "x.zarr"
    if how == "hdf5":
        with h5py.File(folder / "x.h5", "w") as file:
            file.create_dataset("x", data=x, chunks=(8, 8), compression="gzip")
        return f"{folder}/x.h5::x"
    return x


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25)
@given(
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    how=st.tuples(*2 * [st.sampled_from(["memory", "fortran", "npy", "zarr", "hdf5"])]),
    transposes=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**32),
)
def test_two_dtypes_are_multiplied_in_that_of_numpy(
    backend: str,
    tmp_path_factory: pytest.TempPathFactory,
    dtypes: tuple[str, str],
    how: tuple[str, str],
    transposes: tuple[bool, bool],
    seed: int,
) -> None:
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("operands")
    a, b = (values(rng, shape, name) for shape, name in zip(((19, 40), (40, 13)), dtypes, strict=True))
    wide = a.astype(np.complex128) @ b.astype(np.complex128)
    given_ = [
        stored(folder / name, kind, x.T.copy() if swaps else x)
        for name, kind, x, swaps in zip("ab", how, (a, b), transposes, strict=True)
    ]
    with running_on(backend) as options:
        found = oocgemm.matmul(
            *given_, trans_a=transposes[0], trans_b=transposes[1], tile="8x8x16", **options
        )
    kind = multiplied_dtype(a.dtype, b.dtype)
    expected = {"float16": np.float32, "int8": np.int32, "uint8": np.int32, "int16": np.int32}
    if "float16" in dtypes:
        np.testing.assert_allclose(found, wide.real if found.dtype.kind != "c" else wide, rtol=2e-3)
        return
    assert found.dtype == expected.get(kind.name, kind)
    np.testing.assert_array_equal(found, wide)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("out_dtype", ["int32", "int64", "float32", "float64"])
def test_bytes_are_multiplied_exactly(backend: str, dtype: str, out_dtype: str) -> None:
    rng = np.random.default_rng(2)
    x, y = values(rng, (9, 300), dtype), values(rng, (300, 7), dtype)
    old = rng.integers(-9, 9, (9, 7)).astype(out_dtype)
    expected = x.astype(np.int64) @ y.astype(np.int64)
    with running_on(backend) as options:
        found = oocgemm.matmul(x, y, out_dtype=out_dtype, tile="4x4x64", **options)
        assert found.dtype == out_dtype
        np.testing.assert_array_equal(found, expected)
        changed = old.copy()
        oocgemm.gemm(x, y, changed, alpha=3, beta=-2, out_dtype=out_dtype, **options)
        np.testing.assert_array_equal(changed, 3 * expected - 2 * old)
        gram = oocgemm.gram(x, out_dtype=out_dtype, uplo="full", **options).out
        np.testing.assert_array_equal(gram, x.astype(np.int64) @ x.T.astype(np.int64))
        checked = oocgemm.gemm(x, y, out_dtype=out_dtype, verify=True, **options)
        np.testing.assert_array_equal(checked.out, expected)
    assert oocgemm.verify(x, y, found).ok


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_bytes_that_int32_cannot_hold_are_refused_or_exact(backend: str) -> None:
    x = np.full((2, 40_000), 255, np.uint8)
    with running_on(backend) as options:
        np.testing.assert_array_equal(
            oocgemm.matmul(x, x, trans_b="T", out_dtype="int64", **options), 40_000 * 255**2
        )
        with pytest.raises(ExecutionError, match="int32"):
            oocgemm.matmul(x, x, trans_b="T", **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype", ["uint8", *slow(("bool",), ("int16",), ("uint16",), ("uint32",), ("int64",))]
)
def test_every_verb_takes_other_dtypes(backend: str, dtype: str) -> None:
    rng = np.random.default_rng(4)
    x = values(rng, (12, 40), dtype)
    wide = x.astype(np.float64)
    with running_on(backend) as options:
        np.testing.assert_allclose(oocgemm.corr(x, **options).out, np.corrcoef(wide), atol=1e-6)
        np.testing.assert_allclose(
            oocgemm.cov(x, **options).out, np.cov(wide), atol=1e-6 * np.cov(wide).max()
        )
        best = oocgemm.similarity(x, topk=1, metric="dot", **options)
        np.testing.assert_array_equal(np.asarray(best.scores)[:, 0], _largest(wide @ wide.T))
        sums = oocgemm.reduce(x, x, trans_b="T", to=oocgemm.Reduce("sum"), **options)
        np.testing.assert_array_equal(np.asarray(sums).ravel(), (wide @ wide.T).sum(1))
        found = oocgemm.pca(x, k=2, **options)
        singular = np.linalg.svd(wide - wide.mean(0), compute_uv=False)[:2]
        np.testing.assert_allclose(found.singular_values, singular, rtol=1e-4)
        genotypes = values(rng, (8, 30), "bool").astype(dtype)
        np.testing.assert_allclose(
            oocgemm.grm(genotypes, **options).out,
            oocgemm.grm(genotypes.astype("f8"), **options).out,
            atol=1e-5,
        )
    np.testing.assert_array_equal(oocgemm.stats(x).mean, wide.mean(0))


def _largest(scores: Array) -> Array:
    np.fill_diagonal(scores, -np.inf)
    return np.asarray(scores.max(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_that_float64_cannot_represent_are_refused(backend: str, tmp_path: Path) -> None:
    x = np.zeros((9, 8), np.int64)
    x[7, 5] = -(2**53)
    with running_on(backend) as options:
        np.testing.assert_array_equal(oocgemm.matmul(x, np.eye(8), **options), x.astype(np.float64))
        x[7, 5] -= 1
        zarr.create_array(tmp_path / "x", data=x, chunks=(3, 3))
        with pytest.raises(
            ExecutionError, match=r"element at \[7, 5\] of A is -9007199254740993, .* up to 9007199254740992"
        ):
            oocgemm.matmul(tmp_path / "x", np.eye(8), **options)


def test_uint64_is_refused_with_a_remedy() -> None:
    with pytest.raises(InputError, match=r"A is of dtype uint64.*supported are float16.*int64: convert A by"):
        oocgemm.matmul(np.ones((3, 3), np.uint64), np.ones((3, 3)))


def test_mixed_dtypes_resume_and_are_verified_on_the_command_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    a, b = values(rng, (20, 16), "uint8"), values(rng, (16, 12), "int8")
    np.save(tmp_path / "a.npy", a)
    zarr.create_array(tmp_path / "b", data=b, chunks=(8, 8))
    paths = [str(tmp_path / name) for name in ("a.npy", "b", "c.npy")]
    assert command("run", *paths, "--backend", "host", "--verify", "--tile", "8x8x8").code == 0
    np.testing.assert_array_equal(np.load(paths[2]), a.astype(int) @ b.astype(int))
    assert command("verify", *paths).code == 0
