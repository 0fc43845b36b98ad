// liang_normal: the kernel of section 3.1 of Liang, Ren, Guo and Liu, Design and Implementation of Matrix
// Multiplication on GPU (2010).
//
//           R              H = 64
//        +----+        +-----------+        A block of 512 threads owns a W x H tile of C and keeps it in registers,
//  W = 32| A  |     R  |     B     |        W * H / THREADS = 4 elements per thread. Along k, R = 16 at a time:
//        +----+        +-----------+
//                                             1. copy the W x R part of A and the R x H part of B to shared memory
//   thread: column x = t % H, rows            2. barrier
//   y, y + 8, y + 16, ...  of the tile,       3. multiply: an element of B is read once for 4 elements of C
//   y = t / H                                 4. barrier
//
// An element of A that has been copied to shared memory is used for H = 64 multiplications, an element of B
// for W = 32. In the kernel `tiled`, with square tiles of 16, both are used for 16.
//
// Parameters
//   W (32), H (64)   rows and columns of a block's tile of C
//   R (16)           depth of a step along k
//   THREADS (512)    threads of a block
#include "plain/operand.cuh"

#ifndef W
#define W 32
#define H 64
#define R 16
#define THREADS 512
#endif
constexpr int STEP = THREADS / H, RESULTS = W / STEP;
static_assert(THREADS % H == 0 && W % STEP == 0, "each thread has as many rows of one column");
static_assert(THREADS <= 1024 && H % 32 == 0, "at most 1024 threads per block; a warp covers part of one row");
static_assert((W * (R + 1) + R * (H + 1)) * sizeof(Accumulated) <= 48 * 1024, "both parts fit static shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, 1) liang_normal(const gemm_arguments g) {
    __shared__ Accumulated part_a[W][pitch(OOC_OP_A, R)];
    __shared__ Accumulated part_b[R][pitch(OOC_OP_B, H)];
    const int thread = threadIdx.x, x = thread % H, y = thread / H;
    const tile_origin at = origin_of_block<W, H>(g);
    Accumulated sum[RESULTS];
#pragma unroll
    for (int q = 0; q < RESULTS; ++q) sum[q] = zero();
    for (long long p0 = 0; p0 < g.k; p0 += R) {
        load_tile<OOC_OP_A, W, R, THREADS>(part_a, g.a, g.lda, g.m, g.k, at.row, p0, thread);
        load_tile<OOC_OP_B, R, H, THREADS>(part_b, g.b, g.ldb, g.k, g.n, p0, at.col, thread);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < R; ++p) {
            const Accumulated b = part_b[p][x];
#pragma unroll
            for (int q = 0; q < RESULTS; ++q) sum[q] = multiply_add(part_a[y + q * STEP][p], b, sum[q]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int q = 0; q < RESULTS; ++q) write_result(g, at.row + y + q * STEP, at.col + x, sum[q]);
}
