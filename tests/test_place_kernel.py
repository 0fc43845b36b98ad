"""The kernel that composes chunks of their decoded streams: all orders, on the CPU; it compiles for GPUs."""

import ctypes
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from oocgemm.kernels.compile import compiled
from oocgemm.stores.frames import find_streams
from tests.decoding import Array, Batch, blosc, decompressed, samples, zstd
from tests.nvrtc import Nvrtc, resources
from tests.suite import slow
from tests.test_kernels_cpu import built

DTYPES = {"int8": 1, "int16": 2, "float32": 4, "float64": 8, "complex128": 16}


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("dtype", ["int8", "float64", *slow(("int16",), ("float32",), ("complex128",))])
def test_the_kernel_composes_parts_of_chunks(dtype: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    run = built("place", "place", (f"-DOOC_ITEM={DTYPES[dtype]}",), tmp_path)
    for rows, shuffle in product((64, 61), (0, 1, 2)):  # the last blocks of 61 rows are odd
        chunks = samples(rng, dtype, rows * 48)
        for given in (
            *(blosc(name, 5, shuffle, 2048, chunks) for name in ("zstd", "lz4")),
            *([zstd(0, False, chunks)] if not shuffle else []),
        ):
            found = composed(run, given, (rows, 48))
            for at, chunk in enumerate(chunks):
                expected = chunk.reshape(rows, 48)[3:-1, 5:-4]
                np.testing.assert_array_equal(
                    found[:, 39 * at : 39 * (at + 1)].view(np.uint8), expected.copy().view(np.uint8)
                )


def composed(run: Callable[..., None], given: Batch, shape: tuple[int, int]) -> Array:
    """Compose parts of chunks, all but some rows and columns at the edges, beside each other."""
    streams = find_streams(given.buffer, given.start, given.size, given.chunk, given.codec)
    assert not streams.refused.any()
    content = np.zeros(len(given.chunks) * given.chunk, np.uint8)
    pointers = np.empty(len(streams.size), np.uint64)
    for k, raw in enumerate(streams.raw):
        stored = given.buffer[streams.source[k] : streams.source[k] + streams.size[k]]
        pointers[k] = stored.ctypes.data
        if not raw:
            part = content[streams.target[k] : streams.target[k] + streams.length[k]]
            part[:] = decompressed(given.codec, stored, len(part))
            pointers[k] = part.ctypes.data
    rows, cols = shape[0] - 4, shape[1] - 9
    table = np.zeros((len(given.chunks), 11), np.int64)
    table[:, 0], table[:, 1], table[:, 2] = streams.first, streams.split, streams.order
    table[:, 3], table[:, 4], table[:, 5] = streams.block, given.chunk, shape[1]
    table[:, 6:10] = 3, 5, rows, cols
    table[:, 10] = cols * np.arange(len(table))
    out = np.zeros((rows, cols * len(table)), given.chunks[0].dtype)
    at = [ctypes.c_void_p(array.ctypes.data) for array in (pointers, table, out)]
    run((2, len(table), 1), (256, 1, 1), at[0], at[1], ctypes.c_longlong(out.shape[1]), at[2])
    return out


@pytest.mark.parametrize("arch", ["sm_90a", *slow(("sm_75",), ("sm_100",))])
def test_the_kernel_compiles_without_spills(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    for item in DTYPES.values():
        cubin = tmp_path / f"{item}.cubin"
        cubin.write_bytes(compiled(Nvrtc(), "place", arch, (f"-DOOC_ITEM={item}",)))
        used = resources(cubin, "place")
        assert used.local == 0
        assert used.registers <= 64
