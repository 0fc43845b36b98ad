// int8_pack: copies an int8 operand to the layout that cuBLAS needs.
//
// A row here is a row of op(A) or a column of op(B). The copy has `pitch` bytes per row. Its rows are
// contiguous along k, aligned to 16 bytes, and zero beyond k.
//
// A thread block copies 64 rows by 64 positions along k through shared memory. There, each row has 4 bytes of
// padding. So the 32 threads of a warp, which write one column of 32 rows, write to different banks.
//
// Macro: OOC_K_MAJOR. 1: x is contiguous along k, and rows are ld bytes apart. 0: x is contiguous along the
// rows, and positions along k are ld bytes apart.
// Launch: blocks of 256 threads. blockIdx.x selects 64 bytes along pitch, blockIdx.y selects 64 rows.
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
