// liang_opt: the kernel of section 3.2 of Liang, Ren, Guo and Liu, Design and Implementation of Matrix
// Multiplication on GPU (2010): B bypasses shared memory.
//
//           R             H = 64
//        +----+        +-----------+        A block of H threads owns a W x H tile of C, each thread one column: W
//  W = 16| A  |     R  |  |        |        sums in registers. Along k, R = 16 at a time:
//        +----+        |  v        |
//       in shared      +-----------+          1. copy the W x R part of A to shared memory; barrier
//        memory          registers            2. for each p: read B[p, x] into a register, straight from device memory
//                                                (the threads of a warp read neighbours), and multiply it with the W
//                                                elements of A's column p, which all threads share; barrier
//
// A thread is the only one to use its elements of B, so putting them into shared memory would not help. There
// is one read from shared memory per multiply-add, of an element of A. All threads of a warp read the same
// one.
//
// Parameters
//   W (16)   rows of a block's tile of C; each takes a register per thread (2 for float64, 4 for complex128)
//   H (64)   columns of the tile, and threads of a block
//   R (16)   depth of a step along k
#include "plain/operand.cuh"

#ifndef W
#define W 16
#define H 64
#define R 16
#endif
static_assert(H % 32 == 0 && H <= 1024, "whole warps, and at most 1024 threads per block");
static_assert(W * (R + 1) * sizeof(Accumulated) <= 48 * 1024, "the part of A fits static shared memory");

extern "C" __global__ void __launch_bounds__(H, 1) liang_opt(const gemm_arguments g) {
    __shared__ Accumulated part_a[W][pitch(OOC_OP_A, R)];
    const tile_origin at = origin_of_block<W, H>(g);
    const long long j = at.col + threadIdx.x;
    Accumulated sum[W];
#pragma unroll
    for (int i = 0; i < W; ++i) sum[i] = zero();
    for (long long p0 = 0; p0 < g.k; p0 += R) {
        load_tile<OOC_OP_A, W, R, H>(part_a, g.a, g.lda, g.m, g.k, at.row, p0, threadIdx.x);
        __syncthreads();
        Accumulated b[R];
#pragma unroll
        for (int p = 0; p < R; ++p)
            b[p] = p0 + p < g.k && j < g.n ? element<OOC_OP_B>(g.b, g.ldb, p0 + p, j) : zero();
#pragma unroll
        for (int p = 0; p < R; ++p) {
#pragma unroll
            for (int i = 0; i < W; ++i) sum[i] = multiply_add(part_a[i][p], b[p], sum[i]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < W; ++i) write_result(g, at.row + i, j, sum[i]);
}
