"""Chunks of local zarr arrays, read and written past zarr: by the calling thread, into and from the memory it gives.

zarr reads a chunk into fresh memory and copies it from there, all copies of a process in one thread. Here raw
chunks are read straight to where they shall lie, and compressed ones are decompressed straight to there where they
fill contiguous memory, otherwise into memory that the thread uses again and again; each by as many threads as
there are. In a shard the chunks lie in one file, which an index at its start or end leads to.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning.tiling import Span
from oocgemm.stores.base import Array
from oocgemm.stores.files import MIN_SEGMENT, OpenFile, modified, publish
from oocgemm.stores.lines import read_block, straight
from oocgemm.stores.zarr.codecs import CHECKSUM_BYTES, Encoding, checked_content

_NOWHERE = (1 << 64) - 1


@dataclass(frozen=True)
class Shards:
    """How chunks lie in shards: `chunks` down and across in each, found by an index of (offset, length)."""

    chunks: tuple[int, int]
    at_end: bool = True
    dtype: np.dtype[Any] = np.dtype("<u8")  # noqa: RUF009  # a dtype cannot be changed
    checksum: bool = True

    @property
    def index_bytes(self) -> int:
        return 16 * self.chunks[0] * self.chunks[1] + CHECKSUM_BYTES * self.checksum

    def index(self, file: OpenFile) -> Array:
        """Offset and length of every chunk in a shard. Raises `ValueError` if it is damaged."""
        if file.size < self.index_bytes:
            raise ValueError(f"it has {file.size} bytes, its index alone takes {self.index_bytes}")
        stored = file.mapped(file.size - self.index_bytes if self.at_end else 0, self.index_bytes)
        content = checked_content(stored) if self.checksum else stored
        return content.view(self.dtype).reshape(*self.chunks, 2)


@dataclass(frozen=True)
class DirectChunks:
    """A regular grid of chunks in files of their own, or in shards.

    What is read for the first time is read past the page cache, which costs the least and leaves the cache to others.
    What comes to be read again is kept there from then on if `worth_caching`: the disk is read twice at most for an
    array that fits in memory, however often a run comes back to it.
    """

    root: Path
    key: Callable[[tuple[int, int]], str]
    shape: tuple[int, int]
    chunk: tuple[int, int]
    encoding: Encoding
    fill: Any
    shards: Shards | None = None
    worth_caching: bool = True
    _seen: set[tuple[tuple[int, int], int]] = field(default_factory=set, compare=False, repr=False)
    # Whether nobody writes to it meanwhile. Then, when each of its folders was last modified, as this began: while that
    # stays, no chunk has vanished.
    at_rest: bool = False
    _modified: dict[Path, int | None] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.at_rest:
            return
        folders = self._folders((0, 0))
        if folders[0] != self._folders((1, 0))[0]:  # a folder a row of chunks
            folders += [folder for folder in folders[1].glob("*") if folder.is_dir()]
        self._modified.update({folder: modified(folder) for folder in folders})

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's elements; chunks at the edges are stored whole."""
        return self.chunk[0] * self.chunk[1] * self.encoding.dtype.itemsize

    def read(self, rows: Span, cols: Span, out: Array) -> None:
        """Read a block into `out`. Raises `ExecutionError`, naming the file, for chunks that are damaged; `MemoryError`
        where there is none to decode them in."""
        across = self.shards.chunks if self.shards else (1, 1)
        extents = self.chunk[0] * across[0], self.chunk[1] * across[1]
        for number, block in _cut((rows, cols), extents):
            target = _part(out, (rows, cols), block)
            try:
                file = OpenFile(self.root / self.key(number))
            except FileNotFoundError:
                self._check_never_there(number)
                target[...] = self.fill  # zarr's meaning of a chunk that is not there
                continue
            with file:
                try:
                    self._read_file(number, file, block, target)
                except EOFError as error:
                    self._damaged(number, str(error), error)

    def write(self, rows: Span, cols: Span, data: Array) -> None:
        """Write a block that covers whole chunks (but for those cut by the matrix's own edges), each file
        written beside its place and renamed into it."""
        for number, block in _cut((rows, cols), self.chunk):
            part = _part(data, (rows, cols), block)
            stored, size = self.encoding.encode(part, self.chunk, self.fill)
            publish(self.root / self.key(number), stored, size)

    def _read_file(
        self, number: tuple[int, int], file: OpenFile, block: tuple[Span, Span], out: Array
    ) -> None:
        try:
            index = self.shards.index(file) if self.shards else None
        except ValueError as error:
            self._damaged(number, f"is a shard whose index cannot be read ({error})", error)
        for chunk, part in _cut(block, self.chunk):
            target = _part(out, block, part)
            offset, length = 0, file.size
            if index is not None and self.shards:
                place = index[chunk[0] % self.shards.chunks[0], chunk[1] % self.shards.chunks[1]]
                offset, length = int(place[0]), int(place[1])
                if offset == length == _NOWHERE:
                    target[...] = self.fill
                    continue
                if offset + length > file.size:
                    self._damaged(
                        number, f"has {file.size} bytes, of which it has a chunk end at {offset + length}"
                    )
            (r0, r1), (c0, c1) = part
            top, left = chunk[0] * self.chunk[0], chunk[1] * self.chunk[1]
            wanted = slice(r0 - top, r1 - top), slice(c0 - left, c1 - left)
            if self.encoding.raw:
                self._read_raw(number, file, offset, length, wanted, target)
            else:
                self._decode(number, file.mapped(offset, length), wanted, target)

    def _read_raw(
        self,
        number: tuple[int, int],
        file: OpenFile,
        offset: int,
        length: int,
        wanted: tuple[slice, slice],
        out: Array,
    ) -> None:
        if length != self.chunk_bytes:
            self._damaged(number, f"has {length} bytes instead of {self.chunk_bytes}")
        encoding, (height, width) = self.encoding, self.chunk
        by_rows = encoding.order == "C"
        (lines, part), line, block = (wanted, width, out) if by_rows else (wanted[::-1], height, out.T)
        row = line * encoding.dtype.itemsize
        whole = block.shape[1] == line
        if whole and not (straight(encoding.dtype, block) and (out.flags.c_contiguous or row >= MIN_SEGMENT)):
            # All of it is wanted, in another order or in lines too short for a buffer each: copied from a mapping.
            stored = file.mapped(offset + lines.start * row, block.shape[0] * row).view(encoding.dtype)
            np.copyto(block, stored.reshape(block.shape), casting="equiv")
            return
        past_cache = not self.worth_caching
        if whole:
            start = offset + lines.start * row
            past_cache = not ((number, start) in self._seen and self.worth_caching)
            self._seen.add((number, start))
        spans = (lines.start, lines.stop), (part.start, part.stop)
        read_block(file, offset, line, encoding.dtype, *spans, block, past_cache=past_cache)

    def _decode(
        self, number: tuple[int, int], stored: Array, wanted: tuple[slice, slice], out: Array
    ) -> None:
        into = out if out.shape == self.chunk and out.flags.c_contiguous else None
        try:
            elements = self.encoding.decode(stored, self.chunk, into)
        except MemoryError:
            raise
        except Exception as error:  # compressors raise of every kind
            self._damaged(number, f"cannot be decoded: {error}", error)
        if elements is not into:
            np.copyto(out, elements[wanted], casting="equiv")

    def _folders(self, number: tuple[int, int]) -> list[Path]:
        """The folder that a chunk's file lies in, and those above it within the array."""
        parents = list((self.root / self.key(number)).parents)
        return parents[: parents.index(self.root) + 1]

    def _check_never_there(self, number: tuple[int, int]) -> None:
        """Raises `ExecutionError` for a missing chunk that may have been there when the array was opened."""
        if self.at_rest and any(
            modified(folder) != self._modified.get(folder) for folder in self._folders(number)
        ):
            raise ExecutionError(
                f"chunk {self.key(number)} is missing in {self.root}, where files have come or gone since it was opened: "
                "leave operands as they are while a run reads them"
            )

    def _damaged(self, number: tuple[int, int], how: str, error: Exception | None = None) -> NoReturn:
        raise ExecutionError(
            f"chunk {self.key(number)} in {self.root} {how}: it is damaged or cut short"
        ) from error


def _cut(
    block: tuple[Span, Span], chunk: tuple[int, int]
) -> Iterator[tuple[tuple[int, int], tuple[Span, Span]]]:
    """Numbers of the chunks that a block touches, with the part of the block in each."""
    for i, rows in _chunks(block[0], chunk[0]):
        for j, cols in _chunks(block[1], chunk[1]):
            yield (i, j), (rows, cols)


def _part(array: Array, block: tuple[Span, Span], part: tuple[Span, Span]) -> Array:
    """The part of a block's array."""
    (top, _), (left, _) = block
    (r0, r1), (c0, c1) = part
    return array[r0 - top : r1 - top, c0 - left : c1 - left]


def _chunks(span: Span, chunk: int) -> list[tuple[int, Span]]:
    """Chunk numbers that a span touches, with the part of the span in each."""
    start, stop = span
    return [
        (i, (max(start, i * chunk), min(stop, (i + 1) * chunk)))
        for i in range(start // chunk, -(-stop // chunk))
    ]
