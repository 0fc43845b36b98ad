"""A GPU decodes compressed chunks into panels exactly, or reports the damage that the host reports."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from oocgemm.backends.base import Compressed
from oocgemm.errors import ExecutionError
from oocgemm.planning.cost.coding import DecodingShape
from oocgemm.planning.tiling import Range
from oocgemm.stores.codecs import Codec
from oocgemm.stores.zarr_matrix import ZarrMatrix
from tests.support.backends_here import CUDA
from tests.support.decoding import Array

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="no CUDA device answers"),
    pytest.mark.timeout(120, method="thread"),
]

SHAPE, CHUNK = (300, 700), (64, 128)
ROUNDS = 1000
BLOCKS = ((0, 300), (0, 700)), ((64, 192), (128, 640)), ((3, 299), (5, 130)), ((70, 71), (140, 141))
CODECS = {
    "blosc-zstd": BloscCodec(cname="zstd", clevel=5, shuffle="shuffle"),
    "blosc-zstd-bits": BloscCodec(cname="zstd", clevel=1, shuffle="bitshuffle"),
    "blosc-lz4": BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"),
    "blosc-lz4-bits": BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle"),
    "blosc-lz4-none": BloscCodec(cname="lz4", clevel=5, shuffle="noshuffle"),
    "blosc-raw": BloscCodec(cname="zstd", clevel=0, shuffle="shuffle"),
    "zstd": ZstdCodec(level=3),
    "zstd-checksum": ZstdCodec(level=3, checksum=True),
}


def codec_of(name: str, dtype: str) -> Codec:
    return Codec("lz4" if "lz4" in name else "zstd", name.startswith("blosc"), np.dtype(dtype).itemsize)


def compressed(matrix: ZarrMatrix, rows: Range, cols: Range, codec: Codec) -> Compressed:
    """Return a block of a zarr array for the decoder."""
    (top, left), chunk = (rows[0], cols[0]), matrix.layout.read_chunk

    def absolute(r: Range, c: Range) -> tuple[Range, Range]:
        return (top + r[0], top + r[1]), (left + c[0], left + c[1])

    def move(r: Range, c: Range, out: Array) -> None:
        matrix.read(*absolute(r, c), out)

    def fetch(r: Range, c: Range, out: Array) -> Any:
        return [each.counted_from(top, left) for each in matrix.fetch(*absolute(r, c), out)]

    shape, origin = (rows[1] - top, cols[1] - left), (top % chunk[0], left % chunk[1])
    return Compressed(shape, matrix.dtype, move, chunk, origin, codec=codec, fetch=fetch)


@contextmanager
def decoding(shape: DecodingShape) -> Iterator[Any]:
    """Yield a function that decodes a block on the device, and returns its elements and the bytes copied."""
    import cupy

    from oocgemm.backends.cuda.events import Clock
    from oocgemm.backends.cuda.frames import Decoder
    from oocgemm.backends.cuda.launch import Kernels

    device = cupy.cuda.Device(0)
    with device:
        memory = cupy.zeros(shape.device_bytes, cupy.uint8)
        decoder = Decoder(device, shape, memory.data.ptr, Kernels(0))

        def decode(block: Compressed) -> tuple[Array, int]:
            out = cupy.full(block.shape[0] * block.shape[1] * block.dtype.itemsize + 512, 7, cupy.uint8)
            token = decoder.upload(out.data.ptr, block, [], Clock(device))()
            token.synchronize()
            found = cupy.asnumpy(out)
            assert (found[-512:] == 7).all()
            return found[:-512].view(block.dtype).reshape(block.shape), token.bytes or 0

        try:
            yield decode
        finally:
            decoder.close()


def stored(path: Path, x: Array, name: str, *, checksum: bool = False, **options: Any) -> ZarrMatrix:
    codecs = [CODECS[name], *([Crc32cCodec()] if checksum else [])]
    array = zarr.create_array(path, shape=x.shape, dtype=x.dtype, chunks=CHUNK, compressors=codecs, **options)
    array[:] = x
    return ZarrMatrix("A", zarr.open_array(path, mode="r"))


@pytest.mark.parametrize("dtype", ["int8", "float32", "float64", "complex128"])
def test_all_kinds_of_chunks_are_decoded_exactly(dtype: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 100, SHAPE).astype(dtype)
    noise = rng.standard_normal((64, 128)) if x.dtype.kind != "i" else rng.integers(-128, 128, (64, 128))
    x[:64, 128:256] = noise  # does not compress
    with decoding(DecodingShape(3, 1 << 20, 1 << 18)) as decode:
        for name in CODECS:
            matrix = stored(tmp_path / name, x, name)
            for rows, cols in BLOCKS:
                found, copied = decode(compressed(matrix, rows, cols, codec_of(name, dtype)))
                expected = np.ascontiguousarray(x[slice(*rows), slice(*cols)])
                np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8), f"{name} {rows}")
                if name != "zstd-checksum":  # the host decodes it
                    # All chunks came as they are stored. Those at the edges are stored whole.
                    assert copied < (1.6 if name == "blosc-raw" else 1.1) * x.nbytes


def test_chunks_that_are_not_stored_or_in_shards_are_decoded(tmp_path: Path) -> None:
    x = np.zeros(SHAPE)
    x[100:120, 300:420] = 3
    with decoding(DecodingShape(2, 1 << 20, 1 << 19)) as decode:
        sparse = stored(tmp_path / "sparse", x, "blosc-zstd", config={"write_empty_chunks": False})
        shards = stored(tmp_path / "shards", x, "blosc-zstd", shards=(128, 256))
        for matrix in (sparse, shards):
            for rows, cols in BLOCKS:
                found, _ = decode(compressed(matrix, rows, cols, codec_of("blosc-zstd", "float64")))
                np.testing.assert_array_equal(found, x[slice(*rows), slice(*cols)])


def damaged(rng: np.random.Generator, whole: bytes) -> bytes:
    """Change one to three bytes of a frame, in most cases near its start, or cut it off."""
    if rng.random() < 0.1:
        return whole[: rng.integers(1, len(whole))]
    content = bytearray(whole)
    for at in rng.choice(rng.choice([24, 64, len(whole)]), rng.integers(1, 4), replace=False):
        content[at] ^= rng.integers(1, 256)
    return bytes(content)


@pytest.mark.parametrize("name", ["blosc-lz4", "blosc-zstd", "zstd"])
def test_damage_never_affects_other_chunks_and_is_found_as_on_the_host(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 100, (256, 512)).astype(np.float64)
    matrix = stored(tmp_path / "x", x, name)
    path, corner = tmp_path / "x" / "c" / "1" / "2", (slice(64, 128), slice(256, 384))
    whole, expected = path.read_bytes(), np.empty((64, 128))
    found_by = Counter[tuple[bool, bool]]()  # rounds by whether the host and the GPU report the damage
    with decoding(DecodingShape(4, 1 << 20, 1 << 20)) as decode:
        block = compressed(matrix, (0, 256), (0, 512), codec_of(name, "float64"))
        for _ in range(ROUNDS):
            path.write_bytes(damaged(rng, whole))
            on_host = on_gpu = True
            try:
                matrix.read((64, 128), (256, 384), expected)
                on_host = False
            except ExecutionError:
                pass
            try:
                found = decode(block)[0]
                on_gpu = False
                if not on_host:
                    np.testing.assert_array_equal(found[corner].view(np.uint64), expected.view(np.uint64))
                found[corner] = x[corner]
                np.testing.assert_array_equal(found, x)
            except ExecutionError as error:
                assert "damaged" in str(error)
            found_by[on_host, on_gpu] += 1
    assert not found_by[False, True]  # the GPU refuses nothing that the host decodes
    assert found_by[True, True] > ROUNDS // 4
    assert not found_by[True, False]


@pytest.mark.parametrize("name", ["blosc-zstd", "blosc-lz4", "zstd"])
def test_damage_of_chunks_with_checksums_is_always_found(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 100, (64, 128)).astype(np.float64)
    matrix = stored(tmp_path / "x", x, name, checksum=True)
    path = tmp_path / "x" / "c" / "0" / "0"
    whole = path.read_bytes()
    with decoding(DecodingShape(4, 1 << 20, 1 << 20)) as decode:
        block = compressed(matrix, (0, 64), (0, 128), codec_of(name, "float64"))
        np.testing.assert_array_equal(decode(block)[0], x)
        for _ in range(ROUNDS):
            path.write_bytes(damaged(rng, whole))
            with pytest.raises(ExecutionError, match=r"checksum|damaged"):
                decode(block)
