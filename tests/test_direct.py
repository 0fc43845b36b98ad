"""Chunks that oocgemm reads and writes without zarr: both give the same values as zarr."""

import ctypes
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

from oocgemm.errors import ExecutionError
from oocgemm.stores import files
from oocgemm.stores.arrays import ArrayMatrix
from oocgemm.stores.npy import NpyMatrix, create_npy, open_npy
from oocgemm.stores.zarr import codecs as encoding
from oocgemm.stores.zarr import through
from oocgemm.stores.zarr.matrix import ZarrMatrix
from oocgemm.system.memory import allocate
from tests.problems import DTYPES
from tests.suite import examples

V2_COMPRESSORS: list[Any] = [
    None,
    numcodecs.Zstd(level=1),
    numcodecs.Blosc(cname="lz4"),
    numcodecs.Blosc(cname="zstd", shuffle=2),
    numcodecs.GZip(level=1),
    numcodecs.LZ4(),
    numcodecs.Zlib(level=1),
    numcodecs.BZ2(level=1),
    numcodecs.LZMA(),
]
V3_COMPRESSORS: list[Any] = [
    None,
    ZstdCodec(level=1),
    ZstdCodec(level=1, checksum=True),
    BloscCodec(cname="lz4"),
    BloscCodec(cname="blosclz", shuffle="noshuffle"),
    GzipCodec(level=1),
]
EVERYTHING = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def draw_array(data: st.DataObject, place: Path, **fixed: Any) -> "zarr.Array[Any]":
    """Create an empty array with random chunks, dtype, fill value and codecs."""
    draw = data.draw
    chunks = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    options: dict[str, Any] = {
        "shape": draw(st.tuples(st.integers(1, 30), st.integers(1, 30))),
        "chunks": chunks,
        "dtype": dtype,
        "fill_value": draw(st.sampled_from([0, 3, float("nan"), float("inf")])),
        "zarr_format": draw(st.sampled_from([2, 3])),
    }
    options |= fixed
    if options["zarr_format"] == 2:
        options["dtype"] = dtype.newbyteorder(draw(st.sampled_from("<>")))
        options["compressors"] = draw(st.sampled_from(V2_COMPRESSORS))
        options["order"] = draw(st.sampled_from("CF"))
        return zarr.create_array(place, **options)
    codecs = [draw(st.sampled_from(V3_COMPRESSORS)), Crc32cCodec() if draw(st.booleans()) else None]
    turned = draw(st.sampled_from([None, (0, 1), (1, 0)]))
    endian = BytesCodec(endian=draw(st.sampled_from(["little", "big"])))
    filters = [TransposeCodec(order=turned)] if turned else []
    compressors = [codec for codec in codecs if codec]
    if draw(st.booleans()) and "chunks" not in fixed:
        inner = tuple(c * draw(st.integers(1, 3)) for c in chunks)
        options["chunks"] = inner
        options["serializer"] = ShardingCodec(
            chunk_shape=chunks,
            codecs=[*filters, endian, *compressors],
            index_codecs=draw(
                st.sampled_from([[BytesCodec(), Crc32cCodec()], [BytesCodec()], [BytesCodec(endian="big")]])
            ),
            index_location=draw(st.sampled_from(["start", "end"])),
        )
        return zarr.create_array(place, compressors=None, **options)
    return zarr.create_array(place, filters=filters, serializer=endian, compressors=compressors, **options)


def draw_block(data: st.DataObject, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    def span(extent: int) -> tuple[int, int]:
        one, other = data.draw(st.integers(0, extent)), data.draw(st.integers(0, extent))
        return min(one, other), max(one, other)

    return [span(extent) for extent in shape]


@EVERYTHING
@given(data=st.data())
def test_any_block_of_any_layout_is_what_zarr_reads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    array = draw_array(data, tmp_path_factory.mktemp("read") / "A")
    values = data.draw(st.integers(0, 2**32).map(np.random.default_rng)).integers(-9, 9, array.shape)
    # Only some rows are written. Chunks without any of them have no file, and neither do chunks that contain
    # only the fill value.
    rows = draw_block(data, array.shape[:1])[0]
    array[slice(*rows)] = values[slice(*rows)]
    matrix = ZarrMatrix("A", array)
    assert matrix.direct is not None
    for _ in range(3):
        rows, cols = draw_block(data, array.shape)
        room = np.full((30, 40), 7, matrix.dtype)
        left = data.draw(st.integers(0, 9))
        out = room[: rows[1] - rows[0], left : left + cols[1] - cols[0]]
        if data.draw(st.booleans()):
            out = np.ascontiguousarray(out)
        matrix.read(rows, cols, out)
        np.testing.assert_array_equal(out, array[slice(*rows), slice(*cols)])


@EVERYTHING
@given(data=st.data())
def test_zarr_reads_what_was_written_past_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    array = draw_array(data, tmp_path_factory.mktemp("write") / "C")
    matrix = ZarrMatrix("C", array)
    rng = data.draw(st.integers(0, 2**32).map(np.random.default_rng))
    values = rng.integers(-9, 9, array.shape).astype(matrix.dtype)
    height, width = matrix.layout.write_chunk
    for top in range(0, array.shape[0], 2 * height):
        for left in range(0, array.shape[1], width):
            rows = top, min(top + 2 * height, array.shape[0])
            cols = left, min(left + width, array.shape[1])
            part = values[slice(*rows), slice(*cols)]
            matrix.write(rows, cols, part if data.draw(st.booleans()) else np.asfortranarray(part))
    np.testing.assert_array_equal(zarr.open_array(array.store_path.store, mode="r")[:], values)
    out = np.empty_like(values)
    matrix.read((0, array.shape[0]), (0, array.shape[1]), out)
    np.testing.assert_array_equal(out, values)
    leftovers = [p.name for p in Path(str(matrix.describe()["path"])[7:]).rglob(".*.partial")]
    assert leftovers == []


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec", "ignore:Array is unsupported")
@pytest.mark.parametrize("reader", ["zarr", "zarrs", "told"])
@pytest.mark.parametrize(
    "options",
    [
        {"zarr_format": 2, "compressors": None, "filters": [numcodecs.Shuffle(8)]},
        {"zarr_format": 2, "compressors": None, "filters": [numcodecs.Shuffle(8)], "dtype": ">f8"},
        {"zarr_format": 2, "compressors": None, "filters": [numcodecs.Delta("f8")]},
        {"chunks": (8, 8), "serializer": ShardingCodec(chunk_shape=(4, 4)), "compressors": [GzipCodec()]},
        {"compressors": [ZstdCodec(), GzipCodec()]},
        {"compressors": [Crc32cCodec(), ZstdCodec()]},
    ],
)
def test_what_is_not_understood_is_left_to_zarr(
    tmp_path: Path, options: dict[str, Any], reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks whose codec oocgemm does not know are read by zarr.

    zarr uses the package zarrs if that is installed or configured.
    """
    if reader == "zarr":
        monkeypatch.setattr(through, "FAST_PIPELINE", "not_installed")
    told = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"} if reader == "told" else {}
    values = np.arange(130.0).reshape(13, 10)
    with zarr.config.set(told):
        given = {"chunks": (4, 4), "dtype": "f8"} | options
        array = zarr.create_array(tmp_path / "A", shape=(13, 10), fill_value=3, **given)
        matrix = ZarrMatrix("A", array)
    assert matrix.direct is None
    matrix.write((0, 8), (0, 10), values[:8])
    values[8:] = 3
    for room in (np.empty((7, 5)), np.empty((9, 9))[1:8, 2:7]):
        matrix.read((2, 9), (3, 8), room)
        np.testing.assert_array_equal(room, values[2:9, 3:8])
    delta = any(isinstance(codec, numcodecs.Delta) for codec in options.get("filters", ()))
    by_zarrs = type(matrix._read.async_array.codec_pipeline).__name__ == "ZarrsCodecPipeline"
    assert by_zarrs is (reader == "told" or (reader == "zarrs" and not delta))


def test_concurrent_opens_restore_the_zarr_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thread to start ends first.

    The second must not restore the settings that the first one had set.
    """
    compressors = [ZstdCodec(), GzipCodec()]
    array = zarr.create_array(
        tmp_path / "A", shape=(8, 8), chunks=(4, 4), dtype="f8", compressors=compressors
    )
    right, turns = zarr.AsyncArray, iter((0.2, 0.4))

    def slow(*arguments: Any) -> Any:
        time.sleep(next(turns))
        return right(*arguments)

    monkeypatch.setattr(zarr, "AsyncArray", slow)
    before = zarr.config.get("codec_pipeline.path")
    both = [threading.Thread(target=ZarrMatrix, args=("A", array)) for _ in range(2)]
    for thread in both:
        thread.start()
        time.sleep(0.1)
    for thread in both:
        thread.join()
    assert next(turns, None) is None
    assert zarr.config.get("codec_pipeline.path") == before


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
        encoding.Encoding(np.dtype("f8")).decode(np.zeros(504, np.uint8), (8, 8), None)


@pytest.mark.parametrize("length", [12, 15, 527])
def test_what_lies_behind_a_chunk_is_not_taken_for_its_end(length: int) -> None:
    """In a shard other bytes follow the chunk.

    A chunk whose own header gives too long a length must not read them.
    """
    values = np.random.default_rng(0).standard_normal((8, 8))
    blosc = encoding.Encoding(np.dtype("f8"), compressor=numcodecs.Blosc("lz4", shuffle=0))
    stored = np.frombuffer(blosc.compressor.encode(values), np.uint8)
    assert len(stored) == 528
    np.testing.assert_array_equal(blosc.decode(stored, (8, 8), None), values)
    with pytest.raises(ValueError, match=f"blosc data of {length} bytes is truncated"):
        blosc.decode(stored[:length], (8, 8), None)


def test_a_chunk_may_be_of_several_gzip_members() -> None:
    values, gzip = np.random.default_rng(0).standard_normal((8, 8)), numcodecs.GZip()
    stored = np.frombuffer(gzip.encode(values[:3]) + gzip.encode(values[3:]), np.uint8)
    found = encoding.Encoding(np.dtype("f8"), compressor=gzip).decode(stored, (8, 8), None)
    np.testing.assert_array_equal(found, values)


def test_a_checksum_is_that_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_CHECKSUM_PART", 100)
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
    matrix, right = ZarrMatrix("A", array), files.OpenFile.__init__

    def cut(self: files.OpenFile, path: Path) -> None:
        right(self, path)
        os.truncate(path, 0)

    monkeypatch.setattr(files.OpenFile, "__init__", cut)
    with pytest.raises(ExecutionError, match=r"chunk c/0/0 in .*A ends .*damaged or truncated"):
        matrix.read((0, 16), (0, 16), np.empty((16, 16)))


@pytest.mark.parametrize("options", [{}, {"order": "F"}, {"compressors": numcodecs.Zstd()}])
def test_threads_read_side_by_side(tmp_path: Path, options: dict[str, Any]) -> None:
    values = np.random.default_rng(0).standard_normal((400, 300))
    array = zarr.create_array(
        tmp_path / "A", data=values, chunks=(50, 60), zarr_format=2, **{"compressors": None} | options
    )
    matrix, out = ZarrMatrix("A", array), np.empty_like(values)

    def read(first: int) -> None:
        for top in range(first, 400, 100):
            matrix.read((top, top + 25), (0, 300), out[top : top + 25])

    threads = [threading.Thread(target=read, args=(first,)) for first in (0, 25, 50, 75)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        ((512, 512), "every row on whole sectors"),
        ((300, 1000), "rows that are not"),
        ((1001, 1001), "an odd number of bytes, the last of them no whole sector"),
    ],
)
def test_reading_past_the_page_cache_gives_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunk: tuple[int, int],
    resident: bool,
    why: str,
) -> None:
    monkeypatch.setattr(files, "resident", lambda address, size: resident)
    values = np.random.default_rng(0).standard_normal((1100, 1100))
    array = zarr.create_array(tmp_path / "A", data=values, chunks=chunk, compressors=None)
    for cols in ((0, 1100), (0, chunk[1])):
        matrix = ZarrMatrix("A", array)
        out = allocate(1100 * 1100 * 8).view("f8")[: 1100 * cols[1]].reshape(1100, cols[1])
        for _ in ("past the cache", "through it"):
            out[...] = np.nan
            matrix.read((0, 1100), cols, out)
            np.testing.assert_array_equal(out, values[:, : cols[1]])


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_reads_fall_back_to_the_page_cache_without_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    place, data = tmp_path / "file", np.random.default_rng(0).bytes(1 << 21)
    place.write_bytes(data)
    preadv = files._fill

    def refuse(descriptor: int, rows: Any, offset: int, done: int = 0, flags: int = 0) -> int:
        if flags or fcntl.fcntl(descriptor, fcntl.F_GETFL) & files.O_DIRECT:
            raise OSError(errno.EINVAL if not flags else error, "no")
        return preadv(descriptor, rows, offset, done, flags)

    monkeypatch.setattr(files, "resident", lambda address, size: False)
    monkeypatch.setattr(files, "_fill", refuse)
    out = files.scratch(1 << 21)
    out[...] = 0
    with files.OpenFile(place) as file:
        file.read(0, out, past_cache=True)
    assert out.tobytes() == data


@pytest.mark.parametrize(("share", "expected"), [(0.5, [True, False, False]), (0, [True, True, True])])
def test_what_is_read_again_is_cached_if_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, expected: list[bool]
) -> None:
    monkeypatch.setattr("oocgemm.stores.files.MAX_CACHED_SHARE", share)
    asked: list[bool] = []
    read = files.OpenFile.read

    def note(file: files.OpenFile, offset: int, out: Any, *, past_cache: bool) -> None:
        asked.append(past_cache)
        read(file, offset, out, past_cache=past_cache)

    monkeypatch.setattr(files.OpenFile, "read", note)
    matrix = ZarrMatrix("A", zarr.create_array(tmp_path / "A", data=np.eye(8), compressors=None))
    for _ in expected:
        matrix.read((0, 8), (0, 8), np.empty((8, 8)))
    assert asked == expected


def test_asking_what_is_in_the_page_cache_is_answered(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(bytes(1 << 20))
    with files.OpenFile(place) as file:
        file.mapped(0, 1 << 20).sum()
        view, _ = file._map(4096, 1 << 19)
        assert files.resident(files._address(view), len(view))


@pytest.mark.parametrize(("held", "answer"), [(8, True), (4, True), (3, False), (0, False)])
def test_half_of_the_pages_looked_at_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, answer: bool
) -> None:
    place = tmp_path / "file"
    place.write_bytes(bytes(1 << 20))
    asked: list[int] = []

    def mincore(address: int, length: int, found: int) -> int:
        asked.append(address)
        # Only the lowest bit says whether the page is cached, the others are undefined.
        ctypes.c_ubyte.from_address(found).value = 0xFE | (len(asked) <= held)
        return 0

    monkeypatch.setattr(files, "_mincore", mincore)
    with files.OpenFile(place) as file:
        view, _ = file._map(0, 1 << 20)
        assert files.resident(files._address(view), len(view)) is answer
    assert [address - asked[0] for address in asked] == list(range(0, 1 << 20, 1 << 17))


def test_rows_of_any_number_and_place_are_filled(tmp_path: Path) -> None:
    place = tmp_path / "file"
    values = np.arange(3000 * 7, dtype="u2").reshape(3000, 7)
    place.write_bytes(b"head" + values.tobytes())
    with files.OpenFile(place) as file:
        out = np.zeros((3000, 9), "u2")
        file.read(4, out[:, 1:8], past_cache=True)
        np.testing.assert_array_equal(out[:, 1:8], values)
        assert not out[:, [0, 8]].any()
        with pytest.raises(EOFError, match="ends 4 bytes too early"):
            file.read(8, out[:, 1:8], past_cache=False)


def test_scratch_is_used_again_and_grows() -> None:
    first = files.scratch(100)
    assert files.scratch(50).ctypes.data == first.ctypes.data
    assert files.scratch(1 << 20).size == 1 << 20


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("cols", [(0, 700), (100, 300), (699, 700)])
def test_blocks_of_mapped_files_are_what_numpy_reads(
    tmp_path: Path, order: Any, cols: tuple[int, int]
) -> None:
    values = np.random.default_rng(0).standard_normal((600, 700))
    np.save(tmp_path / "A.npy", np.asarray(values, order=order))
    for matrix in (
        open_npy("A", tmp_path / "A.npy"),
        ArrayMatrix("A", np.load(tmp_path / "A.npy", mmap_mode="r")[::-1][::-1]),
    ):
        out = np.empty((500, cols[1] - cols[0]))
        matrix.read((77, 577), cols, out)
        np.testing.assert_array_equal(out, values[77:577, slice(*cols)])


def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "replace", Mock(side_effect=full))
    monkeypatch.setattr(NpyMatrix, "reserve", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space"):
        files.publish(tmp_path / "chunk", np.ones((4, 4)), 128)
    with pytest.raises(OSError, match="No space"):
        create_npy("C", tmp_path / "C.npy", (4, 4), np.dtype("f8"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not files.O_DIRECT, reason="there is no way past the page cache")
@pytest.mark.parametrize("call", ["open", "pwritev"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSPC])
def test_writes_use_the_page_cache_only_where_direct_io_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    data = files.scratch(8192)
    data[...] = np.arange(8192) % 251
    right, flags = getattr(os, call), []

    def refuse(target: Any, *rest: Any) -> Any:
        flags.append(rest[0] if call == "open" else fcntl.fcntl(target, fcntl.F_GETFL))
        if flags[-1] & files.O_DIRECT:
            raise OSError(number, "no")
        return right(target, *rest)

    monkeypatch.setattr(os, call, refuse)
    if number == errno.EINVAL:
        files.publish(tmp_path / "chunk", data, 8000)
        assert (tmp_path / "chunk").read_bytes() == data[:8000].tobytes()
    else:
        with pytest.raises(OSError, match="no"):
            files.publish(tmp_path / "chunk", data, 8000)
        assert list(tmp_path.iterdir()) == []
    assert len(flags) == (2 if number == errno.EINVAL else 1)
