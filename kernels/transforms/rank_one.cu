// rank_one: subtracts rows[i] + cols[j] from each element (i, j) of a strip of C, in place.
//
// The strip is row-major, without gaps between its rows of `width` elements. A product of matrices whose means
// were subtracted is computed this way from the product of the matrices themselves (`oocgemm.Transform`).
//
// Launch: any number of blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(256) rank_one(
    long long elements, long long width, const double* __restrict__ rows, const double* __restrict__ cols,
    double* __restrict__ c) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long e = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; e < elements; e += stride) {
        const long long row = e / width;
        c[e] = c[e] - rows[row] - cols[e - row * width];
    }
}
