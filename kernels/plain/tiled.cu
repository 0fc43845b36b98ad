// tiled: C = alpha * op(A) @ op(B) + beta * C through square tiles in shared memory.
//
//            k                n
//        +-------+        +-------+         A thread block of TILE x TILE threads owns one tile of C, each
//      m | A     |      k |   B   |         thread one element. The block walks along k, one tile at a time:
//        |  ===> |        |   |   |
//        +-------+        |   v   |           1. every thread copies one element of A's tile and one of B's
//                         +-------+              to shared memory, or zero past the edge of the matrix
//                                             2. barrier: the tiles are complete
//   C[i, j] = sum_p A[i, p] * B[p, j]         3. TILE multiply-adds from shared memory
//                                             4. barrier: the tiles may be overwritten
//
// Device memory is read TILE times less often than by the naive kernel. Shared memory is the bottleneck: two
// reads per multiply-add.
//
// Parameters
//   TILE (16)  side of a tile: TILE * TILE threads per block, at most 1024, and 2 * TILE * TILE elements of shared
//              memory (8 KiB for complex128 at 16). With TILE = 8, a warp spans four rows of the tile of C,
//              so each read of the tile of A takes four different elements instead of two.
#include "plain/operand.cuh"

#ifndef TILE
#define TILE 16
#endif
static_assert(TILE * TILE <= 1024, "a block has at most 1024 threads, one per element of the tile");
static_assert(2 * TILE * (TILE + 1) * sizeof(Accumulated) <= 48 * 1024, "both tiles must fit static shared memory");

extern "C" __global__ void __launch_bounds__(TILE* TILE, 1) tiled(const gemm_arguments g) {
    __shared__ Accumulated tile_a[TILE][pitch(OOC_OP_A, TILE)];
    __shared__ Accumulated tile_b[TILE][pitch(OOC_OP_B, TILE)];
    const int thread = threadIdx.x, x = thread % TILE, y = thread / TILE;
    const tile_origin at = origin_of_block<TILE, TILE>(g);
    Accumulated sum = zero();
    for (long long p0 = 0; p0 < g.k; p0 += TILE) {
        load_tile<OOC_OP_A, TILE, TILE, TILE * TILE>(tile_a, g.a, g.lda, g.m, g.k, at.row, p0, thread);
        load_tile<OOC_OP_B, TILE, TILE, TILE * TILE>(tile_b, g.b, g.ldb, g.k, g.n, p0, at.col, thread);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < TILE; ++p) sum = multiply_add(tile_a[y][p], tile_b[p][x], sum);
        __syncthreads();
    }
    write_result(g, at.row + y, at.col + x, sum);
}
