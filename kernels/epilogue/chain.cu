// chain: result = the chain of steps applied to alpha * sum + beta * result, for each element of a strip of C.
//
// The strip is row-major, without gaps between its rows of `width` elements. `result` may be `sums`. If a step needs D,
// `result` contains D at first; beta is 0 then. The steps are computed in double precision, in one pass over the strip.
//
// A product of several terms (`oocgemm.planning.terms`) has as many sums per element. A row of them has the sums of the
// first term for all columns, then those of the second term, and so on. They are combined before the other steps.
//
// Macros: those of epilogue/steps.cuh, and
//   OOC_STORED       type of the result
//   OOC_READS        1: `result` contains D or the old C
//   OOC_PITCH        a row of `result` is followed by room for OOC_PITCH - 1 rows; 1 if it is not defined
// Launch: any number of blocks of 256 threads along x and y. Those along y take turns with groups of ROWS rows. A
// thread loads an element of each row of its group before it computes, so that several loads are in flight.
#include "common/scalar.cuh"
#include "epilogue/steps.cuh"

// Rounds once. bfloat16 is rounded from float.
__device__ inline void round_to(double x, double& y) { y = x; }
__device__ inline void round_to(double x, float& y) { y = static_cast<float>(x); }
__device__ inline void round_to(double x, half_t& y) { asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x)); }
__device__ inline void round_to(double x, bfloat_t& y) { narrow(static_cast<float>(x), y); }

#ifndef OOC_PITCH
#define OOC_PITCH 1
#endif
constexpr int ROWS = 4;

extern "C" __global__ void __launch_bounds__(256) chain(
    long long height, long long width, const OOC_ACCUMULATED* sums, double alpha, double beta, chain_t chain,
    OOC_STORED* result) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (long long top = static_cast<long long>(blockIdx.y) * ROWS; top < height; top += gridDim.y * ROWS) {
        const int rows = height - top < ROWS ? static_cast<int>(height - top) : ROWS;
        for (long long j = first; j < width; j += stride) {
            double c[ROWS], d[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const long long row = (top + r) * width;
                c[r] = r < rows ? combined(sums + row * OOC_TERMS + j, width, chain) : 0;
                d[r] = OOC_READS && r < rows ? static_cast<double>(widen(result[row * OOC_PITCH + j])) : 0;
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                c[r] *= alpha;
                if (OOC_READS && beta != 0) c[r] += beta * d[r];
                c[r] = chained(c[r], chain, r < rows ? top + r : top, j, d[r]);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r < rows) round_to(c[r], result[(top + r) * OOC_PITCH * width + j]);
            }
        }
    }
}
