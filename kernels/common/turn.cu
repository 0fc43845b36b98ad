// turn: the conjugate transpose of a block of a strip of C, for the other triangle of a Gram matrix.
//
//   y[i, j] = conj(x[j, i])    for i < rows, j < cols
//
// x is row-major with `pitch` elements from row to row, y is row-major without gaps. A thread block passes
// squares of SIDE x SIDE elements through shared memory, so that it reads and writes whole rows of them.
//
// Macros:
//   OOC_STORED  type of the elements (common/scalar.cuh)
// Launch: any number of blocks of 256 threads, as SIDE columns of threads by DOWN rows of threads.
#include "common/scalar.cuh"

constexpr int SIDE = 32, DOWN = 8;

extern "C" __global__ void __launch_bounds__(256) turn(
    const OOC_STORED* __restrict__ x, long long pitch, long long rows, long long cols, OOC_STORED* __restrict__ y) {
    __shared__ OOC_STORED square[SIDE][SIDE + 1];  // one more column, so that a column is in different banks
    const int across = threadIdx.x % SIDE, down = threadIdx.x / SIDE;
    const long long wide = (cols + SIDE - 1) / SIDE, squares = (rows + SIDE - 1) / SIDE * wide;
    for (long long number = blockIdx.x; number < squares; number += gridDim.x) {
        const long long top = number / wide * SIDE, left = number % wide * SIDE;  // in y
        for (int i = down; i < SIDE; i += DOWN)
            if (left + i < cols && top + across < rows) square[i][across] = x[(left + i) * pitch + top + across];
        __syncthreads();
        for (int i = down; i < SIDE; i += DOWN)
            if (top + i < rows && left + across < cols)
                y[(top + i) * cols + left + across] = conjugate(square[across][i]);
        __syncthreads();
    }
}
