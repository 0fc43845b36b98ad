"""Bound the rounding errors of sums of elements of C with random signs, for Freivalds' check.

Let y be a vector of random signs (+1 or -1) on a group of columns, independent of C. The sum is y^T C_i,
where C_i are the elements of row i in the group. The symbols are:

    R_ij    the rounding error of C_ij; R_i has those of row i
    u       the unit roundoff of the accumulator's dtype
    c       the number of successive rounded additions that compute one element of C
    S_ij    sum_p (a_ip b_pj)^2, the sum of the squared terms of C_ij

There are two bounds, and the user chooses one of them. Each holds for one sum with a probability of at least
1 - 2 exp(-t). The value of t depends on the number of sums: the probability that the check of a correct C
fails is at most `FALSE_ALARM`.

*Probabilistic.* Sources: Higham and Mary, *A new approach to probabilistic rounding error analysis* (2019);
*Sharper probabilistic backward error analysis for basic linear algebra kernels with random data* (2020).
The errors of single operations are assumed to be independent and uniformly distributed, with mean 0. The
error of one addition is then sub-Gaussian with variance u^2 |s|^2 / 3, where s is the rounded partial sum. If
the terms have random signs, s is about sqrt(S_ij), in any order of summation. Hoeffding's inequality, applied
to R and to y, gives

    |y^T R_i|  <=  t u sqrt(c / 3) sqrt(sum_j S_ij)

If most terms have the same sign, partial sums are larger, and their rounding errors may repeat. The check
therefore estimates by how much partial sums exceed those of random signs (`sign_sums.bias_of`), and adds to
the bound sqrt(2 t) times this estimate times min(gamma_c, 6 sqrt(c) u), with gamma_c = c u / (1 - c u).

*Worst case.* |R_ij| <= gamma_c (|A| |B|)_ij, whatever the errors of single operations are (Higham, *Accuracy
and Stability of Numerical Algorithms*, 2002, section 3.5). Only y is random here:

    |y^T R_i|  <=  sqrt(2 t) |R_i|

With a reduced precision (tf32, bf16), the operands are rounded before the product, and both bounds get
another summand. It is larger than for independent errors, because the error of an element of A affects its
whole row of C.
"""

from math import log, sqrt

import numpy as np

from oocgemm.backends.base import Array, numpy_dtype
from oocgemm.errors import InputError
from oocgemm.integrity.rounding import DOUBLE, OPERANDS, Rounding, gamma, sum_error
from oocgemm.planning import GemmProblem
from oocgemm.planning.integers import EXACT_LIMIT

# The names of the two error bounds that the docstring of this module explains.
BOUNDS = ("probabilistic", "worst-case")
# Maximum probability that a check fails although C is correct.
FALSE_ALARM = 1e-6
# Maximum number of rounded operations of the epilogue on one element of C.
EPILOGUE = 8


class SumTolerance(Rounding):
    """The error bound of sums of elements of C with random signs, for Freivalds' check.

    Args:
        problem: the product.
        bound: one of `BOUNDS`.
        k: number of products that are added up for each element of C.
        elements: maximum number of elements of C per sum.
        tests: number of sums that the check compares.

    Raises:
        InputError: the worst-case bound is infinite, because k is too large for the accumulator's precision.
    """

    def __init__(self, problem: GemmProblem, bound: str, k: int, elements: int, tests: int) -> None:
        super().__init__(problem, k, k + 2 * elements)
        self._probabilistic = bound == "probabilistic"
        # By the Cauchy-Schwarz inequality, a sum of k terms is at most sqrt(k) times their 2-norm.
        self._terms = sqrt(k)
        self._t = log(2 * max(1, tests) / FALSE_ALARM)
        self._signs = sqrt(2 * self._t)
        accumulator = numpy_dtype("float64" if problem.exact else problem.acc_dtype)
        unit, factor = float(np.finfo(accumulator).eps) / 2, 4 if accumulator.kind == "c" else 1
        chain, check = (
            factor * ((0 if problem.exact else k) + EPILOGUE),
            factor * (k + 2 * elements + EPILOGUE),
        )
        self._operands = 2 * OPERANDS[problem.compute]
        self._walk = self._t / sqrt(3) * (sqrt(chain) * unit + sqrt(check) * DOUBLE)
        self._bias = self._signs * (sum_error(chain, unit) + sum_error(check, DOUBLE))
        self._epilogue = self._signs * sum_error(factor * EPILOGUE, unit)
        self._worst = gamma(chain, unit) + self._operands + gamma(check, DOUBLE) * sqrt(elements)
        if not (self._probabilistic or np.isfinite(self._worst)):
            raise InputError(
                f"the worst-case bound is infinite for sums of {k} products in {accumulator}, whose unit "
                f"roundoff is {unit:.2g}: use the probabilistic bound (--bound probabilistic)"
            )

    @property
    def needs_stored(self) -> bool:
        """Whether `of_sums` needs norms of the stored C. It does if the cast to C's dtype rounds."""
        return bool(self._stored)

    def product_norm(self, terms: Array) -> Array:
        """Return upper bounds of the norms of |A| |B| over the elements of each sum.

        `terms` has the norms sqrt(sum_j S_ij); the docstring of this module defines S_ij.
        """
        return np.asarray(self._terms * terms)

    def of_sums(self, terms: Array, bias: Array, old: Array, stored: Array, elements: Array) -> Array:
        """Return the error bounds of sums of elements of C with random signs.

        All arguments have one value per sum.

        Args:
            terms: 2-norms of all terms a_ip b_pj of the summed elements of C: sqrt(sum_j S_ij).
            bias: the results of `sign_sums.bias_of`: 0 unless most terms have the same sign.
            old: norms of the old C over the summed elements.
            stored: norms of C, as stored, over the summed elements.
            elements: numbers of summed elements.
        """
        alpha, beta = abs(self.alpha), abs(self.beta)
        old = beta * old if beta else np.zeros_like(old)
        root = np.sqrt(elements)
        largest = alpha * self.product_norm(terms) + old
        if self._integer:  # sums of integers below EXACT_LIMIT have no rounding errors in float64
            return np.where(root * largest < EXACT_LIMIT / 2, 0.0, self._check_error * root * largest)
        signs = np.minimum(self._signs, root)
        if self._probabilistic:
            reduced = self._operands * ((self._t + self._signs) * terms + self._signs * bias)
            rounding = alpha * (self._walk * terms + self._bias * bias + reduced) + self._epilogue * old
        else:
            rounding = signs * self._worst * largest
        return np.asarray(rounding + signs * self._stored * stored + elements * self._underflow)
