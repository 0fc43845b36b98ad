"""Cut arrays in host memory at the borders of pinned ranges, which a CUDA copy must not cross."""

from collections.abc import Iterator, Sequence

from oocgemm.backends.base import Array


def cut(block: Array, borders: Sequence[int]) -> Iterator[Array]:
    """Cut an array in memory order, so that every address in `borders` is on the border between two pieces.

    A piece is some whole rows, or a part of one row.
    """
    (height, width), low = block.shape, block.ctypes.data
    high = low + (height - 1) * block.strides[0] + width * block.itemsize
    places = [divmod(border - low, block.strides[0]) for border in borders if low < border < high]
    columns = [(r, inside // block.itemsize) for r, inside in places]
    row, col = 0, 0
    for r, c in [*((r, c) if c < width else (r + 1, 0) for r, c in columns), (height, 0)]:
        if row < r and col:
            yield block[row : row + 1, col:]
            row, col = row + 1, 0
        if row < r:
            yield block[row:r]
            row = r
        if c > col:
            yield block[row : row + 1, col:c]
            col = c
