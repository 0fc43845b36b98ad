"""Least squares and singular values of a tall X, from products ``X^T X P`` of a few reads of X, in float64.

`QRFactors` are a P for which the columns of X P are nearly orthonormal, and an R for which X = (X P) R. So R
has the singular values of X, and P P^T is the inverse of X^T X.

*The first read* computes X^T X. With its Cholesky factor L, P is L^-T. X^T X has rounding errors of about
eps |X|^2, which hide singular values below sqrt(eps) |X|. If there are such values, a shift is added to the
diagonal, so that L exists (Fukaya, Kannan, Nakatsukasa, Yamamoto and Yanagisawa, *Shifted Cholesky QR for
computing the QR factorization of ill-conditioned matrices*, 2020).

*Each further read* computes the inner products H of the columns of X P, as P^T (X^T (X P)). Elements of a
column X p have errors of eps |X| |p|. Those of X^T (X p) are of eps |X|, since |X p| is about 1, and the
product with p_i multiplies them by |p_i|. H is symmetric, so that each element is taken from the shorter one
of p_i and p_j. Its error is then eps |X| min(|p_i|, |p_j|), where that of P^T (X^T X) P is
eps |X|^2 |p_i| |p_j|. With the Cholesky factor L of H, P L^-T is the next P.

*Errors.* Row i of H has random errors of `noise` n_i. From them and from the shift follows the error of
|X p|^2 for a column p of the next P. After three reads, condition numbers of 1e12 leave errors of about 1e-3,
which is enough to correct a solution. Only columns whose error matters are multiplied again.
"""

from typing import NamedTuple

import numpy as np

from oocgemm.stores import Array

EPS = float(np.finfo(np.float64).eps)
# Random errors of inner products, in units of rounding.
NOISE = 4
# A shift is needed if the square of a diagonal element of L is below MARGIN times its noise.
MARGIN = 4
# Steps of the power method. A norm of a matrix is then known to some percent.
STEPS = 40
# Smaller triangles are inverted by LAPACK.
BLOCK = 128


class QRFactors(NamedTuple):
    """P and R of X = (X P) R, with nearly orthonormal columns of X P.

    - `p`: the columns are in ascending order of their lengths. `r` is its inverse.
    - `errors`: the estimated error of |X p|^2 for each column; 1 or more if nothing is known.
    - `size`: |X|.
    """

    p: Array
    r: Array
    errors: Array
    size: float

    @classmethod
    def of(cls, gram: Array) -> "QRFactors":
        """Return the first factors, given the Gram matrix of an X whose columns have a length of about 1."""
        whole, size = np.eye(len(gram)), np.sqrt(norm(gram))
        return cls(whole, whole, np.ones(len(gram)), size).refined(np.ones(len(gram), bool), gram)

    def solved(self, products: Array) -> Array:
        """Return b for which X b is the projection of Y, given the `products` X^T Y."""
        return np.asarray(self.p @ (self.p.T @ products))

    def condition(self) -> float:
        """Estimate the condition number of X."""
        return norm(self.p) * norm(self.r)

    def refined(self, chosen: Array, product: Array) -> "QRFactors":
        """Return better factors, given the product X^T X P of the `chosen` columns of P."""
        inner = np.eye(len(chosen))
        inner[:, chosen] = self.p.T @ product
        block = np.triu(inner[np.ix_(chosen, chosen)])
        inner[chosen] = inner[:, chosen].T
        inner[np.ix_(chosen, chosen)] = block + np.triu(block, 1).T
        lengths = np.linalg.norm(self.p, axis=0)
        noise = np.where(chosen, NOISE * EPS * np.maximum(1, lengths * self.size), self.errors)
        lower, shift = _factored(inner, noise, 2 * np.sqrt(len(chosen)) * noise * chosen)
        change = inverted(lower).T
        p, errors = self.p @ change, np.square(change).T @ (noise + shift)
        order = np.argsort(np.linalg.norm(p, axis=0), kind="stable")
        return QRFactors(p[:, order], (lower.T @ self.r)[order], errors[order], self.size)


def of_eigenvectors(values: Array, vectors: Array, errors: Array, largest: float) -> QRFactors:
    """Return factors, given eigenvalues and eigenvectors of X^T X in descending order.

    `errors` are those of the values, relative to the `largest` one.
    """
    if not largest:
        return QRFactors(vectors, 0 * vectors.T, np.zeros(len(values)), 0.0)
    least = len(vectors) * NOISE * EPS * largest
    roots = np.sqrt(np.maximum(values, least))
    known = np.where(values > least, errors * largest / roots**2, 1.0)
    return QRFactors(vectors / roots, roots[:, None] * vectors.T, known, float(np.sqrt(largest)))


def _factored(inner: Array, noise: Array, shift: Array) -> tuple[Array, Array]:
    """Return the Cholesky factor of a matrix with `noise` on its diagonal, and the shift that it needed."""
    try:
        lower = np.linalg.cholesky(inner)
        if (np.square(lower.diagonal()) >= MARGIN * noise).all():
            return lower, np.zeros(len(inner))
    except np.linalg.LinAlgError:
        pass
    while True:
        try:
            return np.linalg.cholesky(inner + np.diag(shift)), shift
        except np.linalg.LinAlgError:
            shift = 2 * shift


def inverted(lower: Array) -> Array:
    """Return the inverse of a lower triangle."""
    rows = len(lower)
    if rows <= BLOCK:
        return np.tril(np.linalg.inv(lower))
    found, half = np.zeros_like(lower), rows // 2
    first, last = slice(0, half), slice(half, rows)
    found[first, first], found[last, last] = inverted(lower[first, first]), inverted(lower[last, last])
    found[last, first] = -found[last, last] @ (lower[last, first] @ found[first, first])
    return found


def norm(matrix: Array) -> float:
    """Estimate the largest singular value of a matrix, to some percent, by the power method."""
    if not matrix.size:
        return 0.0
    vector = np.random.default_rng(0).standard_normal(matrix.shape[1])
    found = 0.0
    for _ in range(STEPS):
        length = np.linalg.norm(vector)
        if not 0 < length < np.inf:
            return float(length)
        image = matrix @ (vector / length)
        found, vector = float(np.linalg.norm(image)), matrix.T @ image
    return found
