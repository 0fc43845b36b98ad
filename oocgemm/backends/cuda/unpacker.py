"""Decode chunks in zstd, blosc-zstd and blosc-lz4 by the kernels of `kernels/decoding`.

They check all that they read. (nvCOMP never ends on many damaged streams of zstd, and does not see all damage
of LZ4.) They find the streams of a batch, which would take the host as long as reading them, and decode the
blocks of a stream of zstd at the same time.
"""

import ctypes
from typing import Any

from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.kernels.spec import Launch
from oocgemm.planning.cost.coding import DecodingShape
from oocgemm.planning.tiling import ceil_div
from oocgemm.stores.compressors import NUMBERS, Codec

# Bytes of structures of `kernels/decoding/streams.cuh`, and minimum mean bytes of a block's content.
_STREAM, _BLOCK, _COUNTERS, _MIN_BLOCK = 40, 112, 32, 2 << 10
# Warps per multiprocessor that decode, and bytes of content that keep one busy.
_WARPS, _PER_WARP = 24, 32 << 10
# Blocks of the kernel `crc32c` per chunk.
_PARTS = 8
_KERNELS = (
    *(
        ("crc32c", "crc32c"),
        ("frames", "frames"),
        ("zstd", "zstd_walk"),
        ("zstd", "zstd_entropy"),
        ("lz4", "lz4_parse"),
    ),
    ("execute", "execute"),
)


class Batch(ctypes.Structure):
    """The argument of the kernels, `batch_t` of `streams.cuh`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "chunks", "statuses", "counters", "pointers", "streams", "blocks", "sequences", "literals",
            "content", "max_sequences", "max_literals",
        )),
        *((name, ctypes.c_uint32) for name in (
            "count", "max_streams", "max_blocks", "chunk", "itemsize", "compressor",
        )),
    )  # fmt: skip


class Unpacker:
    """The kernels on one device, and how lanes of a shape divide their memory for them."""

    def __init__(self, kernels: Kernels, shape: DecodingShape) -> None:
        """Compile and load the kernels. The device must be the current one."""
        self._shape = shape
        self._warps = _WARPS * kernels.device.processors
        self._kernels = {entry: kernels.plain(source, entry, ()) for source, entry in _KERNELS}

    def decode(
        self,
        codec: Codec,
        chunks: tuple[int, int, bool],
        chunk: int,
        lane: tuple[int, int, int],
        stream: Any,
    ) -> tuple[int, int]:
        """Enqueue on a stream, which is the current one, to decode a batch.

        Args:
            codec: how the chunks are compressed.
            chunks: the device address of their table, their number, and whether some have checksums.
            chunk: bytes of a decoded chunk.
            lane: device addresses of the lane's content, temporary memory and tables.

        Returns:
            The device addresses of the content of each stream, and of the status of each chunk, four bytes.
        """
        shape, (content, temporary, tables) = self._shape, lane
        table, count, checksums = chunks
        most = shape.streams
        streams = tables + 8 * most
        counters = streams + _STREAM * most
        statuses = counters + _COUNTERS
        blocks = shape.batch // _MIN_BLOCK + count
        literals = temporary + _BLOCK * blocks
        sequences = literals + ceil_div(shape.batch, 8) * 8
        given = Batch(
            *(table, statuses, counters, tables, streams, temporary, sequences, literals, content),
            *((temporary + shape.temporary - sequences) // 8, shape.batch),
            *(count, most, blocks, chunk, codec.itemsize, NUMBERS[codec.compressor] if codec.blosc else 0),
        )
        cuda_calls.make(cuda_calls.fill(counters, _COUNTERS + 4 * count, stream))
        warps = max(1, min(self._warps, ceil_div(count * chunk, _PER_WARP)))
        finding = {"lz4_parse": warps} if codec.compressor == "lz4" else {
            "zstd_walk": ceil_div(warps, 4), "zstd_entropy": warps,
        }  # fmt: skip
        verifying = {"crc32c": _PARTS * count} if checksums else {}
        for name, grid in {**verifying, "frames": count, **finding, "execute": warps}.items():
            self._kernels[name](Launch((grid, 1, 1), (32, 1, 1)), given)
        return tables, statuses
