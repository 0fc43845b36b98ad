// steps.cuh: the steps of an epilogue, which replace an element c of C, in row i and column j of a strip.
//
// A step has numbers per row, per column, or neither, and one number `value`. A number that it does not have per row or
// column is 1. d is the element of the further matrix D. Numbers are those of `oocgemm.planning.sinks`.
//
// Macros:
//   OOC_ACCUMULATED  type of the sums: float, double, or int
//   OOC_CHAIN        the steps, in their order, as OOC_STEP(name, number) without separators
//   OOC_TERMS        the number of terms of the product, and of sums of an element; 1 if it is not defined
//   OOC_COMBINE      the step that combines the sums of several terms. It is step 0, and OOC_CHAIN lacks it
#pragma once

struct step_t {
    const double* rows;
    const double* cols;
    double value;
};
struct chain_t {
    step_t steps[9];
};

__device__ inline double number(const double* numbers, long long index) { return numbers ? numbers[index] : 1.0; }

__device__ inline double factor(const step_t& s, long long i, long long j) {
    return s.value * number(s.rows, i) * number(s.cols, j);
}
__device__ inline double scale(double c, const step_t& s, long long i, long long j, double) {
    return c * factor(s, i, j);
}
__device__ inline double rank_one(double c, const step_t& s, long long i, long long j, double) {
    return c + factor(s, i, j);
}
__device__ inline double add(double c, const step_t& s, long long, long long, double d) { return c + s.value * d; }
__device__ inline double divide(double c, const step_t&, long long, long long, double d) { return c / d; }
__device__ inline double divide_or_zero(double c, const step_t&, long long, long long, double d) {
    return d == 0 ? 0 : c / d;
}

// NaN stays NaN.
__device__ inline double correlation(double c, const step_t& s, long long i, long long j, double) {
    const double r = c * factor(s, i, j);
    return r > 1 ? 1 : r < -1 ? -1 : r;
}

// The exponential is that of the type of the sums. Squared distances that rounding made negative are 0.
__device__ inline double exponential(double x, double) { return exp(x); }
__device__ inline double exponential(double x, int) { return exp(x); }
__device__ inline double exponential(double x, float) { return exp(static_cast<float>(x)); }
__device__ inline double gaussian(double c, const step_t& s, long long i, long long j, double) {
    const double d2 = s.rows[i] + s.cols[j] - 2 * c;
    return exponential(d2 < 0 ? 0 : -s.value * d2, OOC_ACCUMULATED(0));
}

__device__ inline double distance(double c, const step_t& s, long long i, long long j, double) {
    const double d2 = s.rows[i] + s.cols[j] - 2 * c;
    return d2 < 0 ? 0 : s.value * d2;
}

// Both are of counts, which are exact.
__device__ inline double jaccard(double c, const step_t& s, long long i, long long j, double) {
    const double either = s.rows[i] + s.cols[j] - c;
    return either == 0 ? 0 : (either - c) / either;
}
__device__ inline double hamming(double c, const step_t& s, long long i, long long j, double) {
    return (s.rows[i] + s.cols[j] - 2 * c) / s.value;
}

__device__ inline double root(double c, const step_t&, long long, long long, double) { return sqrt(c); }

// Rows of op(A) and columns of op(B) that are equal have the same number. NaN stays NaN.
__device__ inline double identical(double c, const step_t& s, long long i, long long j, double) {
    return s.rows[i] == s.cols[j] && c == c ? s.value : c;
}

__device__ inline double squared(double c, const step_t& s, long long, long long, double) {
    return c * c - s.value * (1 - c * c);
}

// NaN becomes 0, too, where it is outside.
__device__ inline double within(double c, const step_t& s, long long i, long long j, double) {
    return number(s.rows, i) <= number(s.cols, j) ? c : s.value == 0 ? 0 : nan("");
}

__device__ inline double kinship(double c, const step_t& s, long long i, long long j, double) {
    const double u = number(s.rows, i), v = number(s.cols, j);
    return 0.5 - (2 * s.value - u - v - 2 * c) / (4 * fmin(u, v));
}

// Steps that combine the sums t of several terms. Their order is that of `COMBINING` in oocgemm/planning/sinks.py.
__device__ inline double undefined() {
    const double zero = 0;
    return zero / zero;
}
__device__ inline double pairwise_covariance(const double* t, double value) {
    return t[0] > value ? (t[3] - t[1] * t[2] / t[0]) / (t[0] - value) : undefined();
}
__device__ inline double pairwise_correlation(const double* t, double value) {
    const double of_x = t[0] * t[4] - t[1] * t[1], of_y = t[0] * t[5] - t[2] * t[2];
    const double r = (t[0] * t[3] - t[1] * t[2]) / (sqrt(of_x) * sqrt(of_y));
    const bool defined = of_x > value * t[0] * t[4] && of_y > value * t[0] * t[5];
    return !defined ? undefined() : r > 1 ? 1 : r < -1 ? -1 : r;
}
__device__ inline double pairwise_kinship(const double* t, double) {
    return 0.5 - (2 * t[0] - t[1] - t[2] - 2 * t[3]) / (4 * fmin(t[1], t[2]));
}
__device__ inline double shared_alleles(const double* t, double) { return 0.5 + 0.5 * (t[1] + t[2]) / t[0]; }
__device__ inline double ibs0(const double* t, double) { return 0.5 * (t[0] - t[1]); }
__device__ inline double ibs1(const double* t, double) { return t[0] - t[1] - t[2]; }
__device__ inline double ibs2(const double* t, double) { return t[0] + 0.5 * (t[1] + t[2]); }

#ifndef OOC_TERMS
#define OOC_TERMS 1
#endif
// Returns the element of C that the sums of all terms make, the first of which is at `sums`.
__device__ inline double combined(const OOC_ACCUMULATED* sums, long long width, const chain_t& chain) {
#if OOC_TERMS > 1
    double t[OOC_TERMS];
#pragma unroll
    for (int e = 0; e < OOC_TERMS; ++e) t[e] = static_cast<double>(sums[e * width]);
    return OOC_COMBINE(t, chain.steps[0].value);
#else
    return static_cast<double>(*sums);
#endif
}

#define OOC_STEP(name, number) c = name(c, chain.steps[number], i, j, d);
// Returns what the chain makes of c.
__device__ inline double chained(double c, const chain_t& chain, long long i, long long j, double d) {
    OOC_CHAIN
    return c;
}
