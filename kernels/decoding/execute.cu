// execute: appends the literals and matches of streams, whose blocks `zstd_entropy` or `lz4_parse` has decoded.
//
// A warp per stream appends 32 sequences at a time. A match repeats earlier content, and is copied as soon as all
// matches that it repeats are there. The last content is kept in shared memory, since most matches repeat that.
//
// Launch: blocks of 32 threads, as many as can work at a time.

#include "decoding/copies.cuh"

// Copies of up to so many bytes are done by one thread.
constexpr u32 SHORT_LITERALS = 8, SHORT_MATCH = 64;
// Bytes of content in shared memory, and maximum bytes of 32 sequences that are appended there.
constexpr u32 RECENT = 8 << 10, FEW = 2 << 10;

__device__ inline u32 resolved(u32 offset, const u32* offsets) {
    if (!(offset & SYMBOLIC)) return offset;
    const u32 base = offsets[offset >> 26 & 3], less = offset & (1u << 26) - 1;
    return base > less ? base - less : 0;
}

// The last content of a stream, in shared memory, where it is written and read much faster. Content from `base` on is
// there, and content before `flushed` is in `target`.
struct recent_t {
    u8 *bytes, *target;
    u32 base, flushed;

    __device__ u8& at(u32 place) const { return bytes[place & RECENT - 1]; }
    __device__ u8 read(u32 place) const { return place < base ? target[place] : at(place); }
    // Copy what comes before `end` to `target`.
    __device__ void flush(u32 end, u32 lane) {
        __syncwarp();
        while (flushed < end) {
            const u32 from = flushed & RECENT - 1, count = min(end - flushed, RECENT - from);
            copy(target + flushed, bytes + from, count, lane);
            flushed += count;
        }
        __syncwarp();
    }
};

// 32 sequences, one per thread: where the literals of each begin, their number, where the content of the match belongs,
// its length, and its offset.
struct group_t {
    u32 literal, count, match, length, offset;
};

// Copy the match of a thread, byte by byte, or eight bytes at a time.
__device__ inline void repeat(const recent_t& recent, const group_t& own) {
    u32 from = own.match - own.offset, to = own.match, left = own.length;
    if (own.offset >= 8) {
        for (; left >= 8; left -= 8, from += 8, to += 8) {
            u8 bytes[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) bytes[k] = recent.read(from + k);
#pragma unroll
            for (int k = 0; k < 8; ++k) recent.at(to + k) = bytes[k];
        }
    }
    for (; left; --left) recent.at(to++) = recent.read(from++);
}

// Return the matches of other threads that the match of this thread repeats, as a mask. `match` and `stop`, where they
// begin and end, do not decrease from thread to thread.
__device__ inline u32 needed(const group_t& own, u32 start, u32 lane) {
    const u32 source = own.match - own.offset, stop = own.match + own.length;
    const u32 end = min(source + own.length, own.match);
    if (!__ballot_sync(ALL, own.length && end > start)) return 0;
    u32 before = 0, begun = 0;  // matches that end before the source, and that begin before its end
    for (int step = 16; step; step >>= 1) {
        if (__shfl_sync(ALL, stop, before + step - 1) <= source) before += step;
        if (__shfl_sync(ALL, own.match, begun + step - 1) < end) begun += step;
    }
    return (1u << begun) - 1 & ~((1u << before) - 1) & (1u << lane) - 1;
}

// Append 32 sequences of few bytes, by way of shared memory. `start` is where their content begins.
__device__ inline void append(recent_t& recent, const block_t& block, const group_t& own, u32 start, u32 lane) {
    const u8* literals = block.literals;
    const u32 step = block.literal_step;
    if (own.count <= SHORT_LITERALS) {
        for (u32 j = 0; j < own.count; ++j) recent.at(own.match - own.count + j) = literals[(own.literal + j) * step];
    }
    for (u32 left = __ballot_sync(ALL, own.count > SHORT_LITERALS); left; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const u32 n = __shfl_sync(ALL, own.count, owner), from = __shfl_sync(ALL, own.literal, owner);
        const u32 to = __shfl_sync(ALL, own.match, owner) - n;
        for (u32 j = lane; j < n; j += 32) recent.at(to + j) = literals[(from + j) * step];
    }
    const u32 needs = needed(own, start, lane);
    __syncwarp();
    for (u32 missing = __ballot_sync(ALL, own.length > 0); missing;) {
        const bool ready = (missing >> lane & 1) && !(needs & missing);
        if (ready && own.length <= SHORT_MATCH) repeat(recent, own);
        for (u32 left = __ballot_sync(ALL, ready && own.length > SHORT_MATCH); left; left &= left - 1) {
            const int owner = __ffs(left) - 1;
            const u32 n = __shfl_sync(ALL, own.length, owner), o = __shfl_sync(ALL, own.offset, owner);
            const u32 to = __shfl_sync(ALL, own.match, owner);
            for (u32 j = lane; j < n; j += 32) recent.at(to + j) = recent.read(to - o + (o < n ? j % o : j));
        }
        missing &= ~__ballot_sync(ALL, ready);
        __syncwarp();
    }
}

// Append 32 sequences of many bytes, one after the other.
__device__ inline void append_long(const block_t& block, u8* target, const group_t& own, u32 lane) {
    for (int owner = 0; owner < 32; ++owner) {
        const u32 count = __shfl_sync(ALL, own.count, owner), from = __shfl_sync(ALL, own.literal, owner);
        const u32 n = __shfl_sync(ALL, own.length, owner), o = __shfl_sync(ALL, own.offset, owner);
        u8* to = target + __shfl_sync(ALL, own.match, owner);
        if (block.literal_step) {
            copy(to - count, block.literals + from, count, lane);
        } else if (count) {
            fill(to - count, block.literals[0], count, lane);
        }
        __syncwarp();
        if (!n) continue;
        const u8* source = to - o;
        if (o >= n) {
            copy(to, source, n, lane);
        } else if (o == 1) {
            fill(to, source[0], n, lane);
        } else {  // the match repeats its own first bytes
            for (u32 j = lane, k = lane % o; j < n; j += 32, k = (k + 32) % o) to[j] = source[k];
        }
        __syncwarp();
    }
}

// Append the content of a compressed block to a stream that has `at` bytes. Returns whether all matches are valid.
__device__ inline bool append_block(const batch_t& batch, const block_t& block, recent_t& recent, u32 at, u32* offsets,
                                    u32 lane) {
    const u64* sequences = batch.sequences + block.first_sequence;
    u32 literal = 0;
    u64 next = lane < block.sequences ? sequences[lane] : 0;
    recent.base = recent.flushed = at;
    for (u32 i = 0; i < block.sequences; i += 32) {
        const u64 sequence = next;
        next = i + 32 + lane < block.sequences ? sequences[i + 32 + lane] : 0;
        group_t own;
        own.count = sequence & MAX_LITERALS;
        own.length = sequence >> LENGTH_AT & MAX_LENGTH;
        own.offset = resolved((u32)(sequence >> OFFSET_AT), offsets);
        // The literals and the bytes of this and the sequences before it.
        u32 upto = own.count, total = own.count + own.length;
        for (int d = 1; d < 32; d <<= 1) {
            const u32 a = __shfl_up_sync(ALL, upto, d), b = __shfl_up_sync(ALL, total, d);
            if (lane >= d) upto += a, total += b;
        }
        own.literal = literal + upto - own.count;
        if (block.places && i + lane < block.sequences) own.literal = block.places[i + lane];
        own.match = at + total - own.length;
        if (!__all_sync(ALL, !own.length || (own.offset && own.offset <= own.match))) return false;
        literal += __shfl_sync(ALL, upto, 31);
        const u32 all = __shfl_sync(ALL, total, 31);
        if (all <= FEW) {
            if (at + all - recent.flushed > RECENT / 2) recent.flush(at, lane);
            if (at + all > recent.base + RECENT) recent.base = at + all - RECENT;
            append(recent, block, own, at, lane);
        } else {
            recent.flush(at, lane);
            append_long(block, recent.target, own, lane);
            recent.base = recent.flushed = at + all;
        }
        at += all;
    }
    recent.flush(at, lane);
    const u32 rest = block.literal_count - literal;
    if (block.literal_step) {
        copy(recent.target + at, block.literals + literal, rest, lane);
    } else if (rest) {
        fill(recent.target + at, block.literals[0], rest, lane);
    }
    u32 last[3];
    bool valid = true;
    for (int i = 0; i < 3; ++i) {
        last[i] = resolved(block.offsets[i], offsets);
        valid = valid && last[i];
    }
    for (int i = 0; i < 3; ++i) offsets[i] = last[i];
    return valid;
}

extern "C" __global__ void __launch_bounds__(32) execute(const batch_t batch) {
    __shared__ __align__(16) u8 bytes[RECENT];
    const u32 lane = threadIdx.x, streams = min(batch.counters->streams, batch.max_streams);
    for (;;) {
        u32 number = lane == 0 ? atomicAdd(&batch.counters->executed, 1) : 0;
        number = __shfl_sync(ALL, number, 0);
        if (number >= streams) return;
        const stream_t stream = batch.streams[number];
        if (stream.raw) continue;
        u32 status = lane == 0 ? batch.statuses[stream.chunk] : 0;
        status = __shfl_sync(ALL, status, 0);
        if (status) continue;
        recent_t recent = {bytes, stream.target, 0, 0};
        u32 offsets[3] = {1, 4, 8};
        u64 at = 0;
        bool fine = true;
        for (u32 i = 0; fine && i < stream.blocks; ++i) {
            const block_t block = batch.blocks[stream.first + i];
            if (at + block.content > stream.length) {
                fine = false;
            } else if (block.kind == RAW) {
                copy(stream.target + at, block.source, block.content, lane);
            } else if (block.kind == RLE) {
                fill(stream.target + at, block.source[0], block.content, lane);
            } else {
                fine = append_block(batch, block, recent, (u32)at, offsets, lane);
            }
            __syncwarp();
            at += block.content;
        }
        if (lane == 0 && (!fine || at != stream.length)) batch.statuses[stream.chunk] = 4;
    }
}
