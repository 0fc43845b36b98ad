"""Chunks that oocgemm reads and writes without zarr: both give the same values as zarr."""

import threading
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

from oocgemm.stores.zarr_matrix import ZarrMatrix
from tests.support.problems import DTYPES
from tests.support.suite import examples

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
    height, width = matrix.layout.writing.chunk
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
