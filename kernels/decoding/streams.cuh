// What the kernels that decode a batch of chunks hand to each other.
//
// The host fills the table of the chunks. `crc32c` verifies their checksums. `frames` finds the compressed streams of each chunk, `zstd_walk` the blocks
// of each stream, and `zstd_entropy` decodes these. (`lz4_parse` does both for LZ4.) `execute` composes the content of
// the streams, and `place` the elements of the chunks.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

constexpr long long PLAIN = 0, BYTES = 1, BITS = 2;
// Kinds of blocks.
constexpr u32 RAW = 0, RLE = 1, COMPRESSED = 2;
// A sequence has the number of literals in its lowest bits, then the length of the match, and then its offset. An
// offset may depend on the last three offsets before the block: SYMBOLIC | index << 26 | what to subtract.
constexpr u32 LENGTH_AT = 17, OFFSET_AT = 35, MAX_LITERALS = (1 << 17) - 1, MAX_LENGTH = (1 << 18) - 1;
constexpr u32 SYMBOLIC = 1u << 28;
// All threads of a warp.
constexpr u32 ALL = 0xFFFFFFFF;

// A chunk: its first stream; how it is composed; the bytes of a block and of the chunk; the elements in a row of
// the chunk; the rectangle of elements that the panel has; the element of the panel where this begins; where its stored
// bytes are, and how many; and whether a checksum of four bytes follows them.
struct chunk_t {
    long long first, split, order, block, size, width, row, col, rows, cols, target;
    const u8* source;
    u64 stored, checksum;
};

// A stream of a chunk, and the place for its content of `length` bytes. It has nothing to decode if it is stored as it
// is (`raw`). `first` and `blocks` are the blocks of zstd that it consists of.
struct stream_t {
    const u8* source;
    u8* target;
    u32 size, length, chunk, raw, first, blocks;
};

// A block of zstd. `source` are its `size` stored bytes, `content` the bytes of its content, at most `most`. Its
// `literals` have `literal_step` = 0 if all are equal. Those of a sequence begin at `places`; without that, they follow
// each other.
struct block_t {
    const u8* source;
    const u8* literals;
    const u32* places;
    u64 first_sequence;
    u32 stream, kind, size, content, most;
    u32 literal_kind, literal_step, literal_head, literal_size, literal_count, parts;
    u32 sequences_at, sequences;
    u32 huffman, tables[3];  // the blocks that describe the Huffman code and the FSE tables
    u32 offsets[3];          // the last three offsets at the end of the block
};

// How much of the memory below is used, and how many pieces of work have been taken.
struct counters_t {
    u32 streams, blocks, decoded, executed;
    u64 sequences, literals;
};

// A batch of `count` chunks, and the memory for it. `statuses` has a number for each chunk, which is 0 if all went
// well. `pointers` has the content of each stream. `compressor` is its number in
// blosc frames, whose sizes must be `chunk`, and those of elements that are shuffled `itemsize`; 0 stands for zstd
// without such frames.
struct batch_t {
    chunk_t* chunks;
    u32* statuses;
    counters_t* counters;
    const u8** pointers;
    stream_t* streams;
    block_t* blocks;
    u64* sequences;
    u8* literals;
    u8* content;
    u64 max_sequences, max_literals;
    u32 count, max_streams, max_blocks, chunk, itemsize, compressor;
};
static_assert(sizeof(chunk_t) == 112 && sizeof(stream_t) == 40 && sizeof(block_t) == 112 && sizeof(counters_t) == 32,
              "oocgemm.backends.cuda.zstd allocates the memory");

__device__ inline u32 read(const u8* at, int bytes) {
    u32 found = 0;
    for (int i = 0; i < bytes; ++i) found |= (u32)at[i] << (8 * i);
    return found;
}
