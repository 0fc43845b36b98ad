"""Read the compressed chunks of local zarr arrays as they are stored, for a GPU that decodes them."""

import os
from collections.abc import Iterable, Sequence

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning.cost.decoding import Coding
from oocgemm.planning.cost.encoding import ITEM_BYTES, MAX_CHUNK
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array
from oocgemm.stores.files import OpenFile, worth_caching
from oocgemm.stores.frames import NO_ROOM, Codec, Fetched, frame_of
from oocgemm.stores.gather import Part, read_parts
from oocgemm.stores.opener import Opener
from oocgemm.stores.zarr.chunks import DirectChunks, _cut
from oocgemm.stores.zarr.codecs import CHECKSUM_BYTES

# Files that a thread has open at a time: it reads these together.
MAX_OPEN = 48
_SHUFFLED = 1  # the number of the byte shuffle in numcodecs
_Block = tuple[Range, Range]


def coding_of(chunks: DirectChunks) -> Coding | None:
    """Return how chunks are compressed; None if a GPU cannot decode them. This reads the first chunk."""
    encoding = chunks.encoding
    decoded, itemsize = _name(encoding.compressor), encoding.dtype.itemsize
    if not (decoded and encoding.in_place and itemsize in ITEM_BYTES and chunks.chunk_bytes <= MAX_CHUNK):
        return None
    codec = Codec.of(decoded, itemsize)
    rows, cols = (min(pair) for pair in zip(chunks.chunk, chunks.shape, strict=True))
    frame = np.empty(2 * chunks.chunk_bytes, np.uint8)
    found = fetch(chunks, (0, rows), (0, cols), frame)[0]
    if found.size <= 0:
        return None
    stored = frame_of(frame[found.start :][: found.size].tobytes(), chunks.chunk_bytes, codec)
    if stored is None or all(stream.raw for stream in stored.streams):
        return None
    share = found.size / chunks.chunk_bytes
    # Panels that are used again are read again: the page cache must have room for the files.
    if not worth_caching(int(share * chunks.shape[0] * chunks.shape[1] * itemsize)):
        return None
    return Coding(decoded, max(stream.length for stream in stored.streams), share)


def codec_of(chunks: DirectChunks) -> str:
    """Return how a GPU could compress chunks that are written; "" if it could not.

    Elements of a chunk that are beyond the edge of the matrix are 0 then.
    """
    encoding, compressor = chunks.encoding, chunks.encoding.compressor
    shuffled = getattr(compressor, "shuffle", _SHUFFLED) == _SHUFFLED
    fast = getattr(compressor, "cname", "") != "lz4hc"  # whose user wants short chunks
    return _name(compressor) if encoding.in_place and shuffled and fast and chunks.fill == 0 else ""


def fetch(chunks: DirectChunks, rows: Range, cols: Range, out: Array) -> list[Fetched]:
    """Read the stored bytes of the chunks of a block, one after another, into `out`.

    The size in the result is 0 for a chunk that is not stored or cannot be read: `DirectChunks.read` says
    what is wrong. A CRC behind a chunk does not count, and is not verified.
    """
    found, end = {part: (0, 0) for _, part in _cut((rows, cols), chunks.chunk)}, 0
    across = chunks.shards.chunks if chunks.shards else (1, 1)
    crc = CHECKSUM_BYTES if chunks.encoding.checksum else 0
    waiting, opened = list[tuple[Part, _Block]](), list[int]()

    def read() -> None:
        for complete, (part, block) in zip(_read([part for part, _ in waiting], out), waiting, strict=True):
            if complete:
                found[block] = part.address - out.ctypes.data, max(0, part.size - crc)
        waiting.clear()
        while opened:
            Opener.close(opened.pop())

    try:
        for number, block in _cut((rows, cols), (chunks.chunk[0] * across[0], chunks.chunk[1] * across[1])):
            try:
                file = OpenFile(f"{chunks.root}/{chunks.key(number)}", chunks.opener)
                opened.append(file.descriptor)
                for offset, length, part in chunks.places(number, file, block):
                    if offset is not None and end + length > out.size:
                        found[part] = 0, NO_ROOM
                    elif offset is not None:
                        read_to = out.ctypes.data + end
                        waiting.append((Part(file.descriptor, offset, read_to, 1, length), part))
                        end += length
            except (OSError, EOFError, ExecutionError):
                pass
            if len(opened) >= MAX_OPEN:
                read()
    finally:
        read()
    high, wide = chunks.chunk
    return [Fetched(r, c, (r[0] % high, c[0] % wide), *place, crc > 0) for (r, c), place in found.items()]


def _read(parts: Sequence[Part], out: Array) -> Iterable[bool]:
    """Read parts of files into `out`. Return for each part whether it was read as a whole."""
    if not parts:
        return []
    apart = max(part.size for part in parts)
    try:
        complete: list[bool] = read_parts(parts, apart, apart).tolist()
        return complete
    except OSError:  # the system does not support such reads
        return [_read_one(part, out) for part in parts]


def _read_one(part: Part, out: Array) -> bool:
    start = part.address - out.ctypes.data
    try:
        return os.preadv(part.descriptor, [out[start : start + part.size].data], part.offset) == part.size
    except OSError:
        return False


def _name(compressor: object) -> str:
    """Return the name of a compressor in layouts; "" if a GPU cannot decode it."""
    match getattr(compressor, "codec_id", ""), getattr(compressor, "cname", ""):
        case "zstd", _:
            return "zstd"
        case "blosc", "zstd":
            return "blosc-zstd"
        case "blosc", "lz4" | "lz4hc":
            return "blosc-lz4"
    return ""
