"""Products whose C the (fake) GPU compresses."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

import oocgemm
from oocgemm.errors import ExecutionError
from oocgemm.jobs.prepare import codec_of_c
from oocgemm.planning import Coding
from oocgemm.planning.cost import coding
from oocgemm.reports.exports import page
from tests.support.backends_here import CUDA, needs_gpu
from tests.support.fake_cuda import fake_cuda
from tests.support.problems import integers
from tests.support.suite import each_value
from tests.support.unfinished_runs import failing_after

rng = np.random.default_rng(0)
CODECS = "zstd", "blosc-lz4", "blosc-zstd"
BACKENDS = [pytest.param("fake-cuda"), pytest.param("cuda", marks=needs_gpu)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the GPU compress a small C, of small chunks, in small batches."""
    for name, value in {"MIN_BYTES": 0, "MIN_CHUNK": 1 << 10, "MIN_STREAM": 128, "BATCH": 64 << 10}.items():
        monkeypatch.setattr(coding, name, value)


@contextmanager
def gpu(backend: str, seed: int = 0) -> Iterator[None]:
    if backend == "cuda":
        assert CUDA
        yield
        return
    with fake_cuda(seed) as device:
        yield
        device.check()


def options(**more: Any) -> dict[str, Any]:
    return {"backend": "cuda", "kernel": "cublas", "device_memory": "256MiB"} | more


@each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128", "int8"])
def test_products_are_compressed_exactly(tmp_path: Path, backend: str, codec: str, dtype: str) -> None:
    a, b = integers(rng, (230, 70), dtype), integers(rng, (70, 310), dtype)
    for seed in range(2):
        place = tmp_path / f"C{seed}.zarr"
        with gpu(backend, seed):
            result = oocgemm.gemm(
                a, b, place, chunks=(40, 64), compressor=codec, tile="120x128x30", **options()
            )
        assert result.plan.layouts.codings.c == Coding(codec)
        expected = a.astype(result.out.dtype) @ b.astype(result.out.dtype)
        np.testing.assert_array_equal(zarr.open_array(place, mode="r")[:], expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["blosc-zstd", "blosc-lz4", "zstd"])
def test_an_existing_c_with_checksums_is_overwritten(tmp_path: Path, backend: str, name: str) -> None:
    """zarr verifies the checksums when it reads C."""
    codec: Any = ZstdCodec() if name == "zstd" else BloscCodec(cname=name[6:], shuffle="shuffle")  # type: ignore[arg-type]
    a, b = integers(rng, (130, 50), "float32"), integers(rng, (50, 170), "float32")
    place = str(tmp_path / "C.zarr")
    zarr.create_array(
        place, shape=(130, 170), dtype="f4", chunks=(64, 50), compressors=[codec, Crc32cCodec()]
    )
    with gpu(backend):
        result = oocgemm.gemm(a, b, place, alpha=2, tile="64x100x20", overwrite=True, **options())
    assert result.plan.layouts.codings.c == Coding(name)
    np.testing.assert_array_equal(zarr.open_array(place, mode="r")[:], 2 * (a @ b))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_c_that_is_cast_before_it_is_compressed(tmp_path: Path, backend: str) -> None:
    a, b = integers(rng, (130, 50), "float16"), integers(rng, (50, 170), "float16")
    place = str(tmp_path / "C.zarr")
    with gpu(backend):
        result = oocgemm.gemm(
            a, b, place, alpha=0.5, chunks=(32, 40), compressor="blosc-zstd", tile="96x80x20", **options()
        )
    assert result.plan.problem.finishes
    assert result.plan.layouts.codings.c
    np.testing.assert_array_equal(
        zarr.open_array(place, mode="r")[:], (0.5 * (a.astype("f4") @ b.astype("f4"))).astype("f2")
    )


def test_several_devices_compress_their_tiles(tmp_path: Path) -> None:
    a, b = integers(rng, (200, 60), "float64"), integers(rng, (60, 300), "float64")
    place = str(tmp_path / "C.zarr")
    with fake_cuda(0, devices=2) as device:
        result = oocgemm.gemm(
            a,
            b,
            place,
            chunks=(50, 60),
            compressor="blosc-lz4",
            tile="100x120x20",
            devices=(0, 1),
            **options(),
        )
        device.check()
    assert result.plan.layouts.codings.c
    np.testing.assert_array_equal(zarr.open_array(place, mode="r")[:], a @ b)


@pytest.mark.parametrize("first", [True, False])
def test_a_run_is_resumed_with_and_without_compression_by_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    a, b, has = integers(rng, (230, 70), "float64"), integers(rng, (70, 310), "float64"), [first]
    for name, x in (("a", a), ("b", b)):
        np.save(tmp_path / f"{name}.npy", x)
    monkeypatch.setattr(
        "oocgemm.jobs.prepare.codec_of_c", lambda *given: codec_of_c(*given) if has[0] else ""
    )
    left, right, out = (str(tmp_path / name) for name in ("a.npy", "b.npy", "C.zarr"))
    more: dict[str, Any] = {"chunks": (40, 64), "compressor": "zstd", "tile": "80x128x30"}
    with gpu("fake-cuda"):
        with failing_after(2), pytest.raises(ExecutionError):
            oocgemm.gemm(left, right, out, **options(**more))
        has[0] = not first
        result = oocgemm.gemm(left, right, out, resume=True, tile="80x128x30", **options())
    assert result.plan.done
    assert bool(result.plan.layouts.codings.c) != first
    np.testing.assert_array_equal(zarr.open_array(out, mode="r")[:], a @ b)


def test_plans_and_reports_say_that_the_gpu_compresses(tmp_path: Path) -> None:
    a, b, place = np.ones((100, 20)), np.ones((20, 90)), str(tmp_path / "C.zarr")
    more: dict[str, Any] = options(compressor="blosc-zstd", chunks=(50, 90))
    with gpu("fake-cuda"):
        plan = oocgemm.plan(a, b, place, **more)
        result = oocgemm.gemm(plan=plan)
    assert "compressed by the GPU: C (blosc-zstd)" in str(plan)
    assert "compressed by the GPU" in page([("run", result.timeline)])
    assert plan.footprint.device["encode"] > 0
    assert not {span.lane for span in result.timeline.spans} & {"encode"}


HOST = (
    "small",
    "lz4hc",
    "gzip",
    "verify",
    "beta",
    "gram",
    "fill value",
    "shards",
    "bits",
    "prime",
    "budget",
    "npy",
)


@pytest.mark.parametrize("why", HOST)
def test_the_host_compresses_what_the_gpu_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    a, b = integers(rng, (90, 40), "float64"), integers(rng, (40, 90), "float64")
    place = tmp_path / "C.zarr"
    more: dict[str, Any] = {"compressor": "blosc-zstd"}
    multiply: Any = oocgemm.gram if why == "gram" else oocgemm.gemm
    expected = a @ a.T if why == "gram" else a @ b
    match why:
        case "small":
            monkeypatch.setattr(coding, "MIN_BYTES", 1 << 20)
        case "gzip":
            more["compressor"] = "gzip"
        case "verify":
            more["verify"] = True
        case "prime":
            more |= {"chunks": (1, 89)}
        case "budget":
            more["device_memory"] = "84MiB"
        case "npy":
            more, place = {}, tmp_path / "C.npy"
        case "beta" | "fill value" | "shards" | "bits" | "lz4hc":
            given: dict[str, Any] = {"fill_value": 1} if why == "fill value" else {}
            given |= {"shards": (90, 90)} if why == "shards" else {}
            codec = BloscCodec(
                cname="lz4hc" if why == "lz4hc" else "lz4",
                shuffle="bitshuffle" if why == "bits" else "shuffle",
            )
            zarr.create_array(place, data=np.ones((90, 90)), chunks=(45, 45), compressors=codec, **given)
            more = {"beta": 1.0, "overwrite": True} if why == "beta" else {"overwrite": True}
            expected = expected + (why == "beta")
    with gpu("fake-cuda"):
        operands = (a,) if why == "gram" else (a, b)
        result = multiply(*operands, str(place), **options(**more))
    assert not result.plan.layouts.codings.c
    found = np.load(place) if why == "npy" else np.asarray(zarr.open_array(place, mode="r")[:])
    np.testing.assert_array_equal(np.tril(found), np.tril(expected))


def test_a_frame_that_cannot_be_written_ends_the_run_with_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oocgemm.stores.zarr_chunks.publish", full)
    a, b = np.ones((100, 20)), np.ones((20, 90))
    with gpu("fake-cuda"), pytest.raises(ExecutionError, match=r"C\[0:.*No space left|disk"):
        oocgemm.gemm(a, b, str(tmp_path / "C.zarr"), compressor="zstd", chunks=(50, 90), **options())


def test_a_plan_whose_chunks_a_gpu_cannot_divide_runs_on(tmp_path: Path) -> None:
    """The planner chooses chunks of 1021 x 1013 elements, both primes."""
    a, b, place = (
        integers(rng, (1021, 8), "float64"),
        integers(rng, (8, 9117), "float64"),
        tmp_path / "C.zarr",
    )
    more: dict[str, Any] = options(tile="1021x9117x8", compressor="blosc-zstd")
    with gpu("fake-cuda"):
        plan = oocgemm.plan(a, b, str(place), **more)
        result = oocgemm.gemm(plan=plan)
    assert plan.chunks == (1021, 1013)
    assert not result.plan.layouts.codings.c
    np.testing.assert_array_equal(zarr.open_array(place, mode="r")[:], a @ b)


def test_a_tile_that_fits_only_without_the_kernels_memory_is_compressed_by_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MIN_CHUNK": 128 << 10, "BATCH": 4 << 20, "SHARE": 2}.items():
        monkeypatch.setattr(coding, name, value)
    a, b, place = np.ones((2000, 8)), np.ones((8, 2000)), str(tmp_path / "C.zarr")
    found = set()
    for size in (*range(120, 240, 6), 400):
        more: dict[str, Any] = options(tile="2000x2000x8", compressor="zstd", device_memory=f"{size}MiB")
        try:
            found.add(bool(oocgemm.plan(a, b, place, **more).layouts.codings.c))
        except oocgemm.BudgetError:
            assert not found
    assert found == {False, True}
