// moments: means, variances and extremes of the columns or rows of a matrix, from blocks of it in any number.
//
//   moments_columns, moments_rows  those of parts of the lines of one block
//   moments_merge                  adds the parts of a block to what earlier blocks have given
//
// A thread adds up a few elements less one of them, so that large means do not cancel, in float64. Sums of parts are
// merged by the formula of Chan, Golub and LeVeque (1983), in an order that depends on the shapes of blocks alone.
// So the results have the same bits in each run.
//
// Elements are those after a chain of steps (transforms/steps.cuh), without missing ones. What is found of a line are
// five numbers, in arrays of `stride` numbers each: count, mean, sum of squared differences from the mean, minimum
// and maximum. Extremes are NaN if an element is.
//
// Macros: that of transforms/steps.cuh, and
//   OOC_STORED   type of the elements of the block (common/scalar.cuh)
//   OOC_MISSING  0: no element is missing. 1: elements equal to `code` are. 2: NaN are
// Launch: blocks of 256 threads (oocgemm/kernels/launches.py).
#include "common/scalar.cuh"
#include "transforms/steps.cuh"

constexpr int DEPTH = 128;            // rows of a part, for columns
constexpr int WARPS = 8, EACH = 128;  // rows of a thread block, and columns of a thread, for rows

struct moments_t {
    double count, mean, squares, low, high;
};

__device__ inline bool is_missing(double x, double code) {
    return OOC_MISSING == 1 ? x == code : OOC_MISSING == 2 ? x != x : false;
}

__device__ inline double lower(double x, double y) { return y < x || y != y ? y : x; }
__device__ inline double higher(double x, double y) { return y > x || y != y ? y : x; }

__device__ inline moments_t merged(const moments_t& a, const moments_t& b) {
    if (b.count == 0) return a;
    if (a.count == 0) return b;
    const double count = a.count + b.count, apart = b.mean - a.mean;
    return {count, a.mean + apart * (b.count / count), a.squares + b.squares + apart * apart * (a.count * b.count / count),
            lower(a.low, b.low), higher(a.high, b.high)};
}

struct adding_t {
    double count = 0, pivot = 0, sum = 0, squares = 0, low = 0, high = 0;

    __device__ inline void add(double x) {
        if (count == 0) pivot = low = high = x;
        const double d = x - pivot;
        count += 1;
        sum += d;
        squares += d * d;
        low = lower(low, x);
        high = higher(high, x);
    }
    __device__ inline moments_t found() const {
        const double mean = count == 0 ? 0 : sum / count;
        const double rest = squares - sum * mean;
        return {count, pivot + mean, rest < 0 ? 0 : rest, low, high};
    }
};

__device__ inline double changed(double& stored, long long row, long long col, const elements_t& elements) {
    double value = stored;
#define OOC_STEP(name, number, axis)                                                                                   \
    value = element_##name(value, stored, axis == BY_ROW ? elements.steps[number].numbers[row]                         \
                                          : axis == BY_COLUMN ? elements.steps[number].numbers[col] : 0,               \
                           elements.steps[number]);
    OOC_CHAIN
#undef OOC_STEP
    return value;
}

__device__ inline void store(const moments_t& m, double* found, long long stride, long long at) {
    found[at] = m.count;
    found[stride + at] = m.mean;
    found[2 * stride + at] = m.squares;
    found[3 * stride + at] = m.low;
    found[4 * stride + at] = m.high;
}
__device__ inline moments_t load(const double* found, long long stride, long long at) {
    return {found[at], found[stride + at], found[2 * stride + at], found[3 * stride + at], found[4 * stride + at]};
}

// A thread per column and part: part p of column j is number p * cols + j.
extern "C" __global__ void __launch_bounds__(256) moments_columns(
    const OOC_STORED* __restrict__ x, long long rows, long long cols, double code, const elements_t elements,
    double* __restrict__ parts, long long stride) {
    const long long col = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (col >= cols) return;
    const long long top = static_cast<long long>(blockIdx.y) * DEPTH;
    const long long bottom = top + DEPTH < rows ? top + DEPTH : rows;
    adding_t adding;
#pragma unroll 8
    for (long long row = top; row < bottom; ++row) {
        double stored = static_cast<double>(widen(x[row * cols + col]));
        const double value = changed(stored, row, col, elements);
        if (!is_missing(stored, code)) adding.add(value);
    }
    store(adding.found(), parts, stride, blockIdx.y * cols + col);
}

// A warp per row and part: part p of row i is number p * rows + i.
extern "C" __global__ void __launch_bounds__(256) moments_rows(
    const OOC_STORED* __restrict__ x, long long rows, long long cols, double code, const elements_t elements,
    double* __restrict__ parts, long long stride) {
    __shared__ moments_t found[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = static_cast<long long>(blockIdx.x) * WARPS + warp;
    const long long left = static_cast<long long>(blockIdx.y) * (32 * EACH);
    const long long right = row >= rows ? 0 : left + 32 * EACH < cols ? left + 32 * EACH : cols;
    adding_t adding;
#pragma unroll 8
    for (long long col = left + lane; col < right; col += 32) {
        double stored = static_cast<double>(widen(x[row * cols + col]));
        const double value = changed(stored, row, col, elements);
        if (!is_missing(stored, code)) adding.add(value);
    }
    found[warp][lane] = adding.found();
    for (int half = 16; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) found[warp][lane] = merged(found[warp][lane], found[warp][lane + half]);
    }
    if (lane == 0 && row < rows) store(found[warp][0], parts, stride, blockIdx.y * rows + row);
}

// A thread per line of a block, whose first one is line `first` of the matrix.
extern "C" __global__ void __launch_bounds__(256) moments_merge(
    long long lines, long long count, const double* __restrict__ parts, long long stride, long long first,
    long long extent, double* found) {
    const long long line = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (line >= lines) return;
    moments_t whole = load(found, extent, first + line);
    for (long long part = 0; part < count; ++part) whole = merged(whole, load(parts, stride, part * lines + line));
    store(whole, found, extent, first + line);
}
