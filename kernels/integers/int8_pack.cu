// int8_pack: copies rows of op(A), or columns of op(B), to rows of `pitch` bytes that are contiguous along k,
// aligned to 16 bytes, and zero beyond k: the layout that cuBLAS needs for int8.
//
// Macro: OOC_K_MAJOR. 1: x is contiguous along k, with ld bytes per row. 0: x is contiguous along the rows,
// with ld bytes per k. A block copies 64 rows by 64 ks through shared memory. A word of padding per row keeps
// the 32 rows that a warp writes in one column in different banks.
// Launch: 256 threads; blockIdx.x counts
// along pitch, blockIdx.y along the rows.
constexpr int SIDE = 64;

extern "C" __global__ void __launch_bounds__(256) int8_pack(
    const signed char* __restrict__ x, long long ld, long long rows, long long k, signed char* __restrict__ packed, long long pitch) {
    __shared__ __align__(16) signed char tile[SIDE][SIDE + 4];
    const long long row = static_cast<long long>(blockIdx.y) * SIDE, first = static_cast<long long>(blockIdx.x) * SIDE;
    for (int e = threadIdx.x; e < SIDE * SIDE; e += 256) {
        const int r = OOC_K_MAJOR ? e / SIDE : e % SIDE, c = OOC_K_MAJOR ? e % SIDE : e / SIDE;
        const bool inside = row + r < rows && first + c < k;
        tile[r][c] = inside ? x[OOC_K_MAJOR ? (row + r) * ld + first + c : (first + c) * ld + row + r] : 0;
    }
    __syncthreads();
    const int r = threadIdx.x / 4, c = threadIdx.x % 4 * 16;  // 16 bytes per thread
    if (row + r >= rows || first + c >= pitch) return;
    const int* const from = reinterpret_cast<const int*>(&tile[r][c]);
    *reinterpret_cast<int4*>(packed + (row + r) * pitch + first + c) = make_int4(from[0], from[1], from[2], from[3]);
}
