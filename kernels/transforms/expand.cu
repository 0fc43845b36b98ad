// expand: transforms the elements of a panel of A or B just before it is multiplied (`oocgemm.Transform`).
//
//   y = fill[p]                          where x is missing
//   y = (f(x) - center[p]) * inverse[p]  elsewhere; f is log1p or nothing
//
// p is the element's index along k. The arithmetic is in float64, and the result is rounded once. So it has
// the same bits as on the host, except after log1p, whose last bits may differ. The kernel is bound by memory:
// it reads each element once and writes it once, and a thread loads the numbers of its columns once for ROWS
// rows.
//
// x and y are row-major matrices of the same shape, without gaps between rows.
//
// Macros:
//   OOC_STORED, OOC_RESULT  types of x and y (common/scalar.cuh)
//   OOC_K_AXIS              1: p counts columns of x. 0: p counts rows
//   OOC_MISSING             0: no element is missing. 1: elements equal to `code` are. 2: NaN are
//   OOC_LOG1P               1: f is log1p
//   OOC_WIDTH               elements of a row per thread, loaded and stored together: 4, or 1 if rows are not
//                           multiples of 4
// Launch: blocks of 256 threads, as 64 columns of threads by 4 rows of threads. blockIdx.x selects
// 64 * OOC_WIDTH columns, blockIdx.y selects ROWS rows, and then those gridDim.y * ROWS below them.
#include "common/scalar.cuh"

constexpr int ACROSS = 64, DOWN = 4, ROWS = 64, WIDTH = OOC_WIDTH;

template <typename T>
struct alignas(sizeof(T) * WIDTH) pack_t {
    T x[WIDTH];
};

__device__ inline void round_to(double x, half_t& y) { asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x)); }
__device__ inline void round_to(double x, bfloat_t& y) { narrow(static_cast<float>(x), y); }
__device__ inline void round_to(double x, float& y) { y = static_cast<float>(x); }
__device__ inline void round_to(double x, double& y) { y = x; }
__device__ inline void round_to(double x, signed char& y) { y = static_cast<signed char>(static_cast<int>(x)); }

__device__ inline bool is_missing(double x, double code) {
    return OOC_MISSING == 1 ? x == code : OOC_MISSING == 2 ? x != x : false;
}

extern "C" __global__ void __launch_bounds__(256) expand(
    const OOC_STORED* __restrict__ x, long long rows, long long cols, double code,
    const double* __restrict__ fill, const double* __restrict__ center, const double* __restrict__ inverse,
    OOC_RESULT* __restrict__ y) {
    const long long left = (static_cast<long long>(blockIdx.x) * ACROSS + threadIdx.x % ACROSS) * WIDTH;
    if (left >= cols) return;
    double filled[WIDTH], centered[WIDTH], scaled_by[WIDTH];
    if (OOC_K_AXIS) {
        for (int e = 0; e < WIDTH; ++e) {
            filled[e] = OOC_MISSING ? fill[left + e] : 0;
            centered[e] = center[left + e];
            scaled_by[e] = inverse[left + e];
        }
    }
    const long long step = static_cast<long long>(gridDim.y) * ROWS;
    for (long long top = static_cast<long long>(blockIdx.y) * ROWS; top < rows; top += step) {
#pragma unroll (OOC_LOG1P ? 1 : 2)
        for (int down = threadIdx.x / ACROSS; down < ROWS; down += DOWN) {
            const long long row = top + down;
            if (row < rows) {
                const pack_t<OOC_STORED> from = *reinterpret_cast<const pack_t<OOC_STORED>*>(x + row * cols + left);
                pack_t<OOC_RESULT> to;
                if (!OOC_K_AXIS) {
                    for (int e = 0; e < WIDTH; ++e) {
                        filled[e] = OOC_MISSING ? fill[row] : 0;
                        centered[e] = center[row];
                        scaled_by[e] = inverse[row];
                    }
                }
                for (int e = 0; e < WIDTH; ++e) {
                    const double value = static_cast<double>(widen(from.x[e]));
                    const double found = ((OOC_LOG1P ? log1p(value) : value) - centered[e]) * scaled_by[e];
                    round_to(is_missing(value, code) ? filled[e] : found, to.x[e]);
                }
                *reinterpret_cast<pack_t<OOC_RESULT>*>(y + row * cols + left) = to;
            }
        }
    }
}
