"""Cuts blocks into the pieces that threads copy one at a time (`oocgemm.backends.cuda.ring`)."""

from collections.abc import Sequence

from oocgemm.backends.base import Pageable
from oocgemm.planning.tiling import Range, ceil_div

# A piece has at least this many bytes of every chunk that it contains a part of, or the whole chunk. To open
# and to look up a file takes about as long as to read a tenth of it.
MIN_PART = 512 << 10
# If a row of a chunk has at least MIN_ROW bytes, and the chunk MIN_APART, a piece has columns of one chunk
# only: it is read from one place of one file, by one call. The link copies shorter rows more slowly.
MIN_ROW, MIN_APART = 4 << 10, 2 << 20
# A piece of a block: its rows, its columns, and the byte at which it starts in the block.
Piece = tuple[Range, Range, int]


def pieces(block: Pageable, size: int) -> list[Piece]:
    """Cut a block into pieces of at most `size` bytes, which has room for an element.

    Of large chunks, a piece has whole rows of one chunk, or of several that are below one another. Otherwise
    pieces consist of whole rows of the block, if at least `MIN_PART` bytes of each chunk fit into a piece
    then. If not, they are cut between chunks in both directions.
    """
    (rows, cols), itemsize = block.shape, block.dtype.itemsize
    row = cols * itemsize
    (high, wide), (down, along) = block.chunk, block.origin
    line = wide * itemsize
    least = max(1, min(high, MIN_PART // line, size // itemsize))
    if wide < cols and MIN_ROW <= line <= size and min(high * line, size) >= MIN_APART:
        height, width = min(high, size // line), wide
        if height < high:
            height = ceil_div(high, ceil_div(high, height))
            bands = _cuts(rows, high, down)
            heights = [(top + i, top + j) for top, end in bands for i, j in _cuts(end - top, height, 0)]
            return _located(heights, _cuts(cols, width, along), row, itemsize)
        height = size // line // high * high
    elif least * row <= size:
        height, width = size // row, cols
        if height >= high:
            height -= height % high
    else:
        height, width = least, size // (least * itemsize)
        if width >= wide:
            width -= width % wide
    return _located(
        _cuts(rows, height, down if height % high == 0 else 0),
        _cuts(cols, width, along if width % wide == 0 else 0),
        *(row, itemsize),
    )


def _located(rows: Sequence[Range], cols: Sequence[Range], row: int, itemsize: int) -> list[Piece]:
    """Return the pieces with these rows and columns of a block whose rows have `row` bytes."""
    return [
        ((top, end), (left, right), top * row + left * itemsize) for top, end in rows for left, right in cols
    ]


def _cuts(extent: int, step: int, start: int) -> list[Range]:
    """Cut an axis at multiples of `step`, where its first index counts as `start`.

    >>> _cuts(10, 4, 0), _cuts(10, 4, 7)
    ([(0, 4), (4, 8), (8, 10)], [(0, 1), (1, 5), (5, 9), (9, 10)])
    """
    first = -(start % step)
    return [(max(0, at), min(extent, at + step)) for at in range(first, extent, step)]
