// Read the bits of a zstd stream, and build its FSE and Huffman tables (RFC 8878, section 4).
//
// Nothing is trusted: each function returns false, or sets a bad state, for data that no compressor writes. No
// function reads more than the aligned words that contain its data.

// Kinds of sequence codes: literal length, offset, match length.
constexpr int LL = 0, OF = 1, ML = 2;
// Maximum bits of a state, and of a Huffman code.
constexpr int FSE_LOG = 9, HUFFMAN_LOG = 11;

// What is stored for each kind of code: maximum symbol and maximum bits of a state, bits of the default table.
__device__ const int MAX_SYMBOL[3] = {35, 31, 52}, MAX_LOG[3] = {9, 8, 9}, DEFAULT_LOG[3] = {6, 5, 6};
__device__ const signed char DEFAULT_LL[36] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2,
                                               2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
__device__ const signed char DEFAULT_OF[29] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1,
                                               1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};
__device__ const signed char DEFAULT_ML[53] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                               1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                               1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};

// Of each code of a number of literals or of a length, the least number, and the extra bits that are added (24 on).
#define CODE(bits, least) ((u32)(bits) << 24 | (least))
__device__ const u32 LL_CODES[36] = {
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, CODE(1, 16), CODE(1, 18), CODE(1, 20), CODE(1, 22),
    CODE(2, 24), CODE(2, 28), CODE(3, 32), CODE(3, 40), CODE(4, 48), CODE(6, 64), CODE(7, 128), CODE(8, 256),
    CODE(9, 512), CODE(10, 1024), CODE(11, 2048), CODE(12, 4096), CODE(13, 8192), CODE(14, 16384), CODE(15, 32768),
    CODE(16, 65536)};
__device__ const u32 ML_CODES[53] = {
    3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33,
    34, CODE(1, 35), CODE(1, 37), CODE(1, 39), CODE(1, 41), CODE(2, 43), CODE(2, 47), CODE(3, 51), CODE(3, 59),
    CODE(4, 67), CODE(4, 83), CODE(5, 99), CODE(7, 131), CODE(8, 259), CODE(9, 515), CODE(10, 1027), CODE(11, 2051),
    CODE(12, 4099), CODE(13, 8195), CODE(14, 16387), CODE(15, 32771), CODE(16, 65539)};

__device__ inline u32 code_of(int kind, u32 symbol) {
    return kind == LL ? LL_CODES[symbol] : kind == ML ? ML_CODES[symbol] : 0;
}

__device__ inline int highest(u32 x) { return 31 - __clz(x); }

// Bits that are read from the end of a stream to its start.
struct backward_t {
    const u32* words;
    int next;   // the next word to read
    u32 ahead;  // the word before that, which is read early, because a thread waits long for memory
    int held;   // bits in `hold` that have not been read; they are its lowest ones
    int left;   // bits of the stream that have not been read; negative if too many have been read
    u64 hold;

    __device__ u32 word() {
        const u32 found = next >= 0 ? words[next] : 0;
        --next;
        return found;
    }
    __device__ bool open(const u8* begin, u32 size) {
        const u32 last = size ? begin[size - 1] : 0;
        if (!last) return false;
        left = 8 * (size - 1) + highest(last);  // the highest bit of the last byte marks the end
        const u32 before = (u64)begin & 3, end = 8 * before + left;
        words = (const u32*)(begin - before);
        held = end & 31 ? end & 31 : 32;
        next = ((int)end - held) / 32;
        hold = word();
        ahead = word();
        return true;
    }
    // Return the next 32 bits, the first one as the highest.
    __device__ u32 window() {
        if (held < 32) {
            hold = hold << 32 | ahead;
            held += 32;
            ahead = word();
        }
        return (u32)(hold >> (held - 32));
    }
    __device__ void skip(int count) {
        held -= count;
        left -= count;
    }
    __device__ u32 take(int count) {
        const u32 found = window() >> 1 >> (31 - count);
        skip(count);
        return found;
    }
};

// Take bits off a window.
__device__ inline u32 off(u32& window, int count) {
    const u32 found = window >> 1 >> (31 - count);
    window <<= count;
    return found;
}

// Bits that are read from the start of `size` bytes to the end, and zeros beyond.
struct forward_t {
    const u8* begin;
    u32 size, at;

    __device__ u32 peek(int count) const {
        u32 found = 0;
        for (u32 i = 0; i < 4; ++i) {
            const u32 byte = (at >> 3) + i;
            if (byte < size) found |= (u32)begin[byte] << (8 * i);
        }
        return found >> (at & 7) & ((1u << count) - 1);
    }
};

// Read the description of an FSE table. `counts` receives the number of states of each symbol, -1 for "less than
// one". Returns the bytes of the description; 0 if it is damaged.
__device__ inline u32 read_counts(const u8* begin, u32 size, int max_symbol, int max_log, short* counts, int& symbols,
                                  int& log) {
    forward_t bits = {begin, size, 4};
    if (!size) return 0;
    log = (begin[0] & 15) + 5;
    if (log > max_log) return 0;
    int remaining = (1 << log) + 1, symbol = 0;
    while (remaining > 1 && symbol <= max_symbol) {
        const int width = highest(remaining) + 1, half = (1 << (width - 1)) - 1;
        const int short_ones = 2 * half + 1 - remaining;  // values that take one bit less
        const int value = bits.peek(width);
        int count = value & half;
        if (count < short_ones) {
            bits.at += width - 1;
        } else {
            count = value > half ? value - short_ones : value;
            bits.at += width;
        }
        counts[symbol++] = (short)--count;
        remaining -= count < 0 ? -count : count;
        if (count == 0) {
            u32 more;
            do {
                more = bits.peek(2);
                bits.at += 2;
                for (u32 i = 0; i < more; ++i) {
                    if (symbol > max_symbol) return 0;
                    counts[symbol++] = 0;
                }
            } while (more == 3);
        }
    }
    symbols = symbol;
    const u32 bytes = (bits.at + 7) >> 3;
    return remaining == 1 && bytes <= size ? bytes : 0;
}

// Build an FSE table: of each state, the symbol, the bits to read (8 bits on), and what to add to them (16 on).
template <typename T>
__device__ inline bool build_table(const short* counts, int symbols, int log, T* table, u16* following) {
    const u32 size = 1u << log;
    u32 high = size, at = 0;
    for (int s = 0; s < symbols; ++s) {
        following[s] = counts[s] == -1 ? 1 : counts[s];
        if (counts[s] == -1) table[--high] = s;
    }
    for (int s = 0; s < symbols; ++s) {
        for (int i = 0; i < counts[s]; ++i) {
            table[at] = s;
            do at = (at + (size >> 1) + (size >> 3) + 3) & (size - 1);
            while (at >= high);
        }
    }
    if (at != 0) return false;
    for (u32 state = 0; state < size; ++state) {
        const u32 symbol = (u32)table[state], next = following[symbol]++;
        const u32 bits = log - highest(next);
        table[state] = symbol | bits << 8 | ((next << bits) - size) << 16;
    }
    return true;
}

// Room for building tables, in shared memory.
struct room_t {
    short counts[256];
    u16 following[256];
};

// Read the weights of a Huffman tree. Returns the bytes of the description; 0 if it is damaged.
__device__ inline u32 read_weights(const u8* begin, u32 size, u8* weights, int& symbols, u32* table, room_t& room) {
    const u32 head = size ? begin[0] : 0;
    if (head >= 128) {
        symbols = head - 127;
        const u32 bytes = (symbols + 1) / 2;
        if (1 + bytes > size) return 0;
        for (int i = 0; i < symbols; ++i) weights[i] = i & 1 ? begin[1 + i / 2] & 15 : begin[1 + i / 2] >> 4;
        return 1 + bytes;
    }
    int kinds, log;
    if (head < 2 || 1 + head > size) return 0;
    const u32 bytes = read_counts(begin + 1, head, 255, 6, room.counts, kinds, log);
    if (!bytes || !build_table(room.counts, kinds, log, table, room.following)) return 0;
    backward_t bits;
    if (!bits.open(begin + 1 + bytes, head - bytes)) return 0;
    u32 state[2];
    state[0] = bits.take(log);
    state[1] = bits.take(log);
    if (bits.left < 0) return 0;
    // Two states take turns. When the bits are used up, the other state has the last symbol.
    for (symbols = 0; symbols < 254;) {
        u32& current = state[symbols & 1];
        weights[symbols++] = (u8)table[current];
        current = (table[current] >> 16) + bits.take(table[current] >> 8 & 255);
        if (bits.left < 0) {
            weights[symbols] = (u8)table[state[symbols & 1]];
            ++symbols;
            return 1 + head;
        }
    }
    return 0;
}

// Complete the weights, and return the bits of the longest code; 0 if the weights are damaged. `ranks` receives the
// first entry of the table for the symbols of each weight.
__device__ inline int complete_weights(u8* weights, int& symbols, u32* ranks) {
    u32 total = 0;
    for (int w = 0; w <= HUFFMAN_LOG + 1; ++w) ranks[w] = 0;
    for (int i = 0; i < symbols; ++i) {
        if (weights[i] > HUFFMAN_LOG) return 0;
        total += 1u << weights[i] >> 1;
        ++ranks[weights[i]];
    }
    if (!total) return 0;
    const int log = highest(total) + 1;
    const u32 rest = (1u << log) - total;
    if (log > HUFFMAN_LOG || (rest & (rest - 1))) return 0;
    weights[symbols] = (u8)(highest(rest) + 1);
    ++ranks[weights[symbols++]];
    if (ranks[1] < 2 || (ranks[1] & 1)) return 0;
    u32 first = 0;
    for (int w = 1; w <= log; ++w) {
        const u32 count = ranks[w];
        ranks[w] = first;
        first += count << (w - 1);
    }
    return log;
}
