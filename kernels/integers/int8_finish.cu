// int8_finish: result = alpha * sum + beta * result, element by element, in double precision. The sums are
// integers. beta = 0 never reads result.
//
// Macros
//   OOC_ACCUMULATED  the type of the sums
//   OOC_STORED       the type of the result
//   OOC_MAX          defined only if the result has an integer type: the largest value allowed. If an element
//                    is above OOC_MAX, below -OOC_MAX - 1, or so large that double precision may have rounded
//                    it, the kernel sets *too_large to 1 and leaves the element unchanged.
// Launch: any number of blocks of 256 threads.
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
