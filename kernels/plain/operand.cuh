// operand.cuh: how the plain rungs read op(A) and op(B) and write C.
//
// op() is known when a kernel is compiled, so that it costs nothing at run time: element (row, col) of op(X) lies at
// x[row * ld + col] as stored, and at x[col * ld + row] transposed.
//
// The rungs say __launch_bounds__(threads, 1): registers for one block a multiprocessor at least. Without the 1 the
// compiler aims at some number of blocks of its own choice and spills a register or two for it.
#pragma once
#include "common/gemm.cuh"
#include "common/scalar.cuh"

using Stored = OOC_STORED;
using Accumulated = OOC_ACCUMULATED;

// Columns of a tile in shared memory: one more than it has where a transpose is written down its columns, which
// would otherwise lie in one bank.
constexpr int pitch(int op, int columns) { return columns + (op != 0); }

__device__ inline Accumulated zero() { return make_scalar<Accumulated>::of(0, 0); }

template <int Op>
__device__ inline Accumulated element(const void* x, long long ld, long long row, long long col) {
    const Stored* const stored = static_cast<const Stored*>(x);
    const Accumulated value = Accumulated(widen(stored[Op == 0 ? row * ld + col : col * ld + row]));
    return Op == 2 ? conjugate(value) : value;
}

// The Rows x Cols block of op(X) that begins at (row0, col0), into shared memory by Threads threads; zero where the
// matrix, rows x cols, has ended. Consecutive threads read consecutive addresses, whichever way X is stored.
template <int Op, int Rows, int Cols, int Threads>
__device__ inline void load_tile(Accumulated (&tile)[Rows][pitch(Op, Cols)], const void* x, long long ld,
                                 long long rows, long long cols, long long row0, long long col0, int thread) {
    static_assert(Rows * Cols % Threads == 0, "every thread copies as many elements");
#pragma unroll 8  // so many loads in flight; 32 at once would cost more registers than there are
    for (int q = 0; q < Rows * Cols / Threads; ++q) {
        const int e = thread + q * Threads;
        const int r = Op == 0 ? e / Cols : e % Rows;
        const int c = Op == 0 ? e % Cols : e / Rows;
        const bool inside = row0 + r < rows && col0 + c < cols;
        tile[r][c] = inside ? element<Op>(x, ld, row0 + r, col0 + c) : zero();
    }
}

// C[i, j] = alpha * sum + beta * C[i, j] if C has such an element. beta = 0 never reads it.
__device__ inline void write_result(const gemm_arguments& g, long long i, long long j, Accumulated sum) {
    if (i >= g.m || j >= g.n) return;
    Accumulated* const target = static_cast<Accumulated*>(g.c) + i * g.ldc + j;
    Accumulated value = scaled(make_scalar<Accumulated>::of(g.alpha_re, g.alpha_im), sum);
    if (g.beta_re != 0 || g.beta_im != 0)
        value = multiply_add(make_scalar<Accumulated>::of(g.beta_re, g.beta_im), *target, value);
    *target = value;
}

// A kernel's blocks are counted along one dimension, which may be long, row of tiles by row of tiles.
struct tile_origin {
    long long row, col;
};
template <int Rows, int Cols>
__device__ inline tile_origin origin_of_block(const gemm_arguments& g) {
    const long long across = (g.n + Cols - 1) / Cols;
    return {blockIdx.x / across * Rows, blockIdx.x % across * Cols};
}
