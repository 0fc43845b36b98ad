"""How far rounding takes sums of C's rows: the tolerance of Freivalds' check, by either of two bounds.

A sum is y^T C_i over a group of columns, y a vector of random signs that does not depend on C. R_ij is the rounding error
of C_ij, u the unit roundoff, c the number of additions in a row, and S_ij = sum_p (a_ip b_pj)^2.

*Probabilistic.* After Higham and Mary, *A new approach to probabilistic rounding error analysis* (2019) and *Sharper
probabilistic backward error analysis for basic linear algebra kernels with random data* (2020): the errors of single
operations are taken to be independent, of mean 0 and spread evenly over their interval, which makes each sub-Gaussian of
variance u^2 |s|^2 / 3, where s is the partial sum that was rounded. Where terms do not lean to one sign, s has the size of
a random walk, sqrt(S_ij), whatever the order of summation, FMA or not. By Hoeffding's inequality for R, and again for y,
which together have the tail of a product of two sub-Gaussian variables,

    |y^T R_i|  <=  t u sqrt(c / 3) sqrt(sum_j S_ij)    with a probability of at least 1 - 2 exp(-t)

Where terms lean to one sign, partial sums grow with k and rounding errors may repeat (sums of one number are the extreme).
What partial sums exceed a random walk by is therefore measured, on blocks of k, as `lean`. It is allowed min(gamma_c,
6 sqrt(c) u) for each element, and sqrt(2 t) for the signs.

*Worst case.* |R_ij| <= gamma_c (|A| |B|)_ij (Higham, *Accuracy and Stability of Numerical Algorithms*, 2002, section 3.5),
whatever the errors are. Only y is random, and chosen here: |y^T R_i| <= sqrt(2 t) |R_i| with the same probability.

t makes the probability of any false alarm in one check at most `FALSE_ALARM`. Operands rounded to less precision (tf32,
bf16) add an error for each operand, which all elements of a row or column share. It may be cut off, not rounded.
"""

from math import log, sqrt

import numpy as np

from oocgemm.backends.base import Array, numpy_dtype
from oocgemm.errors import InputError
from oocgemm.integrity.rounding import DOUBLE, OPERANDS, Rounding, gamma, sum_error
from oocgemm.planning import GemmProblem
from oocgemm.planning.integers import LIMIT

BOUNDS = ("probabilistic", "worst-case")
FALSE_ALARM = 1e-6
EPILOGUE = 8  # operations on an element beside the sum of its products: alpha, beta, conversions


class SumTolerance(Rounding):
    """The tolerance of `tests` sums over `elements` columns each, of a product whose sums have `k` terms.

    Raises `InputError` where the worst-case bound is infinite.
    """

    def __init__(self, problem: GemmProblem, bound: str, k: int, elements: int, tests: int) -> None:
        super().__init__(problem, k, k + 2 * elements)
        self._probabilistic = bound == "probabilistic"
        self._terms = sqrt(k)  # | |A| |B| | is at most sqrt(k) times the norm of the terms
        self._t = log(2 * max(1, tests) / FALSE_ALARM)
        self._signs = sqrt(2 * self._t)
        accumulator = numpy_dtype("float64" if problem.exact else problem.acc_dtype)
        unit, factor = float(np.finfo(accumulator).eps) / 2, 4 if accumulator.kind == "c" else 1
        chain, own = factor * ((0 if problem.exact else k) + EPILOGUE), factor * (k + 2 * elements + EPILOGUE)
        self._operands = 2 * OPERANDS[problem.compute]
        self._walk = self._t / sqrt(3) * (sqrt(chain) * unit + sqrt(own) * DOUBLE)
        self._lean = self._signs * (sum_error(chain, unit) + sum_error(own, DOUBLE))
        self._epilogue = self._signs * sum_error(factor * EPILOGUE, unit)
        self._worst = gamma(chain, unit) + self._operands + gamma(own, DOUBLE) * sqrt(elements)
        if not (self._probabilistic or np.isfinite(self._worst)):
            raise InputError(
                f"the worst-case bound is infinite for sums of {k} products in {accumulator}, whose unit roundoff is "
                f"{unit:.2g}: use the probabilistic bound"
            )

    @property
    def needs_stored(self) -> bool:
        """Whether norms of C as it is stored count."""
        return bool(self._stored)

    def product_norm(self, terms: Array) -> Array:
        """Bound of the norms of |A| |B| from those of the terms."""
        return np.asarray(self._terms * terms)

    def of_sums(self, terms: Array, lean: Array, old: Array, stored: Array, elements: Array) -> Array:
        """What sums over so many `elements` may differ by. `terms` are the norms sqrt(sum_j S_ij), `lean` what norms of
        partial sums exceed them by, `old` and `stored` the norms of the old C and of C there."""
        alpha, beta = abs(self.alpha), abs(self.beta)
        old = beta * old if beta else np.zeros_like(old)
        root = np.sqrt(elements)
        largest = alpha * self.product_norm(terms) + old
        if self._whole:  # every sum is exact, unless it is too large to be
            return np.where(root * largest < LIMIT / 2, 0.0, self._own * root * largest)
        signs = np.minimum(self._signs, root)
        if self._probabilistic:
            reduced = self._operands * ((self._t + self._signs) * terms + self._signs * lean)
            rounding = alpha * (self._walk * terms + self._lean * lean + reduced) + self._epilogue * old
        else:
            rounding = signs * self._worst * largest
        return np.asarray(rounding + signs * self._stored * stored + elements * self._least)
