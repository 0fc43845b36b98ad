// Write the bits of a zstd stream, and build its FSE and Huffman codes (RFC 8878, section 4).
#pragma once

#include "encoding/encoding.cuh"

#include "decoding/zstd_tables.cuh"

// Bits that are written from the start of a stream on. The reader begins at its end.
struct bits_t {
    u8* at;
    u64 hold;
    u32 held;

    // Add the lowest `count` bits of a value, at most 32. There must be room for them: see `flush`.
    __device__ void add(u32 value, u32 count) {
        hold |= (u64)(value & (u32)((1ull << count) - 1)) << held;
        held += count;
    }
    // Leave at most 31 bits in `hold`.
    __device__ void flush() {
        if (held < 32) return;
        for (int i = 0; i < 4; ++i) at[i] = (u8)(hold >> (8 * i));
        at += 4;
        hold >>= 32;
        held -= 32;
    }
    // Write what is left. `marked`: add a bit first that marks the end.
    __device__ void close(bool marked) {
        if (marked) add(1, 1);
        for (; held > 0; held = held > 8 ? held - 8 : 0, hold >>= 8) *at++ = (u8)hold;
    }
};

// An FSE code of at most 64 states: of each symbol, what gives the number of bits and the next state.
struct fse_t {
    u16 next[64];
    u32 bits[53];
    short state[53];
    u8 symbols[64];
    int log;

    // Build the code. `counts` has the number of states of each symbol, -1 for "less than one".
    template <typename T>
    __device__ void build(const T* counts, int count, int of_log) {
        log = of_log;
        const u32 size = 1u << log;
        u32 high = size, at = 0;
        for (int s = 0; s < count; ++s) {
            if (counts[s] == -1) symbols[--high] = s;
        }
        for (int s = 0; s < count; ++s) {
            for (int i = 0; i < counts[s]; ++i) {
                symbols[at] = s;
                do at = (at + (size >> 1) + (size >> 3) + 3) & (size - 1);
                while (at >= high);
            }
        }
        u32 total = 0;
        for (int s = 0; s < count; ++s) {
            const int states = counts[s] == -1 ? 1 : counts[s];
            state[s] = (short)total;
            total += states;
            const int most = states > 1 ? log - highest(states - 1) : log;
            bits[s] = states ? ((u32)most << 16) - ((u32)states << most) : 0;
        }
        for (u32 u = 0; u < size; ++u) next[state[symbols[u]]++] = size + u;
        for (int s = 0; s < count; ++s) state[s] -= 2 * (counts[s] == -1 ? 1 : counts[s]);
    }
    // Return the first state of a stream whose last symbol this is.
    __device__ u32 begin(u32 symbol) const {
        const u32 count = (bits[symbol] + (1 << 15)) >> 16;
        return next[(((count << 16) - bits[symbol]) >> count) + state[symbol]];
    }
    __device__ void add(bits_t& to, u32& current, u32 symbol) const {
        const u32 count = (current + bits[symbol]) >> 16;
        to.add(current, count);
        current = next[(current >> count) + state[symbol]];
    }
    __device__ void end(bits_t& to, u32 current) const { to.add(current, log); }
};

// Return the code of a number of literals or of a length: the highest one whose least number is not greater.
__device__ inline u32 symbol_of(int kind, u32 number) {
    u32 low = 0;
    for (u32 step = 32; step; step >>= 1) {
        const u32 tried = low + step;
        if (tried <= (u32)MAX_SYMBOL[kind] && (code_of(kind, tried) & 0xFFFFFF) <= number) low = tried;
    }
    return low;
}

// A Huffman code of bytes: of each byte, its number of bits (0 if it is absent) and its code.
struct huffman_t {
    u32 counts[256];
    u8 lengths[256];
    u16 codes[256];
    u32 longest;
};

// Return in how many of 2^HUFFMAN_LOG entries of a table a byte with this count begins, if `of` bytes divide `entries`.
__device__ inline u32 share(u32 count, u32 entries, u32 of) {
    const u32 exact = (u32)((u64)count * entries / of);
    return exact ? 1u << highest(exact) : 0;
}

// Build a code for the bytes that `counts` has, of which at least two are present, by a warp. Its lengths are those of
// Shannon's code, whose rest is then given to those bytes that gain most by it.
__device__ inline void build_huffman(huffman_t& code, u32 lane) {
    constexpr u32 EACH = 8;  // bytes of a thread: lane + 32 k
    u32 own[EACH], entries[EACH], total = 0;
    for (u32 k = 0; k < EACH; ++k) {
        own[k] = code.counts[lane + 32 * k];
        total += own[k];
    }
    const auto sum = [&](u32 value) {
        for (int d = 16; d; d >>= 1) value += __shfl_sync(ALL, value, (lane + d) & 31);
        return value;
    };
    total = sum(total);
    // Rare bytes get one entry each, and others share the rest.
    u32 left = 1u << HUFFMAN_LOG, of = total, rare = 0;
    for (;;) {
        u32 now = 0, less = 0;
        for (u32 k = 0; k < EACH; ++k) {
            if (own[k] && !share(own[k], left, of)) ++now, less += own[k];
        }
        now = sum(now);
        less = sum(less);
        if (now == rare) break;
        rare = now;
        left = (1u << HUFFMAN_LOG) - rare;
        of = total - less;
    }
    u32 used = 0;
    for (u32 k = 0; k < EACH; ++k) {
        entries[k] = own[k] ? max(1u, share(own[k], left, of)) : 0;
        used += entries[k];
    }
    for (u32 rest = (1u << HUFFMAN_LOG) - sum(used); rest;) {
        u32 best = 0, at = 0;  // gain per entry, and the byte
        for (u32 k = 0; k < EACH; ++k) {
            const u32 gain = entries[k] && entries[k] <= rest ? (own[k] << 11) / entries[k] + 1 : 0;
            if (gain > best) best = gain, at = k;
        }
        u64 most = (u64)best << 8 | lane | at << 5;
        for (int d = 16; d; d >>= 1) {
            const u64 other = __shfl_sync(ALL, most, (lane + d) & 31);
            most = other > most ? other : most;
        }
        const u32 byte = most & 255;
        u32 given = 0;
        for (u32 k = 0; k < EACH; ++k) {
            if (byte == lane + 32 * k) given = entries[k], entries[k] *= 2;
        }
        rest -= __shfl_sync(ALL, given, byte & 31);
    }
    u32 longest = 0;
    for (u32 k = 0; k < EACH; ++k) {
        const u32 length = entries[k] ? HUFFMAN_LOG - highest(entries[k]) : 0;
        code.lengths[lane + 32 * k] = length;
        longest = max(longest, length);
    }
    for (int d = 16; d; d >>= 1) longest = max(longest, __shfl_sync(ALL, longest, (lane + d) & 31));
    __syncwarp();
    if (lane == 0) {
        code.longest = longest;
        u32 ranks[HUFFMAN_LOG + 2] = {}, next = 0;
        for (int s = 0; s < 256; ++s) ++ranks[code.lengths[s]];
        for (int n = longest; n > 0; --n) {
            const u32 count = ranks[n];
            ranks[n] = next;
            next = (next + count) >> 1;
        }
        for (int s = 0; s < 256; ++s) {
            if (code.lengths[s]) code.codes[s] = ranks[code.lengths[s]]++;
        }
    }
    __syncwarp();
}

// Write the description of a Huffman code, by one thread. Returns its bytes; 0 if it would have too many.
__device__ inline u32 put_weights(const huffman_t& code, fse_t& fse, u8* to) {
    const auto weight = [&](int s) { return code.lengths[s] ? code.longest + 1 - code.lengths[s] : 0; };
    int count = 255;  // of the weights; that of the last byte follows from the others
    while (!code.lengths[count]) --count;
    if (count <= 128) {
        to[0] = 127 + count;
        for (int s = 0; s < count; s += 2) to[1 + s / 2] = weight(s) << 4 | (s + 1 < count ? weight(s + 1) : 0);
        return 1 + (count + 1) / 2;
    }
    constexpr int LOG = 6, SIZE = 1 << LOG;
    int shares[HUFFMAN_LOG + 1] = {}, kinds = 0, sum = 0, largest = 0;
    for (int s = 0; s < count; ++s) {
        ++shares[weight(s)];
        kinds = max(kinds, (int)weight(s) + 1);
    }
    for (int w = 0; w < kinds; ++w) {
        shares[w] = max(1, shares[w] * SIZE / count);
        sum += shares[w];
        if (shares[w] > shares[largest]) largest = w;
    }
    shares[largest] += SIZE - sum;
    bits_t bits = {to + 1, 0, 0};
    bits.add(LOG - 5, 4);
    for (int w = 0, remaining = SIZE + 1; w < kinds; ++w) {
        const int width = highest(remaining) + 1, half = 1 << (width - 1), short_ones = 2 * half - 1 - remaining;
        int value = shares[w] + 1;
        remaining -= shares[w];
        if (value >= half) value += short_ones;
        bits.add(value, width - (value < short_ones));
        bits.flush();
    }
    bits.close(false);
    fse.build(shares, kinds, LOG);
    bits.hold = bits.held = 0;
    u32 states[2] = {0, 0};
    for (int s = count - 1; s >= 0; --s) {
        if (s >= count - 2) {
            states[s & 1] = fse.begin(weight(s));
        } else {
            fse.add(bits, states[s & 1], weight(s));
            bits.flush();
        }
    }
    fse.end(bits, states[1]);
    fse.end(bits, states[0]);
    bits.close(true);
    const u32 size = bits.at - to - 1;
    to[0] = size;
    return size < 128 ? 1 + size : 0;
}
