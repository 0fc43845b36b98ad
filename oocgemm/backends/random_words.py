"""Counter-based random numbers: any word of a random stream is computed from its index alone.

`random_words` is SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, 2014).
kernels/checks/check_sums.cu has the same generator, so that host and device agree.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Ids of random streams. The digest of a matrix is a weighted sum of its words. The weight of a word depends
# on its row (stream 0) and on its position in the row (stream 1). All later streams have random signs.
ROW_WEIGHTS, WORD_WEIGHTS, _SIGNS = 0, 1, 2
# Number of vectors in a `SignVectors`. Each of the 8 bits of a random byte is a sign of one vector.
VECTORS = 8
# Number of bytes that Philox generates for one value of its counter.
_BYTES_PER_COUNT = 32
_SIGNS_OF_BYTE = 1.0 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)


def random_words(stream: int, count: int, first: int = 0) -> NDArray[np.uint64]:
    """Return `count` words (uint64) of a random stream, from index `first` on.

    There are 2^16 streams of 2^48 words each.
    """
    index = np.arange(first, first + count, dtype=np.uint64)
    z = (index + np.uint64((stream << 48) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def sign_stream(seed: int, axis: int) -> int:
    """Return the id of the random stream from which the signs of rows (axis 0) or columns (axis 1) come."""
    return _SIGNS + 2 * seed + axis


def signs(seed: int, axis: int, extent: int) -> NDArray[Any]:
    """Return `extent` random signs, 1.0 or -1.0, for the rows (axis 0) or columns (axis 1) of a product."""
    return 1.0 - 2.0 * (random_words(sign_stream(seed, axis), extent) >> np.uint64(63)).astype(np.float64)


class SignVectors:
    """`VECTORS` vectors of random signs, of unlimited length. Any part of them can be computed by itself.

    The generator is Philox (Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3*,
    2011). The 8 bits of byte j of its output are the signs of element j of the 8 vectors.
    """

    def __init__(self, *seed: int) -> None:
        self._key = np.random.SeedSequence(seed).generate_state(2, np.uint64)

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """Return elements `start` to `stop` of all vectors, each 1.0 or -1.0.

        The array is float64 and has the shape (stop - start, VECTORS).
        """
        counter = start // _BYTES_PER_COUNT
        skipped = start - counter * _BYTES_PER_COUNT
        count = -(-(stop - counter * _BYTES_PER_COUNT) // 8)
        words = np.random.Philox(key=self._key, counter=counter).random_raw(count)
        drawn = words.astype("<u8", copy=False).view(np.uint8)[skipped : skipped + stop - start]
        return _SIGNS_OF_BYTE.take(drawn, axis=0)
