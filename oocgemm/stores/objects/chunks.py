"""Read and write the chunks of a zarr array in an object store without zarr, one request each.

Small chunks of a shard that are close to each other in it are read by one request.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Array, pieces
from oocgemm.stores.objects.bucket import STREAMED_BYTES, Bucket
from oocgemm.stores.zarr_chunks import MISSING, Shards
from oocgemm.stores.zarr_codecs import CHECKSUM_BYTES, Encoding

# A part of a sharded array that is read by one task has at most this many bytes before compression.
GROUP_BYTES = 2 << 20
# Chunks of a shard with at most this many bytes between them are read by one request. It has at most
# GROUP_BYTES, or one chunk.
MAX_GAP = 64 << 10
Place = tuple[int, int]
Block = tuple[Range, Range]
# Stored bytes of a shard: where they begin and end, and whose they are: the row and column of their chunk in
# the grid of chunks, the rows and columns of the matrix that are needed, and the destination of these.
Span = tuple[int, int, Place, Block, Array]


@dataclass(frozen=True)
class ObjectChunks:
    """The chunks of a zarr array in an object store, and how to read and write them.

    - `bucket`: contains the objects of the array.
    - `key`: returns the key of a chunk or shard, given its indices in the grid.
    - `chunk`: the shape of a chunk.
    - `encoding`: the format of a chunk's bytes.
    - `fill`: the value of all elements of a chunk that is not stored.
    - `shards`: the format of the shards; None if each chunk is an object.
    - `prefix`: what is prepended to the key when a chunk is written.
    """

    bucket: Bucket
    key: Callable[[Place], str]
    chunk: tuple[int, int]
    encoding: Encoding
    fill: Any
    shards: Shards | None = None
    prefix: str = ""
    # The indexes of shards, which do not change while an operand is read.
    _indexes: dict[Place, Array | None] = field(default_factory=dict, compare=False, repr=False)

    def below(self, prefix: str) -> "ObjectChunks":
        """Return the same chunks, but written to keys with this prefix."""
        return replace(self, prefix=prefix)

    @property
    def request_bytes(self) -> int:
        """The bytes of host memory that reading or writing one chunk takes, besides its source or target."""
        size = self.chunk[0] * self.chunk[1] * self.encoding.dtype.itemsize + CHECKSUM_BYTES
        stored = GROUP_BYTES if self.group != (1, 1) else size
        return max(2 * STREAMED_BYTES, stored + self.encoding.encode_bytes(size))

    @cached_property
    def group(self) -> tuple[int, int]:
        """The rows and columns of chunks that a task reads together; (1, 1) unless shards have small chunks.

        zarr stores the chunks of a shard in Morton order: squares of 2, 4, 8, ... chunks are contiguous.
        """
        down = across = 1
        size = self.chunk[0] * self.chunk[1] * self.encoding.dtype.itemsize
        rows, columns = self.shards.chunks if self.shards else (1, 1)
        while 2 * down * across * size <= GROUP_BYTES and (2 * down <= rows or 2 * across <= columns):
            wider = 2 * across <= columns and (across <= down or 2 * down > rows)
            down, across = (down, 2 * across) if wider else (2 * down, across)
        return down, across

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read the block at these rows and columns into `out`, chunk by chunk.

        Raises `ExecutionError` for a damaged chunk, and `StoreError` for a request that fails.
        """
        if self.group != (1, 1):
            self._read_group((rows, cols), out)
            return
        for number, block, target in self._cut((rows, cols), out):
            place = self._place(number)
            try:
                if place is None:
                    target[...] = self.fill
                elif self.encoding.raw:
                    self._read_raw(number, place, block, target)
                else:
                    self._read_encoded(number, place, block, target)
            except FileNotFoundError:
                target[...] = self.fill  # zarr need not store a chunk of fill values
            except EOFError as error:
                self._damaged(number, str(error), error)

    def _read_group(self, block: Block, out: Array) -> None:
        """Read a block of an array with small chunks in shards into `out`."""
        spans: dict[str, list[Span]] = {}
        for number, part, target in self._cut(block, out):
            place = self._place(number)
            if place is None:
                target[...] = self.fill
                continue
            key, offset, length = place
            lines = 0, length
            if self.encoding.raw:
                lines = self._lines(number, length, part)
            spans.setdefault(key, []).append((offset + lines[0], offset + lines[1], number, part, target))
        for key, found in spans.items():
            for run in runs(sorted(found, key=lambda span: span[:2])):
                first, number = run[0][0], run[0][2]
                try:
                    stored = self.bucket.get_part(key, first, max(span[1] for span in run) - first)
                except FileNotFoundError:
                    self._damaged(number, "the shard is missing")
                except EOFError as error:
                    self._damaged(number, str(error), error)
                for start, end, at, part, target in run:
                    self._decode(at, part, stored[start - first : end - first], target)

    def write(self, rows: Range, cols: Range, data: Array) -> dict[str, str]:
        """Write a block that consists of whole chunks. Return the ETags of the new objects by their keys."""
        tags = {}
        for number, _, part in self._cut((rows, cols), data):
            stored, size = self.encoding.encode(part, self.chunk, self.fill)
            content = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)[:size]
            tags[self.key(number)] = self.bucket.put(self.prefix + self.key(number), content)
        return tags

    def _cut(self, block: Block, array: Array) -> Iterator[tuple[Place, Block, Array]]:
        """Cut a block, whose elements are in `array`, along chunk borders.

        For each part, yield the row and column of its chunk in the grid of chunks, the rows and columns of
        the part, and the view of its elements.
        """
        (top, _), (left, _) = block
        for (r0, r1), (c0, c1) in pieces(*block, self.chunk, 1):
            number = r0 // self.chunk[0], c0 // self.chunk[1]
            yield number, ((r0, r1), (c0, c1)), array[r0 - top : r1 - top, c0 - left : c1 - left]

    def _place(self, number: Place) -> tuple[str, int, int] | None:
        """Return where a chunk is: the key of its object, the offset in it, and the bytes; None if nowhere.

        The number of bytes is -1 for the whole object.
        """
        if self.shards is None:
            return self.key(number), 0, -1
        down, across = self.shards.chunks
        shard = number[0] // down, number[1] // across
        if shard not in self._indexes:
            self._indexes[shard] = self._index(shard)
        index = self._indexes[shard]
        if index is None:
            return None
        offset, length = map(int, index[number[0] % down, number[1] % across])
        return None if offset == length == MISSING else (self.key(shard), offset, length)

    def _index(self, shard: Place) -> Array | None:
        """Read the index of a shard; None if the shard is not stored."""
        assert self.shards is not None
        size, start = self.shards.index_bytes, -1 if self.shards.at_end else 0
        try:
            return self.shards.parsed(self.bucket.get_part(self.key(shard), start, size))
        except FileNotFoundError:
            return None
        except (EOFError, ValueError) as error:
            raise ExecutionError(
                f"{self.bucket.url}/{self.key(shard)} is a shard whose index cannot be read ({error}): it is "
                "damaged or truncated"
            ) from error

    def _read_raw(self, number: Place, place: tuple[str, int, int], block: Block, out: Array) -> None:
        """Read a part of an uncompressed chunk: the lines that contain it, in one request."""
        key, offset, length = place
        start, end = (offset + at for at in self._lines(number, length, block))
        target = out if self.encoding.order == "C" else out.T
        whole = target.nbytes == end - start
        if whole and target.flags.c_contiguous and self.encoding.dtype.isnative:
            self.bucket.read_into(key, start, target.reshape(-1).view(np.uint8))
        else:
            self._decode(number, block, self.bucket.get_part(key, start, end - start), out)

    def _read_encoded(self, number: Place, place: tuple[str, int, int], block: Block, out: Array) -> None:
        """Read and decode a chunk, and copy the part that is wanted."""
        key, offset, length = place
        if length < 0:
            found = self.bucket.get(key)
            if found is None:
                raise FileNotFoundError(key)
            stored = found[0]
        else:
            stored = self.bucket.get_part(key, offset, length)
        self._decode(number, block, stored, out)

    def _lines(self, number: Place, length: int, block: Block) -> tuple[int, int]:
        """Return where the lines of an uncompressed chunk that contain a block begin and end in the chunk.

        Its rows are its lines, or its columns if it is stored in Fortran order.
        """
        itemsize = self.encoding.dtype.itemsize
        size = self.chunk[0] * self.chunk[1] * itemsize
        if length not in (-1, size):
            self._damaged(number, f"it has {length} bytes instead of {size}")
        axis = self.encoding.order == "F"
        lines, line = self._inside(number, block)[axis], self.chunk[1 - axis] * itemsize
        return lines.start * line, lines.stop * line

    def _decode(self, number: Place, block: Block, stored: Array, out: Array) -> None:
        """Decode the bytes of a chunk, or the lines of an uncompressed one, and copy what is wanted."""
        wanted = self._inside(number, block)
        if self.encoding.raw:
            axis = self.encoding.order == "F"
            target, part = out.T if axis else out, wanted[1 - axis]
            found = stored.view(self.encoding.dtype).reshape(-1, self.chunk[1 - axis])
            np.copyto(target, found[:, part], casting="equiv")
            return
        try:
            self.encoding.decode_part(stored, self.chunk, wanted, out)
        except ValueError as error:
            self._damaged(number, f"it {error}", error)

    def _inside(self, number: Place, block: Block) -> tuple[slice, slice]:
        """Return the rows and columns of a block of the matrix, counted from the first ones of its chunk."""
        (r0, r1), (c0, c1) = block
        top, left = number[0] * self.chunk[0], number[1] * self.chunk[1]
        return slice(r0 - top, r1 - top), slice(c0 - left, c1 - left)

    def _damaged(self, number: Place, how: str, error: Exception | None = None) -> NoReturn:
        """Raise the `ExecutionError` for a damaged chunk. `how` says what is wrong with it."""
        raise ExecutionError(
            f"chunk {number[0]}/{number[1]} in {self.bucket.url} is damaged or truncated: {how}"
        ) from error


def runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Split spans, in the order of their starts, into runs that are read by one request each."""
    run: list[Span] = []
    end = 0
    for span in spans:
        if run and (span[0] > end + MAX_GAP or max(end, span[1]) > run[0][0] + GROUP_BYTES):
            yield run
            run = []
        end = max(end, span[1]) if run else span[1]
        run.append(span)
    if run:
        yield run
