// int8_finish: result = alpha * sum + beta * result in double precision, sums being integers. beta = 0 never reads result.
//
// Macros: OOC_ACCUMULATED, of the sums; OOC_STORED, of the result; and where that is an integer type OOC_MAX, the largest
// that it may be: more, or a sum that may not be exact, makes *too_large 1.
// Launch: any number of blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(256) int8_finish(
    long long elements, const OOC_ACCUMULATED* __restrict__ sums, double alpha, double beta, OOC_STORED* __restrict__ result,
    volatile int* too_large) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long e = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; e < elements; e += stride) {
        double value = alpha * sums[e], size = fabs(value);
        if (beta != 0) {
            const double kept = beta * result[e];
            value += kept;
            size += fabs(kept);
        }
#ifdef OOC_MAX
        constexpr double EXACT = 9007199254740992.0, MAX = OOC_MAX;  // 2^53
        if (!(size < EXACT && value <= MAX && value >= -MAX - 1)) {
            *too_large = 1;
            continue;
        }
#endif
        result[e] = static_cast<OOC_STORED>(value);
    }
}
