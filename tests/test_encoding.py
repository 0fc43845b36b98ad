"""Products whose C the (fake) GPU compresses."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.planning.cost import encoding
from tests.backends_here import CUDA, needs_gpu
from tests.fake_cuda import fake_cuda
from tests.problems import integers

rng = np.random.default_rng(0)
CODECS = "zstd", "blosc-lz4", "blosc-zstd"
BACKENDS = [pytest.param("fake-cuda"), pytest.param("cuda", marks=needs_gpu)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the GPU compress a small C, of small chunks, in small batches."""
    for name, value in {"MIN_BYTES": 0, "MIN_CHUNK": 1 << 10, "MIN_STREAM": 128, "BATCH": 64 << 10}.items():
        monkeypatch.setattr(encoding, name, value)


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
        assert result.plan.layouts.c.encoded == codec
        expected = a.astype(result.out.dtype) @ b.astype(result.out.dtype)
        np.testing.assert_array_equal(zarr.open_array(place, mode="r")[:], expected)
