"""Count the genotypes in a .bed file without decoding them."""

import numpy as np

from oocgemm.jobs.streaming import reduced
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Genotypes
from oocgemm.stores.plink import PER_BYTE

# Bytes of the file that are counted at a time. Temporary arrays have six times as many bytes.
_SLAB = 64 << 10
# The low bit of each genotype in a word.
_LOW = np.uint64(0x5555_5555_5555_5555)


def genotype_counts(matrix: Genotypes, memory: int) -> Array:
    """Return how many genotypes of each variant are 0, 1, 2 and missing, an array with four columns.

    Words of 32 genotypes are counted by their bits: a high bit alone stands for 1, a low bit alone for a
    missing genotype, both for 0. So this is much faster than a pass over the elements.

    Args:
        matrix: the genotypes.
        memory: upper bound in bytes for the pass, unless one thread needs more.

    Raises:
        ExecutionError: the file cannot be read.
    """
    packed = matrix.packed()
    variants, width = packed.shape
    individuals = matrix.shape[1 - matrix.variant_axis]
    found = np.zeros((variants, 4), np.int64)
    unused = width * PER_BYTE - individuals  # genotypes in the last byte of a line

    def act(rows: Range, cols: Range, raw: Array) -> Array:
        if cols[1] == width and unused:
            raw.view(np.uint8)[:, -1] &= 0xFF >> 2 * unused
        counts = _counted(raw)
        counts[:, 2] = min(cols[1] * PER_BYTE, individuals) - cols[0] * PER_BYTE - counts.sum(1)
        return counts

    for rows, _, part in reduced(packed, 1, memory, 8 * max(_SLAB, width), act):
        found[slice(*rows)] += part
    return found


def _counted(raw: Array) -> Array:
    """Count genotypes in rows of bytes. The count of genotype 2, which has no bits, is left at 0."""
    counts = np.zeros((len(raw), 4), np.int64)
    width = -(-raw.shape[1] // 8) * 8
    height = max(1, _SLAB // width)
    padded = np.zeros((min(height, len(raw)), width), np.uint8)
    for top in range(0, len(raw), height):
        part = slice(top, min(top + height, len(raw)))
        words = padded[: part.stop - top]
        words[:, : raw.shape[1]] = raw[part].view(np.uint8)
        low = words.view(np.uint64)
        high = low >> np.uint64(1)
        high &= _LOW
        low = low & _LOW
        ones, twos = _bits(low), _bits(high)
        low &= high
        both = _bits(low)
        counts[part, 0], counts[part, 1], counts[part, 3] = both, twos - both, ones - both
    return counts


def _bits(words: Array) -> Array:
    """Count the bits in each row. A block has so few that uint32 holds them, and it is fast."""
    return np.asarray(np.bitwise_count(words).sum(1, dtype=np.uint32)).astype(np.int64)
