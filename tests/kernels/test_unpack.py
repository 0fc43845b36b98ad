"""The kernels that decode chunks, run on the processor, decode all valid ones, and accept no other bytes."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import settings
from numcodecs import Blosc, Zstd

from oocgemm.stores.codecs import Codec, decompress_into
from tests.support.backends_here import CUDA
from tests.support.decoding import Array, Batch, batch, blosc, samples, zstd
from tests.support.suite import ALL, examples, slow
from tests.support.unpacking import unpacked, unpacked_on_gpu

rng = np.random.default_rng(1)
# Elements of a chunk. With the odd ones, the last block is shorter, and is not bitshuffled.
COUNTS = (24, 1 << 15, 100_003) if settings().max_examples >= ALL else (24, 1 << 13, 20_003)


def equal(given: Batch) -> None:
    for found, chunk in zip(unpacked(given), given.chunks, strict=True):
        assert found is not None
        np.testing.assert_array_equal(found, chunk.view(np.uint8))


def contents(count: int) -> dict[str, Array]:
    """Return data for which compressors use all kinds of blocks, tables and codes."""
    text = " ".join(str(i * i) for i in range(count // 4))[:count].ljust(count).encode()
    return {
        "few values": rng.integers(0, 64, count // 8).astype(np.float64),
        "planes": rng.integers(0, 64, count // 8).astype(np.float64).view(np.uint8).reshape(-1, 8).T.copy(),
        "normal": rng.standard_normal(count // 4).astype(np.float32),
        "smooth": np.cumsum(rng.standard_normal(count // 4)).astype(np.float32),
        "genotypes": rng.choice(np.array([0, 1, 2, -1], np.int8), count, p=[0.6, 0.25, 0.13, 0.02]),
        "zeros": np.zeros(count, np.int8),
        "sparse": ((rng.random(count) < 0.01) * rng.integers(0, 100, count)).astype(np.int8),
        "text": np.frombuffer(text, np.int8),
        "noise": np.frombuffer(rng.bytes(count), np.int8),
    }


@pytest.mark.parametrize("count", [16, 1000, 300_000, *slow((64,), (5000,), (131_072,))])
def test_streams_of_all_levels_are_decoded(count: int) -> None:
    for name, content in contents(count).items():
        for level in (-5, 0, 1, 5, 9, 15, 19, 22)[:: 3 if count > 100_000 else 1]:
            given = zstd(level, False, [content])
            (found,) = unpacked(given)
            assert found is not None, f"{name} {level}"
            np.testing.assert_array_equal(found, content.reshape(-1).view(np.uint8), f"{name} {level}")


@pytest.mark.parametrize("dtype", ["int8", "float64", *slow(("int16",), ("float32",), ("complex128",))])
@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_blosc_frames_are_decoded(name: str, dtype: str) -> None:
    for count, shuffle, level, block in product(COUNTS, (0, 1, 2), (0, 1, 5), (0, 4096)):
        equal(blosc(name, level, shuffle, block, samples(rng, dtype, count)))


def test_long_runs_of_lz4_are_decoded() -> None:
    """Numbers of literals and lengths of matches do not fit into a sequence."""
    for count in (131_071, 131_072, 131_073, 262_143, 262_144, 262_145, 700_000):
        literals = np.frombuffer(rng.bytes(count), np.int8)
        for content in (
            np.zeros(count, np.int8),
            np.concatenate([literals, literals]),
            np.tile(literals[:9], count // 9),
        ):
            given = blosc("lz4", 1, 0, content.size, [content])
            equal(given)


def test_a_chunk_that_is_refused_does_not_affect_the_others() -> None:
    chunks = samples(rng, "float64", 1 << 15)
    for given in (blosc("zstd", 5, 1, 0, chunks), blosc("lz4", 5, 1, 0, chunks), zstd(0, False, chunks)):
        size = given.size.copy()
        size[1] = 0
        first, second, third = unpacked(Batch(given.buffer, given.start, size, chunks, given.codec))
        assert second is None
        for found, chunk in ((first, chunks[0]), (third, chunks[2])):
            assert found is not None
            np.testing.assert_array_equal(found, chunk.view(np.uint8))


@pytest.mark.parametrize("what", [0, 1, 2])
def test_chunks_for_which_there_is_no_memory_are_refused(what: int) -> None:
    chunks = [rng.integers(0, 64, 1 << 15).astype(np.float64) for _ in range(6)]
    for given in (blosc("zstd", 5, 0, 0, chunks), blosc("lz4", 5, 0, 0, chunks), zstd(0, False, chunks)):
        most = [1 << 10, 1 << 10, 1 << 20]
        whole = unpacked(given, (most[0], most[1], most[2]))
        assert all(found is not None for found in whole)
        most[what] = (2, 5, 100_000)[what]
        some = unpacked(given, (most[0], most[1], most[2]))
        assert any(found is None for found in some)
        for found, chunk in zip(some, chunks, strict=True):
            assert found is None or (found == chunk.view(np.uint8)).all()


def test_frames_with_a_checksum_or_of_other_compressors_are_refused() -> None:
    x = rng.integers(0, 64, 1 << 12).astype(np.float64)
    for given in (
        zstd(0, True, [x]),
        batch(Blosc("zlib", 5), Codec("zstd", True, 8), [x]),
        batch(Blosc("lz4", 5), Codec("zstd", True, 8), [x]),
        batch(Blosc("zstd", 5), Codec("zstd", True, 4), [x]),  # elements of eight bytes were shuffled
    ):
        assert unpacked(given) == [None]


def test_checksums_are_verified_before_chunks_are_decoded() -> None:
    for count in (3, 8, 100, 1000, 70_000):
        chunks = [rng.integers(0, 64, count).astype(np.float64) for _ in range(4)]
        given = zstd(0, False, chunks)
        frames = []
        for number, (at, size) in enumerate(zip(given.start, given.size, strict=True)):
            frame = given.buffer[at : at + size]
            crc = google_crc32c.value(frame.tobytes()) ^ (number == 2)
            frames.append(np.concatenate([frame, np.frombuffer(crc.to_bytes(4, "little"), np.uint8)]))
        frames[3] = frames[3].copy()
        frames[3][rng.integers(frames[3].size)] ^= 1 << rng.integers(8)
        size = np.array([frame.size for frame in frames], np.int64)
        found = unpacked(
            Batch(np.concatenate(frames), np.cumsum(size) - size, size, chunks, given.codec), checksum=True
        )
        assert [each is None for each in found] == [False, False, True, True]
        for each, chunk in zip(found[:2], chunks, strict=False):
            assert each is not None
            np.testing.assert_array_equal(each, chunk.view(np.uint8))


KINDS: dict[str, tuple[Any, Codec]] = {
    "blosc-zstd": (Blosc("zstd", 5, 1), Codec("zstd", True, 8)),
    "blosc-lz4": (Blosc("lz4", 5, 1), Codec("lz4", True, 8)),
    "blosc-lz4-unsplit": (Blosc("lz4", 9, 0), Codec("lz4", True, 8)),
    "zstd": (Zstd(0), Codec("zstd", False, 8)),
    "zstd-19": (Zstd(19), Codec("zstd", False, 8)),
    "zstd-blocks": (Zstd(5), Codec("zstd", False, 8)),  # frames of several blocks, which share tables
}


def damaged(whole: bytes) -> bytes:
    """Change a few bits or bytes of a frame, in most cases near its start or its end, or cut it off."""
    content = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        near = int(rng.integers(min(len(content), rng.choice([12, 24, 64, 200, len(content)]))))
        at = near if rng.random() < 0.8 else len(content) - 1 - near
        content[at] = content[at] ^ 1 << rng.integers(8) if rng.random() < 0.5 else rng.integers(256)
    return bytes(content[: rng.integers(1, len(content))] if rng.random() < 0.1 else content)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_frames_are_refused_or_decode_to_what_the_host_decodes(kind: str) -> None:
    """10,000 of each codec in the slow suite."""
    rounds = examples(1000, 50) if kind == "zstd-blocks" else examples(10_000, 300)
    compare_damaged(kind, rounds, 50, unpacked)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device answers")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_refuses_10_000_damaged_frames_or_decodes_them_as_the_host_does(kind: str) -> None:
    compare_damaged(kind, *((1000, 100) if kind == "zstd-blocks" else (10_000, 1000)), unpacked_on_gpu)


def compare_damaged(
    kind: str, rounds: int, together: int, unpack: Callable[[Batch], list[Array | None]]
) -> None:
    """Decode damaged frames, some `together`, with `unpack` and on the host, and compare the results."""
    compressor, codec = KINDS[kind]
    count = 20_000 if kind == "zstd-blocks" else 1000
    whole = [
        (x, compressor.encode(x))
        for x in (
            rng.integers(0, 64, count).astype(np.float64),
            np.cumsum(rng.integers(-2, 3, count)).astype(np.float64),
            np.frombuffer(contents(8 * count)["text"].tobytes(), np.float64),
        )
    ]
    found_by = Counter[tuple[bool, bool]]()
    for _ in range(rounds // together):
        chosen = [whole[i] for i in rng.integers(len(whole), size=together)]
        frames = [np.frombuffer(damaged(frame), np.uint8) for _, frame in chosen]
        size = np.array([frame.size for frame in frames], np.int64)
        given = Batch(np.concatenate(frames), np.cumsum(size) - size, size, [x for x, _ in chosen], codec)
        for frame, found in zip(frames, unpack(given), strict=True):
            expected = np.empty(given.chunk, np.uint8)
            try:
                decompress_into(compressor, frame, expected)
            except (RuntimeError, ValueError, MemoryError, SystemError):
                found_by[True, found is None] += 1
                continue
            found_by[False, found is None] += 1
            if found is not None:
                np.testing.assert_array_equal(found, expected)
    assert not found_by[True, False]  # nothing that the host refuses is accepted
    assert found_by[True, True] > 5
    assert found_by[False, False] > 0
