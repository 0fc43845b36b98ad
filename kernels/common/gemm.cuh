// gemm.cuh: the argument struct that every GEMM kernel of the ladder takes by value:
//
//   C = alpha op(A) @ op(B) + beta C       all row-major as stored; beta = 0 never reads C
//
// Compile-time macros beside OOC_STORED and OOC_ACCUMULATED (scalar.cuh):
//   OOC_OP_A, OOC_OP_B   0 as stored, 1 transposed, 2 conjugate transposed
// A is stored m x k with leading dimension lda (k x m if transposed), B k x n (n x k if transposed), C m x n
// in OOC_ACCUMULATED. m, n and k may be any numbers >= 0. Leading dimensions are in elements. Pointers need
// no alignment beyond that of an element.
#pragma once
struct gemm_arguments {
    long long m, n, k;
    double alpha_re, alpha_im, beta_re, beta_im;
    const void* a; long long lda;
    const void* b; long long ldb;
    void* c; long long ldc;
};
