"""The compressed streams of chunks are found in all kinds of frames, and damaged frames are refused."""

from itertools import product

import numpy as np
import pytest
from numcodecs import LZ4, Blosc, Zstd

from oocgemm.stores.compressors import decompress_into
from oocgemm.stores.frames import Codec, Streams, find_streams
from oocgemm.stores.zarr import codecs
from tests.decoding import Batch, batch, blosc, decoded, samples, zstd
from tests.suite import examples, slow

# Elements of a chunk. With the odd ones, the last block is shorter, and is not bitshuffled.
COUNTS = 24, 1 << 16, 100_003


def streams_of(given: Batch) -> Streams:
    return find_streams(given.buffer, given.start, given.size, given.chunk, given.codec)


@pytest.mark.parametrize("dtype", ["int8", "float32", "float64", *slow(("int16",), ("complex128",))])
@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_streams_of_blosc_frames_have_the_content_of_the_chunks(name: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for count, shuffle, level, block in product(COUNTS, (0, 1, 2), (0, 1, 5), (0, 4096)):
        given = blosc(name, level, shuffle, block, samples(rng, dtype, count))
        found = streams_of(given)
        assert not found.refused.any()
        for number, chunk in enumerate(given.chunks):
            np.testing.assert_array_equal(decoded(found, given, number), chunk.view(np.uint8))


def test_streams_of_zstd_frames_have_the_content_of_the_chunks() -> None:
    rng = np.random.default_rng(1)
    for count, level, checksum in product((100, 256, 300, 1 << 20), (-1, 0, 5, 12), (False, True)):
        given = zstd(level, checksum, samples(rng, "int8", count))
        found = streams_of(given)
        assert (found.refused == checksum).all()
        for number, chunk in enumerate(given.chunks if not checksum else ()):
            np.testing.assert_array_equal(decoded(found, given, number), chunk.view(np.uint8))


def test_a_chunk_has_many_streams_unless_it_is_one_frame_of_zstd() -> None:
    x = np.random.default_rng(1).integers(0, 64, 1 << 20).astype(np.float64)
    assert streams_of(blosc("zstd", 5, 1, 0, [x])).streams.tolist() == [32]
    assert streams_of(blosc("lz4", 5, 1, 0, [x])).streams.tolist() == [64]
    assert streams_of(zstd(0, False, [x])).streams.tolist() == [1]


def test_valid_frames_that_the_device_does_not_decode_are_refused() -> None:
    x = np.zeros(1 << 14)
    for compressor in (Blosc("zlib", 5), Blosc("blosclz", 5), LZ4()):
        assert streams_of(batch(compressor, Codec("zstd", True, 8), [x])).refused.all()
    other = batch(Blosc("zstd", 5), Codec("zstd", True, 4), [x])  # elements of eight bytes were shuffled
    assert streams_of(other).refused.all()
    given = zstd(0, False, [x])
    twice = np.concatenate([given.buffer, given.buffer])
    found = find_streams(twice, given.start, 2 * given.size, given.chunk, given.codec)
    assert found.refused.all()


def test_a_frame_that_is_refused_does_not_affect_the_others() -> None:
    rng = np.random.default_rng(1)
    given = blosc("zstd", 5, 1, 0, samples(rng, "float64", 1 << 15))
    size = given.size.copy()
    size[1] = 0
    found = find_streams(given.buffer, given.start, size, given.chunk, given.codec)
    assert found.refused.tolist() == [False, True, False]
    for number in (0, 2):
        np.testing.assert_array_equal(decoded(found, given, number), given.chunks[number].view(np.uint8))


KINDS = {
    "blosc-zstd": (Blosc("zstd", 5, 1), Codec("zstd", True, 8)),
    "blosc-lz4": (Blosc("lz4", 5, 2), Codec("lz4", True, 8)),
    "zstd": (Zstd(0), Codec("zstd", False, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_frames_are_refused_or_decode_to_what_the_host_decodes(kind: str) -> None:
    """Each stream is within its frame, and fills its part of the chunk. What streams contain is not checked:
    the decoder reports it, or decodes what the host would."""
    compressor, codec = KINDS[kind]
    rng = np.random.default_rng(1)
    whole = batch(compressor, codec, [rng.integers(0, 64, 4096).astype(np.float64)])
    refused = 0
    for _ in range(count := examples(10_000 // len(KINDS), 500)):
        buffer = whole.buffer.copy()
        places = rng.integers(0, min(buffer.size, rng.choice([20, 64, buffer.size])), rng.integers(1, 4))
        buffer[places] = rng.integers(0, 256, len(places))
        size = np.array([buffer.size if rng.random() < 0.8 else rng.integers(0, buffer.size)])
        given = Batch(buffer[: size[0]], whole.start, size, whole.chunks, codec)
        if not given.buffer.size:
            continue
        found = streams_of(given)
        refused += int(found.refused[0])
        if found.refused[0]:
            assert not found.size.size
            continue
        assert (found.source >= 0).all()
        assert (found.source + found.size <= size[0]).all()
        order = np.argsort(found.target)
        ends = np.cumsum(found.length[order])
        assert ends[-1] == given.chunk
        np.testing.assert_array_equal(found.target[order][1:], ends[:-1])
        try:
            content = decoded(found, given, 0)
        except (RuntimeError, AssertionError):
            continue  # the decoder reports damage within a stream
        expected = np.empty(given.chunk, np.uint8)
        decompress_into(compressor, given.buffer, expected)
        np.testing.assert_array_equal(content, expected)
    assert refused > count // 10


@pytest.mark.parametrize("library", [True, False])
def test_checksums_are_those_of_crc32c(monkeypatch: pytest.MonkeyPatch, library: bool) -> None:
    if not library:
        monkeypatch.setattr(codecs, "_without_gil", lambda: None)
    content = np.frombuffer(b"123456789" + (0xE3069283).to_bytes(4, "little"), np.uint8)
    assert codecs.checked_content(content).tobytes() == b"123456789"  # the check value of CRC-32C
    with pytest.raises(ValueError, match="does not match"):
        codecs.checked_content(content[::-1].copy())
