// int8_finish: result = alpha * sum + beta * result in double precision, for integer sums. beta = 0 never
// reads result.
//
// Macros: OOC_ACCUMULATED, the type of the sums; OOC_STORED, the type of the result; and OOC_MAX if that is
// an integer type:
// a result beyond OOC_MAX, or one that may not be exact, sets *too_large to 1.
// Launch: any number of blocks
// of 256 threads.
extern "C" __global__ void __launch_bounds__(256) int8_finish(
    long long elements, const OOC_ACCUMULATED* __restrict__ sums, double alpha, double beta, OOC_STORED* __restrict__ result,
    volatile int* too_large) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long e = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; e < elements; e += stride) {
        double value = alpha * sums[e], size = fabs(value);
        if (beta != 0) {
            const double old = beta * result[e];
            value += old;
            size += fabs(old);
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
