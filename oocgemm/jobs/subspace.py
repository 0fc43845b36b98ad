"""Eigenvectors of X^T X from its products with thin matrices: a randomized block method.

The first block Q is random (Halko, Martinsson and Tropp, *Finding structure with randomness*, 2011). Each
pass over X gives Z = X^T X Q. The next Q is the best one in the span of the last two Z, as in LOBPCG
(Knyazev, 2001). So X is read once per iteration, and few iterations suffice, even if singular values decay
slowly.

All of this is computed in float64. Its matrices have as many rows as X has columns.
"""

from dataclasses import dataclass

import numpy as np

from oocgemm.stores import Array

# A block Q of orthonormal columns, and the product X^T X Q.
Block = tuple[Array, Array]
# Singular values below ROUNDINGS units of rounding, or below FLOOR, relative to the largest one, are 0.
ROUNDINGS, FLOOR = 8, 1e-7
# Directions of the last block that are shorter than this, in square roots of the unit of rounding, when those
# of the present one have been removed, are left out, and so are those shorter than MIN_DIFFERENCE.
MIN_LENGTH, MIN_DIFFERENCE = 3, 1e-6
# Nearly dependent directions are left out: of X V, and of X^T U.
MIN_EIGENVALUE, MIN_SHARE = 1e-3, 1e-10
# Matrices of the size of Q that exist at the same time, at most.
MAX_MATRICES = 14


@dataclass(frozen=True, eq=False)
class Subspace:
    """The state of the iteration: what the next pass multiplies, and the last block.

    Attributes:
        basis: Q of the next pass, with orthonormal columns.
        last: the block of the last pass; None before the first one.
        passes: the number of passes so far.
        components: of the last two blocks, orthonormal columns, the first one of the largest singular value.
        values: the singular values of X that belong to `components`.
    """

    basis: Array
    last: Block | None = None
    passes: int = 0
    components: Array | None = None
    values: Array | None = None


def start(rows: int, columns: int, seed: int) -> Subspace:
    """Return the state before the first pass, which depends on the seed."""
    return Subspace(_orthonormal(np.random.default_rng(seed).standard_normal((rows, columns))))


def advance(state: Subspace, block: Block, rounding: float) -> Subspace:
    """Return the state after a pass.

    Args:
        state: before the pass.
        block: the Q that was multiplied, which is `state.basis` except for rounding, and the product.
        rounding: relative error of the products, such as 1.2e-7 for float32.
    """
    components, values = _best(block, state.last, rounding)
    # In the first product, rounding errors of the largest singular value hide small ones. So it is only
    # orthogonalized.
    first = state.last is None
    basis = _orthonormal(block[1]) if first else completed(components, state.basis.shape[1])
    return Subspace(basis, block, state.passes + 1, components, values)


def completed(vectors: Array, columns: int) -> Array:
    """Return the first of some orthonormal columns, or further ones too if there are too few."""
    if vectors.shape[1] >= columns:
        return vectors[:, :columns]
    more = np.random.default_rng(columns).standard_normal((len(vectors), columns - vectors.shape[1]))
    for _ in range(2):  # once is not enough if a random column is nearly in the span
        more -= vectors @ (vectors.T @ more)
        more, _ = np.linalg.qr(more)
    return np.hstack([vectors, more])


def _best(block: Block, last: Block | None, rounding: float) -> Block:
    """Return the right singular vectors and the singular values of X, restricted to the span of blocks.

    The Ritz vectors V of X^T X in the span are as many as a block has columns. U = X V T is orthonormal if
    T = (V^T X^T X V)^(-1/2). Then X^T U = X^T X V T, so that the products with X need not be computed again.
    Its singular vectors are more accurate than V, by half an iteration.
    """
    columns = block[0].shape[1]
    q, z = _joined(block, last, rounding)
    _, directions = np.linalg.eigh(_gram(q, z))
    directions = directions[:, ::-1][:, :columns]
    q, z = q @ directions, z @ directions
    gram = _gram(q, z)
    lengths = np.sqrt(np.maximum(np.diagonal(gram), 0))
    used = lengths > max(FLOOR, ROUNDINGS * rounding) * lengths.max()
    # Columns of X V have very different lengths. Scaled to length 1, the short ones are as accurate.
    found, directions = np.linalg.eigh(gram[np.ix_(used, used)] / np.outer(lengths[used], lengths[used]))
    wide = found > MIN_EIGENVALUE
    return _svd(z[:, used] @ (directions[:, wide] / np.sqrt(found[wide]) / lengths[used, None]))


def _svd(x: Array) -> Block:
    """Return the left singular vectors and the singular values of a matrix of nearly orthogonal columns.

    With the lengths D of the columns, x = P K D, where K K^T are the inner products of the columns scaled to
    length 1, and P is orthonormal. So only K D, which is small, needs an SVD.
    """
    lengths = np.linalg.norm(x, axis=0)
    used = lengths > 0
    x, lengths = x[:, used] / lengths[used], lengths[used]
    found, directions = np.linalg.eigh(x.T @ x)
    wide = found > MIN_SHARE
    roots, directions = np.sqrt(found[wide]), directions[:, wide]
    left, values, _ = np.linalg.svd(roots[:, None] * directions.T * lengths, full_matrices=False)
    return x @ (directions / roots @ left), values


def _joined(block: Block, last: Block | None, rounding: float) -> Block:
    """Return an orthonormal basis of the span of blocks, and its product, without what rounding hides."""
    q, z = _normalized(*block, least=0.5)
    if last is None:
        return q, z
    more, product = last
    for _ in range(2):  # once is not enough for columns that are nearly in the span
        shares = q.T @ more
        more, product = more - q @ shares, product - z @ shares
    # The products of what is left are differences, whose rounding errors are divided by the length.
    more, product = _normalized(more, product, least=max(MIN_LENGTH * np.sqrt(rounding), MIN_DIFFERENCE))
    more, product = _normalized(more, product, least=0.5)
    return np.hstack([q, more]), np.hstack([z, product])


def _normalized(q: Array, z: Array, least: float) -> Block:
    """Return orthonormal combinations of the columns of Q that are at least `least` long, and those of Z."""
    directions = _directions(q, least)
    return q @ directions, z @ directions


def _orthonormal(x: Array) -> Array:
    """Return orthonormal columns that span the columns of a matrix, and others if it has a lower rank."""
    lengths = np.linalg.norm(x, axis=0)
    found = x[:, lengths > 0] / lengths[lengths > 0]
    for least in (MIN_DIFFERENCE, 0.5):
        found = found @ _directions(found, least)
    return completed(found, x.shape[1])


def _directions(q: Array, least: float) -> Array:
    """Return T with orthonormal columns of Q T, which are combinations of length `least` or more.

    A few products and a small decomposition take less time than the decomposition of a tall matrix.
    """
    found, directions = np.linalg.eigh(q.T @ q)
    kept = found >= least * least
    return np.asarray(directions[:, kept] / np.sqrt(found[kept]))


def _gram(q: Array, z: Array) -> Array:
    """Return Q^T Z, which is symmetric except for rounding. The shorter columns of Z are more accurate."""
    gram, lengths = q.T @ z, np.linalg.norm(z, axis=0)
    return np.asarray(np.where(lengths <= lengths[:, None], gram, gram.T))
