// turn: transposes strips of a Gram matrix, for its other triangle and at its diagonal.
//
//   turn       y[i, j] = conj(x[j, i])    for i < rows, j < cols
//   complete   replaces one triangle of the square x by the conjugate transpose of the other one, or by 0, and
//              makes the diagonal real
//
// x is row-major with `pitch` elements from row to row, y is row-major without gaps. A thread block passes
// squares of SIDE x SIDE elements through shared memory, so that it reads and writes whole rows of them.
//
// Macros:
//   OOC_STORED  type of the elements (common/scalar.cuh)
//   OOC_UPPER   1: the upper triangle is kept. 0: the lower one is
//   OOC_MIRROR  1: the other triangle mirrors it. 0: it becomes 0
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

template <typename T>
__device__ inline T real_of(T x) { return x; }
template <typename Real>
__device__ inline complex_t<Real> real_of(complex_t<Real> x) { return {x.re, 0}; }

extern "C" __global__ void __launch_bounds__(256) complete(OOC_STORED* x, long long pitch, long long extent) {
    __shared__ OOC_STORED square[SIDE][SIDE + 1];
    const int across = threadIdx.x % SIDE, down = threadIdx.x / SIDE;
    const long long wide = (extent + SIDE - 1) / SIDE;
    const OOC_STORED none{};
    for (long long number = blockIdx.x; number < wide * wide; number += gridDim.x) {
        const long long i = number / wide, j = number % wide;
        if (OOC_UPPER ? i > j : i < j) continue;  // of the triangle that is replaced
        const long long top = i * SIDE, left = j * SIDE;
        for (int row = down; row < SIDE; row += DOWN)
            if (top + row < extent && left + across < extent) square[row][across] = x[(top + row) * pitch + left + across];
        __syncthreads();
        for (int row = down; row < SIDE; row += DOWN) {
            if (left + row >= extent || top + across >= extent) continue;
            OOC_STORED& to = x[(left + row) * pitch + top + across];
            if (i == j && row == across) to = real_of(square[row][row]);
            else if (i != j || (OOC_UPPER ? across < row : across > row)) to = OOC_MIRROR ? conjugate(square[across][row]) : none;
        }
        __syncthreads();
    }
}
