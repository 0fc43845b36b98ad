// tensor_f64_tma: C = alpha op(A) @ op(B) + beta C in fp64 on the tensor cores of sm_90a, with panels copied
// by TMA.
//
// A block computes two tiles of C at a time. A team of warps works on each tile. Its producer warp copies
// panels (the parts of op(A) and op(B) that are multiplied at a time) into a ring of STAGES buffers in shared
// memory, and goes on with the next tile without waiting. Its consumer warps multiply (mma.sync,
// fragments_f64.cuh).
//
//   team 0   producer | k  k+1  k+2 ...  next tile ...                   mbarriers:
//            warps    | multiply ............. | C | multiply .........  full[s]   counts the bytes of a stage
//   team 1   warps    |         | multiply ............. | C | multiply  empty[s]  one arrival per warp that has read it
//
// Team 1 starts half a tile later, so that one team reads and writes C while the other multiplies.
//
// A cluster is two blocks, one below the other in C, that share the panels of B. Each block copies one half
// of a panel by TMA multicast to both blocks. So for 128 x 128 elements of C, two panels of A and one of B
// are read from the L2 cache, instead of two of each.
//
// Parameters
//   BLOCK_M, BLOCK_N   a team's tile of C; a panel has 16 elements (128 bytes) along k
//   WARP_X, WARP_Y     a warp's part of the tile, WARP_X rows of X by WARP_Y columns of Y (fragments_f64.cuh): its sums take
//                      WARP_X * WARP_Y / 16 registers per thread
//   STAGES             pairs of panels per team in shared memory: STAGES * (BLOCK_M + BLOCK_N) * 128 bytes
//   CLUSTER            blocks that share B: 1 | 2
//   GROUP              the argument `group` of tile_at (layout.cuh), which orders the tiles
// m, n and k are 1 to 2^31 - 1.
// Launch: the number of blocks is the smaller of the tiles and the blocks that run at once, rounded to whole
// clusters.
// Tensor maps of A and B: box (16, R) of 8-byte elements, 128-byte swizzle. If the operand is contiguous
// along k, R is the number of rows of a panel that one block copies. Otherwise R is 16.
#ifndef BLOCK_M
#define BLOCK_M 64
#define BLOCK_N 128
#define WARP_X 64
#define WARP_Y 32
#define STAGES 4
#define CLUSTER 2
#define GROUP 8
#endif
#include "common/gemm.cuh"
#include "common/hopper.cuh"
#include "common/layout.cuh"
#include "fast/fragments_f64.cuh"

constexpr int DEPTH = 16, TEAMS = 2;
constexpr int BLOCK_X = SWAP ? BLOCK_N : BLOCK_M, BLOCK_Y = SWAP ? BLOCK_M : BLOCK_N;
constexpr int WARPS_Y = BLOCK_Y / WARP_Y, WARPS = 4, THREADS = (TEAMS + 1) * WARPS * 32;
constexpr int PANEL_A = BLOCK_M * ROW_BYTES, PANEL_B = BLOCK_N * ROW_BYTES, STAGE = PANEL_A + PANEL_B;
constexpr int PANEL_X = SWAP ? PANEL_A : 0, PANEL_Y = SWAP ? 0 : PANEL_A;  // their offsets in a stage
constexpr int GROUPS_X = WARP_X / 16, GROUPS_Y = WARP_Y / 16, STEPS_K = DEPTH / 8, STEPS = STEPS_K * GROUPS_X;
constexpr int SHARED_BYTES = TEAMS * STAGES * (STAGE + 16) + 16 + 1024;  // rings, their barriers, the start, alignment

static_assert(WARP_X % 16 == 0 && WARP_Y % 16 == 0, "a quad covers 16 rows or columns");
static_assert(BLOCK_X == WARP_X * (WARPS / WARPS_Y) && BLOCK_Y == WARP_Y * WARPS_Y, "a team is a warpgroup: setmaxnreg works on warpgroups");
static_assert(BLOCK_M <= 256 && BLOCK_N / CLUSTER <= 256, "a TMA box has at most 256 rows");
static_assert(BLOCK_N % (16 * CLUSTER) == 0, "a block copies whole slabs of B");
static_assert(STAGES >= 2 && SHARED_BYTES <= 232448, "a block has at most 227 KiB of shared memory");

struct ring {
    unsigned stages, full, empty;  // addresses
    int stage = 0;
    unsigned phase = 0;  // parity of the round through the stages
    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Copies `rows` rows of op(A), or columns of op(B), from `row` on: those of the panel that begins at k. If
// SHARED, the copy is a multicast to every block of the cluster.
template <bool K_MAJOR, bool SHARED>
__device__ inline void copy_rows(const tensor_map& map, unsigned to, unsigned barrier, int row, int rows, int k) {
    constexpr unsigned short everyone = (1 << CLUSTER) - 1;
    const int step = K_MAJOR ? rows : DEPTH;
    for (int done = 0; done < rows; done += step, to += step * ROW_BYTES) {
        const int x = K_MAJOR ? k : row + done, y = K_MAJOR ? row : k;
        if (SHARED && CLUSTER > 1) tma_multicast_box(map, to, barrier, x, y, everyone);
        else tma_copy_box(map, to, barrier, x, y);
    }
}

extern "C" __global__ void
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(THREADS, 1)
        tensor_f64_tma(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b, const gemm_arguments g) {
    extern __shared__ unsigned char memory[];
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;  // slabs begin at multiples of 1024
    const unsigned barriers = stages + TEAMS * STAGES * STAGE, start = barriers + TEAMS * STAGES * 16;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool multiplies = warp >= WARPS;
    const int team = multiplies ? warp / WARPS - 1 : warp;

    const int m = static_cast<int>(g.m), n = static_cast<int>(g.n);
    const unsigned rows = (m - 1) / (BLOCK_M * CLUSTER) + 1, columns = (n - 1) / BLOCK_N + 1, tiles = rows * columns;
    const unsigned clusters = gridDim.x / CLUSTER, first = team * clusters + blockIdx.x / CLUSTER;
    const int panels = static_cast<int>((g.k + DEPTH - 1) / DEPTH);
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;

    if (threadIdx.x == 0) {
        for (int s = 0; s < TEAMS * STAGES; ++s) {
            mbarrier_init(barriers + 16 * s, 1);
            mbarrier_init(barriers + 16 * s + 8, WARPS * CLUSTER);
        }
        mbarrier_init(start, WARPS);
        mbarrier_init_fence();
    }
    if (CLUSTER > 1) cluster_barrier();
    else __syncthreads();

    ring r = {stages + team * STAGES * STAGE, barriers + team * STAGES * 16, barriers + team * STAGES * 16 + 8};
    if (!multiplies) {
        fewer_registers<40>();
        if (team < TEAMS)
        for (unsigned tile = first; tile < tiles; tile += TEAMS * clusters) {
            const tile_position at = tile_at(tile, rows, columns, GROUP);
            const int top = (at.row * CLUSTER + rank) * BLOCK_M, left = at.column * BLOCK_N;
            constexpr int part = BLOCK_N / CLUSTER;
            // If beta != 0, the warp also prefetches the tile of C into the L2 cache, in lines of 128 bytes.
            // With each panel, a lane prefetches `share` lines.
            constexpr int per_row = BLOCK_N / 16, lines = BLOCK_M * per_row;
            const int share = g.beta_re != 0 ? (lines / 32 + panels - 1) / panels : 0;
            int line = lane;
            for (int panel = 0; panel < panels; ++panel, r.advance()) {
                mbarrier_wait(r.empty + 16 * r.stage, r.phase ^ 1);
                if (lane == 0) {
                    const unsigned to = r.stages + r.stage * STAGE, barrier = r.full + 16 * r.stage;
                    mbarrier_expect_bytes(barrier, STAGE);
                    copy_rows<A_K, false>(map_a, to, barrier, top, BLOCK_M, panel * DEPTH);
                    copy_rows<B_K, true>(map_b, to + PANEL_A + rank * part * ROW_BYTES, barrier, left + rank * part, part, panel * DEPTH);
                }
                __syncwarp();
                for (int i = 0; i < share && line < lines; ++i, line += 32) {
                    const int row = top + line / per_row, column = left + line % per_row * 16;
                    if (row < m && column < n)
                        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const double*>(g.c) + row * g.ldc + column));
                }
            }
        }
    } else {
        more_registers<232>();
        const int in_team = warp % WARPS, warp_x = in_team / WARPS_Y * WARP_X, warp_y = in_team % WARPS_Y * WARP_Y;
        const unsigned lane_x = PANEL_X + warp_x * ROW_BYTES + x_lane(), lane_y = PANEL_Y + warp_y * ROW_BYTES + y_lane();
        const bool aligned = (reinterpret_cast<unsigned long long>(g.c) | static_cast<unsigned long long>(g.ldc) * 8) % 16 == 0;
        if (team == 1 && first < tiles) mbarrier_wait(start, 0);
        for (unsigned tile = first; tile < tiles; tile += TEAMS * clusters) {
            quad x[2], y[GROUPS_Y];
            double sums[GROUPS_X][2 * GROUPS_Y][4] = {};
            mbarrier_wait(r.full + 16 * r.stage, r.phase);
            unsigned at = r.stages + r.stage * STAGE;
            read_x(x[0], at + lane_x, 0);
#pragma unroll
            for (int p = 0; p < GROUPS_Y; ++p) read_y(y[p], at + lane_y + p * SLAB, 0);
#pragma unroll 1
            for (int panel = 0; panel < panels; ++panel) {
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const int group = step % GROUPS_X, step_k = step / GROUPS_X;
                    const int released = r.stage;
                    if (step == STEPS - 1) {  // all values of this panel have been read: go to the next one
                        r.advance();
                        if (panel + 1 < panels) {
                            mbarrier_wait(r.full + 16 * r.stage, r.phase);
                            at = r.stages + r.stage * STAGE;
                        }  // else the values read below are not used
                    }
                    read_x(x[(step + 1) % 2], at + lane_x + (group + 1) % GROUPS_X * SLAB, (step + 1) / GROUPS_X % STEPS_K);
#pragma unroll
                    for (int p = 0; p < GROUPS_Y; ++p) {
                        multiply(sums[group][2 * p], x[step % 2], y[p], 0);
                        multiply(sums[group][2 * p + 1], x[step % 2], y[p], 1);
                        if (group == GROUPS_X - 1) read_y(y[p], at + lane_y + p * SLAB, (step_k + 1) % STEPS_K);
                    }
                    if (step == STEPS - 1) {
                        __syncwarp();
                        if (CLUSTER == 1 && lane == 0) mbarrier_arrive(r.empty + 16 * released);
                        if (CLUSTER > 1 && lane < CLUSTER) mbarrier_arrive_at(r.empty + 16 * released, lane);
                    }
                }
                if (tile == first && team == 0 && panel == panels / 2 && lane == 0) mbarrier_arrive(start);
            }
            const tile_position where = tile_at(tile, rows, columns, GROUP);
            const int top = (where.row * CLUSTER + rank) * BLOCK_M + (SWAP ? warp_y : warp_x);
            const int left = where.column * BLOCK_N + (SWAP ? warp_x : warp_y);
            double* const c = static_cast<double*>(g.c) + top * g.ldc + left;
            constexpr int height = SWAP ? WARP_Y : WARP_X, width = SWAP ? WARP_X : WARP_Y;
            if (aligned && top + height <= m && left + width <= n)
                write_sums<true, GROUPS_X, GROUPS_Y>(sums, c, g, height, width, true);
            else
                write_sums<false, GROUPS_X, GROUPS_Y>(sums, c, g, m - top, n - left, aligned);
        }
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_barrier();  // no block exits while another may still write to its shared memory
}
