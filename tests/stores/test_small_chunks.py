"""Small encoded chunks: many files are read together, and each chunk is decoded into its place."""

import gc
import threading
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from oocgemm.errors import ExecutionError
from oocgemm.stores import codecs, files, lines, zarr_chunks
from oocgemm.stores.lines import read_ranges
from oocgemm.stores.zarr_chunks import DirectChunks
from oocgemm.stores.zarr_matrix import ZarrMatrix
from tests.support.problems import integers
from tests.support.suite import each_value

rng = np.random.default_rng(0)
SHAPE = (230, 310)
ARRAYS: dict[str, dict[str, Any]] = {
    "zstd": {"compressors": "auto"},
    "zstd with a checksum": {"compressors": [ZstdCodec(checksum=True)]},
    "zstd and crc32c": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "blosc": {"compressors": [BloscCodec(cname="lz4")]},
    "gzip": {"compressors": [GzipCodec()]},
    "lz4 by columns": {"compressors": numcodecs.LZ4(), "zarr_format": 2, "order": "F"},
    "big-endian": {"compressors": numcodecs.Zstd(), "zarr_format": 2, "dtype": ">f8"},
    "shards": {"chunks": (20, 32), "shards": (80, 64)},
    "wide": {"chunks": (3, 310)},
    "raw": {"compressors": None},
    "raw by columns": {"compressors": None, "zarr_format": 2, "order": "F"},
    "raw shards": {"compressors": None, "chunks": (20, 32), "shards": (80, 64)},
}


def opened(folder: Path, values: Any, **options: Any) -> ZarrMatrix:
    given: dict[str, Any] = {"chunks": (20, 32), "fill_value": 3} | options
    values = values.astype(given.pop("dtype", "f8"))
    array = zarr.create_array(folder / "A.zarr", data=values, **given)
    return ZarrMatrix("A", array, unchanging=True)


def read(matrix: ZarrMatrix) -> Any:
    out = np.full(matrix.shape, -1.0)
    matrix.read((0, matrix.shape[0]), (0, matrix.shape[1]), out)
    return out


@each_value
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize(("many", "stored_bytes"), [(False, 1 << 20), (True, 1 << 20), (True, 6000)])
def test_any_block_is_read_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, many: bool, stored_bytes: int
) -> None:
    monkeypatch.setattr(DirectChunks, "stored_bytes", stored_bytes)
    monkeypatch.setattr(files, "MAPPING_CORES", 0 if many else 1000)
    monkeypatch.setattr(zarr_chunks, "MAX_OPEN", 5)
    monkeypatch.setattr(zarr_chunks, "MAX_READS", 7)
    values = integers(rng, SHAPE, "float64")
    values[40:60, 64:96] = 3  # zarr does not store this chunk
    matrix = opened(tmp_path, values, **ARRAYS[name])
    assert matrix.direct is not None
    assert matrix.direct.decodes_together != (many and matrix.direct.stored_as_is)
    np.testing.assert_array_equal(read(matrix), values)
    for _ in range(20):
        r0, r1 = sorted(rng.choice(SHAPE[0] + 1, 2, replace=False).tolist())
        c0, c1 = sorted(rng.choice(SHAPE[1] + 1, 2, replace=False).tolist())
        whole = np.full((r1 - r0 + 2, c1 - c0 + 2), -1.0)
        matrix.read((r0, r1), (c0, c1), whole[1:-1, 1:-1])
        np.testing.assert_array_equal(whole[1:-1, 1:-1], values[r0:r1, c0:c1])
        whole[1:-1, 1:-1] = -1
        assert (whole == -1).all()


@pytest.mark.parametrize("name", ["zstd", "blosc", "shards"])
def test_many_chunks_take_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = list[int]()

    def counted(ranges: Any) -> Any:
        calls.append(len(ranges))
        return read_ranges(ranges)

    monkeypatch.setattr(files, "MAPPING_CORES", 0)
    monkeypatch.setattr(zarr_chunks, "read_ranges", counted)
    monkeypatch.setattr(DirectChunks, "_read_file", None)
    values = integers(rng, (400, 640), "float64")
    np.testing.assert_array_equal(read(opened(tmp_path, values, **ARRAYS[name])), values)
    assert sum(calls) >= 399  # a single last chunk is read by preadv
    assert len(calls) <= 400 // zarr_chunks.MAX_OPEN + 1


@pytest.mark.parametrize("lacking", ["io_submit", "symbols"])
@pytest.mark.parametrize("name", ["zstd", "blosc"])
def test_other_systems_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, name: str
) -> None:
    def refuse() -> int:
        raise OSError

    monkeypatch.setattr(files, "MAPPING_CORES", 0)
    if lacking == "io_submit":
        monkeypatch.setattr(lines, "_free_context", refuse)
    else:
        monkeypatch.setattr(codecs, "_library", lambda name: None)
        monkeypatch.setattr(codecs, "_of_thread", threading.local())
    values = integers(rng, SHAPE, "float64")
    np.testing.assert_array_equal(read(opened(tmp_path, values, **ARRAYS[name])), values)


@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "missing"])
def test_a_damaged_chunk_among_others_is_named(tmp_path: Path, damage: str) -> None:
    matrix = opened(tmp_path, integers(rng, SHAPE, "float64"), compressors=[ZstdCodec(checksum=True)])
    path = tmp_path / "A.zarr" / "c" / "5" / "4"
    stored = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        middle = len(stored) // 2
        flipped = stored[:middle] + bytes([stored[middle] ^ 255]) + stored[middle + 1 :]
        path.write_bytes({"cut": stored[:middle], "flipped": flipped, "longer": stored + bytes(9)}[damage])
    with pytest.raises(ExecutionError, match="chunk c/5/4"):
        read(matrix)


@each_value
@pytest.mark.parametrize("cores", [0, 1000])
@pytest.mark.parametrize("side", [16, 64, 256])
@pytest.mark.parametrize("name", ["zstd", "gzip", "blosc", "raw", "raw by columns", "raw, big-endian"])
def test_scratch_memory_is_that_of_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, side: int, cores: int
) -> None:
    monkeypatch.setattr(files, "MAPPING_CORES", cores)
    options = ARRAYS.get(name, {"compressors": None, "zarr_format": 2, "dtype": ">f4"})
    matrix = opened(tmp_path, integers(rng, (256, 256), "float64"), **options, chunks=(side, side))
    out, layout = np.empty((256, 256), matrix.dtype), matrix.layout
    for rows, cols, panel in (((0, 256), (0, 256), (256, 256)), ((3, side), (5, 250), (250, 250))):
        monkeypatch.setattr(files, "_of_thread", threading.local())
        matrix.read(rows, cols, out[slice(*rows), slice(*cols)])
        taken = sum(buffer.nbytes for buffer in vars(files._of_thread).values())
        # Scratch memory consists of whole pages.
        assert taken <= layout.decode_bytes + layout.line_scratch(panel) + files.PAGE


def test_a_thread_keeps_its_context() -> None:
    stored, out = np.frombuffer(numcodecs.Zstd().encode(bytes(1000)), np.uint8), np.ones(1000, np.uint8)
    found = list[Any]()

    def decompress() -> None:
        for _ in range(2):
            assert codecs.decompress("zstd", stored, out)
            found.append(codecs.decompresser("zstd"))

    decompress()
    other = threading.Thread(target=decompress)
    other.start()
    other.join()
    assert (out == 0).all()
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert found[0] is not found[2]


def test_contexts_are_freed_with_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = list[int]()
    right = codecs._Context.__del__

    def count(context: Any) -> None:
        freed.append(context.address)
        right(context)

    monkeypatch.setattr(codecs._Context, "__del__", count)
    for _ in range(3):
        thread = threading.Thread(target=codecs.decompresser, args=("zstd",))
        thread.start()
        thread.join()
    gc.collect()
    assert len(freed) == 3


@pytest.mark.parametrize("codec", [numcodecs.Zstd(checksum=True), numcodecs.Blosc("lz4", shuffle=0)])
@given(content=st.binary(min_size=1, max_size=300), other=st.none() | st.integers(1, 300), data=st.data())
def test_damaged_data_fills_nothing_else(
    codec: Any, content: bytes, other: int | None, data: st.DataObject
) -> None:
    asked = len(content) if other is None else other
    stored = bytearray(codec.encode(content))
    damaged = data.draw(st.sampled_from(["no", "flipped", "cut"]))
    if damaged == "flipped":
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    elif damaged == "cut":
        del stored[data.draw(st.integers(0, len(stored) - 1)) :]
    memory = np.full(asked + 64, 7, np.uint8)
    filled = codecs.decompress(codec.codec_id, np.frombuffer(stored, np.uint8), memory[32 : asked + 32])
    assert (memory[:32] == 7).all()
    assert (memory[asked + 32 :] == 7).all()
    if filled and (damaged != "flipped" or codec.codec_id == "zstd"):
        assert memory[32 : asked + 32].tobytes() == content
    assert filled or damaged != "no" or asked != len(content)
