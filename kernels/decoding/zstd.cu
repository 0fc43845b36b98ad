// zstd: decodes the blocks of many zstd streams of one frame each (RFC 8878), for `execute`.
//
// A frame consists of blocks of up to 128 KiB of content. A block that is compressed has literals, which a Huffman
// code compresses, and sequences: triples of a number of literals to append, and an offset and a length of a match,
// that is of earlier content to append. FSE, a kind of arithmetic code, compresses these.
//
//   zstd_walk     a thread per stream finds its blocks, and reserves memory for their literals and sequences
//   zstd_entropy  a warp per block decodes the sequences, another one the literals. Blocks are independent in this: all
//                 that one takes from an earlier one is where this describes its tables, and offsets, see streams.cuh
//
// Nothing in a stream is trusted. All loops are bounded, and all addresses are checked. A stream that is damaged, or
// unusual, sets the status of its chunk. Streams with a checksum of the content are refused.
//
// Launch: blocks of 32 threads, as many as can work at a time.

#include "decoding/streams.cuh"
#include "decoding/zstd_tables.cuh"

constexpr u32 MAX_BLOCK = 128 << 10, NONE = 0xFFFFFFFF;
constexpr u32 TREELESS = 3;  // a kind of literals
// Modes of an FSE table.
constexpr u32 ONE_SYMBOL = 1, DESCRIBED = 2, REPEATED = 3;  // 0 stands for the default table
// Where the tables of the kinds begin, and their end.
__device__ const u32 TABLE_AT[3] = {0, 512, 768};
constexpr u32 TABLES_END = 1280;

// Check the header of a frame. Returns its bytes; 0 if it is damaged or unusual. `most` receives the maximum bytes of
// a block.
__device__ inline u32 frame_header(const u8* source, u64 size, u64 length, u32& most) {
    if (size < 9 || read(source, 4) != 0xFD2FB528) return 0;
    const u32 flags = source[4], single = flags >> 5 & 1;
    // Bits 0 and 1 tell of a dictionary, 2 of a checksum, and 3 is reserved.
    if (flags & 15) return 0;
    u32 at = 5, width = 1u << (flags >> 6);
    if (width == 1) width = single;
    u64 window = length;
    if (!single) {
        const u32 log = 10 + (source[at] >> 3);
        if (log > 27) return 0;
        window = (1ull << log) + ((1ull << log) >> 3) * (source[at] & 7);
        ++at;
    }
    if (!width || at + width + 3 > size) return 0;
    u64 stated = width == 2 ? 256 : 0;
    for (u32 i = 0; i < width; ++i) stated += (u64)source[at + i] << (8 * i);
    if (stated != length) return 0;
    most = window < MAX_BLOCK ? (u32)window : MAX_BLOCK;
    return at + width;
}

// Read the header of the literals of a block.
__device__ inline bool literals_header(block_t& block) {
    const u8* at = block.source;
    if (block.size < 2) return false;
    const u32 kind = at[0] & 3, format = at[0] >> 2 & 3;
    block.literal_kind = kind;
    block.literal_step = kind != RLE;
    block.parts = 1;
    if (kind == RAW || kind == RLE) {
        block.literal_head = format == 1 ? 2 : format == 3 ? 3 : 1;
        if (block.literal_head > block.size) return false;
        block.literal_count = read(at, block.literal_head) >> (format & 1 ? 4 : 3);
        block.literal_size = kind == RLE ? 1 : block.literal_count;
    } else {
        block.literal_head = format < 2 ? 3 : format + 2;
        if (block.literal_head > block.size) return false;
        const u64 head = read(at, block.literal_head < 4 ? 3 : 4) | (block.literal_head == 5 ? (u64)at[4] << 32 : 0);
        const u32 bits = format < 2 ? 10 : format == 2 ? 14 : 18, mask = (1u << bits) - 1;
        block.literal_count = (u32)(head >> 4) & mask;
        block.literal_size = (u32)(head >> (4 + bits)) & mask;
        block.parts = format == 0 ? 1 : 4;
        if (!block.literal_count || !block.literal_size || (block.parts == 4 && block.literal_count < 6)) return false;
    }
    block.literals = at + block.literal_head;
    return block.literal_count <= block.most && block.literal_head + block.literal_size < block.size;
}

// Read the number of the sequences of a block, and find their modes.
__device__ inline bool sequences_header(block_t& block) {
    u32 at = block.literal_head + block.literal_size;
    const u8* p = block.source + at;
    const u32 rest = block.size - at;
    const u32 width = p[0] < 128 ? 1 : p[0] < 255 ? 2 : 3;
    if (width > rest) return false;
    block.sequences = width == 1 ? p[0] : width == 2 ? (p[0] - 128) << 8 | p[1] : 0x7F00 + read(p + 1, 2);
    block.sequences_at = at + width;
    if (!block.sequences) return width == 1 && rest == 1;
    return block.sequences <= block.most / 3 && rest > width && (p[width] & 3) == 0;
}

// Walk through the blocks of a stream. `count` receives their number. Their sequences and literals are added to
// `sequences` and `literals`, which are where the first ones shall be. The blocks are written to `blocks` from `first`
// on, unless it is null.
__device__ inline bool walk(const batch_t& batch, u32 number, block_t* blocks, u32 first, u32& count, u64& sequences,
                            u64& literals) {
    const u8* source = batch.streams[number].source;
    const u64 size = batch.streams[number].size, length = batch.streams[number].length;
    u32 most;
    u64 at = frame_header(source, size, length, most);
    if (!at) return false;
    u32 huffman = NONE, tables[3] = {NONE, NONE, NONE};
    for (count = 0;;) {
        if (at + 3 > size || count == batch.max_blocks || sequences > batch.max_sequences) return false;
        const u32 head = read(source + at, 3);
        block_t block = {};
        block.source = source + at + 3;
        block.stream = number;
        block.most = most;
        block.kind = head >> 1 & 3;
        block.content = head >> 3;
        block.size = block.kind == RLE ? 1 : block.content;
        at += 3 + block.size;
        if (block.kind > COMPRESSED || block.content > most || at > size) return false;
        if (block.kind == COMPRESSED) {
            if (!literals_header(block) || !sequences_header(block)) return false;
            const u32 here = first + count;
            if (block.literal_kind == COMPRESSED) huffman = here;
            if (block.literal_kind == TREELESS && huffman == NONE) return false;
            block.huffman = huffman;
            if (block.sequences) {
                const u32 modes = block.source[block.sequences_at];
                for (int k = 0; k < 3; ++k) {
                    if ((modes >> (6 - 2 * k) & 3) != REPEATED) tables[k] = here;
                    if (tables[k] == NONE) return false;
                    block.tables[k] = tables[k];
                }
            }
            block.first_sequence = sequences;
            sequences += block.sequences;
            if (block.literal_kind >= COMPRESSED) {
                block.literals = batch.literals + literals;
                literals += block.literal_count;
            }
        }
        if (blocks) blocks[first + count] = block;
        ++count;
        if (head & 1) return at == size;
    }
}

extern "C" __global__ void __launch_bounds__(32) zstd_walk(const batch_t batch) {
    const u32 streams = min(batch.counters->streams, batch.max_streams);
    for (u32 number = blockIdx.x * 32 + threadIdx.x; number < streams; number += gridDim.x * 32) {
        stream_t& stream = batch.streams[number];
        if (stream.raw) continue;
        u32 count = 0;
        u64 sequences = 0, literals = 0;
        bool fine = walk(batch, number, nullptr, 0, count, sequences, literals);
        if (fine) {
            u64 sequence = atomicAdd(&batch.counters->sequences, sequences);
            u64 literal = atomicAdd(&batch.counters->literals, literals);
            fine = sequence + sequences <= batch.max_sequences && literal + literals <= batch.max_literals;
            if (fine) {
                const u32 first = atomicAdd(&batch.counters->blocks, count);
                fine = (u64)first + count <= batch.max_blocks;
                if (fine) {
                    stream.first = first;
                    stream.blocks = count;
                    walk(batch, number, batch.blocks, first, count, sequence, literal);
                } else {  // what is left has nothing to decode
                    for (u32 i = first; i < batch.max_blocks; ++i) batch.blocks[i].kind = RAW;
                }
            }
        }
        if (!fine) batch.statuses[stream.chunk] = 2;
    }
}

// Shared memory of a warp: the FSE tables of the sequences, or the Huffman table and what it is built of. An entry of
// the former has the code's entry in `LL_CODES` or `ML_CODES` in its upper half.
struct shared_t {
    room_t room;
    union {
        u64 tables[TABLES_END];
        struct {
            u16 codes[1 << HUFFMAN_LOG];
            u32 table[1 << 6];
            u8 weights[256];
            u32 ranks[HUFFMAN_LOG + 2];
        } huffman;
    };
    u32 logs[3];
};

// Read the description of a table of sequences at `at` of a block, and build it unless `table` is null. Returns its
// bytes, or NONE if it is damaged.
__device__ inline u32 describe(const block_t& block, u32 at, int kind, u32 mode, u64* table, u32* log, room_t& room) {
    const u8* p = block.source + at;
    const u32 rest = block.size - at;
    if (mode == REPEATED) return 0;
    if (mode == ONE_SYMBOL) {
        if (!rest || p[0] > MAX_SYMBOL[kind]) return NONE;
        if (table) table[0] = p[0], *log = 0;
        return 1;
    }
    int symbols, bits;
    u32 bytes = 0;
    if (mode == DESCRIBED) {
        bytes = read_counts(p, rest, MAX_SYMBOL[kind], MAX_LOG[kind], room.counts, symbols, bits);
        if (!bytes) return NONE;
    } else {
        const signed char* counts = kind == LL ? DEFAULT_LL : kind == OF ? DEFAULT_OF : DEFAULT_ML;
        symbols = kind == LL ? 36 : kind == OF ? 29 : 53;
        bits = DEFAULT_LOG[kind];
        for (int s = 0; s < symbols; ++s) room.counts[s] = counts[s];
    }
    if (table) {
        if (!build_table(room.counts, symbols, bits, table, room.following)) return NONE;
        *log = bits;
    }
    return bytes;
}

// Build the tables of the sequences of a block. Returns where their bits begin in the block, or NONE.
__device__ inline u32 sequence_tables(const batch_t& batch, const block_t& block, shared_t& shared) {
    for (int kind = 0; kind < 3; ++kind) {
        const block_t& from = batch.blocks[block.tables[kind]];
        const u32 modes = from.source[from.sequences_at];
        u32 at = from.sequences_at + 1;
        for (int k = 0; k <= kind; ++k) {
            const bool build = k == kind;
            const u32 bytes = describe(from, at, k, modes >> (6 - 2 * k) & 3, build ? shared.tables + TABLE_AT[k] : nullptr,
                                       &shared.logs[k], shared.room);
            if (bytes == NONE) return NONE;
            at += bytes;
        }
    }
    u32 at = block.sequences_at + 1;
    const u32 modes = block.source[block.sequences_at];
    for (int k = 0; k < 3; ++k) {
        const u32 bytes = describe(block, at, k, modes >> (6 - 2 * k) & 3, nullptr, nullptr, shared.room);
        if (bytes == NONE) return NONE;
        at += bytes;
    }
    return at;
}

// Decode the sequences of a block, by a warp. Only the first thread returns whether all went well.
__device__ inline bool decode_sequences(const batch_t& batch, block_t& block, shared_t& shared, u32 lane) {
    u32 offsets[3] = {SYMBOLIC, SYMBOLIC | 1 << 26, SYMBOLIC | 2 << 26};
    const u32 literal_count = block.literal_count, most = block.most;
    u32 content = literal_count, literals = 0, at = 0;
    if (block.sequences) {
        if (lane == 0) at = sequence_tables(batch, block, shared);
        at = __shfl_sync(ALL, at, 0);
        if (at >= block.size) return false;
        for (int kind = LL; kind <= ML; kind += ML - LL) {
            u64* table = shared.tables + TABLE_AT[kind];
            const u32 states = 1u << shared.logs[kind];
            for (u32 i = lane; i < states; i += 32) table[i] |= (u64)code_of(kind, table[i] & 255) << 32;
        }
        __syncwarp();
    }
    if (lane) return true;
    if (block.sequences) {
        backward_t bits;
        if (!bits.open(block.source + at, block.size - at)) return false;
        const u64 *lls = shared.tables + TABLE_AT[LL], *ofs = shared.tables + TABLE_AT[OF];
        const u64* mls = shared.tables + TABLE_AT[ML];
        u32 ll_state = bits.take(shared.logs[LL]);
        u32 of_state = bits.take(shared.logs[OF]);
        u32 ml_state = bits.take(shared.logs[ML]);
        u64* found = batch.sequences + block.first_sequence;
        for (u32 left = block.sequences; left--;) {
            const u64 ll = lls[ll_state], ml = mls[ml_state];
            const u32 of = (u32)ofs[of_state], code = of & 255;
            if (code > 27) return false;
            // The bits of the offset, the length, the number of literals, and, unless this is the last one, of the
            // next states.
            const u32 ml_bits = (u32)(ml >> 56), ll_bits = (u32)(ll >> 56);
            const u32 ll_next = left ? (u32)ll >> 8 & 255 : 0, ml_next = left ? (u32)ml >> 8 & 255 : 0;
            const u32 of_next = left ? of >> 8 & 255 : 0, next = ll_next + ml_next + of_next;
            u32 window = bits.window();
            const bool together = code + ml_bits + ll_bits + next <= 32;
            const u32 value = (1u << code) + off(window, code);
            if (!together) {
                bits.skip(code);
                window = bits.window();
            }
            const u32 length = ((u32)(ml >> 32) & 0xFFFFFF) + off(window, ml_bits);
            const u32 count = ((u32)(ll >> 32) & 0xFFFFFF) + off(window, ll_bits);
            if (!together) {
                bits.skip(ml_bits + ll_bits);
                window = bits.window();
            }
            ll_state = ((u32)ll >> 16) + off(window, ll_next);
            ml_state = ((u32)ml >> 16) + off(window, ml_next);
            of_state = (of >> 16) + off(window, of_next);
            bits.skip(together ? code + ml_bits + ll_bits + next : next);
            u32 offset;
            if (value > 3) {
                offset = value - 3;
                offsets[2] = offsets[1];
                offsets[1] = offsets[0];
            } else {
                const u32 index = value - (count > 0);
                offset = index == 0 ? offsets[0] : index == 1 ? offsets[1] : index == 2 ? offsets[2]
                         : offsets[0] & SYMBOLIC ? offsets[0] + 1 : offsets[0] - 1;
                if (index > 1) offsets[2] = offsets[1];
                if (index > 0) offsets[1] = offsets[0];
            }
            offsets[0] = offset;
            literals += count;
            content += length;
            if (!offset || literals > literal_count || content > most) return false;
            *found++ = (u64)offset << OFFSET_AT | (u64)length << LENGTH_AT | count;
        }
        if (bits.left != 0) return false;
    }
    block.content = content;
    for (int i = 0; i < 3; ++i) block.offsets[i] = offsets[i];
    return true;
}

// Decode the literals of a block, by a warp. All threads return the same.
__device__ inline bool decode_literals(const batch_t& batch, const block_t& block, shared_t& shared, u32 lane) {
    const block_t& from = batch.blocks[block.huffman];
    auto& huffman = shared.huffman;
    u32 bytes = 0;
    int log = 0, symbols = 0;
    if (lane == 0) {
        bytes = read_weights(from.source + from.literal_head, from.literal_size, huffman.weights, symbols,
                             huffman.table, shared.room);
        log = bytes ? complete_weights(huffman.weights, symbols, huffman.ranks) : 0;
        if (log) {
            // Where the codes of each symbol begin in the table.
            for (int s = 0; s < symbols; ++s) {
                const u32 w = huffman.weights[s];
                shared.room.following[s] = w ? (u16)huffman.ranks[w] : 0;
                if (w) huffman.ranks[w] += 1u << (w - 1);
            }
        }
    }
    log = __shfl_sync(ALL, log, 0);
    symbols = __shfl_sync(ALL, symbols, 0);
    bytes = __shfl_sync(ALL, bytes, 0);
    if (!log) return false;
    for (int s = lane; s < symbols; s += 32) {
        const u32 w = huffman.weights[s], first = shared.room.following[s];
        const u16 code = (u16)(s | (log + 1 - w) << 8);
        if (w) for (u32 i = 0; i < 1u << (w - 1); ++i) huffman.codes[first + i] = code;
    }
    __syncwarp();
    const u32 head = block.literal_kind == COMPRESSED ? bytes : 0;
    const u8* p = block.source + block.literal_head + head;
    const u32 size = block.literal_size - head, each = (block.literal_count + 3) / 4;
    bool fine = head < block.literal_size && (block.parts == 1 || (size >= 10 && 3 * each <= block.literal_count));
    if (fine && lane < block.parts) {
        u32 begin = 0, end = size, first = 0, last = block.literal_count;
        if (block.parts == 4) {
            begin = 6;
            for (u32 i = 0; i < lane; ++i) begin += read(p + 2 * i, 2);
            end = lane < 3 ? begin + read(p + 2 * lane, 2) : size;
            first = lane * each;
            if (lane < 3) last = first + each;
        }
        backward_t bits;
        fine = begin < end && end <= size && bits.open(p + begin, end - begin);
        if (fine) {
            u8* out = (u8*)block.literals;
            u32 i = first;
            for (; i + 2 <= last; i += 2) {
                const u32 window = bits.window(), one = huffman.codes[window >> (32 - log)];
                const u32 two = huffman.codes[window << (one >> 8) >> (32 - log)];
                bits.skip((one >> 8) + (two >> 8));
                out[i] = (u8)one;
                out[i + 1] = (u8)two;
            }
            if (i < last) {
                const u32 code = huffman.codes[bits.window() >> (32 - log)];
                bits.skip(code >> 8);
                out[i] = (u8)code;
            }
            fine = bits.left == 0;
        }
    }
    return __all_sync(ALL, fine);
}

extern "C" __global__ void __launch_bounds__(32) zstd_entropy(const batch_t batch) {
    __shared__ shared_t shared;
    const u32 lane = threadIdx.x;
    const u32 blocks = min(batch.counters->blocks, batch.max_blocks);
    for (;;) {
        u32 item = lane == 0 ? atomicAdd(&batch.counters->decoded, 1) : 0;
        item = __shfl_sync(ALL, item, 0);
        if (item >= 2 * blocks) return;
        block_t& block = batch.blocks[item < blocks ? item : item - blocks];
        if (block.kind == COMPRESSED) {
            bool fine = true;
            if (item >= blocks) {
                if (block.literal_kind >= COMPRESSED) fine = decode_literals(batch, block, shared, lane);
            } else {
                fine = decode_sequences(batch, block, shared, lane);
            }
            if (!fine) batch.statuses[batch.streams[block.stream].chunk] = 3;
        }
        __syncwarp();
    }
}
