// threshold: finds the elements of a strip of C (some rows of a tile) that are at or above a threshold.
//
// With `excludes_self`, elements on C's diagonal are left out, and if C is symmetric, all those right of it.
//
// A warp searches one row, and each element is read once. The warp collects what it finds in a buffer in shared
// memory, in the order of columns. When the buffer is nearly full, and at the end of the row, its elements are
// appended to `elements` as a segment. Segments of a row are in the order of their first elements. `counters` are the
// numbers of elements and of segments, which must be 0 at first.
//
// Macros: those of selection/element.cuh, and
//   OOC_ABSOLUTE     1: magnitudes of scores are compared
//   OOC_TRIANGLE     1: C is symmetric
//   OOC_ROOM         elements in the buffer of a warp
// Launch: blocks of WARPS warps. The grid may have fewer warps than there are rows.
#include "selection/element.cuh"

constexpr int ROOM = OOC_ROOM, WARPS = 8;

struct segment_t {
    unsigned row, count;
    word_t first;
};

// Appends the elements of a buffer as a segment of a row. `firsts` are shared by the warps of a block.
__device__ inline void append(
    const element_t* buffer, int used, long long row, int lane, word_t* first, word_t* counters, segment_t* segments,
    element_t* elements) {
    if (lane == 0) {
        *first = atomicAdd(counters, static_cast<word_t>(used));
        segments[atomicAdd(counters + 1, word_t(1))] = {
            static_cast<unsigned>(row), static_cast<unsigned>(used), *first};
    }
    __syncwarp();
    for (int e = lane; e < used; e += 32) elements[*first + e] = buffer[e];
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) threshold(
    const OOC_ACCUMULATED* __restrict__ sums, long long rows, long long width, long long first_row,
    long long first_column, long long excludes_self, double least, const score_t* __restrict__ row_factors,
    const score_t* __restrict__ col_factors,
    word_t* counters, segment_t* segments, element_t* __restrict__ elements) {
    __shared__ element_t buffers[WARPS][ROOM];
    __shared__ word_t firsts[WARPS];
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, warp = threadIdx.x / 32;
    element_t* buffer = buffers[warp];
    const score_t bound = static_cast<score_t>(least);
    for (long long row = static_cast<long long>(blockIdx.x) * warps + warp; row < rows;
         row += static_cast<long long>(gridDim.x) * warps) {
        const long long diagonal = first_row + row - first_column;
        const long long below = OOC_TRIANGLE ? diagonal + !excludes_self : width;
        const long long own = !OOC_TRIANGLE && excludes_self ? diagonal : -1;
        const long long end = below < width ? below : width;  // the first column that is left out
        const score_t of_row = OOC_RULE ? row_factors[first_row + row] : score_t(1);
        const OOC_ACCUMULATED* from = sums + row * width * OOC_PITCH;
        int used = 0;
        for (long long start = 0; start < end; start += 32 * UNROLL) {
            score_t scores[UNROLL];
            read_scores(from, start, end, lane, of_row, col_factors + first_column, scores);
            bool some = false;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) some |= scores[u] >= bound || (OOC_ABSOLUTE && -scores[u] >= bound);
            if (!__ballot_sync(ALL, some)) continue;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const long long column = start + u * 32 + lane;
                const bool found = column != own && (scores[u] >= bound || (OOC_ABSOLUTE && -scores[u] >= bound));
                const unsigned votes = __ballot_sync(ALL, found);
                if (found) {
                    buffer[used + __popc(votes & ((1u << lane) - 1))] = {
                        scores[u], static_cast<column_t>(first_column + column)};
                }
                used += __popc(votes);
                __syncwarp();
                if (used > ROOM - 32) {
                    append(buffer, used, row, lane, &firsts[warp], counters, segments, elements);
                    used = 0;
                }
            }
        }
        if (used) append(buffer, used, row, lane, &firsts[warp], counters, segments, elements);
    }
}
