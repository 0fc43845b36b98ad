"""The compressed streams of a chunk are found in all kinds of frames, and damaged frames are refused."""

from itertools import product

import numpy as np
import pytest
from numcodecs import LZ4, Blosc

from oocgemm.stores import codecs
from oocgemm.stores.codecs import Codec, Frame, decompress_into, frame_of
from tests.support.decoding import Batch, batch, blosc, composed, samples, zstd
from tests.support.suite import each_value, examples, slow

# Elements of a chunk. With the odd ones, the last block is shorter, and is not bitshuffled.
COUNTS = 24, 1 << 16, 100_003


def frames_of(given: Batch) -> list[Frame | None]:
    parts = zip(given.start, given.size, strict=True)
    return [frame_of(given.buffer[at : at + size].tobytes(), given.chunk, given.codec) for at, size in parts]


def equal(given: Batch) -> None:
    for number, frame in enumerate(frames_of(given)):
        assert frame is not None
        stored = given.buffer[given.start[number] :][: given.size[number]]
        found = composed(frame, stored, given.codec)
        np.testing.assert_array_equal(found, given.chunks[number].view(np.uint8))


@each_value
@pytest.mark.parametrize("dtype", ["int8", "float32", "float64", *slow(("int16",), ("complex128",))])
@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_streams_of_blosc_frames_have_the_content_of_the_chunks(name: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for count, shuffle, level, block in product(COUNTS, (0, 1, 2), (0, 1, 5), (0, 4096)):
        equal(blosc(name, level, shuffle, block, samples(rng, dtype, count)))


def test_frames_of_zstd_are_one_stream_and_those_with_checksums_are_refused() -> None:
    rng = np.random.default_rng(1)
    for count, level in product((100, 256, 300, 1 << 20), (-1, 0, 5, 12)):
        chunks = samples(rng, "int8", count)
        equal(zstd(level, False, chunks))
        assert frames_of(zstd(level, True, chunks)) == [None, None, None]


def test_a_chunk_has_many_streams_unless_it_is_one_frame_of_zstd() -> None:
    x = np.random.default_rng(1).integers(0, 64, 1 << 20).astype(np.float64)
    for given, count in (
        (blosc("zstd", 5, 1, 0, [x]), 32),
        (blosc("lz4", 5, 1, 0, [x]), 64),
        (zstd(0, False, [x]), 1),
    ):
        (frame,) = frames_of(given)
        assert frame is not None
        assert len(frame.streams) == count


def test_valid_frames_that_the_device_does_not_decode_are_refused() -> None:
    x = np.zeros(1 << 14)
    for compressor in (Blosc("zlib", 5), Blosc("blosclz", 5), LZ4()):
        assert frames_of(batch(compressor, Codec("zstd", True, 8), [x])) == [None]
    other = batch(Blosc("zstd", 5), Codec("zstd", True, 4), [x])  # elements of eight bytes were shuffled
    assert frames_of(other) == [None]


@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_damaged_headers_are_refused_or_describe_what_the_host_decodes(name: str) -> None:
    compressor, codec = Blosc(name, 5, 1), Codec(name, True, 8)
    rng = np.random.default_rng(1)
    whole = batch(compressor, codec, [rng.integers(0, 64, 4096).astype(np.float64)])
    refused = 0
    for _ in range(count := examples(5000, 300)):
        buffer = whole.buffer.copy()
        places = rng.integers(0, min(buffer.size, rng.choice([20, 64])), rng.integers(1, 4))
        buffer[places] = rng.integers(0, 256, len(places))
        buffer = buffer[: buffer.size if rng.random() < 0.8 else rng.integers(1, buffer.size)]
        frame = frame_of(buffer.tobytes(), whole.chunk, codec)
        refused += frame is None
        if frame is None:
            continue
        assert sum(stream.length for stream in frame.streams) == whole.chunk
        assert all(16 <= x.source <= x.source + x.size <= buffer.size for x in frame.streams)
        try:
            content = composed(frame, buffer, codec)
        except RuntimeError:
            continue  # the decoder reports damage within a stream
        expected = np.empty(whole.chunk, np.uint8)
        decompress_into(compressor, buffer, expected)
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
