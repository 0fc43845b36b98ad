// element.cuh: elements of C that are kept, as scores with the numbers of their columns.
//
//   score(i, j) = sums[i][j]                       with OOC_RULE 0
//               = sums[i][j] * (u[i] * v[j])       with OOC_RULE 1, but at least -1 and at most 1
//               = 2 * sums[i][j] - (u[i] + v[j])   with OOC_RULE 2, but at most 0
//
// for factors u of the rows and v of the columns of C.
//
// Macros:
//   OOC_ACCUMULATED  type of the sums: float, double, or int
//   OOC_WIDE         0: scores are float, columns unsigned. 1: scores are double, columns unsigned long long
//   OOC_RULE         how scores are computed: 0, 1 or 2
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

// Returns a score. One of its factors is `factor`, the other one is factors[other].
__device__ inline score_t score_at(
    const OOC_ACCUMULATED* from, long long at, score_t factor, const score_t* __restrict__ factors, long long other) {
    // Sums are read once, and shall not evict the factors from the cache.
    const score_t score = static_cast<score_t>(__ldcs(from + at));
    if (OOC_RULE == 0) return score;
    if (OOC_RULE == 2) {
        const score_t nearness = 2 * score - (factor + factors[other]);
        return nearness > 0 ? 0 : nearness;
    }
    const score_t cosine = score * (factor * factors[other]);
    return cosine > 1 ? 1 : cosine < -1 ? -1 : cosine;  // NaN stays NaN
}

// Reads the scores of 32 * UNROLL columns from `first` on, of which those from `end` on become NaN. `of_row` is
// u[i], and `factors` starts with that of the first column of `from`. A branch per column would keep the compiler
// from issuing all loads before it uses their results.
__device__ inline void read_scores(
    const OOC_ACCUMULATED* from, long long first, long long end, int lane, score_t of_row,
    const score_t* __restrict__ factors, score_t (&scores)[UNROLL]) {
    if (first + 32 * UNROLL <= end) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const long long column = first + u * 32 + lane;
            scores[u] = score_at(from, column, of_row, factors, column);
        }
    } else {
        const score_t nan = score_t(0) / score_t(0);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const long long column = first + u * 32 + lane;
            scores[u] = column < end ? score_at(from, column, of_row, factors, column) : nan;
        }
    }
}
