"""Random words that the host and a device draw alike: word `index` of a stream, without any before it.

Steele, Lea and Flood, *Fast splittable pseudorandom number generators* (2014): SplitMix64, as in kernels/check_sums.cu.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW_WEIGHTS, WORD_WEIGHTS, _SIGNS = 0, 1, 2  # streams


def random_words(stream: int, count: int, first: int = 0) -> NDArray[np.uint64]:
    """Words `first` to `first + count` of a stream; there are 2^16 streams of 2^48 words."""
    index = np.arange(first, first + count, dtype=np.uint64)
    z = (index + np.uint64((stream << 48) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def sign_stream(seed: int, axis: int) -> int:
    """The stream of the signs of rows (axis 0) or columns (axis 1)."""
    return _SIGNS + 2 * seed + axis


def signs(seed: int, axis: int, extent: int) -> NDArray[Any]:
    """Random signs, 1.0 or -1.0, for the rows (axis 0) or columns (axis 1) of a product."""
    return 1.0 - 2.0 * (random_words(sign_stream(seed, axis), extent) >> np.uint64(63)).astype(np.float64)
