// scatter: composes lines of a sparse matrix from their entries, in a panel of A or B.
//
// Line i has the entries starts[i] to starts[i + 1] - 1. The panel has the places `left` to `left + width - 1` of each
// line, from its element i * pitch on. Two entries of a line never have the same place.
//
// Most elements of a panel are 0. So the kernel takes about as long as filling the panel with zeros.
//
// Macros:
//   OOC_ITEM   bytes of an element: 1, 2, 4, 8 or 16
//   OOC_INDEX  the type of the places of entries in their lines: int or long long
// Launch: a block of 256 threads per line.

constexpr int ITEM = OOC_ITEM;

struct alignas(ITEM) element_t {
    unsigned char bytes[ITEM];
};

extern "C" __global__ void __launch_bounds__(256) scatter(
    const long long* __restrict__ starts, const OOC_INDEX* __restrict__ indices,
    const element_t* __restrict__ values, long long left, long long width, long long pitch,
    element_t* __restrict__ panel) {
    element_t* line = panel + blockIdx.x * pitch;
    for (long long i = threadIdx.x; i < width; i += 256) line[i] = element_t{};
    __syncthreads();
    const long long end = starts[blockIdx.x + 1];
    for (long long i = starts[blockIdx.x] + threadIdx.x; i < end; i += 256) {
        const long long place = indices[i] - left;
        if (place >= 0 && place < width) line[place] = values[i];
    }
}
