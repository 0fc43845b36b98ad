"""Results that are smaller than C, on several devices: exact on integers, equal bits, and budgets."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import MatVec, Reduce, Scale, Threshold, TopK
from tests.support.backends_here import needs_gpu, running_on
from tests.support.fake_cuda import fake_cuda
from tests.support.problems import Array, integers
from tests.support.suite import each_value
from tests.support.summing import summed  # noqa: F401  imports what the kernels of checksums need

RNG = np.random.default_rng(11)
ENGINES = ["host", "host-staged", "fake-cuda", pytest.param("cuda", marks=needs_gpu)]
M, N, K, TILE = 93, 105, 70, "20x20x16"
V = integers(RNG, (N, 3), "float64")
Found = tuple[Array, ...]


def _neighbors(found: oocgemm.Neighbors) -> Found:
    return found.indices, found.scores


def _pairs(found: oocgemm.Pairs) -> Found:
    return found.indptr, found.indices, found.scores


def _array(found: Array) -> Found:
    return (found,)


# What is computed of A and B, as arrays.
CALLS: Mapping[str, Callable[..., Found]] = {
    "sum": lambda a, b, **how: _array(oocgemm.reduce(a, b, to=Reduce("sum"), **how)),
    "sum of columns": lambda a, b, **how: _array(oocgemm.reduce(a, b, to=Reduce("sum", axis=0), **how)),
    "sumsq": lambda a, b, **how: _array(
        oocgemm.reduce(a, b, to=Reduce("sumsq"), epilogue=[Scale(value=0.5)], **how)
    ),
    "max": lambda a, b, **how: _array(oocgemm.reduce(a, b, to=Reduce("max"), **how)),
    "product with V": lambda a, b, **how: _array(oocgemm.reduce(a, b, to=MatVec(V), **how)),
    "top": lambda a, b, **how: _neighbors(oocgemm.reduce(a, b, to=TopK(5), **how)),
    "threshold": lambda a, b, **how: _pairs(oocgemm.reduce(a, b, to=Threshold(40), **how)),
    "symmetric sum": lambda a, b, **how: _array(oocgemm.reduce(a, to=Reduce("sum"), **how)),
    "symmetric top": lambda a, b, **how: _neighbors(oocgemm.reduce(a, to=TopK(5), **how)),
    "symmetric threshold": lambda a, b, **how: _pairs(oocgemm.reduce(a, to=Threshold(40), **how)),
    "similar": lambda a, b, **how: _neighbors(oocgemm.similarity(a, topk=4, metric="dot", **how)),
}
# The same with NumPy, of C = A B and A A^T.
RIGHT: Mapping[str, Callable[[Array, Array], Array]] = {
    "sum": lambda c, g: c.sum(1),
    "sum of columns": lambda c, g: c.sum(0),
    "sumsq": lambda c, g: ((c / 2) ** 2).sum(1),
    "max": lambda c, g: c.max(1),
    "product with V": lambda c, g: c @ V,
    "top": lambda c, g: np.sort(c, axis=1)[:, : -5 - 1 : -1],
    "threshold": lambda c, g: c[c >= 40],
    "symmetric sum": lambda c, g: g.sum(1),
    "symmetric top": lambda c, g: np.sort(g, axis=1)[:, : -5 - 1 : -1],
    "symmetric threshold": lambda c, g: g[g >= 40],
    "similar": lambda c, g: np.sort(np.where(np.eye(M), -np.inf, g), axis=1)[:, : -4 - 1 : -1],
}
# Further calls, whose results are rounded.
ROUNDED: Mapping[str, Callable[..., Found]] = {
    "cosines": lambda a, b, **how: _neighbors(oocgemm.similarity(a, topk=4, **how)),
    "pairs of cosines": lambda a, b, **how: _pairs(oocgemm.similarity(a, threshold=0.1, **how)),
    "correlations": lambda a, b, **how: _neighbors(oocgemm.corr(a, topk=4, **how)),
    "kernel": lambda a, b, **how: _array(oocgemm.kernel_matmul(a, a[:, :2], gamma=0.01, **how)),
    "kernel of two": lambda a, b, **how: _array(
        oocgemm.kernel_matmul(a, V, np.ascontiguousarray(b.T), gamma=0.01, **how)
    ),
}


@each_value
@pytest.mark.parametrize("devices", [[0, 0], [0, 0, 0]])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int8"])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("engine", ENGINES)
def test_results_are_exact_on_several_sessions(
    engine: str, name: str, verify: bool, dtype: str, devices: list[int], tmp_path: Path
) -> None:
    if (name, dtype) == ("product with V", "int8"):
        pytest.skip("products of int8 are not multiplied by V")
    a, b = integers(RNG, (M, K), dtype), integers(RNG, (K, N), dtype)
    wide = a.astype("f8"), b.astype("f8")
    right = RIGHT[name](wide[0] @ wide[1], wide[0] @ wide[0].T)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    with running_on(engine) as options:
        for sources in ((a, b), (tmp_path / "a.npy", tmp_path / "b.npy")):
            given: dict[str, Any] = {"devices": devices, "tile": TILE, "verify": verify}
            found = CALLS[name](*sources, **given, **options)
            np.testing.assert_array_equal(found[-1], right)


@each_value
@pytest.mark.parametrize("tile", [TILE, "50x50x9", "11x50x70"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", [*CALLS, *ROUNDED])
@pytest.mark.parametrize("engine", ENGINES)
def test_one_two_and_three_sessions_have_equal_bits(engine: str, name: str, dtype: str, tile: str) -> None:
    a, b = (RNG.standard_normal(shape).astype(dtype) for shape in ((M, K), (K, N)))
    if name.startswith(("symmetric t", "similar", "cosines", "pairs", "correlations")):
        tile = tile.replace("11x50", "11x11")  # tiles of a triangle are square
    call = {**CALLS, **ROUNDED}[name]
    with running_on(engine) as options:
        one, *several = (
            call(a, b, tile=tile, **options, **given)
            for given in ({}, {"devices": "0,0"}, {"devices": "0,0,0"})
        )
    for found in several:
        for mine, right in zip(found, one, strict=True):
            np.testing.assert_array_equal(mine.view(np.uint8), right.view(np.uint8))


@each_value
@pytest.mark.parametrize("name", ["sum", "symmetric top", "threshold", "product with V"])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_the_streams_gives_the_bits_of_one_device(name: str, seed: int) -> None:
    a, b = RNG.standard_normal((M, K)), RNG.standard_normal((K, N))
    given: dict[str, Any] = {"backend": "cuda", "kernel": "cublas", "tile": TILE}
    with fake_cuda(seed, devices=2) as gpus:
        one, several = (CALLS[name](a, b, **given, **more) for more in ({}, {"devices": "0,1"}))
        gpus.check()
    for mine, right in zip(several, one, strict=True):
        np.testing.assert_array_equal(mine, right)


def test_nan_and_equal_scores_rank_as_on_one_device() -> None:
    x = integers(RNG, (60, 5), "float64")
    x[7, 2] = x[31, 0] = np.nan
    x[40:] = x[20:40]
    given: dict[str, Any] = {"topk": 59, "metric": "dot", "backend": "host", "tile": "8x8x4"}
    one, several = oocgemm.similarity(x, **given), oocgemm.similarity(x, devices="0,0,0", **given)
    np.testing.assert_array_equal(several.indices, one.indices)
    np.testing.assert_array_equal(several.scores, one.scores)


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (3, 0)])
def test_small_products_need_no_second_device(shape: tuple[int, int]) -> None:
    found = oocgemm.reduce(np.ones(shape), to=Reduce("sum"), backend="host", devices=[0, 0, 0])
    np.testing.assert_array_equal(found, np.full(shape[0], shape[0] * shape[1]))


def test_a_dry_run_shows_the_plan_of_several_devices() -> None:
    x = np.ones((4000, 100), "float32")
    for plan in (
        oocgemm.similarity(x, topk=3, devices="0,0", backend="host", dry_run=True),
        oocgemm.reduce(x, to=Reduce("sum"), devices="0,0", backend="host", dry_run=True),
        oocgemm.kernel_matmul(x, x[:, 0], gamma=1.0, devices="0,0", backend="host", dry_run=True),
    ):
        assert plan.devices == 2
        assert "2 devices" in str(plan)
        assert len(list(plan.tiles)) >= 2
