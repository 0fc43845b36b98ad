// expand: does the steps of elements (transforms/steps.cuh) in a panel of A or B just before it is multiplied.
//
// The arithmetic is in float64, and the result is rounded once. So it has the same bits as on the host, except after
// log1p, whose last bits may differ. The kernel is bound by memory: it reads each element once and writes it once, and
// a thread loads the numbers of its columns once for ROWS rows.
//
// x and y are row-major matrices of the same shape, without gaps between rows.
//
// Macros: that of transforms/steps.cuh, and
//   OOC_STORED, OOC_RESULT  types of x and y (common/scalar.cuh)
//   OOC_UNROLL              rows of a thread whose loads are in flight at the same time
//   OOC_WIDTH               elements of a row per thread, loaded and stored together: 4, or 1 if rows are not
//                           multiples of 4
// Launch: blocks of 256 threads, as 64 columns of threads by 4 rows of threads. blockIdx.x selects
// 64 * OOC_WIDTH columns, blockIdx.y selects ROWS rows, and then those gridDim.y * ROWS below them.
#include "common/scalar.cuh"
#include "transforms/steps.cuh"

constexpr int ACROSS = 64, DOWN = 4, ROWS = 64, WIDTH = OOC_WIDTH;

template <typename T>
struct alignas(sizeof(T) * WIDTH) pack_t {
    T x[WIDTH];
};

__device__ inline void round_to(double x, half_t& y) { asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x)); }
__device__ inline void round_to(double x, bfloat_t& y) { narrow(static_cast<float>(x), y); }
__device__ inline void round_to(double x, float& y) { y = static_cast<float>(x); }
__device__ inline void round_to(double x, double& y) { y = x; }
__device__ inline void round_to(double x, signed char& y) { y = static_cast<signed char>(static_cast<int>(x)); }
template <typename Real>
__device__ inline void round_to(double x, complex_t<Real>& y) { y = {static_cast<Real>(x), 0}; }

extern "C" __global__ void __launch_bounds__(256) expand(
    const OOC_STORED* __restrict__ x, long long rows, long long cols, const elements_t elements,
    OOC_RESULT* __restrict__ y) {
    const long long left = (static_cast<long long>(blockIdx.x) * ACROSS + threadIdx.x % ACROSS) * WIDTH;
    if (left >= cols) return;
    double u[8][WIDTH];  // the numbers of each step, of which the compiler keeps those that are used
#define OOC_STEP(name, number, axis) \
    if (axis == BY_COLUMN)           \
        for (int e = 0; e < WIDTH; ++e) u[number][e] = elements.steps[number].numbers[left + e];
    OOC_CHAIN
#undef OOC_STEP
    const long long step = static_cast<long long>(gridDim.y) * ROWS;
    for (long long top = static_cast<long long>(blockIdx.y) * ROWS; top < rows; top += step) {
#pragma unroll OOC_UNROLL
        for (int down = threadIdx.x / ACROSS; down < ROWS; down += DOWN) {
            const long long row = top + down;
            if (row < rows) {
                const pack_t<OOC_STORED> from = *reinterpret_cast<const pack_t<OOC_STORED>*>(x + row * cols + left);
                pack_t<OOC_RESULT> to;
#define OOC_STEP(name, number, axis) \
    if (axis == BY_ROW)              \
        for (int e = 0; e < WIDTH; ++e) u[number][e] = elements.steps[number].numbers[row];
                OOC_CHAIN
#undef OOC_STEP
                for (int e = 0; e < WIDTH; ++e) {
                    double stored = static_cast<double>(widen(from.x[e]));
                    double value = stored;
#define OOC_STEP(name, number, axis) value = element_##name(value, stored, u[number][e], elements.steps[number]);
                    OOC_CHAIN
#undef OOC_STEP
                    round_to(value, to.x[e]);
                }
                *reinterpret_cast<pack_t<OOC_RESULT>*>(y + row * cols + left) = to;
            }
        }
    }
}
