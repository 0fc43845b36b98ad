"""Chunks that are damaged or truncated are errors that name their file. Odd but valid ones are read."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec

from oocgemm.errors import ExecutionError
from oocgemm.stores import codecs, files
from oocgemm.stores.files import Opener
from oocgemm.stores.zarr_matrix import ZarrMatrix


def _cut(stored: bytes) -> bytes:
    return stored[: len(stored) // 2]


def _longer(stored: bytes) -> bytes:
    return stored + bytes(8)


def _flipped(stored: bytes) -> bytes:
    middle = len(stored) // 2
    return stored[:middle] + bytes([stored[middle] ^ 255]) + stored[middle + 1 :]


def _empty(stored: bytes) -> bytes:
    return b""


def _zeros(stored: bytes) -> bytes:
    return bytes(len(stored))


def _of_less(codec: Any) -> Callable[[bytes], bytes]:
    """Return a damage: the chunk decompresses to fewer bytes than the metadata say."""
    return lambda stored: bytes(codec.encode(np.zeros(3)))


def _shorter(content: bytes) -> bytes:
    return content[:-1]


def _wrong_checksum(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _far_offset(content: bytes) -> bytes:
    return (1 << 63).to_bytes(8, "little") + content[8:]


def _wrong_offset(stored: bytes) -> bytes:
    return struct.pack("<QQ", len(stored), 512) + stored[16:]


CRC = Crc32cCodec()
PLAIN_INDEX = ShardingCodec(
    chunk_shape=(8, 8), codecs=[BytesCodec()], index_codecs=[BytesCodec()], index_location="start"
)
SHARD = ShardingCodec(chunk_shape=(8, 8), codecs=[BytesCodec()])


@pytest.mark.parametrize(
    ("options", "damage"),
    [
        ({"compressors": None}, _cut),
        ({"compressors": None}, _longer),
        ({"compressors": [CRC]}, _cut),
        ({"compressors": [CRC]}, _flipped),
        ({"compressors": [CRC]}, _empty),
        ({"compressors": [ZstdCodec()]}, _cut),
        ({"compressors": [ZstdCodec()]}, _zeros),
        ({"compressors": [ZstdCodec(checksum=True)]}, _flipped),
        ({"compressors": [ZstdCodec(), CRC]}, _flipped),
        ({"compressors": [BloscCodec(cname="lz4")]}, _cut),
        ({"compressors": [BloscCodec(cname="lz4", shuffle="noshuffle")]}, _shorter),
        ({"compressors": [BloscCodec(cname="lz4")]}, _empty),
        ({"compressors": [BloscCodec(cname="lz4")]}, _zeros),
        ({"compressors": [GzipCodec()]}, _cut),
        ({"compressors": [GzipCodec()]}, _flipped),
        ({"compressors": [GzipCodec()]}, _empty),
        ({"compressors": [GzipCodec()]}, _of_less(numcodecs.GZip())),
        ({"compressors": [ZstdCodec()]}, _of_less(numcodecs.Zstd())),
        ({"compressors": [BloscCodec()]}, _of_less(numcodecs.Blosc())),
        ({"zarr_format": 2, "compressors": numcodecs.LZ4()}, _of_less(numcodecs.LZ4())),
        ({"zarr_format": 2, "compressors": numcodecs.LZ4()}, _cut),
        ({"zarr_format": 2, "compressors": numcodecs.LZ4()}, _empty),
        ({"zarr_format": 2, "compressors": numcodecs.Zlib()}, _cut),
        ({"zarr_format": 2, "compressors": numcodecs.BZ2()}, _empty),
        ({"zarr_format": 2, "compressors": numcodecs.BZ2()}, _zeros),
        ({"zarr_format": 2, "compressors": numcodecs.LZMA()}, _cut),
        ({"compressors": None, "serializer": SHARD, "chunks": (16, 16)}, _cut),
        ({"compressors": None, "serializer": SHARD, "chunks": (16, 16)}, _empty),
        ({"compressors": None, "serializer": SHARD, "chunks": (16, 16)}, _longer),
        ({"compressors": None, "serializer": SHARD, "chunks": (16, 16)}, _wrong_checksum),
        ({"compressors": None, "serializer": PLAIN_INDEX, "chunks": (16, 16)}, _wrong_offset),
        ({"compressors": None, "serializer": PLAIN_INDEX, "chunks": (16, 16)}, _far_offset),
    ],
)
def test_a_damaged_chunk_is_an_error_that_names_its_file(
    tmp_path: Path, options: dict[str, Any], damage: Callable[[bytes], bytes]
) -> None:
    array = zarr.create_array(tmp_path / "A", shape=(16, 16), dtype="f8", **{"chunks": (8, 8)} | options)
    array[:] = np.random.default_rng(0).standard_normal((16, 16))
    matrix = ZarrMatrix("A", array)
    assert matrix.direct is not None
    key = matrix.direct.key((0, 0))
    chunk = tmp_path / "A" / key
    chunk.write_bytes(damage(chunk.read_bytes()))
    with pytest.raises(ExecutionError, match=f"chunk {key} in .*A .*damaged or truncated"):
        matrix.read((0, 16), (0, 16), np.empty((16, 16)))


def test_a_chunk_of_another_size_says_both() -> None:
    with pytest.raises(ValueError, match="504 bytes instead of 512"):
        codecs.Encoding(np.dtype("f8")).decode(np.zeros(504, np.uint8), (8, 8), None)


@pytest.mark.parametrize("length", [12, 15, 527])
def test_what_lies_behind_a_chunk_is_not_taken_for_its_end(length: int) -> None:
    """In a shard other bytes follow the chunk.

    A chunk whose own header gives too long a length must not read them.
    """
    values = np.random.default_rng(0).standard_normal((8, 8))
    blosc = codecs.Encoding(np.dtype("f8"), compressor=numcodecs.Blosc("lz4", shuffle=0))
    stored = np.frombuffer(blosc.compressor.encode(values), np.uint8)
    assert len(stored) == 528
    np.testing.assert_array_equal(blosc.decode(stored, (8, 8), None), values)
    with pytest.raises(ValueError, match=f"blosc data of {length} bytes is truncated"):
        blosc.decode(stored[:length], (8, 8), None)


def test_a_chunk_may_be_of_several_gzip_members() -> None:
    values, gzip = np.random.default_rng(0).standard_normal((8, 8)), numcodecs.GZip()
    stored = np.frombuffer(gzip.encode(values[:3]) + gzip.encode(values[3:]), np.uint8)
    found = codecs.Encoding(np.dtype("f8"), compressor=gzip).decode(stored, (8, 8), None)
    np.testing.assert_array_equal(found, values)


def test_a_checksum_is_that_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_CHECKSUM_PART", 100)
    values = np.random.default_rng(0).standard_normal((8, 8))
    array = zarr.create_array(tmp_path / "A", data=values, chunks=(8, 8), compressors=[CRC])
    matrix, out = ZarrMatrix("A", array), np.empty((8, 8))
    for _ in ("written by zarr", "and by us"):
        matrix.read((0, 8), (0, 8), out)
        np.testing.assert_array_equal(out, values)
        matrix.write((0, 8), (0, 8), values)
    np.testing.assert_array_equal(array[:], values)


@pytest.mark.parametrize("compressors", [None, [ZstdCodec()]])
def test_a_chunk_that_is_cut_once_it_is_open_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressors: Any
) -> None:
    array = zarr.create_array(
        tmp_path / "A", data=np.ones((16, 16)), chunks=(16, 16), compressors=compressors
    )
    matrix = ZarrMatrix("A", array)

    def cut_after(right: Callable[..., Any]) -> Callable[..., Any]:
        def cut(self: Any, path: Path, *rest: Any) -> Any:
            found = right(self, path, *rest)
            os.truncate(path, 0)
            return found

        return cut

    monkeypatch.setattr(files.OpenFile, "__init__", cut_after(files.OpenFile.__init__))
    monkeypatch.setattr(Opener, "open", cut_after(Opener.open))
    with pytest.raises(ExecutionError, match=r"chunk c/0/0 in .*A (ends|has 0 bytes) .*damaged or truncated"):
        matrix.read((0, 16), (0, 16), np.empty((16, 16)))
