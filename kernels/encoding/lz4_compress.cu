// lz4_compress: compresses streams in the block format of LZ4, a warp per stream.
//
// A stream that does not become shorter is stored as it is.
//
// Source: the block format of LZ4 (lz4_Block_format.md).
//
// Launch: a block of 32 threads per stream.

#include "decoding/copies.cuh"
#include "encoding/matches.cuh"

// At the end of a stream, no match begins within the last MARGIN bytes, or ends within the last LAST.
constexpr u32 MARGIN = 12, LAST = 5, MIN_MATCH = 4;

// Return how many bytes follow a token for a number whose highest value in the token is 15.
__device__ inline u32 more_bytes(u32 number) { return number < 15 ? 0 : (number - 15) / 255 + 1; }

// Write these bytes, by a warp.
__device__ inline void put_more(u8* to, u32 number, u32 lane) {
    const u32 count = more_bytes(number);
    for (u32 i = lane; i < count; i += 32) to[i] = i + 1 < count ? 255 : (number - 15) % 255;
}

extern "C" __global__ void __launch_bounds__(32) lz4_compress(const encoding_t given) {
    __shared__ u32 table[HASHES];
    const u32 lane = threadIdx.x, chunk = blockIdx.x / given.streams, number = blockIdx.x % given.streams;
    const u32 length = stream_bytes(given, number);
    const u8* content = given.content + (u64)chunk * chunk_bytes(given) + number * given.length;
    u8* encoded = given.encoded + (u64)blockIdx.x * given.room;
    u32 size = 0, rest = 0;
    // Append literals and, if its length is not 0, a match.
    const auto append = [&](u32 place, u32 literals, u32 offset, u32 match) {
        const u32 code = match ? match - MIN_MATCH : 0;
        const u32 before = 1 + more_bytes(literals), after = match ? 2 + more_bytes(code) : 0;
        if (size + before + literals + after >= length) return false;
        u8* to = encoded + size;
        if (lane == 0) *to = min(literals, 15u) << 4 | min(code, 15u);
        put_more(to + 1, literals, lane);
        to += before;
        copy(to, content + place, literals, lane);
        to += literals;
        if (match) {
            if (lane < 2) to[lane] = offset >> (8 * lane);
            put_more(to + 2, code, lane);
        }
        size += before + literals + after;
        return true;
    };
    const u32 begins = length > MARGIN ? length - MARGIN + 1 : 0, ends = length > LAST ? length - LAST : 0;
    const bool shorter = find_matches<MIN_MATCH>(content, begins, ends, table, lane, rest, append) &&
                         append(rest, length - rest, 0, 0);
    if (lane == 0) given.sizes[blockIdx.x] = shorter ? size : AS_IT_IS;
}
