"""The kernel that composes chunks of their decoded streams: all orders, on the CPU; it compiles for GPUs."""

import ctypes
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from oocgemm.kernels.compile import compiled
from oocgemm.stores.codecs import frame_of
from tests.support.decoding import Array, Batch, blosc, decompressed, samples, zstd
from tests.support.native import launcher
from tests.support.nvrtc import Nvrtc, resources
from tests.support.suite import slow
from tests.support.unpacking import FIELDS

DTYPES = {"int8": 1, "int16": 2, "float32": 4, "float64": 8, "complex128": 16}


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("dtype", ["int8", "float64", *slow(("int16",), ("float32",), ("complex128",))])
def test_the_kernel_composes_parts_of_chunks(dtype: str) -> None:
    rng = np.random.default_rng(1)
    run = launcher("place", "place", (f"-DOOC_ITEM={DTYPES[dtype]}",))
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
    pointers, contents = list[int](), list[Array]()
    table = np.zeros((len(given.chunks), FIELDS), np.int64)
    for number, (start, size) in enumerate(zip(given.start, given.size, strict=True)):
        stored = given.buffer[start : start + size]
        frame = frame_of(stored.tobytes(), given.chunk, given.codec)
        assert frame is not None
        table[number, :4] = len(pointers), frame.split, frame.order, frame.block
        contents += [decompressed(given.codec, stored, stream) for stream in frame.streams]
        pointers += [content.ctypes.data for content in contents[len(pointers) :]]
    rows, cols = shape[0] - 4, shape[1] - 9
    table[:, 4], table[:, 5] = given.chunk, shape[1]
    table[:, 6:10] = 3, 5, rows, cols
    table[:, 10] = cols * np.arange(len(table))
    out = np.zeros((rows, cols * len(table)), given.chunks[0].dtype)
    addresses = np.array(pointers, np.uint64)
    at = [ctypes.c_void_p(array.ctypes.data) for array in (addresses, table, out)]
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


@pytest.mark.parametrize(
    ("source", "entry"),
    [
        ("crc32c", "crc32c"),
        ("frames", "frames"),
        ("lz4", "lz4_parse"),
        ("execute", "execute"),
        *(("zstd", f"zstd_{x}") for x in ("walk", "entropy")),
    ],
)
def test_the_kernels_that_decode_compile_without_spills(
    source: str, entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path))
    cubin = tmp_path / "cubin"
    cubin.write_bytes(compiled(Nvrtc(), source, "sm_90a", ()))
    used = resources(cubin, entry)
    assert used.local <= 16
    assert used.registers <= 80
