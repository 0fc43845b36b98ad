"""Eigenvectors of X^T X from its products with thin matrices: a randomized block method.

The first block Q is random (Halko, Martinsson and Tropp, *Finding structure with randomness*, 2011). Each
pass over X gives Z = X^T X Q. The next Q is the best one in the span of the last two Z, as in LOBPCG
(Knyazev, 2001). So X is read once per iteration, and few iterations suffice, even if singular values decay
slowly.

The results of a pass are the Ritz vectors V of X^T X in that span. Since X^T X V is known there, so are their
residuals ``X^T X v - s^2 v``. The next Q is half an iteration ahead of V.

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
# Residuals below this many units of rounding are rounding errors, and eigenvalues that differ by less are
# equal, relative to the largest eigenvalue.
NOISE = 4
# Matrices of the size of Q that exist at the same time, at most.
MAX_MATRICES = 16


@dataclass(frozen=True, eq=False)
class Subspace:
    """The state of the iteration: what the next pass multiplies, and the last block.

    Attributes:
        basis: Q of the next pass, with orthonormal columns.
        last: the block of the last pass; None before the first one.
        passes: the number of passes so far.
        found: what the passes have found; None before the first one.
    """

    basis: Array
    last: Block | None = None
    passes: int = 0
    found: "Ritz | None" = None


@dataclass(frozen=True, eq=False)
class Ritz:
    """Approximate singular vectors and values of X, those of the largest values first.

    Attributes:
        components: the right singular vectors, orthonormal columns.
        values: the singular values.
        residuals: |X^T X v - s^2 v| / s_1^2 for each of them.
        errors: for each, its residual over the estimated gap between s^2 and the other eigenvalues of X^T X.
            This bounds the sine of the angle between v and the exact singular vector. It is 0 where rounding
            errors are all that is left of the residual.
    """

    components: Array
    values: Array
    residuals: Array
    errors: Array


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
    q, z = _joined(block, state.last, rounding)
    eigenvalues, directions = np.linalg.eigh(_gram(q, z))
    eigenvalues, directions = eigenvalues[::-1], directions[:, ::-1][:, : block[0].shape[1]]
    v, product = q @ directions, z @ directions
    found = _ritz(v, product, eigenvalues, rounding)
    # In the first product, rounding errors of the largest singular value hide small ones. So it is only
    # orthogonalized.
    ahead = block[1] if state.last is None else completed(_ahead(v, product, rounding), state.basis.shape[1])
    basis = _orthonormal(ahead) if state.last is None else ahead
    return Subspace(basis, block, state.passes + 1, found)


def _ritz(v: Array, product: Array, eigenvalues: Array, rounding: float) -> Ritz:
    """Return what is known of Ritz vectors V, from X^T X V and all eigenvalues in the span, descending."""
    squares = np.maximum(np.einsum("ij,ij->j", v, product), 0)
    squares[squares <= max(FLOOR, ROUNDINGS * rounding) ** 2 * squares.max(initial=0)] = 0
    order = np.argsort(-squares, kind="stable")
    v, product, squares = v[:, order], product[:, order], squares[order]
    largest = squares.max(initial=0) or 1.0
    difference = product - v * squares
    residuals = np.linalg.norm(difference, axis=0) / largest
    # What is left of a residual in the span of V is rounding error.
    difference -= v @ (v.T @ difference)
    outside = np.linalg.norm(difference, axis=0) / largest
    known = np.append(np.maximum(np.append(squares, eigenvalues[len(squares) :]), 0) / largest, 0.0)
    apart = np.abs(known[: len(squares), None] - known)
    noise = NOISE * rounding
    gaps = np.where(apart > noise, apart, np.inf).min(axis=1)
    errors = np.where(outside <= noise, 0.0, outside / gaps)  # NaN stays NaN, which has not converged
    return Ritz(v, np.sqrt(squares), residuals, errors)


def completed(vectors: Array, columns: int) -> Array:
    """Return the first of some orthonormal columns, or further ones too if there are too few."""
    if vectors.shape[1] >= columns:
        return vectors[:, :columns]
    more = np.random.default_rng(columns).standard_normal((len(vectors), columns - vectors.shape[1]))
    for _ in range(2):  # once is not enough if a random column is nearly in the span
        more -= vectors @ (vectors.T @ more)
        more, _ = np.linalg.qr(more)
    return np.hstack([vectors, more])


def _ahead(v: Array, z: Array, rounding: float) -> Array:
    """Return better right singular vectors of X than its Ritz vectors V, from Z = X^T X V.

    U = X V T is orthonormal if T = (V^T X^T X V)^(-1/2). Then X^T U = X^T X V T, so that the products with X
    need not be computed again. Its singular vectors are more accurate than V, by half an iteration.
    """
    gram = _gram(v, z)
    lengths = np.sqrt(np.maximum(np.diagonal(gram), 0))
    used = lengths > max(FLOOR, ROUNDINGS * rounding) * lengths.max()
    # Columns of X V have very different lengths. Scaled to length 1, the short ones are as accurate.
    found, directions = np.linalg.eigh(gram[np.ix_(used, used)] / np.outer(lengths[used], lengths[used]))
    wide = found > MIN_EIGENVALUE
    return _left(z[:, used] @ (directions[:, wide] / np.sqrt(found[wide]) / lengths[used, None]))


def _left(x: Array) -> Array:
    """Return the left singular vectors of a matrix of nearly orthogonal columns.

    With the lengths D of the columns, x = P K D, where K K^T are the inner products of the columns scaled to
    length 1, and P is orthonormal. So only K D, which is small, needs an SVD.
    """
    lengths = np.linalg.norm(x, axis=0)
    used = lengths > 0
    x, lengths = x[:, used] / lengths[used], lengths[used]
    found, directions = np.linalg.eigh(x.T @ x)
    wide = found > MIN_SHARE
    roots, directions = np.sqrt(found[wide]), directions[:, wide]
    left, _, _ = np.linalg.svd(roots[:, None] * directions.T * lengths, full_matrices=False)
    return np.asarray(x @ (directions / roots @ left))


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
