// steps.cuh: the steps of elements (`oocgemm.planning.elements`), which replace an element x of a panel.
//
// A step has a number u per row or per column of the panel, or none, and up to two constants. `stored` is the element
// before the first step. Steps that decode it come first, and change `stored`, too.
//
// Macros:
//   OOC_CHAIN  the steps, in their order, as OOC_STEP(name, number, axis) without separators. The axis of the numbers
//              is 1 for rows, 2 for columns and 0 for none
#pragma once

constexpr int BY_ROW = 1, BY_COLUMN = 2;

struct step_t {
    const double* numbers;  // those of the panel
    double first, second;
};
struct elements_t {
    step_t steps[8];
};

// Names begin with element_, since some are those of functions of CUDA.
__device__ inline double element_log1p(double x, double&, double, const step_t&) { return log1p(x); }
__device__ inline double element_impute(double x, double& stored, double u, const step_t& s) {
    return stored == s.first ? u : x;
}
__device__ inline double element_impute_nan(double x, double& stored, double u, const step_t&) {
    return stored != stored ? u : x;
}
__device__ inline double element_center(double x, double&, double u, const step_t&) { return x - u; }
// NaN stays NaN.
__device__ inline double element_clip(double x, double&, double, const step_t& s) {
    return x != x ? x : fmin(fmax(x, s.first), s.second);
}
__device__ inline double element_known(double x, double&, double, const step_t& s) { return x == s.first ? 0 : 1; }
__device__ inline double element_known_nan(double x, double&, double, const step_t&) { return x != x ? 0 : 1; }
__device__ inline double element_or_zero(double x, double&, double, const step_t& s) { return x == s.first ? 0 : x; }
__device__ inline double element_or_zero_nan(double x, double&, double, const step_t&) { return x != x ? 0 : x; }
__device__ inline double element_equal(double x, double&, double, const step_t& s) { return x == s.first ? 1 : 0; }
__device__ inline double element_shift(double x, double&, double, const step_t& s) { return x + s.first; }
__device__ inline double element_square(double x, double&, double, const step_t&) {
#ifdef __CUDA_ARCH__
    return __dmul_rn(x, x);
#else
    return x * x;
#endif
}
// Not contracted with a subtraction after it, so that bits are those of the host.
__device__ inline double element_scale(double x, double&, double u, const step_t&) {
#ifdef __CUDA_ARCH__
    return __dmul_rn(x, u);
#else
    return x * u;
#endif
}
__device__ inline double element_absent(double, double& stored, double, const step_t& s) {
#ifdef __CUDA_ARCH__
    return stored = stored == s.first ? __longlong_as_double(0x7ff8000000000000LL) : stored;
#else
    return stored = stored == s.first ? __builtin_nan("") : stored;
#endif
}
__device__ inline double element_unsigned(double, double& stored, double, const step_t& s) {
    return stored = stored < 0 ? stored + s.first : stored;
}
__device__ inline double element_normalize(double, double& stored, double u, const step_t&) {
#ifdef __CUDA_ARCH__
    return stored = __dmul_rn(stored, u);
#else
    return stored = stored * u;
#endif
}
// Not contracted, as above.
__device__ inline double element_unpack(double, double& stored, double, const step_t& s) {
#ifdef __CUDA_ARCH__
    return stored = __dadd_rn(__dmul_rn(stored, s.first), s.second);
#else
    return stored = stored * s.first + s.second;
#endif
}
