"""The size of the memory in which a GPU decodes compressed chunks."""

from dataclasses import dataclass

from oocgemm.planning.tiling import round_up

ALIGNMENT = 4096
# Temporary device memory of nvCOMP's zstd decoder, per byte of decoded data. It takes 3.06 bytes, and 6.4 KiB
# per stream.
TEMPORARY = 3.6
# Minimum mean bytes of the content of a stream. The tables of the streams have room for so many.
MIN_CONTENT = 2 << 10
# Bytes of the tables per stream, and besides per lane: the tables of chunks.
STREAM_BYTES, TABLE_BYTES = 56, 1 << 20


@dataclass(frozen=True, slots=True)
class DecodingShape:
    """`lanes` threads decode batches of chunks. A batch has at most `batch` bytes when it is decoded."""

    lanes: int
    batch: int

    @property
    def frames(self) -> int:
        """Bytes of the room for the compressed chunks of a batch. They may be larger than their content."""
        return round_up(self.batch + self.batch // 128 + (64 << 10), ALIGNMENT)

    @property
    def streams(self) -> int:
        """Maximum number of streams of a batch."""
        return self.batch // MIN_CONTENT

    @property
    def tables(self) -> int:
        """Bytes of the room for the tables of a batch."""
        return round_up(STREAM_BYTES * self.streams + TABLE_BYTES, ALIGNMENT)

    @property
    def temporary(self) -> int:
        """Bytes of temporary memory of the decoder of a lane."""
        return round_up(int(TEMPORARY * self.batch), ALIGNMENT)

    @property
    def lane_bytes(self) -> int:
        """Bytes of a lane on the device."""
        return self.frames + round_up(self.batch, ALIGNMENT) + self.temporary + self.tables

    @property
    def device_bytes(self) -> int:
        """Bytes of all lanes on the device."""
        return self.lanes * self.lane_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of all lanes in pinned host memory."""
        return self.lanes * (self.frames + self.tables)
