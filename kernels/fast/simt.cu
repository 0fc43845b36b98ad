// simt: C = alpha op(A) @ op(B) + beta C with ordinary multiply-adds: fp32, and fp64 on devices without fp64
// tensor cores.
//
//   block tile BLOCK_M x BLOCK_N of C        warp tile                      thread: THREAD_M x THREAD_N sums
//   +-----------------+                      +-----------------+            in chunks of 16 bytes along m and n, so that
//   | warp | warp | . |   panels of op(A)    | LANES_M rows of |            every read of shared memory is 16 bytes
//   |------+------+---|   and op(B), each    | lanes, 32 /     |            and a warp's lanes read adjacent chunks:
//   | warp | warp | . |   BLOCK_K deep       | LANES_M columns |
//   +-----------------+                      +-----------------+            |c0|c1|c2|..|c7|c0|c1|..  lane columns
//
// A panel is the part of op(A) or op(B) that a block multiplies at a time.
//
// A multiprocessor issues at most four warp instructions per cycle, and its 128 multiply-add units can use
// all four. So every other instruction costs speed. Two things keep them few. A thread reads THREAD_M +
// THREAD_N values for THREAD_M * THREAD_N multiply-adds, so it computes as many sums as the registers allow.
// And cp.async copies panels to shared memory without passing through registers.
//
// A thread reads values from shared memory one k before it uses them. Panels are copied STAGES - 1 panels
// before they are used. In shared memory, panels are contiguous along rows of op(A) and columns of op(B)
// (layout.cuh). If an operand is contiguous along k in device memory, its panels are transposed value by
// value while they are copied.
//
// Parameters
//   BLOCK_M, BLOCK_N, BLOCK_K   tile of C and depth of a panel
//   THREAD_M, THREAD_N          sums per thread
//   LANES_M                     rows of lanes in a warp, which has LANES_M x 32 / LANES_M lanes: 4 or 8
//   STAGES                      pairs of panels in shared memory, which take
//                               STAGES * (BLOCK_M + BLOCK_N + 8) * BLOCK_K * 4 bytes in fp32
//   GROUP                       the argument `group` of tile_at (layout.cuh), which orders the tiles
//   RESIDENT                    minimum number of blocks per multiprocessor, which limits the registers
#ifndef BLOCK_M
#define BLOCK_M 128
#define BLOCK_N 256
#define BLOCK_K 8
#define THREAD_M 8
#define THREAD_N 16
#define LANES_M 8
#define STAGES 5
#define GROUP 16
#define RESIDENT 1
#endif
#include "common/gemm.cuh"
#include "common/layout.cuh"
#include "fast/async_copy.cuh"

using T = OOC_STORED;
constexpr int SIZE = sizeof(T), CHUNK = 16 / SIZE;  // values in 16 bytes
constexpr int LANES_N = 32 / LANES_M;
constexpr int WARP_M = LANES_M * THREAD_M, WARP_N = LANES_N * THREAD_N;
constexpr int WARPS_N = BLOCK_N / WARP_N, THREADS = BLOCK_M / WARP_M * WARPS_N * 32;
constexpr int PITCH_A = simt_pitch(BLOCK_M, SIZE), PITCH_B = simt_pitch(BLOCK_N, SIZE);  // bytes
constexpr int PANEL_A = BLOCK_K * PITCH_A, STAGE = PANEL_A + BLOCK_K * PITCH_B;
constexpr bool A_K = OOC_OP_A == 0, B_K = OOC_OP_B != 0;  // whether the operand is contiguous along k
constexpr int FIRST_COPY = BLOCK_K / 2 - 1;  // the k at which copies of a later panel start

static_assert(sizeof(OOC_STORED) == sizeof(OOC_ACCUMULATED), "fp32 or fp64, accumulated as stored");
static_assert(LANES_M == 4 || LANES_M == 8, "4 x 8 or 8 x 4 lanes");
static_assert(THREAD_M % CHUNK == 0 && THREAD_N % CHUNK == 0, "shared memory is read 16 bytes at a time");
static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "warps divide the tile");
static_assert(BLOCK_K % 8 == 0, "eight ks are transposed together");
static_assert(THREADS <= 1024, "a block has at most 1024 threads");
static_assert(STAGES >= 3, "one panel is read, one is ready and one is being filled");
static_assert(STAGES * STAGE * RESIDENT <= 227 * 1024, "shared memory of a multiprocessor (sm_90)");

struct alignas(16) chunk {
    T x[CHUNK];
};

template <int PITCH>
struct placed {
    __device__ static constexpr unsigned offset(int mn, int k) { return k * PITCH + mn * SIZE; }
    __device__ static constexpr unsigned step(int mn, int k) { return offset(mn, k); }
};

// Loads 16 bytes of a row of C. Only the first `left` values are inside C. `wide`: they are aligned to 16
// bytes.
__device__ inline chunk load_chunk(const T* from, int left, bool wide) {
    if (wide && left >= CHUNK) return *reinterpret_cast<const chunk*>(from);
    chunk c = {};
#pragma unroll
    for (int v = 0; v < CHUNK; ++v)
        if (v < left) c.x[v] = from[v];
    return c;
}
__device__ inline void store_chunk(T* to, const chunk& c, int left, bool wide) {
    if (wide && left >= CHUNK) {
        *reinterpret_cast<chunk*>(to) = c;
    } else {
#pragma unroll
        for (int v = 0; v < CHUNK; ++v)
            if (v < left) to[v] = c.x[v];
    }
}

template <int ALIGNED>
__device__ inline void run(const gemm_arguments& g, char* shared) {
    constexpr int WIDE_A = A_K ? 1 : ALIGNED, WIDE_B = B_K ? 1 : ALIGNED;
    using copy_a = panel_copy<T, placed<PITCH_A>, BLOCK_K, BLOCK_M, A_K, WIDE_A, A_K ? 8 : THREADS / 8, THREADS>;
    using copy_b = panel_copy<T, placed<PITCH_B>, BLOCK_K, BLOCK_N, B_K, WIDE_B, B_K ? 8 : THREADS / 8, THREADS>;

    const tile_corner at = corner_of(blockIdx.x, g.m, g.n, BLOCK_M, BLOCK_N, GROUP);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_m = warp / WARPS_N * WARP_M + lane_row(lane, LANES_M) * CHUNK;
    const int first_n = warp % WARPS_N * WARP_N + lane_column(lane, LANES_M) * CHUNK;
    const bool keeps_old = g.beta_re != 0;

    panel_stream<T, copy_a, copy_b> stream(g, at);
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

    T a[2][THREAD_M], b[2][THREAD_N];
    int reading = 0, filling = (STAGES - 1) * STAGE;  // offsets of the panels being read and being copied to
    auto load = [&](int buffer, int k) {
        const char* const row_a = shared + reading + first_m * SIZE + k * PITCH_A;
        const char* const row_b = shared + reading + PANEL_A + first_n * SIZE + k * PITCH_B;
#pragma unroll
        for (int i = 0; i < THREAD_M; i += CHUNK) {
            const chunk c = *reinterpret_cast<const chunk*>(row_a + i * LANES_M * SIZE);
#pragma unroll
            for (int v = 0; v < CHUNK; ++v) a[buffer][i + v] = c.x[v];
        }
#pragma unroll
        for (int j = 0; j < THREAD_N; j += CHUNK) {
            const chunk c = *reinterpret_cast<const chunk*>(row_b + j * LANES_N * SIZE);
#pragma unroll
            for (int v = 0; v < CHUNK; ++v) b[buffer][j + v] = c.x[v];
        }
    };
    load(0, 0);

    T* const c = static_cast<T*>(g.c) + at.top * g.ldc + at.left;
    if (keeps_old) prefetch_tile<THREADS, BLOCK_N>(c, g.ldc, stream.m_left, stream.n_left);
    T sums[THREAD_M][THREAD_N] = {};
    for (unsigned panel = stream.panels; panel > 0; --panel) {
#pragma unroll
        for (int k = 0; k < BLOCK_K; ++k) {
            if (k == FIRST_COPY) {  // wait until every warp has read the previous panel
                mbarrier_wait(barrier, parity);
                parity ^= 1;
            }
            if (k == BLOCK_K - 1) {  // all values of this panel have been read: go to the next one
                stream.advance();
                commit_copies();
                await_copies<STAGES - 3>();
                mbarrier_arrive(barrier);
                filling = reading;
                reading = reading == (STAGES - 1) * STAGE ? 0 : reading + STAGE;
            } else if (k == FIRST_COPY) {
                stream.copy(stages + filling, stages + filling + PANEL_A, 0, 1);
            }
            load((k + 1) % 2, (k + 1) % BLOCK_K);
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j)
#pragma unroll
                for (int e = 0; e < THREAD_M; ++e) {
                    const int i = j % 2 ? THREAD_M - 1 - e : e;  // alternate directions: consecutive multiply-adds share an operand
                    sums[i][j] += a[k % 2][i] * b[k % 2][j];
                }
        }
    }

    const int m_left = stream.m_left, n_left = stream.n_left - first_n;
    const bool wide = (reinterpret_cast<unsigned long long>(g.c) | static_cast<unsigned long long>(g.ldc) * SIZE) % 16 == 0;
    const T alpha = static_cast<T>(g.alpha_re), beta = static_cast<T>(g.beta_re);
#pragma unroll
    for (int i0 = 0; i0 < THREAD_M; i0 += 2) {
        chunk old[2][THREAD_N / CHUNK];
        if (keeps_old) {  // issue all loads of two rows before the first store, so that they overlap
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int q = 0; q < THREAD_N / CHUNK; ++q) {
                    const int row = first_m + (i0 + e) / CHUNK * LANES_M * CHUNK + (i0 + e) % CHUNK, j = q * LANES_N * CHUNK;
                    if (row < m_left) old[e][q] = load_chunk(c + row * g.ldc + first_n + j, n_left - j, wide);
                }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int q = 0; q < THREAD_N / CHUNK; ++q) {
                const int row = first_m + (i0 + e) / CHUNK * LANES_M * CHUNK + (i0 + e) % CHUNK, j = q * LANES_N * CHUNK;
                chunk values;
#pragma unroll
                for (int v = 0; v < CHUNK; ++v) {
                    values.x[v] = alpha * sums[i0 + e][q * CHUNK + v];
                    if (keeps_old) values.x[v] += beta * old[e][q].x[v];
                }
                if (row < m_left) store_chunk(c + row * g.ldc + first_n + j, values, n_left - j, wide);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) simt(gemm_arguments g) {
    extern __shared__ __align__(128) char shared[];
    // Operands that are transposed are copied value by value. So only the others need aligned addresses.
    const unsigned long long a = reinterpret_cast<unsigned long long>(g.a) | static_cast<unsigned long long>(g.lda) * SIZE;
    const unsigned long long b = reinterpret_cast<unsigned long long>(g.b) | static_cast<unsigned long long>(g.ldb) * SIZE;
    if (((A_K ? 0 : a) | (B_K ? 0 : b)) % 16 == 0)
        run<CHUNK>(g, shared);
    else
        run<1>(g, shared);
}
