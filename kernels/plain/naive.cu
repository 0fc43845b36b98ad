// naive: C = alpha * op(A) @ op(B) + beta * C, one thread per element of C, without shared memory.
//
//            k                n
//        +-------+        +-------+         Thread (x, y) of block (bx, by) owns C[i, j],
//      m |=======|      k |   |   |
//        | A     |        | B |   |           i = by * BLOCK_Y + y,  j = bx * BLOCK_X + x,
//        +-------+        |   |   |
//                         +-------+         and walks along row i of op(A) and column j of op(B). The grid covers C;
//                                           threads past its edges do nothing.
//   C[i, j] = sum_p A[i, p] * B[p, j]
//
// There are two loads per multiply-add. The threads of a warp have the same i, so they read the same element
// of A and consecutive elements of a row of B. Each element of A is requested n times, each element of B m
// times. Only the caches keep these 2 * m * n * k requests from device memory.
//
// Parameters
//   BLOCK_X (32), BLOCK_Y (8)  threads of a block along columns and rows of C. If BLOCK_X is a multiple of the warp size,
//                              reads of B cover whole cache lines. The rows of a block share these lines in the L1 cache.
// The grid has at most 65535 rows of blocks: m <= 65535 * BLOCK_Y. naive_grid has no such limit.
#ifndef ENTRY
#define ENTRY naive
#endif
#include "plain/operand.cuh"

#ifndef BLOCK_X
#define BLOCK_X 32
#define BLOCK_Y 8
#endif
static_assert(BLOCK_X * BLOCK_Y <= 1024, "a block has at most 1024 threads, one per element of C");

extern "C" __global__ void __launch_bounds__(BLOCK_X* BLOCK_Y, 1) ENTRY(const gemm_arguments g) {
    const long long i = static_cast<long long>(blockIdx.y) * BLOCK_Y + threadIdx.y;
    const long long j = static_cast<long long>(blockIdx.x) * BLOCK_X + threadIdx.x;
    if (i >= g.m || j >= g.n) return;
    Accumulated sum = zero();
    for (long long p = 0; p < g.k; ++p)
        sum = multiply_add(element<OOC_OP_A>(g.a, g.lda, i, p), element<OOC_OP_B>(g.b, g.ldb, p, j), sum);
    write_result(g, i, j, sum);
}
