"""Bound the rounding error of sums of C's rows, for Freivalds' check.

A sum is y^T C_i over a group of columns, where y is a vector of random signs independent of C. R_ij is the
rounding error of C_ij, u the unit roundoff, c the number of additions in a row, and S_ij = sum_p (a_ip
b_pj)^2. There are two bounds.

*Probabilistic.* Source: Higham and Mary, *A new approach to probabilistic rounding error analysis* (2019) and
*Sharper probabilistic backward error analysis for basic linear algebra kernels with random data* (2020).
Errors of single operations are modelled as independent, of mean 0 and uniform over their interval. Each is
then sub-Gaussian with variance u^2 |s|^2 / 3, where s is the partial sum that was rounded. If the terms have
no bias in sign, s has the size of a random walk, sqrt(S_ij), for any order of summation, with or without FMA.
Hoeffding's inequality for R, and again for y, gives the tail of a product of two sub-Gaussian variables:

    |y^T R_i|  <=  t u sqrt(c / 3) sqrt(sum_j S_ij)    with a probability of at least 1 - 2 exp(-t)

If the terms are biased, partial sums grow with k, and rounding errors may repeat (sums of one number are the
extreme). The excess of partial sums over a random walk is therefore measured on blocks of k, as `bias`. The
allowance for it is min(gamma_c, 6 sqrt(c) u) for each element, and sqrt(2 t) for the signs.

*Worst case.* |R_ij| <= gamma_c (|A| |B|)_ij for any errors (Higham, *Accuracy and Stability of Numerical
Algorithms*, 2002, section 3.5). Only y is random, and we choose it: |y^T R_i| <= sqrt(2 t) |R_i| with the
same probability.

t makes the probability of any false alarm in one check at most `FALSE_ALARM`. Operands rounded to a reduced
precision (tf32, bf16) add an error per operand, which all elements of a row or column share. They may be
truncated instead.
"""

from math import log, sqrt

import numpy as np

from oocgemm.backends.base import Array, numpy_dtype
from oocgemm.errors import InputError
from oocgemm.integrity.rounding import DOUBLE, OPERANDS, Rounding, gamma, sum_error
from oocgemm.planning import GemmProblem
from oocgemm.planning.integers import EXACT_LIMIT

BOUNDS = ("probabilistic", "worst-case")
FALSE_ALARM = 1e-6
EPILOGUE = 8  # operations on an element after the sum of its products: alpha, beta, conversions


class SumTolerance(Rounding):
    """The error bound of `tests` sums over `elements` columns each, for a product whose sums have `k` terms.

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
        """Whether the bound depends on norms of C as it is stored."""
        return bool(self._stored)

    def product_norm(self, terms: Array) -> Array:
        """Return a bound of the norms of |A| |B|, given those of the terms."""
        return np.asarray(self._terms * terms)

    def of_sums(self, terms: Array, bias: Array, old: Array, stored: Array, elements: Array) -> Array:
        """Return the error bound of sums over `elements` elements each.

        Arguments:
            terms: the norms sqrt(sum_j S_ij)
            bias: the excess of the norms of partial sums over them
            old, stored: the norms of the old C and of C as it is stored
        """
        alpha, beta = abs(self.alpha), abs(self.beta)
        old = beta * old if beta else np.zeros_like(old)
        root = np.sqrt(elements)
        largest = alpha * self.product_norm(terms) + old
        if self._integer:  # sums below EXACT_LIMIT are exact
            return np.where(root * largest < EXACT_LIMIT / 2, 0.0, self._check_error * root * largest)
        signs = np.minimum(self._signs, root)
        if self._probabilistic:
            reduced = self._operands * ((self._t + self._signs) * terms + self._signs * bias)
            rounding = alpha * (self._walk * terms + self._bias * bias + reduced) + self._epilogue * old
        else:
            rounding = signs * self._worst * largest
        return np.asarray(rounding + signs * self._stored * stored + elements * self._underflow)
