// gemm.cuh: the argument struct that every GEMM kernel takes by value. A GEMM kernel computes
//
//   C = alpha op(A) @ op(B) + beta C       all matrices are row-major; beta = 0 never reads C
//
// Macros that are defined when a kernel is compiled, besides OOC_STORED and OOC_ACCUMULATED (scalar.cuh):
//   OOC_OP_A, OOC_OP_B   op(): 0 uses the matrix as stored, 1 transposes it, 2 also conjugates it
//
// A is stored as m x k (k x m if op() transposes it) and has the leading dimension lda. B is stored as k x n
// (n x k if transposed), C as m x n with the type OOC_ACCUMULATED. m, n and k may be any numbers >= 0.
// Leading dimensions are in elements. Pointers need no alignment beyond that of an element.
#pragma once
struct gemm_arguments {
    long long m, n, k;
    double alpha_re, alpha_im, beta_re, beta_im;
    const void* a; long long lda;
    const void* b; long long ldb;
    void* c; long long ldc;
};
