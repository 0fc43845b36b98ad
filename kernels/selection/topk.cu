// topk: updates the largest elements of each row of C with those of a strip (some rows of a tile).
//
// Scores are those of selection/element.cuh. kept[i] has the `count` largest ones of row i so far, with the numbers of
// their columns. They are in descending order, and equal scores in ascending order of columns. NaN comes last, and -0
// becomes 0. Before a run, all bytes of kept are 0xff. Such an element has the key 0 (see below), which stands for none.
//
// A warp searches one row, and each element is read once. The warp's buffer in shared memory starts with kept[i].
// Elements that rank above its element number `count` are appended to it, with a ballot. Before the buffer
// overflows, it is sorted and cut to `count` elements again. After the first few thousand elements of a row, hardly
// any element is appended, and the kernel is bound by memory.
//
// If `count` elements do not fit into a buffer (OOC_FAR), they stay in kept[i]. The buffer has only the elements that are
// appended, and is merged with kept[i] when it is full and when the row ends.
//
// Elements are ranked by keys (rank_t). A key is an unsigned integer. Its upper half is made of the bits of the score,
// such that larger scores have larger keys. Its lower half is the inverted number of the column.
//
// C is symmetric, and only its lower triangle is computed. So topk_columns also searches the columns of a strip, which
// are rows of the upper triangle.
//
// Macros: those of selection/element.cuh, and
//   OOC_FAR          1: the selected elements of a row stay in kept
//   OOC_ROOM         elements in the buffer of a warp: a power of two, at least 64, and without OOC_FAR count + 64
// Launch: blocks of one warp per row, or per column. The grid may have fewer warps than there are rows or columns.
// Dynamic shared memory: OOC_ROOM keys per warp. For topk_columns, the number of warps of a block is a power of two, and
// if it is not 1, memory for 32 * UNROLL + 32 / warps scores more per warp.
#include "selection/element.cuh"

constexpr int ROOM = OOC_ROOM;
constexpr bool FAR = OOC_FAR;

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

// The elements of one row that its warp has selected. They are keys[0..used), and with FAR also the `count` elements `best`.
// Only elements that rank above `least` are appended; `bound` is its score.
struct Selected {
    rank_t* keys;
    element_t* best;
    int count, used;
    bool changed;
    rank_t least;
    score_t bound;

    __device__ inline rank_t ranked(int e) const { return key_of(best[e].score, best[e].column); }

    __device__ inline void begin(element_t* kept, int size, int lane) {
        best = kept;
        count = size;
        for (int e = lane; !FAR && e < count; e += 32) keys[e] = ranked(e);
        __syncwarp();
        changed = false;
        restart();
    }

    __device__ inline void restart() {
        used = FAR ? 0 : count;
        least = FAR ? ranked(count - 1) : keys[count - 1];
        bound = score_of(least);
    }

    // Returns how many of the sorted keys rank above a key.
    __device__ inline int above(rank_t key) const {
        int low = 0, high = used;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (below(key, keys[middle]))
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }

    // Sorts the keys. With FAR, merges them with `best`. Elements move towards the end, so the last ones move first. An
    // element e that `shift` keys rank above moves by as many places. The keys between elements e - 1 and e follow e - 1.
    __device__ inline void merge(int lane) {
        sort(keys, used, lane);
        if (!FAR) return;
        for (int top = (count - 1) / 32 * 32; top >= 0; top -= 32) {
            const int e = top + lane;
            element_t old;
            int before = 0, shift = 0;
            if (e < count) {
                old = best[e];
                before = e ? above(ranked(e - 1)) : 0;
                shift = above(key_of(old.score, old.column));
            }
            if (!__ballot_sync(ALL, shift > 0)) break;
            __syncwarp();
            for (int i = before; i < shift && e + i < count; ++i) best[e + i] = {score_of(keys[i]), column_of(keys[i])};
            if (shift && e + shift < count) best[e + shift] = old;
            __syncwarp();
        }
        __syncwarp();
    }

    // Appends those of 32 * UNROLL scores that rank high enough. The first one is that of column `first`. Scores of
    // the column `own`, and of those from `end` on, are left out.
    __device__ inline void add(
        const score_t (&scores)[UNROLL], long long first, long long end, long long own, int lane) {
        bool some = false;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) some |= !(scores[u] < bound);
        if (!__ballot_sync(ALL, some)) return;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const long long column = first + u * 32 + lane;
            const rank_t key = key_of(scores[u], static_cast<column_t>(column));
            const bool appends = column < end && column != own && below(least, key);
            const unsigned votes = __ballot_sync(ALL, appends);
            if (!votes) continue;
            if (appends) keys[used + __popc(votes & ((1u << lane) - 1))] = key;
            used += __popc(votes);
            changed = true;
            __syncwarp();
            if (used > ROOM - 32) {
                merge(lane);
                restart();
                __syncwarp();
            }
        }
    }

    __device__ inline void end(int lane) {
        if (changed) {
            if (used > (FAR ? 0 : count)) merge(lane);
            for (int e = lane; !FAR && e < count; e += 32) best[e] = {score_of(keys[e]), column_of(keys[e])};
        }
        __syncwarp();
    }
};

extern "C" __global__ void topk(
    const OOC_ACCUMULATED* __restrict__ sums, long long rows, long long width, long long first_row,
    long long first_column, long long count, long long excludes_self, const score_t* __restrict__ row_factors,
    const score_t* __restrict__ col_factors,
    element_t* __restrict__ kept) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, warp = threadIdx.x / 32, k = static_cast<int>(count);
    Selected selected;
    selected.keys = reinterpret_cast<rank_t*>(shared) + warp * ROOM;
    for (long long row = static_cast<long long>(blockIdx.x) * warps + warp; row < rows;
         row += static_cast<long long>(gridDim.x) * warps) {
        selected.begin(kept + row * count, k, lane);
        const long long own = excludes_self ? first_row + row : -1;
        const score_t of_row = OOC_RULE ? row_factors[first_row + row] : score_t(1);
        const OOC_ACCUMULATED* from = sums + row * width * OOC_PITCH;
        for (long long start = 0; start < width; start += 32 * UNROLL) {
            score_t scores[UNROLL];
            read_scores(from, start, width, lane, of_row, col_factors + first_column, scores);
            selected.add(scores, first_column + start, first_column + width, own, lane);
        }
        selected.end(lane);
    }
}

// Selects of each of the first `columns` columns of a strip, as topk does of its transpose. Its rows have `width`
// elements. A block reads 32 * UNROLL rows of as many adjacent columns as it has warps at a time, and transposes them
// in shared memory. C's diagonal is not in these columns.
extern "C" __global__ void topk_columns(
    const OOC_ACCUMULATED* __restrict__ sums, long long rows, long long width, long long first_row,
    long long first_column, long long columns, long long count, const score_t* __restrict__ row_factors,
    const score_t* __restrict__ col_factors,
    element_t* __restrict__ kept) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, warp = threadIdx.x / 32, k = static_cast<int>(count);
    Selected selected;
    selected.keys = reinterpret_cast<rank_t*>(shared) + warp * ROOM;
    // Columns are padded by 32 / warps elements. So the threads of a warp write to different banks of shared memory.
    const int pitch = 32 * UNROLL + 32 / warps;
    score_t* turned = reinterpret_cast<score_t*>(reinterpret_cast<rank_t*>(shared) + warps * ROOM);
    const long long ld = width * OOC_PITCH;
    const int across = threadIdx.x % warps, down = threadIdx.x / warps;
    const score_t none = score_t(0), nan = none / none;
    for (long long left = static_cast<long long>(blockIdx.x) * warps; left < columns;
         left += static_cast<long long>(gridDim.x) * warps) {
        const long long column = left + across;
        const bool reads = column < columns, searches = left + warp < columns;
        if (searches) selected.begin(kept + (left + warp) * count, k, lane);
        const score_t of_column = OOC_RULE && reads ? col_factors[first_column + column] : score_t(1);
        for (long long top = 0; top < rows; top += 32 * UNROLL) {
            score_t scores[UNROLL];
            const OOC_ACCUMULATED* from = sums + (top + down) * ld + column;
            if (reads && top + 32 * UNROLL <= rows) {
#pragma unroll
                for (int u = 0; u < UNROLL; ++u)
                    scores[u] = score_at(from, u * 32 * ld, of_column, row_factors + first_row + top + down, u * 32);
            } else {
#pragma unroll
                for (int u = 0; u < UNROLL; ++u)
                    scores[u] = reads && top + down + u * 32 < rows
                                    ? score_at(from, u * 32 * ld, of_column, row_factors + first_row + top + down, u * 32)
                                    : nan;
            }
            if (warps > 1) {
                __syncthreads();
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) turned[across * pitch + down + u * 32] = scores[u];
                __syncthreads();
                if (!searches) continue;
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) scores[u] = turned[warp * pitch + u * 32 + lane];
            }
            selected.add(scores, first_row + top, first_row + rows, -1, lane);
        }
        if (searches) selected.end(lane);
    }
}
