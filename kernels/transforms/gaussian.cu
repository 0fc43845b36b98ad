// gaussian: replaces each element c of a strip of C by exp(-gamma d2) with d2 = rows[i] + cols[j] - 2 c.
//
// The strip is row-major, without gaps between its rows of `width` elements. With the squared norms of the rows
// of A in `rows`, and those of the columns of B in `cols`, d2 is the squared distance of a row of A and a column
// of B. Rounding may make it negative: then it is 0. NaN stays NaN.
//
// Macros: OOC_ACCUMULATED, the type of the elements.
// Launch: any number of blocks of 256 threads along x and y. Those along y take turns with the rows.
extern "C" __global__ void __launch_bounds__(256) gaussian(
    long long height, long long width, const double* __restrict__ rows, const double* __restrict__ cols,
    double gamma, OOC_ACCUMULATED* __restrict__ c) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (long long row = blockIdx.y; row < height; row += gridDim.y) {
        const double here = rows[row];
        OOC_ACCUMULATED* line = c + row * width;
        for (long long col = first; col < width; col += stride) {
            const double d2 = here + cols[col] - 2 * static_cast<double>(line[col]);
            line[col] = exp(static_cast<OOC_ACCUMULATED>(d2 < 0 ? 0 : -gamma * d2));
        }
    }
}
