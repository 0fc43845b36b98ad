// tensor_wgmma: C = alpha op(A) @ op(B) + beta C on the tensor cores of sm_90a; operands fp16, bf16 or tf32,
// sums in float32.
//
// The kernel computes D = X Y. X is op(A) and Y is op(B); or, if SWAP, X is op(B)^T, Y is op(A)^T and D is
// C^T. A block computes tiles of TILE_X by TILE_Y of D, one after the other, with three warpgroups:
//
//   producer        One warp issues TMA copies of k-blocks of X and Y, STAGES ahead, also across tiles. It prefetches the
//                   tile of C into L2 if C is read.
//   two consumers   They issue wgmma on full stages, keep one k-block in flight behind the one being issued, and release
//                   stages. Then they write their part of the tile while the producer fills stages for the next tile.
//
// mbarriers:
//      full[s]   one arrival (the producer's) and the bytes of the stage
//      empty[s]  one arrival per consumer warp that reads the stage, in every block of the cluster
//      turns[w]  one arrival per warp of the other consumer, once it has waited for its last stage (TEAM = 1). A wait by
//                parity is only valid for a consumer that is less than two rounds through the stages behind.
//
// A cluster of two blocks computes two tiles with the same Y. Each block copies half of Y by TMA multicast to
// both. For a 256 x 256 square of D, 512 rows are then read from L2 instead of 768. A stage is refilled when
// both blocks have read it.
//
// wgmma reads 16-bit operands from shared memory in either layout, but tf32 only K-major. A tf32 operand that
// is not K-major becomes X, and the consumers read it into registers (fragment_reader), from where wgmma
// takes it. This is why A and B both as stored need SWAP: A is K-major and becomes Y, B is not and becomes X.
// The kernel refuses tf32 if neither operand is K-major (op(A) = A^T, op(B) = B). TMA rounds float32 to tf32
// (the type of the tensor maps is TFLOAT32), at no cost.
//
// Parameters (macros), beside OOC_OP_A and OOC_OP_B (0 as stored, 1 or 2 transposed):
//   OOC_FORMAT    f16 | bf16 | tf32
//   MMA_N     columns of Y in one wgmma: 128 | 256
//   M_BLOCKS  64-row blocks of X whose sums one consumer has in registers: 1 | 2
//   TEAM      consumers per tile. 2: they share a tile. 1: each computes another tile, and one writes while the other multiplies
//   STAGES    k-blocks in shared memory
//   CLUSTER   blocks that share Y: 1 | 2
//   GROUP     tiles along X in a group (layout.cuh)
//   REDUCE    if k >= REDUCE and beta = 1, sums are added to C in L2 by red.add; then no multiprocessor reads C (subnormal
//             sums become 0)
//   PREFETCH  1: prefetch C into L2 before it is read
// Launch: min(blocks that fit at once, tiles) rounded to clusters, 384 threads, SHARED_BYTES. Tensor maps:
// box (128 bytes, R), 128-byte swizzle, for X and for Y; R is the rows per copy if K-major, else the depth of
// a k-block. m, n and k are 1 to 2^31 - 1.
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
constexpr int RELEASES = 4 * TEAM * CLUSTER;   // arrivals that release a stage: one per warp that reads it

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

// Loads one warp's part of one k-step of X into the registers of wgmma: (row, k), (row + 8, k), (row, k + 4),
// (row + 8, k + 4) with row = g, k = q. The instruction's rows g and g + 8 are X's rows 2 g and 2 g + 1, so
// that one 8-byte load gets both. Lanes with odd q load k + 4 first, so that 16 lanes read 16 different pairs
// of banks.
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

// After a wait: keeps the compiler from moving reads of the sums before it.
__device__ inline void settle(float (&d)[M_BLOCKS][MMA_N / 2]) {
#pragma unroll
    for (int b = 0; b < M_BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < MMA_N / 2; ++i) asm volatile("" : "+f"(d[b][i])::"memory");
}

__device__ inline void add_in_l2(float* p, float4 v) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// Writes the sums of one consumer: rows x to x + 64 M_BLOCKS and columns y to y + TILE_Y of D. Each thread's
// sums become runs of four along LINES rows of C; one store of a warp writes 64 bytes in each of eight rows.
constexpr int LINES = SWAP ? TILE_Y / 8 : 2 * M_BLOCKS, RUNS = SWAP ? M_BLOCKS : TILE_Y / 16;  // lines per thread, runs per line
constexpr int RUN_GAP = SWAP ? 64 : 16;                                                   // columns between runs
struct writer {
    float* c;
    long long ldc;
    int down, right, lane;  // rows and columns of C that are left from this thread's first run on
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
    // Rows of C between the first line and another one.
    __device__ static int line_row(int line) { return SWAP ? line * 8 : line / 2 * 64 + line % 2 * (X_IN_REGISTERS ? 1 : 8); }
    __device__ float4 run(const float (&d)[M_BLOCKS][TILE_Y / 2], int line, int r) const {
        const float* e = SWAP ? d[r] + line * 4 : d[line / 2] + r * 8 + line % 2 * 2;
        return scaled(alpha, SWAP ? exchange(e[0], e[2], e[1], e[3], lane / 4 & 1, 4) : exchange(e[0], e[1], e[4], e[5], lane & 1, 1));
    }
    // Advances a pointer from run i - 1 to run i, line by line. The asm statement hides the pointer from the
    // compiler, which otherwise computes the addresses of all lines first and spills registers.
    template <typename Pointer>
    __device__ void go_to(Pointer& p, int i) const {
        if (i % RUNS > 0) {
            p += RUN_GAP;
            return;
        }
        if (i > 0) p += (line_row(i / RUNS) - line_row(i / RUNS - 1)) * ldc - (RUNS - 1) * RUN_GAP;
        asm volatile("" : "+l"(p)::"memory");
    }
    // EDGE: the tile may extend past the edge of C, or C is not aligned.
    template <bool EDGE>
    __device__ void write(const float (&d)[M_BLOCKS][TILE_Y / 2], bool reduce) const {
        constexpr int ALL = LINES * RUNS, BATCH = 8;  // loads of C run BATCH runs ahead of the stores
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
                // Prefetches the tile of C in lines of 128 bytes, `share` lines per lane and k-block.
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
            int before = 0;  // the stage that wgmmas in flight may still read
            if constexpr (X_IN_REGISTERS) {
                // One group of wgmmas per k-step. While two groups are in flight, the fragments of the next
                // step are read.
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
