// ozaki_split: splits a panel into int8 residues, for an emulated product (planning/emulation.py).
//
// A panel is the block of op(A) or op(B) that one step multiplies. A row here is a row of op(A) or a column
// of op(B); `depth` is its length along k. A plane is the matrix of the residues for one modulus. There are
// two kernels, and a thread block of either processes ROWS rows:
//
//   ozaki_facts   computes the 2-norm of each row, as norm * 2^exponent, and the ratio of its 1-norm to its
//                 2-norm. Large, medium and small elements have an accumulator each (Blue, 1978), so that
//                 squares neither overflow nor underflow.
//   ozaki_split   scales each element a of a row to the integer rint(a 2^s), where s = floor(OOC_EXPONENT -
//                 log2 of the row's 2-norm). Writes the integer's residues modulo each modulus, contiguous
//                 along k and zero beyond `depth`. Also updates the verdict.
//
// The verdict is the struct from which the host decides whether the number of moduli gives an accurate
// product (PanelFacts in planning/emulation.py). It starts as zeros. Threads update it by integer atomicMax,
// so their order does not matter. A minimum is stored as the maximum of the complement.
//
// Macros
//   OOC_STORED     the type of the panel's elements
//   OOC_K_MAJOR    1: rows are contiguous along k; 0: columns are contiguous
//   OOC_MODULI     the moduli
//   OOC_EXPONENT   log2 of the 2-norm to which rows are scaled
//   OOC_LEVELS     multiples of a row's root mean square. Elements of at least these sizes are counted.
//   OOC_COUNT      0 omits that count, to measure what it costs; the default is 1
// Launch: one block of 256 threads per ROWS rows.
#ifndef OOC_COUNT
#define OOC_COUNT 1
#endif
#include "emulation/residue.cuh"

// A thread block stages ROWS rows by DEPTH positions along k in shared memory. A thread then converts RUN
// consecutive positions of a row.
constexpr int ROWS = 16, THREADS = 256, DEPTH = 128, RUN = 8;
// In shared memory, one element of padding follows every RUN elements. So neither the reads nor the writes of
// a warp have bank conflicts.
constexpr int PITCH = DEPTH + DEPTH / RUN + (OOC_K_MAJOR ? 0 : 1);
constexpr int MODULI[] = {OOC_MODULI};
constexpr int NUMBER = sizeof(MODULI) / sizeof(int);
// Minimum number of blocks per multiprocessor. More blocks hide the latency of memory better, but leave fewer
// registers per thread. With 15 or more moduli, or on devices other than sm_90, four blocks leave too few.
#if __CUDA_ARCH__ == 900
constexpr int RESIDENT = NUMBER < 15 ? 4 : 2;
#else
constexpr int RESIDENT = 2;
#endif
constexpr double LEVELS[] = {OOC_LEVELS};
constexpr double SLACK = 1.0 + 0x1p-30;  // a computed norm times this is at least the true norm

struct row_facts {
    double norm;
    float ratio;
    int exponent;
};

struct verdict {
    unsigned not_finite, inexact, nonzero, grain, most, not_least, below[4];
};

__device__ inline double power(int e) { return __longlong_as_double(static_cast<long long>(e + 1023) << 52); }

// Returns x 2^e, for |e| <= 2000. 2^e may be no double, so it is applied as two factors.
__device__ inline double scaled(double x, int e) {
    const int half = e >> 1;
    return x * power(half) * power(e - half);
}

__device__ inline long long place(int row, int k, int rows, int depth) {
    return OOC_K_MAJOR ? static_cast<long long>(row) * depth + k : static_cast<long long>(k) * rows + row;
}

extern "C" __global__ void __launch_bounds__(THREADS) ozaki_facts(const OOC_STORED* __restrict__ x, int rows, int depth, row_facts* facts) {
    // Elements above LARGE are scaled by 2^-SHIFT before they are squared, elements below SMALL by 2^SHIFT.
    constexpr int LANES = THREADS / ROWS, SHIFT = 600;
    constexpr double LARGE = 0x1p480, SMALL = 0x1p-480;
    __shared__ double sums[6][THREADS];
    const int i = OOC_K_MAJOR ? threadIdx.x / LANES : threadIdx.x % ROWS;
    const int lane = OOC_K_MAJOR ? threadIdx.x % LANES : threadIdx.x / ROWS;
    const int row = blockIdx.x * ROWS + i;
    double square[3] = {}, sum[3] = {};
    if (row < rows) {
        constexpr int BATCH = 8;  // a thread issues so many loads before it uses the first value
        for (int k = lane; k < depth; k += BATCH * LANES) {
            double batch[BATCH];
#pragma unroll
            for (int e = 0; e < BATCH; ++e) {
                const int at = k + e * LANES;
                batch[e] = at < depth ? fabs(static_cast<double>(x[place(row, at, rows, depth)])) : 0;
            }
#pragma unroll
            for (int e = 0; e < BATCH; ++e) {
                const double v = batch[e];
                if (sizeof(OOC_STORED) == 4 || (v <= LARGE && v >= SMALL) || v == 0) {
                    square[1] += v * v;
                    sum[1] += v;
                } else if (v < SMALL) {
                    const double up = v * 0x1p600;
                    square[2] += up * up;
                    sum[2] += up;
                } else {  // NaN included
                    const double down = v * 0x1p-600;
                    square[0] += down * down;
                    sum[0] += down;
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 3; ++j) {
        sums[j][threadIdx.x] = square[j];
        sums[3 + j][threadIdx.x] = sum[j];
    }
    __syncthreads();
    if (threadIdx.x >= ROWS || blockIdx.x * ROWS + threadIdx.x >= rows) return;
    double total[6] = {};
    for (int l = 0; l < LANES; ++l) {
        const int at = OOC_K_MAJOR ? threadIdx.x * LANES + l : l * ROWS + threadIdx.x;
#pragma unroll
        for (int j = 0; j < 6; ++j) total[j] += sums[j][at];
    }
    // Add the next smaller kind of elements to the largest kind that occurs. A kind two steps smaller, small
    // beside large, is less than 2^-80 of the sum and is omitted.
    const int kind = total[0] != 0 ? 0 : total[1] != 0 ? 1 : 2;
    double norm = kind == 0 ? total[0] : kind == 1 ? total[1] : total[2];
    double one = kind == 0 ? total[3] : kind == 1 ? total[4] : total[5];
    if (kind == 0) {
        norm += total[1] * power(-SHIFT) * power(-SHIFT);
        one += total[4] * power(-SHIFT);
    } else if (kind == 1) {
        norm += total[2] * power(-SHIFT) * power(-SHIFT);
        one += total[5] * power(-SHIFT);
    }
    norm = sqrt(norm) * SLACK;
    facts[blockIdx.x * ROWS + threadIdx.x] = {norm, static_cast<float>(norm > 0 ? one / norm : 0), (1 - kind) * SHIFT};
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) ozaki_split(
    const OOC_STORED* __restrict__ x, int rows, int depth, int ld, const row_facts* __restrict__ facts,
    signed char* __restrict__ planes, int* __restrict__ exponents, verdict* __restrict__ found) {
    __shared__ double tile[ROWS * PITCH];
    __shared__ int counts[ROWS][4];
    if (threadIdx.x < ROWS * 4) counts[threadIdx.x / 4][threadIdx.x % 4] = 0;
    constexpr int RUNS = DEPTH / RUN;
    const int i = threadIdx.x / RUNS, run = threadIdx.x % RUNS, top = blockIdx.x * ROWS, row = top + i;
    row_facts f = {};
    if (row < rows) f = facts[row];
    const bool finite = f.norm <= 0x1p1000 , nonzero = f.norm != 0;
    int s = 0;
    double unit = 0;  // the root mean square of the scaled row
    if (finite && nonzero) {
        s = static_cast<int>(floor(OOC_EXPONENT - log2(f.norm) - f.exponent));
        unit = scaled(f.norm, s + f.exponent) / sqrt(static_cast<double>(depth)) * SLACK;
    }
    int above[4] = {};
    bool inexact = false;
    for (int k0 = 0; k0 < ld; k0 += DEPTH) {
        __syncthreads();
#pragma unroll
        for (int e = threadIdx.x; e < ROWS * DEPTH; e += THREADS) {
            const int r = OOC_K_MAJOR ? e / DEPTH : e % ROWS, k = OOC_K_MAJOR ? e % DEPTH : e / ROWS;
            const bool inside = top + r < rows && k0 + k < depth;
            tile[r * PITCH + k + k / RUN] = inside ? static_cast<double>(x[place(top + r, k0 + k, rows, depth)]) : 0.0;
        }
        __syncthreads();
        unsigned long long lifted[RUN];  // the scaled integers plus 2^63, which makes them unsigned
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
            const double v = tile[i * PITCH + run * (RUN + 1) + e], y = scaled(v, s), whole = rint(y);
            inexact |= whole != y || (y == 0 && v != 0);
            if (OOC_COUNT) {
#pragma unroll
                for (int l = 0; l < 4; ++l) above[l] += fabs(y) >= LEVELS[l] * unit;
            }
            lifted[e] = static_cast<unsigned long long>(static_cast<long long>(whole)) ^ 1ull << 63;
        }
        const int k = k0 + run * RUN;
        if (row < rows && k < ld) {
#pragma unroll
            for (int l = 0; l < NUMBER; ++l) {
                unsigned r[RUN];
#pragma unroll
                for (int e = 0; e < RUN; ++e) r[e] = lifted_residue(lifted[e], MODULI[l]);
                const unsigned low = four_bytes(r), high = four_bytes(r + 4);
                *reinterpret_cast<uint2*>(planes + (static_cast<long long>(l) * rows + row) * ld + k) = {low, high};
            }
        }
    }
    if (OOC_COUNT) {
#pragma unroll
        for (int l = 0; l < 4; ++l) atomicAdd(&counts[i][l], above[l]);
    }
    if (row < rows && nonzero && inexact) atomicMax(&found->inexact, 1u);
    __syncthreads();
    if (row >= rows || run > 0) return;
    exponents[row] = s;
    if (!finite) atomicMax(&found->not_finite, 1u);
    if (!finite || !nonzero) return;
    atomicMax(&found->nonzero, 1u);
    atomicMax(&found->grain, __float_as_uint(__double2float_ru(1 / scaled(f.norm, s + f.exponent) * SLACK * SLACK)));
    atomicMax(&found->most, __float_as_uint(f.ratio * 1.00001f));
    atomicMax(&found->not_least, ~__float_as_uint(f.ratio * 0.99999f));
#pragma unroll
    for (int l = 0; l < 4; ++l) atomicMax(&found->below[l], static_cast<unsigned>(depth - counts[i][l]));
}
