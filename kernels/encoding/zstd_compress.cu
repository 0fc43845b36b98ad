// zstd_compress: compresses streams into blocks of zstd, a warp per stream.
//
// Long matches become sequences, with zstd's default codes. All other bytes, the literals, get a Huffman code of their
// own. No block needs another one. A block that does not become shorter is stored as it is.
//
// Source: RFC 8878.
//
// Launch: a block of 32 threads per stream.

#include "decoding/copies.cuh"
#include "encoding/bits.cuh"
#include "encoding/matches.cuh"

// Shorter matches cost more than Huffman codes of their bytes. Fewer literals get no code.
constexpr u32 MIN_MATCH = 16, MIN_LITERALS = 64;
// Offsets up to 3 stand for earlier ones. Maximum bytes of a sequence.
constexpr u32 OFFSET_BASE = 3, SEQUENCE_BYTES = 12;

struct shared_t {
    union {
        u32 table[HASHES];
        struct {
            huffman_t huffman;
            fse_t codes[3];
        };
    };
};

// Return whether all bytes are equal.
__device__ inline bool all_equal(const u8* content, u32 length, u32 lane) {
    for (u32 i = lane, left = length; left; i += 32, left -= min(left, 32u)) {
        if (__ballot_sync(ALL, i < length && content[i] != content[0])) return false;
    }
    return true;
}

// Write the literals of a block. Returns their bytes there; 0 if they do not fit into `limit`.
__device__ inline u32 put_literals(shared_t& shared, u8* to, const u8* literals, u32 count, u32 limit, u32 lane) {
    huffman_t& code = shared.huffman;
    for (u32 i = lane; i < 256; i += 32) code.counts[i] = 0;
    __syncwarp();
    for (u32 i = lane; i < count; i += 32) atomicAdd(&code.counts[literals[i]], 1u);
    __syncwarp();
    u32 largest = 0;
    for (u32 i = lane; i < 256; i += 32) largest = max(largest, code.counts[i]);
    const u32 whole = __ballot_sync(ALL, largest == count);
    if (whole && count) {
        if (lane == 0) {
            put(to, 1 | 3 << 2 | count << 4, 3);
            to[3] = literals[0];
        }
        return 4;
    }
    if (count >= MIN_LITERALS) {
        build_huffman(code, lane);
        u32 head = lane == 0 ? put_weights(code, shared.codes[0], to + 5) : 0;
        head = __shfl_sync(ALL, head, 0);
        // Four streams, whose sizes but that of the last one come first.
        const u32 each = (count + 3) / 4;
        u32 sizes[4], own = 0, at = 5 + head + 6, total = at;
        for (u32 q = 0; q < 4; ++q) {
            u32 bits = 0;
            for (u32 i = q * each + lane; i < min(count, (q + 1) * each); i += 32) bits += code.lengths[literals[i]];
            for (int d = 16; d; d >>= 1) bits += __shfl_sync(ALL, bits, (lane + d) & 31);
            sizes[q] = bits / 8 + 1;
            total += sizes[q];
        }
        if (head && total < count + 3 && total < limit) {
            if (lane == 0) {
                put(to, 2 | 3 << 2 | (u64)count << 4 | (u64)(total - 5) << 22, 5);
                for (u32 q = 0; q < 3; ++q) put(to + 5 + head + 2 * q, sizes[q], 2);
            }
            if (lane < 4) {
                for (u32 q = 0; q < lane; ++q) own += sizes[q];
                bits_t bits = {to + at + own, 0, 0};
                const u32 begin = lane * each;
                for (u32 i = min(count, begin + each); i > begin;) {
                    const u32 byte = literals[--i];
                    bits.add(code.codes[byte], code.lengths[byte]);
                    bits.flush();
                }
                bits.close(true);
            }
            return total;
        }
    }
    if (3 + count >= limit) return 0;
    if (lane == 0) put(to, 0 | 3 << 2 | count << 4, 3);
    copy(to + 3, literals, count, lane);
    return 3 + count;
}

// Write the sequences of a block, by one thread. Returns their bytes; 0 if they do not fit into `limit`.
__device__ inline u32 put_sequences(const fse_t* codes, u8* to, const u64* sequences, u32 count, u32 limit) {
    if (limit < 8) return 0;
    u8* at = to;
    if (count < 128) {
        *at++ = count;
    } else if (count < 0x7F00) {
        *at++ = (count >> 8) + 128;
        *at++ = count;
    } else {
        *at++ = 255;
        put(at, count - 0x7F00, 2);
        at += 2;
    }
    if (!count) return 1;
    *at++ = 0;  // the default codes
    bits_t bits = {at, 0, 0};
    u32 states[3];
    for (u32 i = count; i-- > 0;) {
        if (bits.at - to + SEQUENCE_BYTES >= limit) return 0;
        const u32 numbers[3] = {(u32)sequences[i] & MAX_LITERALS, (u32)(sequences[i] >> OFFSET_AT) + OFFSET_BASE,
                                (u32)(sequences[i] >> LENGTH_AT) & MAX_LENGTH};
        u32 symbols[3];
        for (int kind = 0; kind < 3; ++kind) {
            symbols[kind] = kind == OF ? highest(numbers[OF]) : symbol_of(kind, numbers[kind]);
        }
        if (i == count - 1) {
            for (int kind = 0; kind < 3; ++kind) states[kind] = codes[kind].begin(symbols[kind]);
        } else {
            codes[OF].add(bits, states[OF], symbols[OF]);
            codes[ML].add(bits, states[ML], symbols[ML]);
            codes[LL].add(bits, states[LL], symbols[LL]);
            bits.flush();
        }
        for (int kind : {LL, ML}) {
            const u32 of = code_of(kind, symbols[kind]);
            bits.add(numbers[kind] - (of & 0xFFFFFF), of >> 24);
            bits.flush();
        }
        bits.add(numbers[OF], symbols[OF]);
        bits.flush();
    }
    codes[ML].end(bits, states[ML]);
    codes[OF].end(bits, states[OF]);
    codes[LL].end(bits, states[LL]);
    bits.close(true);
    return bits.at - to;
}

extern "C" __global__ void __launch_bounds__(32) zstd_compress(const encoding_t given) {
    __shared__ shared_t shared;
    const u32 lane = threadIdx.x, chunk = blockIdx.x / given.streams, number = blockIdx.x % given.streams;
    const u32 length = stream_bytes(given, number);
    const u8* content = given.content + (u64)chunk * chunk_bytes(given) + number * given.length;
    u8* encoded = given.encoded + (u64)blockIdx.x * given.room;
    u64* sequences = (u64*)(given.sequences + (u64)blockIdx.x * given.room);
    u8* literals = given.literals + (u64)blockIdx.x * given.room;
    u32& size = given.sizes[blockIdx.x];
    if (all_equal(content, length, lane)) {
        if (lane == 0) {
            encoded[0] = content[0];
            size = EQUAL | 1;
        }
        return;
    }
    u32 found = 0, rest = 0, count = 0;
    const u32 begins = length >= MIN_MATCH ? length - MIN_MATCH + 1 : 0;
    const auto append = [&](u32 place, u32 before, u32 offset, u32 match) {
        if (lane == 0) sequences[found] = (u64)offset << OFFSET_AT | (u64)match << LENGTH_AT | before;
        ++found;
        copy(literals + count, content + place, before, lane);
        count += before;
        return true;
    };
    find_matches<MIN_MATCH>(content, begins, length, shared.table, lane, rest, append);
    copy(literals + count, content + rest, length - rest, lane);
    count += length - rest;
    __syncwarp();
    const u32 done = put_literals(shared, encoded, literals, count, length, lane);
    __syncwarp();
    if (found && lane < 3) {
        if (lane == LL) shared.codes[LL].build(DEFAULT_LL, 36, DEFAULT_LOG[LL]);
        if (lane == OF) shared.codes[OF].build(DEFAULT_OF, 29, DEFAULT_LOG[OF]);
        if (lane == ML) shared.codes[ML].build(DEFAULT_ML, 53, DEFAULT_LOG[ML]);
    }
    __syncwarp();
    if (lane == 0) {
        const u32 more = done ? put_sequences(shared.codes, encoded + done, sequences, found, length - done) : 0;
        size = more && done + more < length ? done + more : AS_IT_IS;
    }
}
