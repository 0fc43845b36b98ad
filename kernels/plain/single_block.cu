// single_block: C = alpha * op(A) @ op(B) + beta * C by one block that keeps both operands in shared memory.
//
//            k                n
//        +-------+        +-------+           1. the block copies op(A) and op(B) into shared memory
//      m |#######|      k |#######|           2. barrier
//        |#######|        |#######|           3. each thread computes elements THREADS apart of C, row by row,
//        +-------+        |#######|              from shared memory alone
//                         +-------+
//
// Every element of A and B is read from device memory once, which is the minimum. But
//   - (m + n) * k elements of the accumulator's dtype must fit one block's shared memory: 227 KiB on an H100 or H200,
//     163 KiB on an A100; in float64 on an H200 two matrices of 120 x 120
//   - one block runs on one multiprocessor; the others (131 of 132 on an H200) are idle
//   - the first multiplication waits until all of A and B has been read.
//
// Parameters
//   THREADS (1024)  threads of the block
#include "plain/operand.cuh"

#ifndef THREADS
#define THREADS 1024
#endif
static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps, and at most 1024 threads per block");

extern "C" __global__ void __launch_bounds__(THREADS, 1) single_block(const gemm_arguments g) {
    extern __shared__ __align__(16) unsigned char shared[];
    Accumulated* const a = reinterpret_cast<Accumulated*>(shared);
    Accumulated* const b = a + g.m * g.k;
    const int m = static_cast<int>(g.m), n = static_cast<int>(g.n), k = static_cast<int>(g.k);
    for (int e = threadIdx.x; e < m * k; e += THREADS) a[e] = element<OOC_OP_A>(g.a, g.lda, e / k, e % k);
    for (int e = threadIdx.x; e < k * n; e += THREADS) b[e] = element<OOC_OP_B>(g.b, g.ldb, e / n, e % n);
    __syncthreads();
    for (long long e = threadIdx.x; e < g.m * g.n; e += THREADS) {
        const int i = static_cast<int>(e / n), j = static_cast<int>(e % n);
        Accumulated sum = zero();
        for (int p = 0; p < k; ++p) sum = multiply_add(a[i * k + p], b[p * n + j], sum);
        write_result(g, i, j, sum);
    }
}
