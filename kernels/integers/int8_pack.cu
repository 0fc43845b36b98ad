// int8_pack: rows of op(A), or columns of op(B), as rows of `pitch` bytes that begin at multiples of 16, zero beyond k: what
// int8 products read fastest.
//
// Macro: OOC_K_MAJOR, 1 where elements along k lie side by side, ld bytes from one row to the next; 0 where those along
// the rows do, ld bytes from one k to the next. A block takes 64 rows by 64 k through shared memory, whose rows are a word
// longer than their values: the 32 rows that a warp writes down a column lie in different banks.
// Launch: 256 threads; blockIdx.x counts along pitch, blockIdx.y along the rows.
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
    const int r = threadIdx.x / 4, c = threadIdx.x % 4 * 16;  // 16 bytes a thread
    if (row + r >= rows || first + c >= pitch) return;
    const int* const from = reinterpret_cast<const int*>(&tile[r][c]);
    *reinterpret_cast<int4*>(packed + (row + r) * pitch + first + c) = make_int4(from[0], from[1], from[2], from[3]);
}
