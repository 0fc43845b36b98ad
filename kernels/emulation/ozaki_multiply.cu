// ozaki_multiply: multiplies residues of A and B, for an emulated product (planning/emulation.py), on the
// int8 tensor cores of sm_90a. It computes some rows of the product for all moduli.
//
// A plane is the matrix of the residues for one modulus. Plane l of the result is (plane l of A) times
// (plane l of B)^T, modulo the l-th modulus. The sums are exact in int32. They are reduced to residues in
// registers, so only one byte per element goes to memory.
//
// The pipeline is that of tensor_wgmma.cu with TEAM = 2. A producer warp copies k-blocks (128 bytes along k)
// to a ring of STAGES buffers in shared memory, by TMA. Two consumer warpgroups multiply them and share a
// tile. A cluster of two blocks shares B by TMA multicast. All tiles of one modulus are computed before those
// of the next, so that concurrent tiles share data in the L2 cache.
//
// Macros
//   OOC_MODULI   the moduli
//   STAGES       k-blocks in shared memory
//   GROUP        the argument `group` of tile_at (layout.cuh), which orders the tiles
// Launch: SHARED_BYTES of shared memory and 384 threads per block. The number of blocks is the smaller of the
// tiles and the blocks that run at once, rounded to whole clusters.
// Tensor maps of A and B: bytes with the coordinates (k, row, plane), box (128, 128, 1), 128-byte swizzle.
// TMA fills boxes with zeros past the edge of the matrix.
#define OOC_FORMAT s8
#define OOC_INTEGER_SUMS
#define MMA_N 256
#include "common/hopper.cuh"
#include "common/layout.cuh"
#include "emulation/residue.cuh"

constexpr int CONSUMERS = 2, CLUSTER = 2, BOX = 128;
constexpr int TILE_X = 64 * CONSUMERS, TILE_Y = MMA_N;
constexpr int X_BYTES = TILE_X * ROW_BYTES, STAGE_BYTES = X_BYTES + TILE_Y * ROW_BYTES;
constexpr int SHARED_BYTES = STAGES * (STAGE_BYTES + 16) + 1024;  // stages, their barriers, alignment
static_assert(TILE_X == BOX && TILE_Y == BOX * CLUSTER, "each block of a cluster copies one box of A and one of B");
static_assert(STAGES >= 2 && SHARED_BYTES <= 232448, "a block has at most 227 KiB of shared memory");

constexpr int MODULI[] = {OOC_MODULI};
constexpr int NUMBER = sizeof(MODULI) / sizeof(int);
struct divisor {
    int p, inverse, high;  // the modulus, its scaled reciprocal (residue.cuh), and 2^16 mod p
};
struct divisors {
    divisor all[NUMBER] = {};
    constexpr divisors() {
        for (int l = 0; l < NUMBER; ++l) all[l] = {MODULI[l], reciprocal(MODULI[l]), power_residue(16, MODULI[l])};
    }
};
__constant__ constexpr divisors DIVISORS;

// Collects eight neighbouring bytes of a row of the result in one lane, to store them at once. There are four
// such runs of eight bytes per four neighbouring lanes. Before, each lane has two bytes of every run: of runs
// 0 and 2 in v, of runs 1 and 3 in w. After, lane i of the four has all of run i.
__device__ inline uint2 gathered(unsigned v, unsigned w, int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    const unsigned kept = odd ? w : v, got = __shfl_xor_sync(~0u, odd ? v : w, 1);
    const unsigned first = odd ? got : kept, second = odd ? kept : got;
    const unsigned low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
    const unsigned mine = upper ? high : low, other = __shfl_xor_sync(~0u, upper ? low : high, 2);
    return upper ? make_uint2(other, mine) : make_uint2(mine, other);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (CONSUMERS + 1), 1)
    ozaki_multiply(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b,
                   signed char* __restrict__ residues, int rows, int pitch, int depth) {
    extern __shared__ unsigned char memory[];
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;  // slabs begin at multiples of 1024
    const unsigned full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    const int lane = threadIdx.x % 32, rank = cluster_rank();
    const unsigned x_tiles = (rows - 1) / (TILE_X * CLUSTER) + 1, y_tiles = (pitch - 1) / TILE_Y + 1;
    const unsigned plane_tiles = x_tiles * y_tiles, tiles = NUMBER * plane_tiles, clusters = gridDim.x / CLUSTER;
    const int k_blocks = (depth - 1) / ROW_BYTES + 1;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + 8 * s, 1);
            mbarrier_init(empty + 8 * s, 4 * CONSUMERS * CLUSTER);
        }
        mbarrier_init_fence();
    }
    cluster_barrier();

    position<STAGES> p;
    if (warpgroup == 0) {
        fewer_registers<40>();
        if (warp == 0 && lane == 0)
            for (unsigned t = blockIdx.x / CLUSTER; t < tiles; t += clusters) {
                const tile_position tile = tile_at(t % plane_tiles, x_tiles, y_tiles, GROUP);
                const int plane = t / plane_tiles, x = (tile.row * CLUSTER + rank) * TILE_X, y = tile.column * TILE_Y;
                for (int kb = 0; kb < k_blocks; ++kb, p.advance(1)) {
                    mbarrier_wait(empty + 8 * p.stage, p.phase ^ 1);
                    const unsigned at = stages + p.stage * STAGE_BYTES, barrier = full + 8 * p.stage;
                    mbarrier_expect_bytes(barrier, STAGE_BYTES);
                    tma_copy_box(map_a, at, barrier, kb * ROW_BYTES, x, plane);
                    tma_multicast_box(map_b, at + X_BYTES + rank * BOX * ROW_BYTES, barrier, kb * ROW_BYTES, y + rank * BOX, plane, 3);
                }
            }
    } else {
        more_registers<232>();
        const int part = (warpgroup - 1) * 64;
        const auto release = [&](int stage) {
            if (lane < CLUSTER) mbarrier_arrive_at(empty + 8 * stage, lane);
        };
        const unsigned long long x_base = slab_descriptor(stages + part * ROW_BYTES, true, ROW_BYTES);
        const unsigned long long y_base = slab_descriptor(stages + X_BYTES, true, ROW_BYTES);
        for (unsigned t = blockIdx.x / CLUSTER; t < tiles; t += clusters) {
            int d[TILE_Y / 2], before = 0;  // before: the stage that unfinished wgmmas may still read
#pragma unroll 1
            for (int kb = 0; kb < k_blocks; ++kb) {
                mbarrier_wait(full + 8 * p.stage, p.phase);
                const unsigned stage = p.stage * STAGE_BYTES >> 4, step = step_bytes(true, 1) >> 4;
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < ROW_BYTES / 32; ++s)
                    wgmma_8bit(d, x_base + stage + s * step, y_base + stage + s * step, s > 0 || kb > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (kb > 0) release(before);
                before = p.stage;
                p.advance(1);
            }
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < TILE_Y / 2; ++i) asm volatile("" : "+r"(d[i])::"memory");  // keeps reads of the sums after the wait
            release(before);

            // A thread's sums are in two rows, 8 apart. Of every 8 columns it has the two neighbours
            // 2 (lane % 4) and 2 (lane % 4) + 1.
            const tile_position tile = tile_at(t % plane_tiles, x_tiles, y_tiles, GROUP);
            const int l = t / plane_tiles, row = (tile.row * CLUSTER + rank) * TILE_X + part + 16 * warp + lane / 4;
            const int column = tile.column * TILE_Y + 8 * (lane % 4);
            const divisor by = DIVISORS.all[l];
            const auto reduced = [&](int i) -> unsigned { return residue((d[i] >> 16) * by.high + (d[i] & 0xffff), by.p, by.inverse); };
            const auto packed = [&](int i, int j) {
                const unsigned four[] = {reduced(i), reduced(i + 1), reduced(j), reduced(j + 1)};
                return four_bytes(four);
            };
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                signed char* to = residues + (static_cast<long long>(l) * rows + row + 8 * half) * pitch + column;
#pragma unroll
                for (int run = 0; run < TILE_Y / 32; ++run) {
                    const int i = run * 16 + 2 * half;
                    const uint2 eight = gathered(packed(i, i + 8), packed(i + 4, i + 12), lane);
                    if (row + 8 * half < rows && column + 32 * run < pitch) *reinterpret_cast<uint2*>(to + 32 * run) = eight;
                }
            }
        }
    }
    cluster_barrier();  // no block exits while another may still write to its shared memory
}
