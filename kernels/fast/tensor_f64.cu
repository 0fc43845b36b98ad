// tensor_f64: C = alpha op(A) @ op(B) + beta C in fp64 on the tensor cores (mma.sync), sm_80 and later.
//
//   block tile BLOCK_M x BLOCK_N of C, in registers; panels of op(A) and op(B), BLOCK_K deep, in shared memory
//
//            +------+------+------+------+
//   ... ---> | k+3  | k+2  | k+1  |  k   | ---> fragments of A and B ---> mma ---> sums
//            +------+------+------+------+
//   cp.async    STAGES panels in flight           registers
//
// A panel is the part of op(A) or op(B) that a block multiplies at a time.
//
// The instruction multiplies X (16 rows) by Y (8 columns) over MMA_K indices k. Which rows, columns and k of
// the matrices these are may be chosen freely, as long as X and Y have the same k. With the choice here, a
// lane reads two neighbouring values at a time (16 bytes) without bank conflicts. Lane (g, t) = (lane / 4,
// lane % 4) has four values, a "quad", of 16 rows of X (or 16 columns of Y, for two instructions) and 8
// indices k:
//
//   in the instruction               in the matrix
//   rows g and g + 8                 rows 2g and 2g + 1 of 16
//   column c of instruction j        column 2c + j of 16 (j = 0 or 1)
//   k = t and t + 4                  k = 2t and 2t + 1 of 8
//
// The instruction takes a quad of X row by row, and a quad of Y k by k. So in shared memory X is contiguous
// along its rows, and Y along k. If B is used as stored, X is B and the kernel computes C^T = B^T A^T.
// Otherwise X is A. If A and B are both used as stored, or both transposed, they are copied 16 bytes at a
// time. Otherwise one of them is transposed value by value while it is copied.
//
// Parameters
//   BLOCK_M, BLOCK_N, BLOCK_K   tile of C and depth of a panel
//   WARP_X, WARP_Y              a warp's part of the tile, WARP_X rows of X by WARP_Y columns of Y: its sums take
//                               WARP_X * WARP_Y / 16 registers per thread
//   MMA_K                       the instruction. 16: m16n8k16, 8: m16n8k8 (both from sm_90 on); 4: m8n8k4
//                               (from sm_80 on)
//   STAGES                      pairs of panels in shared memory: STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 8
//                               bytes
//   GROUP                       the argument `group` of tile_at (layout.cuh), which orders the tiles
//   RESIDENT                    minimum number of blocks per multiprocessor, which limits the registers
#ifndef BLOCK_M
#define BLOCK_M 64
#define BLOCK_N 128
#define BLOCK_K 16
#define WARP_X 64
#define WARP_Y 32
#define MMA_K 8
#define STAGES 4
#define GROUP 16
#define RESIDENT 2
#endif
#include "common/gemm.cuh"
#include "common/layout.cuh"
#include "fast/async_copy.cuh"

constexpr bool SWAP = OOC_OP_B == 0;  // the kernel computes C^T, and X is B
constexpr int BLOCK_X = SWAP ? BLOCK_N : BLOCK_M, BLOCK_Y = SWAP ? BLOCK_M : BLOCK_N;
constexpr int WARPS_Y = BLOCK_Y / WARP_Y, THREADS = BLOCK_X / WARP_X * WARPS_Y * 32;
constexpr int PANEL_A = BLOCK_M * BLOCK_K * 8, PANEL_B = BLOCK_N * BLOCK_K * 8, STAGE = PANEL_A + PANEL_B;
constexpr int PANEL_X = SWAP ? PANEL_A : 0, PANEL_Y = SWAP ? 0 : PANEL_A;  // their offsets in a stage
constexpr bool A_K = OOC_OP_A == 0, B_K = OOC_OP_B != 0;  // whether the operand is contiguous along k
constexpr int HALVES = MMA_K == 16 ? 2 : 1;  // number of quads (8 indices k each) that one step multiplies
constexpr int GROUPS_X = WARP_X / 16, GROUPS_Y = WARP_Y / 16;
constexpr int STEPS_K = BLOCK_K / (8 * HALVES), STEPS = STEPS_K * GROUPS_X;
constexpr int FIRST_COPY = STEPS / 2;  // the step of a panel at which the copies of a later panel start

static_assert(MMA_K == 16 || MMA_K == 8 || MMA_K == 4, "m16n8k16, m16n8k8 or m8n8k4");
#ifdef __CUDA_ARCH__
static_assert(MMA_K == 4 || __CUDA_ARCH__ >= 900, "m16n8k8 and m16n8k16 need sm_90");
#endif
static_assert(WARP_X % 16 == 0 && WARP_Y % 16 == 0, "a quad covers 16 rows or columns");
static_assert(BLOCK_X % WARP_X == 0 && BLOCK_Y % WARP_Y == 0, "warps divide the tile");
static_assert(BLOCK_K % 16 == 0, "a row of a panel with k contiguous covers all 32 banks");
static_assert(THREADS <= 1024 && THREADS % 128 == 0, "a pass of copies covers whole runs of eight chunks");
static_assert(STAGES >= 3, "one panel is read, one is ready and one is being filled");
static_assert(STEPS % 2 == 0, "fragments of X alternate between two buffers");
static_assert(STAGES * STAGE * RESIDENT <= 227 * 1024, "shared memory of a multiprocessor (sm_90)");

template <bool FIRST, typename A, typename B>
struct choice {
    using type = A;
};
template <typename A, typename B>
struct choice<false, A, B> {
    using type = B;
};

struct quad {
    double at[2][2];  // [row or column][k]
};
struct alignas(16) pair {
    double x[2];
};

// Byte offsets in a panel of X and in a panel of Y, which are swizzled. `step` is the difference of two
// offsets for the distances between passes of copies. Those do not change the bits that the swizzle xors, so
// `step` need not know the positions.
struct place_x {
    __device__ static constexpr unsigned offset(int mn, int k) { return mn_rows_offset(mn, k, BLOCK_X); }
    __device__ static constexpr unsigned step(int mn, int k) { return (k * BLOCK_X + mn) * 8; }
};
struct place_y {
    __device__ static constexpr unsigned offset(int mn, int k) { return k_rows_offset(mn, k, BLOCK_K); }
    __device__ static constexpr unsigned step(int mn, int k) { return (mn * BLOCK_K + k) * 8; }
};

// Loads this lane's quad of the 16 rows from first + 16 group on, and of the 8 indices k from 8 half on.
__device__ inline quad load_x_quad(const char* panel, int first, int group, int half) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // mn_rows_offset(first + 16 group + 2 g, 8 half + 2 t + r)
    const char* const at = panel + 2 * t * (BLOCK_X * 8) + first * 8 + (g * 16 ^ t * 32);
    quad q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const pair p = *reinterpret_cast<const pair*>(at + (8 * half + r) * (BLOCK_X * 8) + group * 128);
        q.at[0][r] = p.x[0];
        q.at[1][r] = p.x[1];
    }
    return q;
}

__device__ inline quad load_y_quad(const char* panel, int first, int group, int half) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // k_rows_offset(first + 16 group + 2 g + r, 8 half + 2 t)
    const char* const at = panel + (first + 2 * g) * (BLOCK_K * 8) + t * 16 + ((g & 1) * 64 ^ (half & 1) * 64);
    quad q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const pair p = *reinterpret_cast<const pair*>(at + (16 * group + r) * (BLOCK_K * 8) + half / 2 * 128);
        q.at[r][0] = p.x[0];
        q.at[r][1] = p.x[1];
    }
    return q;
}

// Adds the product of 16 rows of X and 8 columns of Y, over 8 or 16 indices k, to the sums. y has 16 columns;
// j selects those with the numbers 2c + j.
__device__ inline void multiply(double (&sums)[4], const quad (&x)[HALVES], const quad (&y)[HALVES], int j) {
#if MMA_K == 16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
        : "d"(x[0].at[0][0]), "d"(x[0].at[1][0]), "d"(x[0].at[0][1]), "d"(x[0].at[1][1]), "d"(x[1].at[0][0]),
          "d"(x[1].at[1][0]), "d"(x[1].at[0][1]), "d"(x[1].at[1][1]), "d"(y[0].at[j][0]), "d"(y[0].at[j][1]),
          "d"(y[1].at[j][0]), "d"(y[1].at[j][1]));
#elif MMA_K == 8
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
        : "d"(x[0].at[0][0]), "d"(x[0].at[1][0]), "d"(x[0].at[0][1]), "d"(x[0].at[1][1]), "d"(y[0].at[j][0]),
          "d"(y[0].at[j][1]));
#else
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                         : "+d"(sums[2 * r]), "+d"(sums[2 * r + 1])
                         : "d"(x[0].at[r][k]), "d"(y[0].at[j][k]));
#endif
}

// Loads two neighbours in a row of C. Only the first `left` of them are inside C. `wide`: they are aligned to
// 16 bytes.
__device__ inline pair load_pair(const double* from, int left, bool wide) {
    if (wide && left >= 2) return *reinterpret_cast<const pair*>(from);
    return {left >= 1 ? from[0] : 0, left >= 2 ? from[1] : 0};
}
__device__ inline void store_pair(double* to, pair values, int left, bool wide) {
    if (wide && left >= 2) {
        *reinterpret_cast<pair*>(to) = values;
    } else {
        if (left >= 1) to[0] = values.x[0];
        if (left >= 2) to[1] = values.x[1];
    }
}

template <bool K, bool IS_Y, int WIDTH, int ALIGNED>
struct matrix_copy_of {
    static constexpr int WIDE = K == IS_Y ? ALIGNED : 1;  // 1: transposed value by value while it is copied
    static constexpr int UNITS_K = BLOCK_K / WIDE < 16 ? BLOCK_K / WIDE : 16;
    static constexpr int ALONG = K ? (IS_Y || UNITS_K * 16 <= THREADS ? UNITS_K : THREADS / 16) : THREADS / (IS_Y ? 16 : 8);
    static constexpr int STEP_MN = K ? THREADS / ALONG : ALONG * WIDE, STEP_K = K ? ALONG * WIDE : THREADS / ALONG;
    static_assert(STEP_MN % (IS_Y ? 4 : 16) == 0, "a pass must not change the bits of mn that take part in the swizzle");
    static_assert(STEP_K % (IS_Y ? 16 : 8) == 0, "a pass must not change the bits of k that take part in the swizzle");
    using place = typename choice<IS_Y, place_y, place_x>::type;
    using type = panel_copy<double, place, BLOCK_K, WIDTH, K, WIDE, ALONG, THREADS>;
};
template <bool K, bool IS_Y, int WIDTH, int ALIGNED>
using matrix_copy = typename matrix_copy_of<K, IS_Y, WIDTH, ALIGNED>::type;

template <int WIDE>
__device__ inline void run(const gemm_arguments& g, char* shared) {
    using copy_a = matrix_copy<A_K, SWAP, BLOCK_M, WIDE>;
    using copy_b = matrix_copy<B_K, !SWAP, BLOCK_N, WIDE>;

    const tile_corner at = corner_of(blockIdx.x, g.m, g.n, BLOCK_M, BLOCK_N, GROUP);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_x = warp / WARPS_Y * WARP_X, warp_y = warp % WARPS_Y * WARP_Y;
    const bool keeps_old = g.beta_re != 0;

    panel_stream<double, copy_a, copy_b> stream(g, at);
    const unsigned stages = shared_address(shared);
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) {
        stream.copy(stages + s * STAGE, stages + s * STAGE + PANEL_A, 0, 1);
        stream.advance();
        commit_copies();
    }
    __shared__ unsigned long long read_barrier;
    const unsigned barrier = shared_address(&read_barrier);
    unsigned parity = 0;
    if (threadIdx.x == 0) mbarrier_init(barrier, THREADS / 32);
    await_copies<STAGES - 3>();
    __syncthreads();
    mbarrier_arrive(barrier);

    quad x[2][HALVES], y[GROUPS_Y][HALVES];
    int reading = 0, filling = (STAGES - 1) * STAGE;  // offsets of the panels being read and being copied to
    auto load_x = [&](quad(&into)[HALVES], int group, int step_k) {
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
            into[h] = load_x_quad(shared + reading + PANEL_X, warp_x, group, step_k * HALVES + h);
    };
    auto load_y = [&](quad(&into)[HALVES], int group, int step_k) {
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
            into[h] = load_y_quad(shared + reading + PANEL_Y, warp_y, group, step_k * HALVES + h);
    };
    load_x(x[0], 0, 0);
#pragma unroll
    for (int p = 0; p < GROUPS_Y; ++p) load_y(y[p], p, 0);

    double* const c = static_cast<double*>(g.c) + at.top * g.ldc + at.left;
    if (keeps_old) prefetch_tile<THREADS, BLOCK_N>(c, g.ldc, stream.m_left, stream.n_left);
    double sums[GROUPS_X][2 * GROUPS_Y][4] = {};
    for (unsigned panel = stream.panels; panel > 0; --panel) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int group = step % GROUPS_X, step_k = step / GROUPS_X;
            if (step == FIRST_COPY) {  // wait until every warp has read the previous panel
                mbarrier_wait(barrier, parity);
                parity ^= 1;
            }
            if (step == STEPS - 1) {  // all values of this panel have been read: go to the next one
                stream.advance();
                commit_copies();
                await_copies<STAGES - 3>();
                mbarrier_arrive(barrier);
                filling = reading;
                reading = reading == (STAGES - 1) * STAGE ? 0 : reading + STAGE;
            } else if (step >= FIRST_COPY) {
                stream.copy(stages + filling, stages + filling + PANEL_A, step - FIRST_COPY, STEPS - 1 - FIRST_COPY);
            }
            load_x(x[(step + 1) % 2], (group + 1) % GROUPS_X, (step + 1) / GROUPS_X % STEPS_K);
#pragma unroll
            for (int p = 0; p < GROUPS_Y; ++p) {
                multiply(sums[group][2 * p], x[step % 2], y[p], 0);
                multiply(sums[group][2 * p + 1], x[step % 2], y[p], 1);
                if (group == GROUPS_X - 1) load_y(y[p], p, (step_k + 1) % STEPS_K);
            }
        }
    }

    // With g = lane / 4 and t = lane % 4, sums[i][2 p + j][2 r + s] belongs to row 16 i + 2 g + r of X and to
    // column 16 p + 4 t + 2 s + j of Y.
    const int m_left = stream.m_left, n_left = stream.n_left;
    const bool wide = (reinterpret_cast<unsigned long long>(g.c) | static_cast<unsigned long long>(g.ldc) * 8) % 16 == 0;
    const int in_x = warp_x + 2 * (lane / 4), in_y = warp_y + 4 * (lane % 4);
    // `place` gives the row and the column of pair e of the i-th 16 rows of X: two neighbours in a row of C.
    constexpr int PAIRS = 4 * GROUPS_Y;
    auto place = [&](int i, int e, int& row, int& column) {
        row = SWAP ? in_y + e / 4 * 16 + e % 4 : in_x + 16 * i + e % 2;
        column = SWAP ? in_x + 16 * i : in_y + e / 4 * 16 + e / 2 % 2 * 2;
    };
#pragma unroll
    for (int i = 0; i < GROUPS_X; ++i) {
        pair old[PAIRS];
        int row, column;
        if (keeps_old) {  // issue all loads before the first store, so that they overlap
#pragma unroll
            for (int e = 0; e < PAIRS; ++e) {
                place(i, e, row, column);
                if (row < m_left) old[e] = load_pair(c + row * g.ldc + column, n_left - column, wide);
            }
        }
#pragma unroll
        for (int e = 0; e < PAIRS; ++e) {
            const int p = e / 4;
            pair values;
            if (SWAP)
                values = {sums[i][2 * p + e % 2][e / 2 % 2], sums[i][2 * p + e % 2][2 + e / 2 % 2]};
            else
                values = {sums[i][2 * p][e % 2 * 2 + e / 2 % 2], sums[i][2 * p + 1][e % 2 * 2 + e / 2 % 2]};
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                values.x[v] *= g.alpha_re;
                if (keeps_old) values.x[v] += g.beta_re * old[e].x[v];
            }
            place(i, e, row, column);
            if (row < m_left) store_pair(c + row * g.ldc + column, values, n_left - column, wide);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) tensor_f64(gemm_arguments g) {
    extern __shared__ __align__(128) char shared[];
    const unsigned long long a = reinterpret_cast<unsigned long long>(g.a) | static_cast<unsigned long long>(g.lda) * 8;
    const unsigned long long b = reinterpret_cast<unsigned long long>(g.b) | static_cast<unsigned long long>(g.ldb) * 8;
    if ((a | b) % 16 == 0)
        run<2>(g, shared);
    else  // rows that are not aligned to 16 bytes are copied value by value
        run<1>(g, shared);
}
