"""Decompose symmetric matrices on a GPU, by cuSOLVER."""

import cupy

from oocgemm.backends.base import Array
from oocgemm.backends.cuda.warm import take

# Device memory that a decomposition takes, in matrices: the matrix, its eigenvectors, a workspace of two
# matrices for cuSOLVER, and copies.
MATRICES = 7


def decomposed(device: int, s: Array, width: int, budget: int) -> tuple[Array, Array] | None:
    """Return all eigenvalues in descending order, and the eigenvectors of the first `width` as columns.

    Return None if `budget` bytes of device memory are too few, or if cuSOLVER is missing or fails.
    """
    needed = MATRICES * s.nbytes
    if needed > budget:
        return None
    warm = take(device)
    try:
        if warm.size + needed > budget:  # the arena counts towards the budget
            warm.free()
        with cupy.cuda.Device(device):
            values, vectors = cupy.linalg.eigh(cupy.asarray(s))
            found = cupy.asnumpy(values)[::-1], cupy.asnumpy(vectors[:, ::-1][:, :width])
            del values, vectors
            cupy.get_default_memory_pool().free_all_blocks()
            return found
    except Exception:  # CuPy raises exceptions of many types; the host decomposes the matrix then
        return None
    finally:
        warm.keep(warm.session)
