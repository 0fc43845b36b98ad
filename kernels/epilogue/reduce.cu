// reduce: adds to `kept` the sum, the sum of squares, or the largest element of each row of a strip of C.
//
// The strip is row-major, without gaps between its rows of `width` elements. A block reduces a row. Each thread takes
// every 256th element, and the order of additions depends on the width alone. NaN is the largest element.
//
// Macros:
//   OOC_ACCUMULATED  type of the elements: float or double
//   OOC_PITCH        a row of the strip is followed by room for OOC_PITCH - 1 rows; 1 if it is not defined
//   OOC_REDUCTION    0: the sum, 1: the sum of squares, 2: the largest element
// Launch: any number of blocks of 256 threads along x, which take turns with the rows.
#ifndef OOC_PITCH
#define OOC_PITCH 1
#endif

__device__ inline double joined(double x, double y) {
#if OOC_REDUCTION == 2
    return x != x || x > y ? x : y;
#else
    return x + y;
#endif
}

extern "C" __global__ void __launch_bounds__(256) reduce(
    const OOC_ACCUMULATED* __restrict__ elements, long long height, long long width, long long begins,
    double* __restrict__ kept) {
    __shared__ double parts[256];
    const int thread = threadIdx.x;
    for (long long i = blockIdx.x; i < height; i += gridDim.x) {
        const OOC_ACCUMULATED* row = elements + i * width * OOC_PITCH;
        double found = OOC_REDUCTION == 2 ? -__longlong_as_double(0x7ffll << 52) : 0.0;
        for (long long j = thread; j < width; j += 256) {
            const double x = static_cast<double>(row[j]);
            found = joined(OOC_REDUCTION == 1 ? x * x : x, found);
        }
        parts[thread] = found;
        __syncthreads();
        for (int half = 128; half > 0; half /= 2) {
            if (thread < half) parts[thread] = joined(parts[thread], parts[thread + half]);
            __syncthreads();
        }
        if (thread == 0) kept[i] = begins ? parts[0] : joined(kept[i], parts[0]);
        __syncthreads();
    }
}
