// element.cuh: elements of C that are kept, as scores with the numbers of their columns.
//
//   score(i, j) = sums[i][j] * (scales[i] * scales[j]), but at least -1 and at most 1      or sums[i][j]
//
// Macros:
//   OOC_ACCUMULATED  type of the sums: float, double, or int
//   OOC_WIDE         0: scores are float, columns unsigned. 1: scores are double, columns unsigned long long
//   OOC_SCALED       1: rows and columns are scaled
//   OOC_PITCH        a row of sums is followed by room for OOC_PITCH - 1 rows; 1 if it is not defined
#pragma once

#ifndef OOC_PITCH
#define OOC_PITCH 1
#endif

using word_t = unsigned long long;
#if OOC_WIDE
using score_t = double;
using column_t = word_t;
#else
using score_t = float;
using column_t = unsigned;
#endif

struct element_t {
    score_t score;
    column_t column;
};

constexpr unsigned ALL = 0xffffffffu;  // the threads of a warp
// A warp reads this many times 32 successive elements of a row at once.
constexpr int UNROLL = 8;

// Returns a score. One of its scales is `scale`, the other one is scales[other].
__device__ inline score_t score_at(
    const OOC_ACCUMULATED* from, long long at, score_t scale, const score_t* __restrict__ scales, long long other) {
    // Sums are read once, and shall not evict the scales from the cache.
    const score_t score = static_cast<score_t>(__ldcs(from + at));
    if (!OOC_SCALED) return score;
    const score_t cosine = score * (scale * scales[other]);
    return cosine > 1 ? 1 : cosine < -1 ? -1 : cosine;  // NaN stays NaN
}

// Reads the scores of 32 * UNROLL columns from `first` on, of which those from `end` on become NaN. `of_row` is
// scales[i], and `scales` starts with that of the first column of `from`. A branch per column would keep the compiler
// from issuing all loads before it uses their results.
__device__ inline void read_scores(
    const OOC_ACCUMULATED* from, long long first, long long end, int lane, score_t of_row,
    const score_t* __restrict__ scales, score_t (&scores)[UNROLL]) {
    if (first + 32 * UNROLL <= end) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const long long column = first + u * 32 + lane;
            scores[u] = score_at(from, column, of_row, scales, column);
        }
    } else {
        const score_t nan = score_t(0) / score_t(0);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const long long column = first + u * 32 + lane;
            scores[u] = column < end ? score_at(from, column, of_row, scales, column) : nan;
        }
    }
}
