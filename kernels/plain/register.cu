// register: the kernel `tiled` with RESULTS elements of C per thread, which are summed in registers. The
// function is called register_kernel, since `register` is reserved in C++.
//
//        TILE                     The same TILE x TILE tiles, with RESULTS times fewer threads. A thread owns RESULTS
//      +------+                   elements of one column of C's tile, TILE / RESULTS rows apart:
//      |  0   |  y
//      |  1   |                     C[y + 0 * step, x], C[y + 1 * step, x], ...    step = TILE / RESULTS
//      |  0   |  y + step
//      |  1   |                   For each p it reads B[p, x] once for all of them: 1 + 1 / RESULTS reads of shared memory
//      +------+                   per multiply-add instead of 2. The RESULTS sums are independent, so one thread keeps
//         x                       several multiply-adds in flight (instruction-level parallelism: V. Volkov, Better
//                                 Performance at Lower Occupancy, 2010).
//
// Parameters
//   TILE (32)     side of a tile
//   RESULTS (8)   elements of C per thread: 1, 2, 4, 8, 16 or 32. A block has TILE * TILE / RESULTS threads. More
//                 elements take more registers and leave fewer threads to hide the latency of loads.
#include "plain/operand.cuh"

#ifndef TILE
#define TILE 32
#endif
#ifndef RESULTS
#define RESULTS 8
#endif
constexpr int THREADS = TILE * TILE / RESULTS, STEP = TILE / RESULTS;
static_assert(TILE % RESULTS == 0, "each thread has as many rows of the tile");
static_assert(THREADS <= 1024 && THREADS % 32 == 0, "whole warps, and at most 1024 threads per block");
static_assert(2 * TILE * (TILE + 1) * sizeof(Accumulated) <= 48 * 1024, "both tiles must fit static shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, 1) register_kernel(const gemm_arguments g) {
    __shared__ Accumulated tile_a[TILE][pitch(OOC_OP_A, TILE)];
    __shared__ Accumulated tile_b[TILE][pitch(OOC_OP_B, TILE)];
    const int thread = threadIdx.x, x = thread % TILE, y = thread / TILE;
    const tile_origin at = origin_of_block<TILE, TILE>(g);
    Accumulated sum[RESULTS];
#pragma unroll
    for (int q = 0; q < RESULTS; ++q) sum[q] = zero();
    for (long long p0 = 0; p0 < g.k; p0 += TILE) {
        load_tile<OOC_OP_A, TILE, TILE, THREADS>(tile_a, g.a, g.lda, g.m, g.k, at.row, p0, thread);
        load_tile<OOC_OP_B, TILE, TILE, THREADS>(tile_b, g.b, g.ldb, g.k, g.n, p0, at.col, thread);
        __syncthreads();
#pragma unroll 8
        for (int p = 0; p < TILE; ++p) {
            const Accumulated b = tile_b[p][x];
#pragma unroll
            for (int q = 0; q < RESULTS; ++q) sum[q] = multiply_add(tile_a[y + q * STEP][p], b, sum[q]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int q = 0; q < RESULTS; ++q) write_result(g, at.row + y + q * STEP, at.col + x, sum[q]);
}
