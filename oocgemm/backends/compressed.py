"""Blocks of operands in compressed chunks, which a GPU decodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oocgemm.backends.base import Array, Pageable
from oocgemm.planning.tiling import Range
from oocgemm.stores.compressors import Codec, Fetched


@dataclass(frozen=True, slots=True)
class Compressed(Pageable):
    """A block of an operand in compressed chunks, which the device decodes.

    `move` decodes a part of the block on the host, and raises the error of a damaged chunk.

    Attributes:
        codec: how the chunks are compressed.
        fetch: reads the stored chunks that contain some rows and columns of the block, counted from its first
            ones, one after another into an array of bytes. Many threads call this.
    """

    codec: Codec = field(kw_only=True)
    fetch: Callable[[Range, Range, Array], Sequence[Fetched]] = field(kw_only=True)
