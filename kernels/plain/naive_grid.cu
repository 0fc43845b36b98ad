// naive_grid: the kernel `naive` for a C that is larger than one grid of threads may be.
//
//        n
//      +------+------+---+          Submatrices of at most COVER_M x COVER_N elements cover C. Each is launched as a
//    m |  1   |  2   | 3 |          product of some rows of op(A) and some columns of op(B), with unchanged leading
//      +------+------+---+          dimensions. The kernel is the naive one. The caller makes the launches and moves
//      |  4   |  5   | 6 |          three pointers for each: a to op(A)[i0, 0], b to op(B)[0, j0], c to C[i0, j0].
//      +------+------+---+
//
// Parameters
//   COVER_M, COVER_N (32768, 32768)  rows and columns of a submatrix
//   BLOCK_X, BLOCK_Y (32, 8)         threads of a block, as in naive
#define ENTRY naive_grid
#include "plain/naive.cu"

#ifndef COVER_M
#define COVER_M 32768
#define COVER_N 32768
#endif
static_assert((COVER_M + BLOCK_Y - 1) / BLOCK_Y <= 65535, "a grid has at most 65535 rows of blocks");
static_assert(COVER_M > 0 && COVER_N > 0, "a submatrix is not empty");
