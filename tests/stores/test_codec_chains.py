"""Chains of codecs that oocgemm does not decode: zarr's own pipeline reads and writes them, bit for bit.

The package zarrs, a pipeline that users can configure, decodes some of these chains to other elements.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from numpy.typing import NDArray
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)
from zarr.codecs import numcodecs as extensions

import oocgemm
from oocgemm.stores import codecs
from oocgemm.stores.codecs import Zstd
from oocgemm.stores.zarr_matrix import ZarrMatrix
from tests.support.suite import thinned

pytestmark = pytest.mark.filterwarnings(
    "ignore:Combining a `sharding_indexed` codec",
    "ignore:overflow encountered in cast:RuntimeWarning",  # zarr decodes some chains to arbitrary elements
    "ignore:invalid value encountered in cast:RuntimeWarning",
    "ignore:Numcodecs codecs are not in",
    "ignore:Array is unsupp",
)
DTYPES = [order + dtype for dtype in ("f2", "f4", "f8", "c8", "c16") for order in "<>"] + ["|i1"]
SHAPE, CHUNKS = (13, 10), (4, 3)
# Blocks that begin and end inside chunks, at their borders, and at the edges of the array.
BLOCKS = (((0, 13), (0, 10)), ((2, 9), (1, 8)), ((4, 8), (3, 6)), ((12, 13), (9, 10)), ((5, 6), (0, 10)))
ZARRS = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
Chain = Mapping[str, Any]


def chains_v2(dtype: np.dtype[Any]) -> Iterator[tuple[str, Chain]]:
    """Yield filters and compressors of zarr format 2, for elements of a dtype with a byte order."""
    filters: dict[str, Sequence[Any]] = {
        "shuffle": [numcodecs.Shuffle(dtype.itemsize)],
        "delta": [numcodecs.Delta(dtype.str)],
    }
    if dtype.kind == "f":
        for stored in ("<i2", ">i2", "<i4", ">i4", "u1"):
            filters[f"scaled {stored}"] = [numcodecs.FixedScaleOffset(-9, 2, dtype.str, stored)]
        filters["scaled, shuffle"] = [
            numcodecs.FixedScaleOffset(-9, 2, dtype.str, "<i2"),
            numcodecs.Shuffle(2),
        ]
        filters["quantize"] = [numcodecs.Quantize(1, dtype.str)]
        filters["as f4"] = [numcodecs.AsType("<f4", dtype.str)]
        filters["as >f8"] = [numcodecs.AsType(">f8", dtype.str)]
    filters["delta, shuffle"] = [*filters["delta"], *filters["shuffle"]]
    filters["checks"] = [*filters["shuffle"], numcodecs.CRC32(), numcodecs.Fletcher32()]
    compressors = (None, numcodecs.Zlib(1), numcodecs.Zstd(1), numcodecs.Blosc("lz4", shuffle=1))
    for name, chain in filters.items():
        for compressor, order in zip(compressors, "CFCF", strict=True):
            options = {"filters": chain, "compressors": compressor, "order": order}
            yield f"{name}, {compressor}, {order}", options


def chains_v3(dtype: np.dtype[Any]) -> Iterator[tuple[str, Chain]]:
    """Yield chains of codecs of zarr format 3. The "bytes" codec has the byte order of the dtype."""
    endian = BytesCodec(endian="big" if dtype.byteorder == ">" else "little")
    native = dtype.newbyteorder("=").name
    behind: list[list[Any]] = [
        [ZstdCodec(level=1), GzipCodec(level=1)],
        [Crc32cCodec(), ZstdCodec(level=1)],
        [BloscCodec(cname="lz4"), GzipCodec(level=1), Crc32cCodec()],
        [extensions.Zlib(level=1)],
        [extensions.LZ4()],
        [extensions.BZ2(level=1), ZstdCodec(level=1)],
        [extensions.Shuffle(elementsize=dtype.itemsize), ZstdCodec(level=1)],
        [extensions.CRC32(), extensions.Adler32()],
    ]
    turned = TransposeCodec(order=(1, 0))
    before: list[list[Any]] = [[extensions.Delta(dtype=native)], [turned, turned]]
    if dtype.kind == "f":
        for stored in ("<i2", ">i2", "i4"):
            before.append([extensions.FixedScaleOffset(offset=-9, scale=2, dtype=native, astype=stored)])
        before.append([extensions.Quantize(digits=1, dtype=native)])
        before.append([extensions.AsType(encode_dtype="float32", decode_dtype=native)])
        before.append([extensions.BitRound(keepbits=7)])
    before += [[turned, *before[0]]]
    for filters in ([], [turned]):
        for compressors in behind:
            yield (
                f"{filters}, {compressors}",
                {"filters": filters, "serializer": endian, "compressors": compressors},
            )
    for filters in before:
        for compressors in ([], [ZstdCodec(level=1)], behind[0]):
            yield (
                f"{filters}, {compressors}",
                {"filters": filters, "serializer": endian, "compressors": compressors},
            )
    inners: list[list[Any]] = [[endian], [turned, endian, ZstdCodec(level=1)], [endian, *behind[0]]]
    for inner in inners:
        shards = ShardingCodec(chunk_shape=CHUNKS, codecs=inner)
        nested = ShardingCodec(chunk_shape=(8, 6), codecs=[shards])
        yield f"shards of {inner}, gzip", {"serializer": shards, "compressors": [GzipCodec(level=1)]}
        yield (
            f"nested shards of {inner}",
            {"serializer": nested, "compressors": None, "chunks": (16, 12)},
        )
        shards = ShardingCodec(chunk_shape=CHUNKS[::-1], codecs=inner)
        yield f"turned shards of {inner}", {"filters": [turned], "serializer": shards, "compressors": None}


def arrays(folder: Path, dtype: np.dtype[Any], zarr_format: int) -> Iterator[tuple[str, Path]]:
    """Create an array of each chain, and yield the name of the chain and the place.

    The last row of chunks, or of shards, is not stored.
    """
    values = some_elements(dtype)
    chains = chains_v2 if zarr_format == 2 else chains_v3
    for number, (name, chain) in enumerate(chains(dtype)):
        options: dict[str, Any] = {"chunks": (8, 6) if "shards" in name else CHUNKS, "fill_value": 3} | dict(
            chain
        )
        options |= {"shape": SHAPE, "zarr_format": zarr_format}
        options["dtype"] = dtype if zarr_format == 2 else dtype.newbyteorder("=")
        place = folder / str(number)
        try:
            array: Any = zarr.create_array(place, **options)
            array[:8] = values[:8]
        except (ValueError, TypeError, NotImplementedError):
            continue  # zarr itself cannot use such a chain
        yield name, place


def whole(place: Path) -> NDArray[Any]:
    """Read an array with zarr's own pipeline. Return its elements in native byte order."""
    array: Any = zarr.open_array(place, mode="r")
    elements: NDArray[Any] = np.asarray(array[:], array.dtype.newbyteorder("="))
    return elements


def assert_same_bits(found: NDArray[Any], expected: NDArray[Any], name: str) -> None:
    np.testing.assert_array_equal(found, expected, name)
    assert found.tobytes() == expected.tobytes(), name


def some_elements(dtype: np.dtype[Any]) -> NDArray[Any]:
    values = np.random.default_rng(0).integers(-9, 9, (2, *SHAPE))
    chosen: NDArray[Any] = values[0] + 1j * values[1] if dtype.kind == "c" else values[0]
    return chosen.astype(dtype.newbyteorder("="))


@pytest.mark.parametrize("configured", thinned(["zarr", "zarrs"], ["zarrs"]))
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", thinned(DTYPES, [">f4"]))
def test_every_block_of_every_chain_is_what_zarr_reads(
    tmp_path: Path, dtype: str, zarr_format: int, configured: str
) -> None:
    tried = 0
    for name, place in arrays(tmp_path, np.dtype(dtype), zarr_format):
        expected = whole(place)
        with zarr.config.set(ZARRS) if configured == "zarrs" else nullcontext():
            matrix = ZarrMatrix("A", zarr.open_array(place, mode="r"))
            if matrix.direct is not None:
                continue
            tried += 1
            for rows, cols in BLOCKS:
                room = np.full((15, 12), 99, matrix.dtype)
                out = room[1 : 1 + rows[1] - rows[0], 2 : 2 + cols[1] - cols[0]]
                matrix.read(rows, cols, out)
                assert_same_bits(out, expected[slice(*rows), slice(*cols)], f"{name}, {rows}, {cols}")
    assert tried > 10


@pytest.mark.slow
@pytest.mark.parametrize("configured", ["zarr", "zarrs"])
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zarr_reads_what_is_written_in_every_chain(
    tmp_path: Path, dtype: str, zarr_format: int, configured: str
) -> None:
    values = some_elements(np.dtype(dtype))
    for name, place in arrays(tmp_path, np.dtype(dtype), zarr_format):
        with zarr.config.set(ZARRS) if configured == "zarrs" else nullcontext():
            ZarrMatrix("C", zarr.open_array(place, mode="r+")).write((0, 13), (0, 10), values)
        found = whole(place)
        zarr.open_array(place, mode="r+")[:] = values
        assert_same_bits(found, whole(place), name)


@pytest.mark.parametrize("configured", ["zarr", "zarrs"])
def test_products_of_a_user_who_configured_another_pipeline(tmp_path: Path, configured: str) -> None:
    values = some_elements(np.dtype("c16"))
    chain: Any = {"serializer": BytesCodec(endian="big"), "compressors": [ZstdCodec(), GzipCodec()]}
    for name in "AC":
        array = zarr.create_array(tmp_path / name, shape=SHAPE, chunks=CHUNKS, dtype="c16", **chain)
        array[:] = values
    with zarr.config.set(ZARRS) if configured == "zarrs" else nullcontext():
        a, c = (zarr.open_array(tmp_path / name, mode="r+") for name in "AC")
        result = oocgemm.gemm(a, np.eye(10, dtype="c16"), c, beta=1, tile="4x3x3", backend="host")
    assert result.out is c
    np.testing.assert_array_equal(whole(tmp_path / "C"), 2 * values)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("level", [-5, 0, 3, 22, 40])
def test_zstd_compresses_to_the_same_bytes_as_numcodecs(level: int, checksum: bool) -> None:
    ours, theirs = Zstd(level, checksum), numcodecs.Zstd(level, checksum)
    rng = np.random.default_rng(0)
    contents = [rng.integers(0, bound, size, np.uint8) for bound in (3, 255) for size in (0, 1, 100, 1 << 17)]
    for content in (*contents, rng.standard_normal(10_000), np.zeros(1 << 20, "i4")):
        encoded = ours.encode(content)
        assert bytes(encoded) == theirs.encode(content)
        if content.size:  # numcodecs refuses to decode nothing
            assert bytes(ours.decode(encoded)) == content.tobytes()
    assert ours.get_config() == theirs.get_config()
    assert Zstd(**{name: value for name, value in ours.get_config().items() if name != "id"}) == ours


def test_zstd_fails_like_numcodecs() -> None:
    ours, theirs = Zstd(), numcodecs.Zstd()
    huge = np.broadcast_to(np.uint8(0), (1 << 31,))
    damaged = np.arange(30, dtype=np.uint8)
    for expected, act, given in ((theirs.encode, ours.encode, huge), (theirs.decode, ours.decode, damaged)):
        with pytest.raises((ValueError, RuntimeError)) as refused:
            expected(given)
        with pytest.raises(type(refused.value), match=re.escape(str(refused.value))):
            act(given)


def test_zstd_without_the_library_is_that_of_numcodecs(monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.arange(1000)
    expected = bytes(Zstd(3).encode(content))
    monkeypatch.setattr(codecs, "_library", lambda name: None)
    assert bytes(Zstd(3).encode(content)) == expected
