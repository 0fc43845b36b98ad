// measure: finds the means and scales of a transform in panels of X that have all of its rows.
//
// A Gram matrix of one tile uploads each panel once, with all rows of X and some of its columns, which are
// indices along k. So the numbers of a column are known before the panel is transformed, and X is read once.
// All sums are of integers, and exact. They do not depend on the order in which blocks run.
//
//   measure_sums      count, sum and squares[p] of the elements of column p that are not missing
//   measure_numbers   from these sums, the numbers of column p for the kernel expand, or the weight of column p
//   measure_products  products[i] += the sum over p of x[i, p] * weights[p]; a missing element is 0
//   measure_square    square = the sum over p of weights[p]^2
//   measure_center    rows[i] and cols[i], for the kernel rank_one
//
// With the means u = weights / d, X u = products / d and u^T u = square / d^2 are what centering subtracts from
// X X^T. Without missing elements, the weights are the sums of the columns, and d is the number of rows. So all
// products are integers. Otherwise the weights are the means, and d = 1.
//
// Macros:
//   OOC_K_AXIS    1: columns of the stored panel are columns of X. 0: its rows are
//   OOC_MISSING   1: elements equal to `code` are missing. 0: no element is
//   OOC_WIDTH     elements of a stored row per thread, loaded together: 4, or 1 if rows are not multiples of 4
//   OOC_CENTER    1: the mean is what is subtracted. 0: nothing is found
//   OOC_SCALE     what elements are divided by. 0: nothing is found. 1: the standard deviation. 2: that of genotypes
//                 in Hardy-Weinberg equilibrium
//   OOC_FILL      1: missing elements become the mean. 0: nothing is found
//   OOC_RAISES    1: a missing element is an error
//   OOC_CORRECTS  1: weights are found. 0: the numbers of the kernel expand are
// Launch: blocks of 256 threads (oocgemm/kernels/launches.py).
#include "common/scalar.cuh"

constexpr int ACROSS = 64, DOWN = 4, WIDTH = OOC_WIDTH, COLUMNS = ACROSS * WIDTH, ROWS = 1024;
constexpr int WARPS = 8, EACH = 4;  // rows of X per warp

using sum_t = unsigned long long;

struct alignas(WIDTH) pack_t {
    signed char x[WIDTH];
};

__device__ inline pack_t load(const signed char* x) { return *reinterpret_cast<const pack_t*>(x); }
__device__ inline bool is_missing(int x, int code) { return OOC_MISSING && x == code; }

extern "C" __global__ void __launch_bounds__(256) measure_sums(
    const signed char* __restrict__ x, long long rows, long long cols, int code, long long depth, sum_t* sums) {
    if (OOC_K_AXIS) {
        __shared__ int parts[3][DOWN][COLUMNS];
        const int across = threadIdx.x % ACROSS * WIDTH, down = threadIdx.x / ACROSS;
        const long long left = static_cast<long long>(blockIdx.x) * COLUMNS, top = blockIdx.y * 1LL * ROWS;
        int found[3][WIDTH] = {};
        const long long bottom = top + ROWS < rows ? top + ROWS : rows;
        if (left + across < cols) {
#pragma unroll 4
            for (long long row = top + down; row < bottom; row += DOWN) {
                const pack_t from = load(x + row * cols + left + across);
                for (int e = 0; e < WIDTH; ++e) {
                    const int value = is_missing(from.x[e], code) ? 0 : from.x[e];
                    found[0][e] += !is_missing(from.x[e], code);
                    found[1][e] += value;
                    found[2][e] += value * value;
                }
            }
        }
        for (int i = 0; i < 3; ++i)
            for (int e = 0; e < WIDTH; ++e) parts[i][down][across + e] = found[i][e];
        __syncthreads();
        for (int at = threadIdx.x; at < 3 * COLUMNS; at += 256) {
            const int i = at / COLUMNS, column = at % COLUMNS;
            if (left + column >= cols) continue;
            long long total = 0;
            for (int each = 0; each < DOWN; ++each) total += parts[i][each][column];
            atomicAdd(sums + depth * i + left + column, static_cast<sum_t>(total));
        }
    } else {
        __shared__ long long parts[3][256];
        for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
            int found[3] = {};
#pragma unroll 4
            for (long long left = threadIdx.x * WIDTH; left < cols; left += 256 * WIDTH) {
                const pack_t from = load(x + row * cols + left);
                for (int e = 0; e < WIDTH; ++e) {
                    const int value = is_missing(from.x[e], code) ? 0 : from.x[e];
                    found[0] += !is_missing(from.x[e], code);
                    found[1] += value;
                    found[2] += value * value;
                }
            }
            for (int i = 0; i < 3; ++i) parts[i][threadIdx.x] = found[i];
            for (int half = 128; half > 0; half /= 2) {
                __syncthreads();
                if (threadIdx.x < half)
                    for (int i = 0; i < 3; ++i) parts[i][threadIdx.x] += parts[i][threadIdx.x + half];
            }
            __syncthreads();
            if (threadIdx.x < 3) sums[depth * threadIdx.x + row] = static_cast<sum_t>(parts[threadIdx.x][0]);
            __syncthreads();
        }
    }
}

// Finds the numbers of the columns from `first` on. Sets `wrong` if the steps are undefined for a column. Of `fill`,
// `center` and `inverse`, only those that are found are written.
extern "C" __global__ void __launch_bounds__(256) measure_numbers(
    long long first, long long columns, long long depth, long long rows, const sum_t* __restrict__ sums,
    double* fill, double* center, double* inverse, double* weights, int* wrong) {
    const long long column = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x, p = first + column;
    if (column >= columns) return;
    const long long count = sums[p], sum = sums[depth + p], squares = sums[2 * depth + p];
    const double mean = static_cast<double>(sum) / static_cast<double>(count);
    const bool lacks = count != rows, uses_mean = OOC_CENTER || OOC_SCALE || (OOC_FILL && lacks);
    bool fails = (OOC_RAISES && lacks) || (uses_mean && count == 0);
    if (OOC_CORRECTS) {
        weights[p] = OOC_MISSING ? mean : static_cast<double>(sum);
    } else {
        if (OOC_FILL) fill[p] = lacks ? mean : 0;
        if (OOC_CENTER) center[p] = mean;
        if (OOC_SCALE) {
            const double share = mean / 2, number = static_cast<double>(count);
            const double spread = static_cast<double>(count * squares - sum * sum);
            const double scale = sqrt(OOC_SCALE == 1 ? spread / (number * number) : 2 * share * (1 - share));
            fails = fails || !(scale > 0) || (OOC_SCALE == 2 && !(mean >= 0 && mean <= 2));
            inverse[p] = 1 / scale;
        }
    }
    if (fails) *wrong = 1;
}

// `rows` and `cols` are those of the stored panel, whose first index along k has the first of `weights`.
extern "C" __global__ void __launch_bounds__(256) measure_products(
    const signed char* __restrict__ x, long long rows, long long cols, int code,
    const double* __restrict__ weights, double* products) {
    if (OOC_K_AXIS) {
        __shared__ double parts[WARPS][EACH][32];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const long long top = (static_cast<long long>(blockIdx.x) * WARPS + warp) * EACH;
        double found[EACH] = {};
        for (long long left = lane * WIDTH; left < cols; left += 32 * WIDTH) {
            double weight[WIDTH];
            for (int e = 0; e < WIDTH; ++e) weight[e] = weights[left + e];
            for (int i = 0; i < EACH; ++i) {
                if (top + i >= rows) break;
                const pack_t from = load(x + (top + i) * cols + left);
                for (int e = 0; e < WIDTH; ++e)
                    found[i] += is_missing(from.x[e], code) ? 0 : from.x[e] * weight[e];
            }
        }
        for (int i = 0; i < EACH; ++i) parts[warp][i][lane] = found[i];
        __syncthreads();
        if (lane < EACH && top + lane < rows) {
            double total = 0;
            for (int i = 0; i < 32; ++i) total += parts[warp][lane][i];
            products[top + lane] += total;
        }
    } else {
        __shared__ double parts[DOWN][COLUMNS];
        const int across = threadIdx.x % ACROSS * WIDTH, down = threadIdx.x / ACROSS;
        const long long left = static_cast<long long>(blockIdx.x) * COLUMNS;
        double found[WIDTH] = {};
        if (left + across < cols) {
#pragma unroll 4
            for (long long row = down; row < rows; row += DOWN) {
                const pack_t from = load(x + row * cols + left + across);
                for (int e = 0; e < WIDTH; ++e)
                    found[e] += is_missing(from.x[e], code) ? 0 : from.x[e] * weights[row];
            }
        }
        for (int e = 0; e < WIDTH; ++e) parts[down][across + e] = found[e];
        __syncthreads();
        const int column = threadIdx.x;
        if (column < COLUMNS && left + column < cols) {
            double total = 0;
            for (int each = 0; each < DOWN; ++each) total += parts[each][column];
            products[left + column] += total;
        }
    }
}

// Launch: one block.
extern "C" __global__ void __launch_bounds__(256) measure_square(
    long long depth, const double* __restrict__ weights, double* square) {
    __shared__ double parts[256];
    double found = 0;
#pragma unroll 8
    for (long long p = threadIdx.x; p < depth; p += 256) found += weights[p] * weights[p];
    parts[threadIdx.x] = found;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *square = parts[0];
}

extern "C" __global__ void __launch_bounds__(256) measure_center(
    long long extent, double alpha, double divisor, const double* __restrict__ products,
    const double* __restrict__ square, double* rows, double* cols) {
    const long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (i >= extent) return;
    const double product = products[i] / divisor;
    rows[i] = alpha * product;
    cols[i] = alpha * (product - *square / (divisor * divisor));
}
