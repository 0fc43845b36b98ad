// Find repetitions in a stream, by a warp.
#pragma once

#include "encoding/encoding.cuh"

// The table has the last place where a word of four bytes of each hash value was seen.
constexpr u32 HASH_LOG = 12, HASHES = 1 << HASH_LOG;

// Return four bytes. This may read up to seven bytes beyond them.
__device__ inline u32 word_at(const u8* at) {
    const u32* from = (const u32*)((u64)at & ~3ull);
    return __funnelshift_r(from[0], from[1], 8 * ((u64)at & 3));
}

// Return how many bytes at `to` are equal to those at `from`, until `end`.
__device__ inline u32 equal_bytes(const u8* content, u32 from, u32 to, u32 end, u32 lane) {
    for (u32 done = 0;; done += 128) {
        const u32 i = done + 4 * lane;
        const u32 differs = to + i < end ? word_at(content + from + i) ^ word_at(content + to + i) : 0xFF;
        const u32 votes = __ballot_sync(ALL, differs != 0);
        if (votes) {
            const u32 first = __ffs(votes) - 1, bits = __shfl_sync(ALL, __ffs(differs) - 1, first);
            return min(done + 4 * first + bits / 8, end - to);
        }
    }
}

// Call `found` for matches of at least MIN_LENGTH bytes, in ascending order: with the place where the literals before the
// match begin, their number, the offset of the match, and its length. Matches begin before `begins`, and end before or
// at `ends`, which is at least MIN_LENGTH - 1 bytes after `begins`. A match is taken where the first one is found. Stops if
// `found` returns false. Returns whether it never did. `rest` receives the place after the last match.
template <u32 MIN_LENGTH, typename F>
__device__ inline bool find_matches(const u8* content, u32 begins, u32 ends, u32* table, u32 lane, u32& rest, F found) {
    static_assert(MIN_LENGTH % 4 == 0, "words are compared");
    for (u32 i = lane; i < HASHES; i += 32) table[i] = 0;
    __syncwarp();
    rest = 0;
    for (u32 at = 0; at < begins;) {
        const u32 place = at + lane;
        u32 hash = 0, candidate = 0;
        bool equal = false;
        if (place < begins) {
            const u32 word = word_at(content + place);
            hash = word * 2654435761u >> (32 - HASH_LOG);
            candidate = table[hash];
            equal = candidate < place && word_at(content + candidate) == word;
            for (u32 i = 4; i < MIN_LENGTH && equal; i += 4) {
                equal = word_at(content + candidate + i) == word_at(content + place + i);
            }
        }
        const u32 votes = __ballot_sync(ALL, equal), first = votes ? __ffs(votes) - 1 : 31;
        // Not beyond the match: the next search begins after it.
        if (place < begins && lane <= first) atomicMax(&table[hash], place);
        __syncwarp();
        if (!votes) {
            at += 32;
            continue;
        }
        const u32 begin = at + first, from = __shfl_sync(ALL, candidate, first);
        const u32 count = equal_bytes(content, from, begin, ends, lane);
        if (!found(rest, begin - rest, begin - from, count)) return false;
        at = rest = begin + count;
    }
    return true;
}
