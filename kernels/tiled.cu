// tiled: C = alpha * op(A) @ op(B) + beta * C through square tiles in shared memory.
//
//            k                n
//        +-------+        +-------+         A thread block of TILE x TILE threads owns one tile of C, a thread
//      m | A     |      k |   B   |         one element of it. It walks along k a tile at a time:
//        |  ===> |        |   |   |
//        +-------+        |   v   |           1. every thread copies one element of A's tile and one of B's
//                         +-------+              into shared memory, zero where the matrix has ended
//                                             2. barrier: the tiles are there
//   C[i, j] = sum_p A[i, p] * B[p, j]         3. TILE multiply-adds from shared memory
//                                             4. barrier: the tiles may be overwritten
//
// Each element of A and B is read from device memory k-tiles / TILE times less often than by a thread alone.
//
// Operands are row-major as stored; op() is in the strides: element (i, p) of op(A) lies at
// A[i * a_row + p * a_col]. A transpose swaps them, a conjugate transpose sets conj_a besides.
//
// Parameters
//   TILE (16)  side of a tile. TILE * TILE threads a block, at most 1024; 2 * TILE * TILE elements of shared
//              memory: 8 KiB for complex128 at 16.
#include "scalar.cuh"

#ifndef TILE
#define TILE 16
#endif
static_assert(TILE * TILE <= 1024, "a block has at most 1024 threads, one an element of the tile");
static_assert(2 * TILE * TILE * sizeof(OOC_ACCUMULATED) <= 48 * 1024, "both tiles must fit static shared memory");

using Stored = OOC_STORED;
using Accumulated = OOC_ACCUMULATED;

extern "C" __global__ void __launch_bounds__(TILE * TILE) tiled(
    long long m, long long n, long long k,
    double alpha_re, double alpha_im,
    const Stored* __restrict__ a, long long a_row, long long a_col, int conj_a,
    const Stored* __restrict__ b, long long b_row, long long b_col, int conj_b,
    double beta_re, double beta_im,
    Accumulated* __restrict__ c, long long ldc) {
    __shared__ Accumulated tile_a[TILE][TILE];
    __shared__ Accumulated tile_b[TILE][TILE];
    const Accumulated alpha = make_scalar<Accumulated>::of(alpha_re, alpha_im);
    const Accumulated beta = make_scalar<Accumulated>::of(beta_re, beta_im);
    const Accumulated zero = make_scalar<Accumulated>::of(0, 0);
    const bool keeps_old = beta_re != 0 || beta_im != 0;
    const int x = threadIdx.x, y = threadIdx.y;
    const long long j = static_cast<long long>(blockIdx.x) * TILE + x;

    // gridDim.y is at most 65535, so that taller products take several rounds.
    for (long long top = static_cast<long long>(blockIdx.y) * TILE; top < m;
         top += static_cast<long long>(gridDim.y) * TILE) {
        const long long i = top + y;
        Accumulated sum = zero;
        for (long long p0 = 0; p0 < k; p0 += TILE) {
            const long long pa = p0 + x, pb = p0 + y;
            Accumulated va = i < m && pa < k ? Accumulated(widen(a[i * a_row + pa * a_col])) : zero;
            Accumulated vb = pb < k && j < n ? Accumulated(widen(b[pb * b_row + j * b_col])) : zero;
            tile_a[y][x] = conj_a ? conjugate(va) : va;
            tile_b[y][x] = conj_b ? conjugate(vb) : vb;
            __syncthreads();
#pragma unroll
            for (int p = 0; p < TILE; ++p) sum = multiply_add(tile_a[y][p], tile_b[p][x], sum);
            __syncthreads();
        }
        if (i < m && j < n) {
            Accumulated* const target = c + i * ldc + j;
            const Accumulated product = scaled(alpha, sum);
            *target = keeps_old ? multiply_add(beta, *target, product) : product;
        }
    }
}
