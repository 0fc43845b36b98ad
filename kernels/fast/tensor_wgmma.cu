// tensor_wgmma: C = alpha op(A) @ op(B) + beta C on the tensor cores of sm_90a; operands fp16, bf16 or tf32,
// sums in float32.
//
// The kernel computes D = X Y. X is op(A) and Y is op(B); or, if SWAP, X is op(B)^T, Y is op(A)^T and D is
// C^T. A k-block is 128 bytes of X and Y along k. Shared memory has a ring of STAGES buffers (stages) for one
// k-block each. A block computes tiles of TILE_X by TILE_Y of D, one after the other, with three warpgroups:
//
//   producer        One warp copies k-blocks to empty stages by TMA, and goes on with the next tile without
//                   waiting. If C is read, it also prefetches the tile of C into the L2 cache.
//   two consumers   They issue wgmma on the k-blocks of full stages. When they have issued a k-block, they
//                   wait for the one before it and release its stage. At the end, they write their part of
//                   the tile, while the producer fills stages for the next tile.
//
// mbarriers, and what they wait for:
//      full[s]   until the producer has arrived and TMA has copied all bytes of stage s
//      empty[s]  until all consumer warps that read stage s, in every block of the cluster, have arrived
//      turns[w]  until the warps of the other consumer have waited for the last stage of their tile (TEAM =
//                1). Without this, a consumer could fall two rounds through the stages behind. The parity of
//                a phase would then no longer identify the phase.
//
// A cluster of two blocks computes two tiles with the same Y. Each block copies half of Y by TMA multicast to
// both. For a 256 x 256 square of D, 512 rows are then read from the L2 cache instead of 768. A stage is
// filled again when both blocks have read it.
//
// K-major means contiguous along k. wgmma reads 16-bit operands from shared memory in either layout, but tf32
// operands only if they are K-major. A tf32 operand that is not K-major becomes X. The consumers load it into
// registers (fragment_reader), from which wgmma takes it. This is why SWAP is needed if A and B are both used
// as stored: A is K-major and becomes Y, B is not and becomes X. The kernel refuses tf32 if neither operand
// is K-major (op(A) = A^T, op(B) = B). TMA rounds float32 to tf32 (the type of the tensor maps is TFLOAT32),
// at no cost.
//
// Parameters (macros), beside OOC_OP_A and OOC_OP_B (0 as stored, 1 or 2 transposed):
//   OOC_FORMAT    f16 | bf16 | tf32
//   MMA_N     columns of Y in one wgmma: 128 | 256
//   M_BLOCKS  one consumer computes the sums of 64 * M_BLOCKS rows of X: 1 | 2
//   TEAM      consumers per tile. 2: both share a tile. 1: each computes its own tile, and one writes while
//             the other multiplies.
//   STAGES    k-blocks in shared memory
//   CLUSTER   blocks that share Y: 1 | 2
//   GROUP     the argument `group` of tile_at (layout.cuh), which orders the tiles
//   REDUCE    if k >= REDUCE and beta = 1, sums are added to C in the L2 cache by the instruction red.add. No
//             multiprocessor then reads C. But red.add replaces subnormal sums by 0.
//   PREFETCH  1: C is prefetched into the L2 cache before it is read
// m, n and k are 1 to 2^31 - 1.
// Launch: SHARED_BYTES of shared memory and 384 threads per block. The number of blocks is the smaller of the
// tiles and the blocks that run at once, rounded to whole clusters.
// Tensor maps of X and Y: box (128 bytes, R), 128-byte swizzle. If the operand is K-major, R is the number of
// rows that one copy takes. Otherwise R is the number of elements of a k-block along k.
#ifndef MMA_N
#define MMA_N 256
#define M_BLOCKS 1
#define TEAM 2
#define STAGES 4
#define CLUSTER 2
#define GROUP 8
#define REDUCE 1024
#define PREFETCH 1
#endif
#include "fast/epilogue.cuh"
#include "common/gemm.cuh"
#include "common/hopper.cuh"
#include "common/layout.cuh"

constexpr bool TF32 = OOC_TEXT(OOC_FORMAT)[0] == 't';
constexpr int ITEM = TF32 ? 4 : 2;           // bytes
constexpr int DEPTH = ROW_BYTES / ITEM;      // elements of k in a k-block
constexpr int STEPS = 4;                     // k-steps in a k-block, 32 bytes each
constexpr bool A_K_MAJOR = OOC_OP_A == 0, B_K_MAJOR = OOC_OP_B != 0;
constexpr bool SWAP = TF32 && !B_K_MAJOR;    // D is C^T
constexpr bool X_K_MAJOR = SWAP ? B_K_MAJOR : A_K_MAJOR, Y_K_MAJOR = SWAP ? A_K_MAJOR : B_K_MAJOR;
constexpr bool X_IN_REGISTERS = TF32 && !X_K_MAJOR;

constexpr int CONSUMERS = 2;
constexpr int TILE_X = 64 * M_BLOCKS * TEAM, TILE_Y = MMA_N;
constexpr int X_BYTES = TILE_X * ROW_BYTES, Y_BYTES = TILE_Y * ROW_BYTES, STAGE_BYTES = X_BYTES + Y_BYTES;
constexpr int RELEASES = 4 * TEAM * CLUSTER;   // warps that read a stage: all must arrive at empty[s]

static_assert(!TF32 || Y_K_MAJOR, "tf32 wgmma reads Y K-major only: tensor_mma runs transposed A with B as stored");
static_assert(M_BLOCKS * MMA_N <= 256, "a thread has M_BLOCKS * MMA_N / 2 sums; more than 128 leave too few registers");
static_assert(TEAM == 1 || TEAM == 2, "there are two consumers");
static_assert(CLUSTER == 1 || CLUSTER == 2, "Y is copied in CLUSTER parts, each a whole number of slabs");
constexpr int SHARED_BYTES = STAGES * (STAGE_BYTES + 16) + 16 + 1024;  // stages, their barriers, turns, alignment
static_assert(STAGES >= 2 && SHARED_BYTES <= 232448, "a block has at most 227 KiB of shared memory");
static_assert(TILE_X <= 256, "a TMA box has at most 256 rows");

// --- producer ----------------------------------------------------------------------------------------------

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

__device__ inline void prefetch(const float* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// --- consumers ---------------------------------------------------------------------------------------------

// Loads one warp's part of X for one k-step (8 elements along k) into registers, as wgmma takes them. Lane 4
// g + q has four values: rows g and g + 8 at k = q, and the same rows at k = q + 4. The instruction's rows g
// and g + 8 are the rows 2 g and 2 g + 1 of X, so that one 8-byte load gets both. Lanes with odd q load k = q
// + 4 first, so that 16 lanes read from 16 different pairs of banks.
struct fragment_reader {
    int low, high, odd;  // offsets in a stage of X
    __device__ fragment_reader(int row, int g, int q) {
        odd = q & 1;
        low = element_offset(false, row + 2 * g, q + 4 * odd, ITEM);
        high = element_offset(false, row + 2 * g, (q + 4 * odd) ^ 4, ITEM);
    }
    __device__ void read(unsigned x, int step, unsigned (&f)[4]) const {
        unsigned u0, u1, v0, v1;
        const unsigned at = x + step * step_bytes(false, ITEM);
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(u0), "=r"(u1) : "r"(at + low));
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v0), "=r"(v1) : "r"(at + high));
        f[0] = odd ? v0 : u0;
        f[1] = odd ? v1 : u1;
        f[2] = odd ? u0 : v0;
        f[3] = odd ? u1 : v1;
    }
};

// Called after wgmma_wait: keeps the compiler from moving reads of the sums before the wait.
__device__ inline void settle(float (&d)[M_BLOCKS][MMA_N / 2]) {
#pragma unroll
    for (int b = 0; b < M_BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < MMA_N / 2; ++i) asm volatile("" : "+f"(d[b][i])::"memory");
}

__device__ inline void add_in_l2(float* p, float4 v) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// Writes the sums of one consumer to C: 64 M_BLOCKS rows of D from x on, and TILE_Y columns from y on. A
// thread has sums in LINES rows of C. They are rearranged to RUNS runs per row, of four neighbours each. One
// store of a warp writes 64 bytes in each of eight rows.
constexpr int LINES = SWAP ? TILE_Y / 8 : 2 * M_BLOCKS, RUNS = SWAP ? M_BLOCKS : TILE_Y / 16;
constexpr int RUN_GAP = SWAP ? 64 : 16;  // columns from one run of a thread to the next
struct writer {
    float* c;
    long long ldc;
    int down, right, lane;  // down, right: rows and columns of C from this thread's first run to the edge
    float alpha, beta;
    bool aligned;

    __device__ writer(const gemm_arguments& g, int x, int y) {
        const int thread = threadIdx.x % 128, warp = thread / 32;
        lane = thread % 32;
        const int q = lane % 4, r = lane / 4;
        const int row = SWAP ? y + 2 * q + (r & 1) : x + 16 * warp + (X_IN_REGISTERS ? 2 * r : r);
        const int column = SWAP ? x + 16 * warp + 4 * (r >> 1) : y + 8 * (q & 1) + 4 * (q >> 1);
        ldc = g.ldc;
        c = static_cast<float*>(g.c) + row * ldc + column;
        down = static_cast<int>(g.m) - row, right = static_cast<int>(g.n) - column;
        alpha = static_cast<float>(g.alpha_re), beta = static_cast<float>(g.beta_re);
        aligned = reinterpret_cast<unsigned long long>(g.c) % 16 == 0 && g.ldc % 4 == 0;
    }
    // Returns how many rows of C a line is below this thread's first line.
    __device__ static int line_row(int line) { return SWAP ? line * 8 : line / 2 * 64 + line % 2 * (X_IN_REGISTERS ? 1 : 8); }
    __device__ float4 run(const float (&d)[M_BLOCKS][TILE_Y / 2], int line, int r) const {
        const float* e = SWAP ? d[r] + line * 4 : d[line / 2] + r * 8 + line % 2 * 2;
        return scaled(alpha, SWAP ? exchange(e[0], e[2], e[1], e[3], lane / 4 & 1, 4) : exchange(e[0], e[1], e[4], e[5], lane & 1, 1));
    }
    // Advances a pointer from run i - 1 to run i; runs are numbered line by line. The asm statement hides the
    // pointer from the compiler, which would otherwise compute the addresses of all lines first and spill
    // registers.
    template <typename Pointer>
    __device__ void go_to(Pointer& p, int i) const {
        if (i % RUNS > 0) {
            p += RUN_GAP;
            return;
        }
        if (i > 0) p += (line_row(i / RUNS) - line_row(i / RUNS - 1)) * ldc - (RUNS - 1) * RUN_GAP;
        asm volatile("" : "+l"(p)::"memory");
    }
    // Writes all runs. EDGE: the tile may extend past the edge of C, or C is not aligned. `reduce`: add in
    // L2.
    template <bool EDGE>
    __device__ void write(const float (&d)[M_BLOCKS][TILE_Y / 2], bool reduce) const {
        constexpr int ALL = LINES * RUNS, BATCH = 8;  // the old C is loaded BATCH runs before it is needed
        const auto valid = [&](int i) { return down > line_row(i / RUNS) ? right - i % RUNS * RUN_GAP : 0; };
        float* to = c;
        if (beta == 0) {
#pragma unroll
            for (int i = 0; i < ALL; ++i) {
                go_to(to, i);
                store_run<!EDGE>(to, run(d, i / RUNS, i % RUNS), valid(i), aligned);
            }
        } else if (!EDGE && reduce) {
#pragma unroll
            for (int i = 0; i < ALL; ++i) {
                go_to(to, i);
                add_in_l2(to, run(d, i / RUNS, i % RUNS));
            }
        } else {
            const float* from = c;
            float4 old[2 * BATCH];
#pragma unroll
            for (int i = 0; i < ALL + BATCH; ++i) {
                if (i < ALL) {
                    go_to(from, i);
                    old[i % (2 * BATCH)] = load_run<!EDGE>(from, valid(i), aligned);
                }
                if (i >= BATCH) {
                    const int j = i - BATCH;
                    go_to(to, j);
                    store_run<!EDGE>(to, added(run(d, j / RUNS, j % RUNS), beta, old[j % (2 * BATCH)]), valid(j), aligned);
                }
            }
        }
    }
};

extern "C" __global__ void
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(128 * (CONSUMERS + 1), 1)
        tensor_wgmma(const __grid_constant__ tensor_map map_a, const __grid_constant__ tensor_map map_b, const gemm_arguments g) {
    extern __shared__ unsigned char memory[];
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;  // slabs begin at multiples of 1024
    const unsigned full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES, turns = empty + 8 * STAGES;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    const int lane = threadIdx.x % 32;

    const int m = static_cast<int>(g.m), n = static_cast<int>(g.n);
    const unsigned x_tiles = ((SWAP ? n : m) - 1) / (TILE_X * CLUSTER) + 1, y_tiles = ((SWAP ? m : n) - 1) / TILE_Y + 1;
    const unsigned tiles = x_tiles * y_tiles, clusters = gridDim.x / CLUSTER;
    const unsigned k_blocks = static_cast<unsigned>((g.k + DEPTH - 1) / DEPTH);
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + 8 * s, 1);
            mbarrier_init(empty + 8 * s, RELEASES);
        }
        mbarrier_init(turns, 4);
        mbarrier_init(turns + 8, 4);
        mbarrier_init_fence();
    }
    if (CLUSTER > 1) cluster_barrier();
    else __syncthreads();

    position<STAGES> p;
    if (warpgroup == 0) {
        fewer_registers<40>();
        const tensor_map& map_x = SWAP ? map_b : map_a;
        const tensor_map& map_y = SWAP ? map_a : map_b;
        if (warp == 0)
            for (unsigned t = blockIdx.x / CLUSTER; t < tiles; t += clusters) {
                const tile_position tile = tile_at(t, x_tiles, y_tiles, GROUP);
                const int x = (tile.row * CLUSTER + rank) * TILE_X, y = tile.column * TILE_Y;
                constexpr int part = TILE_Y / CLUSTER;
                // If beta != 0, the warp also prefetches the tile of C into the L2 cache, in lines of 128
                // bytes. With each k-block, a lane prefetches `share` lines.
                constexpr int columns = SWAP ? TILE_X : TILE_Y, lines_per_row = columns / 32, lines = TILE_X * TILE_Y / 32;
                const int share = PREFETCH && g.beta_re != 0 ? (lines / 32 + k_blocks - 1) / k_blocks : 0;
                int line = lane;
                for (unsigned kb = 0; kb < k_blocks; ++kb, p.advance(1)) {
                    mbarrier_wait(empty + 8 * p.stage, p.phase ^ 1);
                    if (lane == 0) {
                        const unsigned at = stages + p.stage * STAGE_BYTES, barrier = full + 8 * p.stage;
                        mbarrier_expect_bytes(barrier, STAGE_BYTES);
                        copy_rows<X_K_MAJOR, false>(map_x, at, barrier, x, TILE_X, kb * DEPTH);
                        copy_rows<Y_K_MAJOR, true>(map_y, at + X_BYTES + rank * part * ROW_BYTES, barrier, y + rank * part, part, kb * DEPTH);
                    }
                    __syncwarp();
                    for (int i = 0; i < share && line < lines; ++i, line += 32) {
                        const int row = (SWAP ? y : x) + line / lines_per_row, column = (SWAP ? x : y) + line % lines_per_row * 32;
                        if (row < m && column < n) prefetch(static_cast<const float*>(g.c) + row * g.ldc + column);
                    }
                }
            }
    } else {
        more_registers<232>();
        const int consumer = warpgroup - 1, part = TEAM == 2 ? consumer * 64 * M_BLOCKS : 0;
        const auto release = [&](int stage) {
            if (CLUSTER == 1 && lane == 0) mbarrier_arrive(empty + 8 * stage);
            if (CLUSTER > 1 && lane < CLUSTER) mbarrier_arrive_at(empty + 8 * stage, lane);
        };
        // 64 rows of X take 64 * ROW_BYTES bytes in either layout.
        const unsigned long long x_base = slab_descriptor(stages + part * ROW_BYTES, X_K_MAJOR, DEPTH);
        const unsigned long long y_base = slab_descriptor(stages + X_BYTES, Y_K_MAJOR, DEPTH);
        unsigned t = blockIdx.x / CLUSTER, turn = consumer == 0;  // parity
        if (TEAM == 1 && consumer == 1) {
            t += clusters;
            p.advance(k_blocks);
        }
        for (; t < tiles; t += clusters * (3 - TEAM)) {
            float d[M_BLOCKS][TILE_Y / 2];
            if (TEAM == 1) {
                mbarrier_wait(turns + 8 * consumer, turn);
                turn ^= 1;
            }
            int before = 0;  // the stage that unfinished wgmmas may still read
            if constexpr (X_IN_REGISTERS) {
                // The wgmmas of one k-step are a group. While two groups are unfinished, the warps read the
                // part of X for the next k-step into registers.
                const fragment_reader reader(part + 16 * warp, lane / 4, lane % 4);
                unsigned fragments[STEPS][M_BLOCKS][4];
                const auto read = [&](int step) {
#pragma unroll
                    for (int b = 0; b < M_BLOCKS; ++b)
                        reader.read(stages + p.stage * STAGE_BYTES + 64 * b * ROW_BYTES, step, fragments[step][b]);
                };
                mbarrier_wait(full + 8 * p.stage, p.phase);
                read(0);
#pragma unroll 1
                for (unsigned kb = 0; kb < k_blocks; ++kb) {
                    const unsigned long long y = y_base + (p.stage * STAGE_BYTES >> 4);
#pragma unroll
                    for (int s = 0; s < STEPS; ++s) {
                        wgmma_fence();
#pragma unroll
                        for (int b = 0; b < M_BLOCKS; ++b)
                            wgmma_tf32(d[b], fragments[s][b], y + (s * step_bytes(true, ITEM) >> 4), s > 0 || kb > 0);
                        wgmma_commit();
                        wgmma_wait<2>();
                        if (s == 1 && kb > 0) release(before);
                        if (s < STEPS - 1) read(s + 1);
                    }
                    before = p.stage;
                    p.advance(1);
                    if (kb + 1 < k_blocks) {
                        mbarrier_wait(full + 8 * p.stage, p.phase);
                        read(0);
                    }
                }
            } else {
#pragma unroll 1
                for (unsigned kb = 0; kb < k_blocks; ++kb) {
                    mbarrier_wait(full + 8 * p.stage, p.phase);
                    const unsigned long long x = x_base + (p.stage * STAGE_BYTES >> 4), y = y_base + (p.stage * STAGE_BYTES >> 4);
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < STEPS; ++s)
#pragma unroll
                        for (int b = 0; b < M_BLOCKS; ++b) {
                            const unsigned long long xs = x + ((b * 64 * ROW_BYTES + s * step_bytes(X_K_MAJOR, ITEM)) >> 4);
                            const unsigned long long ys = y + (s * step_bytes(Y_K_MAJOR, ITEM) >> 4);
                            if constexpr (TF32) wgmma_tf32(d[b], xs, ys, s > 0 || kb > 0);
                            else wgmma_16bit<X_K_MAJOR, Y_K_MAJOR>(d[b], xs, ys, s > 0 || kb > 0);
                        }
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (kb > 0) release(before);
                    before = p.stage;
                    p.advance(1);
                }
            }
            if (TEAM == 1 && lane == 0) mbarrier_arrive(turns + 8 * (1 - consumer));
            wgmma_wait<0>();
            settle(d);
            release(before);
            if (TEAM == 1) p.advance(k_blocks);

            const tile_position tile = tile_at(t, x_tiles, y_tiles, GROUP);
            const int x = (tile.row * CLUSTER + rank) * TILE_X, y = tile.column * TILE_Y;
            const bool inner = x + TILE_X <= (SWAP ? n : m) && y + TILE_Y <= (SWAP ? m : n);
            const writer w(g, x + part, y);
            if (inner && w.aligned) w.write<false>(d, g.k >= REDUCE && g.beta_re == 1);
            else w.write<true>(d, false);
        }
    }
    if (CLUSTER > 1) cluster_barrier();  // no block exits while another may still write to its shared memory
}
