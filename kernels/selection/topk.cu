// topk: updates the largest elements of each row of C with those of a strip (some rows of a tile).
//
// Scores are those of selection/element.cuh. kept[i] has the `count` largest ones of row i so far, with the numbers of
// their columns. They are in descending order, and equal scores in ascending order of columns. NaN comes last, and -0
// becomes 0.
//
// A warp searches one row, and each element is read once. The warp's buffer in shared memory starts with kept[i].
// Elements that rank above its element number `count` are appended to it, with a ballot. Before the buffer
// overflows, it is sorted and cut to `count` elements again. After the first few thousand elements of a row, hardly
// any element is appended, and the kernel is bound by memory.
//
// Elements are ranked by keys (rank_t). A key is an unsigned integer. Its upper half is made of the bits of the score,
// such that larger scores have larger keys. Its lower half is the inverted number of the column. The key 0 stands for
// no element.
//
// Macros: those of selection/element.cuh, and
//   OOC_ROOM         elements in the buffer of a warp: a power of two, at least count + 64
// Launch: blocks of one warp per row (threadIdx.x / 32). The grid may have fewer warps than there are rows. Dynamic
// shared memory: OOC_ROOM keys per warp.
#include "selection/element.cuh"

constexpr int ROOM = OOC_ROOM;

#if OOC_WIDE
struct alignas(16) rank_t {
    word_t score, column;
};
__device__ inline bool below(rank_t a, rank_t b) {
    return a.score < b.score || (a.score == b.score && a.column < b.column);
}
__device__ inline rank_t key_of(score_t score, column_t column) {
    const word_t bits = static_cast<word_t>(__double_as_longlong(score + 0.0)), top = 1ull << 63;
    return {score == score ? (bits & top ? ~bits : bits | top) : 0, ~column};
}
__device__ inline score_t score_of(rank_t key) {
    const word_t top = 1ull << 63, bits = key.score & top ? key.score ^ top : ~key.score;
    return __longlong_as_double(static_cast<long long>(key.score ? bits : 0x7ff8ull << 48));
}
__device__ inline column_t column_of(rank_t key) { return ~key.column; }
#else
using rank_t = word_t;
__device__ inline bool below(rank_t a, rank_t b) { return a < b; }
__device__ inline rank_t key_of(score_t score, column_t column) {
    const unsigned bits = __float_as_uint(score + 0.0f), top = 1u << 31;
    const unsigned ordered = score == score ? (bits & top ? ~bits : bits | top) : 0;
    return static_cast<word_t>(ordered) << 32 | ~column;
}
__device__ inline score_t score_of(rank_t key) {
    const unsigned top = 1u << 31, ordered = static_cast<unsigned>(key >> 32);
    return __uint_as_float(ordered ? (ordered & top ? ordered ^ top : ~ordered) : 0x7fc00000u);
}
__device__ inline column_t column_of(rank_t key) { return ~static_cast<unsigned>(key); }
#endif

// Sorts the first `used` keys in descending order. Keys behind them are overwritten.
__device__ inline void sort(rank_t* keys, int used, int lane) {
    int size = 64;
    while (size < used) size *= 2;
    for (int e = used + lane; e < size; e += 32) keys[e] = rank_t{};
    __syncwarp();
    // Bitonic: after each pass of the outer loop, blocks of `block` keys are sorted, in alternating directions.
    for (int block = 2; block <= size; block *= 2) {
        for (int gap = block / 2; gap > 0; gap /= 2) {
            for (int pair = lane; pair < size / 2; pair += 32) {
                const int low = 2 * pair - (pair & (gap - 1)), high = low + gap;
                const rank_t x = keys[low], y = keys[high];
                if (below(x, y) == ((low & block) == 0)) {
                    keys[low] = y;
                    keys[high] = x;
                }
            }
            __syncwarp();
        }
    }
}

extern "C" __global__ void topk(
    const OOC_ACCUMULATED* __restrict__ sums, long long rows, long long width, long long first_row,
    long long first_column, long long count, long long excludes_self, long long begins,
    const score_t* __restrict__ scales, element_t* __restrict__ kept) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, warp = threadIdx.x / 32;
    rank_t* keys = reinterpret_cast<rank_t*>(shared) + warp * ROOM;
    for (long long row = static_cast<long long>(blockIdx.x) * warps + warp; row < rows;
         row += static_cast<long long>(gridDim.x) * warps) {
        element_t* best = kept + row * count;
        for (int e = lane; e < count; e += 32) keys[e] = begins ? rank_t{} : key_of(best[e].score, best[e].column);
        __syncwarp();
        int used = static_cast<int>(count);
        bool changed = begins != 0;
        rank_t least = keys[count - 1];
        score_t bound = score_of(least);
        const long long own = excludes_self ? first_row + row - first_column : -1;
        const score_t of_row = OOC_SCALED ? scales[first_row + row] : score_t(1);
        const OOC_ACCUMULATED* from = sums + row * width;
        for (long long start = 0; start < width; start += 32 * UNROLL) {
            score_t scores[UNROLL];
            read_scores(from, start, width, lane, of_row, scales + first_column, scores);
            bool some = false;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) some |= !(scores[u] < bound);
            if (!__ballot_sync(ALL, some)) continue;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const long long column = start + u * 32 + lane;
                const rank_t key = key_of(scores[u], static_cast<column_t>(first_column + column));
                const bool appends = column < width && column != own && below(least, key);
                const unsigned votes = __ballot_sync(ALL, appends);
                if (!votes) continue;
                if (appends) keys[used + __popc(votes & ((1u << lane) - 1))] = key;
                used += __popc(votes);
                changed = true;
                __syncwarp();
                if (used > ROOM - 32) {
                    sort(keys, used, lane);
                    used = static_cast<int>(count);
                    least = keys[count - 1];
                    bound = score_of(least);
                    __syncwarp();
                }
            }
        }
        if (changed) {
            if (used > count) sort(keys, used, lane);
            for (int e = lane; e < count; e += 32) best[e] = {score_of(keys[e]), column_of(keys[e])};
        }
        __syncwarp();
    }
}
