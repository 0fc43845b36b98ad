"""Gram matrices on several devices: equal bits, every triangle, existing arrays, resumed runs, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import Scale
from tests.support.backends_here import needs_gpu, running_on
from tests.support.command import command
from tests.support.fake_cuda import fake_cuda
from tests.support.problems import Array, integers
from tests.support.suite import each_value
from tests.support.summing import summed  # noqa: F401  imports what the kernels of checksums need

RNG = np.random.default_rng(7)
ENGINES = ["host", "host-staged", "fake-cuda", pytest.param("cuda", marks=needs_gpu)]
TILE = "20x20x16"
M, K = 93, 70


def triangle(full: Array, uplo: str) -> Array:
    if uplo == "full":
        return full
    return np.tril(full) if uplo == "lower" else np.triu(full)


@each_value
@pytest.mark.parametrize("uplo", ["lower", "upper", "full"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "complex64", "int8"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_triangle_is_exact_on_several_sessions(engine: str, dtype: str, uplo: str, tmp_path: Path) -> None:
    x = integers(RNG, (M, K), dtype)
    wide = x.astype("complex128" if x.dtype.kind == "c" else "float64")
    right = triangle(wide @ wide.conj().T, uplo)
    np.save(tmp_path / "x.npy", x)
    with running_on(engine) as options:
        source: Any
        for source in (x, tmp_path / "x.npy"):
            for verify in (False, True):
                given: dict[str, Any] = {"devices": [0, 0, 0], "tile": TILE, "verify": verify}
                found = oocgemm.gram(source, uplo=uplo, **given, **options)
                np.testing.assert_array_equal(found.out, right)
                assert {span.device for span in found.timeline.spans} == {0, 1, 2}


@each_value
@pytest.mark.parametrize("uplo", ["lower", "upper", "full"])
@pytest.mark.parametrize("engine", ENGINES)
def test_beta_applies_to_the_triangle_that_is_read(engine: str, uplo: str, tmp_path: Path) -> None:
    x, c = integers(RNG, (M, K), "float64"), integers(RNG, (M, M), "float64")
    c = c + c.T
    right = x @ x.T + 2 * c
    if uplo != "full":
        inside = triangle(np.ones((M, M)), uplo) != 0
        right = np.where(inside, right, c)
    with running_on(engine) as options:
        out = c.copy()
        oocgemm.gram(x, out, beta=2, uplo=uplo, devices=[0, 0], tile=TILE, **options)
        np.testing.assert_array_equal(out, right)
        stored = zarr.create_array(tmp_path / "c.zarr", shape=c.shape, chunks=(10, 10), dtype=c.dtype)
        stored[:] = c
        given: dict[str, Any] = {"beta": 2, "uplo": uplo, "devices": [0, 0], "tile": TILE}
        oocgemm.gram(x, tmp_path / "c.zarr", **given, **options)
        np.testing.assert_array_equal(np.asarray(stored[:]), right)


@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (5, 0)])
def test_small_products_need_no_second_device(shape: tuple[int, int]) -> None:
    found = oocgemm.gram(np.ones(shape), backend="host", devices=[0, 0])
    np.testing.assert_array_equal(found.out, np.ones(shape) @ np.ones(shape).T)


@pytest.mark.parametrize("chunks", [(10, 15), (16, 24), (7, 93), (93, 3)])
def test_tiles_consist_of_whole_chunks_of_an_existing_c(chunks: tuple[int, int], tmp_path: Path) -> None:
    x = integers(RNG, (M, K), "float64")
    stored = zarr.create_array(tmp_path / "c.zarr", shape=(M, M), chunks=chunks, dtype=x.dtype)
    oocgemm.gram(x, tmp_path / "c.zarr", backend="host", devices=[0, 0], overwrite=True)
    np.testing.assert_array_equal(np.asarray(stored[:]), x @ x.T)


Verb = Callable[..., oocgemm.Result]
VERBS: dict[str, Verb] = {
    "gram": lambda x, **options: oocgemm.gram(x, epilogue=[Scale(value=0.5)], **options),
    "transformed": lambda x, **options: oocgemm.gram(
        x, transform=oocgemm.Transform(center="k", scale="k", cast="float32"), **options
    ),
    "centered": lambda x, **options: oocgemm.gram(
        (x * 9).astype("i1"), transform=oocgemm.Transform(center="k", cast="int8"), **options
    ),
    "corr": oocgemm.corr,
    "cov": oocgemm.cov,
    "cov of columns": lambda x, **options: oocgemm.cov(x, axis=1, **options),
}


@each_value
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_verb_has_the_bits_of_one_device(engine: str, verb: str) -> None:
    x = RNG.standard_normal((M, K))
    with running_on(engine) as options:
        one, several = (
            VERBS[verb](x, tile=TILE, verify=True, **options, **given) for given in ({}, {"devices": [0, 0]})
        )
    assert several.plan.devices == 2
    np.testing.assert_array_equal(several.out, one.out)


@pytest.mark.parametrize("devices", ["0,0", "0,1"])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_the_streams_gives_the_bits_of_one_device(
    devices: str, seed: int, tmp_path: Path
) -> None:
    x = RNG.standard_normal((M, K))
    np.save(tmp_path / "x.npy", x)
    with fake_cuda(seed, devices=2) as gpus:
        given: dict[str, Any] = {"backend": "cuda", "kernel": "cublas", "tile": TILE}
        one = oocgemm.gram(tmp_path / "x.npy", tmp_path / "one.npy", **given)
        several = oocgemm.gram(tmp_path / "x.npy", tmp_path / "several.npy", devices=devices, **given)
        np.testing.assert_array_equal(np.asarray(several), np.asarray(one))
        gpus.check()


@pytest.mark.parametrize(("first", "second"), [("0,0", "0"), ("0", "0,0,0"), ("0,0", "0,0,0")])
def test_a_run_is_resumed_on_other_devices_with_the_same_bits(
    first: str, second: str, tmp_path: Path
) -> None:
    x = RNG.standard_normal((M, K))
    np.save(tmp_path / "x.npy", x)
    given: dict[str, Any] = {"backend": "host", "tile": TILE, "uplo": "full"}
    right = np.asarray(oocgemm.gram(tmp_path / "x.npy", devices=first, **given))

    writes = 0

    def stop(plan: Any) -> Any:
        def observe(span: Any) -> None:
            nonlocal writes
            writes += span.kind == "write"
            if writes > plan.tiles.count * 2 // 3:
                raise KeyboardInterrupt

        return observe

    with pytest.raises(KeyboardInterrupt):
        oocgemm.gram(tmp_path / "x.npy", tmp_path / "c.zarr", devices=first, progress=stop, **given)
    resumed = oocgemm.gram(tmp_path / "x.npy", tmp_path / "c.zarr", devices=second, resume=True, **given)
    assert len(resumed.plan.done) > 0
    np.testing.assert_array_equal(np.asarray(resumed), right)


def test_plans_and_commands_take_devices(tmp_path: Path) -> None:
    x = RNG.standard_normal((400, 60))
    np.save(tmp_path / "x.npy", x)
    plan = oocgemm.plan_gram(tmp_path / "x.npy", backend="host", devices="0,0")
    assert plan.devices == 2
    assert len(list(plan.tiles)) >= 2
    done = command("gram", tmp_path / "x.npy", tmp_path / "c.npy", "--backend", "host", "--devices", "0,0")
    assert done.code == 0
    np.testing.assert_allclose(np.load(tmp_path / "c.npy"), x @ x.T, rtol=1e-12)
