// tensor_mma: C = alpha op(A) @ op(B) + beta C on the tensor cores by mma.sync, from sm_80 on; operands fp16,
// bf16 or tf32, sums in float32. It takes any extents, addresses and leading dimensions.
//
// A block of WARPS warps computes a TILE_M x TILE_N tile of C. A k-block is 128 bytes of A and B along k.
// cp.async copies k-blocks to a ring of STAGES buffers in shared memory, STAGES - 1 k-blocks before they are
// multiplied. layout.cuh describes the buffers (slabs). There is one barrier per k-block. For k-block i, a
// warp does this:
//
//      issue the copies of k-block i + STAGES - 1 to the buffer of k-block i - 1
//      multiply all steps but the last, reading the fragments of the next step at the same time
//      wait for k-block i + 1; barrier; read the fragments of its first step; multiply the last step
//
// An operand is copied as it is stored. If it is K-major (contiguous along k), its fragments are read by
// ldmatrix. Otherwise they are read by ldmatrix.trans (16-bit operands) or by single loads (tf32). Then tf32
// operands are rounded to nearest.
//
// Parameters (macros), beside OOC_OP_A and OOC_OP_B (0 as stored, 1 or 2 transposed):
//   OOC_FORMAT   f16 | bf16 | tf32
//   TILE_M, TILE_N   the tile of C that a block computes
//   WARPS    warps per block
//   WARPS_M  how many of these warps are below each other in the tile; the others are beside them
//   STAGES   k-blocks in shared memory, (TILE_M + TILE_N) * 128 bytes each
//   COPY     bytes per copy: 16 | 4 | 2. Addresses and row pitches of A and B must be multiples. 2 is slow,
//            because these copies pass through registers.
//   GROUP    the argument `group` of tile_at (layout.cuh), which orders the tiles
//   RESIDENT minimum number of blocks per multiprocessor, which limits the registers
// Launch: one block per tile, 32 * WARPS threads, STAGES * STAGE_BYTES bytes of shared memory. k may be 0.
#ifndef TILE_M
#define TILE_M 128
#define TILE_N 64
#define WARPS 4
#define WARPS_M 2
#define STAGES 3
#define COPY 16
#define GROUP 8
#define RESIDENT 2
#endif
#include "fast/epilogue.cuh"
#include "common/gemm.cuh"
#include "common/layout.cuh"
#include "common/ptx.cuh"

constexpr bool TF32 = OOC_TEXT(OOC_FORMAT)[0] == 't';
constexpr int ITEM = TF32 ? 4 : 2;       // bytes
constexpr int DEPTH = ROW_BYTES / ITEM;  // elements of k in a k-block
constexpr int STEPS = 4;                 // mma steps in a k-block, 32 bytes of k each
constexpr int THREADS = 32 * WARPS;
constexpr int PIECE = COPY == 2 ? 16 : COPY;  // bytes that a thread copies at a time
constexpr int WARPS_N = WARPS / WARPS_M;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;  // a warp's part of the tile
constexpr int A_BYTES = TILE_M * ROW_BYTES, STAGE_BYTES = A_BYTES + TILE_N * ROW_BYTES;
constexpr bool A_K_MAJOR = OOC_OP_A == 0, B_K_MAJOR = OOC_OP_B != 0;

static_assert(WARPS_M * WARPS_N == WARPS && WARP_M * WARPS_M == TILE_M && WARP_N * WARPS_N == TILE_N, "the warps share the tile");
static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "fragments are 16 rows of A, and two times 8 columns of B");
static_assert(TILE_M % DEPTH == 0 && TILE_N % DEPTH == 0, "operands that are not K-major are whole slabs");
static_assert(WARP_M * WARP_N / 32 <= 128, "a thread has WARP_M * WARP_N / 32 sums; more than 128 leave too few registers");
static_assert(THREADS * PIECE / ROW_BYTES <= DEPTH, "the lines that are copied at a time are in one slab");
static_assert(STAGES >= 2, "one is read while another is filled");
static_assert((COPY == 16 || COPY == 4 || COPY == 2) && COPY % ITEM == 0, "what cp.async or a load can copy, in whole elements");

template <int ROWS>
constexpr int PIECES = ROWS * ROW_BYTES / PIECE / THREADS;  // pieces per thread and k-block

// Calls take(i, offset, pointer, valid) for each piece of one operand's k-block that this thread copies. i
// numbers the pieces, offset is in shared memory, pointer is in device memory, and `valid` bytes are inside
// the matrix. The k-block has ROWS rows of op(A) (or columns of op(B)) from `row` on, and DEPTH elements
// along k from `k` on. The whole matrix has `extent` rows and `depth` elements along k.
//
// The asm statements hide the thread number and the pointer from the compiler. Otherwise it computes all
// addresses before the loop over k and spills registers.
template <bool K_MAJOR, int ROWS, typename Take>
__device__ inline void each_piece(const void* operand, long long ld, long long row, long long extent, long long k, long long depth, const Take& take) {
    constexpr int WIDTH = ROW_BYTES / PIECE, LINES = THREADS / WIDTH;  // per row of a slab; rows at a time
    constexpr int SLABS = K_MAJOR ? 1 : ROWS / DEPTH, SLAB_LINES = K_MAJOR ? ROWS : DEPTH;
    constexpr int FAR = 1 << 28;
    unsigned thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    const int line = thread % THREADS / WIDTH, byte = thread % WIDTH * PIECE;
    const int rows = extent - row < FAR ? static_cast<int>(extent - row) : FAR, deep = depth - k < FAR ? static_cast<int>(depth - k) : FAR;
    const int lines = (K_MAJOR ? rows : deep) - line, bytes = (K_MAJOR ? deep : rows) * ITEM - byte;
    const unsigned char* from = static_cast<const unsigned char*>(operand) + (K_MAJOR ? (row + line) * ld + k : (k + line) * ld + row) * ITEM + byte;
    int i = 0;
#pragma unroll
    for (int j = 0; j < SLAB_LINES; j += LINES, from += LINES * ITEM * ld) {
        asm volatile("" : "+l"(from));
#pragma unroll
        for (int s = 0; s < SLABS; ++s, ++i) {
            const int left = j < lines ? bytes - s * ROW_BYTES : 0;
            take(i, swizzled(s * DEPTH + j + line, byte), from + s * ROW_BYTES, left <= 0 ? 0 : left < PIECE ? left : PIECE);
        }
    }
}

// Writes COPY bytes to shared memory: copies of the first `valid` bytes, then zeros.
__device__ inline void copy_async(unsigned to, const unsigned char* from, int valid) {
    if constexpr (COPY == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

// Loads eight 16-bit elements from any even address into four registers. Those past the first `valid` bytes
// are 0.
__device__ inline uint4 gather(const unsigned char* from, int valid) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const unsigned short* p = reinterpret_cast<const unsigned short*>(from) + 2 * w;
        const unsigned low = 4 * w < valid ? p[0] : 0, high = 4 * w + 2 < valid ? p[1] : 0;
        words[w] = low | high << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ inline void store_chunk(unsigned to, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ inline void load_matrices(unsigned from, unsigned (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ inline void load_matrices_transposed(unsigned from, unsigned (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ inline unsigned load_word(unsigned from) {
    unsigned word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}
__device__ inline void round_to_tf32(unsigned& x) { asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(x) : "f"(__uint_as_float(x))); }

// Loads the fragment of 16 rows of op(A) (or columns of op(B)) from `row` on, and of one step along k, as mma
// takes it. With g = lane / 4, the four registers for A are (row g, lower half of k), (row g + 8, lower
// half), (row g, upper half), (row g + 8, upper half). For B the middle two are swapped. So r[0] and r[1] are
// columns 0 to 7, and r[2] and r[3] are columns 8 to 15: two instructions.
template <bool K_MAJOR, bool IS_A>
__device__ inline void load_fragment(unsigned operand, int row, int step, int lane, unsigned (&r)[4]) {
    if constexpr (K_MAJOR) {
        const int line = IS_A ? lane % 16 : lane % 8 + lane / 16 * 8, half = IS_A ? lane / 16 : lane / 8 % 2;
        load_matrices(operand + element_offset(true, row + line, (step * 32 + half * 16) / ITEM, ITEM), r);
    } else if constexpr (!TF32) {
        const int k = step * 16 + (IS_A ? lane % 8 + lane / 16 * 8 : lane % 16), x = row + (IS_A ? lane / 8 % 2 : lane / 16) * 8;
        load_matrices_transposed(operand + element_offset(false, x, k, ITEM), r);
    } else {
        // Lanes with odd q load the upper half of k first, so that 32 lanes read from 32 different banks.
        const int g = lane / 4, q = lane % 4, odd = q & 1, k = step * 8 + q + 4 * odd;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int x = row + g + 8 * i;
            const unsigned u = load_word(operand + element_offset(false, x, k, ITEM)), v = load_word(operand + element_offset(false, x, k ^ 4, ITEM));
            r[IS_A ? i : 2 * i] = odd ? v : u;
            r[IS_A ? i + 2 : 2 * i + 1] = odd ? u : v;
        }
    }
    if constexpr (TF32)
#pragma unroll
        for (int i = 0; i < 4; ++i) round_to_tf32(r[i]);
}

__device__ inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define OOC_MMA(shape) "mma.sync.aligned." shape ".row.col.f32." OOC_TEXT(OOC_FORMAT) "." OOC_TEXT(OOC_FORMAT) ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    if constexpr (TF32)
        asm volatile(OOC_MMA("m16n8k8") : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile(OOC_MMA("m16n8k16") : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) tensor_mma(const gemm_arguments g) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned stages = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp % WARPS_M * WARP_M, warp_n = warp / WARPS_M * WARP_N;
    const unsigned rows = static_cast<unsigned>((g.m + TILE_M - 1) / TILE_M), columns = static_cast<unsigned>((g.n + TILE_N - 1) / TILE_N);
    const tile_position tile = tile_at(blockIdx.x, rows, columns, GROUP);
    const long long m0 = static_cast<long long>(tile.row) * TILE_M, n0 = static_cast<long long>(tile.column) * TILE_N;
    const unsigned k_blocks = static_cast<unsigned>((g.k + DEPTH - 1) / DEPTH);

    // Issues the copies of a k-block. If COPY = 2, they go to registers first, and put_chunks stores them to
    // shared memory.
    uint4 chunks_a[COPY == 2 ? PIECES<TILE_M> : 1], chunks_b[COPY == 2 ? PIECES<TILE_N> : 1];
    const auto issue_copies = [&](unsigned block, int stage) {
        const unsigned a_at = stages + stage * STAGE_BYTES, b_at = a_at + A_BYTES;
        const auto copy_a = [&](int i, int offset, const unsigned char* from, int valid) {
            if constexpr (COPY == 2) chunks_a[i] = gather(from, valid);
            else copy_async(a_at + offset, from, valid);
        };
        const auto copy_b = [&](int i, int offset, const unsigned char* from, int valid) {
            if constexpr (COPY == 2) chunks_b[i] = gather(from, valid);
            else copy_async(b_at + offset, from, valid);
        };
        if (block < k_blocks) {
            each_piece<A_K_MAJOR, TILE_M>(g.a, g.lda, m0, g.m, static_cast<long long>(block) * DEPTH, g.k, copy_a);
            each_piece<B_K_MAJOR, TILE_N>(g.b, g.ldb, n0, g.n, static_cast<long long>(block) * DEPTH, g.k, copy_b);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");  // also without copies: waits count groups
    };
    const auto put_chunks = [&](int stage) {
        if constexpr (COPY == 2) {
            const unsigned a_at = stages + stage * STAGE_BYTES, b_at = a_at + A_BYTES;
            each_piece<A_K_MAJOR, TILE_M>(nullptr, 0, 0, 0, 0, 0, [&](int i, int offset, const unsigned char*, int) { store_chunk(a_at + offset, chunks_a[i]); });
            each_piece<B_K_MAJOR, TILE_N>(nullptr, 0, 0, 0, 0, 0, [&](int i, int offset, const unsigned char*, int) { store_chunk(b_at + offset, chunks_b[i]); });
        }
    };

    float d[WARP_M / 16][WARP_N / 8][4] = {};
    unsigned a[2][WARP_M / 16][4], b[2][WARP_N / 16][4];  // fragments of this step and of the next
    const auto load_step = [&](int stage, int s) {
        const unsigned a_at = stages + stage * STAGE_BYTES, b_at = a_at + A_BYTES;
        unsigned thread = threadIdx.x;
        asm volatile("" : "+r"(thread));  // recomputed addresses take fewer registers than stored ones
        const int lane = thread % 32;
#pragma unroll
        for (int i = 0; i < WARP_M / 16; ++i) load_fragment<A_K_MAJOR, true>(a_at, warp_m + 16 * i, s, lane, a[s % 2][i]);
#pragma unroll
        for (int j = 0; j < WARP_N / 16; ++j) load_fragment<B_K_MAJOR, false>(b_at, warp_n + 16 * j, s, lane, b[s % 2][j]);
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        issue_copies(s, s);
        put_chunks(s);
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    load_step(0, 0);
    int stage = 0;
#pragma unroll 1
    for (unsigned kb = 0; kb < k_blocks; ++kb) {
        const int before = stage == 0 ? STAGES - 1 : stage - 1;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            if (s == 0) issue_copies(kb + STAGES - 1, before);
            if (s < STEPS - 1) load_step(stage, s + 1);
            else {
                put_chunks(before);
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
                __syncthreads();
                stage = stage == STAGES - 1 ? 0 : stage + 1;
                load_step(stage, 0);
            }
#pragma unroll
            for (int i = 0; i < WARP_M / 16; ++i)
#pragma unroll
                for (int j = 0; j < WARP_N / 8; ++j) multiply_add(d[i][j], a[s % 2][i], b[s % 2][j / 2][j % 2 * 2], b[s % 2][j / 2][j % 2 * 2 + 1]);
        }
    }

    const float alpha = static_cast<float>(g.alpha_re), beta = static_cast<float>(g.beta_re);
    const int q = lane % 4;
    const long long column = n0 + warp_n + 8 * (q & 1) + 4 * (q >> 1);
    const bool aligned = reinterpret_cast<unsigned long long>(g.c) % 16 == 0 && g.ldc % 4 == 0;
    constexpr int RUNS = WARP_N / 16;  // runs of four in a row of C
#pragma unroll
    for (int line = 0; line < WARP_M / 8; ++line) {
        const long long row = m0 + warp_m + line * 8 + lane / 4, left = row < g.m ? g.n - column : 0;
        const int valid = left < TILE_N ? static_cast<int>(left) : TILE_N;
        float* const p = static_cast<float*>(g.c) + row * g.ldc + column;
        float4 v[RUNS];
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
            const float *e = d[line / 2][2 * r] + line % 2 * 2, *f = d[line / 2][2 * r + 1] + line % 2 * 2;
            v[r] = scaled(alpha, exchange(e[0], e[1], f[0], f[1], q & 1, 1));
        }
        if (beta != 0)
#pragma unroll
            for (int r = 0; r < RUNS; ++r) v[r] = added(v[r], beta, load_run<false>(p + 16 * r, valid - 16 * r, aligned));
#pragma unroll
        for (int r = 0; r < RUNS; ++r) store_run<false>(p + 16 * r, v[r], valid - 16 * r, aligned);
    }
}
