// naive_grid: the naive kernel for a C larger than one grid.
//
//        n
//      +------+------+---+          C is covered by submatrices of at most COVER_M x COVER_N elements, launched one
//    m |  1   |  2   | 3 |          after the other. A submatrix is a product of its own: of rows of op(A) and columns
//      +------+------+---+          of op(B), which begin elsewhere and have the same leading dimensions. So the kernel
//      |  4   |  5   | 6 |          is the naive one, and the cover is made by whoever launches it, who moves three
//      +------+------+---+          pointers: a to op(A)[i0, 0], b to op(B)[0, j0], c to C[i0, j0].
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
static_assert(COVER_M > 0 && COVER_N > 0, "a submatrix holds something");
