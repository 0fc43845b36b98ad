"""Compressed chunks for the tests of decoding, and the host's way to decode their streams."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numcodecs import LZ4, Blosc, Zstd
from numpy.typing import NDArray

from oocgemm.stores.codecs import BITS, BYTES, Codec, Frame, FrameStream

Array = NDArray[Any]


@dataclass(frozen=True)
class Batch:
    """Frames of chunks in a buffer, and the elements of the chunks."""

    buffer: Array
    start: Array
    size: Array
    chunks: list[Array]
    codec: Codec

    @property
    def chunk(self) -> int:
        """The bytes of a chunk."""
        return int(self.chunks[0].nbytes)


def batch(compressor: Any, codec: Codec, chunks: Sequence[Array]) -> Batch:
    """Compress chunks with a codec of numcodecs."""
    frames = [np.frombuffer(compressor.encode(chunk), np.uint8) for chunk in chunks]
    size = np.array([frame.size for frame in frames], np.int64)
    return Batch(np.concatenate(frames), np.cumsum(size) - size, size, list(chunks), codec)


def blosc(name: str, level: int, shuffle: int, block: int, chunks: Sequence[Array]) -> Batch:
    """Compress chunks in blosc frames."""
    return batch(Blosc(name, level, shuffle, block), Codec(name, True, chunks[0].itemsize), chunks)


def zstd(level: int, checksum: bool, chunks: Sequence[Array]) -> Batch:
    """Compress chunks in zstd frames."""
    return batch(Zstd(level, checksum), Codec("zstd", False, chunks[0].itemsize), chunks)


def samples(rng: np.random.Generator, dtype: str, count: int) -> list[Array]:
    """Return chunks of elements that compress well, less well, and not at all."""
    size = np.dtype(dtype).itemsize
    return [
        *(rng.integers(0, high, count).astype(dtype) for high in (3, 100)),
        np.frombuffer(rng.bytes(count * size), dtype),
    ]


def composed(frame: Frame, stored: Array, codec: Codec) -> Array:
    """Decode a chunk, as bytes, from its streams. Raises an error if a stream is damaged."""
    content = np.concatenate([decompressed(codec, stored, stream) for stream in frame.streams])
    blocks = (content[at : at + frame.block] for at in range(0, content.size, frame.block))
    return np.concatenate([ordered(block, frame.order, codec.itemsize) for block in blocks])


def decompressed(codec: Codec, frame: Array, stream: FrameStream) -> Array:
    """Decompress a stream of a frame."""
    stored = frame[stream.source : stream.source + stream.size]
    if stream.raw:
        return stored
    if codec.compressor == "zstd":
        found = Zstd().decode(stored.tobytes())
    else:
        found = LZ4().decode(stream.length.to_bytes(4, "little") + stored.tobytes())
    if len(found) != stream.length:
        raise RuntimeError(f"{len(found)} bytes instead of {stream.length}")
    return np.frombuffer(found, np.uint8)


def ordered(block: Array, order: int, itemsize: int) -> Array:
    """Bring the bytes of a block into the order of its elements."""
    count = block.size // itemsize
    if order == BYTES:
        return block.reshape(itemsize, count).T.reshape(-1)
    if order == BITS and count % 8 == 0:
        bits = np.unpackbits(block.reshape(itemsize * 8, count // 8), axis=1, bitorder="little")
        whole = bits.reshape(itemsize, 8, count).transpose(2, 0, 1)
        return np.packbits(whole, axis=2, bitorder="little").reshape(-1)
    return block
