// scalar.cuh: the types of stored elements and of sums, and the arithmetic between them.
//
// A kernel is compiled once per dtype, with two macros: the type of the elements of A and B, and below it the
// type in which their products are summed.
//
//   OOC_STORED       half_t | bfloat_t | float | double | complex_t<float> | complex_t<double> | signed char
//   OOC_ACCUMULATED  float  | float    | float | double | complex_t<float> | complex_t<double> | int
//
// No CUDA header is included. So NVRTC, which compiles the kernels, works without an installed CUDA toolkit.
#pragma once

struct half_t {
    unsigned short bits;
};

struct bfloat_t {
    unsigned short bits;
};

template <typename Real>
struct complex_t {
    Real re, im;
};

__device__ inline float widen(half_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ inline float widen(bfloat_t x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
template <typename T>
__device__ inline T widen(T x) { return x; }

__device__ inline void narrow(float x, half_t& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ inline void narrow(float x, bfloat_t& y) {  // round to nearest even; NaN stays NaN
    const unsigned bits = __float_as_uint(x);
    y.bits = static_cast<unsigned short>(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff);
}
template <typename T>
__device__ inline void narrow(T x, T& y) { y = x; }

template <typename T>
__device__ inline T conjugate(T x) { return x; }
template <typename Real>
__device__ inline complex_t<Real> conjugate(complex_t<Real> x) { return {x.re, -x.im}; }

template <typename T>
__device__ inline T multiply_add(T a, T b, T c) { return a * b + c; }
template <typename Real>
__device__ inline complex_t<Real> multiply_add(complex_t<Real> a, complex_t<Real> b, complex_t<Real> c) {
    return {a.re * b.re - a.im * b.im + c.re, a.re * b.im + a.im * b.re + c.im};
}

template <typename T>
struct make_scalar {
    __device__ static T of(double re, double) { return static_cast<T>(re); }
};
template <typename Real>
struct make_scalar<complex_t<Real>> {
    __device__ static complex_t<Real> of(double re, double im) {
        return {static_cast<Real>(re), static_cast<Real>(im)};
    }
};

// Returns alpha * product, for real and complex types.
template <typename T>
__device__ inline T scaled(T alpha, T product) { return multiply_add(alpha, product, make_scalar<T>::of(0, 0)); }
