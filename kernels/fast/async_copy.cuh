// async_copy.cuh: copies panels of op(A) and op(B) from device memory to shared memory by cp.async (sm_80).
//
// A panel is the part of an operand that a thread block multiplies at a time. It is DEPTH along k by WIDTH
// along mn, which means rows of op(A) or columns of op(B). One cp.async copies a unit, WIDE values along the
// dimension that is contiguous in device memory. This dimension is called "along", the other one "across":
//
//   K_CONTIGUOUS   along = k,  across = mn    (A as stored, B transposed)
//   otherwise      along = mn, across = k     (A transposed, B as stored)
//
// In one pass, THREADS threads copy ALONG units along by ACROSS = THREADS / ALONG across. A panel takes
// several passes. Values past the edge of the matrix are set to zero; memory there is not read.
#pragma once

#include "common/ptx.cuh"

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Copies BYTES (4, 8 or 16) bytes to shared memory if `wanted`; else does nothing.
template <int BYTES>
__device__ inline void copy_async(unsigned to, const void* from, bool wanted) {
    if constexpr (BYTES == 16)  // bypasses the L1 cache: a multiprocessor does not read the same data twice
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], %2;}" ::"r"(to),
            "l"(from), "n"(BYTES), "r"(static_cast<int>(wanted))
            : "memory");
    else
        asm volatile(
            "{.reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.ca.shared.global.L2::128B [%0], [%1], %2;}" ::"r"(to),
            "l"(from), "n"(BYTES), "r"(static_cast<int>(wanted))
            : "memory");
}

// Writes BYTES bytes to shared memory: copies of the first `valid` bytes, then zeros. If `valid` is 0, it
// reads nothing.
template <int BYTES>
__device__ inline void copy_async_filled(unsigned to, const void* from, int valid) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(valid)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(valid)
                     : "memory");
}

// Prefetches a tile of C into the L2 cache. If beta != 0, the kernel reads the tile after the last
// multiplication. `rows` and `columns` are the extents of the part of the tile that is inside C.
template <int THREADS, int WIDTH, typename T>
__device__ inline void prefetch_tile(const T* c, long long ldc, int rows, int columns) {
    constexpr int LINE = 128 / sizeof(T), LINES = WIDTH / LINE;
    for (int i = threadIdx.x / LINES; i < rows; i += THREADS / LINES)
        if (threadIdx.x % LINES * LINE < columns)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(c + i * ldc + threadIdx.x % LINES * LINE));
}

// An mbarrier is a barrier in two parts: a warp arrives, continues, and waits for the other warps later. In
// between, some warps may run ahead of others, so that they do not all stall at the same time. The barrier is
// used again and again; a wait takes the parity (0 or 1) of the number of times that it has been used before.
__device__ inline void mbarrier_init(unsigned barrier, int warps) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(warps) : "memory");
}
__device__ inline void mbarrier_arrive(unsigned barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(barrier) : "memory");
}
__device__ inline void mbarrier_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
#if __CUDA_ARCH__ >= 900  // try_wait suspends the thread for a while before it returns false
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
#else
        asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
#endif
    } while (!done);
}

// The copies of one operand's panels that one thread makes. PLACE::offset(mn, k) is the byte offset of a
// value in a panel in shared memory. PLACE::step(mn, k) is the difference between two offsets whose positions
// differ by (mn, k), for the distances between the passes; it must not depend on the positions.
template <typename T, typename PLACE, int DEPTH, int WIDTH, bool K_CONTIGUOUS, int WIDE, int ALONG, int THREADS>
struct panel_copy {
    static constexpr int ACROSS = THREADS / ALONG;
    static constexpr int PASSES_ALONG = (K_CONTIGUOUS ? DEPTH : WIDTH) / (ALONG * WIDE);
    static constexpr int PASSES_ACROSS = (K_CONTIGUOUS ? WIDTH : DEPTH) / ACROSS;
    static constexpr int COPIES = PASSES_ALONG * PASSES_ACROSS;
    static constexpr int BYTES = WIDE * sizeof(T);
    static_assert(ALONG * ACROSS == THREADS, "a pass uses every thread");
    static_assert(PASSES_ALONG * ALONG * WIDE == (K_CONTIGUOUS ? DEPTH : WIDTH), "passes must fit along the panel");
    static_assert(PASSES_ACROSS * ACROSS == (K_CONTIGUOUS ? WIDTH : DEPTH), "passes must fit across the panel");

    const char* from;   // address in device memory of this thread's first unit of the next panel
    long long row;      // bytes in device memory from one pass across to the next
    long long advance;  // bytes in device memory from one panel to the next
    unsigned to;        // byte offset of this thread's first unit in a panel in shared memory

    __device__ static int along() { return static_cast<int>(threadIdx.x) % ALONG * WIDE; }
    __device__ static int across() { return static_cast<int>(threadIdx.x) / ALONG; }

    // `first` is the row of op(A), or the column of op(B), at which the panels begin.
    __device__ panel_copy(const T* matrix, long long ld, long long first)
        : from(reinterpret_cast<const char*>(
              matrix + (K_CONTIGUOUS ? (first + across()) * ld + along() : across() * ld + first + along()))),
          row(ACROSS * ld * static_cast<long long>(sizeof(T))),
          advance(DEPTH * (K_CONTIGUOUS ? 1 : ld) * static_cast<long long>(sizeof(T))),
          to(K_CONTIGUOUS ? PLACE::offset(across(), along()) : PLACE::offset(along(), across())) {}

    __device__ static constexpr unsigned step(int copy) {
        const int l = copy / PASSES_ACROSS * ALONG * WIDE, r = copy % PASSES_ACROSS * ACROSS;
        return K_CONTIGUOUS ? PLACE::step(r, l) : PLACE::step(l, r);
    }

    __device__ const char* source(int copy) const {
        return from + copy / PASSES_ACROSS * (ALONG * BYTES) + copy % PASSES_ACROSS * row;
    }

    // Makes copy number `copy` of this thread, for a panel that is entirely inside its matrix.
    __device__ void copy_inside(unsigned panel, int copy, bool wanted) const {
        copy_async<BYTES>(panel + to + step(copy), source(copy), wanted);
    }

    // Makes all copies of this thread for a panel of which only mn_left by k_left values are inside the
    // matrix.
    __device__ void copy_edge(unsigned panel, int mn_left, int k_left) const {
        const int along_left = (K_CONTIGUOUS ? k_left : mn_left) - along();
        const int across_left = (K_CONTIGUOUS ? mn_left : k_left) - across();
        const char* at = from;
        unsigned into = panel + to;
#pragma unroll 1  // this loop runs rarely, and unrolling it would take registers
        for (int l = 0; l < PASSES_ALONG; ++l) {
            const int values = along_left - l * (ALONG * WIDE), valid = (values <= 0 ? 0 : values < WIDE ? values : WIDE) * sizeof(T);
#pragma unroll 1
            for (int r = 0; r < PASSES_ACROSS; ++r) {
                copy_async_filled<BYTES>(into, at, r * ACROSS < across_left ? valid : 0);
                at += row;
                into += step(1);
            }
            at += ALONG * BYTES - PASSES_ACROSS * row;
            into = panel + to + step((l + 1) * PASSES_ACROSS);
        }
    }
};

// Copies the panels of both operands for one tile of C, in order along k. A panel is the part of an operand
// that the block multiplies at a time.
template <typename T, typename COPY_A, typename COPY_B>
struct panel_stream {
    unsigned panel, panels, inside;  // next panel; number of panels; how many are wholly inside
    int m_left, n_left, k_last;      // rows and columns of the tile inside C; k % BLOCK_K, for the last panel
    COPY_A a;
    COPY_B b;

    __device__ panel_stream(const gemm_arguments& g, tile_corner at)
        : panel(0),
          panels(tiles_along(g.k, BLOCK_K)),
          m_left(at_most(g.m - at.top, BLOCK_M)),
          n_left(at_most(g.n - at.left, BLOCK_N)),
          k_last(static_cast<int>(g.k % BLOCK_K)),
          a(static_cast<const T*>(g.a), g.lda, at.top),
          b(static_cast<const T*>(g.b), g.ldb, at.left) {
        inside = m_left == BLOCK_M && n_left == BLOCK_N ? panels - (k_last != 0) : 0;
    }

    // Makes share `part` of `parts` of the copies of the next two panels, to spread them over the loop along
    // k. Panels past an edge are copied entirely with part 0.
    __device__ void copy(unsigned panel_a, unsigned panel_b, int part, int parts) const {
        const bool whole = panel < inside;
#pragma unroll
        for (int c = 0; c < COPY_A::COPIES; ++c)
            if (c * parts / COPY_A::COPIES == part) a.copy_inside(panel_a, c, whole);
#pragma unroll
        for (int c = 0; c < COPY_B::COPIES; ++c)
            if (c * parts / COPY_B::COPIES == part) b.copy_inside(panel_b, c, whole);
        if (part == 0 && !whole && panel < panels) {
            const int k_left = panel == panels - 1 && k_last != 0 ? k_last : BLOCK_K;
            a.copy_edge(panel_a, m_left, k_left);
            b.copy_edge(panel_b, n_left, k_left);
        }
    }

    __device__ void advance() {
        a.from += a.advance;
        b.from += b.advance;
        ++panel;
    }
};
