// operand.cuh: how the kernels in this folder read op(A) and op(B) and write C.
//
// op() is a compile-time constant and costs nothing at run time: element (row, col) of op(X) is x[row * ld +
// col] if X is used as stored, and x[col * ld + row] if it is transposed.
//
// The kernels have __launch_bounds__(threads, 1): at least one block per multiprocessor. Without the 1, the
// compiler aims at more blocks and spills a register or two to reach that number.
#pragma once
#include "common/gemm.cuh"
#include "common/scalar.cuh"

using Stored = OOC_STORED;
using Accumulated = OOC_ACCUMULATED;

// The row pitch, in elements, of a tile in shared memory with that many columns. If op() transposes, a warp
// writes down a column of the tile. One column of padding then puts the elements of a column into different
// banks.
constexpr int pitch(int op, int columns) { return columns + (op != 0); }

__device__ inline Accumulated zero() { return make_scalar<Accumulated>::of(0, 0); }

template <int Op>
__device__ inline Accumulated element(const void* x, long long ld, long long row, long long col) {
    const Stored* const stored = static_cast<const Stored*>(x);
    const Accumulated value = Accumulated(widen(stored[Op == 0 ? row * ld + col : col * ld + row]));
    return Op == 2 ? conjugate(value) : value;
}

// Copies the Rows x Cols block of op(X) that starts at (row0, col0) to shared memory. All `Threads` threads
// of the block take part. op(X) is rows x cols; elements past its edge are set to zero. Reads are coalesced
// for either op().
template <int Op, int Rows, int Cols, int Threads>
__device__ inline void load_tile(Accumulated (&tile)[Rows][pitch(Op, Cols)], const void* x, long long ld,
                                 long long rows, long long cols, long long row0, long long col0, int thread) {
    static_assert(Rows * Cols % Threads == 0, "each thread copies as many elements");
#pragma unroll 8  // a thread issues 8 loads before it uses the first value; 32 would exceed the registers
    for (int q = 0; q < Rows * Cols / Threads; ++q) {
        const int e = thread + q * Threads;
        const int r = Op == 0 ? e / Cols : e % Rows;
        const int c = Op == 0 ? e % Cols : e / Rows;
        const bool inside = row0 + r < rows && col0 + c < cols;
        tile[r][c] = inside ? element<Op>(x, ld, row0 + r, col0 + c) : zero();
    }
}

// Sets C[i, j] = alpha * sum + beta * C[i, j] if (i, j) is inside C. beta = 0 never reads C.
__device__ inline void write_result(const gemm_arguments& g, long long i, long long j, Accumulated sum) {
    if (i >= g.m || j >= g.n) return;
    Accumulated* const target = static_cast<Accumulated*>(g.c) + i * g.ldc + j;
    Accumulated value = scaled(make_scalar<Accumulated>::of(g.alpha_re, g.alpha_im), sum);
    if (g.beta_re != 0 || g.beta_im != 0)
        value = multiply_add(make_scalar<Accumulated>::of(g.beta_re, g.beta_im), *target, value);
    *target = value;
}

// The first row and column of the tile of C that this thread block computes. The grid is one-dimensional, in
// row-major order of tiles, because only gridDim.x may exceed 65535.
struct tile_origin {
    long long row, col;
};
template <int Rows, int Cols>
__device__ inline tile_origin origin_of_block(const gemm_arguments& g) {
    const long long across = (g.n + Cols - 1) / Cols;
    return {blockIdx.x / across * Rows, blockIdx.x % across * Cols};
}
