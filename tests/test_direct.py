"""Chunks that oocgemm reads and writes without zarr: both give the same values as zarr."""

import threading
import time
from pathlib import Path
from typing import Any

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

from oocgemm.stores.zarr import through
from oocgemm.stores.zarr.matrix import ZarrMatrix
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
